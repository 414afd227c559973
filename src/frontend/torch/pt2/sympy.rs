//! Symbolic sizes as sympy writes them (`srepr`): `Mul(Integer(16), Symbol('s70', positive=True, integer=True))`.

use ckpt_passes::ir::Dim;
use ckpt_passes::{Error, Result};

/// Nested calls; sizes of real programs have a few.
const MAX_DEPTH: usize = 64;

/// Reads an expression of integers.
///
/// # Errors
/// What is no such text, or a function that no size of ours can hold.
pub fn size(text: &str) -> Result<Dim> {
    let mut reader = Reader { rest: text, text };
    let dim = reader.expression(0)?;
    match reader.rest.trim() {
        "" => Ok(dim),
        _ => Err(reader.wrong("text behind the expression")),
    }
}

struct Reader<'a> {
    rest: &'a str,
    text: &'a str,
}

impl<'a> Reader<'a> {
    fn wrong(&self, what: &str) -> Box<Error> {
        let shown: String = self.text.chars().take(200).collect();
        Error::model("shape", format!("a symbolic size cannot be read: {what}"))
            .found(shown.escape_debug().to_string())
    }

    fn eat(&mut self, token: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn word(&mut self) -> &'a str {
        self.rest = self.rest.trim_start();
        let end = self
            .rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '-')))
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn expression(&mut self, depth: usize) -> Result<Dim> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("it is nested too deeply"));
        }
        let name = self.word();
        if name.starts_with(|c: char| c == '-' || c.is_ascii_digit()) {
            return self.number(name);
        }
        if !self.eat('(') {
            return Err(self.wrong("a call is expected"));
        }
        let dim = match name {
            "Symbol" => {
                let symbol = self.quoted()?;
                // Assumptions about it.
                while self.eat(',') {
                    self.word();
                    if !self.eat('=') {
                        return Err(self.wrong("an assumption has no value"));
                    }
                    self.word();
                }
                Dim::symbol(symbol)
            }
            "Integer" => {
                let digits = self.word();
                self.number(digits)?
            }
            _ => {
                let mut args = vec![self.expression(depth + 1)?];
                while self.eat(',') {
                    args.push(self.expression(depth + 1)?);
                }
                self.call(name, &args)?
            }
        };
        if !self.eat(')') {
            return Err(self.wrong("a bracket is not closed"));
        }
        Ok(dim)
    }

    fn number(&self, digits: &str) -> Result<Dim> {
        let n: i64 = digits
            .parse()
            .map_err(|_| self.wrong("a number is damaged or out of range"))?;
        Ok(Dim::from(n))
    }

    fn quoted(&mut self) -> Result<&'a str> {
        let quote = if self.eat('\'') { '\'' } else { '"' };
        if quote == '"' && !self.eat('"') {
            return Err(self.wrong("a symbol has no name"));
        }
        let Some((name, rest)) = self.rest.split_once(quote) else {
            return Err(self.wrong("a name is not closed"));
        };
        self.rest = rest;
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.is_empty() || !name.chars().all(plain) {
            return Err(self.wrong("a symbol's name is not plain"));
        }
        Ok(name)
    }

    fn call(&self, name: &str, args: &[Dim]) -> Result<Dim> {
        let divides = |d: &Dim| *d != Dim::ZERO;
        Ok(match (name, args) {
            ("Add", _) => args.iter().fold(Dim::ZERO, |sum, a| sum.add(a)),
            ("Mul", _) => Dim::product(args),
            ("Min", [first, rest @ ..]) => rest.iter().fold(first.clone(), |m, a| m.smaller(a)),
            ("Max", [first, rest @ ..]) => rest.iter().fold(first.clone(), |m, a| m.larger(a)),
            ("FloorDiv" | "CleanDiv", [a, b]) if divides(b) => a.div(b),
            ("Mod" | "PythonMod", [a, b]) if divides(b) => a.modulo(b),
            ("ModularIndexing", [a, b, m]) if divides(b) && divides(m) => a.div(b).modulo(m),
            ("Pow", [a, n]) => match n.as_const() {
                Some(n @ 0..=16) => Dim::product(&vec![a.clone(); n as usize]),
                _ => return Err(self.wrong("a power")),
            },
            _ => return Err(self.wrong(&format!("the function {name} is not supported"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn expressions() {
        let s = "Symbol('s70', positive=True, integer=True)";
        for (text, dim) in [
            ("Integer(-3)".to_string(), "-3"),
            (s.to_string(), "s70"),
            (format!("Mul(Integer(16), {s})"), "16*s70"),
            (format!("Add({s}, Integer(-1))"), "s70 - 1"),
            (format!("FloorDiv({s}, Integer(2))"), "floordiv(s70, 2)"),
            (format!("Min(Mul(Integer(2), {s}), {s})"), "s70"),
            (format!("Pow({s}, Integer(2))"), "s70*s70"),
        ] {
            assert_eq!(size(&text).unwrap().to_string(), dim, "{text}");
        }
        let deep = format!("{}Integer(1){}", "Add(".repeat(1000), ")".repeat(1000));
        let wrong = [
            "",
            "Integer(",
            "Symbol('a b')",
            "Sin(Integer(1))",
            "Integer(99999999999999999999)",
            "Mod(Integer(1), Integer(0))",
            "Integer(1) x",
            "Symbol('a",
            "Add()",
        ];
        for text in wrong.into_iter().chain([deep.as_str()]) {
            assert_eq!(size(text).unwrap_err().exit_code(), 2, "{text}");
        }
    }
}
