//! `--config FILE`: options from a file, where the command line does not give them.
//!
//! The file is one JSON object, `{"budget": "60%", "dim": ["batch=8"], "no-fuse": true}`: long names of options without
//! their dashes; text, numbers, truth values, or lists for options that may be repeated. It becomes words of the command
//! line before that is parsed, so that values mean the same in both and errors are the same. Options that exclude each
//! other (a budget, a policy, a plan) are one: who says one of them on the command line has said all.

use super::args::Cli;
use ckpt_passes::near::nearest;
use ckpt_passes::{Error, Result};
use clap::CommandFactory;
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::Path;

/// Of these the command line gives one for all.
const ONE_OF: [&str; 3] = ["budget", "policy", "plan-in"];

/// The words of the command line, with those of the file that it names.
///
/// # Errors
/// A file that cannot be read or is not such an object; an option that no command has.
pub fn applied(mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    let Some(path) = taken(&mut words)? else {
        return Ok(words);
    };
    let given = read(Path::new(&path)).map_err(|e| e.at(Path::new(&path).display().to_string()))?;
    let cli = Cli::command();
    let verb = words
        .get(1)
        .and_then(|w| cli.find_subcommand(w.to_string_lossy().as_ref()));
    let has = |command: &clap::Command, name: &str| {
        let mut all = command.get_arguments();
        all.any(|a| a.get_long() == Some(name))
    };
    let said = |name: &str| {
        let (long, with_value) = (format!("--{name}"), format!("--{name}="));
        words.iter().any(|w| {
            let w = w.to_string_lossy();
            w == long || w.starts_with(&with_value)
        })
    };
    let settled = ONE_OF.iter().any(|name| said(name));
    let mut added: Vec<OsString> = Vec::new();
    for (name, value) in &given {
        if !cli.get_subcommands().any(|c| has(c, name)) {
            let all = cli.get_subcommands().flat_map(|c| c.get_arguments());
            let near = nearest(name, all.filter_map(|a| a.get_long()), 3);
            let error = Error::usage("config", format!("no command has an option `--{name}`"));
            return Err(match near.as_slice() {
                [] => error,
                near => error.help(format!("did you mean {}?", near.join(", "))),
            });
        }
        let is_settled = settled && ONE_OF.contains(&name.as_str());
        if is_settled || said(name) || !verb.is_some_and(|v| has(v, name)) {
            continue;
        }
        match value {
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
    words.splice(2.min(words.len())..2.min(words.len()), added);
    Ok(words)
}

/// Takes `--config FILE` out of the words. What follows `--` is no option.
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
            format!("`{name}` has a value that is no option's: {other}"),
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

    #[test]
    fn the_command_line_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.json");
        let text =
            r#"{"budget": "60%", "dim": ["batch=8", "seq=4"], "link-weights": true, "points": 3}"#;
        std::fs::write(&path, text).unwrap();
        let with = |line: &str| {
            let line = line.replace("CONFIG", &path.display().to_string());
            let all = applied(words(&line)).unwrap();
            let all: Vec<String> = all.into_iter().map(|w| w.into_string().unwrap()).collect();
            all.join(" ")
        };
        assert_eq!(
            with("ckpt-opt optimize m.onnx --config CONFIG"),
            "ckpt-opt optimize --budget=60% --dim=batch=8 --dim=seq=4 --link-weights m.onnx"
        );
        // What plan does not have is for others; a policy said is a budget said.
        assert_eq!(
            with("ckpt-opt plan m.onnx --config=CONFIG --policy full --dim batch=1"),
            "ckpt-opt plan m.onnx --policy full --dim batch=1"
        );
        assert_eq!(
            with("ckpt-opt plan m.onnx -- --config"),
            "ckpt-opt plan m.onnx -- --config"
        );
        for (text, says) in [
            ("{\"bugdet\": 1}", "did you mean budget"),
            ("[1]", "not an object of options"),
            ("{\"dim\": [{}]}", "no option's"),
        ] {
            std::fs::write(&path, text).unwrap();
            let line = format!("ckpt-opt plan m.onnx --config {}", path.display());
            let error = applied(words(&line)).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(says), "{error}");
        }
        assert!(applied(words("ckpt-opt plan --config")).is_err());
    }
}
