//! Elementwise functions of one operand.

use super::arith::unary;
use super::context::*;
use ckpt_passes::ops::math::*;

kernels! {
    EXP => unary("aten::exp.out", &[]);
    LOG => unary("aten::log.out", &[]);
    SQRT => unary("aten::sqrt.out", &[]);
    RECIPROCAL => unary("aten::reciprocal.out", &[]);
    ERF => unary("aten::erf.out", &[]);
    SIN => unary("aten::sin.out", &[]);
    COS => unary("aten::cos.out", &[]);
}
