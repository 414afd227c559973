//! Moves transposes of scores behind the ops that read them, so that classes stay the last axis and all other axes are rows.
//!
//! A 1x1 convolution that makes scores `[N, C, …]` is a product of the pixels, whose result is transposed. A loss that needs
//! its classes or its time steps elsewhere transposes scores `[N, T, C]`. Ops on each element, along the classes, reductions and
//! changes of shape are computed of the scores before the transpose instead, with their axes renamed. A transpose moves until a
//! loss or an op that is none of these reads it; there it is of something narrow, as a rule. It stays where that leads to no op
//! along the classes, no reduction and no loss.
//!
//! A mean over rows and classes is the mean of what is the mean over the classes of each row.

use super::heads::{heads, is_product};
use crate::error::Result;
use crate::ir::op::{BatchAxes, Effect, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Dim, Graph, Node, NodeId, Same, ValueId};
use crate::ops::arith::ADD;
use crate::ops::batch_axes::{axis_of, own_axes};
use crate::ops::conv::CONV;
use crate::ops::matmul::MATMUL;
use crate::ops::reduce::REDUCE_MEAN;
use crate::ops::rule::compute_type;
use crate::ops::shape::{IDENTITY, RESHAPE, SHAPE, TRANSPOSE};
use crate::ops::{Builder, EmitExt};
use rustc_hash::{FxHashMap, FxHashSet};

/// A value that is the transpose of another.
#[derive(Clone)]
struct Moved {
    /// The other value.
    from: ValueId,
    /// The axis of `from` that each axis is.
    perm: Vec<usize>,
}

/// A graph whose transposes are being moved.
struct Sink<'b, 'g> {
    b: &'b mut Builder<'g>,
    /// Axes of reductions and slices.
    axes: FxHashMap<NodeId, Vec<usize>>,
    /// Transposes that no node makes yet, in the order they were found.
    moved: FxHashMap<ValueId, Moved>,
    found: Vec<ValueId>,
    /// Nodes that something else is computed for.
    sunk: FxHashSet<NodeId>,
    /// Numbers of classes.
    widths: FxHashSet<Dim>,
    /// What follows from scores or from labels as one-hot vectors.
    below: FxHashSet<ValueId>,
    /// The new value for each value that was replaced.
    replaced: FxHashMap<ValueId, ValueId>,
}

/// Moves the transposes. Returns the new value for each value that was replaced. New nodes are at the end of the order.
///
/// # Errors
/// What typing refuses.
pub fn sink(graph: &mut Graph, contents: Contents) -> Result<FxHashMap<ValueId, ValueId>> {
    let order = graph.order().to_vec();
    let axes = |id: &NodeId| Some((*id, own_axes(graph, &contents, graph.node(*id))?));
    let axes = order.iter().filter_map(axes).collect();
    let below: FxHashSet<ValueId> = heads(graph).into_iter().collect();
    let classes = |v: &ValueId| {
        let dims = &graph.ty(*v).dims;
        match graph.node(graph.def_node(*v)?).op.class {
            OpClass::Convolution => dims.get(1).cloned(),
            _ => dims.last().cloned(),
        }
    };
    let widths = below.iter().filter_map(classes).collect();
    let mut b = Builder::resume(graph, contents);
    let mut sink = Sink {
        b: &mut b,
        axes,
        moved: FxHashMap::default(),
        found: Vec::new(),
        sunk: FxHashSet::default(),
        widths,
        below,
        replaced: FxHashMap::default(),
    };
    for id in &order {
        sink.node(*id)?;
    }
    sink.keep_useful(&order);
    sink.finish()
}

impl Sink<'_, '_> {
    fn node(&mut self, id: NodeId) -> Result<()> {
        let node = self.b.graph.node(id);
        let follows = node.operands().any(|v| self.below.contains(&v));
        let is_head = node.outs.first().is_some_and(|v| self.below.contains(v));
        if !follows && !is_head && node.op.axes != BatchAxes::OneHot {
            return Ok(());
        }
        let node = resume_at(self.b, id);
        self.below.extend(&node.outs);
        if is_head && is_product(&node) {
            if let Some(moved) = self.pixels(&node)? {
                self.sunk.insert(id);
                self.give(node.outs[0], moved)?;
            }
            return Ok(());
        }
        if node.op == &TRANSPOSE {
            let x = node.ins[0].expect("I4: a transpose has an operand");
            let given = self.given(x);
            let perm = node.attrs.opt_ints("perm").map(<[i64]>::to_vec);
            let perm = perm.unwrap_or_else(|| (0..given.perm.len() as i64).rev().collect());
            if perm.len() > 2 {
                let perm = perm.iter().map(|p| given.perm[*p as usize]).collect();
                self.sunk.insert(id);
                self.give(node.outs[0], Moved { perm, ..given })?;
            }
            return Ok(());
        }
        let reads = node.operands().any(|v| self.moved.contains_key(&v));
        if !(reads || node.op == &REDUCE_MEAN) || node.op.effect != Effect::Pure {
            return Ok(());
        }
        if let Some(outs) = self.instead(id, &node)? {
            self.sunk.insert(id);
            for (old, new) in node.outs.iter().zip(outs) {
                self.give(*old, new)?;
            }
        }
        Ok(())
    }

    /// Returns what a value is a transpose of; the value itself if it is none.
    fn given(&self, v: ValueId) -> Moved {
        let own = || Moved {
            from: v,
            perm: (0..self.b.ty(v).rank()).collect(),
        };
        self.moved.get(&v).cloned().unwrap_or_else(own)
    }

    /// Records that a value is the transpose of another, or replaces it where no axis moves.
    fn give(&mut self, old: ValueId, moved: Moved) -> Result<()> {
        self.below.insert(moved.from);
        if moved.perm.iter().copied().eq(0..moved.perm.len()) {
            return self.replace(old, moved.from);
        }
        self.found.push(old);
        self.moved.insert(old, moved);
        Ok(())
    }

    fn replace(&mut self, old: ValueId, new: ValueId) -> Result<()> {
        let is_new = self.b.graph.value(new).uses().is_empty() && !self.b.graph.is_output(new);
        // A value that keeps its readers keeps its name.
        let new = match self.b.graph.is_output(old) && !is_new {
            true => self.b.emit(&IDENTITY, &[new], Attrs::new())?,
            false => new,
        };
        match is_new || self.b.graph.is_output(old) {
            true => take_over(self.b, old, new),
            false => self.b.graph.replace_uses(old, new),
        }
        self.replaced.insert(old, new);
        Ok(())
    }

    /// Emits a permutation of axes; a change of shape where only axes of size 1 move.
    fn permuted(&mut self, v: ValueId, perm: &[usize]) -> Result<ValueId> {
        if perm.iter().copied().eq(0..perm.len()) {
            return Ok(v);
        }
        let dims = self.b.ty(v).dims.clone();
        let one = |axis: &usize| dims[*axis].is_one();
        if perm.iter().filter(|axis| !one(axis)).is_sorted() {
            let gone: Vec<i64> = (0..dims.len()).filter(one).map(|a| a as i64).collect();
            let new = (0..perm.len()).filter(|i| one(&perm[*i]));
            let new: Vec<i64> = new.map(|i| i as i64).collect();
            let v = self.b.squeeze(v, &gone)?;
            return self.b.unsqueeze(v, &new);
        }
        let perm: Vec<i64> = perm.iter().map(|axis| *axis as i64).collect();
        self.b.transpose(v, &perm)
    }

    /// Emits an operand with the axes of what `perm` transposes, to be broadcast.
    fn arranged(&mut self, v: ValueId, perm: &[usize]) -> Result<Option<ValueId>> {
        let (rank, own) = (perm.len(), self.b.ty(v).rank());
        if self.b.ty(v).elements().is_one() && own < rank {
            return Ok(Some(v));
        }
        let mut given = self.given(v);
        if own < rank {
            if self.moved.contains_key(&v) {
                return Ok(None);
            }
            let new: Vec<i64> = (0..(rank - own) as i64).collect();
            given = Moved {
                from: self.b.unsqueeze(v, &new)?,
                perm: (0..rank).collect(),
            };
        }
        let mut axes = vec![0; rank];
        for (to, from) in perm.iter().zip(&given.perm) {
            axes[*to] = *from;
        }
        self.permuted(given.from, &axes).map(Some)
    }

    /// Returns the permutation of the first operand of `rank` axes that is a transpose.
    fn perm_of(&self, node: &Node, rank: usize) -> Option<Vec<usize>> {
        let mut perms = node
            .operands()
            .filter_map(|v| Some(&self.moved.get(&v)?.perm));
        perms.find(|perm| perm.len() == rank).cloned()
    }

    /// Emits what a node makes of operands before their transpose; `None` where there is no rule.
    fn instead(&mut self, id: NodeId, node: &Node) -> Result<Option<Vec<Moved>>> {
        let rank = self.b.ty(node.outs[0]).rank();
        let given = node.operand(0).map(|v| self.given(v));
        let axes = self.axes.get(&id).cloned();
        match (node.op.axes, given, axes) {
            (BatchAxes::Pointwise, ..) => {
                let perm = self.perm_of(node, rank);
                self.rearranged(node, perm, node.attrs.clone())
            }
            (BatchAxes::AlongAxis, ..) => {
                let alike = node
                    .outs
                    .iter()
                    .chain(node.ins.first().into_iter().flatten());
                let alike = alike.into_iter().all(|v| self.b.ty(*v).rank() == rank);
                let axis = axis_of(node, rank);
                let perm = self.perm_of(node, rank);
                let perm = perm.filter(|perm| alike && perm[axis] + 1 == rank);
                let attrs = node.attrs.clone().with("axis", rank as i64 - 1);
                self.rearranged(node, perm, attrs)
            }
            (BatchAxes::Reduced, Some(mut x), Some(axes)) if !axes.is_empty() => {
                let last = x.perm.len() - 1;
                let has_classes = axes.iter().any(|a| x.perm[*a] == last)
                    && self.widths.contains(&self.b.ty(x.from).dims[last]);
                let dtype = self.b.dtype(x.from);
                let is_wide = dtype == compute_type(dtype);
                if node.op == &REDUCE_MEAN && has_classes && axes.len() > 1 && is_wide {
                    // The mean of rows, of which the mean over the classes is narrow.
                    let classes = self.b.ints(&[last as i64]);
                    x.from = self
                        .b
                        .emit(&REDUCE_MEAN, &[x.from, classes], Attrs::new())?;
                } else if node.operand(0) == Some(x.from) {
                    return Ok(None);
                }
                let mut of: Vec<i64> = axes.iter().map(|a| x.perm[*a] as i64).collect();
                of.sort_unstable();
                let ins = vec![Some(x.from), Some(self.b.ints(&of))];
                let new = self.b.emit_n(node.op, ins, node.attrs.clone(), 1)?[0];
                let left: Vec<usize> = match rank == x.perm.len() {
                    true => x.perm,
                    false => {
                        let stay = (0..x.perm.len()).filter(|a| !axes.contains(a));
                        stay.map(|a| x.perm[a]).collect()
                    }
                };
                let before = |axis: &usize| left.iter().filter(|other| *other < axis).count();
                let perm = left.iter().map(before).collect();
                Ok(Some(vec![Moved { from: new, perm }]))
            }
            (BatchAxes::Sliced, Some(x), Some(axes)) => {
                let of: Vec<i64> = axes.iter().map(|a| x.perm[*a] as i64).collect();
                let mut ins = node.ins.clone();
                ins[0] = Some(x.from);
                ins[3] = Some(self.b.ints(&of));
                let from = self.b.emit_n(node.op, ins, node.attrs.clone(), 1)?[0];
                Ok(Some(vec![Moved { from, ..x }]))
            }
            (BatchAxes::Regrouped, Some(x), _) => self.regrouped(node, &x),
            (BatchAxes::ClassLoss, Some(x), _) => self.classes_last(node, &x),
            _ => Ok(None),
        }
    }

    /// Emits a node whose operands of as many axes as its results are before the transpose `perm`.
    fn rearranged(
        &mut self,
        node: &Node,
        perm: Option<Vec<usize>>,
        attrs: Attrs,
    ) -> Result<Option<Vec<Moved>>> {
        let Some(perm) = perm else {
            return Ok(None);
        };
        let mut ins = node.ins.clone();
        for v in ins.iter_mut().flatten() {
            let is_tensor = self.b.ty(*v).rank() == perm.len();
            if !is_tensor && node.op.axes == BatchAxes::AlongAxis {
                continue;
            }
            match self.arranged(*v, &perm)? {
                Some(new) => *v = new,
                None => return Ok(None),
            }
        }
        let outs = self.b.emit_n(node.op, ins, attrs, node.outs.len())?;
        let outs = outs.into_iter().map(|from| Moved {
            from,
            perm: perm.clone(),
        });
        Ok(Some(outs.collect()))
    }

    /// Emits a change of shape that joins or divides axes which lie side by side before the transpose, too.
    fn regrouped(&mut self, node: &Node, x: &Moved) -> Result<Option<Vec<Moved>>> {
        let v = node.ins[0].expect("I4: a layout op has an operand");
        let (old, new) = (&self.b.ty(v).dims, &self.b.ty(node.outs[0]).dims);
        let Some(mut groups) = groups(old, new) else {
            return Ok(None);
        };
        let mut order: Vec<usize> = (0..old.len()).filter(|a| !old[*a].is_one()).collect();
        order.sort_by_key(|a| x.perm[*a]);
        let place = |axis: &usize| order.iter().position(|a| a == axis).unwrap_or(0);
        let together = |(axes, _): &(Vec<usize>, Vec<usize>)| {
            axes.windows(2)
                .all(|two| place(&two[0]) + 1 == place(&two[1]))
        };
        if !groups.iter().all(together) {
            return Ok(None);
        }
        groups.sort_by_key(|(axes, _)| axes.first().map_or(0, |a| place(a) + 1));
        let order: Vec<usize> = groups.into_iter().flat_map(|(_, axes)| axes).collect();
        let mut perm = vec![0; order.len()];
        for (at, axis) in order.iter().enumerate() {
            perm[*axis] = at;
        }
        let shape: Vec<i64> = order
            .iter()
            .map(|a| new[*a].as_const().unwrap_or(-1))
            .collect();
        if shape.iter().filter(|n| **n == -1).count() > 1 {
            return Ok(None);
        }
        let from = self.b.reshape(x.from, &shape)?;
        Ok(Some(vec![Moved { from, perm }]))
    }

    /// Emits a loss of scores whose classes were moved behind the first axis, with all other axes as one.
    fn classes_last(&mut self, node: &Node, x: &Moved) -> Result<Option<Vec<Moved>>> {
        let last = x.perm.len() - 1;
        let graph = &self.b.graph;
        let is_read = |v: &ValueId| !graph.value(*v).uses().is_empty() || graph.is_output(*v);
        let classes = self.b.ty(x.from).dims[last].as_const().filter(|n| *n > 0);
        let is_behind = x
            .perm
            .iter()
            .copied()
            .eq([0, last].into_iter().chain(1..last));
        let (Some(classes), true) = (classes, is_behind && !node.outs.iter().skip(1).any(is_read))
        else {
            return Ok(None);
        };
        let labels = node.ins[1].expect("I4: a loss has labels");
        let mut ins = node.ins.clone();
        ins[0] = Some(self.b.reshape(x.from, &[-1, classes])?);
        ins[1] = Some(self.b.reshape(labels, &[-1])?);
        let mut new = self
            .b
            .emit_n(node.op, ins, node.attrs.clone(), node.outs.len())?[0];
        if node.attrs.str("reduction") == "none" {
            let shape = self.b.emit(&SHAPE, &[labels], Attrs::new())?;
            new = self.b.emit(&RESHAPE, &[new, shape], Attrs::new())?;
        }
        let perm = (0..self.b.ty(new).rank()).collect();
        Ok(Some(vec![Moved { from: new, perm }]))
    }

    /// Emits a convolution of single pixels as a product with them.
    fn pixels(&mut self, node: &Node) -> Result<Option<Moved>> {
        let (Some(x), Some(w)) = (node.operand(0), node.operand(1)) else {
            return Ok(None);
        };
        let all = |name: &str, n: i64| {
            let given = node.attrs.opt_ints(name);
            given.is_none_or(|given| given.iter().all(|v| *v == n))
        };
        let Some(dims) = self.b.ty(w).static_dims() else {
            return Ok(None);
        };
        let single = node.op == &CONV
            && node.attrs.int("group") == 1
            && all("strides", 1)
            && all("pads", 0)
            && dims[2..].iter().all(|n| *n == 1);
        if !single {
            return Ok(None);
        }
        let rank = dims.len();
        // What was transposed already is not transposed back.
        let mut given = self.given(x);
        let maker = self.b.graph.def_node(x).map(|id| self.b.graph.node(id));
        if let Some(maker) = maker.filter(|maker| maker.op == &TRANSPOSE)
            && let (Some(from), Some(perm)) = (maker.operand(0), maker.attrs.opt_ints("perm"))
        {
            let perm = perm.iter().map(|p| *p as usize).collect();
            given = Moved { from, perm };
        }
        let channels_last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
        let perm: Vec<usize> = channels_last.iter().map(|a| given.perm[*a]).collect();
        let pixels = self.permuted(given.from, &perm)?;
        let matrix = self.b.reshape(w, &dims[..2])?;
        let matrix = self.b.transpose(matrix, &[1, 0])?;
        let mut from = self.b.emit(&MATMUL, &[pixels, matrix], Attrs::new())?;
        if let Some(bias) = node.operand(2) {
            from = self.b.emit(&ADD, &[from, bias], Attrs::new())?;
        }
        let perm = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
        Ok(Some(Moved { from, perm }))
    }

    /// Keeps only those of the nodes that lead to an op which gains by it.
    fn keep_useful(&mut self, order: &[NodeId]) {
        let mut useful = FxHashSet::default();
        for id in order.iter().rev().filter(|id| self.sunk.contains(id)) {
            let node = self.b.graph.node(*id);
            let gains = [
                BatchAxes::AlongAxis,
                BatchAxes::Reduced,
                BatchAxes::ClassLoss,
            ];
            let uses = node.outs.iter().flat_map(|v| self.b.graph.value(*v).uses());
            let is_replaced = node.outs.iter().any(|v| self.replaced.contains_key(v));
            let leads = |node: NodeId| useful.contains(&node);
            if gains.contains(&node.op.axes)
                || is_replaced
                || uses.into_iter().any(|u| leads(u.node))
            {
                useful.insert(*id);
            }
        }
        self.sunk = useful;
    }

    /// Emits those transposes that nodes still read.
    fn finish(mut self) -> Result<FxHashMap<ValueId, ValueId>> {
        for old in std::mem::take(&mut self.found) {
            let moved = self.moved[&old].clone();
            let graph = &self.b.graph;
            let maker = graph.def_node(old).expect("a node made it");
            if !self.sunk.contains(&maker) {
                continue;
            }
            let is_own = graph.node(maker).operand(0) == Some(moved.from);
            let mut uses = graph.value(old).uses().iter();
            let is_read = uses.any(|u| !self.sunk.contains(&u.node)) || graph.is_output(old);
            if is_read && !(is_own && graph.node(maker).op == &TRANSPOSE) {
                resume_at(self.b, maker);
                let new = self.permuted(moved.from, &moved.perm)?;
                self.replace(old, new)?;
            }
        }
        Ok(self.replaced)
    }
}

/// Sets origin, role and prefix of new nodes to those of an old one, and returns a copy of it.
pub fn resume_at(b: &mut Builder, id: NodeId) -> Node {
    let node = b.graph.node(id).clone();
    b.loc = node.loc.clone();
    b.role = node.role;
    b.prefix = format!("{}/early", node.name);
    node
}

/// Gives a value the readers and the name of another.
pub fn take_over(b: &mut Builder, old: ValueId, new: ValueId) {
    let name = b.graph.value(old).name.clone();
    b.graph.rename_value(old, &format!("{name}/late"));
    b.graph.rename_value(new, &name);
    b.graph.replace_uses(old, new);
}

/// Pairs the axes of two shapes of the same elements that hold the same of them, without axes of size 1 in the first shape.
fn groups(old: &[Dim], new: &[Dim]) -> Option<Vec<(Vec<usize>, Vec<usize>)>> {
    let mut groups: Vec<(Vec<usize>, Vec<usize>)> = vec![(Vec::new(), Vec::new())];
    let (mut i, mut j) = (0, 0);
    loop {
        while old.get(i).is_some_and(Dim::is_one) {
            i += 1;
        }
        while new.get(j).is_some_and(Dim::is_one) {
            groups.last_mut()?.1.push(j);
            j += 1;
        }
        if i == old.len() && j == new.len() {
            return Some(groups);
        }
        let (mut left, mut right) = (old.get(i)?.clone(), new.get(j)?.clone());
        let mut group = (vec![i], vec![j]);
        (i, j) = (i + 1, j + 1);
        while left.same(&right) != Same::Yes {
            if right.exact_div(&left).is_some() {
                left = left.mul(old.get(i)?);
                group.0.extend((!old[i].is_one()).then_some(i));
                i += 1;
            } else {
                left.exact_div(&right)?;
                right = right.mul(new.get(j)?);
                group.1.push(j);
                j += 1;
            }
        }
        groups.push(group);
    }
}
