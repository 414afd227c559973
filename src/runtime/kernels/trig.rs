//! Trigonometric and hyperbolic functions of one operand.

use super::arith::unary;
use super::context::*;
use ckpt_passes::ops::trig::*;

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&TAN, |cx| unary(cx, "aten::tan.out", &[])),
    (&ASIN, |cx| unary(cx, "aten::asin.out", &[])),
    (&ACOS, |cx| unary(cx, "aten::acos.out", &[])),
    (&ATAN, |cx| unary(cx, "aten::atan.out", &[])),
    (&SINH, |cx| unary(cx, "aten::sinh.out", &[])),
    (&COSH, |cx| unary(cx, "aten::cosh.out", &[])),
    (&ASINH, |cx| unary(cx, "aten::asinh.out", &[])),
    (&ACOSH, |cx| unary(cx, "aten::acosh.out", &[])),
    (&ATANH, |cx| unary(cx, "aten::atanh.out", &[])),
];
