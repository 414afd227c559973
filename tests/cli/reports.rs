//! Files that show a plan: their totals are the plan's, they are what their viewers read, and they load nothing.

use crate::support::command;

use command::{call, code, fixture, json, stderr, workplace};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const PLANS: [&[&str]; 3] = [
    &["--policy", "full"],
    &["--policy", "none"],
    &["--budget", "60%", "--effort", "first"],
];

/// Reports of a plan of the GPT-2 fixture, and what `plan` says of it.
fn reported(dir: &Path, plan: &[&str], files: &[&str]) -> Value {
    let mut args = vec!["plan", "model.onnx", "--dim", "batch=4", "--format", "json"];
    args.extend(plan);
    for file in files {
        args.extend(["--report", file]);
    }
    json(&call(dir, &args))
}

fn read(dir: &Path, name: &str) -> String {
    std::fs::read_to_string(dir.join(name)).unwrap()
}

#[test]
fn slices_do_not_overlap_and_counters_reach_the_peak() {
    let dir = workplace();
    for plan in PLANS {
        let said = reported(dir.path(), plan, &["p.trace.json"]);
        let trace: Value = serde_json::from_str(&read(dir.path(), "p.trace.json")).unwrap();
        assert_eq!(trace["otherData"]["policy"], said["policy"]);
        let mut ends: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        let mut peaks: BTreeMap<u64, u64> = BTreeMap::new();
        let (mut slices, mut again) = (0, 0);
        for event in trace["traceEvents"].as_array().unwrap() {
            let n = |key: &str| event[key].as_f64().unwrap();
            let pid = event["pid"].as_u64().unwrap();
            match event["ph"].as_str().unwrap() {
                "X" => {
                    let end = ends
                        .entry((pid, event["tid"].as_u64().unwrap()))
                        .or_default();
                    assert!(n("ts") >= *end - 1e-9 && n("dur") >= 0.0, "{event}");
                    *end = n("ts") + n("dur");
                    slices += 1;
                    again += (event["cat"] == "recompute") as u64;
                }
                "C" => {
                    let values = event["args"].as_object().unwrap().values();
                    let total: u64 = values.map(|v| v.as_u64().unwrap()).sum();
                    let peak = peaks.entry(pid).or_default();
                    *peak = total.max(*peak);
                }
                "M" => assert!(event["args"]["name"].is_string()),
                other => panic!("phase {other}"),
            }
        }
        assert_eq!(peaks[&1], said["peak_after_bytes"].as_u64().unwrap());
        assert_eq!(peaks[&2], said["peak_before_bytes"].as_u64().unwrap());
        let (ops, steps) = (
            said["ops"].as_u64().unwrap(),
            said["steps"].as_u64().unwrap(),
        );
        assert_eq!((slices, again), (ops + steps, steps - ops));
        let cost = said["cost_after"].as_f64().unwrap();
        assert!((ends[&(1, 1)] - cost).abs() < 1e-3 * cost);
    }
}

#[test]
fn the_page_is_whole_and_loads_nothing() {
    let dir = workplace();
    for plan in PLANS {
        let said = reported(dir.path(), plan, &["p.html"]);
        let page = read(dir.path(), "p.html");
        assert!(!page.contains("{{") && page.contains("default-src 'none'"));
        for word in ["src=", "@import", "url(", "fetch(", "XMLHttp", "import("] {
            assert!(!page.contains(word), "{word}");
        }
        let namespace = "http://www.w3.org/2000/svg";
        assert!(!page.replace(namespace, "").contains("://"));
        let (_, rest) = page.split_once("id=\"data\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        // What the script does: sums of what is held at every step.
        for (memory, peak) in [
            ("before", "peak_before_bytes"),
            ("after", "peak_after_bytes"),
        ] {
            let memory = &data[memory];
            let column = |name: &str| -> Vec<u64> {
                let list = memory["t"][name].as_array().unwrap();
                list.iter().map(|n| n.as_u64().unwrap()).collect()
            };
            let steps = memory["s"].as_array().unwrap().len();
            let mut live = vec![0u64; steps];
            for ((from, to), bytes) in column("f").iter().zip(column("e")).zip(column("b")) {
                live[*from as usize..to as usize]
                    .iter_mut()
                    .for_each(|l| *l += bytes);
            }
            for entry in memory["m"].as_array().unwrap() {
                live[entry[0].as_u64().unwrap() as usize] += entry[1].as_u64().unwrap();
            }
            assert_eq!(live.into_iter().max(), said[peak].as_u64());
        }
        assert_eq!(data["layers"].as_array().unwrap().len(), 2);
        assert!(data["frontier"]["points"].as_array().unwrap().len() >= 5);
    }
}

#[test]
fn names_cannot_break_out_of_the_page() {
    let dir = workplace();
    let text = "graph @g imported (%x: f32[4]) -> (%y) {
  init %w : f32[4] = [1, 2, 3, 4]
  %\"</script><script>alert(1)</script>\" = Mul %x, %w
  %y = Tanh %\"</script><script>alert(1)</script>\"
}
";
    std::fs::write(dir.path().join("<b>.ckir"), text).unwrap();
    let done = call(
        dir.path(),
        &["plan", "<b>.ckir", "--policy", "none", "--report", "p.html"],
    );
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    let page = read(dir.path(), "p.html");
    assert!(page.contains("\\u003c/script>") && !page.contains("alert(1)</script>"));
    assert!(page.contains("&lt;b&gt;.ckir") && !page.contains("<b>"));
    assert_eq!(page.matches("</script>").count(), 2);
}

#[test]
fn overlays_name_the_nodes_of_the_written_graph() {
    let dir = workplace();
    let files = [
        "--report",
        "p.overlay.json",
        "--report",
        "p.dot",
        "--report",
        "p.json",
    ];
    let write = [
        "model.onnx",
        "-o",
        "t.onnx",
        "--policy",
        "full",
        "--dim",
        "batch=4",
    ];
    let done = call(dir.path(), &[&write[..], &files].concat());
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    let overlay: Value = serde_json::from_str(&read(dir.path(), "p.overlay.json")).unwrap();
    let (graph, data) = overlay.as_object().unwrap().iter().next().unwrap();
    let bytes = std::fs::read(dir.path().join("t.onnx")).unwrap();
    use prost::Message;
    let model = ckpt_opt::frontend::onnx::proto::ModelProto::decode(bytes.as_slice()).unwrap();
    let written = model.graph.unwrap();
    assert_eq!(*graph, written.name());
    let results = data["results"].as_object().unwrap();
    let mut told: Vec<&str> = results.keys().map(String::as_str).collect();
    let mut names: Vec<&str> = written.node.iter().map(|n| n.name()).collect();
    told.sort_unstable();
    names.sort_unstable();
    assert_eq!(told, names);
    let again = |name: &&str| results[*name]["value"] == "recompute";
    assert!(
        names
            .iter()
            .filter(|n| n.ends_with("/recompute"))
            .all(again)
    );
    let dot = read(dir.path(), "p.dot");
    assert!(dot.starts_with("digraph layers {") && dot.ends_with("}\n"));
    assert!(dot.contains("layers 0 to 1: attention+mlp"), "{dot}");
    let whole: Value = serde_json::from_str(&read(dir.path(), "p.json")).unwrap();
    assert!(whole["at_peak_after"]["bytes"].as_u64().unwrap() > 0);
}

#[test]
fn a_name_without_a_viewer_is_refused() {
    let dir = workplace();
    let done = call(dir.path(), &["plan", "model.onnx", "--report", "p.txt"]);
    assert_eq!(code(&done), 2);
    assert!(
        stderr(&done).contains(".html, .trace.json"),
        "{}",
        stderr(&done)
    );
    std::fs::create_dir(dir.path().join("d.html")).unwrap();
    let args = [
        "plan",
        "model.onnx",
        "--policy",
        "none",
        "--report",
        "d.html",
    ];
    assert_eq!(code(&call(dir.path(), &args)), 2);
    assert!(fixture("gpt2", "model.onnx").exists());
}

/// Runs a Python of the oracles, where there is one.
fn python() -> Option<std::path::PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    own.exists().then_some(own)
}

const READ_SNAPSHOT: &str = "
import pickle, sys
snapshot = pickle.load(open(sys.argv[1], 'rb'))
live = peak = 0
held = {}
for event in snapshot['device_traces'][0]:
    assert event['addr'] < 2**53 and event['frames'][0]['name']
    if event['action'] == 'alloc':
        assert event['addr'] not in held
        held[event['addr']] = event['size']
        live += event['size']
    else:
        assert event['action'] == 'free_completed'
        assert held.pop(event['addr']) == event['size']
        live -= event['size']
    peak = max(peak, live)
print(peak, sum(s['allocated_size'] for s in snapshot['segments']))
";

/// Python reads the snapshot, and what is held at the peak is the plan's. `python tools memory_viz` has PyTorch read it.
#[test]
fn the_snapshot_is_a_pickle_with_the_totals_of_the_plan() {
    let Some(python) = python() else {
        eprintln!("skipped: no .venv (tools/test --setup makes it)");
        return;
    };
    let dir = workplace();
    for plan in PLANS {
        let said = reported(dir.path(), plan, &["p.pickle"]);
        let done = Command::new(&python)
            .args(["-c", READ_SNAPSHOT, "p.pickle"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", stderr(&done));
        let peak = said["peak_after_bytes"].as_u64().unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        assert_eq!(text.trim(), format!("{peak} {peak}"));
    }
}

/// How many rows pass a mask, only the data decides.
const MASKED: &str = "graph @g imported (%x: f32[n, 64], %m: bool[n]) -> (%total) {
  init %w : f32[64, 64] = splat 0.5
  init %axis : i64[1] = [0]
  %found = NonZero %m
  %rows = Squeeze %found, %axis
  %r = Gather %x, %rows {axis = 0}
  %y = MatMul %r, %w
  %z = Tanh %y
  %total = ReduceSum %z {keepdims = 0}
}
";

#[test]
fn a_peak_that_data_decides_is_called_a_bound_wherever_it_is_shown() {
    let dir = workplace();
    std::fs::write(dir.path().join("masked.ckir"), MASKED).unwrap();
    let run = |args: &str| {
        let done = call(dir.path(), &args.split(' ').collect::<Vec<_>>());
        assert_eq!(code(&done), 0, "{args}: {}", stderr(&done));
        String::from_utf8(done.stdout).unwrap()
    };
    let goal = "--dim n=256 --policy selective";
    let shown = [
        format!("plan masked.ckir {goal} --plan-out p.json --report p.html --report p.dot"),
        format!("plan masked.ckir {goal} --compare"),
        format!("masked.ckir -o t.ckir {goal}"),
        format!("explain masked.ckir {goal}"),
        "explain p.json".into(),
        "plan masked.ckir --dim n=256 --policy none --plan-out other.json".into(),
        "diff p.json other.json".into(),
        "frontier masked.ckir --dim n=256 --points 2 --effort first".into(),
    ];
    for args in &shown {
        let text = run(args);
        assert!(text.contains("at most"), "{args}:\n{text}");
    }
    assert!(read(dir.path(), "p.html").contains("<dd>at most "));
    assert!(read(dir.path(), "p.html").contains("\"most\":\"at most \""));
    assert!(read(dir.path(), "p.dot").contains("peak at most "));
    for args in [&shown[0], &shown[2], &shown[3], &shown[7]] {
        let said: Value = serde_json::from_str(&run(&format!("{args} --format json"))).unwrap();
        assert_eq!(said["peak_is_bound"], true, "{args}");
        let fixed = args
            .replace("masked.ckir", "model.onnx")
            .replace("n=256", "seq=8");
        let fixed = fixed
            .replace("t.ckir", "u.onnx")
            .replace("p.json", "q.json");
        let said: Value = serde_json::from_str(&run(&format!("{fixed} --format json"))).unwrap();
        assert_eq!(said["peak_is_bound"], false, "{fixed}");
    }
    if cfg!(feature = "torch") {
        assert!(run("run t.ckir --seed 1").contains("measured, at most "));
        let said: Value = serde_json::from_str(&run("run t.ckir --seed 1 --format json")).unwrap();
        assert_eq!(said["peak_is_bound"], true);
    }
}

#[test]
fn the_summary_counts_what_is_in_memory_only() {
    let dir = workplace();
    let args = "model.onnx -o t.onnx --dim batch=8 --policy none --offload cpu --format json";
    let said = json(&call(dir.path(), &args.split(' ').collect::<Vec<_>>()));
    assert!(said["outside_peak_bytes"].as_u64() > Some(0), "{said}");
    for (rows, peak) in [
        ("at_peak_before", "peak_before_bytes"),
        ("at_peak_after", "peak_after_bytes"),
    ] {
        let rows = said[rows].as_object().unwrap().values();
        let sum: u64 = rows.map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(Some(sum), said[peak].as_u64(), "{said}");
    }
}

/// Data decides how many columns are left. Their bound is all of them, which would lie side by side; fewer have gaps between
/// their rows, so that the reshape copies them.
#[test]
fn a_part_that_data_cuts_is_copied_within_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let graph = "graph @g imported (%x: f32[64, 32], %m: bool[32]) -> (%y) {
  init %zero : i64[1] = [0]
  init %one : i64[1] = [1]
  init %flat : i64[1] = [-1]
  %places = NonZero %m
  %count = Shape %places {start=1, end=2}
  %half = Mul %x, %x
  %part = Slice %half, %zero, %count, %one
  %row = Reshape %part, %flat
  %y = ReduceSum %row {keepdims=0}
}
";
    std::fs::write(dir.path().join("g.ckir"), graph).unwrap();
    for seed in ["1", "2", "3"] {
        let said = json(&call(
            dir.path(),
            &["run", "g.ckir", "--seed", seed, "--format", "json"],
        ));
        let n = |key: &str| said[key].as_u64().unwrap();
        assert_eq!(said["peak_is_bound"], true);
        assert!(
            n("measured_peak_bytes") <= n("predicted_peak_bytes"),
            "{said}"
        );
    }
}
