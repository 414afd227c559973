//! Joins chains of ops with scalar arithmetic into nodes that a device computes with one generated kernel each.
//!
//! The runtime calls this for a device, after planning; no file holds the result. A chain is a run of nodes of the schedule, each
//! of which reads a result of the others; views between them may stand in front of it. All results have one shape. A sum over
//! rows stays within one node, so all that a chain reads of another row is what its nodes read. A result that others read is
//! a result of the chain; all others are never stored. A chain takes no more memory than its nodes did one by one.
//!
//! Single nodes are replaced too: an op then has the same arithmetic, and so the same bits, alone and in every chain.

use crate::error::{Error, Result};
use crate::ir::arithmetic::{Expr, Program, ScalarCx, Source, is_scalar_type};
use crate::ir::edit::NewNode;
use crate::ir::op::{Body, Domain, Effect, Grad, MemoryCx, OpClass, OpDef, Slot, fresh};
use crate::ir::{
    Attr, AttrKind, AttrSpec, Attrs, DType, Def, Dim, Graph, Loc, NodeId, Tensor, Ty, ValueId,
    same_dims,
};
use crate::ops::cast::CAST;
use crate::ops::rule::standard;
use crate::ops::sum_to::SUM_TO_SHAPE;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The attribute of [`FUSED`] with the text of its [`Program`].
pub const PROGRAM: &str = "program";

/// The most operands and results of a chain: pointers that a kernel takes.
const MOST_POINTERS: usize = 24;

/// A chain of ops. It is not in the op table, because no file holds it.
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
        let slots = program(cx.attrs).map_or(Vec::new(), |p| p.inputs_in_place());
        fresh(cx).in_place_operands(cx, &slots)
    },
    ..standard(
        "Fused",
        Domain::Ckpt,
        OpClass::Other,
        crate::ir::op::BatchAxes::Mixed,
    )
};

/// Returns the program of a [`FUSED`] node.
///
/// # Errors
/// A text that is no program: a bug.
pub fn program(attrs: &Attrs) -> Result<Program> {
    let parsed = attrs.str(PROGRAM).parse();
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
    fn joined(&self, graph: &Graph, id: NodeId) -> Option<Chain> {
        // Terms of a sum are alive until the chain ends.
        let reads = self.summed.is_empty() && graph.node(id).operands().any(|v| self.makes(v));
        let chain = self.with(graph, id).filter(|_| reads)?;
        (chain.bytes(graph) <= chain.bytes_one_by_one(graph)).then_some(chain)
    }

    /// Returns the values that nodes outside read, or that are outputs of the graph.
    fn results(&self, graph: &Graph) -> Vec<(ValueId, usize)> {
        let outlives = |v: ValueId| !self.dies_with(graph, v, &self.members);
        let made = self.made.iter().copied();
        made.filter(|(v, _)| outlives(*v)).collect()
    }

    /// Returns whether only these nodes read a value that a node makes.
    fn dies_with(&self, graph: &Graph, value: ValueId, readers: &[NodeId]) -> bool {
        let v = graph.value(value);
        matches!(v.def, Def::Node { .. })
            && !graph.is_output(value)
            && v.uses().iter().all(|u| readers.contains(&u.node))
    }

    /// Returns the type of a value as the chain stores it: of a sum, that of its terms.
    fn stored(&self, graph: &Graph, value: ValueId) -> Ty {
        match self.summed.contains(&value) {
            true => Ty::new(DType::F32, self.space.clone()),
            false => graph.ty(value).clone(),
        }
    }

    /// Returns the bytes of a value for one element of the chain's shape; 0 for a value that is broadcast.
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

    fn bytes(&self, graph: &Graph) -> u64 {
        let outs: Vec<ValueId> = self.results(graph).into_iter().map(|(v, _)| v).collect();
        let in_place = self.program.inputs_in_place();
        let over = in_place.into_iter().map(|i| self.inputs[i]);
        let over: Vec<ValueId> = over
            .filter(|v| self.dies_with(graph, *v, &self.members))
            .collect();
        self.alive(graph, &self.inputs, &outs, &over)
    }

    /// Returns the most bytes per element while the nodes run one by one, if each overwrites an operand where it can.
    fn bytes_one_by_one(&self, graph: &Graph) -> u64 {
        let mut most = 0;
        let mut alive = self.inputs.clone();
        for (i, id) in self.members.iter().enumerate() {
            let node = graph.node(*id);
            let dies = |v: &ValueId| self.dies_with(graph, *v, &self.members[..=i]);
            let over: Vec<ValueId> = node.operands().filter(dies).collect();
            most = most.max(self.alive(graph, &alive, &node.outs, &over));
            alive.extend(&node.outs);
            alive.retain(|v| !dies(v));
        }
        most
    }
}

/// Replaces all nodes with scalar arithmetic, alone or in chains. Returns the number of nodes that were replaced and the
/// number of chains.
pub fn fuse_chains(graph: &mut Graph) -> (usize, usize) {
    let mut chains: Vec<Chain> = Vec::new();
    let mut order: Vec<NodeId> = Vec::new();
    let mut open: Option<Chain> = None;
    for id in graph.order().to_vec() {
        if let Some(longer) = open.as_ref().and_then(|chain| chain.joined(graph, id)) {
            open = Some(longer);
            continue;
        }
        let node = graph.node(id);
        let is_aside = |chain: &Chain| !node.operands().any(|v| chain.makes(v));
        if !(node.op.is_layout() && open.as_ref().is_some_and(is_aside)) {
            close(open.take(), &mut chains, &mut order);
            open = Chain::new(graph, id);
            if open.is_some() {
                continue;
            }
        }
        order.push(id);
    }
    close(open, &mut chains, &mut order);
    let replaced = chains.iter().map(|c| c.members.len()).sum();
    let count = chains.len();
    let mut renewed = FxHashMap::default();
    for chain in chains {
        replace(graph, chain, &mut order, &mut renewed);
    }
    let kept = |id: &NodeId| graph.contains_node(*id);
    let order = order.into_iter().filter(kept).collect();
    graph.set_order(order);
    (replaced, count)
}

/// Puts the members of a chain where the last of them stands.
fn close(chain: Option<Chain>, chains: &mut Vec<Chain>, order: &mut Vec<NodeId>) {
    if let Some(chain) = chain {
        order.extend(&chain.members);
        chains.push(chain);
    }
}

/// Puts one node in the place of a chain. `renewed` has the new value of each result that was replaced.
fn replace(
    graph: &mut Graph,
    mut chain: Chain,
    order: &mut Vec<NodeId>,
    renewed: &mut FxHashMap<ValueId, ValueId>,
) {
    for input in &mut chain.inputs {
        *input = renewed.get(input).copied().unwrap_or(*input);
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
        renewed.insert(*old, *new);
    }
    // A copy of a node that is gone is a node of its own.
    let orphans: Vec<NodeId> = (graph.nodes())
        .filter(|(_, n)| n.recompute_of.is_some_and(|o| chain.members.contains(&o)))
        .map(|(id, _)| id)
        .collect();
    for id in orphans {
        graph.set_recompute_of(id, None, None);
    }
    let members = chain.members;
    graph.remove_nodes(&|id| members.contains(&id));
    for ((name, _), new) in old.iter().zip(&outs) {
        graph.rename_value(*new, name);
    }
    if let Some(at) = order.iter().position(|id| *id == last) {
        order.splice(at..=at, nodes);
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
