//! Tiles of attention: their operands, their queries and keys, and the softmax weights of a tile.

use super::segments::{Segments, at_lead};
use crate::runtime::convert;
use crate::runtime::kernels::context::*;
use crate::runtime::kernels::product::Product;
use ckpt_passes::ops::attention::*;
use std::ops::Range;

/// The operands, with a heads axis, and the state that all tiles share.
pub struct Work {
    pub plan: AttentionPlan,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// Broadcast to the scores.
    pub bias: Option<Tensor>,
    pub segments: Option<Segments>,
    pub kind: Kind,
    pub scale: f64,
    pub softcap: f64,
    pub empty_is_nan: bool,
    /// Whether a tile is one call (`fused`) and not one libtorch call per step.
    pub is_fused: bool,
    pub block: Tensor,
    /// Scalars as tensors, because libtorch allocates memory for plain numbers.
    pub cap: Tensor,
    pub nothing: Tensor,
    /// It on the device, where a mask needs it.
    pub nothing_there: Option<Tensor>,
}

/// Some heads of one group of queries, at one index of the leading axes.
#[derive(Clone, Copy)]
pub struct Part {
    pub lead: i64,
    pub head: i64,
    pub heads: i64,
    pub group: i64,
}

/// Some queries of a part, and the keys they may see.
#[derive(Clone)]
pub struct Tile {
    pub part: Part,
    pub rows: Range<i64>,
    pub keys: Range<i64>,
}

impl Tile {
    pub fn count(&self) -> i64 {
        self.rows.end - self.rows.start
    }

    pub fn key_count(&self) -> i64 {
        self.keys.end - self.keys.start
    }
}

/// The matrices of a tile as products read them. If a tile is one call, the queries are passed in place.
pub struct Operands {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

/// Returns `x` with an axis for heads, of size 1 if it has none.
pub fn with_heads(x: &Tensor) -> Tensor {
    if x.dim() == 2 {
        x.unsqueeze(0)
    } else {
        x.alias()
    }
}

/// Reduces [h, r, n] over n into the first h·r elements of `out`, by `name(x, [-1], true, rest…, out)`. For a single result
/// libtorch allocates a buffer per thread, so a single result is computed twice.
fn along_keys(name: &str, x: &Tensor, rest: &[Arg], out: &Tensor) -> Result<()> {
    let size = x.size();
    let x = match size[0] * size[1] {
        1 => x.expand([2, 1, size[2]], false),
        _ => x.alias(),
    };
    let out = seen_as(out, &[x.size()[0], x.size()[1], 1]);
    write_with(name, args![&x, &[-1], true], rest, &out)
}

/// Returns the first elements of a buffer as a row-major tensor.
pub fn seen_as(buffer: &Tensor, dims: &[i64]) -> Tensor {
    buffer.narrow(0, 0, dims.iter().product()).view(dims)
}

/// Writes alpha·a·b to `out`, or adds it if `add`.
pub fn product(out: &Tensor, a: &Tensor, b: &Tensor, alpha: f64, add: bool) -> Result<()> {
    Product::onto(out, a, b, alpha, add).write()
}

impl Work {
    /// Reads the operands from slot `at` on, and segments. `may_fuse` is false if a result is wanted that only separate steps
    /// compute.
    pub fn new(
        cx: &KernelCx,
        plan: AttentionPlan,
        (at, segments): (usize, usize),
        may_fuse: bool,
    ) -> Result<Work> {
        let (q, k, v) = (cx.x(at)?, cx.x(at + 1)?, cx.x(at + 2)?);
        let (size, keys) = (q.size(), k.size());
        let rank = size.len();
        let heads = |dims: &[i64]| if rank > 2 { dims[rank - 3] } else { 1 };
        let fits = keys[rank - 1] == size[rank - 1]
            && v.size()[..rank - 1] == keys[..rank - 1]
            && (rank == 2 || keys[..rank - 3] == size[..rank - 3])
            && heads(&size) == heads(&keys) * plan.groups;
        if !fits {
            let found = format!("{size:?}, {keys:?} and {:?}", v.size());
            return Err(cx.shape_error("operands do not fit").found(found));
        }
        let bias = cx.opt(at + 3).map(|bias| {
            let mut scores = size.clone();
            scores[rank - 1] = keys[rank - 2];
            bias.f_expand(scores, false).map(|b| with_heads(&b))
        });
        let bias = bias
            .transpose()
            .map_err(|e| cx.shape_error(format!("the bias does not fit: {e}")))?;
        let segments = cx.opt(segments);
        let segments = segments.map(|s| Segments::new(cx, s, &plan)).transpose()?;
        // No more does a tile in one call take.
        let has_one_mask = bias.is_none() || segments.is_none();
        let kind = convert::kind(plan.dtype)?;
        let softcap = cx.number("softcap");
        let nothing = scalar(kind, f64::NEG_INFINITY)?;
        let has_mask = segments.is_some() || bias.as_ref().is_some_and(|b| b.kind() == Kind::Bool);
        let mut work = Work {
            q: with_heads(q),
            k: with_heads(k),
            v: with_heads(v),
            bias,
            segments,
            kind,
            scale: cx.number("scale"),
            softcap,
            empty_is_nan: empty_is_nan(cx.attrs),
            is_fused: may_fuse
                && has_one_mask
                && backend(q).has_own_products()
                && kind == Kind::Float
                && plan.size > 0
                && plan.value_size > 0,
            block: empty(&[plan.workspace_elements() as i64], kind, q.device())?,
            cap: scalar(kind, softcap)?,
            nothing_there: match has_mask && !backend(q).is_host() {
                true => Some(number_at(&nothing, q.device())?),
                false => None,
            },
            nothing,
            plan,
        };
        if !work.is_fused {
            work.fill_edges()?;
        }
        Ok(work)
    }

    pub fn part_of_block(&self, span: Span) -> Tensor {
        self.block
            .narrow(0, span.start as i64, span.elements as i64)
    }

    /// Returns a planned buffer.
    pub fn buffer(&self, span: Option<Span>) -> Result<Tensor> {
        span.map(|span| self.part_of_block(span))
            .ok_or_else(|| Error::bug("kernel", "a buffer that was not planned"))
    }

    /// Fills the masks of the edges: −∞ for columns not below the row (right), or below it (left).
    pub fn fill_edges(&mut self) -> Result<()> {
        let (rows, buffers) = (self.plan.rows_at_once, self.plan.buffers);
        for (span, name, diagonal) in [
            (buffers.right_edge, "aten::triu_", 0),
            (buffers.left_edge, "aten::tril_", -1),
        ] {
            if let Some(span) = span {
                let edge = seen_as(&self.part_of_block(span), &[rows, rows - 1]);
                copy_into(&edge, &self.nothing)?;
                write(name, args![&edge, diagonal])?;
            }
        }
        Ok(())
    }

    /// Returns the query heads of a part: [heads, queries, columns], or [1, …] if `x` has one for all heads.
    pub fn of_part(&self, x: &Tensor, part: Part) -> Tensor {
        let (heads, groups) = (self.plan.heads, self.plan.groups);
        let at = at_lead(x, &self.plan.lead, part.lead);
        let size = at.size();
        if size[0] != heads * groups {
            return at;
        }
        let at = match groups {
            1 => at,
            _ => at
                .view([heads, groups, size[1], size[2]])
                .select(1, part.group),
        };
        at.narrow(0, part.head, part.heads)
    }

    /// As [`Work::of_part`], for the queries of a tile; one row if `x` has one for all queries.
    pub fn of_tile(&self, x: &Tensor, tile: &Tile) -> Tensor {
        let x = self.of_part(x, tile.part);
        match x.size()[1] == self.plan.band.queries {
            true => x.narrow(1, tile.rows.start, tile.count()),
            false => x,
        }
    }

    /// Returns the key heads of a part: [heads, keys, columns].
    pub fn of_keys(&self, x: &Tensor, part: Part) -> Tensor {
        at_lead(x, &self.plan.lead, part.lead).narrow(0, part.head, part.heads)
    }

    /// Returns `x` as a product reads it: in place, or copied into its buffer.
    pub fn readable(&self, x: Tensor, span: Option<Span>) -> Result<Tensor> {
        let Some(span) = span else { return Ok(x) };
        let copy = seen_as(&self.part_of_block(span), &x.size());
        copy_into(&copy, &x)?;
        Ok(copy)
    }

    /// Runs `each` for all tiles. Calls `start` and `end` once per set of heads and index of the leading axes, with the part of
    /// the first group.
    pub fn for_all(
        &self,
        mut start: impl FnMut(Part) -> Result<()>,
        mut each: impl FnMut(&Operands, &Tile) -> Result<()>,
        mut end: impl FnMut(Part) -> Result<()>,
    ) -> Result<()> {
        let plan = &self.plan;
        for lead in 0..plan.lead_count() {
            for (head, heads) in blocks(plan.heads, plan.heads_at_once) {
                let mut part = Part {
                    lead,
                    head,
                    heads,
                    group: 0,
                };
                start(part)?;
                let k = self.readable(self.of_keys(&self.k, part), plan.buffers.k)?;
                let v = self.readable(self.of_keys(&self.v, part), plan.buffers.v)?;
                for group in 0..plan.groups {
                    part.group = group;
                    self.for_rows(part, &k, &v, &mut each)?;
                }
                part.group = 0;
                end(part)?;
            }
        }
        Ok(())
    }

    pub fn for_rows(
        &self,
        part: Part,
        k: &Tensor,
        v: &Tensor,
        each: &mut impl FnMut(&Operands, &Tile) -> Result<()>,
    ) -> Result<()> {
        let (queries, step) = (self.plan.band.queries, self.plan.rows_at_once);
        for (first, count) in blocks(queries, step) {
            let rows = first..first + count;
            let mut keys = self.plan.keys_of(rows.clone());
            if let Some(segments) = &self.segments {
                keys = segments.met(part.lead, first / step, keys);
            }
            let tile = Tile { part, rows, keys };
            let mut q = self.of_tile(&self.q, &tile);
            if !self.is_fused {
                q = self.readable(q, self.plan.buffers.q)?;
            }
            let seen = |x: &Tensor| x.narrow(1, tile.keys.start, tile.key_count());
            let (k, v) = (seen(k), seen(v));
            each(&Operands { q, k, v }, &tile)?;
        }
        Ok(())
    }

    /// Returns exp(score − largest score) of a tile, [heads, rows, keys]. Leaves the largest scores, the sums and, if there is
    /// a buffer for it, the tanh of capped scores in their buffers.
    pub fn weights(&self, x: &Operands, tile: &Tile) -> Result<Tensor> {
        let buffers = &self.plan.buffers;
        let dims = [tile.part.heads, tile.count(), tile.key_count()];
        let scores = seen_as(&self.buffer(buffers.scores)?, &dims);
        let keys = x.k.transpose(1, 2);
        if self.softcap == 0.0 {
            product(&scores, &x.q, &keys, self.scale, false)?;
        } else {
            product(&scores, &x.q, &keys, self.scale / self.softcap, false)?;
            write("aten::tanh_", args![&scores])?;
            if let Some(span) = buffers.capped {
                copy_into(&seen_as(&self.part_of_block(span), &dims), &scores)?;
            }
            mul_into(&scores, &self.cap)?;
        }
        if let Some(bias) = &self.bias {
            let bias = self.of_tile(bias, tile);
            self.apply(&scores, &bias.narrow(2, tile.keys.start, tile.key_count()))?;
        }
        if let Some(same) = self.same_segment(tile)? {
            self.apply(&scores, &same)?;
        }
        self.hide_outside(&scores, tile)?;
        let top = self.buffer(buffers.top)?;
        along_keys("aten::amax.out", &scores, &[], &top)?;
        // Makes the weights of a query that sees no key 0, not NaN.
        let lowest = match self.kind {
            Kind::Double => f64::MIN,
            _ => f64::from(f32::MIN),
        };
        write("aten::clamp_min_", args![&top, lowest])?;
        let tops = seen_as(&top, &[dims[0], dims[1], 1]);
        sub_into(&scores, &tops)?;
        write("aten::exp_", args![&scores])?;
        let sum = self.buffer(buffers.sum)?;
        along_keys("aten::sum.IntList_out", &scores, args![Arg::None], &sum)?;
        Ok(scores)
    }

    /// Returns which keys of a tile are of a query's segment, bool [1, rows, keys]; `None` where all are.
    pub fn same_segment(&self, tile: &Tile) -> Result<Option<Tensor>> {
        let Some(segments) = &self.segments else {
            return Ok(None);
        };
        let (rows, keys) = (tile.count(), tile.key_count());
        let place = tile.rows.start + self.plan.band.keys - self.plan.band.queries;
        let own = place..place + rows;
        if segments.are_one(tile.part.lead, [&own, &tile.keys]) {
            return Ok(None);
        }
        let of = at_lead(&segments.of, &self.plan.lead, tile.part.lead);
        let own = of.narrow(0, own.start, rows).view([1, rows, 1]);
        let keys_of = of.narrow(0, tile.keys.start, keys).view([1, 1, keys]);
        let block = self.buffer(self.plan.buffers.segments)?;
        let same = seen_as(&block.view_dtype(Kind::Bool), &[1, rows, keys]);
        write("aten::eq.Tensor_out", args![&own, &keys_of, &same])?;
        Ok(Some(same))
    }

    /// Sets `slopes` to p·(slopes − Σ p·slopes).
    pub fn softmax_grad(&self, p: &Tensor, slopes: &Tensor) -> Result<()> {
        if backend(p).is_host() {
            return write(
                "aten::_softmax_backward_data.out",
                args![slopes, p, -1, self.kind, slopes],
            );
        }
        // The same computation as libtorch's kernel for a device, without its buffer for the products.
        mul_into(slopes, p)?;
        let sums = self.buffer(self.plan.buffers.sum)?;
        along_keys("aten::sum.IntList_out", slopes, args![Arg::None], &sums)?;
        let size = slopes.size();
        let sums = seen_as(&sums, &[size[0], size[1], 1]);
        write("aten::addcmul_", args![slopes, p, &sums, -1.0])
    }

    /// Adds a bias, or sets scores to −∞ where a mask is false.
    pub fn apply(&self, scores: &Tensor, bias: &Tensor) -> Result<()> {
        if bias.kind() == Kind::Bool {
            let nothing = self.nothing_there.as_ref().unwrap_or(&self.nothing);
            return write("aten::where.self_out", args![bias, scores, nothing, scores]);
        }
        let bias = self.readable(bias.alias(), self.plan.buffers.bias)?;
        add_into(scores, &bias)
    }

    /// Sets scores to −∞ for keys outside the band of their query.
    pub fn hide_outside(&self, scores: &Tensor, tile: &Tile) -> Result<()> {
        let (buffers, band) = (&self.plan.buffers, &self.plan.band);
        let step = self.plan.rows_at_once;
        // Column c of an edge is the key `c` places after the start or end of the first query's band.
        for (span, start, all_before) in [
            (buffers.right_edge, band.end(tile.rows.start), false),
            (buffers.left_edge, band.first(tile.rows.start), true),
        ] {
            let Some(start) = start else { continue };
            let within = |at: i64| at.clamp(tile.keys.start, tile.keys.end);
            let (from, to) = (within(start), within(start.saturating_add(step - 1)));
            let hidden = match all_before {
                true => tile.keys.start..from,
                false => to..tile.keys.end,
            };
            let at = |keys: &Range<i64>| {
                scores.narrow(2, keys.start - tile.keys.start, keys.end - keys.start)
            };
            if hidden.start < hidden.end {
                copy_into(&at(&hidden), &self.nothing)?;
            }
            if from < to {
                let edge = seen_as(&self.buffer(span)?, &[step, step - 1]);
                let edge = edge
                    .narrow(0, 0, tile.count())
                    .narrow(1, from - start, to - from);
                add_into(&at(&(from..to)), &edge)?;
            }
        }
        Ok(())
    }

    /// Returns the sums of a tile as divisors, [heads, rows, 1].
    pub fn divisors(&self, tile: &Tile) -> Result<Tensor> {
        let sum = self.buffer(self.plan.buffers.sum)?;
        if !self.empty_is_nan {
            // The largest score of a query has weight 1, so its sum is 0 or at least 1.
            write("aten::clamp_min_", args![&sum, 1.0])?;
        }
        Ok(seen_as(&sum, &[tile.part.heads, tile.count(), 1]))
    }

    /// Divides `x` in place.
    pub fn divide(&self, x: &Tensor, tile: &Tile) -> Result<()> {
        let by = self.divisors(tile)?;
        div_into(x, &by)
    }
}
