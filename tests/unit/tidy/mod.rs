//! House rules that a compiler does not check. Each failure names the file, the line and the rule.

mod module_graph;

use module_graph::{Crate, ModuleGraph};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// Everything that lives at the top of the repository, dotfiles aside.
const TOP: &[&str] = &[
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "build.rs",
    "clippy.toml",
    "deny.toml",
    "docs",
    "fixtures",
    "passes",
    "pyproject.toml",
    "rustfmt.toml",
    "src",
    "tests",
    "tools",
];

const MAX_LINES: usize = 1000;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Paths of the files that git tracks, relative to the root and sorted.
fn files() -> &'static [String] {
    static FILES: OnceLock<Vec<String>> = OnceLock::new();
    FILES.get_or_init(|| {
        let listed = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root())
            .output()
            .ok()
            .filter(|done| done.status.success());
        let mut files = match listed {
            Some(done) => String::from_utf8(done.stdout)
                .unwrap()
                .split_terminator('\0')
                .map(String::from)
                .collect(),
            // A source archive has no git.
            None => walk(root(), &ignored()),
        };
        files.retain(|name: &String| root().join(name).is_file());
        files.sort();
        files
    })
}

/// Names that `.gitignore` lists.
fn ignored() -> Vec<String> {
    let list = std::fs::read_to_string(root().join(".gitignore")).unwrap();
    let names = list.lines().map(|l| l.trim_matches('/').to_string());
    names.chain([".git".to_string()]).collect()
}

/// Paths of all files below `folder`, relative to the root, without names in `ignored`.
fn walk(folder: &Path, ignored: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if ignored.contains(&name) {
            continue;
        } else if path.is_dir() {
            found.extend(walk(&path, ignored));
        } else {
            let path = path.strip_prefix(root()).unwrap();
            found.push(path.to_string_lossy().into_owned());
        }
    }
    found
}

/// All files in `folders` (relative to the root) that end in one of `ends`, with their text.
fn texts(folders: &[&str], ends: &[&str]) -> Vec<(String, String)> {
    let inside = |name: &str| {
        folders
            .iter()
            .any(|f| name.strip_prefix(f).is_some_and(|n| n.starts_with('/')))
    };
    files()
        .iter()
        .filter(|name| inside(name) && ends.iter().any(|e| name.ends_with(e)))
        .filter_map(|name| {
            Some((
                name.clone(),
                std::fs::read_to_string(root().join(name)).ok()?,
            ))
        })
        .collect()
}

fn rust(folders: &[&str]) -> Vec<(String, String)> {
    let files = texts(folders, &[".rs"]);
    assert!(!files.is_empty(), "no sources under {folders:?}");
    files
}

/// Fails with every line that holds one of `words`; `allowed` exempts files.
fn forbid(files: &[(String, String)], words: &[&str], rule: &str, allowed: &dyn Fn(&str) -> bool) {
    let mut broken = String::new();
    for (name, text) in files.iter().filter(|(name, _)| !allowed(name)) {
        for (i, line) in text.lines().enumerate() {
            if let Some(word) = words.iter().find(|w| line.contains(**w)) {
                let _ = writeln!(broken, "{name}:{}: `{word}`", i + 1);
            }
        }
    }
    assert!(broken.is_empty(), "{rule}\n{broken}");
}

/// Rust without its test modules: what ships.
fn shipped(files: Vec<(String, String)>) -> Vec<(String, String)> {
    let is_test = |name: &str| {
        name.ends_with("/tests.rs")
            || name.starts_with("passes/tests/")
            || name == "passes/testing.rs"
    };
    files
        .into_iter()
        .filter(|(name, _)| !is_test(name))
        .map(|(name, text)| {
            let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
            (name, text[..end].to_string())
        })
        .collect()
}

fn nobody(_: &str) -> bool {
    false
}

#[test]
fn every_module_says_what_it_is() {
    let silent: Vec<String> = rust(&["src", "passes", "tests", "tools"])
        .into_iter()
        .filter(|(_, text)| !text.starts_with("//!"))
        .map(|(name, _)| name)
        .collect();
    assert!(
        silent.is_empty(),
        "these do not open with `//!`: {silent:?}"
    );
}

#[test]
fn no_file_is_too_long() {
    let long: Vec<String> = rust(&["src", "passes", "tests", "tools"])
        .into_iter()
        .filter(|(_, text)| text.lines().count() > MAX_LINES)
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    assert!(
        long.is_empty(),
        "split these, {MAX_LINES} lines are the limit: {long:?}"
    );
}

#[test]
fn every_op_family_is_in_the_table() {
    let table = std::fs::read_to_string(root().join("passes/ops/lib.rs")).unwrap();
    for (name, text) in rust(&["passes/ops"]) {
        let module = Path::new(&name)
            .file_stem()
            .unwrap()
            .to_string_lossy()
            .into_owned();
        if text.contains("pub const ROWS") || text.contains("pub static ROWS") {
            assert!(
                table.contains(&format!("{module}::ROWS")),
                "{name} is not listed in FAMILIES"
            );
        }
        for (i, line) in text.lines().enumerate() {
            let Some(row) = line
                .strip_prefix("pub static ")
                .and_then(|l| l.split_once(": OpDef = "))
                .map(|(row, _)| row)
            else {
                continue;
            };
            let rows = text
                .split(" ROWS:")
                .nth(1)
                .and_then(|t| t.split(';').next())
                .unwrap_or("");
            assert!(
                rows.split(|c: char| !c.is_alphanumeric() && c != '_')
                    .any(|w| w == row),
                "{name}:{}: row {row} is not in ROWS",
                i + 1
            );
        }
    }
}

#[test]
fn the_compiler_is_pure() {
    let files = shipped(rust(&["passes"]));
    let touches = [
        "std::fs",
        "std::net",
        "std::env",
        "std::process",
        "std::io",
        "println!",
        "eprintln!",
        "dbg!",
    ];
    forbid(&files, &touches, "`passes` does no I/O", &nobody);
    forbid(
        &files,
        &[" tch::", "(tch::", "use tch", "extern \"C\"", "unsafe "],
        "`passes` knows no libtorch",
        &nobody,
    );
    forbid(
        &files,
        &["HashMap<", "HashSet<"],
        "deterministic maps only: BTreeMap, or FxHash never iterated",
        &|name| {
            // The alias of a fixed hasher is fine; the standard ones have a random seed.
            files.iter().any(|(n, text)| {
                n == name
                    && (text.contains("rustc_hash") || text.contains("FxHash"))
                    && !text.contains("collections::Hash")
            })
        },
    );
}

#[test]
fn passes_never_ask_for_an_op_by_name() {
    let files = shipped(rust(&[
        "passes/analysis",
        "passes/transform",
        "passes/plan",
        "passes/planning",
    ]));
    let asks = [
        "op.name ==",
        "op.name !=",
        "match node.op.name",
        "op.name.starts_with",
        "matches!(node.op.name",
    ];
    forbid(
        &files,
        &asks,
        "what a pass needs to know about an op is a field of its row",
        &nobody,
    );
}

#[test]
fn dependencies_run_one_way() {
    forbid(
        &rust(&["passes"]),
        &["ckpt_opt"],
        "`passes` must not know `src`",
        &nobody,
    );
    for (name, manifest) in texts(&["passes"], &["Cargo.toml"]) {
        for word in ["ckpt-opt\"", "tch", "torch-sys"] {
            assert!(
                !manifest.contains(&format!("\n{word}")),
                "{name} depends on {word}"
            );
        }
    }
    let only_runtime = |name: &str| name.starts_with("src/runtime/");
    forbid(
        &rust(&["src"]),
        &[" tch::", "(tch::", "use tch", "<tch::", "&tch::"],
        "only `src/runtime` knows libtorch",
        &only_runtime,
    );
}

#[test]
fn nothing_is_left_undone() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("todo", "!("),
        concat!("unimplemented", "!("),
    ];
    let files = texts(
        &["src", "passes", "tests", "tools", "fixtures"],
        &[".rs", ".py", ".md", ".sh", ".toml"],
    );
    forbid(
        &files,
        &marks,
        "finish it, or say in words what is missing",
        &nobody,
    );
}

#[test]
fn no_path_of_some_machine() {
    let paths = [
        concat!("/wo", "rk/"),
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/us", "r/local/"),
        concat!("/op", "t/"),
        concat!("/tm", "p/"),
    ];
    let mut files = texts(
        &[
            "src", "passes", "tests", "tools", "fixtures", ".ci", ".cargo",
        ],
        &[
            ".rs", ".py", ".md", ".sh", ".toml", "/run", "/test", ".json", ".ckir",
        ],
    );
    for name in ["README.md", "ARCHITECTURE.md", "Cargo.toml"] {
        files.extend(
            std::fs::read_to_string(root().join(name))
                .ok()
                .map(|t| (name.to_string(), t)),
        );
    }
    forbid(
        &files,
        &paths,
        "a path that exists on one machine only",
        &nobody,
    );
}

#[test]
fn every_fixture_has_its_generator() {
    let shared = std::fs::read_to_string(root().join("fixtures/make.py")).unwrap_or_default();
    let mut folders = 0;
    for entry in std::fs::read_dir(root().join("fixtures")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !path.is_dir() || name.starts_with(['_', '.']) {
            continue;
        }
        folders += 1;
        let own = path.join("make.py").exists();
        assert!(
            own || shared.contains(&format!("def {name}(")),
            "fixtures/{name} has no generator"
        );
    }
    assert!(folders > 0, "no fixtures");
}

#[test]
fn the_top_of_the_house_is_fixed() {
    for name in files() {
        let top = name.split('/').next().unwrap();
        assert!(
            top.starts_with('.') || TOP.contains(&top),
            "`{top}` does not belong at the top"
        );
    }
}

/// The crates whose modules must not form a cycle, by the names of paths: libraries of the workspace, and the binary.
fn crates() -> Vec<Crate> {
    let mut crates = vec![Crate {
        name: "bin".into(),
        root: root().join("src/main.rs"),
    }];
    for manifest in files().iter().filter(|f| f.ends_with("Cargo.toml")) {
        let text = std::fs::read_to_string(root().join(manifest)).unwrap();
        let value = |key: &str| {
            let line = text.lines().find(|l| l.starts_with(key))?;
            line.split('"').nth(1).map(String::from)
        };
        let folder = root().join(manifest).parent().unwrap().to_path_buf();
        let default = folder.join("src/lib.rs");
        let library = match value("path = ") {
            Some(path) => folder.join(path),
            None => default,
        };
        if let (Some(name), true) = (value("name = "), library.is_file()) {
            crates.push(Crate {
                name: name.replace('-', "_"),
                root: library,
            });
        }
    }
    crates
}

#[test]
fn modules_depend_one_way() {
    let graph = ModuleGraph::read(&crates());
    assert!(graph.len() > 300, "only {} modules were read", graph.len());
    let cycles = graph.cycles();
    let shown: String = cycles.iter().map(|c| graph.shown(c)).collect();
    assert!(cycles.is_empty(), "{} cycles\n{shown}", cycles.len());
}
