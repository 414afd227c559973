//! Options mean what they say: what is misspelled, impossible or without effect is told, with what to write instead.

use crate::support::command;

use command::{call, code, fixture, json, stderr, workplace};
use serde_json::Value;
use std::path::Path;

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

/// Calls with these words, which are refused with this exit code; returns what stderr says.
fn refused(folder: &Path, line: &str, exit: i32) -> String {
    let done = call(folder, &words(line));
    assert_eq!(code(&done), exit, "{line}: {}", stderr(&done));
    stderr(&done)
}

fn report(folder: &Path, line: &str) -> Value {
    json(&call(folder, &words(&format!("{line} --format json"))))
}

#[test]
fn a_misspelled_command_is_no_model() {
    let dir = workplace();
    for (line, near) in [
        ("paln model.onnx", "plan"),
        ("explian model.onnx --policy full", "explain"),
        ("insepct", "inspect"),
        ("man verfy", "verify"),
    ] {
        let text = refused(dir.path(), line, 2);
        assert!(text.contains(&format!("did you mean {near}?")), "{text}");
        assert!(text.contains("expected: optimize, inspect"), "{text}");
    }
    // A file is a model, whatever its name.
    std::fs::copy(dir.path().join("model.onnx"), dir.path().join("paln")).unwrap();
    let done = call(dir.path(), &words("paln -o t.onnx --policy none"));
    assert_eq!(code(&done), 0, "{}", stderr(&done));
}

#[test]
fn sizes_take_units_and_a_budget_without_one_is_asked_about() {
    let dir = workplace();
    let plan = "plan model.onnx --effort first --budget";
    for (text, bytes) in [("2mib", 2 << 20), ("900K", 900_000), ("1.5Mb", 1_500_000)] {
        let found = report(dir.path(), &format!("{plan} {text}"));
        assert_eq!(found["budget_bytes"], bytes, "{text}");
    }
    let spaced = [
        "plan",
        "model.onnx",
        "--policy",
        "none",
        "--host-budget",
        "1.5 GB",
    ];
    assert_eq!(code(&call(dir.path(), &spaced)), 0);
    let moved = |least: &str| {
        let line =
            format!("plan model.onnx --policy none --offload cpu --min-offload-bytes {least}");
        report(dir.path(), &line)["offloaded"].as_u64().unwrap()
    };
    assert!(moved("1GiB") == 0 && moved("1k") > 0);
    assert_eq!(moved("10240"), moved("10kib"));
    for (budget, percent, exit) in [
        ("60", 60, 3),
        ("0.5", 50, 2),
        ("0.6", 60, 2),
        ("80.0", 80, 2),
    ] {
        let text = refused(dir.path(), &format!("{plan} {budget}"), exit);
        assert!(
            text.contains(&format!("did you mean {percent}%?")),
            "{budget}: {text}"
        );
    }
    let text = stderr(&call(
        dir.path(),
        &words("frontier model.onnx --budgets 60,1MiB --effort first"),
    ));
    assert!(text.contains("did you mean 60%?"), "{text}");
}

#[test]
fn a_choice_of_layers_that_leaves_none_is_refused() {
    let dir = workplace();
    for options in ["--every 99", "--every 2 --first 1"] {
        for goal in ["--policy full", "--budget 60% --effort first"] {
            let text = refused(dir.path(), &format!("plan model.onnx {goal} {options}"), 2);
            assert!(
                text.contains(&format!("{options} leaves no layer")),
                "{text}"
            );
            assert!(text.contains("found: 2 layers"), "{text}");
        }
    }
    report(dir.path(), "plan model.onnx --policy full --first 5");
}

#[test]
fn ops_are_known_by_pytorchs_names() {
    let dir = workplace();
    let plan = |ops: &str| {
        let found = report(
            dir.path(),
            &format!("plan model.onnx --policy full --save-ops {ops}"),
        );
        (
            found["recompute_flops"].clone(),
            found["peak_after_bytes"].clone(),
        )
    };
    for word in ["addmm", "torch.addmm", "torch.ops.aten.addmm.default"] {
        assert_eq!(plan(word), plan("aten.addmm"), "{word}");
    }
    assert_eq!(plan("layer_norm"), plan("LayerNormalization"));
    for (word, near) in [
        ("adddmm", "did you mean aten.addmm (MatMul, Gemm)?"),
        ("Gelo", "did you mean Gelu"),
        ("layernormalisation", "did you mean LayerNormalization?"),
    ] {
        let line = format!("plan model.onnx --policy full --save-ops {word}");
        let text = refused(dir.path(), &line, 2);
        assert!(text.contains(near), "{text}");
    }
}

#[test]
fn a_name_that_fusing_took_away_leads_to_the_fused_op() {
    let dir = workplace();
    for (options, name) in [
        ("--policy full --save-ops Tanh", "Gelu"),
        ("--policy full --save-ops aten.tanh", "Gelu"),
        ("--policy none --recompute-ops Pow", "Gelu"),
        ("--policy none --recompute node_tanh", "Gelu"),
        ("--budget 60% --effort first --save-ops node_tanh*", "Gelu"),
    ] {
        let text = refused(dir.path(), &format!("plan model.onnx {options}"), 2);
        assert!(text.contains(&format!("fused into {name}")), "{text}");
        assert!(text.contains("--fuse off leaves the nodes"), "{text}");
        report(dir.path(), &format!("plan model.onnx {options} --fuse off"));
    }
    // Where it matches others too, the plan is made, and the warning says what it does not reach.
    let warned = |ops: &str| {
        let found = report(
            dir.path(),
            &format!("plan model.onnx --policy full --save-ops {ops}"),
        );
        found["warnings"].to_string()
    };
    assert!(warned("Mul").contains("does not reach 12 nodes that were fused into Attention, Gelu"));
    assert!(warned("Mul,Gelu").contains("fused into Attention: --save-ops Attention means"));
    assert_eq!(warned("Mul,Gelu,Attention"), "[]");
    assert_eq!(warned("aten.addmm"), "[]");
}

const FIXED: &str = "graph @g imported (%x: f32[2, 3]) -> (%y) {
  init %w : f32[3, 3] = [1, 2, 3, 4, 5, 6, 7, 8, 9]
  %1 = MatMul %x, %w
  %y = Tanh %1
}
";

#[test]
fn a_fixed_size_can_be_freed() {
    let dir = workplace();
    std::fs::write(dir.path().join("fixed.ckir"), FIXED).unwrap();
    let line = "plan fixed.ckir --maximize batch --budget 10kB --effort first";
    let text = refused(dir.path(), line, 2);
    assert!(text.contains("--input 'x:f32[batch,3]'"), "{text}");
    let freed = report(dir.path(), &format!("{line} --input x:f32[batch,3]"));
    assert!(freed["maximized"]["size"].as_u64().unwrap() > 2, "{freed}");
    let near = refused(dir.path(), "plan model.onnx --policy none --dim bach=2", 2);
    assert!(near.contains("did you mean batch?"), "{near}");
}

const WIDE_HEAD: &str = "graph @g imported (%x: f32[n, 8]) -> (%y) {
  init %a : f32[8, 8] = splat 0.5
  init %b : f32[8, 9000] = splat 0.25
  %1 = MatMul %x, %a
  %2 = Tanh %1
  %y = MatMul %2, %b
}
";

#[test]
fn a_policy_that_saves_nothing_says_so() {
    let dir = workplace();
    let line = "plan model.onnx --policy full --loss causal-lm --dim batch=1 --dim";
    let wasted = |line: &str| {
        let warnings = report(dir.path(), line)["warnings"].clone();
        let mut all = warnings
            .as_array()
            .unwrap()
            .iter()
            .map(|w| w.as_str().unwrap());
        all.find(|w| w.contains("less peak")).map(str::to_string)
    };
    let text = wasted(&format!("{line} seq=8")).unwrap();
    assert!(
        text.starts_with("full takes 19.0 % more time for 0.0 % less peak"),
        "{text}"
    );
    assert!(text.contains("--fuse-optimizer"), "{text}");
    assert!(!text.contains("--tile-loss"), "{text}");
    assert_eq!(wasted(&format!("{line} seq=128")), None);
    assert_eq!(
        wasted(&format!("{line} seq=8 --policy none").replace("--policy full ", "")),
        None
    );
    std::fs::write(dir.path().join("head.ckir"), WIDE_HEAD).unwrap();
    let head = "plan head.ckir --policy selective --loss cross-entropy --dim n=16";
    let text_of_head = wasted(head).unwrap();
    assert!(
        text_of_head.contains("runs; what would help: --tile-loss auto ("),
        "{text_of_head}"
    );
    assert!(text_of_head.contains("--drop-output y ("), "{text_of_head}");
    let written = "model.onnx -o t.onnx --policy full --loss causal-lm --dim batch=1 --dim seq=8";
    assert_eq!(wasted(written).as_deref(), Some(text.as_str()));
}

const UNKNOWN: &str = "graph @g typed (%x: f32[3]) -> (%y) {
  init %w : f32[3] = [1, 2, 3]
  %h = Mul %x, %w : f32[3]
  %y = Opaque %h {domain=\"com.microsoft\", op_type=\"FlashThing\", version=1} : f32[3]
}
";

#[test]
fn an_unknown_op_is_named_with_its_domain() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("g.ckir"), UNKNOWN).unwrap();
    let text = refused(dir.path(), "plan g.ckir --policy none", 2);
    let name = "com.microsoft::FlashThing";
    assert!(
        text.contains(&format!("{name} has no gradient here")),
        "{text}"
    );
    assert!(text.contains(&format!("({name})")), "{text}");
}

/// What the solver may do by itself, an override may demand under a budget.
#[test]
fn outputs_are_recomputed_where_that_is_demanded() {
    let dir = workplace();
    let model = "model.onnx --dim batch=8 --recompute-ops node_linear";
    let line = format!("explain {model} logits --budget 80% --effort first");
    let made = report(dir.path(), &line);
    let logits = &made["values"][0];
    assert_eq!(
        (&logits["name"], &logits["fate"]),
        (&"logits".into(), &"recomputed".into())
    );
    assert_eq!(logits["reason"], "--recompute-ops node_linear");
    assert_eq!(logits["runs"], 2);
    let text = refused(dir.path(), &format!("plan {model} --policy full"), 2);
    assert!(
        text.contains("matches only graph outputs, which policies keep"),
        "{text}"
    );
    assert!(text.contains("with --budget"), "{text}");
    let line =
        "plan model.onnx --budget 80% --effort first --recompute-ops node_linear/grad/MatMul";
    let text = refused(dir.path(), line, 2);
    assert!(text.contains("only nodes of the backward pass"), "{text}");
}

#[test]
fn a_bound_says_that_it_is_about_plans_under_the_overrides() {
    let dir = workplace();
    let line = "plan model.onnx --budget 60% --effort first";
    let class = |line: &str| {
        report(dir.path(), line)["bound_class"]
            .as_str()
            .unwrap()
            .to_string()
    };
    let free = class(line);
    assert!(
        free.starts_with("every schedule whose first computations"),
        "{free}"
    );
    let bound = class(&format!("{line} --save-ops Gelu"));
    assert!(
        bound.starts_with("every schedule that obeys the overrides and whose"),
        "{bound}"
    );
    let frontier = "frontier model.onnx --points 2 --effort first --save-ops Gelu";
    assert_eq!(class(frontier), bound);
    let moved = class(&format!("{line} --offload auto --save-ops Gelu"));
    assert!(moved.contains("obeys the overrides"), "{moved}");
}

/// The fixture's own dropouts draw at random.
#[test]
fn a_stream_of_random_numbers_is_one_option() {
    let dir = workplace();
    let model = fixture("exported", "block.pt");
    let model = model.to_str().unwrap();
    let line = format!("plan {model} --policy none --rng-stream");
    for (streams, says) in [
        ("a=d1,b=d2", "`b=d2` is a second stream"),
        ("a=d1,a=d2", "give each stream an option of its own"),
        ("a=d1,d1", "the pattern `d1` twice"),
    ] {
        let text = refused(dir.path(), &format!("{line} {streams}"), 2);
        assert!(text.contains(says), "{text}");
    }
}
