//! Tiles in one call each, on processors with our own products, in the planned buffers.
//!
//! The choice depends only on processor, types, sizes and requested results, so a node and its recomputation make the same.

use super::tiles::*;
use crate::runtime::convert::torch_error;
use ckpt_passes::Result;
use ckpt_passes::ops::attention::Span;
use ckpt_torch::attention::{Gradients, Lent, Tile as Fused, attend, attend_back};
use tch::{Kind, Tensor};

fn lent(tensor: &Option<Tensor>) -> Option<Lent<'_>> {
    tensor.as_ref().map(Lent::from)
}

/// The buffers of a call, views of the planned block.
struct Buffers {
    scores: Tensor,
    sums: Option<Tensor>,
    result: Option<Tensor>,
    q_copy: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Buffers {
    fn new(work: &Work, x: &Operands, tile: &Tile, columns: i64) -> Result<Buffers> {
        let (heads, rows, keys) = (tile.part.heads, tile.count(), tile.key_count());
        let (spans, seen) = (&work.plan.buffers, |span: Option<Span>, columns: i64| {
            span.map(|span| seen_as(&work.part_of_block(span), &[heads, rows, columns]))
        });
        let bias = match &work.bias {
            None => work
                .same_segment(tile)?
                .map(|same| same.expand([heads, rows, keys], false)),
            Some(bias) => {
                let bias = work.of_tile(bias, tile).narrow(2, tile.keys.start, keys);
                let readable = match bias.kind() {
                    Kind::Bool => bias,
                    _ => work.readable(bias, spans.bias)?,
                };
                Some(readable.expand([heads, rows, keys], false))
            }
        };
        Ok(Buffers {
            scores: seen_as(&work.buffer(spans.scores)?, &[heads, rows, keys]),
            sums: seen(spans.sum, 1),
            result: seen(spans.result, columns),
            q_copy: seen(spans.q, x.q.size()[2]),
            bias,
        })
    }

    fn tile<'a>(&'a self, work: &Work, x: &'a Operands, tile: &Tile) -> Fused<'a> {
        let within = |at: i64| at.saturating_sub(tile.keys.start);
        let (first, end) = (
            work.plan.band.first(tile.rows.start),
            work.plan.band.end(tile.rows.start),
        );
        Fused {
            q: Lent::from(&x.q),
            k: Lent::from(&x.k),
            v: Lent::from(&x.v),
            bias: lent(&self.bias),
            scores: Lent::from(&self.scores),
            sums: lent(&self.sums),
            result: lent(&self.result),
            q_copy: lent(&self.q_copy),
            scale: work.scale,
            softcap: work.softcap,
            first: first.map_or(i64::MIN, within),
            end: end.map_or(i64::MAX, within),
            empty_is_nan: work.empty_is_nan.into(),
        }
    }
}

/// Computes a tile of the result and of the log-sum-exp.
pub fn forward(
    work: &Work,
    x: &Operands,
    tile: &Tile,
    y: &Tensor,
    lse: Option<&Tensor>,
) -> Result<()> {
    let buffers = Buffers::new(work, x, tile, work.plan.value_size)?;
    attend(&buffers.tile(work, x, tile), y.into(), lse.map(Lent::from)).map_err(torch_error)
}

/// Adds a tile's contribution to the gradients of queries, keys and values; `dk` and `dv` hold all keys of the part.
pub fn backward(
    work: &Work,
    x: &Operands,
    tile: &Tile,
    (dy, dlse): (&Tensor, Option<&Tensor>),
    dq: Option<&Tensor>,
    dk: Option<&Tensor>,
    dv: Option<&Tensor>,
) -> Result<()> {
    let buffers = Buffers::new(work, x, tile, work.plan.size)?;
    let spans = &work.plan.buffers;
    let of_keys = |x: &Tensor| x.narrow(1, tile.keys.start, tile.key_count());
    let (dk, dv) = (dk.map(of_keys), dv.map(of_keys));
    let seen = |span: Option<Span>, dims: &[i64]| {
        span.map(|span| seen_as(&work.part_of_block(span), dims))
    };
    let scores = buffers.scores.size();
    let (slopes, capped) = (seen(spans.slopes, &scores), seen(spans.capped, &scores));
    let dy_copy = seen(spans.dy, &dy.size());
    let gradients = Gradients {
        dy: dy.into(),
        dlse: dlse.map(Lent::from),
        dy_copy: lent(&dy_copy),
        slopes: lent(&slopes),
        capped: lent(&capped),
        dq: dq.map(Lent::from),
        dk: lent(&dk),
        dv: lent(&dv),
    };
    attend_back(&buffers.tile(work, x, tile), &gradients).map_err(torch_error)
}
