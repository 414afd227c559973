//! Sums, slices and parts over the ranks of a group: processes that run one graph on different rows of a batch, or that have
//! different parts of its layers.
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
//!
//! A part of a tensor ([`Part`]) has some of the indices of one axis, and the same number on every rank. What ranks compute of
//! their parts of a layer is added up by [`ALL_REDUCE`]; what they read alike is [`SHARED`] (Shoeybi et al. 2019, Megatron-LM,
//! arXiv 1909.08053, where the two are called g and f).
//!
//! A model may have collectives of its own. Then each rank has a loss of its own, and what is differentiated is the sum of all
//! losses, as in PyTorch: the gradient of [`ALL_REDUCE`] with [`SHARED`] behind it is a sum over ranks; [`CONCAT_RANKS`] and
//! [`REDUCE_SCATTER`] are each other's gradients.
//!
//! Between such layers, ranks can share rows: indices of the first axes of a tensor together ([`ROW_AXES`]). A rank has the next
//! ⌈n/N⌉ of n rows, and copies of the last row or zeros where it has fewer (Korthikanti et al. 2022, arXiv 2205.05198).

use super::rule::*;
use super::shape::reshape_like;
use ckpt_ir::error::Result;
use ckpt_ir::op::{
    BatchAxes, Body, Domain, Effect, Grad, Indices, InferCx, OpClass, OpDef, free, fresh,
};
use ckpt_ir::{AttrKind, AttrSpec, Attrs, DType, Def, Dim, Graph, Node, NodeId, Ty, ValueId};

/// The rows of this family.
pub const ROWS: &[&OpDef] = &[
    &ALL_REDUCE,
    &REDUCE_SCATTER,
    &START_ALL_REDUCE,
    &START_REDUCE_SCATTER,
    &WAIT,
    &GATHER_SLICES,
    &ALL_GATHER,
    &GATHER_ROWS,
    &OWN_SLICE,
    &OWN_PART,
    &OWN_INDICES,
    &SHARED,
    &KEEP_SLICE,
    &GATHER_KEPT,
    &CONCAT_RANKS,
];

/// The group of ranks that train on different examples.
pub const DATA_PARALLEL: &str = "dp";
/// The group of ranks that have different parts of the layers, and the same examples.
pub const TENSOR_PARALLEL: &str = "tp";

/// Attribute: the name of the group.
pub const GROUP: &str = "group";
/// Attribute: the number of ranks in it. [`ALL_REDUCE`] and [`SHARED`], whose types do not depend on it, may have [`ANY_RANKS`].
pub const RANKS: &str = "ranks";
/// As many ranks as there are.
pub const ANY_RANKS: i64 = 0;
/// Attribute: the bytes of sums that are exchanged together.
pub const BUCKET: &str = "bucket";
/// Attribute: the axis of a [`Part`].
const AXIS: &str = "axis";
/// Attribute of [`OWN_INDICES`]: the size of the axis.
pub const SIZE: &str = "size";
/// Attribute of [`OWN_INDICES`]: the label of what does not count.
pub const IGNORE_INDEX: &str = "ignore_index";
/// Attribute: its pieces.
const PIECES: &str = "pieces";
/// Attribute of [`OWN_SLICE`] and [`REDUCE_SCATTER`]: the number of leading axes that are rows; 0 where a slice is one of
/// elements.
pub const ROW_AXES: &str = "row_axes";
/// Attribute beside it: whether copies of the last row stand for rows that a rank lacks, instead of zeros. Results are computed
/// of the copies as of other rows; their cotangents are zeros.
pub const REPEATS: &str = "repeats";
/// Attribute of [`ALL_GATHER`]: the sizes of what is gathered, where that is a part of the parameter.
pub const DIMS: &str = "dims";

/// Returns the attributes of a collective.
pub fn of_group(group: &str, ranks: impl Into<i64>) -> Attrs {
    Attrs::new().with(GROUP, group).with(RANKS, ranks.into())
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

/// Which part of a tensor each rank has: the axis consists of pieces, and of each of them the next share of indices goes to the
/// next rank. More than one piece is where a layer has, for example, queries, keys and values side by side in one weight. Of a
/// piece that ranks cannot share evenly, the last ranks have fewer indices, and copies of their last one after them: as a weight,
/// zeros could become NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The axis.
    pub axis: usize,
    /// Sizes of the pieces, which together are the whole axis.
    pub pieces: Vec<i64>,
}

impl Part {
    /// Returns a part of an axis that is one piece.
    pub fn of(axis: usize, size: i64) -> Part {
        Part {
            axis,
            pieces: vec![size],
        }
    }

    /// Returns the number of indices of the whole axis.
    pub fn size(&self) -> i64 {
        self.pieces.iter().sum()
    }

    /// Returns true if every rank gets the same number of indices of each piece.
    pub fn is_even(&self, ranks: i64) -> bool {
        self.pieces.iter().all(|n| *n > 0 && n % ranks == 0)
    }

    /// Returns the size of the axis in a rank's part.
    pub fn own_size(&self, ranks: i64) -> i64 {
        self.pieces.iter().map(|n| slice_size(*n, ranks)).sum()
    }

    /// Returns the type of a rank's part of a tensor.
    pub fn ty(&self, whole: &Ty, ranks: i64) -> Ty {
        let mut ty = whole.clone();
        if let Some(dim) = ty.dims.get_mut(self.axis) {
            *dim = Dim::from(self.own_size(ranks));
        }
        ty
    }

    /// Returns the stretches of the whole axis that a rank's part consists of, in order: the first index and their number.
    pub fn stretches(&self, ranks: i64, rank: i64) -> Vec<(i64, i64)> {
        let mut begin = 0;
        let stretch = |piece: &i64| {
            let (from, own) = slice_of(*piece, ranks, rank);
            let stretch = (begin + from, own);
            begin += piece;
            stretch
        };
        self.pieces.iter().map(stretch).collect()
    }

    /// Returns the attributes of [`OWN_PART`].
    pub fn attrs(&self, group: &str, ranks: u32) -> Attrs {
        of_group(group, ranks)
            .with(AXIS, self.axis as i64)
            .with(PIECES, self.pieces.clone())
    }
}

/// A graph input that holds this rank's part of a parameter, or a slice of that part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnPart {
    /// The input.
    pub input: ValueId,
    /// The parameter, of which the graph reads the type alone.
    pub parameter: ValueId,
    /// Which part it is.
    pub part: Part,
    /// The name of the group of ranks that have the others.
    pub group: String,
    /// How many ranks these are.
    pub ranks: i64,
    /// How many ranks each keep a slice of the part; 1 where the input is the part.
    pub slices: i64,
}

impl OwnPart {
    /// Returns the type of the part.
    pub fn ty(&self, graph: &Graph) -> Ty {
        self.part.ty(graph.ty(self.parameter), self.ranks)
    }
}

/// Returns the parts of parameters that a graph takes as inputs, in schedule order.
pub fn own_parts(graph: &Graph) -> Vec<OwnPart> {
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let own = nodes.filter(|node| node.op == &OWN_PART && node.recompute_of.is_none());
    let own = own.filter_map(|node| {
        let (own, parameter) = (node.operand(0)?, node.operand(1)?);
        let is_whole = matches!(graph.value(parameter).def, Def::Init(_));
        let gather = graph.def_node(own).map(|id| graph.node(id));
        let gather = gather.filter(|node| node.op == &ALL_GATHER);
        let (input, slices) = match gather {
            Some(gather) => (gather.operand(1)?, gather.attrs.int(RANKS)),
            None => (own, 1),
        };
        is_whole.then(|| OwnPart {
            input,
            parameter,
            part: part_of(&node.attrs),
            group: node.attrs.str(GROUP).into(),
            ranks: node.attrs.int(RANKS),
            slices,
        })
    });
    own.collect()
}

/// Returns the groups that the nodes of a graph name, each with its number of ranks.
pub fn groups(graph: &Graph) -> Vec<(String, i64)> {
    let nodes = graph.nodes().map(|(_, node)| node);
    let named =
        nodes.filter(|n| ROWS.contains(&n.op) && n.op.attrs.iter().any(|attr| attr.name == GROUP));
    let named = named.map(|n| (n.attrs.str(GROUP).to_string(), n.attrs.int(RANKS)));
    let all: std::collections::BTreeSet<_> = named.collect();
    all.into_iter().collect()
}

/// Returns the number of ranks that share the layers of a graph, if some do.
pub fn tensor_parallel_ranks(graph: &Graph) -> Option<i64> {
    let groups = groups(graph).into_iter();
    let mut shared = groups.filter(|(name, ranks)| name == TENSOR_PARALLEL && *ranks > 1);
    shared.next().map(|(_, ranks)| ranks)
}

/// Returns true for a node that several ranks compute together, each with its part.
pub fn is_of_ranks(node: &Node) -> bool {
    node.attrs.opt_int(RANKS).is_some_and(|ranks| ranks != 1)
}

/// Gives the collectives over [`ANY_RANKS`] of a group a number.
pub fn set_ranks(graph: &mut Graph, group: &str, ranks: i64) {
    let nodes = graph.nodes().filter(|(_, n)| {
        ROWS.contains(&n.op)
            && n.attrs.opt_int(RANKS) == Some(ANY_RANKS)
            && n.attrs.str(GROUP) == group
    });
    for id in nodes.map(|(id, _)| id).collect::<Vec<NodeId>>() {
        graph.set_attr(id, RANKS, ranks);
    }
}

/// Takes out what only differentiation needs: readers of a [`SHARED`] value read its operand.
pub fn drop_shared(graph: &mut Graph) {
    let shared = graph.nodes().filter(|(_, node)| node.op == &SHARED);
    let shared: Vec<NodeId> = shared.map(|(id, _)| id).collect();
    for id in &shared {
        let node = graph.node(*id);
        if let (Some(x), y) = (node.operand(0), node.outs[0]) {
            graph.replace_uses(y, x);
        }
    }
    graph.remove_nodes(&|id| shared.contains(&id));
}

fn part_of(attrs: &Attrs) -> Part {
    Part {
        axis: usize::try_from(attrs.int(AXIS)).unwrap_or(usize::MAX),
        pieces: attrs.ints(PIECES).to_vec(),
    }
}

pub(super) const OF_GROUP: AttrSpec = AttrSpec::str(GROUP, DATA_PARALLEL);
pub(super) const OF_RANKS: AttrSpec = AttrSpec::int(RANKS, 1);
const ATTRS: &[AttrSpec] = &[OF_GROUP, OF_RANKS];
const SLICE_ATTRS: &[AttrSpec] = &[
    OF_GROUP,
    OF_RANKS,
    AttrSpec::int(ROW_AXES, 0),
    AttrSpec::int(REPEATS, 0),
];
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

/// The sum of the ranks' tensors, on all ranks. All ranks use it in the same way, so each has the same cotangent, which is the
/// gradient of its own tensor.
pub static ALL_REDUCE: OpDef = OpDef {
    grad: Grad::First(|cx| Ok(cx.dy0())),
    ins: slots!["x"],
    outs: slots!["sum"],
    infer: same_type_of_any,
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
    attrs: SLICE_ATTRS,
    grad: Grad::First(|cx| {
        let (x, dy, attrs) = (cx.x(0), cx.dy0(), cx.attrs());
        let ranks = Dim::from(attrs.int(RANKS));
        if row_axes(&attrs) > 0 {
            return Err(no_rule(
                cx,
                "rows of ranks are added up after differentiation",
            ));
        }
        if cx.b.ty(x).elements().exact_div(&ranks).is_none() {
            return Err(no_rule(cx, "the slices of ranks are not of one size"));
        }
        let whole = cx.b.emit(&CONCAT_RANKS, &[dy], group_attrs(&attrs))?;
        reshape_like(cx, whole, x)
    }),
    ins: slots!["x"],
    outs: slots!["slice"],
    infer: |cx| {
        checked(cx)?;
        own_slice_type(cx)
    },
    cost: |cx| cx.per_largest_operand(1),
    memory: |cx| {
        // Where ranks have different numbers of rows, the operand is copied with those that are lacking.
        let (axes, ranks) = (row_axes(cx.attrs), cx.attrs.int(RANKS).max(1));
        let rows = cx.ins[0]
            .as_ref()
            .map_or(0, |x| x.dims[..axes].iter().product());
        let padded = match axes > 0 && rows % ranks > 0 {
            true => cx.outs[0].bytes() * ranks.unsigned_abs(),
            false => 0,
        };
        fresh(cx).with_temp(strided_bytes(cx, &[0]) + padded)
    },
    ..row("ReduceScatter", OpClass::Exchange, Effect::Collective)
};

/// [`REDUCE_SCATTER`], begun. The first result is the operand, row-major, which must live as long and is never made again.
pub static START_REDUCE_SCATTER: OpDef = OpDef {
    attrs: START_ATTRS,
    outs: slots!["lent", "pending"],
    infer: |cx| {
        checked(cx)?;
        Ok(vec![
            cx.ty(0)?.clone(),
            slice_type(cx.ty(0)?, cx.attrs.int(RANKS)),
        ])
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
    attrs: SLICE_ATTRS,
    ins: slots!["x"],
    outs: slots!["slice"],
    infer: own_slice_type,
    grad: Grad::First(|cx| {
        let attrs = cx.attrs();
        let axes = row_axes(&attrs);
        if axes == 0 {
            return Err(no_rule(
                cx,
                "slices of elements are added after differentiation",
            ));
        }
        let lead = cx.b.sizes(cx.x(0), 0..axes)?;
        let group = group_attrs(&attrs);
        cx.b.emit(&GATHER_ROWS, &[cx.dy0(), lead], group)
    }),
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
        of_slice(cx, cx.ty(0)?, is_alike)
    },
    memory: |cx| fresh(cx).in_place_operands(cx, &[0]),
    ..row("GatherSlices", OpClass::Update, Effect::Collective)
};

/// Gathers a parameter of which each rank keeps a slice; with `dims`, the rank's part of a parameter. The first operand gives the
/// type; its contents are read nowhere ([`reads_contents`]). It changes nothing on any rank, so a plan may repeat it.
pub static ALL_GATHER: OpDef = OpDef {
    attrs: &[OF_GROUP, OF_RANKS, AttrSpec::optional(DIMS, AttrKind::Ints)],
    ins: slots!["parameter", "slice"],
    outs: slots!["whole"],
    infer: |cx| {
        let mut whole = cx.ty(0)?.clone();
        if let Some(dims) = cx.attrs.opt_ints(DIMS) {
            whole.dims = dims.iter().map(|n| Dim::from(*n)).collect();
        }
        of_slice(cx, &whole, cx.ty(1)?.dtype == whole.dtype)
    },
    cost: |cx| cx.per_largest_operand(1),
    ..row("AllGather", OpClass::Exchange, Effect::Pure)
};

/// The tensors of all ranks, which are of one type, one after the other along the first axis. On a rank, the gradient is its rows of the
/// sum over all ranks.
pub static CONCAT_RANKS: OpDef = OpDef {
    grad: Grad::First(|cx| {
        let (x, dy, attrs) = (cx.x(0), cx.dy0(), cx.attrs());
        let own = cx.b.emit(&REDUCE_SCATTER, &[dy], attrs)?;
        reshape_like(cx, own, x)
    }),
    ins: slots!["x"],
    outs: slots!["all"],
    infer: |cx| {
        checked(cx)?;
        let (mut rows, ranks) = (cx.ty(0)?.clone(), Dim::from(cx.attrs.int(RANKS)));
        match rows.dims.first_mut() {
            Some(size) => *size = size.mul(&ranks),
            None => return Err(cx.fail("axis", "a scalar has no rows")),
        }
        Ok(vec![rows])
    },
    cost: |cx| cx.per_largest_operand(1),
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0])),
    ..row("ConcatRanks", OpClass::Exchange, Effect::Collective)
};

/// The tensor of which each rank has its rows; the second operand lists the sizes of the axes that are rows. All ranks use it in the
/// same way, so each has the same cotangent. It changes nothing on any rank, so a plan may repeat it.
pub static GATHER_ROWS: OpDef = OpDef {
    ins: slots!["rows", "sizes"],
    outs: slots!["whole"],
    infer: |cx| {
        let (own, ranks) = (cx.ty(0)?, ranks_of(cx)?);
        let count = int_vector(cx, 1)?;
        let lead: Vec<Dim> = match (cx.ints(1), count) {
            (Some(lead), _) => lead.to_vec(),
            (None, Some(count)) => (0..count).map(|i| cx.fresh(0, i)).collect(),
            (None, None) => return Err(cx.fail("shape", "the number of axes is not known")),
        };
        let size = [Dim::product(&lead).ceil_div(&Dim::from(ranks))];
        match own.dims.split_at_checked(1) {
            Some((first, row)) if may_be_same(first, &size) => {
                Ok(vec![own.with_dims([&lead, row].concat())])
            }
            _ => Err(cx
                .fail("type", "`rows` are not those of a rank")
                .expected(format!("{} along the first axis", size[0]))
                .found(own.to_string())),
        }
    },
    grad: Grad::First(|cx| {
        let axes = cx.ty(cx.y(0)).rank() + 1 - cx.ty(cx.x(0)).rank();
        let attrs = group_attrs(&cx.attrs()).with(ROW_AXES, axes as i64);
        cx.b.emit(&OWN_SLICE, &[cx.dy0()], attrs)
    }),
    cost: |cx| cx.per_largest_operand(1),
    ..row("GatherRows", OpClass::Exchange, Effect::Pure)
};

/// The rank's own part of a parameter, which is the first operand. The second names the parameter and gives the type of the
/// whole; its contents are read nowhere ([`reads_contents`]).
pub static OWN_PART: OpDef = OpDef {
    attrs: &[
        OF_GROUP,
        OF_RANKS,
        AttrSpec::int(AXIS, 0),
        AttrSpec::required(PIECES, AttrKind::Ints),
    ],
    ins: slots!["part", "parameter"],
    outs: slots!["own"],
    infer: |cx| {
        checked(cx)?;
        let (own, whole, ranks) = (cx.ty(0)?, cx.ty(1)?, cx.attrs.int(RANKS));
        let part = part_of(cx.attrs);
        let size = whole.dims.get(part.axis).and_then(Dim::as_const);
        let expected = part.ty(whole, ranks);
        let fits = own.dtype == whole.dtype && may_be_same(&own.dims, &expected.dims);
        let is_shared = part.is_even(ranks) || part.pieces.len() == 1;
        match size == Some(part.size()) && is_shared && fits {
            true => Ok(vec![own.clone()]),
            false => Err(cx
                .fail("type", "`part` is not the part of a rank")
                .expected(format!("{expected}: a share of {:?}", part.pieces))
                .found(format!("{own} of {whole}"))),
        }
    },
    grad: Grad::Rule(|cx| {
        if cx.wants(1) {
            return Err(no_rule(
                cx,
                "what is trained is the part, not the whole parameter",
            ));
        }
        let dy = cx.dy0();
        cx.give(0, dy);
        Ok(())
    }),
    cost: free,
    memory: |cx| view_of_first(cx, |x| x.strides.clone()),
    ..row("OwnPart", OpClass::Layout, Effect::Pure)
};

/// Where indices of an axis lie in the rank's own part of it, which is one stretch: the index there, and whether it is the rank's own. For
/// an index of another rank the first is 0. With `ignore_index` the indices are labels, and one of that number may be no class;
/// otherwise an index below 0 counts from the end, as in ONNX.
pub static OWN_INDICES: OpDef = OpDef {
    attrs: &[
        OF_GROUP,
        OF_RANKS,
        AttrSpec::required(SIZE, AttrKind::Int),
        AttrSpec::optional(IGNORE_INDEX, AttrKind::Int),
    ],
    indices: Indices::OfSize,
    ins: slots!["indices"],
    outs: slots!["index", "is_own"],
    infer: |cx| {
        let is_index = |d| matches!(d, DType::I32 | DType::I64);
        cx.want_dtype(0, is_index, "int32 or int64")?;
        ranks_of(cx)?;
        if cx.attrs.int(SIZE) <= 0 {
            return Err(cx
                .fail("attribute", "the axis has no index")
                .expected("1 or more")
                .found(cx.attrs.int(SIZE).to_string()));
        }
        let dims = &cx.ty(0)?.dims;
        Ok(vec![
            Ty::new(DType::I64, dims.clone()),
            Ty::new(DType::Bool, dims.clone()),
        ])
    },
    cost: one_flop,
    memory: |cx| fresh(cx).with_temp(cx.elements(0)),
    axes: BatchAxes::Pointwise,
    ..row("OwnIndices", OpClass::Other, Effect::Pure)
};

/// Returns its operand, which is the same on all ranks while each computes something else from it. The gradient of the operand
/// is the sum over the ranks. Only differentiation needs this node; [`drop_shared`] removes it afterwards.
pub static SHARED: OpDef = OpDef {
    ins: slots!["x"],
    outs: slots!["shared"],
    infer: same_type_of_any,
    grad: Grad::First(|cx| {
        let (dy, attrs) = (cx.dy0(), cx.attrs());
        cx.b.emit(&ALL_REDUCE, &[dy], attrs)
    }),
    cost: free,
    memory: |cx| view_of_first(cx, |x| x.strides.clone()),
    ..row("Shared", OpClass::Layout, Effect::Pure)
};

/// The rank's own slice of a result that all ranks of the group have, kept in its place. The second result has no element: it has
/// a first axis of size 0 before those of the operand, and tells [`GATHER_KEPT`] their sizes.
pub static KEEP_SLICE: OpDef = OpDef {
    ins: slots!["value"],
    outs: slots!["slice", "form"],
    infer: |cx| Ok(kept_types(cx.ty(0)?, ranks_of(cx)?)),
    cost: free,
    memory: |cx| fresh(cx).with_temp(strided_bytes(cx, &[0])),
    ..row("KeepSlice", OpClass::Transfer, Effect::Pure)
};

/// The result of which each rank has kept its slice.
pub static GATHER_KEPT: OpDef = OpDef {
    ins: slots!["slice", "form"],
    outs: slots!["value"],
    infer: |cx| {
        let (slice, form, ranks) = (cx.ty(0)?, cx.ty(1)?, ranks_of(cx)?);
        let whole = Ty::new(form.dtype, form.dims.get(1..).unwrap_or_default());
        let expected = &kept_types(&whole, ranks)[0];
        match slice.dtype == form.dtype && may_be_same(&slice.dims, &expected.dims) {
            true => Ok(vec![whole]),
            false => Err(cx
                .fail("type", "`slice` is not the slice of a rank")
                .expected(expected.to_string())
                .found(slice.to_string())),
        }
    },
    cost: free,
    ..row("GatherKept", OpClass::Transfer, Effect::Pure)
};

/// Returns the types of a rank's slice of a result, and of what has its form.
pub fn kept_types(whole: &Ty, ranks: i64) -> Vec<Ty> {
    let form = std::iter::once(Dim::from(0)).chain(whole.dims.iter().cloned());
    vec![
        slice_type(whole, ranks),
        Ty::new(whole.dtype, form.collect::<Vec<Dim>>()),
    ]
}

/// Returns true for an op whose time is that of the link between ranks.
pub fn is_exchange(op: &OpDef) -> bool {
    op.class == OpClass::Exchange || op == &GATHER_SLICES || op == &GATHER_KEPT
}

/// Returns how many bytes a rank receives from the others in a node, for values of so many bytes: all slices but its own,
/// twice for a sum that all ranks have afterwards.
pub fn received_bytes(node: &Node, bytes: &dyn Fn(ValueId) -> u64) -> u64 {
    if !is_exchange(node.op) {
        return 0;
    }
    let gathers = [&ALL_GATHER, &GATHER_ROWS, &GATHER_KEPT, &CONCAT_RANKS];
    let whole_bytes = match gathers.contains(&node.op) {
        true => bytes(node.outs[0]),
        false => node.operands().map(bytes).max().unwrap_or(0),
    };
    let ranks = node.attrs.int(RANKS).unsigned_abs().max(1);
    let is_whole = node.op == &ALL_REDUCE || node.op == &START_ALL_REDUCE;
    (1 + u64::from(is_whole)) * (whole_bytes - whole_bytes / ranks)
}

/// Returns false for a value that nothing reads, or of which a graph reads the type alone.
pub fn reads_contents(graph: &Graph, value: ValueId) -> bool {
    let uses = graph.value(value).uses().iter();
    let mut uses = uses.map(|u| (graph.node(u.node).op, u.slot));
    let is_named =
        |op: &OpDef, slot| (op == &ALL_GATHER && slot == 0) || (op == &OWN_PART && slot == 1);
    graph.is_output(value) || uses.any(|(op, slot)| !is_named(op, slot))
}

/// Returns true for a weight of which each rank keeps a slice or a part: the graph reads its type alone.
pub fn is_sharded(graph: &Graph, weight: ValueId) -> bool {
    !graph.value(weight).uses().is_empty() && !reads_contents(graph, weight)
}

/// Checks that the operand can be summed over any number of ranks, and returns its type.
fn same_type_of_any(cx: &InferCx) -> Result<Vec<Ty>> {
    if cx.attrs.int(RANKS) != ANY_RANKS {
        ranks_of(cx)?;
    }
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    Ok(vec![cx.ty(0)?.clone()])
}

/// Checks the number of ranks and that the operand can be summed.
fn checked(cx: &InferCx) -> Result<()> {
    cx.want_dtype(0, DType::is_float, "a floating-point type")?;
    ranks_of(cx).map(drop)
}

/// Returns the number of ranks.
fn ranks_of(cx: &InferCx) -> Result<i64> {
    let ranks = cx.attrs.int(RANKS);
    match (1..=i64::from(u16::MAX)).contains(&ranks) {
        true => Ok(ranks),
        false => Err(cx
            .fail("attribute", "there is no such number of ranks")
            .expected(format!("1 to {}", u16::MAX))
            .found(ranks.to_string())),
    }
}

/// Returns the type of a rank's slice.
fn slice_type(of: &Ty, ranks: i64) -> Ty {
    let ranks = Dim::from(ranks.max(1));
    Ty::new(of.dtype, [of.elements().ceil_div(&ranks)])
}

/// Checks that operand 1 has the size of a rank's slice of `whole`, and a type that fits. Returns the type of the whole.
fn of_slice(cx: &InferCx, whole: &Ty, is_alike: bool) -> Result<Vec<Ty>> {
    checked(cx)?;
    let slice = cx.ty(1)?;
    let expected = slice_type(whole, cx.attrs.int(RANKS));
    match is_alike && may_be_same(&slice.dims, &expected.dims) {
        true => Ok(vec![whole.clone()]),
        false => Err(cx
            .fail("type", "`slice` is not the slice of a rank")
            .expected(expected.to_string())
            .found(slice.to_string())),
    }
}

fn own_slice_type(cx: &InferCx) -> Result<Vec<Ty>> {
    let (x, ranks) = (cx.ty(0)?, ranks_of(cx)?);
    let axes = row_axes(cx.attrs);
    if axes > x.rank() {
        return Err(cx
            .fail("attribute", "the operand has fewer axes than are rows")
            .expected(format!("{axes} axes"))
            .found(x.to_string()));
    }
    if axes == 0 {
        return Ok(vec![slice_type(x, ranks)]);
    }
    let (lead, row) = x.dims.split_at(axes);
    let own = Dim::product(lead).ceil_div(&Dim::from(ranks));
    Ok(vec![x.with_dims([&[own], row].concat())])
}

/// Returns how many axes of the operand of a node are rows.
pub fn row_axes(attrs: &Attrs) -> usize {
    usize::try_from(attrs.int(ROW_AXES)).unwrap_or(0)
}

/// Returns the attributes that name the same group.
pub fn group_attrs(attrs: &Attrs) -> Attrs {
    of_group(attrs.str(GROUP), attrs.int(RANKS))
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
