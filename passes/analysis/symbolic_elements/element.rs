//! What an element is, and elementwise arithmetic on elements that are known.

use super::condition::Condition;
use crate::ir::{DType, Dim, OpDef, Tensor, ValueId};
use crate::ops::{arith, extreme, logic, math, power};

/// An element of a tensor, as a function of its indices.
#[derive(Clone, Debug, PartialEq)]
pub enum Element {
    /// An integer: a polynomial in sizes and index variables.
    Int(Dim),
    /// A number that is the same at all indices.
    Number(f64),
    /// A boolean.
    Bool(Condition),
    /// The first number where the condition holds, else the second.
    Either(Condition, f64, f64),
    /// The element of a value that is not followed further.
    Of(ValueId, Vec<Dim>),
}

impl Element {
    /// Returns the element as an integer polynomial.
    pub fn int(self) -> Option<Dim> {
        match self {
            Element::Int(d) => Some(d),
            Element::Number(x) if x.fract() == 0.0 && x.abs() < 1e15 => Some(Dim::from(x as i64)),
            _ => None,
        }
    }

    /// Returns the number that the element is at all indices.
    pub fn number(&self) -> Option<f64> {
        match self {
            Element::Int(d) => d.as_const().map(|n| n as f64),
            Element::Number(x) => Some(*x),
            _ => None,
        }
    }

    /// Returns a known number as an element of type `dtype`.
    pub(super) fn constant(dtype: DType, x: f64) -> Element {
        match dtype {
            d if d.is_float() => Element::Number(x),
            d if d.is_int() => Element::Int(Dim::from(x as i64)),
            _ => Element::Bool(Condition::Is(x != 0.0)),
        }
    }
}

/// Returns `x` where the condition holds, else `y`.
pub(super) fn choose(condition: Condition, x: Element, y: Element) -> Option<Element> {
    match (condition, x, y) {
        (Condition::Is(true), x, _) => Some(x),
        (Condition::Is(false), _, y) => Some(y),
        (_, x, y) if x == y && !matches!(x, Element::Of(..)) => Some(x),
        // Where(c, Where(d, a, b), b) is Where(c and d, a, b), and so on.
        (c, Element::Either(d, a, b), y) => match y.number()? {
            y if y == b => Some(Element::Either(c.and(d)?, a, b)),
            y if y == a => Some(Element::Either(c.and(d.negated())?, b, a)),
            _ => None,
        },
        (c, x, Element::Either(d, a, b)) => match x.number()? {
            x if x == a => Some(Element::Either(c.or(d)?, a, b)),
            x if x == b => Some(Element::Either(c.or(d.negated())?, b, a)),
            _ => None,
        },
        (c, x, y) => Some(Element::Either(c, x.number()?, y.number()?)),
    }
}

/// Returns the boolean that is `then` where the condition holds, else `otherwise`.
pub(super) fn choose_bool(c: Condition, then: bool, otherwise: bool) -> Element {
    Element::Bool(match (then, otherwise) {
        (true, false) => c,
        (false, true) => c.negated(),
        (same, _) => Condition::Is(same),
    })
}

/// Returns the nearest element of that type to a number; `None` where an integer type does not hold it.
pub(super) fn rounded(dtype: DType, x: f64) -> Option<f64> {
    if let Some((least, greatest)) = dtype.int_range() {
        let whole = x.trunc();
        return (whole >= least as f64 && whole <= greatest as f64).then_some(whole);
    }
    Tensor::scalar(dtype, x).get_f64(0)
}

/// Applies an op with operands of type `from` and results of type `to` to numbers. Operands that depend on a condition
/// all have to depend on the same one.
pub(super) fn apply(op: &OpDef, from: DType, to: DType, known: &[Element]) -> Option<Element> {
    let mut condition: Option<&Condition> = None;
    for element in known {
        if let Element::Either(c, ..) = element {
            if condition.is_some_and(|d| d != c) {
                return add_masks(op, known);
            }
            condition = Some(c);
        }
    }
    let result = |holds: bool| -> Option<f64> {
        let side = known.iter().map(|e| match e {
            Element::Either(_, a, b) => Some(if holds { *a } else { *b }),
            other => other.number(),
        });
        let y = apply_to_numbers(op, &side.collect::<Option<Vec<f64>>>()?)?;
        // Comparisons give 0 and 1.
        if to == DType::Bool {
            Some(y)
        } else {
            rounded(from, y)
        }
    };
    let (then, otherwise) = (result(true)?, result(false)?);
    if to == DType::Bool {
        let c = condition.cloned().unwrap_or(Condition::Is(true));
        return Some(choose_bool(c, then != 0.0, otherwise != 0.0));
    }
    match condition {
        Some(c) => choose(c.clone(), Element::Number(then), Element::Number(otherwise)),
        None => Some(Element::Number(then)),
    }
}

/// Returns the sum of two masks that are 0 or minus infinity.
fn add_masks(op: &OpDef, known: &[Element]) -> Option<Element> {
    let shown = |e: &Element| match e {
        Element::Either(c, 0.0, b) if *b == f64::NEG_INFINITY => Some(c.clone()),
        Element::Either(c, a, 0.0) if *a == f64::NEG_INFINITY => Some(c.clone().negated()),
        _ => None,
    };
    match known {
        [a, b] if op == &arith::ADD => {
            let both = shown(a)?.and(shown(b)?)?;
            Some(Element::Either(both, 0.0, f64::NEG_INFINITY))
        }
        _ => None,
    }
}

/// Ops on numbers: the row, the number of operands, the function. Comparisons give 0 and 1.
static NUMERIC: &[(&OpDef, usize, fn(&[f64]) -> f64)] = &[
    (&arith::NEG, 1, |x| -x[0]),
    (&arith::ABS, 1, |x| x[0].abs()),
    (&math::SQRT, 1, |x| x[0].sqrt()),
    (&math::RECIPROCAL, 1, |x| 1.0 / x[0]),
    (&logic::IS_NAN, 1, |x| truth(x[0].is_nan())),
    (&arith::ADD, 2, |x| x[0] + x[1]),
    (&arith::SUB, 2, |x| x[0] - x[1]),
    (&arith::MUL, 2, |x| x[0] * x[1]),
    (&arith::DIV, 2, |x| x[0] / x[1]),
    (&power::POW, 2, |x| x[0].powf(x[1])),
    (&extreme::MIN, 2, |x| x[0].min(x[1])),
    (&extreme::MAX, 2, |x| x[0].max(x[1])),
    (&logic::EQUAL, 2, |x| truth(x[0] == x[1])),
    (&logic::LESS, 2, |x| truth(x[0] < x[1])),
    (&logic::LESS_OR_EQUAL, 2, |x| truth(x[0] <= x[1])),
    (&logic::GREATER, 2, |x| truth(x[0] > x[1])),
    (&logic::GREATER_OR_EQUAL, 2, |x| truth(x[0] >= x[1])),
];

fn truth(b: bool) -> f64 {
    f64::from(u8::from(b))
}

/// Returns true if [`apply`] knows an op.
pub(super) fn is_numeric(op: &OpDef) -> bool {
    NUMERIC.iter().any(|(known, ..)| op == *known)
}

fn apply_to_numbers(op: &OpDef, x: &[f64]) -> Option<f64> {
    let is_it = |(known, arity, _): &&(&OpDef, usize, _)| op == *known && x.len() == *arity;
    NUMERIC.iter().find(is_it).map(|(.., function)| function(x))
}
