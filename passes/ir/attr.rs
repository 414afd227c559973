//! Attributes of nodes and the schema they are checked against.

use super::tensor::Tensor;
use super::ty::DType;
use std::collections::BTreeMap;
use std::fmt;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    Int(i64),
    Float(f32),
    Str(String),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Strs(Vec<String>),
    DType(DType),
    Tensor(Tensor),
}

/// What kind of value an attribute takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrKind {
    Int,
    Float,
    Str,
    Ints,
    Floats,
    Strs,
    DType,
    Tensor,
}

impl Attr {
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

impl fmt::Display for AttrKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", format!("{self:?}").to_lowercase())
    }
}

impl From<i64> for Attr {
    fn from(v: i64) -> Attr {
        Attr::Int(v)
    }
}
impl From<f32> for Attr {
    fn from(v: f32) -> Attr {
        Attr::Float(v)
    }
}
impl From<&str> for Attr {
    fn from(v: &str) -> Attr {
        Attr::Str(v.into())
    }
}
impl From<Vec<i64>> for Attr {
    fn from(v: Vec<i64>) -> Attr {
        Attr::Ints(v)
    }
}
impl From<DType> for Attr {
    fn from(v: DType) -> Attr {
        Attr::DType(v)
    }
}

/// One row of an op's attribute schema.
pub struct AttrSpec {
    pub name: &'static str,
    pub kind: AttrKind,
    pub default: AttrDefault,
}

/// What holds when a file does not give the attribute.
#[derive(Clone, Copy)]
pub enum AttrDefault {
    /// It must be given.
    Required,
    /// Its absence means something of its own.
    Absent,
    Int(i64),
    Float(f32),
    Str(&'static str),
}

impl AttrSpec {
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
    pub fn new() -> Attrs {
        Attrs::default()
    }

    /// For chaining: `Attrs::new().with("axis", 1)`.
    pub fn with(mut self, name: &str, value: impl Into<Attr>) -> Attrs {
        self.0.insert(name.into(), value.into());
        self
    }

    pub fn set(&mut self, name: &str, value: Attr) {
        self.0.insert(name.into(), value);
    }

    pub fn get(&self, name: &str) -> Option<&Attr> {
        self.0.get(name)
    }

    pub fn remove(&mut self, name: &str) -> Option<Attr> {
        self.0.remove(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attr)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn opt_int(&self, name: &str) -> Option<i64> {
        match self.0.get(name) {
            Some(Attr::Int(v)) => Some(*v),
            _ => None,
        }
    }

    pub fn opt_float(&self, name: &str) -> Option<f32> {
        match self.0.get(name) {
            Some(Attr::Float(v)) => Some(*v),
            _ => None,
        }
    }

    pub fn opt_ints(&self, name: &str) -> Option<&[i64]> {
        match self.0.get(name) {
            Some(Attr::Ints(v)) => Some(v),
            _ => None,
        }
    }

    pub fn opt_str(&self, name: &str) -> Option<&str> {
        match self.0.get(name) {
            Some(Attr::Str(v)) => Some(v),
            _ => None,
        }
    }

    pub fn opt_dtype(&self, name: &str) -> Option<DType> {
        match self.0.get(name) {
            Some(Attr::DType(v)) => Some(*v),
            _ => None,
        }
    }

    pub fn opt_tensor(&self, name: &str) -> Option<&Tensor> {
        match self.0.get(name) {
            Some(Attr::Tensor(v)) => Some(v),
            _ => None,
        }
    }

    /// An attribute that the schema guarantees (required or with a default).
    pub fn int(&self, name: &str) -> i64 {
        self.opt_int(name)
            .unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
    }

    /// An attribute that the schema guarantees.
    pub fn float(&self, name: &str) -> f32 {
        self.opt_float(name)
            .unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
    }

    /// An attribute that the schema guarantees.
    pub fn ints(&self, name: &str) -> &[i64] {
        self.opt_ints(name)
            .unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
    }

    /// An attribute that the schema guarantees.
    pub fn str(&self, name: &str) -> &str {
        self.opt_str(name)
            .unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
    }

    /// An attribute that the schema guarantees.
    pub fn dtype(&self, name: &str) -> DType {
        self.opt_dtype(name)
            .unwrap_or_else(|| panic!("I4: attribute `{name}` is missing"))
    }
}
