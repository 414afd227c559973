//! What is shown where somebody looks, and where nobody does: colour, progress, `NO_COLOR`, `-q`, `-v`.
#![cfg(unix)]

use crate::support::command;

use command::{call, code, command_with, stderr, workplace};
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Both ends of a terminal of 100 columns.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (0, 0);
    let mut size = libc::winsize {
        ws_row: 40,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: both numbers are written before they are used, and each becomes the property of one owner.
    unsafe {
        #[allow(
            clippy::unnecessary_mut_passed,
            reason = "the size is a mutable pointer on macOS"
        )]
        let done = libc::openpty(
            &mut ours,
            &mut theirs,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &mut size,
        );
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    }
}

/// What a terminal shows of stderr until the command ends, shows `word`, or has run for `most`.
fn on_a_terminal(
    dir: &Path,
    args: &[&str],
    environment: &[(&str, &str)],
    (word, most): (&str, Duration),
) -> String {
    let (mut ours, theirs) = terminal();
    let mut process = command_with(dir, args);
    process.env("TERM", "xterm").env_remove("NO_COLOR");
    process.envs(environment.iter().copied());
    process.stdout(Stdio::null()).stderr(theirs);
    let mut child = process.spawn().unwrap();
    // The other end is closed with the child's: `process` holds it until then.
    drop(process);
    let (say, hear) = channel();
    let reader = std::thread::spawn(move || {
        let mut piece = [0; 4096];
        // At the end the system says that there is no such device.
        while let Ok(n @ 1..) = ours.read(&mut piece) {
            let _ = say.send(String::from_utf8_lossy(&piece[..n]).into_owned());
        }
    });
    let (started, mut seen) = (Instant::now(), String::new());
    while let Ok(piece) = hear.recv_timeout(most.saturating_sub(started.elapsed())) {
        seen += &piece;
        if seen.contains(word) {
            break;
        }
    }
    let _ = child.kill();
    child.wait().unwrap();
    reader.join().unwrap();
    seen
}

const ESCAPE: char = '\u{1b}';

#[test]
fn colour_is_for_terminals_that_want_it() {
    let dir = workplace();
    let wrong = ["inspect", "none.onnx"];
    let whole = ("nothing", Duration::from_secs(60));
    let seen = on_a_terminal(dir.path(), &wrong, &[], whole);
    assert!(seen.contains(ESCAPE) && seen.contains("error"), "{seen:?}");
    let plain = on_a_terminal(dir.path(), &wrong, &[("NO_COLOR", "1")], whole);
    assert!(
        plain.contains("error[file]") && !plain.contains(ESCAPE),
        "{plain:?}"
    );
    let piped = call(dir.path(), &wrong);
    assert!(!stderr(&piped).contains(ESCAPE), "{}", stderr(&piped));
}

/// The search takes longer than a second; nobody waits for its end.
#[test]
fn progress_is_for_terminals_and_not_for_the_quiet() {
    let dir = workplace();
    let long = "plan model.onnx --dim batch=4 --budget 60% --effort thorough";
    let long: Vec<&str> = long.split(' ').collect();
    let patient = ("planning", Duration::from_secs(60));
    let seen = on_a_terminal(dir.path(), &long, &[], patient);
    assert!(seen.contains("planning"), "{seen:?}");
    let plain = on_a_terminal(dir.path(), &long, &[("NO_COLOR", "1")], patient);
    assert!(
        plain.contains("planning") && !plain.contains("\u{1b}[36m"),
        "{plain:?}"
    );
    let quiet: Vec<&str> = long.iter().copied().chain(["-q"]).collect();
    let a_while = ("planning", Duration::from_millis(2500));
    assert_eq!(on_a_terminal(dir.path(), &quiet, &[], a_while), "");
}

/// Nothing but warnings and errors goes into a pipe.
#[test]
fn pipes_hear_no_progress() {
    let dir = workplace();
    let long = "plan model.onnx --dim batch=4 --budget 60% --effort thorough";
    let mut process = command_with(dir.path(), &long.split(' ').collect::<Vec<_>>());
    process.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = process.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let _ = child.kill();
    let done = child.wait_with_output().unwrap();
    assert_eq!(stderr(&done), "");
}

#[test]
fn quiet_says_only_errors_and_prints_no_table_beside_a_file() {
    let dir = workplace();
    let none = |args: &[&str]| {
        let done = call(dir.path(), args);
        assert_eq!(code(&done), 0, "{}", stderr(&done));
        assert!(done.stdout.is_empty() && done.stderr.is_empty(), "{args:?}");
    };
    none(&["model.onnx", "-o", "t.onnx", "--policy", "full", "-q"]);
    none(&[
        "plan",
        "model.onnx",
        "--policy",
        "full",
        "--plan-out",
        "p.json",
        "-q",
    ]);
    none(&[
        "plan",
        "graph.json.gz",
        "--policy",
        "none",
        "--plan-out",
        "s.json",
        "-q",
    ]);
    none(&[
        "plan",
        "model.onnx",
        "--policy",
        "full",
        "--report",
        "p.dot",
        "-q",
    ]);
    none(&[
        "frontier",
        "graph.json.gz",
        "--budgets",
        "80%",
        "--effort",
        "first",
        "--svg",
        "f.svg",
        "-q",
    ]);
    // Where the table is what was asked for it is printed.
    let table = call(
        dir.path(),
        &["plan", "model.onnx", "--policy", "full", "-q"],
    );
    assert!(!table.stdout.is_empty() && table.stderr.is_empty());
    let wrong = call(dir.path(), &["inspect", "none.onnx", "-q"]);
    assert_eq!(code(&wrong), 2);
    assert!(stderr(&wrong).contains("error[file]"));
    let both = call(dir.path(), &["inspect", "model.onnx", "-q", "-v"]);
    assert_eq!(code(&both), 2);
}

#[test]
fn verbose_tells_the_time_of_each_pass() {
    let dir = workplace();
    let made = ["model.onnx", "-o", "t.onnx", "--policy", "full"];
    let done = call(dir.path(), &[&made[..], &["-v"]].concat());
    assert_eq!(code(&done), 0);
    for pass in ["infer", "autodiff", "remat"] {
        assert!(stderr(&done).contains(pass), "{}", stderr(&done));
    }
    assert!(!stderr(&call(dir.path(), &made)).contains("autodiff"));
}
