//! Axes as PyTorch counts them: a negative one counts from the end, and a scalar counts as having one axis.

use ckpt_passes::{Error, Result};

/// Returns an axis of a tensor of that rank, counted from the front.
///
/// # Errors
/// An axis that the tensor does not have; the message names the op.
pub fn in_rank(op: &str, axis: i64, rank: usize) -> Result<usize> {
    let r = rank.max(1) as i64;
    let at = if axis < 0 { axis + r } else { axis };
    if (0..r).contains(&at) {
        return Ok(at as usize);
    }
    let what = format!("{op}: axis {axis} is out of range");
    Err(Error::model("axis", what).expected(format!("-{r}..{r}")))
}

/// Returns axes in `0..rank`; all of them if none is listed.
///
/// # Errors
/// See [`in_rank`]; an axis that is listed twice.
pub fn chosen(op: &str, listed: &[i64], rank: usize) -> Result<Vec<usize>> {
    let axes = listed.iter().map(|a| in_rank(op, *a, rank));
    let axes: Vec<usize> = axes.collect::<Result<_>>()?;
    for (i, axis) in axes.iter().enumerate() {
        if axes[..i].contains(axis) && rank > 0 {
            bail!("axis", "{op}: axis {axis} is listed twice");
        }
    }
    // A scalar has no axis to name.
    match axes.is_empty() || rank == 0 {
        true => Ok((0..rank).collect()),
        false => Ok(axes),
    }
}
