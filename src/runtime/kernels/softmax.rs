//! Softmax, its logarithm, and their gradients.

use super::context::*;
use ckpt_passes::ops::softmax::*;

kernels! {
    SOFTMAX => forward("aten::_softmax.out");
    LOG_SOFTMAX => forward("aten::_log_softmax.out");
    SOFTMAX_GRAD => backward("aten::_softmax_backward_data.out");
    LOG_SOFTMAX_GRAD => backward("aten::_log_softmax_backward_data.out");
}

fn forward(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let x = dense(cx.x(0)?)?;
    let out = cx.result_like(&x)?;
    write(name, args![&x, cx.axis(x.dim()) as i64, false, &out])?;
    Ok(vec![out])
}

fn backward(cx: &KernelCx, name: &str) -> Result<Vec<Tensor>> {
    let (y, dy) = (dense(cx.x(0)?)?, dense(cx.x(1)?)?);
    let out = cx.result_like(&y)?;
    let axis = cx.axis(y.dim()) as i64;
    write(name, args![&dy, &y, axis, y.kind(), &out])?;
    Ok(vec![out])
}
