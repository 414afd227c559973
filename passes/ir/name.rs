//! How names are written in text: quoted only if they have to be.
//!
//! Names come from files and may hold anything. A name that the text form could misread is quoted, with escapes for
//! quotes, backslashes and control characters. So every name can be read back exactly. Rust's `Debug` is not used,
//! because its escapes change with the Unicode version.

use std::fmt::{self, Write};

/// Whether `name` is a word: a letter or underscore, then letters, digits, underscores and dots.
pub fn is_word(name: &str) -> bool {
    let mut chars = name.bytes();
    chars
        .next()
        .is_some_and(|c| c.is_ascii_alphabetic() || c == b'_')
        && chars.all(is_word_byte)
}

/// Whether a byte may stand inside a word.
pub fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.')
}

/// Whether a byte may stand in a bare name after `%` or `@`; a colon may not be the last.
pub fn is_name_byte(byte: u8) -> bool {
    is_word_byte(byte) || matches!(byte, b'/' | b':' | b'-' | b'[' | b']' | b'$' | b'#' | b'~')
}

/// Whether `name` needs no quotes after `%` or `@`.
pub fn is_bare(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(is_name_byte) && !name.ends_with(':')
}

/// `text` in quotes.
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                '\t' => f.write_str("\\t")?,
                '\r' => f.write_str("\\r")?,
                c if c.is_control() => write!(f, "\\u{{{:x}}}", c as u32)?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

/// A word as it is, anything else in quotes: symbols of sizes, names of attributes.
pub struct Word<'a>(pub &'a str);

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_word(self.0) {
            f.write_str(self.0)
        } else {
            Quoted(self.0).fmt(f)
        }
    }
}

/// A name after its sigil, quoted where it must be: names of values, nodes and graphs.
pub struct Name<'a>(pub char, pub &'a str);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char(self.0)?;
        if is_bare(self.1) {
            f.write_str(self.1)
        } else {
            Quoted(self.1).fmt(f)
        }
    }
}
