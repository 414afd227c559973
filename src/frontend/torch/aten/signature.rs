//! Signatures of ops and how a call's arguments are bound to them.
//!
//! A signature is written as PyTorch's schemas are, shortened: `add(self: t, other: ts, alpha: s?)`. Letters say what an
//! argument may be: `t` tensor, `c` complex tensor, `C` list of these, `l` list of tensors (`None` among them where an index skips an axis), `s` number, `i`
//! integer, `I` list of integers, `f` number that is known, `b` bool, `S` string, `d` element type, `z` complex one, `p` device, `_` anything (it has
//! no effect here). `?` marks one that need not be given; those behind `*` are given by name
//! only. An op with several overloads has several signatures: the first
//! that the arguments fit is meant, so that files that do not name overloads (TorchScript) are read all the same.

use super::{Lowering, TensorId, Value};
use ckpt_passes::ir::{DType, Dim, ValueId};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// Emits what an op means and returns its result.
pub type Lower = fn(&mut Call) -> Result<Value>;

/// One line of the vocabulary: signature and meaning.
pub type Op = (&'static str, Lower);

/// A parameter of a signature.
#[derive(Clone, Debug)]
struct Param {
    name: &'static str,
    kinds: &'static str,
    optional: bool,
    by_name_only: bool,
}

#[derive(Clone, Debug)]
struct Signature {
    text: &'static str,
    params: Vec<Param>,
    lower: Lower,
}

/// Every op by name; the overloads of one in the order they are listed.
pub struct Vocabulary(BTreeMap<&'static str, Vec<Signature>>);

impl Vocabulary {
    pub fn new(families: &[&'static [Op]]) -> Vocabulary {
        let mut ops: BTreeMap<&'static str, Vec<Signature>> = BTreeMap::new();
        for (text, lower) in families.iter().flat_map(|f| f.iter()) {
            let (name, params) = parse(text);
            ops.entry(name).or_default().push(Signature {
                text,
                params,
                lower: *lower,
            });
        }
        Vocabulary(ops)
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.keys().copied()
    }

    /// The meaning of a call, and its arguments by the names of the signature.
    pub fn bind(
        &self,
        low: &mut Lowering,
        name: &str,
        args: &[Value],
        kwargs: &[(&str, Value)],
    ) -> Result<(Lower, Vec<(&'static str, Value)>)> {
        let Some((name, overloads)) = self.0.get_key_value(name) else {
            let e = Error::model("op", format!("PyTorch's op {name} is not supported"));
            let near = ckpt_passes::near::nearest(name, self.names(), 3);
            return Err(match near.is_empty() {
                true => e,
                false => e.help(format!(
                    "ops of a similar name that are: {}",
                    near.join(", ")
                )),
            });
        };
        for signature in overloads {
            if let Some(bound) = signature.bind(low, args, kwargs)? {
                return Ok((signature.lower, bound));
            }
        }
        let given = args.iter().map(|v| v.kind().to_string());
        let named = kwargs.iter().map(|(n, v)| format!("{n} = {}", v.kind()));
        let given: Vec<String> = given.chain(named).collect();
        let texts: Vec<&str> = overloads.iter().map(|s| s.text).collect();
        Err(
            Error::model("op", format!("{name}: these arguments are not supported"))
                .expected(texts.join(" or "))
                .found(given.join(", ")),
        )
    }
}

fn parse(text: &'static str) -> (&'static str, Vec<Param>) {
    let (name, rest) = text.split_once('(').unwrap_or((text, ")"));
    let list = rest.trim_end_matches(')');
    let mut params = Vec::new();
    let mut by_name_only = false;
    for p in list.split(',').map(str::trim).filter(|p| !p.is_empty()) {
        if p == "*" {
            by_name_only = true;
            continue;
        }
        let (name, kinds) = p.split_once(": ").unwrap_or((p, "_?"));
        params.push(Param {
            name,
            kinds: kinds.trim_end_matches('?'),
            optional: kinds.ends_with('?'),
            by_name_only,
        });
    }
    (name, params)
}

impl Signature {
    fn has(&self, name: &str) -> bool {
        self.params.iter().any(|p| p.name == name)
    }

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
        // What an op writes into is `self`, also where the op that writes nothing calls it `input`.
        let is_called = |i: usize, name: &str| {
            self.params[i].name == name || i == 0 && name == "self" && !self.has("self")
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
                (Some(v), None) => v,
                (None, Some((_, v))) => v,
                (None, None) => &Value::None,
            };
            if *given == Value::None {
                if !param.optional {
                    return Ok(None);
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

/// The argument as one of `kinds`; `None` where it is none of them.
fn fit(low: &mut Lowering, kinds: &str, given: &Value) -> Result<Option<Value>> {
    for kind in kinds.chars() {
        let fitting = match (kind, given) {
            ('_', _)
            | ('t', Value::Tensor(_))
            | ('c', Value::Complex(_))
            | ('s' | 'f', Value::Float(_))
            | ('s' | 'i' | 'f', Value::Int(_))
            | ('s' | 'b', Value::Bool(_))
            | ('S', Value::Str(_))
            | ('d', Value::DType(_))
            | ('z', Value::ComplexType(_))
            | ('p', Value::Place) => Some(given.clone()),
            // Where an integer is meant, 0-d integer tensors with known contents are taken.
            ('i', Value::Tensor(id)) => low.as_int(*id)?.map(Value::Int),
            ('z', Value::Int(code)) => {
                let dtype = code.as_const().and_then(complex_of_code);
                dtype.map(Value::ComplexType)
            }
            ('d', Value::Int(code)) => match code.as_const().and_then(dtype_of_code) {
                Some(dtype) => Some(Value::DType(dtype)),
                None if code.as_const().and_then(complex_of_code).is_some() => None,
                None => {
                    return Err(Error::model(
                        "type",
                        format!("element type {code} is not supported"),
                    ));
                }
            },
            ('I', Value::Int(_)) => Some(Value::List(vec![given.clone()])),
            ('I', Value::List(items) | Value::Tuple(items)) => {
                let mut ints = Vec::with_capacity(items.len());
                for item in items {
                    match fit(low, "i", item)? {
                        Some(int) => ints.push(int),
                        None => break,
                    }
                }
                (ints.len() == items.len()).then_some(Value::List(ints))
            }
            ('C', Value::List(items) | Value::Tuple(items))
                if items.iter().all(|i| matches!(i, Value::Complex(_))) =>
            {
                Some(given.clone())
            }
            ('l', Value::List(items) | Value::Tuple(items))
                if items
                    .iter()
                    .all(|i| matches!(i, Value::Tensor(_) | Value::None)) =>
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

/// PyTorch's `ScalarType` numbers (c10/core/ScalarType.h).
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
        _ => return None,
    })
}

/// The type of the parts of a complex type, by PyTorch's number.
pub fn complex_of_code(code: i64) -> Option<DType> {
    Some(match code {
        8 => DType::F16,
        9 => DType::F32,
        10 => DType::F64,
        _ => return None,
    })
}

/// A call as the function of its op sees it: bound arguments, and the lowering to emit into.
pub struct Call<'l, 'g> {
    pub low: &'l mut Lowering<'g>,
    /// The op, without `aten::`.
    pub name: String,
    args: Vec<(&'static str, Value)>,
}

impl<'l, 'g> Call<'l, 'g> {
    pub(super) fn new(
        low: &'l mut Lowering<'g>,
        name: &str,
        args: Vec<(&'static str, Value)>,
    ) -> Call<'l, 'g> {
        Call {
            low,
            name: name.to_string(),
            args,
        }
    }

    /// An argument; `None` where it is not given.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.args.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// An argument that its signature requires, as a tensor.
    pub fn tensor(&self, name: &str) -> Result<TensorId> {
        match self.get(name) {
            Some(Value::Tensor(id)) => Ok(*id),
            _ => Err(self.wrong(name, "a tensor")),
        }
    }

    /// The value of a tensor argument.
    pub fn value(&mut self, name: &str) -> Result<ValueId> {
        let id = self.tensor(name)?;
        self.low.read(id)
    }

    pub fn opt_value(&mut self, name: &str) -> Result<Option<ValueId>> {
        match self.get(name) {
            None => Ok(None),
            Some(_) => self.value(name).map(Some),
        }
    }

    /// A list of tensors, all given.
    pub fn tensors(&self, name: &str) -> Result<Vec<TensorId>> {
        self.opt_tensors(name)?
            .into_iter()
            .map(|t| t.ok_or_else(|| self.wrong(name, "tensors")))
            .collect()
    }

    /// A list of tensors of which some may be `None`.
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

    /// An integer, perhaps an expression; `default` where it is not given.
    pub fn dim(&self, name: &str, default: i64) -> Result<Dim> {
        match self.get(name) {
            None => Ok(Dim::from(default)),
            Some(Value::Int(dim)) => Ok(dim.clone()),
            Some(_) => Err(self.wrong(name, "an integer")),
        }
    }

    /// An integer that is a number.
    pub fn int(&self, name: &str, default: i64) -> Result<i64> {
        let dim = self.dim(name, default)?;
        dim.as_const()
            .ok_or_else(|| self.wrong(name, "a number that the file fixes"))
    }

    /// An axis of a tensor of that rank; scalars count as having one.
    pub fn axis(&self, name: &str, default: i64, rank: usize) -> Result<usize> {
        let axis = self.int(name, default)?;
        self.in_rank(axis, rank)
    }

    pub fn in_rank(&self, axis: i64, rank: usize) -> Result<usize> {
        let r = rank.max(1) as i64;
        let at = if axis < 0 { axis + r } else { axis };
        if (0..r).contains(&at) {
            return Ok(at as usize);
        }
        Err(self
            .fail("axis", format!("axis {axis} is out of range"))
            .expected(format!("-{r}..{r}")))
    }

    /// The size of a tensor along an axis.
    ///
    /// # Errors
    /// A scalar, which has none.
    pub fn size(&self, tensor: TensorId, axis: usize) -> Result<Dim> {
        let size = self.low.dims(tensor).get(axis).cloned();
        size.ok_or_else(|| self.fail("axis", "a scalar has no axis"))
    }

    /// A list of integers, `None` where it is not given.
    pub fn dims(&self, name: &str) -> Result<Option<Vec<Dim>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::List(items)) => {
                let dims = items.iter().map(|item| match item {
                    Value::Int(dim) => Ok(dim.clone()),
                    _ => Err(self.wrong(name, "a list of integers")),
                });
                dims.collect::<Result<_>>().map(Some)
            }
            Some(_) => Err(self.wrong(name, "a list of integers")),
        }
    }

    /// A list of numbers, `None` where it is not given.
    pub fn ints(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(dims) = self.dims(name)? else {
            return Ok(None);
        };
        let numbers: Option<Vec<i64>> = dims.iter().map(Dim::as_const).collect();
        numbers
            .map(Some)
            .ok_or_else(|| self.wrong(name, "numbers that the file fixes"))
    }

    /// Axes in `0..rank`; all of them where the list is empty or not given.
    pub fn axes(&self, name: &str, rank: usize) -> Result<Vec<usize>> {
        let list = self.ints(name)?.unwrap_or_default();
        if list.is_empty() {
            return Ok((0..rank).collect());
        }
        let mut axes = Vec::with_capacity(list.len());
        for axis in list {
            let axis = self.in_rank(axis, rank)?;
            if axes.contains(&axis) {
                return Err(self.fail("axis", format!("axis {axis} is listed twice")));
            }
            // A scalar has none to name.
            if rank > 0 {
                axes.push(axis);
            }
        }
        Ok(axes)
    }

    pub fn bool(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.wrong(name, "a bool")),
        }
    }

    pub fn str(&self, name: &str, default: &'static str) -> Result<&str> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Str(text)) => Ok(text),
            Some(_) => Err(self.wrong(name, "a string")),
        }
    }

    /// A number that is known.
    pub fn float(&self, name: &str, default: f64) -> Result<f64> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Float(x)) => Ok(*x),
            Some(Value::Int(dim)) => dim
                .as_const()
                .map(|n| n as f64)
                .ok_or_else(|| self.wrong(name, "a number that the file fixes")),
            Some(_) => Err(self.wrong(name, "a number")),
        }
    }

    pub fn opt_dtype(&self, name: &str) -> Result<Option<DType>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::DType(dtype)) => Ok(Some(*dtype)),
            Some(_) => Err(self.wrong(name, "an element type")),
        }
    }

    pub fn fail(&self, code: &'static str, what: impl std::fmt::Display) -> Box<Error> {
        Error::model(code, format!("{}: {what}", self.name))
    }

    pub fn unsupported(&self, what: impl std::fmt::Display) -> Box<Error> {
        self.fail("op", format!("{what} is not supported"))
    }

    fn wrong(&self, name: &str, expected: &str) -> Box<Error> {
        let found = self.get(name).map_or("nothing", Value::kind);
        self.fail("op", format!("`{name}` is not of the right kind"))
            .expected(expected)
            .found(found)
    }

    /// Another op of PyTorch's, by which this one is defined.
    pub fn run<const N: usize>(&mut self, name: &str, args: [Value; N]) -> Result<Value> {
        super::vocabulary::run(self.low, name, args.to_vec(), Vec::new())
    }

    /// The argument as it was given; `None` where it was not.
    pub fn given(&self, name: &str) -> Value {
        self.get(name).cloned().unwrap_or(Value::None)
    }

    /// A result of its own memory.
    pub fn made(&mut self, value: ValueId) -> Result<Value> {
        Ok(Value::Tensor(self.low.fresh(value)))
    }
}
