//! `calibrate` and `profile` from outside: what they measure is what plans are then priced with.
use crate::support::command;

use command::{call, code, json, stderr, workplace};
use serde_json::Value;
use std::path::Path;

fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn file(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_plan_costs_what_was_measured() {
    let dir = workplace();
    let run = |line: &str| json(&call(dir.path(), &words(line)));
    run("profile model.onnx --dim batch=2 --dim seq=16 --runs 3 -o t.json --format json");
    let times = file(&dir.path().join("t.json"));
    assert_eq!(
        times["dims"],
        serde_json::json!({"batch": 2, "seq": 16}),
        "sizes travel with the times"
    );
    let plan = run(
        "plan model.onnx --dim batch=2 --dim seq=16 --policy full --profile t.json --plan-out p.json --format json",
    );
    assert_eq!(plan["warnings"], serde_json::json!([]));
    let nodes = times["nodes_us"].as_object().unwrap();
    let all: f64 = nodes.values().map(|t| t.as_f64().unwrap()).sum();
    let before = plan["cost_before"].as_f64().unwrap();
    assert!((before / all - 1.0).abs() < 1e-9, "{before} of {all}");
    // Every copy costs what its original was measured to take.
    let plan_file = file(&dir.path().join("p.json"));
    let extra = plan["cost_after"].as_f64().unwrap() - before;
    assert!(extra > 0.0 && plan_file["schedule"].as_array().unwrap().len() > nodes.len());
    let modelled = run("plan model.onnx --dim batch=2 --dim seq=16 --policy full --format json");
    assert_ne!(modelled["cost_before"], plan["cost_before"]);
    assert_eq!(modelled["recompute_flops"], plan["recompute_flops"]);
}

#[test]
fn a_planned_file_is_measured_by_the_names_of_what_it_copies() {
    let dir = workplace();
    let run = |line: &str| json(&call(dir.path(), &words(line)));
    let size = "--dim batch=1 --dim seq=8";
    run(&format!(
        "model.onnx -o full.onnx --policy full {size} --format json"
    ));
    let plain = run(&format!("profile model.onnx {size} --runs 1 --format json"));
    let planned = run(&format!(
        "profile full.onnx {size} --runs 1 -o t.json --format json"
    ));
    let names = |v: &Value| command::keys(&v["nodes_us"]).join(" ");
    assert_eq!(names(&plain), names(&planned));
    run(&format!(
        "plan model.onnx {size} --policy selective --profile t.json --format json"
    ));
}

#[test]
fn times_of_other_sizes_or_of_something_else_are_refused() {
    let dir = workplace();
    let run = |line: &str| call(dir.path(), &words(line));
    let made = run("profile model.onnx --dim batch=2 --dim seq=16 --runs 1 -o t.json");
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let human = String::from_utf8(made.stdout).unwrap();
    assert!(
        human.contains("batch=2, seq=16") && human.contains("wrote t.json"),
        "{human}"
    );
    for (line, says) in [
        (
            "plan model.onnx --dim batch=4 --dim seq=16 --profile t.json",
            "found: batch=2, seq=16",
        ),
        (
            "plan model.onnx --profile t.json",
            "--dim batch=1 --dim seq=128",
        ),
        (
            "model.onnx -o x.onnx --dim batch=2 --profile t.json",
            "other sizes",
        ),
        (
            "frontier model.onnx --dim batch=2 --profile t.json",
            "other sizes",
        ),
        (
            "plan graph.json.gz --profile t.json",
            "names none of the graph's nodes",
        ),
        ("plan model.onnx --profile model.onnx", "cannot read"),
    ] {
        let done = run(line);
        assert_eq!(code(&done), 2, "{line}: {}", stderr(&done));
        assert!(stderr(&done).contains(says), "{line}: {}", stderr(&done));
    }
    assert!(!dir.path().join("x.onnx").exists());
}

#[test]
fn a_calibrated_device_prices_plans() {
    let dir = workplace();
    let run = |line: &str| json(&call(dir.path(), &words(line)));
    run(
        "calibrate -o d.json --name bench --threads 1 --max-rows 64 --vector-bytes 65536 --runs 1 --format json",
    );
    let plan =
        run("plan model.onnx --dim seq=8 --policy full --device-profile d.json --format json");
    assert_eq!(plan["device"], "bench");
    let refused = call(dir.path(), &words("calibrate -o d.json --runs 0"));
    assert_eq!(code(&refused), 2);
    let nowhere = call(
        dir.path(),
        &words("calibrate -o none/d.json --max-rows 8 --vector-bytes 64 --runs 1"),
    );
    assert!(matches!(code(&nowhere), 2 | 5), "{}", stderr(&nowhere));
}

#[test]
fn the_link_between_ranks_is_measured_and_prices_gathers() {
    let dir = workplace();
    let run = |line: &str| json(&call(dir.path(), &words(line)));
    let sizes = "--threads 1 --max-rows 64 --vector-bytes 1048576 --runs 3 --format json";
    let alone = run(&format!("calibrate -o alone.json {sizes}"));
    let device = run(&format!("calibrate -o d.json --ranks 2 {sizes}"));
    let [speed, latency] =
        ["link_gigabytes_per_s", "link_us"].map(|field| device[field].as_f64().unwrap());
    assert!(speed > 0.0 && latency > 0.0, "{speed} {latency}");
    assert_ne!(device["link_us"], alone["link_us"]);
    let sources = device["sources"].as_array().unwrap();
    for op in ["AllGather", "ReduceScatter", "AllReduce"] {
        let is_told = |s: &serde_json::Value| s.as_str().unwrap().contains(&format!("{op} over 2"));
        assert!(sources.iter().any(is_told), "{op}: {sources:?}");
    }
    // A plan's exchanges take the time of that link: latency for each, and the bytes.
    let plan = run(
        "plan model.onnx --loss causal-lm --dim batch=2 --dim seq=8 --policy full --mesh dp=2 --optimizer adamw \
         --fuse-optimizer --shard params --device-profile d.json --format json",
    );
    let (bytes, cost) = (plan["link_bytes"].as_f64(), plan["link_cost"].as_f64());
    let of_bytes = bytes.unwrap() / (speed * 1e3);
    let rest = (cost.unwrap() - of_bytes) / latency;
    assert!(
        of_bytes > 0.0 && rest > 1.0 && (rest - rest.round()).abs() < 1e-3,
        "{rest}"
    );
}

#[test]
fn a_plan_is_measured_in_turns_with_the_unplanned_step() {
    let dir = workplace();
    let run = |line: &str| call(dir.path(), &words(line));
    let size = "--dim batch=2 --dim seq=16";
    let planned = json(&run(&format!(
        "model.onnx -o t.onnx --policy full {size} --format json"
    )));
    // The model is differentiated without a plan; or an unplanned file is taken as it is.
    assert_eq!(code(&run("model.onnx -o u.onnx --policy none")), 0);
    for a in ["model.onnx", "u.onnx"] {
        let found = json(&run(&format!(
            "overhead {a} t.onnx {size} --seconds 0 --threads 1 --format json"
        )));
        assert_eq!(found["pairs"], 6);
        assert_eq!(found["dims"], serde_json::json!({"batch": 2, "seq": 16}));
        assert_eq!(found["a"]["peak_bytes"], planned["peak_before_bytes"]);
        assert_eq!(found["b"]["peak_bytes"], planned["peak_after_bytes"]);
        for kind in ["time", "cpu"] {
            let at = |name: &str| found[kind][name].as_f64().unwrap();
            assert!(at("low_pct") <= at("pct") && at("pct") <= at("high_pct"));
        }
    }
    let human = run(&format!("overhead model.onnx t.onnx {size} --seconds 0"));
    let human = String::from_utf8(human.stdout).unwrap();
    assert!(
        human.contains("of 6 pairs of steps at batch=2, seq=16"),
        "{human}"
    );
    let swapped = run("overhead t.onnx model.onnx --seconds 0");
    assert_eq!(code(&swapped), 2, "{}", stderr(&swapped));
}
