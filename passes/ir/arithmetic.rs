//! The arithmetic of ops on single elements, from which kernels for chains of ops are generated.
//!
//! A row states each result as an [`Expr`]. A [`Program`] joins the expressions of several nodes; a CUDA kernel is generated from
//! it, and [`Program::evaluate`] computes the same on a CPU. Everything is computed in float32. A result of a 16-bit type is
//! rounded where the node's own kernel rounds it.

mod evaluate;
mod program;

pub use evaluate::{Elements, Functions};
pub use program::{Program, Source, Step};

use super::attr::Attrs;
use super::ty::{DType, Ty};
use std::ops;

/// An exact function of up to three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a · b.
    Mul,
    /// a / b.
    Div,
    /// −a.
    Neg,
    /// |a|.
    Abs,
    /// The larger one, or NaN if one is.
    Max,
    /// The smaller one, or NaN if one is.
    Min,
    /// 1 where a < b, else 0.
    Less,
    /// 1 where a ≤ b, else 0.
    LessOrEqual,
    /// 1 where a = b, else 0.
    Equal,
    /// b where a is not 0, else c.
    Select,
}

/// What a generator knows about an [`Op`].
pub struct OpRow {
    /// The op.
    pub op: Op,
    /// The name in a program's text.
    pub name: &'static str,
    /// The number of operands.
    pub arity: usize,
    /// The expression in CUDA C++, with `$0`, `$1` and `$2` for the operands.
    pub cuda: &'static str,
    /// The function.
    pub run: fn([f32; 3]) -> f32,
}

const fn row(
    op: Op,
    name: &'static str,
    arity: usize,
    cuda: &'static str,
    run: fn([f32; 3]) -> f32,
) -> OpRow {
    OpRow {
        op,
        name,
        arity,
        cuda,
        run,
    }
}

fn truth(holds: bool) -> f32 {
    if holds { 1.0 } else { 0.0 }
}

/// All ops, in the order of [`Op`].
#[rustfmt::skip]
pub const OPS: [OpRow; 12] = [
    row(Op::Add, "add", 2, "$0 + $1", |[a, b, _]| a + b),
    row(Op::Sub, "sub", 2, "$0 - $1", |[a, b, _]| a - b),
    row(Op::Mul, "mul", 2, "$0 * $1", |[a, b, _]| a * b),
    row(Op::Div, "div", 2, "$0 / $1", |[a, b, _]| a / b),
    row(Op::Neg, "neg", 1, "-$0", |[a, _, _]| -a),
    row(Op::Abs, "abs", 1, "fabsf($0)", |[a, _, _]| a.abs()),
    row(Op::Max, "max", 2, "$0 != $0 ? $0 : $1 != $1 ? $1 : fmaxf($0, $1)", |[a, b, _]| if a.is_nan() || a > b { a } else { b }),
    row(Op::Min, "min", 2, "$0 != $0 ? $0 : $1 != $1 ? $1 : fminf($0, $1)", |[a, b, _]| if a.is_nan() || a < b { a } else { b }),
    row(Op::Less, "less", 2, "$0 < $1 ? 1.0f : 0.0f", |[a, b, _]| truth(a < b)),
    row(Op::LessOrEqual, "less_or_equal", 2, "$0 <= $1 ? 1.0f : 0.0f", |[a, b, _]| truth(a <= b)),
    row(Op::Equal, "equal", 2, "$0 == $1 ? 1.0f : 0.0f", |[a, b, _]| truth(a == b)),
    row(Op::Select, "select", 3, "$0 != 0.0f ? $1 : $2", |[a, b, c]| if a != 0.0 { b } else { c }),
];

impl Op {
    /// Returns what generators know about the op.
    pub fn row(self) -> &'static OpRow {
        &OPS[self as usize]
    }
}

/// Functions of one number that differ between libraries in the last bit, with their names in CUDA.
pub const LIBRARY: [(&str, &str); 8] = [
    ("exp", "expf"),
    ("log", "logf"),
    ("tanh", "tanhf"),
    ("erf", "erff"),
    ("sin", "sinf"),
    ("cos", "cosf"),
    ("sqrt", "sqrtf"),
    ("rsqrt", "rsqrtf"),
];

/// One element of a result.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The operand at the index of the result, broadcast. An operand of half the last axis serves both halves.
    Operand(usize),
    /// The operand at the same place in the other half of the last axis.
    Partner(usize),
    /// 1 in the first half of the last axis, else 0.
    FirstHalf,
    /// The size of the last axis.
    RowLength,
    /// A number.
    Number(f32),
    /// An exact function.
    Apply(Op, Vec<Expr>),
    /// Rounded to the type of the op's first result.
    Round(Box<Expr>),
    /// The sum over the last axis.
    RowSum(Box<Expr>),
    /// A whole result that is the sum over the axes along which it is smaller than the first one. Its terms are added in
    /// float32, by a node of their own.
    SumToResult(Box<Expr>),
    /// A function that libraries compute as one, with its arithmetic. A function of [`LIBRARY`] has none.
    Call(&'static str, Vec<Expr>, Option<Box<Expr>>),
}

/// The operand in slot `i` at the index of the result.
pub fn x(i: usize) -> Expr {
    Expr::Operand(i)
}

/// A number, rounded to float32.
pub fn number(value: f64) -> Expr {
    Expr::Number(value as f32)
}

/// A function that rounds exactly.
pub fn apply<const N: usize>(op: Op, operands: [Expr; N]) -> Expr {
    Expr::Apply(op, operands.into())
}

/// A function of [`LIBRARY`].
pub fn library(name: &'static str, operand: Expr) -> Expr {
    Expr::Call(name, vec![operand], None)
}

/// A function that libraries compute as one: `arithmetic` says what it computes.
pub fn call<const N: usize>(name: &'static str, operands: [Expr; N], arithmetic: Expr) -> Expr {
    Expr::Call(name, operands.into(), Some(Box::new(arithmetic)))
}

/// `a` where `condition` is not 0, else `b`.
pub fn select(condition: Expr, a: Expr, b: Expr) -> Expr {
    apply(Op::Select, [condition, a, b])
}

impl Expr {
    /// The value rounded to the type of the op's first result.
    pub fn round(self) -> Expr {
        Expr::Round(Box::new(self))
    }

    /// The mean over the last axis.
    pub fn row_mean(self) -> Expr {
        Expr::RowSum(Box::new(self)) / Expr::RowLength
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident;)+) => {$(
        impl ops::$trait for Expr {
            type Output = Expr;
            fn $method(self, other: Expr) -> Expr {
                apply(Op::$op, [self, other])
            }
        }
    )+};
}
operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
}

impl ops::Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        apply(Op::Neg, [self])
    }
}

/// What a row knows when it states its arithmetic.
pub struct ScalarCx<'a> {
    /// Attributes of the node.
    pub attrs: &'a Attrs,
    /// Types of the operands; `None` for one that is not given.
    pub ins: &'a [Option<&'a Ty>],
    /// Types of the results.
    pub outs: &'a [&'a Ty],
}

impl ScalarCx<'_> {
    /// Returns whether the attribute `axis`, where an op's rows begin, names the last axis of operand `slot`.
    pub fn is_last_axis(&self, slot: usize) -> bool {
        let rank = self.ins[slot].map_or(0, Ty::rank) as i64;
        rank > 0 && [-1, rank - 1].contains(&self.attrs.int("axis"))
    }
}

/// Returns whether elements of a type are computed in float32 without loss.
pub fn is_scalar_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Bool)
}

/// The rule of ops whose results are no arithmetic on elements.
pub fn no_scalar(_: &ScalarCx) -> Option<Vec<Expr>> {
    None
}
