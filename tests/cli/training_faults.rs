//! What can go wrong in a run of `train`: killed processes, disks that refuse, files that changed. Nothing is lost, and the error
//! says what is whole. `docs/training-faults.md` lists these tests.

use super::training::{
    SAVED, STEPS, args, checkpoints, done, fails, reaches, same_bits, started, steps,
    uninterrupted, with, words, workplace,
};
use crate::support::command;

use ckpt_opt::train::checkpoint::Checkpoints;
use command::{code, command, files, stderr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

/// Trains with a process that is killed again and again at points that `pause` chooses. Returns how often it was.
fn train_killed(dir: &Path, out: &str, pause: &mut dyn FnMut() -> (usize, Duration)) -> usize {
    let run = dir.join(out);
    let (mut kills, mut last, mut longer) = (0, None, 0);
    loop {
        let mut child = started(dir, &args(out, &[STEPS, SAVED, "--resume"]));
        let done = checkpoints(&run)
            .iter()
            .filter_map(|name| name.strip_prefix("step-")?.parse().ok())
            .max();
        // A disk may take longer for a checkpoint than the steps that it is given.
        longer = if done == last { longer + 1 } else { 0 };
        last = done;
        let (more_steps, wait) = pause();
        let steps = done.unwrap_or(0) + more_steps + longer;
        if reaches(&mut child, &run, steps) {
            std::thread::sleep(wait);
        }
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            kills += 1;
        }
        if child.wait().unwrap().success() {
            return kills;
        }
        // Whatever was killed, each folder that has a step's name is whole.
        let whole = Checkpoints::open(&run, 2).unwrap();
        if let Some(read) = whole.read().unwrap() {
            assert!(read.parameters.len() == 20 && read.states[0].len() == 40);
        }
    }
}

#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    let dir = workplace();
    let whole = uninterrupted(dir.path());
    let mut rounds = 0;
    let kills = train_killed(dir.path(), "killed", &mut || {
        rounds += 1;
        // Later steps, and points between two steps.
        (5, Duration::from_micros(700 * rounds))
    });
    assert!(kills >= 3, "{kills} kills");
    same_bits(&whole, &dir.path().join("killed"));
}

/// 200 kills at random points. Takes minutes.
#[test]
#[ignore = "takes minutes; its result stands in docs/training-faults.md"]
fn two_hundred_kills_lose_nothing() {
    let dir = workplace();
    let whole = uninterrupted(dir.path());
    let mut state = 7u64;
    let (mut kills, mut run) = (0, 0);
    while kills < 200 {
        let out = format!("killed-{run}");
        kills += train_killed(dir.path(), &out, &mut || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (
                1 + (state >> 60) as usize % 4,
                Duration::from_micros((state >> 33) % 20_000),
            )
        });
        same_bits(&whole, &dir.path().join(&out));
        run += 1;
    }
    println!("{kills} kills in {run} runs");
}

#[test]
fn what_does_not_fit_a_checkpoint_is_refused() {
    let dir = workplace();
    let dir = dir.path();
    let first = args("out", &["--steps 4 --save-every 2"]);
    done(dir, &first);
    fails(dir, &first, 2, &["error[out]", "step-4", "--resume"]);
    let again = args("out", &["--steps 8 --save-every 2 --resume"]);
    let resume = |old: &str, new: &'static str, says: &[&str]| {
        fails(dir, &with(again.clone(), old, new), 2, says);
    };
    let changed = "the model, its loss or its optimizer has changed";
    resume("model.onnx", "other.onnx", &["error[resume]", changed]);
    let data = ["error[resume]", "the data has changed", "step-4"];
    resume("tokens.bin", "other.bin", &data);
    for (more, says) in [
        ("--optimizer sgd", changed),
        ("--seed 1", "the seed has changed"),
    ] {
        let words = [&again[..], &words(more)].concat();
        fails(dir, &words, 2, &["error[resume]", says]);
    }
    let newest = dir.join("out/checkpoints/step-4/parameters.safetensors");
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let damaged = ["error[checkpoint]", "is damaged", "goes on from", "step-2"];
    fails(dir, &again, 2, &damaged);
    std::fs::remove_dir_all(dir.join("out/checkpoints/step-4")).unwrap();
    assert!(stderr(&done(dir, &again)).contains("other settings"));
    // A place where nothing can be made.
    for out in ["/proc/none", "tokens.bin/out"] {
        fails(dir, &args(out, &["--steps 4"]), 5, &["error[write]"]);
    }
}

#[test]
fn numbers_that_are_not_finite_end_the_run_at_their_node() {
    let dir = workplace();
    let words = with(args("out", &["--steps 8 --save-every 1"]), "1e-2", "1e30");
    let says = [
        "error[finite]: step 2",
        "at: node",
        "model.norm",
        "checkpoints/step-1",
    ];
    fails(dir.path(), &words, 4, &says);
    assert_eq!(steps(&dir.path().join("out")).len(), 1);
}

/// A library that makes calls of the process it is loaded into fail.
fn shim(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/full_disk.c");
    let library = dir.join("full_disk.so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]);
    let made = compiler.arg(&library).arg(source).arg("-ldl").output();
    let made = made.expect("the C compiler runs");
    assert!(made.status.success(), "{}", stderr(&made));
    library
}

/// Runs where a variable of the library makes the disk refuse.
fn refused(dir: &Path, library: &Path, (key, value): (&str, &str), args: &[&str]) -> Output {
    let mut command = command(dir);
    command.args(args).env("LD_PRELOAD", library);
    command.env(key, value).output().unwrap()
}

fn copied(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in files(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copied(&from, &to),
            false => drop(std::fs::copy(&from, &to).unwrap()),
        }
    }
}

#[test]
fn a_disk_that_is_full_at_any_write_loses_nothing() {
    let dir = workplace();
    let dir = dir.path();
    let library = shim(dir);
    let more = "--save-every 1 --eval-data other.bin";
    done(dir, &args("base", &["--steps 2", more]));
    copied(&dir.join("base"), &dir.join("whole"));
    let rest = ["--steps 4 --resume", more];
    done(dir, &args("whole", &rest));
    let mut places = std::collections::BTreeSet::new();
    let mut write = 0;
    loop {
        write += 1;
        let out = format!("full-{write}");
        copied(&dir.join("base"), &dir.join(&out));
        let variable = ("FULL_DISK_AT", &*write.to_string());
        let ended = refused(dir, &library, variable, &args(&out, &rest));
        if code(&ended) == 0 {
            break;
        }
        let said = stderr(&ended);
        assert_eq!(code(&ended), 5, "write {write}: {said}");
        for part in ["error[write]", "No space left on device", "free some space"] {
            assert!(said.contains(part), "write {write}: no `{part}` in {said}");
        }
        let place = said
            .lines()
            .find_map(|line| line.trim().strip_prefix("at: "));
        let place = place.unwrap_or_else(|| panic!("write {write}: no place in {said}"));
        let name = place.rsplit('/').next().unwrap();
        places.insert(name.to_string());
        // The newest checkpoint is whole, and the run goes on from it.
        let run = dir.join(&out);
        let saved = Checkpoints::open(&run, 2).unwrap();
        let newest = saved.read().unwrap().unwrap().manifest.step;
        assert!(newest >= 2, "write {write}: {newest}");
        if name.starts_with("step-") || name == "model.safetensors" {
            assert!(
                said.contains(&format!("checkpoints/step-{newest}")),
                "{said}"
            );
        }
        done(dir, &args(&out, &rest));
        for name in ["model.safetensors", "checkpoints/step-4/states.safetensors"] {
            let [a, b] =
                ["whole", &out].map(|run| std::fs::read(dir.join(run).join(name)).unwrap());
            assert!(a == b, "write {write}: {name} differs");
        }
        assert_eq!(steps(&dir.join("whole")), steps(&run), "write {write}");
        std::fs::remove_dir_all(run).unwrap();
    }
    for name in [
        "metrics.jsonl",
        "step-4",
        "model.safetensors",
        "report.html",
    ] {
        assert!(
            places.contains(name),
            "no write of {name} failed: {places:?}"
        );
    }
    println!("{} writes, to {places:?}", write - 1);
}

#[test]
fn a_folder_that_is_read_only_stays_as_it_is() {
    let dir = workplace();
    let dir = dir.path();
    let library = shim(dir);
    done(dir, &args("out", &["--steps 2 --save-every 1"]));
    let run = dir.join("out");
    let before = (
        files(&run),
        checkpoints(&run),
        std::fs::read(run.join("metrics.jsonl")).unwrap(),
    );
    let rest = args("out", &["--steps 4 --save-every 1 --resume"]);
    let ended = refused(dir, &library, ("READ_ONLY_BELOW", "out"), &rest);
    let said = stderr(&ended);
    assert_eq!(code(&ended), 5, "{said}");
    for part in ["error[write]", "Read-only file system", "at: out"] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    let after = (
        files(&run),
        checkpoints(&run),
        std::fs::read(run.join("metrics.jsonl")).unwrap(),
    );
    assert_eq!(before, after);
    done(dir, &rest);
}

/// Writes a text of a few words, and a tokenizer that gives the last of them a number.
fn text(dir: &Path, name: &str, last: u32) {
    let vocabulary = format!("{{\"[UNK]\": 0, \"cat\": 1, \"dog\": {last}}}");
    let tokenizer = format!(
        "{{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": [], \"normalizer\": null, \
          \"pre_tokenizer\": {{\"type\": \"Whitespace\"}}, \"post_processor\": null, \"decoder\": null, \
          \"model\": {{\"type\": \"WordLevel\", \"unk_token\": \"[UNK]\", \"vocab\": {vocabulary}}}}}"
    );
    std::fs::write(dir.join(name), tokenizer).unwrap();
    let lines = "{\"text\": \"cat cat cat cat dog\"}\n".repeat(40);
    std::fs::write(dir.join("corpus.jsonl"), lines).unwrap();
}

#[test]
fn another_tokenizer_is_refused() {
    let dir = workplace();
    let dir = dir.path();
    for (name, last) in [("own.json", 2), ("other.json", 3), ("large.json", 100_000)] {
        text(dir, name, last);
    }
    let run = |tokenizer: &'static str, more: &'static str| {
        with(
            args("out", &["--tokenizer", tokenizer, more]),
            "tokens.bin",
            "corpus.jsonl",
        )
    };
    let large = run("large.json", "--steps 2");
    let says = [
        "error[data]",
        "token 100000 (`dog`)",
        "use the tokenizer of the model",
        "corpus.jsonl, line 1",
    ];
    fails(dir, &large, 2, &says);
    done(dir, &run("own.json", "--steps 2 --save-every 1"));
    let rest = "--steps 4 --save-every 1 --resume";
    let says = ["error[resume]", "the tokenizer has changed", "step-2"];
    fails(dir, &run("other.json", rest), 2, &says);
    assert_eq!(checkpoints(&dir.join("out")), ["step-1", "step-2"]);
    done(dir, &run("own.json", rest));
}
