//! Signatures of ops, and the arguments of a call bound to them.
//!
//! A signature is a shortened form of PyTorch's schema: `add(self: t, other: ts, alpha: s?)`. Names in braces stand for
//! several ops: `{max,avg}_pool{1,2}d(…)` are four. Each letter behind a parameter names a kind of argument that it takes:
//!
//! | letter | kind | letter | kind |
//! |---|---|---|---|
//! | `t` | tensor | `f` | number that the file fixes |
//! | `c` | complex tensor | `b` | bool |
//! | `l` | list of tensors; `None` where an index skips an axis | `S` | string |
//! | `C` | list of complex tensors | `d` | element type |
//! | `s` | number | `z` | complex element type |
//! | `i` | integer | `p` | device |
//! | `I` | list of integers | `_` | anything; it has no effect here |
//! | `n` | size; a run may be what tells it | `N` | list of sizes |
//!
//! `?` marks a parameter that need not be given, `= 0.5` one with a default. Parameters behind `*` are given by name only.
//! An op with several overloads has several signatures. A call means the first one that its arguments fit, because
//! TorchScript does not name overloads.

use super::super::value::{TensorId, Value};
use super::lowering::Lowering;
use super::{axes, formula};
use ckpt_passes::ir::{Attrs, DType, Dim, OpDef, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::concat::SPLIT;
use ckpt_passes::ops::fill::RANGE;
use ckpt_passes::ops::shape::RESHAPE;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Display;

/// Emits the nodes of an op and returns its result.
pub type Lower = fn(&mut Call) -> Result<Value>;

/// A line of the vocabulary: a signature, or several with semicolons, and the function that lowers the op.
pub type Op = (&'static str, Lower);

/// A line of the vocabulary: a signature, or several with semicolons, and the op written in rows and other ops ([`formula`]):
/// `dist(self: t, other: t, p: f = 2.0) => norm(self - other, p)`.
pub type Formula = &'static str;

/// The meaning of an op.
#[derive(Clone, Copy)]
enum Meaning {
    Lower(Lower),
    Formula(&'static str),
}

/// A parameter of a signature.
struct Param {
    name: &'static str,
    kinds: &'static str,
    optional: bool,
    default: Option<&'static str>,
    by_name_only: bool,
}

struct Signature {
    text: String,
    params: Vec<Param>,
    meaning: Meaning,
}

/// All ops by name. The overloads of an op stand in the order in which they are listed.
pub struct Vocabulary(BTreeMap<String, Vec<Signature>>);

/// An op's meaning with the arguments of a call.
pub struct Bound {
    meaning: Meaning,
    args: Vec<(&'static str, Value)>,
}

impl Vocabulary {
    pub fn new(families: &[(&[Op], &[Formula])]) -> Vocabulary {
        let mut ops: BTreeMap<String, Vec<Signature>> = BTreeMap::new();
        for (lowered, formulas) in families {
            let lowered = lowered.iter().map(|(s, f)| (*s, Meaning::Lower(*f)));
            let formulas = formulas.iter().filter_map(|text| text.split_once(") => "));
            let formulas = formulas.map(|(s, f)| (s, Meaning::Formula(f)));
            let all = lowered.chain(formulas);
            for (text, meaning) in all.flat_map(|(s, m)| s.split("; ").map(move |s| (s, m))) {
                let (names, list) = text.split_once('(').unwrap_or((text, ""));
                let list = list.trim_end_matches(')');
                for name in expand(names) {
                    let signature = Signature {
                        text: format!("{name}({list})"),
                        params: parse(list),
                        meaning,
                    };
                    ops.entry(name).or_default().push(signature);
                }
            }
        }
        Vocabulary(ops)
    }

    /// Returns true if an op has that name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Binds the arguments of a call to the first signature that they fit.
    ///
    /// # Errors
    /// An op that is not known, and arguments that no signature takes.
    pub fn bind(
        &self,
        low: &mut Lowering,
        name: &str,
        args: &[Value],
        kwargs: &[(&str, Value)],
    ) -> Result<Bound> {
        let Some(overloads) = self.0.get(name) else {
            let e = Error::model("op", format!("PyTorch's op {name} is not supported"));
            let near = ckpt_passes::near::nearest(name, self.0.keys().map(String::as_str), 3);
            return Err(match near.is_empty() {
                true => e,
                false => e.help(format!(
                    "ops of a similar name that are: {}",
                    near.join(", ")
                )),
            });
        };
        for signature in overloads {
            if let Some(args) = signature.bind(low, args, kwargs)? {
                let meaning = signature.meaning;
                return Ok(Bound { meaning, args });
            }
        }
        const IN_RUN: &str = "an integer tensor, whose number only a run can tell";
        let kind = |v: &Value| match v {
            Value::Tensor(t) if low.dims(*t).is_empty() && low.dtype(*t) == DType::I64 => IN_RUN,
            v => v.kind(),
        };
        let given = args.iter().map(|v| kind(v).to_string());
        let named = kwargs.iter().map(|(n, v)| format!("{n} = {}", kind(v)));
        let given: Vec<String> = given.chain(named).collect();
        let texts: Vec<&str> = overloads.iter().map(|s| s.text.as_str()).collect();
        let found = given.join(", ");
        let e = Error::model("op", format!("{name}: these arguments are not supported"))
            .expected(texts.join(" or "));
        Err(match found.contains(IN_RUN) {
            true => e
                .found(found)
                .help("compute that number outside of the model, or keep the size and mask with torch.where"),
            false => e.found(found),
        })
    }
}

impl Bound {
    /// Returns the tensors among the arguments.
    pub fn tensors(&self) -> Vec<TensorId> {
        self.args.iter().flat_map(|(_, v)| v.tensors()).collect()
    }

    /// Lowers the call of `name`.
    ///
    /// # Errors
    /// Whatever the op refuses.
    pub fn lower(self, low: &mut Lowering, name: &str) -> Result<Value> {
        let mut call = Call {
            low,
            name: name.to_string(),
            args: self.args,
        };
        match self.meaning {
            Meaning::Lower(lower) => lower(&mut call),
            Meaning::Formula(text) => call.formula(&[], text),
        }
    }
}

/// Returns the names that a name with braces stands for.
fn expand(name: &str) -> Vec<String> {
    let Some((before, rest)) = name.split_once('{') else {
        return vec![name.to_string()];
    };
    let (choices, after) = rest.split_once('}').unwrap_or((rest, ""));
    let behind = expand(after);
    let choices = choices.split(',');
    choices
        .flat_map(|choice| behind.iter().map(move |b| format!("{before}{choice}{b}")))
        .collect()
}

/// Reads the parameters of a signature.
fn parse(list: &'static str) -> Vec<Param> {
    let mut params = Vec::new();
    let mut by_name_only = false;
    let list = list.split(',').map(str::trim);
    for text in list.filter(|p| !p.is_empty()) {
        if text == "*" {
            by_name_only = true;
            continue;
        }
        let (text, default) = match text.split_once(" = ") {
            Some((text, default)) => (text, Some(default)),
            None => (text, None),
        };
        let (name, kinds) = text.split_once(": ").unwrap_or((text, "_?"));
        params.push(Param {
            name,
            kinds: kinds.trim_end_matches('?'),
            optional: kinds.ends_with('?') || default.is_some(),
            default,
            by_name_only,
        });
    }
    params
}

impl Signature {
    fn bind(
        &self,
        low: &mut Lowering,
        args: &[Value],
        kwargs: &[(&str, Value)],
    ) -> Result<Option<Vec<(&'static str, Value)>>> {
        let by_place = self.params.iter().filter(|p| !p.by_name_only).count();
        if args.len() > by_place {
            return Ok(None);
        }
        // An in-place op calls its target `self`, even if its namesake calls it `input`.
        let has_self = self.params.iter().any(|p| p.name == "self");
        let is_called = |i: usize, name: &str| {
            self.params[i].name == name || i == 0 && name == "self" && !has_self
        };
        let known = |name: &str| (0..self.params.len()).any(|i| is_called(i, name));
        if kwargs.iter().any(|(name, _)| !known(name)) {
            return Ok(None);
        }
        let mut bound = Vec::with_capacity(self.params.len());
        for (i, param) in self.params.iter().enumerate() {
            let named = kwargs.iter().find(|(n, _)| is_called(i, n));
            let given = match (args.get(i), named) {
                (Some(_), Some(_)) => return Ok(None),
                (Some(v), None) | (None, Some((_, v))) => v,
                (None, None) => &Value::None,
            };
            if *given == Value::None {
                match param.default {
                    Some(default) => bound.push((param.name, formula::literal(default))),
                    None if param.optional => {}
                    None => return Ok(None),
                }
                continue;
            }
            match fit(low, param.kinds, given)? {
                Some(value) => bound.push((param.name, value)),
                None => return Ok(None),
            }
        }
        Ok(Some(bound))
    }
}

/// Returns the argument as one of `kinds`, or nothing if it is none of them.
fn fit(low: &mut Lowering, kinds: &str, given: &Value) -> Result<Option<Value>> {
    for kind in kinds.chars() {
        let members = given.members();
        let is_list = matches!(given, Value::List(_) | Value::Tuple(_));
        let fitting = match (kind, given) {
            ('_', _)
            | ('t', Value::Tensor(_))
            | ('c', Value::Complex(_))
            | ('s' | 'f', Value::Float(_))
            | ('s' | 'i', Value::Int(_))
            | ('s' | 'b', Value::Bool(_))
            | ('S', Value::Str(_))
            | ('d', Value::DType(_))
            | ('z', Value::ComplexType(_))
            | ('p', Value::Place) => Some(given.clone()),
            ('f', Value::Int(_)) => given.number().map(Value::Float),
            // A 0-d integer tensor with known content counts as an integer.
            ('i', Value::Tensor(id)) => low.as_int(*id)?.map(Value::Int),
            ('z', Value::Int(code)) => {
                let dtype = code.as_const().and_then(complex_of_code);
                dtype.map(Value::ComplexType)
            }
            ('d', Value::Int(code)) => match code.as_const().and_then(dtype_of_code) {
                Some(dtype) => Some(Value::DType(dtype)),
                None if code.as_const().and_then(complex_of_code).is_some() => None,
                None => {
                    bail!("type", "element type {code} is not supported");
                }
            },
            ('n', Value::Int(_)) => Some(given.clone()),
            ('n', Value::Tensor(id)) => match low.as_int(*id)? {
                Some(known) => Some(Value::Int(known)),
                None => low.size_in_run(*id)?.map(Value::Int),
            },
            ('I' | 'N', Value::Int(_)) => Some(Value::List(vec![given.clone()])),
            ('I' | 'N', _) if is_list => {
                let each = if kind == 'I' { "i" } else { "n" };
                let ints = members.iter().map(|item| fit(low, each, item));
                let ints: Option<Vec<Value>> = ints.collect::<Result<_>>()?;
                ints.map(Value::List)
            }
            ('C', _) if is_list && members.iter().all(|m| matches!(m, Value::Complex(_))) => {
                Some(given.clone())
            }
            ('l', _)
                if is_list
                    && members
                        .iter()
                        .all(|m| matches!(m, Value::Tensor(_) | Value::None)) =>
            {
                Some(given.clone())
            }
            _ => None,
        };
        if fitting.is_some() {
            return Ok(fitting);
        }
    }
    Ok(None)
}

/// Returns the element type of one of PyTorch's `ScalarType` numbers (c10/core/ScalarType.h).
pub fn dtype_of_code(code: i64) -> Option<DType> {
    Some(match code {
        0 => DType::U8,
        1 => DType::I8,
        2 => DType::I16,
        3 => DType::I32,
        4 => DType::I64,
        5 => DType::F16,
        6 => DType::F32,
        7 => DType::F64,
        11 => DType::Bool,
        15 => DType::BF16,
        23 => DType::F8E5M2,
        24 => DType::F8E4M3FN,
        25 => DType::F8E5M2FNUZ,
        26 => DType::F8E4M3FNUZ,
        _ => return None,
    })
}

/// Returns the type of the parts of a complex type, by PyTorch's number.
pub fn complex_of_code(code: i64) -> Option<DType> {
    Some(match code {
        8 => DType::F16,
        9 => DType::F32,
        10 => DType::F64,
        _ => return None,
    })
}

/// A call as the function of its op sees it: the arguments by name, and the lowering to emit into.
pub struct Call<'l, 'g> {
    pub low: &'l mut Lowering<'g>,
    /// The name of the op, without `aten::`.
    pub name: String,
    args: Vec<(&'static str, Value)>,
}

/// Arguments.
impl Call<'_, '_> {
    /// Returns an argument, or nothing if it is not given.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.args.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    /// Returns an argument, or `None` if it is not given.
    pub fn given(&self, name: &str) -> Value {
        self.get(name).cloned().unwrap_or(Value::None)
    }

    /// Returns true if an argument is given.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// Returns an argument that must be given.
    pub fn need(&self, name: &str) -> Result<Value> {
        let given = self.get(name).cloned();
        given.ok_or_else(|| self.fail("op", format!("`{name}` is missing")))
    }

    /// Returns the first of several arguments that is given.
    pub fn either<'n>(&self, names: &[&'n str]) -> &'n str {
        let given = names.iter().find(|n| self.has(n));
        given.unwrap_or(&names[0])
    }

    /// Returns a tensor argument.
    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        match self.get(name) {
            Some(Value::Tensor(id)) => Ok(*id),
            _ => Err(self.wrong(name, "a tensor")),
        }
    }

    /// Returns the value of a tensor argument.
    pub fn value(&mut self, name: &str) -> Result<ValueId> {
        let id = self.tensor(name)?;
        self.low.read(id)
    }

    /// Returns the value of a tensor argument, if it is given.
    pub fn opt_value(&mut self, name: &str) -> Result<Option<ValueId>> {
        self.has(name).then(|| self.value(name)).transpose()
    }

    /// Returns a list of tensors, all of them given.
    pub fn tensors(&self, name: &str) -> Result<Vec<TensorId>> {
        let all = self.opt_tensors(name)?.into_iter();
        all.map(|t| t.ok_or_else(|| self.wrong(name, "tensors")))
            .collect()
    }

    /// Returns a list of tensors, of which some may be `None`.
    pub fn opt_tensors(&self, name: &str) -> Result<Vec<Option<TensorId>>> {
        let Some(Value::List(items) | Value::Tuple(items)) = self.get(name) else {
            return Err(self.wrong(name, "a list of tensors"));
        };
        let ids = items.iter().map(|item| match item {
            Value::Tensor(id) => Ok(Some(*id)),
            Value::None => Ok(None),
            _ => Err(self.wrong(name, "a list of tensors")),
        });
        ids.collect()
    }

    /// Returns an integer, which may be an expression; `default` if it is not given.
    pub fn dim(&self, name: &str, default: i64) -> Result<Dim> {
        match self.get(name) {
            None => Ok(Dim::from(default)),
            Some(Value::Int(dim)) => Ok(dim.clone()),
            Some(_) => Err(self.wrong(name, "an integer")),
        }
    }

    /// Returns an integer that the file fixes.
    pub fn int(&self, name: &str, default: i64) -> Result<i64> {
        let dim = self.dim(name, default)?;
        dim.as_const()
            .ok_or_else(|| self.wrong(name, "a number that the file fixes"))
    }

    /// Returns an axis of a tensor of that rank. A scalar counts as having one axis.
    pub fn axis(&self, name: &str, default: i64, rank: usize) -> Result<usize> {
        let axis = self.int(name, default)?;
        self.in_rank(axis, rank)
    }

    /// Returns an axis counted from the front.
    ///
    /// # Errors
    /// An axis that a tensor of that rank does not have.
    pub fn in_rank(&self, axis: i64, rank: usize) -> Result<usize> {
        axes::in_rank(&self.name, axis, rank)
    }

    /// Returns `self` and the axis `dim` of it, the first by default.
    pub fn self_axis(&self) -> Result<(TensorId, usize)> {
        let x = self.tensor("self")?;
        Ok((x, self.axis("dim", 0, self.low.dims(x).len())?))
    }

    /// Returns the size of a tensor along an axis.
    ///
    /// # Errors
    /// A scalar, which has no axis.
    pub fn size(&self, tensor: TensorId, axis: usize) -> Result<Dim> {
        self.size_in(self.low.dims(tensor), axis)
    }

    /// Returns one of several sizes.
    ///
    /// # Errors
    /// The sizes of a scalar, which has no axis.
    pub fn size_in(&self, dims: &[Dim], axis: usize) -> Result<Dim> {
        let size = dims.get(axis).cloned();
        size.ok_or_else(|| self.fail("axis", "a scalar has no axis"))
    }

    /// Returns the sizes of a tensor argument.
    pub fn sizes(&self, name: &str) -> Result<Vec<Dim>> {
        Ok(self.low.dims(self.tensor(name)?).to_vec())
    }

    /// Returns a list of integers, or nothing if it is not given.
    pub fn dims(&self, name: &str) -> Result<Option<Vec<Dim>>> {
        let Some(given) = self.get(name) else {
            return Ok(None);
        };
        let dims = given.members().iter().map(|item| match item {
            Value::Int(dim) => Some(dim.clone()),
            _ => None,
        });
        let dims = matches!(given, Value::List(_)).then(|| dims.collect());
        dims.flatten()
            .map(Some)
            .ok_or_else(|| self.wrong(name, "a list of integers"))
    }

    /// Returns a list of numbers that the file fixes, or nothing if it is not given.
    pub fn ints(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(dims) = self.dims(name)? else {
            return Ok(None);
        };
        let numbers: Option<Vec<i64>> = dims.iter().map(Dim::as_const).collect();
        numbers
            .map(Some)
            .ok_or_else(|| self.wrong(name, "numbers that the file fixes"))
    }

    /// Returns a list of axes in its order; one axis may stand in it twice.
    pub fn listed_axes(&self, name: &str, rank: usize) -> Result<Vec<usize>> {
        let listed = self.ints(name)?.unwrap_or_default();
        listed.iter().map(|a| self.in_rank(*a, rank)).collect()
    }

    /// Returns axes in `0..rank`; all of them if the list is empty or not given.
    pub fn axes(&self, name: &str, rank: usize) -> Result<Vec<usize>> {
        axes::chosen(&self.name, &self.ints(name)?.unwrap_or_default(), rank)
    }

    /// Returns a truth value.
    pub fn bool(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.wrong(name, "a bool")),
        }
    }

    /// Returns a string.
    pub fn str(&self, name: &str, default: &'static str) -> Result<&str> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Str(text)) => Ok(text),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    /// Returns a number that the file fixes.
    pub fn float(&self, name: &str, default: f64) -> Result<f64> {
        match self.get(name) {
            None => Ok(default),
            Some(given) => given
                .number()
                .ok_or_else(|| self.wrong(name, "a number that the file fixes")),
        }
    }

    /// Returns an element type, or nothing if it is not given.
    pub fn opt_dtype(&self, name: &str) -> Result<Option<DType>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::DType(dtype)) => Ok(Some(*dtype)),
            Some(_) => Err(self.wrong(name, "an element type")),
        }
    }

    /// Returns the argument `dtype`, or `natural` if it is not given.
    pub fn dtype_or(&self, natural: DType) -> Result<DType> {
        Ok(self.opt_dtype("dtype")?.unwrap_or(natural))
    }

    /// Returns an error about this call.
    pub fn fail(&self, code: &'static str, what: impl Display) -> Box<Error> {
        Error::model(code, format!("{}: {what}", self.name))
    }

    /// Returns an error about something in this call that is not supported.
    pub fn unsupported(&self, what: impl Display) -> Box<Error> {
        self.fail("op", format!("{what} is not supported"))
    }

    fn wrong(&self, name: &str, expected: &str) -> Box<Error> {
        let found = self.get(name).map_or("nothing", Value::kind);
        self.fail("op", format!("`{name}` is not of the right kind"))
            .expected(expected)
            .found(found)
    }
}

/// Emission.
impl Call<'_, '_> {
    /// Calls another op of PyTorch's, by which this one is defined.
    pub fn run<const N: usize>(&mut self, name: &str, args: [Value; N]) -> Result<Value> {
        self.run_named(name, Vec::from(args), Vec::new())
    }

    /// Calls another op of PyTorch's with some arguments by name.
    pub fn run_named(
        &mut self,
        name: &str,
        args: Vec<Value>,
        kwargs: Vec<(&str, Value)>,
    ) -> Result<Value> {
        (self.low.run)(self.low, name, args, kwargs)
    }

    /// Evaluates a formula over the arguments of the call and the `names` given here.
    pub fn formula(
        &mut self,
        names: &[(&'static str, Value)],
        text: &'static str,
    ) -> Result<Value> {
        formula::evaluate(self.low, &self.name, [names, &self.args].concat(), text)
    }

    /// Returns a result in memory of its own.
    pub fn made(&mut self, value: ValueId) -> Result<Value> {
        Ok(Value::Tensor(self.low.fresh(value)))
    }

    /// Emits a node and returns its result as that of the call.
    pub fn result(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<Value> {
        self.result_with(op, ins, Attrs::new())
    }

    /// Emits a node with attributes and returns its result as that of the call.
    pub fn result_with(
        &mut self,
        op: &'static OpDef,
        ins: &[ValueId],
        attrs: Attrs,
    ) -> Result<Value> {
        let y = self.emit_with(op, ins, attrs)?;
        self.made(y)
    }

    /// Emits a node.
    pub fn emit(&mut self, op: &'static OpDef, ins: &[ValueId]) -> Result<ValueId> {
        self.low.emit(op, ins)
    }

    /// Emits a node with attributes.
    pub fn emit_with(
        &mut self,
        op: &'static OpDef,
        ins: &[ValueId],
        attrs: Attrs,
    ) -> Result<ValueId> {
        self.low.b.emit(op, ins, attrs)
    }

    /// Returns the element type of a value.
    pub fn dtype(&self, x: ValueId) -> DType {
        self.low.b.ty(x).dtype
    }

    /// Returns the rank of a value.
    pub fn rank(&self, x: ValueId) -> usize {
        self.low.b.rank(x)
    }

    /// Returns the sizes of a value.
    pub fn shape_of(&self, x: ValueId) -> Vec<Dim> {
        self.low.b.ty(x).dims.clone()
    }

    /// Returns a scalar constant in the element type of `x`.
    pub fn scalar_like(&mut self, x: ValueId, number: f64) -> ValueId {
        let dtype = self.dtype(x);
        self.low.b.scalar(dtype, number)
    }

    /// Reshapes a value to these sizes.
    pub fn reshape(&mut self, x: ValueId, dims: &[Dim]) -> Result<ValueId> {
        let shape = self.low.int_vector(dims)?;
        self.emit(&RESHAPE, &[x, shape])
    }

    /// Reshapes a value to a vector.
    pub fn flattened(&mut self, x: ValueId) -> Result<ValueId> {
        self.reshape(x, &[Dim::from(-1)])
    }

    /// Returns the vector `0, 1, …` of `n` elements.
    pub fn numbers_to(&mut self, n: &Dim) -> Result<ValueId> {
        let n = self.low.int_scalar(n)?;
        let (zero, one) = (self.low.b.int(0), self.low.b.int(1));
        self.emit(&RANGE, &[zero, n, one])
    }

    /// Splits a value into `count` equal chunks along an axis.
    pub fn split(&mut self, x: ValueId, axis: i64, count: usize) -> Result<Vec<ValueId>> {
        let attrs = Attrs::new()
            .with("axis", axis)
            .with("num_outputs", count as i64);
        self.low.b.emit_n(&SPLIT, vec![Some(x)], attrs, count)
    }
}

/// Returns the attribute of an op along one axis.
pub fn along(axis: usize) -> Attrs {
    Attrs::new().with("axis", axis as i64)
}
