//! Attention and its gradient in tiles: a few queries of a few heads at a time, as `ops::attention::plan` plans them.
//!
//! One block of memory holds all buffers. Keys that no query of a tile may see, or
//! that are of other segments, are not read. Gradients are summed in one
//! order, whatever the number of threads.
//!
//! A node with a pinned fused kernel of PyTorch runs that kernel instead ([`sdpa`]).

pub mod check;
mod fused;
pub mod sdpa;
mod segments;
mod tiles;

use super::context::*;
use crate::runtime::convert;
use ckpt_passes::ir::Attrs;
use ckpt_passes::ir::op::Sized;
use ckpt_passes::ops::attention::*;
use tiles::*;

/// Kernels for attention and its gradient, fused or in tiles.
pub const KERNELS: &[(&OpDef, Kernel)] =
    &[(&ATTENTION, attention), (&ATTENTION_GRAD, attention_grad)];

fn attention(cx: &KernelCx) -> Result<Vec<Tensor>> {
    if let Some(pair) = cx.pair {
        return sdpa::run(pair, cx);
    }
    let plan = plan_of(cx, AttentionPlan::forward)?;
    let (q, v) = (cx.x(0)?, cx.x(2)?);
    let mut dims = q.size();
    let rows = dims[..dims.len() - 1].to_vec();
    dims[rows.len()] = plan.value_size;
    let y = empty(&dims, q.kind(), q.device())?;
    let lse = (cx.n_outs > 1)
        .then(|| empty(&rows, convert::kind(plan.dtype)?, v.device()))
        .transpose()?;
    if plan.is_empty() {
        zero(&y)?;
        if let Some(lse) = &lse {
            copy_into(lse, &scalar(lse.kind(), f64::NEG_INFINITY)?)?;
        }
        return Ok([y].into_iter().chain(lse).collect());
    }
    let work = Work::new(cx, plan, (0, SEGMENTS), true)?;
    let (ys, stats) = (
        with_heads(&y),
        lse.as_ref().map(|l| with_heads(&l.unsqueeze(-1))),
    );
    work.for_all(
        |_| Ok(()),
        |x, tile| attend(&work, x, tile, &ys, stats.as_ref()),
        |_| Ok(()),
    )?;
    Ok([y].into_iter().chain(lse).collect())
}

/// Computes a tile of the result and of the log-sum-exp.
fn attend(work: &Work, x: &Operands, tile: &Tile, y: &Tensor, lse: Option<&Tensor>) -> Result<()> {
    let y = work.of_tile(y, tile);
    let lse = lse.map(|lse| work.of_tile(lse, tile));
    if tile.keys.is_empty() {
        if let Some(lse) = lse {
            copy_into(&lse, &work.nothing)?;
        }
        return zero(&y);
    }
    if work.is_fused {
        return fused::forward(work, x, tile, &y, lse.as_ref());
    }
    let weights = work.weights(x, tile)?;
    let (heads, rows) = (tile.part.heads, tile.count());
    let buffers = &work.plan.buffers;
    if let Some(lse) = lse {
        let column = |span| work.buffer(span).map(|x| seen_as(&x, &[heads, rows, 1]));
        write("aten::log.out", args![&column(buffers.sum)?, &lse])?;
        add_into(&lse, &column(buffers.top)?)?;
    }
    let result = seen_as(
        &work.buffer(buffers.result)?,
        &[heads, rows, work.plan.value_size],
    );
    product(&result, &weights, &x.v, 1.0, false)?;
    work.divide(&result, tile)?;
    copy_into(&y, &result)
}

/// The targets of the gradients, with heads axes; sums in the compute type.
struct Gradients {
    dq: Option<Tensor>,
    dk: Option<Tensor>,
    dv: Option<Tensor>,
    dbias: Option<Tensor>,
}

fn attention_grad(cx: &KernelCx) -> Result<Vec<Tensor>> {
    if let Some(pair) = cx.pair {
        return sdpa::run(pair, cx);
    }
    let plan = plan_of(cx, AttentionPlan::backward)?;
    let wants = cx.attrs.ints("wants");
    let mut outs = Vec::new();
    for want in wants {
        let x = cx.x(*want as usize + 1)?;
        outs.push(empty_like(x)?);
    }
    if plan.is_empty() {
        outs.iter().try_for_each(zero)?;
        return Ok(outs);
    }
    let work = Work::new(cx, plan, (1, GRAD_SEGMENTS), !wants.contains(&3))?;
    let buffers = work.plan.buffers;
    let dy = with_heads(cx.x(0)?);
    let dlse = cx.opt(DLSE).map(|x| with_heads(&x.unsqueeze(-1)));
    let find = |slot: i64| wants.iter().position(|w| *w == slot).map(|i| &outs[i]);
    let dbias = find(3).map(|out| match buffers.dbias {
        None => out.alias(),
        Some(span) => seen_as(&work.part_of_block(span), &out.size()),
    });
    let into = Gradients {
        dq: find(0).map(with_heads),
        dk: find(1).map(with_heads),
        dv: find(2).map(with_heads),
        dbias: dbias.as_ref().map(|sum| {
            let missing = work.q.dim() - sum.dim();
            (0..missing).fold(sum.alias(), |t, _| t.unsqueeze(0))
        }),
    };
    if let Some(sum) = &dbias {
        zero(sum)?;
    }
    let sums = |part: Part| {
        let sum = |x: &Option<Tensor>, span: Option<Span>| {
            x.as_ref().map(|x| {
                let own = work.of_keys(x, part);
                match span {
                    None => own,
                    Some(span) => seen_as(&work.part_of_block(span), &own.size()),
                }
            })
        };
        (sum(&into.dk, buffers.dk), sum(&into.dv, buffers.dv))
    };
    work.for_all(
        |part| {
            let (dk, dv) = sums(part);
            dk.iter().chain(&dv).try_for_each(zero)
        },
        |x, tile| {
            let (dk, dv) = sums(tile.part);
            backward_tile(&work, x, tile, (&dy, dlse.as_ref()), &into, dk, dv)
        },
        |part| {
            let (dk, dv) = sums(part);
            for (to, sum, span) in [(&into.dk, dk, buffers.dk), (&into.dv, dv, buffers.dv)] {
                if let (Some(to), Some(sum)) = (to, sum)
                    && span.is_some()
                {
                    copy_into(&work.of_keys(to, part), &sum)?;
                }
            }
            Ok(())
        },
    )?;
    if let (Some(out), Some(sum)) = (find(3), &dbias)
        && buffers.dbias.is_some()
    {
        copy_into(out, sum)?;
    }
    Ok(outs)
}

/// Adds the contribution of a tile to every gradient.
fn backward_tile(
    work: &Work,
    x: &Operands,
    tile: &Tile,
    (dy, dlse): (&Tensor, Option<&Tensor>),
    into: &Gradients,
    dk: Option<Tensor>,
    dv: Option<Tensor>,
) -> Result<()> {
    let buffers = &work.plan.buffers;
    let dq = into.dq.as_ref().map(|dq| work.of_tile(dq, tile));
    if tile.keys.is_empty() {
        return dq.iter().try_for_each(zero);
    }
    let dy = work.of_tile(dy, tile);
    let dlse = dlse.map(|x| work.of_tile(x, tile));
    if work.is_fused {
        let cotangents = (&dy, dlse.as_ref());
        return fused::backward(
            work,
            x,
            tile,
            cotangents,
            dq.as_ref(),
            dk.as_ref(),
            dv.as_ref(),
        );
    }
    let p = work.weights(x, tile)?;
    work.divide(&p, tile)?;
    let dy = work.readable(dy, buffers.dy)?;
    let seen = |x: Tensor| x.narrow(1, tile.keys.start, tile.key_count());
    if let Some(dv) = dv {
        product(&seen(dv), &p.transpose(1, 2), &dy, 1.0, true)?;
    }
    let Some(slopes) = buffers.slopes else {
        return Ok(());
    };
    let slopes = seen_as(&work.part_of_block(slopes), &p.size());
    product(&slopes, &dy, &x.v.transpose(1, 2), 1.0, false)?;
    work.softmax_grad(&p, &slopes)?;
    if let Some(dlse) = dlse {
        write("aten::addcmul_", args![&slopes, &p, &dlse, 1.0])?;
    }
    if let Some(dbias) = &into.dbias {
        add_summed(work, &slopes, &p, tile, dbias)?;
    }
    if let Some(span) = buffers.capped {
        let tanh = seen_as(&work.part_of_block(span), &p.size());
        mul_into(&tanh, &tanh)?;
        write("aten::addcmul_", args![&slopes, &slopes, &tanh, -1.0])?;
    }
    if let Some(dq) = dq {
        let result = seen_as(&work.buffer(buffers.result)?, &dq.size());
        product(&result, &slopes, &x.k, work.scale, false)?;
        copy_into(&dq, &result)?;
    }
    if let Some(dk) = dk {
        product(&seen(dk), &slopes.transpose(1, 2), &x.q, work.scale, true)?;
    }
    Ok(())
}

/// Adds the slopes of a tile to the bias's gradient, summed over axes along which the bias was broadcast. The sums are
/// computed in the buffer of the probabilities, which are no longer needed: each is at most half as large as the last.
fn add_summed(
    work: &Work,
    slopes: &Tensor,
    free: &Tensor,
    tile: &Tile,
    dbias: &Tensor,
) -> Result<()> {
    let target = work.of_tile(dbias, tile);
    let target = match target.size()[2] == work.plan.band.keys {
        true => target.narrow(2, tile.keys.start, tile.key_count()),
        false => target,
    };
    let free = free.view([-1]);
    let mut at = 0;
    let mut x = slopes.alias();
    for axis in [2, 1, 0] {
        let mut size = x.size();
        if target.size()[axis] != 1 || size[axis] == 1 {
            continue;
        }
        let single = size.iter().product::<i64>() == size[axis];
        size[axis] = 1;
        // For a single result libtorch allocates memory for each thread, so the sum is computed twice.
        let (from, axis, size) = match single {
            true => (
                x.view([-1]).expand([2, x.numel() as i64], false),
                1,
                vec![2, 1],
            ),
            false => (x.alias(), axis as i64, size),
        };
        let out = free
            .narrow(0, at, size.iter().product())
            .view(size.as_slice());
        at += out.numel() as i64;
        write(
            "aten::sum.IntList_out",
            args![&from, &[axis], true, Arg::None, &out],
        )?;
        x = match single {
            true => out.narrow(0, 0, 1).view([1, 1, 1]),
            false => out,
        };
    }
    add_into(&target, &x)
}

fn plan_of(
    cx: &KernelCx,
    plan: impl Fn(&Attrs, &[Option<Sized>]) -> Option<AttentionPlan>,
) -> Result<AttentionPlan> {
    plan(cx.attrs, &cx.sized_from(0)?).ok_or_else(|| cx.bug("operands without a plan"))
}
