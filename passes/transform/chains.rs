//! Joins chains of ops with scalar arithmetic into nodes that a device computes with one generated kernel each.
//!
//! The runtime calls this for a device, after planning; no file holds the result. A chain is a run of nodes of the schedule, each
//! of which reads a result of the others. Views between them move in front of it. All results have one shape. Sums over rows do
//! not cross nodes: a node reads whole rows only of values that are stored. A chain stores the results that other nodes read.
//! It takes no more memory than its nodes one by one.
//!
//! Single nodes are replaced too: an op then has the same arithmetic, and so the same bits, alone and in every chain.

use crate::error::{Error, Result};
use crate::ir::arithmetic::{Expr, Program, ScalarCx, Source, is_scalar_type};
use crate::ir::edit::NewNode;
use crate::ir::op::{Body, Domain, Effect, Grad, MemoryCx, OpClass, OpDef, Slot, fresh};
use crate::ir::{
    Attr, AttrKind, AttrSpec, Attrs, DType, Def, Dim, Graph, Loc, Node, NodeId, SecondaryMap,
    Tensor, Ty, ValueId, same_dims,
};
use crate::ops::cast::CAST;
use crate::ops::rule::standard;
use crate::ops::shape::{FLATTEN, RESHAPE};
use crate::ops::slice::SLICE;
use crate::ops::sum_to::SUM_TO_SHAPE;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

/// The attribute of [`FUSED`] with the text of its [`Program`].
pub const PROGRAM: &str = "program";

/// The most operands and results of a chain: pointers that a kernel takes.
const MOST_POINTERS: usize = 24;

/// A chain of ops. It is not in the op table, because no file holds it. Its types are those of the values that it replaces.
pub static FUSED: OpDef = OpDef {
    attrs: &[AttrSpec::required(PROGRAM, AttrKind::Str)],
    ins: &[Slot::var("operands")],
    outs: &[Slot::var("results")],
    infer: |cx| {
        Err(cx.fail(
            "op",
            "a fused chain has the types of the nodes that it replaced",
        ))
    },
    grad: Grad::Missing("chains are fused after differentiation"),
    body: Body::None("chains are fused after the file was written"),
    // One kernel without temporaries, which reads each element before it writes the one at the same index.
    memory: |cx: &MemoryCx| {
        let slots = program(cx.attrs.str(PROGRAM)).map_or(Vec::new(), |p| p.inputs_in_place());
        fresh(cx).in_place_operands(cx, &slots)
    },
    ..standard(
        "Fused",
        Domain::Opaque,
        OpClass::Other,
        crate::ir::op::BatchAxes::Mixed,
    )
};

/// Returns the program of a [`FUSED`] node, from its attribute [`PROGRAM`].
///
/// # Errors
/// A text that is no program: a bug.
pub fn program(text: &str) -> Result<Program> {
    let parsed = text.parse();
    parsed.map_err(|what: String| Error::bug("fused", what))
}

/// Returns the arithmetic of a node whose operands and results a generated kernel can compute.
pub fn arithmetic(graph: &Graph, id: NodeId) -> Option<Vec<Expr>> {
    let node = graph.node(id);
    let ins: Vec<Option<&Ty>> = node.ins.iter().map(|v| v.map(|v| graph.ty(v))).collect();
    let outs: Vec<&Ty> = node.outs.iter().map(|v| graph.ty(*v)).collect();
    let space = &outs.first()?.dims;
    let fits = ins.iter().flatten().chain(&outs);
    let is_pure = node.op.effect == Effect::Pure;
    if !is_pure || !fits.clone().all(|ty| is_scalar_type(ty.dtype)) {
        return None;
    }
    let cx = ScalarCx {
        attrs: &node.attrs,
        ins: &ins,
        outs: &outs,
    };
    let exprs = (node.op.scalar)(&cx).filter(|exprs| exprs.len() == outs.len())?;
    let fits = |(e, ty): (&Expr, &&Ty)| match e {
        Expr::SumToResult(_) => ty.static_dims().is_some(),
        _ => same_dims(&ty.dims, space),
    };
    exprs.iter().zip(&outs).all(fits).then_some(exprs)
}

/// The position of each node, and of the last reader of each value. Sizes may be unknown, and with them whether a layout op
/// makes a view or a copy.
struct Lifetimes {
    positions: SecondaryMap<NodeId, usize>,
    /// If every layout op copies.
    earliest: SecondaryMap<ValueId, usize>,
    /// If every layout op makes a view, so that all views of a value live as long as each of them.
    latest: SecondaryMap<ValueId, usize>,
}

impl Lifetimes {
    fn new(graph: &Graph) -> Lifetimes {
        let mut positions = SecondaryMap::new(graph.node_bound(), 0);
        let mut earliest = SecondaryMap::new(graph.value_bound(), 0);
        for (at, id) in graph.order().iter().enumerate() {
            positions[*id] = at;
            for v in graph.node(*id).operands() {
                earliest[v] = at;
            }
        }
        // Nobody frees inputs and initializers.
        let made = |v: ValueId| matches!(graph.value(v).def, Def::Node { .. });
        for (v, _) in graph
            .values()
            .filter(|(v, _)| !made(*v) || graph.is_output(*v))
        {
            earliest[v] = usize::MAX;
        }
        let mut latest = earliest.clone();
        let views = || {
            let nodes = graph.order().iter().map(|id| graph.node(*id));
            nodes.filter(|n| n.op.is_layout())
        };
        // From the last view to the first one, and back to the other views.
        let root_of = |n: &Node| n.operand(0);
        for n in views().rev() {
            if let Some(x) = root_of(n) {
                latest[x] = n
                    .outs
                    .iter()
                    .fold(latest[x], |most, v| most.max(latest[*v]));
            }
        }
        for n in views() {
            if let Some(x) = root_of(n) {
                for v in &n.outs {
                    latest[*v] = latest[x];
                }
            }
        }
        Lifetimes {
            positions,
            earliest,
            latest,
        }
    }
}

/// Nodes of one shape that are computed together.
#[derive(Clone)]
struct Chain {
    space: Vec<Dim>,
    members: Vec<NodeId>,
    inputs: Vec<ValueId>,
    program: Program,
    /// Results of the members, with their steps.
    made: Vec<(ValueId, usize)>,
    /// Results of which the chain makes the terms; they are summed after it.
    summed: Vec<ValueId>,
}

impl Chain {
    fn new(graph: &Graph, id: NodeId) -> Option<Chain> {
        let empty = Chain {
            space: graph.ty(*graph.node(id).outs.first()?).dims.clone(),
            members: Vec::new(),
            inputs: Vec::new(),
            program: Program::default(),
            made: Vec::new(),
            summed: Vec::new(),
        };
        empty.with(graph, id)
    }

    fn makes(&self, value: ValueId) -> bool {
        self.made.iter().any(|(v, _)| *v == value)
    }

    /// Returns the chain with one more node; `None` if the node cannot join it.
    fn with(&self, graph: &Graph, id: NodeId) -> Option<Chain> {
        let node = graph.node(id);
        if !same_dims(&graph.ty(*node.outs.first()?).dims, &self.space) {
            return None;
        }
        let exprs = arithmetic(graph, id)?;
        let mut chain = self.clone();
        let mut of_chain = |(e, v): (Expr, &ValueId)| match e {
            Expr::SumToResult(terms) => {
                chain.summed.push(*v);
                (*terms, DType::F32)
            }
            e => (e, graph.ty(*v).dtype),
        };
        let (exprs, types): (Vec<Expr>, Vec<DType>) =
            exprs.into_iter().zip(&node.outs).map(&mut of_chain).unzip();
        let mut source = |value: ValueId| {
            let made = chain.made.iter().find(|(v, _)| *v == value);
            if let Some((_, step)) = made {
                return Source::Step(*step);
            }
            let found = chain.inputs.iter().position(|v| *v == value);
            Source::Input(found.unwrap_or_else(|| {
                chain.inputs.push(value);
                chain.inputs.len() - 1
            }))
        };
        let operands: Vec<Option<Source>> = node.ins.iter().map(|v| v.map(&mut source)).collect();
        let steps = chain.program.inline(&exprs, &operands, &types)?;
        chain.made.extend(node.outs.iter().copied().zip(steps));
        chain.members.push(id);
        let pointers = chain.inputs.len() + chain.results(graph).len();
        (pointers <= MOST_POINTERS).then_some(chain)
    }

    /// As [`Chain::with`], for a node that reads a result of the chain, unless the chain would then take more memory than its
    /// nodes one by one.
    fn joined(&self, graph: &Graph, lives: &Lifetimes, id: NodeId) -> Option<Chain> {
        // Terms of a sum are alive until the chain ends.
        let reads = self.summed.is_empty() && graph.node(id).operands().any(|v| self.makes(v));
        let chain = self.with(graph, id).filter(|_| reads)?;
        (chain.bytes(graph, lives) <= chain.bytes_one_by_one(graph, lives)).then_some(chain)
    }

    /// Returns the values that nodes outside read, or that are outputs of the graph.
    fn results(&self, graph: &Graph) -> Vec<(ValueId, usize)> {
        let outlives = |v: ValueId| {
            let mut uses = graph.value(v).uses().iter();
            graph.is_output(v) || uses.any(|u| !self.members.contains(&u.node))
        };
        let made = self.made.iter().copied();
        made.filter(|(v, _)| outlives(*v)).collect()
    }

    /// Returns the type of a value as the chain stores it: of a sum, that of its terms.
    fn stored(&self, graph: &Graph, value: ValueId) -> Ty {
        match self.summed.contains(&value) {
            true => Ty::new(DType::F32, self.space.clone()),
            false => graph.ty(value).clone(),
        }
    }

    /// Returns the bytes of a value for one element of the chain's shape; 0 for a value that is broadcast. Sizes may be unknown.
    fn element_bytes(&self, graph: &Graph, value: ValueId) -> u64 {
        let ty = self.stored(graph, value);
        match same_dims(&ty.dims, &self.space) {
            true => ty.dtype.size_bytes(),
            false => 0,
        }
    }

    /// Returns the bytes per element that are alive while `ins` are read and `outs` written, where `over` of them may be
    /// overwritten by the first result.
    fn alive(&self, graph: &Graph, alive: &[ValueId], outs: &[ValueId], over: &[ValueId]) -> u64 {
        let bytes = |v: &ValueId| self.element_bytes(graph, *v);
        let of = |v: &ValueId| (graph.ty(*v).dtype, bytes(v));
        let first = outs.first().map(of);
        let is_taken = over.iter().any(|v| Some(of(v)) == first);
        let taken = outs.first().filter(|_| is_taken).map_or(0, bytes);
        alive.iter().chain(outs).map(bytes).sum::<u64>() - taken
    }

    /// Returns the most bytes per element that the chain may take.
    fn bytes(&self, graph: &Graph, lives: &Lifetimes) -> u64 {
        let end = self.members.last().map_or(0, |id| lives.positions[*id]);
        let outs: Vec<ValueId> = self.results(graph).into_iter().map(|(v, _)| v).collect();
        let in_place = self.program.inputs_in_place();
        let over = in_place.into_iter().map(|i| self.inputs[i]);
        let over: Vec<ValueId> = over.filter(|v| lives.latest[*v] <= end).collect();
        // A smaller input that a node could have freed before the end of the chain counts as one of the chain's shape.
        let held = self
            .inputs
            .iter()
            .filter(|v| self.element_bytes(graph, **v) == 0 && lives.earliest[**v] < end);
        let held_bytes: u64 = held.map(|v| graph.ty(*v).dtype.size_bytes()).sum();
        self.alive(graph, &self.inputs, &outs, &over) + held_bytes
    }

    /// Returns the fewest bytes per element that the nodes may take one by one, if each overwrites an operand where it can.
    fn bytes_one_by_one(&self, graph: &Graph, lives: &Lifetimes) -> u64 {
        let mut most = 0;
        let mut alive = self.inputs.clone();
        for id in &self.members {
            let node = graph.node(*id);
            let dies = |v: &ValueId| lives.earliest[*v] <= lives.positions[*id];
            let over: Vec<ValueId> = node.operands().filter(dies).collect();
            most = most.max(self.alive(graph, &alive, &node.outs, &over));
            alive.extend(&node.outs);
            alive.retain(|v| !dies(v));
        }
        most
    }
}

/// Returns whether a node certainly makes a view: a layout op that never copies, or whose operand is row-major.
fn is_view(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    if !node.op.is_layout() {
        return false;
    }
    let Some(x) = node.operand(0) else {
        return false;
    };
    if [&RESHAPE, &FLATTEN].contains(&node.op) {
        return graph
            .def_node(x)
            .is_none_or(|maker| arithmetic(graph, maker).is_some());
    }
    let has_steps = node.op == &SLICE && node.operand(4).is_some();
    !has_steps
}

/// Replaces all nodes with scalar arithmetic, alone or in chains. Returns the number of nodes that were replaced and the
/// number of chains.
pub fn fuse_chains(graph: &mut Graph) -> (usize, usize) {
    let lives = Lifetimes::new(graph);
    let mut found = Found::default();
    let mut open: Option<Chain> = None;
    for id in graph.order().to_vec() {
        if let Some(longer) = open
            .as_ref()
            .and_then(|chain| chain.joined(graph, &lives, id))
        {
            open = Some(longer);
            continue;
        }
        let node = graph.node(id);
        let is_aside = |chain: &Chain| !node.operands().any(|v| chain.makes(v));
        if !(open.as_ref().is_some_and(is_aside) && is_view(graph, id)) {
            found.close(graph, open.take());
            open = Chain::new(graph, id);
            if open.is_some() {
                continue;
            }
        }
        found.order.push(id);
    }
    found.close(graph, open);
    let mut replaced = Replaced::default();
    let count = found.chains.len();
    for chain in found.chains {
        replaced.replace(graph, chain);
    }
    let nodes = replaced.members.len();
    replaced.finish(graph, &found.order);
    (nodes, count)
}

/// The chains of a graph, and its order with the members of each chain side by side.
#[derive(Default)]
struct Found {
    chains: Vec<Chain>,
    order: Vec<NodeId>,
}

impl Found {
    /// Ends a chain. If nothing reads its results, its nodes stay as they are.
    fn close(&mut self, graph: &Graph, chain: Option<Chain>) {
        let Some(chain) = chain else { return };
        self.order.extend(&chain.members);
        if !chain.results(graph).is_empty() {
            self.chains.push(chain);
        }
    }
}

/// What replaces the chains so far. The old nodes stay in the graph until the end.
#[derive(Default)]
struct Replaced {
    members: FxHashSet<NodeId>,
    /// The new nodes, by the last member of their chain.
    nodes: FxHashMap<NodeId, Vec<NodeId>>,
    /// The new value of each result, and the name of the old one.
    renewed: FxHashMap<ValueId, ValueId>,
    names: Vec<(ValueId, String)>,
}

impl Replaced {
    /// Adds the node of a chain.
    fn replace(&mut self, graph: &mut Graph, mut chain: Chain) {
        for input in &mut chain.inputs {
            *input = self.renewed.get(input).copied().unwrap_or(*input);
        }
        let results = chain.results(graph);
        let of = |v: ValueId| (graph.value(v).name.clone(), chain.stored(graph, v));
        let old: Vec<(String, Ty)> = results.iter().map(|(v, _)| of(*v)).collect();
        let steps = results.iter().map(|(_, step)| *step);
        chain.program.results = steps.zip(old.iter().map(|(_, ty)| ty.dtype)).collect();
        let last = *chain.members.last().expect("a chain has a node");
        let name = graph.node(last).name.clone();
        let node = graph.node(last);
        let (loc, role): (Arc<Loc>, _) = (node.loc.clone(), node.role);
        let new = graph.add_node(NewNode {
            op: &FUSED,
            name: &name,
            attrs: Attrs::new().with(PROGRAM, Attr::Str(chain.program.to_string())),
            ins: chain.inputs.iter().map(|v| Some(*v)).collect(),
            outs: old
                .iter()
                .map(|(n, ty)| (n.clone(), Some(ty.clone())))
                .collect(),
            loc,
            role,
        });
        let mut nodes = vec![new];
        let outs: Vec<ValueId> = (graph.node(new).outs.clone().into_iter().zip(&results))
            .map(|(made, (old, _))| match chain.summed.contains(old) {
                true => sum_to(graph, made, *old, &mut nodes),
                false => made,
            })
            .collect();
        for ((old, _), new) in results.iter().zip(&outs) {
            graph.replace_uses(*old, *new);
            self.renewed.insert(*old, *new);
        }
        let names = old.into_iter().map(|(name, _)| name);
        self.names.extend(outs.into_iter().zip(names));
        self.members.extend(chain.members);
        self.nodes.insert(last, nodes);
    }

    /// Removes the old nodes, and gives their names and places to the new ones.
    fn finish(mut self, graph: &mut Graph, order: &[NodeId]) {
        // A copy of a node that is gone is a node of its own.
        let of_member =
            |original: Option<NodeId>| original.is_some_and(|o| self.members.contains(&o));
        let orphans: Vec<NodeId> = (graph.nodes())
            .filter(|(_, n)| of_member(n.recompute_of))
            .map(|(id, _)| id)
            .collect();
        for id in orphans {
            graph.set_recompute_of(id, None, None);
        }
        graph.remove_nodes(&|id| self.members.contains(&id));
        for (value, name) in &self.names {
            graph.rename_value(*value, name);
        }
        let mut renewed = Vec::with_capacity(order.len());
        for id in order {
            match self.nodes.remove(id) {
                Some(nodes) => renewed.extend(nodes),
                None if self.members.contains(id) => {}
                None => renewed.push(*id),
            }
        }
        graph.set_order(renewed);
    }
}

/// Adds the nodes that sum terms to the sizes and the type of a result.
fn sum_to(graph: &mut Graph, terms: ValueId, like: ValueId, nodes: &mut Vec<NodeId>) -> ValueId {
    let ty = graph.ty(like).clone();
    let maker = graph.node(nodes[0]);
    let (loc, role) = (maker.loc.clone(), maker.role);
    let shape = Tensor::ints(&ty.static_dims().unwrap_or_default());
    let shape = graph.add_init("shape", shape);
    let mut add = |op: &'static OpDef, ins: &[ValueId], attrs: Attrs, dtype: DType| {
        let name = graph.value(like).name.clone();
        let id = graph.add_node(NewNode {
            op,
            name: &name,
            attrs,
            ins: ins.iter().map(|v| Some(*v)).collect(),
            outs: vec![(name.clone(), Some(ty.with_dtype(dtype)))],
            loc: loc.clone(),
            role,
        });
        nodes.push(id);
        graph.node(id).outs[0]
    };
    let sum = add(&SUM_TO_SHAPE, &[terms, shape], Attrs::new(), DType::F32);
    match ty.dtype {
        DType::F32 => sum,
        dtype => add(&CAST, &[sum], Attrs::new().with("to", dtype), dtype),
    }
}
