//! Sums and slices over ranks, at once or begun and waited for.

use super::context::*;
use super::index::wrapped;
use super::loss::checked_labels;
use crate::runtime::pending_exchanges;
use crate::runtime::ranks::{Group, group};
use ckpt_passes::ops::collective::*;

kernels! {
    ALL_REDUCE => all_reduce;
    REDUCE_SCATTER => reduce_scatter;
    START_ALL_REDUCE => start_all_reduce;
    START_REDUCE_SCATTER => start_reduce_scatter;
    WAIT => wait;
    GATHER_SLICES => gather_slices;
    ALL_GATHER => all_gather;
    GATHER_ROWS => gather_rows;
    OWN_SLICE => own_slice;
    OWN_PART => itself;
    OWN_INDICES => own_indices;
    SHARED => itself;
    KEEP_SLICE => keep_slice;
    GATHER_KEPT => gather_kept;
    CONCAT_RANKS => concat_ranks;
}

/// Returns the group that a node names; it must be of as many ranks.
fn group_of(cx: &KernelCx) -> Result<Group> {
    group(cx.attrs.str(GROUP), cx.attrs.int(RANKS))
}

fn all_reduce(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (out, group) = (cx.result_from(cx.x(0)?)?, group_of(cx)?);
    if group.ranks > 1 {
        group.add_up(Group::next_tag(), std::slice::from_ref(&out), None)?;
    }
    Ok(vec![out])
}

fn start_all_reduce(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (out, group) = (cx.result_from(cx.x(0)?)?, group_of(cx)?);
    pending_exchanges::begin(&group, &out, None, bucket(cx))?;
    Ok(vec![out])
}

fn bucket(cx: &KernelCx) -> u64 {
    cx.attrs.int(BUCKET).unsigned_abs()
}

fn reduce_scatter(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    if row_axes(cx.attrs) > 0 {
        return scatter_rows(cx, x, &group);
    }
    if group.ranks == 1 || group.is_alone() {
        return own_elements(x, &group);
    }
    let size = slice_size(x.numel() as i64, group.ranks);
    let out = [empty(&[size], x.kind(), x.device())?];
    group.add_up(Group::next_tag(), &[dense(x)?], Some(&out))?;
    Ok(out.into())
}

/// Returns a row-major tensor with its rows as one axis.
fn as_rows(cx: &KernelCx, x: &Tensor) -> Result<Tensor> {
    let size = x.size();
    let (lead, row) = size.split_at(row_axes(cx.attrs));
    let dims = [&[lead.iter().product()], row].concat();
    call("aten::view", args![x, &dims])
}

/// Writes rows to the first of `to`, and what stands for rows that are lacking behind them: copies of `last`, or zeros.
fn fill_rows(cx: &KernelCx, to: &Tensor, rows: &Tensor, last: Option<&Tensor>) -> Result<()> {
    let (size, own) = (to.size()[0], rows.size()[0]);
    copy_into(&narrow(to, 0, 0, own)?, rows)?;
    let lacking = narrow(to, 0, own, size - own)?;
    match last.filter(|_| cx.flag(REPEATS)) {
        Some(last) => copy_into(&lacking, last),
        None => zero(&lacking),
    }
}

fn last_row(rows: &Tensor) -> Result<Option<Tensor>> {
    match rows.size()[0] {
        0 => Ok(None),
        n => narrow(rows, 0, n - 1, 1).map(Some),
    }
}

fn own_rows(cx: &KernelCx, x: &Tensor, group: &Group) -> Result<Vec<Tensor>> {
    let rows = as_rows(cx, &dense(x)?)?;
    let mut size = rows.size();
    let (from, own) = slice_of(size[0], group.ranks, group.rank);
    size[0] = slice_size(size[0], group.ranks);
    let out = empty(&size, x.kind(), x.device())?;
    fill_rows(
        cx,
        &out,
        &narrow(&rows, 0, from, own)?,
        last_row(&rows)?.as_ref(),
    )?;
    Ok(vec![out])
}

fn scatter_rows(cx: &KernelCx, x: &Tensor, group: &Group) -> Result<Vec<Tensor>> {
    let mut rows = as_rows(cx, &dense(x)?)?;
    let mut size = rows.size();
    let count = size[0];
    let own = slice_size(count, group.ranks);
    if count % group.ranks > 0 {
        size[0] = own * group.ranks;
        let padded = empty(&size, x.kind(), x.device())?;
        fill_rows(cx, &padded, &rows, last_row(&rows)?.as_ref())?;
        rows = padded;
    }
    size[0] = own;
    let out = empty(&size, x.kind(), x.device())?;
    match group.ranks == 1 || group.is_alone() {
        true => copy_into(&out, &narrow(&rows, 0, own * group.rank, own)?)?,
        false => {
            let slice = std::slice::from_ref(&out);
            group.add_up(Group::next_tag(), &[rows], Some(slice))?;
        }
    }
    Ok(vec![out])
}

fn gather_rows(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (own, lead, group) = (cx.x(0)?, cx.ints(1)?, group_of(cx)?);
    let (count, size) = (lead.iter().product(), own.size());
    let (from, mine) = slice_of(count, group.ranks, group.rank);
    if size.first() != Some(&slice_size(count, group.ranks)) {
        return Err(cx.misfit(format!("{size:?} of {lead:?}")));
    }
    let out = empty(&[&lead, &size[1..]].concat(), own.kind(), own.device())?;
    if group.is_alone() {
        zero(&out)?;
    }
    let rows = call("aten::view", args![&out, &[&[count], &size[1..]].concat()])?;
    copy_into(&narrow(&rows, 0, from, mine)?, &narrow(own, 0, 0, mine)?)?;
    group.gather(&out, size[1..].iter().product())?;
    Ok(vec![out])
}

fn start_reduce_scatter(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    let elements = x.numel() as i64;
    let lent = cx.result_from(x)?;
    let out = empty(&[slice_size(elements, group.ranks)], x.kind(), x.device())?;
    if group.ranks == 1 || group.is_alone() {
        let (from, own) = slice_of(elements, group.ranks, group.rank);
        fill_slice(&out, &narrow(&as_vector(&lent)?, 0, from, own)?)?;
    }
    pending_exchanges::begin(&group, &lent, Some(&out), bucket(cx))?;
    Ok(vec![lent, out])
}

fn wait(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    pending_exchanges::wait(x)?;
    Ok(vec![cx.result_from(x)?])
}

/// The first operand has the type of the parameter, and no contents.
fn all_gather(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (like, slice, group) = (cx.x(0)?, cx.x(1)?, group_of(cx)?);
    let dims = like.size();
    let dims = cx.attrs.opt_ints(DIMS).unwrap_or(&dims);
    let whole = with_own(&group, slice, dims)?;
    pending_exchanges::begin_gather(&group, &whole)?;
    Ok(vec![whole])
}

/// Returns the tensor of which each rank has a slice. Alone, the slices of the others are zeros.
///
/// # Errors
/// Another rank is gone or too late.
pub fn gathered(group: &Group, slice: &Tensor, dims: &[i64]) -> Result<Tensor> {
    let out = with_own(group, slice, dims)?;
    group.gather(&out, 1)?;
    Ok(out)
}

/// Returns a new tensor with the rank's own slice in its place. Alone, all else is zeros.
fn with_own(group: &Group, slice: &Tensor, dims: &[i64]) -> Result<Tensor> {
    let out = empty(dims, slice.kind(), slice.device())?;
    if group.is_alone() {
        zero(&out)?;
    }
    place_own(&out, slice, group)?;
    Ok(out)
}

/// Returns the tensor of which each rank has a part. Alone, the parts of the others are zeros.
///
/// # Errors
/// Another rank is gone or too late.
pub fn whole_of(group: &Group, own: &Tensor, dims: &[i64], part: &Part) -> Result<Tensor> {
    let lead = |dims: &[i64], n: i64| [&[n], dims].concat();
    let parts = gathered(
        group,
        &as_vector(&dense(own)?)?,
        &lead(&own.size(), group.ranks),
    )?;
    let whole = empty(&lead(dims, 1), own.kind(), own.device())?;
    let axis = part.axis as i64 + 1;
    for rank in 0..group.ranks {
        let theirs = narrow(&parts, 0, rank, 1)?;
        let mut at = 0;
        for (from, count) in part.stretches(group.ranks, rank) {
            let stretch = narrow(&theirs, axis, at, count)?;
            copy_into(&narrow(&whole, axis, from, count)?, &stretch)?;
            at += count;
        }
    }
    whole.f_squeeze_dim(0).map_err(|e| tch_error(&e))
}

/// Writes a rank's slice to its place in the whole tensor.
fn place_own(whole: &Tensor, slice: &Tensor, group: &Group) -> Result<()> {
    let (from, own) = slice_of(whole.numel() as i64, group.ranks, group.rank);
    let place = narrow(&as_vector(whole)?, 0, from, own)?;
    copy_into(&place, &narrow(slice, 0, 0, own)?)
}

fn keep_slice(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let form = [&[0], &x.size()[..]].concat();
    let form = empty(&form, x.kind(), x.device())?;
    let slice = own_elements(x, &group_of(cx)?)?.into_iter();
    Ok(slice.chain([form]).collect())
}

/// The second operand has no element, and an axis before those of the result.
fn gather_kept(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (slice, form) = (cx.x(0)?, cx.x(1)?.size());
    Ok(vec![gathered(&group_of(cx)?, slice, &form[1..])?])
}

fn concat_ranks(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    let mut dims = x.size();
    dims[0] *= group.ranks;
    Ok(vec![gathered(&group, &as_vector(&dense(x)?)?, &dims)?])
}

fn itself(cx: &KernelCx) -> Result<Vec<Tensor>> {
    Ok(vec![cx.x(0)?.alias()])
}

fn own_slice(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, group) = (cx.x(0)?, group_of(cx)?);
    match row_axes(cx.attrs) {
        0 => own_elements(x, &group),
        _ => own_rows(cx, x, &group),
    }
}

fn own_elements(x: &Tensor, group: &Group) -> Result<Vec<Tensor>> {
    let elements = x.numel() as i64;
    let out = empty(&[slice_size(elements, group.ranks)], x.kind(), x.device())?;
    let (from, own) = slice_of(elements, group.ranks, group.rank);
    fill_slice(&out, &narrow(&as_vector(&dense(x)?)?, 0, from, own)?)?;
    Ok(vec![out])
}

fn own_indices(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (group, size) = (group_of(cx)?, cx.attrs.int(SIZE));
    let index = match cx.attrs.opt_int(IGNORE_INDEX) {
        None => wrapped(cx, cx.x(0)?, size)?,
        ignored => checked_labels(cx, copied_as(cx.x(0)?, Kind::Int64)?, size, ignored)?,
    };
    let (first, part) = slice_of(size, group.ranks, group.rank);
    let [first, part, zero] = [first, part, 0].map(|n| scalar(Kind::Int64, n as f64));
    let (part, zero) = (part?, zero?);
    let [is_own, other] = [0; 2].map(|_| empty_as(&index, Kind::Bool));
    let (is_own, other) = (is_own?, other?);
    write("aten::sub_.Tensor", args![&index, &first?, 1])?;
    write("aten::ge.Tensor_out", args![&index, &zero, &is_own])?;
    write("aten::lt.Tensor_out", args![&index, &part, &other])?;
    write("aten::logical_and_", args![&is_own, &other])?;
    write("aten::logical_not.out", args![&is_own, &other])?;
    write("aten::masked_fill_.Tensor", args![&index, &other, &zero])?;
    Ok(vec![index, is_own])
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
    place_own(&out, slice, &group)?;
    group.gather(&out, 1)?;
    Ok(vec![out])
}
