//! Emits a region part by part.

mod sums;

use super::region::{Region, like};
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Builder, Dim, Graph, Node, NodeId, Role, Ty, ValueId};
use crate::ops::accumulate::{ACCUMULATE, ADD_PRODUCT};
use crate::ops::arith::DIV;
use crate::ops::batch_axes::{
    CutCx, Rows, bare_product, cut, is_class_loss_grad, is_mean_loss, is_plain_sum, reduces,
};
use crate::ops::concat::CONCAT;
use crate::ops::fill::CONSTANT_OF_SHAPE;
use crate::ops::logic::EQUAL;
use crate::ops::loss::label_weight;
use crate::ops::matmul::GEMM;
use crate::ops::rule::{choose, compute_type, emit as emit_plain};
use crate::ops::shape::{RESHAPE, SHAPE};
use crate::ops::slice::SLICE;
use rustc_hash::FxHashMap;
use sums::Summed;

/// A region to be emitted, as it was before anything was.
pub struct Work<'r> {
    region: &'r Region,
    /// Into how many parts.
    pub count: usize,
    nodes: FxHashMap<NodeId, Node>,
    inputs: [Vec<ValueId>; 2],
    outputs: [Vec<ValueId>; 2],
    /// Axes of reductions.
    axes: FxHashMap<NodeId, Vec<usize>>,
}

impl<'r> Work<'r> {
    pub fn new(graph: &Graph, contents: &Contents, region: &'r Region, count: usize) -> Work<'r> {
        let sides = [&region.nodes, &region.after];
        let node = |id: &NodeId| (*id, graph.node(*id).clone());
        let axes = |id: &NodeId| Some((*id, reduces(graph, contents, graph.node(*id))?));
        Work {
            region,
            count,
            nodes: region.all().map(node).collect(),
            inputs: sides.map(|nodes| region.parted_inputs(graph, nodes)),
            outputs: sides.map(|nodes| region.outputs(graph, nodes)),
            axes: region.all().filter_map(axes).collect(),
        }
    }
}

/// What was emitted for a region.
pub struct Emitted {
    pub parts: usize,
    /// New nodes that take the place of the region's nodes, and of those that run later.
    pub nodes: [Vec<NodeId>; 2],
}

/// Emits the parts of the region at the end of the graph, fewer where there are fewer rows; whoever read its results
/// reads what the parts make. `moved` says what was put in the place of results of other regions before, and is added to.
///
/// # Errors
/// What typing refuses.
pub fn emit(
    b: &mut Builder,
    work: &Work,
    moved: &mut FxHashMap<ValueId, ValueId>,
) -> Result<Emitted> {
    let region = work.region;
    let is_chain = !region.after.is_empty();
    b.prefix = "tile".into();
    b.loc = work.nodes[&region.nodes[0]].loc.clone();
    b.role = match is_chain {
        true => work.nodes[&region.nodes[0]].role,
        false => Role::Backward,
    };
    let mut parts = Parts {
        region,
        work,
        flats: FxHashMap::default(),
        totals: FxHashMap::default(),
        shares: FxHashMap::default(),
        sums: FxHashMap::default(),
        pieces: FxHashMap::default(),
        products: FxHashMap::default(),
        moved,
        b,
    };
    let mut nodes = [Vec::new(), Vec::new()];
    let first = parts.b.graph.order().len();
    parts.means()?;
    let cuts = parts.cuts(work.count)?;
    let mut now: Vec<Part> = cuts.iter().map(|_| Part::default()).collect();
    for (side, ids) in [&region.nodes, &region.after].into_iter().enumerate() {
        let start = match side {
            0 => first,
            _ => parts.b.graph.order().len(),
        };
        if side == 1 {
            parts.b.role = Role::Backward;
        }
        let outputs = &work.outputs[side];
        parts.products(outputs);
        for ((start, end), part) in cuts.iter().zip(&mut now) {
            parts.part(*start, *end, part, &work.inputs[side], ids)?;
            parts.gather(part, outputs)?;
        }
        for v in outputs {
            parts.replace(*v)?;
        }
        nodes[side] = parts.b.graph.order()[start..].to_vec();
    }
    Ok(Emitted {
        parts: cuts.len(),
        nodes,
    })
}

/// What has been emitted for some of the rows.
#[derive(Default)]
struct Part {
    /// By the value that it is a part of.
    values: FxHashMap<ValueId, ValueId>,
    /// How many rows it has, as an int64 vector of length 1.
    count: Option<ValueId>,
}

struct Parts<'r, 'g> {
    region: &'r Region,
    work: &'r Work<'r>,
    /// Values from outside with their rows as one axis.
    flats: FxHashMap<ValueId, ValueId>,
    /// The weight of all labels, of nodes that take the mean.
    totals: FxHashMap<NodeId, ValueId>,
    /// The cotangent of such a node, divided by its total.
    shares: FxHashMap<NodeId, ValueId>,
    /// Sums over the rows so far, in the type they are added up in.
    sums: FxHashMap<ValueId, ValueId>,
    /// Parts of results that have rows.
    pieces: FxHashMap<ValueId, Vec<ValueId>>,
    /// Sums of products, which need not exist one by one.
    products: FxHashMap<ValueId, Summed>,
    /// What stands for results of regions that were emitted before.
    moved: &'r mut FxHashMap<ValueId, ValueId>,
    b: &'r mut Builder<'g>,
}

impl Parts<'_, '_> {
    /// The value that has taken the place of one from outside, if any has.
    fn own(&self, v: ValueId) -> ValueId {
        self.moved.get(&v).copied().unwrap_or(v)
    }

    /// The weight of all labels, for every mean over them.
    fn means(&mut self) -> Result<()> {
        let mut known = FxHashMap::default();
        for id in self.region.all() {
            let node = &self.work.nodes[id];
            if is_mean_loss(node) {
                let at = usize::from(is_class_loss_grad(node.op));
                let (labels, weights) = (node.ins[at + 1], node.ins.get(at + 2).copied().flatten());
                let scores = node.ins[at].expect("I4: a loss has scores");
                let attrs = node.attrs.clone();
                let dtype = compute_type(self.b.ty(scores).dtype);
                let labels = labels.expect("I4: a loss has labels");
                let key = (labels, weights, attrs.opt_int("ignore_index"), dtype);
                let total = match known.get(&key) {
                    Some(total) => *total,
                    None => label_weight(self.b, labels, weights, &attrs, dtype)?,
                };
                known.insert(key, total);
                self.totals.insert(*id, total);
            }
        }
        Ok(())
    }

    /// How many rows there are, as an int64 vector of length 1.
    fn n_rows(&mut self) -> Result<ValueId> {
        if let Some(n) = self.region.rows.as_const() {
            return Ok(self.b.ints(&[n]));
        }
        let flat = |rows: &Rows| matches!(rows, Rows::Lead(_));
        let inputs = &self.work.inputs[0];
        let known = inputs.iter().find(|v| flat(&self.region.classes[*v]));
        let Some(v) = known.copied() else {
            return Err(Error::bug(
                "tile",
                "no operand says how many rows there are",
            ));
        };
        let v = self.flat(v)?;
        let first = Attrs::new().with("start", 0).with("end", 1);
        self.b.emit(&SHAPE, &[v], first)
    }

    /// First and last row of each part, as int64 vectors of length 1. None is empty where there are as many rows as parts.
    fn cuts(&mut self, count: usize) -> Result<Vec<(ValueId, ValueId)>> {
        let count = count as i64;
        if let Some(rows) = self.region.rows.as_const() {
            let each = (rows + count - 1) / count;
            let starts = (0..rows).step_by(each.max(1) as usize);
            let bounds = starts.map(|at| (at, (at + each).min(rows)));
            let mut bounds: Vec<_> = bounds.collect();
            // No rows at all are one part.
            if bounds.is_empty() {
                bounds.push((0, 0));
            }
            return Ok(bounds
                .into_iter()
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
            let end = self.b.emit(&DIV, &[some, by], Attrs::new())?;
            bounds.push((start, end));
            start = end;
        }
        Ok(bounds)
    }

    /// A value with its rows as one axis.
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
        let Rows::Lead(k) = rows else {
            return Ok(v);
        };
        if k == 1 {
            return Ok(v);
        }
        let row = self.b.ty(v).dims[k..].to_vec();
        let row: Option<Vec<i64>> = row.iter().map(Dim::as_const).collect();
        let shape = match row {
            Some(row) => {
                let target: Vec<i64> = std::iter::once(-1).chain(row).collect();
                self.b.ints(&target)
            }
            None => {
                let all = Attrs::new().with("start", k as i64);
                let row = self.b.emit(&SHAPE, &[v], all)?;
                let first = self.b.ints(&[-1]);
                self.b
                    .emit(&CONCAT, &[first, row], Attrs::new().with("axis", 0))?
            }
        };
        self.b.emit(&RESHAPE, &[v, shape], Attrs::new())
    }

    /// Emits nodes of the region for the rows from `start` up to `end`.
    fn part(
        &mut self,
        start: ValueId,
        end: ValueId,
        part: &mut Part,
        inputs: &[ValueId],
        nodes: &[NodeId],
    ) -> Result<()> {
        let Part { values: now, count } = part;
        self.b.prefix = "tile".into();
        for v in inputs.iter().copied() {
            if now.contains_key(&v) {
                continue;
            }
            let axis = i64::from(self.region.classes[&v] == Rows::Last);
            let flat = self.flat(v)?;
            let (axis, one) = (self.b.ints(&[axis]), self.b.ints(&[1]));
            let part = self
                .b
                .emit(&SLICE, &[flat, start, end, axis, one], Attrs::new())?;
            now.insert(v, part);
            if count.is_none() && axis == self.b.ints(&[0]) {
                let first = Attrs::new().with("start", 0).with("end", 1);
                *count = Some(match self.b.ty(part).dims[0].as_const() {
                    Some(n) => self.b.ints(&[n]),
                    None => self.b.emit(&SHAPE, &[part], first)?,
                });
            }
        }
        let Some(count) = *count else {
            return Err(Error::bug(
                "tile",
                "no operand says how many rows a part has",
            ));
        };
        for id in nodes {
            self.node(*id, now, count)?;
        }
        Ok(())
    }

    fn node(
        &mut self,
        id: NodeId,
        now: &mut FxHashMap<ValueId, ValueId>,
        count: ValueId,
    ) -> Result<()> {
        let node = self.work.nodes[&id].clone();
        self.b.loc = node.loc.clone();
        self.b.prefix = format!("{}/tile", node.name);
        let fit = &self.region.fits[&id];
        let mut ins: Vec<Option<ValueId>> = node
            .ins
            .iter()
            .map(|v| v.map(|v| now.get(&v).copied().unwrap_or_else(|| self.own(v))))
            .collect();
        let in_types = node
            .ins
            .iter()
            .map(|v| v.map(|v| self.b.ty(v).clone()))
            .collect();
        if self.add_product(node.outs[0], &ins, count)? {
            return Ok(());
        }
        if self.biased(node.outs[0]).is_some() {
            return Ok(());
        }
        let outs = match self.losses(&node, &ins)? {
            Some(outs) => Some(outs),
            None => self.biased_product(&node, now)?,
        };
        if let Some(outs) = outs {
            now.extend(node.outs.iter().copied().zip(outs));
            return Ok(());
        }
        if is_plain_sum(node.op) && fit.outs[0] == Rows::Sum {
            self.widen_first(&mut ins)?;
        }
        let out_types = node.outs.iter().map(|v| self.b.ty(*v).clone()).collect();
        let mut attrs = node.attrs.clone();
        if let Some(total) = self.totals.get(&id).copied() {
            attrs.set("reduction", "sum".into());
            if is_class_loss_grad(node.op) {
                let dloss = ins[0].expect("I4: a gradient has a cotangent");
                ins[0] = Some(match self.shares.get(&id) {
                    Some(share) => *share,
                    None => self.share(dloss, total)?,
                });
                self.shares.extend(ins[0].map(|share| (id, share)));
            }
        }
        let outs = cut(CutCx {
            b: self.b,
            op: node.op,
            attrs,
            ins,
            in_types,
            out_types,
            fit,
            axes: self.work.axes.get(&id).cloned(),
            count,
        })?;
        now.extend(node.outs.iter().copied().zip(outs));
        Ok(())
    }

    /// Lets whoever read `old` read what its parts make together.
    fn replace(&mut self, old: ValueId) -> Result<()> {
        self.b.prefix = self.b.graph.value(old).name.clone();
        let maker = self
            .b
            .graph
            .def_node(old)
            .expect("a region makes its outputs");
        self.b.loc = self.work.nodes[&maker].loc.clone();
        let new = match self.pieces.remove(&old) {
            Some(pieces) => self.joined(old, &pieces)?,
            None => self.summed(old, maker)?,
        };
        let name = self.b.graph.value(old).name.clone();
        self.b.graph.rename_value(old, &format!("{name}/whole"));
        if self.b.graph.value(new).name != name {
            self.b.graph.rename_value(new, &name);
        }
        self.b.graph.replace_uses(old, new);
        self.moved.insert(old, new);
        Ok(())
    }

    fn joined(&mut self, old: ValueId, pieces: &[ValueId]) -> Result<ValueId> {
        let ty = self.b.ty(old).clone();
        let Rows::Lead(k) = self.region.classes[&old] else {
            let axis = Attrs::new().with("axis", 1);
            return self.b.emit(&CONCAT, pieces, axis);
        };
        let flat = self.b.emit(&CONCAT, pieces, Attrs::new().with("axis", 0))?;
        if self.b.ty(flat).dims == ty.dims {
            return Ok(flat);
        }
        let shape = match ty.static_dims() {
            Some(dims) => self.b.ints(&dims),
            None => {
                let axis = Attrs::new().with("axis", 0);
                let all: Vec<ValueId> = self.work.inputs.concat();
                let classes = &self.region.classes;
                let batch = match like(self.b.graph, &all, classes, &ty.dims[..k]) {
                    Some(v) => {
                        let v = self.own(v);
                        let first = Attrs::new().with("start", 0).with("end", k as i64);
                        self.b.emit(&SHAPE, &[v], first)?
                    }
                    None if k == 1 => self.n_rows()?,
                    None => return Err(Error::bug("tile", "no operand has the sizes of a result")),
                };
                let rank = ty.rank() as i64;
                let row = Attrs::new()
                    .with("start", 1)
                    .with("end", rank - k as i64 + 1);
                let row = self.b.emit(&SHAPE, &[flat], row)?;
                self.b.emit(&CONCAT, &[batch, row], axis)?
            }
        };
        self.b.emit(&RESHAPE, &[flat, shape], Attrs::new())
    }
}
