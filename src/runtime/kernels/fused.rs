//! Fused chains: one generated kernel on a device; on the host step by step, with libtorch's functions.

use super::context::*;
use crate::runtime::generated;
use ckpt_passes::ir::arithmetic::{Elements, Functions, Program};
use ckpt_passes::transform::chains::{FUSED, PROGRAM};

/// The kernel of fused chains.
pub const KERNELS: &[(&OpDef, Kernel)] = &[(&FUSED, fused)];

fn fused(cx: &KernelCx) -> Result<Vec<Tensor>> {
    let text = cx.attrs.str(PROGRAM);
    let program = generated::program(text)?;
    let operands = cx.all();
    let outs = results(cx, &program, &operands)?;
    if let Device::Cuda(device) = outs[0].device() {
        generated::launch(text, &program, &operands, &outs, device)?;
        return Ok(outs);
    }
    let computed = on_host(&program, &operands, &outs[0].size(), &Libtorch);
    for (out, values) in outs.iter().zip(computed) {
        copy_into(out, &Tensor::from_slice(&values).reshape(out.size()))?;
    }
    Ok(outs)
}

/// Makes the results; the first may be an operand.
fn results(cx: &KernelCx, program: &Program, operands: &[&Tensor]) -> Result<Vec<Tensor>> {
    let dims = space(operands);
    let device = operands.first().map_or(Device::Cpu, |x| x.device());
    let one = |(i, (_, dtype)): (usize, &(usize, _))| {
        let kind = crate::runtime::convert::kind(*dtype)?;
        match i {
            0 => cx.result(&dims, kind, device),
            _ => empty(&dims, kind, device),
        }
    };
    program.results.iter().enumerate().map(one).collect()
}

/// Returns the sizes that operands are broadcast to. The last axis of an operand may be half of it.
pub fn space(operands: &[&Tensor]) -> Vec<i64> {
    let sizes: Vec<Vec<i64>> = operands.iter().map(|x| x.size()).collect();
    let rank = sizes.iter().map(Vec::len).max().unwrap_or(0);
    let axis = |i: usize| {
        let seen = (sizes.iter()).filter_map(|s| s.get((i + s.len()).checked_sub(rank)?).copied());
        match seen.clone().any(|n| n == 0) {
            true => 0,
            false => seen.max().unwrap_or(1),
        }
    };
    (0..rank).map(axis).collect()
}

/// Computes the results of a program on the host, in float32.
pub fn on_host(
    program: &Program,
    operands: &[&Tensor],
    dims: &[i64],
    functions: &dyn Functions,
) -> Vec<Vec<f32>> {
    let width = dims.last().copied().unwrap_or(1);
    let load = |input: usize, partner: bool| {
        let x = operands[input].to_kind(Kind::Float);
        let last = x.size().last().copied().unwrap_or(1);
        let x = match last != 1 && last != width {
            true => Tensor::cat(&[&x, &x], -1),
            false => x,
        };
        let x = x.expand(dims, false);
        let x = match partner {
            true => x.roll(width / 2, -1),
            false => x,
        };
        Vec::<f32>::try_from(x.contiguous().reshape([-1])).expect("float32 on the host")
    };
    let elements = Elements {
        rows: dims[..dims.len().saturating_sub(1)].iter().product::<i64>() as usize,
        width: width as usize,
        load: &load,
    };
    program.evaluate(&elements, functions)
}

/// libtorch's functions in float32. Their results depend on whether an element is computed in a vector, so they are called on
/// all elements at once.
pub struct Libtorch;

impl Functions for Libtorch {
    fn call(&self, name: &str, operands: &[&[f32]]) -> Option<Vec<f32>> {
        let x: Vec<Tensor> = operands.iter().map(|x| Tensor::from_slice(x)).collect();
        let result = match name {
            "sub_product" => call("aten::addcmul", args![&x[0], &x[1], &x[2], -1]),
            "add_product" => call("aten::addcmul", args![&x[0], &x[1], &x[2], 1]),
            "gelu" => call("aten::gelu", args![&x[0], "none"]),
            "gelu_tanh" => call("aten::gelu", args![&x[0], "tanh"]),
            "gelu_grad" => call("aten::gelu_backward", args![&x[1], &x[0], "none"]),
            "gelu_tanh_grad" => call("aten::gelu_backward", args![&x[1], &x[0], "tanh"]),
            "silu_grad" => call("aten::silu_backward", args![&x[1], &x[0]]),
            "tanh_grad" => call("aten::tanh_backward", args![&x[1], &x[0]]),
            function => call(&format!("aten::{function}"), args![&x[0]]),
        };
        Vec::<f32>::try_from(result.ok()?).ok()
    }

    fn row_sums(&self, x: &[f32], width: usize) -> Vec<f32> {
        let rows = Tensor::from_slice(x).reshape([-1, width as i64]);
        let sums = rows.sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
        Vec::<f32>::try_from(sums).expect("float32 on the host")
    }
}
