//! The temporaries of a fused kernel: blocks beside the results of a node from libtorch's allocator.
//!
//! The sizes were read from PyTorch's sources ([`super`] names the files) and measured on an H200. The result is
//! the largest sum of live blocks. Not counted are the temporaries inside the CPU's kernels, and copies of operands that could
//! be read in place but are not aligned to 16 bytes, which is known only at run time.

use super::layout::{Axes, axes, strides_in_place};
use super::{Facts, SdpaBackend, SdpaBackends};
use crate::analysis::device::round_up;
use crate::ir::op::{Sized, contiguous_strides};

/// The properties of a node that its memory depends on.
pub struct Node<'a> {
    /// The properties that the choice of the kernels depends on.
    pub facts: &'a Facts,
    /// Element type, sizes and strides of the queries.
    pub q: &'a Sized,
    /// Element type, sizes and strides of the keys.
    pub k: &'a Sized,
    /// Element type, sizes and strides of the values.
    pub v: &'a Sized,
    /// The cotangent, for a gradient.
    pub dy: Option<&'a Sized>,
    /// Operands whose gradients are wanted.
    pub wants: &'a [i64],
    /// Whether a forward node returns the log-sum-exp of each row too; false for a gradient.
    pub wants_lse: bool,
    /// How a gradient gets the result of the forward.
    pub result: ForwardResult,
}

/// How a gradient gets the result and the log-sum-exp of the forward.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ForwardResult {
    /// It runs the forward again.
    Recomputed,
    /// They are operands, the result in its own layout.
    RowMajor,
    /// They are operands, the result with the heads of a row side by side.
    HeadsInside,
}

/// An operand in the library's layout.
struct Seen {
    /// Rounded bytes of the tensor itself.
    bytes: u64,
    copied_bytes: u64,
    dims: Axes,
    strides: Axes,
}

impl Seen {
    fn new(x: &Sized, blocks: Layers) -> Option<Seen> {
        let dims = axes(&x.dims)?;
        let bytes = blocks.of(x.bytes());
        let in_place = strides_in_place(&x.dims, &x.strides);
        Some(Seen {
            bytes,
            copied_bytes: if in_place.is_none() { bytes } else { 0 },
            dims,
            strides: match in_place {
                Some(strides) => strides,
                None => contiguous_strides(&dims).try_into().ok()?,
            },
        })
    }

    /// Returns whether the heads of a row lie side by side, so that a result in this layout is not row-major.
    fn has_heads_inside(&self) -> bool {
        self.dims[1] > 1 && self.dims[2] > 1 && self.strides[1] < self.strides[2]
    }

    /// Returns the bytes of a copy with the heads of each row side by side, without gaps; 0 if it has that layout.
    fn copied_inside_bytes(&self) -> u64 {
        let [batch, heads, rows, columns] = self.dims;
        let expected = contiguous_strides(&[batch, rows, heads, columns]);
        let order = [0, 2, 1, 3].into_iter().zip(expected);
        let lies_so = order
            .filter(|(axis, _)| self.dims[*axis] > 1)
            .all(|(axis, stride)| self.strides[axis] == stride);
        if lies_so { 0 } else { self.bytes }
    }
}

/// The rounding of an allocator.
#[derive(Clone, Copy)]
struct Layers(u64);

impl Layers {
    fn of(self, bytes: u64) -> u64 {
        round_up(bytes, self.0)
    }

    /// Returns the bytes of a float32 tensor.
    fn floats(self, dims: &[i64]) -> u64 {
        let count = dims.iter().fold(1u64, |n, d| n.saturating_mul(*d as u64));
        self.of(count.saturating_mul(4))
    }
}

/// Returns the bytes of temporaries; `None` for operands that typing refuses.
pub fn bytes(
    pair: SdpaBackend,
    available: &SdpaBackends,
    node: &Node,
    granularity_bytes: u64,
) -> Option<u64> {
    let blocks = Layers(granularity_bytes);
    let f = node.facts;
    let (q, k, v) = (
        Seen::new(node.q, blocks)?,
        Seen::new(node.k, blocks)?,
        Seen::new(node.v, blocks)?,
    );
    let heads = f.query_heads();
    let y_dims = [f.batch, heads, f.queries, f.value_size];
    let elements = y_dims.iter().fold(1u64, |n, d| n.saturating_mul(*d as u64));
    let y = blocks.of(elements.saturating_mul(f.dtype.size_bytes()));
    let rows = f.queries
        + if pair == SdpaBackend::Efficient {
            -f.queries & 31
        } else {
            0
        };
    let lse = blocks.floats(&[f.batch, heads, rows]);
    // The generator's state and a number that is not used; efficient has both on the host.
    let state = match pair {
        SdpaBackend::Flash => blocks.of(16) + blocks.of(8),
        _ => 0,
    };
    let made = q.copied_bytes + k.copied_bytes + v.copied_bytes + y + lse + state;
    let forward = made + accumulators(pair, available, f, blocks);
    // Results of efficient have the heads of a row side by side; those of flash have the layout of the operands.
    let is_turned = |x: &Seen| match pair {
        SdpaBackend::Flash => x.has_heads_inside(),
        _ => x.dims[1] > 1 && x.dims[2] > 1,
    };
    let Some(dy) = node.dy else {
        let wanted_lse = blocks.floats(&[f.batch, heads, f.queries]);
        let (mut last, mut results) = (y + lse, y);
        if node.wants_lse {
            results += wanted_lse;
            if rows != f.queries {
                last += wanted_lse;
            }
        }
        if is_turned(&q) {
            last += y;
        }
        return Some(forward.max(last).saturating_sub(results));
    };
    let dy = Seen::new(dy, blocks)?;
    let gradients = q.bytes + k.bytes + v.bytes;
    // The kernels read the result with the heads of a row side by side, and those of efficient padded rows.
    let turned_y = if heads == 1 || f.queries == 1 { 0 } else { y };
    let is_recomputed = node.result == ForwardResult::Recomputed;
    let (forward, made) = match is_recomputed {
        true => (forward, made),
        false => {
            let padded = if rows == f.queries { 0 } else { lse };
            let copied = q.copied_bytes + k.copied_bytes + v.copied_bytes;
            let is_turned = node.result == ForwardResult::HeadsInside;
            (0, copied + padded + if is_turned { 0 } else { turned_y })
        }
    };
    let back = made
        + dy.copied_bytes
        + gradients
        + match pair {
            SdpaBackend::Cpu => 0,
            SdpaBackend::Efficient => dy.copied_inside_bytes() + efficient_back(f, blocks),
            SdpaBackend::Flash => {
                let turned = if is_recomputed && !is_turned(&q) {
                    turned_y
                } else {
                    0
                };
                dy.copied_inside_bytes() + turned + flash_back(available, f, blocks)
            }
        };
    let wanted: Vec<&Seen> = [&q, &k, &v]
        .into_iter()
        .enumerate()
        .filter(|(i, _)| node.wants.contains(&(*i as i64)))
        .map(|(_, x)| x)
        .collect();
    let turned = wanted.iter().filter(|x| is_turned(x)).map(|x| x.bytes);
    let last = gradients + turned.max().unwrap_or(0);
    let results: u64 = wanted.iter().map(|x| x.bytes).sum();
    Some(forward.max(back).max(last).saturating_sub(results))
}

/// Returns the bytes of the accumulators of a forward.
fn accumulators(pair: SdpaBackend, available: &SdpaBackends, f: &Facts, blocks: Layers) -> u64 {
    let heads = f.query_heads();
    match pair {
        SdpaBackend::Flash => match key_splits(available, f) {
            1 => 0,
            n => {
                let rows = [n, f.batch, heads, f.queries];
                let columns = rounded_size(f.size);
                blocks.floats(&rows) + blocks.floats(&[n, f.batch, heads, f.queries, columns])
            }
        },
        // The result does not fit into registers.
        SdpaBackend::Efficient if f.size.max(f.value_size) > 128 => {
            blocks.floats(&[f.batch, heads, f.queries, f.value_size])
        }
        _ => 0,
    }
}

/// Returns the size of a head rounded up as in flash's tiles.
fn rounded_size(size: i64) -> i64 {
    match up(size, 32) {
        n if n < 224 => n,
        _ => 256,
    }
}

fn up(n: i64, to: i64) -> i64 {
    ceil(n, to) * to
}

fn ceil(n: i64, by: i64) -> i64 {
    n.saturating_add(by - 1) / by
}

/// Returns the number of parts into which flash splits the keys if queries alone do not fill the device: the smallest number
/// whose utilisation is at least 85% of the best. Numbers that give the same part length as a smaller one are skipped.
fn key_splits(available: &SdpaBackends, f: &Facts) -> i64 {
    let work = f.batch * f.query_heads() * ceil(f.queries, 64);
    let places = 2 * available.processors;
    if work as f32 >= 0.8 * places as f32 {
        return 1;
    }
    let block = match f.size {
        ..=64 => 256,
        65..=128 => 128,
        _ => 64,
    };
    let key_blocks = ceil(f.keys, block);
    let differs = |n: &i64| *n == 1 || ceil(key_blocks, *n) != ceil(key_blocks, n - 1);
    let candidates = || (1..=places.min(key_blocks).min(128)).filter(differs);
    let used = |n: i64| {
        let rounds = (work * n) as f32 / places as f32;
        rounds / rounds.ceil()
    };
    let best = candidates().map(used).fold(0.0, f32::max);
    let is_good = |n: &i64| f64::from(used(*n)) >= 0.85 * f64::from(best);
    candidates().find(is_good).unwrap_or(1)
}

/// Of flash's backward: the sums of slopes, dq in float32 in a part for each set of processors, and for grouped heads dk
/// and dv of every query head.
fn flash_back(available: &SdpaBackends, f: &Facts, blocks: Layers) -> u64 {
    let heads = f.query_heads();
    let queries = up(f.queries, 128);
    let parts = ceil(available.processors, f.batch * heads);
    let accumulated = [parts, f.batch, queries, heads, rounded_size(f.size)];
    let expanded = match f.groups {
        1 => 0,
        _ => blocks.floats(&[f.batch, f.keys, heads, f.size / 2]),
    };
    blocks.floats(&[f.batch, heads, queries]) + blocks.floats(&accumulated) + 2 * expanded
}

/// Of efficient's backward: the sums of slopes, and tiles of dq, dk and dv in float32. Which kernel runs depends on shared
/// memory; the largest need of all is taken.
fn efficient_back(f: &Facts, blocks: Layers) -> u64 {
    let need = |(i, j, in_registers): (i64, i64, bool)| {
        let tiles = ceil(f.queries, i) * ceil(f.size, j);
        let kept = match in_registers {
            true => 0,
            false => j * (up(f.size, i) + up(f.value_size, i)),
        };
        up(tiles * (i * j + 4) + kept, 4)
    };
    let kernels: &[(i64, i64, bool)] = match f.size.max(f.value_size) {
        ..=64 => &[(64, 64, true)],
        65..=128 => &[(128, 64, true), (128, 128, true), (64, 64, false)],
        _ => &[(128, 64, false), (64, 64, false)],
    };
    let most = kernels.iter().map(|kernel| need(*kernel)).max();
    let heads = f.query_heads();
    blocks.floats(&[f.batch, heads, f.queries])
        + blocks.floats(&[f.batch, heads, most.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn facts(batch: i64, heads: i64, groups: i64, rows: i64, size: i64) -> Facts {
        Facts {
            batch,
            heads,
            groups,
            queries: rows,
            keys: rows,
            size,
            value_size: size,
            ..Facts::example()
        }
    }

    fn found(pair: SdpaBackend, f: &Facts, inside: bool, back: bool) -> u64 {
        taken(pair, f, inside, back, ForwardResult::Recomputed)
    }

    fn taken(pair: SdpaBackend, f: &Facts, inside: bool, back: bool, result: ForwardResult) -> u64 {
        let sized = |heads: i64, rows: i64, size: i64| {
            let mut x = Sized::contiguous(f.dtype, vec![f.batch, heads, rows, size]);
            if inside {
                x.strides = vec![rows * heads * size, size, heads * size, 1];
            }
            x
        };
        let q = sized(f.query_heads(), f.queries, f.size);
        let (k, v) = (
            sized(f.heads, f.keys, f.size),
            sized(f.heads, f.keys, f.value_size),
        );
        let dy = sized(f.query_heads(), f.queries, f.value_size);
        let node = Node {
            facts: f,
            q: &q,
            k: &k,
            v: &v,
            dy: back.then_some(&dy),
            wants: &[0, 1, 2],
            wants_lse: false,
            result,
        };
        bytes(pair, &SdpaBackends::cuda(90, 132), &node, 512).unwrap()
    }

    /// Written out by hand: 8 places, 16 heads, 1024 rows of 64, results of 16 MiB.
    #[test]
    fn flash_takes_what_its_sources_say() {
        let f = facts(8, 16, 1, 1024, 64);
        let (lse, state) = (MIB / 2, 1024);
        assert_eq!(found(SdpaBackend::Flash, &f, false, false), lse + state);
        // The result is turned once the state is gone.
        assert_eq!(found(SdpaBackend::Flash, &f, true, false), lse + 16 * MIB);
        // Result, dy and result with heads inside, sums, two parts of dq in float32; gradients are results.
        let back = 16 * MIB + lse + state + 2 * 16 * MIB + lse + 2 * 32 * MIB;
        assert_eq!(found(SdpaBackend::Flash, &f, false, true), back);
        assert_eq!(
            found(SdpaBackend::Flash, &f, true, true),
            back - 2 * 16 * MIB
        );
        // With the result as an operand: dy and result with heads inside, sums, dq; no result, no state.
        let read = 2 * 16 * MIB + lse + 2 * 32 * MIB;
        let saved = |inside, result| taken(SdpaBackend::Flash, &f, inside, true, result);
        assert_eq!(saved(false, ForwardResult::RowMajor), read);
        assert_eq!(saved(false, ForwardResult::HeadsInside), read - 16 * MIB);
        assert_eq!(saved(true, ForwardResult::RowMajor), read - 16 * MIB);
        // Four query heads of each key head: dk and dv of every one of them beside.
        let grouped = facts(8, 4, 4, 1024, 64);
        assert_eq!(
            found(SdpaBackend::Flash, &grouped, false, true),
            back + 2 * 16 * MIB
        );
    }

    #[test]
    fn efficient_takes_what_its_sources_say() {
        let f = Facts {
            value_size: 32,
            ..facts(8, 16, 1, 1024, 64)
        };
        // Heads are inside: the result is turned.
        assert_eq!(
            found(SdpaBackend::Efficient, &f, false, false),
            MIB / 2 + 8 * MIB
        );
        // Sixteen tiles of 64 by 64 a head and their locks.
        let tiles = 8 * 16 * 16 * (64 * 64 + 4) * 4;
        let back = 8 * MIB + MIB / 2 + 8 * MIB + MIB / 2 + tiles;
        assert_eq!(found(SdpaBackend::Efficient, &f, false, true), back);
        let read = |f: &Facts| {
            taken(
                SdpaBackend::Efficient,
                f,
                false,
                true,
                ForwardResult::RowMajor,
            )
        };
        assert_eq!(read(&f), back - MIB / 2);
        // Rows that are padded to 1024 are copied; there are as many tiles.
        let odd = Facts {
            queries: 1000,
            ..f.clone()
        };
        let y = 8 * 16 * 1000 * 32 * 2;
        let sums = 8 * 16 * 1000 * 4;
        assert_eq!(read(&odd), 2 * y + MIB / 2 + sums + tiles);
    }

    #[test]
    fn keys_are_split_where_queries_do_not_fill_the_device() {
        let splits = |f: &Facts| key_splits(&SdpaBackends::cuda(90, 132), f);
        assert_eq!(splits(&facts(8, 16, 1, 1024, 64)), 1);
        // 12 heads of 2 blocks of queries, 264 places, 16 blocks of keys: 8 parts use 192 of 264, 16 all but 8 of 3 rounds.
        let few = Facts {
            keys: 4096,
            causal: false,
            ..facts(1, 12, 1, 128, 64)
        };
        let n = splits(&few);
        assert!((2..=16).contains(&n), "{n}");
        let more = found(SdpaBackend::Flash, &few, false, false);
        assert!(more > 4 * (n * 12 * 128 * 64) as u64, "{more}");
    }

    #[test]
    fn what_is_not_read_in_place_is_copied() {
        let f = facts(8, 16, 1, 1024, 64);
        let mut q = Sized::contiguous(f.dtype, vec![8, 16, 1024, 64]);
        let (k, mut node_q) = (q.clone(), q.clone());
        q.strides = vec![1 << 20, 1 << 16, 1, 1024];
        node_q.strides = q.strides.clone();
        let node = Node {
            facts: &f,
            q: &node_q,
            k: &k,
            v: &k,
            dy: None,
            wants: &[],
            wants_lse: true,
            result: ForwardResult::Recomputed,
        };
        let taken = bytes(SdpaBackend::Flash, &SdpaBackends::cuda(90, 132), &node, 512);
        assert_eq!(taken, Some(16 * MIB + 1024));
    }
}
