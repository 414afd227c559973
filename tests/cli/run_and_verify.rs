//! `run` and `verify` from outside: what they report, what they write, what they prove and what they catch.

use crate::support::command;

use ckpt_opt::frontend::onnx::proto::ModelProto;
use ckpt_opt::tensors::{self, Tensors};
use ckpt_passes::ir::{DType, Tensor};
use command::{call, code, files, fixture, has_keys, json, stderr, workplace};
use prost::Message;
use sha2::{Digest, Sha256};
use std::path::Path;

const MODELS: [&str; 6] = [
    "bert",
    "gpt2",
    "gpt2_loss",
    "llama32",
    "llama32_bf16",
    "llama32_mask",
];

/// Changes one weight of a file that was written.
fn damage(path: &Path, name: &str) {
    let mut model = ModelProto::decode(std::fs::read(path).unwrap().as_slice()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    let weight = graph
        .initializer
        .iter_mut()
        .find(|t| t.name() == name)
        .unwrap();
    let mut bytes = weight.raw_data.as_ref().unwrap().to_vec();
    bytes[1] ^= 1;
    weight.raw_data = Some(bytes.into());
    std::fs::write(path, model.encode_to_vec()).unwrap();
}

#[test]
fn run_reports_and_writes_what_the_contract_lists() {
    let dir = workplace();
    let made = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--policy",
        "full",
    ];
    assert_eq!(code(&call(dir.path(), &made)), 0);
    let run = [
        "run",
        "t.onnx",
        "--inputs",
        "case.npz",
        "--outputs",
        "o.npz",
        "--steps",
        "3",
        "--trace",
        "trace.json",
        "--format",
        "json",
    ];
    let report = json(&call(dir.path(), &run));
    let trace = std::fs::read_to_string(dir.path().join("trace.json")).unwrap();
    let trace: serde_json::Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let bars: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
    assert_eq!(2 * bars.len(), events.len());
    for part in ["forward", "loss", "backward", "recompute"] {
        assert!(bars.iter().any(|e| e["args"]["part"] == part), "{part}");
    }
    let live = bars
        .iter()
        .map(|e| e["args"]["live_bytes"].as_u64().unwrap());
    let peak = report["measured_peak_bytes"].as_u64().unwrap();
    assert!(live.max().unwrap() <= peak && peak > report["static_bytes"].as_u64().unwrap());
    // A CPU's allocator rounds nothing and holds nothing back.
    assert_eq!(report["predicted_requested_bytes"], peak);
    assert!(report["reserved_bytes"].is_null());
    has_keys(
        &report,
        &[
            "predicted_peak_bytes",
            "measured_peak_bytes",
            "static_bytes",
            "workspace_bytes",
            "arena_bytes",
            "resident_bytes",
            "attention",
            "peak_at",
            "step_time_us",
            "step_cpu_us",
            "steps",
        ],
    );
    let steps = report["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 3);
    for (each, median) in [("time_us", "step_time_us"), ("cpu_us", "step_cpu_us")] {
        let mut all: Vec<u64> = steps.iter().map(|s| s[each].as_u64().unwrap()).collect();
        all.sort_unstable();
        assert_eq!(report[median], all[1], "{each}");
    }
    let n = |key: &str| report[key].as_f64().unwrap();
    assert!(
        (n("measured_peak_bytes") / n("predicted_peak_bytes") - 1.0).abs() < 0.02,
        "{report}"
    );
    let outputs = tensors::read(&dir.path().join("o.npz")).unwrap();
    let case = tensors::read(&dir.path().join("case.npz")).unwrap();
    let (ours, theirs) = (
        outputs["loss"].get_f64(0).unwrap(),
        case["loss.causal_lm"].get_f64(0).unwrap(),
    );
    assert!(
        (ours - theirs).abs() < 1e-5 * theirs.abs(),
        "{ours} {theirs}"
    );
    assert!(outputs.keys().filter(|k| k.ends_with(".grad")).count() > 20);
    assert_eq!(outputs["logits"].dims, case["out.logits"].dims);
    // The same into the other format, bit for bit.
    let other = [
        "run",
        "t.onnx",
        "--inputs",
        "o2.safetensors",
        "--outputs",
        "p.safetensors",
    ];
    let keep = |k: &String| k == "in.input_ids" || k == "labels";
    let inputs: Tensors = case.into_iter().filter(|(k, _)| keep(k)).collect();
    tensors::write(&dir.path().join("o2.safetensors"), &inputs).unwrap();
    assert_eq!(code(&call(dir.path(), &other)), 0);
    assert_eq!(
        tensors::read(&dir.path().join("p.safetensors")).unwrap(),
        outputs
    );
}

#[test]
fn tensors_of_8_bit_floats_travel_as_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let source = "graph @g imported (%x: f32[2, 3], %old: f8e5m2[3]) -> (%q, %y) {
  %q = Cast %x {to=f8e4m3fn}
  %y = Cast %old {to=f32}
}
";
    std::fs::write(dir.path().join("m.ckir"), source).unwrap();
    let inputs = [
        (
            "x".to_string(),
            Tensor::rounded(
                DType::F32,
                &[2, 3],
                [1.0, -0.3, 1e6, 0.0, 17.0, -448.0].into_iter(),
            ),
        ),
        (
            "old".to_string(),
            Tensor::rounded(DType::F8E5M2, &[3], [0.5, 3.0, -57344.0].into_iter()),
        ),
    ];
    tensors::write(&dir.path().join("x.safetensors"), &inputs.into()).unwrap();
    let run = |to: &str| {
        let words = [
            "run",
            "m.ckir",
            "--inputs",
            "x.safetensors",
            "--outputs",
            to,
        ];
        call(dir.path(), &words)
    };
    let done = run("y.safetensors");
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    let found = tensors::read(&dir.path().join("y.safetensors")).unwrap();
    let (q, y) = (&found["q"], &found["y"]);
    assert_eq!((q.dtype, q.size_bytes()), (DType::F8E4M3FN, 6));
    let numbers = |t: &Tensor| -> Vec<f64> {
        let all = (0..t.elements() as usize).filter_map(|i| t.get_f64(i));
        all.collect()
    };
    assert_eq!(numbers(q), [1.0, -0.3125, 448.0, 0.0, 16.0, -448.0]);
    assert_eq!(numbers(y), [0.5, 3.0, -57344.0]);
    let refused = run("y.npz");
    assert_eq!(code(&refused), 2);
    assert!(
        stderr(&refused).contains("f8e4m3fn, which npz does not have"),
        "{}",
        stderr(&refused)
    );
    let shown = call(dir.path(), &["inspect", "m.ckir"]);
    assert_eq!(code(&shown), 0, "{}", stderr(&shown));
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.contains("f8e5m2[3]") && shown.contains("f8e4m3fn[2, 3]"),
        "{shown}"
    );
}

#[test]
fn run_says_what_it_lacks() {
    let dir = workplace();
    assert_eq!(code(&call(dir.path(), &["model.onnx", "-o", "t.onnx"])), 0);
    let none = call(dir.path(), &["run", "t.onnx"]);
    assert_eq!(code(&none), 2);
    for part in [
        "input_ids: i64[batch, seq]",
        "logits.cotangent: f32[batch, seq, 347]",
        "--seed",
    ] {
        assert!(stderr(&none).contains(part), "{}", stderr(&none));
    }
    let made = call(
        dir.path(),
        &[
            "run", "t.onnx", "--seed", "3", "--dim", "batch=2", "--dim", "seq=5",
        ],
    );
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let wrong = [(
        "input_ids".to_string(),
        Tensor::new(DType::F32, [2, 3], vec![0; 24]),
    )];
    tensors::write(&dir.path().join("wrong.npz"), &wrong.into()).unwrap();
    let refused = call(
        dir.path(),
        &["run", "t.onnx", "--inputs", "wrong.npz", "--seed", "1"],
    );
    assert_eq!(code(&refused), 2);
    assert!(
        stderr(&refused).contains("i64[batch, seq]"),
        "{}",
        stderr(&refused)
    );
    let far = [(
        "input_ids".to_string(),
        Tensor::new(DType::I64, [1, 2], vec![0x7f; 16]),
    )];
    tensors::write(&dir.path().join("far.npz"), &far.into()).unwrap();
    let refused = call(
        dir.path(),
        &[
            "run",
            "t.onnx",
            "--inputs",
            "far.npz",
            "--seed",
            "1",
            "--outputs",
            "o.npz",
        ],
    );
    assert_eq!(code(&refused), 2);
    assert!(
        stderr(&refused).contains("error[data]"),
        "{}",
        stderr(&refused)
    );
    assert!(!files(dir.path()).contains(&"o.npz".to_string()));
}

#[test]
fn weights_can_be_replaced_by_name() {
    let dir = workplace();
    let case = tensors::read(&fixture("gpt2", "case.npz")).unwrap();
    let mut inputs: Tensors = [("input_ids".to_string(), case["in.input_ids"].clone())].into();
    inputs.insert(
        "transformer.wpe.weight".into(),
        Tensor::new(DType::F32, [128, 24], vec![0; 128 * 24 * 4]),
    );
    tensors::write(&dir.path().join("zero.npz"), &inputs).unwrap();
    let run = |file: &str, out: &str| {
        let done = call(
            dir.path(),
            &["run", "model.onnx", "--inputs", file, "--outputs", out],
        );
        assert_eq!(code(&done), 0, "{}", stderr(&done));
        tensors::read(&dir.path().join(out)).unwrap()
    };
    assert_ne!(run("zero.npz", "a.npz"), run("case.npz", "b.npz"));
}

#[test]
fn every_policy_changes_no_bit_on_every_model() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let source = fixture(model, "model.onnx");
        let source = source.to_str().unwrap();
        let more: &[&str] = if model == "gpt2" {
            &["none", "full --every 2", "group:2"]
        } else {
            &[]
        };
        for policy in ["full", "selective"].iter().chain(more) {
            let words: Vec<&str> = policy.split(' ').collect();
            let args = [&[source, "-o", "t.onnx", "--policy"][..], &words].concat();
            let made = call(dir.path(), &args);
            assert_eq!(code(&made), 0, "{model} {policy}: {}", stderr(&made));
            let args = [
                "verify", source, "t.onnx", "--dim", "batch=2", "--dim", "seq=6", "--format",
                "json",
            ];
            let certificate = json(&call(dir.path(), &args));
            assert_eq!(
                (&certificate["equal"], &certificate["by"]),
                (&true.into(), &"bits".into()),
                "{model} {policy}"
            );
            assert_eq!(certificate["kind"], "gradients");
        }
    }
}

#[test]
fn verify_redoes_what_the_file_records() {
    let dir = workplace();
    let args = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--trainable",
        "*mlp*",
        "--freeze",
        "*bias",
        "--drop-output",
        "logits",
        "--policy",
        "full",
    ];
    assert_eq!(code(&call(dir.path(), &args)), 0);
    let args = [
        "verify",
        "model.onnx",
        "t.onnx",
        "--certificate",
        "proof.json",
        "--seed",
        "5",
    ];
    let done = call(dir.path(), &args);
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    assert!(String::from_utf8_lossy(&done.stdout).contains("equal bit for bit"));
    let proof: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.path().join("proof.json")).unwrap()).unwrap();
    assert_eq!(
        (&proof["equal"], &proof["loss"], &proof["seed"]),
        (&true.into(), &"causal-lm".into(), &5.into())
    );
    assert_eq!(
        proof["outputs"].as_array().unwrap().len(),
        5,
        "the loss and the gradients of four weights"
    );
    for (run, file) in proof["runs"]
        .as_array()
        .unwrap()
        .iter()
        .zip(["model.onnx", "t.onnx"])
    {
        assert_eq!(run["peak_bytes"], run["predicted_peak_bytes"], "{file}");
        assert!(run["peak_bytes"].as_u64() > run["static_bytes"].as_u64());
        let bytes = std::fs::read(dir.path().join(file)).unwrap();
        let hash: String = Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(run["sha256"], hash.as_str());
    }
    // Two files of one kind are compared as they are, whatever their plans.
    let other = ["t.onnx", "-o", "u.onnx", "--policy", "none"];
    assert_eq!(code(&call(dir.path(), &other)), 0);
    assert_eq!(code(&call(dir.path(), &["verify", "u.onnx", "t.onnx"])), 0);
    let swapped = call(dir.path(), &["verify", "t.onnx", "model.onnx"]);
    assert_eq!(code(&swapped), 2, "{}", stderr(&swapped));
}

#[test]
fn fusion_is_told_from_a_difference() {
    let dir = workplace();
    for (out, fuse) in [("f.onnx", "on"), ("u.onnx", "off")] {
        let args = ["model.onnx", "-o", out, "--fuse", fuse];
        assert_eq!(code(&call(dir.path(), &args)), 0);
    }
    let compared = |a: &str, b: &str| {
        json(&call(
            dir.path(),
            &["verify", a, b, "--format", "json", "--threads", "1"],
        ))
    };
    // The model is differentiated as the file says: with the same fusion, and without.
    for out in ["f.onnx", "u.onnx"] {
        let report = compared("model.onnx", out);
        assert_eq!(
            (&report["equal"], &report["by"]),
            (&true.into(), &"bits".into())
        );
    }
    let report = compared("u.onnx", "f.onnx");
    assert_eq!(
        (&report["equal"], &report["by"]),
        (&true.into(), &"rounding".into())
    );
    // More than rounding is a difference, with and without a tolerance of one's own.
    let outputs = report["outputs"].as_array().unwrap();
    assert!(
        outputs
            .iter()
            .any(|o| o["max_abs_difference"].as_f64() > Some(0.0))
    );
    damage(&dir.path().join("f.onnx"), "transformer.ln_f.weight");
    let call = call(dir.path(), &["verify", "u.onnx", "f.onnx", "--rtol", "0"]);
    assert_eq!(code(&call), 4);
}

#[test]
fn verify_catches_one_flipped_bit() {
    let dir = workplace();
    assert_eq!(code(&call(dir.path(), &["model.onnx", "-o", "t.onnx"])), 0);
    damage(
        &dir.path().join("t.onnx"),
        "transformer.h.0.mlp.c_fc.weight",
    );
    let done = call(
        dir.path(),
        &[
            "verify",
            "model.onnx",
            "t.onnx",
            "--certificate",
            "proof.json",
        ],
    );
    assert_eq!(code(&done), 4, "{}", stderr(&done));
    let said = stderr(&done);
    assert!(
        said.contains("error[verify]") && said.contains("outputs differ, first `"),
        "{said}"
    );
    assert!(
        said.contains("expected") && said.contains("elements differ"),
        "{said}"
    );
    assert!(done.stdout.is_empty());
    let proof = std::fs::read_to_string(dir.path().join("proof.json")).unwrap();
    assert!(proof.contains(r#""equal": false"#));
    // The same difference is within a tolerance that is wide enough, and only there.
    let within = |rtol: &str, atol: &str| {
        code(&call(
            dir.path(),
            &[
                "verify",
                "model.onnx",
                "t.onnx",
                "--rtol",
                rtol,
                "--atol",
                atol,
            ],
        ))
    };
    assert_eq!((within("1e-3", "1e-3"), within("1e-12", "0")), (0, 4));
}

#[test]
fn a_graph_without_the_same_outputs_is_not_equal() {
    let dir = workplace();
    assert_eq!(
        code(&call(
            dir.path(),
            &["model.onnx", "-o", "a.onnx", "--loss", "causal-lm"]
        )),
        0
    );
    let fewer = [
        "model.onnx",
        "-o",
        "b.onnx",
        "--loss",
        "causal-lm",
        "--drop-output",
        "logits",
    ];
    assert_eq!(code(&call(dir.path(), &fewer)), 0);
    let done = call(dir.path(), &["verify", "a.onnx", "b.onnx"]);
    assert_eq!(code(&done), 4);
    assert!(
        stderr(&done).contains("only in A: [logits]"),
        "{}",
        stderr(&done)
    );
}

#[test]
fn an_index_beyond_its_table_is_not_our_bug() {
    let dir = workplace();
    let ids: Vec<u8> = [9_999_999i64; 4]
        .iter()
        .flat_map(|i| i.to_le_bytes())
        .collect();
    let given = Tensors::from([(
        "input_ids".to_string(),
        Tensor::new(DType::I64, [1, 4], ids),
    )]);
    tensors::write(&dir.path().join("ids.npz"), &given).unwrap();
    let args = ["run", "model.onnx", "--inputs", "ids.npz", "--seed", "0"];
    let done = call(dir.path(), &args);
    assert_eq!(code(&done), 2, "{}", stderr(&done));
    for part in [
        "error[data]: input `input_ids` holds 9999999 at [0, 0]",
        "`lm_head.weight`, from 0 to 346",
    ] {
        assert!(stderr(&done).contains(part), "{}", stderr(&done));
    }
    let long = ["run", "model.onnx", "--seed", "0", "--dim", "seq=500"];
    let done = call(dir.path(), &long);
    assert_eq!(code(&done), 2, "{}", stderr(&done));
    assert!(
        stderr(&done).contains("--dim seq=128 at most"),
        "{}",
        stderr(&done)
    );
}

/// The inputs of the fixture's case, with labels of which the one at [1, 3] is `label`.
fn labelled(label: i64) -> Tensors {
    let case = tensors::read(&fixture("gpt2", "case.npz")).unwrap();
    let ids = case["in.input_ids"].clone();
    let width = ids.dims[1] as usize;
    let labels: Vec<u8> = (0..ids.elements() as usize)
        .map(|i| if i == width + 3 { label } else { 7 })
        .flat_map(i64::to_le_bytes)
        .collect();
    let labels = Tensor::new(DType::I64, ids.dims.clone(), labels);
    [
        ("input_ids".to_string(), ids),
        ("labels".to_string(), labels),
    ]
    .into()
}

#[test]
fn a_label_out_of_range_is_named_with_its_place() {
    let dir = workplace();
    for (label, good) in [
        (400, false),
        (-1, false),
        (347, false),
        (346, true),
        (-100, true),
    ] {
        tensors::write(&dir.path().join(format!("l{label}.npz")), &labelled(label)).unwrap();
        for loss in ["causal-lm", "cross-entropy", "causal-lm --tile-loss 3"] {
            let made =
                format!("model.onnx -o t.onnx --drop-output logits --policy none --loss {loss}");
            let made = call(dir.path(), &made.split(' ').collect::<Vec<_>>());
            assert_eq!(code(&made), 0, "{}", stderr(&made));
            let inputs = format!("l{label}.npz");
            let done = call(dir.path(), &["run", "t.onnx", "--inputs", &inputs]);
            let said = stderr(&done);
            if good {
                assert_eq!(code(&done), 0, "{loss}: {said}");
                continue;
            }
            assert_eq!(code(&done), 2, "{loss}: {said}");
            for part in [
                &format!("error[data]: input `labels` holds {label} at [1, 3]"),
                "a class from 0 to 346, or -100",
            ] {
                assert!(said.contains(part), "{loss}: {said}");
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_named() {
    let dir = workplace();
    let made = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--policy",
        "full",
    ];
    assert_eq!(code(&call(dir.path(), &made)), 0);
    let mut inputs = labelled(7);
    let good = call_run(dir.path(), &inputs, &["--check-finite"]);
    assert_eq!(code(&good), 0, "{}", stderr(&good));
    let nans: Vec<u8> = [f32::NAN; 128 * 24]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let nans = Tensor::new(DType::F32, [128, 24], nans);
    inputs.insert("transformer.wpe.weight".into(), nans);
    let checked = call_run(dir.path(), &inputs, &["--check-finite"]);
    assert_eq!(code(&checked), 4, "{}", stderr(&checked));
    for part in [
        "error[finite]: step 1 gave NaN or infinities",
        "`loss`",
        "more",
    ] {
        assert!(stderr(&checked).contains(part), "{}", stderr(&checked));
    }
    let told = call_run(dir.path(), &inputs, &["--format", "json"]);
    let report = json(&told);
    assert_eq!(report["not_finite"][0], "loss");
    assert!(
        report["warnings"].to_string().contains("`loss`"),
        "{report}"
    );
}

fn call_run(dir: &Path, inputs: &Tensors, more: &[&str]) -> std::process::Output {
    tensors::write(&dir.join("given.npz"), inputs).unwrap();
    let run = ["run", "t.onnx", "--inputs", "given.npz"];
    call(dir, &[&run[..], more].concat())
}

#[test]
fn the_first_step_that_counts_is_warm_and_starts_from_what_was_given() {
    let dir = workplace();
    let made = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--optimizer",
        "adamw",
        "--dim",
        "seq=6",
    ];
    assert_eq!(code(&call(dir.path(), &made)), 0);
    let run = |warm_up: &[&str], out: &str| {
        let args = [
            "run",
            "t.onnx",
            "--seed",
            "1",
            "--outputs",
            out,
            "--format",
            "json",
        ];
        let report = json(&call(dir.path(), &[&args[..], warm_up].concat()));
        let outputs = tensors::read(&dir.path().join(out)).unwrap();
        (report, outputs)
    };
    let (report, outputs) = run(&[], "a.npz");
    assert_eq!(report["warm_up"], 1);
    assert_eq!(report["steps"].as_array().unwrap().len(), 1);
    for count in ["0", "2"] {
        let (report, other) = run(&["--warm-up", count], "b.npz");
        assert_eq!(report["warm_up"].to_string(), count);
        assert!(outputs == other, "{count}");
    }
}

#[test]
fn a_certificate_states_what_was_compared_at_the_planned_sizes() {
    let dir = workplace();
    let args = "model.onnx -o t.onnx --loss causal-lm --drop-output logits --tile-loss 3 --tile-mlp 2 --dim batch=2 --dim seq=12 --policy full";
    let made = call(dir.path(), &args.split(' ').collect::<Vec<_>>());
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let proof = json(&call(
        dir.path(),
        &["verify", "model.onnx", "t.onnx", "--format", "json"],
    ));
    assert_eq!(proof["dims"], serde_json::json!({"batch": 2, "seq": 12}));
    assert_eq!(
        (
            &proof["equal"],
            &proof["against"],
            &proof["by"],
            &proof["largest"]
        ),
        (
            &true.into(),
            &"unplanned".into(),
            &"bits".into(),
            &serde_json::Value::Null
        )
    );
    let exported = &proof["exported"];
    assert_eq!(
        (&exported["agrees"], &exported["against"], &exported["by"]),
        (&true.into(), &"exported".into(), &"rounding".into())
    );
    assert_eq!(
        exported["outputs"].as_array().unwrap().len(),
        proof["outputs"].as_array().unwrap().len()
    );
    let n = |key: &str| exported["largest"][key].as_f64().unwrap();
    assert!(
        n("difference") > 0.0 && n("difference") <= n("allowed"),
        "{exported}"
    );
    assert!(!exported["largest"]["index"].as_array().unwrap().is_empty());
    assert_eq!(proof["runs"].as_array().unwrap().len(), 3);
    let said = call(
        dir.path(),
        &["verify", "model.onnx", "t.onnx", "--dim", "seq=5"],
    );
    let said = String::from_utf8_lossy(&said.stdout).to_string();
    for part in [
        "at batch=2, seq=5",
        "equal bit for bit to the same graph without a plan",
        "to the model as exported: not planned, not fused, not tiled",
        "the largest difference is",
        "is allowed",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // Nothing fused or tiled: one comparison says both.
    let args = "model.onnx -o u.onnx --fuse off --policy full --dim seq=6";
    assert_eq!(
        code(&call(dir.path(), &args.split(' ').collect::<Vec<_>>())),
        0
    );
    let proof = json(&call(
        dir.path(),
        &["verify", "model.onnx", "u.onnx", "--format", "json"],
    ));
    assert_eq!(
        (
            &proof["against"],
            &proof["by"],
            &proof["exported"],
            &proof["dims"]["seq"]
        ),
        (
            &"exported".into(),
            &"bits".into(),
            &serde_json::Value::Null,
            &6.into()
        )
    );
}
