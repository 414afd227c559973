//! PyTorch's ops as rows of the op table: one vocabulary for every format that PyTorch writes.
//!
//! A reader makes a [`Lowering`], declares inputs and weights, and replays the program one [`Lowering::call`] at a time.
//! Tensors are handles ([`TensorId`]): views remember what they are views of, and an op that writes into one gives every
//! other view of the same memory its new value ([`tensors`]). So in-place programs become graphs of values, here and
//! nowhere else. The vocabulary is one file a family; an op is one line of its file's `OPS`, a signature
//! ([`signature`]) and a function.
//!
//! What is known when the file is read stays a number or an expression over named sizes ([`Value::Int`]); it becomes a
//! value of the graph only where an op needs one.

mod activation;
mod arrange;
mod assemble;
mod attention;
mod backward;
mod compare;
mod complex;
mod composed;
mod create;
mod fourier;
mod image;
mod index;
mod linear;
mod lookup;
mod loss;
mod native;
mod norm;
mod pointwise;
mod products;
mod reduce;
mod resample;
mod signature;
mod sizes;
mod special;
mod tensors;
mod types;
mod views;
mod vocabulary;
mod weights;

pub use signature::{Call, complex_of_code, dtype_of_code};
pub use tensors::TensorId;
pub use weights::{Kind, Weight};

use ckpt_passes::ir::typing::Contents;
use ckpt_passes::ir::{Builder, DType, Dim, Graph, Loc, Origin, Tensor, Ty, ValueId};
use ckpt_passes::transform::sizes::Sizes;
use ckpt_passes::{Error, Result};
use signature::Vocabulary;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use tensors::Memory;

/// An argument or a result of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Tensor(TensorId),
    /// A complex tensor: its real and imaginary part are the last axis of this one ([`complex`]).
    Complex(TensorId),
    /// A number, or an expression over named sizes.
    Int(Dim),
    Float(f64),
    Bool(bool),
    Str(String),
    /// An argument that is not given.
    None,
    DType(DType),
    /// The element type of a complex tensor, by that of its parts.
    ComplexType(DType),
    /// A device, a layout, a memory format, a generator: what says where a tensor lies. No op here looks at it.
    Place,
    /// A number or truth value that only a run can tell; an op that needs it is refused.
    Unknown,
    List(Vec<Value>),
    Tuple(Vec<Value>),
}

impl From<TensorId> for Value {
    fn from(id: TensorId) -> Value {
        Value::Tensor(id)
    }
}

impl From<f64> for Value {
    fn from(x: f64) -> Value {
        Value::Float(x)
    }
}

impl From<i64> for Value {
    fn from(n: i64) -> Value {
        Value::Int(Dim::from(n))
    }
}

impl From<Dim> for Value {
    fn from(n: Dim) -> Value {
        Value::Int(n)
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Value {
        Value::Bool(b)
    }
}

impl From<&Value> for Value {
    fn from(value: &Value) -> Value {
        value.clone()
    }
}

impl Value {
    /// Integers as a list.
    pub fn ints(list: &[i64]) -> Value {
        Value::List(list.iter().map(|n| Value::from(*n)).collect())
    }

    /// The members of a list or tuple.
    pub fn listed(&self) -> &[Value] {
        match self {
            Value::List(items) | Value::Tuple(items) => items,
            _ => &[],
        }
    }

    /// What kind of value it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Tensor(_) => "a tensor",
            Value::Complex(_) => "a complex tensor",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a bool",
            Value::Str(_) => "a string",
            Value::None => "None",
            Value::DType(_) => "an element type",
            Value::ComplexType(_) => "a complex element type",
            Value::Place => "a device or layout",
            Value::Unknown => "a number that only a run can tell",
            Value::List(items) if items.contains(&Value::Unknown) => {
                "a list with a number that only a run can tell"
            }
            Value::List(_) => "a list",
            Value::Tuple(_) => "a tuple",
        }
    }
}

/// Where a call stands in the model.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Base of the names of the nodes it becomes, and of its result; made unique.
    pub name: String,
    /// Module path, outermost first, with classes (see [`Loc`]).
    pub scopes: Vec<(String, Option<String>)>,
    /// For messages: `node 12 "linear_3"`, `code/__torch__/m.py:42`.
    pub source: String,
}

/// The key of notes that nodes carry of the op that they were traced from: `aten.linear.default`.
pub const TRACED: &str = ckpt_passes::analysis::modules::OUR_TRACED;

/// A program being replayed into a graph.
pub struct Lowering<'g> {
    b: Builder<'g>,
    sizes: Sizes,
    memory: Memory,
    vocabulary: Rc<Vocabulary>,
    weights: weights::Weights,
    /// Whether each value depends on a parameter through ops that have a gradient; `None`: not looked at yet.
    depends: BTreeMap<ValueId, bool>,
    grad_enabled: bool,
    /// The input that random ops draw by, once there is one.
    seed: Option<ValueId>,
    /// Tensors that stand for plain numbers: in the element type of a result they count as those do.
    plain: BTreeSet<TensorId>,
    warnings: Vec<String>,
}

impl<'g> Lowering<'g> {
    /// A lowering into an empty graph.
    pub fn new(graph: &'g mut Graph) -> Lowering<'g> {
        let contents = Contents::of(graph);
        Lowering {
            b: Builder::resume(graph, contents),
            sizes: Sizes::default(),
            memory: Memory::default(),
            vocabulary: Rc::new(Vocabulary::new(vocabulary::FAMILIES)),
            weights: weights::Weights::default(),
            depends: BTreeMap::new(),
            grad_enabled: true,
            seed: None,
            plain: BTreeSet::new(),
            warnings: Vec::new(),
        }
    }

    /// An input of the model. Its named sizes are at hand from here on.
    ///
    /// # Errors
    /// A name that is empty or taken.
    pub fn input(&mut self, name: &str, ty: Ty) -> Result<TensorId> {
        self.free_name(name)?;
        let value = self.b.graph.add_input(name, Some(ty));
        self.sizes.read(self.b.graph, value);
        Ok(self.fresh(value))
    }

    /// A tensor that is part of the program: row-major, no parameter and no buffer.
    pub fn constant(&mut self, name: &str, tensor: Tensor) -> TensorId {
        let value = self.b.constant(name, tensor);
        self.fresh(value)
    }

    /// Names a result of the model, in the order of its outputs.
    ///
    /// # Errors
    /// A name that is empty or was given to another output; a tensor whose value is not certain.
    pub fn output(&mut self, name: &str, tensor: TensorId) -> Result<()> {
        let mut value = self.read(tensor)?;
        let listed = self.b.graph.outputs().contains(&value);
        if listed || self.b.graph.def_node(value).is_none() {
            value = self.emit(&ckpt_passes::ops::shape::IDENTITY, &[value])?;
        }
        if self.b.graph.value(value).name != name {
            if let Some(holder) = self.b.graph.find_value(name) {
                let fixed = self.b.graph.outputs().contains(&holder)
                    || self.b.graph.def_node(holder).is_none();
                if name.is_empty() || fixed {
                    return Err(Error::model(
                        "name",
                        format!("an output is called `{name}`, and so is something else"),
                    ));
                }
                self.b.graph.rename_value(holder, &format!("{name}.inner"));
            }
            self.b.graph.rename_value(value, name);
        }
        self.b.graph.add_output(value);
        Ok(())
    }

    /// Turns gradients on or off for the calls that follow, as `torch.no_grad` does; returns what it was.
    pub fn set_grad_enabled(&mut self, enabled: bool) -> bool {
        std::mem::replace(&mut self.grad_enabled, enabled)
    }

    /// Replays a call of `name` (`aten::add`, `transformers::grouped_mm_fallback`). Arguments may be given by place, by
    /// name or both; `overload` is used where the file tells it, else the kinds of the arguments decide.
    ///
    /// # Errors
    /// An op that is not known, arguments that it does not take, and what its row refuses; the error names the place.
    pub fn call(
        &mut self,
        name: &str,
        overload: Option<&str>,
        args: Vec<Value>,
        kwargs: Vec<(&str, Value)>,
        place: &Place,
    ) -> Result<Value> {
        self.b.prefix.clone_from(&place.name);
        self.b.loc = Arc::new(Loc {
            node: place.name.clone(),
            scopes: place.scopes.clone(),
        });
        let first = self.b.graph.order().len();
        let done = vocabulary::run(self, name, args, kwargs);
        let value = done.map_err(|e| {
            if place.source.is_empty() {
                e
            } else {
                e.at(place.source.clone())
            }
        })?;
        let traced = name.replacen("::", ".", 1);
        let traced = format!("{traced}.{}", overload.unwrap_or("default"));
        for node in self.b.graph.order()[first..].to_vec() {
            let meta = self.b.graph.meta_mut(node);
            meta.insert(TRACED.into(), traced.clone());
        }
        self.check_sizes(&value)
            .map_err(|e| e.at(place.source.clone()))?;
        if let Value::Tensor(id) = &value {
            let result = self.read(*id)?;
            let new = self
                .b
                .graph
                .def_node(result)
                .is_some_and(|n| self.b.graph.order()[first..].contains(&n));
            if new && !place.name.is_empty() {
                self.b.graph.rename_value(result, &place.name);
            }
        }
        Ok(value)
    }

    /// Fails where the sizes of results are expressions that grow without end.
    fn check_sizes(&self, value: &Value) -> Result<()> {
        match value {
            Value::Tensor(id) | Value::Complex(id) => self
                .dims(*id)
                .iter()
                .try_for_each(|d| super::scalars::checked(d.clone()).map(drop)),
            Value::List(items) | Value::Tuple(items) => {
                items.iter().try_for_each(|item| self.check_sizes(item))
            }
            _ => Ok(()),
        }
    }

    /// The sizes of a tensor.
    pub fn dims(&self, tensor: TensorId) -> &[Dim] {
        self.memory.dims(tensor)
    }

    pub fn dtype(&self, tensor: TensorId) -> DType {
        self.memory.dtype(tensor)
    }

    /// The sizes of what a program calls a tensor, be it complex.
    pub fn sizes_of(&self, value: &Value) -> Option<&[Dim]> {
        match value {
            Value::Tensor(id) => Some(self.dims(*id)),
            Value::Complex(id) => Some(self.complex_dims(*id)),
            _ => None,
        }
    }

    /// The elements of a small integer or boolean tensor, row-major, where they are known.
    ///
    /// # Errors
    /// A tensor whose value is not certain.
    pub fn known(&mut self, tensor: TensorId) -> Result<Option<Vec<Dim>>> {
        let value = self.read(tensor)?;
        Ok(self.b.contents.get(value).map(<[Dim]>::to_vec))
    }

    /// An int64 scalar tensor that holds an integer: `prim::NumToTensor`.
    ///
    /// # Errors
    /// A data-dependent size that nothing tells.
    pub fn number(&mut self, int: &Dim) -> Result<TensorId> {
        let value = self.int_scalar(int)?;
        Ok(self.fresh(value))
    }

    /// A 0-d tensor that holds a float: float32, or float64 for a plain number of the program.
    pub fn real(&mut self, value: f64, plain: bool) -> TensorId {
        let dtype = if plain { DType::F64 } else { DType::F32 };
        let value = self.b.scalar(dtype, value);
        let tensor = self.fresh(value);
        if plain {
            self.plain.insert(tensor);
        }
        tensor
    }

    /// Ends the program; what a user should know about it, each one line.
    ///
    /// # Errors
    /// A program without outputs.
    pub fn finish(mut self) -> Result<Vec<String>> {
        if self.b.graph.outputs().is_empty() {
            return Err(Error::model("outputs", "the program returns no tensor"));
        }
        self.warn_of_lost_writes();
        // Parameters are what the program calls so; tables that ops are written with are none, whatever they look like.
        let inits = self.b.graph.inits();
        let inits: Vec<(ValueId, String)> = inits.map(|(id, v)| (id, v.name.clone())).collect();
        for (value, name) in inits {
            self.b.graph.origins.entry(value).or_insert(Origin {
                names: vec![name],
                transposed: false,
                is_parameter: Some(false),
                frozen: false,
            });
        }
        Ok(self.warnings)
    }

    fn free_name(&self, name: &str) -> Result<()> {
        if name.is_empty() || self.b.graph.has_value_name(name) {
            return Err(Error::model("name", format!("`{name}` is defined twice")));
        }
        Ok(())
    }
}
