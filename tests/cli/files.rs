//! The command line from outside: exit codes, what lands on stdout and on disk, help that tells the truth.

use crate::support::command;

use ckpt_opt::frontend::onnx::proto::ModelProto;
use command::{call, code, command_with, files, has_keys, json, stderr, workplace};
use prost::Message;
use serde_json::Value;
use std::process::Stdio;

#[test]
fn a_refined_policy_is_recorded_and_a_wrong_wish_is_refused() {
    let dir = workplace();
    let report = |words: &[&str]| {
        let mut args = vec!["model.onnx", "-o", "t.onnx", "--format", "json", "--policy"];
        args.extend(words);
        json(&call(dir.path(), &args))
    };
    let again = |report: &Value| report["recompute_flops"].as_u64().unwrap();
    let (full, half) = (report(&["full"]), report(&["full", "--every", "2"]));
    assert_eq!(half["policy"], "full --every 2");
    let every = ["model.onnx", "-o", "t.onnx", "--policy", "every:2"];
    let refused = stderr(&call(dir.path(), &every));
    assert!(
        refused.contains("write --policy full --every 2"),
        "{refused}"
    );
    assert!(again(&half) < again(&full) && again(&half) > 0);
    let last_wins = ["none", "--recompute-ops", "Gemm", "--save-ops=aten.addmm"];
    assert_eq!(report(&last_wins)["recompute_flops"], 0);
    for (option, word, says) in [
        (
            "--save-ops",
            "__import__('os')",
            "`(` cannot stand in a name",
        ),
        ("--save-ops", "MatMull", "did you mean MatMul?"),
        ("--recompute-ops", "TopK", "the model has no TopK"),
        (
            "--recompute",
            "layers.*.nothing",
            "matches no module path and no node",
        ),
        ("--layers", "GPT2Blok", "classes GPT2Block"),
        ("--scope", "nowhere", "matches no module and no node"),
        ("--every", "0", "1 or more"),
    ] {
        let args = [
            "model.onnx",
            "-o",
            "u.onnx",
            "--policy",
            "full",
            option,
            word,
        ];
        let done = call(dir.path(), &args);
        assert_eq!(code(&done), 2, "{option} {word}");
        assert!(
            stderr(&done).contains(says),
            "{option} {word}: {}",
            stderr(&done)
        );
        assert!(!dir.path().join("u.onnx").exists());
    }
}

#[test]
fn optimize_reports_what_the_contract_lists() {
    let dir = workplace();
    let args = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--policy",
        "full",
        "--dim",
        "batch=8",
        "--format",
        "json",
    ];
    let report = json(&call(dir.path(), &args));
    has_keys(
        &report,
        &[
            "policy",
            "budget_bytes",
            "peak_before_bytes",
            "peak_after_bytes",
            "static_bytes",
            "saved_bytes",
            "recompute_flops",
            "forward_backward_flops",
            "overhead_pct",
            "lower_bound_pct",
            "gap_pct",
            "smallest_feasible_bytes",
            "plan_seconds",
            "segments",
            "blocks",
            "kv_sharing",
            "warnings",
        ],
    );
    assert_eq!(report["policy"], "full");
    assert_eq!(report["dims"], serde_json::json!({"batch": 8, "seq": 128}));
    assert_eq!(report["assumed_dims"], serde_json::json!(["seq"]));
    let n = |key: &str| report[key].as_u64().unwrap();
    assert_eq!(
        n("saved_bytes"),
        n("peak_before_bytes") - n("peak_after_bytes")
    );
    assert!(n("saved_bytes") > 0 && n("recompute_flops") > 0 && n("segments") >= 2);
    for (rows, peak) in [
        ("at_peak_before", "peak_before_bytes"),
        ("at_peak_after", "peak_after_bytes"),
    ] {
        let sum: u64 = report[rows]
            .as_object()
            .unwrap()
            .values()
            .map(|v| v.as_u64().unwrap())
            .sum();
        assert_eq!(sum, n(peak), "{rows}");
    }
    let human = call(dir.path(), &["t.onnx", "-o", "u.onnx", "--policy", "none"]);
    let text = String::from_utf8(human.stdout).unwrap();
    for part in [
        "gradients",
        "activations",
        "peak",
        "batch=1 (assumed",
        "output logits holds",
        "wrote u.onnx",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn inspect_reports_what_the_contract_lists() {
    let dir = workplace();
    let report = json(&call(
        dir.path(),
        &[
            "inspect",
            "model.onnx",
            "--freeze",
            "*wpe*",
            "--format",
            "json",
        ],
    ));
    has_keys(
        &report,
        &[
            "inputs",
            "outputs",
            "parameters",
            "blocks",
            "kv_sharing",
            "ops",
            "dims",
            "warnings",
        ],
    );
    has_keys(
        &report["parameters"][0],
        &[
            "name",
            "initializer",
            "aliases",
            "transposed",
            "trainable",
            "shape",
            "dtype",
        ],
    );
    has_keys(
        &report["blocks"][0],
        &["index", "class", "kind", "nodes", "first", "last", "parts"],
    );
    for block in report["blocks"].as_array().unwrap() {
        let parts = block["parts"].as_array().unwrap();
        let kinds: Vec<&str> = parts.iter().map(|p| p["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["norm", "attention", "norm", "mlp"]);
        let sums: Vec<bool> = parts.iter().map(|p| p["residual"].is_string()).collect();
        assert_eq!(sums, [false, true, false, true], "{parts:?}");
        let inside: u64 = parts.iter().map(|p| p["nodes"].as_u64().unwrap()).sum();
        assert_eq!(Some(inside), block["nodes"].as_u64());
    }
    assert_eq!(report["graph"], "forward");
    assert_eq!(report["blocks"].as_array().unwrap().len(), 2);
    assert_eq!(
        report["inputs"][0]["shape"],
        serde_json::json!(["batch", "seq"])
    );
    let frozen = |p: &&Value| p["trainable"] == false;
    let parameters = report["parameters"].as_array().unwrap();
    assert_eq!(parameters.iter().filter(frozen).count(), 1);
    assert_eq!(
        code(&call(
            dir.path(),
            &["model.onnx", "-o", "t.onnx", "--freeze", "*wpe*"]
        )),
        0
    );
    let planned = json(&call(
        dir.path(),
        &["inspect", "t.onnx", "--format", "json"],
    ));
    assert_eq!(planned["graph"], "planned");
    let parameters = planned["parameters"].as_array().unwrap();
    assert_eq!(
        parameters.iter().filter(frozen).count(),
        1,
        "what has no gradient was not trained"
    );
    assert_eq!(planned["meta"]["ckpt.loss"], "vjp");
    let text = String::from_utf8(call(dir.path(), &["inspect", "t.onnx"]).stdout).unwrap();
    assert!(text.contains("planned training graph"), "{text}");
}

#[test]
fn what_was_asked_for_is_in_the_file() {
    let dir = workplace();
    let args = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--loss",
        "causal-lm",
        "--policy",
        "full",
        "--every",
        "2",
        "--trainable",
        "*mlp*",
        "--trainable",
        "*attn*",
        "--freeze",
        "*bias",
        "--drop-output",
        "logits",
    ];
    assert_eq!(code(&call(dir.path(), &args)), 0);
    let model =
        ModelProto::decode(std::fs::read(dir.path().join("t.onnx")).unwrap().as_slice()).unwrap();
    let prop = |key: &str| {
        let found = model.metadata_props.iter().find(|p| p.key() == key);
        found.map(|p| p.value().to_string()).unwrap_or_default()
    };
    assert_eq!(prop("ckpt.loss"), "causal-lm");
    assert_eq!(prop("ckpt.policy"), "full --every 2");
    assert_eq!(prop("ckpt.numerics"), "rounded");
    assert_eq!(prop("ckpt.fuse"), "true");
    assert_eq!(prop("ckpt.trainable"), r#"["*mlp*","*attn*"]"#);
    assert_eq!(prop("ckpt.freeze"), r#"["*bias"]"#);
    assert_eq!(prop("ckpt.version"), env!("CARGO_PKG_VERSION"));
    let outputs: Vec<&str> = model
        .graph
        .as_ref()
        .unwrap()
        .output
        .iter()
        .map(|o| o.name())
        .collect();
    assert!(
        outputs.contains(&"loss") && !outputs.contains(&"logits"),
        "{outputs:?}"
    );
    assert!(
        !outputs.iter().any(|o| o.ends_with("bias.grad")),
        "{outputs:?}"
    );
}

#[test]
fn without_fusion_every_op_is_the_models_own() {
    let dir = workplace();
    let plain = ["--policy", "none"];
    let args = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--fuse",
        "off",
        plain[0],
        plain[1],
    ];
    assert_eq!(code(&call(dir.path(), &args)), 0);
    let bytes = std::fs::read(dir.path().join("t.onnx")).unwrap();
    let model = ModelProto::decode(bytes.as_slice()).unwrap();
    let prop = |key: &str| {
        let found = model.metadata_props.iter().find(|p| p.key() == key);
        found.map(|p| p.value().to_string())
    };
    assert_eq!(prop("ckpt.numerics").as_deref(), Some("exact"));
    assert_eq!(prop("ckpt.fuse"), None);
    let nodes = &model.graph.as_ref().unwrap().node;
    let count = |op: &str| nodes.iter().filter(|n| n.op_type() == op).count();
    assert_eq!((count("Attention"), count("Softmax")), (0, 2));
    // With it, the scores are nowhere.
    let args = ["model.onnx", "-o", "f.onnx", plain[0], plain[1]];
    assert_eq!(code(&call(dir.path(), &args)), 0);
    let bytes = std::fs::read(dir.path().join("f.onnx")).unwrap();
    let fused = ModelProto::decode(bytes.as_slice()).unwrap();
    let nodes = &fused.graph.as_ref().unwrap().node;
    // Functions of our own are named after the op and what it is made for.
    let count = |op: &str| nodes.iter().filter(|n| n.op_type().starts_with(op)).count();
    assert_eq!((count("Softmax"), count("AttentionGrad")), (0, 2));
    assert!(count("Attention") >= 4);
}

#[test]
fn wrong_usage_is_exit_2_and_says_what_is_right() {
    let dir = workplace();
    let cases: &[(&[&str], &str)] = &[
        (&["model.onnx"], "-o OUT"),
        (&["nothing.onnx", "-o", "t.onnx"], "No such file"),
        (
            &["model.onnx", "-o", "t.onnx", "--policy", "ful"],
            "selective",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--loss", "huber"],
            "causal-lm",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--loss", "output:nothing"],
            "logits",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--loss", "output:logits"],
            "scalar",
        ),
        (&["model.onnx", "-o", "t.onnx", "--dim", "batch"], "NAME=N"),
        (
            &["model.onnx", "-o", "t.onnx", "--dim", "sequence=3"],
            "one of batch, seq",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--dim", "batch=0"],
            "1 or more",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--freeze", "nothing*"],
            "matches no parameter",
        ),
        (&["model.onnx", "-o", "t.onnx", "--freeze", "*"], "train"),
        (
            &["model.onnx", "-o", "t.onnx", "--drop-output", "nothing"],
            "outputs logits",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--input", "nothing:f32[1]"],
            "inputs input_ids",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--input", "input_ids:i65[1]"],
            "DTYPE",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--passes", "infer,nothing"],
            "there is no pass",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--passes", "remat"],
            "must come right after",
        ),
        (
            &["model.onnx", "-o", "t.onnx", "--stop-after", "nothing"],
            "infer,tie,simplify",
        ),
        (&["model.onnx", "-o", "model.onnx"], "replace an input"),
        (&["model.onnx", "-o", "."], "file name"),
        (&["model.onnx", "-o", "t.onnx", "--nothing"], "--nothing"),
        (&["inspect"], "MODEL"),
        (
            &["inspect", "model.onnx", "--trainable", "nothing"],
            "matches no parameter",
        ),
        (&["completions", "nothing"], "bash"),
        (&["run", "model.onnx", "--threads", "0"], "--threads"),
        (&["verify", "model.onnx"], "<B>"),
    ];
    let before = files(dir.path());
    for (args, says) in cases {
        let done = call(dir.path(), args);
        assert_eq!(code(&done), 2, "{args:?}: {}", stderr(&done));
        assert!(
            stderr(&done).contains(says),
            "{args:?} should say `{says}`: {}",
            stderr(&done)
        );
        assert!(done.stdout.is_empty(), "{args:?}: errors go to stderr");
        assert_eq!(files(dir.path()), before, "{args:?} left something behind");
    }
}

#[test]
fn nothing_is_written_where_nothing_can_be() {
    let dir = workplace();
    let done = call(dir.path(), &["model.onnx", "-o", "no/such/folder/t.onnx"]);
    assert_eq!(code(&done), 5, "{}", stderr(&done));
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let done = call(
        dir.path(),
        &["model.onnx", "-o", "t.onnx", "--dump", "file"],
    );
    assert_eq!(code(&done), 5, "{}", stderr(&done));
    assert_eq!(
        files(dir.path()),
        ["case.npz", "file", "graph.json.gz", "model.onnx"]
    );
}

#[test]
fn passes_can_be_watched_stopped_and_chosen() {
    let dir = workplace();
    let stopped = call(
        dir.path(),
        &[
            "model.onnx",
            "--stop-after",
            "autodiff",
            "--loss",
            "causal-lm",
        ],
    );
    assert_eq!(code(&stopped), 0, "{}", stderr(&stopped));
    let text = String::from_utf8(stopped.stdout).unwrap();
    assert!(text.starts_with("graph ") && text.contains("training") && text.contains("backward:"));
    let args = [
        "model.onnx",
        "-o",
        "t.ckir",
        "--dump",
        "dumps",
        "-v",
        "--passes",
        "infer,loss,autodiff,plan,remat",
    ];
    let done = call(dir.path(), &args);
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    let names = [
        "01-infer.ckir",
        "02-loss.ckir",
        "03-autodiff.ckir",
        "04-plan.ckir",
        "05-remat.ckir",
    ];
    assert_eq!(files(&dir.path().join("dumps")), names);
    assert!(stderr(&done).contains("verify ms"));
    // The written text is a model again, and so is a dump.
    let again = json(&call(
        dir.path(),
        &["inspect", "t.ckir", "--format", "json"],
    ));
    assert_eq!(again["graph"], "planned");
    let dump = dir.path().join("dumps").join("03-autodiff.ckir");
    let report = json(&call(
        dir.path(),
        &[dump.to_str().unwrap(), "-o", "u.onnx", "--format", "json"],
    ));
    assert!(report["loss"].is_null() && report["peak_after_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_planned_file_is_planned_anew() {
    let dir = workplace();
    let plan = |from: &str, to: &str, policy: &str| {
        json(&call(
            dir.path(),
            &[from, "-o", to, "--policy", policy, "--format", "json"],
        ))
    };
    let first = plan("model.onnx", "a.onnx", "full");
    let second = plan("a.onnx", "b.onnx", "selective");
    let third = plan("b.onnx", "c.onnx", "full");
    for key in [
        "peak_before_bytes",
        "peak_after_bytes",
        "recompute_flops",
        "segments",
    ] {
        assert_eq!(first[key], third[key], "{key}");
    }
    assert_eq!(first["peak_before_bytes"], second["peak_before_bytes"]);
    let chosen = call(dir.path(), &["a.onnx", "-o", "d.onnx", "--loss", "mse"]);
    assert_eq!(code(&chosen), 2, "the backward is in the file");
}

#[test]
fn a_reader_that_goes_away_is_no_bug() {
    let dir = workplace();
    let mut child = command_with(dir.path(), &["inspect", "model.onnx"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn no_colour_where_nobody_sees_it() {
    let dir = workplace();
    let done = call(dir.path(), &["nothing.onnx", "-o", "t.onnx"]);
    assert!(
        stderr(&done).starts_with("error[file]: "),
        "{}",
        stderr(&done)
    );
}

#[test]
fn planned_graphs_can_be_compared() {
    let dir = workplace();
    for policy in ["none", "full"] {
        let target = format!("{policy}.onnx");
        let done = call(
            dir.path(),
            &["model.onnx", "-o", &target, "--policy", policy],
        );
        assert_eq!(code(&done), 0, "{}", stderr(&done));
    }
    let same = json(&call(
        dir.path(),
        &["diff", "full.onnx", "full.onnx", "--format", "json"],
    ));
    let other = json(&call(
        dir.path(),
        &["diff", "none.onnx", "full.onnx", "--format", "json"],
    ));
    assert_eq!(same["is_same"], true);
    assert_eq!(other["is_same"], false);
    assert!(other["peak_b_bytes"].as_u64() < other["peak_a_bytes"].as_u64());
    assert!(!other["changed"].as_array().unwrap().is_empty());
}

#[cfg(not(feature = "torch"))]
#[test]
fn without_the_runtime_it_is_the_environment() {
    let dir = workplace();
    for args in [
        &["run", "model.onnx"][..],
        &["verify", "model.onnx", "model.onnx"][..],
    ] {
        let done = call(dir.path(), args);
        assert_eq!(code(&done), 5);
        assert!(stderr(&done).contains("get-libtorch"), "{}", stderr(&done));
    }
}
