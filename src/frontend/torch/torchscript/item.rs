//! The values of a program's variables while it is replayed.
//!
//! Lists, tuples and dictionaries live in one store and are referred to by index. So two names of one list see each other's
//! appends, as in TorchScript, and dropping a value never recurses.

use super::ast::ExprKind;
use crate::frontend::torch::pickle::Ref;
use crate::frontend::torch::value::Value;
use ckpt_passes::ir::Dim;
use ckpt_passes::{Error, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The largest depth of containers that become one value.
const MAX_NESTING: usize = 16;

/// The largest number of members of all containers together.
const MAX_MEMBERS: usize = 1 << 24;

/// The value of a variable.
#[derive(Clone, Debug)]
pub enum Item {
    /// Any value but a list or tuple.
    Value(Value),
    /// A 0-d int64 tensor with a known value. A trace computes sizes with these.
    Number(Shared<Dim>),
    /// A 0-d float tensor with a known value.
    Real(Shared<Real>),
    /// A 0-d float tensor with a size by a number, such as frames of a stride that are rounded up later.
    Ratio(Ratio),
    Container(Container),
    /// An object of the model, and the path that led to it.
    Module(Ref, Rc<str>),
    /// A function of the archive, by its qualified name.
    Function(Rc<str>),
}

/// The content of a tensor. All clones see what is written to one.
#[derive(Clone, Debug)]
pub struct Shared<T>(Rc<(RefCell<T>, Cell<bool>)>);

impl<T: Clone> Shared<T> {
    /// Returns a tensor of its own.
    pub fn new(value: T) -> Shared<T> {
        Shared(Rc::new((RefCell::new(value), Cell::new(false))))
    }

    /// Returns a tensor that is not written to.
    pub fn fixed(value: T) -> Shared<T> {
        Shared(Rc::new((RefCell::new(value), Cell::new(true))))
    }

    /// Returns the present content.
    pub fn get(&self) -> T {
        self.0.0.borrow().clone()
    }

    /// Replaces the content, and returns true unless the tensor is fixed.
    pub fn write(&self, value: T) -> bool {
        let is_fixed = self.0.1.get();
        if !is_fixed {
            self.0.0.replace(value);
        }
        !is_fixed
    }

    /// Forbids later writes: other tensors, which do not see them, share the memory.
    pub fn fix(&self) {
        self.0.1.set(true);
    }
}

/// A float in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Real {
    /// The value, rounded to float32 unless it is a plain number.
    pub value: f64,
    /// Whether the program wrote a plain number, which never decides the element type of a result. A trace keeps such a
    /// number as a constant: a float64 tensor without axes.
    pub plain: bool,
}

/// `of / by`, a float32 in a tensor. It is exact as long as sizes are below 2²⁴.
#[derive(Clone, Debug, PartialEq)]
pub struct Ratio {
    pub of: Dim,
    /// At least 1.
    pub by: i64,
}

impl Ratio {
    /// Returns the number rounded down.
    pub fn floor(&self) -> Dim {
        self.of.div(&Dim::from(self.by))
    }

    /// Returns the number without its fraction, if it is known not to be negative or to have none.
    pub fn whole(&self) -> Option<Dim> {
        let is_natural = self.of.bounds().0.is_some_and(|least| least >= 0);
        (self.by == 1 || is_natural).then(|| self.floor())
    }
}

impl Item {
    pub const NONE: Item = Item::Value(Value::None);

    /// Returns an item that is one value.
    pub fn of(value: impl Into<Value>) -> Item {
        Item::Value(value.into())
    }

    /// Returns an integer, or an unknown number if it is not known.
    pub fn int_or_unknown(n: Option<Dim>) -> Item {
        Item::Value(n.map_or(Value::Unknown, Value::Int))
    }

    /// Returns the item of a literal; nothing for any other expression.
    pub fn literal(kind: &ExprKind) -> Option<Item> {
        Some(match kind {
            ExprKind::Int(n) => Item::of(*n),
            ExprKind::Float(x) => Item::of(*x),
            ExprKind::Bool(b) => Item::of(*b),
            ExprKind::Str(text) => Item::Value(Value::Str(text.to_string())),
            ExprKind::None => Item::NONE,
            _ => return None,
        })
    }

    /// Returns true for `None`.
    pub fn is_none(&self) -> bool {
        matches!(self, Item::Value(Value::None))
    }

    /// Names the kind of item in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Item::Value(value) => value.kind(),
            Item::Number(_) | Item::Real(_) | Item::Ratio(_) => "a number in a tensor",
            Item::Container(_) => "a list, tuple or dictionary",
            Item::Module(..) => "a module",
            Item::Function(_) => "a function",
        }
    }
}

/// The index of a container in [`Containers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Container(usize);

/// The members of a container.
#[derive(Clone, Debug)]
pub enum Content {
    List(Vec<Item>),
    Tuple(Vec<Item>),
    /// Keys and values in the order of insertion.
    Dict(Vec<(Item, Item)>),
}

/// All lists, tuples and dictionaries of a program.
#[derive(Default)]
pub struct Containers {
    all: Vec<Content>,
    members: usize,
}

impl Content {
    /// Returns all members; of a dictionary its values.
    pub fn values(&self) -> Vec<Item> {
        match self {
            Content::List(items) | Content::Tuple(items) => items.clone(),
            Content::Dict(pairs) => pairs.iter().map(|(_, value)| value.clone()).collect(),
        }
    }
}

impl Containers {
    /// Adds a container.
    ///
    /// # Errors
    /// A program that makes too many.
    pub fn add(&mut self, content: Content) -> Result<Item> {
        self.count(match &content {
            Content::List(items) | Content::Tuple(items) => items.len() + 1,
            Content::Dict(items) => 2 * items.len() + 1,
        })?;
        self.all.push(content);
        Ok(Item::Container(Container(self.all.len() - 1)))
    }

    /// Returns the members of a container.
    pub fn get(&self, at: Container) -> &Content {
        &self.all[at.0]
    }

    /// Appends to a list.
    ///
    /// # Errors
    /// A tuple or dictionary.
    pub fn append(&mut self, at: Container, item: Item) -> Result<()> {
        self.count(1)?;
        match &mut self.all[at.0] {
            Content::List(items) => items.push(item),
            _ => return Err(Error::model("code", "only lists can be appended to")),
        }
        Ok(())
    }

    /// Returns the members of a list or tuple; nothing for any other item.
    pub fn items(&self, item: &Item) -> Option<&[Item]> {
        match item {
            Item::Container(at) => match self.get(*at) {
                Content::List(items) | Content::Tuple(items) => Some(items),
                Content::Dict(_) => None,
            },
            _ => None,
        }
    }

    /// Returns an item as an argument of an op. `number` makes a tensor of a number that is one.
    ///
    /// # Errors
    /// What no op takes: modules, functions, dictionaries, containers in themselves.
    pub fn argument(
        &self,
        item: &Item,
        number: &mut dyn FnMut(&Item) -> Result<Value>,
    ) -> Result<Value> {
        self.nested(item, number, 0)
    }

    fn nested(
        &self,
        item: &Item,
        number: &mut dyn FnMut(&Item) -> Result<Value>,
        depth: usize,
    ) -> Result<Value> {
        if depth > MAX_NESTING {
            bail!("code", "a list is nested too deeply");
        }
        let mut all = |items: &[Item]| -> Result<Vec<Value>> {
            items
                .iter()
                .map(|i| self.nested(i, number, depth + 1))
                .collect()
        };
        match item {
            Item::Value(value) => Ok(value.clone()),
            Item::Number(_) | Item::Real(_) | Item::Ratio(_) => number(item),
            Item::Container(at) => match self.get(*at) {
                Content::List(items) => Ok(Value::List(all(items)?)),
                Content::Tuple(items) => Ok(Value::Tuple(all(items)?)),
                Content::Dict(_) => Err(Error::model("code", "no op takes a dictionary")),
            },
            Item::Module(..) | Item::Function(_) => {
                Err(Error::model("code", format!("no op takes {}", item.kind())))
            }
        }
    }

    /// Returns the item for the result of an op.
    ///
    /// # Errors
    /// See [`Containers::add`].
    pub fn result(&mut self, value: Value) -> Result<Item> {
        let (Value::List(values) | Value::Tuple(values)) = &value else {
            return Ok(Item::Value(value));
        };
        let items = values.iter().map(|v| self.result(v.clone()));
        let items = items.collect::<Result<_>>()?;
        self.add(match value {
            Value::List(_) => Content::List(items),
            _ => Content::Tuple(items),
        })
    }

    fn count(&mut self, more: usize) -> Result<()> {
        self.members += more;
        if self.members > MAX_MEMBERS {
            bail!("code", "the program makes too many lists");
        }
        Ok(())
    }
}
