//! Sums and slices over the ranks of a group: processes that run one graph on different rows of a batch.
//!
//! A tensor of n elements has one slice for each of N ranks: the next ⌈n/N⌉ elements in row-major order, and at the end of
//! the tensor fewer or none. A slice as a value of its own has ⌈n/N⌉ elements on every rank, zeros at its end, so that all
//! ranks run a graph of the same types.
//!
//! Each element is summed on one rank, in the order of ranks, in float32 or wider, and rounded once. So the sum has the
//! same bits on all ranks, whether it is whole or in slices, and they are those of gradients that one process adds up. 16-bit
//! operands are rounded before that.
//!
//! All ranks run the same collectives in the same order. They are never recomputed, moved or left out.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Body, Domain, Effect, Grad, InferCx, MemoryCx, OpClass, OpDef, Sized, fresh,
};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Ty};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[&ALL_REDUCE, &REDUCE_SCATTER, &GATHER_SLICES, &OWN_SLICE];

/// The group of ranks that train on different examples.
pub const DATA_PARALLEL: &str = "dp";

/// Attribute: the name of the group.
pub const GROUP: &str = "group";
/// Attribute: the number of ranks in it.
pub const RANKS: &str = "ranks";

/// Returns the attributes of a collective.
pub fn of_group(group: &str, ranks: u32) -> Attrs {
    Attrs::new()
        .with(GROUP, group)
        .with(RANKS, i64::from(ranks))
}

/// Returns the number of elements of a slice, for a tensor of `elements`.
pub fn slice_size(elements: i64, ranks: i64) -> i64 {
    let ranks = ranks.max(1);
    elements / ranks + i64::from(elements % ranks > 0)
}

/// Returns the first element of a rank's slice and how many elements of the tensor it has.
pub fn slice_of(elements: i64, ranks: i64, rank: i64) -> (i64, i64) {
    let size = slice_size(elements, ranks);
    let from = rank.saturating_mul(size).min(elements);
    (from, size.min(elements - from))
}

const ATTRS: &[AttrSpec] = &[AttrSpec::str(GROUP, DATA_PARALLEL), AttrSpec::int(RANKS, 1)];

const fn row(name: &'static str, class: OpClass, effect: Effect) -> OpDef {
    OpDef {
        attrs: ATTRS,
        effect,
        grad: Grad::Missing("ranks are added after differentiation"),
        body: Body::None("standard ops know one process only"),
        ..standard(name, Domain::Ckpt, class, BatchAxes::Mixed)
    }
}

/// The sum of the ranks' tensors, on all ranks.
pub static ALL_REDUCE: OpDef = OpDef {
    ins: slots!["x"],
    outs: slots!["sum"],
    infer: |cx| {
        checked(cx)?;
        Ok(vec![cx.ty(0)?.clone()])
    },
    cost: |cx| cx.per_largest_operand(1),
    memory: |cx| {
        let temp = match cx.attrs.int(RANKS) {
            ..=1 => 0,
            _ => strided_bytes(cx, &[0]) + exchange_bytes(cx),
        };
        fresh(cx).with_temp(temp).in_place_operands(cx, &[0])
    },
    ..row("AllReduce", OpClass::Other, Effect::Collective)
};

/// The rank's own slice of the sum.
pub static REDUCE_SCATTER: OpDef = OpDef {
    ins: slots!["x"],
    outs: slots!["slice"],
    infer: |cx| {
        checked(cx)?;
        own_slice_type(cx)
    },
    cost: |cx| cx.per_largest_operand(1),
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0]) + exchange_bytes(cx)),
    ..row("ReduceScatter", OpClass::Other, Effect::Collective)
};

/// The rank's own slice of a tensor that all ranks have.
pub static OWN_SLICE: OpDef = OpDef {
    ins: slots!["x"],
    outs: slots!["slice"],
    infer: own_slice_type,
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0])),
    ..row("OwnSlice", OpClass::Other, Effect::Pure)
};

/// A tensor after its slices were updated, each on its rank: the slices of all ranks, rounded to its type and in its shape.
pub static GATHER_SLICES: OpDef = OpDef {
    ins: slots!["parameter", "slice"],
    outs: slots!["updated"],
    infer: |cx| {
        checked(cx)?;
        let (tensor, slice) = (cx.ty(0)?, cx.ty(1)?);
        let expected = slice_type(cx, tensor)?;
        let is_alike =
            slice.dtype.is_float() && compute_type(slice.dtype) == compute_type(expected.dtype);
        let fits = is_alike && may_be_same(&slice.dims, &expected.dims);
        match fits {
            true => Ok(vec![tensor.clone()]),
            false => Err(cx
                .fail("type", "`slice` is not the slice of a rank")
                .expected(expected.to_string())
                .found(slice.to_string())),
        }
    },
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row("GatherSlices", OpClass::Update, Effect::Collective)
};

/// Checks the number of ranks and that the operand can be summed.
fn checked(cx: &InferCx) -> Result<()> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    let ranks = cx.attrs.int(RANKS);
    match (1..=i64::from(u16::MAX)).contains(&ranks) {
        true => Ok(()),
        false => Err(cx
            .fail("attribute", "there is no such number of ranks")
            .expected(format!("1 to {}", u16::MAX))
            .found(ranks.to_string())),
    }
}

fn slice_type(cx: &InferCx, of: &Ty) -> Result<Ty> {
    let ranks = Dim::from(cx.attrs.int(RANKS).max(1));
    Ok(Ty::new(of.dtype, [of.elements().ceil_div(&ranks)]))
}

fn own_slice_type(cx: &InferCx) -> Result<Vec<Ty>> {
    Ok(vec![slice_type(cx, cx.ty(0)?)?])
}

/// Bytes of the slices that a rank receives, and, for a 16-bit type, of two slices in float32: their sum and the next one.
fn exchange_bytes(cx: &MemoryCx) -> u64 {
    let ranks = cx.attrs.int(RANKS).max(1);
    let Some(x) = cx.operand(0).filter(|_| ranks > 1) else {
        return 0;
    };
    received_elements(x, ranks) * x.dtype.size_bytes() + sum_bytes(x, ranks)
}

fn received_elements(x: &Sized, ranks: i64) -> u64 {
    (slice_size(x.elements() as i64, ranks) * ranks) as u64
}

fn sum_bytes(x: &Sized, ranks: i64) -> u64 {
    let wide = compute_type(x.dtype);
    match wide == x.dtype {
        true => 0,
        false => 2 * slice_size(x.elements() as i64, ranks) as u64 * wide.size_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_a_tensor_once() {
        for elements in 0..40 {
            for ranks in 1..9 {
                let mut next = 0;
                for rank in 0..ranks {
                    let (from, len) = slice_of(elements, ranks, rank);
                    assert!(from == next && len <= slice_size(elements, ranks));
                    next += len;
                }
                assert_eq!(next, elements);
            }
        }
    }
}
