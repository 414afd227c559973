//! What a call of an op is made of, and short names that the lists of calls share.

use crate::ir::op::{Domain, Grad, OpDef};
use crate::ir::{Attrs, DType, Tensor};
use crate::ops;
use crate::testing::Random;

/// Recipes, one a line: `Op results (operands) with [attributes];`.
macro_rules! recipes {
    (@attrs) => { &[] };
    (@attrs [$($attr:expr),*]) => { &[$($attr),*] };
    (@attrs $name:ident) => { &$name };
    ($($op:ident $outs:literal ($($in:expr),*) $(with $attrs:tt)?;)*) => {
        &[$(r(stringify!($op), $outs, &[$($in),*], recipes!(@attrs $($attrs)?))),*]
    };
}
pub(super) use recipes;

/// One operand of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum In {
    /// An optional operand that is not given.
    Not,
    /// Floating point of the shape, anything but 0 and no two alike: no kink and no tie is near.
    Real(&'static [i64]),
    /// The same, above 0.
    Positive(&'static [i64]),
    /// The same, above 1.
    Large(&'static [i64]),
    /// Above 0, and every row of the last axis sums to 1: the result of a softmax.
    Truth(&'static [i64]),
    /// Constant int64 contents of a vector or, with no dims, of a scalar.
    Ints(&'static [i64]),
    /// A constant int64 scalar.
    Int(i64),
    /// Constant int64 contents of any shape.
    Table(&'static [i64], &'static [i64]),
    /// Constant uint8 contents of any shape.
    Bytes(&'static [i64], &'static [i64]),
    /// Constants 0.5, -1, 1.5, …, of type float8e4m3fn.
    Float8(&'static [i64]),
    /// Constant bfloat16 zeros.
    Narrow(&'static [i64]),
    /// Constants 1.5, 2.5, …, in float32 for 16-bit types.
    Scales(&'static [i64]),
    /// Constant booleans.
    Bools(&'static [i64], &'static [i64]),
    /// A constant floating-point scalar.
    Scalar(f64),
}

/// An attribute of a call.
#[derive(Clone, Copy, Debug)]
pub enum Set {
    /// An integer.
    I(i64),
    /// A float32 number.
    F(f32),
    /// A string.
    S(&'static str),
    /// A list of integers.
    L(&'static [i64]),
    /// An element type.
    D(DType),
    /// A float64-or-narrower scalar in a one-element tensor of the model's type.
    T(f64),
}

/// One call of an op.
#[derive(Clone, Copy, Debug)]
pub struct Recipe {
    /// The name of the op.
    pub op: &'static str,
    /// Results asked for.
    pub outs: usize,
    /// Operands, in the order of the op's slots.
    pub ins: &'static [In],
    /// Attributes with their names; the rest have their defaults.
    pub attrs: &'static [(&'static str, Set)],
}

impl Recipe {
    /// Returns the definition of the op, if there is one with this name.
    pub fn row(&self) -> Option<&'static OpDef> {
        ops::find(self.op)
    }

    /// Whether a training graph can be made of it whose sizes a plan can know. Gradients too: a model that takes them
    /// itself is trained as any other.
    pub fn is_trainable(&self) -> bool {
        let is_sized = !matches!(self.op, "Range" | "NonZero");
        is_sized
            && self.row().is_some_and(|op| match op.grad {
                Grad::Body => true,
                Grad::Missing(_) => false,
                _ => op.domain != Domain::Ckpt,
            })
    }

    /// The attributes, tensors of `dtype`.
    pub fn attrs(&self, dtype: DType) -> Attrs {
        self.attrs
            .iter()
            .fold(Attrs::new(), |a, (name, set)| match *set {
                Set::I(v) => a.with(name, v),
                Set::F(v) => a.with(name, v),
                Set::S(v) => a.with(name, v),
                Set::L(v) => a.with(name, v.to_vec()),
                Set::D(v) => a.with(name, v),
                Set::T(v) => {
                    let mut t = Tensor::scalar(dtype, v);
                    t.dims = vec![1];
                    let mut a = a;
                    a.set(name, crate::ir::Attr::Tensor(t));
                    a
                }
            })
    }
}

/// Contents for a floating-point operand, row-major; `None` for the others.
///
/// Magnitudes lie between 0.3 and 1.3 and no two are closer than 0.4/n; `shift` sets operands of one call apart.
pub fn contents(of: In, r: &mut Random, shift: usize) -> Option<Vec<f64>> {
    let (dims, signed) = match of {
        In::Real(dims) => (dims, true),
        In::Positive(dims) | In::Large(dims) | In::Truth(dims) => (dims, false),
        _ => return None,
    };
    let n = dims.iter().product::<i64>() as usize;
    let mut ranks: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        ranks.swap(i, r.below(i + 1));
    }
    let mut values: Vec<f64> = ranks
        .into_iter()
        .map(|k| {
            let v = 0.3 + (k as f64 + 0.1 + 0.13 * (shift % 6) as f64) / n.max(1) as f64;
            let v = if matches!(of, In::Large(_)) {
                v + 1.0
            } else {
                v
            };
            if signed && r.below(2) == 0 { -v } else { v }
        })
        .collect();
    if let In::Truth(dims) = of {
        let row = dims.last().map_or(1, |d| *d as usize).max(1);
        for chunk in values.chunks_mut(row) {
            let sum: f64 = chunk.iter().sum();
            chunk.iter_mut().for_each(|v| *v /= sum);
        }
    }
    Some(values)
}

/// Returns a recipe.
pub const fn r(
    op: &'static str,
    outs: usize,
    ins: &'static [In],
    attrs: &'static [(&'static str, Set)],
) -> Recipe {
    Recipe {
        op,
        outs,
        ins,
        attrs,
    }
}

pub const S: &[i64] = &[];
pub const V3: &[i64] = &[3];
pub const V4: &[i64] = &[4];
pub const M23: &[i64] = &[2, 3];
pub const M34: &[i64] = &[3, 4];
pub const M24: &[i64] = &[2, 4];
pub const M13: &[i64] = &[1, 3];
pub const C234: &[i64] = &[2, 3, 4];
