//! The nodes that have to be tiled together so that one wide value never exists whole.
//!
//! A value is wide if a row of it is at least half as wide as a row of the scores, and wider than what the scores are made of
//! ([`Wide`]). A node that makes or reads a wide value belongs to the region, and so does every node on a path between two nodes of it. Narrow values are its border. Every
//! node of a region treats rows alike or sums over them (`ops/batch_axes.rs`), so that chunks of the rows can pass through
//! one after the other.
//!
//! Rows are all elements of the axes before the classes. Where a node mixes these, the last of the axes is no axis of rows but
//! part of a row, and so on, until a row is an example of the batch.
//!
//! The backward pass of scores begins where their forward pass ends, so a chunk passes through both at once. In the middle
//! of a model ([`Region::chain`]) all chunks pass through the forward nodes first. They pass through the backward nodes
//! later, which read what the forward nodes made of the same chunk.

use crate::ir::op::{BatchAxes, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Atom, Dim, Graph, NodeId, Role, Same, SecondaryMap, ValueId, same_dims};
use crate::ops::batch_axes::{Fit, FitCx, Reason, Rows, each, fit, lead};
use rustc_hash::{FxHashMap, FxHashSet};

/// Nodes to be tiled together.
pub struct Region {
    /// Nodes in the order they run.
    pub nodes: Vec<NodeId>,
    /// Backward nodes that run later, in their order.
    pub after: Vec<NodeId>,
    /// How each node treats rows.
    pub fits: FxHashMap<NodeId, Fit>,
    /// Where the rows of each value are.
    pub classes: FxHashMap<ValueId, Rows>,
    /// Number of rows.
    pub rows: Dim,
    /// Elements in a row of the scores.
    pub width: Dim,
    wide: Wide,
}

/// Which rows are wide.
#[derive(Clone)]
struct Wide {
    /// Elements in a row of the scores.
    most: Dim,
    /// Elements in a row of what the scores are a product of, if half of the scores are wide, too: joined scores of several
    /// products, such as those of sampled classes, and pieces of scores.
    narrow: Option<i64>,
}

/// A reason that says nothing of other scores.
pub const ONE_ROW: Reason = "there is one row only";

/// Why there is no region.
pub struct Refusal {
    /// The node that cannot be cut, if one is to blame.
    pub node: Option<NodeId>,
    /// The reason, for people.
    pub why: Reason,
    /// Operands of the node, all one value from outside, that it reads otherwise than the region reads this value. The region
    /// may exist if they are a value of their own.
    pub apart: Vec<usize>,
    /// Something narrow of the region that a node reads for all rows. The region may exist if that is there before it.
    pub early: Option<Early>,
}

/// Something narrow that follows from the rows of a region, such as a sum over them, and that is read for all rows.
pub struct Early {
    /// What is read.
    pub value: ValueId,
    /// The nodes with rows that lead to it, in order.
    pub nodes: Vec<NodeId>,
    /// The first wide value that they make.
    pub wide: ValueId,
    /// Nodes that read it so, each with the operand.
    pub readers: Vec<(NodeId, usize)>,
}

impl Refusal {
    fn new(node: Option<NodeId>, why: Reason) -> Refusal {
        Refusal {
            node,
            why,
            apart: Vec::new(),
            early: None,
        }
    }

    /// Returns the node and [`Self::apart`], if that may help.
    pub fn to_split(&self) -> Option<(NodeId, &[usize])> {
        let node = self.node.filter(|_| !self.apart.is_empty())?;
        Some((node, &self.apart))
    }
}

impl Region {
    /// Returns the region around `scores`, whose axis `classes` is the classes: a chunk of rows passes forward and backward
    /// at once where possible, or all chunks pass forward first. With `halves`, what is half as wide belongs to it.
    ///
    /// # Errors
    /// The first node that cannot be cut along rows.
    pub fn around(
        graph: &Graph,
        contents: &Contents,
        scores: ValueId,
        classes: usize,
        halves: bool,
    ) -> Result<Region, Refusal> {
        let mut first = None;
        for axes in (1..=classes).rev() {
            let search = |is_chain| Region::search(graph, contents, scores, axes, is_chain, halves);
            // What a loss computes of whole sequences lies between the forward and the backward part of its rows.
            let found = search(false).or_else(|once| match search(true) {
                Err(_) if !once.apart.is_empty() || once.early.is_some() => Err(once),
                found => found,
            });
            match found {
                Ok(region) => return Ok(region),
                Err(refusal) => {
                    first.get_or_insert(refusal);
                }
            }
        }
        Err(first.unwrap_or(Refusal::new(None, ONE_ROW)))
    }

    /// Returns the region around `wide`, a value of the forward pass, with its backward nodes apart.
    ///
    /// # Errors
    /// The first node that cannot be cut along rows.
    pub fn chain(graph: &Graph, contents: &Contents, wide: ValueId) -> Result<Region, Refusal> {
        let axes = graph.ty(wide).rank().saturating_sub(1);
        let search = |halves| Region::search(graph, contents, wide, axes, true, halves);
        search(true).or_else(|refusal| search(false).map_err(|_| refusal))
    }

    /// Returns the region around `scores`, whose first `axes` axes are the rows.
    fn search(
        graph: &Graph,
        contents: &Contents,
        scores: ValueId,
        axes: usize,
        is_chain: bool,
        halves: bool,
    ) -> Result<Region, Refusal> {
        let none = |why| Refusal::new(None, why);
        let dims = &graph.ty(scores).dims;
        let (batch, row) = dims.split_at(axes.min(dims.len()));
        let width = Dim::product(row);
        if width.is_one() {
            return Err(none("there is one class only"));
        }
        let rows = Dim::product(batch);
        let Some(k) = lead(dims, &rows).filter(|_| !rows.is_one()) else {
            return Err(none(match row.len() {
                1 => ONE_ROW,
                _ => {
                    "there is one example only, whose elements the loss or what makes the scores mixes"
                }
            }));
        };
        let mut search = Search {
            graph,
            contents,
            rows,
            wide: Wide {
                narrow: halves.then(|| entering(graph, scores)).flatten(),
                most: width,
            },
            is_chain,
            classes: FxHashMap::default(),
            fits: FxHashMap::default(),
            open: Vec::new(),
        };
        search.classes.insert(scores, Rows::Lead(k));
        search.touch(scores)?;
        let refusal = match search.close() {
            Ok(()) => return search.region(),
            Err(refusal) => refusal,
        };
        // A node that fits is refused for another reason.
        let is_misfit = |id: &NodeId| {
            search.fitted(*id, None).is_err()
                || (search.fits.contains_key(id) && search.read_whole(*id).is_some())
        };
        let node = refusal.node.filter(is_misfit);
        Err(Refusal {
            early: node.and_then(|id| search.early(id)),
            ..refusal
        })
    }

    /// Returns all nodes, in the order they run.
    pub fn all(&self) -> impl Iterator<Item = &NodeId> {
        self.nodes.iter().chain(&self.after)
    }

    /// Returns the values with rows that `nodes` of the region read and other nodes make.
    pub fn inputs_with_rows(&self, graph: &Graph, nodes: &[NodeId]) -> Vec<ValueId> {
        let is_made = |v: ValueId| {
            let maker = graph.def_node(v);
            maker.is_some_and(|n| self.fits.contains_key(&n))
        };
        let mut seen = FxHashSet::default();
        let operands = nodes.iter().flat_map(|id| {
            let with_rows = graph.node(*id).ins.iter().zip(&self.fits[id].ins);
            with_rows.filter_map(|(v, rows)| rows.and(*v))
        });
        operands
            .filter(|v| !is_made(*v) && seen.insert(*v))
            .collect()
    }

    /// Returns the elements in the widest row that enters the region and is narrower than the scores: a row of the
    /// activations that the scores are made of.
    pub fn narrow_width(&self, graph: &Graph) -> i64 {
        let row = |v: ValueId| match self.classes[&v] {
            how @ Rows::Lead(_) => width(graph, v, how, &self.rows)?.as_const(),
            Rows::Last | Rows::Shared(_) | Rows::Sum => None,
        };
        let inputs = self.inputs_with_rows(graph, &self.nodes).into_iter();
        let most = self.width.as_const().unwrap_or(i64::MAX);
        let narrow = inputs.filter_map(row).filter(|n| *n < most);
        narrow.max().unwrap_or(1)
    }

    /// Returns whether a row of a value in the region is at least as wide as one of the scores.
    pub fn is_wide(&self, graph: &Graph, v: ValueId) -> bool {
        let rows = self.classes.get(&v);
        rows.is_some_and(|rows| self.wide.holds(graph, v, *rows, &self.rows))
    }

    /// Returns whether a row of all that leaves the forward pass is narrower than one of the value that the region is around, as far as
    /// sizes are constants.
    pub fn narrows(&self, graph: &Graph) -> bool {
        let row = |v: ValueId| {
            let how = self.classes.get(&v)?;
            width(graph, v, *how, &self.rows)?.as_const()
        };
        let leaving: Option<i64> = self.outputs(graph, &self.nodes).into_iter().map(row).sum();
        let widths = leaving.zip(self.width.as_const());
        widths.is_none_or(|(leaving, width)| leaving < width)
    }

    /// Returns the number of elements for each row along the axes of a value that hold the rows.
    pub fn each(&self, graph: &Graph, v: ValueId) -> Option<Dim> {
        elements(graph, v, *self.classes.get(&v)?, &self.rows)
    }

    /// Returns the values that `nodes` of the region make and nodes outside it read.
    pub fn outputs(&self, graph: &Graph, nodes: &[NodeId]) -> Vec<ValueId> {
        let is_read_outside = |v: &ValueId| {
            let mut uses = graph.value(*v).uses().iter();
            graph.is_output(*v) || uses.any(|u| !self.fits.contains_key(&u.node))
        };
        let made = nodes.iter().flat_map(|id| &graph.node(*id).outs);
        made.copied().filter(is_read_outside).collect()
    }
}

struct Search<'a> {
    graph: &'a Graph,
    contents: &'a Contents,
    rows: Dim,
    wide: Wide,
    /// Whether the backward nodes run later.
    is_chain: bool,
    classes: FxHashMap<ValueId, Rows>,
    fits: FxHashMap<NodeId, Fit>,
    open: Vec<NodeId>,
}

impl Search<'_> {
    /// Queues the nodes that make or read a wide value.
    fn touch(&mut self, v: ValueId) -> Result<(), Refusal> {
        if self.graph.is_output(v) {
            return Err(Refusal::new(
                self.graph.def_node(v),
                "its result is an output of the model, so it has to exist whole",
            ));
        }
        self.open.extend(self.graph.def_node(v));
        let readers = self.graph.value(v).uses().iter().map(|u| u.node);
        self.open.extend(readers);
        Ok(())
    }

    /// Adds a node to the region.
    fn include(&mut self, id: NodeId) -> Result<(), Refusal> {
        if self.fits.contains_key(&id) {
            return Ok(());
        }
        let found = self.fitted(id, None).map_err(|why| Refusal {
            apart: self.apart(id),
            ..Refusal::new(Some(id), why)
        })?;
        let node = self.graph.node(id);
        let ins = node.ins.iter().copied().zip(found.ins.iter().copied());
        let ins = ins.filter_map(|(v, rows)| Some((v?, rows?)));
        let outs = node.outs.iter().copied().zip(found.outs.iter().copied());
        let all: Vec<(ValueId, Rows)> = ins.chain(outs).collect();
        self.fits.insert(id, found);
        for (v, rows) in all {
            let is_new = self.classes.insert(v, rows).is_none();
            if is_new && self.wide.holds(self.graph, v, rows, &self.rows) {
                self.touch(v)?;
            }
        }
        Ok(())
    }

    /// Returns how rows lie in what a node reads and makes. Of the value `hidden` nothing is known.
    fn fitted(&self, id: NodeId, hidden: Option<ValueId>) -> Result<Fit, Reason> {
        let known = |v: ValueId| {
            let rows = self.classes.get(&v).copied();
            rows.filter(|_| hidden != Some(v))
        };
        let cx = FitCx {
            graph: self.graph,
            contents: self.contents,
            rows: &self.rows,
            known: &known,
        };
        let found = fit(&cx, id)?;
        let node = self.graph.node(id);
        let ins = || node.ins.iter().copied().zip(found.ins.iter().copied());
        let outs = node.outs.iter().copied().zip(found.outs.iter().copied());
        let with_rows = || ins().filter_map(|(v, rows)| Some((v?, rows?)));
        for v in ins().filter_map(|(v, rows)| v.filter(|_| rows.is_none())) {
            if known(v).is_some() || with_rows().any(|(w, _)| w == v) {
                return Err("it reads rows as if they were none");
            }
        }
        for (v, rows) in with_rows().chain(outs) {
            let of_row = elements(self.graph, v, rows, &self.rows);
            let is_one_axis = matches!(rows, Rows::Lead(_) | Rows::Last);
            if is_one_axis && !of_row.is_some_and(|n| self.is_named(&n)) {
                return Err("the number of elements for each row is not known before the step");
            }
            // What is built of these sizes needs them before the step.
            let dims = &self.graph.ty(v).dims;
            if !is_one_axis && !dims.iter().all(|dim| self.is_named(dim)) {
                return Err("the sizes of a sum over rows are not known before the step");
            }
            let mut others = with_rows().filter(|(w, _)| *w == v);
            let is_other = |before: Rows| before != rows;
            if known(v).is_some_and(is_other) || others.any(|(_, before)| is_other(before)) {
                return Err("rows lie in one value in two ways");
            }
        }
        Ok(found)
    }

    /// Returns [`Refusal::apart`] of a node that does not fit.
    fn apart(&self, id: NodeId) -> Vec<usize> {
        let node = self.graph.node(id);
        for v in node.operands().filter(|v| !self.is_inside(*v)) {
            let slots = (0..node.ins.len()).filter(|slot| node.ins[*slot] == Some(v));
            let is_twice = slots.clone().count() > 1;
            // As in the product of a matrix with itself.
            if is_twice && matches!(node.op.class, OpClass::Product | OpClass::BiasedProduct) {
                return slots.skip(1).collect();
            }
            if self.classes.contains_key(&v) && self.fitted(id, Some(v)).is_ok() {
                return slots.collect();
            }
        }
        Vec::new()
    }

    /// Returns true for a value that a node of the region makes, or that is too wide to be read whole.
    fn is_inside(&self, v: ValueId) -> bool {
        let maker = self.graph.def_node(v);
        let rows = self.classes.get(&v);
        maker.is_some_and(|n| self.fits.contains_key(&n))
            || rows.is_some_and(|rows| self.wide.holds(self.graph, v, *rows, &self.rows))
    }

    /// Returns true for a size that the sizes of the graph's inputs determine.
    fn is_named(&self, dim: &Dim) -> bool {
        let inputs = self.graph.inputs().iter();
        let sizes: Vec<&Dim> = inputs.flat_map(|v| &self.graph.ty(*v).dims).collect();
        let is_input = |atom: &Atom| sizes.iter().any(|dim| dim.as_atom() == Some(atom));
        let mut factors = dim.terms().into_iter().flat_map(|(factors, _)| factors);
        factors.all(|atom| is_input(&atom))
    }

    /// Adds all queued nodes, then the nodes on paths between nodes of the region, until there are none.
    fn close(&mut self) -> Result<(), Refusal> {
        let order = self.graph.order();
        let sides: &[Option<bool>] = match self.is_chain {
            true => &[Some(false), Some(true)],
            false => &[None],
        };
        loop {
            while let Some(id) = self.open.pop() {
                self.include(id)?;
            }
            let sides = sides.iter().map(|side| self.between(order, *side));
            let between = sides.collect::<Vec<_>>().concat();
            if between.is_empty() {
                break;
            }
            for id in between {
                self.include(id)?;
            }
        }
        // One lookup serves all readers of what rows share.
        let mut shared: FxHashMap<ValueId, &[Dim]> = FxHashMap::default();
        for id in order.iter().filter(|id| self.fits.contains_key(id)) {
            let (node, fit) = (self.graph.node(*id), &self.fits[id]);
            let Some(Rows::Lead(k)) = fit.outs.first().copied() else {
                continue;
            };
            let lead = &self.graph.ty(node.outs[0]).dims[..k];
            for (v, rows) in node.ins.iter().zip(&fit.ins) {
                if let (Some(v), Some(Rows::Shared(_))) = (v, rows)
                    && !same_dims(shared.entry(*v).or_insert(lead), lead)
                {
                    return Err(Refusal::new(
                        Some(*id),
                        "rows share its operand in two ways",
                    ));
                }
            }
        }
        // What a node reads whole must not have got rows since.
        for id in order.iter().filter(|id| self.fits.contains_key(id)) {
            let node = self.graph.node(*id);
            let Some(v) = self.read_whole(*id) else {
                continue;
            };
            let mut refusal = Refusal::new(Some(*id), "it reads rows as if they were none");
            if !self.is_inside(v) {
                let slots = 0..node.ins.len();
                refusal.apart = slots.filter(|slot| node.ins[*slot] == Some(v)).collect();
            }
            return Err(refusal);
        }
        Ok(())
    }

    /// Returns the region of all nodes that were added.
    fn region(self) -> Result<Region, Refusal> {
        let order = self.graph.order();
        let inside = |id: &NodeId| self.fits.contains_key(id);
        let all = order.iter().copied().filter(inside);
        let later = |id: &NodeId| self.is_chain && self.is_backward(*id);
        let (after, nodes): (Vec<NodeId>, Vec<NodeId>) = all.partition(later);
        if nodes.is_empty() {
            return Err(Refusal::new(
                None,
                "no node of the forward part belongs to it",
            ));
        }
        Ok(Region {
            nodes,
            after,
            fits: self.fits,
            classes: self.classes,
            rows: self.rows,
            width: self.wide.most.clone(),
            wide: self.wide,
        })
    }

    /// Returns [`Refusal::early`] for a node that does not fit. If a node before it does not fit either, returns that one's.
    fn early(&mut self, mut reader: NodeId) -> Option<Early> {
        loop {
            let value = self.read_for_all(reader)?;
            match self.leading_to(value) {
                Ok(nodes) => return self.early_value(reader, value, nodes),
                Err(earlier) => reader = earlier,
            }
        }
    }

    /// Returns something narrow of the region without which a node would fit, or would not belong to it.
    fn read_for_all(&self, id: NodeId) -> Option<ValueId> {
        let node = self.graph.node(id);
        let of_region = |v: &ValueId| self.classes.contains_key(v);
        let mut operands = node.operands().filter(of_region);
        operands.find(|v| {
            let is_narrow = !self.wide.holds(self.graph, *v, self.classes[v], &self.rows);
            let is_only = node.operands().filter(of_region).all(|w| w == *v)
                && !node.outs.iter().any(of_region);
            // A sum is read for all rows wherever it is read.
            let is_sum = self.classes[v] == Rows::Sum;
            is_narrow && (is_sum || is_only || self.fitted(id, Some(*v)).is_ok())
        })
    }

    /// Adds the nodes that lead to a value, and returns those of the region in order.
    ///
    /// # Errors
    /// The first of these that does not fit.
    fn leading_to(&mut self, value: ValueId) -> Result<Vec<NodeId>, NodeId> {
        let order = self.graph.order();
        let above = ancestors(self.graph, value);
        loop {
            self.open.retain(|id| above[*id]);
            if self.open.is_empty() {
                let mut between = self.between(order, None);
                between.retain(|id| above[*id]);
                self.open = between;
            }
            let Some(id) = self.open.pop() else {
                break;
            };
            self.include(id).map_err(|_| id)?;
        }
        let inside = |id: &&NodeId| above[**id] && self.fits.contains_key(id);
        let nodes: Vec<NodeId> = order.iter().filter(inside).copied().collect();
        match nodes.iter().find(|id| self.read_whole(**id).is_some()) {
            Some(id) => Err(*id),
            None => Ok(nodes),
        }
    }

    fn early_value(&self, reader: NodeId, value: ValueId, nodes: Vec<NodeId>) -> Option<Early> {
        let graph = self.graph;
        let is_wide = |v: &ValueId| self.wide.holds(graph, *v, self.classes[v], &self.rows);
        let mut made = nodes.iter().flat_map(|id| &graph.node(*id).outs);
        let wide = *made.find(|v| is_wide(v))?;
        let makes = |id: &NodeId| graph.node(*id).outs.contains(&value);
        if !nodes.iter().any(makes)
            || !nodes
                .iter()
                .all(|id| graph.node(*id).op.effect.recomputable())
        {
            return None;
        }
        let uses = graph.value(value).uses().iter();
        // No node of the region can read a sum.
        let counts = |node: NodeId| node == reader || self.classes[&value] == Rows::Sum;
        let readers = uses.filter(|u| counts(u.node)).map(|u| (u.node, u.slot));
        Some(Early {
            value,
            nodes,
            wide,
            readers: readers.collect(),
        })
    }

    /// Returns a value that has rows and that a node of the region reads as if it had none.
    fn read_whole(&self, id: NodeId) -> Option<ValueId> {
        let node = self.graph.node(id);
        let fit = &self.fits[&id];
        let mut whole = node
            .ins
            .iter()
            .zip(&fit.ins)
            .filter(|(_, rows)| rows.is_none());
        whole.find_map(|(v, _)| v.filter(|v| self.classes.contains_key(v)))
    }

    fn is_backward(&self, id: NodeId) -> bool {
        self.graph.node(id).role == Role::Backward
    }

    /// Returns nodes outside the region that depend on it and that it depends on, in order. With `backward`, only nodes of
    /// the backward pass (`true`) or of the rest (`false`) count.
    fn between(&self, order: &[NodeId], backward: Option<bool>) -> Vec<NodeId> {
        let graph = self.graph;
        let counts = |id: &&NodeId| backward.is_none_or(|side| self.is_backward(**id) == side);
        let mut after = SecondaryMap::new(graph.value_bound(), false);
        for id in order.iter().filter(counts) {
            let node = graph.node(*id);
            if self.fits.contains_key(id) || node.operands().any(|v| after[v]) {
                for v in &node.outs {
                    after[*v] = true;
                }
            }
        }
        let mut before = SecondaryMap::new(graph.value_bound(), false);
        let mut between = Vec::new();
        for id in order.iter().rev().filter(counts) {
            let node = graph.node(*id);
            let inside = self.fits.contains_key(id);
            let leads = node.outs.iter().any(|v| before[*v]);
            if inside || leads {
                for v in node.operands() {
                    before[v] = true;
                }
            }
            if !inside && leads && node.operands().any(|v| after[v]) {
                between.push(*id);
            }
        }
        between.reverse();
        between
    }
}

/// Returns the nodes that lead to a value.
fn ancestors(graph: &Graph, v: ValueId) -> SecondaryMap<NodeId, bool> {
    let mut above = SecondaryMap::new(graph.node_bound(), false);
    let mut open: Vec<NodeId> = graph.def_node(v).into_iter().collect();
    while let Some(id) = open.pop() {
        if !above[id] {
            above[id] = true;
            open.extend(graph.operand_nodes(id));
        }
    }
    above
}

/// Returns the number of elements for each row along the axes of a value that hold the rows.
fn elements(graph: &Graph, v: ValueId, how: Rows, rows: &Dim) -> Option<Dim> {
    let dims = &graph.ty(v).dims;
    match how {
        Rows::Lead(k) => each(&dims[..k], rows),
        Rows::Last => each(&dims[1..], rows),
        Rows::Shared(_) | Rows::Sum => None,
    }
}

/// Returns the number of elements in a row of a value.
fn width(graph: &Graph, v: ValueId, how: Rows, rows: &Dim) -> Option<Dim> {
    let dims = &graph.ty(v).dims;
    let rest = match how {
        Rows::Lead(k) => Dim::product(&dims[k..]),
        Rows::Last => dims.first()?.clone(),
        Rows::Shared(_) | Rows::Sum => return None,
    };
    Some(elements(graph, v, how, rows)?.mul(&rest))
}

impl Wide {
    /// Returns whether the rows of a value are wide, as far as sizes with names tell.
    fn holds(&self, graph: &Graph, v: ValueId, how: Rows, rows: &Dim) -> bool {
        let Some(row) = width(graph, v, how, rows) else {
            return false;
        };
        let is_as_wide = |row: &Dim| row.sub(&self.most).bounds().0 >= Some(0);
        let Some(narrow) = self.narrow else {
            return is_as_wide(&row);
        };
        let enters = row.as_const().is_some_and(|row| row <= narrow);
        is_as_wide(&row) || (!enters && is_as_wide(&row.add(&row)))
    }
}

/// Returns the elements in the widest row of what enters the products that make a value; `None` where there are none, or one is
/// not known.
fn entering(graph: &Graph, v: ValueId) -> Option<i64> {
    let mut open = vec![v];
    let mut seen = FxHashSet::default();
    let mut widest = None;
    while let Some(v) = open.pop() {
        let Some(node) = graph.def_node(v).map(|id| graph.node(id)) else {
            continue;
        };
        match node.op.class {
            _ if !seen.insert(v) || node.op.axes == BatchAxes::Reduced => {}
            OpClass::Product | OpClass::BiasedProduct | OpClass::Convolution => {
                let dims = &graph.ty(node.operand(0)?).dims;
                let row = match node.op.class {
                    OpClass::Convolution => dims.get(1),
                    _ if node.attrs.opt_int("transA") == Some(1) => dims.first(),
                    _ => dims.last(),
                };
                widest = widest.max(Some(row?.as_const()?));
            }
            _ => open.extend(node.operands()),
        }
    }
    widest
}

/// Returns an operand of the region whose first sizes are `dims`.
pub fn like(
    graph: &Graph,
    inputs: &[ValueId],
    classes: &FxHashMap<ValueId, Rows>,
    dims: &[Dim],
) -> Option<ValueId> {
    inputs.iter().copied().find(|v| {
        let have = &graph.ty(*v).dims;
        matches!(classes.get(v), Some(Rows::Lead(_)))
            && have.len() >= dims.len()
            && have.iter().zip(dims).all(|(a, b)| a.same(b) == Same::Yes)
    })
}
