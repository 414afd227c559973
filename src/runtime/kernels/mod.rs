//! One kernel per op, in files that mirror `passes/ops`.
//!
//! A kernel follows its row's `memory` rule exactly. Results are new and row-major unless the rule says "view", and
//! temporaries take `temp_bytes`. If the rule names in-place operands, the kernel gets the tensor of its first result from
//! [`KernelCx::result`].

use ckpt_passes::ir::OpDef;
use ckpt_passes::ops;
pub use context::{Kernel, KernelCx, calls, copy_into, empty, scalar_number};

pub mod accumulate;
pub mod activation;
pub mod arith;
pub mod attention;
pub mod bits;
pub mod blockwise;
pub mod cast;
pub mod collective;
pub mod concat;
mod context;
pub mod conv;
pub mod extreme;
pub mod fill;
pub mod float8;
pub mod fused;
pub mod gated;
pub mod grouped;
pub mod index;
pub mod linalg;
pub mod logic;
pub mod loss;
pub mod math;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod piecewise;
pub mod pool;
pub mod power;
mod product;
pub mod quantised;
pub mod random;
pub mod reduce;
pub mod rotary;
pub mod scan;
pub mod scatter;
pub mod select;
pub mod shape;
pub mod slice;
pub mod softmax;
pub mod sum_to;
pub mod transfer;
pub mod trig;

/// The kernels of every family.
const FAMILIES: &[&[(&OpDef, Kernel)]] = &[
    accumulate::KERNELS,
    activation::KERNELS,
    arith::KERNELS,
    attention::KERNELS,
    bits::KERNELS,
    blockwise::KERNELS,
    cast::KERNELS,
    collective::KERNELS,
    concat::KERNELS,
    conv::KERNELS,
    extreme::KERNELS,
    fill::KERNELS,
    float8::KERNELS,
    fused::KERNELS,
    gated::KERNELS,
    grouped::KERNELS,
    index::KERNELS,
    linalg::KERNELS,
    logic::KERNELS,
    loss::KERNELS,
    math::KERNELS,
    matmul::KERNELS,
    norm::KERNELS,
    optimizer::KERNELS,
    piecewise::KERNELS,
    pool::KERNELS,
    power::KERNELS,
    quantised::KERNELS,
    random::KERNELS,
    reduce::KERNELS,
    rotary::KERNELS,
    scan::KERNELS,
    scatter::KERNELS,
    select::KERNELS,
    shape::KERNELS,
    slice::KERNELS,
    softmax::KERNELS,
    sum_to::KERNELS,
    transfer::KERNELS,
    trig::KERNELS,
];

/// Returns the kernel of an op.
pub fn find(op: &OpDef) -> Option<Kernel> {
    let mut kernels = FAMILIES.iter().copied().flatten();
    kernels
        .find(|(row, _)| *row == op)
        .map(|(_, kernel)| *kernel)
}

/// Returns whether a view begins where its operand begins, so that sizes and strides describe it completely.
pub fn begins_with_operand(op: &OpDef) -> bool {
    op.is_layout() && op != &ops::slice::SLICE && op != &ops::concat::SPLIT
}
