//! Arithmetic of a program outside of tensors: on integers, floats, truth values and strings.
//!
//! Integers may be expressions over named sizes. A comparison that their bounds do not decide is [`Value::Unknown`], never a
//! guess. The size of expressions is bounded ([`checked`]), because a hostile program could square one until no memory
//! holds it.

use super::value::Value;
use ckpt_passes::ir::Dim;
use ckpt_passes::ir::dim::{Atom, Same};
use ckpt_passes::{Error, Result};

/// The largest number of names and operations in an expression over sizes, counted with repetitions. The product of two
/// such expressions still fits into memory.
const MAX_ATOMS: usize = 512;

/// The largest depth of operations, such as the floor divisions of strided layers in a row.
const MAX_DEPTH: usize = 64;

/// Returns `torch.NAME(values)`; nothing for an op that is not one of scalars, and for other kinds of values.
///
/// # Errors
/// A division by zero, and an overflow.
pub fn evaluate(name: &str, values: &[Value]) -> Result<Option<Value>> {
    if values.contains(&Value::Unknown) {
        return Ok(Some(Value::Unknown));
    }
    match values {
        [x] => unary(name, x),
        [a, b] => binary(name, a, b),
        _ => Ok(None),
    }
}

fn unary(name: &str, x: &Value) -> Result<Option<Value>> {
    Ok(Some(match (name, x) {
        ("neg", Value::Int(n)) => int(Dim::ZERO.sub(n))?,
        ("neg", Value::Float(x)) => Value::Float(-x),
        ("abs", Value::Int(n)) => int(n.larger(&Dim::ZERO.sub(n)))?,
        ("abs", Value::Float(x)) => Value::Float(x.abs()),
        ("__not__", x) => match truth(x) {
            Some(b) => Value::Bool(!b),
            None => return Ok(None),
        },
        ("sqrt", x) => match float(x) {
            Some(x) => Value::Float(x.sqrt()),
            None => return Ok(None),
        },
        ("floor", Value::Float(x)) => whole(x.floor())?,
        ("ceil", Value::Float(x)) => whole(x.ceil())?,
        ("Int", x) => return to_int(x).map(Some),
        ("Float", x) => match float(x) {
            Some(x) => Value::Float(x),
            None => Value::Unknown,
        },
        ("Bool", x) => truth(x).map_or(Value::Unknown, Value::Bool),
        _ => return Ok(None),
    }))
}

/// Returns `int(x)`.
///
/// # Errors
/// A float out of the range of int64.
pub fn to_int(x: &Value) -> Result<Value> {
    Ok(match x {
        Value::Int(_) => x.clone(),
        Value::Bool(b) => Value::Int(Dim::from(i64::from(*b))),
        Value::Float(x) => whole(x.trunc())?,
        _ => Value::Unknown,
    })
}

fn binary(name: &str, a: &Value, b: &Value) -> Result<Option<Value>> {
    if let (Value::Bool(x), Value::Bool(y)) = (a, b) {
        match name {
            "__and__" | "logical_and" => return Ok(Some(Value::Bool(*x && *y))),
            "__or__" | "logical_or" => return Ok(Some(Value::Bool(*x || *y))),
            "__xor__" | "ne" => return Ok(Some(Value::Bool(x != y))),
            "eq" => return Ok(Some(Value::Bool(x == y))),
            _ => {}
        }
    }
    if let (Value::Str(x), Value::Str(y)) = (a, b) {
        return Ok(compared(name, x, y).filter(|_| matches!(name, "eq" | "ne")));
    }
    if let (Some(x), Some(y)) = (as_int(a), as_int(b)) {
        return ints(name, &x, &y);
    }
    match (float(a), float(b)) {
        (Some(x), Some(y)) => Ok(floats(name, x, y)),
        // One operand is an integer that is not known yet.
        _ if number(a) && number(b) => Ok(Some(Value::Unknown)),
        _ => Ok(None),
    }
}

fn ints(name: &str, a: &Dim, b: &Dim) -> Result<Option<Value>> {
    let zero = || Error::model("size", "a division by zero");
    Ok(Some(match name {
        "add" => int(a.add(b))?,
        "sub" => int(a.sub(b))?,
        "mul" => int(a.mul(b))?,
        "floordiv" | "floor_divide" => match b.same(&Dim::ZERO) {
            Same::Yes => return Err(zero()),
            _ => int(a.div(b))?,
        },
        "remainder" => match b.same(&Dim::ZERO) {
            Same::Yes => return Err(zero()),
            _ => int(a.modulo(b))?,
        },
        "div" => match (a.as_const(), b.as_const()) {
            (_, Some(0)) => return Err(zero()),
            (Some(a), Some(b)) => Value::Float(a as f64 / b as f64),
            _ => Value::Unknown,
        },
        "pow" => match (a.as_const(), b.as_const()) {
            (Some(a), Some(b)) if b >= 0 => {
                let power = u32::try_from(b).ok().and_then(|b| a.checked_pow(b));
                Value::Int(Dim::from(power.ok_or_else(out_of_range)?))
            }
            (Some(a), Some(b)) => Value::Float((a as f64).powf(b as f64)),
            _ => Value::Unknown,
        },
        "min" => int(a.smaller(b))?,
        "max" => int(a.larger(b))?,
        "eq" => answer(a.same(b)),
        "ne" => answer(match a.same(b) {
            Same::Yes => Same::No,
            Same::No => Same::Yes,
            Same::Unknown => Same::Unknown,
        }),
        "lt" => less(a, b, 0),
        "le" => less(a, b, 1),
        "gt" => less(b, a, 0),
        "ge" => less(b, a, 1),
        _ => return Ok(None),
    }))
}

/// Returns `a < b + slack`.
fn less(a: &Dim, b: &Dim, slack: i64) -> Value {
    let distance = a.sub(b).sub(&Dim::from(slack));
    match distance.bounds() {
        (_, Some(high)) if high < 0 => Value::Bool(true),
        (Some(low), _) if low >= 0 => Value::Bool(false),
        _ => Value::Unknown,
    }
}

fn answer(same: Same) -> Value {
    match same {
        Same::Yes => Value::Bool(true),
        Same::No => Value::Bool(false),
        Same::Unknown => Value::Unknown,
    }
}

fn floats(name: &str, a: f64, b: f64) -> Option<Value> {
    Some(match name {
        "add" => Value::Float(a + b),
        "sub" => Value::Float(a - b),
        "mul" => Value::Float(a * b),
        "div" if b != 0.0 => Value::Float(a / b),
        "floordiv" if b != 0.0 => Value::Float((a / b).floor()),
        "pow" => Value::Float(a.powf(b)),
        "min" => Value::Float(a.min(b)),
        "max" => Value::Float(a.max(b)),
        _ => return compared(name, &a, &b),
    })
}

fn compared<T: PartialOrd>(name: &str, a: &T, b: &T) -> Option<Value> {
    Some(Value::Bool(match name {
        "eq" => a == b,
        "ne" => a != b,
        "lt" => a < b,
        "le" => a <= b,
        "gt" => a > b,
        "ge" => a >= b,
        _ => return None,
    }))
}

/// Returns whether a value counts as true; nothing if only a run can tell.
pub fn truth(x: &Value) -> Option<bool> {
    match x {
        Value::Bool(b) => Some(*b),
        Value::Int(n) => match n.same(&Dim::ZERO) {
            Same::Yes => Some(false),
            Same::No => Some(true),
            Same::Unknown => None,
        },
        Value::Float(x) => Some(*x != 0.0),
        _ => None,
    }
}

fn number(x: &Value) -> bool {
    matches!(x, Value::Int(_) | Value::Float(_) | Value::Bool(_))
}

fn as_int(x: &Value) -> Option<Dim> {
    match x {
        Value::Int(n) => Some(n.clone()),
        Value::Bool(b) => Some(Dim::from(i64::from(*b))),
        _ => None,
    }
}

fn float(x: &Value) -> Option<f64> {
    match x {
        Value::Float(x) => Some(*x),
        x => as_int(x)?.as_const().map(|n| n as f64),
    }
}

fn out_of_range() -> Box<Error> {
    Error::model("size", "a number does not fit into 64 bits")
}

fn int(n: Dim) -> Result<Value> {
    checked(n).map(Value::Int)
}

/// Checks a result of arithmetic and returns it.
///
/// # Errors
/// A number out of range, and an expression that is too large.
pub fn checked(n: Dim) -> Result<Dim> {
    if atoms(&n, 0) > MAX_ATOMS {
        bail!("size", "an expression over sizes is too large");
    }
    match n.may_be_saturated() {
        true => Err(out_of_range()),
        false => Ok(n),
    }
}

/// Counts the atoms of an expression. Returns more than allowed if they are nested too deeply.
fn atoms(n: &Dim, depth: usize) -> usize {
    if n.as_const().is_some() {
        return 0;
    }
    if depth > MAX_DEPTH {
        return MAX_ATOMS + 1;
    }
    let mut count = 0;
    for (product, _) in n.terms() {
        for atom in &product {
            count += 1;
            match atom {
                Atom::Sym(_) | Atom::Data(_) => {}
                Atom::Div(a, b)
                | Atom::Mod(a, b)
                | Atom::Min(a, b)
                | Atom::Max(a, b)
                | Atom::Broadcast(a, b) => count += atoms(a, depth + 1) + atoms(b, depth + 1),
            }
            if count > MAX_ATOMS {
                return count;
            }
        }
    }
    count
}

fn whole(x: f64) -> Result<Value> {
    match x.abs() < 9.0e18 {
        true => Ok(Value::Int(Dim::from(x as i64))),
        false => Err(out_of_range()),
    }
}
