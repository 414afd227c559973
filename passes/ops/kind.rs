//! What analyses and policies ask about an op besides its row: is it a product, a softmax, a convolution?
//!
//! One answer an op, in one place, so that no pass compares names. Most ops are [`Kind::Other`].

use crate::ir::OpDef;

/// What an op is to the search for layers and to per-op policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A matrix product of its first two operands and nothing else.
    Product,
    /// A matrix product that adds its third operand, if given.
    BiasedProduct,
    /// A product of quantised operands.
    QuantisedProduct,
    Softmax,
    /// Scores, softmax and the product with the values in one op.
    Attention,
    Convolution,
    /// Picks elements by size: a copy must pick the same ones.
    Choice,
    MaxReduction,
    /// Sums or averages over axes.
    SumReduction,
    /// Divides by the spread over some axes.
    Norm,
    /// A power or root of each element.
    Power,
    /// Each result element depends on the operand elements at its place (or on a mask, scale or bound there).
    Elementwise,
    Cast,
    Other,
}

/// The kind of an op.
pub fn kind(op: &OpDef) -> Kind {
    match op.name {
        "MatMul" | "Einsum" => Kind::Product,
        "Gemm" => Kind::BiasedProduct,
        "MatMulInteger" | "QLinearMatMul" => Kind::QuantisedProduct,
        "Softmax" => Kind::Softmax,
        "Attention" => Kind::Attention,
        "Conv" | "ConvTranspose" | "ConvInteger" | "QLinearConv" | "DeformConv" => {
            Kind::Convolution
        }
        "TopK" => Kind::Choice,
        "ReduceMax" => Kind::MaxReduction,
        "ReduceMean" | "ReduceSum" | "ReduceSumSquare" | "ReduceL2" => Kind::SumReduction,
        "Pow" | "Sqrt" => Kind::Power,
        "LayerNormalization"
        | "RMSNormalization"
        | "GroupNormalization"
        | "InstanceNormalization"
        | "BatchNormalization" => Kind::Norm,
        "Cast" => Kind::Cast,
        "Add" | "Sub" | "Mul" | "Div" | "Where" | "Tanh" | "Clip" | "Max" | "Min" | "Dropout" => {
            Kind::Elementwise
        }
        _ => Kind::Other,
    }
}
