//! Trigonometric and hyperbolic functions of one operand.

use super::arith::unary;
use super::context::*;
use ckpt_passes::ops::trig::*;

kernels! {
    TAN => unary("aten::tan.out", &[]);
    ASIN => unary("aten::asin.out", &[]);
    ACOS => unary("aten::acos.out", &[]);
    ATAN => unary("aten::atan.out", &[]);
    SINH => unary("aten::sinh.out", &[]);
    COSH => unary("aten::cosh.out", &[]);
    ASINH => unary("aten::asinh.out", &[]);
    ACOSH => unary("aten::acosh.out", &[]);
    ATANH => unary("aten::atanh.out", &[]);
}
