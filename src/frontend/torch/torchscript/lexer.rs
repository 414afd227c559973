//! The lexer of serialised TorchScript. Indentation becomes tokens of its own, as in Python.

use super::ast::Name;
use ckpt_passes::{Error, Result};

#[derive(Clone, Debug, PartialEq)]
pub enum Token {
    Name(Name),
    /// An integer without its sign, because the magnitude of the smallest int64 is no int64.
    Int(u64),
    Float(f64),
    Str(Name),
    /// Punctuation, `->` included.
    Mark(&'static str),
    /// End of a logical line.
    Newline,
    Indent,
    Dedent,
    End,
}

const MARKS: [&str; 12] = ["->", "(", ")", "[", "]", "{", "}", ",", ":", ".", "=", "-"];

fn bad(line: u32, message: impl Into<String>) -> Box<Error> {
    Error::model("code", message).at(format!("line {line}"))
}

/// Returns the tokens of a text, each with its line, from 1. The last one is [`Token::End`].
///
/// # Errors
/// `code` for a character that the dialect does not have, and for indentation that matches no line above.
pub fn tokens(text: &str) -> Result<Vec<(Token, u32)>> {
    let mut lexer = Lexer {
        rest: text,
        line: 1,
        open: 0,
        indents: vec![0],
        tokens: Vec::new(),
    };
    while !lexer.rest.is_empty() {
        if lexer.open == 0 && lexer.at_line_start() && !lexer.indentation()? {
            continue;
        }
        lexer.token()?;
    }
    if lexer.open > 0 {
        return Err(bad(lexer.line, "a bracket is not closed"));
    }
    if !lexer.at_line_start() {
        lexer.push(Token::Newline);
    }
    for _ in 1..lexer.indents.len() {
        lexer.push(Token::Dedent);
    }
    lexer.push(Token::End);
    Ok(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    line: u32,
    /// The number of open brackets. Lines do not end inside them.
    open: usize,
    indents: Vec<usize>,
    tokens: Vec<(Token, u32)>,
}

impl Lexer<'_> {
    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.line));
    }

    fn at_line_start(&self) -> bool {
        matches!(
            self.tokens.last(),
            None | Some((Token::Newline | Token::Dedent | Token::Indent, _))
        )
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }

    /// Reads the start of a line. Returns false if the line is empty.
    fn indentation(&mut self) -> Result<bool> {
        let width = self.rest.bytes().take_while(|b| *b == b' ').count();
        let after = &self.rest[width..];
        if after.starts_with(['\n', '\r', '#']) || after.is_empty() {
            let end = after.find('\n').map_or(self.rest.len(), |n| width + n + 1);
            self.line += u32::from(after.contains('\n'));
            self.skip(end);
            return Ok(false);
        }
        self.skip(width);
        let current = self.indents.last().copied().unwrap_or(0);
        if width > current {
            self.indents.push(width);
            self.push(Token::Indent);
        }
        while self.indents.last().is_some_and(|i| *i > width) {
            self.indents.pop();
            self.push(Token::Dedent);
        }
        if self.indents.last() != Some(&width) {
            return Err(bad(self.line, "the indentation matches no line above"));
        }
        Ok(true)
    }

    fn token(&mut self) -> Result<()> {
        let Some(first) = self.rest.chars().next() else {
            return Ok(());
        };
        match first {
            '\n' => {
                if self.open == 0 && !self.at_line_start() {
                    self.push(Token::Newline);
                }
                self.line += 1;
                self.skip(1);
            }
            ' ' | '\r' | '\t' => self.skip(1),
            '#' => {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.skip(end);
            }
            '"' | '\'' => self.string(first)?,
            '0'..='9' => self.number()?,
            c if c == '_' || c.is_alphabetic() => {
                let end = self.rest.find(|c: char| c != '_' && !c.is_alphanumeric());
                let name = &self.rest[..end.unwrap_or(self.rest.len())];
                let token = Token::Name(name.into());
                let length = name.len();
                self.push(token);
                self.skip(length);
            }
            _ => {
                let Some(mark) = MARKS.iter().find(|m| self.rest.starts_with(**m)) else {
                    return Err(bad(
                        self.line,
                        format!("{first:?} is not part of serialised TorchScript"),
                    ));
                };
                match *mark {
                    "(" | "[" | "{" => self.open += 1,
                    ")" | "]" | "}" => {
                        self.open = self.open.checked_sub(1).ok_or_else(|| {
                            bad(self.line, "a bracket is closed that is not open")
                        })?;
                    }
                    _ => {}
                }
                self.push(Token::Mark(mark));
                self.skip(mark.len());
            }
        }
        Ok(())
    }

    fn number(&mut self) -> Result<()> {
        let bytes = self.rest.as_bytes();
        let digits = |from: usize| {
            bytes[from..]
                .iter()
                .take_while(|b| b.is_ascii_digit())
                .count()
        };
        let whole = digits(0);
        let mut end = whole;
        if bytes.get(end) == Some(&b'.') {
            end += 1 + digits(end + 1);
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            let exponent = digits(end + 1 + sign);
            if exponent > 0 {
                end += 1 + sign + exponent;
            }
        }
        let text = &self.rest[..end];
        let wrong = || {
            bad(
                self.line,
                format!("{text} is not a number that is supported"),
            )
        };
        if matches!(bytes.get(end), Some(c) if c.is_ascii_alphanumeric() || *c == b'_') {
            return Err(wrong());
        }
        let token = if end == whole {
            Token::Int(text.parse().map_err(|_| wrong())?)
        } else {
            Token::Float(text.parse().map_err(|_| wrong())?)
        };
        self.push(token);
        self.skip(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let unfinished = || bad(self.line, "a string does not end");
        let mut text = Vec::new();
        let bytes = self.rest.as_bytes();
        let mut at = 1;
        loop {
            let byte = *bytes.get(at).ok_or_else(unfinished)?;
            at += 1;
            match byte {
                b'\n' => return Err(unfinished()),
                b'\\' => {
                    let escape = *bytes.get(at).ok_or_else(unfinished)?;
                    at += 1;
                    text.push(match escape {
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'a' => 7,
                        b'b' => 8,
                        b'f' => 12,
                        b'v' => 11,
                        b'0'..=b'7' => {
                            let more = bytes[at..]
                                .iter()
                                .take(2)
                                .take_while(|b| (b'0'..=b'7').contains(*b))
                                .count();
                            let digits = &bytes[at - 1..at + more];
                            at += more;
                            digits
                                .iter()
                                .fold(0u8, |n, d| n.wrapping_mul(8) | (d - b'0'))
                        }
                        b'x' => {
                            let code = self.rest.get(at..at + 2).ok_or_else(unfinished)?;
                            at += 2;
                            u8::from_str_radix(code, 16)
                                .map_err(|_| bad(self.line, "a string has a bad escape"))?
                        }
                        other => other,
                    });
                }
                b if b == quote as u8 => break,
                b => text.push(b),
            }
        }
        let text = String::from_utf8(text).map_err(|_| bad(self.line, "a string is not UTF-8"))?;
        self.push(Token::Str(text.into()));
        self.skip(at);
        Ok(())
    }
}
