//! The kit behind `tools/cuda-checks`, as far as a CPU can prove it: all steps run, none hides another, and what was found
//! outlives the run. Needs the Python environment that `tools/test --setup` makes.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_ckpt-opt");
/// A dry run takes two or three minutes, on a busy machine more.
const DRY_RUN_S: &str = "900";

/// Calls `tools/cuda-checks` of a checkout or a kit.
fn checks(root: &Path) -> Command {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/python");
    assert!(
        python.exists(),
        "no Python environment: run `tools/test --setup`"
    );
    let mut command = Command::new(python);
    command.arg(root.join("tools/cuda-checks"));
    // The kit starts the binary it carries, and no other in its place.
    command.env_remove("CKPT_OPT_PLANNER");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn done(command: &mut Command) -> (Option<i32>, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    (status.code(), text(&stdout) + &text(&stderr))
}

/// The records of a run, each a whole line.
fn results(out: &Path) -> Vec<Value> {
    let lines = std::fs::read_to_string(out.join("results.jsonl")).unwrap_or_default();
    let parsed = lines.lines().map(|l| serde_json::from_str(l).unwrap());
    parsed.collect()
}

/// How a step ended.
fn ended(results: &[Value], step: &str) -> String {
    let of_step = |r: &&Value| r["step"] == step && r["ended"].is_string();
    let record = results.iter().find(of_step);
    record
        .map_or("not begun", |r| r["ended"].as_str().unwrap())
        .into()
}

fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A stand-in for the binary: `--version` fails, `doctor` hangs in a process of its own, all else works.
fn break_binary(kit: &Path, hanging: &Path) {
    let script = format!(
        "#!/bin/sh
case \"$1\" in
  --version) echo 'no version' >&2; exit 3 ;;
  doctor) sleep 1000 & echo $! > '{0}.new'; mv '{0}.new' '{0}'; wait ;;
  *) exec '{BINARY}' \"$@\" ;;
esac
",
        hanging.display()
    );
    let binary = kit.join("bin/ckpt-opt");
    std::fs::write(&binary, script).unwrap();
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Whether the process whose number a file holds is still there.
fn lives(hanging: &Path) -> bool {
    let id = std::fs::read_to_string(hanging).unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", id.trim())).unwrap_or_default();
    // A process that nobody waits for stays as a zombie.
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn the_kit_runs_on_a_cpu_and_survives_its_steps() {
    let dir = tempfile::tempdir().unwrap();
    let (out, work) = (dir.path().join("out"), dir.path().join("work"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut dry = checks(root);
    dry.args(["--dry-run", "--binary", BINARY, "--limit", DRY_RUN_S]);
    dry.arg("--out").arg(&out).arg("--work").arg(&work);
    let (code, said) = done(&mut dry);
    assert_eq!(code, Some(0), "{said}");
    every_step_ended(root, &out);

    let (kit, hanging) = (work.join("kit"), dir.path().join("hanging"));
    break_binary(&kit, &hanging);
    a_bad_step_hides_no_other(&kit, &dir.path().join("bad"), &hanging);
    std::fs::remove_file(&hanging).unwrap();
    results_outlive_the_run(&kit, &dir.path().join("killed"), &hanging);
}

fn every_step_ended(root: &Path, out: &Path) {
    let (_, listed) = done(checks(root).arg("--list"));
    let results = results(out);
    assert!(listed.lines().count() >= 30, "{listed}");
    for line in listed.lines() {
        let mut words = line.split_whitespace();
        let limit_s: u32 = words.next().unwrap().parse().unwrap();
        let step = words.skip(1).collect::<Vec<_>>().join(" ");
        assert!((1..=90).contains(&limit_s), "{line}");
        // The tests' environment has no PyTorch.
        let is_peer = step.contains("PyTorch") || step.contains("gradients");
        let end = ended(&results, &step);
        assert!(
            end == "good" || (is_peer && end == "skipped"),
            "{step}: {end}"
        );
    }
    let conditions = results.iter().filter(|r| r["condition"].is_string());
    assert!(conditions.clone().count() >= 100);
    assert!(conditions.clone().all(|r| r["holds"] == true));
    for wanted in [
        "planned = unplanned bit for bit",
        "a second run gives the same bits",
        "requested memory is the predicted one",
        "replayed steps give the bits of steps node by node",
        "offloads no more than predicted",
        "sums are exact",
        "the bits of the unplanned step",
    ] {
        let mut named = conditions.clone();
        assert!(
            named.any(|r| r["condition"].as_str().unwrap().contains(wanted)),
            "{wanted}"
        );
    }
    let page = std::fs::read_to_string(out.join("evidence.md")).unwrap();
    assert!(
        page.contains("# Dry run on the CPU") && page.contains("| gpt2-small, planned |"),
        "{page}"
    );
    assert!(std::fs::read_dir(out).unwrap().count() <= 8);
}

const STEPS: &str = "environment,doctor,16-bit products,llama PyTorch compiled";

fn a_bad_step_hides_no_other(kit: &Path, out: &Path, hanging: &Path) {
    let mut command = checks(kit);
    command.args(["--device", "cpu", "--limit", "60", "--steps", STEPS]);
    let (code, said) = done(command.arg("--out").arg(out));
    assert_eq!(code, Some(4), "{said}");
    let results = results(out);
    for (step, end, words) in [
        ("environment", "failed", "no version"),
        ("doctor", "out of time", "stopped after 25 s"),
        ("16-bit products", "good", "sums are exact"),
        ("llama PyTorch compiled", "dropped", "s of 60 s were left"),
    ] {
        assert_eq!(ended(&results, step), end, "{said}");
        let mut of_step = results.iter().filter(|r| r["step"] == step);
        assert!(
            of_step.any(|r| r.to_string().contains(words)),
            "{step}: {words}\n{said}"
        );
    }
    assert!(
        !lives(hanging),
        "what a step had started outlived its limit"
    );
    let page = std::fs::read_to_string(out.join("evidence.md")).unwrap();
    assert!(page.contains("out of time: doctor"), "{page}");
}

fn results_outlive_the_run(kit: &Path, out: &Path, hanging: &Path) {
    let mut command = checks(kit);
    command.args(["--device", "cpu", "--steps", STEPS]);
    command.arg("--out").arg(out).stdout(Stdio::null());
    let mut run: Child = command.spawn().unwrap();
    wait_for("the second step hangs", || hanging.exists());
    run.kill().unwrap();
    run.wait().unwrap();
    assert_eq!(ended(&results(out), "environment"), "failed");
    wait_for("its steps end with the run", || !lives(hanging));
}
