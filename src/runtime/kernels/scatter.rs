//! Writes at indices. Repeated indices add up in their order: the same bits every time.

use super::index::{axis_of, flat, nd_positions, wrapped};
use super::{Kernel, KernelCx, empty, write};
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::scatter::*;
use ckpt_passes::{Error, Result};
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&SCATTER_ELEMENTS, scatter_elements),
    (&SCATTER_ND, scatter_nd),
    (&ONE_HOT, one_hot),
];

fn copied(x: &Tensor) -> Result<Tensor> {
    let out = empty(&x.size(), x.kind(), x.device())?;
    write(
        "aten::copy_",
        "",
        &[Arg::Tensor(&out), Arg::Tensor(x), Arg::Bool(false)],
    )?;
    Ok(out)
}

/// libtorch's name of a reduction.
fn reduction(cx: &KernelCx, name: &str) -> Result<&'static str> {
    match name {
        "mul" => Ok("prod"),
        "max" => Ok("amax"),
        "min" => Ok("amin"),
        other => Err(Error::bug(
            "kernel",
            format!("{}: the reduction `{other}` is not known", cx.op.name),
        )),
    }
}

fn scatter_elements(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices, updates) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let axis = axis_of(cx, data.dim());
    let out = copied(data)?;
    let at = wrapped(cx, indices, data.size()[axis])?;
    let mut args = vec![
        Arg::Tensor(&out),
        Arg::Int(axis as i64),
        Arg::Tensor(&at),
        Arg::Tensor(updates),
    ];
    match cx.attrs.str("reduction") {
        "none" => write("aten::scatter_", "src", &args)?,
        "add" => write("aten::scatter_add_", "", &args)?,
        other => {
            args.extend([Arg::Str(reduction(cx, other)?), Arg::Bool(true)]);
            write("aten::scatter_reduce_", "two", &args)?;
        }
    };
    Ok(vec![out])
}

fn scatter_nd(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (data, indices, updates) = (cx.x(0)?, cx.x(1)?, cx.x(2)?);
    let size = data.size();
    let tuple = indices.size()[indices.dim() - 1] as usize;
    let rows: i64 = size[..tuple].iter().product();
    let width: i64 = size[tuple..].iter().product();
    let out = copied(data)?;
    let table = out.view([rows, width]);
    let tuples: i64 = indices.size()[..indices.dim() - 1].iter().product();
    let updates = updates.reshape([tuples, width]);
    let at = flat(&nd_positions(cx, indices, &size, 0)?);
    match cx.attrs.str("reduction") {
        "add" => {
            write(
                "aten::index_add_",
                "",
                &[
                    Arg::Tensor(&table),
                    Arg::Int(0),
                    Arg::Tensor(&at),
                    Arg::Tensor(&updates),
                    Arg::Int(1),
                ],
            )?;
        }
        "none" => {
            write(
                "aten::index_copy_",
                "",
                &[
                    Arg::Tensor(&table),
                    Arg::Int(0),
                    Arg::Tensor(&at),
                    Arg::Tensor(&updates),
                ],
            )?;
        }
        other => {
            let at = at.unsqueeze(1).expand([tuples, width], false);
            write(
                "aten::scatter_reduce_",
                "two",
                &[
                    Arg::Tensor(&table),
                    Arg::Int(0),
                    Arg::Tensor(&at),
                    Arg::Tensor(&updates),
                    Arg::Str(reduction(cx, other)?),
                    Arg::Bool(true),
                ],
            )?;
        }
    }
    Ok(vec![out])
}

/// ONNX OneHot-11: indices out of range give a row of "off".
fn one_hot(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let (indices, depth, values) = (cx.x(0)?, cx.ints(1)?, cx.x(2)?);
    let Some(depth) = depth.first().copied() else {
        return Err(Error::model("shape", "OneHot: `depth` is empty"));
    };
    let rank = indices.dim() as i64 + 1;
    let axis = cx.attrs.int("axis");
    let axis = if axis < 0 { axis + rank } else { axis };
    let mut size = indices.size();
    size.insert(axis as usize, depth);
    let out = empty(&size, values.kind(), values.device())?;
    let (off, on) = (values.select(0, 0), values.select(0, 1));
    write(
        "aten::fill_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(&off)],
    )?;
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
    write(
        "aten::masked_fill_",
        "Tensor",
        &[Arg::Tensor(&out), Arg::Tensor(&hot), Arg::Tensor(&on)],
    )?;
    Ok(vec![out])
}
