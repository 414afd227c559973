//! How to call every op: for each row at least one list of operands and attributes that it takes and that can be run.
//!
//! Tests over the op table (text, bodies, gradients, random models) draw from here, so a row without a recipe is a
//! failing test, and a new op is tested by existing. Sizes are small and few, so that calls chain.

mod attention;
mod conv;
mod index;
mod loss;
mod optimizer;
mod pool;
mod random;
mod scatter;

use super::Random;
use crate::ir::op::{Domain, Grad, OpDef};
use crate::ir::{Attrs, DType, Tensor};
use crate::ops;

/// One operand of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum In {
    /// An optional operand that is not given.
    Not,
    /// Floating point of the shape, anything but 0 and no two alike: no kink and no tie is near.
    Real(&'static [i64]),
    /// The same, above 0.
    Positive(&'static [i64]),
    /// The same, above 1.
    Large(&'static [i64]),
    /// Like `Real`, but with an axis where every row sums to 1: the result of a softmax.
    Truth(&'static [i64]),
    /// Constant int64 contents of a vector or, with no dims, of a scalar.
    Ints(&'static [i64]),
    Int(i64),
    /// Constant int64 contents of any shape.
    Table(&'static [i64], &'static [i64]),
    /// Constant uint8 contents of any shape.
    Bytes(&'static [i64], &'static [i64]),
    /// Constant booleans.
    Bools(&'static [i64], &'static [i64]),
    /// A constant floating-point scalar.
    Scalar(f64),
}

/// An attribute of a call.
#[derive(Clone, Copy, Debug)]
pub enum Set {
    I(i64),
    F(f32),
    S(&'static str),
    L(&'static [i64]),
    D(DType),
    /// A float64-or-narrower scalar in a one-element tensor of the model's type.
    T(f64),
}

/// One call of an op.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    pub op: &'static str,
    /// Results asked for.
    pub outs: usize,
    pub ins: &'static [In],
    pub attrs: &'static [(&'static str, Set)],
}

impl Recipe {
    pub fn row(&self) -> Option<&'static OpDef> {
        ops::find(self.op)
    }

    /// Whether a training graph can be made of it whose sizes a plan can know. Gradients too: a model that takes them
    /// itself is trained as any other.
    pub fn is_trainable(&self) -> bool {
        let is_sized = !matches!(self.op, "Range" | "NonZero");
        is_sized
            && self.row().is_some_and(|op| match op.grad {
                Grad::Body => true,
                Grad::Missing(_) => false,
                _ => op.domain != Domain::Ckpt,
            })
    }

    /// The attributes, tensors of `dtype`.
    pub fn attrs(&self, dtype: DType) -> Attrs {
        self.attrs
            .iter()
            .fold(Attrs::new(), |a, (name, set)| match *set {
                Set::I(v) => a.with(name, v),
                Set::F(v) => a.with(name, v),
                Set::S(v) => a.with(name, v),
                Set::L(v) => a.with(name, v.to_vec()),
                Set::D(v) => a.with(name, v),
                Set::T(v) => {
                    let mut t = Tensor::scalar(dtype, v);
                    t.dims = vec![1];
                    let mut a = a;
                    a.set(name, crate::ir::Attr::Tensor(t));
                    a
                }
            })
    }
}

/// Contents for a floating-point operand, row-major; `None` for the others.
///
/// Magnitudes lie between 0.3 and 1.3 and no two are closer than 0.4/n; `shift` sets operands of one call apart.
pub fn contents(of: In, r: &mut Random, shift: usize) -> Option<Vec<f64>> {
    let (dims, signed) = match of {
        In::Real(dims) => (dims, true),
        In::Positive(dims) | In::Large(dims) | In::Truth(dims) => (dims, false),
        _ => return None,
    };
    let n = dims.iter().product::<i64>() as usize;
    let mut ranks: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        ranks.swap(i, r.below(i + 1));
    }
    let mut values: Vec<f64> = ranks
        .into_iter()
        .map(|k| {
            let v = 0.3 + (k as f64 + 0.1 + 0.13 * (shift % 6) as f64) / n.max(1) as f64;
            let v = if matches!(of, In::Large(_)) {
                v + 1.0
            } else {
                v
            };
            if signed && r.below(2) == 0 { -v } else { v }
        })
        .collect();
    if let In::Truth(dims) = of {
        let row = dims.last().map_or(1, |d| *d as usize).max(1);
        for chunk in values.chunks_mut(row) {
            let sum: f64 = chunk.iter().sum();
            chunk.iter_mut().for_each(|v| *v /= sum);
        }
    }
    Some(values)
}

const fn r(
    op: &'static str,
    outs: usize,
    ins: &'static [In],
    attrs: &'static [(&'static str, Set)],
) -> Recipe {
    Recipe {
        op,
        outs,
        ins,
        attrs,
    }
}

use In::*;
use Set::*;

/// Short names of the shapes below.
const S: &[i64] = &[];
const V3: &[i64] = &[3];
const V4: &[i64] = &[4];
const M23: &[i64] = &[2, 3];
/// Attributes of a product whose left operand is turned.
const TURNED: &[(&str, Set)] = &[("transA", I(1))];
const M34: &[i64] = &[3, 4];
const M24: &[i64] = &[2, 4];
const M13: &[i64] = &[1, 3];
const C234: &[i64] = &[2, 3, 4];

/// Every call.
pub const ALL: &[Recipe] = &joined::<{ total() }>();

const PARTS: &[&[Recipe]] = &[
    GENERAL,
    attention::CALLS,
    conv::CALLS,
    index::CALLS,
    loss::CALLS,
    optimizer::CALLS,
    pool::CALLS,
    random::CALLS,
    scatter::CALLS,
];

const fn total() -> usize {
    let (mut n, mut part) = (0, 0);
    while part < PARTS.len() {
        (n, part) = (n + PARTS[part].len(), part + 1);
    }
    n
}

const fn joined<const N: usize>() -> [Recipe; N] {
    let mut all = [GENERAL[0]; N];
    let (mut to, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut from = 0;
        while from < PARTS[part].len() {
            all[to] = PARTS[part][from];
            (from, to) = (from + 1, to + 1);
        }
        part += 1;
    }
    all
}

const GENERAL: &[Recipe] = &[
    r("Tanh", 1, &[Real(C234)], &[]),
    r("TanhGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Sigmoid", 1, &[Real(M23)], &[]),
    r("SigmoidGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Relu", 1, &[Real(C234)], &[]),
    r("ReluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Gelu", 1, &[Real(M23)], &[]),
    r("Gelu", 1, &[Real(C234)], &[("approximate", S_TANH)]),
    r("GeluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Silu", 1, &[Real(C234)], &[]),
    r("SiluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("SwiGlu", 1, &[Real(M23), Real(M23)], &[]),
    r("SwiGluGrad", 2, &[Real(M23), Real(M23), Real(M23)], &[]),
    r(
        "GeluGrad",
        1,
        &[Real(M23), Real(M23)],
        &[("approximate", S_TANH)],
    ),
    r("LeakyRelu", 1, &[Real(M23)], &[("alpha", F(0.1))]),
    r(
        "LeakyReluGrad",
        1,
        &[Real(M23), Real(M23)],
        &[("alpha", F(0.1))],
    ),
    r("PRelu", 1, &[Real(M23), Real(V3)], &[]),
    r("Elu", 1, &[Real(M23)], &[]),
    r("EluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("HardSigmoid", 1, &[Real(M23)], &[]),
    r("HardSwish", 1, &[Real(M23)], &[]),
    r("HardSwishGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Mish", 1, &[Real(M23)], &[]),
    r("MishGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("ArgMax", 1, &[Real(M23)], &[("axis", I(1))]),
    r(
        "ArgMin",
        1,
        &[Real(M23)],
        &[("axis", I(0)), ("keepdims", I(0))],
    ),
    r("TopK", 2, &[Real(M24), Ints(&[2])], &[]),
    r(
        "TopK",
        2,
        &[Real(M24), Ints(&[1])],
        &[("axis", I(0)), ("largest", I(0))],
    ),
    r("Softplus", 1, &[Real(M23)], &[]),
    r("ErfGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Accumulate", 1, &[Real(M23), Real(M23)], &[]),
    r("Accumulate", 1, &[Real(&[]), Real(&[])], &[]),
    r("AddProduct", 1, &[Real(M24), Real(M23), Real(M34)], &[]),
    r("AddProduct", 1, &[Real(M34), Real(M23), Real(M24)], TURNED),
    r("Offload", 1, &[Real(M23)], &[]),
    r("Release", 1, &[Real(M23), Real(M23)], &[]),
    r("Fetch", 1, &[Real(M23)], &[]),
    r("Add", 1, &[Real(M23), Real(V3)], &[]),
    r("Add", 1, &[Real(C234), Real(&[3, 1])], &[]),
    r("Sub", 1, &[Real(M13), Real(M23)], &[]),
    r("Mul", 1, &[Real(C234), Real(C234)], &[]),
    r("Mul", 1, &[Real(S), Real(M23)], &[]),
    r("Div", 1, &[Real(M23), Real(V3)], &[]),
    r("Neg", 1, &[Real(C234)], &[]),
    r("Sum", 1, &[Real(M23), Real(V3), Real(M13)], &[]),
    r("Sum", 1, &[Real(V3)], &[]),
    r("LeakyRelu", 1, &[Real(M23)], &[("alpha", F(0.3))]),
    r("LeakyReluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("PRelu", 1, &[Real(C234), Real(&[3, 1])], &[]),
    r("Elu", 1, &[Real(M23)], &[("alpha", F(0.5))]),
    r("EluGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("HardSigmoid", 1, &[Real(M23)], &[]),
    r("HardSwish", 1, &[Real(M23)], &[]),
    r("HardSwishGrad", 1, &[Real(M23), Real(M23)], &[]),
    r("Mish", 1, &[Real(M23)], &[]),
    r("MishGrad", 1, &[Real(M23), Real(M23)], &[]),
    r(
        "ArgMax",
        1,
        &[Real(C234)],
        &[("axis", I(1)), ("keepdims", I(0))],
    ),
    r("ArgMin", 1, &[Real(M23)], &[("select_last_index", I(1))]),
    r("TopK", 2, &[Real(C234), Ints(&[2])], &[("axis", I(1))]),
    r("TopK", 2, &[Real(M24), Ints(&[3])], &[("largest", I(0))]),
    r("Abs", 1, &[Real(M23)], &[]),
    r("Sign", 1, &[Real(M23)], &[]),
    r("Mod", 1, &[Real(M23), Positive(V3)], &[("fmod", I(1))]),
    r("Mod", 1, &[Table(&[3], &[5, 7, 9]), Ints(&[2])], &[]),
    r("Floor", 1, &[Real(M23)], &[]),
    r("Ceil", 1, &[Real(M23)], &[]),
    r("Round", 1, &[Real(M23)], &[]),
    r("RoundThrough", 1, &[Real(M23)], &[]),
    r("Cast", 1, &[Real(M23)], &[("to", D(DType::F32))]),
    r("Cast", 1, &[Real(M23)], &[("to", D(DType::Bool))]),
    r("Max", 1, &[Real(M23), Real(V3)], &[]),
    r("Max", 1, &[Real(M23)], &[]),
    r("Min", 1, &[Real(M13), Real(M23)], &[]),
    r("Clip", 1, &[Real(M23), Scalar(-0.55), Scalar(0.6)], &[]),
    r("Clip", 1, &[Real(M23), Not, Scalar(0.6)], &[]),
    r(
        "And",
        1,
        &[Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0])],
        &[],
    ),
    r(
        "Or",
        1,
        &[Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0])],
        &[],
    ),
    r(
        "Xor",
        1,
        &[Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0])],
        &[],
    ),
    r("Not", 1, &[Bools(&[2], &[1, 0])], &[]),
    r(
        "Where",
        1,
        &[Bools(&[2, 1], &[0, 1]), Real(M23), Real(V3)],
        &[],
    ),
    r("Where", 1, &[Bools(&[], &[1]), Real(M13), Real(M23)], &[]),
    r("Exp", 1, &[Real(C234)], &[]),
    r("Log", 1, &[Positive(M23)], &[]),
    r("Sqrt", 1, &[Positive(M23)], &[]),
    r("Reciprocal", 1, &[Real(M23)], &[]),
    r("Erf", 1, &[Real(M23)], &[]),
    r("Sin", 1, &[Real(M23)], &[]),
    r("Cos", 1, &[Real(M23)], &[]),
    r("Tan", 1, &[Real(M23)], &[]),
    r("Asin", 1, &[Truth(M23)], &[]),
    r("Acos", 1, &[Truth(M23)], &[]),
    r("Atan", 1, &[Real(M23)], &[]),
    r("Sinh", 1, &[Real(M23)], &[]),
    r("Cosh", 1, &[Real(M23)], &[]),
    r("Asinh", 1, &[Real(M23)], &[]),
    r("Acosh", 1, &[Large(M23)], &[]),
    r("Atanh", 1, &[Truth(M23)], &[]),
    r("Pow", 1, &[Positive(M23), Real(V3)], &[]),
    r("Pow", 1, &[Real(M23), Scalar(2.0)], &[]),
    r("Equal", 1, &[Real(M23), Real(V3)], &[]),
    r("Less", 1, &[Real(M23), Real(V3)], &[]),
    r("LessOrEqual", 1, &[Real(M23), Real(V3)], &[]),
    r("Greater", 1, &[Real(M23), Real(V3)], &[]),
    r("GreaterOrEqual", 1, &[Real(M23), Real(V3)], &[]),
    r("IsNaN", 1, &[Real(M23)], &[]),
    r("IsInf", 1, &[Real(M23)], &[("detect_negative", I(0))]),
    r("MatMul", 1, &[Real(M23), Real(M34)], &[]),
    r("MatMul", 1, &[Real(C234), Real(&[4, 3])], &[]),
    r("MatMul", 1, &[Real(C234), Real(&[2, 4, 3])], &[]),
    r("MatMul", 1, &[Real(V3), Real(M34)], &[]),
    r("MatMul", 1, &[Real(M23), Real(V3)], &[]),
    r("Gemm", 1, &[Real(M23), Real(M34), Real(V4)], &[]),
    r(
        "Gemm",
        1,
        &[Real(M23), Real(&[4, 3])],
        &[("transB", I(1)), ("alpha", F(0.5))],
    ),
    r(
        "Gemm",
        1,
        &[Real(&[3, 2]), Real(M34), Real(M24)],
        &[("transA", I(1)), ("beta", F(2.0))],
    ),
    r(
        "LayerNormalization",
        1,
        &[Real(C234), Real(V4), Real(V4)],
        &[],
    ),
    r(
        "LayerNormalization",
        1,
        &[Real(C234), Real(M34)],
        &[("axis", I(1))],
    ),
    r(
        "LayerNormalization",
        3,
        &[Real(M23), Real(V3), Real(V3)],
        &[("epsilon", F(1e-3))],
    ),
    r(
        "LayerNormGrad",
        3,
        &[Real(C234), Real(C234), Real(V4)],
        &[("wants", L(&[0, 1, 2]))],
    ),
    r(
        "LayerNormGrad",
        2,
        &[Real(C234), Real(C234), Real(M34)],
        &[("axis", I(1)), ("wants", L(&[0, 2]))],
    ),
    r("RMSNormalization", 1, &[Real(C234), Real(V4)], &[]),
    r(
        "RMSNormGrad",
        2,
        &[Real(C234), Real(C234), Real(V4)],
        &[("wants", L(&[0, 1]))],
    ),
    r(
        "RMSNormGrad",
        1,
        &[Real(C234), Real(C234), Real(V4)],
        &[("axis", I(1)), ("wants", L(&[0]))],
    ),
    r("Softmax", 1, &[Real(C234)], &[]),
    r("Softmax", 1, &[Real(C234)], &[("axis", I(1))]),
    r("SoftmaxGrad", 1, &[Truth(M23), Real(M23)], &[]),
    r(
        "SoftmaxGrad",
        1,
        &[Real(C234), Real(C234)],
        &[("axis", I(1))],
    ),
    r("LogSoftmax", 1, &[Real(M23)], &[]),
    r("LogSoftmaxGrad", 1, &[Real(M23), Real(M23)], &[]),
    r(
        "LogSoftmaxGrad",
        1,
        &[Real(M23), Real(M23)],
        &[("axis", I(0))],
    ),
    r("ReduceSum", 1, &[Real(C234), Ints(&[0, 2])], &[]),
    r("ReduceSum", 1, &[Real(C234)], &[("keepdims", I(0))]),
    r(
        "ReduceSum",
        1,
        &[Real(M23), Ints(&[])],
        &[("noop_with_empty_axes", I(1))],
    ),
    r("ReduceMean", 1, &[Real(C234), Ints(&[-1])], &[]),
    r(
        "ReduceMax",
        1,
        &[Real(C234), Ints(&[1])],
        &[("keepdims", I(0))],
    ),
    r("ReduceMin", 1, &[Real(M23), Ints(&[-1])], &[]),
    r("ReduceProd", 1, &[Real(M23), Ints(&[0])], &[]),
    r(
        "ReduceProd",
        1,
        &[Real(C234), Ints(&[0, -1])],
        &[("keepdims", I(0))],
    ),
    r("ReduceSumSquare", 1, &[Real(M23), Ints(&[0])], &[]),
    r("ReduceL1", 1, &[Real(M23), Ints(&[1])], &[]),
    r("ReduceL2", 1, &[Real(M23), Ints(&[1])], &[]),
    r("ReduceLogSumExp", 1, &[Real(M23), Ints(&[1])], &[]),
    r("SumToShape", 1, &[Real(C234), Ints(&[3, 1])], &[]),
    r("SumToShape", 1, &[Real(M23), Ints(&[])], &[]),
    r("CumSum", 1, &[Real(M23), Int(1)], &[]),
    r(
        "CumSum",
        1,
        &[Real(M23), Int(0)],
        &[("exclusive", I(1)), ("reverse", I(1))],
    ),
    r("Shape", 1, &[Real(C234)], &[("start", I(-2))]),
    r("Size", 1, &[Real(M23)], &[]),
    r("Expand", 1, &[Real(M13), Ints(&[2, 3])], &[]),
    r("Expand", 1, &[Real(V3), Ints(&[2, 1])], &[]),
    r("Reshape", 1, &[Real(C234), Ints(&[2, -1])], &[]),
    r("Reshape", 1, &[Real(C234), Ints(&[0, 4, 3])], &[]),
    r("Flatten", 1, &[Real(C234)], &[("axis", I(2))]),
    r("Transpose", 1, &[Real(C234)], &[("perm", L(&[2, 0, 1]))]),
    r("Transpose", 1, &[Real(M23)], &[]),
    r("Squeeze", 1, &[Real(M13), Ints(&[0])], &[]),
    r("Unsqueeze", 1, &[Real(M23), Ints(&[0, -1])], &[]),
    r("Identity", 1, &[Real(M23)], &[]),
    r("StopGradient", 1, &[Real(M23)], &[]),
    r("Concat", 1, &[Real(M23), Real(M24)], &[("axis", I(1))]),
    r(
        "Concat",
        1,
        &[Real(M23), Real(M23), Real(M13)],
        &[("axis", I(-2))],
    ),
    r(
        "Split",
        2,
        &[Real(C234)],
        &[("axis", I(2)), ("num_outputs", I(2))],
    ),
    r("Split", 2, &[Real(M24), Ints(&[1, 3])], &[("axis", I(-1))]),
    r("Tile", 1, &[Real(M23), Ints(&[2, 1])], &[]),
    r("Pad", 1, &[Real(M23), Ints(&[0, 1, 1, 0])], &[]),
    r(
        "Pad",
        1,
        &[Real(M23), Ints(&[-1, 0]), Scalar(0.5), Ints(&[1])],
        &[],
    ),
    r(
        "Slice",
        1,
        &[Real(C234), Ints(&[1]), Ints(&[3]), Ints(&[1])],
        &[],
    ),
    r(
        "Slice",
        1,
        &[
            Real(C234),
            Ints(&[-1, 0]),
            Ints(&[-9, 4]),
            Ints(&[1, 2]),
            Ints(&[-1, 2]),
        ],
        &[],
    ),
    r(
        "SliceGrad",
        1,
        &[Real(&[2, 2]), Ints(&[2, 4]), Ints(&[0]), Ints(&[4])],
        &[("axes", L(&[1])), ("steps", L(&[2]))],
    ),
    r("Trilu", 1, &[Real(&[3, 3])], &[]),
    r("Trilu", 1, &[Real(C234), Int(-1)], &[("upper", I(0))]),
    r(
        "ConstantOfShape",
        1,
        &[Ints(&[2, 3])],
        &[("value", T(0.25))],
    ),
    r("Range", 1, &[Scalar(0.5), Scalar(3.0), Scalar(1.0)], &[]),
    r("Range", 1, &[Int(1), Int(6), Int(2)], &[]),
];

const S_TANH: Set = Set::S("tanh");
