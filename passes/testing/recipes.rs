//! How to call every op: for each row at least one list of operands and attributes that it takes and that can be run.
//!
//! Tests over the op table (text, bodies, gradients, random models) draw from here, so a row without a recipe is a
//! failing test, and a new op is tested by existing. Sizes are small and few, so that calls chain.

mod attention;
mod blockwise;
mod call;
mod conv;
mod float8;
mod index;
mod loss;
mod optimizer;
mod pool;
mod quantised;
mod random;
mod scatter;

pub use call::{In, Recipe, Set, contents};

use crate::ir::DType;
use In::*;
use Set::*;
use call::{C234, M13, M23, M24, M34, S, V3, V4, r, recipes};

/// Attributes of a product whose left operand is transposed.
const TURNED: [(&str, Set); 1] = [("transA", I(1))];

/// Every call.
pub const ALL: &[Recipe] = &joined::<{ total() }>();

const PARTS: &[&[Recipe]] = &[
    GENERAL,
    attention::CALLS,
    blockwise::CALLS,
    conv::CALLS,
    float8::CALLS,
    index::CALLS,
    loss::CALLS,
    optimizer::CALLS,
    pool::CALLS,
    quantised::CALLS,
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
    GroupedMatMul 1 (Real(M23), Real(&[3, 3, 4]), Ints(&[0, 2]));
    GroupedMatMul 1 (Real(&[5, 3]), Real(&[3, 4, 3]), Ints(&[2, 0, 4, 2, 0])) with [("transB", I(1))];
    GroupedWeightGrad 1 (Real(M23), Real(M24), Ints(&[0, 2])) with [("groups", I(3))];
    GroupedWeightGrad 1 (Real(&[5, 3]), Real(&[5, 4]), Ints(&[1, 0, 1, -1, 2])) with [("groups", I(2))];
    Accumulate 1 (Real(M23), Real(M23));
    Accumulate 1 (Real(&[]), Real(&[]));
    AddProduct 1 (Real(M24), Real(M23), Real(M34));
    AddProduct 1 (Real(M34), Real(M23), Real(M24)) with TURNED;
    Offload 1 (Real(M23));
    Release 1 (Real(M23), Real(M23));
    Fetch 1 (Real(M23));
    AllReduce 1 (Real(M23));
    ReduceScatter 1 (Real(M23));
    StartAllReduce 1 (Real(M23));
    StartReduceScatter 2 (Real(M23));
    Wait 1 (Real(M23));
    Wait 1 (Real(S), Real(M23));
    AllGather 1 (Real(M23), Real(&[6]));
    OwnSlice 1 (Real(M23));
    OwnSlice 1 (Real(C234)) with [("row_axes", I(2))];
    GatherRows 1 (Real(M23), Ints(&[2]));
    GatherRows 1 (Real(M23), Ints(&[2, 1]));
    ConcatRanks 1 (Real(M23));
    OwnIndices 2 (Ints(&[1, 0, 3])) with [("size", I(4))];
    OwnPart 1 (Real(M23), Real(M23)) with [("axis", I(1)), ("pieces", L(&[1, 2]))];
    Shared 1 (Real(M23));
    KeepSlice 2 (Real(M23));
    GatherKept 1 (Real(&[6]), Real(&[0, 2, 3]));
    GatherSlices 1 (Real(M23), Real(&[6]));
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
    SolveTriangular 1 (Real(&[3, 3]), Real(M34));
    SolveTriangular 1 (Real(&[2, 3, 3]), Real(M34)) with [("upper", I(0)), ("unitriangular", I(1))];
    SolveTriangular 1 (Real(&[3, 3]), Real(&[2, 4, 3])) with [("upper", I(0)), ("left", I(0))];
    SolveTriangular 1 (Real(&[2, 5, 5]), Real(&[2, 4, 5])) with [("left", I(0)), ("unitriangular", I(1))];
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
