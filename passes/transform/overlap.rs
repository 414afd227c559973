//! Lets sums over ranks run beside the nodes after them.
//!
//! In and out: `Training`, after the updates. A sum becomes a node that begins it, where it stood, and a `Wait` before what
//! reads it. Sums are exchanged in buckets of some bytes, one after the other. What depends on the sums of a bucket waits at least
//! until the next bucket is full, so that one is under way while the backward pass fills another. So gradients of about
//! two buckets live at once where updates are fused; the planner counts them, as all else.

use crate::error::Result;
use crate::ir::typing::Contents;
use crate::ir::{Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::collective::{
    ALL_REDUCE, BUCKET, DATA_PARALLEL, GROUP, REDUCE_SCATTER, START_ALL_REDUCE,
    START_REDUCE_SCATTER, WAIT, group_attrs,
};
use crate::ops::{Builder, EmitExt};

/// What stands between the start of a sum and its readers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// Nothing.
    No,
    /// It is a sum whose bucket is not exchanged yet, or reads something that is held.
    Yes,
    /// A `Wait`, which is not in the order yet.
    By(NodeId),
}

struct Order<'g> {
    graph: &'g Graph,
    held: SecondaryMap<ValueId, Held>,
    /// Sums that are not exchanged yet, each with its bucket and its `Wait`.
    sums: Vec<(usize, ValueId, NodeId)>,
    /// Nodes that read what is held.
    behind: Vec<NodeId>,
    order: Vec<NodeId>,
}

impl Order<'_> {
    /// Appends a node, with the `Wait`s of what it reads; keeps it back where that is held.
    fn add(&mut self, id: NodeId) {
        let node = self.graph.node(id);
        let mut operands = node.operands();
        if operands.any(|v| self.held[v] == Held::Yes) {
            for out in &node.outs {
                self.held[*out] = Held::Yes;
            }
            self.behind.push(id);
            return;
        }
        for value in node.operands() {
            self.wait(value);
        }
        for out in &node.outs {
            self.held[*out] = Held::No;
        }
        self.order.push(id);
    }

    fn wait(&mut self, sum: ValueId) {
        if let Held::By(wait) = self.held[sum] {
            self.held[sum] = Held::No;
            self.order.push(wait);
        }
    }

    /// Lets go of the buckets before the one of that number.
    fn release(&mut self, before: usize) {
        let held = &mut self.held;
        self.sums.retain(|(bucket, sum, wait)| {
            let stays = *bucket >= before;
            if !stays {
                held[*sum] = Held::By(*wait);
            }
            stays
        });
        for id in std::mem::take(&mut self.behind) {
            self.add(id);
        }
    }
}

/// Splits each sum of gradients over ranks into its start and a `Wait`. Returns whether there was one.
///
/// # Errors
/// None but bugs: the nodes have the types of those that they replace.
pub fn overlap(graph: &mut Graph, bucket_bytes: u64) -> Result<bool> {
    let old = graph.order().to_vec();
    let contents = Contents::known(graph)?;
    let mut b = Builder::resume(graph, contents);
    // By old node: the start, the wait and its result.
    let mut begun = SecondaryMap::new(b.graph.node_bound(), None);
    for id in &old {
        let node = b.graph.node(*id);
        let (op, count) = match node.op {
            op if op == &ALL_REDUCE => (&START_ALL_REDUCE, 1),
            op if op == &REDUCE_SCATTER => (&START_REDUCE_SCATTER, 2),
            _ => continue,
        };
        let (sum, name) = (node.outs[0], node.name.clone());
        // Numbers such as the loss are read at once, and so is the sum of a layer.
        if node.attrs.str(GROUP) != DATA_PARALLEL
            || node.operand(0).is_none_or(|x| b.graph.ty(x).rank() == 0)
        {
            continue;
        }
        let bucket = i64::try_from(bucket_bytes).unwrap_or(i64::MAX);
        let (ins, attrs) = (
            node.ins.clone(),
            group_attrs(&node.attrs).with(BUCKET, bucket),
        );
        (b.loc, b.prefix, b.role) = (node.loc.clone(), name, node.role);
        let mut started = b.emit_n(op, ins, attrs, count)?;
        started.reverse();
        let done = b.emit(&WAIT, &started, Default::default())?;
        let result = b.graph.value(sum).name.clone();
        b.graph.rename_value(sum, &format!("{result}/pending"));
        b.graph.rename_value(done, &result);
        b.graph.replace_uses(sum, done);
        let new = b.graph.order();
        begun[*id] = Some((new[new.len() - 2], new[new.len() - 1], done));
    }
    if old.len() == graph.order().len() {
        return Ok(false);
    }
    let mut next = Order {
        graph,
        held: SecondaryMap::new(graph.value_bound(), Held::No),
        sums: Vec::new(),
        behind: Vec::new(),
        order: Vec::with_capacity(graph.order().len()),
    };
    let (mut bucket, mut bytes) = (0, 0);
    for id in &old {
        let Some((start, wait, done)) = begun[*id] else {
            next.add(*id);
            continue;
        };
        next.add(start);
        next.held[done] = Held::Yes;
        next.sums.push((bucket, done, wait));
        let ty = graph.ty(graph.node(start).ins[0].unwrap_or(done));
        let elements = ty.elements().as_const().unwrap_or(0).unsigned_abs();
        bytes += elements * ty.dtype.size_bytes();
        if bytes >= bucket_bytes {
            next.release(bucket);
            (bucket, bytes) = (bucket + 1, 0);
        }
    }
    next.release(usize::MAX);
    // Nothing reads these before the end of the step.
    for (_, _, done) in old.iter().filter_map(|id| begun[*id]) {
        next.wait(done);
    }
    let order = next.order;
    graph.remove_nodes(&|id| begun[id].is_some());
    graph.set_order(order);
    Ok(true)
}
