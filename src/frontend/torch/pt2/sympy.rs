//! Symbolic sizes as sympy writes them (`srepr`): `Mul(Integer(16), Symbol('s70', positive=True, integer=True))`.

use super::super::scalars::checked;
use ckpt_passes::ir::Dim;
use ckpt_passes::{Error, Result};

/// The largest depth of calls. Sizes of real programs have a few.
const MAX_DEPTH: usize = 64;

/// The longest text of one expression.
const MAX_BYTES: usize = 64 << 10;

/// Reads an expression of integers. `known` returns what a symbol stands for, if anything.
///
/// # Errors
/// Text that is no such expression, a function that sizes do not have, or an expression that grows too large.
pub fn size(text: &str, known: &dyn Fn(&str) -> Option<Dim>) -> Result<Dim> {
    let rest = text;
    let mut reader = Reader { rest, text, known };
    if text.len() > MAX_BYTES {
        return Err(reader.wrong("it is too long"));
    }
    let dim = reader.expression(0)?;
    match reader.rest.trim() {
        "" => Ok(dim),
        _ => Err(reader.wrong("text behind the expression")),
    }
}

struct Reader<'a> {
    rest: &'a str,
    text: &'a str,
    known: &'a dyn Fn(&str) -> Option<Dim>,
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
                // Assumptions about the symbol.
                while self.eat(',') {
                    self.word();
                    if !self.eat('=') {
                        return Err(self.wrong("an assumption has no value"));
                    }
                    self.word();
                }
                (self.known)(symbol).unwrap_or_else(|| Dim::symbol(symbol))
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
        let each = |f: fn(&Dim, &Dim) -> Dim, first: &Dim, rest: &[Dim]| {
            rest.iter()
                .try_fold(first.clone(), |all, a| checked(f(&all, a)))
        };
        match (name, args) {
            ("Add", [first, rest @ ..]) => each(Dim::add, first, rest),
            ("Mul", [first, rest @ ..]) => each(Dim::mul, first, rest),
            ("Min", [first, rest @ ..]) => each(Dim::smaller, first, rest),
            ("Max", [first, rest @ ..]) => each(Dim::larger, first, rest),
            ("FloorDiv" | "CleanDiv", [a, b]) if divides(b) => checked(a.div(b)),
            ("Mod" | "PythonMod", [a, b]) if divides(b) => checked(a.modulo(b)),
            ("ModularIndexing", [a, b, m]) if divides(b) && divides(m) => {
                checked(checked(a.div(b))?.modulo(m))
            }
            ("Pow", [a, n]) => match n.as_const() {
                Some(n @ 0..=16) => each(Dim::mul, &Dim::ONE, &vec![a.clone(); n as usize]),
                _ => Err(self.wrong("a power")),
            },
            _ => Err(self.wrong(&format!("the function {name} is not supported"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Dim;

    fn size(text: &str) -> super::Result<Dim> {
        super::size(text, &|name| (name == "s9").then_some(Dim::from(9)))
    }

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
            (format!("Mul({s}, Symbol('s9'))"), "9*s70"),
        ] {
            assert_eq!(size(&text).unwrap().to_string(), dim, "{text}");
        }
        let deep = format!("{}Integer(1){}", "Add(".repeat(1000), ")".repeat(1000));
        let symbols: Vec<String> = (0..40).map(|i| format!("Symbol('t{i}')")).collect();
        let wide = format!("Add({})", symbols.join(", "));
        let powers = format!("Pow(Pow({wide}, Integer(16)), Integer(16))");
        let products = format!("Mul({})", vec![wide.as_str(); 50].join(", "));
        let long = format!("Add({}Integer(1))", "Integer(1), ".repeat(10_000));
        let divided = "FloorDiv(Add(Symbol('s'), Integer(1)), Integer(2))";
        let divided = (0..7).fold(divided.to_string(), |d, _| d.replace("Symbol('s')", &d));
        for text in [&powers, &products, &long, &divided] {
            assert_eq!(size(text).unwrap_err().exit_code(), 2, "{text}");
        }
        assert_eq!(size(&wide).unwrap().terms().len(), 40);
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
