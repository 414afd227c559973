//! Random numbers: one loop over the result's elements, no temporaries.
//!
//! The hash is integer arithmetic of ours, so that it runs on the host; a result on another device is made here and
//! copied there.

use super::{Kernel, KernelCx, copy_into, empty, torch_error};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::random::*;
use ckpt_torch::bytes;
use half::{bf16, f16};
use tch::{Device, Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[(&DROPOUT, dropout), (&UNIFORM, uniform)];

fn key(cx: &KernelCx, slot: usize) -> Result<Key> {
    Ok(Key::new(cx.ints(slot)?[0], cx.ints(slot + 1)?[0]))
}

/// Runs `change` over the bytes of `out`, wherever it is.
fn edit(mut out: Tensor, change: impl FnOnce(&mut [u8])) -> Result<Vec<Tensor>> {
    if out.device() == Device::Cpu {
        bytes::edit(&mut out, change).map_err(torch_error)?;
    } else {
        let mut host = out.to_device(Device::Cpu);
        bytes::edit(&mut host, change).map_err(torch_error)?;
        copy_into(&out, &host)?;
    }
    Ok(vec![out])
}

/// Calls `change(index, element)` for every element, held in `N` bytes each.
fn each<const N: usize>(bytes: &mut [u8], change: impl Fn(u64, [u8; N]) -> [u8; N]) {
    let (elements, _) = bytes.as_chunks_mut::<N>();
    for (index, element) in elements.iter_mut().enumerate() {
        *element = change(index as u64, *element);
    }
}

/// Copies the operand into the result and works there. 16-bit elements are computed in float32 and rounded once.
fn dropout(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, key) = (cx.x(0)?, key(cx, 2)?);
    let ratio = cx.x(1)?.double_value(&vec![0; cx.x(1)?.dim()]);
    let least = threshold(ratio as f32);
    let (wide, scale) = (1.0 / (1.0 - ratio), 1.0 / (1.0 - ratio as f32));
    let kind = x.kind();
    let out = empty(&x.size(), kind, x.device());
    copy_into(&out, x)?;
    let off = |index: u64| key.draw(index) < least;
    edit(out, |all| match kind {
        Kind::Double => each(all, |i, e| {
            if off(i) {
                [0; 8]
            } else {
                (f64::from_le_bytes(e) * wide).to_le_bytes()
            }
        }),
        Kind::Float => each(all, |i, e| {
            if off(i) {
                [0; 4]
            } else {
                (f32::from_le_bytes(e) * scale).to_le_bytes()
            }
        }),
        Kind::Half => each(all, |i, e| {
            let x = f16::from_le_bytes(e).to_f32();
            if off(i) {
                [0; 2]
            } else {
                f16::from_f32(x * scale).to_le_bytes()
            }
        }),
        // The row takes floating-point types only.
        _ => each(all, |i, e| {
            let x = bf16::from_le_bytes(e).to_f32();
            if off(i) {
                [0; 2]
            } else {
                bf16::from_f32(x * scale).to_le_bytes()
            }
        }),
    })
}

fn uniform(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let key = key(cx, 1)?;
    let out = empty(&cx.ints(0)?, Kind::Float, cx.x(0)?.device());
    let step = 1.0 / (1u32 << BITS) as f32;
    edit(out, |all| {
        each(all, |i, _: [u8; 4]| {
            (key.draw(i) as f32 * step).to_le_bytes()
        })
    })
}
