//! The published schemas of what we print, write and read: real outputs satisfy them, and what does not is told.

use crate::support::command;

use command::{call, code, fixture, json, stderr, workplace};
use serde_json::{Value, json};
use std::path::Path;

fn schema(name: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/report/schema");
    serde_json::from_slice(&std::fs::read(folder.join(name)).unwrap()).unwrap()
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        _ => panic!("the checker does not know type {name}"),
    }
}

/// The part of JSON Schema 2020-12 that our schemas use; anything else in a schema is refused.
fn check(value: &Value, schema: &Value, at: &str) -> Result<(), String> {
    for (key, rule) in schema.as_object().unwrap() {
        let holds = match key.as_str() {
            "$schema" | "title" | "description" | "properties" => true,
            "type" => match rule {
                Value::String(name) => is_type(value, name),
                names => names
                    .as_array()
                    .unwrap()
                    .iter()
                    .any(|n| is_type(value, n.as_str().unwrap())),
            },
            "enum" => rule.as_array().unwrap().contains(value),
            "minimum" => value.as_f64().is_none_or(|x| x >= rule.as_f64().unwrap()),
            "maximum" => value.as_f64().is_none_or(|x| x <= rule.as_f64().unwrap()),
            "exclusiveMinimum" => value.as_f64().is_none_or(|x| x > rule.as_f64().unwrap()),
            "minItems" => {
                let least = rule.as_u64().unwrap() as usize;
                value.as_array().is_none_or(|list| list.len() >= least)
            }
            "required" => {
                let names = rule.as_array().unwrap().iter();
                value
                    .as_object()
                    .is_none_or(|o| names.clone().all(|n| o.contains_key(n.as_str().unwrap())))
            }
            "items" => {
                for (i, item) in value.as_array().into_iter().flatten().enumerate() {
                    check(item, rule, &format!("{at}[{i}]"))?;
                }
                true
            }
            "additionalProperties" => true,
            _ => panic!("the checker does not know `{key}`"),
        };
        if !holds {
            return Err(format!("{at}: {value} is not as `{key}`: {rule} wants it"));
        }
    }
    for (name, item) in value.as_object().into_iter().flatten() {
        let at = format!("{at}.{name}");
        match (
            schema["properties"].get(name),
            &schema["additionalProperties"],
        ) {
            (Some(rule), _) => check(item, rule, &at)?,
            (None, Value::Bool(false)) => return Err(format!("{at} is not in the schema")),
            (None, rule @ Value::Object(_)) => check(item, rule, &at)?,
            (None, _) => {}
        }
    }
    Ok(())
}

fn satisfies(value: &Value, name: &str) {
    if let Err(e) = check(value, &schema(name), name) {
        panic!("{e}");
    }
}

fn file(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn what_is_printed_and_written_is_as_published() {
    let dir = workplace();
    let run = |args: &str| json(&call(dir.path(), &args.split(' ').collect::<Vec<_>>()));
    let plan = run(
        "plan graph.json.gz --budget 60% --effort first --compare --plan-out s.json --format json",
    );
    satisfies(&plan, "plan-report.json");
    let model = run(
        "plan model.onnx --dim seq=32 --budget 70% --effort first --plan-out p.json --format json",
    );
    satisfies(&model, "plan-report.json");
    let policy = run("plan model.onnx --dim seq=32 --policy full --plan-out q.json --format json");
    satisfies(&policy, "plan-report.json");
    let most = run(
        "plan model.onnx --dim seq=8 --maximize batch --budget 200kB --effort first --format json",
    );
    assert!(most.get("maximized").is_some());
    satisfies(&most, "plan-report.json");
    for name in ["s.json", "p.json", "q.json"] {
        satisfies(&file(&dir.path().join(name)), "plan.json");
    }
    satisfies(&run("diff p.json q.json --format json"), "difference.json");
    let converted = run("convert model.onnx --to safetensors -o w.safetensors --format json");
    satisfies(&converted, "conversion.json");
    for args in [
        "explain model.onnx --dim seq=32 --budget 70% --effort first --format json",
        "explain model.onnx layer:1 --dim seq=32 --policy selective --format json",
        "explain graph.json.gz --budget 60% --effort first --format json",
    ] {
        satisfies(&run(args), "explanation.json");
    }
    satisfies(&run("explain p.json --format json"), "plan.json");
    let curve = run("frontier graph.json.gz --budgets 1kB,70%,100% --effort first --format json");
    assert!(curve["points"][0]["peak_bytes"].is_null());
    satisfies(&curve, "frontier.json");
    satisfies(
        &run("frontier model.onnx --dim seq=32 --points 2 --effort first --ablation --format json"),
        "frontier.json",
    );
    let cut = "--loss causal-lm --drop-output logits --tile-loss auto --budget 40% --effort first --dim batch=32";
    let parts = run(&format!("plan model.onnx --dim seq=32 {cut} --format json"));
    satisfies(&parts, "plan-report.json");
    assert!(!parts["parts_tried"].as_array().unwrap().is_empty());
    let explained = run(&format!(
        "explain model.onnx --dim seq=32 {cut} --format json"
    ));
    satisfies(&explained, "explanation.json");
    for more in ["--budget 70% --effort first", "--policy full", cut] {
        let report = run(&format!(
            "model.onnx -o t.onnx --dim seq=32 {more} --format json"
        ));
        satisfies(&report, "optimize-report.json");
    }
}

#[test]
fn what_is_looked_at_is_as_published() {
    let dir = workplace();
    for model in ["gpt2", "gemma3n", "bert", "llama32_bf16", "gpt2_loss"] {
        let path = fixture(model, "model.onnx").display().to_string();
        let found = json(&call(dir.path(), &["inspect", &path, "--format", "json"]));
        satisfies(&found, "inspection.json");
        assert!(!found["blocks"].as_array().unwrap().is_empty(), "{model}");
    }
    let made = "model.onnx -o t.onnx --policy full --format json";
    json(&call(dir.path(), &made.split(' ').collect::<Vec<_>>()));
    let planned = json(&call(
        dir.path(),
        &["inspect", "t.onnx", "--format", "json"],
    ));
    satisfies(&planned, "inspection.json");
    assert_eq!(planned["graph"], "planned");
    let found = json(&call(dir.path(), &["doctor", "--format", "json"]));
    satisfies(&found, "doctor.json");
}

#[cfg(feature = "torch")]
#[test]
fn what_is_run_is_as_published() {
    let dir = workplace();
    let run = |args: &str| call(dir.path(), &args.split(' ').collect::<Vec<_>>());
    json(&run("model.onnx -o t.onnx --policy full --format json"));
    let ran = json(&run("run t.onnx --seed 1 --dim seq=8 --format json"));
    satisfies(&ran, "run-report.json");
    std::fs::write(dir.path().join("tokens.bin"), [0; 256]).unwrap();
    let trained = json(&run(
        "train model.onnx --loss causal-lm --data tokens.bin --dim seq=8 --policy full --steps 2 --out tuned --format json",
    ));
    satisfies(&trained, "train-report.json");
    let proof = json(&run(
        "verify model.onnx t.onnx --dim seq=8 --certificate c.json --format json",
    ));
    satisfies(&proof, "certificate.json");
    assert_eq!(file(&dir.path().join("c.json")), proof);
    let more = json(&run(
        "overhead model.onnx t.onnx --dim seq=8 --seconds 0 --format json",
    ));
    satisfies(&more, "overhead.json");
    // One that tells a difference, and one of outputs that are of other types.
    for (name, body) in [
        ("a", "%y = Sin %x"),
        ("b", "%y = Cos %x"),
        ("c", "%y = Cast %x {to=f16}"),
    ] {
        let text = format!("graph @g imported (%x: f32[4]) -> (%y) {{\n  {body}\n}}\n");
        std::fs::write(dir.path().join(format!("{name}.ckir")), text).unwrap();
    }
    for other in ["b", "c"] {
        let done = run(&format!("verify a.ckir {other}.ckir --format json"));
        assert_eq!(code(&done), 4, "{}", stderr(&done));
        let proof: Value = serde_json::from_slice(&done.stdout).unwrap();
        satisfies(&proof, "certificate.json");
        assert_eq!(proof["equal"], false);
    }
}

#[test]
fn a_refusal_is_as_published() {
    let dir = workplace();
    let refused = |args: &str| {
        let done = call(dir.path(), &args.split(' ').collect::<Vec<_>>());
        assert_eq!(code(&done), 3, "{args}: {}", stderr(&done));
        let value: Value = serde_json::from_slice(&done.stdout).expect("one JSON object");
        satisfies(&value, "refusal.json");
        value
    };
    for (args, on) in [
        (
            "plan graph.json.gz --budget 100kB --format json",
            "peak above static",
        ),
        (
            "plan model.onnx --dim seq=16 --budget 10kB --format json",
            "peak",
        ),
        (
            "model.onnx -o t.onnx --dim seq=16 --budget 10kB --format json",
            "peak",
        ),
    ] {
        let value = refused(args);
        assert_eq!(value["budget_on"], on);
        let n = |key: &str| value[key].as_u64().unwrap();
        assert!(n("budget_bytes") <= 100_000 && n("smallest_feasible_bytes") > n("budget_bytes"));
        let held: u64 = value["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t["bytes"].as_u64().unwrap())
            .sum();
        assert!(held > 0, "{value}");
        let fits = format!(
            "{} --effort first",
            args.replace("100kB", &n("smallest_feasible_bytes").to_string())
                .replace("10kB", &n("smallest_feasible_bytes").to_string())
        );
        json(&call(dir.path(), &fits.split(' ').collect::<Vec<_>>()));
    }
    let none =
        "plan model.onnx --dim seq=8 --maximize batch --budget 10kB --effort first --format json";
    refused(none);
}

/// What we refuse and what the option parser refuses, from the command line and from a file.
#[test]
fn every_error_is_one_object() {
    let dir = workplace();
    let text = "policy = \"ful\"\nformat = \"json\"\n";
    std::fs::write(dir.path().join("c.toml"), text).unwrap();
    for (args, error, says) in [
        ("plan model.onnx --nope --format json", "option", "--nope"),
        (
            "plan model.onnx --format=json --budget lots",
            "option",
            "lots",
        ),
        ("plan --format json", "option", "required"),
        (
            "plan model.onnx --save-ops Gelo --format json",
            "selection",
            "Gelo",
        ),
        ("paln model.onnx --format json", "command", "paln"),
        (
            "run t.onnx --no-arena --format json",
            "option",
            "--no-arena",
        ),
        (
            "plan model.onnx --config none.json --format json",
            "file",
            "read",
        ),
        ("plan model.onnx --config c.toml", "config", "ful"),
        (
            "inspect graph.json.gz --format json",
            "format",
            "not a model",
        ),
    ] {
        let done = call(dir.path(), &args.split(' ').collect::<Vec<_>>());
        assert_eq!(code(&done), 2, "{args}: {}", stderr(&done));
        let value: Value = serde_json::from_slice(&done.stdout).expect("one JSON object");
        satisfies(&value, "refusal.json");
        assert_eq!(value["error"], error, "{args}");
        let message = value["message"].as_str().unwrap();
        assert!(message.contains(says), "{args}: {message}");
        assert!(!stderr(&done).is_empty());
    }
    let human = call(dir.path(), &["plan", "model.onnx", "--nope"]);
    assert!(human.stdout.is_empty() && code(&human) == 2);
}

#[test]
fn what_is_read_is_as_published() {
    let packed = std::fs::File::open(fixture("graphs", "layers.json.gz")).unwrap();
    let graph: Value = serde_json::from_reader(flate2::read::GzDecoder::new(packed)).unwrap();
    satisfies(&graph, "cost-graph.json");
    let devices = Path::new(env!("CARGO_MANIFEST_DIR")).join("passes/analysis/devices");
    for entry in std::fs::read_dir(devices).unwrap() {
        satisfies(&file(&entry.unwrap().path()), "device.json");
    }
    let dir = workplace();
    let device =
        json!({"name": "mine", "teraflops": {"f32": 1.5}, "gigabytes_per_s": 20, "launch_us": 0});
    satisfies(&device, "device.json");
    std::fs::write(dir.path().join("d.json"), device.to_string()).unwrap();
    let args = [
        "plan",
        "model.onnx",
        "--policy",
        "none",
        "--device-profile",
        "d.json",
    ];
    let done = call(dir.path(), &args);
    assert_eq!(code(&done), 0, "{}", stderr(&done));
}

#[cfg(feature = "torch")]
#[test]
fn what_is_measured_is_as_published() {
    let dir = workplace();
    let run = |args: &str| json(&call(dir.path(), &args.split(' ').collect::<Vec<_>>()));
    let device =
        run("calibrate -o d.json --max-rows 64 --vector-bytes 4096 --runs 1 --format json");
    satisfies(&device, "device.json");
    assert_eq!(file(&dir.path().join("d.json")), device);
    let times = run("profile model.onnx --dim seq=8 --runs 1 -o t.json --format json");
    satisfies(&times, "profile.json");
    assert_eq!(file(&dir.path().join("t.json")), times);
}

#[test]
fn the_checker_tells_what_is_wrong() {
    let plan = schema("plan-report.json");
    for (field, wrong) in [
        ("budget_on", json!("heap")),
        ("steps", json!(-1)),
        ("steps", json!(1.5)),
        ("gap_pct", json!("0")),
        ("warnings", json!([3])),
        (
            "compare_left_out",
            json!({"policies": [], "because": "of this"}),
        ),
        ("new", json!(1)),
    ] {
        let dir = workplace();
        let good = json(&call(
            dir.path(),
            &[
                "plan",
                "graph.json.gz",
                "--policy",
                "none",
                "--format",
                "json",
            ],
        ));
        check(&good, &plan, "").unwrap();
        let mut bad = good.clone();
        bad[field] = wrong;
        assert!(check(&bad, &plan, "").is_err(), "{field}");
        let mut less = good;
        less.as_object_mut().unwrap().remove("steps");
        assert!(check(&less, &plan, "").is_err());
    }
}
