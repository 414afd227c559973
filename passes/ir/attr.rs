//! Attributes of nodes and the schema they are checked against.

use super::tensor::Tensor;
use super::ty::DType;
use std::collections::BTreeMap;
use std::fmt;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// An integer.
    Int(i64),
    /// A number.
    Float(f32),
    /// A text.
    Str(String),
    /// Integers.
    Ints(Vec<i64>),
    /// Numbers.
    Floats(Vec<f32>),
    /// Texts.
    Strs(Vec<String>),
    /// An element type.
    DType(DType),
    /// A tensor.
    Tensor(Tensor),
}

/// What kind of value an attribute takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    /// An integer.
    Int,
    /// A number.
    Float,
    /// A text.
    Str,
    /// Integers.
    Ints,
    /// Numbers.
    Floats,
    /// Texts.
    Strs,
    /// An element type.
    DType,
    /// A tensor.
    Tensor,
}

impl Attr {
    /// The kind of the value.
    pub fn kind(&self) -> AttrKind {
        match self {
            Attr::Int(_) => AttrKind::Int,
            Attr::Float(_) => AttrKind::Float,
            Attr::Str(_) => AttrKind::Str,
            Attr::Ints(_) => AttrKind::Ints,
            Attr::Floats(_) => AttrKind::Floats,
            Attr::Strs(_) => AttrKind::Strs,
            Attr::DType(_) => AttrKind::DType,
            Attr::Tensor(_) => AttrKind::Tensor,
        }
    }
}

macro_rules! attr_from {
    ($($ty:ty => $kind:ident),+) => {$(
        impl From<$ty> for Attr {
            fn from(v: $ty) -> Attr {
                Attr::$kind(v)
            }
        }
    )+};
}
attr_from!(i64 => Int, f32 => Float, Vec<i64> => Ints, DType => DType);

impl fmt::Display for AttrKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

impl From<&str> for Attr {
    fn from(v: &str) -> Attr {
        Attr::Str(v.into())
    }
}

/// One row of an op's attribute schema.
pub struct AttrSpec {
    /// Its name in the text form and in files.
    pub name: &'static str,
    /// The kind of its value.
    pub kind: AttrKind,
    /// What holds where it is not given.
    pub default: AttrDefault,
}

/// What holds when a file does not give the attribute.
#[derive(Clone, Copy)]
pub enum AttrDefault {
    /// It must be given.
    Required,
    /// Its absence means something of its own.
    Absent,
    /// An integer.
    Int(i64),
    /// A number.
    Float(f32),
    /// A text.
    Str(&'static str),
}

impl AttrSpec {
    const fn new(name: &'static str, kind: AttrKind, default: AttrDefault) -> AttrSpec {
        AttrSpec {
            name,
            kind,
            default,
        }
    }

    /// An integer with a default.
    pub const fn int(name: &'static str, default: i64) -> AttrSpec {
        AttrSpec::new(name, AttrKind::Int, AttrDefault::Int(default))
    }

    /// A number with a default.
    pub const fn float(name: &'static str, default: f32) -> AttrSpec {
        AttrSpec::new(name, AttrKind::Float, AttrDefault::Float(default))
    }

    /// A word with a default.
    pub const fn str(name: &'static str, default: &'static str) -> AttrSpec {
        AttrSpec::new(name, AttrKind::Str, AttrDefault::Str(default))
    }

    /// An attribute that must be given.
    pub const fn required(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec::new(name, kind, AttrDefault::Required)
    }

    /// An attribute whose absence has a meaning of its own.
    pub const fn optional(name: &'static str, kind: AttrKind) -> AttrSpec {
        AttrSpec::new(name, kind, AttrDefault::Absent)
    }

    /// Returns the value that holds where the attribute is not given, if there is one.
    pub fn default_value(&self) -> Option<Attr> {
        match self.default {
            AttrDefault::Required | AttrDefault::Absent => None,
            AttrDefault::Int(v) => Some(Attr::Int(v)),
            AttrDefault::Float(v) => Some(Attr::Float(v)),
            AttrDefault::Str(v) => Some(Attr::Str(v.into())),
        }
    }
}

/// Attributes by name. Complete: an attribute with a default is always there (see `Graph::add_node`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attrs(BTreeMap<String, Attr>);

impl Attrs {
    /// Returns no attributes.
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// For chaining: `Attrs::new().with("axis", 1)`.
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.0.insert(name.into(), value.into());
        self
    }

    /// Sets an attribute.
    pub fn set(&mut self, name: &str, value: Attr) {
        self.0.insert(name.into(), value);
    }

    /// Returns an attribute.
    pub fn get(&self, name: &str) -> Option<&Attr> {
        self.0.get(name)
    }

    /// Removes an attribute and returns its value.
    pub fn remove(&mut self, name: &str) -> Option<Attr> {
        self.0.remove(name)
    }

    /// Returns all attributes, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attr)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// Returns true if there is no attribute.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Getters of one kind of attribute: where it may be absent, and where the schema guarantees it (required or with a
/// default), which panics otherwise.
macro_rules! getters {
    ($($opt:ident, $get:ident: $kind:ident -> $ty:ty = $read:expr;)+) => {
        impl Attrs {
            $(
                #[doc = concat!("Returns the attribute where it is given, as `", stringify!($ty), "`.")]
                pub fn $opt(&self, name: &str) -> Option<$ty> {
                    match self.0.get(name) {
                        Some(Attr::$kind(v)) => Some($read(v)),
                        _ => None,
                    }
                }

                #[doc = concat!("Returns an attribute that the schema guarantees, as `", stringify!($ty), "`.")]
                pub fn $get(&self, name: &str) -> $ty {
                    self.$opt(name).unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
                }
            )+
        }
    };
}
getters! {
    opt_int, int: Int -> i64 = |v: &i64| *v;
    opt_float, float: Float -> f32 = |v: &f32| *v;
    opt_ints, ints: Ints -> &[i64] = Vec::as_slice;
    opt_str, str: Str -> &str = String::as_str;
    opt_dtype, dtype: DType -> DType = |v: &DType| *v;
    opt_tensor, tensor: Tensor -> &Tensor = std::convert::identity;
}
