//! Shares the rows between the blocks of a model among the ranks that have its layers in parts: sequence parallelism
//! (Korthikanti et al. 2022, arXiv 2205.05198, Megatron-LM).
//!
//! In and out: `Typed`, after [`share_layers`](super::tensor_parallel::share_layers). The sum at the end of a block is the same on
//! all ranks. What keeps its rows apart ([`fit`]) is computed for the rank's own rows alone: residual additions, norms,
//! casts. The walk goes forward from the sums. Where a node reads all rows, as the first products of the next block do, they are
//! gathered. Rows are the indices of all axes but the last one together, so each rank has one stretch of memory, and batch
//! and positions are cut alike.
//!
//! `OwnSlice` takes a rank's rows of a value that all ranks have, and `GatherRows` is its inverse: each is the gradient of the other. What is
//! the same for every row, such as the scale of a norm, is read through `Shared`, so its gradient is summed. After
//! differentiation, [`scatter_sums`] turns a sum of which a rank reads its own rows only into a `ReduceScatter`: before a region in the
//! forward pass, and after one in the backward pass. The bits are those of the sum.

use super::loss::Seed;
use super::order::order_by_reads;
use super::sizes::Sizes;
use super::tensor_parallel::{SharedLayers, reasons};
use crate::error::{Error, Result};
use crate::ir::op::{BatchAxes, Effect, OpClass};
use crate::ir::typing::Contents;
use crate::ir::verify::verify;
use crate::ir::{Def, Dim, Graph, NodeId, Same, Use, ValueId, same_dims};
use crate::ops::batch_axes::{CutCx, Fit, FitCx, Rows, cut, fit, own_axes};
use crate::ops::collective::{
    ALL_REDUCE, GATHER_ROWS, GROUP, OWN_SLICE, REDUCE_SCATTER, REPEATS, ROW_AXES, SHARED,
    TENSOR_PARALLEL, of_group, row_axes,
};
use crate::ops::shape::{SHAPE, SIZE};
use crate::ops::{Builder, EmitExt};
use std::collections::{BTreeMap, BTreeSet};

/// What ranks share between blocks.
#[derive(Clone, Debug, Default)]
pub struct SharedRows {
    /// The number of results of which each rank computes its own rows.
    pub results: usize,
    /// Why nodes that read such results are computed for all rows, each with its place.
    pub whole: Vec<String>,
}

impl SharedRows {
    /// Returns what the user should know.
    pub fn note(&self) -> String {
        let note = format!(
            "each rank computes its own rows of {} results between blocks",
            self.results
        );
        note + &reasons("; for all rows on every rank", &self.whole)
    }
}

/// A value of which each rank computes its own rows: how many rows there are, and how many leading axes they are.
#[derive(Clone)]
struct Known {
    rows: Dim,
    axes: usize,
}

/// How rows lie in a node, or why it is computed for all of them.
type Fitted = std::result::Result<Fit, Option<&'static str>>;

struct Walk<'a, 'g> {
    b: Builder<'g>,
    sizes: Sizes,
    layers: &'a SharedLayers,
    trained: &'a [ValueId],
    ranks: u32,
    known: BTreeMap<ValueId, Known>,
    /// The rank's rows of a value, by the number of axes that are rows.
    own: BTreeMap<(ValueId, usize), ValueId>,
    /// What is the same for every row, as nodes of the region read it.
    shared: BTreeMap<ValueId, ValueId>,
    /// The nodes that are computed for the rank's rows.
    region: BTreeSet<NodeId>,
    done: SharedRows,
}

/// Has each rank compute its own rows of what lies between the blocks that `ranks` share. `trained` lists the parameters.
///
/// # Errors
/// None but bugs: the nodes have the types of those that they replace.
pub fn share_rows(
    graph: &mut Graph,
    seeds: &mut [Seed],
    layers: &SharedLayers,
    trained: &[ValueId],
    ranks: u32,
) -> Result<SharedRows> {
    let old = graph.order().to_vec();
    let mut sizes = Sizes::of_inputs(graph);
    for sum in &layers.sums {
        sizes.read(graph, *sum);
    }
    let contents = Contents::known(graph)?;
    let mut walk = Walk {
        b: Builder::resume(graph, contents),
        sizes,
        layers,
        trained,
        ranks,
        known: BTreeMap::new(),
        own: BTreeMap::new(),
        shared: BTreeMap::new(),
        region: BTreeSet::new(),
        done: SharedRows::default(),
    };
    for sum in &layers.sums {
        let dims = &walk.b.ty(*sum).dims;
        let axes = dims.len().saturating_sub(1);
        let rows = Dim::product(&dims[..axes]);
        if axes > 0 && rows.as_const().is_none_or(|n| n >= i64::from(ranks)) {
            walk.known.insert(*sum, Known { rows, axes });
        }
    }
    for id in &old {
        walk.node(*id)?;
    }
    walk.gather(seeds)?;
    let Walk { region, done, .. } = walk;
    graph.remove_nodes(&|id| region.contains(&id));
    let old: Vec<NodeId> = old.into_iter().filter(|id| !region.contains(id)).collect();
    order_by_reads(graph, &old)?;
    verify(graph)?;
    Ok(done)
}

impl Walk<'_, '_> {
    /// Computes a node for the rank's own rows, if it reads some and keeps them apart.
    fn node(&mut self, id: NodeId) -> Result<()> {
        let node = self.b.graph.node(id);
        let first = node.operands().find_map(|v| self.known.get(&v));
        let Some(known) = first.cloned().filter(|_| !self.layers.nodes.contains(&id)) else {
            return Ok(());
        };
        if node.op == &SHAPE || node.op == &SIZE {
            return self.sizes_of(id);
        }
        if node.op == &SHARED {
            return Ok(());
        }
        match self.fitted(id, &known)? {
            Ok(fit) => self.cut(id, &fit, &known),
            Err(why) => {
                let describe = self.b.graph.describe(id);
                let reason = why.map(|why| format!("{describe}, because {why}"));
                self.done.whole.extend(reason);
                Ok(())
            }
        }
    }

    /// Has readers of sizes read them elsewhere, where that is possible.
    fn sizes_of(&mut self, id: NodeId) -> Result<()> {
        let out = self.b.graph.node(id).outs[0];
        let scalar = self.b.rank(out) == 0;
        let known = self.b.contents.get(out).map(<[Dim]>::to_vec);
        if let Some(known) = known
            && let Some(built) = self.sizes.build(&mut self.b, scalar, &known)?
        {
            self.b.graph.replace_uses(out, built);
        }
        Ok(())
    }

    /// Returns how rows lie in operands and results of a node that keeps them apart, or why it does not; `None` for a product, which
    /// the blocks say something about.
    fn fitted(&mut self, id: NodeId, known: &Known) -> Result<Fitted> {
        let ins = self.b.graph.node(id).ins.clone();
        let found = self.fitted_when_spread(id, known)?;
        if found.is_err() {
            for (slot, v) in ins.into_iter().enumerate() {
                self.b.graph.set_operand(id, slot, v);
            }
        }
        Ok(found)
    }

    /// As [`Self::fitted`], with operands of a pointwise node expanded.
    fn fitted_when_spread(&mut self, id: NodeId, known: &Known) -> Result<Fitted> {
        let node = self.b.graph.node(id);
        match (node.op.effect, node.op.class) {
            (Effect::Seeded, _) => {
                return Ok(Err(Some(
                    "it draws random numbers, by the number of the element",
                )));
            }
            (Effect::Pure, OpClass::Product | OpClass::BiasedProduct) => {
                return Ok(Err(None));
            }
            (Effect::Pure, _) => {}
            _ => return Ok(Err(Some("it does more than make its results"))),
        }
        if node.op.axes == BatchAxes::Pointwise {
            self.spread(id, known)?;
        }
        let of = |v: ValueId| self.known.get(&v).filter(|other| other.rows == known.rows);
        let cx = FitCx {
            graph: self.b.graph,
            contents: &self.b.contents,
            rows: &known.rows,
            known: &|v| of(v).map(|known| Rows::Lead(known.axes)),
        };
        let found = match fit(&cx, id) {
            Ok(found) => found,
            Err(why) => return Ok(Err(Some(why))),
        };
        let node = self.b.graph.node(id);
        let is_all = |v: ValueId, rows: Rows| match rows {
            Rows::Lead(k) => {
                let all = Dim::product(&self.b.ty(v).dims[..k]);
                all.same(&known.rows) == Same::Yes
            }
            Rows::Last | Rows::Shared(_) | Rows::Sum => false,
        };
        let ins = node.ins.iter().zip(&found.ins);
        let mut ins = ins.filter_map(|(v, rows)| Some(((*v)?, *rows)));
        let is_read = |(v, rows): (ValueId, Option<Rows>)| match (rows, self.known.get(&v)) {
            (None, None) => true,
            (Some(rows), None) => is_all(v, rows),
            (rows, Some(own)) => of(v).is_some() && rows == Some(Rows::Lead(own.axes)),
        };
        let mut outs = node.outs.iter().zip(&found.outs);
        if !ins.all(is_read) || !outs.all(|(v, rows)| is_all(*v, *rows)) {
            return Ok(Err(Some("its operands or results have other rows")));
        }
        for (v, rows) in node.outs.clone().into_iter().zip(&found.outs) {
            if let Rows::Lead(axes) = *rows
                && self.lead(v, axes)?.is_none()
            {
                return Ok(Err(Some(
                    "the number of its rows is not known before the step",
                )));
            }
        }
        Ok(Ok(found))
    }

    /// Expands operands of a pointwise node that have some of the axes of the rows, such as positions for all examples.
    fn spread(&mut self, id: NodeId, known: &Known) -> Result<()> {
        let node = self.b.graph.node(id);
        let out = self.b.ty(node.outs[0]).dims.clone();
        let Some(rest) = out.len().checked_sub(known.axes) else {
            return Ok(());
        };
        let lead = &out[..known.axes];
        if Dim::product(lead).same(&known.rows) != Same::Yes {
            return Ok(());
        }
        for (slot, v) in node.ins.clone().into_iter().enumerate() {
            let Some(v) = v.filter(|v| !self.known.contains_key(v)) else {
                continue;
            };
            let dims = self.b.ty(v).dims.clone();
            let has_some = dims.len() > rest && !dims[..dims.len() - rest].iter().all(Dim::is_one);
            if !has_some || (dims.len() == out.len() && same_dims(&dims[..known.axes], lead)) {
                continue;
            }
            let target = [lead, &dims[dims.len() - rest..]].concat();
            if let Some(sizes) = self.sizes.build(&mut self.b, false, &target)? {
                self.at(id);
                let all = self.b.expand(v, sizes)?;
                self.b.graph.set_operand(id, slot, Some(all));
            }
        }
        Ok(())
    }

    /// Returns the sizes of the first axes of a value as an int64 vector, if inputs or sums have them.
    fn lead(&mut self, v: ValueId, axes: usize) -> Result<Option<ValueId>> {
        let lead = self.b.ty(v).dims[..axes].to_vec();
        self.sizes.build(&mut self.b, false, &lead)
    }

    fn at(&mut self, id: NodeId) {
        let node = self.b.graph.node(id);
        (self.b.prefix, self.b.loc, self.b.role) = (node.name.clone(), node.loc.clone(), node.role);
    }

    /// Emits a node for the rank's own rows.
    fn cut(&mut self, id: NodeId, fit: &Fit, known: &Known) -> Result<()> {
        let node = self.b.graph.node(id).clone();
        self.at(id);
        let mut ins = Vec::with_capacity(node.ins.len());
        let mut count = None;
        for (v, rows) in node.ins.iter().zip(&fit.ins) {
            ins.push(match (*v, rows) {
                (None, _) => None,
                (Some(v), Some(Rows::Lead(k))) => {
                    let own = self.own_rows(v, *k)?;
                    count = Some(own);
                    Some(own)
                }
                (Some(v), _) => Some(self.shared(v)?),
            });
        }
        self.at(id);
        let count = count.unwrap_or(node.outs[0]);
        let count = self.b.axis_vector(count, 0)?;
        let ty = |v: ValueId| self.b.ty(v).clone();
        let in_types = node.ins.iter().map(|v| v.map(ty)).collect();
        let out_types = node.outs.iter().map(|v| ty(*v)).collect();
        let axes = own_axes(self.b.graph, &self.b.contents, &node);
        let outs = cut(CutCx {
            b: &mut self.b,
            op: node.op,
            attrs: node.attrs.clone(),
            ins,
            in_types,
            out_types,
            fit,
            axes,
            count,
        })?;
        for ((v, rows), own) in node.outs.iter().zip(&fit.outs).zip(outs) {
            let Rows::Lead(axes) = *rows else { continue };
            let rows = known.rows.clone();
            self.known.insert(*v, Known { rows, axes });
            self.own.insert((*v, axes), own);
        }
        self.region.insert(id);
        self.done.results += node.outs.len();
        Ok(())
    }

    /// Returns the rank's own rows of a value, the first `axes` axes of which are the rows.
    fn own_rows(&mut self, v: ValueId, axes: usize) -> Result<ValueId> {
        if let Some(own) = self.own.get(&(v, axes)) {
            return Ok(*own);
        }
        self.b.prefix = self.b.graph.value(v).name.clone();
        let attrs = of_group(TENSOR_PARALLEL, self.ranks)
            .with(ROW_AXES, axes as i64)
            .with(REPEATS, 1);
        let own = self.b.emit(&OWN_SLICE, &[v], attrs)?;
        self.own.insert((v, axes), own);
        Ok(own)
    }

    /// Returns a value that is the same for every row, as nodes of the region read it: the gradient is summed over ranks.
    fn shared(&mut self, v: ValueId) -> Result<ValueId> {
        let has_gradient = match self.b.graph.value(v).def {
            Def::Node { .. } => self.b.ty(v).dtype.is_float(),
            Def::Init(_) => self.trained.contains(&v),
            Def::Input => false,
        };
        if !has_gradient {
            return Ok(v);
        }
        if let Some(shared) = self.shared.get(&v) {
            return Ok(*shared);
        }
        self.b.prefix = self.b.graph.value(v).name.clone();
        let group = of_group(TENSOR_PARALLEL, self.ranks);
        let shared = self.b.emit(&SHARED, &[v], group)?;
        self.shared.insert(v, shared);
        Ok(shared)
    }

    /// Gathers the rows of what nodes outside the region read, outputs of the graph and seeds.
    fn gather(&mut self, seeds: &mut [Seed]) -> Result<()> {
        for id in self.region.clone() {
            for v in self.b.graph.node(id).outs.clone() {
                let is_outside = |id: NodeId| !self.region.contains(&id);
                let uses = self.b.graph.value(v).uses().iter();
                let readers: Vec<_> = uses.filter(|u| is_outside(u.node)).copied().collect();
                let is_seed = seeds.iter().any(|seed| seed.value == v);
                let is_output = self.b.graph.is_output(v);
                if readers.is_empty() && !is_output && !is_seed {
                    continue;
                }
                let axes = self.known[&v].axes;
                let own = self.own[&(v, axes)];
                self.at(id);
                let sizes = self.lead(v, axes)?;
                let sizes = sizes.ok_or_else(|| Error::bug("mesh", "the rows have no number"))?;
                let group = of_group(TENSOR_PARALLEL, self.ranks);
                let all = self.b.emit(&GATHER_ROWS, &[own, sizes], group)?;
                for u in readers {
                    self.b.graph.set_operand(u.node, u.slot, Some(all));
                }
                if is_output {
                    let name = self.b.graph.value(v).name.clone();
                    self.b.graph.rename_value(v, &format!("{name}/own"));
                    self.b.graph.rename_value(all, &name);
                    let outputs = self.b.graph.outputs().iter();
                    let outputs = outputs.map(|o| if *o == v { all } else { *o }).collect();
                    self.b.graph.set_outputs(outputs);
                }
                for seed in seeds.iter_mut().filter(|seed| seed.value == v) {
                    seed.value = all;
                }
            }
        }
        Ok(())
    }
}

/// Has ranks scatter a sum of which each reads its own rows only, and gather the same rows once. Readers of the sizes of a sum read
/// those of its operand.
///
/// # Errors
/// None but bugs: the nodes have the types of those that they replace.
pub fn scatter_sums(graph: &mut Graph) -> Result<()> {
    let old = graph.order().to_vec();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    let mut instead: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    let mut gone: BTreeSet<NodeId> = BTreeSet::new();
    let mut gathered: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    for id in &old {
        let node = b.graph.node(*id);
        if let (true, Some(own)) = (node.op == &GATHER_ROWS, node.operand(0)) {
            let all = node.outs[0];
            let first = *gathered.entry(own).or_insert(all);
            if first != all && b.ty(first) == b.ty(all) && !b.graph.is_output(all) {
                b.graph.replace_uses(all, first);
                gone.insert(*id);
            }
            continue;
        }
        let is_sum = node.op == &ALL_REDUCE && node.attrs.str(GROUP) == TENSOR_PARALLEL;
        let Some(x) = node.operand(0).filter(|_| is_sum) else {
            continue;
        };
        let sum = node.outs[0];
        let uses = b.graph.value(sum).uses().to_vec();
        let is_size = |id: NodeId| {
            let op = b.graph.node(id).op;
            op == &SHAPE || op == &SIZE
        };
        let (of_sizes, readers): (Vec<Use>, Vec<Use>) =
            uses.into_iter().partition(|u| is_size(u.node));
        let Some(first) = readers.first().map(|u| b.graph.node(u.node)) else {
            continue;
        };
        let is_same = |u: &Use| {
            let reader = b.graph.node(u.node);
            reader.op == &OWN_SLICE && row_axes(&reader.attrs) > 0 && reader.attrs == first.attrs
        };
        if b.graph.is_output(sum) || !readers.iter().all(is_same) {
            continue;
        }
        let attrs = first.attrs.clone();
        (b.prefix, b.loc, b.role) = (node.name.clone(), node.loc.clone(), node.role);
        for u in of_sizes {
            b.graph.set_operand(u.node, u.slot, Some(x));
        }
        let own = b.emit(&REDUCE_SCATTER, &[x], attrs)?;
        for u in readers {
            b.graph.replace_uses(b.graph.node(u.node).outs[0], own);
            gone.insert(u.node);
        }
        instead.extend(b.graph.def_node(own).map(|new| (*id, new)));
        gone.insert(*id);
    }
    let order = old.iter().filter_map(|id| match instead.get(id) {
        Some(new) => Some(*new),
        None => Some(*id).filter(|id| !gone.contains(id)),
    });
    let order = order.collect();
    graph.remove_nodes(&|id| gone.contains(&id));
    graph.set_order(order);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;
    use crate::transform::infer::infer;
    use crate::transform::tensor_parallel::share_layers;

    const INITS: &str = "  init %up : f32[8, 32] = splat 0.5\n  init %down : f32[32, 8] = splat 0.5\n  \
                         init %g : f32[8] = splat 0.5\n";

    fn shared(nodes: &str) -> (Graph, SharedRows) {
        let source = format!(
            "graph @g imported (%x: f32[b, s, 8], %p: f32[s, 8]) -> (%y) {{\n{INITS}{nodes}}}\n"
        );
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        let weights = ["up", "down", "g"].map(|name| graph.find_value(name).unwrap());
        let (mut seeds, mut trained) = (Vec::new(), weights.to_vec());
        let layers = share_layers(&mut graph, &mut seeds, &weights, &mut trained, 2).unwrap();
        let rows = share_rows(&mut graph, &mut seeds, &layers, &trained, 2).unwrap();
        (graph, rows)
    }

    fn count(graph: &Graph, op: &'static crate::ir::OpDef) -> usize {
        graph.nodes().filter(|(_, node)| node.op == op).count()
    }

    /// Positions that all examples share are rows too, and what every row reads is shared.
    #[test]
    fn rows_go_from_a_sum_to_what_reads_all_of_them() {
        let block = |from: &str, to: &str| {
            format!(
                "  %h{to} = MatMul {from}, %up\n  %a{to} = Tanh %h{to}\n  %o{to} = MatMul %a{to}, %down\n"
            )
        };
        let nodes = format!(
            "{}  %r = Add %x, %o1\n  %q = Add %r, %p\n  %n = RMSNormalization %q, %g\n{}  %y = Add %q, %o2\n",
            block("%x", "1"),
            block("%n", "2"),
        );
        let (mut graph, rows) = shared(&nodes);
        assert_eq!((rows.results, rows.whole.len()), (4, 0), "{:?}", rows.whole);
        // Of `x`, the positions and two sums; what the second block and the output read.
        assert_eq!(
            (count(&graph, &OWN_SLICE), count(&graph, &GATHER_ROWS)),
            (4, 2)
        );
        // The scale, and what the second block reads: the first reads an input, which has no gradient.
        assert_eq!(count(&graph, &SHARED), 2);
        let own = graph.find_value("y/own");
        assert!(own.is_none() && graph.ty(graph.outputs()[0]).rank() == 3);
        scatter_sums(&mut graph).unwrap();
        verify(&graph).unwrap();
        let left = [count(&graph, &REDUCE_SCATTER), count(&graph, &ALL_REDUCE)];
        assert_eq!(left, [2, 0]);
    }

    /// A node that mixes rows reads all of them, and says why; its result comes back into what ranks share.
    #[test]
    fn what_mixes_rows_stays_whole() {
        let nodes = "  %h = MatMul %x, %up\n  %a = Tanh %h\n  %o = MatMul %a, %down\n  %r = Add %x, %o\n  \
                     %c = CumSum %r, %one\n  %z = Add %r, %c\n  %y = Tanh %z\n";
        let nodes = format!("  init %one : i64[] = 1\n{nodes}");
        let (mut graph, rows) = shared(&nodes);
        assert!(rows.whole[0].contains("CumSum"), "{:?}", rows.whole);
        assert_eq!(rows.whole.len(), 1);
        assert_eq!(
            (count(&graph, &OWN_SLICE), count(&graph, &GATHER_ROWS)),
            (3, 2)
        );
        scatter_sums(&mut graph).unwrap();
        assert_eq!(count(&graph, &REDUCE_SCATTER), 1);
    }
}
