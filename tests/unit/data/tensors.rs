//! Tensors by the names of inputs.

use super::*;
use ckpt_opt::passes::ir::{DType, Tensor};
use ckpt_opt::tensors::{self, Tensors};
use std::io::Write;

const SOURCE: &str = "graph @g typed (%x: f32[batch, 3], %labels: i64[batch]) -> (%loss) {
  init %w : f32[3, 5] = splat 0.5
  %s = MatMul %x, %w : f32[batch, 5]
  %loss = SoftmaxCrossEntropyLoss %s, %labels {ignore_index = -100} : f32[]
}
";

fn classifier() -> Graph {
    let mut graph = parse(SOURCE).unwrap();
    graph
        .meta
        .insert("ckpt.loss".into(), "cross-entropy".into());
    graph
}

fn rows(examples: u64, first: f32) -> Tensor {
    let values = (0..3 * examples).map(|i| first + i as f32);
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    Tensor::new(DType::F32, [examples, 3], bytes)
}

fn examples(labels: &[i64], first: f32) -> Tensors {
    let x = rows(labels.len() as u64, first);
    [
        ("x".to_string(), x),
        ("labels".to_string(), Tensor::ints(labels)),
    ]
    .into()
}

fn write(folder: &Path, name: &str, tensors: &Tensors) -> PathBuf {
    let path = folder.join(name);
    tensors::write(&path, tensors).unwrap();
    path
}

#[test]
fn rows_are_examples_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let mut given = examples(&[4, 0, -100, 2, 1], 0.0);
    let plain = write(dir.path(), "a.npz", &given);
    let safe = write(dir.path(), "a.safetensors", &given);
    let deflated = dir.path().join("b.npz");
    let mut archive = zip::ZipWriter::new(std::fs::File::create(&deflated).unwrap());
    for (name, tensor) in &given {
        let method = zip::CompressionMethod::Deflated;
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        archive.start_file(format!("{name}.npy"), options).unwrap();
        archive
            .write_all(&tensors::npy::header(name, tensor).unwrap())
            .unwrap();
        archive.write_all(tensor.bytes().unwrap()).unwrap();
    }
    archive.finish().unwrap();
    let prefixed = given.remove("x").unwrap();
    given.insert("in.x".into(), prefixed);
    given.insert("other".into(), Tensor::ints(&[1]));
    let named = write(dir.path(), "c.npz", &given);
    for path in [plain, safe, deflated, named] {
        let all = read(&request(&path, 2, 1), &classifier()).unwrap();
        assert_eq!(all.len(), 3, "{path:?}");
        assert_eq!(all[0].inputs["x"].dims, [2, 3]);
        assert_eq!(floats(&all[1], "x"), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
        assert_eq!((ints(&all[1], "labels"), all[1].tokens), (vec![-100, 2], 1));
        assert_eq!((ints(&all[2], "labels"), all[2].tokens), (vec![1], 1));
    }
    let batches = open(&request(&dir.path().join("c.npz"), 2, 1), &classifier()).unwrap();
    assert!(
        batches.notes()[0].contains("other"),
        "{:?}",
        batches.notes()
    );
}

#[test]
fn shards_follow_each_other() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "1.npz", &examples(&[1, 2, 3], 0.0));
    write(dir.path(), "2.safetensors", &examples(&[4, 0], 100.0));
    let all = read(&request(dir.path(), 4, 1), &classifier()).unwrap();
    assert_eq!(ints(&all[0], "labels"), [1, 2, 3, 4]);
    assert_eq!(floats(&all[0], "x")[9..], [100.0, 101.0, 102.0]);
    assert_eq!(floats(&all[1], "x"), [103.0, 104.0, 105.0]);
}

#[test]
fn labels_of_a_causal_loss_count_from_the_second() {
    let dir = tempfile::tempdir().unwrap();
    let labels = Tensor {
        dims: vec![2, 3],
        ..Tensor::ints(&[7, 8, -100, 9, -100, -100])
    };
    let ids = Tensor {
        dims: vec![2, 3],
        ..Tensor::ints(&[7, 8, 1, 9, 1, 1])
    };
    let given = [
        ("labels".to_string(), labels),
        ("input_ids".to_string(), ids),
    ]
    .into();
    let path = write(dir.path(), "a.npz", &given);
    assert_eq!(
        read(&request(&path, 2, 3), &graph(LABELS)).unwrap()[0].tokens,
        1
    );
    let e = read(&request(&path, 1, 3), &graph(LABELS)).unwrap_err();
    assert!(e.to_string().contains("no label"), "{e}");
    let without = read(&request(&path, 2, 3), &graph("")).unwrap();
    assert_eq!(
        without[0].tokens, 2,
        "examples count where there are no labels"
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let good = examples(&[1, 2, 3], 0.0);
    let fails = |change: &dyn Fn(&mut Tensors), words: &[&str]| {
        let mut given = good.clone();
        change(&mut given);
        let path = write(dir.path(), "a.npz", &given);
        let e = read(&request(&path, 2, 1), &classifier()).unwrap_err();
        assert_eq!(e.exit_code(), 2);
        for word in ["a.npz"].iter().chain(words) {
            assert!(e.to_string().contains(word), "{word} in {e}");
        }
    };
    let put = |name: &'static str, tensor: Tensor| {
        move |t: &mut Tensors| drop(t.insert(name.into(), tensor.clone()))
    };
    fails(
        &|t| drop(t.remove("x")),
        &["`x`", "f32[batch, 3]", "labels"],
    );
    fails(&put("x", Tensor::ints(&[1, 2, 3])), &["`x`", "i64[3]"]);
    fails(
        &put("x", Tensor::new(DType::F64, [3, 3], vec![0; 72])),
        &["f64[3, 3]"],
    );
    fails(
        &put("x", Tensor::new(DType::F32, [3, 2], vec![0; 24])),
        &["f32[3, 2]"],
    );
    fails(&put("x", rows(2, 0.0)), &["different numbers of examples"]);
    fails(
        &put("labels", Tensor::ints(&[1, 5, 0])),
        &["row 1", "has 5", "0 to 4, or -100"],
    );
    fails(
        &put("labels", Tensor::ints(&[1, 0, -1])),
        &["row 2", "has -1"],
    );
    fails(
        &put("labels", Tensor::ints(&[])),
        &["`x`"].map(|_| "different"),
    );
    let none = |t: &mut Tensors| *t = examples(&[], 0.0);
    fails(&none, &["no examples"]);
}

#[test]
fn files_of_one_request_are_of_one_kind() {
    let dir = tempfile::tempdir().unwrap();
    let ids = Tensor {
        dims: vec![1, 3],
        ..Tensor::ints(&[7, 8, 1])
    };
    write(
        dir.path(),
        "a.npz",
        &[("input_ids".to_string(), ids)].into(),
    );
    bin(dir.path(), "b.bin", 0..6);
    let e = read(&request(dir.path(), 1, 3), &graph("")).unwrap_err();
    assert!(e.to_string().contains("one kind"), "{e}");
    let wide = Tensor {
        dims: vec![1, 4],
        ..Tensor::ints(&[7, 8, 1, 1])
    };
    std::fs::remove_file(dir.path().join("b.bin")).unwrap();
    write(
        dir.path(),
        "c.npz",
        &[("input_ids".to_string(), wide)].into(),
    );
    let e = read(&request(dir.path(), 1, 3), &graph("")).unwrap_err();
    assert!(e.to_string().contains("rows as in the first file"), "{e}");
}
