//! Formulas over values of a graph, written with operators: `dy * (1.0 - y * y)`.
//!
//! [`Expr`] is a tree that is not in the graph yet. [`Formulas::eval`] emits it: operands from left to right, inner
//! formulas before outer ones, and constants right before the node that reads them. [`Term`] is a value of the graph
//! that formulas can read any number of times.

use super::EmitExt;
use crate::names::*;
use ckpt_ir::error::Result;
use ckpt_ir::op::{BodyCx, GradCx, OpDef, OpRef};
use ckpt_ir::{Attrs, DType, Emit, ValueId};
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A value of the graph, as part of a formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term(pub ValueId);

/// A formula that can be emitted.
#[derive(Clone, Debug)]
pub enum Expr {
    /// A value of the graph.
    Value(ValueId),
    /// A scalar constant of the element type of the last operand beside it that is no constant.
    Number(f64),
    /// A node with one result.
    Node(OpRef, Vec<Expr>, Attrs),
    /// A conversion, left out where the element type is that already.
    Cast(Box<Expr>, DType),
}

impl From<Term> for ValueId {
    fn from(term: Term) -> ValueId {
        term.0
    }
}

impl From<Term> for Expr {
    fn from(term: Term) -> Expr {
        Expr::Value(term.0)
    }
}

impl From<ValueId> for Expr {
    fn from(value: ValueId) -> Expr {
        Expr::Value(value)
    }
}

impl From<f64> for Expr {
    fn from(number: f64) -> Expr {
        Expr::Number(number)
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident, $row:ident) => {
        impl<R: Into<Expr>> $trait<R> for Expr {
            type Output = Expr;
            fn $method(self, right: R) -> Expr {
                binary_op(&$row, self, right)
            }
        }
        impl<R: Into<Expr>> $trait<R> for Term {
            type Output = Expr;
            fn $method(self, right: R) -> Expr {
                binary_op(&$row, self, right)
            }
        }
        impl $trait<Expr> for f64 {
            type Output = Expr;
            fn $method(self, right: Expr) -> Expr {
                binary_op(&$row, self, right)
            }
        }
        impl $trait<Term> for f64 {
            type Output = Expr;
            fn $method(self, right: Term) -> Expr {
                binary_op(&$row, self, right)
            }
        }
    };
}
operator!(Add, add, ADD);
operator!(Sub, sub, SUB);
operator!(Mul, mul, MUL);
operator!(Div, div, DIV);

impl Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        unary_op(NEG, self)
    }
}

impl Neg for Term {
    type Output = Expr;
    fn neg(self) -> Expr {
        unary_op(NEG, self)
    }
}

/// `op(x)`.
pub fn unary_op(op: impl Into<OpRef>, x: impl Into<Expr>) -> Expr {
    Expr::Node(op.into(), vec![x.into()], Attrs::new())
}

/// `op(a, b)`.
pub fn binary_op(op: impl Into<OpRef>, a: impl Into<Expr>, b: impl Into<Expr>) -> Expr {
    Expr::Node(op.into(), vec![a.into(), b.into()], Attrs::new())
}

/// `yes` where the condition holds, `no` elsewhere.
pub fn select(condition: impl Into<Expr>, yes: impl Into<Expr>, no: impl Into<Expr>) -> Expr {
    let operands = vec![condition.into(), yes.into(), no.into()];
    Expr::Node((&WHERE).into(), operands, Attrs::new())
}

/// `x` converted to `dtype`.
pub fn cast(x: impl Into<Expr>, dtype: DType) -> Expr {
    Expr::Cast(Box::new(x.into()), dtype)
}

/// Emits formulas; gradient and body contexts do so through their builder.
pub trait Formulas {
    /// Returns the graph that formulas are emitted into.
    fn emitter(&mut self) -> &mut dyn Emit;

    /// Emits a formula and returns its value.
    ///
    /// # Errors
    /// What typing refuses.
    fn eval(&mut self, formula: impl Into<Expr>) -> Result<ValueId> {
        emit_expr(self.emitter(), formula.into())
    }

    /// Emits a formula that other formulas read.
    ///
    /// # Errors
    /// What typing refuses.
    fn bind(&mut self, formula: impl Into<Expr>) -> Result<Term> {
        self.eval(formula).map(Term)
    }

    /// A scalar constant of the element type of `like`.
    fn number(&mut self, like: Term, value: f64) -> Term {
        let b = self.emitter();
        let dtype = b.ty(like.0).dtype;
        Term(b.scalar(dtype, value))
    }

    /// `x` in the type that kernels compute in: float32 for the 16-bit types.
    ///
    /// # Errors
    /// What typing refuses.
    fn widened(&mut self, x: ValueId) -> Result<Term> {
        self.emitter().widen(x).map(Term)
    }
}

impl Formulas for dyn Emit + '_ {
    fn emitter(&mut self) -> &mut dyn Emit {
        self
    }
}

impl Formulas for GradCx<'_> {
    fn emitter(&mut self) -> &mut dyn Emit {
        self.b
    }
}

impl Formulas for BodyCx<'_> {
    fn emitter(&mut self) -> &mut dyn Emit {
        self.b
    }
}

/// Operands, results and cotangents of the node that a gradient rule differentiates, as terms.
pub trait GradTerms {
    /// Operand `i`, which the op requires.
    fn operand(&self, i: usize) -> Term;

    /// Result `i`.
    fn result(&self, i: usize) -> Term;

    /// The cotangent of the only result.
    fn cotangent(&self) -> Term;

    /// Emits the gradient of operand `i`.
    ///
    /// # Errors
    /// What typing refuses.
    fn give_expr(&mut self, i: usize, gradient: impl Into<Expr>) -> Result<()>;

    /// Emits the gradient of operand `i` and sums it down to the operand's shape where that was broadcast.
    ///
    /// # Errors
    /// What typing refuses.
    fn give_summed(&mut self, i: usize, gradient: impl Into<Expr>) -> Result<()>;
}

impl GradTerms for GradCx<'_> {
    fn operand(&self, i: usize) -> Term {
        Term(self.x(i))
    }

    fn result(&self, i: usize) -> Term {
        Term(self.y(i))
    }

    fn cotangent(&self) -> Term {
        Term(self.dy0())
    }

    fn give_expr(&mut self, i: usize, gradient: impl Into<Expr>) -> Result<()> {
        let gradient = self.eval(gradient)?;
        self.give(i, gradient);
        Ok(())
    }

    fn give_summed(&mut self, i: usize, gradient: impl Into<Expr>) -> Result<()> {
        let gradient = self.eval(gradient)?;
        let summed = self.b.sum_to(gradient, self.x(i))?;
        self.give(i, summed);
        Ok(())
    }
}

/// Emits `op(x, dy)` with the attributes of the node that is differentiated: the gradient of a function of each element.
///
/// # Errors
/// What typing refuses.
pub fn with_own_attrs(cx: &mut GradCx, op: &'static OpDef) -> Result<ValueId> {
    let attrs = cx.attrs();
    cx.b.emit(op, &[cx.x(0), cx.dy0()], attrs)
}

/// Operands of the op whose body is built, in the type that kernels compute in.
///
/// # Errors
/// What typing refuses.
pub fn wide<const N: usize>(cx: &mut BodyCx) -> Result<[Term; N]> {
    let mut terms = [Term(cx.x(0)); N];
    for (i, term) in terms.iter_mut().enumerate() {
        *term = cx.widened(cx.x(i))?;
    }
    Ok(terms)
}

/// The only result of a body, converted to the first operand's element type.
///
/// # Errors
/// What typing refuses.
pub fn narrow(cx: &mut BodyCx, result: impl Into<Expr>) -> Result<Vec<ValueId>> {
    narrow_as(cx, 0, result)
}

/// The only result of a body, converted to the element type of operand `slot`.
///
/// # Errors
/// What typing refuses.
pub fn narrow_as(cx: &mut BodyCx, slot: usize, result: impl Into<Expr>) -> Result<Vec<ValueId>> {
    let result = cx.eval(result)?;
    let dtype = cx.ty(cx.x(slot)).dtype;
    Ok(vec![cx.b.cast(result, dtype)?])
}

fn emit_expr(b: &mut dyn Emit, formula: Expr) -> Result<ValueId> {
    match formula {
        Expr::Value(v) => Ok(v),
        Expr::Number(_) => unreachable!("a constant has its type from the operand beside it"),
        Expr::Cast(x, dtype) => {
            let x = emit_expr(b, *x)?;
            b.cast(x, dtype)
        }
        Expr::Node(op, operands, attrs) => {
            let mut ins = Vec::with_capacity(operands.len());
            for operand in operands {
                ins.push(match operand {
                    Expr::Number(n) => Err(n),
                    other => Ok(emit_expr(b, other)?),
                });
            }
            let typed = ins.iter().rev().find_map(|x| x.ok());
            let dtype = typed.map_or(DType::F32, |v| b.ty(v).dtype);
            let mut number =
                |x: std::result::Result<ValueId, f64>| x.unwrap_or_else(|n| b.scalar(dtype, n));
            let ins: Vec<ValueId> = ins.into_iter().map(&mut number).collect();
            b.emit(op, &ins, attrs)
        }
    }
}
