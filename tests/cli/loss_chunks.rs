//! The number of parts of a loss as something that is planned: what is tried, what is taken, and what is said of it.

use crate::support::command;

use command::{call, code, fixture, json, stderr, workplace};
use serde_json::Value;
use std::path::Path;

const STEP: &str = "model.onnx --loss causal-lm --drop-output * --dim batch=32 --dim seq=8";

fn run(folder: &Path, verb: &str, more: &str) -> Value {
    let line = format!("{verb} {STEP} {more} --effort first --format json");
    json(&call(folder, &line.split_whitespace().collect::<Vec<_>>()))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

fn trials(report: &Value) -> &Vec<Value> {
    report["parts_tried"].as_array().unwrap()
}

fn taken(report: &Value) -> &Value {
    let mut chosen = trials(report).iter().filter(|t| t["chosen"] == true);
    let one = chosen.next().unwrap();
    assert!(chosen.next().is_none());
    one
}

/// What a plan costs, by FLOPs.
fn flops(report: &Value) -> f64 {
    number(&report["forward_backward_flops"]) + number(&report["recompute_flops"])
}

#[test]
fn parts_are_cut_only_where_that_is_cheaper_and_no_number_tried_is_better() {
    let dir = workplace();
    let whole = run(dir.path(), "plan", "--policy none");
    let peak = number(&whole["peak_before_bytes"]);
    let loose = format!("--objective flops --tile-loss auto --budget {peak}");
    let loose = run(dir.path(), "plan", &loose);
    assert_eq!(taken(&loose)["parts"], 1);
    assert!(loose["loss_parts"].is_null());
    assert_eq!(flops(&loose), number(&whole["forward_backward_flops"]));
    let least = number(&run(dir.path(), "plan", "--policy none --tile-loss auto")["static_bytes"]);
    let mut cut = 0;
    for share in [0.45, 0.27] {
        let budget = (least + share * (peak - least)) as u64;
        let wish = format!("--objective flops --budget {budget}");
        let found = run(dir.path(), "plan", &format!("{wish} --tile-loss auto"));
        assert_eq!(found["budget_bytes"], budget);
        assert!(found["peak_after_bytes"].as_u64().unwrap() <= budget);
        let own = taken(&found);
        assert_eq!(own["fits"], true);
        cut += usize::from(own["parts"] != 1);
        for trial in trials(&found) {
            let parts = match trial["parts"].as_u64().unwrap() {
                1 => "off".to_string(),
                n => n.to_string(),
            };
            let given =
                format!("plan {STEP} {wish} --tile-loss {parts} --effort first --format json");
            let given = call(dir.path(), &given.split_whitespace().collect::<Vec<_>>());
            if trial["fits"] == false {
                assert_eq!(code(&given), 3, "{}", stderr(&given));
                continue;
            }
            let given = json(&given);
            assert_eq!(given["peak_after_bytes"], trial["peak_bytes"]);
            let percent = 100.0 * (flops(&given) / flops(&whole) - 1.0);
            assert!(
                (percent - number(&trial["overhead_pct"])).abs() < 1e-6,
                "{trial}"
            );
            assert!(number(&own["overhead_pct"]) <= percent + 0.06, "{trial}");
        }
        let class = found["bound_class"].as_str().unwrap();
        assert!(class.contains("other numbers were not"), "{class}");
    }
    assert!(cut > 0, "no budget was small enough to tell");
}

#[test]
fn a_budget_that_nobody_gave_is_met_and_a_plan_remembers_its_parts() {
    let dir = workplace();
    let free = run(
        dir.path(),
        "plan",
        "--tile-loss auto --budget auto --plan-out p.json",
    );
    assert!(!trials(&free).is_empty());
    let text = std::fs::read_to_string(dir.path().join("p.json")).unwrap();
    let plan: Value = serde_json::from_str(&text).unwrap();
    let small = run(
        dir.path(),
        "plan",
        "--tile-loss auto --budget 40% --plan-out q.json",
    );
    assert!(small["loss_parts"].as_u64().unwrap() > 1);
    for (name, before) in [("p.json", &free), ("q.json", &small)] {
        let again = run(
            dir.path(),
            "plan",
            &format!("--tile-loss auto --plan-in {name}"),
        );
        assert_eq!(again["peak_after_bytes"], before["peak_after_bytes"]);
        assert_eq!(again["loss_parts"], before["loss_parts"]);
    }
    assert_eq!(
        plan.get("loss_parts"),
        free.get("loss_parts").filter(|p| !p.is_null())
    );
}

#[test]
fn a_file_says_how_many_parts_were_taken() {
    let dir = workplace();
    let wish = "-o t.onnx --tile-loss auto --budget 40% --objective flops";
    let report = run(dir.path(), "optimize", wish);
    let parts = taken(&report)["parts"].as_u64().unwrap();
    assert!(parts > 1);
    let tiled: Vec<u64> = report["tiled"]
        .as_object()
        .unwrap()
        .values()
        .map(|n| n.as_u64().unwrap())
        .collect();
    assert_eq!(tiled, [parts]);
    let line = format!("optimize {STEP} {wish} --effort first");
    let human = call(dir.path(), &line.split_whitespace().collect::<Vec<_>>());
    let human = String::from_utf8_lossy(&human.stdout).into_owned();
    assert!(human.contains("numbers of parts"), "{human}");
    assert!(human.contains(&format!("loss in {parts}")), "{human}");
}

#[test]
fn one_option_stands_for_the_chunks_of_losses_and_of_chains() {
    let dir = workplace();
    let model = fixture("llama32", "model.onnx");
    let found = |verb: &str, more: &str| {
        let line = format!(
            "{verb} {} --loss causal-lm --drop-output logits --dim batch=8 --dim seq=64 --effort first --format json {more}",
            model.display()
        );
        json(&call(
            dir.path(),
            &line.split_whitespace().collect::<Vec<_>>(),
        ))
    };
    let told = |more: &str| {
        let report = found("plan", &format!("--policy full {more}"));
        let key = |key: &str| report[key].as_u64();
        [key("loss_parts"), key("mlp_parts"), key("peak_after_bytes")]
    };
    let both = told("--tile auto");
    assert!(both[0].unwrap() > 1 && both[1].unwrap() > 1, "{both:?}");
    assert_eq!(both, told("--tile-mlp auto --tile-loss auto"));
    // An option of one kind wins.
    assert_eq!(told("--tile auto --tile-loss off"), told("--tile-mlp auto"));
    let given = told("--tile auto --tile-mlp 4 --tile-loss 2");
    assert_eq!(given[..2], [Some(2), Some(4)]);
    let none = told("--tile off");
    assert_eq!(none[..2], [None, None]);
    assert!(both[2] < none[2]);
    // With a budget, the planner tries several numbers of both.
    let within = found("plan", "--tile auto --budget 1MiB");
    let tried = |key: &str| {
        trials(&within)
            .iter()
            .any(|trial| trial[key].as_u64() > Some(1))
    };
    assert!(tried("parts") && tried("mlp_parts"), "{within}");
    let smallest = |more: &str| found("frontier", more)["smallest_feasible_bytes"].as_u64();
    let frontier = |more: &str| smallest(&format!("--points 2 {more}"));
    assert_eq!(
        frontier("--tile auto"),
        frontier("--tile-mlp auto --tile-loss auto")
    );
    let number = ["plan", "model.onnx", "--tile", "3"];
    assert_eq!(code(&call(dir.path(), &number)), 2);
}

#[test]
fn techniques_are_compared() {
    let dir = workplace();
    let found = run(dir.path(), "frontier", "--ablation --points 2 --svg f.svg");
    let techniques = found["ablation"].as_array().unwrap();
    let names: Vec<&str> = techniques
        .iter()
        .map(|l| l["technique"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["recompute", "chunks", "offload", "all"]);
    let least = |i: usize| techniques[i]["smallest_feasible_bytes"].as_u64().unwrap();
    assert!(least(1) < least(0) && least(3) <= least(1) && least(2) <= least(0));
    for i in 0..2 {
        let at = |technique: usize| techniques[technique]["points"][i]["overhead_pct"].as_f64();
        for alone in [0, 1] {
            if let Some(alone) = at(alone) {
                assert!(at(3).unwrap() <= alone + 1e-9, "together they cost more");
            }
        }
        let budget = techniques[0]["points"][i]["budget_bytes"].as_u64().unwrap();
        for technique in techniques {
            if let Some(peak) = technique["points"][i]["peak_bytes"].as_u64() {
                assert!(peak <= budget);
            }
        }
    }
    assert_eq!(techniques[3]["points"][1]["overhead_pct"], 0.0);
    assert!(techniques[3]["points"][0]["loss_parts"].as_u64().unwrap() > 1);
    let picture = std::fs::read_to_string(dir.path().join("f.svg")).unwrap();
    assert!(picture.contains(">all</text>") && picture.contains(">chunks</text>"));
    let cost_graph = call(dir.path(), &["frontier", "graph.json.gz", "--ablation"]);
    assert_eq!(code(&cost_graph), 2);
}

#[test]
fn the_largest_value_of_the_loss_is_told() {
    let dir = workplace();
    let written = "-o out.onnx --policy none";
    let largest = |more: &str| {
        let report = run(dir.path(), "optimize", &format!("{written} {more}"));
        number(&report["largest_of_loss"]["bytes"])
    };
    let whole = largest("");
    // A sixteenth is less than the weights, whose gradient is added up beside.
    for chunks in [4, 16] {
        let cut = largest(&format!("--tile-loss {chunks}"));
        assert!(
            whole > 0.0 && f64::from(chunks) * cut == whole,
            "{whole} and {cut}"
        );
    }
    // Clipping reads each cotangent, but gradients are not of the loss.
    assert_eq!(largest("--optimizer muon --clip 1"), whole);
    let line = format!("optimize {STEP} {written}");
    let told = call(dir.path(), &line.split_whitespace().collect::<Vec<_>>());
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(told.contains("\n  largest of the loss: "), "{told}");
}
