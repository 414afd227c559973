//! Text as tokens: a temporary file with the tokens of all documents of a file.
//!
//! All threads of the machine tokenise. Documents longer than a piece are cut between words, so that the pieces have the
//! tokens of the whole where a tokenizer splits text at words first.

use super::chat::{Chat, ChatTemplate};
use super::spill::Spill;
use super::text_tokenizer::TextTokenizer;
use super::tokens::{MASKED, Stream};
use ckpt_passes::ir::DType;
use ckpt_passes::{Error, Result};
use serde_json::Value;
use std::ops::Range;
use std::thread;

/// The longest piece of text that is tokenised at once.
const PIECE_BYTES: usize = 1 << 17;
/// Text that waits until it is tokenised on all threads.
const WAITING_BYTES: usize = 1 << 22;

/// A piece of a document.
struct Piece {
    /// The line or row of its document.
    place: u64,
    text: String,
    is_first: bool,
    is_last: bool,
    /// The parts of a chat that are learned.
    learned: Option<Vec<Range<usize>>>,
}

/// The tokens of a piece, with [`MASKED`].
type Encoded = Result<Vec<u32>>;

/// Writes the tokens of documents.
pub(super) struct TokenWriter<'t> {
    tokenizer: &'t TextTokenizer,
    template: &'t mut Option<ChatTemplate>,
    /// One more than the largest token.
    below: i64,
    name: String,
    /// `line` or `row`.
    unit: &'static str,
    tokens: Spill,
    starts: Spill,
    written: u64,
    /// Where the document begins that is being written.
    begin: u64,
    last: Option<u32>,
    has_masks: bool,
    waiting: Vec<Piece>,
    waiting_bytes: usize,
}

impl<'t> TokenWriter<'t> {
    /// Starts the tokens of a file.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn new(
        tokenizer: &'t TextTokenizer,
        template: &'t mut Option<ChatTemplate>,
        below: i64,
        name: String,
        unit: &'static str,
    ) -> Result<TokenWriter<'t>> {
        Ok(TokenWriter {
            tokenizer,
            template,
            below,
            name,
            unit,
            tokens: Spill::new()?,
            starts: Spill::new()?,
            written: 0,
            begin: 0,
            last: None,
            has_masks: false,
            waiting: Vec::new(),
            waiting_bytes: 0,
        })
    }

    /// Adds a document.
    ///
    /// # Errors
    /// Text that cannot be tokenised, a token that the model does not have, a disk that refuses.
    pub fn text(&mut self, place: u64, text: &str) -> Result<()> {
        let mut rest = text;
        let mut is_first = true;
        loop {
            let (piece, after) = rest.split_at(cut(rest));
            let is_last = after.is_empty();
            self.wait(Piece {
                place,
                text: piece.into(),
                is_first,
                is_last,
                learned: None,
            })?;
            if is_last {
                return Ok(());
            }
            (rest, is_first) = (after, false);
        }
    }

    /// Adds a chat: what the assistant says is learned.
    ///
    /// # Errors
    /// As [`TokenWriter::text`]; no template, or messages that it refuses.
    pub fn chat(&mut self, place: u64, messages: &Value, tools: Option<&Value>) -> Result<()> {
        let template = match self.template {
            Some(template) => template,
            None => self.template.insert(self.tokenizer.chat_template()?),
        };
        let Chat { text, learned } = template.render(messages, tools)?;
        self.wait(Piece {
            place,
            text,
            is_first: true,
            is_last: true,
            learned: Some(learned),
        })
    }

    fn wait(&mut self, piece: Piece) -> Result<()> {
        self.waiting_bytes += piece.text.len();
        self.waiting.push(piece);
        match self.waiting_bytes < WAITING_BYTES && self.waiting.len() < WAITING_BYTES >> 6 {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn flush(&mut self) -> Result<()> {
        let pieces = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let share = pieces.len().div_ceil(threads).max(1);
        let tokenizer = self.tokenizer;
        let encoded: Vec<Encoded> = thread::scope(|scope| {
            let work = |share| move || -> Vec<Encoded> { encode_all(tokenizer, share) };
            let threads: Vec<_> = pieces.chunks(share).map(|s| scope.spawn(work(s))).collect();
            let panicked = || {
                vec![Err(Error::usage(
                    "tokenizer",
                    "the tokenizer failed on this text",
                ))]
            };
            let results = threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|_| panicked()));
            results.flatten().collect()
        });
        for (piece, ids) in pieces.iter().zip(encoded) {
            let at = format!("{}, {} {}", self.name, self.unit, piece.place);
            let ids = ids.map_err(|e| e.at(at.clone()))?;
            self.append(piece, &ids).map_err(|e| e.at(at))?;
        }
        Ok(())
    }

    fn append(&mut self, piece: &Piece, ids: &[u32]) -> Result<()> {
        if piece.is_first {
            (self.begin, self.last) = (self.written, None);
        }
        for id in ids {
            let bare = id & !MASKED;
            if i64::from(bare) >= self.below {
                return Err(self.tokenizer.beyond(bare, self.below));
            }
            self.put(*id)?;
        }
        if piece.is_last && self.written > self.begin {
            self.starts.put_u64(self.begin)?;
            if let Some(end) = self
                .tokenizer
                .end_of_text
                .filter(|end| self.last != Some(*end))
            {
                // A chat has its own ends, which are learned.
                self.put(end | if piece.learned.is_some() { MASKED } else { 0 })?;
            }
        }
        Ok(())
    }

    fn put(&mut self, id: u32) -> Result<()> {
        self.has_masks |= id & MASKED != 0;
        self.last = Some(id & !MASKED);
        self.written += 1;
        self.tokens.put(&id.to_le_bytes())
    }

    /// Returns the tokens of all documents.
    ///
    /// # Errors
    /// As [`TokenWriter::text`]; no text at all.
    pub fn finish(mut self) -> Result<Stream> {
        self.flush()?;
        if self.written == 0 {
            return Err(Error::usage("data", "there is no text in the data").at(self.name));
        }
        Ok(Stream {
            name: self.name,
            tokens: self.tokens.finish(DType::U32)?,
            has_masks: self.has_masks,
            documents: Some(self.starts.finish(DType::I64)?),
        })
    }
}

fn encode_all(tokenizer: &TextTokenizer, pieces: &[Piece]) -> Vec<Encoded> {
    let encode = |piece: &Piece| match &piece.learned {
        None => tokenizer.encode(&piece.text, piece.is_first),
        Some(learned) => tokenizer.encode_masked(&piece.text, learned),
    };
    pieces.iter().map(encode).collect()
}

/// Returns the bytes of the first piece: before white space between two words, or else at the limit.
fn cut(text: &str) -> usize {
    if text.len() <= PIECE_BYTES {
        return text.len();
    }
    let mut limit = PIECE_BYTES;
    while !text.is_char_boundary(limit) {
        limit -= 1;
    }
    let mut after: Option<(usize, char)> = None;
    let mut later: Option<char> = None;
    for (at, c) in text[..limit].char_indices().rev() {
        if let (Some((gap, space)), Some(next)) = (after, later)
            && c.is_alphanumeric()
            && space.is_whitespace()
            && next.is_alphanumeric()
        {
            return gap;
        }
        if at < PIECE_BYTES / 2 {
            break;
        }
        later = after.map(|(_, c)| c);
        after = Some((at, c));
    }
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_end_between_words() {
        let words = "word and more, ".repeat(PIECE_BYTES / 8);
        let at = cut(&words);
        assert!(at > PIECE_BYTES / 2 && at <= PIECE_BYTES);
        assert!(words[..at].ends_with("word") || words[..at].ends_with("and"));
        assert!(words[at..].starts_with(' '));
        let one = "é".repeat(PIECE_BYTES);
        assert_eq!(cut(&one), PIECE_BYTES);
        assert_eq!(cut("short text"), 10);
        let odd = format!("a{one}");
        assert!(odd.is_char_boundary(cut(&odd)));
    }
}
