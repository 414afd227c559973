//! Discrete Fourier transforms, as products with matrices of roots of unity.
//!
//! Of `n` numbers a product takes `n²` steps and a fast transform `n log n`; but it is made of standard ops that have gradients and
//! run everywhere, and for the lengths of sequences a product is what accelerators are fast at (Lee-Thorp et al., FNet,
//! 2021, §3.3). Angles are those of whole numbers modulo `n`, in float64, so that roots are as exact as their type holds them.
//! Numbers that are missing are zeros and take no part: a matrix has a row for each that is there.

use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Builder, DType, ValueId};
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::shape::{TRANSPOSE, UNSQUEEZE};
use ckpt_passes::ops::{arith, fill, logic, math};

/// Of the exponent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    Forward,
    Inverse,
}

/// What a transform of `n` numbers is divided by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    One,
    Root,
    Length,
}

/// Cosines and sines of the angles `2π·j·k/n`, `j` down and `k` across, divided by the scale.
#[derive(Clone, Copy)]
pub struct Roots {
    pub cos: ValueId,
    pub sin: ValueId,
}

/// `0, 1, …` below an int64 scalar.
fn numbers(b: &mut Builder, count: ValueId) -> Result<ValueId> {
    let (zero, one) = (b.int(0), b.int(1));
    b.emit(&fill::RANGE, &[zero, count, one], Attrs::new())
}

fn column(b: &mut Builder, v: ValueId) -> Result<ValueId> {
    let axes = b.ints(&[1]);
    b.emit(&UNSQUEEZE, &[v, axes], Attrs::new())
}

/// The roots of a transform of `n` numbers of which `rows` are there, for the first `columns` results; sizes are int64
/// scalars. They are rounded to their type once, at the end.
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
    let (down, across) = (numbers(b, rows)?, numbers(b, columns)?);
    let down = column(b, down)?;
    let turns = b.mul(down, across)?;
    let turns = b.emit(&arith::MOD, &[turns, n], Attrs::new())?;
    let (turns, n) = (b.cast(turns, DType::F64)?, b.cast(n, DType::F64)?);
    let circle = b.scalar(DType::F64, std::f64::consts::TAU);
    let step = b.div(circle, n)?;
    let angles = b.mul(turns, step)?;
    let by = match scale {
        Scale::One => None,
        Scale::Root => Some(b.emit(&math::SQRT, &[n], Attrs::new())?),
        Scale::Length => Some(n),
    };
    let mut of = |op| {
        let mut root = b.emit(op, &[angles], Attrs::new())?;
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
    /// Real and imaginary part of the transform of numbers along an axis: `Σ e^(∓iθ)·(re + i·im)`.
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

    /// The `n` real numbers of which `re` and `im` are the first `bins` of the transform, not scaled; the roots have a row for
    /// each bin. The other bins are the conjugates of these, so each counts twice but the first, and the last of an even `n`.
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
        let dtype = b.ty(re).dtype;
        let bins = numbers(b, bins)?;
        let other = b.sub(n, bins)?;
        let other = b.emit(&arith::MOD, &[other, n], Attrs::new())?;
        let is_own = b.emit(&logic::EQUAL, &[other, bins], Attrs::new())?;
        let (one, two) = (b.scalar(dtype, 1.0), b.scalar(dtype, 2.0));
        let times = b.emit(&logic::WHERE, &[is_own, one, two], Attrs::new())?;
        let times = column(b, times)?;
        let (cos, sin) = (b.mul(times, self.cos)?, b.mul(times, self.sin)?);
        let (re, im) = (along(b, re, cos, axis)?, along(b, im, sin, axis)?);
        b.sub(re, im)
    }
}

/// `x` times a matrix along an axis.
fn along(b: &mut Builder, x: ValueId, matrix: ValueId, axis: usize) -> Result<ValueId> {
    let rank = b.rank(x);
    if axis + 1 == rank {
        return b.emit(&MATMUL, &[x, matrix], Attrs::new());
    }
    let mut order: Vec<i64> = (0..rank as i64).collect();
    order.swap(axis, rank - 1);
    let turned = Attrs::new().with("perm", order);
    let x = b.emit(&TRANSPOSE, &[x], turned.clone())?;
    let y = b.emit(&MATMUL, &[x, matrix], Attrs::new())?;
    b.emit(&TRANSPOSE, &[y], turned)
}
