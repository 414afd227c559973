//! A cursor over the text: words, names, strings, numbers, and errors with line and column.
//!
//! It never panics. Every loop consumes text, so reading takes linear time.

use crate::error::{Error, Result};
use crate::ir::name::{is_name_byte, is_word_byte};

/// A place in a text.
#[derive(Clone)]
pub(super) struct Scan<'a> {
    text: &'a str,
    /// Byte offset, always between characters.
    pub at: usize,
}

/// A number as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Number {
    Int(i128),
    /// With a point or an exponent, or infinite: its text.
    Float(String),
    /// The bits of a NaN.
    Nan(u64),
}

impl<'a> Scan<'a> {
    pub fn new(text: &'a str) -> Scan<'a> {
        Scan { text, at: 0 }
    }

    pub fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Skips blanks within a line.
    pub fn blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    fn comment(&mut self) {
        if self.peek() == Some(b';') {
            self.at += self.rest().find('\n').unwrap_or(self.rest().len());
        }
    }

    /// Skips blanks, comments and line ends.
    pub fn lines(&mut self) {
        loop {
            self.blanks();
            self.comment();
            if self.peek() != Some(b'\n') {
                return;
            }
            self.at += 1;
        }
    }

    /// Returns true if only a comment is left on this line.
    pub fn at_line_end(&mut self) -> bool {
        self.blanks();
        matches!(self.peek(), None | Some(b'\n' | b';'))
    }

    pub fn line_end(&mut self) -> Result<()> {
        if self.at_line_end() {
            return Ok(());
        }
        Err(self.unexpected("the end of the line"))
    }

    pub fn at_end(&self) -> bool {
        self.at >= self.text.len()
    }

    /// Takes punctuation if it comes next.
    pub fn eat(&mut self, mark: &str) -> bool {
        self.blanks();
        let found = self.rest().starts_with(mark);
        if found {
            self.at += mark.len();
        }
        found
    }

    pub fn expect(&mut self, mark: &str) -> Result<()> {
        if self.eat(mark) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{mark}`")))
    }

    fn word_len(&self) -> usize {
        let rest = self.rest().as_bytes();
        match rest.first() {
            Some(c) if c.is_ascii_alphabetic() || *c == b'_' => {
                rest.iter().take_while(|c| is_word_byte(**c)).count()
            }
            _ => 0,
        }
    }

    /// Returns the next word without reading it; empty if there is none.
    pub fn peek_word(&mut self) -> &'a str {
        self.blanks();
        &self.rest()[..self.word_len()]
    }

    pub fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.at += word.len();
        }
        found
    }

    pub fn word(&mut self, what: &str) -> Result<&'a str> {
        let word = self.peek_word();
        if word.is_empty() {
            return Err(self.unexpected(what));
        }
        self.at += word.len();
        Ok(word)
    }

    pub fn expect_word(&mut self, word: &str) -> Result<()> {
        if self.eat_word(word) {
            return Ok(());
        }
        Err(self.unexpected(&format!("`{word}`")))
    }

    /// Reads a word, or a string for anything that is not a word.
    pub fn word_or_string(&mut self, what: &str) -> Result<String> {
        self.blanks();
        if self.peek() == Some(b'"') {
            return self.string();
        }
        Ok(self.word(what)?.to_string())
    }

    /// Reads a name after its sigil.
    pub fn name(&mut self, sigil: &str, what: &str) -> Result<String> {
        if !self.eat(sigil) {
            return Err(self.unexpected(what));
        }
        if self.peek() == Some(b'"') {
            return self.string();
        }
        let rest = self.rest().as_bytes();
        let taken = rest.iter().take_while(|c| is_name_byte(**c)).count();
        let name = self.rest()[..taken].trim_end_matches(':');
        if name.is_empty() {
            return Err(self.unexpected(what));
        }
        self.at += name.len();
        Ok(name.to_string())
    }

    /// Reads a string in quotes.
    pub fn string(&mut self) -> Result<String> {
        self.blanks();
        let start = self.at;
        if self.peek() != Some(b'"') {
            return Err(self.unexpected("a string in quotes"));
        }
        self.at += 1;
        let mut out = String::new();
        loop {
            let Some(c) = self.rest().chars().next() else {
                return Err(self.fail_at(start, "a string that never ends"));
            };
            let here = self.at;
            self.at += c.len_utf8();
            match c {
                '"' => return Ok(out),
                '\n' => return Err(self.fail_at(start, "a string that does not end on its line")),
                '\\' => out.push(self.escape(here)?),
                c => out.push(c),
            }
        }
    }

    fn escape(&mut self, start: usize) -> Result<char> {
        let c = self.peek();
        self.at += usize::from(c.is_some_and(|c| c.is_ascii()));
        Ok(match c {
            Some(b'n') => '\n',
            Some(b't') => '\t',
            Some(b'r') => '\r',
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'u') => {
                let body = self
                    .rest()
                    .strip_prefix('{')
                    .and_then(|r| r.split_once('}'));
                let c = body.and_then(|(hex, _)| {
                    let n = u32::from_str_radix(hex, 16)
                        .ok()
                        .filter(|_| hex.len() <= 6)?;
                    Some((hex.len() + 2, char::from_u32(n)?))
                });
                let Some((taken, c)) = c else {
                    return Err(self.fail_at(start, "not an escape: expected \\u{hex}"));
                };
                self.at += taken;
                c
            }
            _ => return Err(self.fail_at(start, "not an escape: \\n \\t \\r \\\" \\\\ \\u{hex}")),
        })
    }

    /// Reads a non-negative integer below 2^64.
    pub fn uint(&mut self) -> Result<u64> {
        self.blanks();
        let digits = self.digits();
        if digits.is_empty() {
            return Err(self.unexpected("a number"));
        }
        digits
            .parse()
            .map_err(|_| self.fail_at(self.at - digits.len(), "the number is too large"))
    }

    fn digits(&mut self) -> &'a str {
        let rest = self.rest();
        let n = rest.bytes().take_while(u8::is_ascii_digit).count();
        self.at += n;
        &rest[..n]
    }

    /// Reads a number of any kind.
    pub fn number(&mut self) -> Result<Number> {
        self.blanks();
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.eat_word("inf") {
            return Ok(Number::Float(self.text[start..self.at].to_string()));
        }
        if self.at == start && self.eat_word("nan") {
            self.expect("(0x")?;
            let rest = self.rest();
            let n = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
            self.at += n;
            let bits = u64::from_str_radix(&rest[..n], 16)
                .map_err(|_| self.fail_at(start, "not the bits of a NaN"))?;
            self.expect(")")?;
            return Ok(Number::Nan(bits));
        }
        if self.digits().is_empty() {
            self.at = start;
            return Err(self.unexpected("a number"));
        }
        let mut float = false;
        if self.peek() == Some(b'.') {
            float = true;
            self.at += 1;
            self.digits();
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            float = true;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            if self.digits().is_empty() {
                return Err(self.fail_at(start, "an exponent without digits"));
            }
        }
        let text = &self.text[start..self.at];
        if float {
            return Ok(Number::Float(text.to_string()));
        }
        match text.parse() {
            Ok(n) => Ok(Number::Int(n)),
            Err(_) => Err(self.fail_at(start, "the number is too large")),
        }
    }

    /// `line 3, column 7`, both from 1.
    pub fn place(&self) -> String {
        self.place_of(self.at)
    }

    pub fn place_of(&self, at: usize) -> String {
        let before = &self.text[..at.min(self.text.len())];
        let line = before.matches('\n').count() + 1;
        let start = before.rfind('\n').map_or(0, |i| i + 1);
        let column = before[start..].chars().count() + 1;
        let shown: String = self.text[start..]
            .lines()
            .next()
            .unwrap_or("")
            .chars()
            .take(160)
            .collect();
        format!("line {line}, column {column}\n{}", shown.trim_end())
    }

    /// Returns an error at this place.
    pub fn fail(&self, message: impl Into<String>) -> Box<Error> {
        self.fail_at(self.at, message)
    }

    /// Returns an error at an earlier place.
    pub fn fail_at(&self, at: usize, message: impl Into<String>) -> Box<Error> {
        Error::model("parse", message).at(self.place_of(at))
    }

    pub fn unexpected(&self, wanted: &str) -> Box<Error> {
        let found = match self.rest().lines().next() {
            None => "the end of the text".to_string(),
            Some("") => "the end of the line".to_string(),
            Some(line) => format!("`{}`", line.chars().take(24).collect::<String>()),
        };
        self.fail(format!("expected {wanted}")).found(found)
    }
}
