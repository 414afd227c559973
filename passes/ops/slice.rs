//! `Slice` and its adjoint: parts of a tensor along some axes.
//!
//! Bounds are operands and may be symbolic. Axes and steps must be constants, else the model is refused: a slice with
//! positive steps is a view and one with a negative step is a copy, and the memory rule must know which.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::layout::{slice_span, slice_strides};
use ckpt_ir::op::{
    BatchAxes, BodyCx, Cost, DataSizes, Footprint, Grad, GradCx, InferCx, MemoryCx, OpDef, Sized,
    contiguous_strides, fresh, moves,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Emit, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&SLICE, &SLICE_GRAD];

/// A constant bound as large as this means "to the end": exporters write the largest 32-bit or 64-bit integer.
const TO_THE_END: i64 = i32::MAX as i64;

/// The operand of [`SLICE`] that holds the steps.
pub const STEPS: usize = 4;

/// Every `steps`-th element from `starts` up to `ends` along `axes` (ONNX Slice-13).
pub static SLICE: OpDef = OpDef {
    aten: &["aten.slice"],
    ins: slots!["data", "starts", "ends"; "axes", "steps"],
    outs: OUTPUT,
    data_sizes: DataSizes::LongestAxis,
    fold: fold_slice,
    grad: Grad::Rule(grad_slice),
    cost: |cx| match steps_of(cx.ins.get(STEPS)) {
        Some(steps) if steps.iter().any(|s| *s < 0) => moves(cx),
        _ => Cost::default(),
    },
    memory: |cx| {
        let steps = steps_of(cx.ins.get(STEPS));
        if let (Some(steps), Some(Some(x))) = (steps, cx.ins.first())
            && steps.iter().any(|s| *s < 0)
        {
            return flipped_memory(cx, x, steps);
        }
        view_of_first(cx, |x| {
            let Some(steps) = steps else {
                return x.strides.clone();
            };
            slice_strides(&x.strides, &sliced_axes(cx, steps.len()), steps)
        })
    },
    ..layout("Slice", onnx(10, 13), BatchAxes::Sliced, infer_slice)
};

/// A walk backward is a flip of the walk forward, which is made row-major first.
fn flipped_memory(cx: &MemoryCx, x: &Sized, steps: &[i64]) -> Footprint {
    let forward: Vec<i64> = steps.iter().map(|s| s.abs()).collect();
    let mut view = cx.outs[0].clone();
    view.strides = slice_strides(&x.strides, &sliced_axes(cx, steps.len()), &forward);
    fresh(cx).with_temp(if view.is_contiguous() {
        0
    } else {
        view.bytes()
    })
}

fn steps_of(operand: Option<&Option<Sized>>) -> Option<&[i64]> {
    operand?.as_ref()?.ints.as_deref()
}

fn sliced_axes(cx: &MemoryCx, count: usize) -> Vec<usize> {
    match cx.ins.get(3) {
        Some(Some(axes)) => known_axes(axes.ints.as_deref(), cx.outs[0].dims.len()),
        _ => (0..count).collect(),
    }
}

/// Which axes are sliced and with which steps.
///
/// # Errors
/// Axes or steps that are not constants; a step of 0; operands of unequal length.
fn axes_and_steps(cx: &InferCx) -> Result<(Vec<usize>, Vec<i64>)> {
    let rank = cx.ty(0)?.rank();
    let given: Vec<usize> = (1..5).filter(|slot| cx.opt_ty(*slot).is_some()).collect();
    cx.same_dtype(&given)?;
    let count = int_vector(cx, 1)?
        .ok_or_else(|| cx.fail("shape", "the number of sliced axes is not known"))?;
    let same = |slot: usize| -> Result<()> {
        if int_vector(cx, slot)? == Some(count) {
            return Ok(());
        }
        Err(cx
            .fail(
                "shape",
                format!("`{}` has another length", cx.op.ins[slot].name),
            )
            .expected(format!("{count}, as `starts`"))
            .found(cx.ty(slot)?.to_string()))
    };
    same(2)?;
    let axes = match const_axes(cx, 3, rank)? {
        Some(axes) => {
            same(3)?;
            axes
        }
        None if count > rank => {
            return Err(cx.fail("shape", "more axes are sliced than there are"));
        }
        None => (0..count).collect(),
    };
    let steps = match cx.opt_ty(4) {
        None => vec![1; count],
        Some(_) => {
            same(4)?;
            cx.const_ints(4)
                .ok_or_else(|| cx.fail("shape", "steps that are not constants are not supported"))?
        }
    };
    if steps.contains(&0) {
        return Err(cx.fail("shape", "a step is 0"));
    }
    Ok((axes, steps))
}

fn infer_slice(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    let (axes, steps) = axes_and_steps(cx)?;
    let mut dims = x.dims.clone();
    for (i, (axis, step)) in axes.iter().zip(steps).enumerate() {
        let length = match (cx.ints(1), cx.ints(2)) {
            (Some(starts), Some(ends)) => span_length(&dims[*axis], &starts[i], &ends[i], step),
            _ => None,
        };
        dims[*axis] = length.unwrap_or_else(|| cx.fresh(0, *axis));
    }
    Ok(vec![x.with_dims(dims)])
}

/// A bound counted from 0, not yet clamped; `None` for "to the end" (or, for a negative one, "from before the start").
enum Bound {
    At(Dim),
    Above,
    Below,
}

/// `None` where the sign of the bound is not known.
fn bound(dim: &Dim, at: &Dim) -> Option<Bound> {
    match (at.as_const(), at.bounds()) {
        (Some(n), _) if n >= TO_THE_END => Some(Bound::Above),
        (Some(n), _) if n <= -TO_THE_END => Some(Bound::Below),
        (_, (Some(lo), _)) if lo >= 0 => Some(Bound::At(at.clone())),
        (_, (_, Some(hi))) if hi < 0 => Some(Bound::At(dim.add(at))),
        _ => None,
    }
}

/// How many elements a slice takes of an axis of size `dim`; the symbolic form of [`slice_span`].
///
/// `None` where the sign of a bound, and so its meaning, is not known. A lower clamp of the far bound and an upper clamp
/// of the near one are left out: they only matter where the slice is empty, which the last clamp covers.
fn span_length(dim: &Dim, start: &Dim, end: &Dim, step: i64) -> Option<Dim> {
    if let (Some(dim), Some(start), Some(end)) = (dim.as_const(), start.as_const(), end.as_const())
    {
        return Some(Dim::from(slice_span(dim, start, end, step).1));
    }
    // Both lie on the axis, in this order.
    if let (1, Some((p, q)), Some((r, s))) = (step, start.share_of(dim), end.share_of(dim))
        && matches!((p.checked_mul(s), r.checked_mul(q)), (Some(from), Some(to)) if from <= to)
    {
        return Some(end.sub(start));
    }
    let (start, end) = (bound(dim, start)?, bound(dim, end)?);
    let last = dim.sub(&Dim::ONE);
    let distance = if step > 0 {
        let first = match start {
            Bound::Above => return Some(Dim::ZERO),
            Bound::Below => Dim::ZERO,
            Bound::At(at) => at.larger(&Dim::ZERO),
        };
        match end {
            Bound::Below => return Some(Dim::ZERO),
            Bound::Above => dim.sub(&first),
            Bound::At(at) => at.clamped(dim).sub(&first),
        }
    } else {
        let first = match start {
            Bound::Above => last,
            Bound::Below => Dim::ZERO.smaller(&last),
            Bound::At(at) => at.larger(&Dim::ZERO).smaller(&last),
        };
        match end {
            Bound::Above => return Some(Dim::ZERO),
            Bound::Below => first.add(&Dim::ONE),
            Bound::At(at) => first.sub(&at.larger(&Dim::from(-1))),
        }
    };
    let step = Dim::from(i64::try_from(step.unsigned_abs()).ok()?);
    Some(distance.larger(&Dim::ZERO).ceil_div(&step))
}

fn fold_slice(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let (out, dims) = (types.first()?.static_dims()?, cx.ty(0).ok()?.static_dims()?);
    let (axes, steps) = axes_and_steps(cx).ok()?;
    let (starts, ends) = (cx.const_ints(1)?, cx.const_ints(2)?);
    let own = contiguous_strides(&dims);
    let mut offset = 0;
    for (i, axis) in axes.iter().enumerate() {
        let (first, _) = slice_span(dims[*axis], starts[i], ends[i], steps[i]);
        offset += first * own[*axis];
    }
    let strides = slice_strides(&own, &axes, &steps);
    Some(vec![strided_contents(cx.ints(0)?, &out, &strides, offset)?])
}

fn grad_slice(cx: &mut GradCx) -> Result<()> {
    let (x, starts, ends) = (cx.x(0), cx.x(1), cx.x(2));
    let rank = cx.b.rank(x);
    let constants = |cx: &GradCx, slot: usize| -> Result<Option<Vec<i64>>> {
        let Some(v) = cx.opt_x(slot) else {
            return Ok(None);
        };
        let known = cx.b.known(v);
        let known = known.and_then(|ints| ints.iter().map(Dim::as_const).collect());
        match known {
            Some(ints) => Ok(Some(ints)),
            None => Err(no_rule(
                cx,
                "the axes or steps of a slice are not constants",
            )),
        }
    };
    let count = cx.b.ty(starts).dims.first().and_then(Dim::as_const);
    let count = count.ok_or_else(|| no_rule(cx, "the number of sliced axes is not known"))?;
    if count == 0 {
        cx.give(0, cx.dy0());
        return Ok(());
    }
    let axes: Vec<i64> = match constants(cx, 3)? {
        Some(listed) => {
            let axes = known_axes(Some(&listed), rank);
            axes.into_iter().map(|a| a as i64).collect()
        }
        None => (0..count).collect(),
    };
    let steps = constants(cx, 4)?.unwrap_or_else(|| vec![1; count as usize]);
    let shape = cx.b.shape(x)?;
    let starts = cx.b.cast(starts, DType::I64)?;
    let ends = cx.b.cast(ends, DType::I64)?;
    let attrs = Attrs::new().with("axes", axes).with("steps", steps);
    let d =
        cx.b.emit(&SLICE_GRAD, &[cx.dy0(), shape, starts, ends], attrs)?;
    cx.give(0, d);
    Ok(())
}

/// `SliceGrad(dy, shape, starts, ends)`: zeros of `shape` with `dy` where the slice took its elements from.
///
/// `starts` and `ends` mean what they mean to `Slice` of a tensor of `shape`; `axes` are counted from 0.
pub static SLICE_GRAD: OpDef = OpDef {
    attrs: &[
        AttrSpec::required("axes", AttrKind::Ints),
        AttrSpec::required("steps", AttrKind::Ints),
    ],
    ins: slots!["dy", "shape", "starts", "ends"],
    outs: DX,
    infer: infer_slice_grad,
    grad: Grad::First(|cx| {
        let attrs = cx.attrs();
        let axes = cx.b.ints(attrs.ints("axes"));
        let steps = cx.b.ints(attrs.ints("steps"));
        let operands = [cx.dy0(), cx.x(2), cx.x(3), axes, steps];
        cx.b.op(&SLICE, &operands)
    }),
    // What walks backward is flipped first.
    memory: |cx| {
        let flips = cx.attrs.ints("steps").iter().any(|s| *s < 0);
        fresh(cx).with_temp(match (flips, &cx.ins[0]) {
            (true, Some(dy)) => dy.bytes(),
            _ => 0,
        })
    },
    ..our_mixed("SliceGrad", slice_grad_body)
};

fn infer_slice_grad(cx: &InferCx) -> Result<Vec<Ty>> {
    let dy = cx.ty(0)?;
    let (axes, steps) = (cx.attrs.ints("axes"), cx.attrs.ints("steps"));
    if int_vector(cx, 1)? != Some(dy.rank()) {
        return Err(cx.fail("shape", "`shape` does not have one size an axis of `dy`"));
    }
    for slot in [2, 3] {
        if int_vector(cx, slot)? != Some(axes.len()) {
            return Err(cx.fail("shape", "bounds and `axes` have different lengths"));
        }
    }
    if steps.len() != axes.len() || steps.contains(&0) {
        return Err(cx.fail("attribute", "`steps` is not one step, not 0, an axis"));
    }
    let in_range = |a: &i64| (0..dy.rank() as i64).contains(a);
    if !axes.iter().all(in_range) {
        return Err(cx.fail("attribute", "`axes` are out of range"));
    }
    let dims: Vec<Dim> = match cx.ints(1) {
        Some(dims) => dims.to_vec(),
        None => (0..dy.rank())
            .map(|i| match axes.contains(&(i as i64)) {
                true => cx.fresh(0, i),
                false => dy.dims[i].clone(),
            })
            .collect(),
    };
    for (i, dim) in dims.iter().enumerate() {
        if !axes.contains(&(i as i64)) && dim.same(&dy.dims[i]) == Same::No {
            return Err(cx
                .fail("shape", format!("axis {i} is not sliced but differs"))
                .expected(dy.dims[i].to_string())
                .found(dim.to_string()));
        }
    }
    Ok(vec![dy.with_dims(dims)])
}

/// Works on one axis at a time. Slicing the positions `0, 1, …` returns the positions that the slice took, and the
/// elements are scattered there into zeros. `Slice` itself clamps the bounds, so both agree.
fn slice_grad_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (shape, starts, ends) = (cx.x(1), cx.x(2), cx.x(3));
    let (axes, steps) = (
        cx.attrs.ints("axes").to_vec(),
        cx.attrs.ints("steps").to_vec(),
    );
    let mut d = cx.x(0);
    let (rank, dtype) = (cx.b.rank(d), cx.b.ty(d).dtype);
    let part = |b: &mut dyn Emit, v: ValueId, from: i64, to: i64| {
        let (from, to) = (b.ints(&[from]), b.ints(&[to]));
        b.op(&SLICE, &[v, from, to])
    };
    for (i, (axis, step)) in axes.iter().zip(steps).enumerate() {
        let size = part(cx.b, shape, *axis, axis + 1)?;
        let zero_axis = cx.b.ints(&[0]);
        let limit = cx.b.op(SQUEEZE, &[size, zero_axis])?;
        let all = cx.b.counted(limit)?;
        let start = part(cx.b, starts, i as i64, i as i64 + 1)?;
        let end = part(cx.b, ends, i as i64, i as i64 + 1)?;
        let step = cx.b.ints(&[step]);
        let taken = cx.b.op(&SLICE, &[all, start, end, zero_axis, step])?;
        // Positions as [1, .., length, .., 1], then one for every element of `d`.
        let own = cx.b.shape(d)?;
        let mut column = vec![1; rank];
        column[*axis as usize] = -1;
        let taken = cx.b.reshape(taken, &column)?;
        let indices = cx.b.expand(taken, own)?;
        let before = part(cx.b, own, 0, *axis)?;
        let after = part(cx.b, own, axis + 1, rank as i64)?;
        let target = cx.b.concat(&[before, size, after], 0)?;
        let value = cx.b.scalar(dtype, 0.0);
        let zeros = cx.b.expand(value, target)?;
        let attrs = Attrs::new().with("axis", *axis);
        d = cx.b.emit(SCATTER_ELEMENTS, &[zeros, indices, d], attrs)?;
    }
    Ok(vec![d])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The symbolic length, at every size, is the length: bounds as numbers, and as sums with the size.
    #[test]
    fn symbolic_lengths_agree_with_spans() {
        let (named, data) = (Dim::symbol("s"), Dim::data("d"));
        let numbers = [i64::MIN, -9, -3, -1, 0, 1, 2, 8, i64::MAX];
        let mut known = 0;
        for (dim, least) in [(&named, 1), (&data, 0)] {
            let mut bounds: Vec<Dim> = numbers.iter().map(|n| Dim::from(*n)).collect();
            bounds.extend([dim.clone(), dim.sub(&Dim::ONE), dim.add(&Dim::from(2))]);
            bounds.push(Dim::ZERO.sub(&dim.add(&Dim::ONE)));
            for start in &bounds {
                for end in &bounds {
                    for step in [-3, -2, -1, 1, 2, 5] {
                        let Some(length) = span_length(dim, start, end, step) else {
                            continue;
                        };
                        for size in least..12 {
                            let at = |d: &Dim| d.eval(&|_| Some(size)).unwrap();
                            let (_, expected) = slice_span(size, at(start), at(end), step);
                            assert_eq!(
                                at(&length),
                                expected,
                                "{size}[{start}:{end}:{step}] {length}"
                            );
                            known += 1;
                        }
                    }
                }
            }
        }
        assert!(known > 10_000, "{known}");
    }

    /// Parts of an axis whose length is no simple size.
    #[test]
    fn shares_of_an_axis_have_lengths() {
        let n = Dim::symbol("n");
        let part = |k: i64| n.mul(&Dim::from(k)).div(&Dim::from(3));
        let dim = part(2).sub(&part(1));
        let share = |k: i64| dim.mul(&Dim::from(k)).div(&Dim::from(4));
        for (from, to) in [(0, 1), (1, 2), (1, 4), (3, 4), (2, 2)] {
            let length = span_length(&dim, &share(from), &share(to), 1).unwrap();
            for size in 1..40 {
                let at = |d: &Dim| d.eval(&|_| Some(size)).unwrap();
                let span = slice_span(at(&dim), at(&share(from)), at(&share(to)), 1);
                assert_eq!(at(&length), span.1, "{from} {to} {size}");
            }
        }
        assert!(share(5).share_of(&dim).is_none() && share(-1).share_of(&dim).is_none());
        assert!(span_length(&dim, &share(3), &share(1), 1).is_none());
    }

    /// The forms exporters write stay simple.
    #[test]
    fn common_lengths_are_simple() {
        let s = Dim::symbol("s");
        let n = |k: i64| Dim::from(k);
        let length = |start: i64, end: i64, step: i64| {
            span_length(&s, &n(start), &n(end), step)
                .unwrap()
                .to_string()
        };
        assert_eq!(length(0, i64::MAX, 1), "s");
        assert_eq!(length(0, -1, 1), "s - 1");
        assert_eq!(length(-1, i64::MAX, 1), "1");
        assert_eq!(length(0, 1, 1), "1");
        assert_eq!(length(1, i64::MAX, 1), "s - 1");
        assert_eq!(length(-1, i64::MIN, -1), "s");
        let next = s.add(&Dim::ONE);
        assert_eq!(span_length(&next, &n(1), &next, 1), Some(s.clone()));
        assert_eq!(span_length(&next, &n(0), &s, 1), Some(s.clone()));
        assert_eq!(span_length(&s, &s.sub(&n(4)), &n(i64::MAX), 1), None);
    }
}
