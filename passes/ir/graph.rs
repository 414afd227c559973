//! The graph and read access to it: nodes, values and the order in which nodes run.
//!
//! `order` is the schedule. A planner decides it, and the written file has its nodes in that order. A node with
//! `recompute_of = Some(n)` recomputes node `n`. Whatever can be computed from the graph is kept in a side table, not
//! in a field here.

use super::attr::Attrs;
use super::id::{Arena, NodeId, ValueId};
use super::op::{Domain, OpDef};
use super::tensor::Tensor;
use super::ty::Ty;
use rustc_hash::FxHashSet;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A stage of compilation. A pass states the phase that it takes and the phase that it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Phase {
    /// As the frontend read it; types may be missing.
    #[default]
    Imported,
    /// Every value has a type.
    Typed,
    /// Forward, loss and backward in one graph.
    Training,
    /// Recompute nodes are in place.
    Rewritten,
}

/// The part of a training step that a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The model's own computation.
    Forward,
    /// The loss.
    Loss,
    /// Gradients and updates.
    Backward,
}

/// The origin of a node in the user's model. Gradients and recompute nodes inherit it from the forward node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loc {
    /// Name of the node in the file, or the node's own name if the file has none for it.
    pub node: String,
    /// Module path, outermost first: (`model.layers.0.mlp`, class `LlamaMLP` if known).
    pub scopes: Vec<(String, Option<String>)>,
}

/// A node of the model that a fused op replaced.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedNode {
    /// The name that it had.
    pub name: String,
    /// The origin that it had.
    pub loc: Arc<Loc>,
    /// Its row.
    pub op: &'static OpDef,
}

/// An operation in the graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its row.
    pub op: &'static OpDef,
    /// Unique among nodes.
    pub name: String,
    /// Its attributes, defaults included.
    pub attrs: Attrs,
    /// Operands by slot; `None` for an optional operand that is not given.
    pub ins: Vec<Option<ValueId>>,
    /// Its results.
    pub outs: Vec<ValueId>,
    /// Its origin in the user's model.
    pub loc: Arc<Loc>,
    /// Its part of the training step.
    pub role: Role,
    /// The node that this one recomputes.
    pub recompute_of: Option<NodeId>,
    /// The segment of a recompute node.
    pub segment: Option<u32>,
    /// The nodes that it was fused from, for messages; neither text nor files have them.
    pub fused_from: Vec<FusedNode>,
    /// Metadata that travels with the node: the file's own, and `ckpt.*` notes for readers of the written file.
    pub meta: BTreeMap<String, String>,
}

/// The note on nodes whose results the backward pass may not keep: it reads them from a recomputation.
pub const MUST_RECOMPUTE: &str = "ckpt.must_recompute";

impl Node {
    /// Returns whether the backward pass must read the results from a recomputation, because they would be too wide all at
    /// once. The note stays in files, so that a later plan obeys it, too.
    pub fn must_recompute(&self) -> bool {
        self.meta.contains_key(MUST_RECOMPUTE)
    }

    /// Returns the operand in `slot`, or `None` where it is not given.
    pub fn operand(&self, slot: usize) -> Option<ValueId> {
        self.ins.get(slot).copied().flatten()
    }

    /// Returns the operands that are given, in slot order.
    pub fn operands(&self) -> impl DoubleEndedIterator<Item = ValueId> + '_ {
        self.ins.iter().copied().flatten()
    }

    /// Returns the op's name, for messages: of an op that the table does not have, the name in its file, with its domain.
    pub fn op_name(&self) -> Cow<'static, str> {
        let part = |key| self.attrs.opt_str(key).unwrap_or_default();
        match (self.op.domain, part("op_type")) {
            (Domain::Opaque, op_type) if !op_type.is_empty() => match part("domain") {
                "" => format!("ai.onnx::{op_type}").into(),
                domain => format!("{domain}::{op_type}").into(),
            },
            _ => self.op.name.into(),
        }
    }

    /// Returns true for nodes of the forward pass that recompute nothing.
    pub fn is_forward(&self) -> bool {
        self.role == Role::Forward && self.recompute_of.is_none()
    }
}

/// What defines a value.
#[derive(Clone, Debug, PartialEq)]
pub enum Def {
    /// A graph input.
    Input,
    /// A constant or parameter.
    Init(Tensor),
    /// A result of a node.
    Node {
        /// The node.
        node: NodeId,
        /// The result slot.
        slot: usize,
    },
}

/// One operand slot that reads a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Use {
    /// The reader.
    pub node: NodeId,
    /// The operand slot.
    pub slot: usize,
}

/// A tensor that flows through the graph.
#[derive(Clone, Debug)]
pub struct Value {
    /// Unique among values.
    pub name: String,
    /// `None` only in phase `Imported`.
    pub ty: Option<Ty>,
    /// What defines the value.
    pub def: Def,
    pub(super) uses: Vec<Use>,
}

impl Value {
    /// Returns the operand slots that read the value, in any order. Graph outputs are not among them.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// Returns the type, which every value has from phase `Typed` on.
    pub fn ty(&self) -> &Ty {
        self.ty
            .as_ref()
            .unwrap_or_else(|| panic!("I5: value `{}` has no type", self.name))
    }

    /// Returns the tensor of an initializer; `None` for any other value.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.def {
            Def::Init(tensor) => Some(tensor),
            _ => None,
        }
    }
}

/// Facts about an initializer that the file states.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origin {
    /// The framework's parameter names; the first is the main one, the others are aliases of a tied weight.
    pub names: Vec<String>,
    /// The initializer is the transpose of the framework's parameter.
    pub transposed: bool,
    /// True for a parameter, false for a buffer or constant, `None` where the file does not tell.
    pub is_parameter: Option<bool>,
    /// A buffer that the framework saves with the parameters.
    pub is_persistent: bool,
    /// A parameter that the framework does not train (`requires_grad` is off).
    pub frozen: bool,
    /// The framework's parameters from which an exporter computed the initializer. It is none of them, and its gradient is
    /// the gradient of none.
    pub folded_from: Vec<String>,
}

impl Origin {
    /// The origin of a constant that is no parameter.
    pub fn constant(name: &str) -> Origin {
        Origin {
            names: vec![name.to_string()],
            is_parameter: Some(false),
            ..Origin::default()
        }
    }
}

/// A model: values, the nodes between them, and the order they run in.
#[derive(Clone, Default)]
pub struct Graph {
    /// The name of the model.
    pub name: String,
    /// The stage of compilation.
    pub phase: Phase,
    pub(super) nodes: Arena<NodeId, Node>,
    pub(super) values: Arena<ValueId, Value>,
    pub(super) order: Vec<NodeId>,
    pub(super) inputs: Vec<ValueId>,
    pub(super) outputs: Vec<ValueId>,
    pub(super) node_names: FxHashSet<String>,
    pub(super) value_names: FxHashSet<String>,
    /// Facts that the file states about initializers.
    pub origins: BTreeMap<ValueId, Origin>,
    /// Metadata of the file: producer, IR version (`ir_version`), the model's own properties.
    pub meta: BTreeMap<String, String>,
}

impl Graph {
    /// Returns an empty graph.
    pub fn new(name: &str) -> Graph {
        Graph {
            name: name.into(),
            ..Graph::default()
        }
    }

    /// Returns a node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id]
    }

    /// Returns a value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id]
    }

    /// Returns true if the node exists.
    pub fn contains_node(&self, id: NodeId) -> bool {
        self.nodes.get(id).is_some()
    }

    /// Returns true if the value exists.
    pub fn contains_value(&self, id: ValueId) -> bool {
        self.values.get(id).is_some()
    }

    /// Returns the type of a value; see [`Value::ty`].
    pub fn ty(&self, id: ValueId) -> &Ty {
        self.values[id].ty()
    }

    /// Returns the nodes in the order in which they run.
    pub fn order(&self) -> &[NodeId] {
        &self.order
    }

    /// Returns the graph inputs, without initializers.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// Returns the graph outputs, in order.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Returns true if the value is a graph output.
    pub fn is_output(&self, id: ValueId) -> bool {
        self.outputs.contains(&id)
    }

    /// Returns the initializers in the order in which they were added.
    pub fn inits(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values
            .iter()
            .filter(|(_, v)| matches!(v.def, Def::Init(_)))
    }

    /// Returns all values in the order in which they were added.
    pub fn values(&self) -> impl Iterator<Item = (ValueId, &Value)> {
        self.values.iter()
    }

    /// Returns all nodes in the order in which they were added, which is not the order in which they run.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.nodes.iter()
    }

    /// Returns the node that defines a value, if one does.
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

    /// Returns the length of a table indexed by node.
    pub fn node_bound(&self) -> usize {
        self.nodes.bound()
    }

    /// Returns the length of a table indexed by value.
    pub fn value_bound(&self) -> usize {
        self.values.bound()
    }

    /// Returns the value of that name. Takes linear time: for tests, goldens and single requests.
    pub fn find_value(&self, name: &str) -> Option<ValueId> {
        self.values
            .iter()
            .find(|(_, v)| v.name == name)
            .map(|(id, _)| id)
    }

    /// Returns the node of that name. Takes linear time.
    pub fn find_node(&self, name: &str) -> Option<NodeId> {
        self.nodes
            .iter()
            .find(|(_, n)| n.name == name)
            .map(|(id, _)| id)
    }

    /// Returns the node that `id` recomputes, through any chain of recompute nodes, or `id` itself.
    pub fn original(&self, mut id: NodeId) -> NodeId {
        while let Some(earlier) = self.nodes[id].recompute_of {
            id = earlier;
        }
        id
    }

    /// Returns the value that `id` recomputes or transfers, through any chain of both, or `id` itself.
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

    /// Returns a node in one line, for messages: `node "fc2/MatMul" (MatMul) in model.layers.0.mlp`.
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
        format!("node \"{}\" ({}){from}{place}", node.name, node.op_name())
    }
}
