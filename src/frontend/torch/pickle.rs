//! A pickle reader that executes nothing.
//!
//! A pickle is a program. This reader only records what a real unpickler would call: a `GLOBAL` is a pair of names, a
//! `REDUCE` is an [`Object::Call`], a `BUILD` is the state of an object. Names must be on the caller's list, so a file that
//! wants to do anything else is refused at the name. Objects live in one list and refer to each other by index. So shared
//! objects are shared, cycles are harmless, and nothing here recurses. Every opcode takes at least one byte and makes at
//! most one object, so the size of the pickle bounds the memory.
//!
//! The reader knows protocols 2 to 5 as far as they build data. Source: `Lib/pickletools.py` of CPython, which defines the
//! opcodes.

use ckpt_passes::{Error, Result};
use rustc_hash::FxHashMap;

/// The largest pickle that is read. Those of a model take a few hundred bytes for each parameter.
pub const MAX_PICKLE_BYTES: u64 = 64 << 20;

/// The index of an object in its [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ref(u32);

/// An object of a pickle.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// Python's `None`.
    None,
    /// A `bool`.
    Bool(bool),
    /// An `int`, at most 64 bits wide.
    Int(i64),
    /// A `float`.
    Float(f64),
    /// A `str`, from UTF-8.
    Str(String),
    /// A `bytes` object.
    Bytes(Vec<u8>),
    /// A `tuple`, by its members.
    Tuple(Vec<Ref>),
    /// A `list`, by its members.
    List(Vec<Ref>),
    /// A `dict` or `OrderedDict`, in the order of insertion.
    Dict(Vec<(Ref, Ref)>),
    /// A name that an unpickler would import.
    Global {
        /// Dotted path of the Python module: `torch._utils`.
        module: String,
        /// Name in that module; on the caller's list of allowed names.
        name: String,
    },
    /// `function(*arguments)`, with the state that a `BUILD` sets on the result.
    Call {
        /// The callable, a [`Global`](Object::Global).
        function: Ref,
        /// The positional arguments, a [`Tuple`](Object::Tuple).
        arguments: Ref,
        /// What `BUILD` sets; `None` without a `BUILD`.
        state: Option<Ref>,
    },
    /// A new object of a class (`NEWOBJ`), with the state that a `BUILD` sets on it.
    Instance {
        /// The class, a [`Global`](Object::Global).
        class: Ref,
        /// The arguments of `__new__`, a [`Tuple`](Object::Tuple).
        arguments: Ref,
        /// What `BUILD` sets; `None` without a `BUILD`.
        state: Option<Ref>,
    },
    /// An object outside the pickle, such as a storage.
    Persistent(Ref),
}

/// The objects of a pickle.
#[derive(Debug)]
pub struct Pickle {
    objects: Vec<Object>,
    root: Ref,
}

impl Pickle {
    /// Returns the object that the pickle is about.
    pub fn root(&self) -> Ref {
        self.root
    }

    /// Returns an object.
    pub fn get(&self, at: Ref) -> &Object {
        &self.objects[at.0 as usize]
    }

    /// Returns a string; nothing for any other object.
    pub fn str(&self, at: Ref) -> Option<&str> {
        match self.get(at) {
            Object::Str(s) => Some(s),
            _ => None,
        }
    }

    /// Returns an integer; nothing for any other object.
    pub fn int(&self, at: Ref) -> Option<i64> {
        match self.get(at) {
            Object::Int(i) => Some(*i),
            _ => None,
        }
    }

    /// Returns the members of a tuple or list; nothing for any other object.
    pub fn items(&self, at: Ref) -> Option<&[Ref]> {
        match self.get(at) {
            Object::Tuple(items) | Object::List(items) => Some(items),
            _ => None,
        }
    }

    /// Returns the module and name of a global; nothing for any other object.
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

/// Reads a pickle. `allowed` tells which globals (module, name) may occur.
///
/// # Errors
/// `pickle` for a damaged pickle, an opcode that does more than build data, or a global that is not allowed.
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
    /// The length of the stack at each open mark.
    marks: Vec<usize>,
    memo: FxHashMap<u64, Ref>,
    allowed: &'a dyn Fn(&str, &str) -> bool,
}

impl<'a> Machine<'a> {
    /// Runs one opcode. Returns the root at `STOP`.
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
            // A frame only helps readers of streams.
            0x95 => drop(self.take_array::<8>()?),
            b'N' => self.push(Object::None)?,
            0x88 => self.push(Object::Bool(true))?,
            0x89 => self.push(Object::Bool(false))?,
            b'K' => self.int(1)?,
            b'M' => self.int(2)?,
            b'J' => {
                let n = i32::from_le_bytes(self.take_array()?);
                self.push(Object::Int(n.into()))?;
            }
            0x8a => {
                let size = self.number(1)?;
                let n = long(self.take(size)?);
                let n = n.ok_or_else(|| bad("an integer does not fit into 64 bits"))?;
                self.push(Object::Int(n))?;
            }
            b'G' => {
                let x = f64::from_be_bytes(self.take_array()?);
                self.push(Object::Float(x))?;
            }
            b'X' => self.string(4)?,
            0x8c => self.string(1)?,
            0x8d => self.string(8)?,
            b'C' => self.bytes(1)?,
            b'B' => self.bytes(4)?,
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
            b't' | b'l' => {
                let items = self.pop_mark()?;
                self.push(match op {
                    b't' => Object::Tuple(items),
                    _ => Object::List(items),
                })?;
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
            b'q' | b'r' => {
                let key = self.number(if op == b'q' { 1 } else { 4 })?;
                self.remember(key)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' | b'j' => {
                let key = self.number(if op == b'h' { 1 } else { 4 })?;
                self.recall(key)?;
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

    /// Reads an unsigned little-endian integer of 1 to 8 bytes.
    fn number(&mut self, bytes: usize) -> Result<u64> {
        let mut wide = [0; 8];
        wide[..bytes].copy_from_slice(self.take(bytes as u64)?);
        Ok(u64::from_le_bytes(wide))
    }

    fn int(&mut self, bytes: usize) -> Result<()> {
        let n = self.number(bytes)? as i64;
        self.push(Object::Int(n))
    }

    /// Reads a string behind its length, a number of `length_bytes`.
    fn string(&mut self, length_bytes: usize) -> Result<()> {
        let size = self.number(length_bytes)?;
        let string = text(self.take(size)?)?;
        self.push(Object::Str(string))
    }

    /// Reads bytes behind their length, a number of `length_bytes`.
    fn bytes(&mut self, length_bytes: usize) -> Result<()> {
        let size = self.number(length_bytes)?;
        let bytes = self.take(size)?.to_vec();
        self.push(Object::Bytes(bytes))
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

    /// Fails unless a call is of a global with a tuple of arguments.
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

    /// Returns the top of the stack, which must be above the innermost mark.
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

/// Reads a little-endian integer in two's complement; nothing if it does not fit.
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
