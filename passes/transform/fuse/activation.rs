//! GELU in both forms, SiLU and SwiGLU out of their parts.
//!
//! A GELU is found from its `Erf` or `Tanh`: one is added, the sum meets the operand and ½ in products in any order, and
//! what went in must be the right polynomial of that operand: x/√2, or √(2/π)·(x + 0.044715·x³), in any spelling
//! (Hendrycks and Gimpel 2016, arXiv 1606.08415). So a polynomial with other numbers is no GELU.

use super::{Found, Pattern};
use crate::analysis::matcher::Reading;
use crate::error::Result;
use crate::ir::{Attrs, Builder, Node, NodeId, ValueId};
use crate::ops::{activation, arith, cast, gated, math, power, shape};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Longest chain of products behind the gate of a GELU, deepest polynomial in it.
const MAX_STEPS: usize = 6;
/// Constants are written with seven digits or more, if their type has as many.
const TOLERANCE: f64 = 1e-6;
/// How many rounded constants are multiplied into one number of the polynomial.
const FACTORS: f64 = 2.0;

pub enum Activation {
    Gelu { x: ValueId, tanh: bool },
    Silu { x: ValueId },
    SwiGlu { gate: ValueId, up: ValueId },
}

impl Pattern for Activation {
    fn operands(&mut self) -> Vec<&mut ValueId> {
        match self {
            Activation::Gelu { x, .. } | Activation::Silu { x } => vec![x],
            Activation::SwiGlu { gate, up } => vec![gate, up],
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Activation::Gelu { .. } => "GELUs",
            Activation::Silu { .. } => "SiLUs",
            Activation::SwiGlu { .. } => "SwiGLUs",
        }
    }

    fn build(self, b: &mut Builder) -> Result<ValueId> {
        match self {
            Activation::Gelu { x, tanh } => {
                let how = if tanh { "tanh" } else { "none" };
                b.emit(
                    &activation::GELU,
                    &[x],
                    Attrs::new().with("approximate", how),
                )
            }
            Activation::Silu { x } => b.emit(&gated::SILU, &[x], Attrs::new()),
            Activation::SwiGlu { gate, up } => b.emit(&gated::SWIGLU, &[gate, up], Attrs::new()),
        }
    }
}

/// All activations, in order.
pub fn find(reading: &mut Reading) -> Vec<Found<Activation>> {
    let nodes = &reading.flow.nodes;
    nodes
        .iter()
        .filter_map(|id| gelu(reading, *id).or_else(|| silu(reading, *id)))
        .collect()
}

fn gelu(r: &mut Reading, id: NodeId) -> Option<Found<Activation>> {
    let graph = r.graph;
    let node = graph.node(id);
    let tanh = node.op == &activation::TANH;
    if !tanh && node.op != &math::ERF {
        return None;
    }
    let inner = node.ins[0]?;
    if !r.is_inner(inner) {
        return None;
    }
    // 1 + erf(…)
    let sum = graph.node(r.sole_use(node.outs[0])?.node);
    let other = other_operand(sum, node.outs[0])?;
    let shape = &graph.ty(inner).dims;
    if sum.op != &arith::ADD
        || r.elements.number(other)? != 1.0
        || graph.ty(sum.outs[0]).dims != *shape
    {
        return None;
    }
    let wanted = if tanh {
        let beta = FRAC_1_SQRT_2 * FRAC_2_SQRT_PI;
        [0.0, beta, 0.0, 0.044715 * beta]
    } else {
        [0.0, FRAC_1_SQRT_2, 0.0, 0.0]
    };
    let dtype = graph.ty(inner).dtype;
    let tolerance = TOLERANCE.max(FACTORS * dtype.roundoff());
    let mut v = sum.outs[0];
    let mut factor = 1.0;
    let mut met: Option<ValueId> = None;
    for _ in 0..MAX_STEPS {
        let next = graph.node(r.sole_use(v)?.node);
        if let Some((x, by)) = r.scaled(next)
            && x == v
        {
            factor *= by;
        } else if next.op == &arith::MUL && met.is_none() {
            let x = other_operand(next, v)?;
            if graph.ty(x).dims != *shape || graph.ty(next.outs[0]).dims != *shape {
                return None;
            }
            met = Some(x);
        } else {
            return None;
        }
        v = next.outs[0];
        let Some(x) = met else { continue };
        // The factor may stand on the operand.
        let mut candidates = vec![(x, factor)];
        if let Some((_, made)) = r.made_by(x)
            && r.is_inner(x)
            && let Some((bare, by)) = r.scaled(made)
        {
            candidates.push((bare, factor * by));
        }
        for (x, factor) in candidates {
            // ½ has no rounding in any type.
            let half = (factor - 0.5).abs() <= TOLERANCE;
            let is_near = |p: Polynomial| near(&p, &wanted, tolerance);
            if half && polynomial(r, inner, x, 0).is_some_and(is_near) {
                return Some(Found {
                    output: v,
                    what: Activation::Gelu { x, tanh },
                });
            }
        }
    }
    None
}

fn silu(r: &mut Reading, id: NodeId) -> Option<Found<Activation>> {
    let graph = r.graph;
    let node = graph.node(id);
    if node.op != &activation::SIGMOID {
        return None;
    }
    let x = node.ins[0]?;
    let product = graph.node(r.sole_use(node.outs[0])?.node);
    if product.op != &arith::MUL || other_operand(product, node.outs[0])? != x {
        return None;
    }
    let y = product.outs[0];
    // A gate is worth more than its silu alone: nothing between is kept.
    let gated = r.sole_use(y).and_then(|u| {
        let next = graph.node(u.node);
        let up = other_operand(next, y)?;
        let alike = graph.ty(up).dims == graph.ty(y).dims && r.flow.active[up];
        (next.op == &arith::MUL && alike).then_some((next.outs[0], up))
    });
    Some(match gated {
        Some((output, up)) => Found {
            output,
            what: Activation::SwiGlu { gate: x, up },
        },
        None => Found {
            output: y,
            what: Activation::Silu { x },
        },
    })
}

/// The operand of a binary node beside `v`; `None` where both are `v`.
fn other_operand(node: &Node, v: ValueId) -> Option<ValueId> {
    match node.ins.as_slice() {
        [Some(a), Some(b)] if *a == v && *b != v => Some(*b),
        [Some(a), Some(b)] if *b == v && *a != v => Some(*a),
        _ => None,
    }
}

type Polynomial = [f64; 4];

fn near(a: &Polynomial, b: &Polynomial, tolerance: f64) -> bool {
    a.iter()
        .zip(b)
        .all(|(x, y)| (x - y).abs() <= tolerance * y.abs().max(TOLERANCE))
}

/// `v` as a polynomial of `x`, by its coefficients; `None` where it is none, or of too high a degree.
fn polynomial(r: &mut Reading, v: ValueId, x: ValueId, depth: usize) -> Option<Polynomial> {
    if v == x {
        return Some([0.0, 1.0, 0.0, 0.0]);
    }
    if r.graph.ty(v).elements().is_one()
        && let Some(c) = r.elements.number(v)
    {
        return Some([c, 0.0, 0.0, 0.0]);
    }
    if depth > MAX_STEPS {
        return None;
    }
    let (_, node) = r.made_by(v)?;
    let a = polynomial(r, node.ins[0]?, x, depth + 1)?;
    if node.op == &shape::IDENTITY || node.op == &cast::CAST {
        return Some(a);
    }
    if node.op == &arith::NEG {
        return Some(a.map(|c| -c));
    }
    let second = node.ins.get(1).copied().flatten()?;
    if node.op == &power::POW {
        let mut power = [1.0, 0.0, 0.0, 0.0];
        let exponent = r.elements.number(second)?;
        if !matches!(exponent, 1.0 | 2.0 | 3.0) {
            return None;
        }
        for _ in 0..exponent as usize {
            power = product(&power, &a)?;
        }
        return Some(power);
    }
    let b = polynomial(r, second, x, depth + 1)?;
    let joined = |f: fn(f64, f64) -> f64| std::array::from_fn(|i| f(a[i], b[i]));
    if node.op == &arith::ADD {
        Some(joined(|p, q| p + q))
    } else if node.op == &arith::SUB {
        Some(joined(|p, q| p - q))
    } else if node.op == &arith::MUL {
        product(&a, &b)
    } else if node.op == &arith::DIV && b[1..] == [0.0; 3] {
        Some(a.map(|c| c / b[0]))
    } else {
        None
    }
}

fn product(a: &Polynomial, b: &Polynomial) -> Option<Polynomial> {
    let mut out = [0.0; 4];
    for (i, x) in a.iter().enumerate() {
        for (j, y) in b.iter().enumerate() {
            match out.get_mut(i + j) {
                Some(c) => *c += x * y,
                None if x * y == 0.0 => {}
                None => return None,
            }
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use crate::ops::activation;
    use crate::text;
    use crate::transform::fuse::fuse;

    /// GELU in its parts, with that number as the factor of the cube.
    fn model(dtype: &str, cube: f64) -> String {
        format!(
            "graph @g typed (%x: {dtype}[4]) -> (%y) {{
  init %w : {dtype}[4] = [1, 2, 3, 4]
  init %three : {dtype}[] = 3
  init %cube : {dtype}[] = {cube}
  init %beta : {dtype}[] = 0.7978845608028654
  init %one : {dtype}[] = 1
  init %half : {dtype}[] = 0.5
  %v = Mul %x, %w : {dtype}[4]
  %p = Pow %v, %three : {dtype}[4]
  %q = Mul %p, %cube : {dtype}[4]
  %r = Add %v, %q : {dtype}[4]
  %s = Mul %r, %beta : {dtype}[4]
  %t = Tanh %s : {dtype}[4]
  %u = Add %t, %one : {dtype}[4]
  %h = Mul %v, %half : {dtype}[4]
  %y = Mul %h, %u : {dtype}[4]
}}
"
        )
    }

    fn is_fused(dtype: &str, cube: f64) -> bool {
        let mut g = text::parse(&model(dtype, cube)).unwrap();
        fuse(&mut g).unwrap();
        g.order().iter().any(|n| g.node(*n).op == &activation::GELU)
    }

    #[test]
    fn constants_are_as_exact_as_their_type() {
        for dtype in ["f64", "f32", "f16", "bf16"] {
            assert!(is_fused(dtype, 0.044715), "{dtype}");
            assert!(!is_fused(dtype, 0.0452), "{dtype}");
        }
        assert!(!is_fused("f32", 0.04472) && !is_fused("f16", 0.0448));
    }
}
