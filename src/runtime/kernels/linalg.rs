//! Systems of linear equations.

use super::context::*;
use ckpt_passes::ops::linalg::*;
use ckpt_torch::memory;

kernels! {
    SOLVE_TRIANGULAR => solve_triangular;
}

/// LAPACK solves in the tensor that holds B, in float32 for 16-bit types.
fn solve_triangular(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (a, b) = (cx.x(0)?, cx.x(1)?);
    let (size_a, size_b) = (a.size(), b.size());
    let [.., n, columns] = size_a[..] else {
        return Err(cx.shape_error("`A` is not a matrix"));
    };
    let inner = size_b.len() - if cx.flag("left") { 2 } else { 1 };
    if n != columns || size_b[inner] != n {
        return Err(cx.misfit(format!("{size_a:?} and {size_b:?}")));
    }
    let batch_a = &size_a[..size_a.len() - 2];
    let mut dims = broadcast_sizes(&[batch_a, &size_b[..size_b.len() - 2]]);
    let wide = [&dims[..], &[n, n]].concat();
    dims.extend(&size_b[size_b.len() - 2..]);
    let out = cx.result(&dims, b.kind(), b.device())?;
    if out.numel() == 0 {
        return Ok(vec![out]);
    }
    let computed = match is_narrow(a.kind()) {
        true => Kind::Float,
        false => a.kind(),
    };
    let a = match read_in_place(&sized(a)?, &dims) {
        Some(read) => strided(a, &read.dims, &read.strides)?,
        None => {
            let copy = empty(&wide, computed, a.device())?;
            copy_into(&copy, a)?;
            copy
        }
    };
    let x = match computed == b.kind() {
        true => out.shallow_clone(),
        false => empty(&dims, computed, b.device())?,
    };
    if cx.overwrites.is_none() || computed != b.kind() {
        copy_into(&x, b)?;
    }
    let [upper, left, unit] = ["upper", "left", "unitriangular"].map(|name| cx.flag(name));
    let scratch = memory::Scratch::begin();
    write(
        "aten::linalg_solve_triangular.out",
        args![&a, &x, upper, left, unit, &x],
    )?;
    drop(scratch);
    if computed != b.kind() {
        copy_into(&out, &x)?;
    }
    Ok(vec![out])
}
