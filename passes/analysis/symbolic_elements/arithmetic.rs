//! Elementwise ops on elements that are known.

use super::{Condition, Element, Elements, layout};
use crate::ir::{DType, Dim, Node, NodeId, OpDef, Tensor};
use crate::ops::{arith, cast, extreme, logic, math, power};

impl Elements<'_> {
    pub(super) fn arithmetic(&mut self, id: NodeId, at: &[Dim]) -> Option<Element> {
        let node = self.graph.node(id);
        let to = &self.graph.ty(*node.outs.first()?).dims;
        if !is_known(node.op) {
            return None;
        }
        let mut places = Vec::new();
        for x in &node.ins {
            let x = (*x)?;
            places.push((x, layout::broadcast(&self.graph.ty(x).dims, to, at)?));
        }
        let [(a, at_a), rest @ ..] = places.as_slice() else {
            return None;
        };
        let op = node.op;
        if op == &logic::NOT {
            return Some(Element::Bool(self.condition(*a, at_a).not()));
        }
        if op == &logic::WHERE {
            let [(x, at_x), (y, at_y)] = rest else {
                return None;
            };
            let condition = self.condition(*a, at_a);
            if self.graph.ty(*x).dtype == DType::Bool {
                let (x, y) = (self.condition(*x, at_x), self.condition(*y, at_y));
                let then = condition.clone().and(x)?;
                let otherwise = condition.not().and(y)?;
                return then.or(otherwise).map(Element::Bool);
            }
            let (x, y) = (self.at(*x, at_x), self.at(*y, at_y));
            return choose(condition, x, y);
        }
        if op == &logic::AND || op == &logic::OR || op == &logic::XOR {
            let [(b, at_b)] = rest else { return None };
            let (a, b) = (self.condition(*a, at_a), self.condition(*b, at_b));
            let joined = if op == &logic::AND {
                a.and(b)
            } else if op == &logic::OR {
                a.or(b)
            } else {
                let either = a.clone().and(b.clone().not())?;
                either.or(a.not().and(b)?)
            };
            return joined.map(Element::Bool);
        }
        let from = self.graph.ty(*a).dtype;
        let dtype = self.graph.ty(node.outs[0]).dtype;
        if op == &cast::CAST {
            return self.converted(*a, at_a, from, dtype);
        }
        if from == DType::Bool {
            // `Equal` of two booleans.
            let [(b, at_b)] = rest else { return None };
            let (a, b) = (self.condition(*a, at_a), self.condition(*b, at_b));
            let both = a.clone().and(b.clone())?;
            return both.or(a.not().and(b.not())?).map(Element::Bool);
        }
        let mut known = vec![self.at(*a, at_a)];
        for (x, at) in rest {
            known.push(self.at(*x, at));
        }
        if known.iter().any(|e| matches!(e, Element::Of(..))) {
            return None;
        }
        if from.is_int()
            && let Some(ints) = known
                .iter()
                .map(|e| e.clone().int())
                .collect::<Option<Vec<Dim>>>()
        {
            return self.integers(node, from, &ints);
        }
        numbers(op, from, dtype, &known)
    }

    fn integers(&mut self, node: &Node, dtype: DType, ints: &[Dim]) -> Option<Element> {
        let op = node.op;
        if let [a, b] = ints
            && is_comparison(op)
        {
            return self.compared(op, a.clone(), b.clone()).map(Element::Bool);
        }
        let result = match ints {
            [a] if op == &arith::NEG => Dim::ZERO.sub(a),
            [a] if op == &arith::ABS && self.range(a).0.is_some_and(|lo| lo >= 0) => a.clone(),
            [a, b] if op == &arith::ADD => a.add(b),
            [a, b] if op == &arith::SUB => a.sub(b),
            [a, b] if op == &arith::MUL => a.mul(b),
            // Truncation is floor where neither side is negative.
            [a, b] if op == &arith::DIV || (op == &arith::MOD && node.attrs.int("fmod") == 0) => {
                let sure = self.range(a).0.is_some_and(|lo| lo >= 0)
                    && self.range(b).0.is_some_and(|lo| lo >= 1);
                match (sure, op == &arith::DIV) {
                    (false, _) => return None,
                    (_, true) => a.div(b),
                    (_, false) => a.modulo(b),
                }
            }
            [a, b] if op == &extreme::MIN || op == &extreme::MAX => {
                let least = op == &extreme::MIN;
                let gap = self.range(&a.sub(b));
                match gap {
                    (Some(lo), _) if lo >= 0 => if least { b } else { a }.clone(),
                    (_, Some(hi)) if hi <= 0 => if least { a } else { b }.clone(),
                    _ => return None,
                }
            }
            _ => return None,
        };
        // Narrow types wrap around; so would 64 bits where a polynomial stopped.
        let fits = match (result.as_const(), dtype.int_range()) {
            (Some(n), Some((least, greatest))) => (least..=greatest).contains(&n),
            _ => matches!(dtype, DType::I64 | DType::I32),
        };
        (fits && !result.may_be_saturated()).then_some(Element::Int(result))
    }

    fn converted(
        &mut self,
        x: crate::ir::ValueId,
        at: &[Dim],
        from: DType,
        to: DType,
    ) -> Option<Element> {
        if from == DType::Bool {
            let condition = self.condition(x, at);
            if to == DType::Bool {
                return Some(Element::Bool(condition));
            }
            return choose(condition, Element::Number(1.0), Element::Number(0.0));
        }
        let element = self.at(x, at);
        if to == DType::Bool {
            return match element {
                Element::Either(c, a, b) => either_bool(c, a != 0.0, b != 0.0).map(Element::Bool),
                Element::Int(d) if d.as_const().is_none() => {
                    let (up, down) = (
                        self.at_least_0(d.clone()),
                        self.at_least_0(Dim::ZERO.sub(&d)),
                    );
                    up.and(down).map(|zero| Element::Bool(zero.not()))
                }
                other => Some(Element::Bool(Condition::Is(other.number()? != 0.0))),
            };
        }
        match element {
            Element::Int(d) if d.as_const().is_none() => {
                let wide = |t: DType| matches!(t, DType::I64 | DType::I32);
                (wide(from) && wide(to)).then_some(Element::Int(d))
            }
            Element::Either(c, a, b) => Some(Element::Either(c, rounded(to, a)?, rounded(to, b)?)),
            Element::Of(..) | Element::Bool(_) => None,
            known => {
                let x = rounded(to, known.number()?)?;
                Some(if to.is_int() {
                    Element::Int(Dim::from(x as i64))
                } else {
                    Element::Number(x)
                })
            }
        }
    }
}

fn is_comparison(op: &OpDef) -> bool {
    [
        &logic::EQUAL,
        &logic::LESS,
        &logic::LESS_OR_EQUAL,
        &logic::GREATER,
        &logic::GREATER_OR_EQUAL,
    ]
    .iter()
    .any(|c| op == *c)
}

fn is_known(op: &OpDef) -> bool {
    is_comparison(op)
        || [
            &arith::ADD,
            &arith::SUB,
            &arith::MUL,
            &arith::DIV,
            &arith::MOD,
            &arith::NEG,
            &arith::ABS,
            &cast::CAST,
            &extreme::MIN,
            &extreme::MAX,
            &logic::AND,
            &logic::IS_INF,
            &logic::IS_NAN,
            &logic::NOT,
            &logic::OR,
            &logic::WHERE,
            &logic::XOR,
            &math::RECIPROCAL,
            &math::SQRT,
            &power::POW,
        ]
        .iter()
        .any(|c| op == *c)
}

/// `x` where the condition holds, else `y`.
pub(super) fn choose(condition: Condition, x: Element, y: Element) -> Option<Element> {
    match (condition, x, y) {
        (Condition::Is(true), x, _) => Some(x),
        (Condition::Is(false), _, y) => Some(y),
        (_, x, y) if x == y && !matches!(x, Element::Of(..)) => Some(x),
        // Where(c, Where(d, a, b), b) is Where(c and d, a, b), and so on.
        (c, Element::Either(d, a, b), y) => match y.number()? {
            y if y == b => Some(Element::Either(c.and(d)?, a, b)),
            y if y == a => Some(Element::Either(c.and(d.not())?, b, a)),
            _ => None,
        },
        (c, x, Element::Either(d, a, b)) => match x.number()? {
            x if x == a => Some(Element::Either(c.or(d)?, a, b)),
            x if x == b => Some(Element::Either(c.or(d.not())?, b, a)),
            _ => None,
        },
        (c, x, y) => Some(Element::Either(c, x.number()?, y.number()?)),
    }
}

fn either_bool(c: Condition, then: bool, otherwise: bool) -> Option<Condition> {
    Some(match (then, otherwise) {
        (true, false) => c,
        (false, true) => c.not(),
        (same, _) => Condition::Is(same),
    })
}

/// A number as an element of that type.
fn rounded(dtype: DType, x: f64) -> Option<f64> {
    if let Some((least, greatest)) = dtype.int_range() {
        let whole = x.trunc();
        return (whole >= least as f64 && whole <= greatest as f64).then_some(whole);
    }
    Tensor::scalar(dtype, x).get_f64(0)
}

/// An op on numbers, of which at most one depends on a condition (or all on the same).
fn numbers(op: &OpDef, from: DType, to: DType, known: &[Element]) -> Option<Element> {
    let mut condition: Option<&Condition> = None;
    for element in known {
        if let Element::Either(c, ..) = element {
            if condition.is_some_and(|d| d != c) {
                return masks(op, known);
            }
            condition = Some(c);
        }
    }
    let side = |first: bool| -> Option<Vec<f64>> {
        known
            .iter()
            .map(|e| match e {
                Element::Either(_, a, b) => Some(if first { *a } else { *b }),
                other => other.number(),
            })
            .collect()
    };
    let result = |x: &[f64]| -> Option<f64> {
        let y = on_numbers(op, x)?;
        // Comparisons give 0 and 1.
        if to == DType::Bool {
            Some(y)
        } else {
            rounded(from, y)
        }
    };
    let then = result(&side(true)?)?;
    let otherwise = result(&side(false)?)?;
    if to == DType::Bool {
        let c = condition.cloned().unwrap_or(Condition::Is(true));
        return either_bool(c, then != 0.0, otherwise != 0.0).map(Element::Bool);
    }
    match condition {
        Some(c) => choose(c.clone(), Element::Number(then), Element::Number(otherwise)),
        None => Some(Element::Number(then)),
    }
}

/// The sum of two masks that are 0 or minus infinity.
fn masks(op: &OpDef, known: &[Element]) -> Option<Element> {
    let shown = |e: &Element| match e {
        Element::Either(c, 0.0, b) if *b == f64::NEG_INFINITY => Some(c.clone()),
        Element::Either(c, a, 0.0) if *a == f64::NEG_INFINITY => Some(c.clone().not()),
        _ => None,
    };
    let [a, b] = known else { return None };
    if op != &arith::ADD {
        return None;
    }
    let both = shown(a)?.and(shown(b)?)?;
    Some(Element::Either(both, 0.0, f64::NEG_INFINITY))
}

fn on_numbers(op: &OpDef, x: &[f64]) -> Option<f64> {
    let truth = |b: bool| Some(f64::from(u8::from(b)));
    match x {
        [a] if op == &arith::NEG => Some(-a),
        [a] if op == &arith::ABS => Some(a.abs()),
        [a] if op == &math::SQRT => Some(a.sqrt()),
        [a] if op == &math::RECIPROCAL => Some(1.0 / a),
        [a] if op == &logic::IS_NAN => truth(a.is_nan()),
        [a, b] if op == &arith::ADD => Some(a + b),
        [a, b] if op == &arith::SUB => Some(a - b),
        [a, b] if op == &arith::MUL => Some(a * b),
        [a, b] if op == &arith::DIV => Some(a / b),
        [a, b] if op == &power::POW => Some(a.powf(*b)),
        [a, b] if op == &extreme::MIN => Some(a.min(*b)),
        [a, b] if op == &extreme::MAX => Some(a.max(*b)),
        [a, b] if op == &logic::EQUAL => truth(a == b),
        [a, b] if op == &logic::LESS => truth(a < b),
        [a, b] if op == &logic::LESS_OR_EQUAL => truth(a <= b),
        [a, b] if op == &logic::GREATER => truth(a > b),
        [a, b] if op == &logic::GREATER_OR_EQUAL => truth(a >= b),
        _ => None,
    }
}
