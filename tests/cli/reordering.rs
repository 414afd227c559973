//! `--reorder`: other orders of first computations lower peaks, files have them, and no bit of a gradient changes.

use crate::support::command;

use command::{call, code, json, stderr};
use serde_json::Value;
use std::fmt::Write;
use std::path::Path;

const BRANCHES: usize = 4;
const WIDTH: usize = 64;

/// Branches that are wide inside and narrow at the end, written breadth first: all wide values exist at once.
fn write_branches(folder: &Path) {
    let mut text = String::from("graph @branches imported (%x: f32[n, 2]) -> (%loss) {\n");
    for b in 0..BRANCHES {
        let numbers: Vec<String> = (0..2 * WIDTH)
            .map(|i| format!("{}.5", (i * 7 + b) % 5))
            .collect();
        let list = numbers.join(", ");
        let _ = writeln!(
            text,
            "  init %w{b} : f32[2, {WIDTH}] = [{list}] origin \"w{b}\" parameter"
        );
    }
    text.push_str("  init %axes : i64[1] = [1]\n  init %all : i64[2] = [0, 1]\n");
    for b in 0..BRANCHES {
        let _ = writeln!(text, "  %wide{b} = MatMul %x, %w{b}");
    }
    for b in 0..BRANCHES {
        let _ = writeln!(text, "  %end{b} = ReduceSum %wide{b}, %axes {{keepdims=1}}");
    }
    text.push_str("  %sum1 = Add %end0, %end1\n");
    for b in 2..BRANCHES {
        let _ = writeln!(text, "  %sum{b} = Mul %sum{}, %end{b}", b - 1);
    }
    let last = BRANCHES - 1;
    let _ = writeln!(
        text,
        "  %loss = ReduceSum %sum{last}, %all {{keepdims=0}}\n}}"
    );
    std::fs::write(folder.join("branches.ckir"), text).unwrap();
}

fn plan(folder: &Path, more: &str) -> Value {
    let args = format!("plan branches.ckir --loss output:loss --dim n=512 --format json {more}");
    json(&call(folder, &args.split_whitespace().collect::<Vec<_>>()))
}

#[test]
fn another_order_lowers_peaks_and_never_costs_more() {
    let dir = tempfile::tempdir().unwrap();
    write_branches(dir.path());
    let bytes = |v: &Value, key: &str| v[key].as_u64().unwrap();
    // With everything kept the order alone decides.
    let given = plan(dir.path(), "--budget 100% --save-ops *");
    let other = plan(dir.path(), "--budget 30% --save-ops * --reorder");
    let floor = "smallest_feasible_bytes";
    assert!(
        3 * bytes(&other, floor) < bytes(&given, floor),
        "{other} {given}"
    );
    assert_eq!(other["overhead_pct"], 0.0);
    let refused = "plan branches.ckir --loss output:loss --dim n=512 --budget 30% --save-ops *";
    let refused = call(dir.path(), &refused.split(' ').collect::<Vec<_>>());
    assert_eq!(code(&refused), 3, "{}", stderr(&refused));
    // Recomputation instead: what the order saves need not run again.
    for percent in [90, 60, 30] {
        let given = plan(dir.path(), &format!("--effort first --budget {percent}%"));
        let other = plan(
            dir.path(),
            &format!("--effort first --budget {percent}% --reorder"),
        );
        assert!(given["overhead_pct"].as_f64().unwrap() > 1.0, "{given}");
        assert_eq!(other["overhead_pct"], 0.0, "{other}");
    }
    let curve = |more: &[&str]| {
        let args = "frontier branches.ckir --loss output:loss --dim n=512 --budgets 90%,60%,30% --effort first --format json";
        let args: Vec<&str> = args.split(' ').chain(more.iter().copied()).collect();
        json(&call(dir.path(), &args))
    };
    let (given, other) = (curve(&[]), curve(&["--reorder"]));
    let sum = |v: &Value| -> f64 {
        let points = v["points"].as_array().unwrap().iter();
        points.map(|p| p["overhead_pct"].as_f64().unwrap()).sum()
    };
    assert!(sum(&given) > 3.0 && sum(&other) == 0.0, "{given} {other}");
}

#[test]
fn policies_and_offloading_keep_the_order() {
    let dir = tempfile::tempdir().unwrap();
    write_branches(dir.path());
    for (more, why) in [
        (["--policy", "none"], "cannot be used with '--policy"),
        (["--offload", "auto"], "exclude each other"),
    ] {
        let args = ["plan", "branches.ckir", "--reorder"];
        let refused = call(dir.path(), &[&args[..], &more].concat());
        assert_eq!(code(&refused), 2);
        assert!(stderr(&refused).contains(why), "{}", stderr(&refused));
    }
}

#[cfg(feature = "torch")]
#[test]
fn the_written_order_runs_to_the_same_bits_within_its_peak() {
    let dir = tempfile::tempdir().unwrap();
    write_branches(dir.path());
    let dim = ["--loss", "output:loss", "--dim", "n=512"];
    let mut peaks = Vec::new();
    for (file, more) in [
        ("given.onnx", "--policy none"),
        ("other.onnx", "--budget 30% --save-ops * --reorder"),
    ] {
        let mut args = vec!["branches.ckir", "-o", file, "--format", "json"];
        args.extend(dim.iter().copied().chain(more.split(' ')));
        json(&call(dir.path(), &args));
        let run = "--dim n=512 --seed 1 --format json".split(' ');
        let run: Vec<&str> = ["run", file].into_iter().chain(run).collect();
        let report = json(&call(dir.path(), &run));
        let measured = &report["measured_peak_bytes"];
        assert_eq!(measured, &report["predicted_peak_bytes"], "{file}");
        peaks.push(measured.as_u64().unwrap());
        let verify = ["verify", "branches.ckir", file, "--dim", "n=512"];
        let verified = call(dir.path(), &verify);
        assert_eq!(code(&verified), 0, "{}", stderr(&verified));
    }
    assert!(3 * peaks[1] < peaks[0], "{peaks:?}");
}
