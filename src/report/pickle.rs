//! Writes pickles of plain data: dicts, lists, text, whole numbers, truth values. Protocol 2, without references.
//!
//! Source: the opcodes of CPython's `pickletools`. Nothing written here can make a reader call anything.

use std::io::{Result, Write};

/// A pickle being written. What is started inside another value must be a whole value.
pub struct Pickle<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Pickle<'a> {
    /// # Errors
    /// Those of `out`; so have all others.
    pub fn new(out: &'a mut dyn Write) -> Result<Pickle<'a>> {
        out.write_all(b"\x80\x02")?;
        Ok(Pickle { out })
    }

    /// A dict: `items` writes a key, then a value, and so on.
    pub fn dict(&mut self, items: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.out.write_all(b"}(")?;
        items(self)?;
        self.out.write_all(b"u")
    }

    /// A list: `items` writes its values.
    pub fn list(&mut self, items: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.out.write_all(b"](")?;
        items(self)?;
        self.out.write_all(b"e")
    }

    pub fn key(&mut self, text: &str) -> Result<()> {
        self.text(text)
    }

    /// # Errors
    /// Also for text of 4 GiB or more, which this form cannot hold.
    pub fn text(&mut self, text: &str) -> Result<()> {
        let length = u32::try_from(text.len()).map_err(std::io::Error::other)?;
        self.out.write_all(b"X")?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())
    }

    pub fn number(&mut self, n: u64) -> Result<()> {
        if let Ok(n) = i32::try_from(n) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&n.to_le_bytes());
        }
        // Little-endian two's complement; a ninth byte keeps large numbers positive.
        let bytes = n.to_le_bytes();
        self.out.write_all(b"\x8a\x09")?;
        self.out.write_all(&bytes)?;
        self.out.write_all(b"\0")
    }

    pub fn truth(&mut self, is_true: bool) -> Result<()> {
        self.out.write_all(if is_true { b"\x88" } else { b"\x89" })
    }

    /// A tuple of two numbers.
    pub fn pair(&mut self, a: u64, b: u64) -> Result<()> {
        self.number(a)?;
        self.number(b)?;
        self.out.write_all(b"\x86")
    }

    pub fn end(self) -> Result<()> {
        self.out.write_all(b".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_as_pickletools_has_them() {
        let mut bytes = Vec::new();
        let mut p = Pickle::new(&mut bytes).unwrap();
        p.dict(|p| {
            p.key("a")?;
            p.list(|p| {
                p.number(1)?;
                p.number(1 << 40)
            })?;
            p.key("b")?;
            p.truth(true)
        })
        .unwrap();
        p.end().unwrap();
        let expected =
            b"\x80\x02}(X\x01\0\0\0a](J\x01\0\0\0\x8a\x09\0\0\0\0\0\x01\0\0\0eX\x01\0\0\0b\x88u.";
        assert_eq!(bytes, expected);
    }
}
