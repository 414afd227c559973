//! Fuses GELU in both forms, SiLU and SwiGLU.
//!
//! The search for a GELU starts at its `Erf` or `Tanh`. One is added, and the sum meets the operand and ½ in products in
//! any order. The argument must be the right polynomial of that operand, in any spelling: x/√2, or
//! √(2/π)·(x + 0.044715·x³) (Hendrycks and Gimpel 2016, arXiv 1606.08415). A polynomial with other numbers is no GELU.

use super::pattern::{Found, Pattern};
use crate::analysis::matcher::{Matcher, other_operand};
use crate::error::Result;
use crate::ir::{Attrs, NodeId, ValueId};
use crate::ops::{Builder, EmitExt, activation, arith, cast, gated, math, power, shape};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Longest chain of products behind the gate of a GELU, and deepest polynomial in it.
const MAX_STEPS: usize = 6;
/// Constants are written with seven digits or more, if their type has as many.
const TOLERANCE: f64 = 1e-6;
/// Number of rounded constants that are multiplied into one coefficient of the polynomial.
const FACTORS: f64 = 2.0;

enum Activation {
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

    fn plural(&self) -> &'static str {
        match self {
            Activation::Gelu { .. } => "GELUs",
            Activation::Silu { .. } => "SiLUs",
            Activation::SwiGlu { .. } => "SwiGLUs",
        }
    }

    fn build(self: Box<Self>, b: &mut Builder) -> Result<ValueId> {
        match *self {
            Activation::Gelu { x, tanh } => {
                let how = if tanh { "tanh" } else { "none" };
                let attrs = Attrs::new().with("approximate", how);
                b.emit(&activation::GELU, &[x], attrs)
            }
            Activation::Silu { x } => b.emit(&gated::SILU, &[x], Attrs::new()),
            Activation::SwiGlu { gate, up } => b.emit(&gated::SWIGLU, &[gate, up], Attrs::new()),
        }
    }
}

/// Returns the activation whose `Erf`, `Tanh` or `Sigmoid` a node is.
pub(super) fn find(m: &mut Matcher, id: NodeId) -> Option<Found> {
    gelu(m, id).or_else(|| silu(m, id))
}

fn gelu(m: &mut Matcher, id: NodeId) -> Option<Found> {
    let graph = m.graph;
    let node = graph.node(id);
    let tanh = node.op == &activation::TANH;
    if !tanh && node.op != &math::ERF {
        return None;
    }
    let inner = node.ins[0]?;
    if !m.is_inner(inner) {
        return None;
    }
    // 1 + erf(…)
    let sum = m.sole_reader(node.outs[0])?;
    let other = other_operand(sum, node.outs[0])?;
    let shape = &graph.ty(inner).dims;
    if sum.op != &arith::ADD
        || m.elements.number(other)? != 1.0
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
        let next = m.sole_reader(v)?;
        if let Some((x, by)) = m.scaled(next)
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
        if let Some((_, made)) = m.producer(x)
            && m.is_inner(x)
            && let Some((bare, by)) = m.scaled(made)
        {
            candidates.push((bare, factor * by));
        }
        for (x, factor) in candidates {
            // ½ is exact in every type.
            let is_half = (factor - 0.5).abs() <= TOLERANCE;
            let is_near = |p: Polynomial| near(&p, &wanted, tolerance);
            if is_half && polynomial(m, inner, x, 0).is_some_and(is_near) {
                return Some(Found::new(v, Activation::Gelu { x, tanh }));
            }
        }
    }
    None
}

fn silu(m: &mut Matcher, id: NodeId) -> Option<Found> {
    let graph = m.graph;
    let node = graph.node(id);
    if node.op != &activation::SIGMOID {
        return None;
    }
    let x = node.ins[0]?;
    let product = m.sole_reader(node.outs[0])?;
    if product.op != &arith::MUL || other_operand(product, node.outs[0])? != x {
        return None;
    }
    let y = product.outs[0];
    // A SwiGLU saves more than its SiLU alone: nothing between is kept.
    let gated = m.sole_reader(y).and_then(|next| {
        let up = other_operand(next, y)?;
        let alike = graph.ty(up).dims == graph.ty(y).dims && m.flow.active[up];
        (next.op == &arith::MUL && alike).then_some((next.outs[0], up))
    });
    Some(match gated {
        Some((output, up)) => Found::new(output, Activation::SwiGlu { gate: x, up }),
        None => Found::new(y, Activation::Silu { x }),
    })
}

/// Coefficients, the constant first.
type Polynomial = [f64; 4];

fn near(a: &Polynomial, b: &Polynomial, tolerance: f64) -> bool {
    a.iter()
        .zip(b)
        .all(|(x, y)| (x - y).abs() <= tolerance * y.abs().max(TOLERANCE))
}

/// Returns `v` as a polynomial of `x`; `None` where it is none, or of too high a degree.
fn polynomial(m: &mut Matcher, v: ValueId, x: ValueId, depth: usize) -> Option<Polynomial> {
    if v == x {
        return Some([0.0, 1.0, 0.0, 0.0]);
    }
    if m.graph.ty(v).elements().is_one()
        && let Some(c) = m.elements.number(v)
    {
        return Some([c, 0.0, 0.0, 0.0]);
    }
    if depth > MAX_STEPS {
        return None;
    }
    let (_, node) = m.producer(v)?;
    let a = polynomial(m, node.ins[0]?, x, depth + 1)?;
    if node.op == &shape::IDENTITY || node.op == &cast::CAST {
        return Some(a);
    }
    if node.op == &arith::NEG {
        return Some(a.map(|c| -c));
    }
    let second = node.operand(1)?;
    if node.op == &power::POW {
        let exponent = m.elements.number(second)?;
        if !matches!(exponent, 1.0 | 2.0 | 3.0) {
            return None;
        }
        let one = [1.0, 0.0, 0.0, 0.0];
        return (0..exponent as usize).try_fold(one, |power, _| product(&power, &a));
    }
    let b = polynomial(m, second, x, depth + 1)?;
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

/// Returns a product of polynomials; `None` where its degree is above 3.
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
