//! Budgets are kept: by the plan, by the prediction for the file that is written, and by what its run takes.
use crate::support::command;

use command::{call, fixture, json};

/// Fixtures and the sizes they are planned at; `python tools budgets` goes through all of them at ten budgets each.
const MODELS: [(&str, [&str; 4]); 4] = [
    ("gpt2", ["--dim", "batch=4", "--dim", "seq=32"]),
    ("bert", ["--dim", "batch=2", "--dim", "seq=24"]),
    ("llama32", ["--dim", "batch=2", "--dim", "seq=16"]),
    ("llama32_bf16", ["--dim", "batch=2", "--dim", "seq=16"]),
];

#[test]
fn plans_predictions_and_runs_stay_within_budgets() {
    for (name, dims) in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let model = fixture(name, "model.onnx");
        let model = model.to_str().unwrap();
        let run = |words: &[&str]| {
            let mut all = words.to_vec();
            all.extend(dims);
            all.extend(["--format", "json"]);
            json(&call(dir.path(), &all))
        };
        let ends = run(&["frontier", model, "--points", "2", "--effort", "first"]);
        let n = |key: &str| ends[key].as_u64().unwrap();
        let (least, most) = (n("smallest_feasible_bytes"), n("unplanned_bytes"));
        assert!(least < most, "{name}: nothing to plan");
        for share in [0, 1, 3] {
            let budget = least + (most - least) * share / 4;
            let word = budget.to_string();
            let plan = run(&[
                model, "-o", "t.onnx", "--budget", &word, "--effort", "first",
            ]);
            let done = run(&["run", "t.onnx", "--seed", "0"]);
            let bytes = |key: &str| done[key].as_u64().unwrap();
            let planned = plan["peak_after_bytes"].as_u64().unwrap();
            assert!(planned <= budget, "{name} at {budget}: planned {planned}");
            assert_eq!(planned, bytes("predicted_peak_bytes"), "{name} at {budget}");
            let measured = bytes("measured_peak_bytes");
            assert_eq!(measured, planned, "{name} at {budget}");
        }
    }
}

#[test]
fn a_weight_that_nothing_reads_is_neither_predicted_nor_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let graph = "graph @g typed (%x: f32[4]) -> (%y) {
  init %w : f32[4] = [1, 2, 3, 4]
  init %unread : i64[2] = [5, 6]
  %y = Mul %x, %w : f32[4]
}
";
    std::fs::write(dir.path().join("g.ckir"), graph).unwrap();
    let done = json(&call(
        dir.path(),
        &["run", "g.ckir", "--seed", "0", "--format", "json"],
    ));
    assert_eq!(done["static_bytes"], 32);
    assert_eq!(done["predicted_peak_bytes"], 48);
    assert_eq!(done["measured_peak_bytes"], 48);
}
