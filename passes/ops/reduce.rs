//! Reductions (ONNX operator specifications of those names, axes as an operand).
//!
//! Typing needs the contents of the axes operand, unless every axis is kept. Gradients bring the cotangent to the
//! operand's rank, compute as much as possible while it is small, and broadcast last.

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Cost, CostCx, DeviceKind, Footprint, Grad, GradCx, InferCx, MemoryCx, OpClass,
    OpDef, OpRef, Sized, Slot, fresh,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Emit, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &REDUCE_SUM,
    &REDUCE_MEAN,
    &REDUCE_MAX,
    &REDUCE_MIN,
    &REDUCE_PROD,
    &REDUCE_SUM_SQUARE,
    &REDUCE_L1,
    &REDUCE_L2,
    &REDUCE_LOG_SUM_EXP,
];

const KEEPDIMS: AttrSpec = AttrSpec::int("keepdims", 1);
const NOOP: AttrSpec = AttrSpec::int("noop_with_empty_axes", 0);

/// The axes to reduce, ascending; `None` where the axes operand is not a known constant.
fn axes_of(cx: &InferCx) -> Result<Option<Vec<usize>>> {
    let rank = cx.ty(0)?.rank();
    let given = match cx.opt_ty(1) {
        None => Vec::new(),
        Some(ty) if ty.dtype != DType::I64 || ty.rank() != 1 => {
            return Err(cx
                .fail("type", "`axes` is not an int64 vector")
                .found(ty.to_string()));
        }
        Some(_) => match cx.const_ints(1) {
            Some(axes) => axes,
            None => return Ok(None),
        },
    };
    if given.is_empty() {
        let noop = cx.attrs.int("noop_with_empty_axes") != 0;
        return Ok(Some(if noop {
            Vec::new()
        } else {
            (0..rank).collect()
        }));
    }
    let mut axes = Vec::with_capacity(given.len());
    for axis in given {
        axes.push(cx.axis(axis, rank)?);
    }
    axes.sort_unstable();
    if axes.windows(2).any(|w| w[0] == w[1]) {
        return Err(cx.fail("axis", "an axis is given twice"));
    }
    Ok(Some(axes))
}

fn infer_reduce(cx: &InferCx) -> Result<Vec<Ty>> {
    cx.want_dtype(0, is_number, "a number type")?;
    infer_extreme(cx)
}

/// Of any element type: booleans have extremes too (ONNX ReduceMax-20).
fn infer_extreme(cx: &InferCx) -> Result<Vec<Ty>> {
    let x = cx.ty(0)?;
    let keep = cx.attrs.int("keepdims") != 0;
    let Some(axes) = axes_of(cx)? else {
        if !keep {
            return Err(cx
                .fail(
                    "shape",
                    "the axes are computed from data, so the rank is not known",
                )
                .help("keep the reduced axes (keepdims = 1) or make the axes constant"));
        }
        let dims: Vec<Dim> = (0..x.rank()).map(|i| cx.fresh(0, i)).collect();
        return Ok(vec![x.with_dims(dims)]);
    };
    let mut dims = Vec::new();
    for (i, dim) in x.dims.iter().enumerate() {
        if !axes.contains(&i) {
            dims.push(dim.clone());
        } else if keep {
            dims.push(Dim::ONE);
        }
    }
    Ok(vec![x.with_dims(dims)])
}

/// For reductions that also transform each element: ONNX leaves open what they do when no axis is reduced.
fn infer_reduce_of_function(cx: &InferCx) -> Result<Vec<Ty>> {
    let types = infer_reduce(cx)?;
    let none_given = match cx.opt_ty(1) {
        None => true,
        Some(ty) => ty
            .dims
            .first()
            .is_some_and(|n| n.same(&Dim::ZERO) != Same::No),
    };
    if none_given && cx.attrs.int("noop_with_empty_axes") != 0 {
        return Err(cx
            .fail(
                "axis",
                "`noop_with_empty_axes` without axes is ambiguous here",
            )
            .help("give the axes, or remove the node"));
    }
    Ok(types)
}

/// Contents of a reduction over known operands.
fn fold_reduce(
    cx: &InferCx,
    types: &[Ty],
    start: Option<Dim>,
    join: fn(&Dim, &Dim) -> Dim,
) -> Option<Vec<Vec<Dim>>> {
    let dims = cx.ty(0).ok()?.static_dims()?;
    let axes = axes_of(cx).ok()??;
    let ints = cx.ints(0)?;
    let kept: Vec<i64> = (0..dims.len())
        .map(|i| if axes.contains(&i) { 1 } else { dims[i] })
        .collect();
    let n = types.first()?.elements().as_const()?;
    let mut out: Vec<Option<Dim>> = vec![start; usize::try_from(n).ok()?];
    for (flat, value) in ints.iter().enumerate() {
        let slot = out.get_mut(broadcast_index(flat as i64, &dims, &kept))?;
        *slot = Some(match slot {
            None => value.clone(),
            Some(so_far) => join(so_far, value),
        });
    }
    Some(vec![out.into_iter().collect::<Option<_>>()?])
}

/// One operation an element of the operand.
pub fn per_input(cx: &CostCx) -> Cost {
    cx.work(cx.elements(0))
}

/// The axes that the node reduces.
fn known_axes(cx: &GradCx) -> Result<Vec<usize>> {
    let rank = cx.ty(cx.x(0)).rank();
    let given: Vec<i64> = match cx.opt_x(1) {
        None => Vec::new(),
        Some(axes) => {
            cx.b.known(axes)
                .and_then(|d| d.iter().map(Dim::as_const).collect())
                .ok_or_else(|| no_rule(cx, "the axes of the reduction are computed from data"))?
        }
    };
    if given.is_empty() {
        let noop = cx.attrs().int("noop_with_empty_axes") != 0;
        return Ok(if noop {
            Vec::new()
        } else {
            (0..rank).collect()
        });
    }
    let mut axes: Vec<usize> = given
        .iter()
        .map(|a| (if *a < 0 { a + rank as i64 } else { *a }) as usize)
        .collect();
    axes.sort_unstable();
    Ok(axes)
}

/// A value of the result's shape with the reduced axes as 1, so that it broadcasts against the operand.
fn with_kept_axes(cx: &mut GradCx, v: ValueId) -> Result<Term> {
    if cx.attrs().int("keepdims") != 0 || cx.ty(v).rank() == 0 {
        return Ok(Term(v));
    }
    let axes: Vec<i64> = known_axes(cx)?.iter().map(|a| *a as i64).collect();
    if axes.is_empty() {
        return Ok(Term(v));
    }
    let axes = cx.b.ints(&axes);
    cx.bind(binary_op(UNSQUEEZE, v, axes))
}

/// Broadcasts to the operand's shape: a view.
fn spread(cx: &mut GradCx, v: ValueId) -> Result<ValueId> {
    let shape = cx.b.shape(cx.x(0))?;
    cx.b.expand(v, shape)
}

/// `v` summed over `axes`, which stay as 1.
pub fn sum_kept(b: &mut dyn Emit, v: impl Into<Expr>, axes: &[usize]) -> Result<ValueId> {
    reduce_axes(b, &REDUCE_SUM, v, axes, true)
}

/// `v` reduced over exactly `axes`.
pub fn reduce_axes(
    b: &mut dyn Emit,
    op: impl Into<OpRef>,
    v: impl Into<Expr>,
    axes: &[usize],
    keep: bool,
) -> Result<ValueId> {
    let v = b.eval(v)?;
    if axes.is_empty() {
        return Ok(v);
    }
    let axes: Vec<i64> = axes.iter().map(|a| *a as i64).collect();
    let axes = b.ints(&axes);
    b.emit(op, &[v, axes], Attrs::new().with("keepdims", keep as i64))
}

const DATA_AXES: &[Slot] = slots!["data"; "axes"];
const REDUCED: &[Slot] = slots!["reduced"];

const fn reduction(
    name: &'static str,
    since: i64,
    class: OpClass,
    aten: &'static [&'static str],
    grad: Grad,
) -> OpDef {
    OpDef {
        aten,
        attrs: &[KEEPDIMS, NOOP],
        ins: DATA_AXES,
        outs: REDUCED,
        infer: infer_reduce,
        grad,
        cost: per_input,
        ..standard(name, onnx(since, since), class, BatchAxes::Reduced)
    }
}

/// ONNX `ReduceSum`.
pub static REDUCE_SUM: OpDef = OpDef {
    fold: |cx, ty| fold_reduce(cx, ty, Some(Dim::ZERO), Dim::add),
    memory: sum_memory,
    ..reduction(
        "ReduceSum",
        13,
        OpClass::SumReduction,
        &["aten.sum"],
        Grad::First(|cx| {
            let dy = with_kept_axes(cx, cx.dy0())?;
            spread(cx, dy.0)
        }),
    )
};

/// ONNX `ReduceMean`.
pub static REDUCE_MEAN: OpDef = OpDef {
    memory: mean_memory,
    ..reduction(
        "ReduceMean",
        18,
        OpClass::SumReduction,
        &["aten.mean"],
        Grad::First(grad_mean),
    )
};

/// The sum of the reduced axes; see [`wide_sum_bytes`].
fn sum_memory(cx: &MemoryCx) -> Footprint {
    let Some(x) = &cx.ins[0] else {
        return fresh(cx);
    };
    let axes = reduced_axes(cx, x);
    fresh(cx).with_temp(wide_sum_bytes(cx.device, x, &axes, cx.outs[0].elements()))
}

fn reduced_axes(cx: &MemoryCx, x: &Sized) -> Vec<usize> {
    let reduced = match cx.attrs.int("noop_with_empty_axes") {
        0 => (0..x.dims.len()).collect(),
        _ => Vec::new(),
    };
    let rank = x.dims.len().max(1) as i64;
    match cx.ins.get(1) {
        Some(Some(axes)) if axes.dims != [0] => {
            let given = axes.ints.iter().flatten();
            let mut axes: Vec<usize> = given.map(|a| a.rem_euclid(rank) as usize).collect();
            axes.sort_unstable();
            axes
        }
        _ => reduced,
    }
}

/// Returns true if a sum adds up the columns of a row-major matrix. On a CUDA device that is a product with a row of ones, because
/// libtorch's own kernel allocates several times the bytes of the operand.
pub fn is_product_with_ones(x: &Sized, axes: &[usize]) -> bool {
    let rows: i64 = x.dims[..axes.len()].iter().product();
    let columns: i64 = x.dims[axes.len()..].iter().product();
    let is_leading = axes.iter().enumerate().all(|(i, axis)| i == *axis);
    is_leading && x.dtype.is_float() && x.is_contiguous() && rows > 1 && columns > 1
}

/// Temporary bytes of a sum. `aten::sum` on the CPU takes a float32 copy of 16-bit operands, and a float32 result, where the reduced axes
/// do not lie in memory like one axis.
pub fn wide_sum_bytes(device: DeviceKind, x: &Sized, axes: &[usize], result: u64) -> u64 {
    if device == DeviceKind::Cuda {
        return match is_product_with_ones(x, axes) {
            true => x.bytes() / result.max(1),
            false => 0,
        };
    }
    if !matches!(x.dtype, DType::F16 | DType::BF16) || x.dims.contains(&0) {
        return 0;
    }
    let mut reduced: Vec<(i64, i64)> = axes
        .iter()
        .filter(|a| x.dims[**a] > 1)
        .map(|a| (x.strides[*a], x.dims[*a]))
        .collect();
    reduced.sort_unstable();
    let apart = reduced
        .windows(2)
        .any(|w| w[0].0.saturating_mul(w[0].1) != w[1].0);
    if apart {
        4 * (x.elements() + result)
    } else {
        0
    }
}

/// `aten::mean` on the CPU converts 16-bit operands to float32 and divides the sum in float32.
fn mean_memory(cx: &MemoryCx) -> Footprint {
    let narrow = cx.outs[0].dtype.is_float()
        && cx.outs[0].dtype.size_bytes() == 2
        && cx.device == DeviceKind::Cpu;
    let elements = cx.elements(0) + cx.outs[0].elements();
    fresh(cx).with_temp(if narrow { 4 * elements } else { 0 })
}

/// dx = dy / n. The division is done while the cotangent is small, in float32 for the 16-bit types: n may not fit them.
fn grad_mean(cx: &mut GradCx) -> Result<ValueId> {
    let axes = known_axes(cx)?;
    let dtype = cx.ty(cx.x(0)).dtype;
    let dy = with_kept_axes(cx, cx.dy0())?;
    let dy = cx.widened(dy.0)?;
    let count = count_along(cx, &axes)?;
    let dx = cx.eval(cast(dy / count, dtype))?;
    spread(cx, dx)
}

/// Returns the number of elements in each group along `axes` of the first operand, as a scalar or a vector of one
/// element of the type that kernels compute in.
pub fn count_along(cx: &mut GradCx, axes: &[usize]) -> Result<ValueId> {
    let x = cx.x(0);
    let ty = cx.ty(x);
    let dtype = compute_type(ty.dtype);
    let mut known = 1i64;
    let mut count = None;
    for axis in axes {
        if let Some(n) = ty.dims[*axis].as_const() {
            known = known.saturating_mul(n);
            continue;
        }
        let at = *axis as i64;
        let span = Attrs::new().with("start", at).with("end", at + 1);
        let n = cx.b.emit(SHAPE, &[x], span)?;
        count = Some(match count {
            None => n,
            Some(so_far) => cx.b.mul(so_far, n)?,
        });
    }
    let Some(count) = count else {
        return Ok(cx.b.scalar(dtype, known as f64));
    };
    let known = cx.b.int(known);
    let count = cx.b.mul(count, known)?;
    cx.b.cast(count, dtype)
}

/// ONNX `ReduceMax`.
pub static REDUCE_MAX: OpDef = OpDef {
    later_types: &[(DType::Bool, 20)],
    infer: infer_extreme,
    fold: |cx, ty| fold_reduce(cx, ty, None, Dim::larger),
    ..reduction(
        "ReduceMax",
        18,
        OpClass::MaxReduction,
        &["aten.amax"],
        Grad::First(grad_extreme),
    )
};

/// ONNX `ReduceMin`.
pub static REDUCE_MIN: OpDef = OpDef {
    later_types: &[(DType::Bool, 20)],
    infer: infer_extreme,
    fold: |cx, ty| fold_reduce(cx, ty, None, Dim::smaller),
    ..reduction(
        "ReduceMin",
        18,
        OpClass::Other,
        &["aten.amin"],
        Grad::First(grad_extreme),
    )
};

/// Elements that tie for the extreme share the gradient evenly, as PyTorch's `amax` and `amin` do.
fn grad_extreme(cx: &mut GradCx) -> Result<ValueId> {
    let axes = known_axes(cx)?;
    let dtype = cx.ty(cx.x(0)).dtype;
    let y = with_kept_axes(cx, cx.y(0))?;
    let dy = with_kept_axes(cx, cx.dy0())?;
    let chosen = cx.bind(binary_op(EQUAL, cx.operand(0), y))?;
    let count = sum_kept(cx.b, cast(chosen, compute_type(dtype)), &axes)?;
    let share = cx.widened(dy.0)? / count;
    let share = cx.bind(cast(share, dtype))?;
    cx.eval(select(chosen, share, 0.0))
}

/// ONNX `ReduceProd`.
pub static REDUCE_PROD: OpDef = OpDef {
    fold: |cx, ty| fold_reduce(cx, ty, Some(Dim::ONE), Dim::mul),
    memory: product_memory,
    ..reduction(
        "ReduceProd",
        18,
        OpClass::Other,
        &["aten.prod"],
        Grad::First(grad_product),
    )
};

/// The kernel squares into a buffer and sums it.
pub static REDUCE_SUM_SQUARE: OpDef = OpDef {
    infer: infer_reduce_of_function,
    memory: one_buffer,
    ..reduction(
        "ReduceSumSquare",
        18,
        OpClass::SumReduction,
        &[],
        Grad::First(|cx| {
            let two = cx.number(cx.operand(0), 2.0);
            let dy = with_kept_axes(cx, cx.dy0())?;
            cx.eval(cx.operand(0) * (dy * two))
        }),
    )
};

/// A buffer of the operand's size, dense.
fn one_buffer(cx: &MemoryCx) -> Footprint {
    fresh(cx).with_temp(cx.bytes(0))
}

/// `aten::linalg_vector_norm` of order 1.
pub static REDUCE_L1: OpDef = OpDef {
    infer: infer_reduce_of_function,
    ..reduction(
        "ReduceL1",
        18,
        OpClass::Other,
        &["aten.linalg_vector_norm"],
        Grad::First(|cx| {
            let dy = with_kept_axes(cx, cx.dy0())?;
            cx.eval(unary_op(SIGN, cx.operand(0)) * dy)
        }),
    )
};

/// `aten::linalg_vector_norm` of order 2. The gradient at 0 is taken as 0, as PyTorch takes it.
pub static REDUCE_L2: OpDef = OpDef {
    infer: infer_reduce_of_function,
    ..reduction(
        "ReduceL2",
        18,
        OpClass::SumReduction,
        &["aten.linalg_vector_norm"],
        Grad::First(|cx| {
            let dy = with_kept_axes(cx, cx.dy0())?;
            let y = with_kept_axes(cx, cx.y(0))?;
            let zero = cx.number(y, 0.0);
            let ratio = cx.bind(dy / y)?;
            let slope = select(binary_op(EQUAL, y, zero), zero, ratio);
            cx.eval(cx.operand(0) * slope)
        }),
    )
};

/// `aten::logsumexp`, which takes the exponentials into a buffer beside one of the result's size.
pub static REDUCE_LOG_SUM_EXP: OpDef = OpDef {
    infer: |cx| {
        cx.want_dtype(0, DType::is_float, "a floating-point type")?;
        infer_reduce_of_function(cx)
    },
    memory: |cx| {
        // 16-bit sums pass through one more.
        let is_wide = cx.outs[0].dtype.size_bytes() == 2 && cx.device == DeviceKind::Cpu;
        let sums = 1 + u64::from(is_wide);
        fresh(cx).with_temp(cx.bytes(0) + sums * cx.outs[0].bytes())
    },
    ..reduction(
        "ReduceLogSumExp",
        18,
        OpClass::Other,
        &["aten.logsumexp"],
        Grad::First(|cx| {
            let dy = with_kept_axes(cx, cx.dy0())?;
            let y = with_kept_axes(cx, cx.y(0))?;
            cx.eval(unary_op(EXP, cx.operand(0) - y) * dy)
        }),
    )
};

/// The gradient of each factor is the product of all others: the whole product over the factor. If one factor is 0, its
/// gradient is the product of the rest, and all others are 0. If several are 0, all gradients are 0.
fn grad_product(cx: &mut GradCx) -> Result<ValueId> {
    let (x, axes) = (cx.operand(0), known_axes(cx)?);
    let dy = with_kept_axes(cx, cx.dy0())?;
    let [zero, one] = [0.0, 1.0].map(|n| cx.number(x, n));
    let is_zero = cx.bind(binary_op(EQUAL, x, zero))?;
    let rest = cx.bind(select(is_zero, one, x))?;
    let product = reduce_axes(cx.b, &REDUCE_PROD, rest, &axes, true)?;
    let each = cx.bind(dy * product / rest)?;
    // Counted in int64: exact for groups of any size.
    let zeros = Term(sum_kept(cx.b, cast(is_zero, DType::I64), &axes)?);
    let [none, single] = [0, 1].map(|n| cx.b.int(n));
    let none = cx.bind(binary_op(EQUAL, zeros, none))?;
    let single = binary_op(EQUAL, zeros, single);
    let reached = select(is_zero, single, none);
    cx.eval(select(reached, each, zero))
}

/// `aten::prod` takes one axis at a time, from the last to the first; the last step writes into the result.
fn product_memory(cx: &MemoryCx) -> Footprint {
    let Some(x) = &cx.ins[0] else {
        return fresh(cx);
    };
    let rank = x.dims.len() as i64;
    let mut axes: Vec<i64> = match cx.ins.get(1) {
        Some(Some(axes)) => axes.ints.clone().unwrap_or_default(),
        _ => Vec::new(),
    };
    axes.iter_mut().for_each(|a| *a = a.rem_euclid(rank.max(1)));
    if axes.is_empty() && cx.attrs.int("noop_with_empty_axes") == 0 {
        axes = (0..rank).collect();
    }
    axes.sort_unstable();
    let (mut dims, mut before, mut temp_bytes) = (x.dims.clone(), 0, 0);
    for axis in axes.iter().skip(1).rev() {
        dims[*axis as usize] = 1;
        let partial = Sized::contiguous(x.dtype, dims.clone()).bytes();
        temp_bytes = temp_bytes.max(before + partial);
        before = partial;
    }
    fresh(cx).with_temp(temp_bytes)
}
