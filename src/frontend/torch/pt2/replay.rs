//! The nodes of a program, one call each: values by name, sizes as expressions, nested graphs inlined.

use super::super::aten::{Lowering, Place, TensorId, Value};
use super::schema::{
    Argument, Graph, Named, NamedArgument, Node, OptionalTensor, Size, SymArgument, TensorMeta,
};
use super::{sympy, weights};
use crate::frontend::given::Given;
use ckpt_passes::ir::{Dim, Same, Ty};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Graphs in graphs.
const MAX_NESTING: usize = 16;

/// Higher-order ops that are a mode around a graph: the name, and how many arguments come before the graph.
const GRAD_MODE: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";
const AUTOCAST: &str = "torch.ops.higher_order.wrap_with_autocast";

/// A program on its way into a graph.
pub struct Replay<'l, 'g> {
    lowering: &'l mut Lowering<'g>,
    values: BTreeMap<String, Value>,
    /// Named sizes that the program asserts to be equal to another one.
    equal: BTreeMap<String, Dim>,
}

impl<'l, 'g> Replay<'l, 'g> {
    pub fn new(lowering: &'l mut Lowering<'g>) -> Replay<'l, 'g> {
        Replay {
            lowering,
            values: BTreeMap::new(),
            equal: BTreeMap::new(),
        }
    }

    /// Learns which named sizes are one: what `_assert_scalar` is told of `_operator.eq`.
    ///
    /// # Errors
    /// A size that cannot be read.
    pub fn equal_sizes(&mut self, graph: &Graph) -> Result<()> {
        let mut compared: BTreeMap<&str, [&str; 2]> = BTreeMap::new();
        for node in &graph.nodes {
            match (
                node.target.as_str(),
                node.inputs.as_slice(),
                node.outputs.as_slice(),
            ) {
                ("_operator.eq", [a, b], [Argument::AsSymBool(SymArgument::AsName(out))]) => {
                    if let (
                        Argument::AsSymInt(SymArgument::AsName(a)),
                        Argument::AsSymInt(SymArgument::AsName(b)),
                    ) = (&a.arg, &b.arg)
                    {
                        compared.insert(out, [a, b]);
                    }
                }
                ("torch.ops.aten._assert_scalar.default", [a, ..], _) => {
                    let Argument::AsSymBool(SymArgument::AsName(name)) = &a.arg else {
                        continue;
                    };
                    let Some(sides) = compared.get(name.as_str()) else {
                        continue;
                    };
                    let [Some(a), Some(b)] = sides.map(|s| graph.sym_int_values.get(s)) else {
                        continue;
                    };
                    let (a, b) = (self.size(a)?, self.size(b)?);
                    self.unite(&a, &b);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Two sizes are equal: the later name stands for the other one.
    fn unite(&mut self, a: &Dim, b: &Dim) {
        let (from, to) = match (a.as_symbol(), b.as_symbol()) {
            (Some(x), Some(y)) if x < y => (y, a),
            (Some(x), _) => (x, b),
            (None, Some(y)) => (y, a),
            (None, None) => return,
        };
        let mut within = false;
        to.for_each_leaf(&mut |leaf| {
            within |= Dim::from_atom(leaf.clone()).as_symbol() == Some(from)
        });
        if within {
            return;
        }
        let (from, to) = (from.to_string(), to.clone());
        for known in self.equal.values_mut() {
            *known = replaced(known, &from, &to);
        }
        self.equal.insert(from, to);
    }

    fn size(&self, size: &Size) -> Result<Dim> {
        Ok(match size {
            Size::AsInt(n) => Dim::from(*n),
            Size::AsExpr(e) => {
                let dim = sympy::size(&e.expr_str)?;
                dim.substitute(&|atom| {
                    let name = Dim::from_atom(atom.clone());
                    self.equal.get(name.as_symbol()?).cloned()
                })
            }
        })
    }

    /// Declares a weight under the name that nodes call it by.
    pub fn weight(
        &mut self,
        arg: &str,
        name: &str,
        weights: &weights::Weights,
        parameter: bool,
    ) -> Result<()> {
        let tensor = weights.declare(self.lowering, name, parameter)?;
        self.values.insert(arg.to_string(), Value::Tensor(tensor));
        Ok(())
    }

    /// Declares an input, of the type that the file or the user gives.
    pub fn input(&mut self, name: &str, graph: &Graph, given: &Given) -> Result<()> {
        let meta = graph.tensor_values.get(name);
        let meta = meta.ok_or_else(|| damaged(format!("the input `{name}` has no type")))?;
        let mut dims = Vec::with_capacity(meta.sizes.len());
        for size in &meta.sizes {
            dims.push(self.size(size)?);
        }
        let own = Ty::new(weights::dtype(meta)?, dims);
        let ty = given.inputs.iter().find(|i| i.name == name).map(|i| &i.ty);
        if let Some(ty) = ty.filter(|t| t.dtype != own.dtype || t.rank() != own.rank()) {
            return Err(Error::usage(
                "input",
                format!("the input `{name}` cannot be of type {ty}"),
            )
            .expected(own.to_string()));
        }
        if let Some(ty) = ty {
            // What a number or a name stands for, it stands for everywhere.
            for (own, said) in own.dims.iter().zip(&ty.dims) {
                if let Some(symbol) = own.as_symbol() {
                    self.equal.insert(symbol.to_string(), said.clone());
                } else if own.same(said) == Same::No {
                    return Err(Error::usage(
                        "input",
                        format!("the input `{name}` cannot be of type {ty}"),
                    )
                    .expected(own.to_string()));
                }
            }
        }
        let tensor = self.lowering.input(name, ty.unwrap_or(&own).clone())?;
        self.values.insert(name.to_string(), Value::Tensor(tensor));
        Ok(())
    }

    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        match self.values.get(name) {
            Some(Value::Tensor(id)) => Ok(*id),
            _ => Err(damaged(format!("nothing defines the tensor `{name}`"))),
        }
    }

    /// Replays all nodes of a graph.
    ///
    /// # Errors
    /// What an op refuses, with the node.
    pub fn run(&mut self, graph: &Graph, nesting: usize) -> Result<()> {
        if nesting > MAX_NESTING {
            return Err(damaged("graphs are nested too deeply".into()));
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
        if let Some(op) = target.strip_prefix("_operator.") {
            return self.arithmetic(op, node);
        }
        if let Some(op) = target
            .strip_prefix("torch.sym_")
            .or(target.strip_prefix("math."))
        {
            return self.arithmetic(op, node);
        }
        let Some(path) = target.strip_prefix("torch.ops.") else {
            return Err(Error::model("op", format!("{target} is not supported")));
        };
        let mut parts = path.splitn(3, '.');
        let (Some(namespace), Some(name)) = (parts.next(), parts.next()) else {
            return Err(damaged("a target has no name".into()));
        };
        let name = format!("{namespace}::{name}");
        let mut args = Vec::new();
        let mut kwargs: Vec<(&str, Value)> = Vec::new();
        for NamedArgument { name, arg } in &node.inputs {
            let value = self.argument(arg)?;
            match name.as_str() {
                "" => args.push(value),
                name => kwargs.push((name, value)),
            }
        }
        let place = Place {
            name: node
                .outputs
                .iter()
                .find_map(output_name)
                .unwrap_or(&name)
                .to_string(),
            scopes: scopes(node),
            source: String::new(),
        };
        let overload = parts.next();
        self.lowering.call(&name, overload, args, kwargs, &place)
    }

    /// A graph under a mode: gradients off, or automatic casts (which may only be off).
    fn wrapped(&mut self, node: &Node, nesting: usize) -> Result<Value> {
        let at = node
            .inputs
            .iter()
            .position(|i| matches!(i.arg, Argument::AsGraph(_)));
        let Some((before, [inner, operands @ ..])) = at.map(|at| node.inputs.split_at(at)) else {
            return Err(damaged("a region has no graph".into()));
        };
        let Argument::AsGraph(inner) = &inner.arg else {
            return Err(damaged("a region has no graph".into()));
        };
        let inner = &inner.graph;
        let bools: Vec<bool> = before
            .iter()
            .filter_map(|i| match i.arg {
                Argument::AsBool(b) => Some(b),
                _ => None,
            })
            .collect();
        let Some(enabled) = bools.first().copied() else {
            return Err(damaged(
                "a region does not say whether its mode is on".into(),
            ));
        };
        let autocast = node.target == AUTOCAST;
        if autocast && enabled {
            return Err(
                Error::model("op", "automatic casts (autocast) are not supported")
                    .help("export the model in the types that it computes in"),
            );
        }
        if inner.inputs.len() != operands.len() {
            return Err(damaged("a region has other operands than its graph".into()));
        }
        // Inside there are the operands and nothing else.
        let mut bound = BTreeMap::new();
        for (formal, actual) in inner.inputs.iter().zip(operands) {
            let Some(name) = output_name(formal) else {
                return Err(damaged("an operand of a region has no name".into()));
            };
            bound.insert(name.to_string(), self.argument(&actual.arg)?);
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

    /// Arithmetic of sizes.
    fn arithmetic(&mut self, op: &str, node: &Node) -> Result<Value> {
        let mut args = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            args.push(self.argument(&input.arg)?);
        }
        Ok(match (op, args.as_slice()) {
            ("add", [Value::Int(a), Value::Int(b)]) => Value::Int(a.add(b)),
            ("sub", [Value::Int(a), Value::Int(b)]) => Value::Int(a.sub(b)),
            ("mul", [Value::Int(a), Value::Int(b)]) => Value::Int(a.mul(b)),
            ("neg", [Value::Int(a)]) => Value::Int(Dim::ZERO.sub(a)),
            ("floordiv", [Value::Int(a), Value::Int(b)]) if *b != Dim::ZERO => Value::Int(a.div(b)),
            ("mod", [Value::Int(a), Value::Int(b)]) if *b != Dim::ZERO => Value::Int(a.modulo(b)),
            ("min", [Value::Int(a), Value::Int(b)]) => Value::Int(a.smaller(b)),
            ("max", [Value::Int(a), Value::Int(b)]) => Value::Int(a.larger(b)),
            ("eq", [Value::Int(a), Value::Int(b)]) => known(a.same(b)),
            ("ne", [Value::Int(a), Value::Int(b)]) => match known(a.same(b)) {
                Value::Bool(same) => Value::Bool(!same),
                other => other,
            },
            ("ge", [Value::Int(a), Value::Int(b)]) => ordered(a, b),
            ("le", [Value::Int(a), Value::Int(b)]) => ordered(b, a),
            ("gt", [Value::Int(a), Value::Int(b)]) => ordered(a, &b.add(&Dim::ONE)),
            ("lt", [Value::Int(a), Value::Int(b)]) => ordered(b, &a.add(&Dim::ONE)),
            ("not" | "not_", [Value::Bool(b)]) => Value::Bool(!b),
            ("and_", [Value::Bool(a), Value::Bool(b)]) => Value::Bool(*a && *b),
            ("or_", [Value::Bool(a), Value::Bool(b)]) => Value::Bool(*a || *b),
            ("int", [Value::Int(a)]) => Value::Int(a.clone()),
            ("float", [Value::Int(a)]) => match a.as_const() {
                Some(n) => Value::Float(n as f64),
                None => Value::Unknown,
            },
            // What cannot be told now is refused where it is needed; asserts need nothing.
            _ => Value::Unknown,
        })
    }

    fn sym(&self, arg: &SymArgument) -> Result<Value> {
        Ok(match arg {
            SymArgument::AsInt(n) => Value::Int(Dim::from(*n)),
            SymArgument::AsBool(b) => Value::Bool(*b),
            SymArgument::AsName(name) => self
                .values
                .get(name)
                .cloned()
                .ok_or_else(|| damaged(format!("nothing defines `{name}`")))?,
        })
    }

    fn argument(&self, arg: &Argument) -> Result<Value> {
        let tensor = |named: &Named| self.tensor(&named.name).map(Value::Tensor);
        let optional = |t: &OptionalTensor| match t {
            OptionalTensor::AsTensor(named) => tensor(named),
            OptionalTensor::AsNone(_) => Ok(Value::None),
        };
        let float = |x: &super::schema::Float| {
            let value = x.value().map(Value::Float);
            value.ok_or_else(|| damaged("a number is damaged".into()))
        };
        let list = |items: Result<Vec<Value>>| items.map(Value::List);
        match arg {
            Argument::AsNone(_) => Ok(Value::None),
            Argument::AsTensor(named) => tensor(named),
            Argument::AsTensors(all) => list(all.iter().map(tensor).collect()),
            Argument::AsOptionalTensor(t) => optional(t),
            Argument::AsOptionalTensors(all) => list(all.iter().map(optional).collect()),
            Argument::AsInt(n) => Ok(Value::Int(Dim::from(*n))),
            Argument::AsInts(all) => {
                list(all.iter().map(|n| Ok(Value::Int(Dim::from(*n)))).collect())
            }
            Argument::AsFloat(x) => float(x),
            Argument::AsFloats(all) => list(all.iter().map(float).collect()),
            Argument::AsString(text) => Ok(Value::Str(text.clone())),
            Argument::AsStrings(all) => {
                list(all.iter().map(|s| Ok(Value::Str(s.clone()))).collect())
            }
            Argument::AsSymInt(sym) | Argument::AsSymBool(sym) => self.sym(sym),
            Argument::AsSymInts(all) | Argument::AsSymBools(all) => {
                list(all.iter().map(|s| self.sym(s)).collect())
            }
            Argument::AsScalarType(code) => weights::dtype_of(*code).map(Value::DType),
            Argument::AsMemoryFormat(_) | Argument::AsLayout(_) | Argument::AsDevice(_) => {
                Ok(Value::Place)
            }
            Argument::AsBool(b) => Ok(Value::Bool(*b)),
            Argument::AsBools(all) => list(all.iter().map(|b| Ok(Value::Bool(*b))).collect()),
            other => Err(Error::model(
                "op",
                format!("an argument that is {} is not supported", other.kind()),
            )),
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
                for (output, item) in outputs.iter().zip(items) {
                    if let Some(name) = output_name(output) {
                        self.name(graph, name, item)?;
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

    /// Names a value; a tensor has to be what the file says of it.
    fn name(&mut self, graph: &Graph, name: &str, value: Value) -> Result<()> {
        if let (Value::Tensor(id), Some(meta)) = (&value, graph.tensor_values.get(name)) {
            self.check(*id, name, meta)?;
        }
        self.values.insert(name.to_string(), value);
        Ok(())
    }

    fn check(&self, id: TensorId, name: &str, meta: &TensorMeta) -> Result<()> {
        let (dtype, dims) = (self.lowering.dtype(id), self.lowering.dims(id));
        let mut fits = dtype == weights::dtype(meta)? && dims.len() == meta.sizes.len();
        let mut told = Vec::with_capacity(meta.sizes.len());
        for (size, own) in meta.sizes.iter().zip(dims) {
            // A size that depends on data has a name of its own on either side.
            let size = self.size(size)?;
            fits &= size.as_const().is_none() || own.same(&size) != Same::No;
            told.push(size);
        }
        if fits {
            return Ok(());
        }
        let found = Ty::new(dtype, dims.to_vec());
        Err(Error::model(
            "type",
            format!("`{name}` is not of the type that the file tells"),
        )
        .expected(Ty::new(weights::dtype(meta)?, told).to_string())
        .found(found.to_string()))
    }
}

fn known(same: Same) -> Value {
    match same {
        Same::Yes => Value::Bool(true),
        Same::No => Value::Bool(false),
        Same::Unknown => Value::Unknown,
    }
}

/// Whether `a >= b`, where the bounds of sizes tell.
fn ordered(a: &Dim, b: &Dim) -> Value {
    match a.sub(b).bounds() {
        (Some(least), _) if least >= 0 => Value::Bool(true),
        (_, Some(most)) if most < 0 => Value::Bool(false),
        _ => Value::Unknown,
    }
}

fn replaced(dim: &Dim, from: &str, to: &Dim) -> Dim {
    dim.substitute(&|atom| {
        let leaf = Dim::from_atom(atom.clone());
        (leaf.as_symbol() == Some(from)).then(|| to.clone())
    })
}

fn damaged(what: String) -> Box<Error> {
    Error::model("pt2", format!("the program is damaged: {what}"))
}

/// The name of a single result or formal operand.
fn output_name(output: &Argument) -> Option<&str> {
    match output {
        Argument::AsTensor(named) => Some(&named.name),
        Argument::AsOptionalTensor(OptionalTensor::AsTensor(named)) => Some(&named.name),
        Argument::AsSymInt(SymArgument::AsName(name))
        | Argument::AsSymBool(SymArgument::AsName(name)) => Some(name),
        Argument::AsTensors(all) => all.first().map(|n| n.name.as_str()),
        _ => None,
    }
}

/// Modules that a node was traced in, outermost first: `key,path,class` each, separated by semicolons.
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
