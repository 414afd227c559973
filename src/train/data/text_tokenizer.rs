//! A tokenizer of Hugging Face's format, and what lies beside it: the end of text, and the template of chats.

use super::chat::ChatTemplate;
use super::tokens::MASKED;
use crate::frontend::file::map;
use ckpt_passes::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Tokens that end a text, where the configuration names none.
const ENDS: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]"];
/// Tokens that templates may name.
const NAMED: [&str; 4] = ["bos_token", "eos_token", "pad_token", "unk_token"];

/// A tokenizer for text.
pub(super) struct TextTokenizer {
    tokenizer: Tokenizer,
    /// The token between documents.
    pub end_of_text: Option<u32>,
    /// Where a template of chats was asked for.
    template: Option<PathBuf>,
    folder: PathBuf,
    config: Map<String, Value>,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`, or that of a folder, and the `tokenizer_config.json` beside it.
    ///
    /// # Errors
    /// A file that is absent or damaged.
    pub fn read(path: &Path, template: Option<&Path>) -> Result<TextTokenizer> {
        let path = match path.is_dir() {
            true => path.join("tokenizer.json"),
            false => path.to_path_buf(),
        };
        let damaged = |what: String| {
            Error::usage("tokenizer", "this is no tokenizer")
                .at(path.display().to_string())
                .expected("a tokenizer.json of Hugging Face's tokenizers")
                .found(what)
        };
        let bytes = map(&path)?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(|e| damaged(e.to_string()))?;
        // A file may ask to cut or pad every text.
        tokenizer
            .with_truncation(None)
            .map_err(|e| damaged(e.to_string()))?;
        tokenizer.with_padding(None);
        let folder = crate::emit::file::folder(&path).to_path_buf();
        let config = json(&folder.join("tokenizer_config.json"))?;
        let named = config.get("eos_token").and_then(token);
        let end_of_text = match named {
            Some(text) => tokenizer.token_to_id(text),
            None => ENDS.iter().find_map(|text| tokenizer.token_to_id(text)),
        };
        Ok(TextTokenizer {
            tokenizer,
            end_of_text: end_of_text.filter(|id| id & MASKED == 0),
            template: template.map(Path::to_path_buf),
            folder,
            config,
        })
    }

    /// Returns the tokens of a text, with those that a tokenizer puts around it.
    ///
    /// # Errors
    /// Text that the tokenizer refuses.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoded = self.tokenizer.encode_fast(text, special);
        let ids = encoded
            .map_err(|e| refused(&e.to_string()))?
            .get_ids()
            .to_vec();
        check_width(&ids)?;
        Ok(ids)
    }

    /// Returns the tokens of a text, of which those outside `learned` are masked.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn encode_masked(&self, text: &str, learned: &[Range<usize>]) -> Result<Vec<u32>> {
        let encoded = self
            .tokenizer
            .encode(text, false)
            .map_err(|e| refused(&e.to_string()))?;
        check_width(encoded.get_ids())?;
        let is_learned = |(begin, end): &(usize, usize)| {
            let inside = |span: &Range<usize>| {
                *begin < span.end && *end > span.start && *begin >= span.start
            };
            learned.iter().any(inside)
        };
        let pairs = encoded.get_ids().iter().zip(encoded.get_offsets());
        let masked = pairs.map(|(id, offsets)| {
            if is_learned(offsets) {
                *id
            } else {
                id | MASKED
            }
        });
        Ok(masked.collect())
    }

    /// Returns the error for a token that the model has no row for.
    pub fn beyond(&self, id: u32, below: i64) -> Box<Error> {
        let text = self.tokenizer.id_to_token(id).unwrap_or_default();
        Error::usage(
            "data",
            format!("token {id} (`{text}`) has no row in the model's table"),
        )
        .expected(format!("0 to {}", below - 1))
        .help("use the tokenizer of the model")
    }

    /// Returns the template of chats: the one asked for, or the one beside the tokenizer.
    ///
    /// # Errors
    /// No template, or one that is damaged.
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        let text = |path: &Path| -> Result<String> {
            String::from_utf8(map(path)?.to_vec()).map_err(|_| {
                Error::usage("chat-template", "the template is not UTF-8")
                    .at(path.display().to_string())
            })
        };
        let beside = self.folder.join("chat_template.jinja");
        let source = match &self.template {
            Some(path) if path.extension().is_some_and(|e| e == "json") => {
                template_of(&json(path)?)
            }
            Some(path) => Some(text(path)?),
            None if beside.is_file() => Some(text(&beside)?),
            None => template_of(&self.config),
        };
        let source = source.ok_or_else(|| {
            Error::usage("chat-template", "chats need a template, and there is none")
                .expected("chat_template.jinja, or `chat_template` in tokenizer_config.json, beside the tokenizer")
                .help("give one with --chat-template")
        })?;
        let tokens = NAMED.iter().filter_map(|name| {
            let text = self.config.get(*name).and_then(token)?;
            Some((name.to_string(), text.to_string()))
        });
        ChatTemplate::new(&source, tokens.collect::<BTreeMap<_, _>>())
    }
}

fn refused(why: &str) -> Box<Error> {
    Error::usage("tokenizer", "the tokenizer refuses this text").found(why)
}

/// Checks that the highest bit is free for masks.
fn check_width(ids: &[u32]) -> Result<()> {
    match ids.iter().find(|id| **id & MASKED != 0) {
        None => Ok(()),
        Some(id) => Err(
            Error::usage("tokenizer", format!("token {id} is too large"))
                .expected(format!("less than {MASKED}")),
        ),
    }
}

/// Reads a JSON object; an absent file is an empty one.
fn json(path: &Path) -> Result<Map<String, Value>> {
    if !path.is_file() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&map(path)?).map_err(|e| {
        Error::usage("tokenizer", "the configuration is no JSON object")
            .at(path.display().to_string())
            .found(e.to_string())
    })
}

/// Returns the text of a token of a configuration: `"</s>"` or `{"content": "</s>"}`.
fn token(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Returns the template of a configuration: a text, or the one called `default` of several.
fn template_of(config: &Map<String, Value>) -> Option<String> {
    let value = config.get("chat_template")?;
    let named = || {
        let all = value.as_array()?.iter();
        let mut default = all.filter(|t| t.get("name").and_then(Value::as_str) == Some("default"));
        default.next()?.get("template")?.as_str()
    };
    value.as_str().or_else(named).map(String::from)
}
