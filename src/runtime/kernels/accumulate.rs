//! Sums of 16-bit terms, which are widened a few rows at a time, and sums of products that are never stored whole.

use super::arith;
use super::context::*;
use super::matmul::{check_inner, prepared};
use super::product::Product;
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ops::accumulate::*;
use ckpt_passes::ops::matmul::gemm_plan;

/// The kernels of this family, by op.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&ACCUMULATE, accumulate), (&ADD_PRODUCT, add_product)];

fn accumulate(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (sum, part) = (cx.x(0)?, cx.x(1)?);
    if sum.kind() == part.kind() {
        return arith::binary(cx, "aten::add.out", args![1]);
    }
    let size = part.size();
    let out = cx.result_like(sum)?;
    if part.numel() == 0 {
        return Ok(vec![out]);
    }
    let buffer = wide_rows(cx.device, &size, sum)?;
    add_widened(sum, part, &out, &buffer)?;
    Ok(vec![out])
}

/// Makes a buffer for some rows of `size`, in the type of the sum.
fn wide_rows(device: DeviceKind, size: &[i64], sum: &Tensor) -> Result<Tensor> {
    let mut dims = size.to_vec();
    if let Some(rows) = dims.first_mut() {
        *rows = rows_at_once(device, size);
    }
    empty(&dims, sum.kind(), sum.device())
}

/// Writes sum + part into `out`, as many rows at a time as `buffer` has.
fn add_widened(sum: &Tensor, part: &Tensor, out: &Tensor, buffer: &Tensor) -> Result<()> {
    let size = part.size();
    let total = size.first().copied().unwrap_or(1);
    let most = buffer.size().first().copied().unwrap_or(1);
    for (at, count) in blocks(total, most) {
        let wide = rows(buffer, 0, count)?;
        copy_into(&wide, &rows(part, at, count)?)?;
        let (own, target) = (rows(sum, at, count)?, rows(out, at, count)?);
        write("aten::add.out", args![&own, &wide, 1, &target])?;
    }
    Ok(())
}

/// Computes sum + A'·B', in one call if all have one type.
fn add_product(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (sum, a, b) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let plan = gemm_plan(&sized(a)?, &sized(b)?, cx.flag("transA"), cx.flag("transB"));
    let out = cx.result_like(sum)?;
    if plan.is_empty() {
        if out.data_ptr() != sum.data_ptr() {
            copy_into(&out, sum)?;
        }
        return Ok(vec![out]);
    }
    if a.kind() != sum.kind() && !adds_narrow(sum, a) {
        add_widened_product(cx, &out)?;
        return Ok(vec![out]);
    }
    let (left, right) = (prepared(a, &plan.a)?, prepared(b, &plan.b)?);
    check_inner(cx, a, b, left.size()[1], right.size()[0])?;
    if a.kind() == sum.kind() {
        add_matrices(sum, &left, &right, &out)?;
    } else {
        let args = args![sum, &left, &right, out.kind(), 1.0, 1.0, &out];
        write("aten::addmm.dtype_out", args)?;
    }
    Ok(vec![out])
}

/// Returns whether libtorch adds a product of 16-bit matrices to a float32 sum without rounding the product or widening the
/// matrices.
fn adds_narrow(sum: &Tensor, a: &Tensor) -> bool {
    backend(sum).adds_narrow_products() && is_narrow(a.kind()) && sum.kind() == Kind::Float
}

/// Writes sum + a·b into `out`.
fn add_matrices(sum: &Tensor, a: &Tensor, b: &Tensor, out: &Tensor) -> Result<()> {
    Product {
        sum: Some((sum, 1.0)),
        ..Product::plain(a, b, out)
    }
    .write()
}

/// As [`add_matrices`] for 16-bit operands, some rows of A' and columns of B' at a time.
fn add_widened_product(cx: &KernelCx, out: &Tensor) -> Result<()> {
    let sum = cx.x(0)?;
    let left = Widened::new(cx.x(1)?, sum, !cx.flag("transA"))?;
    let right = Widened::new(cx.x(2)?, sum, cx.flag("transB"))?;
    check_inner(cx, left.of, right.of, left.inner, right.inner)?;
    for (column, columns) in blocks(right.count, right.most) {
        let b = transposed(&right.take(column, columns)?)?;
        for (row, rows) in blocks(left.count, left.most) {
            let a = left.take(row, rows)?;
            let block = |x: &Tensor| narrow(&narrow(x, 0, row, rows)?, 1, column, columns);
            add_matrices(&block(sum)?, &a, &b, &block(out)?)?;
        }
    }
    Ok(())
}

/// An operand of a product that is widened some vectors at a time: rows of A' or columns of B'.
struct Widened<'a> {
    of: &'a Tensor,
    /// The axis that counts the vectors.
    axis: i64,
    count: i64,
    inner: i64,
    /// Vectors in the buffer, which has the operand's layout.
    most: i64,
    buffer: Tensor,
}

impl<'a> Widened<'a> {
    fn new(of: &'a Tensor, sum: &Tensor, is_first: bool) -> Result<Widened<'a>> {
        let size = of.size();
        let axis = i64::from(!is_first);
        let (count, inner) = (size[usize::from(!is_first)], size[usize::from(is_first)]);
        let most = product_rows_at_once(count, inner);
        let dims = match is_first {
            true => [most, inner],
            false => [inner, most],
        };
        let buffer = empty(&dims, sum.kind(), sum.device())?;
        Ok(Widened {
            of,
            axis,
            count,
            inner,
            most,
            buffer,
        })
    }

    /// Returns some widened vectors as rows.
    fn take(&self, at: i64, count: i64) -> Result<Tensor> {
        let some = narrow(&self.buffer, self.axis, 0, count)?;
        copy_into(&some, &narrow(self.of, self.axis, at, count)?)?;
        match self.axis {
            0 => Ok(some),
            _ => transposed(&some),
        }
    }
}

fn transposed(x: &Tensor) -> Result<Tensor> {
    call("aten::t", args![x])
}

/// Returns rows of a tensor, or all of a tensor of rank 0.
fn rows(x: &Tensor, at: i64, count: i64) -> Result<Tensor> {
    match x.dim() {
        0 => Ok(x.alias()),
        _ => narrow(x, 0, at, count),
    }
}
