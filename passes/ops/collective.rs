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
//! All ranks run the same collectives in the same order. They are never recomputed, moved or left out; only [`ALL_GATHER`], which
//! changes nothing, may be repeated.
//!
//! A sum may run beside the nodes after it: a `Start` node begins it, and what it makes is not to be read until `Wait`. Sums that
//! are begun one after the other are exchanged together, once they have `bucket` bytes or one of them is waited for.

use super::rule::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BatchAxes, Body, Domain, Effect, Grad, InferCx, OpClass, OpDef, free, fresh};
use ckpt_ir::{AttrSpec, Attrs, DType, Dim, Graph, Node, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &ALL_REDUCE,
    &REDUCE_SCATTER,
    &START_ALL_REDUCE,
    &START_REDUCE_SCATTER,
    &WAIT,
    &GATHER_SLICES,
    &ALL_GATHER,
    &OWN_SLICE,
];

/// The group of ranks that train on different examples.
pub const DATA_PARALLEL: &str = "dp";

/// Attribute: the name of the group.
pub const GROUP: &str = "group";
/// Attribute: the number of ranks in it.
pub const RANKS: &str = "ranks";
/// Attribute: the bytes of sums that are exchanged together.
pub const BUCKET: &str = "bucket";

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

const OF_GROUP: AttrSpec = AttrSpec::str(GROUP, DATA_PARALLEL);
const OF_RANKS: AttrSpec = AttrSpec::int(RANKS, 1);
const ATTRS: &[AttrSpec] = &[OF_GROUP, OF_RANKS];
const START_ATTRS: &[AttrSpec] = &[OF_GROUP, OF_RANKS, AttrSpec::int(BUCKET, 0)];

const fn row(name: &'static str, class: OpClass, effect: Effect) -> OpDef {
    OpDef {
        attrs: ATTRS,
        effect,
        grad: Grad::Missing("ranks are added after differentiation"),
        body: Body::None("standard ops know one process only"),
        ..standard(name, Domain::Ckpt, class, BatchAxes::Mixed)
    }
}

/// Returns the row of the node that begins what another one does.
const fn row_of(name: &'static str, of: &'static OpDef) -> OpDef {
    OpDef {
        ins: of.ins,
        infer: of.infer,
        cost: of.cost,
        memory: of.memory,
        ..row(name, of.class, Effect::Collective)
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
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row("AllReduce", OpClass::Exchange, Effect::Collective)
};

/// [`ALL_REDUCE`], begun.
pub static START_ALL_REDUCE: OpDef = OpDef {
    attrs: START_ATTRS,
    outs: slots!["pending"],
    ..row_of("StartAllReduce", &ALL_REDUCE)
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
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0])),
    ..row("ReduceScatter", OpClass::Exchange, Effect::Collective)
};

/// [`REDUCE_SCATTER`], begun. The first result is the operand, row-major, which must live as long and is never made again.
pub static START_REDUCE_SCATTER: OpDef = OpDef {
    attrs: START_ATTRS,
    outs: slots!["lent", "pending"],
    infer: |cx| {
        checked(cx)?;
        Ok(vec![cx.ty(0)?.clone(), slice_type(cx, cx.ty(0)?)?])
    },
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row_of("StartReduceScatter", &REDUCE_SCATTER)
};

/// What a `Start` node has begun, done, in the same memory. What it reads lives until here.
pub static WAIT: OpDef = OpDef {
    attrs: &[],
    ins: slots!["pending"; "lent"],
    outs: slots!["result"],
    infer: |cx| Ok(vec![cx.ty(0)?.clone()]),
    cost: free,
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row("Wait", OpClass::Other, Effect::Collective)
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
        let (whole, slice) = (cx.ty(0)?.dtype, cx.ty(1)?.dtype);
        let is_alike = slice.is_float() && compute_type(slice) == compute_type(whole);
        of_slice(cx, is_alike)
    },
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row("GatherSlices", OpClass::Update, Effect::Collective)
};

/// A parameter of which each rank keeps its slice. The first operand gives the type; its contents are read nowhere
/// ([`reads_contents`]). It changes nothing on any rank, so a plan may repeat it.
pub static ALL_GATHER: OpDef = OpDef {
    ins: slots!["parameter", "slice"],
    outs: slots!["whole"],
    infer: |cx| of_slice(cx, cx.ty(1)?.dtype == cx.ty(0)?.dtype),
    cost: |cx| cx.per_largest_operand(1),
    ..row("AllGather", OpClass::Exchange, Effect::Pure)
};

/// Returns true for an op whose time is that of the link between ranks.
pub fn is_exchange(op: &OpDef) -> bool {
    op.class == OpClass::Exchange || op == &GATHER_SLICES
}

/// Returns how many bytes a rank receives from the others in a node, for a tensor of so many bytes: all slices but its own,
/// twice for a sum that all ranks have afterwards.
pub fn received_bytes(node: &Node, whole_bytes: u64) -> u64 {
    if !is_exchange(node.op) {
        return 0;
    }
    let ranks = node.attrs.int(RANKS).unsigned_abs().max(1);
    let is_whole = node.op == &ALL_REDUCE || node.op == &START_ALL_REDUCE;
    (1 + u64::from(is_whole)) * (whole_bytes - whole_bytes / ranks)
}

/// Returns false for a value that nothing reads, or of which a graph reads the type alone.
pub fn reads_contents(graph: &Graph, value: ValueId) -> bool {
    let uses = graph.value(value).uses().iter();
    let mut uses = uses.map(|u| (graph.node(u.node).op, u.slot));
    graph.is_output(value) || uses.any(|(op, slot)| op != &ALL_GATHER || slot > 0)
}

/// Returns true for a weight of which each rank keeps a slice: the graph reads its type alone.
pub fn is_sharded(graph: &Graph, weight: ValueId) -> bool {
    !graph.value(weight).uses().is_empty() && !reads_contents(graph, weight)
}

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

/// Checks that operand 1 has the size of a rank's slice of operand 0, and a type that fits. Returns the type of operand 0.
fn of_slice(cx: &InferCx, is_alike: bool) -> Result<Vec<Ty>> {
    checked(cx)?;
    let (whole, slice) = (cx.ty(0)?, cx.ty(1)?);
    let expected = slice_type(cx, whole)?;
    match is_alike && may_be_same(&slice.dims, &expected.dims) {
        true => Ok(vec![whole.clone()]),
        false => Err(cx
            .fail("type", "`slice` is not the slice of a rank")
            .expected(expected.to_string())
            .found(slice.to_string())),
    }
}

fn own_slice_type(cx: &InferCx) -> Result<Vec<Ty>> {
    Ok(vec![slice_type(cx, cx.ty(0)?)?])
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
