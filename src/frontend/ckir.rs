//! `.ckir`: the compiler's own text form, read as a model like any other.
//!
//! A text shows large constants as a hash of their bytes; such a model can be inspected, planned and rewritten like
//! one whose weight file is absent. Recognised by its content: text whose first word is `graph`.

use super::given::Given;
use super::reader::{Frontend, Model};
use crate::frontend::file::io_error;
use ckpt_passes::{Error, Result, text};
use std::path::Path;

/// The reader of `.ckir` text.
pub struct Ckir;

impl Frontend for Ckir {
    fn name(&self) -> &'static str {
        "ckir text"
    }

    fn recognises(&self, path: &Path, head: &[u8]) -> bool {
        match first_word(head) {
            Some(word) => word == b"graph",
            // Comments may fill all that was read: then the name has to tell.
            None => !head.is_empty() && path.extension().is_some_and(|e| e == "ckir"),
        }
    }

    fn read(&self, path: &Path, given: &Given) -> Result<Model> {
        given.refuse_output_names(self.name())?;
        let place = || path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| io_error("read the model", path, &e))?;
        let source = String::from_utf8(bytes)
            .map_err(|e| Error::model("text", format!("the file is not UTF-8: {e}")).at(place()))?;
        let graph = text::parse(&source).map_err(|e| e.at(place()))?;
        Ok(Model {
            graph,
            warnings: Vec::new(),
            recorded: Vec::new(),
        })
    }
}

/// The first word that is not in a comment; `None` where `head` ends before there is one.
fn first_word(head: &[u8]) -> Option<&[u8]> {
    for line in head.split(|b| *b == b'\n') {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b";") {
            continue;
        }
        let end = line
            .iter()
            .position(|b| !b.is_ascii_alphanumeric())
            .unwrap_or(line.len());
        return Some(&line[..end]);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognised_by_its_first_word() {
        let named = Path::new("a.ckir");
        let other = Path::new("a.txt");
        assert!(Ckir.recognises(other, b"; a comment\n\n  graph @g imported () -> () {\n"));
        assert!(!Ckir.recognises(named, b"graphics\n"));
        assert!(!Ckir.recognises(named, b"\x08\x0a"));
        assert!(Ckir.recognises(named, b"; only a comm"));
        assert!(!Ckir.recognises(other, b"; only a comm"));
    }
}
