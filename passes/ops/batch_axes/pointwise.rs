//! Ops that work on each index alone.

use crate::ir::OpDef;
use crate::ops::activation::*;
use crate::ops::arith::*;
use crate::ops::bits::*;
use crate::ops::cast::CAST;
use crate::ops::extreme::{CLIP, MAX, MIN};
use crate::ops::gated::*;
use crate::ops::logic::*;
use crate::ops::math::*;
use crate::ops::piecewise::*;
use crate::ops::power::POW;
use crate::ops::shape::IDENTITY;
use crate::ops::trig::*;

/// Ops whose result at an index depends on their operands, broadcast, at that index.
pub const POINTWISE: &[&OpDef] = &[
    &ABS,
    &ACOS,
    &ACOSH,
    &ADD,
    &AND,
    &ASIN,
    &ASINH,
    &ATAN,
    &ATANH,
    &BITWISE_AND,
    &BITWISE_NOT,
    &BITWISE_OR,
    &BITWISE_XOR,
    &BIT_SHIFT,
    &CAST,
    &CEIL,
    &CLIP,
    &COS,
    &COSH,
    &DIV,
    &ELU,
    &ELU_GRAD,
    &EQUAL,
    &ERF,
    &ERF_GRAD,
    &EXP,
    &FLOOR,
    &GELU,
    &GELU_GRAD,
    &GREATER,
    &GREATER_OR_EQUAL,
    &HARD_SIGMOID,
    &HARD_SWISH,
    &HARD_SWISH_GRAD,
    &IDENTITY,
    &IS_INF,
    &IS_NAN,
    &LEAKY_RELU,
    &LEAKY_RELU_GRAD,
    &LESS,
    &LESS_OR_EQUAL,
    &LOG,
    &MAX,
    &MIN,
    &MISH,
    &MISH_GRAD,
    &MOD,
    &MUL,
    &NEG,
    &NOT,
    &OR,
    &POW,
    &RECIPROCAL,
    &RELU,
    &RELU_GRAD,
    &ROUND,
    &SIGMOID,
    &SIGMOID_GRAD,
    &SIGN,
    &SILU,
    &SILU_GRAD,
    &SIN,
    &SINH,
    &SOFTPLUS,
    &SQRT,
    &SUB,
    &SUM,
    &SWIGLU,
    &SWIGLU_GRAD,
    &TAN,
    &TANH,
    &TANH_GRAD,
    &WHERE,
    &XOR,
];
