//! `explain`: what it says is true of the plan, and every name that a user can see leads to an answer.

use crate::support::command;

use command::{call, code, fixture, json, stderr, workplace};
use serde_json::Value;
use std::path::Path;

fn explain(folder: &Path, args: &[&str]) -> Value {
    let words = [&["explain"], args, &["--format", "json"]].concat();
    json(&call(folder, &words))
}

fn n(value: &Value, key: &str) -> u64 {
    value[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key} in {value}"))
}

fn sum<'a>(rows: impl Iterator<Item = &'a Value>) -> u64 {
    rows.map(|v| v.as_u64().unwrap()).sum()
}

#[test]
fn what_is_alive_at_the_peak_adds_up_to_it() {
    let dir = workplace();
    for model in ["model.onnx", "llama.onnx"] {
        std::fs::copy(
            fixture("llama32", "model.onnx"),
            dir.path().join("llama.onnx"),
        )
        .unwrap();
        for policy in [
            &["--policy", "none"][..],
            &["--policy", "full"],
            &["--policy", "selective"],
            &["--budget", "60%", "--effort", "first"],
        ] {
            let all = explain(dir.path(), &[&[model, "--dim", "batch=4"], policy].concat());
            let plan = json(&call(
                dir.path(),
                &[
                    &["plan", model, "--dim", "batch=4", "--format", "json"],
                    policy,
                ]
                .concat(),
            ));
            for (at, peak) in [
                ("at_peak_before", "peak_before_bytes"),
                ("at_peak_after", "peak_after_bytes"),
            ] {
                let expected = n(&plan, peak);
                assert_eq!(n(&all, peak), expected);
                assert_eq!(
                    sum(all[at]["kinds"].as_object().unwrap().values()),
                    expected
                );
                let held = all[at]["largest"].as_array().unwrap().iter();
                assert_eq!(sum(held.map(|h| &h["bytes"])), expected);
            }
            let again = all["values"].as_array().unwrap().iter();
            let again = again.filter(|v| v["fate"] == "recomputed").count();
            assert_eq!(again > 0, n(&plan, "recompute_flops") > 0, "{policy:?}");
        }
    }
}

#[test]
fn every_name_on_screen_is_understood() {
    let dir = workplace();
    let full = ["--dim", "batch=4", "--policy", "full"];
    let ask = |name: &str| explain(dir.path(), &[&["model.onnx", name][..], &full].concat());
    let all = explain(dir.path(), &[&["model.onnx"][..], &full].concat());
    let one = all["values"]
        .as_array()
        .unwrap()
        .iter()
        .find(|v| v["fate"] == "recomputed" && v["module"].is_string() && n(v, "bytes") > 1000)
        .unwrap();
    let text = |key: &str| one[key].as_str().unwrap().to_string();
    assert_eq!(ask(&text("name"))["values"], serde_json::json!([one]));
    for name in [
        text("node"),
        format!("{}/recompute", text("node")),
        text("module"),
        format!("{}*", &text("name")[..3]),
        format!("layer:{}", one["layer"]),
        format!("layer {}", one["layer"]),
    ] {
        let found = ask(&name);
        assert!(found["values"].as_array().unwrap().contains(one), "{name}");
        assert_eq!(found["about"], name.as_str());
    }
    let layer = ask("layer:1");
    assert_eq!(layer["layers"].as_array().unwrap().len(), 1);
    let inside = layer["values"].as_array().unwrap();
    assert!(!inside.is_empty() && inside.iter().all(|v| v["layer"] == 1));
    for (name, says) in [
        ("layer:7", "2 layers, counted from 0"),
        ("input_ids", "resident throughout"),
        ("laier", "nothing in the training step is called `laier`"),
        (&format!("{}x", text("node")), "did you mean"),
    ] {
        let args = [&["explain", "model.onnx", name][..], &full].concat();
        let done = call(dir.path(), &args);
        assert_eq!(code(&done), 2, "{name}");
        assert!(stderr(&done).contains(says), "{}", stderr(&done));
    }
}

/// A kept value recomputed by force, and a recomputed one kept by force: the plan then has the time and the peak that
/// were foretold.
#[test]
fn the_price_of_the_other_choice_is_what_it_costs() {
    let dir = workplace();
    let base = ["model.onnx", "--dim", "batch=4", "--dim", "seq=64"];
    let full = explain(dir.path(), &[&base[..], &["--policy", "full"]].concat());
    let wide =
        full["values"].as_array().unwrap().iter().filter(|v| {
            v["fate"] == "recomputed" && n(v, "bytes") > 10_000 && v["layer"].is_number()
        });
    let mut tried = 0;
    for v in wide {
        let node = v["node"].as_str().unwrap();
        let args = ["--policy", "full", "--save-ops", node];
        let kept = explain(dir.path(), &[&base[..], &args].concat());
        let other = &v["alternative"];
        assert_eq!(other["choice"], "keep");
        // Ops that only served to rebuild it may go too: never a higher peak than foretold.
        assert!(
            n(&kept, "peak_after_bytes") <= n(other, "peak_bytes"),
            "{node}"
        );
        let saved = full["recompute_us"].as_f64().unwrap() - kept["recompute_us"].as_f64().unwrap();
        assert!(
            saved >= other["saved_us"].as_f64().unwrap() - 1e-6,
            "{node}"
        );
        tried += 1;
    }
    assert!(tried >= 6, "{tried}");
    let none = explain(dir.path(), &[&base[..], &["--policy", "none"]].concat());
    let kept = none["values"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|v| v["fate"] == "kept" && v["op"] == "Gelu" && n(v, "bytes") > 10_000);
    let mut tried = 0;
    for v in kept {
        let node = v["node"].as_str().unwrap();
        let again = explain(
            dir.path(),
            &[&base[..], &["--policy", "none", "--recompute", node]].concat(),
        );
        let price = v["alternative"]["us"].as_f64().unwrap();
        assert!(
            (again["recompute_us"].as_f64().unwrap() - price).abs() < 1e-6,
            "{node}"
        );
        tried += 1;
    }
    assert!(tried >= 2, "{tried}");
}

#[test]
fn a_planned_file_is_explained_as_it_is() {
    let dir = workplace();
    let at = ["--dim", "batch=4"];
    for policy in [
        &["--policy", "full"][..],
        &["--budget", "60%", "--effort", "first"],
    ] {
        let write = [
            &["model.onnx", "-o", "t.onnx", "--format", "json"],
            &at[..],
            policy,
        ]
        .concat();
        let made = json(&call(dir.path(), &write));
        let told = explain(dir.path(), &[&["t.onnx"][..], &at].concat());
        assert_eq!(told["peak_after_bytes"], made["peak_after_bytes"]);
        assert_eq!(told["peak_before_bytes"], made["peak_before_bytes"]);
        assert_eq!(told["policy"], made["policy"]);
        let fresh = explain(dir.path(), &[&["model.onnx"][..], &at, policy].concat());
        let fates = |all: &Value| -> Vec<(String, String)> {
            let one = |v: &Value| (v["node"].to_string(), v["fate"].to_string());
            let mut all: Vec<_> = all["values"].as_array().unwrap().iter().map(one).collect();
            all.sort();
            all
        };
        assert_eq!(fates(&told), fates(&fresh));
    }
}

fn value<'a>(all: &'a Value, name: &str) -> &'a Value {
    let mut values = all["values"].as_array().unwrap().iter();
    values.find(|v| v["name"] == name).unwrap()
}

/// An op that runs again for one of its results leaves the others as they are: in the decision, in the table of layers and
/// in the written file.
#[test]
fn a_result_that_is_held_is_kept_whatever_its_node_does() {
    let dir = workplace();
    let plan = ["--dim", "batch=8", "--policy", "submodule"];
    let all = explain(dir.path(), &[&["model.onnx"], &plan[..]].concat());
    let norm = value(&all, "layer_norm");
    assert_eq!((&norm["fate"], &norm["runs"]), (&"kept".into(), &2.into()));
    let reason = norm["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("other layers read it; its node runs again for "),
        "{reason}"
    );
    let statistics = reason.rsplit_once(" for ").unwrap().1.split(", ");
    for name in statistics {
        let v = value(&all, name);
        assert_eq!(
            (&v["fate"], &v["node"]),
            (&"recomputed".into(), &norm["node"])
        );
        assert_eq!(v["reason"], "inside a recomputed norm");
        // To keep them holds their own bytes, and not those of the result that is held anyway.
        assert!(n(&v["alternative"], "bytes") < n(norm, "bytes") / 4, "{v}");
    }
    for layer in all["layers"].as_array().unwrap() {
        for (fate, key) in [("kept", "kept_bytes"), ("recomputed", "recomputed_bytes")] {
            let inside = all["values"].as_array().unwrap().iter();
            let inside = inside.filter(|v| v["layer"] == layer["index"] && v["fate"] == fate);
            assert_eq!(n(layer, key), sum(inside.map(|v| &v["bytes"])));
        }
    }
    // Held throughout: at every step from where it is made to its last reader.
    let again = explain(
        dir.path(),
        &["model.onnx", "--dim", "batch=8", "--policy", "none"],
    );
    assert!(n(norm, "held_steps") > n(value(&again, "layer_norm"), "held_steps") / 2);

    let write = [&["model.onnx", "-o", "t.onnx"], &plan[..]].concat();
    assert_eq!(code(&call(dir.path(), &write)), 0);
    let written = explain(dir.path(), &["t.onnx", "--dim", "batch=8"]);
    for v in all["values"].as_array().unwrap() {
        let same = value(&written, v["name"].as_str().unwrap());
        assert_eq!(
            (&same["fate"], &same["reason"]),
            (&v["fate"], &v["reason"]),
            "{v}"
        );
    }
    let file = std::fs::read(dir.path().join("t.onnx")).unwrap();
    let file = String::from_utf8_lossy(&file);
    assert!(file.contains(
        "kept: other layers read it; its other results are recomputed: inside a recomputed norm"
    ));
}

#[test]
fn a_budgeted_plan_names_what_the_user_settled() {
    let dir = workplace();
    let base = [
        "model.onnx",
        "--dim",
        "batch=8",
        "--budget",
        "60%",
        "--effort",
        "first",
    ];
    let with = |options: &[&'static str]| [&base[..], options].concat();
    let ops = with(&["--save-ops", "Gelu", "--recompute-ops", "aten.addmm"]);
    let all = explain(dir.path(), &ops);
    let mut named = 0;
    for v in all["values"].as_array().unwrap() {
        let by = match (v["op"].as_str().unwrap(), v["fate"].as_str().unwrap()) {
            ("Gelu", "kept") => "--save-ops Gelu",
            ("Gemm", "recomputed") => "--recompute-ops aten.addmm",
            _ => continue,
        };
        assert_eq!(v["reason"], by, "{v}");
        named += 1;
    }
    assert!(named >= 4, "{named}");
    let wide = [
        "model.onnx",
        "--dim",
        "batch=8",
        "--budget",
        "95%",
        "--effort",
        "first",
    ];
    let outside = explain(dir.path(), &[&wide[..], &["--first", "1"]].concat());
    let gelu = outside["values"].as_array().unwrap().iter();
    let mut gelu = gelu.filter(|v| v["op"] == "Gelu" && v["layer"] == 1);
    assert_eq!(gelu.next().unwrap()["reason"], "outside what was asked for");

    let human = |args: &[&str]| {
        let done = call(dir.path(), &[&["explain"], args].concat());
        String::from_utf8(done.stdout).unwrap()
    };
    let text = human(&ops);
    let first = text.lines().next().unwrap();
    assert!(
        first.starts_with("budget 3.") && first.contains(" MiB --save-ops Gelu"),
        "{first}"
    );
    // The same from the file that is written.
    let write = [&ops[..], &["-o", "t.onnx"]].concat();
    assert_eq!(code(&call(dir.path(), &write)), 0);
    let written = explain(dir.path(), &["t.onnx", "--dim", "batch=8"]);
    let gelu = all["values"].as_array().unwrap().iter();
    for v in gelu.filter(|v| v["op"] == "Gelu" && v["fate"] == "kept") {
        assert_eq!(
            value(&written, v["name"].as_str().unwrap())["reason"],
            v["reason"]
        );
    }
}

/// A price of several ops says so: it is not that of the op beside it.
#[test]
fn a_price_of_several_ops_says_how_many() {
    let dir = workplace();
    let base = [
        "model.onnx",
        "--dim",
        "batch=8",
        "--effort",
        "first",
        "--budget",
    ];
    let mut chains = 0;
    for budget in ["90%", "80%", "70%", "60%"] {
        let all = explain(dir.path(), &[&base[..], &[budget]].concat());
        for v in all["values"].as_array().unwrap() {
            let reason = v["reason"].as_str().unwrap();
            let (true, Some(ops)) = (reason.contains("dearer"), v["alternative"]["ops"].as_u64())
            else {
                continue;
            };
            let others = match ops {
                1 => "µs a MiB)".into(),
                2 => "with 1 other op)".into(),
                n => format!("with {} other ops)", n - 1),
            };
            assert!(reason.contains(&others), "{reason}");
            chains += usize::from(ops > 1);
        }
    }
    assert!(chains > 0);
}

#[test]
fn a_stored_plan_says_what_it_can() {
    let dir = workplace();
    let plan = [
        "plan",
        "model.onnx",
        "--policy",
        "full",
        "--plan-out",
        "p.json",
    ];
    assert_eq!(code(&call(dir.path(), &plan)), 0);
    let done = call(dir.path(), &["explain", "p.json"]);
    let text = String::from_utf8(done.stdout.clone()).unwrap();
    assert_eq!(code(&done), 0);
    assert!(text.contains("inside a recomputed layer"), "{text}");
    let none = call(dir.path(), &["explain", "p.json", "nothing"]);
    assert_eq!(code(&none), 2);
}

#[test]
fn what_waits_outside_is_explained() {
    let dir = workplace();
    let wish = ["--dim", "batch=4", "--policy", "none", "--offload", "cpu"];
    let planned = explain(dir.path(), &[&["model.onnx"], &wish[..]].concat());
    let outside = |all: &Value| {
        let mut rows: Vec<(String, u64, u64)> = Vec::new();
        for v in all["values"].as_array().unwrap() {
            if v["fate"] == "offloaded" {
                rows.push((
                    v["name"].as_str().unwrap().into(),
                    n(v, "bytes"),
                    n(v, "moves"),
                ));
            }
        }
        rows
    };
    let rows = outside(&planned);
    assert!(!rows.is_empty());
    assert!(
        rows.iter()
            .all(|(_, bytes, moves)| *bytes > 0 && *moves >= 2)
    );
    let layers = planned["layers"].as_array().unwrap().iter();
    let in_layers = sum(layers.map(|l| &l["offloaded_bytes"]));
    let all: u64 = rows.iter().map(|r| r.1).sum();
    assert!(0 < in_layers && in_layers <= all);

    let write = [&["model.onnx", "-o", "off.onnx"], &wish[..]].concat();
    assert_eq!(code(&call(dir.path(), &write)), 0);
    let written = explain(dir.path(), &["off.onnx", "--dim", "batch=4"]);
    assert_eq!(outside(&written), rows);
    for key in ["peak_before_bytes", "peak_after_bytes", "static_bytes"] {
        assert_eq!(n(&written, key), n(&planned, key), "{key}");
    }
    let shown = [
        "off.html",
        "off.trace.json",
        "off.pickle",
        "off.overlay.json",
    ];
    for file in shown {
        let done = call(
            dir.path(),
            &["explain", "off.onnx", "--dim", "batch=4", "--report", file],
        );
        assert_eq!(code(&done), 0, "{}", stderr(&done));
    }
    let text =
        String::from_utf8(call(dir.path(), &["explain", "off.onnx", "--dim", "batch=4"]).stdout);
    assert!(text.unwrap().contains("moved out of the device's memory"));
}
