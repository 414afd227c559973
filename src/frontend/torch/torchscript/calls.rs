//! Calls: of methods, functions of the archive, ops, and the few functions of the language.

use super::ast::{Call, Expr, ExprKind, Name};
use super::item::{Content, Item, Ratio, Real, Shared};
use super::replay::{Frame, Replay, bad};
use crate::frontend::torch::aten::{Lowering, Place, dtype_of_code};
use crate::frontend::torch::scalars;
use crate::frontend::torch::value::{TensorId, Value};
use ckpt_passes::ir::{DType, Dim};
use ckpt_passes::{Error, Result};

impl Replay<'_, '_> {
    pub(super) fn call_expr(&mut self, frame: &mut Frame, call: &Call) -> Result<Item> {
        let dotted = call.function.dotted();
        let root = dotted.as_deref().and_then(|d| d.split('.').next());
        if let (Some(dotted), Some(root)) = (&dotted, root)
            && !Self::is_variable(frame, root)
        {
            let path = dotted[root.len()..].trim_start_matches('.');
            return match root {
                "torch" => self.call_op(frame, &format!("aten::{path}"), call),
                "ops" => self.call_op(frame, &path.replacen('.', "::", 1), call),
                "__torch__" => {
                    let (args, keywords) = self.arguments(frame, call)?;
                    self.call_function(dotted, args, keywords)
                }
                _ => self.built_in(frame, dotted, call),
            };
        }
        // A method, `(m).forward(x, )`, or a function in a variable.
        let (args, keywords) = self.arguments(frame, call)?;
        if let ExprKind::Attribute(of, method) = &call.function.kind {
            let of = self.expr(frame, of)?;
            return match &of {
                Item::Module(module, path) => {
                    self.call_method(*module, path, method, args, keywords)
                }
                other => Err(bad(format!("{} has no method `{method}`", other.kind()))),
            };
        }
        match self.expr(frame, &call.function)? {
            Item::Function(name) => self.call_function(&name, args, keywords),
            other => Err(bad(format!("{} cannot be called", other.kind()))),
        }
    }

    fn arguments(
        &mut self,
        frame: &mut Frame,
        call: &Call,
    ) -> Result<(Vec<Item>, Vec<(Name, Item)>)> {
        let args = self.exprs(frame, &call.args)?;
        let mut keywords = Vec::with_capacity(call.keywords.len());
        for (name, value) in &call.keywords {
            keywords.push((name.clone(), self.expr(frame, value)?));
        }
        Ok((args, keywords))
    }

    fn call_function(
        &mut self,
        qualified: &str,
        args: Vec<Item>,
        keywords: Vec<(Name, Item)>,
    ) -> Result<Item> {
        let (module, name) = qualified.rsplit_once('.').unwrap_or(("", qualified));
        match self.code.function(module, name)? {
            Some(function) => self.call(&function, args, keywords),
            // A call of a class makes an object.
            None => {
                let class = self.code.class(module, name)?;
                match &*class.class().base {
                    "NamedTuple" if keywords.is_empty() => {
                        self.containers.add(Content::Tuple(args))
                    }
                    _ => Err(bad(format!(
                        "an object of class `{name}` is made, which is not supported"
                    ))
                    .help("trace the model with torch.jit.trace instead of scripting it")),
                }
            }
        }
    }

    /// Calls a function of the language.
    fn built_in(&mut self, frame: &mut Frame, name: &str, call: &Call) -> Result<Item> {
        if name == "uninitialized" {
            return Ok(Item::Value(Value::Unknown));
        }
        let typed = matches!(name, "annotate" | "unchecked_cast");
        let first = usize::from(typed);
        let (Some(args), []) = (call.args.get(first..), call.keywords.as_slice()) else {
            return Err(bad(format!(
                "the arguments of `{name}` are not what they should be"
            )));
        };
        let args = self.exprs(frame, args)?;
        match (name, args.as_slice()) {
            ("annotate" | "unchecked_cast", [value]) => self.annotate(&call.args[0], value),
            ("getattr", [of, Item::Value(Value::Str(name))]) => self.attribute_of(of, name),
            ("int", [value]) => self.as_int(value),
            ("float", [value]) => self.as_scalar("Float", value),
            ("bool", [value]) => {
                let truth = self.truth(value)?;
                Ok(Item::Value(truth.map_or(Value::Unknown, Value::Bool)))
            }
            ("str", [_]) => Ok(Item::Value(Value::Str(String::new()))),
            _ => Err(bad(format!("`{name}` is not supported"))
                .help("trace the model with torch.jit.trace instead of scripting it")),
        }
    }

    /// Converts a value to an annotated type, if that is a number.
    fn annotate(&mut self, ty: &Expr, value: &Item) -> Result<Item> {
        match ty.dotted().as_deref() {
            Some("number" | "int") if !is_float(value) => self.as_int(value),
            Some("number" | "float") => self.as_scalar("Float", value),
            _ => Ok(value.clone()),
        }
    }

    /// Returns `int(x)`. An integer that only a run can tell stays in its tensor, which may index another.
    fn as_int(&mut self, value: &Item) -> Result<Item> {
        let number = self.int(value)?;
        match value {
            Item::Value(Value::Tensor(tensor))
                if number.is_none() && self.lowering.dtype(*tensor) == DType::I64 =>
            {
                let number = self.lowering.snapshot(*tensor)?;
                Ok(Item::Value(Value::Tensor(number)))
            }
            _ => Ok(Item::int_or_unknown(number)),
        }
    }

    fn as_scalar(&mut self, name: &str, value: &Item) -> Result<Item> {
        let plain = match value {
            Item::Value(Value::Tensor(_)) | Item::Number(_) => {
                self.int(value)?.map_or(Value::Unknown, Value::Int)
            }
            Item::Real(real) => Value::Float(real.get().value),
            Item::Ratio(_) => Value::Unknown,
            Item::Value(value) => value.clone(),
            other => return Err(bad(format!("{} is no number", other.kind()))),
        };
        let number = scalars::evaluate(name, &[plain])?;
        Ok(Item::Value(number.unwrap_or(Value::Unknown)))
    }

    /// Returns `of[index]` of a list, tuple or dictionary.
    pub(super) fn member(&mut self, of: &Item, index: &Item) -> Result<Item> {
        let Item::Container(at) = of else {
            return Err(bad(format!("{} has no members", of.kind())));
        };
        let items = match self.containers.get(*at) {
            Content::List(items) | Content::Tuple(items) => items,
            Content::Dict(pairs) => {
                // The last value of a key counts.
                let found = pairs.iter().rev().find(|(key, _)| same_key(key, index));
                let found = found.map(|(_, value)| value.clone());
                return found.ok_or_else(|| bad("the dictionary has no such key"));
            }
        };
        let length = items.len() as i64;
        let items = items.clone();
        let index = self.int(index)?.and_then(|n| n.as_const());
        let index = index.ok_or_else(|| bad("which member is taken depends on data"))?;
        let place = if index < 0 { index + length } else { index };
        usize::try_from(place)
            .ok()
            .and_then(|at| items.get(at).cloned())
            .ok_or_else(|| bad(format!("there is no member {index} of {length}")))
    }

    /// Calls an op of the language, of numbers, or of tensors.
    fn call_op(&mut self, frame: &mut Frame, name: &str, call: &Call) -> Result<Item> {
        let unpacked = self.unpacked.take();
        let (args, keywords) = self.arguments(frame, call)?;
        if let Some(item) = self.language_op(name, &args)? {
            return Ok(item);
        }
        let short = name.strip_prefix("aten::").or(name.strip_prefix("prim::"));
        if let (Some(short), []) = (short, keywords.as_slice())
            && let Some(item) = self.scalar_op(short, &args)?
        {
            return Ok(item);
        }
        let is_write = name.ends_with('_') && !name.ends_with("__");
        if let [target @ (Item::Number(_) | Item::Real(_)), ..] = args.as_slice()
            && is_write
        {
            let result = match (short, keywords.as_slice()) {
                (Some(short), []) => self.scalar_op(short.trim_end_matches('_'), &args)?,
                _ => None,
            };
            let is_written = match (target, result) {
                (Item::Number(held), Some(Item::Number(new))) => held.write(new.get()),
                (Item::Real(held), Some(Item::Real(new))) => held.write(new.get()),
                _ => false,
            };
            return match is_written {
                true => Ok(target.clone()),
                false => Err(changed_size(name)),
            };
        }
        let lowering = &mut *self.lowering;
        let mut lent = Vec::new();
        let mut number = |item: &Item| {
            let tensor = in_tensor(lowering, item)?;
            lent.push((item.clone(), tensor));
            Ok(Value::Tensor(tensor))
        };
        let mut values = Vec::with_capacity(args.len());
        for arg in &args {
            values.push(self.containers.argument(arg, &mut number)?);
        }
        let mut named = Vec::with_capacity(keywords.len());
        for (key, value) in &keywords {
            named.push((&**key, self.containers.argument(value, &mut number)?));
        }
        let op = short.unwrap_or(name).trim_end_matches('_');
        let path = self.scopes.last().map_or("", |(path, _)| path.as_str());
        let place = Place {
            name: match path {
                "" => op.to_string(),
                path => format!("{path}/{op}"),
            },
            scopes: self.scopes.clone(),
            source: String::new(),
        };
        if let Some(Value::Tensor(target)) = values.first()
            && is_write
            && (self.viewed.iter()).any(|view| self.lowering.may_share(*view, *target))
        {
            return Err(changed_size(name));
        }
        self.lowering.results = unpacked;
        let result = self.lowering.call(name, None, values, named, &place);
        self.lowering.results = None;
        let result = result?;
        for (item, tensor) in lent {
            let mut results = result.tensors().into_iter();
            if results.any(|result| self.lowering.may_share(tensor, result)) {
                fix(&item);
                self.viewed.push(tensor);
            }
        }
        self.containers.result(result)
    }

    /// Calls an op of the language; returns nothing for any other op.
    fn language_op(&mut self, name: &str, args: &[Item]) -> Result<Option<Item>> {
        let text = |args: &[Item]| match args.first() {
            Some(Item::Value(Value::Str(text))) => text.chars().take(200).collect(),
            _ => String::new(),
        };
        Ok(Some(match (name, args) {
            ("prim::RaiseException", args) => {
                let said: String = text(args);
                return Err(
                    Error::model("code", format!("the program raises an error: {said}"))
                        .help("the model refuses inputs of these types or sizes"),
                );
            }
            ("prim::NumToTensor", [value]) => match self.int(value)? {
                Some(n) if !is_float(value) => Item::Number(Shared::new(n)),
                None if matches!(value, Item::Value(Value::Tensor(_))) => value.clone(),
                _ => return Err(bad("a tensor is made of a number that only a run can tell")),
            },
            ("aten::device" | "prim::device" | "prim::layout", _) => Item::Value(Value::Place),
            ("prim::is_cuda" | "prim::is_cpu", [_]) => Item::of(name == "prim::is_cpu"),
            ("prim::dtype", [Item::Value(Value::Tensor(tensor))]) => {
                Item::of(self.lowering.dtype(*tensor))
            }
            ("aten::format" | "aten::percentFormat", args) => Item::Value(Value::Str(text(args))),
            ("prim::dtype", [Item::Value(Value::Complex(tensor))]) => {
                Item::Value(Value::ComplexType(self.lowering.dtype(*tensor)))
            }
            ("aten::dim" | "prim::dim", [Item::Value(value)])
                if let Some(dims) = self.lowering.sizes_of(value) =>
            {
                Item::of(dims.len() as i64)
            }
            ("aten::size", [Item::Value(value), axis @ ..])
                if let Some(dims) = self.lowering.sizes_of(value) =>
            {
                let dims = dims.to_vec();
                return self.size(dims, axis).map(Some);
            }
            ("aten::size", [Item::Number(_) | Item::Real(_) | Item::Ratio(_)]) => {
                self.containers.add(Content::List(Vec::new()))?
            }
            ("aten::numel", [Item::Value(Value::Tensor(tensor))]) => {
                let count = Dim::product(self.lowering.dims(*tensor));
                Item::of(scalars::checked(count)?)
            }
            ("aten::len", [Item::Container(at)]) => {
                Item::of(self.containers.get(*at).values().len() as i64)
            }
            ("aten::len", [Item::Value(Value::Tensor(tensor))]) => {
                let dims = self.lowering.dims(*tensor).to_vec();
                return self.size(dims, &[Item::of(0)]).map(Some);
            }
            ("aten::append", [Item::Container(at), item]) => {
                self.containers.append(*at, item.clone())?;
                args[0].clone()
            }
            ("aten::__getitem__", [of, index]) => self.member(of, index)?,
            ("aten::__contains__", [Item::Container(at), key]) => {
                let found = match self.containers.get(*at) {
                    Content::Dict(pairs) => pairs.iter().any(|(k, _)| same_key(k, key)),
                    Content::List(items) | Content::Tuple(items) => {
                        items.iter().any(|item| same_key(item, key))
                    }
                };
                Item::of(found)
            }
            ("aten::__is__" | "aten::__isnot__", [a, b]) if a.is_none() || b.is_none() => {
                if matches!(a, Item::Value(Value::Unknown))
                    || matches!(b, Item::Value(Value::Unknown))
                {
                    return Ok(Some(Item::Value(Value::Unknown)));
                }
                let same = a.is_none() == b.is_none();
                Item::of(same == (name == "aten::__is__"))
            }
            ("aten::eq" | "aten::ne" | "aten::add", [Item::Container(_), Item::Container(_)]) => {
                return self.lists(name, &args[0], &args[1]).map(Some);
            }
            _ => return Ok(None),
        }))
    }

    /// Returns all sizes, or one.
    fn size(&mut self, dims: Vec<Dim>, axis: &[Item]) -> Result<Item> {
        let [axis] = axis else {
            let all = dims.into_iter().map(|d| Item::Value(Value::Int(d)));
            return self.containers.add(Content::List(all.collect()));
        };
        let rank = dims.len() as i64;
        let axis = self.int(axis)?.and_then(|n| n.as_const());
        let axis = axis.ok_or_else(|| bad("which size is asked for depends on data"))?;
        let at = if axis < 0 { axis + rank } else { axis };
        let dim = usize::try_from(at)
            .ok()
            .and_then(|at| dims.get(at).cloned());
        let dim = dim.ok_or_else(|| {
            bad(format!("the size of axis {axis} is asked for"))
                .found(format!("a tensor of rank {rank}"))
                .help("give inputs of the rank that the model takes")
        })?;
        Ok(Item::of(dim))
    }

    /// Compares or joins two lists.
    fn lists(&mut self, name: &str, a: &Item, b: &Item) -> Result<Item> {
        let (Some(a), Some(b)) = (self.containers.items(a), self.containers.items(b)) else {
            return Err(bad("dictionaries are neither compared nor joined"));
        };
        if name == "aten::add" {
            let joined = a.iter().chain(b).cloned().collect();
            return self.containers.add(Content::List(joined));
        }
        let mut equal = Value::Bool(a.len() == b.len());
        for (x, y) in a.iter().zip(b) {
            if equal == Value::Bool(false) {
                break;
            }
            let (Item::Value(x), Item::Value(y)) = (x, y) else {
                return Err(bad("only lists of numbers and strings are compared"));
            };
            match scalars::evaluate("eq", &[x.clone(), y.clone()])? {
                Some(Value::Bool(true)) => {}
                Some(other) => equal = other,
                None => return Err(bad("only lists of numbers and strings are compared")),
            }
        }
        Ok(Item::Value(match (equal, name) {
            (Value::Bool(b), "aten::ne") => Value::Bool(!b),
            (answer, _) => answer,
        }))
    }

    /// Returns operands with numbers for integer tensors of one known element, if a size is computed with them: modules
    /// keep a stride, for example, in a buffer.
    fn with_known_scalars(&mut self, args: &[Item]) -> Result<Option<Vec<Item>>> {
        let is_size = |item: &Item| matches!(item, Item::Number(_) | Item::Ratio(_));
        let [a, b] = args else { return Ok(None) };
        if is_size(a) == is_size(b) {
            return Ok(None);
        }
        let mut numbers = Vec::with_capacity(args.len());
        for arg in args {
            numbers.push(match arg {
                Item::Value(Value::Tensor(tensor)) => {
                    let is_scalar = self.lowering.dims(*tensor).is_empty()
                        && self.lowering.dtype(*tensor) == DType::I64;
                    let known = self.lowering.known_scalar(*tensor)?;
                    match known.filter(|_| is_scalar) {
                        Some(number) => Item::Number(Shared::fixed(number)),
                        None => return Ok(None),
                    }
                }
                other => other.clone(),
            });
        }
        Ok(Some(numbers))
    }

    /// Calls an op on numbers: those of the program, or those that a trace keeps in tensors.
    fn scalar_op(&mut self, name: &str, args: &[Item]) -> Result<Option<Item>> {
        if let ("detach" | "contiguous", [number @ Item::Number(_)]) = (name, args) {
            return Ok(Some(number.clone()));
        }
        let known = self.with_known_scalars(args)?;
        let args = known.as_deref().unwrap_or(args);
        if let Some(result) = number_op(name, args)? {
            return Ok(Some(Item::Number(Shared::new(result))));
        }
        if let Some(result) = real_op(name, args)? {
            // A conversion to the same type returns the tensor itself.
            if name == "to" {
                args.iter().chain([&result]).for_each(fix);
            }
            return Ok(Some(result));
        }
        if let Some(result) = ratio_op(name, args) {
            return Ok(Some(result));
        }
        let values = args.iter().map(|arg| match arg {
            Item::Value(Value::Tensor(_)) => None,
            Item::Value(value) => Some(value.clone()),
            _ => None,
        });
        let Some(values) = values.collect::<Option<Vec<Value>>>() else {
            return Ok(None);
        };
        Ok(scalars::evaluate(name, &values)?.map(Item::Value))
    }
}

/// Computes with integers in tensors, where the result is exact.
fn number_op(name: &str, args: &[Item]) -> Result<Option<Dim>> {
    let whole = args.iter().map(|item| match item {
        Item::Number(n) => Some(Value::Int(n.get())),
        Item::Value(Value::Int(n)) => Some(Value::Int(n.clone())),
        _ => None,
    });
    let zero = Value::Int(Dim::ZERO);
    let values = match (name, args, whole.collect::<Option<Vec<Value>>>()) {
        _ if !args.iter().any(|a| matches!(a, Item::Number(_))) => return Ok(None),
        ("clone", [Item::Number(a)], _) => return Ok(Some(a.get())),
        ("floor_divide" | "remainder", [_, _], Some(values)) if values[1] != zero => values,
        ("neg", [_], Some(values)) | ("add" | "sub" | "mul", [_, _], Some(values)) => values,
        _ => return Ok(None),
    };
    Ok(match scalars::evaluate(name, &values)? {
        Some(Value::Int(n)) => Some(n),
        _ => None,
    })
}

/// Computes with floats in tensors, in float32.
///
/// # Errors
/// A conversion to an integer that is out of range.
fn real_op(name: &str, args: &[Item]) -> Result<Option<Item>> {
    let is_real = |item: &Item| matches!(item, Item::Real(_));
    if !args
        .iter()
        .any(|a| is_real(a) || matches!(a, Item::Number(_)))
    {
        return Ok(None);
    }
    let known = |item: &Item| match item {
        Item::Real(real) => Some(real.get().value),
        Item::Value(Value::Float(x)) => Some(*x),
        Item::Number(n) => n.get().as_const().map(|n| n as f64),
        Item::Value(Value::Int(n)) => n.as_const().map(|n| n as f64),
        _ => None,
    };
    let result = match (name, args) {
        ("to", [x, Item::Value(Value::Int(code)), ..]) => {
            let (Some(x), Some(code)) = (known(x), code.as_const()) else {
                return Ok(None);
            };
            match dtype_of_code(code) {
                Some(DType::I64) => {
                    let whole = scalars::to_int(&Value::Float(x))?;
                    return Ok(match whole {
                        Value::Int(n) if is_real(&args[0]) => Some(Item::Number(Shared::new(n))),
                        _ => None,
                    });
                }
                Some(DType::F32) => Some(x),
                _ => None,
            }
        }
        ("sqrt", [x]) => known(x).map(f64::sqrt),
        ("clamp", [x, bounds @ ..]) if is_real(x) => {
            let mut clamped = known(x);
            for (bound, choose) in bounds
                .iter()
                .zip([f64::max as fn(f64, f64) -> f64, f64::min])
            {
                if !matches!(bound, Item::Value(Value::None)) {
                    clamped = clamped.zip(known(bound)).map(|(x, bound)| choose(x, bound));
                }
            }
            clamped
        }
        (_, [x]) if is_real(x) => known(x).and_then(|x| {
            Some(match name {
                "neg" => -x,
                "abs" => x.abs(),
                "floor" => x.floor(),
                "ceil" => x.ceil(),
                "trunc" => x.trunc(),
                "round" => x.round_ties_even(),
                _ => return None,
            })
        }),
        (_, [a, b]) => {
            let float = |item: &Item| is_real(item) || is_float(item);
            let (Some(x), Some(y)) = (known(a), known(b)) else {
                return Ok(None);
            };
            match name {
                "div" => Some(x / y),
                _ if !float(a) && !float(b) => None,
                "add" => Some(x + y),
                "sub" => Some(x - y),
                "mul" => Some(x * y),
                "pow" => Some(x.powf(y)),
                "floor_divide" => Some((x / y).floor()),
                _ => None,
            }
        }
        _ => None,
    };
    Ok(result.map(|x| {
        Item::Real(Shared::new(Real {
            value: f64::from(x as f32),
            plain: false,
        }))
    }))
}

/// Computes with sizes that were divided by a number.
fn ratio_op(name: &str, args: &[Item]) -> Option<Item> {
    let ratio = |item: &Item| {
        let of = match item {
            Item::Ratio(ratio) => return Some(ratio.clone()),
            Item::Number(n) => n.get(),
            Item::Value(Value::Int(n)) => n.clone(),
            Item::Real(real) if real.get().value.fract() == 0.0 => {
                Dim::from(real.get().value as i64)
            }
            Item::Value(Value::Float(x)) if x.fract() == 0.0 => Dim::from(*x as i64),
            _ => return None,
        };
        Some(Ratio { of, by: 1 })
    };
    let is_ratio = |item: &Item| matches!(item, Item::Ratio(_));
    let scaled = |r: &Ratio, by: i64| r.of.mul(&Dim::from(by));
    let result = match (name, args) {
        ("div", [a @ (Item::Ratio(_) | Item::Number(_)), b]) if !is_ratio(b) => {
            let (a, by) = (ratio(a)?, ratio(b)?.of.as_const().filter(|by| *by > 0)?);
            let by = a.by.checked_mul(by)?;
            Ratio { of: a.of, by }
        }
        (_, [a, b]) if name != "to" && (is_ratio(a) || is_ratio(b)) => {
            let (a, b) = (ratio(a)?, ratio(b)?);
            let by = a.by.checked_mul(b.by)?;
            let of = match name {
                "add" => scaled(&a, b.by).add(&scaled(&b, a.by)),
                "sub" => scaled(&a, b.by).sub(&scaled(&b, a.by)),
                "mul" => a.of.mul(&b.of),
                _ => return None,
            };
            Ratio { of, by }
        }
        ("neg", [Item::Ratio(a)]) => Ratio {
            of: Dim::ZERO.sub(&a.of),
            by: a.by,
        },
        ("floor", [Item::Ratio(a)]) => Ratio {
            of: a.floor(),
            by: 1,
        },
        ("ceil", [Item::Ratio(a)]) => Ratio {
            of: a.of.ceil_div(&Dim::from(a.by)),
            by: 1,
        },
        ("to", [Item::Ratio(a), Item::Value(Value::Int(code)), ..])
            if dtype_of_code(code.as_const()?) == Some(DType::I64) =>
        {
            return a.whole().map(|n| Item::Number(Shared::new(n)));
        }
        _ => return None,
    };
    Some(Item::Ratio(result))
}

/// Returns a number in a tensor as a tensor of the graph.
pub(super) fn in_tensor(lowering: &mut Lowering, item: &Item) -> Result<TensorId> {
    match item {
        Item::Number(n) => lowering.number(&n.get()),
        Item::Real(real) => {
            let Real { value, plain } = real.get();
            Ok(lowering.real(value, plain))
        }
        Item::Ratio(ratio) => lowering.ratio(&ratio.of, ratio.by),
        other => Err(Error::bug(
            "torchscript",
            format!("{} is no number", other.kind()),
        )),
    }
}

/// Forbids writes to a number.
fn fix(item: &Item) {
    match item {
        Item::Number(n) => n.fix(),
        Item::Real(real) => real.fix(),
        _ => {}
    }
}

fn changed_size(name: &str) -> Box<Error> {
    bad(format!("{name} changes a size that was computed before"))
        .help("export the model without in-place arithmetic on sizes")
}

fn is_float(item: &Item) -> bool {
    matches!(item, Item::Real(_) | Item::Value(Value::Float(_)))
}

/// Returns true if two keys are equal. The keys of dictionaries are strings and numbers.
fn same_key(a: &Item, b: &Item) -> bool {
    match (a, b) {
        (Item::Value(Value::Tensor(_)), _) => false,
        (Item::Value(a), Item::Value(b)) => a == b,
        _ => false,
    }
}
