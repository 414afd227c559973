//! What the command line says of itself: help whose examples run, completions, the manual, and options from a file.

use crate::support::command;

use command::{call, code, json, stderr, workplace};

/// The commands that work on a model or a device.
const VERBS: &[&str] = &[
    "optimize",
    "inspect",
    "plan",
    "frontier",
    "explain",
    "diff",
    "train",
    "convert",
    "run",
    "verify",
    "calibrate",
    "profile",
    "overhead",
    "doctor",
];

#[test]
fn help_examples_run() {
    let dir = workplace();
    let traced = dir.path().join("traced.pt");
    std::fs::copy(command::fixture("exported", "block.pt"), traced).unwrap();
    // Data of `train`: token 0, 256 times.
    std::fs::write(dir.path().join("tokens.bin"), [0; 512]).unwrap();
    let runtime = if cfg!(feature = "torch") { 0 } else { 5 };
    let mut ran = 0;
    for verb in [""].iter().chain(VERBS) {
        let mut args = vec![*verb, "--help"];
        args.retain(|a| !a.is_empty());
        let help = call(dir.path(), &args);
        assert_eq!(code(&help), 0);
        let text = String::from_utf8(help.stdout).unwrap();
        for line in text.lines().filter_map(|l| l.strip_prefix("  ckpt-opt ")) {
            let words: Vec<&str> = line
                .split_whitespace()
                .map(|w| w.trim_matches('\''))
                .collect();
            let done = call(dir.path(), &words);
            let measured = ["device.json", "times.json"]
                .iter()
                .any(|file| line.contains(file));
            let expected = match words[0] {
                verb if command::EXECUTING.contains(&verb) => runtime,
                // The file that the example before this one has written, if it could.
                _ if measured && runtime != 0 => 2,
                _ => 0,
            };
            assert_eq!(code(&done), expected, "ckpt-opt {line}\n{}", stderr(&done));
            ran += 1;
        }
    }
    assert!(ran >= 20, "{ran} examples");
}

#[test]
fn completions_know_the_verbs() {
    let dir = workplace();
    for shell in ["bash", "zsh", "fish"] {
        let script = call(dir.path(), &["completions", shell]);
        assert_eq!(code(&script), 0);
        let text = String::from_utf8(script.stdout).unwrap();
        assert!(text.contains("inspect") && text.contains("link-weights"));
    }
}

#[test]
fn the_manual_and_the_doctor_know_what_there_is() {
    let dir = workplace();
    let page = String::from_utf8(call(dir.path(), &["man"]).stdout).unwrap();
    assert!(page.contains(".TH ckpt-opt") && page.contains("frontier"));
    let page = String::from_utf8(call(dir.path(), &["man", "plan"]).stdout).unwrap();
    assert!(
        page.contains("ckpt\\-opt\\-plan") && page.contains("budget"),
        "{page}"
    );
    assert_eq!(code(&call(dir.path(), &["man", "nothing"])), 2);

    let mut doctor = command::command(dir.path());
    doctor.args(["doctor", "--format", "json"]);
    let found = json(&doctor.output().unwrap());
    assert_eq!(found["runtime"], cfg!(feature = "torch"));
    let findings = found["findings"].as_array().unwrap();
    for name in ["processors", "memory", "disk, here", "runtime"] {
        assert!(
            findings.iter().any(|f| f["name"] == name),
            "{name}: {found}"
        );
    }
    // What is not good says what to do.
    assert!(
        findings
            .iter()
            .all(|f| f["state"] == "good" || f["help"].is_string())
    );
}

#[test]
fn options_come_from_a_file_too() {
    let dir = workplace();
    std::fs::write(
        dir.path().join("c.json"),
        r#"{"policy": "full", "dim": ["batch=2"], "link-weights": true, "format": "json"}"#,
    )
    .unwrap();
    let report = |words: &[&str]| json(&call(dir.path(), words));
    let full = report(&["model.onnx", "-o", "t.onnx", "--config", "c.json"]);
    assert_eq!(
        (&full["policy"], &full["dims"]["batch"]),
        (&"full".into(), &2.into())
    );
    let none = report(&["plan", "model.onnx", "--config=c.json", "--policy", "none"]);
    assert_eq!(
        (&none["policy"], &none["dims"]["batch"]),
        (&"none".into(), &2.into())
    );
    std::fs::write(dir.path().join("c.json"), r#"{"polcy": "full"}"#).unwrap();
    let wrong = call(dir.path(), &["plan", "model.onnx", "--config", "c.json"]);
    assert_eq!(code(&wrong), 2);
    assert!(
        stderr(&wrong).contains("did you mean policy"),
        "{}",
        stderr(&wrong)
    );
}

#[test]
fn a_file_and_the_command_line_add_up() {
    let dir = workplace();
    let file = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let report = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        json(&call(dir.path(), &words))
    };
    file(
        "c.json",
        r#"{"policy": true, "dim": ["seq=16", "batch=4"], "freeze": ["*wpe*"], "format": "json"}"#,
    );
    file(
        "c.toml",
        "policy = true\nfreeze = '*wpe*'\nformat = 'json'\n[dim]\nseq = 16\nbatch = 4\n",
    );
    for name in ["c.json", "c.toml"] {
        let found = report(&format!("plan model.onnx --dim batch=2 --config {name}"));
        let dims = (&found["dims"]["batch"], &found["dims"]["seq"]);
        assert_eq!(dims, (&2.into(), &16.into()), "{name}");
        assert_eq!(found["policy"], "full");
        let frozen = |line: &str| report(line)["frozen_parameters"].as_u64().unwrap();
        let one = frozen(&format!("model.onnx -o t.onnx --config {name}"));
        let two = frozen(&format!(
            "--config {name} model.onnx -o t.onnx --freeze *ln_f*"
        ));
        assert!(0 < one && one < two, "{name}: {one} {two}");
    }
    file("c.json", r#"{"policy": false, "format": "json"}"#);
    assert_eq!(report("plan model.onnx --config c.json")["policy"], "none");
    file("c.json", r#"{"output": "a.onnx", "policy": "none"}"#);
    let done = call(
        dir.path(),
        &["model.onnx", "-o", "b.onnx", "--config", "c.json"],
    );
    assert_eq!(code(&done), 0, "{}", stderr(&done));
    assert!(dir.path().join("b.onnx").exists() && !dir.path().join("a.onnx").exists());
    // What the parser refuses in the file is told to be there.
    for text in [
        r#"{"budget": "lots"}"#,
        r#"{"every": 0}"#,
        r#"{"reorder": "yes"}"#,
        r#"{"offload-streams": false}"#,
        r#"{"dims": ["batch=2"]}"#,
    ] {
        file("c.json", text);
        let done = call(dir.path(), &["plan", "model.onnx", "--config", "c.json"]);
        assert_eq!(code(&done), 2, "{text}");
        let told = stderr(&done);
        assert!(
            told.contains("error[config]") && told.contains("at: c.json"),
            "{told}"
        );
    }
}

#[test]
fn every_command_names_the_file_of_options_in_its_help() {
    let dir = workplace();
    for verb in VERBS.iter().chain(&["completions", "man"]) {
        let help = String::from_utf8(call(dir.path(), &[verb, "--help"]).stdout).unwrap();
        assert!(help.contains("--config <FILE>"), "{verb}: {help}");
    }
}

#[test]
fn help_groups_options_by_question() {
    let dir = workplace();
    let help = call(dir.path(), &["optimize", "--help"]);
    let text = String::from_utf8(help.stdout).unwrap();
    let mut rest = text.as_str();
    for heading in [
        "Goal",
        "Offloading",
        "Cost model",
        "Model",
        "Chunking",
        "Optimizer",
        "Overrides: which layers and ops",
        "Output",
        "Passes",
    ] {
        let found = rest.split_once(&format!("\n{heading}:\n"));
        rest = found.unwrap_or_else(|| panic!("{heading}: {text}")).1;
    }
}

#[test]
fn renamed_options_name_the_new_spelling() {
    let dir = workplace();
    for (words, new) in [
        ("model.onnx -o t.onnx --no-fuse", "--fuse off"),
        ("run t.onnx --no-arena", "--arena off"),
        ("plan model.onnx -o p.json", "--plan-out FILE"),
        ("plan model.onnx --output=p.json", "--plan-out FILE"),
        ("plan model.onnx --policy budget", "--budget auto"),
        ("frontier model.onnx --levers", "--ablation"),
        (
            "plan model.onnx --offload-streams off",
            "--overlap-transfers on|off",
        ),
        (
            "run t.onnx --offload-streams off",
            "--async-transfers on|off",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let refused = call(dir.path(), &words);
        assert_eq!(code(&refused), 2, "{words:?}");
        let text = stderr(&refused);
        assert!(text.contains(&format!("write {new}")), "{words:?}: {text}");
    }
}
