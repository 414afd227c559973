//! Trained weights written for other tools: names, layouts, ties and types; and that nothing but the weights changes.

use ckpt_opt::emit::save::{Saving, WeightOptions, save};
use ckpt_opt::export::{Export, Target, checkpoint};
use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::{self, onnx::file};
use ckpt_opt::tensors::{self, Tensors};
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::{Result, text};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

fn numbers(dtype: DType, dims: &[u64], first: f64) -> Tensor {
    let count = dims.iter().product::<u64>();
    Tensor::rounded(dtype, dims, (0..count).map(|i| first + i as f64))
}

fn export(model: &Path, trained: &Tensors) -> Result<Export> {
    Export::new(model, &Given::default(), trained, None)
}

/// What the framework loads.
fn state_dict(export: &Export, folder: &Path) -> Tensors {
    let out = folder.join("state.safetensors");
    export.write(Target::Safetensors, &out).unwrap();
    tensors::read(&out).unwrap()
}

fn written(export: &Export, folder: &Path) -> Graph {
    let out = folder.join("tuned.onnx");
    export.write(Target::Onnx, &out).unwrap();
    frontend::read(&out).unwrap().graph
}

fn contents(graph: &Graph) -> Tensors {
    let inits = graph.inits();
    let all = inits.filter_map(|(_, v)| Some((v.name.clone(), v.tensor()?.clone())));
    // Where a tensor lies is not what it holds.
    all.map(|(n, t)| {
        (
            n,
            Tensor::new(t.dtype, t.dims.clone(), t.bytes().unwrap().clone()),
        )
    })
    .collect()
}

/// A model in a file: a transposed weight under another name, a tied one, and one in bfloat16.
fn model(folder: &Path) -> PathBuf {
    let path = folder.join("model.ckir");
    let source = "graph @g typed (%x: f32[n, 2]) -> (%y, %z) {
  init %val_3 : f32[2, 3] = [1, 2, 3, 4, 5, 6] origin \"fc.weight\" transposed parameter
  init %head : f32[3, 2] = [1, 2, 3, 4, 5, 6] origin \"head.weight\", \"table.weight\" parameter
  init %half : bf16[2, 2] = [1, 2, 3, 4] origin \"half.weight\" parameter
  %h = MatMul %x, %val_3 : f32[n, 3]
  %y = MatMul %h, %head : f32[n, 2]
  %c = Cast %x {to=bf16} : bf16[n, 2]
  %z = MatMul %c, %half : bf16[n, 2]
}
";
    std::fs::write(&path, text::print_full(&text::parse(source).unwrap())).unwrap();
    path
}

#[test]
fn all_parameters_have_the_frameworks_names_and_layout() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let names = ["fc.weight", "half.weight", "head.weight", "table.weight"];
    let plain = state_dict(&export(&model, &Tensors::new()).unwrap(), folder.path());
    assert_eq!(plain.keys().collect::<Vec<_>>(), names);
    let values = |t: &Tensor| (0..6).filter_map(|i| t.get_f64(i)).collect::<Vec<_>>();
    assert_eq!(values(&plain["fc.weight"]), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    // Under names of initializers a tensor is in their layout, after a step too.
    let mut trained = Tensors::new();
    trained.insert("val_3.updated".into(), numbers(DType::F32, &[2, 3], 10.0));
    trained.insert(
        "val_3.exp_avg.updated".into(),
        numbers(DType::F32, &[2, 3], 0.0),
    );
    trained.insert("loss".into(), Tensor::scalar(DType::F32, 1.0));
    trained.insert("table.weight".into(), numbers(DType::F32, &[3, 2], 20.0));
    // 258 is a tie between two numbers of bfloat16.
    trained.insert("half.weight".into(), numbers(DType::F32, &[2, 2], 256.0));
    let tuned = export(&model, &trained).unwrap();
    assert!(tuned.warnings.is_empty(), "{:?}", tuned.warnings);
    assert_eq!(tuned.counts(), (3, 0));
    let all = state_dict(&tuned, folder.path());
    assert_eq!(all.keys().collect::<Vec<_>>(), names);
    assert_eq!(
        values(&all["fc.weight"]),
        [10.0, 13.0, 11.0, 14.0, 12.0, 15.0]
    );
    assert_eq!(all["head.weight"], trained["table.weight"]);
    assert_eq!(all["half.weight"].dtype, DType::BF16);
    assert_eq!(values(&all["half.weight"]), [256.0, 256.0, 258.0, 260.0]);
    // A file of them is read back into the same model.
    let file = folder.path().join("all.safetensors");
    tuned.write(Target::Safetensors, &file).unwrap();
    let meta = tensors::safetensors::metadata(&std::fs::read(&file).unwrap());
    assert_eq!(meta["format"], "pt");
    let again = export(&model, &checkpoint::read(&file).unwrap().tensors).unwrap();
    assert_eq!(state_dict(&again, folder.path()), all);
    let (a, b) = (
        written(&tuned, folder.path()),
        written(&again, folder.path()),
    );
    assert_eq!(contents(&a), contents(&b));
    assert_eq!(contents(&a)["val_3"], numbers(DType::F32, &[2, 3], 10.0));
}

#[test]
fn weights_that_do_not_belong_to_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = model(folder.path());
    let refused = |tensors: &[(&str, Tensor)]| {
        let trained: Tensors = tensors
            .iter()
            .map(|(n, t)| (n.to_string(), t.clone()))
            .collect();
        let error = export(&model, &trained).err().unwrap();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    };
    let f32s = |dims: &[u64]| numbers(DType::F32, dims, 0.0);
    let shape = refused(&[("fc.weight", f32s(&[2, 3]))]);
    assert!(
        shape.contains("expected: [3, 2]") && shape.contains("found: [2, 3]"),
        "{shape}"
    );
    let dtype = refused(&[("head", Tensor::new(DType::I64, [3, 2], vec![0; 48]))]);
    assert!(dtype.contains("another element type"), "{dtype}");
    let tied = [
        ("head.weight", f32s(&[3, 2])),
        ("table.weight", numbers(DType::F32, &[3, 2], 1.0)),
    ];
    assert!(refused(&tied).contains("are one weight and hold different values"));
    assert!(refused(&[("fc.weigth", f32s(&[3, 2]))]).contains("no tensor has the name"));
    let scale = refused(&[
        ("fc.lora_A.weight", f32s(&[1, 2])),
        ("fc.lora_B.weight", f32s(&[3, 1])),
    ]);
    assert!(scale.contains("nothing tells their scale"), "{scale}");
    let mut some = Tensors::new();
    some.insert("fc.weight".into(), f32s(&[3, 2]));
    some.insert("fc.weigth".into(), f32s(&[3, 2]));
    let warnings = export(&model, &some).unwrap().warnings;
    assert!(
        warnings[0].contains("did you mean `fc.weight`?"),
        "{warnings:?}"
    );
}

#[test]
fn an_onnx_model_keeps_everything_but_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("gpt2/model.onnx");
    let name = "transformer.h.0.mlp.c_fc.weight";
    let mut trained = Tensors::new();
    trained.insert(name.into(), numbers(DType::F32, &[24, 40], 0.0));
    let out = folder.path().join("tuned.onnx");
    let tuned = export(&source, &trained).unwrap();
    tuned.write(Target::Onnx, &out).unwrap();
    let (mut before, mut after) = (file::open(&source).unwrap(), file::open(&out).unwrap());
    let [old, new] = [&mut before, &mut after].map(|m| &mut m.graph.as_mut().unwrap().initializer);
    assert_eq!(old.len(), new.len());
    let differ = old
        .iter()
        .zip(new.iter())
        .filter(|(a, b)| a.raw_data != b.raw_data);
    let differ: Vec<&str> = differ.map(|(a, _)| a.name()).collect();
    assert_eq!(differ, [name]);
    for tensor in old.iter_mut().chain(new.iter_mut()) {
        tensor.raw_data = None;
    }
    assert!(before == after);
    let failed = export(&source, &trained)
        .unwrap()
        .write(Target::Onnx, &source)
        .unwrap_err();
    assert_eq!((failed.code(), failed.exit_code()), ("output", 2));
    let missing = folder.path().join("none/tuned.onnx");
    assert_eq!(
        tuned.write(Target::Onnx, &missing).unwrap_err().exit_code(),
        5
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn external_weights_come_along() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("gpt2/model.onnx");
    let mut graph = frontend::read(&source).unwrap().graph;
    infer(&mut graph).unwrap();
    let model = folder.path().join("model.onnx");
    let how = Saving {
        input: Some(&source),
        weights: WeightOptions::default(),
        inside_limit_bytes: 0,
    };
    assert_eq!(save(&graph, &model, &how).unwrap().len(), 2);
    let mut trained = Tensors::new();
    let name = "transformer.h.0.attn.c_attn.bias";
    trained.insert(name.into(), numbers(DType::F32, &[72], 0.0));
    let elsewhere = tempfile::tempdir().unwrap();
    let tuned = written(&export(&model, &trained).unwrap(), elsewhere.path());
    let mut expected = contents(&graph);
    expected.insert(name.into(), trained[name].clone());
    assert_eq!(contents(&tuned), expected);
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 1);
}

#[test]
fn a_copy_of_a_tied_weight_follows_it() {
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("folded/tied.onnx");
    let plain = contents(&frontend::read(&source).unwrap().graph);
    let table = &plain["table.weight"];
    let copy = plain.iter().find(|(n, t)| {
        *n != "table.weight" && t.dims.len() == 2 && t.dims.iter().rev().eq(&table.dims)
    });
    let (copy, _) = copy.expect("the exporter wrote the transpose of the table");
    let new = numbers(DType::F32, &table.dims, 0.0);
    let mut trained = Tensors::new();
    trained.insert("table.weight".into(), new.clone());
    let together = export(&source, &trained).unwrap();
    assert_eq!(together.counts().0, 1);
    let tuned = contents(&written(&together, folder.path()));
    let (rows, columns) = (table.dims[0] as usize, table.dims[1] as usize);
    for i in 0..rows * columns {
        let at = i % columns * rows + i / columns;
        assert_eq!(tuned[copy].get_f64(at), new.get_f64(i));
    }
    // A value of its own wins.
    trained.insert(copy.clone(), plain[copy].clone());
    let apart = export(&source, &trained).unwrap();
    assert_eq!(contents(&written(&apart, folder.path()))[copy], plain[copy]);
}

#[test]
fn parameters_that_the_exporter_merged_get_a_value_each() {
    // The file lacks parameters of its own model, so the graph as it was read is written.
    let folder = tempfile::tempdir().unwrap();
    let source = fixture("folded/fresh.onnx");
    let graph = frontend::read(&source).unwrap().graph;
    let all = state_dict(&export(&source, &Tensors::new()).unwrap(), folder.path());
    let (name, tensor) = all
        .iter()
        .find(|(n, t)| n.contains("norm") && t.dims.len() == 1)
        .unwrap();
    let mut trained = Tensors::new();
    trained.insert(name.clone(), numbers(DType::F32, &tensor.dims, 5.0));
    let tuned = export(&source, &trained).unwrap();
    assert_eq!(tuned.counts().0, 1);
    let out = written(&tuned, folder.path());
    let changed = contents(&out)
        .into_iter()
        .filter(|(n, t)| contents(&graph).get(n) != Some(t));
    assert_eq!(changed.count(), 1);
}
