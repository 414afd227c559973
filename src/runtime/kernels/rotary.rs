//! Rotary positions, computed in the result, one half of the last axis at a time.
//!
//! 16-bit operands are widened, so that a rotation is rounded once.

use super::context::*;
use ckpt_passes::ops::rotary::*;

/// The kernel of rotary positions.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&ROTARY, rotary)];

fn rotary(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, cos, sin) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let size = x.size();
    let width = *size.last().unwrap_or(&0);
    for table in [cos, sin] {
        // The last axis may be half of that of x; other axes must not enlarge x.
        let mut seen = size.clone();
        let last = *table.size().last().unwrap_or(&0);
        if let Some(end) = seen.last_mut().filter(|_| last != 1) {
            *end = last;
        }
        if table.dim() > seen.len() || !fits(&table.size(), &seen) {
            let table = table.size();
            let what = format!("a table of {table:?} does not broadcast to {size:?}");
            return Err(cx.shape_error(what));
        }
    }
    let out = empty(&size, x.kind(), x.device())?;
    let half = width / 2;
    let narrow_type = is_narrow(x.kind());
    let (cos, sin) = match narrow_type {
        true => (copied_as(cos, Kind::Float)?, copied_as(sin, Kind::Float)?),
        false => (cos.alias(), sin.alias()),
    };
    let table = |t: &Tensor, which: i64| match serves_both(&t.size(), width) {
        true => Ok(t.alias()),
        false => part(t, which, half),
    };
    let buffers = match narrow_type {
        true => {
            let mut dims = size.clone();
            if let Some(end) = dims.last_mut() {
                *end = half;
            }
            let new = || empty(&dims, Kind::Float, x.device());
            Some((new()?, new()?))
        }
        false => None,
    };
    let inverse = is_inverse(cx.attrs);
    for which in [0, 1] {
        let (own, other) = (part(x, which, half)?, part(x, 1 - which, half)?);
        let target = part(&out, which, half)?;
        // The sine for the other half.
        let sine = table(&sin, if inverse { 1 - which } else { which })?;
        let sign = if (which == 0) == inverse { 1 } else { -1 };
        let cosine = table(&cos, which)?;
        match &buffers {
            None => {
                write("aten::mul.out", args![&own, &cosine, &target])?;
                add_product(&target, &other, &sine, sign)?;
            }
            Some((sum, beside)) => {
                copy_into(sum, &own)?;
                mul_into(sum, &cosine)?;
                copy_into(beside, &other)?;
                add_product(sum, beside, &sine, sign)?;
                copy_into(&target, sum)?;
            }
        }
    }
    Ok(vec![out])
}

/// Returns whether `dims` broadcast to exactly `size`.
fn fits(dims: &[i64], size: &[i64]) -> bool {
    let lead = size.len() - dims.len();
    dims.iter()
        .zip(&size[lead..])
        .all(|(d, s)| *d == 1 || d == s)
}

fn part(x: &Tensor, which: i64, half: i64) -> Result<Tensor> {
    narrow(x, -1, which * half, half)
}

/// Computes to += sign·a·b.
fn add_product(to: &Tensor, a: &Tensor, b: &Tensor, sign: i64) -> Result<()> {
    write("aten::addcmul.out", args![to, a, b, sign, to])
}
