//! How attention runs: the keys that a block of queries sees, the size of a block, and its buffers.
//!
//! Memory rule and kernel use the same plan. The kernel takes the workspace as one block. The plan depends on sizes,
//! strides and attributes only, not on the device or the number of threads.

use crate::rule::*;
use ckpt_ir::layout::count;
use ckpt_ir::op::{Sized, operand};
use ckpt_ir::{Attrs, DType, Dim, Same};
use std::ops::Range;

/// The slot of the segments among the operands of `Attention`.
pub const SEGMENTS: usize = 4;
/// The slot of the segments among the operands of `AttentionGrad`. New slots come last, so older files keep their meaning.
pub const GRAD_SEGMENTS: usize = 7;
/// The slot of the log-sum-exp's cotangent among the operands of `AttentionGrad`.
pub const DLSE: usize = 8;

/// Queries done at once. Fewer waste less on keys that causal queries do not see; more make larger products.
const ROWS: i64 = 64;
/// The fewest queries done at once to stay below [`TILE_ELEMENTS`].
const LEAST_ROWS: i64 = 16;
/// Scores (and copies of keys and values) that exist at once, unless one head and a few queries need more: 1 MiB of float32.
/// The gradient needs two such blocks, which together fit into an L2 cache of 2 MiB.
const TILE_ELEMENTS: i64 = 1 << 18;
/// Buffers start at multiples of this many elements.
const ALIGNMENT_ELEMENTS: u64 = 16;

/// Returns true if a query that sees no key gives NaN.
pub fn empty_is_nan(attrs: &Attrs) -> bool {
    attrs.str("empty_rows") == "nan"
}

/// Returns the number of query heads that read one key head, where it is known.
pub fn groups(query_heads: &Dim, key_heads: &Dim) -> Option<i64> {
    if query_heads.same(key_heads) == Same::Yes {
        return Some(1);
    }
    let count = query_heads.exact_div(key_heads)?.as_const()?;
    (count > 0).then_some(count)
}

/// Which keys each query may see, by their places: `first(i) <= j < end(i)` for query `i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// Number of queries.
    pub queries: i64,
    /// Number of keys.
    pub keys: i64,
    /// Keys before and after a query's own place that it sees; `None`: all.
    left: Option<i64>,
    right: Option<i64>,
}

impl Band {
    /// Returns the band that the attributes of an attention state.
    pub fn new(attrs: &Attrs, queries: i64, keys: i64) -> Band {
        let limit = |name: &str| Some(attrs.int(name)).filter(|n| *n >= 0);
        let right = match attrs.int("causal") {
            0 => limit("window_right"),
            _ => Some(0),
        };
        Band {
            queries,
            keys,
            left: limit("window_left"),
            right,
        }
    }

    /// The key at query `i`'s own place; the last query's is the last key.
    fn place(&self, i: i64) -> i64 {
        i + self.keys - self.queries
    }

    /// The first key that query `i` may see, were there keys at every place.
    pub fn first(&self, i: i64) -> Option<i64> {
        self.left.map(|n| self.place(i).saturating_sub(n))
    }

    /// One past the last key that query `i` may see, were there keys at every place.
    pub fn end(&self, i: i64) -> Option<i64> {
        let after = |n: i64| self.place(i).saturating_add(n).saturating_add(1);
        self.right.map(after)
    }

    /// The keys that any of these queries may see; empty where none sees any.
    pub fn keys_of(&self, rows: Range<i64>) -> Range<i64> {
        let first = self.first(rows.start).unwrap_or(0).clamp(0, self.keys);
        let end = self.end(rows.end - 1).unwrap_or(self.keys);
        first..end.clamp(first, self.keys)
    }

    /// Whether one of these queries sees no key at any place.
    pub fn leaves_one_empty(&self, rows: Range<i64>) -> bool {
        // The last query's own place is the last key, so that only early queries can have all keys after them.
        self.end(rows.start).is_some_and(|end| end <= 0)
    }

    /// Pairs of a query and a key that it may see.
    pub fn pairs(&self) -> u64 {
        let to = |limit: Option<i64>, otherwise: i64| match limit {
            Some(start) => sum_of_clamped(self.queries, start, self.keys),
            None => i128::from(otherwise) * i128::from(self.queries),
        };
        let pairs = to(self.end(0), self.keys) - to(self.first(0), 0);
        u64::try_from(pairs).unwrap_or(u64::MAX)
    }
}

/// Σ over i in 0..n of start + i, clamped to 0..=most.
fn sum_of_clamped(n: i64, start: i64, most: i64) -> i128 {
    let (n, start, most) = (i128::from(n), i128::from(start), i128::from(most));
    let first_above_zero = (-start).clamp(0, n);
    let first_at_most = (most - start).clamp(0, n);
    let rising = first_at_most - first_above_zero;
    let sum = rising * (first_above_zero + first_at_most - 1) / 2 + start * rising;
    sum + most * (n - first_at_most)
}

/// A part of the workspace, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first element.
    pub start: u64,
    /// Its length in elements.
    pub elements: u64,
}

/// Buffers, all alive throughout; `None` where one is not needed. `h` heads, `r` queries at once, `n` keys, `d` and `e` the
/// sizes of head and value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Buffers {
    /// [h, r, n], then the probabilities.
    pub scores: Option<Span>,
    /// [h, r, n]: slopes of the scores.
    pub slopes: Option<Span>,
    /// [h, r, n]: tanh of capped scores, for the gradient.
    pub capped: Option<Span>,
    /// [h, r, n]: a bias of a type narrower than is computed in.
    pub bias: Option<Span>,
    /// [r, n] booleans: keys of a query's segment.
    pub segments: Option<Span>,
    /// [h, r, e], of the gradient [h, r, d].
    pub result: Option<Span>,
    /// [h, r], at least 2: the largest score of a query.
    pub top: Option<Span>,
    /// [h, r], at least 2: the sum of the weights of a query.
    pub sum: Option<Span>,
    /// [h, r, d]: queries that a product cannot read in place.
    pub q: Option<Span>,
    /// [h, n, d]: keys that a product cannot read in place.
    pub k: Option<Span>,
    /// [h, n, e]: values that a product cannot read in place.
    pub v: Option<Span>,
    /// [h, r, e]: cotangents that a product cannot read in place.
    pub dy: Option<Span>,
    /// [h, n, d]: the gradient of 16-bit keys while it is summed.
    pub dk: Option<Span>,
    /// [h, n, e]: the gradient of 16-bit values while it is summed.
    pub dv: Option<Span>,
    /// The same for the bias, in the shape of the bias.
    pub dbias: Option<Span>,
    /// [r, r − 1], −∞ for what lies left of the band.
    pub left_edge: Option<Span>,
    /// [r, r − 1], −∞ for what lies right of the band.
    pub right_edge: Option<Span>,
}

/// How one attention, or its gradient, runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Sizes of the axes before the heads.
    pub lead: Vec<i64>,
    /// Key heads.
    pub heads: i64,
    /// Query heads of one key head.
    pub groups: i64,
    /// Elements of a query and of a key.
    pub size: i64,
    /// Elements of a value.
    pub value_size: i64,
    /// The keys that each query sees.
    pub band: Band,
    /// Key heads done at once.
    pub heads_at_once: i64,
    /// Queries done at once.
    pub rows_at_once: i64,
    /// The type computed in.
    pub dtype: DType,
    /// Where each buffer lies in the workspace.
    pub buffers: Buffers,
    workspace_elements: u64,
    /// Whether a query that sees no key gives NaN and a bias may hide keys.
    nan_anywhere: bool,
    empty_is_nan: bool,
}

/// Returns how many elements of a type have room for booleans.
fn booleans(count: i64, dtype: DType) -> i64 {
    (count as u64).div_ceil(dtype.size_bytes()) as i64
}

/// Hands out parts of the workspace.
struct Cursor(u64);

impl Cursor {
    fn take(&mut self, wanted: bool, dims: &[i64]) -> Option<Span> {
        if !wanted {
            return None;
        }
        let span = Span {
            start: self.0,
            elements: count(dims) as u64,
        };
        self.0 += span.elements.next_multiple_of(ALIGNMENT_ELEMENTS);
        Some(span)
    }
}

/// Whether a product reads the matrices of `x` in place: the type computed in, and rows or columns without gaps. Where
/// an axis has size 1 its stride says nothing, and the copy is small.
fn read_in_place(x: &Sized) -> bool {
    let ([.., rows, columns], [.., down, right]) = (x.dims.as_slice(), x.strides.as_slice()) else {
        return false;
    };
    x.dtype == compute_type(x.dtype)
        && *rows > 1
        && *columns > 1
        && (*right == 1 && down >= columns || *down == 1 && right >= rows)
}

impl AttentionPlan {
    /// Of the forward row; `None` for operands that typing refuses.
    pub fn forward(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<AttentionPlan> {
        AttentionPlan::new(attrs, ins, None, operand(ins, SEGMENTS).is_some())
    }

    /// Of the gradient row; operands start with `dy`.
    pub fn backward(attrs: &Attrs, ins: &[Option<Sized>]) -> Option<AttentionPlan> {
        let has_segments = operand(ins, GRAD_SEGMENTS).is_some();
        AttentionPlan::new(attrs, ins.get(1..)?, Some(operand(ins, 0)?), has_segments)
    }

    fn new(
        attrs: &Attrs,
        ins: &[Option<Sized>],
        dy: Option<&Sized>,
        has_segments: bool,
    ) -> Option<AttentionPlan> {
        let (q, k, v) = (operand(ins, 0)?, operand(ins, 1)?, operand(ins, 2)?);
        let bias = operand(ins, 3);
        let rank = q.dims.len();
        if rank < 2 || k.dims.len() != rank || v.dims.len() != rank {
            return None;
        }
        let at_heads = rank.checked_sub(3);
        let heads = at_heads.map_or(1, |i| k.dims[i]);
        let query_heads = at_heads.map_or(1, |i| q.dims[i]);
        let dtype = compute_type(q.dtype);
        let band = Band::new(attrs, q.dims[rank - 2], k.dims[rank - 2]);
        let mut plan = AttentionPlan {
            lead: q.dims[..at_heads.unwrap_or(0)].to_vec(),
            heads,
            groups: if heads == 0 { 1 } else { query_heads / heads },
            size: q.dims[rank - 1],
            value_size: v.dims[rank - 1],
            band,
            heads_at_once: 0,
            rows_at_once: 0,
            dtype,
            buffers: Buffers::default(),
            workspace_elements: 0,
            nan_anywhere: empty_is_nan(attrs) && bias.is_some(),
            empty_is_nan: empty_is_nan(attrs),
        };
        if plan.is_empty() {
            return Some(plan);
        }
        let (copy_k, copy_v) = (!read_in_place(k), !read_in_place(v));
        plan.choose_tile(copy_k, copy_v);
        let (h, r, n) = (plan.heads_at_once, plan.rows_at_once, band.keys);
        let (d, e) = (plan.size, plan.value_size);
        let narrow = q.dtype != dtype;
        let wants = attrs.opt_ints("wants").unwrap_or_default();
        let wants = |slot: i64| dy.is_some() && wants.contains(&slot);
        let slopes = wants(0) || wants(1) || wants(3);
        let narrow_bias = bias.is_some_and(|b| b.dtype != dtype && b.dtype != DType::Bool);
        let bias_dims: &[i64] = bias.map_or(&[], |b| b.dims.as_slice());
        let result = if dy.is_some() { d } else { e };
        let mut at = Cursor(0);
        plan.buffers = Buffers {
            scores: at.take(true, &[h, r, n]),
            slopes: at.take(slopes, &[h, r, n]),
            capped: at.take(slopes && attrs.float("softcap") != 0.0, &[h, r, n]),
            bias: at.take(narrow_bias, &[h, r, n]),
            segments: at.take(has_segments, &[booleans(r * n, dtype)]),
            result: at.take(dy.is_none() || wants(0), &[h, r, result]),
            top: at.take(true, &[(h * r).max(2)]),
            sum: at.take(true, &[(h * r).max(2)]),
            q: at.take(!read_in_place(q), &[h, r, d]),
            k: at.take(copy_k, &[h, n, d]),
            v: at.take(copy_v && (dy.is_none() || slopes), &[h, n, e]),
            dy: at.take(dy.is_some_and(|dy| !read_in_place(dy)), &[h, r, e]),
            dk: at.take(narrow && wants(1), &[h, n, d]),
            dv: at.take(narrow && wants(2), &[h, n, e]),
            dbias: at.take(narrow_bias && wants(3), bias_dims),
            left_edge: at.take(band.left.is_some(), &[r, r - 1]),
            right_edge: at.take(band.right.is_some(), &[r, r - 1]),
        };
        plan.workspace_elements = at.0;
        Some(plan)
    }

    /// As many queries as [`ROWS`], then as many heads as fit.
    fn choose_tile(&mut self, copy_k: bool, copy_v: bool) {
        let keys = self.band.keys;
        let rows = ROWS.min(self.band.queries);
        let fitting = (TILE_ELEMENTS / keys).max(LEAST_ROWS);
        self.rows_at_once = rows.min(fitting);
        let copied = if copy_k { self.size } else { 0 } + if copy_v { self.value_size } else { 0 };
        let each = keys.saturating_mul(self.rows_at_once.saturating_add(copied));
        let most = (TILE_ELEMENTS / each).clamp(1, self.heads) as u64;
        // As many blocks as that gives, of one size.
        let blocks = (self.heads as u64).div_ceil(most);
        self.heads_at_once = (self.heads as u64).div_ceil(blocks) as i64;
    }

    /// Whether there is nothing to compute: the results, if they have elements, are zeros.
    pub fn is_empty(&self) -> bool {
        let sizes = [self.heads, self.groups, self.band.queries, self.band.keys];
        self.lead_count() == 0 || sizes.contains(&0)
    }

    /// Attentions over the axes before the heads.
    pub fn lead_count(&self) -> i64 {
        count(&self.lead)
    }

    /// Bytes of all buffers together.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_elements * self.dtype.size_bytes()
    }

    /// Returns the elements of all buffers.
    pub fn workspace_elements(&self) -> u64 {
        self.workspace_elements
    }

    /// Whether keys that a query does not see may be left out: they give nothing but zeros.
    pub fn skips_keys(&self) -> bool {
        !self.nan_anywhere
    }

    /// The keys that are read for these queries. All of them where one may give NaN because it sees none: its slopes are
    /// NaN for every key.
    pub fn keys_of(&self, rows: Range<i64>) -> Range<i64> {
        let nan = self.empty_is_nan && self.band.leaves_one_empty(rows.clone());
        if nan || self.nan_anywhere {
            return 0..self.band.keys;
        }
        self.band.keys_of(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn band(causal: i64, left: i64, right: i64, queries: i64, keys: i64) -> Band {
        let attrs = Attrs::new()
            .with("causal", causal)
            .with("window_left", left)
            .with("window_right", right);
        Band::new(&attrs, queries, keys)
    }

    #[test]
    fn bands_hold_what_their_definition_says() {
        let mut empty = 0;
        for (queries, keys) in [(5, 5), (3, 8), (8, 3), (1, 4), (4, 1), (6, 0)] {
            for (causal, left, right) in [
                (0, -1, -1),
                (1, -1, -1),
                (1, 0, -1),
                (1, 2, 1),
                (0, 1, 2),
                (0, -1, 3),
                (0, 40, 40),
            ] {
                let band = band(causal, left, right, queries, keys);
                let sees = |i: i64, j: i64| {
                    let place = i + keys - queries;
                    (causal == 0 || j <= place)
                        && (left < 0 || j >= place - left)
                        && (right < 0 || j <= place + right)
                };
                let seen = |i: i64| (0..keys).filter(move |j| sees(i, *j));
                let pairs: usize = (0..queries).map(|i| seen(i).count()).sum();
                assert_eq!(band.pairs(), pairs as u64, "{band:?}");
                for start in 0..queries {
                    for end in start + 1..=queries {
                        let all: Vec<i64> = (start..end).flat_map(seen).collect();
                        let range = band.keys_of(start..end);
                        let inside = |j: &i64| range.contains(j);
                        assert!(all.iter().all(inside), "{band:?} {start}..{end}");
                        assert_eq!(all.is_empty(), range.is_empty(), "{band:?} {start}..{end}");
                        let none = keys > 0 && (start..end).any(|i| seen(i).count() == 0);
                        assert_eq!(band.leaves_one_empty(start..end) && keys > 0, none);
                        empty += u32::from(none);
                    }
                }
            }
        }
        assert!(empty > 10);
    }

    fn plan(q: [i64; 3], k: [i64; 3], dtype: DType) -> AttentionPlan {
        let attrs = Attrs::new()
            .with("causal", 1)
            .with("window_left", -1)
            .with("window_right", -1)
            .with("softcap", 0.0f32)
            .with("empty_rows", "zeros");
        let sized = |dims: [i64; 3]| Some(Sized::contiguous(dtype, dims.to_vec()));
        AttentionPlan::forward(&attrs, &[sized(q), sized(k), sized(k)]).unwrap()
    }

    /// Long sequences take fewer queries and heads at once: the workspace stays small beside the keys themselves.
    #[test]
    fn workspace_does_not_grow_with_the_queries() {
        let of = |n: i64| plan([12, n, 64], [12, n, 64], DType::F32);
        assert_eq!((of(512).rows_at_once, of(512).heads_at_once), (64, 6));
        for n in [1 << 12, 1 << 14, 1 << 17] {
            let keys_bytes = 12 * n as u64 * 64 * 4;
            assert!(of(n).workspace_bytes() < keys_bytes, "{:?}", of(n));
        }
        let narrow = plan([8, 1 << 17, 64], [8, 1 << 17, 64], DType::BF16);
        assert_eq!(narrow.heads_at_once, 1);
    }
}
