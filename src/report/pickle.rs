//! Writes pickles of plain data, in protocol 2 without references.
//!
//! Source: the opcodes of CPython's `pickletools`. Nothing written here can make a reader call anything.

use std::io::{Result, Write};

/// A value of Python.
pub enum Item<'a> {
    /// A dict with text keys, written in this order.
    Dict(Vec<(&'static str, Item<'a>)>),
    /// A list of items, which may be of different kinds.
    List(Vec<Item<'a>>),
    /// A tuple of two numbers.
    Pair(u64, u64),
    /// A `str` of less than 4 GiB in UTF-8.
    Text(&'a str),
    /// A non-negative `int`.
    Number(u64),
    /// A `bool`.
    Truth(bool),
}

/// A pickle that is being written.
pub struct Pickle<'a> {
    out: &'a mut dyn Write,
}

impl<'a> Pickle<'a> {
    /// Starts a pickle; [`Pickle::end`] ends it.
    ///
    /// # Errors
    /// Those of `out`, as in all other methods.
    pub fn new(out: &'a mut dyn Write) -> Result<Pickle<'a>> {
        out.write_all(b"\x80\x02")?;
        Ok(Pickle { out })
    }

    /// Writes a dict whose keys and values `items` writes in turn.
    pub fn dict(&mut self, items: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.out.write_all(b"}(")?;
        items(self)?;
        self.out.write_all(b"u")
    }

    /// Writes a list of items that are made one by one.
    pub fn list<'i>(&mut self, items: impl IntoIterator<Item = Item<'i>>) -> Result<()> {
        self.out.write_all(b"](")?;
        for item in items {
            self.item(item)?;
        }
        self.out.write_all(b"e")
    }

    /// Writes a list of one list.
    pub fn nested_list<'i>(&mut self, items: impl IntoIterator<Item = Item<'i>>) -> Result<()> {
        self.out.write_all(b"](")?;
        self.list(items)?;
        self.out.write_all(b"e")
    }

    /// Writes text of less than 4 GiB.
    pub fn text(&mut self, text: &str) -> Result<()> {
        let length = u32::try_from(text.len()).map_err(std::io::Error::other)?;
        self.out.write_all(b"X")?;
        self.out.write_all(&length.to_le_bytes())?;
        self.out.write_all(text.as_bytes())
    }

    /// Writes one item.
    pub fn item(&mut self, item: Item) -> Result<()> {
        match item {
            Item::Dict(items) => self.dict(|p| {
                items.into_iter().try_for_each(|(key, item)| {
                    p.text(key)?;
                    p.item(item)
                })
            }),
            Item::List(items) => self.list(items),
            Item::Pair(a, b) => {
                self.number(a)?;
                self.number(b)?;
                self.out.write_all(b"\x86")
            }
            Item::Text(text) => self.text(text),
            Item::Number(n) => self.number(n),
            Item::Truth(is_true) => self.out.write_all(if is_true { b"\x88" } else { b"\x89" }),
        }
    }

    fn number(&mut self, n: u64) -> Result<()> {
        if let Ok(n) = i32::try_from(n) {
            self.out.write_all(b"J")?;
            return self.out.write_all(&n.to_le_bytes());
        }
        // Little-endian two's complement; a ninth byte keeps large numbers positive.
        self.out.write_all(b"\x8a\x09")?;
        self.out.write_all(&n.to_le_bytes())?;
        self.out.write_all(b"\0")
    }

    /// Ends the pickle.
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
        let numbers = Item::List(vec![Item::Number(1), Item::Number(1 << 40)]);
        p.item(Item::Dict(vec![("a", numbers), ("b", Item::Truth(true))]))
            .unwrap();
        p.end().unwrap();
        let expected =
            b"\x80\x02}(X\x01\0\0\0a](J\x01\0\0\0\x8a\x09\0\0\0\0\0\x01\0\0\0eX\x01\0\0\0b\x88u.";
        assert_eq!(bytes, expected);
    }
}
