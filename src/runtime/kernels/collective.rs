//! Sums and slices over ranks. A rank receives its slice from all others, adds the slices up in the order of ranks, and
//! hands the sum on.

use super::context::*;
use crate::runtime::ranks::{Group, group};
use ckpt_passes::ops::collective::*;

kernels! {
    ALL_REDUCE => all_reduce;
    REDUCE_SCATTER => reduce_scatter;
    GATHER_SLICES => gather_slices;
    OWN_SLICE => own_slice;
}

/// Returns the group that a node names; it must be of as many ranks.
fn group_of(cx: &KernelCx) -> Result<Group> {
    group(cx.attrs.str(GROUP), cx.attrs.int(RANKS))
}

/// A view of a row-major tensor as a vector.
fn flat(x: &Tensor) -> Result<Tensor> {
    strided(x, &[x.numel() as i64], &[1])
}

/// Returns the sum of the ranks' own slices in a buffer of one slice per rank: on this rank, its slice of the sum.
fn summed_slice(group: &Group, x: &Tensor) -> Result<Tensor> {
    let elements = x.numel() as i64;
    let size = slice_size(elements, group.ranks);
    let (_, own) = slice_of(elements, group.ranks, group.rank);
    let received = empty(&[size * group.ranks], x.kind(), x.device())?;
    group.exchange(x, &received)?;
    let slice = |rank: i64| narrow(&received, 0, rank * own, own);
    let first = slice(0)?;
    if !is_narrow(x.kind()) {
        for rank in 1..group.ranks {
            add_into(&first, &slice(rank)?)?;
        }
        return Ok(first);
    }
    // As many elements on every rank, so that all of them take what the row declares.
    let wide = compute_kind(x.kind());
    let (sum, next) = (
        empty(&[size], wide, x.device())?,
        empty(&[size], wide, x.device())?,
    );
    let (sum, next) = (narrow(&sum, 0, 0, own)?, narrow(&next, 0, 0, own)?);
    copy_into(&sum, &first)?;
    for rank in 1..group.ranks {
        copy_into(&next, &slice(rank)?)?;
        add_into(&sum, &next)?;
    }
    copy_into(&first, &sum)?;
    Ok(first)
}

fn all_reduce(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    let out = cx.result_like(x)?;
    if group.ranks == 1 || x.numel() == 0 {
        if cx.overwrites.is_none() {
            copy_into(&out, x)?;
        }
        return Ok(vec![out]);
    }
    let sum = summed_slice(&group, &dense(x)?)?;
    if group.is_alone() && cx.overwrites.is_none() {
        copy_into(&out, x)?;
    }
    let whole = flat(&out)?;
    let (from, own) = slice_of(x.numel() as i64, group.ranks, group.rank);
    copy_into(&narrow(&whole, 0, from, own)?, &sum)?;
    group.gather(&whole)?;
    Ok(vec![out])
}

fn reduce_scatter(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    if group.ranks == 1 || x.numel() == 0 {
        return own_slice(cx);
    }
    let size = slice_size(x.numel() as i64, group.ranks);
    let out = empty(&[size], x.kind(), x.device())?;
    fill_slice(&out, &summed_slice(&group, &dense(x)?)?)?;
    Ok(vec![out])
}

fn own_slice(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    let elements = x.numel() as i64;
    let out = empty(&[slice_size(elements, group.ranks)], x.kind(), x.device())?;
    let (from, own) = slice_of(elements, group.ranks, group.rank);
    fill_slice(&out, &narrow(&flat(&dense(x)?)?, 0, from, own)?)?;
    Ok(vec![out])
}

/// Copies a slice, and fills what is left with zeros.
fn fill_slice(out: &Tensor, slice: &Tensor) -> Result<()> {
    let (size, own) = (out.numel() as i64, slice.numel() as i64);
    copy_into(&narrow(out, 0, 0, own)?, slice)?;
    match own < size {
        true => zero(&narrow(out, 0, own, size - own)?),
        false => Ok(()),
    }
}

fn gather_slices(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (old, slice, group) = (cx.x(0)?, cx.x(1)?, group_of(cx)?);
    let out = cx.result_like(old)?;
    if group.is_alone() && cx.overwrites.is_none() {
        copy_into(&out, old)?;
    }
    let whole = flat(&out)?;
    let (from, own) = slice_of(old.numel() as i64, group.ranks, group.rank);
    copy_into(&narrow(&whole, 0, from, own)?, &narrow(slice, 0, 0, own)?)?;
    if group.ranks > 1 && old.numel() > 0 {
        group.gather(&whole)?;
    }
    Ok(vec![out])
}
