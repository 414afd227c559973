//! Fourier transforms, with PyTorch's ways of saying along which axes, of how many numbers and over what.

use super::complex::{made, pair};
use super::signature::{Call, Op};
use super::{TensorId, Value};
use crate::frontend::lower::fourier::{Roots, Scale, Sign, roots};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Dim, Same};

pub const OPS: &[Op] = &[
    ("fft_fft(self: ct, n: i?, dim: i?, norm: S?)", |c| {
        named(c, Sign::Forward)
    }),
    ("fft_fft2(self: ct, s: I?, dim: I?, norm: S?)", |c| {
        of_axes(c, Sign::Forward, &[-2, -1])
    }),
    ("fft_fftn(self: ct, s: I?, dim: I?, norm: S?)", |c| {
        of_axes(c, Sign::Forward, &[])
    }),
    ("fft_ifft(self: ct, n: i?, dim: i?, norm: S?)", |c| {
        named(c, Sign::Inverse)
    }),
    ("fft_ifft2(self: ct, s: I?, dim: I?, norm: S?)", |c| {
        of_axes(c, Sign::Inverse, &[-2, -1])
    }),
    ("fft_ifftn(self: ct, s: I?, dim: I?, norm: S?)", |c| {
        of_axes(c, Sign::Inverse, &[])
    }),
    ("fft_irfft(self: c, n: i?, dim: i?, norm: S?)", |c| {
        let x = operand(c)?;
        let axis = c.axis("dim", -1, x.rank(c))?;
        let bins = x.size(c, axis)?;
        let n = c.dim("n", 0)?;
        let n = match c.has("n") {
            true => n,
            false => bins.sub(&Dim::ONE).mul(&Dim::from(2)),
        };
        let scale = scale(c, Sign::Inverse)?;
        to_real(c, x, axis, &n, scale)
    }),
    ("fft_rfft(self: t, n: i?, dim: i?, norm: S?)", |c| {
        let x = operand(c)?;
        let axis = c.axis("dim", -1, x.rank(c))?;
        let n = length(c, x, axis)?;
        let scale = scale(c, Sign::Forward)?;
        let bins = half(&n);
        one_axis(c, x, axis, &n, &bins, Sign::Forward, scale)
    }),
    (
        "_fft_c2c(self: c, dim: I, normalization: i, forward: b)",
        |c| {
            let sign = match c.bool("forward", true)? {
                true => Sign::Forward,
                false => Sign::Inverse,
            };
            let (x, scale) = (operand(c)?, scale_of_code(c)?);
            let axes = some_axes(c, x)?;
            all_axes(c, x, &axes, &[], sign, scale)
        },
    ),
    (
        "_fft_c2r(self: c, dim: I, normalization: i, last_dim_size: i)",
        |c| {
            let (mut x, scale) = (operand(c)?, scale_of_code(c)?);
            let axes = c.axes("dim", x.rank(c))?;
            let n = c.dim("last_dim_size", 0)?;
            let Some((last, before)) = axes.split_last() else {
                return Err(c.unsupported("a transform along no axis"));
            };
            if !before.is_empty() {
                let done = all_axes(c, x, before, &[], Sign::Inverse, scale)?;
                x = Operand::of(c, &done)?;
            }
            to_real(c, x, *last, &n, scale)
        },
    ),
    (
        "_fft_r2c(self: t, dim: I, normalization: i, onesided: b)",
        |c| {
            let (x, scale) = (operand(c)?, scale_of_code(c)?);
            let axes = some_axes(c, x)?;
            let Some((last, before)) = axes.split_last() else {
                return Err(c.unsupported("a transform along no axis"));
            };
            let n = x.size(c, *last)?;
            let bins = match c.bool("onesided", true)? {
                true => half(&n),
                false => n.clone(),
            };
            let done = one_axis(c, x, *last, &n, &bins, Sign::Forward, scale)?;
            let x = Operand::of(c, &done)?;
            all_axes(c, x, before, &[], Sign::Forward, scale)
        },
    ),
];

/// PyTorch's `fft_norm_mode`.
fn scale_of_code(c: &Call) -> Result<Scale> {
    match c.int("normalization", 0)? {
        0 => Ok(Scale::One),
        1 => Ok(Scale::Root),
        2 => Ok(Scale::Length),
        other => Err(c.unsupported(format!("`normalization` {other}"))),
    }
}

fn scale(c: &Call, sign: Sign) -> Result<Scale> {
    match (c.str("norm", "backward")?, sign) {
        ("ortho", _) => Ok(Scale::Root),
        ("backward", Sign::Forward) | ("forward", Sign::Inverse) => Ok(Scale::One),
        ("backward", Sign::Inverse) | ("forward", Sign::Forward) => Ok(Scale::Length),
        (other, _) => Err(c.unsupported(format!("`norm` {other}"))),
    }
}

/// Numbers, real or complex.
#[derive(Clone, Copy)]
enum Operand {
    Real(TensorId),
    Complex(TensorId),
}

impl Operand {
    fn of(c: &Call, value: &Value) -> Result<Operand> {
        match value {
            Value::Tensor(id) => Ok(Operand::Real(*id)),
            Value::Complex(id) => Ok(Operand::Complex(*id)),
            other => Err(c.unsupported(other.kind())),
        }
    }

    fn dims(self, c: &Call) -> Vec<Dim> {
        match self {
            Operand::Real(id) => c.low.dims(id).to_vec(),
            Operand::Complex(id) => c.low.complex_dims(id).to_vec(),
        }
    }

    fn rank(self, c: &Call) -> usize {
        self.dims(c).len()
    }

    fn size(self, c: &Call, axis: usize) -> Result<Dim> {
        let size = self.dims(c).get(axis).cloned();
        size.ok_or_else(|| c.fail("axis", "a scalar has no axis"))
    }

    /// No more than the first `n` along an axis.
    fn fitted(self, c: &mut Call, axis: usize, n: &Dim) -> Result<Operand> {
        let size = self.size(c, axis)?;
        let kept = size.smaller(n);
        if kept.same(&size) == Same::Yes {
            return Ok(self);
        }
        let (Operand::Real(id) | Operand::Complex(id)) = self;
        let axis = Value::from(axis as i64);
        let done = c.run("narrow", [id.into(), axis, 0.into(), kept.into()])?;
        match (self, done) {
            (Operand::Real(_), Value::Tensor(id)) => Ok(Operand::Real(id)),
            (_, Value::Tensor(id)) => Ok(Operand::Complex(id)),
            (_, other) => Err(c.unsupported(other.kind())),
        }
    }
}

fn operand(c: &Call) -> Result<Operand> {
    match c.get("self") {
        Some(Value::Complex(_)) => Ok(Operand::Complex(pair(c, "self")?)),
        _ => Ok(Operand::Real(c.tensor("self")?)),
    }
}

/// How many bins of `n` real numbers tell all.
fn half(n: &Dim) -> Dim {
    n.div(&Dim::from(2)).add(&Dim::ONE)
}

/// How many numbers are transformed: as many as there are, or as the call says.
fn length(c: &Call, x: Operand, axis: usize) -> Result<Dim> {
    match c.has("n") {
        true => c.dim("n", 0),
        false => x.size(c, axis),
    }
}

/// The axes of a call, of which there have to be some.
fn some_axes(c: &Call, x: Operand) -> Result<Vec<usize>> {
    if c.dims("dim")?.is_none_or(|axes| axes.is_empty()) {
        return Err(c.unsupported("a transform along no axis"));
    }
    c.axes("dim", x.rank(c))
}

fn named(c: &mut Call, sign: Sign) -> Result<Value> {
    let x = operand(c)?;
    let axis = c.axis("dim", -1, x.rank(c))?;
    let n = length(c, x, axis)?;
    let scale = scale(c, sign)?;
    one_axis(c, x, axis, &n, &n, sign, scale)
}

/// Along several axes; with `s` along its last ones, of these lengths.
fn of_axes(c: &mut Call, sign: Sign, default: &[i64]) -> Result<Value> {
    let x = operand(c)?;
    let rank = x.rank(c);
    let lengths = c.dims("s")?.unwrap_or_default();
    let axes = match (c.has("dim"), lengths.len()) {
        (true, _) => some_axes(c, x)?,
        (false, 0) if default.is_empty() => (0..rank).collect(),
        (false, 0) => default
            .iter()
            .map(|a| c.in_rank(*a, rank))
            .collect::<Result<_>>()?,
        (false, n) => (rank.saturating_sub(n)..rank).collect(),
    };
    if !lengths.is_empty() && lengths.len() != axes.len() {
        return Err(c.fail("shape", "there are not as many lengths as axes"));
    }
    let scale = scale(c, sign)?;
    all_axes(c, x, &axes, &lengths, sign, scale)
}

fn all_axes(
    c: &mut Call,
    x: Operand,
    axes: &[usize],
    lengths: &[Dim],
    sign: Sign,
    scale: Scale,
) -> Result<Value> {
    let mut x = x;
    for (i, axis) in axes.iter().enumerate().rev() {
        let n = match lengths.get(i) {
            // −1 is the axis as it is.
            Some(n) if n.as_const() != Some(-1) => n.clone(),
            _ => x.size(c, *axis)?,
        };
        let done = one_axis(c, x, *axis, &n, &n, sign, scale)?;
        x = Operand::of(c, &done)?;
    }
    match x {
        Operand::Complex(id) => Ok(Value::Complex(id)),
        Operand::Real(_) => Err(c.unsupported("a transform along no axis")),
    }
}

/// The first `bins` of the transform of `n` numbers along an axis.
fn one_axis(
    c: &mut Call,
    x: Operand,
    axis: usize,
    n: &Dim,
    bins: &Dim,
    sign: Sign,
    scale: Scale,
) -> Result<Value> {
    let x = x.fitted(c, axis, n)?;
    let rows = x.size(c, axis)?;
    let (re, im) = match x {
        Operand::Real(id) => {
            let re = c.low.read(id)?;
            let dtype = c.low.promoted_float(&[&id.into()])?;
            (c.low.b.cast(re, dtype)?, None)
        }
        Operand::Complex(id) => {
            let [re, im] = c.low.parts(id)?;
            (re, Some(im))
        }
    };
    let roots = scaled(c, n, [&rows, bins], c.low.b.ty(re).dtype, scale)?;
    let [re, im] = roots.transformed(&mut c.low.b, re, im, axis, sign)?;
    made(c, re, im)
}

/// `n` real numbers from the first half of their bins.
fn to_real(c: &mut Call, x: Operand, axis: usize, n: &Dim, scale: Scale) -> Result<Value> {
    let x = x.fitted(c, axis, &half(n))?;
    let rows = x.size(c, axis)?;
    let Operand::Complex(id) = x else {
        return Err(c.unsupported("a real tensor"));
    };
    let parts = c.low.parts(id)?;
    let roots = scaled(c, n, [&rows, n], c.low.b.ty(parts[0]).dtype, scale)?;
    let (n, rows) = (c.low.int_scalar(n)?, c.low.int_scalar(&rows)?);
    let y = roots.real(&mut c.low.b, parts, axis, [n, rows])?;
    c.made(y)
}

fn scaled(c: &mut Call, n: &Dim, sizes: [&Dim; 2], dtype: DType, scale: Scale) -> Result<Roots> {
    if n.bounds().1.is_some_and(|most| most < 1) {
        return Err(c
            .fail("shape", "there is nothing to transform")
            .found(format!("{n} numbers")));
    }
    let n = c.low.int_scalar(n)?;
    let sizes = [c.low.int_scalar(sizes[0])?, c.low.int_scalar(sizes[1])?];
    roots(&mut c.low.b, n, sizes, dtype, scale)
}
