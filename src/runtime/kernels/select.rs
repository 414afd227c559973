//! Selection along an axis.

use super::shape::axes_of;
use super::{Kernel, KernelCx, call, copy_into, empty, scalar, write};
use ckpt_passes::Result;
use ckpt_passes::ir::OpDef;
use ckpt_passes::ops::select::*;
use ckpt_torch::Arg;
use tch::{Kind, Tensor};

pub const KERNELS: &[(&OpDef, Kernel)] = &[
    (&ARG_MAX, |cx| arg(cx, "aten::argmax")),
    (&ARG_MIN, |cx| arg(cx, "aten::argmin")),
    (&TOP_K, top_k),
];

/// libtorch finds the first of several. The last one is the first of the reversed operand, counted from the end.
fn arg(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let mut dims = x.size();
    let axis = axes_of(&[cx.attrs.int("axis")], dims.len())[0];
    let (length, keep) = (dims[axis], cx.attrs.int("keepdims") != 0);
    if keep {
        dims[axis] = 1;
    } else {
        dims.remove(axis);
    }
    let out = empty(&dims, Kind::Int64, x.device())?;
    let last = cx.attrs.int("select_last_index") != 0;
    let axis = axis as i64;
    let operand = match last {
        true => call("aten::flip", "", &[Arg::Tensor(x), Arg::Ints(&[axis])])?,
        false => x.alias(),
    };
    let args = [
        Arg::Tensor(&operand),
        Arg::Int(axis),
        Arg::Bool(keep),
        Arg::Tensor(&out),
    ];
    write(name, "out", &args)?;
    if last {
        let end = scalar(Kind::Int64, (length - 1) as f64)?;
        let args = [
            Arg::Tensor(&end),
            Arg::Tensor(&out),
            Arg::Int(1),
            Arg::Tensor(&out),
        ];
        write("aten::sub", "out", &args)?;
    }
    Ok(vec![out])
}

fn top_k(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let x = cx.x(0)?;
    let mut dims = x.size();
    let axis = axes_of(&[cx.attrs.int("axis")], dims.len())[0];
    let k = cx.ints(1)?[0];
    dims[axis] = k;
    let values = empty(&dims, x.kind(), x.device())?;
    let indices = empty(&dims, Kind::Int64, x.device())?;
    let all = empty(&x.size(), x.kind(), x.device())?;
    let places = empty(&x.size(), Kind::Int64, x.device())?;
    let args = [
        Arg::Tensor(x),
        Arg::Bool(true),
        Arg::Int(axis as i64),
        Arg::Bool(cx.attrs.int("largest") != 0),
        Arg::Tensor(&all),
        Arg::Tensor(&places),
    ];
    write("aten::sort", "values_stable", &args)?;
    for (to, from) in [(&values, &all), (&indices, &places)] {
        copy_into(to, &from.narrow(axis as i64, 0, k))?;
    }
    Ok(vec![values, indices])
}
