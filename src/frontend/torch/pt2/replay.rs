//! Replays the nodes of a program, one call each. Values go by name, sizes are expressions, nested graphs are inlined.

use super::super::aten::{Kind, Lowering, Place};
use super::super::scalars;
use super::super::value::{TensorId, Value};
use super::schema::{
    Argument, Graph, Named, NamedArgument, Node, OptionalTensor, SymArgument, SymFloat, TensorMeta,
};
use super::sizes::Sizes;
use super::weights;
use crate::frontend::given::Given;
use ckpt_passes::ir::{DType, Dim, Same, Ty};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Display;

/// The largest depth of graphs in graphs.
const MAX_NESTING: usize = 16;

/// The higher-order op that turns gradients on or off around a graph.
const GRAD_MODE: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";
/// The higher-order op that turns automatic casts on or off around a graph.
const AUTOCAST: &str = "torch.ops.higher_order.wrap_with_autocast";

/// A program on its way into a graph.
pub struct Replay<'l, 'g> {
    lowering: &'l mut Lowering<'g>,
    values: BTreeMap<String, Value>,
    pub sizes: Sizes<'l>,
}

impl<'l, 'g> Replay<'l, 'g> {
    pub fn new(lowering: &'l mut Lowering<'g>, sizes: Sizes<'l>) -> Replay<'l, 'g> {
        Replay {
            lowering,
            values: BTreeMap::new(),
            sizes,
        }
    }

    /// Declares a weight of the model under the name by which nodes refer to it.
    pub fn weight(
        &mut self,
        (arg, name): (&str, &str),
        graph: &Graph,
        weights: &weights::Weights,
        kind: Kind,
    ) -> Result<()> {
        let tensor = weights.declare(self.lowering, name, kind)?;
        self.name(graph, arg, tensor)
            .map_err(|e| e.at(format!("the weight `{name}`")))
    }

    /// Learns the sizes of inputs that the user gives.
    pub fn say(&mut self, graph: &Graph, given: &Given) -> Result<()> {
        let said = given.inputs.iter().filter_map(|input| {
            let meta = graph.tensor_values.get(&input.name)?;
            Some((input.name.as_str(), meta.sizes.as_slice(), &input.ty))
        });
        let said: Vec<_> = said.collect();
        self.sizes.say(&said)
    }

    /// Declares an input, of the type that the file or the user gives.
    pub fn input(&mut self, name: &str, graph: &Graph, given: &Given) -> Result<()> {
        let meta = graph.tensor_values.get(name);
        let meta = meta.ok_or_else(|| damaged(format!("the input `{name}` has no type")))?;
        let own = self.told(meta)?;
        if own.dims.iter().any(|d| d.as_const().is_some_and(|n| n < 0)) {
            return Err(damaged(format!("the input `{name}` has a negative size")));
        }
        if let Some(said) = given.inputs.iter().find(|i| i.name == name) {
            Sizes::agree(name, &own, &said.ty)?;
        }
        let tensor = self.lowering.input(name, own)?;
        self.define(name, Value::Tensor(tensor))
    }

    /// Notes the ranges of the sizes that inputs have, because ops may mean something else outside of them.
    ///
    /// # Errors
    /// A range without sizes.
    pub fn declare_ranges(&mut self) -> Result<()> {
        self.lowering.declare_ranges(&self.sizes.left())
    }

    /// Gives a value a name that no other value has.
    fn define(&mut self, name: &str, value: Value) -> Result<()> {
        match self.values.insert(name.to_string(), value) {
            None => Ok(()),
            Some(_) => Err(damaged(format!("`{name}` is defined twice"))),
        }
    }

    /// Returns the type that the file gives.
    fn told(&self, meta: &TensorMeta) -> Result<Ty> {
        let dims = self.told_dims(meta)?;
        Ok(Ty::new(weights::dtype(meta)?, dims))
    }

    fn told_dims(&self, meta: &TensorMeta) -> Result<Vec<Dim>> {
        weights::check_rank(meta)?;
        meta.sizes.iter().map(|s| self.sizes.read(s)).collect()
    }

    /// Returns a real tensor by its name.
    ///
    /// # Errors
    /// A name that is not defined, or that of a complex tensor.
    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        match self.values.get(name) {
            Some(Value::Tensor(id)) => Ok(*id),
            Some(Value::Complex(_)) => Err(Error::model(
                "type",
                format!("`{name}` is complex, and leaves the program"),
            )
            .help("return torch.view_as_real of it")),
            _ => Err(damaged(format!("nothing defines the tensor `{name}`"))),
        }
    }

    /// Replays all nodes of a graph.
    ///
    /// # Errors
    /// Whatever an op refuses, with the node.
    pub fn run(&mut self, graph: &Graph, nesting: usize) -> Result<()> {
        if nesting > MAX_NESTING {
            return Err(damaged("graphs are nested too deeply"));
        }
        for (index, node) in graph.nodes.iter().enumerate() {
            let place = || format!("node {index} ({})", node.target.escape_debug());
            let result = self.node(node, nesting).map_err(|e| e.at(place()))?;
            self.bind(graph, node, result).map_err(|e| e.at(place()))?;
        }
        Ok(())
    }

    fn node(&mut self, node: &Node, nesting: usize) -> Result<Value> {
        let target = node.target.as_str();
        if target == GRAD_MODE || target == AUTOCAST {
            return self.wrapped(node, nesting);
        }
        if target.contains("_assert_") || target.contains("sym_constrain_range") {
            return Ok(Value::None);
        }
        let arithmetic = ["_operator.", "torch.sym_", "torch._sym_", "math."];
        if let Some(op) = arithmetic.iter().find_map(|p| target.strip_prefix(p)) {
            return self.arithmetic(op, node);
        }
        let Some(path) = target.strip_prefix("torch.ops.") else {
            bail!("op", "{target} is not supported");
        };
        let mut parts = path.splitn(3, '.');
        let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
            return Err(damaged("a target has no name"));
        };
        let name = format!("{namespace}::{name}");
        let mut args = Vec::new();
        let mut kwargs: Vec<(&str, Value)> = Vec::new();
        for NamedArgument { name, arg } in &node.inputs {
            let mut value = self.argument(arg)?;
            if let (Argument::AsSymFloat(_), Value::Tensor(id)) = (arg, &value) {
                value = Value::Tensor(self.lowering.as_number(*id)?);
            }
            match name.as_str() {
                "" => args.push(value),
                name => kwargs.push((name, value)),
            }
        }
        let place = place(node, &name);
        let overload = parts.next();
        self.lowering.call(&name, overload, args, kwargs, &place)
    }

    /// Replays a graph under a mode: gradients on or off, or automatic casts, which must be off.
    fn wrapped(&mut self, node: &Node, nesting: usize) -> Result<Value> {
        let graphs = node.inputs.iter().enumerate();
        let mut graphs = graphs.filter_map(|(at, input)| match &input.arg {
            Argument::AsGraph(inner) => Some((at, &inner.graph)),
            _ => None,
        });
        let Some((at, inner)) = graphs.next() else {
            return Err(damaged("a region has no graph"));
        };
        let (before, operands) = (&node.inputs[..at], &node.inputs[at + 1..]);
        let enabled = before.iter().find_map(|i| match i.arg {
            Argument::AsBool(b) => Some(b),
            _ => None,
        });
        let Some(enabled) = enabled else {
            return Err(damaged("a region does not say whether its mode is on"));
        };
        let autocast = node.target == AUTOCAST;
        if autocast && enabled {
            return Err(
                Error::model("op", "automatic casts (autocast) are not supported")
                    .help("export the model in the types that it computes in"),
            );
        }
        if inner.inputs.len() != operands.len() {
            return Err(damaged("a region has other operands than its graph"));
        }
        // The inner graph sees its operands and nothing else.
        let mut bound = BTreeMap::new();
        for (formal, actual) in inner.inputs.iter().zip(operands) {
            let Some(name) = output_name(formal) else {
                return Err(damaged("an operand of a region has no name"));
            };
            let value = self.argument(&actual.arg)?;
            if bound.insert(name.to_string(), value).is_some() {
                return Err(damaged(format!("`{name}` is defined twice")));
            }
        }
        let outer = std::mem::replace(&mut self.values, bound);
        let before = match autocast {
            true => None,
            false => Some(self.lowering.set_grad_enabled(enabled)),
        };
        let done = self.run(inner, nesting + 1);
        if let Some(before) = before {
            self.lowering.set_grad_enabled(before);
        }
        done?;
        let results: Result<Vec<Value>> = inner.outputs.iter().map(|o| self.argument(o)).collect();
        self.values = outer;
        Ok(Value::Tuple(results?))
    }

    /// Computes with sizes. A float that depends on a named size becomes a tensor without axes.
    fn arithmetic(&mut self, op: &str, node: &Node) -> Result<Value> {
        let mut args = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            args.push(self.argument(&input.arg)?);
        }
        // Python's operators, and the names that TorchScript has for them.
        let name = match op {
            "mod" => "remainder",
            "truediv" => "div",
            "sym_max" => "max",
            "sym_min" => "min",
            "not_" | "not" | "sym_not" => "__not__",
            "and_" => "__and__",
            "or_" => "__or__",
            "int" | "sym_int" | "trunc" => "Int",
            "float" | "sym_float" => "Float",
            op => op,
        };
        let known = scalars::evaluate(name, &args)?.unwrap_or(Value::Unknown);
        let ops = ["add", "sub", "mul", "div", "pow", "neg", "sqrt", "Float"];
        let of_float =
            ops.contains(&name) && matches!(node.outputs.first(), Some(Argument::AsSymFloat(_)));
        let is_number = |v: &Value| matches!(v, Value::Int(_) | Value::Float(_) | Value::Tensor(_));
        // An unknown result is refused where it is needed. An assertion does not need it.
        if known != Value::Unknown || !of_float || !args.iter().all(is_number) {
            return Ok(known);
        }
        let place = place(node, name);
        let mut tensors = Vec::with_capacity(args.len());
        for arg in args {
            tensors.push(match arg {
                Value::Tensor(_) => arg,
                number => {
                    let double = vec![("dtype", Value::DType(DType::F64))];
                    let make = "aten::scalar_tensor";
                    self.lowering
                        .call(make, None, vec![number], double, &place)?
                }
            });
        }
        match name {
            "Float" => Ok(tensors.swap_remove(0)),
            _ => self
                .lowering
                .call(&format!("aten::{name}"), None, tensors, Vec::new(), &place),
        }
    }

    fn named(&self, name: &str) -> Result<Value> {
        let value = self.values.get(name).cloned();
        value.ok_or_else(|| damaged(format!("nothing defines `{name}`")))
    }

    fn sym(&self, arg: &SymArgument) -> Result<Value> {
        match arg {
            SymArgument::AsInt(n) => Ok(Value::from(*n)),
            SymArgument::AsBool(b) => Ok(Value::from(*b)),
            SymArgument::AsName(name) => self.named(name),
        }
    }

    fn argument(&self, arg: &Argument) -> Result<Value> {
        let tensor = |named: &Named| match self.values.get(&named.name) {
            // Nothing here computes the results that an op keeps for its backward pass.
            Some(Value::Unknown) => Ok(Value::Unknown),
            Some(complex @ Value::Complex(_)) => Ok(complex.clone()),
            _ => self.tensor(&named.name).map(Value::Tensor),
        };
        let optional = |t: &OptionalTensor| match t {
            OptionalTensor::AsTensor(named) => tensor(named),
            OptionalTensor::AsNone(_) => Ok(Value::None),
        };
        let float = |x: &super::schema::Float| {
            let value = x.value().map(Value::Float);
            value.ok_or_else(|| damaged("a number is damaged"))
        };
        let list = |items: Result<Vec<Value>>| items.map(Value::List);
        match arg {
            Argument::AsNone(_) => Ok(Value::None),
            Argument::AsTensor(named) => tensor(named),
            Argument::AsTensors(all) => list(all.iter().map(tensor).collect()),
            Argument::AsOptionalTensor(t) => optional(t),
            Argument::AsOptionalTensors(all) => list(all.iter().map(optional).collect()),
            Argument::AsInt(n) => Ok(Value::Int(Dim::from(*n))),
            Argument::AsInts(all) => Ok(Value::ints(all)),
            Argument::AsFloat(x) | Argument::AsSymFloat(SymFloat::AsFloat(x)) => float(x),
            Argument::AsSymFloat(SymFloat::AsName(name)) => self.named(name),
            Argument::AsFloats(all) => list(all.iter().map(float).collect()),
            Argument::AsString(text) => Ok(Value::Str(text.clone())),
            Argument::AsStrings(all) => Ok(all.clone().into()),
            Argument::AsSymInt(sym) | Argument::AsSymBool(sym) => self.sym(sym),
            Argument::AsSymInts(all) | Argument::AsSymBools(all) => {
                list(all.iter().map(|s| self.sym(s)).collect())
            }
            Argument::AsScalarType(code) => match weights::complex_of(*code) {
                Some(parts) => Ok(Value::ComplexType(parts)),
                None => weights::dtype_of(*code).map(Value::DType),
            },
            Argument::AsMemoryFormat(_) | Argument::AsLayout(_) | Argument::AsDevice(_) => {
                Ok(Value::Place)
            }
            Argument::AsBool(b) => Ok(Value::Bool(*b)),
            Argument::AsBools(all) => Ok(all.clone().into()),
            other => bail!(
                "op",
                "an argument that is {} is not supported",
                other.kind()
            ),
        }
    }

    /// Gives results their names.
    fn bind(&mut self, graph: &Graph, node: &Node, result: Value) -> Result<()> {
        match (node.outputs.as_slice(), result) {
            ([], _) => Ok(()),
            ([Argument::AsTensors(names)], Value::List(items) | Value::Tuple(items))
                if names.len() == items.len() =>
            {
                for (name, item) in names.iter().zip(items) {
                    self.name(graph, &name.name, item)?;
                }
                Ok(())
            }
            (outputs, Value::List(items) | Value::Tuple(items)) if outputs.len() == items.len() => {
                for (at, (output, item)) in outputs.iter().zip(items).enumerate() {
                    let Some(name) = output_name(output) else {
                        continue;
                    };
                    // torch.export writes a wrong shape of the last states (oneDNN's, of one layer at a time).
                    match node.target == "torch.ops.aten.lstm.input" && at > 0 {
                        true => self.define(name, item)?,
                        false => self.name(graph, name, item)?,
                    }
                }
                Ok(())
            }
            ([output], value) if !matches!(value, Value::List(_) | Value::Tuple(_)) => {
                match output_name(output) {
                    Some(name) => self.name(graph, name, value),
                    None => Ok(()),
                }
            }
            (outputs, value) => Err(damaged(format!(
                "a node has {} results, and its op gives {}",
                outputs.len(),
                value.kind()
            ))),
        }
    }

    /// Names a value. A tensor must have the type that the file gives.
    fn name(&mut self, graph: &Graph, name: &str, value: Value) -> Result<()> {
        if let (Value::Tensor(id) | Value::Complex(id), Some(meta)) =
            (&value, graph.tensor_values.get(name))
        {
            let own = self.lowering.sizes_of(&value).unwrap_or_default();
            let own = Ty::new(self.lowering.dtype(*id), own.to_vec());
            let is_complex = matches!(value, Value::Complex(_));
            self.check(&own, is_complex, name, meta)?;
        }
        self.define(name, value)
    }

    fn check(&self, found: &Ty, is_complex: bool, name: &str, meta: &TensorMeta) -> Result<()> {
        let parts = weights::complex_of(meta.dtype);
        if parts.is_some() != is_complex {
            let kind = |is_complex| match is_complex {
                true => "a complex tensor",
                false => "a real tensor",
            };
            let what = format!("`{name}` is not of the type that the file tells");
            return Err(Error::model("type", what)
                .expected(kind(parts.is_some()))
                .found(kind(is_complex)));
        }
        let told = match parts {
            Some(parts) => Ty::new(parts, self.told_dims(meta)?),
            None => self.told(meta)?,
        };
        // A size that depends on data has another name in the file than here.
        let fit =
            |(own, told): (&Dim, &Dim)| told.as_const().is_none() || own.same(told) != Same::No;
        if found.dtype == told.dtype
            && found.rank() == told.rank()
            && found.dims.iter().zip(&told.dims).all(fit)
        {
            return Ok(());
        }
        Err(Error::model(
            "type",
            format!("`{name}` is not of the type that the file tells"),
        )
        .expected(told.to_string())
        .found(found.to_string()))
    }
}

/// Returns an error about a damaged program.
pub fn damaged(what: impl Display) -> Box<Error> {
    Error::model("pt2", format!("the program is damaged: {what}"))
}

/// Returns the name of a single result or formal operand.
pub fn output_name(output: &Argument) -> Option<&str> {
    match output {
        Argument::AsTensor(named) => Some(&named.name),
        Argument::AsOptionalTensor(OptionalTensor::AsTensor(named)) => Some(&named.name),
        Argument::AsSymInt(SymArgument::AsName(name))
        | Argument::AsSymBool(SymArgument::AsName(name))
        | Argument::AsSymFloat(SymFloat::AsName(name)) => Some(name),
        Argument::AsTensors(all) => all.first().map(|n| n.name.as_str()),
        _ => None,
    }
}

/// Returns the place of a node, named after its first result, or `name` if it has none.
fn place(node: &Node, name: &str) -> Place {
    let first = node.outputs.iter().find_map(output_name);
    Place {
        name: first.unwrap_or(name).to_string(),
        scopes: scopes(node),
        source: String::new(),
    }
}

/// Returns the modules in which a node was traced, outermost first. The file has `key,path,class` of each, separated by
/// semicolons.
fn scopes(node: &Node) -> Vec<(String, Option<String>)> {
    let Some(stack) = node.metadata.get("nn_module_stack") else {
        return Vec::new();
    };
    let modules = stack.split(';').filter_map(|module| {
        let (key, rest) = module.split_once(',')?;
        let (path, class) = rest.rsplit_once(',')?;
        if key.starts_with("_empty_nn_module_stack") {
            return None;
        }
        // A module that is called again has a number behind its path.
        let path = path.split('@').next().unwrap_or(path);
        let class = class.rsplit('.').next().filter(|c| !c.is_empty());
        Some((path.to_string(), class.map(str::to_string)))
    });
    modules.collect()
}
