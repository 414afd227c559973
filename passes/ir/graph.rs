//! Nodes, values and the order they run in: read access.
//!
//! `order` is the schedule: it is data, it is what a planner decides, and it is the node order of the file we write.
//! Recomputation is a field: a node with `again = Some(n)` is a copy of node `n`. Everything that can be computed from
//! the graph is an analysis in a side table, never a field here.

use super::attr::Attrs;
use super::id::{Arena, NodeId, ValueId};
use super::op::OpDef;
use super::tensor::Tensor;
use super::ty::Ty;
use rustc_hash::FxHashSet;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How far a graph has come; a pass states what it takes and what it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// As the frontend read it; types may be missing.
    Imported,
    /// Every value has a type.
    Typed,
    /// Forward, loss and backward in one graph.
    Training,
    /// Recompute nodes are in place.
    Rewritten,
}

/// Which part of a training step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Forward,
    Loss,
    Backward,
}

/// Where something comes from in the user's world. Gradients and copies inherit it from the forward node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loc {
    /// Name of the node in the file; a node that comes from none has its own name here.
    pub node: String,
    /// Module path, outermost first: (`model.layers.0.mlp`, class `LlamaMLP` if known).
    pub scopes: Vec<(String, Option<String>)>,
}

/// An operation in the graph.
#[derive(Clone, Debug)]
pub struct Node {
    pub op: &'static OpDef,
    /// Unique among nodes.
    pub name: String,
    pub attrs: Attrs,
    /// One entry a slot of the op; `None` is an optional operand that is not given.
    pub ins: Vec<Option<ValueId>>,
    pub outs: Vec<ValueId>,
    pub loc: Arc<Loc>,
    pub role: Role,
    /// The node this one computes again.
    pub recompute_of: Option<NodeId>,
    /// The recompute segment a copy belongs to.
    pub segment: Option<u32>,
    /// Metadata that travels with the node: the file's own, and `ckpt.*` notes for readers of the written file.
    pub meta: BTreeMap<String, String>,
}

impl Node {
    /// Returns the operand in `slot`, or `None` where it is not given.
    pub fn operand(&self, slot: usize) -> Option<ValueId> {
        self.ins.get(slot).copied().flatten()
    }

    /// Returns the operands that are given, in slot order.
    pub fn operands(&self) -> impl DoubleEndedIterator<Item = ValueId> + '_ {
        self.ins.iter().copied().flatten()
    }

    /// Returns true for first computations of the forward pass: neither a copy nor part of a loss or a gradient.
    pub fn is_forward(&self) -> bool {
        self.role == Role::Forward && self.recompute_of.is_none()
    }
}

/// What defines a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Def {
    Input,
    Init(Tensor),
    Node { node: NodeId, slot: usize },
}

/// One operand slot that reads a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Use {
    pub node: NodeId,
    pub slot: usize,
}

/// A tensor that flows through the graph.
#[derive(Clone, Debug)]
pub struct Value {
    /// Unique among values.
    pub name: String,
    /// `None` only in phase `Imported`.
    pub ty: Option<Ty>,
    pub def: Def,
    pub(super) uses: Vec<Use>,
}

impl Value {
    /// Operand slots that read it, in no particular order. Graph outputs are not among them.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// The type; every value has one from phase `Typed` on.
    pub fn ty(&self) -> &Ty {
        self.ty
            .as_ref()
            .unwrap_or_else(|| panic!("I5: value `{}` has no type", self.name))
    }

    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.def {
            Def::Init(tensor) => Some(tensor),
            _ => None,
        }
    }
}

/// What the file tells about an initializer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origin {
    /// The framework's parameter names; the first is the main one, the others are aliases of a tied weight.
    pub names: Vec<String>,
    /// The initializer is the transpose of the framework's parameter.
    pub transposed: bool,
    /// Whether the framework calls it a parameter (`true`) or a buffer or constant (`false`), where the file tells.
    pub is_parameter: Option<bool>,
    /// A parameter that the framework does not train (`requires_grad` is off).
    pub frozen: bool,
}

/// A model: values, the nodes between them, and the order they run in.
#[derive(Clone, Default)]
pub struct Graph {
    pub name: String,
    pub phase: Phase,
    pub(super) nodes: Arena<NodeId, Node>,
    pub(super) values: Arena<ValueId, Value>,
    pub(super) order: Vec<NodeId>,
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
    pub(super) node_names: FxHashSet<String>,
    pub(super) value_names: FxHashSet<String>,
    /// Initializers of which the file tells something.
    pub origins: BTreeMap<ValueId, Origin>,
    /// Metadata of the file: producer, IR version (`ir_version`), the model's own properties.
    pub meta: BTreeMap<String, String>,
}

impl Default for Phase {
    fn default() -> Self {
        Phase::Imported
    }
}

impl Graph {
    pub fn new(name: &str) -> Graph {
        Graph {
            name: name.into(),
            ..Graph::default()
        }
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id]
    }

    pub fn contains_node(&self, id: NodeId) -> bool {
        self.nodes.get(id).is_some()
    }

    pub fn contains_value(&self, id: ValueId) -> bool {
        self.values.get(id).is_some()
    }

    /// The type of a value; see [`Value::ty`].
    pub fn ty(&self, id: ValueId) -> &Ty {
        self.values[id].ty()
    }

    /// Nodes in the order they run.
    pub fn order(&self) -> &[NodeId] {
        &self.order
    }

    /// Graph inputs, initializers not among them.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    pub fn is_output(&self, id: ValueId) -> bool {
        self.outputs.contains(&id)
    }

    /// Initializers, in the order they were added.
    pub fn inits(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values
            .iter()
            .filter(|(_, v)| matches!(v.def, Def::Init(_)))
    }

    /// All values, in the order they were added.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter()
    }

    /// All nodes, in the order they were added (not the order they run in).
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter()
    }

    /// The node that defines a value, if one does.
    pub fn def_node(&self, id: ValueId) -> Option<NodeId> {
        match self.values[id].def {
            Def::Node { node, .. } => Some(node),
            _ => None,
        }
    }

    /// Returns the nodes that define the operands of `id`, in slot order, with repetitions.
    pub fn operand_nodes(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.nodes[id].operands().filter_map(|v| self.def_node(v))
    }

    /// Length of a table indexed by node.
    pub fn node_bound(&self) -> usize {
        self.nodes.bound()
    }

    /// Length of a table indexed by value.
    pub fn value_bound(&self) -> usize {
        self.values.bound()
    }

    /// The value of that name; linear, for tests, goldens and single requests.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        self.values
            .iter()
            .find(|(_, v)| v.name == name)
            .map(|(id, _)| id)
    }

    /// The node of that name; linear.
    pub fn find_node(&self, name: &str) -> Option<NodeId> {
        self.nodes
            .iter()
            .find(|(_, n)| n.name == name)
            .map(|(id, _)| id)
    }

    /// The first in a chain of copies: the node itself unless it is a copy.
    pub fn original(&self, mut id: NodeId) -> NodeId {
        while let Some(earlier) = self.nodes[id].recompute_of {
            id = earlier;
        }
        id
    }

    /// The value that `id` is a recomputation of, looking through copies and transfers; itself otherwise.
    pub fn origin(&self, mut id: ValueId) -> ValueId {
        loop {
            let Def::Node { node, slot } = self.values[id].def else {
                return id;
            };
            let original = self.original(node);
            id = self.nodes[original].outs[slot];
            match self.nodes[original].ins.first() {
                Some(Some(moved)) if self.nodes[original].op.is_transfer() => id = *moved,
                _ => return id,
            }
        }
    }

    /// One line for messages: `node "fc2/MatMul" (MatMul) in model.layers.0.mlp`.
    pub fn describe(&self, id: NodeId) -> String {
        let node = &self.nodes[id];
        let scope = node
            .loc
            .scopes
            .iter()
            .rev()
            .map(|(path, _)| path.as_str())
            .find(|p| !p.is_empty());
        let place = scope.map_or(String::new(), |s| format!(" in {s}"));
        let from = if node.loc.node == node.name {
            String::new()
        } else {
            format!(", from \"{}\"", node.loc.node)
        };
        format!("node \"{}\" ({}){from}{place}", node.name, node.op.name)
    }
}
