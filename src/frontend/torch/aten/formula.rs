//! Ops written in other ops, as text: `off = abs(self - target); where(off < 1, off * off, off)`.
//!
//! PyTorch defines many ops by others (torch/_decomp, torch/_refs). Such an op is a formula over its arguments. A formula
//! is a list of statements with semicolons; the last one is the result. It has
//!
//! - numbers, `'strings'`, the names of arguments, and names that a statement gave; an argument that is not given is `none`
//! - `+ - * / < <= > >= == != & | ~`: PyTorch's ops of those names, or plain arithmetic if all operands are numbers
//! - `c ? a : b`, where only one side is evaluated; `c` is a truth value or number, and `none` counts as false
//! - calls of PyTorch's ops (`sum(x, -1)`, `std(x, keepdim=keepdim)`) and of the few [`helpers`](helper)
//! - rows of the op table (`Elu(x, alpha=0.5)`), which are emitted as they are ([`row`])
//! - `[a, b]`, `(a, b)`, `x[0]`, and `(a = x; a * a)`, a formula in brackets
//!
//! Operands are evaluated from left to right, which fixes the order of the nodes.

use super::super::scalars;
use super::super::value::Value;
use super::axes;
use super::lowering::{DEFAULT_FLOAT, Lowering};
use ckpt_passes::ir::{Attr, AttrKind, Attrs, DType, Dim, Emit, OpDef, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::cast::CAST;
use ckpt_passes::{Error, Result, ops};
use std::f64::consts::{LN_2, LN_10, PI};

/// Binary operators from the loosest to the tightest, longer ones first, with the names of their ops.
const OPERATORS: [&[(&str, &str)]; 5] = [
    &[("|", "logical_or")],
    &[("&", "logical_and")],
    &[
        ("==", "eq"),
        ("!=", "ne"),
        ("<=", "le"),
        (">=", "ge"),
        ("<", "lt"),
        (">", "gt"),
    ],
    &[("+", "add"), ("-", "sub")],
    &[("*", "mul"), ("/", "div")],
];

/// Evaluates the formula of an op over named values.
///
/// # Errors
/// Whatever an op of the formula refuses.
pub fn evaluate(
    low: &mut Lowering,
    op: &str,
    names: Vec<(&'static str, Value)>,
    text: &'static str,
) -> Result<Value> {
    let mut reader = Reader {
        low,
        op,
        names,
        rest: text,
        skipping: false,
    };
    let value = reader.statements()?;
    match reader.rest {
        "" => Ok(value),
        _ => Err(reader.wrong("the end")),
    }
}

/// Reads a number, truth value, name of a constant, or string.
pub fn literal(text: &str) -> Value {
    match text {
        "true" | "false" => Value::Bool(text == "true"),
        "none" => Value::None,
        "unknown" => Value::Unknown,
        "inf" => Value::Float(f64::INFINITY),
        "pi" => Value::Float(PI),
        "ln2" => Value::Float(LN_2),
        "ln10" => Value::Float(LN_10),
        "bool" => Value::DType(DType::Bool),
        "float32" => Value::DType(DType::F32),
        "float64" => Value::DType(DType::F64),
        "int32" => Value::DType(DType::I32),
        "int64" => Value::DType(DType::I64),
        _ => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(n), _) => Value::from(n),
            (_, Ok(x)) => Value::Float(x),
            _ => Value::Str(text.to_string()),
        },
    }
}

/// Calls a function that formulas have and PyTorch has not; returns nothing for any other name.
fn helper(low: &mut Lowering, op: &str, name: &str, args: &[Value]) -> Result<Option<Value>> {
    let given = || {
        args.iter()
            .filter(|v| **v != Value::None)
            .collect::<Vec<_>>()
    };
    Ok(Some(match (name, args) {
        ("given", [x]) => Value::Bool(*x != Value::None),
        ("is_tensor", [x]) => Value::Bool(matches!(x, Value::Tensor(_))),
        ("is_float", [Value::Tensor(x)]) => Value::Bool(low.dtype(*x).is_float()),
        // Whether the elements are whole numbers, also in a floating-point type.
        ("is_whole", [Value::Tensor(x)]) => {
            let v = low.read(*x)?;
            let node = low.b.def_node(v).map(|id| low.b.node(id));
            let from = node.filter(|n| n.op == &CAST).and_then(|n| n.ins[0]);
            let is_int = |v: ValueId| low.b.ty(v).dtype.is_int();
            Value::Bool(is_int(v) || from.is_some_and(is_int))
        }
        ("is_bool", [Value::Tensor(x)]) => Value::Bool(low.dtype(*x) == DType::Bool),
        ("dtype", [Value::Tensor(x)]) => Value::DType(low.dtype(*x)),
        // The first operand in the type that all of them have in common.
        ("typed", [x, ..]) => low.converted(x, low.promoted(&given())?)?,
        // A number or tensor in the type of another one.
        ("like", [x, Value::Tensor(like)]) => low.converted(x, low.dtype(*like))?,
        // All operands in their common type, or in the floating-point type for it.
        ("common" | "floating", args) => {
            let dtype = match name {
                "common" => low.promoted(&given())?,
                _ => low.promoted_float(&given())?,
            };
            let typed = args.iter().map(|x| low.converted(x, dtype));
            let typed: Vec<Value> = typed.collect::<Result<_>>()?;
            match <[Value; 1]>::try_from(typed) {
                Ok([one]) => one,
                Err(several) => Value::Tuple(several),
            }
        }
        ("in_type", [x, Value::DType(dtype)]) => low.converted(x, *dtype)?,
        ("in_type", [x, Value::None]) => x.clone(),
        // An operand of a sum: in `dtype` if that is given, else integers in int64.
        ("summand", [x @ Value::Tensor(id), dtype]) => {
            let own = low.dtype(*id);
            let natural = if own.is_float() { own } else { DType::I64 };
            let dtype = match dtype {
                Value::DType(dtype) => *dtype,
                _ => natural,
            };
            low.converted(x, dtype)?
        }
        // An integer as an int64 scalar.
        ("whole", [Value::Int(n)]) => low.number(n)?.into(),
        // An axis of a tensor, counted from the front; several, or all if none is given; how many elements they have.
        ("axis", [Value::Tensor(x), axis]) => {
            let at = axes::in_rank(op, fixed(op, axis)?, low.dims(*x).len())?;
            Value::from(at as i64)
        }
        ("axes", [Value::Tensor(x), list]) => {
            let listed = list.members().iter().map(|axis| fixed(op, axis));
            let listed: Vec<i64> = listed.collect::<Result<_>>()?;
            let all = axes::chosen(op, &listed, low.dims(*x).len())?;
            all.into_iter().map(|a| a as i64).collect::<Vec<_>>().into()
        }
        ("count", [Value::Tensor(x), axes]) => {
            let axes = axes.members().iter().filter_map(Value::number);
            let sizes = axes.map(|axis| &low.dims(*x)[axis as usize]);
            sizes.fold(Dim::ONE, |n, size| n.mul(size)).into()
        }
        ("times", [x, factor]) if *factor == Value::None || factor.number() == Some(1.0) => {
            x.clone()
        }
        ("times", [Value::Tensor(x), factor]) => {
            let (value, factor) = (low.read(*x)?, low.operand(factor, low.dtype(*x))?);
            let value = low.b.mul(value, factor)?;
            Value::Tensor(low.fresh(value))
        }
        // Whether each element is not 0.
        ("truth", [Value::Tensor(x)]) => {
            let value = low.read(*x)?;
            let value = low.truth(value)?;
            Value::Tensor(low.fresh(value))
        }
        // A tensor that the forward pass saved for its backward pass.
        ("saved", [Value::Tensor(x)]) => {
            let value = low.read(*x)?;
            low.warn_of_detached(value);
            Value::Tensor(*x)
        }
        ("unsupported", [Value::Str(what)]) => {
            bail!("op", "{op}: {what} is not supported");
        }
        _ => return Ok(None),
    }))
}

/// Returns a number that the file must fix.
fn fixed(op: &str, value: &Value) -> Result<i64> {
    value.number().map(|n| n as i64).ok_or_else(|| {
        Error::model("op", format!("{op}: an axis is not of the right kind"))
            .expected("a number that the file fixes")
            .found(value.kind())
    })
}

/// Emits a row of the op table. A tuple among the operands stands for its members, a number for a scalar in the type of the
/// last tensor beside it, and a list for a vector of integers. Named arguments are attributes; a flag that is not given is 0.
/// `results=2` makes a tuple of that many results.
fn row(
    low: &mut Lowering,
    op: &'static OpDef,
    args: Vec<Value>,
    named: Vec<(&str, Value)>,
) -> Result<Value> {
    let flat = args.into_iter().flat_map(|arg| match arg {
        Value::Tuple(items) => items,
        one => vec![one],
    });
    let args: Vec<Value> = flat.collect();
    let dtype = args.iter().rev().find_map(|arg| match arg {
        Value::Tensor(id) => Some(low.dtype(*id)),
        _ => None,
    });
    let mut ins = Vec::with_capacity(args.len());
    for arg in &args {
        ins.push(match arg {
            Value::None => None,
            Value::Tensor(id) => Some(low.read(*id)?),
            Value::List(items) => {
                let dims = items.iter().filter_map(|item| match item {
                    Value::Int(dim) => Some(dim.clone()),
                    _ => None,
                });
                Some(low.int_vector(&dims.collect::<Vec<_>>())?)
            }
            number => {
                let natural = match number {
                    Value::Int(_) => DType::I64,
                    _ => DEFAULT_FLOAT,
                };
                Some(low.operand(number, dtype.unwrap_or(natural))?)
            }
        });
    }
    let (mut attrs, mut results) = (Attrs::new(), None);
    for (name, value) in named {
        if name == "results" {
            results = value.number().map(|n| n as usize);
            continue;
        }
        let kind = op
            .attrs
            .iter()
            .find(|spec| spec.name == name)
            .map(|spec| spec.kind);
        let attr = match (kind, &value, value.number()) {
            (Some(AttrKind::Float), _, Some(x)) => Attr::Float(x as f32),
            (Some(AttrKind::Int), _, Some(n)) => Attr::Int(n as i64),
            (Some(AttrKind::Int), Value::Bool(flag), _) => Attr::Int((*flag).into()),
            (Some(AttrKind::Int), Value::None, _) => Attr::Int(0),
            (Some(AttrKind::Str), Value::Str(word), _) => Attr::Str(word.clone()),
            (Some(AttrKind::DType), Value::DType(dtype), _) => Attr::DType(*dtype),
            _ => {
                let what = format!("a formula gives {} no attribute `{name}`", op.name);
                return Err(Error::bug("aten", what));
            }
        };
        attrs.set(name, attr);
    }
    let values = low.b.emit_n(op, ins, attrs, results.unwrap_or(1))?;
    let tensors = values.into_iter().map(|v| Value::Tensor(low.fresh(v)));
    let tensors: Vec<Value> = tensors.collect();
    Ok(match results {
        Some(_) => Value::Tuple(tensors),
        None => tensors[0].clone(),
    })
}

struct Reader<'l, 'g> {
    low: &'l mut Lowering<'g>,
    op: &'l str,
    names: Vec<(&'static str, Value)>,
    rest: &'static str,
    /// Whether the reader is in a branch that is not taken: nothing is evaluated there.
    skipping: bool,
}

impl Reader<'_, '_> {
    fn wrong(&self, expected: &str) -> Box<Error> {
        Error::bug("aten", "a formula cannot be read")
            .expected(expected)
            .found(self.rest)
    }

    /// Takes a mark if it is next.
    fn mark(&mut self, mark: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest).trim_start();
        rest.is_some()
    }

    fn need(&mut self, mark: &str) -> Result<()> {
        match self.mark(mark) {
            true => Ok(()),
            false => Err(self.wrong(mark)),
        }
    }

    /// Takes a name or number; an exponent may have a sign.
    fn word(&mut self) -> &'static str {
        let digits = self.rest.starts_with(|c: char| c.is_ascii_digit());
        let mut before = ' ';
        let end = self.rest.find(|c: char| {
            let exponent = digits && before == 'e' && c == '-';
            before = c;
            !(c.is_ascii_alphanumeric() || c == '_' || digits && c == '.' || exponent)
        });
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest.trim_start();
        word
    }

    /// Takes `name =`, if that is next.
    fn target(&mut self) -> Option<&'static str> {
        let before = self.rest;
        let name = self.word();
        let is_target = self.rest.starts_with('=') && !self.rest.starts_with("==");
        if is_target && !name.is_empty() {
            self.mark("=");
            return Some(name);
        }
        self.rest = before;
        None
    }

    fn statements(&mut self) -> Result<Value> {
        loop {
            let target = self.target();
            let value = self.choice()?;
            let Some(name) = target else {
                match self.mark(";") {
                    true => continue,
                    false => return Ok(value),
                }
            };
            self.names.insert(0, (name, value));
            self.need(";")?;
        }
    }

    /// `condition ? a : b`.
    fn choice(&mut self) -> Result<Value> {
        let condition = self.binary(0)?;
        if !self.mark("?") {
            return Ok(condition);
        }
        let holds = match &condition {
            Value::None => false,
            given => scalars::truth(given).is_some_and(|b| b),
        };
        let before = self.skipping;
        self.skipping = before || !holds;
        let then = self.choice()?;
        self.need(":")?;
        self.skipping = before || holds;
        let otherwise = self.choice()?;
        self.skipping = before;
        Ok(if holds { then } else { otherwise })
    }

    fn binary(&mut self, level: usize) -> Result<Value> {
        let Some(operators) = OPERATORS.get(level) else {
            return self.unary();
        };
        let mut left = self.binary(level + 1)?;
        while let Some((_, op)) = operators.iter().find(|(mark, _)| self.mark(mark)) {
            let right = self.binary(level + 1)?;
            left = self.operator(op, vec![left, right])?;
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Value> {
        for (mark, op) in [("-", "neg"), ("~", "logical_not")] {
            if self.mark(mark) {
                let x = self.unary()?;
                return self.operator(op, vec![x]);
            }
        }
        let mut value = self.atom()?;
        while self.mark("[") {
            let index = self.word();
            self.need("]")?;
            let member = index
                .parse()
                .ok()
                .and_then(|i: usize| value.members().get(i));
            value = match member {
                Some(member) => member.clone(),
                None if self.skipping => Value::None,
                None => return Err(self.wrong("a member")),
            };
        }
        Ok(value)
    }

    fn atom(&mut self) -> Result<Value> {
        if self.mark("[") {
            let (items, _) = self.list("]")?;
            return Ok(Value::List(items));
        }
        if self.mark("(") {
            let first = self.statements()?;
            if self.mark(")") {
                return Ok(first);
            }
            self.need(",")?;
            let (mut items, _) = self.list(")")?;
            items.insert(0, first);
            return Ok(Value::Tuple(items));
        }
        if self.mark("'") {
            let (text, rest) = self.rest.split_once('\'').unwrap_or((self.rest, ""));
            self.rest = rest.trim_start();
            return Ok(Value::Str(text.to_string()));
        }
        let word = self.word();
        if word.is_empty() {
            return Err(self.wrong("a value"));
        }
        if self.mark("(") {
            let (args, named) = self.list(")")?;
            return self.call(word, args, named);
        }
        let known = self.names.iter().find(|(name, _)| *name == word);
        Ok(match (known, literal(word)) {
            (Some((_, value)), _) => value.clone(),
            // An argument that is not given.
            (None, Value::Str(_)) => Value::None,
            (None, value) => value,
        })
    }

    /// Reads values with commas up to the closing mark, some of them with names.
    fn list(&mut self, close: &str) -> Result<(Vec<Value>, Vec<(&'static str, Value)>)> {
        let (mut items, mut named) = (Vec::new(), Vec::new());
        while !self.mark(close) {
            match self.target() {
                Some(name) => named.push((name, self.choice()?)),
                None => items.push(self.choice()?),
            }
            if !self.mark(",") && !self.rest.starts_with(close) {
                return Err(self.wrong(close));
            }
        }
        Ok((items, named))
    }

    /// Applies an operator: arithmetic if all operands are numbers, else PyTorch's op.
    fn operator(&mut self, op: &str, operands: Vec<Value>) -> Result<Value> {
        let plain = |v: &Value| matches!(v, Value::Int(_) | Value::Float(_) | Value::Bool(_));
        let name = if op == "logical_not" { "__not__" } else { op };
        if !self.skipping
            && operands.iter().all(plain)
            && let Some(value) = scalars::evaluate(name, &operands)?
        {
            return Ok(value);
        }
        self.call(op, operands, Vec::new())
    }

    /// Calls a row of the op table, a helper or one of PyTorch's ops.
    fn call(&mut self, op: &str, args: Vec<Value>, named: Vec<(&str, Value)>) -> Result<Value> {
        if self.skipping {
            return Ok(Value::None);
        }
        if op.starts_with(|c: char| c.is_ascii_uppercase())
            && let Some(op) = ops::find(op)
        {
            return row(self.low, op, args, named);
        }
        match helper(self.low, self.op, op, &args)? {
            Some(value) => Ok(value),
            None => (self.low.run)(self.low, op, args, named),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ir::{Dim, Graph, Ty};

    fn evaluated(text: &'static str) -> Result<Value> {
        let mut graph = Graph::new("main");
        let mut low = Lowering::new(&mut graph);
        let x = low.input("x", Ty::new(DType::F32, vec![Dim::from(2)]))?;
        evaluate(&mut low, "op", vec![("x", x.into()), ("n", 3.into())], text)
    }

    #[test]
    fn numbers_are_computed_and_branches_are_chosen() {
        for (text, value) in [
            ("1 + 2 * n", Value::from(7)),
            ("1.0 / n - 1e-1 * 0", Value::from(1.0 / 3.0)),
            ("-n < 2 & ~(n == 4)", Value::from(true)),
            ("missing ? x : n > 2 ? 'a' : 'b'", Value::Str("a".into())),
            ("given(missing)", Value::from(false)),
            ("[n, (a = n; a * a)][1]", Value::from(9)),
            ("dtype(x)", Value::from(DType::F32)),
            (
                "dim(x) == 1 ? (x, unknown)[1] : nonsense(x)",
                Value::Unknown,
            ),
            ("dtype(Cast(floating(x), to=int32))", DType::I32.into()),
            ("is_bool(Equal(common(x, n)))", Value::from(true)),
        ] {
            assert_eq!(evaluated(text).unwrap(), value, "{text}");
        }
        assert!(matches!(
            evaluated("y = x + 1; y * y"),
            Ok(Value::Tensor(_))
        ));
    }

    #[test]
    fn what_is_no_formula_is_our_bug() {
        for text in ["", "1 +", "(1", "f(1", "x ? 1", "a = 1", "1 2", "[x][3]"] {
            let error = evaluated(text).unwrap_err();
            assert!(error.to_string().contains("formula"), "{text}: {error}");
        }
    }
}
