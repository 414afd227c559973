//! What a variable of the program holds while it is replayed.
//!
//! Lists, tuples and dictionaries live in one store and are referred to by index: two names of one list see each other's
//! appends, as in TorchScript, and nothing recurses when they go.

use crate::frontend::torch::aten::Value;
use crate::frontend::torch::pickle::Ref;
use ckpt_passes::ir::Dim;
use ckpt_passes::{Error, Result};
use std::rc::Rc;

/// Containers in containers, where they have to become one value.
const MAX_NESTING: usize = 16;

/// Members of all containers together.
const MAX_MEMBERS: usize = 1 << 24;

#[derive(Clone, Debug)]
pub enum Item {
    /// Everything but lists and tuples.
    Value(Value),
    /// A 0-d int64 tensor whose value is known: what a trace computes sizes with.
    Number(Dim),
    /// A 0-d float tensor whose value is known.
    Real(Real),
    Container(Container),
    /// An object of the model, and the path it was reached by.
    Module(Ref, Rc<str>),
    /// A function of the archive, by its qualified name.
    Function(Rc<str>),
}

/// A float in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Real {
    /// As float32 holds it, unless it is a plain number.
    pub value: f64,
    /// Whether the program wrote a plain number, which never decides the element type of a result. A trace keeps such
    /// numbers as constants: float64 tensors without axes.
    pub plain: bool,
}

impl Item {
    pub const NONE: Item = Item::Value(Value::None);

    pub fn int(n: i64) -> Item {
        Item::Value(Value::Int(Dim::from(n)))
    }

    pub fn is_none(&self) -> bool {
        matches!(self, Item::Value(Value::None))
    }

    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Item::Value(value) => value.kind(),
            Item::Number(_) | Item::Real(_) => "a number in a tensor",
            Item::Container(_) => "a list, tuple or dictionary",
            Item::Module(..) => "a module",
            Item::Function(_) => "a function",
        }
    }
}

/// Index into [`Containers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Container(usize);

#[derive(Clone, Debug)]
pub enum Content {
    List(Vec<Item>),
    Tuple(Vec<Item>),
    /// In the order of insertion.
    Dict(Vec<(Item, Item)>),
}

/// All lists, tuples and dictionaries that were made.
#[derive(Default)]
pub struct Containers {
    all: Vec<Content>,
    members: usize,
}

impl Containers {
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

    pub fn get(&self, at: Container) -> &Content {
        &self.all[at.0]
    }

    /// Appends to a list.
    ///
    /// # Errors
    /// Something that is none.
    pub fn append(&mut self, at: Container, item: Item) -> Result<()> {
        self.count(1)?;
        match &mut self.all[at.0] {
            Content::List(items) => items.push(item),
            _ => return Err(Error::model("code", "only lists can be appended to")),
        }
        Ok(())
    }

    /// The members of a list or tuple.
    pub fn items(&self, item: &Item) -> Option<&[Item]> {
        match item {
            Item::Container(at) => match self.get(*at) {
                Content::List(items) | Content::Tuple(items) => Some(items),
                Content::Dict(_) => None,
            },
            _ => None,
        }
    }

    /// As an argument of an op; `number` makes a tensor of a number in one.
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
            return Err(Error::model("code", "a list is nested too deeply"));
        }
        let mut all = |items: &[Item]| -> Result<Vec<Value>> {
            items
                .iter()
                .map(|i| self.nested(i, number, depth + 1))
                .collect()
        };
        match item {
            Item::Value(value) => Ok(value.clone()),
            Item::Number(_) | Item::Real(_) => number(item),
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

    /// The result of an op.
    ///
    /// # Errors
    /// See [`Containers::add`].
    pub fn result(&mut self, value: Value) -> Result<Item> {
        Ok(match value {
            Value::List(values) => {
                let items = values.into_iter().map(|v| self.result(v));
                let items = items.collect::<Result<_>>()?;
                self.add(Content::List(items))?
            }
            Value::Tuple(values) => {
                let items = values.into_iter().map(|v| self.result(v));
                let items = items.collect::<Result<_>>()?;
                self.add(Content::Tuple(items))?
            }
            value => Item::Value(value),
        })
    }

    fn count(&mut self, more: usize) -> Result<()> {
        self.members += more;
        if self.members > MAX_MEMBERS {
            return Err(Error::model("code", "the program makes too many lists"));
        }
        Ok(())
    }
}
