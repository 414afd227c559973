//! The table of operations: one file per family, one row per op, all rows in [`all`].
//!
//! To add an op: write its row in the family's file, list it in that file's `ROWS`, and write its kernel in the file of
//! the same name under `src/runtime/kernels`. Tests iterate the table, so a new op is tested by existing.

pub mod accumulate;
pub mod activation;
pub mod arith;
pub mod aten;
pub mod attention;
pub mod axes;
pub mod batch_axes;
pub mod bits;
pub mod cast;
pub mod concat;
pub mod conv;
pub mod extreme;
pub mod fill;
pub mod gated;
pub mod index;
pub mod kind;
pub mod logic;
pub mod loss;
pub mod math;
pub mod matmul;
pub mod norm;
pub mod opaque;
pub mod optimizer;
pub mod piecewise;
pub mod pool;
pub mod power;
pub mod random;
pub mod reduce;
pub mod rotary;
pub mod rules;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod slice;
pub mod softmax;
pub mod steps;
pub mod sum_to;
pub mod transfer;
pub mod trig;

use crate::ir::op::{Domain, Import, OpDef};
use crate::ir::{DType, Graph, NodeId};

/// Every family's rows.
const FAMILIES: &[&[&OpDef]] = &[
    accumulate::ROWS,
    activation::ROWS,
    arith::ROWS,
    attention::ROWS,
    bits::ROWS,
    cast::ROWS,
    concat::ROWS,
    conv::ROWS,
    extreme::ROWS,
    fill::ROWS,
    gated::ROWS,
    index::ROWS,
    logic::ROWS,
    loss::ROWS,
    math::ROWS,
    matmul::ROWS,
    norm::ROWS,
    opaque::ROWS,
    optimizer::ROWS,
    piecewise::ROWS,
    pool::ROWS,
    power::ROWS,
    random::ROWS,
    reduce::ROWS,
    rotary::ROWS,
    scan::ROWS,
    scatter::ROWS,
    select::ROWS,
    shape::ROWS,
    slice::ROWS,
    softmax::ROWS,
    sum_to::ROWS,
    transfer::ROWS,
    trig::ROWS,
];

/// Every row.
pub fn all() -> impl Iterator<Item = &'static OpDef> {
    FAMILIES.iter().flat_map(|rows| rows.iter().copied())
}

/// The row of that name in the text form.
pub fn find(name: &str) -> Option<&'static OpDef> {
    all().find(|op| op.name == name)
}

/// The row that an ONNX op of that name, at the internal opset, is.
pub fn find_onnx(name: &str) -> Option<&'static OpDef> {
    all().find(|op| {
        op.imports
            .iter()
            .any(|i| matches!(i, Import::Onnx(n, _) if *n == name))
            && op.domain != Domain::Ckpt
    })
}

/// Ops that only change how the elements of their first operand are laid out, or which of them are seen.
const LAYOUT: &[&OpDef] = &[
    &concat::SPLIT,
    &slice::SLICE,
    &shape::EXPAND,
    &shape::FLATTEN,
    &shape::IDENTITY,
    &shape::RESHAPE,
    &shape::SQUEEZE,
    &shape::TRANSPOSE,
    &shape::UNSQUEEZE,
];

/// See [`OpDef::is_layout`].
pub fn is_layout(op: &OpDef) -> bool {
    LAYOUT.contains(&op)
}

/// See [`OpDef::is_transfer`].
pub fn is_transfer(op: &OpDef) -> bool {
    transfer::ROWS.contains(&op)
}

/// See [`OpDef::is_update`].
pub fn is_update(op: &OpDef) -> bool {
    optimizer::ROWS.contains(&op)
}

/// Ops that take some element types only since a later opset than their form; the lists come from the ONNX schemas.
const LATER_TYPES: &[(DType, i64, &[&str])] = &[
    (DType::F16, 20, &["IsInf"]),
    (DType::BF16, 20, &["ConstantOfShape", "IsInf"]),
    (DType::Bool, 20, &["ReduceMax", "ReduceMin"]),
    (
        DType::BF16,
        22,
        &[
            "Acos",
            "Acosh",
            "Asin",
            "Asinh",
            "Atan",
            "Atanh",
            "AveragePool",
            "Conv",
            "ConvTranspose",
            "Cos",
            "Cosh",
            "Elu",
            "EyeLike",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "GridSample",
            "HardSigmoid",
            "HardSwish",
            "InstanceNormalization",
            "LpNormalization",
            "LpPool",
            "MaxPool",
            "Mish",
            "NegativeLogLikelihoodLoss",
            "Round",
            "Selu",
            "Sin",
            "Sinh",
            "Softplus",
            "Softsign",
            "Tan",
        ],
    ),
];

/// The first opset of the standard domain in which this node is valid: its row's, or later for its element types.
/// 0 for an op that is not standard.
pub fn first_opset(graph: &Graph, node: NodeId) -> i64 {
    let n = graph.node(node);
    let Domain::Onnx { since } = n.op.domain else {
        return 0;
    };
    let values = n.ins.iter().flatten().chain(&n.outs);
    let types: Vec<DType> = values
        .filter_map(|v| graph.value(*v).ty.as_ref())
        .map(|ty| ty.dtype)
        .collect();
    let later = LATER_TYPES
        .iter()
        .filter(|(dtype, _, ops)| types.contains(dtype) && ops.contains(&n.op.name));
    later.map(|(_, opset, _)| *opset).fold(since, i64::max)
}
