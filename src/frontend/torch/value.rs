//! Values of a PyTorch program while it is read: tensors as handles, and everything that is known before a run.

use ckpt_passes::ir::{DType, Dim};

/// A handle of a tensor of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TensorId(pub(super) u32);

/// The group of ranks that the collectives of a program name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// How many ranks it has; 0 as long as no collective says so.
    pub ranks: i64,
}

/// An argument or a result of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A real tensor of the program.
    Tensor(TensorId),
    /// A complex tensor, as a real tensor whose last axis holds the real and the imaginary part.
    Complex(TensorId),
    /// A number, or an expression over named sizes.
    Int(Dim),
    /// A floating-point number that is known before a run.
    Float(f64),
    /// A truth value that is known before a run.
    Bool(bool),
    /// Text, such as a mode or an equation.
    Str(String),
    /// An argument that is not given.
    None,
    /// An element type of real tensors.
    DType(DType),
    /// The element type of a complex tensor, given by the type of its parts.
    ComplexType(DType),
    /// A device, layout, memory format or generator. No op reads it.
    Place,
    /// A number or truth value that is known only in a run. An op that needs it is refused.
    Unknown,
    /// Values in order; any of them may be of another variant.
    List(Vec<Value>),
    /// The results of a call with several, or a tuple of the program.
    Tuple(Vec<Value>),
}

/// Makes values of the types that the variants hold.
macro_rules! from {
    ($($of:ty => $variant:ident),+ $(,)?) => {
        $(impl From<$of> for Value {
            fn from(value: $of) -> Value {
                Value::$variant(value.into())
            }
        })+
    };
}

from! { TensorId => Tensor, f64 => Float, i64 => Int, Dim => Int, bool => Bool, DType => DType, String => Str }

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(items: Vec<T>) -> Value {
        Value::List(items.into_iter().map(T::into).collect())
    }
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::None, T::into)
    }
}

impl Value {
    /// Returns a list of integers.
    pub fn ints(list: &[i64]) -> Value {
        Value::from(list.to_vec())
    }

    /// Returns the members of a list or tuple; none for any other value.
    pub fn members(&self) -> &[Value] {
        match self {
            Value::List(items) | Value::Tuple(items) => items,
            _ => &[],
        }
    }

    /// Returns the handles of all tensors in the value.
    pub fn tensors(&self) -> Vec<TensorId> {
        match self {
            Value::Tensor(id) | Value::Complex(id) => vec![*id],
            _ => self.members().iter().flat_map(Value::tensors).collect(),
        }
    }

    /// Returns the value as a number, if the file fixes it.
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Int(n) => n.as_const().map(|n| n as f64),
            Value::Float(x) => Some(*x),
            _ => None,
        }
    }

    /// Names the kind of value in messages.
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
