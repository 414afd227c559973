//! The folder for ONNX Runtime's on-device training: what its files hold. A test of the command line runs them.

use ckpt_opt::export::ort_training::{self, Artifacts};
use ckpt_opt::frontend::given::Given;
use ckpt_opt::onnx::proto::{ModelProto, type_proto};
use ckpt_opt::tensors::Tensors;
use ckpt_opt::{load, optimize};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::lora::Lora;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use prost::Message;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

fn request() -> Request {
    Request {
        loss: Loss::CausalLm,
        plan: Policy::FULL.into(),
        drop_outputs: vec!["*".into()],
        ..Request::default()
    }
}

fn training(model: &str, request: &Request) -> Graph {
    let mut graph = load(&fixture(model), &Given::default()).unwrap().graph;
    optimize(&mut graph, request, &mut Watch::default()).unwrap();
    graph
}

fn model(folder: &Path, name: &str) -> ModelProto {
    let bytes = std::fs::read(folder.join(format!("{name}_model.onnx"))).unwrap();
    ModelProto::decode(bytes.as_slice()).unwrap()
}

fn names(list: &[ckpt_opt::onnx::proto::ValueInfoProto]) -> Vec<&str> {
    list.iter().map(|v| v.name()).collect()
}

/// A reader of flatbuffers that knows nothing but their layout.
struct Buffer(Vec<u8>);

impl Buffer {
    fn number(&self, at: usize, bytes: usize) -> i64 {
        let bytes = self.0[at..at + bytes].iter().rev();
        bytes.fold(0, |n, byte| n << 8 | i64::from(*byte))
    }

    fn follow(&self, at: usize) -> usize {
        at + self.number(at, 4) as usize
    }

    /// The place of a field of a table.
    fn field(&self, table: usize, field: usize) -> Option<usize> {
        let offset = self.number(table, 4) as i32;
        let slots = (table as i64 - i64::from(offset)) as usize;
        let slot = 4 + 2 * field;
        let is_there = slot < self.number(slots, 2) as usize;
        let found = is_there.then(|| self.number(slots + slot, 2) as usize);
        found.filter(|n| *n > 0).map(|n| table + n)
    }

    /// The bytes of a vector of elements of that size.
    fn vector(&self, table: usize, field: usize, element_bytes: usize) -> &[u8] {
        let at = self.follow(self.field(table, field).unwrap());
        let count = self.number(at, 4) as usize;
        &self.0[at + 4..at + 4 + count * element_bytes]
    }

    /// The tables of a vector.
    fn tables(&self, table: usize, field: usize) -> Vec<usize> {
        let at = self.follow(self.field(table, field).unwrap());
        let places = (1..=self.number(at, 4) as usize).map(|i| at + 4 * i);
        places.map(|at| self.follow(at)).collect()
    }
}

/// The trained and frozen parameters of a checkpoint.
fn parameters(folder: &Path) -> [Tensors; 2] {
    let file = Buffer(std::fs::read(folder.join("checkpoint")).unwrap());
    assert_eq!(&file.0[4..8], b"ODTC");
    let root = file.follow(0);
    assert_eq!(file.number(file.field(root, 0).unwrap(), 4), 2, "version");
    let state = file.follow(file.field(root, 1).unwrap());
    let tensor = |table: usize| {
        let name = String::from_utf8(file.vector(table, 0, 1).to_vec()).unwrap();
        let dims = file.vector(table, 2, 8).chunks(8);
        let dims: Vec<u64> = dims
            .map(|d| u64::from_le_bytes(d.try_into().unwrap()))
            .collect();
        assert_eq!(file.number(file.field(table, 3).unwrap(), 4), 1, "float");
        let bytes = file.vector(table, 4, 1).to_vec();
        (name, Tensor::new(DType::F32, dims, bytes))
    };
    [0, 1].map(|field| file.tables(state, field).into_iter().map(tensor).collect())
}

#[test]
fn the_models_have_the_names_that_onnx_runtime_looks_for() {
    let graph = training("llama32/model.onnx", &request());
    let initial: Tensors = graph
        .inits()
        .filter_map(|(_, v)| Some((v.name.clone(), v.tensor()?.clone())))
        .collect();
    let optimizer = Optimizer::parse("adamw:beta2=0.95,weight_decay=0.5").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("new/artifacts");
    let mut artifacts = Artifacts::new(graph, &optimizer).unwrap();
    assert_eq!(artifacts.write(&folder).unwrap().len(), 4);

    let [trained, frozen] = parameters(&folder);
    assert!(trained.len() > 10 && frozen.is_empty());
    for (name, tensor) in &trained {
        assert_eq!(tensor.dims, initial[name].dims, "{name}");
        assert_eq!(tensor.bytes(), initial[name].bytes(), "{name}");
    }

    let training = model(&folder, "training");
    let graph = training.graph.unwrap();
    let (ins, outs) = (names(&graph.input), names(&graph.output));
    assert_eq!(outs[0], "loss");
    assert_eq!(outs.len(), 1 + trained.len());
    assert_eq!(ins[0], "input_ids");
    assert!(ins.contains(&"lazy_reset_grad"));
    let inits: Vec<&str> = graph.initializer.iter().map(|t| t.name()).collect();
    for name in trained.keys() {
        let buffer = format!("{name}_grad.accumulation.buffer");
        let out = format!("{name}_grad.accumulation.out");
        assert!(ins.contains(&name.as_str()) && ins.contains(&buffer.as_str()));
        assert!(outs.contains(&out.as_str()) && !inits.contains(&name.as_str()));
        let at = graph.node.iter().position(|n| n.output == [out.as_str()]);
        let add = &graph.node[at.unwrap()];
        let gradient = format!("{name}.grad");
        assert_eq!(add.input, [buffer.as_str(), &gradient, "lazy_reset_grad"]);
        assert_eq!(
            (add.domain(), add.op_type()),
            ("com.microsoft", "InPlaceAccumulatorV2")
        );
        // It is added before the next node runs, but for other gradients of its node.
        let maker = graph.node.iter().position(|n| n.output.contains(&gradient));
        let between = &graph.node[maker.unwrap() + 1..at.unwrap()];
        assert!(
            between
                .iter()
                .all(|n| n.op_type() == "InPlaceAccumulatorV2")
        );
    }
    // The plan is in it.
    assert!(graph.node.iter().any(|n| n.name().ends_with("/recompute")));
    assert_eq!(training.ir_version, Some(10));
    let opsets: BTreeMap<&str, i64> = training
        .opset_import
        .iter()
        .map(|o| (o.domain(), o.version()))
        .collect();
    assert!(
        opsets[""] <= 21 && opsets["com.microsoft"] == 1,
        "{opsets:?}"
    );

    let eval = model(&folder, "eval").graph.unwrap();
    assert_eq!(names(&eval.output), ["loss"]);
    assert!(
        eval.node
            .iter()
            .all(|n| !n.name().ends_with("/recompute") && !n.name().contains("/grad"))
    );
    for name in trained.keys() {
        assert!(names(&eval.input).contains(&name.as_str()), "{name}");
    }

    let update = model(&folder, "optimizer").graph.unwrap();
    let sequences = [
        "params",
        "gradients",
        "first_order_moments",
        "second_order_moments",
    ];
    assert_eq!(names(&update.input)[..2], ["learning_rate", "step"]);
    assert_eq!(names(&update.input)[2..], sequences);
    assert!(update.input[2..].iter().all(|input| matches!(
        input.r#type.as_ref().unwrap().value,
        Some(type_proto::Value::SequenceType(_))
    )));
    let settings: BTreeMap<&str, (Option<f32>, Option<i64>)> = update.node[0]
        .attribute
        .iter()
        .map(|a| (a.name(), (a.f, a.i)))
        .collect();
    assert_eq!(settings["alpha"].0, Some(0.9));
    assert_eq!(settings["beta"].0, Some(0.95));
    assert_eq!(settings["weight_decay"].0, Some(0.5));
    assert_eq!(settings["adam_mode"].1, Some(0));

    // Other weights: the models stay, the checkpoint holds them.
    let (name, old) = trained.first_key_value().unwrap();
    let twos = Tensor::rounded(DType::F32, &old.dims, (0..old.elements()).map(|_| 2.0));
    let new = Tensors::from([(name.clone(), twos.clone())]);
    assert_eq!(artifacts.set(&new).unwrap().0, 1);
    artifacts.write(&folder).unwrap();
    assert_eq!(parameters(&folder)[0][name].bytes(), twos.bytes());
    let unknown = Tensors::from([("no.such".to_string(), twos)]);
    assert_eq!(artifacts.set(&unknown).unwrap_err().code(), "weights");
}

#[test]
fn frozen_weights_are_in_the_checkpoint_once() {
    let request = Request {
        lora: Some(Lora::parse("r=2,targets=*q_proj*").unwrap()),
        ..request()
    };
    let dir = tempfile::tempdir().unwrap();
    let graph = training("llama32/model.onnx", &request);
    let artifacts = Artifacts::new(graph, &Optimizer::ADAMW).unwrap();
    artifacts.write(dir.path()).unwrap();
    let [trained, frozen] = parameters(dir.path());
    assert!(trained.keys().all(|name| name.contains("lora_")));
    assert!(frozen.len() > 10, "{}", frozen.len());
    for file in ["training", "eval"] {
        let graph = model(dir.path(), file).graph.unwrap();
        let ins = names(&graph.input);
        assert!(frozen.keys().all(|name| ins.contains(&name.as_str())));
        let buffers = ins.iter().filter(|name| name.ends_with(".buffer"));
        let wanted = if file == "training" { trained.len() } else { 0 };
        assert_eq!(buffers.count(), wanted);
    }
}

#[test]
fn what_onnx_runtime_cannot_train_is_refused() {
    let refused = |model: &str, request: &Request, optimizer: &str, says: &[&str]| {
        let optimizer = Optimizer::parse(optimizer).unwrap();
        let failed = Artifacts::new(training(model, request), &optimizer);
        let error = failed.err().unwrap();
        assert_eq!((error.code(), error.exit_code()), ("ort-training", 2));
        for part in says {
            assert!(error.to_string().contains(part), "{error}");
        }
    };
    let llama = "llama32/model.onnx";
    refused(llama, &request(), "sgd", &["expected: adamw", "found: sgd"]);
    let updates = UpdateOptions {
        optimizer: Some(Optimizer::ADAMW),
        fuse: true,
        ..UpdateOptions::default()
    };
    let fused = Request {
        updates,
        ..request()
    };
    refused(llama, &fused, "adamw", &["without --optimizer"]);
    let narrow = "llama32_bf16/model.onnx";
    refused(narrow, &request(), "adamw", &["found: bf16", "--freeze"]);
    let vjp = Request {
        loss: Loss::Vjp,
        ..request()
    };
    let failed = Artifacts::new(training(llama, &vjp), &Optimizer::ADAMW);
    assert_eq!(failed.err().unwrap().code(), "loss");
    let forward = ort_training::read(&fixture(llama), &Given::default(), &Optimizer::ADAMW);
    let error = forward.err().unwrap();
    assert!(error.to_string().contains("make one first"), "{error}");
}
