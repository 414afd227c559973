//! The folder that ONNX Runtime's on-device training loads, from a training graph of ours.
//!
//! | file | what it is |
//! |---|---|
//! | `training_model.onnx` | the graph with its plan. Parameters are inputs, and each gradient is added to a buffer |
//! | `eval_model.onnx` | its forward pass up to the loss |
//! | `optimizer_model.onnx` | one AdamW update of all trained parameters |
//! | `checkpoint` | the parameters ([`checkpoint`]) |
//!
//! Names are those that `onnxruntime.training.artifacts` of ONNX Runtime 1.19 gives; that is the last release with training.

mod checkpoint;

use crate::emit::file::Batch;
use crate::emit::onnx::{Weights, package_up_to};
use crate::emit::save::encoded;
use crate::export::weights;
use crate::forward::{forward, loss};
use crate::frontend::file::io_error;
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::onnx::messages::{attribute, opset_import};
use crate::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use crate::onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto,
    ValueInfoProto, type_proto,
};
use crate::tensors::Tensors;
use ckpt_passes::analysis::gradients::{has_backward, trained, updated};
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::ir::op::{Body, Domain};
use ckpt_passes::ir::{Attr, DType, Def, Graph, Tensor, ValueId};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::joint;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The word of the option, and the name of the folder in that of a run.
pub const FOLDER: &str = "ort-training";

const TRAINING: &str = "training_model.onnx";
const EVAL: &str = "eval_model.onnx";
const OPTIMIZER: &str = "optimizer_model.onnx";
const CHECKPOINT: &str = "checkpoint";

/// The domain of ONNX Runtime's own ops.
const DOMAIN: &str = "com.microsoft";
/// Of the models, the newest opset and IR version that ONNX Runtime 1.19 reads.
const GREATEST_OPSET: i64 = 21;
const GREATEST_IR: i64 = 10;
const BUFFER: &str = "_grad.accumulation.buffer";
const ACCUMULATED: &str = "_grad.accumulation.out";
const RESET: &str = "lazy_reset_grad";

/// The models of the folder, and the graph that they were made of.
pub struct Artifacts {
    graph: Graph,
    trained: Vec<ValueId>,
    frozen: Vec<ValueId>,
    models: [(&'static str, Vec<u8>); 3],
}

impl Artifacts {
    /// Makes the models of a typed training graph whose gradients are outputs.
    ///
    /// # Errors
    /// A graph without backward or with updates in it; an optimizer that ONNX Runtime does not have; parameters that are not
    /// float32; an op that only our runtime has; an opset that ONNX Runtime 1.19 does not read.
    pub fn new(graph: Graph, optimizer: &Optimizer) -> Result<Artifacts> {
        if !has_backward(&graph) {
            return Err(no_training_graph());
        }
        if !updated(&graph).is_empty() {
            let what = "the training graph updates its parameters itself";
            return Err(Error::usage("ort-training", what)
                .expected("a training graph whose gradients are outputs")
                .help("write the graph again without --optimizer; the optimizer is a model of its own here"));
        }
        let gradients: BTreeMap<ValueId, ValueId> = trained(&graph)
            .into_iter()
            .filter(|(id, _)| matches!(graph.value(*id).def, Def::Init(_)))
            .collect();
        if gradients.is_empty() {
            let what = "no gradient of the graph belongs to a parameter in its file";
            return Err(Error::usage("ort-training", what)
                .expected("outputs `<parameter>.grad`")
                .help("write the graph with --loss, as `ckpt-opt MODEL -o train.onnx --loss causal-lm`"));
        }
        for id in gradients.keys().copied() {
            let (name, ty) = (&graph.value(id).name, graph.ty(id));
            if ty.dtype != DType::F32 {
                let what = format!("ONNX Runtime accumulates gradients in float32 only: `{name}`");
                return Err(Error::usage("ort-training", what)
                    .expected(DType::F32.to_string())
                    .found(ty.dtype.to_string())
                    .help("export the model in float32, or freeze the parameter with --freeze"));
            }
        }
        let is_frozen =
            |id: &ValueId| !gradients.contains_key(id) && graph.ty(*id).dtype == DType::F32;
        let frozen = parameters(&graph, &Selection::default())?.into_iter();
        let frozen: Vec<ValueId> = frozen.map(|p| p.value).filter(is_frozen).collect();
        let trained: Vec<ValueId> = gradients.keys().copied().collect();
        let given: BTreeSet<&str> = trained
            .iter()
            .chain(&frozen)
            .map(|id| graph.value(*id).name.as_str())
            .collect();
        let models = [
            (EVAL, encoded(&evaluation(&graph, &given)?)?),
            (OPTIMIZER, encoded(&update(optimizer)?)?),
            (TRAINING, encoded(&training(&graph, &gradients, &given)?)?),
        ];
        Ok(Artifacts {
            models,
            trained,
            frozen,
            graph,
        })
    }

    /// Gives parameters new values, by names of initializers or of the framework. Returns how many changed, and what the user
    /// should know.
    ///
    /// # Errors
    /// Tensors that do not fit the graph.
    pub fn set(&mut self, values: &Tensors) -> Result<(usize, Vec<String>)> {
        let matched = weights::matched(&self.graph, values)?;
        if matched.given.is_empty() && !values.is_empty() {
            return Err(weights::none_matched());
        }
        let changed = matched.changed.len();
        for (id, new) in matched.changed {
            self.graph.set_init(id, new.tensor());
        }
        Ok((changed, matched.warnings))
    }

    /// Writes the folder, and returns its files. All of them appear or none.
    ///
    /// # Errors
    /// A parameter whose file is absent; parameters of more than 2 GiB; a disk that refuses.
    pub fn write(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let named = |ids: &'_ [ValueId]| -> Vec<(&str, Tensor)> {
            let values = ids.iter().map(|id| self.graph.value(*id));
            let tensors = values.filter_map(|v| Some((v.name.as_str(), v.tensor()?.clone())));
            tensors.collect()
        };
        let state = checkpoint::encode(&named(&self.trained), &named(&self.frozen))?;
        std::fs::create_dir_all(folder).map_err(|e| io_error("create the folder", folder, &e))?;
        let mut batch = Batch::new();
        let mut files = Vec::new();
        let models = self.models.iter().map(|(name, bytes)| (*name, bytes));
        for (name, bytes) in [(CHECKPOINT, &state)].into_iter().chain(models) {
            let path = folder.join(name);
            batch.add(&path, |out| out.write_all(bytes))?;
            files.push(path);
        }
        batch.publish()?;
        Ok(files)
    }
}

/// Reads a written training graph.
///
/// # Errors
/// A file that cannot be read; see [`Artifacts::new`].
pub fn read(source: &Path, given: &Given, optimizer: &Optimizer) -> Result<Artifacts> {
    let mut graph = load(source, given)?.graph;
    infer(&mut graph).map_err(|e| e.at(source.display().to_string()))?;
    if has_backward(&graph) {
        joint(&mut graph)?;
    }
    Artifacts::new(graph, optimizer).map_err(|e| e.at(source.display().to_string()))
}

/// The error for a model without a backward pass.
pub(super) fn no_training_graph() -> Box<Error> {
    Error::usage("ort-training", "the model has no backward pass")
        .expected("a training graph")
        .help("make one first: ckpt-opt MODEL -o train.onnx --loss causal-lm --budget 60%")
}

/// Returns the model of one update.
///
/// # Errors
/// Another optimizer.
fn update(optimizer: &Optimizer) -> Result<ModelProto> {
    let Optimizer::AdamW {
        beta1,
        beta2,
        eps,
        weight_decay,
        eight_bits: false,
    } = *optimizer
    else {
        let what = "ONNX Runtime's training has no such optimizer";
        return Err(Error::usage("ort-training", what)
            .expected("adamw")
            .found(optimizer.to_string())
            .help("use --optimizer adamw"));
    };
    const SEQUENCES: [&str; 4] = [
        "params",
        "gradients",
        "first_order_moments",
        "second_order_moments",
    ];
    let scalar = |name: &str, dtype| info(name, tensor_type(dtype, Some(&[1])));
    let sequence = |name: &&str| {
        let elements = type_proto::Sequence {
            elem_type: Some(Box::new(tensor_type(DType::F32, None))),
        };
        let ty = TypeProto {
            denotation: None,
            value: Some(type_proto::Value::SequenceType(Box::new(elements))),
        };
        info(name, ty)
    };
    let (rate, step) = ("learning_rate", "step");
    let inputs = [scalar(rate, DType::F32), scalar(step, DType::I64)];
    let settings = [
        ("alpha", Attr::Float(beta1)),
        ("beta", Attr::Float(beta2)),
        ("epsilon", Attr::Float(eps)),
        ("weight_decay", Attr::Float(weight_decay)),
        // The form of PyTorch: the weight decays first, and epsilon is added to the corrected root.
        ("adam_mode", Attr::Int(0)),
        ("correct_bias", Attr::Int(1)),
    ];
    let settings = settings.iter().map(|(name, value)| attribute(name, value));
    let node = NodeProto {
        attribute: settings.collect::<Result<_>>()?,
        ..node(
            "AdamWOptimizer",
            "adamw",
            [rate, step].into_iter().chain(SEQUENCES),
            "updated",
        )
    };
    Ok(ModelProto {
        ir_version: Some(GREATEST_IR),
        producer_name: Some("ckpt-opt".into()),
        opset_import: vec![opset_import("", GREATEST_OPSET), opset_import(DOMAIN, 1)],
        graph: Some(GraphProto {
            name: Some("optimizer".into()),
            node: vec![node],
            input: inputs
                .into_iter()
                .chain(SEQUENCES.iter().map(sequence))
                .collect(),
            output: vec![scalar("updated", DType::Bool)],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    })
}

/// Returns the training graph as a model that adds gradients to buffers.
fn training(
    graph: &Graph,
    gradients: &BTreeMap<ValueId, ValueId>,
    given: &BTreeSet<&str>,
) -> Result<ModelProto> {
    let mut model = with_inputs(graph, given)?;
    let file = model.graph.get_or_insert_default();
    let loss = &graph.value(loss(graph)?).name;
    let of: BTreeMap<&str, ValueId> = gradients
        .iter()
        .map(|(parameter, gradient)| (graph.value(*gradient).name.as_str(), *parameter))
        .collect();
    // Each gradient is added as soon as it is there, and freed.
    let mut nodes = Vec::new();
    for made in std::mem::take(&mut file.node) {
        let adds: Vec<NodeProto> = made
            .output
            .iter()
            .filter_map(|output| Some((output, &graph.value(*of.get(output.as_str())?).name)))
            .map(|(gradient, name)| {
                let ins = [format!("{name}{BUFFER}"), gradient.clone(), RESET.into()];
                let ins = ins.iter().map(String::as_str);
                let out = format!("{name}{ACCUMULATED}");
                node("InPlaceAccumulatorV2", &out, ins, &out)
            })
            .collect();
        nodes.push(made);
        nodes.extend(adds);
    }
    file.node = nodes;
    let outputs = std::mem::take(&mut file.output);
    let (grads, mut others): (Vec<_>, Vec<_>) =
        outputs.into_iter().partition(|o| of.contains_key(o.name()));
    // ONNX Runtime takes the first output for the loss.
    others.sort_by_key(|output| output.name() != loss);
    file.output = others;
    for gradient in grads {
        let name = &graph.value(of[gradient.name()]).name;
        file.input.push(ValueInfoProto {
            name: Some(format!("{name}{BUFFER}")),
            metadata_props: Vec::new(),
            ..gradient.clone()
        });
        let out = format!("{name}{ACCUMULATED}");
        file.output
            .push(info(&out, tensor_type(DType::Bool, Some(&[1]))));
        file.value_info.push(gradient);
    }
    file.input
        .push(info(RESET, tensor_type(DType::Bool, Some(&[1]))));
    model.opset_import.push(opset_import(DOMAIN, 1));
    Ok(model)
}

fn evaluation(graph: &Graph, given: &BTreeSet<&str>) -> Result<ModelProto> {
    with_inputs(&forward(graph)?, given)
}

/// Returns a graph as a model that takes parameters as inputs, after the graph's own.
fn with_inputs(graph: &Graph, given: &BTreeSet<&str>) -> Result<ModelProto> {
    for (id, node) in graph.nodes() {
        if node.op.domain == Domain::Ckpt
            && let Body::None(why) = node.op.body
        {
            let what = format!("ONNX Runtime cannot run {}: {why}", node.op.name);
            return Err(Error::usage("ort-training", what)
                .at(graph.describe(id))
                .help("plan the graph for one process, without --mesh"));
        }
    }
    let mut package = package_up_to(graph, &Weights::Inside, GREATEST_OPSET)?;
    package.declare(graph, |id| given.contains(graph.value(id).name.as_str()));
    let mut model = package.model;
    let opset = model.opset_import.iter().find(|o| o.domain().is_empty());
    let opset = opset.map_or(0, OperatorSetIdProto::version);
    if opset > GREATEST_OPSET {
        let what = "the graph has ops that the last ONNX Runtime with training does not know";
        return Err(Error::model("opset", what)
            .expected(format!("opset {GREATEST_OPSET} or older"))
            .found(format!("opset {opset}"))
            .help("export the model at opset 18 to 21"));
    }
    model.ir_version = model.ir_version.map(|ir| ir.min(GREATEST_IR));
    if let Some(file) = &mut model.graph {
        file.initializer.retain(|init| !given.contains(init.name()));
    }
    Ok(model)
}

fn node<'a>(
    op: &str,
    name: &str,
    inputs: impl Iterator<Item = &'a str>,
    output: &str,
) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        domain: Some(DOMAIN.into()),
        name: Some(name.into()),
        input: inputs.map(str::to_string).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

fn info(name: &str, ty: TypeProto) -> ValueInfoProto {
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(ty),
        ..ValueInfoProto::default()
    }
}

fn tensor_type(dtype: DType, dims: Option<&[i64]>) -> TypeProto {
    let dim = |n: &i64| Dimension {
        denotation: None,
        value: Some(dimension::Value::DimValue(*n)),
    };
    let shape = dims.map(|dims| TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    });
    TypeProto {
        denotation: None,
        value: Some(type_proto::Value::TensorType(type_proto::Tensor {
            elem_type: Some(dtype.onnx_code()),
            shape,
        })),
    }
}
