//! Calls of convolutions and their gradients.

use super::call::In::*;
use super::call::Set::*;
use super::call::{C234, Recipe, V4, r, recipes};

const C242: &[i64] = &[2, 4, 2];
const C244: &[i64] = &[2, 4, 4];

pub const CALLS: &[Recipe] = recipes! {
    Conv 1 (Real(&[2, 3, 4, 4]), Real(&[4, 3, 2, 3]), Real(V4))
        with [("pads", L(&[1, 0, 0, 1])), ("strides", L(&[2, 1]))];
    Conv 1 (Real(C244), Real(&[4, 2, 2])) with [("group", I(2)), ("dilations", L(&[2]))];
    Conv 1 (Real(C234), Real(&[4, 3, 1]));
    Conv 1 (Real(&[2, 2, 3, 3, 2]), Real(&[2, 1, 2, 2, 1]), Real(&[2]))
        with [("group", I(2)), ("strides", L(&[2, 2, 2]))];
    ConvTranspose 1 (Real(&[2, 4, 3]), Real(&[4, 2, 3]), Real(V4))
        with [("group", I(2)), ("strides", L(&[2])), ("pads", L(&[1, 0])), ("output_padding", L(&[1]))];
    ConvTranspose 1 (Real(&[2, 3, 2, 2]), Real(&[3, 2, 2, 2])) with [("strides", L(&[2, 2]))];
    ConvInputGrad 1 (Real(&[2, 4, 2, 4]), Real(&[4, 3, 2, 3]), Ints(&[2, 3, 4, 4]))
        with [("pads", L(&[1, 0, 0, 2])), ("strides", L(&[2, 1]))];
    ConvInputGrad 1 (Real(C242), Real(&[4, 2, 2]), Ints(&[2, 4, 4]))
        with [("group", I(2)), ("strides", L(&[2]))];
    ConvWeightGrad 1 (Real(&[2, 3, 4, 4]), Real(&[2, 4, 2, 4]), Ints(&[4, 3, 2, 3]))
        with [("pads", L(&[1, 0, 0, 2])), ("strides", L(&[2, 1]))];
    ConvWeightGrad 1 (Real(C244), Real(C242), Ints(&[4, 2, 2]))
        with [("group", I(2)), ("dilations", L(&[2]))];
};
