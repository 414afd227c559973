//! Written files read back equal: the fixtures, and small models with weights inside, in a sidecar, linked and absent.

use ckpt_opt::emit::save::{INSIDE_LIMIT_BYTES, Saving, WeightOptions, save};
use ckpt_opt::frontend;
use ckpt_passes::ir::{Attrs, DType, Data, External, Graph, Tensor, Ty};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::text;
use std::path::{Path, PathBuf};

fn fixtures() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let mut found: Vec<PathBuf> = std::fs::read_dir(root)
        .unwrap()
        .map(|e| e.unwrap().path().join("model.onnx"))
        .filter(|p| p.exists())
        .collect();
    found.sort();
    assert!(found.len() >= 5, "{found:?}");
    found
}

fn typed(path: &Path) -> Graph {
    let mut graph = frontend::read(path).unwrap_or_else(|e| panic!("{e}")).graph;
    ckpt_passes::transform::infer::infer(&mut graph).unwrap_or_else(|e| panic!("{e}"));
    ckpt_passes::ir::verify::verify(&graph).unwrap_or_else(|e| panic!("{e}"));
    graph
}

fn plain(input: Option<&Path>) -> Saving<'_> {
    Saving {
        input,
        weights: Default::default(),
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    }
}

/// The graph without what the writer adds: who made the file, and what each node is.
fn bare(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    graph.meta.remove("producer");
    graph.meta.remove("ir_version");
    for node in graph.order().to_vec() {
        graph.meta_mut(node).remove("ckpt.role");
    }
    graph
}

/// Equal in text, and in weights byte for byte.
fn assert_equal(a: &Graph, b: &Graph, what: &str) {
    let (left, right) = (text::print(&bare(a)), text::print(&bare(b)));
    // The first line that differs says more than two long texts.
    for (left, right) in left.lines().zip(right.lines()) {
        assert_eq!(left, right, "{what}");
    }
    assert_eq!(left.lines().count(), right.lines().count(), "{what}");
    let weights = |g: &Graph| -> Vec<(String, Option<Vec<u8>>)> {
        g.inits()
            .map(|(_, v)| {
                (
                    v.name.clone(),
                    v.tensor().unwrap().bytes().map(|b| b.to_vec()),
                )
            })
            .collect()
    };
    assert_eq!(weights(a), weights(b), "{what}");
    let named = |g: &Graph| -> Vec<(String, ckpt_passes::ir::Origin)> {
        g.origins
            .iter()
            .map(|(id, o)| (g.value(*id).name.clone(), o.clone()))
            .collect()
    };
    assert_eq!(named(a), named(b), "{what}: names of parameters");
    let scopes = |g: &Graph| -> Vec<_> {
        g.order()
            .iter()
            .map(|n| g.node(*n).loc.scopes.clone())
            .collect()
    };
    assert_eq!(scopes(a), scopes(b), "{what}: scopes");
}

#[test]
fn fixtures_read_back_equal_and_twice_written_is_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    for fixture in fixtures() {
        let graph = typed(&fixture);
        let (first, second) = (dir.path().join("a.onnx"), dir.path().join("b.onnx"));
        save(&graph, &first, &plain(Some(&fixture))).unwrap_or_else(|e| panic!("{e}"));
        let back = typed(&first);
        assert_equal(&graph, &back, &fixture.display().to_string());
        save(&back, &second, &plain(Some(&first))).unwrap_or_else(|e| panic!("{e}"));
        let same = std::fs::read(&first).unwrap() == std::fs::read(&second).unwrap();
        assert!(
            same,
            "{}: the second writing differs from the first",
            fixture.display()
        );
    }
}

/// x[n, 512] + w[512], then + c (one element).
fn small() -> Graph {
    let mut g = Graph::new("small");
    let x = g.add_input(
        "x",
        Some(Ty::new(
            DType::F32,
            [ckpt_passes::ir::Dim::symbol("n"), 512.into()],
        )),
    );
    let bytes: Vec<u8> = (0..512u32).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let w = g.add_init("w", Tensor::new(DType::F32, [512], bytes));
    let mut b = Builder::new(&mut g);
    let y = b.add(x, w).unwrap();
    let c = b.scalar(DType::F32, 2.5);
    let z = b
        .emit(
            ckpt_passes::ops::find("Mul").unwrap(),
            &[y, c],
            Attrs::new(),
        )
        .unwrap();
    g.set_outputs(vec![z]);
    ckpt_passes::transform::infer::infer(&mut g).unwrap();
    g
}

#[test]
fn a_sidecar_holds_large_weights_and_appears_with_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let how = Saving {
        inside_limit_bytes: 1000,
        ..plain(None)
    };
    let written = save(&small(), &path, &how).unwrap();
    assert_eq!(written, [dir.path().join("m.onnx.data"), path.clone()]);
    assert_eq!(std::fs::metadata(&written[0]).unwrap().len(), 2048);
    let back = typed(&path);
    assert_equal(&small(), &back, "sidecar");
    let w = back.value(back.find_value("w").unwrap()).tensor().unwrap();
    let Data::Here {
        origin: Some(origin),
        ..
    } = &w.data
    else {
        panic!("{w:?}")
    };
    assert_eq!(
        (origin.location.as_ref(), origin.offset, origin.length),
        ("m.onnx.data", 0, 2048)
    );

    // Linked: the second model refers to the first one's sidecar.
    let linked = dir.path().join("linked.onnx");
    let how = Saving {
        weights: WeightOptions {
            link: true,
            ..Default::default()
        },
        ..plain(Some(&path))
    };
    assert_eq!(
        save(&back, &linked, &how).unwrap(),
        std::slice::from_ref(&linked)
    );
    assert_equal(&back, &typed(&linked), "linked");
    assert!(std::fs::metadata(&linked).unwrap().len() < 2048);

    // Across folders they cannot be.
    let elsewhere = tempfile::tempdir().unwrap();
    let e = save(&back, &elsewhere.path().join("m.onnx"), &how).unwrap_err();
    assert_eq!((e.exit_code(), e.code()), (2, "output"));
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);

    // Neither the model nor the file its weights are mapped from is replaced.
    for name in ["m.onnx", "m.onnx.data"] {
        let e = save(&back, &dir.path().join(name), &plain(Some(&path))).unwrap_err();
        assert_eq!((e.exit_code(), e.code()), (2, "output"), "{name}");
    }
}

#[test]
fn absent_weights_stay_absent() {
    let dir = tempfile::tempdir().unwrap();
    let mut g = Graph::new("absent");
    let x = g.add_input("x", Some(Ty::new(DType::F32, [512.into()])));
    let place = External {
        location: "weights.bin".into(),
        offset: 4096,
        length: 2048,
    };
    let w = g.add_init(
        "w",
        Tensor {
            dtype: DType::F32,
            dims: vec![512],
            data: Data::Absent(place),
        },
    );
    let y = Builder::new(&mut g).add(x, w).unwrap();
    g.set_outputs(vec![y]);
    let path = dir.path().join("m.onnx");
    save(&g, &path, &plain(None)).unwrap();
    let back = typed(&path);
    assert_eq!(
        g.value(w).tensor(),
        back.value(back.find_value("w").unwrap()).tensor()
    );
}

/// A planned training graph comes back with its functions as rows, its copies proven, its schedule and its records.
#[test]
fn planned_fixtures_read_back_equal() {
    use ckpt_passes::compile::Request;
    use ckpt_passes::driver::Watch;
    use ckpt_passes::ir::Phase;
    use ckpt_passes::plan::Policy;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("planned.onnx");
    for fixture in fixtures() {
        let what = fixture.display().to_string();
        let mut graph = typed(&fixture);
        let request = Request {
            plan: Policy::FULL.into(),
            ..Request::default()
        };
        ckpt_opt::optimize::optimize(&mut graph, &request, &mut Watch::default())
            .unwrap_or_else(|e| panic!("{e}"));
        save(&graph, &path, &plain(Some(&fixture))).unwrap_or_else(|e| panic!("{e}"));
        let read = frontend::read(&path).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(read.warnings, [] as [&str; 0], "{what}");
        assert_eq!(read.graph.phase, Phase::Rewritten, "{what}");
        let copies = |g: &Graph| {
            let copies = g.order().iter().filter_map(|n| {
                let node = g.node(*n);
                let original = g.node(node.recompute_of?).name.clone();
                Some((node.name.clone(), original, node.segment))
            });
            copies.collect::<Vec<_>>()
        };
        assert!(!copies(&graph).is_empty(), "{what}: nothing is recomputed");
        assert_eq!(copies(&graph), copies(&read.graph), "{what}");
        assert_equal(&graph, &typed(&path), &what);
    }
}

#[test]
fn trained_weights_are_inputs_on_request_only() {
    let graph = text::parse(
        "graph @g training (%x: f32[2]) -> (%y, %w.grad) {
  init %w : f32[2] = [1.0, 2.0]
  init %frozen : f32[2] = [3.0, 4.0]
  %s = Add %x, %frozen : f32[2]
  %y = Mul %s, %w : f32[2]
backward:
  %w.grad = Neg %s : f32[2]
}
",
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    for (as_inputs, inputs) in [(false, vec!["x"]), (true, vec!["x", "w"])] {
        let weights = WeightOptions {
            as_inputs,
            ..Default::default()
        };
        let how = Saving {
            weights,
            ..plain(None)
        };
        save(&graph, &path, &how).unwrap_or_else(|e| panic!("{e}"));
        let file = frontend::onnx::file::open(&path).unwrap_or_else(|e| panic!("{e}"));
        let listed = file.graph.unwrap().input;
        let listed: Vec<&str> = listed.iter().map(|i| i.name()).collect();
        assert_eq!(listed, inputs);
        assert_equal(&graph, &typed(&path), "either form");
    }
}
