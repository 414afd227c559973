//! Elementwise functions of one operand.

use super::arith::unary;
use super::context::*;
use ckpt_passes::ops::math::*;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&EXP, |cx| unary(cx, "aten::exp.out", &[])),
    (&LOG, |cx| unary(cx, "aten::log.out", &[])),
    (&SQRT, |cx| unary(cx, "aten::sqrt.out", &[])),
    (&RECIPROCAL, |cx| unary(cx, "aten::reciprocal.out", &[])),
    (&ERF, |cx| unary(cx, "aten::erf.out", &[])),
    (&SIN, |cx| unary(cx, "aten::sin.out", &[])),
    (&COS, |cx| unary(cx, "aten::cos.out", &[])),
];
