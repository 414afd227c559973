//! Discrete Fourier transforms as products with matrices of roots of unity, and ONNX `DFT`.
//!
//! A product of `n` numbers takes `n²` steps, and a fast transform `n log n`. But a product is made of standard ops that
//! have gradients and run everywhere, and accelerators are fast at products of these lengths (Lee-Thorp et al., FNet,
//! 2021, §3.3). Angles are multiples of whole numbers modulo `n` in float64, so the roots are as exact as their type.
//! Missing numbers count as zeros and cost nothing: a matrix has a row only for each number that is there.

use super::call::{Call, Lowered, from_start, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, ValueId};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::rule::{Formulas, Term, binary_op, cast};
use ckpt_passes::ops::{Builder, EmitExt, arith, logic, math};

/// Sign of the exponent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// e^(−iθ).
    Forward,
    /// e^(+iθ).
    Inverse,
}

/// The divisor of a transform of `n` numbers.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// 1: nothing is divided.
    One,
    /// √n.
    Root,
    /// n.
    Length,
}

/// Cosines and sines of the angles `2π·j·k/n`, `j` down and `k` across, divided by the scale.
#[derive(Clone, Copy)]
pub struct Roots {
    /// Cosines divided by the scale, as a matrix of `[rows, columns]`.
    pub cos: ValueId,
    /// Sines divided by the scale, as a matrix of `[rows, columns]`.
    pub sin: ValueId,
}

/// Returns the roots of a transform of `n` numbers. `rows` of the numbers are there, and the first `columns` results are
/// wanted; all three are int64 scalars. The roots are rounded to `dtype` once, at the end.
///
/// # Errors
/// What the ops refuse.
pub fn roots(
    b: &mut Builder,
    n: ValueId,
    [rows, columns]: [ValueId; 2],
    dtype: DType,
    scale: Scale,
) -> Result<Roots> {
    let (down, across) = (b.counted(rows)?, b.counted(columns)?);
    let down = b.unsqueeze(down, &[1])?;
    let turns = binary_op(&arith::MOD, Term(down) * across, n);
    let (turns, n) = (b.bind(cast(turns, DType::F64))?, b.cast(n, DType::F64)?);
    let angles = b.eval(turns * (std::f64::consts::TAU / Term(n)))?;
    let by = match scale {
        Scale::One => None,
        Scale::Root => Some(b.op(&math::SQRT, &[n])?),
        Scale::Length => Some(n),
    };
    let mut of = |op| {
        let mut root = b.op(op, &[angles])?;
        if let Some(by) = by {
            root = b.div(root, by)?;
        }
        b.cast(root, dtype)
    };
    Ok(Roots {
        cos: of(&math::COS)?,
        sin: of(&math::SIN)?,
    })
}

impl Roots {
    /// Returns the real and imaginary parts of the transform of numbers along an axis: `Σ e^(∓iθ)·(re + i·im)`.
    ///
    /// # Errors
    /// What the ops refuse.
    pub fn transformed(
        self,
        b: &mut Builder,
        re: ValueId,
        im: Option<ValueId>,
        axis: usize,
        sign: Sign,
    ) -> Result<[ValueId; 2]> {
        let (re_cos, re_sin) = (along(b, re, self.cos, axis)?, along(b, re, self.sin, axis)?);
        let Some(im) = im else {
            return Ok(match sign {
                Sign::Forward => [re_cos, b.neg(re_sin)?],
                Sign::Inverse => [re_cos, re_sin],
            });
        };
        let (im_cos, im_sin) = (along(b, im, self.cos, axis)?, along(b, im, self.sin, axis)?);
        Ok(match sign {
            Sign::Forward => [b.add(re_cos, im_sin)?, b.sub(im_cos, re_sin)?],
            Sign::Inverse => [b.sub(re_cos, im_sin)?, b.add(im_cos, re_sin)?],
        })
    }

    /// Returns the `n` real numbers whose transform begins with the `bins` numbers `re` + i·`im`, not scaled. The roots have
    /// a row for each bin. The other bins are the conjugates of these. So each bin counts twice, except the first and, for
    /// an even `n`, the last.
    ///
    /// # Errors
    /// What the ops refuse.
    pub fn real(
        self,
        b: &mut Builder,
        [re, im]: [ValueId; 2],
        axis: usize,
        [n, bins]: [ValueId; 2],
    ) -> Result<ValueId> {
        let bins = b.counted(bins)?;
        let other = b.sub(n, bins)?;
        let other = b.op(&arith::MOD, &[other, n])?;
        let is_own = b.op(&logic::EQUAL, &[other, bins])?;
        let (once, twice) = (b.scalar_like(re, 1.0), b.scalar_like(re, 2.0));
        let times = b.op(&logic::WHERE, &[is_own, once, twice])?;
        let times = b.unsqueeze(times, &[1])?;
        let (cos, sin) = (b.mul(times, self.cos)?, b.mul(times, self.sin)?);
        let (re, im) = (along(b, re, cos, axis)?, along(b, im, sin, axis)?);
        b.sub(re, im)
    }
}

/// Multiplies `x` by a matrix along an axis.
fn along(b: &mut Builder, x: ValueId, matrix: ValueId, axis: usize) -> Result<ValueId> {
    let x = b.swap_last(x, axis)?;
    let y = b.op(&MATMUL, &[x, matrix])?;
    b.swap_last(y, axis)
}

/// ONNX DFT-20 along an axis, and older ones, whose axis is an attribute. It takes real numbers `[…, 1]` or complex ones
/// `[…, 2]` and returns complex ones, or real ones for the inverse of a one-sided transform.
pub fn dft(call: &mut Call) -> Lowered {
    let x = call.need(0, "input")?;
    let rank = call.rank(x);
    let parts = call.size(x, rank.saturating_sub(1), "the last axis")?;
    if rank < 2 || !matches!(parts, 1 | 2) {
        return Err(call.unsupported("an input whose last axis is not of one part or two"));
    }
    let (length, axis) = (call.opt(1), axis(call, rank)?);
    let sign = match call.attr_flag("inverse")? {
        false => Sign::Forward,
        true => Sign::Inverse,
    };
    let is_half = call.attr_flag("onesided")?;
    if is_half && (parts == 2) != (sign == Sign::Inverse) {
        return Err(call.unsupported("`onesided`, but to and from real numbers,"));
    }
    let (unit, two) = (call.int(1), call.int(2));
    let n = match length {
        Some(length) => {
            let length = call.cast(length, DType::I64)?;
            let length = call.reshape(length, &[1])?;
            call.squeeze(length, &[0])?
        }
        None if is_half && sign == Sign::Inverse => {
            let bins = size(call, x, axis)?;
            let bins = call.sub(bins, unit)?;
            call.mul(bins, two)?
        }
        None => size(call, x, axis)?,
    };
    let half = call.op(&arith::DIV, &[n, two])?;
    let half = call.add(half, unit)?;
    let (read, columns) = match (is_half, sign) {
        (false, _) => (n, n),
        (true, Sign::Forward) => (n, half),
        (true, Sign::Inverse) => (half, n),
    };
    let bounds = [call.ints(&[0]), call.reshape(read, &[1])?];
    let x = match length {
        Some(_) => call.slice(x, bounds, axis)?,
        None => x,
    };
    let rows = size(call, x, axis)?;
    let last = rank as i64 - 1;
    let mut numbers = Vec::new();
    for part in call.split(x, &vec![1; parts as usize], last)? {
        numbers.push(call.squeeze(part, &[last])?);
    }
    let dtype = call.dtype(x);
    let scale = match sign {
        Sign::Forward => Scale::One,
        Sign::Inverse => Scale::Length,
    };
    let matrix = roots(call, n, [rows, columns], dtype, scale)?;
    if let (true, [re, im]) = (is_half, numbers.as_slice()) {
        let y = matrix.real(call, [*re, *im], axis, [n, rows])?;
        return one(call.unsqueeze(y, &[last])?);
    }
    let [re, im] = matrix.transformed(call, numbers[0], numbers.get(1).copied(), axis, sign)?;
    let (re, im) = (call.unsqueeze(re, &[last])?, call.unsqueeze(im, &[last])?);
    one(call.concat(&[re, im], last)?)
}

/// Returns the transformed axis, which is never the axis of real and imaginary parts.
fn axis(call: &mut Call, rank: usize) -> Result<usize> {
    let given = match call.opset < 20 {
        true => call.attr_int("axis", 1)?,
        false => match call.opt(2) {
            None => -2,
            Some(v) => {
                let known = call.contents.get(v).and_then(|c| c.first()?.as_const());
                known.ok_or_else(|| call.unsupported("an axis that is computed"))?
            }
        },
    };
    let at = from_start(given, rank).filter(|at| at + 1 < rank);
    at.ok_or_else(|| {
        call.fail("axis", format!("axis {given} is out of range"))
            .expected(format!("an axis of {rank} that is not the last"))
    })
}

/// Returns the size of an axis as a scalar.
fn size(call: &mut Call, x: ValueId, axis: usize) -> Result<ValueId> {
    let size = call.axis_vector(x, axis)?;
    call.squeeze(size, &[0])
}
