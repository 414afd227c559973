//! The only mutators of a graph. Each keeps use lists and names exact (invariants I1, I3, I8).

use super::attr::{Attr, Attrs};
use super::graph::{Def, FusedNode, Graph, Loc, Node, Role, Use, Value};
use super::id::{NodeId, ValueId};
use super::op::OpDef;
use super::tensor::Tensor;
use super::ty::Ty;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Arguments of [`Graph::add_node`].
pub struct NewNode<'a> {
    /// Its row.
    pub op: &'static OpDef,
    /// The requested name. It is made unique.
    pub name: &'a str,
    /// Its attributes.
    pub attrs: Attrs,
    /// Its operands.
    pub ins: Vec<Option<ValueId>>,
    /// Requested names of the results, which are made unique, and their types, if known.
    pub outs: Vec<(String, Option<Ty>)>,
    /// Its origin in the user's model.
    pub loc: Arc<Loc>,
    /// Its part of the training step.
    pub role: Role,
}

impl Graph {
    /// Returns `wish`, or `wish.n` with the least free `n` if the numbers in use have no gaps. Takes time logarithmic
    /// in their count, because an inlined function may request one name a hundred thousand times.
    fn unique(taken: &mut rustc_hash::FxHashSet<String>, wish: &str) -> String {
        if taken.insert(wish.to_string()) {
            return wish.to_string();
        }
        let numbered = |n: u64| format!("{wish}.{n}");
        let (mut used, mut free) = (1, 2);
        while taken.contains(&numbered(free)) {
            (used, free) = (free, free * 2);
        }
        while free - used > 1 {
            let middle = used + (free - used) / 2;
            if taken.contains(&numbered(middle)) {
                used = middle;
            } else {
                free = middle;
            }
        }
        let name = numbered(free);
        taken.insert(name.clone());
        name
    }

    fn add_value(&mut self, wish: &str, ty: Option<Ty>, def: Def) -> ValueId {
        let name = Graph::unique(&mut self.value_names, wish);
        self.values.push(Value {
            name,
            ty,
            def,
            uses: Vec::new(),
        })
    }

    /// Returns true if a value has that name.
    pub fn has_value_name(&self, name: &str) -> bool {
        self.value_names.contains(name)
    }

    /// Returns true if a node has that name.
    pub fn has_node_name(&self, name: &str) -> bool {
        self.node_names.contains(name)
    }

    /// Adds a graph input.
    pub fn add_input(&mut self, name: &str, ty: Option<Ty>) -> ValueId {
        let id = self.add_value(name, ty, Def::Input);
        self.inputs.push(id);
        id
    }

    /// Adds an initializer.
    pub fn add_init(&mut self, name: &str, tensor: Tensor) -> ValueId {
        let ty = tensor.ty();
        self.add_value(name, Some(ty), Def::Init(tensor))
    }

    /// Replaces the contents of an initializer by a tensor of the same type.
    pub fn set_init(&mut self, id: ValueId, tensor: Tensor) {
        debug_assert_eq!(self.values[id].ty.as_ref(), Some(&tensor.ty()));
        self.values[id].def = Def::Init(tensor);
    }

    /// Appends a graph output.
    pub fn add_output(&mut self, value: ValueId) {
        self.outputs.push(value);
    }

    /// Replaces the graph outputs.
    pub fn set_outputs(&mut self, outputs: Vec<ValueId>) {
        self.outputs = outputs;
    }

    /// Adds a node at the end of the order and fills in attributes that have a default.
    pub fn add_node(&mut self, new: NewNode<'_>) -> NodeId {
        let mut attrs = new.attrs;
        for spec in new.op.attrs {
            if attrs.get(spec.name).is_none()
                && let Some(value) = spec.default_value()
            {
                attrs.set(spec.name, value);
            }
        }
        let name = Graph::unique(&mut self.node_names, new.name);
        let mut loc = new.loc;
        if loc.node.is_empty() {
            // What comes from nowhere else comes from itself; gradients and copies inherit that.
            Arc::make_mut(&mut loc).node.clone_from(&name);
        }
        let id = self.nodes.push(Node {
            op: new.op,
            name,
            attrs,
            ins: Vec::new(),
            outs: Vec::new(),
            loc,
            role: new.role,
            recompute_of: None,
            segment: None,
            fused_from: Vec::new(),
            meta: BTreeMap::new(),
        });
        let outs = new
            .outs
            .into_iter()
            .enumerate()
            .map(|(slot, (n, ty))| self.add_value(&n, ty, Def::Node { node: id, slot }));
        self.nodes[id].outs = outs.collect();
        for (slot, value) in new.ins.iter().enumerate() {
            if let Some(value) = value {
                self.values[*value].uses.push(Use { node: id, slot });
            }
        }
        self.nodes[id].ins = new.ins;
        self.order.push(id);
        id
    }

    /// Appends a result to `node`: an optional output of its op that the file did not ask for.
    pub fn add_result(&mut self, node: NodeId, name: &str, ty: Ty) -> ValueId {
        let slot = self.nodes[node].outs.len();
        let id = self.add_value(name, Some(ty), Def::Node { node, slot });
        self.nodes[node].outs.push(id);
        id
    }

    /// Adds a node that recomputes `original` from `ins`, at the end of the order. Its name is `<original>/recompute`.
    pub fn add_recompute(
        &mut self,
        original: NodeId,
        ins: Vec<Option<ValueId>>,
        segment: Option<u32>,
    ) -> NodeId {
        let source = self.nodes[original].clone();
        let outs = source
            .outs
            .iter()
            .map(|v| {
                (
                    format!("{}/recompute", self.values[*v].name),
                    self.values[*v].ty.clone(),
                )
            })
            .collect::<Vec<_>>();
        let id = self.add_node(NewNode {
            op: source.op,
            name: &format!("{}/recompute", source.name),
            attrs: source.attrs,
            ins,
            outs,
            loc: source.loc,
            role: source.role,
        });
        self.nodes[id].recompute_of = Some(original);
        self.nodes[id].segment = segment;
        self.nodes[id].meta = source.meta;
        id
    }

    /// Makes slot `slot` of `node` read `value`. Slots before it that the node did not have are empty.
    pub fn set_operand(&mut self, node: NodeId, slot: usize, value: Option<ValueId>) {
        let count = self.nodes[node].ins.len().max(slot + 1);
        self.nodes[node].ins.resize(count, None);
        if let Some(old) = self.nodes[node].ins[slot] {
            let gone = Use { node, slot };
            let uses = &mut self.values[old].uses;
            if let Some(at) = uses.iter().position(|u| *u == gone) {
                uses.swap_remove(at);
            }
        }
        self.nodes[node].ins[slot] = value;
        if let Some(new) = value {
            self.values[new].uses.push(Use { node, slot });
        }
    }

    /// Replaces `old` by `new` in every reader and among the graph outputs.
    pub fn replace_uses(&mut self, old: ValueId, new: ValueId) {
        if old == new {
            return;
        }
        for Use { node, slot } in std::mem::take(&mut self.values[old].uses) {
            self.nodes[node].ins[slot] = Some(new);
            self.values[new].uses.push(Use { node, slot });
        }
        for output in &mut self.outputs {
            if *output == old {
                *output = new;
            }
        }
    }

    /// Removes the nodes that `gone` selects and their results, which must have no other readers. Returns their number.
    pub fn remove_nodes(&mut self, gone: &dyn Fn(NodeId) -> bool) -> usize {
        let (dead, kept): (Vec<NodeId>, Vec<NodeId>) = self.order.iter().partition(|id| gone(**id));
        self.order = kept;
        let mut read: Vec<ValueId> = Vec::new();
        for id in &dead {
            let node = self
                .nodes
                .remove(*id)
                .expect("I2: `order` lists nodes that exist");
            self.node_names.remove(&node.name);
            read.extend(node.ins.into_iter().flatten());
            for out in node.outs {
                if let Some(value) = self.values.remove(out) {
                    self.value_names.remove(&value.name);
                }
            }
        }
        read.sort_unstable();
        read.dedup();
        let nodes = &self.nodes;
        for id in read {
            if let Some(value) = self.values.get_mut(id) {
                value.uses.retain(|u| nodes.get(u.node).is_some());
            }
        }
        dead.len()
    }

    /// Removes an input or initializer without readers.
    pub fn remove_source(&mut self, id: ValueId) {
        assert!(
            self.values[id].uses.is_empty(),
            "I3: `{}` is still read",
            self.values[id].name
        );
        if let Some(value) = self.values.remove(id) {
            self.value_names.remove(&value.name);
        }
        self.inputs.retain(|v| *v != id);
        self.origins.remove(&id);
    }

    /// Sets the schedule; it must be a permutation of the nodes.
    pub fn set_order(&mut self, order: Vec<NodeId>) {
        debug_assert_eq!(order.len(), self.order.len());
        self.order = order;
    }

    /// Sets the type of a value.
    pub fn set_type(&mut self, id: ValueId, ty: Ty) {
        self.values[id].ty = Some(ty);
    }

    /// Sets the origin of a node.
    pub fn set_loc(&mut self, id: NodeId, loc: Arc<Loc>) {
        self.nodes[id].loc = loc;
    }

    /// Sets the nodes that a node was fused from.
    pub fn set_fused_from(&mut self, id: NodeId, parts: Vec<FusedNode>) {
        self.nodes[id].fused_from = parts;
    }

    /// Sets an attribute of a node, on which no type depends.
    pub fn set_attr(&mut self, id: NodeId, name: &str, value: impl Into<Attr>) {
        self.nodes[id].attrs.set(name, value.into());
    }

    /// Sets the role of a node.
    pub fn set_role(&mut self, id: NodeId, role: Role) {
        self.nodes[id].role = role;
    }

    /// Marks `id` as a recomputation of `original`. The verifier checks it.
    pub fn set_recompute_of(&mut self, id: NodeId, original: Option<NodeId>, segment: Option<u32>) {
        self.nodes[id].recompute_of = original;
        self.nodes[id].segment = segment;
    }

    /// Returns the metadata of a node for change; see [`Node::meta`].
    pub fn meta_mut(&mut self, id: NodeId) -> &mut BTreeMap<String, String> {
        &mut self.nodes[id].meta
    }

    /// Renames a value. The requested name is made unique.
    pub fn rename_value(&mut self, id: ValueId, wish: &str) {
        let old = std::mem::take(&mut self.values[id].name);
        self.value_names.remove(&old);
        self.values[id].name = Graph::unique(&mut self.value_names, wish);
    }
}
