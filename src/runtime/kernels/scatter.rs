//! Writes at indices. Repeated indices are added in their order, so bits are reproducible.

use super::context::*;
use super::index::{flat, nd_positions, put, put_along, wrapped};
use ckpt_passes::ops::scatter::*;

kernels! {
    SCATTER_ELEMENTS => scatter_elements;
    SCATTER_ND => scatter_nd;
    ONE_HOT => one_hot;
}

/// Returns libtorch's name of a reduction.
fn reduction(cx: &KernelCx, name: &str) -> Result<&'static str> {
    match name {
        "mul" => Ok("prod"),
        "max" => Ok("amax"),
        "min" => Ok("amin"),
        other => Err(cx.bug(format!("the reduction `{other}` is not known"))),
    }
}

fn scatter_elements(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices, updates) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let axis = cx.axis(data.dim());
    let out = copied_as(data, data.kind())?;
    let at = wrapped(cx, indices, data.size()[axis])?;
    let name = cx.attrs.str("reduction");
    if matches!(name, "none" | "add") && backend(&out).sorts_indices() {
        to_places(&at, axis, &out.stride())?;
        put(&out, &flat(&at), &flat(&dense(updates)?), name == "add")?;
        return Ok(vec![out]);
    }
    let axis = axis as i64;
    let args = args![&out, axis, &at, updates];
    match name {
        "none" => write("aten::scatter_.src", args)?,
        "add" => write("aten::scatter_add_", args)?,
        other => {
            let args = args![&out, axis, &at, updates, reduction(cx, other)?, true];
            write("aten::scatter_reduce_.two", args)?;
        }
    };
    Ok(vec![out])
}

/// Turns row-major indices along one axis into row-major places of a tensor with these strides.
fn to_places(at: &Tensor, axis: usize, strides: &[i64]) -> Result<()> {
    let size = at.size();
    mul_into(at, &scalar(Kind::Int64, strides[axis] as f64)?)?;
    for (i, (n, stride)) in size.iter().zip(strides).enumerate() {
        if i != axis {
            let mut dims = vec![1; size.len()];
            dims[i] = *n;
            let along = Tensor::arange(*n, (Kind::Int64, at.device()));
            mul_into(&along, &scalar(Kind::Int64, *stride as f64)?)?;
            add_into(at, &along.view(dims.as_slice()))?;
        }
    }
    Ok(())
}

fn scatter_nd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices, updates) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let size = data.size();
    let tuple = indices.size()[indices.dim() - 1] as usize;
    let rows: i64 = size[..tuple].iter().product();
    let width: i64 = size[tuple..].iter().product();
    let out = copied_as(data, data.kind())?;
    let table = out.view([rows, width]);
    let tuples: i64 = indices.size()[..indices.dim() - 1].iter().product();
    let mut updates = updates.reshape([tuples, width]);
    let name = cx.attrs.str("reduction");
    let is_sorted = matches!(name, "none" | "add") && backend(&out).sorts_indices();
    if is_sorted {
        updates = dense(&updates)?;
    }
    let at = flat(&nd_positions(cx, indices, &size, 0)?);
    if is_sorted {
        put_along(&table, 0, &at, &updates, name == "add")?;
        return Ok(vec![out]);
    }
    match name {
        "add" => {
            write("aten::index_add_", args![&table, 0, &at, &updates, 1])?;
        }
        "none" => {
            write("aten::index_copy_", args![&table, 0, &at, &updates])?;
        }
        other => {
            let at = at.unsqueeze(1).expand([tuples, width], false);
            write(
                "aten::scatter_reduce_.two",
                args![&table, 0, &at, &updates, reduction(cx, other)?, true],
            )?;
        }
    }
    Ok(vec![out])
}

/// ONNX OneHot-11: indices out of range give a row of "off".
fn one_hot(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (indices, depth, values) = (cx.x(0)?, cx.ints(1)?, cx.x(2)?);
    let Some(depth) = depth.first().copied() else {
        return Err(cx.shape_error("`depth` is empty"));
    };
    let rank = indices.dim() as i64 + 1;
    let axis = cx.axis(rank as usize) as i64;
    let mut size = indices.size();
    size.insert(axis as usize, depth);
    let out = empty(&size, values.kind(), values.device())?;
    let (off, on) = (values.select(0, 0), values.select(0, 1));
    fill(&out, &off)?;
    let indices = indices.to_kind(Kind::Int64);
    let at = indices
        .where_self(&indices.ge(0), &(&indices + depth))
        .unsqueeze(axis);
    let classes: Vec<i64> = (0..rank)
        .map(|i| if i == axis { depth } else { 1 })
        .collect();
    let hot = Tensor::arange(depth, (Kind::Int64, out.device()))
        .view(classes.as_slice())
        .eq_tensor(&at);
    write("aten::masked_fill_.Tensor", args![&out, &hot, &on])?;
    Ok(vec![out])
}
