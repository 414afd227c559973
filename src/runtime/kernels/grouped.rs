//! Products by groups of rows: one call of BLAS for the rows of a group, or for some of them where they are copied.

use super::context::*;
use super::matmul::{check_inner, prepared};
use super::product::Product;
use ckpt_passes::ops::grouped::*;
use ckpt_passes::ops::matmul::plan::{grouped_plan, grouped_weight_plan};
use ckpt_torch::bytes;

/// The kernels of this family, by op.
pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&GROUPED_MATMUL, grouped_matmul),
    (&GROUPED_WEIGHT_GRAD, grouped_weight_grad),
];

fn grouped_matmul(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (x, b) = (cx.x(0)?, cx.x(1)?);
    let plan = grouped_plan(&sized(x)?, &sized(b)?, cx.flag("transB"));
    check_inner(cx, x, b, plan.k, plan.b.dims[1])?;
    let out = empty(&plan.out, x.kind(), x.device())?;
    if plan.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let rows = rows_by_group(cx, plan.out[0], plan.b.dims[0])?;
    if rows.count() < plan.out[0] {
        zero(&out)?;
    }
    let (left, right) = (prepared(x, &plan.a)?, prepared(b, &plan.b)?);
    let widths = [plan.k, plan.out[1]];
    let copies = Copies::new(cx, x, plan.out[0], widths)?;
    for (group, rows) in rows.of_groups().enumerate() {
        let matrix = right.select(0, group as i64);
        if let Some(start) = first_of_run(rows) {
            let own = |x: &Tensor| narrow(x, 0, start, rows.len() as i64);
            Product::plain(&own(&left)?, &matrix, &own(&out)?).write()?;
            continue;
        }
        for rows in rows.chunks(copies.at_once) {
            let at = copies.numbers(rows)?;
            let (from, to) = (copies.gather(0, &left, &at)?, copies.part(1, rows.len())?);
            Product::plain(&from, &matrix, &to).write()?;
            write_apart("aten::index_copy_", args![&out, 0, &at, &to])?;
        }
    }
    Ok(vec![out])
}

fn grouped_weight_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let plan = grouped_weight_plan(&sized(a)?, &sized(b)?, cx.attrs.int(GROUPS));
    check_inner(cx, a, b, plan.k, plan.b.dims[0])?;
    let out = empty(&plan.out, a.kind(), a.device())?;
    if plan.is_empty() {
        zero(&out)?;
        return Ok(vec![out]);
    }
    let rows = rows_by_group(cx, plan.k, plan.out[0])?;
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    let (kind, widths) = (compute_kind(a.kind()), [plan.out[1], plan.out[2]]);
    let copies = Copies::new(cx, a, plan.k, widths)?;
    let wide = match kind == a.kind() {
        true => None,
        false => Some((copies.sides_in(kind)?, empty(&widths, kind, a.device())?)),
    };
    for (group, rows) in rows.of_groups().enumerate() {
        let matrix = out.select(0, group as i64);
        if rows.is_empty() {
            zero(&matrix)?;
            continue;
        }
        if let Some(start) = first_of_run(rows) {
            let own = |x: &Tensor| narrow(x, 0, start, rows.len() as i64);
            let turned = own(&left)?.transpose(0, 1);
            Product::plain(&turned, &own(&right)?, &matrix).write()?;
            continue;
        }
        let sum = wide.as_ref().map_or(&matrix, |(_, sum)| sum);
        for (i, rows) in rows.chunks(copies.at_once).enumerate() {
            let at = copies.numbers(rows)?;
            let mut sides = [
                copies.gather(0, &left, &at)?,
                copies.gather(1, &right, &at)?,
            ];
            if let Some((wide, _)) = &wide {
                for (side, wide) in sides.iter_mut().zip(wide) {
                    let wide = narrow(wide, 0, 0, rows.len() as i64)?;
                    copy_into(&wide, side)?;
                    *side = wide;
                }
            }
            let [left, right] = sides;
            Product::onto(sum, &left.transpose(0, 1), &right, 1.0, i > 0).write()?;
        }
        if wide.is_some() {
            copy_into(&matrix, sum)?;
        }
    }
    Ok(vec![out])
}

/// Reads the groups of `count` rows.
fn rows_by_group(cx: &KernelCx, count: i64, groups: i64) -> Result<GroupedRows> {
    let group = cx.ints(GROUP)?;
    if group.len() as i64 != count {
        let found = format!("{count} rows and the groups of {}", group.len());
        return Err(cx.shape_error("the numbers of rows differ").found(found));
    }
    Ok(GroupedRows::new(&group, groups))
}

/// Returns the first row if they follow each other.
fn first_of_run(rows: &[i64]) -> Option<i64> {
    let (first, last) = (rows.first()?, rows.last()?);
    (last - first + 1 == rows.len() as i64).then_some(*first)
}

/// Buffers for rows copied from two matrices, and for the indices of these rows.
struct Copies {
    at_once: usize,
    numbers: Tensor,
    sides: [Tensor; 2],
}

impl Copies {
    fn new(cx: &KernelCx, like: &Tensor, rows: i64, widths: [i64; 2]) -> Result<Copies> {
        let at_once = rows_at_once(cx.device, rows, widths[0] + widths[1]);
        let side = |width: i64| empty(&[at_once, width], like.kind(), like.device());
        Ok(Copies {
            at_once: at_once as usize,
            numbers: empty(&[at_once], Kind::Int64, like.device())?,
            sides: [side(widths[0])?, side(widths[1])?],
        })
    }

    /// Returns buffers of another type for the same rows.
    fn sides_in(&self, kind: Kind) -> Result<[Tensor; 2]> {
        let [left, right] = &self.sides;
        Ok([empty_as(left, kind)?, empty_as(right, kind)?])
    }

    /// Returns row numbers as indices.
    fn numbers(&self, rows: &[i64]) -> Result<Tensor> {
        let mut at = narrow(&self.numbers, 0, 0, rows.len() as i64)?;
        let numbers: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        if at.device() == Device::Cpu {
            bytes::edit(&mut at, |to| to.copy_from_slice(&numbers)).map_err(torch_error)?;
        } else {
            let here = bytes::copy_from(&numbers, Kind::Int64, &[rows.len() as i64]);
            copy_into(&at, &here.map_err(torch_error)?)?;
        }
        Ok(at)
    }

    /// Returns the room for so many rows of a side.
    fn part(&self, side: usize, rows: usize) -> Result<Tensor> {
        narrow(&self.sides[side], 0, 0, rows as i64)
    }

    /// Copies rows of a matrix.
    fn gather(&self, side: usize, x: &Tensor, at: &Tensor) -> Result<Tensor> {
        let to = self.part(side, at.size()[0] as usize)?;
        write("aten::index_select.out", args![x, 0, at, &to])?;
        Ok(to)
    }
}
