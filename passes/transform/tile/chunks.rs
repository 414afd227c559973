//! Emits a region chunk by chunk, and adds up what is summed over the rows: losses, gradients of weights and of biases.
//!
//! Sums of 16-bit numbers are float32 from their first term to their last, so that cutting rows adds no rounding. A term
//! that was rounded to 16 bits before it is added would add one rounding per chunk. So a sum over the rows of a 16-bit
//! matrix is the product with a vector of ones, which is widened some elements at a time as other products are, and a loss
//! is `ClassLoss`, which is float32.

use super::region::{Region, like};
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, DType, Dim, Graph, Node, NodeId, OpDef, Role, Same, Ty, ValueId};
use crate::ops::accumulate::{ACCUMULATE, ADD_PRODUCT};
use crate::ops::arith::{ADD, DIV, MOD};
use crate::ops::batch_axes::{
    CutCx, Fit, Rows, bare_product, cut, each_loss, is_class_loss_grad, is_mean_loss, is_plain_sum,
    own_axes, shared_sizes, summed_by_rows,
};
use crate::ops::concat::CONCAT;
use crate::ops::fill::{CONSTANT_OF_SHAPE, RANGE};
use crate::ops::index::{GATHER, GATHER_GRAD};
use crate::ops::logic::EQUAL;
use crate::ops::loss::{CLASS_LOSS, label_weight};
use crate::ops::matmul::GEMM;
use crate::ops::reduce::REDUCE_SUM;
use crate::ops::rule::{Formulas, compute_type, select};
use crate::ops::shape::{EXPAND, RESHAPE, SHAPE};
use crate::ops::slice::SLICE;
use crate::ops::softmax::LOG_SOFTMAX;
use crate::ops::sum_to::SUM_TO_SHAPE;
use crate::ops::{Builder, EmitExt};
use crate::transform::sizes::Sizes;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// A region and its nodes as they were before any chunk was emitted.
pub struct Snapshot<'r> {
    region: &'r Region,
    /// Number of chunks.
    pub count: usize,
    nodes: FxHashMap<NodeId, Node>,
    /// Inputs with rows, of the nodes that run first and of those that run later.
    inputs: [Vec<ValueId>; 2],
    outputs: [Vec<ValueId>; 2],
    /// Axes of reductions and slices.
    axes: FxHashMap<NodeId, Vec<usize>>,
    /// Of sums over some of the rows: the sizes of their axes that hold the others.
    shared: FxHashMap<NodeId, Vec<Dim>>,
}

impl<'r> Snapshot<'r> {
    /// Copies what the emission reads of a graph.
    pub fn new(
        graph: &Graph,
        contents: &Contents,
        region: &'r Region,
        count: usize,
    ) -> Snapshot<'r> {
        let sides = [&region.nodes, &region.after];
        let node = |id: &NodeId| (*id, graph.node(*id).clone());
        let axes = |id: &NodeId| Some((*id, own_axes(graph, contents, graph.node(*id))?));
        let axes: FxHashMap<NodeId, Vec<usize>> = region.all().filter_map(axes).collect();
        let shared = |id: &NodeId| match region.fits[id].ins.first() {
            Some(Some(Rows::Lead(k))) => {
                let axes = axes.get(id).map(Vec::as_slice);
                Some((*id, summed_by_rows(graph, graph.node(*id), axes, *k)?))
            }
            _ => None,
        };
        Snapshot {
            region,
            count,
            shared: region.all().filter_map(shared).collect(),
            nodes: region.all().map(node).collect(),
            inputs: sides.map(|nodes| region.inputs_with_rows(graph, nodes)),
            outputs: sides.map(|nodes| region.outputs(graph, nodes)),
            axes,
        }
    }
}

/// What was emitted for a region.
pub struct Emitted {
    /// Number of chunks.
    pub chunks: usize,
    /// New nodes that take the place of the region's nodes, and of those that run later.
    pub nodes: [Vec<NodeId>; 2],
    /// New nodes of the first of them that make wide values, if there are nodes that run later.
    pub wide: Vec<NodeId>,
}

/// Emits the chunks of a region at the end of the graph, fewer where there are fewer rows, and redirects the readers of
/// its results to theirs. `moved` holds the values that replaced results of other regions, and is extended.
///
/// # Errors
/// What typing refuses.
pub fn emit(
    b: &mut Builder,
    snapshot: &Snapshot,
    moved: &mut FxHashMap<ValueId, ValueId>,
) -> Result<Emitted> {
    let region = snapshot.region;
    let first_node = &snapshot.nodes[&region.nodes[0]];
    b.prefix = "tile".into();
    b.loc = first_node.loc.clone();
    // Forward and backward run together where the backward pass begins.
    let is_backward = |id: &NodeId| snapshot.nodes[id].role == Role::Backward;
    b.role = match region.nodes.iter().any(is_backward) {
        true => Role::Backward,
        false => first_node.role,
    };
    let mut emitter = Emitter {
        region,
        snapshot,
        flats: FxHashMap::default(),
        sizes_of_rows: BTreeMap::new(),
        totals: FxHashMap::default(),
        shares: FxHashMap::default(),
        sums: FxHashMap::default(),
        pieces: FxHashMap::default(),
        products: FxHashMap::default(),
        moved,
        b,
    };
    let mut nodes = [Vec::new(), Vec::new()];
    let mut wide = Vec::new();
    let mut start = emitter.b.graph.order().len();
    emitter.find_sizes()?;
    emitter.means()?;
    let cuts = emitter.cuts(snapshot.count)?;
    let mut chunks: Vec<Chunk> = cuts.iter().map(|_| Chunk::default()).collect();
    for (side, ids) in [&region.nodes, &region.after].into_iter().enumerate() {
        if side == 1 {
            start = emitter.b.graph.order().len();
            emitter.b.role = Role::Backward;
        }
        let outputs = &snapshot.outputs[side];
        emitter.find_products(outputs);
        for (rows, chunk) in cuts.iter().zip(&mut chunks) {
            emitter.chunk(*rows, chunk, &snapshot.inputs[side], ids)?;
            emitter.gather(chunk, outputs)?;
            if side == 0 && !region.after.is_empty() {
                wide.extend(emitter.wide(chunk));
            }
        }
        for v in outputs {
            emitter.replace(*v)?;
        }
        nodes[side] = emitter.b.graph.order()[start..].to_vec();
    }
    Ok(Emitted {
        chunks: cuts.len(),
        nodes,
        wide,
    })
}

/// What has been emitted for some of the rows.
#[derive(Default)]
struct Chunk {
    /// By the value that it is a chunk of.
    values: FxHashMap<ValueId, ValueId>,
    /// The number of its rows, as an int64 vector of length 1.
    count: Option<ValueId>,
}

/// A sum to which the chunks add products.
#[derive(Clone)]
struct Summed {
    term: Term,
    /// The type of the sum, a matrix.
    ty: Ty,
}

#[derive(Clone)]
enum Term {
    /// The product of the node's operands, with these attributes.
    Product(Attrs),
    /// The product of ones and the first operand: the sum of its rows, with that many elements in each.
    Rows(i64),
}

struct Emitter<'r, 'g> {
    region: &'r Region,
    snapshot: &'r Snapshot<'r>,
    /// Values from outside with their rows as one axis.
    flats: FxHashMap<ValueId, ValueId>,
    /// Numbers of elements for each row along an axis that are not 1.
    sizes_of_rows: BTreeMap<Dim, ValueId>,
    /// The weight of all labels, for nodes that take the mean.
    totals: FxHashMap<NodeId, ValueId>,
    /// The cotangent of such a node, divided by its total.
    shares: FxHashMap<NodeId, ValueId>,
    /// Sums over the rows so far, in the type they are added up in.
    sums: FxHashMap<ValueId, ValueId>,
    /// Chunks of results that have rows.
    pieces: FxHashMap<ValueId, Vec<ValueId>>,
    /// Sums of products, whose terms need not exist one by one.
    products: FxHashMap<ValueId, Summed>,
    /// The values that replaced results of regions emitted before.
    moved: &'r mut FxHashMap<ValueId, ValueId>,
    b: &'r mut Builder<'g>,
}

fn axis(axis: i64) -> Attrs {
    Attrs::new().with("axis", axis)
}

fn bug(what: &str) -> Box<Error> {
    Error::bug("tile", what)
}

impl Emitter<'_, '_> {
    /// Returns the value that replaced one from outside, or the value itself.
    fn own(&self, v: ValueId) -> ValueId {
        self.moved.get(&v).copied().unwrap_or(v)
    }

    fn plain(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<ValueId> {
        self.b.op(op, ins)
    }

    /// Emits the sizes of axes `start..end` as an int64 vector.
    fn sizes(&mut self, v: ValueId, start: usize, end: usize) -> Result<ValueId> {
        let axes = Attrs::new()
            .with("start", start as i64)
            .with("end", end as i64);
        self.b.emit(&SHAPE, &[v], axes)
    }

    /// Emits the weight of all labels, for every mean over them.
    fn means(&mut self) -> Result<()> {
        let mut known = FxHashMap::default();
        for id in self.region.all() {
            let node = &self.snapshot.nodes[id];
            if !is_mean_loss(node) {
                continue;
            }
            let at = usize::from(is_class_loss_grad(node.op));
            let scores = node.ins[at].expect("I4: a loss has scores");
            let labels = node.ins[at + 1].expect("I4: a loss has labels");
            let weights = node.operand(at + 2);
            let dtype = compute_type(self.b.ty(scores).dtype);
            let ignored = node.attrs.opt_int("ignore_index");
            let key = (labels, weights, ignored, dtype);
            let total = match known.get(&key) {
                Some(total) => *total,
                None => label_weight(self.b, labels, weights, &node.attrs, dtype)?,
            };
            known.insert(key, total);
            self.totals.insert(*id, total);
        }
        Ok(())
    }

    /// Returns the number of rows, as an int64 vector of length 1.
    fn n_rows(&mut self) -> Result<ValueId> {
        if let Some(n) = self.region.rows.as_const() {
            return Ok(self.b.ints(&[n]));
        }
        let leads = |v: &&ValueId| matches!(self.region.classes[*v], Rows::Lead(_));
        let known = self.snapshot.inputs[0].iter().find(leads).copied();
        let v = known.ok_or_else(|| bug("no operand says how many rows there are"))?;
        let flat = self.flat(v)?;
        let size = self.sizes(flat, 0, 1)?;
        match self.each(v) {
            None => Ok(size),
            Some(each) => self.plain(&DIV, &[size, each]),
        }
    }

    /// Returns the number of elements for each row along the axes of an old value that hold the rows; `None` for one.
    fn each(&self, v: ValueId) -> Option<ValueId> {
        let each = self.region.each(self.b.graph, v)?;
        self.sizes_of_rows.get(&each).copied()
    }

    /// Emits the sizes that [`Self::each`] returns.
    fn find_sizes(&mut self) -> Result<()> {
        let mut sizes = Sizes::of_inputs(self.b.graph);
        let graph = &self.b.graph;
        let values = self.region.classes.keys();
        let each = values.filter_map(|v| self.region.each(graph, *v));
        let mut each: Vec<Dim> = each.filter(|dim| !dim.is_one()).collect();
        each.sort();
        each.dedup();
        for dim in each {
            let size = sizes.build(self.b, false, std::slice::from_ref(&dim))?;
            let size = size.ok_or_else(|| bug("a size is not known"))?;
            self.sizes_of_rows.insert(dim, size);
        }
        Ok(())
    }

    /// Emits a number of rows times that of elements of an old value for each.
    fn times(&mut self, rows: ValueId, v: ValueId) -> Result<ValueId> {
        match self.each(v) {
            None => Ok(rows),
            Some(each) => self.b.mul(rows, each),
        }
    }

    /// Returns first and last row of each chunk, as int64 vectors of length 1. With at least as many rows as chunks, no
    /// chunk is empty.
    fn cuts(&mut self, count: usize) -> Result<Vec<(ValueId, ValueId)>> {
        let count = count as i64;
        if let Some(rows) = self.region.rows.as_const() {
            let each = ((rows + count - 1) / count).max(1);
            // Without rows there is one empty chunk.
            let starts = (0..rows.max(1)).step_by(each as usize);
            let bounds = starts.map(|at| (at, (at + each).min(rows)));
            return Ok(bounds
                .map(|(s, e)| (self.b.ints(&[s]), self.b.ints(&[e])))
                .collect());
        }
        let rows = self.n_rows()?;
        let by = self.b.ints(&[count]);
        let mut bounds = Vec::new();
        let mut start = self.b.ints(&[0]);
        for i in 1..=count {
            let times = self.b.ints(&[i]);
            let some = self.b.mul(rows, times)?;
            let end = self.plain(&DIV, &[some, by])?;
            bounds.push((start, end));
            start = end;
        }
        Ok(bounds)
    }

    /// Returns a value from outside with its rows as one axis.
    fn flat(&mut self, v: ValueId) -> Result<ValueId> {
        if let Some(flat) = self.flats.get(&v) {
            return Ok(*flat);
        }
        let flat = self.flattened(v)?;
        self.flats.insert(v, flat);
        Ok(flat)
    }

    fn flattened(&mut self, v: ValueId) -> Result<ValueId> {
        let rows = self.region.classes[&v];
        let v = self.own(v);
        let (Rows::Lead(k) | Rows::Shared(k)) = rows else {
            return Ok(v);
        };
        if k == 1 {
            return Ok(v);
        }
        let row = self.b.ty(v).dims[k..].iter().map(Dim::as_const);
        let shape = match row.collect::<Option<Vec<i64>>>() {
            Some(row) => self.b.ints(&[&[-1], &row[..]].concat()),
            None => {
                let all = Attrs::new().with("start", k as i64);
                let row = self.b.emit(&SHAPE, &[v], all)?;
                let first = self.b.ints(&[-1]);
                self.b.emit(&CONCAT, &[first, row], axis(0))?
            }
        };
        self.plain(&RESHAPE, &[v, shape])
    }

    /// Looks up, for each row of a chunk, its element of a value whose elements several rows share.
    fn looked_up(
        &mut self,
        v: ValueId,
        rows: (ValueId, ValueId),
        nodes: &[NodeId],
    ) -> Result<ValueId> {
        // The axes of the rows, as a reader's result has them.
        let reader = nodes.iter().find_map(|id| {
            let (node, fit) = (&self.snapshot.nodes[id], &self.region.fits[id]);
            let is_read = node.ins.contains(&Some(v));
            match fit.outs.first() {
                Some(Rows::Lead(k)) if is_read => Some((node.outs[0], *k)),
                _ => None,
            }
        });
        let (reader, k) = reader.ok_or_else(|| bug("no reader says how rows share elements"))?;
        let all = self.b.ty(reader).dims[..k].to_vec();
        let Rows::Shared(own) = self.region.classes[&v] else {
            return Err(bug("each row has its own elements"));
        };
        let own = shared_sizes(&self.b.ty(v).dims, own, k);
        let flat = self.flat(v)?;
        let index = self.shared_index(reader, &all, &own, rows)?;
        self.plain(&GATHER, &[flat, index])
    }

    /// Emits the indices that look up a shared value for the rows from `start` up to `end`. `all` are the sizes of the axes that
    /// hold the rows in `of`; `own` are those of the shared value, 1 where rows share an element.
    fn shared_index(
        &mut self,
        of: ValueId,
        all: &[Dim],
        own: &[Dim],
        (start, end): (ValueId, ValueId),
    ) -> Result<ValueId> {
        let (from, to) = (self.times(start, of)?, self.times(end, of)?);
        let (from, to) = (self.b.squeeze(from, &[0])?, self.b.squeeze(to, &[0])?);
        let one = self.b.scalar(DType::I64, 1.0);
        let element = self.plain(&RANGE, &[from, to, one])?;
        let mut index: Option<ValueId> = None;
        for axis in (0..all.len()).filter(|axis| !own[*axis].is_one()) {
            let mut at = element;
            if axis + 1 < all.len() {
                let behind = self.product(&all[axis + 1..])?;
                at = self.plain(&DIV, &[at, behind])?;
            }
            if axis > 0 {
                let len = self.product(&all[axis..=axis])?;
                at = self.plain(&MOD, &[at, len])?;
            }
            if axis + 1 < all.len() {
                let behind = self.product(&own[axis + 1..])?;
                at = self.b.mul(at, behind)?;
            }
            index = Some(match index {
                Some(index) => self.b.add(index, at)?,
                None => at,
            });
        }
        index.ok_or_else(|| bug("all rows share one element"))
    }

    /// Emits the product of sizes, as an int64 vector of length 1.
    fn product(&mut self, dims: &[Dim]) -> Result<ValueId> {
        self.dims(&[Dim::product(dims)])
    }

    /// Adds the sums over some of the rows of a chunk to the whole result, in which several rows share an element. Returns whether
    /// `node` makes such a sum.
    fn add_shared(
        &mut self,
        id: NodeId,
        x: Option<ValueId>,
        rows: (ValueId, ValueId),
    ) -> Result<bool> {
        let node = &self.snapshot.nodes[&id];
        let (Some(own), Some(mut x)) = (self.snapshot.shared.get(&id), x) else {
            return Ok(false);
        };
        let old = node.ins[0].ok_or_else(|| bug("a sum lacks an operand"))?;
        let (all, v) = (self.b.ty(old).dims.clone(), node.outs[0]);
        let (k, dtype) = (own.len(), compute_type(self.b.ty(x).dtype));
        let index = self.shared_index(old, &all[..k], own, rows)?;
        x = self.b.cast(x, dtype)?;
        let sum = self.b.ty(v).dims.clone();
        let row: Vec<Dim> = match self.snapshot.axes.get(&id) {
            Some(axes) => {
                let gone: Vec<i64> = axes
                    .iter()
                    .filter(|a| **a >= k)
                    .map(|a| (a - k + 1) as i64)
                    .collect();
                if !gone.is_empty() {
                    let (gone, none_kept) = (self.b.ints(&gone), Attrs::new().with("keepdims", 0));
                    x = self.b.emit(&REDUCE_SUM, &[x, gone], none_kept)?;
                }
                (k..all.len())
                    .filter(|a| !axes.contains(a))
                    .map(|a| all[a].clone())
                    .collect()
            }
            None => {
                let row = sum[sum.len() - (all.len() - k)..].to_vec();
                let count = self.sizes(x, 0, 1)?;
                let sizes = self.dims(&row)?;
                let to = self.b.emit(&CONCAT, &[count, sizes], axis(0))?;
                x = self.plain(&SUM_TO_SHAPE, &[x, to])?;
                row
            }
        };
        let first = self.product(own)?;
        let sizes = self.dims(&row)?;
        let shape = self.b.emit(&CONCAT, &[first, sizes], axis(0))?;
        self.add_entries(v, [shape, index, x])?;
        Ok(true)
    }

    /// Adds the rows `x` of a chunk to the sum `v`, at these indices. `shape` is the shape of the sum.
    fn add_entries(&mut self, v: ValueId, [shape, indices, x]: [ValueId; 3]) -> Result<()> {
        let sum = self.sums.get(&v).copied();
        let ins = vec![Some(shape), Some(indices), Some(x), sum];
        let sum = self.b.emit_n(&GATHER_GRAD, ins, Attrs::new(), 1)?[0];
        self.sums.insert(v, sum);
        Ok(())
    }

    /// Adds a chunk's part of the gradient of a table to the sum. Returns `false` for a node that makes no such gradient.
    fn add_lookup(&mut self, node: &Node, fit: &Fit, ins: &[Option<ValueId>]) -> Result<bool> {
        let is_sum = node.op == &GATHER_GRAD && fit.outs[0] == Rows::Sum;
        let ([Some(shape), Some(indices), Some(x), ..], true) = (ins, is_sum) else {
            return Ok(false);
        };
        let x = self.b.cast(*x, compute_type(self.b.ty(*x).dtype))?;
        self.add_entries(node.outs[0], [*shape, *indices, x])?;
        Ok(true)
    }

    /// Emits sizes as an int64 vector.
    fn dims(&mut self, dims: &[Dim]) -> Result<ValueId> {
        let mut sizes = Sizes::of_inputs(self.b.graph);
        let built = sizes.build(self.b, false, dims)?;
        built.ok_or_else(|| bug("a size is not known"))
    }

    /// Emits nodes of the region for the rows from `start` up to `end`.
    fn chunk(
        &mut self,
        (start, end): (ValueId, ValueId),
        chunk: &mut Chunk,
        inputs: &[ValueId],
        nodes: &[NodeId],
    ) -> Result<()> {
        let Chunk { values: now, count } = chunk;
        self.b.prefix = "tile".into();
        for v in inputs.iter().copied() {
            if now.contains_key(&v) {
                continue;
            }
            let rows = self.region.classes[&v];
            if let Rows::Shared(_) = rows {
                let looked_up = self.looked_up(v, (start, end), nodes)?;
                now.insert(v, looked_up);
                continue;
            }
            let axis = i64::from(rows == Rows::Last);
            let flat = self.flat(v)?;
            let (from, to) = (self.times(start, v)?, self.times(end, v)?);
            let (axis, one) = (self.b.ints(&[axis]), self.b.ints(&[1]));
            let slice = self.plain(&SLICE, &[flat, from, to, axis, one])?;
            now.insert(v, slice);
            if count.is_none() && self.each(v).is_none() && axis == self.b.ints(&[0]) {
                *count = Some(match self.b.ty(slice).dims[0].as_const() {
                    Some(n) => self.b.ints(&[n]),
                    None => self.sizes(slice, 0, 1)?,
                });
            }
        }
        let count = match *count {
            Some(count) => count,
            None => *count.insert(self.b.sub(end, start)?),
        };
        for id in nodes {
            let x = self.snapshot.nodes[id].operand(0);
            let x = x.map(|v| now.get(&v).copied().unwrap_or_else(|| self.own(v)));
            if !self.add_shared(*id, x, (start, end))? {
                self.node(*id, now, count)?;
            }
        }
        Ok(())
    }

    /// Returns the nodes that make values of a chunk which are as wide as the scores.
    fn wide(&self, chunk: &Chunk) -> Vec<NodeId> {
        let is_wide = |v: &ValueId| self.region.is_wide(self.b.graph, *v);
        let made = chunk.values.iter().filter(|(old, _)| is_wide(old));
        made.filter_map(|(_, new)| self.b.graph.def_node(*new))
            .collect()
    }

    fn node(
        &mut self,
        id: NodeId,
        now: &mut FxHashMap<ValueId, ValueId>,
        count: ValueId,
    ) -> Result<()> {
        let snapshot = self.snapshot;
        let node = &snapshot.nodes[&id];
        self.b.loc = node.loc.clone();
        self.b.prefix = format!("{}/tile", node.name);
        let fit = &self.region.fits[&id];
        let chunk_of = |v: ValueId| now.get(&v).copied().unwrap_or_else(|| self.own(v));
        let ins = node.ins.iter().map(|v| v.map(chunk_of));
        let mut ins: Vec<Option<ValueId>> = ins.collect();
        let is_added = self.add_product(node, &ins, count)? || self.add_lookup(node, fit, &ins)?;
        if is_added || self.biased(node.outs[0]).is_some() {
            return Ok(());
        }
        let outs = match self.losses(node, &ins)? {
            Some(outs) => Some(outs),
            None => self.biased_product(node, now)?,
        };
        if let Some(outs) = outs {
            now.extend(node.outs.iter().copied().zip(outs));
            return Ok(());
        }
        if let (true, Some(x)) = (is_plain_sum(node.op) && fit.outs[0] == Rows::Sum, ins[0]) {
            // The sum reads its operand in the type that it is added up in.
            let wide = compute_type(self.b.ty(x).dtype);
            ins[0] = Some(self.b.cast(x, wide)?);
        }
        let mut attrs = node.attrs.clone();
        if let Some(total) = self.totals.get(&id).copied() {
            attrs.set("reduction", "sum".into());
            if is_class_loss_grad(node.op) {
                let dloss = ins[0].expect("I4: a gradient has a cotangent");
                let share = match self.shares.get(&id) {
                    Some(share) => *share,
                    None => self.share(dloss, total)?,
                };
                ins[0] = Some(share);
                self.shares.insert(id, share);
            }
        }
        let count = self.times(count, node.outs[0])?;
        let ty = |v: ValueId| self.b.ty(v).clone();
        let in_types = node.ins.iter().map(|v| v.map(ty)).collect();
        let out_types = node.outs.iter().map(|v| ty(*v)).collect();
        let outs = cut(CutCx {
            b: self.b,
            op: node.op,
            attrs,
            ins,
            in_types,
            out_types,
            fit,
            axes: snapshot.axes.get(&id).cloned(),
            count,
        })?;
        now.extend(node.outs.iter().copied().zip(outs));
        Ok(())
    }

    /// Replaces `old`, for all readers, by what its chunks make together.
    fn replace(&mut self, old: ValueId) -> Result<()> {
        let graph = &self.b.graph;
        let name = graph.value(old).name.clone();
        let maker = graph.def_node(old).expect("a region makes its outputs");
        self.b.prefix = name.clone();
        self.b.loc = self.snapshot.nodes[&maker].loc.clone();
        let new = match self.pieces.remove(&old) {
            Some(pieces) => self.joined(old, &pieces)?,
            None => self.summed(old, maker)?,
        };
        self.b.graph.rename_value(old, &format!("{name}/whole"));
        if self.b.graph.value(new).name != name {
            self.b.graph.rename_value(new, &name);
        }
        self.b.graph.replace_uses(old, new);
        self.moved.insert(old, new);
        Ok(())
    }

    /// Emits the rows of all chunks as one value.
    fn joined(&mut self, old: ValueId, pieces: &[ValueId]) -> Result<ValueId> {
        let ty = self.b.ty(old).clone();
        let Rows::Lead(k) = self.region.classes[&old] else {
            return self.b.emit(&CONCAT, pieces, axis(1));
        };
        let flat = self.b.emit(&CONCAT, pieces, axis(0))?;
        if self.b.ty(flat).dims == ty.dims {
            return Ok(flat);
        }
        let shape = match ty.static_dims() {
            Some(dims) => self.b.ints(&dims),
            None => {
                // What the backward pass reads may follow from this very result.
                let maker = self.b.graph.def_node(old);
                let is_later = maker.is_some_and(|id| self.region.after.contains(&id));
                let sides = &self.snapshot.inputs[..=usize::from(is_later)];
                let inputs: Vec<ValueId> = sides.concat();
                let classes = &self.region.classes;
                let batch = match like(self.b.graph, &inputs, classes, &ty.dims[..k]) {
                    Some(v) => self.sizes(self.own(v), 0, k)?,
                    None if k == 1 => {
                        let n = self.n_rows()?;
                        self.times(n, old)?
                    }
                    None => {
                        let mut sizes = Sizes::of_inputs(self.b.graph);
                        let built = sizes.build(self.b, false, &ty.dims[..k])?;
                        built.ok_or_else(|| bug("the sizes of a result are not known"))?
                    }
                };
                let row = self.sizes(flat, 1, ty.rank() - k + 1)?;
                self.b.emit(&CONCAT, &[batch, row], axis(0))?
            }
        };
        self.plain(&RESHAPE, &[flat, shape])
    }

    /// Finds the results that can be added up as products.
    fn find_products(&mut self, outputs: &[ValueId]) {
        let sums = outputs.iter().copied();
        for v in sums.filter(|v| self.region.classes[v] == Rows::Sum) {
            if let Some(summed) = self.product_of(v) {
                self.products.insert(v, summed);
            }
        }
    }

    fn product_of(&self, v: ValueId) -> Option<Summed> {
        let ty = self.b.ty(v);
        let maker = self.b.graph.def_node(v)?;
        let node = &self.snapshot.nodes[&maker];
        let wide = compute_type(ty.dtype);
        if let Some(attrs) = bare_product(node) {
            let is_matrix = ty.rank() == 2 && ty.static_dims().is_some();
            return is_matrix.then(|| Summed {
                term: Term::Product(attrs),
                ty: Ty::new(wide, ty.dims.clone()),
            });
        }
        if !is_plain_sum(node.op) || wide == ty.dtype {
            return None;
        }
        let Some(Rows::Lead(k)) = self.region.fits[&maker].ins[0] else {
            return None;
        };
        let row = Dim::product(&self.b.ty(node.ins[0]?).dims[k..]).as_const()?;
        let elements = ty.elements().as_const()?;
        (row == elements && row > 1).then(|| Summed {
            term: Term::Rows(row),
            ty: Ty::new(wide, vec![Dim::ONE, Dim::from(row)]),
        })
    }

    /// Adds a product to its sum, and returns true where `v` is such a sum. The first product is the sum where its type
    /// is wide enough.
    fn add_product(
        &mut self,
        node: &Node,
        ins: &[Option<ValueId>],
        count: ValueId,
    ) -> Result<bool> {
        let v = node.outs[0];
        let Some(Summed { term, ty }) = self.products.get(&v).cloned() else {
            return Ok(false);
        };
        let operand = |slot: usize| ins[slot].ok_or_else(|| bug("a product lacks an operand"));
        let first = operand(0)?;
        let (a, b, attrs) = match term {
            Term::Product(attrs) => (first, operand(1)?, attrs),
            Term::Rows(row) => {
                let rows = match self.b.rank(first) {
                    2 => first,
                    _ => {
                        let matrix = self.b.ints(&[-1, row]);
                        self.plain(&RESHAPE, &[first, matrix])?
                    }
                };
                let one = self.b.scalar(self.b.ty(first).dtype, 1.0);
                let width = self.b.ints(&[1]);
                let x = node
                    .operand(0)
                    .ok_or_else(|| bug("a sum lacks an operand"))?;
                let count = self.times(count, x)?;
                let dims = self.b.emit(&CONCAT, &[count, width], axis(0))?;
                let ones = self.plain(&EXPAND, &[one, dims])?;
                (ones, rows, Attrs::new().with("transA", 1))
            }
        };
        let sum = match self.sums.get(&v) {
            Some(sum) => Some(*sum),
            None if self.b.ty(a).dtype == ty.dtype => None,
            None => {
                let dims = self.b.ints(&ty.static_dims().unwrap_or_default());
                let zero = self.plain(&CONSTANT_OF_SHAPE, &[dims])?;
                Some(self.b.cast(zero, ty.dtype)?)
            }
        };
        let sum = match sum {
            Some(sum) => self.b.emit(&ADD_PRODUCT, &[sum, a, b], attrs)?,
            None => self.b.emit(&GEMM, &[a, b], attrs)?,
        };
        self.sums.insert(v, sum);
        Ok(true)
    }

    /// Emits a loss over classes for some of the rows: the sum of the losses, or each of them, and the log-probabilities
    /// where they are read. Returns `None` for other ops.
    fn losses(&mut self, node: &Node, ins: &[Option<ValueId>]) -> Result<Option<Vec<ValueId>>> {
        let Some(attrs) = each_loss(node) else {
            return Ok(None);
        };
        let each = self.b.emit_n(&CLASS_LOSS, ins.to_vec(), attrs, 1)?[0];
        let loss = match node.attrs.str("reduction") {
            "none" => self.b.cast(each, self.b.ty(node.outs[0]).dtype)?,
            _ => {
                let none_kept = Attrs::new().with("keepdims", 0);
                self.b.emit(&REDUCE_SUM, &[each], none_kept)?
            }
        };
        let mut outs = vec![loss];
        if let (Some(_), Some(scores)) = (node.outs.get(1), ins[0]) {
            outs.push(self.b.emit(&LOG_SOFTMAX, &[scores], axis(1))?);
        }
        Ok(Some(outs))
    }

    /// Returns the vector that the only reader of a product adds to every row, where both belong to the region. In 16
    /// bits two ops round the result twice, and one op rounds it once.
    fn biased(&self, product: ValueId) -> Option<ValueId> {
        let graph = &self.b.graph;
        let [only] = graph.value(product).uses() else {
            return None;
        };
        let nodes = &self.snapshot.nodes;
        let (node, add) = (
            nodes.get(&graph.def_node(product)?)?,
            nodes.get(&only.node)?,
        );
        let Some(Rows::Lead(k)) = self.region.classes.get(&product) else {
            return None;
        };
        let ty = graph.ty(product);
        if add.op != &ADD
            || graph.is_output(product)
            || bare_product(node)?.int("transA") != 0
            || ty.rank() != k + 1
        {
            return None;
        }
        let bias = add.operands().find(|v| *v != product)?;
        let have = graph.ty(bias);
        let is_whole = !self.region.classes.contains_key(&bias);
        let fits = have.rank() == 1 && have.dims[0].same(&ty.dims[*k]) == Same::Yes;
        (is_whole && fits && have.dtype == ty.dtype).then_some(bias)
    }

    /// Emits a product and the vector that `add` adds to it as one op.
    fn biased_product(
        &mut self,
        add: &Node,
        now: &FxHashMap<ValueId, ValueId>,
    ) -> Result<Option<Vec<ValueId>>> {
        let found = add.operands().find_map(|v| Some((v, self.biased(v)?)));
        let Some((product, bias)) = found else {
            return Ok(None);
        };
        let maker = self.b.graph.def_node(product);
        let maker = maker.ok_or_else(|| bug("a product without its node"))?;
        let node = &self.snapshot.nodes[&maker];
        let (Some(attrs), Some(a), Some(w)) = (bare_product(node), node.ins[0], node.ins[1]) else {
            return Err(bug("a product lacks an operand"));
        };
        let chunk = |v: ValueId| now.get(&v).copied();
        let a = chunk(a).ok_or_else(|| bug("a product has no rows"))?;
        let (w, bias) = (chunk(w).unwrap_or_else(|| self.own(w)), self.own(bias));
        Ok(Some(vec![self.b.emit(&GEMM, &[a, w, bias], attrs)?]))
    }

    /// Adds results of a chunk to the sums and pieces of the whole.
    fn gather(&mut self, chunk: &Chunk, outputs: &[ValueId]) -> Result<()> {
        self.b.prefix = "tile".into();
        for v in outputs {
            // A value without a part here was added to its sum when its node was emitted.
            let Some(part) = chunk.values.get(v).copied() else {
                continue;
            };
            if self.region.classes[v] != Rows::Sum {
                self.pieces.entry(*v).or_default().push(part);
                continue;
            }
            let wide = compute_type(self.b.ty(part).dtype);
            let sum = match self.sums.get(v).copied() {
                None => self.b.cast(part, wide)?,
                Some(sum) if self.b.ty(part).dtype == wide => self.b.add(sum, part)?,
                Some(sum) => self.plain(&ACCUMULATE, &[sum, part])?,
            };
            self.sums.insert(*v, sum);
        }
        Ok(())
    }

    /// Emits the cotangent of a sum that is divided by `total` afterwards; 0 where no label counts.
    fn share(&mut self, dloss: ValueId, total: ValueId) -> Result<ValueId> {
        let (narrow, wide) = (self.b.ty(dloss).dtype, self.b.ty(total).dtype);
        let dloss = self.b.cast(dloss, wide)?;
        let zero = self.b.scalar(wide, 0.0);
        let share = self.b.div(dloss, total)?;
        let none = self.plain(&EQUAL, &[total, zero])?;
        let share = self.b.eval(select(none, zero, share))?;
        self.b.cast(share, narrow)
    }

    /// Emits the sum of all chunks as the whole result.
    fn summed(&mut self, old: ValueId, maker: NodeId) -> Result<ValueId> {
        let ty = self.b.ty(old).clone();
        let mut sum = self.sums[&old];
        if let Some(total) = self.totals.get(&maker).copied() {
            let total = self.b.cast(total, self.b.ty(sum).dtype)?;
            sum = self.b.div(sum, total)?;
        }
        let sum = self.b.cast(sum, ty.dtype)?;
        if self.b.ty(sum).dims == ty.dims {
            return Ok(sum);
        }
        if let Some(dims) = ty.static_dims() {
            let shape = self.b.ints(&dims);
            return self.plain(&RESHAPE, &[sum, shape]);
        }
        let shape = self.dims(&ty.dims)?;
        self.plain(&RESHAPE, &[sum, shape])
    }
}
