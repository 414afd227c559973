//! Names, types and modules of the ops and values of a problem.
//!
//! A problem refers to values by index. Labels come from its graph before a plan is applied, so that the schedules before
//! and after share them.

use ckpt_passes::analysis::gradients;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::{Def, Graph, ValueId};
use ckpt_passes::plan::OpAnnotations;
use ckpt_passes::plan::infeasible::tensor_name;
use ckpt_passes::plan::{ByOp, ByValue, Problem, ValueKind};
use ckpt_passes::planning::BoundGraph;

/// The role of a value in the training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An initializer, trained or not.
    Parameter,
    /// An input of the graph that holds no optimizer state.
    Input,
    /// An input with the optimizer state of a parameter.
    State,
    /// A gradient that leaves the graph, or that an update reads.
    Gradient,
    /// Another output of the graph.
    Output,
    /// Any other value: a result that only nodes read.
    Inner,
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// `attention+mlp` and the like.
    pub kind: String,
    /// Module path; `None` where the file names none, or where two layers share it.
    pub path: Option<String>,
    /// Module class; `None` where the file names none.
    pub class: Option<String>,
    /// Equal layers have the same number.
    pub run: usize,
}

impl Layer {
    /// Returns the module's path or class where the file names them, else the kind.
    pub fn name(&self) -> &str {
        let told = self.path.as_deref().or(self.class.as_deref());
        told.unwrap_or(&self.kind)
    }
}

/// Names for everything in a problem.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    /// Name of the graph.
    pub graph: String,
    /// By value.
    pub names: ByValue<String>,
    /// By value: `f32[2, 7, 24]`; empty where only bytes are known.
    pub types: ByValue<String>,
    /// By value: the role of its storage.
    pub roles: ByValue<Role>,
    /// In model order.
    pub layers: Vec<Layer>,
    /// By op: its innermost module.
    pub modules: ByOp<Option<String>>,
    /// Number of parameters with a gradient, and of all others.
    pub trained: usize,
    /// Number of parameters without a gradient.
    pub frozen: usize,
}

impl Labels {
    /// Returns the labels of a planning problem and its graph.
    pub fn of_graph(graph: &Graph, bound: &BoundGraph) -> Labels {
        let problem = &bound.input.problem;
        let index = |v: &ValueId| bound.index(*v);
        let mut labels = Labels {
            graph: graph.name.clone(),
            ..Labels::default()
        };
        let mut roles = problem.by_value(Role::Inner);
        for (i, id) in bound.values.enumerated() {
            let value = graph.value(*id);
            labels.names.push(value.name.clone());
            let size = bound.sizes.of(*id);
            labels
                .types
                .push(format!("{}{:?}", size.dtype.name(), size.dims));
            roles[i] = match value.def {
                Def::Init(_) => Role::Parameter,
                Def::Input => Role::Input,
                Def::Node { .. } => Role::Inner,
            };
        }
        for state in gradients::states(graph).iter().filter_map(index) {
            roles[state] = Role::State;
        }
        let roots = problem.roots();
        for output in graph.outputs().iter().filter_map(index) {
            let root = roots[output];
            if roles[root] == Role::Inner {
                roles[root] = Role::Output;
            }
        }
        let trained = gradients::trained(graph);
        for gradient in trained.values().filter_map(index) {
            let root = roots[gradient];
            if matches!(roles[root], Role::Inner | Role::Output) {
                roles[root] = Role::Gradient;
            }
            labels.trained += 1;
        }
        // Without patterns none can fail to match.
        let parameters = parameters(graph, &Selection::default()).map_or(0, |p| p.len());
        labels.frozen = parameters.saturating_sub(labels.trained);
        labels.roles = roles;
        let layer = |b: &ckpt_passes::analysis::layers::Layer| Layer {
            kind: b.kind.clone(),
            path: b.path.clone(),
            class: b.class.clone(),
            run: b.repeat,
        };
        labels.layers = bound.layers.list.iter().map(layer).collect();
        let module = |n: &ckpt_passes::ir::NodeId| {
            let scopes = graph.node(*n).loc.scopes.iter().rev();
            scopes
                .map(|(path, _)| path)
                .find(|p| !p.is_empty())
                .cloned()
        };
        labels.modules = bound.nodes.iter().map(module).collect();
        labels
    }

    /// Returns the labels of a cost graph, which names ops and numbers layers.
    pub fn unknown(problem: &Problem) -> Labels {
        let mut roles: ByValue<Role> = problem
            .values
            .iter()
            .map(|v| match v.kind {
                ValueKind::Static => Role::Parameter,
                ValueKind::Placeholder => Role::Input,
                ValueKind::Activation => Role::Inner,
            })
            .collect();
        let roots = problem.roots();
        for output in &problem.outputs {
            if roles[roots[*output]] == Role::Inner {
                roles[roots[*output]] = Role::Output;
            }
        }
        let layer = Layer {
            kind: "layer".into(),
            ..Layer::default()
        };
        Labels {
            names: problem
                .values
                .indices()
                .map(|v| tensor_name(problem, v))
                .collect(),
            types: problem.by_value(String::new()),
            roles,
            modules: problem.by_op(None),
            layers: vec![layer; OpAnnotations::of_cost_graph(problem).layers],
            ..Labels::default()
        }
    }
}
