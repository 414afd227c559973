//! Calls of pooling: padding, dilation, sizes rounded up, one to three spatial axes.

use super::call::In::*;
use super::call::Set::*;
use super::call::{C234, Recipe, r, recipes};

pub const CALLS: &[Recipe] = recipes! {
    MaxPool 1 (Real(C234)) with [("kernel_shape", L(&[2]))];
    MaxPool 2 (Real(&[2, 3, 4, 5]))
        with [("kernel_shape", L(&[3, 2])), ("strides", L(&[2, 1])), ("pads", L(&[1, 0, 1, 1]))];
    MaxPool 2 (Real(&[1, 2, 5, 4]))
        with [("kernel_shape", L(&[2, 2])), ("strides", L(&[2, 2])), ("dilations", L(&[2, 1])),
            ("ceil_mode", I(1)), ("storage_order", I(1))];
    MaxPool 2 (Real(&[2, 2, 3, 3, 2])) with [("kernel_shape", L(&[2, 2, 2])), ("strides", L(&[1, 2, 1]))];
};
