//! Text from lines of JSON and from plain files.

use super::files::Shard;
use super::writer::TokenWriter;
use crate::frontend::file::{io_error, map};
use ckpt_passes::{Error, Result};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};

/// The longest line of JSON.
const MAX_LINE_BYTES: u64 = 1 << 28;
/// The field of a line that holds a chat.
pub(super) const MESSAGES: &str = "messages";
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads lines of JSON, from a file or stdin. Empty lines are skipped.
///
/// # Errors
/// A line that is too long, not UTF-8, no JSON, or without text.
pub(super) fn json_lines(shard: &Shard, column: &str, out: &mut TokenWriter) -> Result<()> {
    let source: Box<dyn Read> = match shard.is_stdin() {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(
            File::open(&shard.path).map_err(|e| io_error("open the data", &shard.path, &e))?,
        ),
    };
    let mut source = BufReader::with_capacity(1 << 18, source);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let mut limited = source.by_ref().take(MAX_LINE_BYTES + 1);
        let read = limited.read_until(b'\n', &mut line);
        if read.map_err(|e| io_error("read the data", &shard.path, &e))? == 0 {
            break;
        }
        let at = || format!("{}, line {number}", shard.name());
        if line.len() as u64 > MAX_LINE_BYTES {
            return Err(Error::usage("data", "the line is too long")
                .at(at())
                .expected(format!("at most {} MiB", MAX_LINE_BYTES >> 20)));
        }
        let text = match number {
            1 => line.strip_prefix(BOM).unwrap_or(&line),
            _ => &line[..],
        };
        if !text.trim_ascii().is_empty() {
            json_line(text, column, number, out).map_err(|e| e.at(at()))?;
        }
    }
    Ok(())
}

fn json_line(line: &[u8], column: &str, number: u64, out: &mut TokenWriter) -> Result<()> {
    let line = std::str::from_utf8(line).map_err(|e| {
        Error::usage("data", "the line is not UTF-8")
            .found(format!("a wrong byte at column {}", e.valid_up_to() + 1))
    })?;
    let fields: Map<String, Value> = serde_json::from_str(line).map_err(|e| {
        Error::usage("data", "the line is no JSON object")
            .expected(format!(
                "{{\"{column}\": \"…\"}} or {{\"{MESSAGES}\": […]}}"
            ))
            .found(e.to_string())
    })?;
    match (fields.get(column), fields.get(MESSAGES)) {
        (Some(Value::String(text)), _) => out.text(number, text),
        (None, Some(messages)) => out.chat(number, messages, fields.get("tools")),
        (Some(_), _) => Err(Error::usage("data", format!("`{column}` is no text"))),
        (None, None) => {
            let names: Vec<&str> = fields.keys().map(String::as_str).take(10).collect();
            let what = format!("there is no `{column}` and no `{MESSAGES}`");
            Err(Error::usage("data", what)
                .found(if names.is_empty() {
                    "no fields".into()
                } else {
                    names.join(", ")
                })
                .help("name the field that holds the text"))
        }
    }
}

/// Reads a file as one document.
///
/// # Errors
/// Text that is not UTF-8.
pub(super) fn plain(shard: &Shard, out: &mut TokenWriter) -> Result<()> {
    let bytes = map(&shard.path)?;
    let bytes = bytes.strip_prefix(BOM).unwrap_or(&bytes);
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = 1 + bytes[..e.valid_up_to()]
            .iter()
            .filter(|b| **b == b'\n')
            .count();
        Error::usage("data", "the file is not UTF-8").at(format!("{}, line {line}", shard.name()))
    })?;
    out.text(1, text)
}
