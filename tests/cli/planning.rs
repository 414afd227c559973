//! Plans from the command line: budgets, cost graphs and the judge's numbers, stored plans, the largest size that fits.

use crate::support::command;

use command::{call, code, fixture, has_keys, json, stderr, workplace};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The rules of the cost-graph format, word by word: every instance of every value on a list.
fn judge(graph: &Value, schedule: &[usize]) -> (u64, f64, u64) {
    let size = |j: usize| graph["values"][j]["bytes"].as_u64().unwrap();
    let is = |j: usize, kind: &str| graph["values"][j]["kind"] == kind;
    let list = |v: &Value| -> Vec<usize> {
        let indices = v.as_array().unwrap().iter();
        indices.map(|j| j.as_u64().unwrap() as usize).collect()
    };
    let mut current: BTreeMap<usize, usize> = BTreeMap::new();
    let mut instances: Vec<(u64, i64, i64)> = Vec::new();
    for j in 0..graph["values"].as_array().unwrap().len() {
        if is(j, "ph") {
            current.insert(j, instances.len());
            instances.push((size(j), 0, -1));
        }
    }
    let (mut cost, mut flops) = (0.0, 0);
    for (t, o) in schedule.iter().enumerate() {
        let op = &graph["ops"][*o];
        for j in list(&op["ins"]) {
            if !is(j, "static") {
                instances[current[&j]].2 = t as i64;
            }
        }
        for j in list(&op["outs"]) {
            current.insert(j, instances.len());
            instances.push((size(j), t as i64, t as i64));
        }
        cost += op["cost"].as_f64().unwrap();
        flops += op["flops"].as_u64().unwrap();
    }
    for j in list(&graph["outputs"]) {
        if !is(j, "static") {
            instances[current[&j]].2 = schedule.len() as i64;
        }
    }
    let live = |t: i64| -> u64 {
        let alive = instances.iter().filter(|i| i.1 <= t && t <= i.2);
        alive.map(|i| i.0).sum()
    };
    let peak = (0..schedule.len() as i64).map(live).max().unwrap_or(0);
    (peak, cost, flops)
}

fn layers() -> Value {
    let file = std::fs::File::open(fixture("graphs", "layers.json.gz")).unwrap();
    serde_json::from_reader(flate2::read::GzDecoder::new(file)).unwrap()
}

fn close(a: &Value, b: f64) -> bool {
    (a.as_f64().unwrap() - b).abs() <= 1e-9 * b.abs().max(1.0)
}

#[test]
fn a_cost_graph_that_numbers_its_layers_is_planned_and_shown_by_layer() {
    let dir = workplace();
    let mut graph = layers();
    let path = dir.path().join("numbered.json");
    let plan = |graph: &Value| {
        std::fs::write(&path, graph.to_string()).unwrap();
        let words = ["--policy", "full", "--report", "page.html"];
        let words = [
            &["plan", "numbered.json"],
            &words[..],
            &["--format", "json"],
        ]
        .concat();
        call(dir.path(), &words)
    };
    assert_eq!(code(&plan(&graph)), 2);
    let ops = graph["ops"].as_array_mut().unwrap();
    let forward = ops.iter_mut().filter(|op| op["phase"] == "fwd");
    for (i, op) in forward.enumerate() {
        // Numbers may have gaps.
        op["layer"] = json!(7 * (i / 20));
    }
    let report = json(&plan(&graph));
    assert!(report["recompute_flops"].as_u64().unwrap() > 0);
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(!page.contains("of 0 layers"));
}

#[test]
fn plans_of_a_cost_graph_have_the_judges_numbers() {
    let dir = workplace();
    let graph = layers();
    let ops = graph["ops"].as_array().unwrap().len();
    let (unplanned, base_cost, base_flops) = judge(&graph, &(0..ops).collect::<Vec<_>>());
    let mut overheads = Vec::new();
    for (budget, objective) in [
        ("100%", "cost"),
        ("80%", "cost"),
        ("60%", "cost"),
        ("60%", "flops"),
        ("70000000", "cost"),
        ("67.2MB", "flops"),
    ] {
        let args = [
            "plan",
            "graph.json.gz",
            "--budget",
            budget,
            "--objective",
            objective,
            "--effort",
            "first",
            "--plan-out",
            "s.json",
            "--format",
            "json",
        ];
        let report = json(&call(dir.path(), &args));
        let stored: Value =
            serde_json::from_slice(&std::fs::read(dir.path().join("s.json")).unwrap()).unwrap();
        let schedule: Vec<usize> = serde_json::from_value(stored["schedule"].clone()).unwrap();
        let (peak, cost, flops) = judge(&graph, &schedule);
        assert_eq!(report["peak_above_static_after_bytes"], peak, "{budget}");
        assert_eq!(report["peak_above_static_before_bytes"], unplanned);
        assert!(peak <= report["budget_bytes"].as_u64().unwrap(), "{budget}");
        assert!(close(&report["cost_after"], cost) && close(&report["cost_before"], base_cost));
        assert_eq!(report["recompute_flops"], flops - base_flops);
        assert_eq!(report["steps"], schedule.len());
        let overhead = match objective {
            "cost" => 100.0 * (cost - base_cost) / base_cost,
            _ => 100.0 * (flops - base_flops) as f64 / base_flops as f64,
        };
        assert!(close(&report["overhead_pct"], overhead), "{budget}");
        let n = |key: &str| report[key].as_f64().unwrap();
        assert!(
            (n("overhead_pct") - n("lower_bound_pct") - n("gap_pct")).abs() < 1e-6,
            "{budget}"
        );
        assert!(n("gap_pct") >= 0.0);
        if objective == "cost" {
            overheads.push(overhead);
        }
        // A stored plan is judged to the same numbers, and so is its bare schedule.
        std::fs::write(
            dir.path().join("bare.json"),
            json!({"schedule": schedule}).to_string(),
        )
        .unwrap();
        for file in ["s.json", "bare.json"] {
            let again = [
                "plan",
                "graph.json.gz",
                "--plan-in",
                file,
                "--format",
                "json",
            ];
            let again = json(&call(dir.path(), &again));
            for key in [
                "peak_after_bytes",
                "cost_after",
                "recompute_flops",
                "segments",
                "steps",
            ] {
                assert_eq!(again[key], report[key], "{key}");
            }
            assert!(
                again["gap_pct"].is_null(),
                "nothing is proven of a plan that was read"
            );
        }
    }
    assert!(
        overheads.is_sorted() && overheads[0] == 0.0 && overheads[3] > 0.0,
        "{overheads:?}"
    );
}

#[test]
fn what_does_not_fit_is_exit_3_and_says_what_would() {
    let dir = workplace();
    for source in ["graph.json.gz", "model.onnx"] {
        let done = call(
            dir.path(),
            &["plan", source, "--budget", "100kB", "--plan-out", "s.json"],
        );
        assert_eq!(code(&done), 3, "{}", stderr(&done));
        assert!(done.stdout.is_empty() && !dir.path().join("s.json").exists());
        let text = stderr(&done);
        let smallest = text.split("--budget ").nth(1).unwrap().trim().to_string();
        assert!(
            text.contains("bytes: result") && text.contains(&smallest),
            "{text}"
        );
        let args = [
            "plan", source, "--budget", &smallest, "--effort", "first", "--format", "json",
        ];
        let report = json(&call(dir.path(), &args));
        assert_eq!(report["budget_bytes"].to_string(), smallest);
    }
    let done = call(
        dir.path(),
        &["model.onnx", "-o", "t.onnx", "--budget", "100kB"],
    );
    assert_eq!(
        (code(&done), dir.path().join("t.onnx").exists()),
        (3, false)
    );
}

#[test]
fn a_budget_is_kept_by_the_written_graph_and_a_plan_can_be_replayed() {
    let dir = workplace();
    let model = [
        "--loss",
        "causal-lm",
        "--dim",
        "batch=4",
        "--effort",
        "first",
        "--format",
        "json",
    ];
    let run = |more: &[&str]| {
        json(&call(
            dir.path(),
            &[&["model.onnx"], more, &model[..]].concat(),
        ))
    };
    let report = run(&["-o", "a.onnx", "--budget", "55%", "--plan-out", "plan.json"]);
    has_keys(
        &report,
        &[
            "policy",
            "gap_pct",
            "lower_bound_pct",
            "bound_class",
            "plan_seconds",
            "kv_sharing",
        ],
    );
    assert_eq!(
        (&report["policy"], &report["objective"]),
        (&json!("budget"), &json!("cost"))
    );
    let n = |report: &Value, key: &str| report[key].as_u64().unwrap();
    let above = |key: &str| n(&report, key) - n(&report, "static_bytes");
    assert!(n(&report, "peak_after_bytes") <= n(&report, "budget_bytes"));
    assert_eq!(
        above("budget_bytes"),
        (above("peak_before_bytes") as f64 * 0.55) as u64
    );
    assert!(
        report["smallest_feasible_bytes"].is_null(),
        "the quickest plan does without"
    );
    let graph = [
        "plan",
        "graph.json.gz",
        "--budget",
        "70%",
        "--format",
        "json",
    ];
    let whole = json(&call(dir.path(), &graph));
    assert!(n(&whole, "smallest_feasible_bytes") <= n(&whole, "peak_after_bytes"));
    let replayed = run(&["-o", "b.onnx", "--plan-in", "plan.json"]);
    assert_eq!(
        n(&replayed, "peak_after_bytes"),
        n(&report, "peak_after_bytes")
    );
    let bytes = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    assert!(
        bytes("a.onnx") == bytes("b.onnx"),
        "the replayed plan writes another graph"
    );
    // Without a word about plans it is --budget auto: 60 % where no device is known, else what the device has.
    let auto = run(&["-o", "c.onnx"]);
    assert_eq!(
        auto["budget_bytes"],
        run(&["-o", "c.onnx", "--budget", "60%"])["budget_bytes"]
    );
    let device = run(&["-o", "c.onnx", "--device-profile", "L4"]);
    assert_eq!(device["budget_bytes"], 24_000_000_000u64 - (1 << 30));
    assert_eq!(device["saved_bytes"], 0);
    assert_eq!(
        n(&device, "static_bytes") % 512,
        0,
        "blocks of that device are multiples of 512 bytes"
    );
    // An edited plan is judged again, and one for another graph is refused.
    let mut plan: Value = serde_json::from_slice(&bytes("plan.json")).unwrap();
    let schedule = plan["schedule"].as_array().unwrap().clone();
    plan["schedule"] = schedule[1..].into();
    let refused = |plan: &Value, says: &str| {
        std::fs::write(dir.path().join("edited.json"), plan.to_string()).unwrap();
        let done = call(
            dir.path(),
            &[
                "plan",
                "model.onnx",
                "--loss",
                "causal-lm",
                "--plan-in",
                "edited.json",
            ],
        );
        assert_eq!(code(&done), 2, "{}", stderr(&done));
        assert!(stderr(&done).contains(says), "{}", stderr(&done));
    };
    refused(&plan, "before anything computed it");
    plan["schedule"][0] = json!(1_000_000);
    refused(&plan, "names op 1000000");
    plan["fingerprint"] = json!("0");
    refused(&plan, "another graph");
    refused(&json!({"schedule": [-1]}), "not a plan");
    refused(&json!([1]), "not a plan");
    let same = call(dir.path(), &["diff", "plan.json", "plan.json"]);
    assert_eq!(
        String::from_utf8_lossy(&same.stdout),
        "the plans are the same\n"
    );
    let none = run(&[
        "-o",
        "c.onnx",
        "--policy",
        "none",
        "--plan-out",
        "none.json",
    ]);
    assert!(none["gap_pct"].is_null() && none["overhead_pct"] == 0.0);
    let other = json(&call(
        dir.path(),
        &["diff", "none.json", "plan.json", "--format", "json"],
    ));
    assert_eq!(
        (&other["is_same"], &other["policy_b"]),
        (&json!(false), &json!("budget"))
    );
    let changed = other["changed"].as_array().unwrap();
    let copies = schedule.len()
        - none["steps"]
            .as_u64()
            .unwrap_or(other["steps_a"].as_u64().unwrap()) as usize;
    let more = |c: &Value| (c["runs_b"].as_u64().unwrap() - c["runs_a"].as_u64().unwrap()) as usize;
    assert_eq!(changed.iter().map(more).sum::<usize>(), copies);
    assert!(changed.iter().any(|c| c["name"].is_string()));
}

#[test]
fn the_frontier_never_rises_and_its_picture_has_everything() {
    let dir = workplace();
    let args = [
        "frontier",
        "graph.json.gz",
        "--points",
        "6",
        "--effort",
        "first",
        "--svg",
        "f.svg",
        "--format",
        "json",
    ];
    let curve = json(&call(dir.path(), &args));
    let points = curve["points"].as_array().unwrap();
    assert_eq!(points.len(), 6);
    assert_eq!(points[0]["budget_bytes"], curve["smallest_feasible_bytes"]);
    assert_eq!(points[5]["budget_bytes"], curve["unplanned_bytes"]);
    assert_eq!(points[5]["overhead_pct"], 0.0);
    let mut before = f64::INFINITY;
    for p in points {
        let n = |key: &str| p[key].as_f64().unwrap_or_else(|| panic!("no {key} in {p}"));
        assert!(n("peak_bytes") <= n("budget_bytes") && n("overhead_pct") <= before);
        assert!(n("lower_bound_pct") <= n("overhead_pct") + 1e-9 && n("gap_pct") >= 0.0);
        before = n("overhead_pct");
    }
    let picture = std::fs::read_to_string(dir.path().join("f.svg")).unwrap();
    for part in [
        "<svg",
        "</svg>",
        "polyline",
        "smallest feasible",
        "proven lower bound",
        "peak above static, MiB",
        "none",
    ] {
        assert!(picture.contains(part), "{part}");
    }
    assert!(!picture.contains("NaN") && !picture.contains("inf"));
    let human = call(
        dir.path(),
        &[
            "frontier",
            "model.onnx",
            "--budgets",
            "1kB,100%",
            "--policy-free",
        ],
    );
    assert_eq!(code(&human), 2);
    let human = call(
        dir.path(),
        &[
            "frontier",
            "model.onnx",
            "--budgets",
            "1kB,100%",
            "--effort",
            "first",
        ],
    );
    let text = String::from_utf8_lossy(&human.stdout).into_owned();
    assert!(
        text.contains("infeasible") && text.contains("every:2"),
        "{text}{}",
        stderr(&human)
    );
}

/// Three layers over `x: f32[n, 4]`: small enough to plan at every size.
const MLP: &str = "graph @g imported (%x: f32[n, 4]) -> (%y) {
  init %a : f32[4, 4] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7]
  init %b : f32[4, 4] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7]
  init %c : f32[4, 4] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7]
  %1 = MatMul %x, %a
  %2 = Tanh %1
  %3 = MatMul %2, %b
  %4 = Tanh %3
  %5 = MatMul %4, %c
  %y = Tanh %5
}
";

#[test]
fn the_largest_sequence_in_chunks_is_found_and_the_host_holds_what_it_may() {
    let dir = workplace();
    let run = |line: &str| {
        let step = "plan model.onnx --loss causal-lm --drop-output logits --dim batch=1 --tile-sequence 4 --effort first";
        let all = format!("{step} {line} --offload cpu --format json");
        call(dir.path(), &all.split_whitespace().collect::<Vec<_>>())
    };
    let found = json(&run("--maximize seq --budget 256KiB"));
    let size = found["maximized"]["size"].as_i64().unwrap();
    let outside = found["outside_peak_bytes"].as_u64().unwrap();
    assert!(size > 4 && outside > 40 << 10, "{size} {outside}");
    let at = |more: &str| run(&format!("--dim seq={size} --budget 256KiB {more}"));
    assert_eq!(json(&at(""))["outside_peak_bytes"], outside);
    let little = at("--host-budget 40KiB");
    assert_eq!(code(&little), 2, "{}", stderr(&little));
    // Layers have no inputs of their own there.
    let refused = "plan model.onnx --loss causal-lm --drop-output logits --dim batch=1 --dim seq=64 --tile-sequence 4 \
        --offload block-inputs --policy chunks";
    let refused = call(dir.path(), &refused.split_whitespace().collect::<Vec<_>>());
    assert_eq!(code(&refused), 2, "{}", stderr(&refused));
}

#[test]
fn the_largest_size_is_the_one_that_trying_all_finds() {
    let dir = workplace();
    std::fs::write(dir.path().join("mlp.ckir"), MLP).unwrap();
    let fixed = ["--loss", "mse", "--effort", "first", "--format", "json"];
    for (budget, limit) in [("1kB", None), ("900", Some("5"))] {
        let mut wish = vec!["plan", "mlp.ckir", "--maximize", "n", "--budget", budget];
        wish.extend(fixed);
        wish.extend(limit.iter().flat_map(|l| ["--max-overhead", *l]));
        let found = json(&call(dir.path(), &wish));
        let size = found["maximized"]["size"].as_u64().unwrap();
        let end = found["maximized"]["impossible_from"].as_u64().unwrap();
        assert_eq!(found["maximized"]["is_exhaustive"], true);
        assert_eq!(found["dims"]["n"], size);
        let works = |n: u64| {
            let dim = format!("n={n}");
            let mut args = vec!["plan", "mlp.ckir", "--budget", budget, "--dim", &dim];
            args.extend(fixed);
            let done = call(dir.path(), &args);
            code(&done) != 3 && {
                let overhead = json(&done)["overhead_pct"].as_f64().unwrap();
                limit.is_none_or(|l| overhead <= l.parse::<f64>().unwrap())
            }
        };
        let all: Vec<u64> = (1..end + 2).filter(|n| works(*n)).collect();
        assert_eq!(all.last(), Some(&size), "{budget}: {all:?}");
        assert!(size > 1 && end < 100, "{size} {end}");
    }
    for (args, says) in [
        (
            &["--maximize", "batch", "--budget", "60%"][..],
            "fits at any size",
        ),
        (
            &["--maximize", "nothing", "--budget", "1GiB"],
            "one of batch, seq",
        ),
        (
            &["--maximize", "batch", "--policy", "full"],
            "cannot be used with",
        ),
        (&["--max-overhead", "3", "--budget", "1GiB"], "--maximize"),
    ] {
        let done = call(dir.path(), &[&["plan", "model.onnx"], args].concat());
        assert_eq!(code(&done), 2, "{args:?}");
        assert!(stderr(&done).contains(says), "{args:?}: {}", stderr(&done));
    }
    let done = call(
        dir.path(),
        &[
            "plan",
            "model.onnx",
            "--maximize",
            "batch",
            "--budget",
            "1kB",
        ],
    );
    assert_eq!(code(&done), 3, "{}", stderr(&done));
}

#[test]
fn policies_that_mean_nothing_for_a_graph_are_named() {
    let dir = workplace();
    let graph = fixture("graphs", "layers.json.gz");
    let graph = graph.to_str().unwrap();
    let fast = ["--budget", "90%", "--effort", "first", "--compare"];
    let said = call(dir.path(), &[&["plan", graph][..], &fast].concat());
    let text = String::from_utf8(said.stdout).unwrap();
    let others = ["selective", "full", "every:N", "first:N", "group:N"];
    let line = format!("not compared: {}: they need a model", others.join(", "));
    assert!(text.contains(&line), "{text}");
    let of = |file: &str| {
        json(&call(
            dir.path(),
            &[&["plan", file, "--format", "json"][..], &fast].concat(),
        ))
    };
    let report = of(graph);
    assert_eq!(report["compare"].as_array().unwrap().len(), 1);
    assert_eq!(report["compare_left_out"]["policies"], json!(others));
    let report = of("model.onnx");
    let rows = report["compare"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    // Moving everything is shown as what it is: the least of the rows in memory, not in time.
    let moved = &rows[6];
    assert_eq!(moved["policy"], "offload cpu");
    assert!(moved["overhead_pct"].as_f64().unwrap() > 0.0, "{moved}");
    assert!(moved["peak_bytes"].as_u64() < rows[0]["peak_bytes"].as_u64());
    assert!(report["compare_left_out"].is_null(), "{report}");
}

/// A plan for a device counts the temporaries of the attention kernels that a run there uses, not those of our tiles.
#[test]
fn attention_is_planned_with_the_kernels_of_the_device() {
    let dir = tempfile::tempdir().unwrap();
    let layer = |i: usize, x: &str| {
        format!(
            "  %h{i} = Tanh {x} : bf16[2, 4, 512, 64]
  %a{i} = Attention %h{i}, %h{i}, {x} {{causal=1, scale=0.125}} : bf16[2, 4, 512, 64]
  %x{i} = Add %a{i}, {x} : bf16[2, 4, 512, 64]\n"
        )
    };
    let graph = format!(
        "graph @g typed (%x: bf16[2, 4, 512, 64]) -> (%x2) {{\n  init %w : bf16[64] = [{}]\n  %x0 = Mul %x, %w : bf16[2, 4, 512, 64]\n{}{}}}\n",
        ["0.5"; 64].join(", "),
        layer(1, "%x0"),
        layer(2, "%x1")
    );
    std::fs::write(dir.path().join("g.ckir"), graph).unwrap();
    let n = |of: &Value, key: &str| of[key].as_u64().unwrap();
    let with = |device: &str, budget: &str| {
        let words = [
            "g.ckir",
            "-o",
            "o.ckir",
            "--loss",
            "vjp",
            "--device-profile",
            device,
        ];
        let words = [&words[..], &["--budget", budget, "--format", "json"]].concat();
        json(&call(dir.path(), &words))
    };
    let fast = with("H100", "100%");
    assert_eq!(
        fast["attention"],
        json!({"flash": 4, "efficient": 0, "tiles": 0})
    );
    // The same device as far as memory goes, with its attention kernels unknown.
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/passes/analysis/devices/h100.json"
    );
    let mut device: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    device.as_object_mut().unwrap().remove("capability");
    std::fs::write(dir.path().join("d.json"), device.to_string()).unwrap();
    let tiled = with("d.json", "100%");
    assert_eq!(
        tiled["attention"],
        json!({"flash": 0, "efficient": 0, "tiles": 4})
    );
    assert_ne!(
        n(&fast, "peak_before_bytes"),
        n(&tiled, "peak_before_bytes")
    );
    // Recomputed attention takes the same kernels, and the written graph has the peak of its plan.
    let tight = with("H100", &format!("{}", n(&fast, "smallest_feasible_bytes")));
    assert_eq!(
        n(&tight, "peak_after_bytes"),
        n(&fast, "smallest_feasible_bytes")
    );
    assert!(tight["attention"]["flash"].as_u64() >= Some(4));
    assert_eq!(tight["attention"]["tiles"], 0);
}
