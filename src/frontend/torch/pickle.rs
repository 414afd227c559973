//! A machine for pickles that executes nothing.
//!
//! A pickle is a program; what a real unpickler would call is here only noted down: a `GLOBAL` is a pair of names, a
//! `REDUCE` is a [`Object::Call`] that somebody may read, a `BUILD` is an object's state. Names must be on the reader's
//! list, so that a file that wants to do anything else is refused where it says so. Objects live in one list and refer
//! to each other by index: shared ones are shared, cycles are harmless, and nothing here recurses. Every opcode takes at
//! least a byte and makes at most one object, so that memory is bounded by the size of the pickle.
//!
//! Protocols 2 to 5 as far as they build data. Source: `Lib/pickletools.py` of CPython, which defines the opcodes.

use ckpt_passes::{Error, Result};
use rustc_hash::FxHashMap;

/// Pickles of a model's structure are a few hundred bytes a parameter.
pub const MAX_PICKLE_BYTES: u64 = 64 << 20;

/// Index of an object in its [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ref(u32);

/// What a pickle can say.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Str(String),
    Bytes(Vec<u8>),
    Tuple(Vec<Ref>),
    List(Vec<Ref>),
    /// Also an `OrderedDict`; in the order of insertion.
    Dict(Vec<(Ref, Ref)>),
    /// A name that an unpickler would import.
    Global {
        module: String,
        name: String,
    },
    /// `function(*arguments)`; `state` is what a `BUILD` sets on the result.
    Call {
        function: Ref,
        arguments: Ref,
        state: Option<Ref>,
    },
    /// An object without arguments of its own (`NEWOBJ`), with what a `BUILD` sets on it.
    Instance {
        class: Ref,
        arguments: Ref,
        state: Option<Ref>,
    },
    /// Something outside the pickle, such as a storage.
    Persistent(Ref),
}

/// A pickle that has run.
#[derive(Debug)]
pub struct Pickle {
    objects: Vec<Object>,
    root: Ref,
}

impl Pickle {
    pub fn root(&self) -> Ref {
        self.root
    }

    pub fn get(&self, at: Ref) -> &Object {
        &self.objects[at.0 as usize]
    }

    pub fn str(&self, at: Ref) -> Option<&str> {
        match self.get(at) {
            Object::Str(s) => Some(s),
            _ => None,
        }
    }

    pub fn int(&self, at: Ref) -> Option<i64> {
        match self.get(at) {
            Object::Int(i) => Some(*i),
            _ => None,
        }
    }

    /// The members of a tuple or list.
    pub fn items(&self, at: Ref) -> Option<&[Ref]> {
        match self.get(at) {
            Object::Tuple(items) | Object::List(items) => Some(items),
            _ => None,
        }
    }

    /// `module.name` of a global.
    pub fn global(&self, at: Ref) -> Option<(&str, &str)> {
        match self.get(at) {
            Object::Global { module, name } => Some((module, name)),
            _ => None,
        }
    }
}

fn bad(message: impl Into<String>) -> Box<Error> {
    Error::model("pickle", message)
}

/// Runs a pickle. `allowed` tells which globals (module, name) may occur.
///
/// # Errors
/// `pickle` for a damaged one, an opcode that is none or does more than build data, or a global that is not allowed.
pub fn load(bytes: &[u8], allowed: &dyn Fn(&str, &str) -> bool) -> Result<Pickle> {
    if bytes.len() as u64 > MAX_PICKLE_BYTES {
        return Err(bad("the pickle is too large")
            .expected(format!("at most {MAX_PICKLE_BYTES} bytes"))
            .found(format!("{} bytes", bytes.len())));
    }
    let mut machine = Machine {
        bytes,
        at: 0,
        objects: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: FxHashMap::default(),
        allowed,
    };
    loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(root)) => {
                return Ok(Pickle {
                    objects: machine.objects,
                    root,
                });
            }
            Err(e) => return Err(e.at(format!("byte {at} of the pickle"))),
        }
    }
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    objects: Vec<Object>,
    stack: Vec<Ref>,
    /// Lengths of the stack at each open mark.
    marks: Vec<usize>,
    memo: FxHashMap<u64, Ref>,
    allowed: &'a dyn Fn(&str, &str) -> bool,
}

impl<'a> Machine<'a> {
    /// Runs one opcode; the result at `STOP`.
    fn step(&mut self) -> Result<Option<Ref>> {
        let [op] = self.take_array()?;
        match op {
            b'.' => return self.pop().map(Some),
            0x80 => {
                let [protocol] = self.take_array()?;
                if !(2..=5).contains(&protocol) {
                    return Err(bad(format!("pickle protocol {protocol} is not supported"))
                        .expected("2 to 5"));
                }
            }
            // A frame is a hint for readers of streams.
            0x95 => drop(self.take_array::<8>()?),
            b'N' => self.push(Object::None)?,
            0x88 => self.push(Object::Bool(true))?,
            0x89 => self.push(Object::Bool(false))?,
            b'K' => {
                let [n] = self.take_array()?;
                self.push(Object::Int(n.into()))?;
            }
            b'M' => {
                let n = u16::from_le_bytes(self.take_array()?);
                self.push(Object::Int(n.into()))?;
            }
            b'J' => {
                let n = i32::from_le_bytes(self.take_array()?);
                self.push(Object::Int(n.into()))?;
            }
            0x8a => {
                let [size] = self.take_array()?;
                let digits = self.take(size.into())?;
                let n = long(digits).ok_or_else(|| bad("an integer does not fit into 64 bits"))?;
                self.push(Object::Int(n))?;
            }
            b'G' => {
                let x = f64::from_be_bytes(self.take_array()?);
                self.push(Object::Float(x))?;
            }
            b'X' => {
                let size = u32::from_le_bytes(self.take_array()?);
                self.string(size.into())?;
            }
            0x8c => {
                let [size] = self.take_array()?;
                self.string(size.into())?;
            }
            0x8d => {
                let size = u64::from_le_bytes(self.take_array()?);
                self.string(size)?;
            }
            b'C' => {
                let [size] = self.take_array()?;
                let bytes = self.take(size.into())?.to_vec();
                self.push(Object::Bytes(bytes))?;
            }
            b'B' => {
                let size = u32::from_le_bytes(self.take_array()?);
                let bytes = self.take(size.into())?.to_vec();
                self.push(Object::Bytes(bytes))?;
            }
            b'c' => {
                let module = self.line()?;
                let name = self.line()?;
                self.global(module, name)?;
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                match (self.object(module), self.object(name)) {
                    (Object::Str(module), Object::Str(name)) => {
                        let (module, name) = (module.clone(), name.clone());
                        self.global(module, name)?;
                    }
                    _ => return Err(bad("a global's name is not a string")),
                }
            }
            b'(' => self.marks.push(self.stack.len()),
            b'0' => drop(self.pop()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b')' => self.push(Object::Tuple(Vec::new()))?,
            b']' => self.push(Object::List(Vec::new()))?,
            b'}' => self.push(Object::Dict(Vec::new()))?,
            b't' => {
                let items = self.pop_mark()?;
                self.push(Object::Tuple(items))?;
            }
            b'l' => {
                let items = self.pop_mark()?;
                self.push(Object::List(items))?;
            }
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Object::Dict(pairs(&items)?))?;
            }
            0x85..=0x87 => {
                let count = usize::from(op - 0x84);
                let mut items = vec![self.pop()?; count];
                for slot in items.iter_mut().rev().skip(1) {
                    *slot = self.pop()?;
                }
                self.push(Object::Tuple(items))?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(vec![(key, value)])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(pairs(&items)?)?;
            }
            b'R' => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                self.callable(function, arguments)?;
                let made = match (self.object(function), self.object(arguments)) {
                    (Object::Global { module, name }, Object::Tuple(items))
                        if module == "collections" && name == "OrderedDict" && items.is_empty() =>
                    {
                        Object::Dict(Vec::new())
                    }
                    _ => Object::Call {
                        function,
                        arguments,
                        state: None,
                    },
                };
                self.push(made)?;
            }
            0x81 => {
                let arguments = self.pop()?;
                let class = self.pop()?;
                self.callable(class, arguments)?;
                self.push(Object::Instance {
                    class,
                    arguments,
                    state: None,
                })?;
            }
            b'b' => {
                let given = self.pop()?;
                let target = self.top()?;
                match &mut self.objects[target.0 as usize] {
                    Object::Call { state, .. } | Object::Instance { state, .. }
                        if state.is_none() =>
                    {
                        *state = Some(given);
                    }
                    _ => return Err(bad("BUILD of something that has no state, or twice")),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Object::Persistent(id))?;
            }
            b'q' => {
                let [key] = self.take_array()?;
                self.remember(key.into())?;
            }
            b'r' => {
                let key = u32::from_le_bytes(self.take_array()?);
                self.remember(key.into())?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' => {
                let [key] = self.take_array()?;
                self.recall(key.into())?;
            }
            b'j' => {
                let key = u32::from_le_bytes(self.take_array()?);
                self.recall(key.into())?;
            }
            other => {
                return Err(bad(format!("pickle opcode 0x{other:02x} is not supported"))
                    .help("only pickles that PyTorch writes for models are read"));
            }
        }
        Ok(None)
    }

    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = usize::try_from(count).ok().and_then(|n| rest.get(..n));
        let taken = taken.ok_or_else(|| bad("the pickle is cut off"))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn take_array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64)?);
        Ok(array)
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|b| *b == b'\n');
        let end = end.ok_or_else(|| bad("the pickle is cut off"))?;
        self.at += end + 1;
        text(&rest[..end])
    }

    fn string(&mut self, size: u64) -> Result<()> {
        let string = text(self.take(size)?)?;
        self.push(Object::Str(string))
    }

    fn global(&mut self, module: String, name: String) -> Result<()> {
        if !(self.allowed)(&module, &name) {
            let full: String = format!("{module}.{name}").chars().take(200).collect();
            return Err(bad(format!(
                "the pickle refers to {full:?}, which is not allowed"
            ))
            .help(
                "a model's pickle names its own classes and tensors only; do not trust this file",
            ));
        }
        self.push(Object::Global { module, name })
    }

    /// What is called must be a global, with a tuple of arguments.
    fn callable(&self, function: Ref, arguments: Ref) -> Result<()> {
        match (self.object(function), self.object(arguments)) {
            (Object::Global { .. }, Object::Tuple(_)) => Ok(()),
            _ => Err(bad("the pickle calls something that is not a global")),
        }
    }

    fn object(&self, at: Ref) -> &Object {
        &self.objects[at.0 as usize]
    }

    fn push(&mut self, object: Object) -> Result<()> {
        let index = u32::try_from(self.objects.len()).map_err(|_| bad("too many objects"))?;
        self.objects.push(object);
        self.stack.push(Ref(index));
        Ok(())
    }

    /// Nothing below the innermost mark can be popped.
    fn top(&self) -> Result<Ref> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor..]
            .last()
            .copied()
            .ok_or_else(|| bad("the pickle takes more than it has"))
    }

    fn pop(&mut self) -> Result<Ref> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_mark(&mut self) -> Result<Vec<Ref>> {
        let mark = self.marks.pop();
        let mark = mark.ok_or_else(|| bad("the pickle has no mark here"))?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, items: Vec<Ref>) -> Result<()> {
        let target = self.top()?;
        match &mut self.objects[target.0 as usize] {
            Object::List(list) => list.extend(items),
            _ => return Err(bad("the pickle appends to something that is not a list")),
        }
        Ok(())
    }

    fn set(&mut self, items: Vec<(Ref, Ref)>) -> Result<()> {
        let target = self.top()?;
        match &mut self.objects[target.0 as usize] {
            Object::Dict(dict) => dict.extend(items),
            _ => return Err(bad("the pickle sets items of something that is not a dict")),
        }
        Ok(())
    }

    fn remember(&mut self, key: u64) -> Result<()> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<()> {
        let found = self.memo.get(&key).copied();
        let found = found.ok_or_else(|| bad(format!("the pickle has no memo {key}")))?;
        self.stack.push(found);
        Ok(())
    }
}

fn text(bytes: &[u8]) -> Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| bad("a string of the pickle is not UTF-8"))
}

fn pairs(items: &[Ref]) -> Result<Vec<(Ref, Ref)>> {
    if !items.len().is_multiple_of(2) {
        return Err(bad("the pickle has a key without a value"));
    }
    Ok(items.chunks_exact(2).map(|p| (p[0], p[1])).collect())
}

/// A little-endian integer in two's complement.
fn long(digits: &[u8]) -> Option<i64> {
    let negative = digits.last().is_some_and(|b| b & 0x80 != 0);
    let fill = if negative { 0xff } else { 0 };
    let mut wide = [fill; 8];
    let (low, high) = digits.split_at(digits.len().min(8));
    wide[..low.len()].copy_from_slice(low);
    let value = i64::from_le_bytes(wide);
    (high.iter().all(|b| *b == fill) && (value < 0) == negative).then_some(value)
}

#[cfg(test)]
mod tests;
