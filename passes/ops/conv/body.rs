//! The gradients of convolutions in standard ops.

use crate::names::*;
use crate::rule::*;
use crate::shape::transpose;
use ckpt_ir::error::Result;
use ckpt_ir::op::BodyCx;
use ckpt_ir::{Attrs, ValueId};

/// The sizes of `v` from axis `start` on, as an int64 vector.
fn sizes_from(cx: &mut BodyCx, v: ValueId, start: i64) -> Result<ValueId> {
    cx.b.emit(SHAPE, &[v], Attrs::new().with("start", start))
}

/// Padding before each spatial axis.
fn before(cx: &BodyCx, spatial: usize) -> Vec<i64> {
    let pads = cx.attrs.opt_ints("pads");
    pads.map_or(vec![0; spatial], |p| p[..spatial].to_vec())
}

/// `dy` spread over windows, without padding; then what the padding covered is taken away, and what no window reached
/// put on.
pub fn input_grad(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (dy, w) = (cx.b.widen(cx.x(0))?, cx.b.widen(cx.x(1))?);
    let rank = cx.b.rank(dy);
    let mut attrs = Attrs::new().with("group", cx.attrs.int("group"));
    for name in ["dilations", "strides"] {
        if let Some(given) = cx.attrs.opt_ints(name) {
            attrs = attrs.with(name, given.to_vec());
        }
    }
    let full = cx.b.emit(CONV_TRANSPOSE, &[dy, w], attrs)?;
    let before = before(cx, rank - 2);
    let taken: Vec<i64> = before.iter().map(|p| -p).collect();
    let (taken, before) = (cx.b.ints(&taken), cx.b.ints(&before));
    let (from, to) = (cx.b.ints(&[2]), cx.b.ints(&[rank as i64]));
    let first = cx.b.ints(&[0]);
    let shape = cx.x(2);
    let wanted = cx.b.op(SLICE, &[shape, from, to, first])?;
    let reached = sizes_from(cx, full, 2)?;
    let lacking = cx.b.add(wanted, before)?;
    let lacking = cx.b.sub(lacking, reached)?;
    // Samples and channels are named too: ONNX Runtime turns a transposed `Pad` as if it had no `axes`.
    let others = cx.b.ints(&[0, 0]);
    let pads = cx.b.concat(&[others, taken, others, lacking], 0)?;
    let dx = cx.b.op(PAD, &[full, pads])?;
    narrow(cx, dx)
}

/// `x` filtered by `dy` with the axes of samples and channels exchanged, strides and dilations too; places behind the
/// kernel, which a stride leaves over, are cut off.
pub fn weight_grad(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (x, dy) = (cx.b.widen(cx.x(0))?, cx.b.widen(cx.x(1))?);
    let rank = cx.b.rank(x);
    let groups = cx.attrs.int("group");
    let exchanged: Vec<i64> = [1, 0].into_iter().chain(2..rank as i64).collect();
    let mut image = transpose(cx.b, x, exchanged.clone())?;
    if groups > 1 {
        image = groups_as_channels(cx, image, groups)?;
    }
    let filters = transpose(cx.b, dy, exchanged.clone())?;
    let mut attrs = Attrs::new().with("group", groups);
    let names = [
        ("dilations", "strides"),
        ("strides", "dilations"),
        ("pads", "pads"),
    ];
    for (from, to) in names {
        if let Some(given) = cx.attrs.opt_ints(from) {
            attrs = attrs.with(to, given.to_vec());
        }
    }
    let dw = cx.b.emit(CONV, &[image, filters], attrs)?;
    let start = cx.b.ints(&vec![0; rank - 2]);
    let shape = cx.x(2);
    let (from, to) = (cx.b.ints(&[2]), cx.b.ints(&[rank as i64]));
    let first = cx.b.ints(&[0]);
    let kernel = cx.b.op(SLICE, &[shape, from, to, first])?;
    let axes: Vec<i64> = (2..rank as i64).collect();
    let axes = cx.b.ints(&axes);
    let dw = cx.b.op(SLICE, &[dw, start, kernel, axes])?;
    let dw = transpose(cx.b, dw, exchanged)?;
    narrow(cx, dw)
}

/// [groups·channels, samples, …] as [channels, groups·samples, …].
fn groups_as_channels(cx: &mut BodyCx, image: ValueId, groups: i64) -> Result<ValueId> {
    let rank = cx.b.rank(image) as i64;
    let apart = cx.b.ints(&[groups, -1]);
    let rest = sizes_from(cx, image, 1)?;
    let shape = cx.b.concat(&[apart, rest], 0)?;
    let split = cx.b.op(RESHAPE, &[image, shape])?;
    let perm: Vec<i64> = [1, 0].into_iter().chain(2..=rank).collect();
    let turned = transpose(cx.b, split, perm)?;
    let together = cx.b.ints(&[0, -1]);
    let rest = sizes_from(cx, image, 2)?;
    let shape = cx.b.concat(&[together, rest], 0)?;
    cx.b.op(RESHAPE, &[turned, shape])
}
