//! `--config FILE`: options from a file, where the command line does not give them.
//!
//! The file is one JSON object, `{"budget": "60%", "dim": ["batch=8"], "fuse": false}`: long names of options without
//! dashes, and text, numbers, truth values, or lists for options that may be repeated. The options become words of the
//! command line before that is parsed, so values and errors are the same in both. Budget, policy and stored plan exclude
//! each other: any of them on the command line replaces all of them in the file.

use super::replaced;
use ckpt_passes::near::nearest;
use ckpt_passes::{Error, Result};
use clap::{Arg, Command};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::Path;

/// Options that exclude each other.
const ONE_OF: [&str; 3] = ["budget", "policy", "plan-in"];

/// Returns the words of the command line, with those of the file that it names. `cli` declares all options.
///
/// # Errors
/// A file that cannot be read or is no such object; an option that no command has.
pub fn applied(mut words: Vec<OsString>, cli: &Command) -> Result<Vec<OsString>> {
    let Some(path) = taken(&mut words)? else {
        return Ok(words);
    };
    let given = read(Path::new(&path)).map_err(|e| e.at(Path::new(&path).display().to_string()))?;
    let verb = words
        .get(1)
        .map_or_else(Default::default, |w| w.to_string_lossy());
    let command = cli.find_subcommand(verb.as_ref());
    let said = |name: &str| {
        let (long, with_value) = (format!("--{name}"), format!("--{name}="));
        words.iter().any(|w| {
            let w = w.to_string_lossy();
            w == long || w.starts_with(&with_value)
        })
    };
    let is_settled = ONE_OF.iter().any(|name| said(name));
    let mut added: Vec<OsString> = Vec::new();
    for (name, value) in &given {
        let all = || cli.get_subcommands().flat_map(Command::get_arguments);
        let is_it = |a: &&Arg| a.get_long() == Some(name);
        if !all().any(|a| is_it(&a)) {
            let near = nearest(name, all().filter_map(|a| a.get_long()), 3);
            let error = Error::usage("config", format!("no command has an option `--{name}`"));
            return Err(match (replaced::spelling(&verb, name), near.as_slice()) {
                (Some(new), _) => error.help(format!("write {new}")),
                (None, []) => error,
                (None, near) => error.help(format!("did you mean {}?", near.join(", "))),
            });
        }
        let Some(option) = command.and_then(|c| c.get_arguments().find(is_it)) else {
            continue;
        };
        if said(name) || is_settled && ONE_OF.contains(&name.as_str()) {
            continue;
        }
        match value {
            Value::Bool(on) if option.get_action().takes_values() => {
                added.push(format!("--{name}={}", if *on { "on" } else { "off" }).into());
            }
            Value::Bool(true) => added.push(format!("--{name}").into()),
            Value::Bool(false) => {}
            Value::Array(list) => {
                for item in list {
                    added.push(word(name, item)?);
                }
            }
            one => added.push(word(name, one)?),
        }
    }
    let after_verb = 2.min(words.len());
    words.splice(after_verb..after_verb, added);
    Ok(words)
}

/// Removes `--config FILE` from the words and returns the file. Words after `--` are no options.
fn taken(words: &mut Vec<OsString>) -> Result<Option<OsString>> {
    let end = words.iter().position(|w| w == "--").unwrap_or(words.len());
    let is_ours = |w: &OsString| w == "--config" || w.to_string_lossy().starts_with("--config=");
    let Some(at) = words[..end].iter().position(is_ours) else {
        return Ok(None);
    };
    let word = words.remove(at);
    if let Some(path) = word.to_string_lossy().strip_prefix("--config=") {
        return Ok(Some(path.into()));
    }
    if at >= words.len() {
        return Err(Error::usage("config", "--config needs a file"));
    }
    Ok(Some(words.remove(at)))
}

fn read(path: &Path) -> Result<Map<String, Value>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::usage("file", format!("cannot read the file: {e}")))?;
    serde_json::from_str(&text).map_err(|e| {
        Error::usage("config", format!("this is not an object of options: {e}"))
            .expected("{\"budget\": \"60%\", \"dim\": [\"batch=8\"]}")
    })
}

fn word(name: &str, value: &Value) -> Result<OsString> {
    match value {
        Value::String(text) => Ok(format!("--{name}={text}").into()),
        Value::Number(n) => Ok(format!("--{name}={n}").into()),
        other => Err(Error::usage(
            "config",
            format!("`{name}` has a value that no option takes: {other}"),
        )
        .expected("text, a number, true, or a list of texts and numbers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(Into::into).collect()
    }

    fn command() -> Command {
        let option = |name: &'static str| Arg::new(name).long(name);
        let flag = option("link-weights").action(clap::ArgAction::SetTrue);
        let shared = ["budget", "policy", "dim", "fuse"].map(option);
        let optimize = Command::new("optimize").args(shared.clone()).arg(flag);
        let frontier = Command::new("frontier").arg(option("points"));
        Command::new("ckpt-opt")
            .subcommand(optimize)
            .subcommand(Command::new("plan").args(shared))
            .subcommand(frontier)
    }

    #[test]
    fn the_command_line_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.json");
        let text = r#"{"budget": "60%", "dim": ["batch=8", "seq=4"], "link-weights": true, "fuse": false, "points": 3}"#;
        std::fs::write(&path, text).unwrap();
        let with = |line: &str| {
            let line = line.replace("CONFIG", &path.display().to_string());
            let all = applied(words(&line), &command()).unwrap();
            let all: Vec<String> = all.into_iter().map(|w| w.into_string().unwrap()).collect();
            all.join(" ")
        };
        assert_eq!(
            with("ckpt-opt optimize m.onnx --config CONFIG"),
            "ckpt-opt optimize --budget=60% --dim=batch=8 --dim=seq=4 --fuse=off --link-weights m.onnx"
        );
        // Options that the command lacks are skipped, and a policy on the command line replaces the budget.
        assert_eq!(
            with("ckpt-opt plan m.onnx --config=CONFIG --policy full --dim batch=1"),
            "ckpt-opt plan --fuse=off m.onnx --policy full --dim batch=1"
        );
        assert_eq!(
            with("ckpt-opt plan m.onnx -- --config"),
            "ckpt-opt plan m.onnx -- --config"
        );
        for (text, says) in [
            ("{\"bugdet\": 1}", "did you mean budget"),
            ("[1]", "not an object of options"),
            ("{\"dim\": [{}]}", "no option takes"),
            ("{\"no-fuse\": true}", "write --fuse off"),
        ] {
            std::fs::write(&path, text).unwrap();
            let line = format!("ckpt-opt plan m.onnx --config {}", path.display());
            let error = applied(words(&line), &command()).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(says), "{error}");
        }
        assert!(applied(words("ckpt-opt plan --config"), &command()).is_err());
    }
}
