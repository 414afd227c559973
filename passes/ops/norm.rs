//! Normalisation: `LayerNormalization`, `RMSNormalization` and their gradients (ONNX LayerNormalization-17,
//! RMSNormalization-23).
//!
//! Statistics are float32 for 16-bit operands. The gradient of `LayerNormalization` reads the mean and the inverse
//! deviation, of which there is one for each row. Its rule makes the forward node return them. For float64, ONNX has no
//! output type that holds them exactly, so they are recomputed from the operand.

use super::names::*;
use super::reduce::{count_along, reduce_axes};
use super::rule::*;
use super::sum_to::sum_down;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Body, BodyCx, DeviceKind, Footprint, Grad, GradCx, InferCx, MemoryCx, OpClass,
    OpDef, Sized, Slot, fresh,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Dim, Emit, NodeId, Ty, ValueId, same_dims};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&LAYER_NORM, &LAYER_NORM_GRAD, &RMS_NORM, &RMS_NORM_GRAD];

const AXIS: AttrSpec = AttrSpec::int("axis", -1);
const EPSILON: AttrSpec = AttrSpec::float("epsilon", 1e-5);
const STASH_TYPE: AttrSpec = AttrSpec::int("stash_type", 1);
/// Which gradients a gradient row returns, as slots of the forward node, ascending.
const WANTS: AttrSpec = AttrSpec::required("wants", AttrKind::Ints);

/// The first normalised axis; checks what the norms have in common.
fn first_axis(cx: &InferCx, x: usize, scale: usize) -> Result<usize> {
    cx.want_dtype(x, DType::is_float, "a floating-point type")?;
    cx.want_dtype(scale, DType::is_float, "a floating-point type")?;
    if let Some(stash) = cx.attrs.opt_int("stash_type")
        && stash != 1
    {
        return Err(cx
            .fail("attribute", "statistics of this type are not supported")
            .expected("stash_type = 1 (float32)")
            .found(format!("stash_type = {stash}")));
    }
    fits(cx, x, scale)?;
    cx.axis(cx.attrs.int("axis"), cx.ty(x)?.rank())
}

/// The first normalised axis of a node whose types were checked.
fn axis_of(attrs: &Attrs, rank: usize) -> usize {
    let axis = attrs.int("axis");
    (if axis < 0 { axis + rank as i64 } else { axis }) as usize
}

/// Returns the number of rows that are normalised.
fn rows_of(attrs: &Attrs, x: &Sized) -> u64 {
    let outer = &x.dims[..axis_of(attrs, x.dims.len())];
    outer.iter().map(|d| *d as u64).product()
}

/// Fails unless operand `slot` broadcasts to operand `x` without widening it.
fn fits(cx: &InferCx, x: usize, slot: usize) -> Result<()> {
    let (x, scale) = (cx.ty(x)?, cx.ty(slot)?);
    let rank = scale.rank();
    let bad = rank > x.rank()
        || scale
            .dims
            .iter()
            .zip(&x.dims[x.rank() - rank..])
            .any(|(s, d)| {
                !s.is_one() && !may_be_same(std::slice::from_ref(s), std::slice::from_ref(d))
            });
    if bad {
        let name = cx.op.ins[slot].name;
        return Err(cx
            .fail(
                "shape",
                format!("`{name}` does not broadcast to the operand"),
            )
            .expected(x.to_string())
            .found(scale.to_string()));
    }
    Ok(())
}

/// The shape of a row's statistics: the normalised axes are 1.
fn stats_dims(dims: &[Dim], axis: usize) -> Vec<Dim> {
    let mut stats = dims.to_vec();
    stats[axis..].fill(Dim::ONE);
    stats
}

/// `aten::native_layer_norm`.
pub static LAYER_NORM: OpDef = OpDef {
    aten: &["aten.layer_norm", "aten.native_layer_norm"],
    attrs: &[AXIS, EPSILON, STASH_TYPE],
    ins: slots!["X", "Scale"; "B"],
    outs: slots!["Y"; "Mean", "InvStdDev"],
    infer: |cx| {
        let axis = first_axis(cx, 0, 1)?;
        cx.same_dtype(&[0, 1])?;
        if cx.opt_ty(2).is_some() {
            cx.same_dtype(&[0, 2])?;
            fits(cx, 0, 2)?;
        }
        let x = cx.ty(0)?;
        let stats = Ty::new(DType::F32, stats_dims(&x.dims, axis));
        Ok(vec![x.clone(), stats.clone(), stats])
    },
    grad: Grad::Rule(grad_layer_norm),
    cost: |cx| cx.per_largest_operand(8),
    memory: layer_norm_memory,
    ..standard(
        "LayerNormalization",
        onnx(17, 17),
        OpClass::Norm,
        BatchAxes::Mixed,
    )
};

fn grad_layer_norm(cx: &mut GradCx) -> Result<()> {
    if cx.wants(0) {
        give_through_statistics(cx)?;
    }
    let through = cx.dxs[0];
    if let Some(dy) = cx.dy(0) {
        grad_of_normalized(cx, dy)?;
        if let (Some(through), Some(dx)) = (through, cx.dxs[0]) {
            let sum = cx.b.add(dx, through)?;
            cx.give(0, sum);
        }
    } else {
        for slot in 1..3 {
            if cx.wants(slot) {
                let none = cx.b.filled_like(cx.x(slot), 0.0)?;
                cx.give(slot, none);
            }
        }
    }
    Ok(())
}

/// Emits the gradient of the first operand that comes from readers of the statistics. With mean μ and inverse deviation
/// s of rows of n elements: dx = dμ/n − (x − μ)·ds·s³/n.
fn give_through_statistics(cx: &mut GradCx) -> Result<()> {
    if cx.dy(1).is_none() && cx.dy(2).is_none() {
        return Ok(());
    }
    let ty = cx.ty(cx.x(0));
    let dtype = compute_type(ty.dtype);
    let axes: Vec<usize> = (axis_of(&cx.attrs(), ty.rank())..ty.rank()).collect();
    let count = count_along(cx, &axes)?;
    let mut dx = None;
    if let Some(dmean) = cx.dy(1) {
        let share = cx.eval(cast(dmean, dtype) / count)?;
        let shape = cx.b.shape(cx.x(0))?;
        dx = Some(cx.bind(binary_op(EXPAND, share, shape))?);
    }
    if let Some(ds) = cx.dy(2) {
        let ds = cx.bind(cast(ds, dtype))?;
        let s = cx.bind(cast(cx.y(2), dtype))?;
        let share = cx.bind(ds * (s * s * s) / count)?;
        let x = cx.widened(cx.x(0))?;
        let part = cx.bind((x - cast(cx.y(1), dtype)) * share)?;
        dx = Some(match dx {
            Some(so_far) => cx.bind(so_far - part)?,
            None => cx.bind(-part)?,
        });
    }
    if let Some(dx) = dx {
        cx.give_expr(0, cast(dx, ty.dtype))?;
    }
    Ok(())
}

/// Emits the gradients that come from readers of `Y`.
fn grad_of_normalized(cx: &mut GradCx, dy: ValueId) -> Result<()> {
    let (x, scale) = (cx.x(0), cx.x(1));
    // A bias of another shape than the scale (both may broadcast) is summed on its own.
    let bias = cx.opt_x(2).filter(|_| cx.wants(2));
    let fused_bias = bias.filter(|b| same_dims(&cx.b.ty(*b).dims, &cx.b.ty(scale).dims));
    if bias.is_some() && fused_bias.is_none() {
        cx.give_summed(2, dy)?;
    }
    let mut wants: Vec<i64> = (0..2).filter(|i| cx.wants(*i)).map(|i| i as i64).collect();
    if fused_bias.is_some() {
        wants.push(2);
    }
    if wants.is_empty() {
        return Ok(());
    }
    let mut ins = vec![Some(dy), Some(x), Some(scale)];
    if cx.ty(x).dtype != DType::F64 {
        let (mean, inv_std) = statistics(cx.b, cx.node);
        ins.extend([Some(mean), Some(inv_std)]);
    }
    give_wanted(cx, &LAYER_NORM_GRAD, ins, wants)
}

/// Emits a gradient row for the operands in `wants`.
fn give_wanted(
    cx: &mut GradCx,
    op: &'static OpDef,
    ins: Vec<Option<ValueId>>,
    wants: Vec<i64>,
) -> Result<()> {
    let own = cx.attrs();
    let attrs = Attrs::new()
        .with("axis", own.int("axis"))
        .with("epsilon", own.float("epsilon"))
        .with("wants", wants.clone());
    let gradients = cx.b.emit_n(op, ins, attrs, wants.len())?;
    for (slot, gradient) in wants.into_iter().zip(gradients) {
        cx.give(slot as usize, gradient);
    }
    Ok(())
}

/// Returns `Mean` and `InvStdDev` of a [`LAYER_NORM`] node, and adds them to its results if they are missing.
pub fn statistics(b: &mut dyn Emit, node: NodeId) -> (ValueId, ValueId) {
    let n = b.node(node);
    let (x, y) = (n.ins[0], n.outs[0]);
    let ty = b.ty(x.unwrap_or(y));
    let axis = axis_of(n.attrs, ty.rank());
    let ty = Ty::new(DType::F32, stats_dims(&ty.dims, axis));
    let base = b.name(y).to_string();
    for (slot, suffix) in [(1, "mean"), (2, "inv_std")] {
        if b.node(node).outs.len() <= slot {
            b.add_result(node, &format!("{base}.{suffix}"), ty.clone());
        }
    }
    let outs = b.node(node).outs;
    (outs[1], outs[2])
}

/// Gradients of [`LAYER_NORM`] for the operands in `wants` (0 X, 1 Scale, 2 B of the shape of Scale), in that order;
/// `aten::native_layer_norm_backward`. Without `mean` and `inv_std`, both are computed from `x` (`aten::var_mean`).
pub static LAYER_NORM_GRAD: OpDef = OpDef {
    attrs: &[AXIS, EPSILON, WANTS],
    ins: slots!["dy", "x", "scale"; "mean", "inv_std"],
    outs: &[Slot::var("gradients")],
    infer: |cx| {
        let axis = first_axis(cx, 1, 2)?;
        if let Some(mean) = cx.opt_ty(3) {
            let stats = stats_dims(&cx.ty(1)?.dims, axis);
            if !may_be_same(&mean.dims, &stats) || !may_be_same(&cx.ty(4)?.dims, &stats) {
                return Err(cx.fail("shape", "the statistics do not fit `x`"));
            }
        }
        infer_norm_grad(cx, 3)
    },
    grad: Grad::Body,
    cost: |cx| cx.per_largest_operand(14),
    memory: layer_norm_grad_memory,
    ..our_mixed("LayerNormGrad", layer_norm_grad_body)
};

/// Types of the wanted gradients; operands are dy, x, scale.
fn infer_norm_grad(cx: &InferCx, slots: i64) -> Result<Vec<Ty>> {
    let (dy, x, scale) = (cx.ty(0)?, cx.ty(1)?, cx.ty(2)?);
    if !may_be_same(&dy.dims, &x.dims) {
        return Err(cx.fail("shape", "`dy` and `x` have different shapes"));
    }
    let wants = cx.attrs.ints("wants");
    if wants.windows(2).any(|w| w[0] >= w[1]) || wants.iter().any(|w| !(0..slots).contains(w)) {
        return Err(cx
            .fail(
                "attribute",
                "`wants` does not list operands in ascending order",
            )
            .found(format!("{wants:?}")));
    }
    let types = wants.iter().map(|w| if *w == 0 { x } else { scale });
    Ok(types.cloned().collect())
}

/// Whether the scale is exactly one row, which is what `aten`'s kernels take.
pub fn scale_is_row(attrs: &Attrs, x: &[i64], scale: &[i64]) -> bool {
    x.get(axis_of(attrs, x.len())..) == Some(scale)
}

/// 16-bit operands: scale and bias in float32, since the kernel of a CPU takes statistics and parameters of one type. Where
/// the scale is not one row, the kernel normalises first (on a CPU 16-bit operands with a scale of ones) and then scales in
/// its result. It always makes both statistics, in the type computed in; those that are not results are temporary.
fn layer_norm_memory(cx: &MemoryCx) -> Footprint {
    let (Some(x), Some(scale)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    let narrow = converts_parameters(cx.device, x);
    let bias = cx.operand(2);
    let row = x.dims.get(axis_of(cx.attrs, x.dims.len())..).unwrap_or(&[]);
    let fused = scale_is_row(cx.attrs, &x.dims, &scale.dims) && bias.is_none_or(|b| b.dims == row);
    let parameters = match (fused, narrow) {
        (true, true) => 4 * (cx.elements(1) + cx.elements(2)),
        (true, false) => strided_bytes(cx, &[1, 2]),
        (false, true) => 4 * row.iter().product::<i64>() as u64,
        (false, false) => 0,
    };
    let wide = compute_type(x.dtype).size_bytes();
    let given = cx.outs.len().min(3) as u64 - 1;
    let temporary = if wide == 4 { 2 - given } else { 2 };
    fresh(cx)
        .with_temp(strided_bytes(cx, &[0]) + parameters + temporary * rows_of(cx.attrs, x) * wide)
}

/// Returns whether libtorch's kernels take parameters of 16-bit operands in float32.
fn converts_parameters(device: DeviceKind, x: &Sized) -> bool {
    device == DeviceKind::Cpu && x.dtype.size_bytes() == 2
}

/// The most rows for which libtorch's kernel sums the gradients of scale and bias on a CUDA device. For more it may keep sums
/// of some rows in the operands' type.
const MOST_SUMMED_ROWS: i64 = 1 << 16;

/// Returns whether one call of libtorch computes all gradients of [`LAYER_NORM`]. `fused` says that the scale is one row. On
/// a CPU the memory of its sums depends on the number of threads.
pub fn sums_by_library(device: DeviceKind, fused: bool, rows: i64) -> bool {
    device == DeviceKind::Cuda && fused && rows <= MOST_SUMMED_ROWS
}

/// The most elements of a block of rows in which [`LAYER_NORM_GRAD`] sums its terms on a CPU.
const BLOCK_ELEMENTS: i64 = 1 << 16;

/// Rows that [`LAYER_NORM_GRAD`] sums at once, of `rows` rows of `width` elements.
pub fn rows_at_once(device: DeviceKind, rows: i64, width: i64) -> i64 {
    device.rows_at_once(BLOCK_ELEMENTS, rows, width)
}

/// As the forward, whose result is made again where the statistics are not given. Gradients of scale and bias are
/// summed over blocks of rows. Where the scale is not one row all is done in the type computed in, with one buffer of
/// the operand's size.
fn layer_norm_grad_memory(cx: &MemoryCx) -> Footprint {
    let (Some(x), Some(scale)) = (&cx.ins[1], &cx.ins[2]) else {
        return fresh(cx);
    };
    if x.elements() == 0 {
        return fresh(cx);
    }
    let wide = compute_type(x.dtype).size_bytes();
    let narrow = x.dtype.size_bytes() == 2;
    let fused = scale_is_row(cx.attrs, &x.dims, &scale.dims);
    let all = x.elements() * wide;
    let operands = match (fused, narrow) {
        (false, true) => 2 * all,
        _ => strided_bytes(cx, &[0, 1]),
    };
    let weight = match narrow && !(fused && cx.device == DeviceKind::Cuda) {
        true => scale.elements() * wide,
        false => strided_bytes(cx, &[2]),
    };
    let rows = rows_of(cx.attrs, x);
    let given = cx.operand(3);
    let stats = match given {
        Some(mean) if mean.dtype.size_bytes() == wide => strided_bytes(cx, &[3, 4]),
        _ => 2 * rows * wide,
    };
    let base = operands + weight + stats;
    let mut most = match given {
        Some(_) => base,
        None => base + if fused { x.bytes() } else { all },
    };
    let width = x.elements() / rows.max(1);
    let at_once = rows_at_once(cx.device, rows as i64, width as i64) as u64;
    let block = at_once * width * wide;
    // A sum in the type computed in, and one for the block beside the total.
    let total = if narrow { scale.elements() * wide } else { 0 };
    let sums = total + if at_once < rows { width * wide } else { 0 };
    let by_library = sums_by_library(cx.device, fused, rows as i64);
    let mut results = 0;
    for (want, out) in cx.attrs.ints("wants").iter().zip(cx.outs) {
        let buffers = match (want, fused) {
            _ if by_library => 0,
            (0, true) => 0,
            (0, false) => all + if narrow { all } else { 0 },
            (1, true) => block + sums + if narrow { block } else { 0 },
            (_, true) => sums + if narrow { block } else { 0 },
            (1, false) => all + total,
            (_, false) => total,
        };
        results += out.bytes();
        most = most.max(base + buffers + results);
    }
    fresh(cx).with_temp(most.saturating_sub(results))
}

/// With x̂ = (x − μ)·s and g = dy·scale: dx = s·(g − mean(g) − x̂·mean(g·x̂)), dscale = Σ dy·x̂, dB = Σ dy
/// (Ba, Kiros and Hinton 2016, arXiv 1607.06450).
fn layer_norm_grad_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let [dy, x] = wide(cx)?;
    let axes = normalized_axes(cx, 1);
    let (mean, inv_std) = match (cx.opt_x(3), cx.opt_x(4)) {
        (Some(mean), Some(inv_std)) => (mean, inv_std),
        _ => {
            let mean = reduce_axes(cx.b, REDUCE_MEAN, x, &axes, true)?;
            let centred = cx.bind(x - mean)?;
            let variance = reduce_axes(cx.b, REDUCE_MEAN, centred * centred, &axes, true)?;
            (mean, inverse_root(cx, variance)?.0)
        }
    };
    let dtype = cx.ty(x.0).dtype;
    let mean = cx.bind(cast(mean, dtype))?;
    let inv_std = cx.bind(cast(inv_std, dtype))?;
    let normal = cx.bind((x - mean) * inv_std)?;
    norm_gradients(cx, dy, normal, inv_std, &axes, true)
}

fn normalized_axes(cx: &BodyCx, slot: usize) -> Vec<usize> {
    let rank = cx.ty(cx.x(slot)).rank();
    (axis_of(cx.attrs, rank)..rank).collect()
}

/// 1/√(v + epsilon).
fn inverse_root(cx: &mut BodyCx, v: ValueId) -> Result<Term> {
    let epsilon = f64::from(cx.attrs.float("epsilon"));
    let root = unary_op(SQRT, Term(v) + epsilon);
    cx.bind(unary_op(RECIPROCAL, root))
}

/// The wanted gradients, given the normalised operand and the factor it was scaled by.
fn norm_gradients(
    cx: &mut BodyCx,
    dy: Term,
    normal: Term,
    factor: Term,
    axes: &[usize],
    centred: bool,
) -> Result<Vec<ValueId>> {
    let scale = cx.x(2);
    let dtype = cx.ty(normal.0).dtype;
    let mut gradients = Vec::new();
    for want in cx.attrs.ints("wants") {
        let (wide, like) = match *want {
            0 => {
                let g = cx.bind(dy * cast(scale, dtype))?;
                let along = reduce_axes(cx.b, REDUCE_MEAN, g * normal, axes, true)?;
                let mut rest = cx.bind(g - normal * along)?;
                if centred {
                    let mean = reduce_axes(cx.b, REDUCE_MEAN, g, axes, true)?;
                    rest = cx.bind(rest - mean)?;
                }
                (cx.eval(rest * factor)?, cx.x(1))
            }
            1 => {
                let product = cx.eval(dy * normal)?;
                (sum_to_scale(cx, product)?, scale)
            }
            _ => (sum_to_scale(cx, dy.0)?, scale),
        };
        let narrow = cx.ty(like).dtype;
        gradients.push(cx.b.cast(wide, narrow)?);
    }
    Ok(gradients)
}

fn sum_to_scale(cx: &mut BodyCx, v: ValueId) -> Result<ValueId> {
    let scale = cx.x(2);
    let dims = cx.ty(scale).dims;
    sum_down(cx.b, v, &dims, |b| b.shape(scale))
}

/// The scale decides the element type of the result. One buffer of the operand's size in the type computed in, unless
/// that is the result's type (the kernel then squares in its result), and one factor a row.
pub static RMS_NORM: OpDef = OpDef {
    aten: &["aten.rms_norm"],
    attrs: &[AXIS, EPSILON, STASH_TYPE],
    ins: slots!["X", "scale"],
    outs: Y,
    infer: |cx| {
        first_axis(cx, 0, 1)?;
        let dtype = cx.ty(1)?.dtype;
        Ok(vec![cx.ty(0)?.with_dtype(dtype)])
    },
    grad: Grad::Rule(|cx| {
        let wants: Vec<i64> = (0..2).filter(|i| cx.wants(*i)).map(|i| i as i64).collect();
        let ins = vec![Some(cx.dy0()), Some(cx.x(0)), Some(cx.x(1))];
        give_wanted(cx, &RMS_NORM_GRAD, ins, wants)
    }),
    cost: |cx| cx.per_largest_operand(5),
    memory: rms_memory,
    scalar: |cx| {
        let factor = rms_factor(cx, 0)?;
        Some(vec![scalar::x(0) * factor * scalar::x(1)])
    },
    // For files of an opset that lacks it.
    body: Body::Function(|cx| {
        let (x, scale) = (cx.x(0), cx.x(1));
        let dtype = widest(cx, &[x, scale]);
        let axes = normalized_axes(cx, 0);
        let (normal, _) = rms_normal(cx, x, dtype, &axes)?;
        let y = cx.eval(normal * cast(scale, dtype))?;
        let narrow = cx.ty(scale).dtype;
        Ok(vec![cx.b.cast(y, narrow)?])
    }),
    ..standard(
        "RMSNormalization",
        onnx(23, 23),
        OpClass::Norm,
        BatchAxes::Mixed,
    )
};

/// Gradients of [`RMS_NORM`] for the operands in `wants` (0 X, 1 scale), in that order. PyTorch has no such kernel on
/// the CPU; ours works on blocks of rows, and takes one buffer of a block beside its results, or two for 16-bit operands.
pub static RMS_NORM_GRAD: OpDef = OpDef {
    attrs: &[AXIS, EPSILON, WANTS],
    ins: slots!["dy", "x", "scale"],
    outs: &[Slot::var("gradients")],
    infer: |cx| {
        first_axis(cx, 1, 2)?;
        infer_norm_grad(cx, 2)
    },
    grad: Grad::Body,
    cost: |cx| cx.per_largest_operand(12),
    memory: rms_grad_memory,
    scalar: |cx| {
        let (factor, g) = (rms_factor(cx, 1)?, scalar::x(0) * scalar::x(2));
        let normal = scalar::x(1) * factor.clone();
        let along = (normal.clone() * g.clone()).row_mean();
        let dx = (g - normal.clone() * along) * factor;
        let dscale = scalar::Expr::SumToResult(Box::new(scalar::x(0) * normal));
        match cx.attrs.ints("wants") {
            [0] => Some(vec![dx]),
            [0, 1] => Some(vec![dx, dscale]),
            _ => None,
        }
    },
    ..our_mixed("RMSNormGrad", |cx| {
        let (dy, x, scale) = (cx.x(0), cx.x(1), cx.x(2));
        let dtype = widest(cx, &[dy, x, scale]);
        let dy = cx.bind(cast(dy, dtype))?;
        let axes = normalized_axes(cx, 1);
        let (normal, factor) = rms_normal(cx, x, dtype, &axes)?;
        norm_gradients(cx, dy, normal, factor, &axes, false)
    })
};

/// The type that a body computes in: float64 for such an operand.
fn widest(cx: &BodyCx, operands: &[ValueId]) -> DType {
    match operands.iter().any(|v| cx.ty(*v).dtype == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    }
}

/// Emits x/√(mean x² + ε), and the factor of each row in it.
fn rms_normal(cx: &mut BodyCx, x: ValueId, dtype: DType, axes: &[usize]) -> Result<(Term, Term)> {
    let x = cx.bind(cast(x, dtype))?;
    let mean = reduce_axes(cx.b, REDUCE_MEAN, x * x, axes, true)?;
    let factor = inverse_root(cx, mean)?;
    Ok((cx.bind(x * factor)?, factor))
}

/// 1/√(mean x² + ε), for rows along the last axis.
fn rms_factor(cx: &scalar::ScalarCx, slot: usize) -> Option<scalar::Expr> {
    let epsilon = scalar::number(cx.attrs.float("epsilon").into());
    let mean = (scalar::x(slot) * scalar::x(slot)).row_mean();
    let factor = scalar::library("rsqrt", mean + epsilon);
    cx.is_last_axis(slot).then_some(factor)
}

/// The type computed in.
fn rms_type(x: &Sized, scale: &Sized) -> DType {
    match x.dtype == DType::F64 || scale.dtype == DType::F64 {
        true => DType::F64,
        false => DType::F32,
    }
}

/// The most elements of a block of rows in [`RMS_NORM`] and [`RMS_NORM_GRAD`] on a CPU. It is enough work for many threads.
const RMS_BLOCK_ELEMENTS: i64 = 1 << 20;

/// Returns the rows of a block for which [`RMS_NORM`] and [`RMS_NORM_GRAD`] make buffers. The block has all rows if the scale is
/// not one row or an operand is not row-major.
pub fn rms_rows_at_once(
    device: DeviceKind,
    attrs: &Attrs,
    x: &[i64],
    scale: &[i64],
    is_row_major: bool,
) -> i64 {
    let (outer, row) = x.split_at(axis_of(attrs, x.len()));
    let rows = outer.iter().product();
    match is_row_major && scale_is_row(attrs, x, scale) {
        true => device.rows_at_once(RMS_BLOCK_ELEMENTS, rows, row.iter().product()),
        false => rows,
    }
}

/// One number for each row. If the scale has another type than is computed in, the rows are those of a block, which needs a buffer, and
/// the scale is converted.
fn rms_memory(cx: &MemoryCx) -> Footprint {
    let (Some(x), Some(scale)) = (&cx.ins[0], &cx.ins[1]) else {
        return fresh(cx);
    };
    let (wide, rows) = (rms_type(x, scale), rows_of(cx.attrs, x));
    let buffer = match scale.dtype == wide {
        true => rows,
        false => {
            let row_major = x.is_contiguous();
            let at_once =
                rms_rows_at_once(cx.device, cx.attrs, &x.dims, &scale.dims, row_major) as u64;
            at_once * (x.elements() / rows.max(1) + 1) + scale.elements()
        }
    };
    fresh(cx).with_temp(buffer * wide.size_bytes())
}

/// Two buffers of a block, or one where the gradient of x serves as the other; one number for each row of the block, or two for the
/// gradient of x; the scale and its gradient, converted; the sum over a block, if there are several.
fn rms_grad_memory(cx: &MemoryCx) -> Footprint {
    let (Some(x), Some(scale)) = (&cx.ins[1], &cx.ins[2]) else {
        return fresh(cx);
    };
    let wide = rms_type(x, scale);
    let wants = cx.attrs.ints("wants");
    let (dx, dscale) = (wants.contains(&0), wants.contains(&1));
    let buffers = if dx && x.dtype == wide { 1 } else { 2 };
    let rows = rows_of(cx.attrs, x);
    let row_major = strided_bytes(cx, &[0, 1]) == 0;
    let at_once = rms_rows_at_once(cx.device, cx.attrs, &x.dims, &scale.dims, row_major) as u64;
    let numbers = if dx { 2 } else { 1 };
    let block = at_once * (buffers * (x.elements() / rows.max(1)) + numbers);
    let is_converted = u64::from(scale.dtype != wide);
    let is_split = u64::from(at_once < rows);
    let scales = u64::from(dx) * is_converted + u64::from(dscale) * (is_converted + is_split);
    fresh(cx).with_temp((block + scales * scale.elements()) * wide.size_bytes())
}
