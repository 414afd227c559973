//! Names of rows that rules of other families emit.
//!
//! Rules refer to each other in circles: the gradient of `Expand` sums, that of a sum expands. A rule therefore emits a
//! row of another family by its name, and the builder finds the row in the table. So families depend on names alone.

use ckpt_ir::OpRef;

macro_rules! names {
    ($($row:ident = $name:literal;)+) => {
        $(
            #[doc = concat!("`", $name, "`.")]
            pub const $row: OpRef = OpRef::Name($name);
        )+

        /// Every name of this file.
        #[cfg(test)]
        pub const ALL: &[&str] = &[$($name),+];
    };
}
names! {
    ABS = "Abs";
    ADD = "Add";
    AND = "And";
    BITWISE_AND = "BitwiseAnd";
    BITWISE_XOR = "BitwiseXor";
    BIT_SHIFT = "BitShift";
    CAST = "Cast";
    CONCAT = "Concat";
    CONV = "Conv";
    CONV_TRANSPOSE = "ConvTranspose";
    CUM_SUM = "CumSum";
    DIV = "Div";
    EQUAL = "Equal";
    ERF = "Erf";
    ERF_GRAD = "ErfGrad";
    EXP = "Exp";
    EXPAND = "Expand";
    FLATTEN = "Flatten";
    GATHER = "Gather";
    GATHER_ELEMENTS = "GatherElements";
    GATHER_ND = "GatherND";
    GATHER_GRAD = "GatherGrad";
    GEMM = "Gemm";
    GREATER = "Greater";
    GREATER_OR_EQUAL = "GreaterOrEqual";
    IDENTITY = "Identity";
    LESS = "Less";
    LESS_OR_EQUAL = "LessOrEqual";
    LOG = "Log";
    LOG_SOFTMAX = "LogSoftmax";
    LOG_SOFTMAX_GRAD = "LogSoftmaxGrad";
    MATMUL = "MatMul";
    MAX = "Max";
    MOD = "Mod";
    MUL = "Mul";
    NEG = "Neg";
    NOT = "Not";
    OR = "Or";
    PAD = "Pad";
    POW = "Pow";
    RANGE = "Range";
    RECIPROCAL = "Reciprocal";
    REDUCE_L2 = "ReduceL2";
    REDUCE_LOG_SUM_EXP = "ReduceLogSumExp";
    REDUCE_MAX = "ReduceMax";
    REDUCE_MEAN = "ReduceMean";
    REDUCE_PROD = "ReduceProd";
    REDUCE_SUM = "ReduceSum";
    RESHAPE = "Reshape";
    SCATTER_ELEMENTS = "ScatterElements";
    SHAPE = "Shape";
    SIGMOID = "Sigmoid";
    SIGN = "Sign";
    SIZE = "Size";
    SLICE = "Slice";
    SOFTMAX = "Softmax";
    SOFTPLUS = "Softplus";
    SPLIT = "Split";
    SQRT = "Sqrt";
    SQUEEZE = "Squeeze";
    SUB = "Sub";
    SUM_TO_SHAPE = "SumToShape";
    TANH = "Tanh";
    TRANSPOSE = "Transpose";
    TRILU = "Trilu";
    UNSQUEEZE = "Unsqueeze";
    WHERE = "Where";
}
