//! Documents that are run: every command in README and docs is executed, and what it prints is compared.
//!
//! A document is carried out from top to bottom in a folder of its own that shows the repository's fixtures and tools.
//! What a fence holds is told by its info string, and one that is not known fails, so that nothing stays untried:
//!
//! | fence | what happens |
//! |---|---|
//! | `sh` | each command must succeed |
//! | `console`, `console exit=N` | commands after `$ `; all they print, errors first, is what follows |
//! | `json file=NAME`, `text file=NAME` | the file is written |
//! | `python` | run by the interpreter of the oracles, if it is there and has what is imported |
//! | `sh setup`, `text`, `rust` | not run here: what installs or builds, pictures, and what is compiled with the documentation |
//!
//! In expected output a line `…` stands for any lines, and `…` in a line for any text. `BLESS=1` writes what was printed.
//! Without feature `torch` commands that execute graphs must say so, and what needs their files is left out.

use crate::support::command;
use crate::support::damaged;

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const WRITTEN_AFTER: [&str; 4] = ["-o", "--outputs", "--certificate", "--trace"];

/// First words of commands that may stand in `sh setup`.
const SETUP: [&str; 5] = ["cargo", "git", "cd", "tools/", "pip"];

/// The page whose examples are about files that are wrong.
const ERRORS: &str = "docs/errors.md";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Whether `line` is as `pattern` says, in which `…` stands for any text.
fn is_like(line: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    for (i, part) in parts.iter().enumerate() {
        if i + 1 == parts.len() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// Whether all of `lines` are as `patterns` say, in which a line `…` stands for any lines.
fn are_like(lines: &[&str], patterns: &[&str]) -> bool {
    match (lines, patterns) {
        (_, []) => lines.is_empty(),
        (_, ["…", more @ ..]) => (0..=lines.len()).any(|n| are_like(&lines[n..], more)),
        ([line, lines @ ..], [pattern, patterns @ ..]) => {
            is_like(line, pattern) && are_like(lines, patterns)
        }
        ([], _) => false,
    }
}

struct Reader {
    name: String,
    folder: tempfile::TempDir,
    /// Files that commands would have written which this build cannot carry out.
    absent: BTreeSet<String>,
    /// The document anew, with what was printed.
    blessed: String,
    wrong: String,
    commands: usize,
}

impl Reader {
    fn new(name: &str) -> Reader {
        let folder = tempfile::tempdir().unwrap();
        for shown in ["fixtures", "tools"] {
            std::os::unix::fs::symlink(root().join(shown), folder.path().join(shown)).unwrap();
        }
        if name == ERRORS {
            damaged::write(folder.path());
        }
        Reader {
            name: name.into(),
            folder,
            absent: BTreeSet::new(),
            blessed: String::new(),
            wrong: String::new(),
            commands: 0,
        }
    }

    fn fails(&mut self, at: usize, text: &str) {
        let _ = writeln!(self.wrong, "{}:{at}: {text}", self.name);
    }

    fn shell(&self, line: &str) -> Output {
        let line = line.replacen("cargo run --release --", "ckpt-opt", 1);
        let binary = command::binary(line.split_whitespace());
        let own = binary.parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        Command::new("sh")
            .args(["-ec", &line])
            .current_dir(self.folder.path())
            .env("PATH", format!("{}:{path}", own.display()))
            .env("COLUMNS", "100")
            .env_remove("RUST_BACKTRACE")
            .output()
            .unwrap()
    }

    /// Runs one command. What it printed, or `None` where this build cannot carry it out.
    fn carry_out(&mut self, at: usize, line: &str, expected_code: i32) -> Option<String> {
        self.commands += 1;
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.iter().any(|w| self.absent.contains(*w)) {
            return None;
        }
        let executes = words
            .windows(2)
            .any(|w| w[0] == "ckpt-opt" && command::EXECUTING.contains(&w[1]));
        let is_possible = cfg!(feature = "torch") || !executes;
        let done = self.shell(line);
        let code = command::code(&done);
        let wanted = if is_possible { expected_code } else { 5 };
        if code != wanted {
            let said = command::stderr(&done);
            self.fails(
                at,
                &format!("`{line}` ended with {code} instead of {wanted}\n{said}"),
            );
        }
        if !is_possible {
            let written = words.windows(2).filter(|w| WRITTEN_AFTER.contains(&w[0]));
            self.absent.extend(written.map(|w| w[1].to_string()));
            return None;
        }
        let printed = command::stderr(&done) + &String::from_utf8_lossy(&done.stdout);
        Some(printed)
    }

    fn script(&mut self, at: usize, body: &[&str]) {
        let whole = body.join("\n").replace("\\\n", " ");
        for line in whole
            .lines()
            .filter(|l| !l.trim().is_empty() && !l.starts_with('#'))
        {
            self.carry_out(at, line, 0);
        }
    }

    fn console(&mut self, at: usize, body: &[&str], expected_code: i32) {
        let mut lines = body.iter().peekable();
        while let Some(line) = lines.next() {
            let _ = writeln!(self.blessed, "{line}");
            let Some(first) = line.strip_prefix("$ ") else {
                self.fails(at, &format!("`{line}` comes before any command"));
                return;
            };
            let mut command = first.to_string();
            while command.ends_with('\\') {
                command.pop();
                let more = lines.next().expect("a command that goes on");
                let _ = writeln!(self.blessed, "{more}");
                command += more.trim_start();
            }
            let mut expected = Vec::new();
            while let Some(text) = lines.next_if(|l| !l.starts_with("$ ")) {
                expected.push(*text);
            }
            let printed = self.carry_out(at, &command, expected_code);
            let Some(printed) = printed else {
                for text in expected {
                    let _ = writeln!(self.blessed, "{text}");
                }
                continue;
            };
            let found: Vec<&str> = printed.lines().collect();
            if are_like(&found, &expected) {
                for text in expected {
                    let _ = writeln!(self.blessed, "{text}");
                }
            } else {
                let shown = expected.join("\n");
                self.fails(
                    at,
                    &format!("`{command}` printed\n{printed}\ninstead of\n{shown}"),
                );
                let folder = self.folder.path().display().to_string();
                self.blessed += &lasting(&printed, &folder);
            }
        }
    }

    fn python(&mut self, at: usize, body: &[&str]) {
        let interpreter = root().join(".venv/bin/python");
        let program = body.join("\n");
        if self.absent.iter().any(|file| program.contains(file)) {
            return;
        }
        let has = |modules: &str| {
            let done = Command::new(&interpreter).args(["-c", modules]).output();
            done.is_ok_and(|o| o.status.success())
        };
        let imports = body
            .iter()
            .filter(|l| l.starts_with("import ") || l.starts_with("from "));
        let imports: Vec<&str> = imports.copied().collect();
        if !has(&imports.join("\n")) {
            eprintln!(
                "{}:{at}: not run, no Python that has its modules",
                self.name
            );
            return;
        }
        self.commands += 1;
        let done = Command::new(&interpreter)
            .args(["-c", &program])
            .current_dir(self.folder.path())
            .output()
            .unwrap();
        if !done.status.success() {
            self.fails(at, &command::stderr(&done));
        }
    }

    fn fence(&mut self, at: usize, info: &str, body: &[&str]) {
        let start = self.blessed.len();
        let (kind, more) = info.split_once(' ').unwrap_or((info, ""));
        let told = |key: &str| more.split(' ').find_map(|w| w.strip_prefix(key));
        match (kind, more) {
            ("sh", "") => self.script(at, body),
            ("sh", "setup") => {
                let is_known =
                    |l: &&&str| l.trim().is_empty() || SETUP.iter().any(|s| l.starts_with(s));
                if let Some(line) = body.iter().find(|l| !is_known(l)) {
                    self.fails(at, &format!("`{line}` is no setting up"));
                }
            }
            ("console", "") => self.console(at, body, 0),
            ("console", _) if told("exit=").is_some() => {
                let code = told("exit=").and_then(|c| c.parse().ok());
                self.console(at, body, code.expect("a number after exit="));
            }
            ("json" | "text", _) if told("file=").is_some() => {
                let path = self.folder.path().join(told("file=").unwrap_or_default());
                std::fs::write(path, body.join("\n") + "\n").unwrap();
            }
            ("python", "") => self.python(at, body),
            ("text" | "rust", "") => {}
            _ => self.fails(at, &format!("a fence `{info}` is not known")),
        }
        if kind != "console" {
            self.blessed.truncate(start);
            for line in body {
                let _ = writeln!(self.blessed, "{line}");
            }
        }
    }

    fn read(&mut self, text: &str) {
        let mut lines = text.lines().enumerate();
        while let Some((at, line)) = lines.next() {
            let _ = writeln!(self.blessed, "{line}");
            let Some(info) = line.strip_prefix("```") else {
                continue;
            };
            let body: Vec<&str> = lines
                .by_ref()
                .map(|(_, l)| l)
                .take_while(|l| *l != "```")
                .collect();
            self.fence(at + 1, info, &body);
            let _ = writeln!(self.blessed, "```");
        }
    }
}

/// What is not the same twice, how long it took and where the folder was, is any text.
fn lasting(printed: &str, folder: &str) -> String {
    let mut out = String::new();
    for line in printed.lines() {
        let cut = |before: &str, end: &str| -> Option<String> {
            let (head, rest) = line.split_once(before)?;
            let (_, tail) = rest.split_once(end)?;
            Some(format!("{head}…{tail}"))
        };
        let line = match line.split_once("planned in ") {
            Some((head, _)) => cut("planned in ", " s")
                .map(|l| l.replacen(&format!("{head}…"), &format!("{head}planned in … s"), 1)),
            None => cut(folder, "\"").map(|l| l.replacen('…', "…\"", 1)),
        }
        .unwrap_or_else(|| line.to_string());
        let _ = writeln!(out, "{line}");
    }
    out
}

fn documents() -> Vec<PathBuf> {
    let top = [
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
    ];
    let mut found: Vec<PathBuf> = top.iter().map(|name| root().join(name)).collect();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some_and(|e| e == "md") => found.push(path),
                false => {}
            }
        }
    }
    found.sort();
    found
}

#[test]
fn every_command_of_every_document_runs() {
    let is_blessing = std::env::var_os("BLESS").is_some();
    let all = documents();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let (mut wrong, mut commands) = (String::new(), 0);
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(path) = all.get(i) else {
                return (wrong, commands);
            };
            let name = path.strip_prefix(root()).unwrap().display().to_string();
            let text = std::fs::read_to_string(path).unwrap();
            let mut reader = Reader::new(&name);
            reader.read(&text);
            if is_blessing && reader.blessed != text {
                std::fs::write(path, &reader.blessed).unwrap();
            }
            wrong += &reader.wrong;
            commands += reader.commands;
        }
    };
    let results: Vec<(String, usize)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let wrong: String = results.iter().map(|(w, _)| w.as_str()).collect();
    let commands: usize = results.iter().map(|(_, n)| n).sum();
    assert!(wrong.is_empty(), "{wrong}\nBLESS=1 writes what was printed");
    assert!(commands > 0, "no commands");
}

/// Links between documents lead somewhere.
#[test]
fn links_lead_somewhere() {
    let mut wrong = String::new();
    for path in documents() {
        let text = std::fs::read_to_string(&path).unwrap();
        for link in text.split("](").skip(1).filter_map(|l| l.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            let is_here = !link.contains("://") && !file.is_empty();
            if is_here && !path.parent().unwrap().join(file).exists() {
                let _ = writeln!(wrong, "{}: {link}", path.display());
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn expected_output_can_be_missed() {
    assert!(is_like("peak 3 MiB", "peak … MiB"));
    assert!(is_like("a", "a") && !is_like("ab", "a") && !is_like("a", "ab"));
    assert!(!is_like("peak 3 KiB", "peak … MiB"));
    assert!(are_like(&["a", "b", "c"], &["a", "…", "c"]));
    assert!(are_like(&["a", "c"], &["a", "…", "c"]));
    assert!(!are_like(&["a", "b"], &["a"]) && !are_like(&["a"], &["a", "b"]));
    let mut reader = Reader::new("planted");
    reader.read("```sh\nckpt-opt inspect none.onnx\n```\n```console\n$ ckpt-opt --version\nckpt-opt 99\n```\n```perl\n```\n");
    assert_eq!(
        reader.wrong.matches("planted:").count(),
        3,
        "{}",
        reader.wrong
    );
}

/// Every key that we write and every op of our own has its line on the page of the file format.
#[test]
fn the_page_of_the_file_format_is_complete() {
    let page = std::fs::read_to_string(root().join("docs/file-format.md")).unwrap();
    let mut folders = vec![root().join("src"), root().join("passes")];
    let mut keys = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for after in text.split("\"ckpt.").skip(1) {
                    let (key, _) = after.split_once('"').unwrap();
                    keys.insert(format!("ckpt.{key}"));
                }
            }
        }
    }
    // A name that a value has for a moment.
    keys.remove("ckpt.swap");
    keys.remove("ckpt.");
    assert!(keys.len() > 20, "{keys:?}");
    let ours = ckpt_passes::ops::all().filter(|op| op.domain == ckpt_passes::ir::op::Domain::Ckpt);
    let ops = ours.map(|op| op.name.to_string());
    let missing: Vec<String> = keys
        .into_iter()
        .chain(ops)
        .filter(|word| !page.contains(&format!("`{word}`")))
        .collect();
    assert!(missing.is_empty(), "docs/file-format.md misses {missing:?}");
}

/// The codes of errors that users can meet, as `(kind, code)`, from the places in the sources that make them.
fn codes() -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    let mut folders = vec![root().join("src"), root().join("passes")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" {
                folders.push(path);
                continue;
            }
            if !name.ends_with(".rs") || name == "tests.rs" || name == "testing.rs" {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let shipped = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
            for kind in ["model", "usage", "verification", "environment"] {
                for after in text[..shipped].split(&format!("Error::{kind}(")).skip(1) {
                    let code = after.trim_start().strip_prefix('"');
                    let code = code.and_then(|c| c.split_once('"'));
                    found.extend(code.map(|(code, _)| (kind.to_string(), code.to_string())));
                }
            }
        }
    }
    found
}

/// Every code has an entry, every entry a code; an entry shows its error, names the test that makes it, or says why neither can be.
#[test]
fn every_error_has_its_entry() {
    let page = std::fs::read_to_string(root().join(ERRORS)).unwrap();
    let sections = [
        ("## The request", "usage"),
        ("## The model", "model"),
        ("## A check failed", "verification"),
        ("## The environment", "environment"),
    ];
    let mut told = BTreeSet::new();
    let mut wrong = String::new();
    for (heading, kind) in sections {
        let (_, rest) = page.split_once(heading).expect("a section");
        let section = rest.split("\n## ").next().unwrap();
        for entry in section.split("\n### ").skip(1) {
            let (code, text) = entry.split_once('\n').unwrap();
            told.insert((kind.to_string(), code.to_string()));
            let is_shown = text.contains(&format!("\nerror[{code}]"));
            // What the parser of the command line refuses has no code of its own.
            let is_parsed = text.contains("\nerror: invalid value");
            let test = text
                .split("Test: `")
                .nth(1)
                .and_then(|t| t.split('`').next());
            let is_tested = test.is_some_and(|file| {
                let source = std::fs::read_to_string(root().join(file)).unwrap_or_default();
                source.contains(&format!("error[{code}]"))
                    || source.contains(&format!("\"{code}\""))
                    || file == "tests/cli/guides.rs"
            });
            if !is_shown && !is_parsed && !is_tested && !text.contains("Cannot be shown") {
                let _ = writeln!(wrong, "{kind} {code}: shown nowhere");
            }
        }
    }
    let mut known = codes();
    // Made through a helper that takes the code.
    known.extend(
        ["axis", "ranks", "recompute", "verify"].map(|c| ("model".to_string(), c.to_string())),
    );
    for (kind, code) in known.difference(&told) {
        let _ = writeln!(wrong, "{kind} {code}: no entry");
    }
    for (kind, code) in told.difference(&known) {
        let _ = writeln!(wrong, "{kind} {code}: no such error");
    }
    assert!(wrong.is_empty(), "{ERRORS}:\n{wrong}");
}
