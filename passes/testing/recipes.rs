//! How to call every op: for each row at least one list of operands and attributes that it takes and that can be run.
//!
//! Tests over the op table (text, bodies, gradients, random models) draw from here, so a row without a recipe is a
//! failing test, and a new op is tested by existing. Sizes are small and few, so that calls chain.

/// Recipes, one a line: `Op results (operands) with [attributes];`.
macro_rules! recipes {
    (@attrs) => { &[] };
    (@attrs [$($attr:expr),*]) => { &[$($attr),*] };
    (@attrs $name:ident) => { &$name };
    ($($op:ident $outs:literal ($($in:expr),*) $(with $attrs:tt)?;)*) => {
        &[$(r(stringify!($op), $outs, &[$($in),*], recipes!(@attrs $($attrs)?))),*]
    };
}

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
const TURNED: [(&str, Set); 1] = [("transA", I(1))];
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

const GENERAL: &[Recipe] = recipes! {
    Tanh 1 (Real(C234));
    TanhGrad 1 (Real(M23), Real(M23));
    Sigmoid 1 (Real(M23));
    SigmoidGrad 1 (Real(M23), Real(M23));
    Relu 1 (Real(C234));
    ReluGrad 1 (Real(M23), Real(M23));
    Gelu 1 (Real(M23));
    Gelu 1 (Real(C234)) with [("approximate", S_TANH)];
    GeluGrad 1 (Real(M23), Real(M23));
    Silu 1 (Real(C234));
    SiluGrad 1 (Real(M23), Real(M23));
    SwiGlu 1 (Real(M23), Real(M23));
    SwiGluGrad 2 (Real(M23), Real(M23), Real(M23));
    GeluGrad 1 (Real(M23), Real(M23)) with [("approximate", S_TANH)];
    LeakyRelu 1 (Real(M23)) with [("alpha", F(0.1))];
    LeakyReluGrad 1 (Real(M23), Real(M23)) with [("alpha", F(0.1))];
    PRelu 1 (Real(M23), Real(V3));
    Elu 1 (Real(M23));
    EluGrad 1 (Real(M23), Real(M23));
    HardSigmoid 1 (Real(M23));
    HardSwish 1 (Real(M23));
    HardSwishGrad 1 (Real(M23), Real(M23));
    Mish 1 (Real(M23));
    MishGrad 1 (Real(M23), Real(M23));
    ArgMax 1 (Real(M23)) with [("axis", I(1))];
    ArgMin 1 (Real(M23)) with [("axis", I(0)), ("keepdims", I(0))];
    TopK 2 (Real(M24), Ints(&[2]));
    TopK 2 (Real(M24), Ints(&[1])) with [("axis", I(0)), ("largest", I(0))];
    Softplus 1 (Real(M23));
    ErfGrad 1 (Real(M23), Real(M23));
    Accumulate 1 (Real(M23), Real(M23));
    Accumulate 1 (Real(&[]), Real(&[]));
    AddProduct 1 (Real(M24), Real(M23), Real(M34));
    AddProduct 1 (Real(M34), Real(M23), Real(M24)) with TURNED;
    Offload 1 (Real(M23));
    Release 1 (Real(M23), Real(M23));
    Fetch 1 (Real(M23));
    Add 1 (Real(M23), Real(V3));
    Add 1 (Real(C234), Real(&[3, 1]));
    Sub 1 (Real(M13), Real(M23));
    Mul 1 (Real(C234), Real(C234));
    Mul 1 (Real(S), Real(M23));
    Div 1 (Real(M23), Real(V3));
    Neg 1 (Real(C234));
    Sum 1 (Real(M23), Real(V3), Real(M13));
    Sum 1 (Real(V3));
    LeakyRelu 1 (Real(M23)) with [("alpha", F(0.3))];
    LeakyReluGrad 1 (Real(M23), Real(M23));
    PRelu 1 (Real(C234), Real(&[3, 1]));
    Elu 1 (Real(M23)) with [("alpha", F(0.5))];
    EluGrad 1 (Real(M23), Real(M23));
    HardSigmoid 1 (Real(M23));
    HardSwish 1 (Real(M23));
    HardSwishGrad 1 (Real(M23), Real(M23));
    Mish 1 (Real(M23));
    MishGrad 1 (Real(M23), Real(M23));
    ArgMax 1 (Real(C234)) with [("axis", I(1)), ("keepdims", I(0))];
    ArgMin 1 (Real(M23)) with [("select_last_index", I(1))];
    TopK 2 (Real(C234), Ints(&[2])) with [("axis", I(1))];
    TopK 2 (Real(M24), Ints(&[3])) with [("largest", I(0))];
    Abs 1 (Real(M23));
    Sign 1 (Real(M23));
    Mod 1 (Real(M23), Positive(V3)) with [("fmod", I(1))];
    Mod 1 (Table(&[3], &[5, 7, 9]), Ints(&[2]));
    Floor 1 (Real(M23));
    Ceil 1 (Real(M23));
    Round 1 (Real(M23));
    RoundThrough 1 (Real(M23));
    Cast 1 (Real(M23)) with [("to", D(DType::F32))];
    Cast 1 (Real(M23)) with [("to", D(DType::Bool))];
    Max 1 (Real(M23), Real(V3));
    Max 1 (Real(M23));
    Min 1 (Real(M13), Real(M23));
    Clip 1 (Real(M23), Scalar(-0.55), Scalar(0.6));
    Clip 1 (Real(M23), Not, Scalar(0.6));
    And 1 (Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0]));
    Or 1 (Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0]));
    Xor 1 (Bools(&[2, 1], &[0, 1]), Bools(&[2], &[1, 0]));
    Not 1 (Bools(&[2], &[1, 0]));
    Where 1 (Bools(&[2, 1], &[0, 1]), Real(M23), Real(V3));
    Where 1 (Bools(&[], &[1]), Real(M13), Real(M23));
    Exp 1 (Real(C234));
    Log 1 (Positive(M23));
    Sqrt 1 (Positive(M23));
    Reciprocal 1 (Real(M23));
    Erf 1 (Real(M23));
    Sin 1 (Real(M23));
    Cos 1 (Real(M23));
    Tan 1 (Real(M23));
    Asin 1 (Truth(M23));
    Acos 1 (Truth(M23));
    Atan 1 (Real(M23));
    Sinh 1 (Real(M23));
    Cosh 1 (Real(M23));
    Asinh 1 (Real(M23));
    Acosh 1 (Large(M23));
    Atanh 1 (Truth(M23));
    Pow 1 (Positive(M23), Real(V3));
    Pow 1 (Real(M23), Scalar(2.0));
    Equal 1 (Real(M23), Real(V3));
    Less 1 (Real(M23), Real(V3));
    LessOrEqual 1 (Real(M23), Real(V3));
    Greater 1 (Real(M23), Real(V3));
    GreaterOrEqual 1 (Real(M23), Real(V3));
    IsNaN 1 (Real(M23));
    IsInf 1 (Real(M23)) with [("detect_negative", I(0))];
    MatMul 1 (Real(M23), Real(M34));
    MatMul 1 (Real(C234), Real(&[4, 3]));
    MatMul 1 (Real(C234), Real(&[2, 4, 3]));
    MatMul 1 (Real(V3), Real(M34));
    MatMul 1 (Real(M23), Real(V3));
    Gemm 1 (Real(M23), Real(M34), Real(V4));
    Gemm 1 (Real(M23), Real(&[4, 3])) with [("transB", I(1)), ("alpha", F(0.5))];
    Gemm 1 (Real(&[3, 2]), Real(M34), Real(M24)) with [("transA", I(1)), ("beta", F(2.0))];
    LayerNormalization 1 (Real(C234), Real(V4), Real(V4));
    LayerNormalization 1 (Real(C234), Real(M34)) with [("axis", I(1))];
    LayerNormalization 3 (Real(M23), Real(V3), Real(V3)) with [("epsilon", F(1e-3))];
    LayerNormGrad 3 (Real(C234), Real(C234), Real(V4)) with [("wants", L(&[0, 1, 2]))];
    LayerNormGrad 2 (Real(C234), Real(C234), Real(M34)) with [("axis", I(1)), ("wants", L(&[0, 2]))];
    RMSNormalization 1 (Real(C234), Real(V4));
    RMSNormGrad 2 (Real(C234), Real(C234), Real(V4)) with [("wants", L(&[0, 1]))];
    RMSNormGrad 1 (Real(C234), Real(C234), Real(V4)) with [("axis", I(1)), ("wants", L(&[0]))];
    Softmax 1 (Real(C234));
    Softmax 1 (Real(C234)) with [("axis", I(1))];
    SoftmaxGrad 1 (Truth(M23), Real(M23));
    SoftmaxGrad 1 (Real(C234), Real(C234)) with [("axis", I(1))];
    LogSoftmax 1 (Real(M23));
    LogSoftmaxGrad 1 (Real(M23), Real(M23));
    LogSoftmaxGrad 1 (Real(M23), Real(M23)) with [("axis", I(0))];
    ReduceSum 1 (Real(C234), Ints(&[0, 2]));
    ReduceSum 1 (Real(C234)) with [("keepdims", I(0))];
    ReduceSum 1 (Real(M23), Ints(&[])) with [("noop_with_empty_axes", I(1))];
    ReduceMean 1 (Real(C234), Ints(&[-1]));
    ReduceMax 1 (Real(C234), Ints(&[1])) with [("keepdims", I(0))];
    ReduceMin 1 (Real(M23), Ints(&[-1]));
    ReduceProd 1 (Real(M23), Ints(&[0]));
    ReduceProd 1 (Real(C234), Ints(&[0, -1])) with [("keepdims", I(0))];
    ReduceSumSquare 1 (Real(M23), Ints(&[0]));
    ReduceL1 1 (Real(M23), Ints(&[1]));
    ReduceL2 1 (Real(M23), Ints(&[1]));
    ReduceLogSumExp 1 (Real(M23), Ints(&[1]));
    SumToShape 1 (Real(C234), Ints(&[3, 1]));
    SumToShape 1 (Real(M23), Ints(&[]));
    CumSum 1 (Real(M23), Int(1));
    CumSum 1 (Real(M23), Int(0)) with [("exclusive", I(1)), ("reverse", I(1))];
    Shape 1 (Real(C234)) with [("start", I(-2))];
    Size 1 (Real(M23));
    Expand 1 (Real(M13), Ints(&[2, 3]));
    Expand 1 (Real(V3), Ints(&[2, 1]));
    Reshape 1 (Real(C234), Ints(&[2, -1]));
    Reshape 1 (Real(C234), Ints(&[0, 4, 3]));
    Flatten 1 (Real(C234)) with [("axis", I(2))];
    Transpose 1 (Real(C234)) with [("perm", L(&[2, 0, 1]))];
    Transpose 1 (Real(M23));
    Squeeze 1 (Real(M13), Ints(&[0]));
    Unsqueeze 1 (Real(M23), Ints(&[0, -1]));
    Identity 1 (Real(M23));
    StopGradient 1 (Real(M23));
    Concat 1 (Real(M23), Real(M24)) with [("axis", I(1))];
    Concat 1 (Real(M23), Real(M23), Real(M13)) with [("axis", I(-2))];
    Split 2 (Real(C234)) with [("axis", I(2)), ("num_outputs", I(2))];
    Split 2 (Real(M24), Ints(&[1, 3])) with [("axis", I(-1))];
    Tile 1 (Real(M23), Ints(&[2, 1]));
    Pad 1 (Real(M23), Ints(&[0, 1, 1, 0]));
    Pad 1 (Real(M23), Ints(&[-1, 0]), Scalar(0.5), Ints(&[1]));
    Slice 1 (Real(C234), Ints(&[1]), Ints(&[3]), Ints(&[1]));
    Slice 1 (Real(C234), Ints(&[-1, 0]), Ints(&[-9, 4]), Ints(&[1, 2]), Ints(&[-1, 2]));
    SliceGrad 1 (Real(&[2, 2]), Ints(&[2, 4]), Ints(&[0]), Ints(&[4]))
        with [("axes", L(&[1])), ("steps", L(&[2]))];
    Trilu 1 (Real(&[3, 3]));
    Trilu 1 (Real(C234), Int(-1)) with [("upper", I(0))];
    ConstantOfShape 1 (Ints(&[2, 3])) with [("value", T(0.25))];
    Range 1 (Scalar(0.5), Scalar(3.0), Scalar(1.0));
    Range 1 (Int(1), Int(6), Int(2));
};

const S_TANH: Set = Set::S("tanh");
