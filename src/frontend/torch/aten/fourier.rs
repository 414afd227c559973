//! Fourier transforms, with PyTorch's arguments for axes, lengths and scales.

use super::super::value::{TensorId, Value};
use super::complex::made;
use super::signature::{Call, Op};
use crate::frontend::lower::fourier::{Roots, Scale, Sign, roots};
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Dim, Same};
use ckpt_passes::ops::EmitExt;

pub const OPS: &[Op] = &[
    ("fft_{fft,ifft}(self: ct, n: i?, dim: i?, norm: S?)", |c| {
        let (x, axis) = operand_axis(c)?;
        let n = length(c, x, axis)?;
        let sign = sign(c);
        let scale = scale(c, sign)?;
        one_axis(c, x, axis, &n, &n, sign, scale)
    }),
    (
        "fft_{fft2,ifft2,fftn,ifftn}(self: ct, s: I?, dim: I?, norm: S?)",
        of_axes,
    ),
    ("fft_irfft(self: c, n: i?, dim: i?, norm: S?)", |c| {
        let (x, axis) = operand_axis(c)?;
        let bins = x.size(c, axis)?;
        let n = match c.has("n") {
            true => c.dim("n", 0)?,
            false => bins.sub(&Dim::ONE).mul(&Dim::from(2)),
        };
        let scale = scale(c, Sign::Inverse)?;
        to_real(c, x, axis, &n, scale)
    }),
    ("fft_rfft(self: t, n: i?, dim: i?, norm: S?)", |c| {
        let (x, axis) = operand_axis(c)?;
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

/// Returns the scale by PyTorch's `fft_norm_mode`.
fn scale_of_code(c: &Call) -> Result<Scale> {
    match c.int("normalization", 0)? {
        0 => Ok(Scale::One),
        1 => Ok(Scale::Root),
        2 => Ok(Scale::Length),
        other => Err(c.unsupported(format!("`normalization` {other}"))),
    }
}

/// Returns the direction, which the op's name tells: `fft_ifft2`.
fn sign(c: &Call) -> Sign {
    match c.name.starts_with("fft_i") {
        true => Sign::Inverse,
        false => Sign::Forward,
    }
}

/// Returns the scale by the argument `norm`.
fn scale(c: &Call, sign: Sign) -> Result<Scale> {
    match (c.str("norm", "backward")?, sign) {
        ("ortho", _) => Ok(Scale::Root),
        ("backward", Sign::Forward) | ("forward", Sign::Inverse) => Ok(Scale::One),
        ("backward", Sign::Inverse) | ("forward", Sign::Forward) => Ok(Scale::Length),
        (other, _) => Err(c.unsupported(format!("`norm` {other}"))),
    }
}

/// A real or complex operand.
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

    fn dims<'c>(self, c: &'c Call) -> &'c [Dim] {
        match self {
            Operand::Real(id) => c.low.dims(id),
            Operand::Complex(id) => c.low.complex_dims(id),
        }
    }

    fn rank(self, c: &Call) -> usize {
        self.dims(c).len()
    }

    fn size(self, c: &Call, axis: usize) -> Result<Dim> {
        c.size_in(self.dims(c), axis)
    }

    /// Returns at most the first `n` numbers along an axis.
    fn fitted(self, c: &mut Call, axis: usize, n: &Dim) -> Result<Operand> {
        let size = self.size(c, axis)?;
        let kept = size.smaller(n);
        if kept.same(&size) == Same::Yes {
            return Ok(self);
        }
        let (Operand::Real(id) | Operand::Complex(id)) = self;
        let axis = Value::from(axis as i64);
        let done = c.run("narrow", [id.into(), axis, 0.into(), kept.into()])?;
        match (self, Operand::of(c, &done)?) {
            (Operand::Complex(_), Operand::Real(id)) => Ok(Operand::Complex(id)),
            (_, done) => Ok(done),
        }
    }
}

fn operand(c: &Call) -> Result<Operand> {
    Operand::of(c, &c.given("self"))
}

/// Returns `self` and the axis `dim` of it, the last by default.
fn operand_axis(c: &Call) -> Result<(Operand, usize)> {
    let x = operand(c)?;
    Ok((x, c.axis("dim", -1, x.rank(c))?))
}

/// Returns the number of bins that determine the transform of `n` real numbers.
fn half(n: &Dim) -> Dim {
    n.div(&Dim::from(2)).add(&Dim::ONE)
}

/// Returns the length of a transform: `n`, by default the size of the axis.
fn length(c: &Call, x: Operand, axis: usize) -> Result<Dim> {
    match c.has("n") {
        true => c.dim("n", 0),
        false => x.size(c, axis),
    }
}

/// Returns the axes of a call, of which there must be at least one.
fn some_axes(c: &Call, x: Operand) -> Result<Vec<usize>> {
    if c.dims("dim")?.is_none_or(|axes| axes.is_empty()) {
        return Err(c.unsupported("a transform along no axis"));
    }
    c.axes("dim", x.rank(c))
}

/// Lowers transforms along several axes. With lengths `s` and no axes, these are the last ones.
fn of_axes(c: &mut Call) -> Result<Value> {
    let x = operand(c)?;
    let rank = x.rank(c);
    let default: &[i64] = if c.name.ends_with('2') {
        &[-2, -1]
    } else {
        &[]
    };
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
    let sign = sign(c);
    let scale = scale(c, sign)?;
    all_axes(c, x, &axes, &lengths, sign, scale)
}

/// Transforms along axes from the last to the first.
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
            // −1 stands for the size of the axis.
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

/// Lowers the first `bins` of the transform of `n` numbers along an axis.
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

/// Lowers `n` real numbers from the first half of their bins.
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

/// Returns the roots of unity of a transform with their scale.
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
