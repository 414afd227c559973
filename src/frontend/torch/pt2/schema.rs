//! The JSON of an exported program, as far as it is read (torch/_export/serde/schema.py, schema version 8).
//!
//! Unions are tagged by their only key. The JSON reader bounds the depth. Parts that are not read take no memory
//! ([`IgnoredAny`]). A name that stands twice in a table is an error, because neither entry is certain to be meant.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

/// A table in which each name stands once.
type Table<T> = BTreeMap<String, T>;

fn table<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Table<T>, D::Error> {
    struct Unique<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Unique<T> {
        type Value = Table<T>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a table by name")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Table<T>, A::Error> {
            let mut table = Table::new();
            while let Some((name, value)) = entries.next_entry::<String, T>()? {
                if table.contains_key(&name) {
                    let shown: String = name.chars().take(120).collect();
                    return Err(A::Error::custom(format!("{shown:?} is there twice")));
                }
                table.insert(name, value);
            }
            Ok(table)
        }
    }
    from.deserialize_map(Unique(PhantomData))
}

#[derive(Deserialize)]
pub struct Versioned {
    pub schema_version: Version,
}

#[derive(Deserialize)]
pub struct Version {
    pub major: i64,
    pub minor: i64,
}

#[derive(Deserialize)]
pub struct Program {
    pub graph_module: Module,
    /// The ranges of the named sizes.
    #[serde(default, deserialize_with = "table")]
    pub range_constraints: Table<Range>,
}

/// The range of a named size, both ends included.
#[derive(Clone, Copy, Deserialize)]
pub struct Range {
    pub min_val: Option<i64>,
    pub max_val: Option<i64>,
}

#[derive(Deserialize)]
pub struct Module {
    pub graph: Graph,
    pub signature: Signature,
}

#[derive(Deserialize)]
pub struct Signature {
    pub input_specs: Vec<InputSpec>,
    pub output_specs: Vec<OutputSpec>,
}

#[derive(Deserialize)]
pub struct Named {
    pub name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputSpec {
    UserInput {
        arg: Argument,
    },
    Parameter {
        arg: Named,
        #[serde(rename = "parameter_name")]
        name: String,
    },
    Buffer {
        arg: Named,
        #[serde(rename = "buffer_name")]
        name: String,
    },
    TensorConstant {
        arg: Named,
        #[serde(rename = "tensor_constant_name")]
        name: String,
    },
    CustomObj {},
    Token {},
    ConstantInput {},
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput { arg: Named },
    BufferMutation { buffer_name: String },
    ParameterMutation { parameter_name: String },
    UserInputMutation { user_input_name: String },
    GradientToParameter {},
    GradientToUserInput {},
    Token {},
}

#[derive(Deserialize)]
pub struct Graph {
    pub inputs: Vec<Argument>,
    pub outputs: Vec<Argument>,
    pub nodes: Vec<Node>,
    #[serde(default, deserialize_with = "table")]
    pub tensor_values: Table<TensorMeta>,
    #[serde(default, deserialize_with = "table")]
    pub sym_int_values: Table<Size>,
}

#[derive(Deserialize)]
pub struct Node {
    pub target: String,
    pub inputs: Vec<NamedArgument>,
    pub outputs: Vec<Argument>,
    #[serde(default, deserialize_with = "table")]
    pub metadata: Table<String>,
}

#[derive(Deserialize)]
pub struct NamedArgument {
    #[serde(default)]
    pub name: String,
    pub arg: Argument,
}

/// An argument or a result. A kind that is not read is refused where it is used.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Argument {
    AsNone(bool),
    AsTensor(Named),
    AsTensors(Vec<Named>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Float),
    AsFloats(Vec<Float>),
    AsString(String),
    AsStrings(Vec<String>),
    AsSymInt(SymArgument),
    AsSymInts(Vec<SymArgument>),
    AsSymFloat(IgnoredAny),
    AsSymFloats(IgnoredAny),
    AsScalarType(i64),
    AsMemoryFormat(i64),
    AsLayout(i64),
    AsDevice(IgnoredAny),
    AsBool(bool),
    AsBools(Vec<bool>),
    AsSymBool(SymArgument),
    AsSymBools(Vec<SymArgument>),
    AsGraph(Box<GraphArgument>),
    AsOptionalTensor(OptionalTensor),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsNestedTensors(IgnoredAny),
    AsCustomObj(IgnoredAny),
    AsOperator(String),
    AsComplex(IgnoredAny),
    AsIntLists(Vec<Vec<i64>>),
    AsStringToArgument(IgnoredAny),
}

impl Argument {
    /// Names the kind of argument in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Argument::AsNone(_) => "None",
            Argument::AsTensor(_) => "a tensor",
            Argument::AsTensors(_) | Argument::AsOptionalTensors(_) => "a list of tensors",
            Argument::AsInt(_) | Argument::AsSymInt(_) => "an integer",
            Argument::AsInts(_) | Argument::AsSymInts(_) => "a list of integers",
            Argument::AsFloat(_) | Argument::AsSymFloat(_) => "a float",
            Argument::AsString(_) => "a string",
            Argument::AsBool(_) | Argument::AsSymBool(_) => "a bool",
            Argument::AsGraph(_) => "a graph",
            Argument::AsOptionalTensor(_) => "a tensor or None",
            _ => "an object of another kind",
        }
    }
}

/// A number, or the text of one that JSON has no number for.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Float {
    Number(f64),
    Text(String),
}

impl Float {
    /// Returns the number, unless the text is none.
    pub fn value(&self) -> Option<f64> {
        match self {
            Float::Number(x) => Some(*x),
            Float::Text(text) => match text.as_str() {
                "Infinity" => Some(f64::INFINITY),
                "-Infinity" => Some(f64::NEG_INFINITY),
                "NaN" => Some(f64::NAN),
                _ => None,
            },
        }
    }
}

/// An integer or truth value: a literal, or the name of a result.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SymArgument {
    AsName(String),
    AsInt(i64),
    AsBool(bool),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptionalTensor {
    AsTensor(Named),
    AsNone(bool),
}

#[derive(Deserialize)]
pub struct GraphArgument {
    pub graph: Graph,
}

#[derive(Deserialize)]
pub struct TensorMeta {
    pub dtype: i64,
    pub sizes: Vec<Size>,
    #[serde(default)]
    pub strides: Vec<Size>,
    pub storage_offset: Option<Size>,
    #[serde(default)]
    pub requires_grad: bool,
}

/// A size: a number, or an expression as text.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Size {
    AsInt(i64),
    AsExpr(Expression),
}

#[derive(Deserialize)]
pub struct Expression {
    pub expr_str: String,
}

/// `model_weights_config.json` and `model_constants_config.json`.
#[derive(Deserialize)]
pub struct WeightsConfig {
    #[serde(deserialize_with = "table")]
    pub config: Table<Payload>,
}

#[derive(Deserialize)]
pub struct Payload {
    pub path_name: String,
    #[serde(default)]
    pub use_pickle: bool,
    pub tensor_meta: Option<TensorMeta>,
}
