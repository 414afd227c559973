//! Reading by index: `Gather`, `GatherElements`, `GatherND`, `NonZero`, and `GatherGrad`, the adjoint of `Gather`.
//!
//! Indices may be negative and then count from the end. libtorch's kernels do not all take those, so every kernel here
//! works on a row-major int64 copy of the indices, made non-negative: the temporary that the `memory` rules declare.

pub mod tuples;

use super::names::*;
use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::layout::{count, view_strides};
use ckpt_ir::op::{
    BatchAxes, BodyCx, DataSizes, DeviceKind, Footprint, Grad, Indices, InferCx, MemoryCx, OpClass,
    OpDef, Place, Sized, Slot, fresh, moves,
};
use ckpt_ir::typing::MAX_KNOWN_ELEMENTS;
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Same, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &GATHER,
    &GATHER_ELEMENTS,
    &GATHER_ND,
    &GATHER_GRAD,
    &NON_ZERO,
];

const AXIS_0: AttrSpec = AttrSpec::int("axis", 0);

/// Bytes of one int64 an element: normalised indices.
pub fn index_bytes(indices: &Sized) -> u64 {
    indices.elements() * DType::I64.size_bytes()
}

/// Bytes of a contiguous copy of `x` as `dims`; 0 where a view does.
pub fn copy_bytes(x: &Sized, dims: &[i64]) -> u64 {
    match view_strides(&x.dims, &x.strides, dims) {
        Some(_) => 0,
        None => x.bytes(),
    }
}

/// Results are new; besides them the kernel takes `temp_bytes`.
pub fn with_temp(cx: &MemoryCx, temp_bytes: u64) -> Footprint {
    Footprint {
        outs: vec![Place::Fresh; cx.outs.len()],
        temp_bytes,
        in_place_operands: Vec::new(),
    }
}

/// Bytes of the float32 copy of a result that libtorch makes on a CPU to gather, scatter or add 16-bit numbers.
pub fn widened_bytes(device: DeviceKind, result: &Sized) -> u64 {
    match (device, result.dtype) {
        (DeviceKind::Cpu, DType::F16 | DType::BF16) => 4 * result.elements(),
        _ => 0,
    }
}

/// Temporary bytes of `aten::_index_put_impl_` on a CUDA device for `n` row-major values. Each is written to one of `places`
/// places, and libtorch sorts the values by place. The block size of the sort depends on the device; this one is for compute
/// capability 9.
pub fn sorted_put_bytes(n: i64, places: i64) -> u64 {
    const IN_ONE_BLOCK: u64 = 2304;
    const BLOCK: u64 = 4608;
    const ALIGNMENT: u64 = 256;
    let Some(n) = u64::try_from(n).ok().filter(|n| *n > 0) else {
        return 0;
    };
    // Four int64 lists: the places and the positions of the values, each before and after sorting.
    let own = 4 * n * DType::I64.size_bytes();
    if n <= IN_ONE_BLOCK {
        return own + 1;
    }
    let bits = i64::BITS - (places - 1).max(1).leading_zeros();
    let passes = u64::from(bits.div_ceil(8));
    let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
    let between = match passes {
        1 => 0,
        _ => 2 * aligned(n * DType::I64.size_bytes()),
    };
    let counts = 256 * 8 * passes + 256 * 4 * n.div_ceil(BLOCK);
    own + between + counts + 2 * ALIGNMENT - 1
}

/// Fails unless operand `slot` has an index type.
pub fn want_index(cx: &InferCx, slot: usize) -> Result<()> {
    cx.want_dtype(
        slot,
        |d| matches!(d, DType::I64 | DType::I32),
        "int64 or int32",
    )?;
    Ok(())
}

/// Slices of the data along an axis, in the order of the indices (ONNX Gather-13).
///
/// Temporary: the indices, normalised.
pub static GATHER: OpDef = OpDef {
    aten: &["aten.embedding", "aten.index", "aten.index_select"],
    attrs: &[AXIS_0],
    ins: &[Slot::req("data").weight(), Slot::req("indices")],
    outs: OUTPUT,
    indices: Indices::OfAxis,
    infer: |cx| {
        want_index(cx, 1)?;
        let (x, indices) = (cx.ty(0)?, cx.ty(1)?);
        let axis = cx.axis(cx.attrs.int("axis"), x.rank())?;
        let mut dims = x.dims[..axis].to_vec();
        dims.extend_from_slice(&indices.dims);
        dims.extend_from_slice(&x.dims[axis + 1..]);
        Ok(vec![x.with_dims(dims)])
    },
    fold: fold_gather,
    grad: Grad::First(|cx| {
        let (x, indices) = (cx.x(0), cx.x(1));
        let shape = cx.b.shape(x)?;
        let rank = cx.b.rank(x) as i64;
        let axis = cx.attrs().int("axis");
        let attrs = Attrs::new().with("axis", if axis < 0 { axis + rank } else { axis });
        let mut operands = vec![shape, indices, cx.dy0()];
        operands.extend(cx.so_far[0].take());
        cx.b.emit(&GATHER_GRAD, &operands, attrs)
    }),
    cost: |cx| ckpt_ir::op::Cost {
        flops: 0,
        // Only the rows that are asked for are read.
        bytes: 2 * cx.outs.iter().map(Sized::bytes).sum::<u64>()
            + cx.ins
                .iter()
                .skip(1)
                .flatten()
                .map(Sized::bytes)
                .sum::<u64>(),
    },
    memory: |cx| fresh(cx).with_temp(cx.operand(1).map_or(0, index_bytes)),
    ..mixed("Gather", onnx(1, 13))
};

/// A constant index, from the end if negative, as `0..size`.
fn index_at(index: &Dim, size: i64) -> Option<i64> {
    let at = index.as_const()?;
    let at = if at < 0 { at + size } else { at };
    (0..size).contains(&at).then_some(at)
}

fn fold_gather(cx: &InferCx, types: &[Ty]) -> Option<Vec<Vec<Dim>>> {
    let dims = cx.ty(0).ok()?.static_dims()?;
    let total = types.first()?.elements().as_const()?;
    if total as u64 > MAX_KNOWN_ELEMENTS {
        return None;
    }
    let axis = cx.axis(cx.attrs.int("axis"), dims.len()).ok()?;
    let (data, indices) = (cx.ints(0)?, cx.ints(1)?);
    let outer = count(&dims[..axis]);
    let inner = count(&dims[axis + 1..]);
    let mut result = Vec::new();
    for i in 0..outer {
        for index in indices {
            let from = (i * dims[axis] + index_at(index, dims[axis])?) * inner;
            result.extend_from_slice(data.get(from as usize..(from + inner) as usize)?);
        }
    }
    Some(vec![result])
}

/// One element of the data for every index, along an axis (ONNX GatherElements-13).
///
/// Temporary: the indices, normalised.
pub static GATHER_ELEMENTS: OpDef = OpDef {
    aten: &["aten.gather"],
    attrs: &[AXIS_0],
    ins: &[Slot::req("data").weight(), Slot::req("indices")],
    outs: OUTPUT,
    indices: Indices::OfAxis,
    infer: |cx| {
        want_index(cx, 1)?;
        let (x, indices) = (cx.ty(0)?, cx.ty(1)?);
        cx.axis(cx.attrs.int("axis"), x.rank())?;
        if indices.rank() != x.rank() {
            return Err(cx
                .fail("shape", "data and indices have different numbers of axes")
                .expected(x.to_string())
                .found(indices.to_string()));
        }
        Ok(vec![x.with_dims(indices.dims.clone())])
    },
    grad: Grad::First(|cx| {
        let (x, indices) = (cx.x(0), cx.x(1));
        let zeros = cx.b.filled_like(x, 0.0)?;
        let attrs = Attrs::new()
            .with("axis", cx.attrs().int("axis"))
            .with("reduction", "add");
        cx.b.emit(SCATTER_ELEMENTS, &[zeros, indices, cx.dy0()], attrs)
    }),
    memory: |cx| {
        let indices = cx.operand(1).map_or(0, index_bytes);
        fresh(cx).with_temp(indices + widened_bytes(cx.device, &cx.outs[0]))
    },
    ..standard(
        "GatherElements",
        onnx(11, 13),
        OpClass::Other,
        BatchAxes::AlongAxis,
    )
};

/// Slices of the data at index tuples (ONNX GatherND-13): the last axis of the indices holds the tuple.
///
/// Temporaries: the flat position of every tuple, one component beside it where a tuple has several, and a copy of the
/// data where it cannot be seen as (batch · positions, slice).
pub static GATHER_ND: OpDef = OpDef {
    aten: &["aten.index"],
    attrs: &[AttrSpec::int("batch_dims", 0)],
    ins: &[Slot::req("data").weight(), Slot::req("indices")],
    outs: OUTPUT,
    indices: Indices::Tuples,
    infer: infer_gather_nd,
    grad: Grad::Rule(|cx| {
        let (x, indices) = (cx.x(0), cx.x(1));
        // Tuples of one index are a lookup along the first axis.
        if cx.b.ty(indices).dims.last().and_then(Dim::as_const) == Some(1)
            && cx.attrs().int("batch_dims") == 0
        {
            let last = cx.b.ints(&[-1]);
            let flat = cx.b.op(SQUEEZE, &[indices, last])?;
            let shape = cx.b.shape(x)?;
            let operands = [shape, flat, cx.dy0()];
            let d =
                cx.b.emit(&GATHER_GRAD, &operands, Attrs::new().with("axis", 0))?;
            cx.give(0, d);
            return Ok(());
        }
        tuples::grad_gather_nd(cx)
    }),
    memory: |cx| {
        let (Some(x), Some(indices)) = (cx.operand(0), cx.operand(1)) else {
            return fresh(cx);
        };
        let batch = cx.attrs.int("batch_dims") as usize;
        let temp = tuple_bytes(indices) + copy_bytes(x, &by_position(x, indices, batch));
        fresh(cx).with_temp(temp)
    },
    ..mixed("GatherND", onnx(11, 13))
};

/// Components of an index tuple.
fn tuple_length(indices: &Sized) -> usize {
    indices.dims.last().map_or(0, |k| *k as usize)
}

/// Bytes of the flat position of every index tuple, and of one component while they are summed.
pub fn tuple_bytes(indices: &Sized) -> u64 {
    let tuples = count(&indices.dims[..indices.dims.len().saturating_sub(1)]) as u64;
    let parts = tuple_length(indices).clamp(1, 2) as u64;
    tuples.saturating_mul(parts * DType::I64.size_bytes())
}

/// The shape of data as (every position an index tuple can name, what lies there).
pub fn by_position(x: &Sized, indices: &Sized, batch_dims: usize) -> Vec<i64> {
    let named = (batch_dims + tuple_length(indices)).min(x.dims.len());
    vec![count(&x.dims[..named]), count(&x.dims[named..])]
}

fn infer_gather_nd(cx: &InferCx) -> Result<Vec<Ty>> {
    let (x, indices) = (cx.ty(0)?, cx.ty(1)?);
    cx.want_dtype(1, |d| d == DType::I64, "int64")?;
    let batch = usize::try_from(cx.attrs.int("batch_dims"))
        .ok()
        .filter(|b| *b < x.rank().min(indices.rank()).max(1))
        .ok_or_else(|| cx.fail("attribute", "`batch_dims` is out of range"))?;
    let named = named_axes(cx, indices)?;
    if batch + named > x.rank() {
        return Err(cx
            .fail("shape", "an index has more entries than the data has axes")
            .expected(format!("at most {}", x.rank() - batch))
            .found(named.to_string()));
    }
    for i in 0..batch {
        if x.dims[i].same(&indices.dims[i]) == Same::No {
            return Err(cx
                .fail("shape", format!("batch axis {i} differs"))
                .expected(x.dims[i].to_string())
                .found(indices.dims[i].to_string()));
        }
    }
    let mut dims = indices.dims[..indices.rank() - 1].to_vec();
    dims.extend_from_slice(&x.dims[batch + named..]);
    Ok(vec![x.with_dims(dims)])
}

/// How many axes an index tuple names: the last size of the indices, which has to be a number.
pub fn named_axes(cx: &InferCx, indices: &Ty) -> Result<usize> {
    let last = indices.dims.last().and_then(Dim::as_const);
    last.and_then(|k| usize::try_from(k).ok()).ok_or_else(|| {
        cx.fail(
            "shape",
            "the last size of the indices is not a known number",
        )
    })
}

/// `GatherGrad(shape, indices, dy, sum)`: the gradient of an embedding. Adds every slice of `dy` at its index to `sum`,
/// or to zeros of `shape`. If `sum` is not read again, the kernel changes only the rows that the indices name. So the
/// gradient of a tied table needs no addition over the whole table.
///
/// Temporaries: the indices, normalised, and a copy of `dy` where its index axes cannot be seen as one.
pub static GATHER_GRAD: OpDef = OpDef {
    attrs: &[AXIS_0],
    ins: slots!["shape", "indices", "dy"; "sum"],
    outs: DX,
    infer: infer_gather_grad,
    grad: Grad::Rule(|cx| {
        let (indices, dz, attrs) = (cx.x(1), cx.dy0(), cx.attrs());
        if cx.wants(2) {
            let d = cx.b.emit(&GATHER, &[dz, indices], attrs)?;
            cx.give(2, d);
        }
        if cx.wants(3) {
            cx.give(3, dz);
        }
        Ok(())
    }),
    cost: |cx| match (cx.ins.get(2), cx.ins.get(3)) {
        (Some(Some(dy)), Some(Some(_))) => ckpt_ir::op::Cost {
            flops: dy.elements(),
            bytes: 3 * dy.bytes(),
        },
        _ => moves(cx),
    },
    memory: |cx| {
        let (Some(indices), Some(dy)) = (cx.operand(1), cx.operand(2)) else {
            return fresh(cx);
        };
        let axis = cx.attrs.int("axis") as usize;
        let rows = count(&indices.dims);
        let mut dims = dy.dims[..axis].to_vec();
        dims.push(rows);
        dims.extend_from_slice(&dy.dims[axis + indices.dims.len()..]);
        let beside = match cx.device {
            DeviceKind::Cpu => copy_bytes(dy, &dims),
            DeviceKind::Cuda => {
                let places = count(&cx.outs[0].dims[..=axis]);
                strided_bytes(cx, &[2]) + sorted_put_bytes(rows, places)
            }
        };
        fresh(cx)
            .with_temp(index_bytes(indices) + beside)
            .in_place_operands(cx, &[3])
    },
    ..our_mixed("GatherGrad", gather_grad_body)
};

fn infer_gather_grad(cx: &InferCx) -> Result<Vec<Ty>> {
    want_index(cx, 1)?;
    cx.want_dtype(2, is_number, "a number type")?;
    let rank = int_vector(cx, 0)?
        .ok_or_else(|| cx.fail("shape", "the rank of the result is not known"))?;
    let (indices, dy) = (cx.ty(1)?, cx.ty(2)?);
    let axis = cx.axis(cx.attrs.int("axis"), rank)?;
    if cx.attrs.int("axis") < 0 || dy.rank() + 1 != rank + indices.rank() {
        return Err(cx
            .fail(
                "shape",
                "`dy` is not a result of `Gather` from such a shape",
            )
            .expected(format!("{} axes", rank + indices.rank() - 1))
            .found(dy.to_string()));
    }
    let mut dims = dy.dims[..axis].to_vec();
    dims.push(cx.fresh(0, axis));
    dims.extend_from_slice(&dy.dims[axis + indices.rank()..]);
    if let Some(known) = cx.ints(0) {
        for (i, dim) in dims.iter().enumerate() {
            if i != axis && dim.same(&known[i]) == Same::No {
                return Err(cx
                    .fail("shape", format!("`dy` differs from `shape` along axis {i}"))
                    .expected(known[i].to_string())
                    .found(dim.to_string()));
            }
        }
        dims = known.to_vec();
    }
    let dx = dy.with_dims(dims);
    if let Some(sum) = cx.opt_ty(3)
        && (sum.dtype != dx.dtype || !may_be_same(&sum.dims, &dx.dims))
    {
        return Err(cx
            .fail("shape", "`sum` is no gradient of the same table")
            .expected(dx.to_string())
            .found(sum.to_string()));
    }
    Ok(vec![dx])
}

/// Merges the index axes of `dy` into one and adds every element at its index along it. `ScatterND` would need fewer
/// indices, but that of ONNX Runtime adds from several threads at once and may lose an addition where an index occurs
/// twice (microsoft/onnxruntime#18048, #23396).
fn gather_grad_body(cx: &mut BodyCx) -> Result<Vec<ValueId>> {
    let (shape, indices, dy) = (cx.x(0), cx.x(1), cx.x(2));
    let axis = cx.attrs.int("axis") as usize;
    let index_rank = cx.b.rank(indices);
    let dy_rank = cx.b.rank(dy);
    let rank = dy_rank + 1 - index_rank;
    let base = match cx.opt_x(3) {
        Some(sum) => sum,
        None => {
            let value = cx.b.scalar(cx.ty(dy).dtype, 0.0);
            cx.b.expand(value, shape)?
        }
    };
    let indices = cx.b.cast(indices, DType::I64)?;
    let flat = cx.b.reshape(indices, &[-1])?;
    let count = cx.b.shape(flat)?;
    let sizes = cx.b.shape(dy)?;
    let mut parts = Vec::new();
    for (of, range) in [
        (sizes, 0..axis),
        (count, 0..1),
        (sizes, axis + index_rank..dy_rank),
    ] {
        let at: Vec<i64> = range.map(|i| i as i64).collect();
        if !at.is_empty() {
            let at = cx.b.ints(&at);
            parts.push(cx.b.op(&GATHER, &[of, at])?);
        }
    }
    let target = cx.b.concat(&parts, 0)?;
    let updates = cx.b.reshape_to(dy, target)?;
    let mut column = vec![1; rank];
    column[axis] = -1;
    let column = cx.b.reshape(flat, &column)?;
    let indices = cx.b.expand(column, target)?;
    let attrs = Attrs::new()
        .with("axis", axis as i64)
        .with("reduction", "add");
    let operands = [base, indices, updates];
    Ok(vec![cx.b.emit(SCATTER_ELEMENTS, &operands, attrs)?])
}

/// Indices of the elements that are not zero, one column each (ONNX NonZero-13); how many, only the data decides.
///
/// Temporary: the indices once more, one row each, as libtorch finds them.
pub static NON_ZERO: OpDef = OpDef {
    ins: X,
    outs: Y,
    data_sizes: DataSizes::Elements,
    infer: |cx| {
        let rank = Dim::from(cx.ty(0)?.rank() as i64);
        Ok(vec![Ty::new(DType::I64, [rank, cx.fresh(0, 1)])])
    },
    grad: Grad::Zero("indices do not change with the data"),
    cost: |cx| cx.elementwise(1),
    memory: |cx| fresh(cx).with_temp(cx.outs.iter().map(Sized::bytes).sum()),
    ..mixed("NonZero", onnx(9, 13))
};
