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

/// The schema version alone, read before the rest of the program.
#[derive(Deserialize)]
pub struct Versioned {
    /// Version of the schema that the program was written with.
    pub schema_version: Version,
}

/// A version of the schema.
#[derive(Deserialize)]
pub struct Version {
    /// Changes when older readers can no longer read the program.
    pub major: i64,
    /// Changes when a compatible addition is made. Shown in errors only.
    pub minor: i64,
}

/// An exported program (`models/model.json`).
#[derive(Deserialize)]
pub struct Program {
    /// The graph of the model, with the roles of its inputs and outputs.
    pub graph_module: Module,
    /// The ranges of the named sizes.
    #[serde(default, deserialize_with = "table")]
    pub range_constraints: Table<Range>,
    /// The dialects that the program was checked against: `TRAINING` as torch.export gives it, others once it was decomposed.
    #[serde(default)]
    pub verifiers: Vec<String>,
}

/// The range of a named size, both ends included.
#[derive(Clone, Copy, Deserialize)]
pub struct Range {
    /// Smallest value; `None` means no lower bound in the file.
    pub min_val: Option<i64>,
    /// Largest value; `None` means no upper bound.
    pub max_val: Option<i64>,
}

/// A graph and its signature.
#[derive(Deserialize)]
pub struct Module {
    /// The top-level graph.
    pub graph: Graph,
    /// Roles of the graph's inputs and outputs.
    pub signature: Signature,
}

/// The roles of a graph's inputs and outputs.
#[derive(Deserialize)]
pub struct Signature {
    /// One for each of [`Graph::inputs`], in the same order.
    pub input_specs: Vec<InputSpec>,
    /// One for each of [`Graph::outputs`], in the same order.
    pub output_specs: Vec<OutputSpec>,
}

/// A reference to a value of the graph (`TensorArgument`).
#[derive(Deserialize)]
pub struct Named {
    /// Name of the value, as in [`Graph::tensor_values`].
    pub name: String,
}

/// The role of an input of the graph.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputSpec {
    /// An argument of the model's `forward`.
    UserInput {
        /// A tensor, or a literal that the program is specialised to.
        arg: Argument,
    },
    /// A parameter of the model.
    Parameter {
        /// Name of the parameter in the graph.
        arg: Named,
        /// Key in [`WeightsConfig::config`], for example `layers.0.weight`.
        #[serde(rename = "parameter_name")]
        name: String,
    },
    /// A buffer of the model.
    Buffer {
        /// Name of the buffer in the graph.
        arg: Named,
        /// Key in [`WeightsConfig::config`], for example `norm.running_mean`.
        #[serde(rename = "buffer_name")]
        name: String,
        /// True if the model's state dictionary holds it.
        persistent: bool,
    },
    /// A tensor that the model's code holds, but registers neither as parameter nor as buffer.
    TensorConstant {
        /// Name of the constant in the graph.
        arg: Named,
        /// Key in [`WeightsConfig::config`].
        #[serde(rename = "tensor_constant_name")]
        name: String,
    },
    /// An object of a TorchScript class. Not supported.
    CustomObj {},
    /// A token that orders effects. Not supported.
    Token {},
    /// An argument that export replaced with its value. The reader skips it.
    ConstantInput {},
}

/// The role of an output of the graph.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputSpec {
    /// A result of the model's `forward`.
    UserOutput {
        /// The returned value. Only tensors become outputs; others but `None` give a warning.
        arg: Argument,
    },
    /// The loss of a program that was exported with its backward pass.
    LossOutput {
        /// The tensor of the loss, which becomes an output.
        arg: Named,
    },
    /// The new value of a buffer. Dropped with a warning.
    BufferMutation {
        /// The buffer that the program changes, by its name in the model.
        buffer_name: String,
    },
    /// The new value of a parameter. Dropped with a warning.
    ParameterMutation {
        /// The parameter that the program changes, by its name in the model.
        parameter_name: String,
    },
    /// The new value of an input that the program changes in place. Dropped with a warning.
    UserInputMutation {
        /// The input that the program changes, by its name in the graph.
        user_input_name: String,
    },
    /// The gradient of a parameter. Not supported: the program must be the forward pass.
    GradientToParameter {},
    /// The gradient of an argument of `forward`. Not supported.
    GradientToUserInput {},
    /// A token that orders effects. Not supported.
    Token {},
}

/// A list of nodes, with the types of the values that they define.
#[derive(Deserialize)]
pub struct Graph {
    /// The values that the graph is called with, parameters and buffers included.
    pub inputs: Vec<Argument>,
    /// The values that the graph returns.
    pub outputs: Vec<Argument>,
    /// The calls, each after the nodes whose results it uses.
    pub nodes: Vec<Node>,
    /// Types of the tensors of the graph, by name.
    #[serde(default, deserialize_with = "table")]
    pub tensor_values: Table<TensorMeta>,
    /// Expressions of the symbolic integers of the graph, by name.
    #[serde(default, deserialize_with = "table")]
    pub sym_int_values: Table<Size>,
}

/// A call of an operator.
#[derive(Deserialize)]
pub struct Node {
    /// Qualified name of the operator, for example `torch.ops.aten.mm.default`.
    pub target: String,
    /// The arguments, by position or by name.
    pub inputs: Vec<NamedArgument>,
    /// The names that the results get: one list, or one entry for each result.
    pub outputs: Vec<Argument>,
    /// Notes of the exporter by kind. Only `nn_module_stack` is read.
    #[serde(default, deserialize_with = "table")]
    pub metadata: Table<String>,
}

/// An argument of a call.
#[derive(Deserialize)]
pub struct NamedArgument {
    /// Name of the parameter in the operator's signature; empty for an argument that goes by position.
    #[serde(default)]
    pub name: String,
    /// The value that is passed.
    pub arg: Argument,
}

/// An argument or a result. A kind that is not read is refused where it is used.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Argument {
    /// `None`. The flag has no meaning.
    AsNone(bool),
    /// A tensor.
    AsTensor(Named),
    /// A list of tensors.
    AsTensors(Vec<Named>),
    /// An integer literal.
    AsInt(i64),
    /// A list of integer literals.
    AsInts(Vec<i64>),
    /// A float literal.
    AsFloat(Float),
    /// A list of float literals.
    AsFloats(Vec<Float>),
    /// A string literal.
    AsString(String),
    /// A list of string literals.
    AsStrings(Vec<String>),
    /// An integer that is computed from sizes.
    AsSymInt(SymArgument),
    /// A list of integers, some of them computed from sizes.
    AsSymInts(Vec<SymArgument>),
    /// A float that is computed from sizes.
    AsSymFloat(SymFloat),
    /// A list of floats, some of them computed from sizes. Not supported.
    AsSymFloats(IgnoredAny),
    /// An element type: a code as in [`TensorMeta::dtype`], complex types included.
    AsScalarType(i64),
    /// A memory format (`MemoryFormat` of the schema). Its value is ignored.
    AsMemoryFormat(i64),
    /// A layout (`Layout` of the schema). Its value is ignored.
    AsLayout(i64),
    /// A device. It is ignored.
    AsDevice(IgnoredAny),
    /// A truth value.
    AsBool(bool),
    /// A list of truth values.
    AsBools(Vec<bool>),
    /// A truth value that is computed from sizes.
    AsSymBool(SymArgument),
    /// A list of truth values, some of them computed from sizes.
    AsSymBools(Vec<SymArgument>),
    /// A nested graph. Supported only for the ops that set the gradient mode or autocast.
    AsGraph(Box<GraphArgument>),
    /// A tensor or `None`.
    AsOptionalTensor(OptionalTensor),
    /// A list of which each entry is a tensor or `None`.
    AsOptionalTensors(Vec<OptionalTensor>),
    /// A list of lists of tensors. Not supported.
    AsNestedTensors(IgnoredAny),
    /// An object of a TorchScript class. Not supported.
    AsCustomObj(IgnoredAny),
    /// The name of an operator. Not supported.
    AsOperator(String),
    /// A complex number. Not supported.
    AsComplex(IgnoredAny),
    /// A list of lists of integers. Not supported.
    AsIntLists(Vec<Vec<i64>>),
    /// A dictionary with string keys. Not supported.
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
    /// A finite number.
    Number(f64),
    /// `Infinity`, `-Infinity` or `NaN`. Other texts have no value.
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
    /// Name of the result that holds the value.
    AsName(String),
    /// An integer literal, in a list that also has names.
    AsInt(i64),
    /// A truth value literal, in a list that also has names.
    AsBool(bool),
}

/// A float: a literal, or the name of a result.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SymFloat {
    /// Name of the result that holds the value.
    AsName(String),
    /// A literal.
    AsFloat(Float),
}

/// A tensor, or `None` in its place.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptionalTensor {
    /// The tensor that is passed.
    AsTensor(Named),
    /// `None`. The flag has no meaning.
    AsNone(bool),
}

/// A graph that is passed to a higher-order op.
#[derive(Deserialize)]
pub struct GraphArgument {
    /// The nested graph. It sees only its own inputs.
    pub graph: Graph,
}

/// The type of a tensor, and its place in its storage.
#[derive(Deserialize)]
pub struct TensorMeta {
    /// Code of the element type (`ScalarType` of the schema), for example 7 for float32.
    pub dtype: i64,
    /// One size for each axis.
    pub sizes: Vec<Size>,
    /// Distance between neighbours along each axis, in elements. Places stored weights only.
    #[serde(default)]
    pub strides: Vec<Size>,
    /// Distance from the start of the storage, in elements; `None` means 0. Places stored weights only.
    pub storage_offset: Option<Size>,
    /// True for a parameter that is trained. Ignored for other tensors.
    #[serde(default)]
    pub requires_grad: bool,
}

/// A size: a number, or an expression as text.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Size {
    /// A fixed size.
    AsInt(i64),
    /// A size that depends on named sizes.
    AsExpr(Expression),
}

/// A symbolic size (`SymExpr`). Its example value is not read.
#[derive(Deserialize)]
pub struct Expression {
    /// The expression as SymPy prints it, for example `2*s0 + 1`.
    pub expr_str: String,
}

/// `model_weights_config.json` and `model_constants_config.json`.
#[derive(Deserialize)]
pub struct WeightsConfig {
    /// What the archive stores, by its name in the model. The reader uses tensors only.
    #[serde(deserialize_with = "table")]
    pub config: Table<Payload>,
}

/// Where a tensor is stored, and how (`PayloadMeta`).
#[derive(Deserialize)]
pub struct Payload {
    /// File in the folder of weights or constants. Tied weights share one.
    pub path_name: String,
    /// True if the file is a `torch.save` archive, false if it is raw bytes.
    #[serde(default)]
    pub use_pickle: bool,
    /// Type of raw bytes. Ignored, and may be `None`, for a file of `torch.save`.
    pub tensor_meta: Option<TensorMeta>,
}

/// What `ckpt_opt.export` writes beside a program.
#[derive(Deserialize)]
pub struct Names {
    /// Names that the user gave to sizes, by PyTorch's own.
    #[serde(deserialize_with = "table")]
    pub sizes: Table<String>,
}
