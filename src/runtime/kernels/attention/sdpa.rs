//! Attention by one of PyTorch's fused kernels: one call for the forward pass, one for the backward pass.
//!
//! Operands are passed in the library's layout, and results have the layout of our row. Nothing here waits for the device or
//! copies between it and the host. Where the result and the log-sum-exp are no operands of the gradient, as in a graph that was
//! compiled for another device, it recomputes them by the same kernel on the same operands.

use crate::runtime::kernels::context::*;
use ckpt_passes::analysis::sdpa::SdpaBackend;
use ckpt_passes::analysis::sdpa::layout::{ALIGNMENT_ELEMENTS, axes, strides_in_place};
use ckpt_passes::ops::attention::{ATTENTION_GRAD, LSE, Y};
use ckpt_torch::Ret;

/// Returns an operand as the library reads it: in place, or as a row-major copy.
fn readable(x: &Tensor) -> Result<Tensor> {
    let dims = x.size();
    let lost = || Error::bug("kernel", "an operand of attention without rows and columns");
    let axes = axes(&dims).ok_or_else(lost)?;
    let bytes = ALIGNMENT_ELEMENTS as usize * 2;
    let is_aligned = (x.data_ptr() as usize).is_multiple_of(bytes);
    if let Some(strides) = strides_in_place(&dims, &x.stride()).filter(|_| is_aligned) {
        return ckpt_torch::view(x, &axes, &strides).map_err(torch_error);
    }
    copied_as(x, x.kind())?
        .f_view(axes)
        .map_err(|e| tch_error(&e))
}

/// Returns a row-major tensor of the given dims.
fn row_major(x: &Tensor, dims: &[i64]) -> Result<Tensor> {
    dense(x)?.f_view(dims).map_err(|e| tch_error(&e))
}

struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: f64,
    causal: bool,
}

impl Operands {
    /// Reads the operands from slot `at` on.
    fn new(cx: &KernelCx, at: usize) -> Result<Operands> {
        Ok(Operands {
            q: readable(cx.x(at)?)?,
            k: readable(cx.x(at + 1)?)?,
            v: readable(cx.x(at + 2)?)?,
            scale: cx.number("scale"),
            causal: cx.flag("causal"),
        })
    }
}

/// The results of a forward kernel that its backward reads.
struct Done {
    y: Tensor,
    lse: Tensor,
    /// Further results, opaque to us.
    rest: Vec<Ret>,
}

fn attend(backend: SdpaBackend, x: &Operands) -> Result<Done> {
    let mut args = args![&x.q, &x.k, &x.v].to_vec();
    let (dropout, causal) = (Arg::from(0.0), Arg::from(x.causal));
    match backend {
        // The last argument asks for no probabilities for debugging.
        SdpaBackend::Flash => args.extend(args![dropout, causal, false]),
        // No bias, with the log-sum-exp.
        SdpaBackend::Efficient => args.extend(args![Arg::None, true, dropout, causal]),
        // No mask.
        SdpaBackend::Cpu => args.extend(args![dropout, causal, Arg::None]),
    }
    args.push(Arg::from(x.scale));
    let mut results = call_n(backend.names()[0], &args)?.into_iter();
    let (y, lse) = (taken(results.next())?, taken(results.next())?);
    Ok(Done {
        y,
        lse,
        rest: results.collect(),
    })
}

/// The alignment of the rows of a log-sum-exp that efficient reads, in elements.
const LSE_ROWS: i64 = 32;

/// Returns saved results as the backward kernels read them. Without dropout they read no state of a generator. A `y` that
/// `is_turned` has the heads of each row side by side.
fn saved(
    backend: SdpaBackend,
    x: &Operands,
    y: &Tensor,
    is_turned: bool,
    lse: &Tensor,
) -> Result<Done> {
    let e = |e| tch_error(&e);
    let dims = x.q.size();
    let (batch, heads, queries) = (dims[0], dims[1], dims[2]);
    let (keys, value_size) = (x.k.size()[2], x.v.size()[3]);
    let heads_inside = match is_turned {
        true => row_major(y, &[batch, queries, heads, value_size])?,
        false => {
            let y = row_major(y, &[batch, heads, queries, value_size])?;
            dense(&y.f_transpose(1, 2).map_err(e)?)?
        }
    };
    let mut lse = row_major(lse, &[batch, heads, queries])?;
    let mut rest = Vec::new();
    match backend {
        SdpaBackend::Flash => {
            rest = vec![Ret::None, Ret::None, Ret::Int(queries), Ret::Int(keys)];
        }
        SdpaBackend::Efficient if queries % LSE_ROWS != 0 => {
            // Rows that do not exist weigh exp(−∞).
            let missing = [0, -queries & (LSE_ROWS - 1)];
            lse = lse.f_pad(missing, "constant", f64::INFINITY).map_err(e)?;
        }
        _ => {}
    }
    Ok(Done {
        y: heads_inside.f_transpose(1, 2).map_err(e)?,
        lse,
        rest,
    })
}

/// Computes the gradients of q, k and v.
fn attend_back(
    backend: SdpaBackend,
    x: &Operands,
    dy: &Tensor,
    done: &Done,
) -> Result<[Tensor; 3]> {
    let mut args = args![dy, &x.q, &x.k, &x.v].to_vec();
    if backend == SdpaBackend::Efficient {
        // No bias.
        args.push(Arg::NoTensor);
    }
    args.extend(args![&done.y, &done.lse]);
    let (dropout, causal) = (Arg::from(0.0), Arg::from(x.causal));
    let rest = |n: usize| done.rest.get(n).map_or(Arg::NoTensor, passed_on);
    match backend {
        // Offsets of sequences of different lengths (none), the largest lengths, and the state of the generator.
        SdpaBackend::Flash => {
            args.extend((0..4).map(rest));
            args.extend([dropout, causal, rest(4), rest(5)]);
        }
        // The state of the generator, and no gradient of a bias.
        SdpaBackend::Efficient => {
            let mask = &[true, true, true, false];
            args.extend(args![rest(0), rest(1), dropout, mask, causal]);
        }
        SdpaBackend::Cpu => args.extend(args![dropout, causal, Arg::None]),
    }
    args.push(Arg::from(x.scale));
    let mut results = call_n(backend.names()[1], &args)?.into_iter();
    let mut next = || taken(results.next());
    Ok([next()?, next()?, next()?])
}

fn taken(result: Option<Ret>) -> Result<Tensor> {
    match result {
        Some(Ret::Tensor(tensor)) => Ok(tensor),
        other => Err(Error::bug(
            "kernel",
            format!("attention gave {other:?} in the place of a tensor"),
        )),
    }
}

/// Converts a result of the forward to an argument of the backward.
fn passed_on(result: &Ret) -> Arg<'_> {
    match result {
        Ret::Tensor(tensor) => Arg::Tensor(tensor),
        Ret::Int(n) => Arg::Int(*n),
        _ => Arg::NoTensor,
    }
}

/// Computes the results of a node by a backend's kernels.
///
/// # Errors
/// The library's.
pub fn run(pair: SdpaBackend, cx: &KernelCx) -> Result<Vec<Tensor>> {
    match cx.op == &ATTENTION_GRAD {
        true => backward(pair, cx),
        false => forward(pair, cx),
    }
}

fn forward(pair: SdpaBackend, cx: &KernelCx) -> Result<Vec<Tensor>> {
    let mut dims = cx.x(0)?.size();
    let rows = dims[..dims.len() - 1].to_vec();
    dims[rows.len()] = cx.x(2)?.size()[rows.len()];
    let Done { y, lse, .. } = attend(pair, &Operands::new(cx, 0)?)?;
    let lse = match cx.n_outs > 1 {
        true => {
            // Efficient pads it, for loads of whole blocks.
            let queries = dims[rows.len() - 1];
            let lse = lse.f_narrow(2, 0, queries).map_err(|e| tch_error(&e))?;
            Some(row_major(&lse, &rows)?)
        }
        false => None,
    };
    Ok([row_major(&y, &dims)?].into_iter().chain(lse).collect())
}

fn backward(pair: SdpaBackend, cx: &KernelCx) -> Result<Vec<Tensor>> {
    let gradients = {
        let x = Operands::new(cx, 1)?;
        let done = match (cx.opt(Y), cx.opt(LSE)) {
            (Some(y), Some(lse)) => {
                let is_turned = y.dim() != cx.x(0)?.dim();
                saved(pair, &x, y, is_turned, lse)?
            }
            _ => attend(pair, &x)?,
        };
        let dy = readable(cx.x(0)?)?;
        attend_back(pair, &x, &dy, &done)?
    };
    let mut gradients = gradients.map(Some);
    let mut outs = Vec::new();
    for want in cx.attrs.ints("wants") {
        let gradient = gradients.get_mut(*want as usize).and_then(Option::take);
        let gradient = gradient.ok_or_else(|| {
            Error::bug(
                "kernel",
                format!("a pair has no gradient of operand {want}"),
            )
        })?;
        outs.push(row_major(&gradient, &cx.x(*want as usize + 1)?.size())?);
    }
    Ok(outs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    fn operands() -> Operands {
        let x = || Tensor::ones([1, 2, 5, 8], (Kind::BFloat16, Device::Cpu));
        Operands {
            q: x(),
            k: x(),
            v: x(),
            scale: 0.25,
            causal: true,
        }
    }

    /// Arguments are checked against the schemas before libtorch looks for a kernel of the device: what comes back is that
    /// a CPU has none.
    #[test]
    fn arguments_fit_the_schemas() {
        let x = operands();
        for (pair, rest) in [
            (
                SdpaBackend::Flash,
                vec![
                    Ret::None,
                    Ret::None,
                    Ret::Int(5),
                    Ret::Int(5),
                    Ret::Tensor(x.q.shallow_clone()),
                    Ret::Tensor(x.q.shallow_clone()),
                ],
            ),
            (
                SdpaBackend::Efficient,
                vec![
                    Ret::Tensor(x.q.shallow_clone()),
                    Ret::Tensor(x.q.shallow_clone()),
                ],
            ),
        ] {
            let done = Done {
                y: x.q.shallow_clone(),
                lse: x.q.shallow_clone(),
                rest,
            };
            let forward = attend(pair, &x).err().unwrap();
            let backward = attend_back(pair, &x, &x.q, &done).err().unwrap();
            for (error, name) in [forward, backward].iter().zip(pair.names()) {
                let text = error.to_string();
                assert!(
                    text.contains("with arguments from the 'CPU' backend"),
                    "{name}: {text}"
                );
            }
            // Every argument is given: none but those that are kept for other kernels has a default that we rely on.
            for (name, given) in pair.names().into_iter().zip(match pair {
                SdpaBackend::Flash => [7, 15],
                _ => [8, 13],
            }) {
                let op = ckpt_torch::Op::find(name).unwrap();
                let (arguments, _) = op.schema().split_once("->").unwrap();
                let wanted = arguments.split(", ").filter(|a| *a != "*").count();
                assert_eq!(wanted, given, "{}", op.schema());
            }
        }
    }
}
