//! `--config FILE`: options from a file, where the command line does not give them.
//!
//! The file is TOML (`.toml`) or one JSON object, `{"budget": "60%", "dim": ["batch=8"], "fuse": false}`: long names of options
//! without dashes, and text, numbers, truth values, or lists for options that may be repeated. The options become words of the
//! command line before that is parsed, so values and errors are the same in both.
//!
//! An option on the command line replaces that of the file, and those of the file that it excludes. Lists are added up, but
//! for entries of one name (`--dim batch=2`) and for lists that mean something only as a whole.

use super::replaced;
use ckpt_passes::near::nearest;
use ckpt_passes::{Error, Result};
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

/// Lists that mean something only as a whole: the command line replaces them.
const WHOLE: [&str; 2] = ["output-names", "budgets"];

/// The words of the command line, with those of a file.
pub struct Applied {
    /// What to parse.
    pub words: Vec<OsString>,
    /// The file, if one was named.
    file: Option<PathBuf>,
    /// The words that come from the file.
    added: Vec<OsString>,
}

/// Adds the options of the file that the command line names. `cli` declares all options; the verb stands at `verb`.
///
/// # Errors
/// A file that cannot be read or has no options; an option that no command has.
pub fn applied(mut words: Vec<OsString>, verb: usize, cli: &Command) -> Result<Applied> {
    // What cannot be parsed is an error later.
    let said = cli.clone().ignore_errors(true).try_get_matches_from(&words);
    let said = said.ok();
    let said = said.as_ref().and_then(ArgMatches::subcommand);
    let file = said.and_then(|(_, said)| said.get_one::<PathBuf>("config"));
    let (Some((name, said)), Some(file)) = (said, file) else {
        let (file, added) = (None, Vec::new());
        return Ok(Applied { words, file, added });
    };
    let at = |e: Box<Error>| e.at(file.display().to_string());
    let mut added = Vec::new();
    for (option, value) in read(file).map_err(at)?.0 {
        check_known(&option, name, cli).map_err(at)?;
        if let Some(command) = cli.find_subcommand(name) {
            add(&mut added, (&option, &value), command, said).map_err(at)?;
        }
    }
    let after = (verb + 1).min(words.len());
    words.splice(after..after, added.iter().cloned());
    Ok(Applied {
        words,
        file: Some(file.clone()),
        added,
    })
}

impl Applied {
    /// Returns the file, if an error of the parser is about a word of it.
    pub fn place(&self, error: &clap::Error) -> Option<&Path> {
        let told = [ContextKind::InvalidArg, ContextKind::PriorArg];
        let told = told.into_iter().filter_map(|kind| error.get(kind));
        let is_told = |word: &OsString| {
            let word = word.to_string_lossy();
            let (option, value) = word.split_once('=').unwrap_or((word.as_ref(), ""));
            let is_value = match error.get(ContextKind::InvalidValue) {
                Some(ContextValue::String(invalid)) => value.contains(invalid.as_str()),
                _ => true,
            };
            let is_option = |text: &str| text.split([' ', '=']).next() == Some(option);
            is_value
                && told.clone().any(|told| match told {
                    ContextValue::String(text) => is_option(text),
                    ContextValue::Strings(texts) => texts.iter().any(|text| is_option(text)),
                    _ => false,
                })
        };
        self.file
            .as_deref()
            .filter(|_| self.added.iter().any(is_told))
    }
}

/// # Errors
/// `error[config]` for a name that is no option of any command.
fn check_known(option: &str, verb: &str, cli: &Command) -> Result<()> {
    let all = || cli.get_subcommands().flat_map(Command::get_arguments);
    if all().any(|arg| arg.get_long() == Some(option)) {
        return Ok(());
    }
    let near = nearest(option, all().filter_map(Arg::get_long), 3);
    let error = Error::usage("config", format!("no command has an option `--{option}`"));
    Err(match (replaced::spelling(verb, option), near.as_slice()) {
        (Some(new), _) => error.help(format!("write {new}")),
        (None, []) => error,
        (None, near) => error.help(format!("did you mean {}?", near.join(", "))),
    })
}

/// Adds the words of one option of the file. Options that the command does not have are left out.
fn add(
    words: &mut Vec<OsString>,
    (name, value): (&str, &Value),
    command: &Command,
    said: &ArgMatches,
) -> Result<()> {
    let mut arguments = command.get_arguments();
    let Some(option) = arguments.find(|arg| arg.get_long() == Some(name)) else {
        return Ok(());
    };
    let is_said =
        |arg: &Arg| said.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let excludes = |one: &Arg, other: &Arg| {
        let mut conflicts = command.get_arg_conflicts_with(one).into_iter();
        conflicts.any(|arg| arg.get_id() == other.get_id())
    };
    let mut others = command.get_arguments().filter(|arg| is_said(arg));
    if others.any(|other| excludes(other, option) || excludes(option, other)) {
        return Ok(());
    }
    let is_list = matches!(option.get_action(), ArgAction::Append);
    if is_said(option) && (!is_list || WHOLE.contains(&name)) {
        return Ok(());
    }
    let sign = sign(option);
    let key = |item: &str| sign.and_then(|sign| Some(item.split_once(sign)?.0.trim().to_string()));
    let own = is_said(option).then(|| said.get_raw(option.get_id().as_str()));
    let own = own.flatten().into_iter().flatten();
    let own: Vec<String> = own
        .filter_map(|item| key(&item.to_string_lossy()))
        .collect();
    let item = |value: &Value| text(name, value);
    let items: Vec<String> = match (value, sign) {
        (Value::Bool(on), _) if option.get_action().takes_values() => {
            vec![if *on { "on" } else { "off" }.into()]
        }
        (Value::Bool(on), _) => {
            words.extend(on.then(|| OsString::from(format!("--{name}"))));
            return Ok(());
        }
        (Value::Array(list), _) => list.iter().map(item).collect::<Result<_>>()?,
        // A table of names: `dim = {batch = 8}`.
        (Value::Object(table), Some(sign)) if is_list => table
            .iter()
            .map(|(key, value)| Ok(format!("{key}{sign}{}", item(value)?)))
            .collect::<Result<_>>()?,
        (one, _) => vec![item(one)?],
    };
    let is_own = |item: &String| key(item).is_some_and(|key| own.contains(&key));
    let items = items.into_iter().filter(|item| !is_own(item));
    words.extend(items.map(|item| OsString::from(format!("--{name}={item}"))));
    Ok(())
}

/// Returns the sign that ends the name in the values of an option: `=` of `NAME=N`.
fn sign(option: &Arg) -> Option<char> {
    let form = option.get_value_names()?.first()?;
    let rest = form.as_str().strip_prefix("NAME")?;
    rest.chars().next().filter(|sign| ['=', ':'].contains(sign))
}

/// Returns the position of the verb among the words: the first that is not `--config` or its file.
pub fn verb_at(words: &[OsString]) -> usize {
    let mut at = 1;
    while let Some(word) = words.get(at) {
        at += match word.as_os_str() {
            word if word == OsStr::new("--config") => 2,
            word if word.to_string_lossy().starts_with("--config=") => 1,
            _ => break,
        };
    }
    at.min(words.len())
}

/// The options of a file, in its order.
struct Options(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Options, D::Error> {
        from.deserialize_map(Read)
    }
}

struct Read;

impl<'de> Visitor<'de> for Read {
    type Value = Options;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("names of options with their values")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Options, M::Error> {
        let mut options: Vec<(String, Value)> = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, Value>()? {
            if options.iter().any(|(known, _)| *known == name) {
                return Err(M::Error::custom(format!("`{name}` is given twice")));
            }
            options.push((name, value));
        }
        Ok(Options(options))
    }
}

fn read(path: &Path) -> Result<Options> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::usage("file", format!("cannot read the file: {e}")))?;
    let is_toml = path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("toml"));
    let (options, form) = match is_toml {
        true => (
            toml::from_str(&text).map_err(|e| e.to_string()),
            "budget = \"60%\", dim = [\"batch=8\"]",
        ),
        false => (
            serde_json::from_str(&text).map_err(|e| e.to_string()),
            "{\"budget\": \"60%\", \"dim\": [\"batch=8\"]}, or TOML in a file that ends in .toml",
        ),
    };
    options.map_err(|e| {
        let what = format!("this is not an object of options: {}", e.trim_end());
        Error::usage("config", what).expected(form)
    })
}

fn text(name: &str, value: &Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(n) => Ok(n.to_string()),
        other => Err(Error::usage(
            "config",
            format!("`{name}` has a value that no option takes: {other}"),
        )
        .expected("text, a number, true or false, or a list of texts and numbers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::value_parser;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(Into::into).collect()
    }

    fn command() -> Command {
        let option = |name: &'static str| Arg::new(name).long(name);
        let list = |name: &'static str| option(name).action(ArgAction::Append);
        let flag = |name: &'static str| option(name).action(ArgAction::SetTrue);
        let shared = || {
            [
                Arg::new("model"),
                option("budget"),
                option("policy").conflicts_with("budget"),
                option("fuse"),
                option("output").short('o'),
                list("dim").value_name("NAME=N"),
                list("input").value_name("NAME:DTYPE[DIMS]"),
                list("freeze"),
                list("output-names").value_delimiter(','),
            ]
        };
        let config = option("config")
            .global(true)
            .value_parser(value_parser!(PathBuf));
        let frontier = Command::new("frontier").arg(option("points"));
        Command::new("ckpt-opt")
            .arg(config)
            .subcommand(
                Command::new("optimize")
                    .args(shared())
                    .arg(flag("link-weights")),
            )
            .subcommand(Command::new("plan").args(shared()))
            .subcommand(frontier)
    }

    fn with(file: &Path, line: &str) -> Result<String> {
        let words = words(&line.replace("FILE", &file.display().to_string()));
        let verb = verb_at(&words);
        let applied = applied(words, verb, &command())?;
        let told = |w: OsString| w.into_string().unwrap();
        let all: Vec<String> = applied.words.into_iter().map(told).collect();
        Ok(all.join(" ").replace(&file.display().to_string(), "FILE"))
    }

    #[test]
    fn the_command_line_wins() {
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("c.json");
        let toml = dir.path().join("c.toml");
        let text = r#"{"budget": "60%", "dim": ["batch=8", "seq=4"], "link-weights": true, "fuse": false, "points": 3,
            "input": "x:f32[2]", "freeze": ["a", "b"], "output-names": ["u", "v"], "output": "t.onnx"}"#;
        std::fs::write(&json, text).unwrap();
        let text = r#"
budget = "60%" # and a remark
link-weights = true
fuse = false
points = 3
input = "x:f32[2]"
freeze = ["a", "b"]
output-names = ["u", "v"]
output = "t.onnx"
[dim]
batch = 8
seq = 4
"#;
        std::fs::write(&toml, text).unwrap();
        let all = "--freeze=a --freeze=b --output-names=u --output-names=v --output=t.onnx";
        assert_eq!(
            with(&json, "ckpt-opt optimize m.onnx --config FILE").unwrap(),
            format!(
                "ckpt-opt optimize --budget=60% --dim=batch=8 --dim=seq=4 --link-weights --fuse=off --input=x:f32[2] {all} \
                 m.onnx --config FILE"
            )
        );
        assert_eq!(
            with(&toml, "ckpt-opt optimize m.onnx --config FILE").unwrap(),
            format!(
                "ckpt-opt optimize --budget=60% --link-weights --fuse=off --input=x:f32[2] {all} --dim=batch=8 --dim=seq=4 \
                 m.onnx --config FILE"
            )
        );
        // Options that the command lacks are skipped, a policy replaces the budget that it excludes, and lists are added up.
        for file in [&json, &toml] {
            assert_eq!(
                with(
                    file,
                    "ckpt-opt --config=FILE plan m.onnx --policy full --dim batch=1 -o u.onnx --freeze c --input=x:f64 \
                     --output-names w --fuse=on"
                )
                .unwrap(),
                "ckpt-opt --config=FILE plan DIM m.onnx --policy full --dim batch=1 -o u.onnx --freeze c --input=x:f64 \
                 --output-names w --fuse=on"
                    .replace("DIM", match file == &json {
                        true => "--dim=seq=4 --freeze=a --freeze=b",
                        false => "--freeze=a --freeze=b --dim=seq=4",
                    })
            );
        }
        assert_eq!(
            with(&json, "ckpt-opt plan m.onnx -- --config").unwrap(),
            "ckpt-opt plan m.onnx -- --config"
        );
    }

    #[test]
    fn what_is_wrong_in_a_file_is_told() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text, says) in [
            ("c.json", "{\"bugdet\": 1}", "did you mean budget"),
            ("c.toml", "bugdet = 1", "did you mean budget"),
            ("c.json", "[1]", "not an object of options"),
            ("c.toml", "budget 1", "not an object of options"),
            ("c.json", "{\"dim\": [{}]}", "no option takes"),
            ("c.json", "{\"fuse\": null}", "no option takes"),
            ("c.json", "{\"budget\": 1, \"budget\": 2}", "given twice"),
            (
                "c.json",
                "{\"config\": \"d.json\"}",
                "no command has an option",
            ),
            ("c.json", "{\"no-fuse\": true}", "write --fuse off"),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            let error = with(&path, "ckpt-opt plan m.onnx --config FILE").unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(says), "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}
