//! Plans the offset of each storage of a run in one block of memory, the arena.
//!
//! Storages that never live together may share addresses. Each storage in turn is placed at the lowest address that is free
//! throughout its life. The order decides how much memory is wasted, so several orders are tried. Each is improved by
//! moving forward whatever lay above the bytes that are needed at the worst moment (Joslin and Clements, "Squeaky Wheel
//! Optimization", 1999), until hardly anything is wasted or enough was tried. The best orders begin with what lives at the
//! worst moments; largest first is common (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
//! 2020).
//!
//! A storage that overwrites another lies at the same address. Temporaries of a node form one range while the node runs.
//! Small storages are not placed: they would only make the plan longer.
//!
//! [`Arena::check`] proves that no two storages that live together overlap, by another algorithm than the one that places
//! them.

use super::memory::{MemoryProfile, StorageId};
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Smaller storages are not placed.
pub const LEAST_BYTES: u64 = 1 << 16;

/// No more storages than this are placed, the largest: the search looks at each pair that lives together.
const MOST_PLACED: usize = 4096;

/// No further try once at most this fraction (one in so many bytes) is wasted.
const WASTE: u64 = 256;

/// How often an order is improved.
const ROUNDS: usize = 30;

/// No further try once so many pairs were compared.
const MOST_PAIRS: usize = 20_000_000;

/// Room for the headers of temporaries.
const TEMP_HEADERS: u64 = 16;

/// A range `from..to`, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first byte in the arena.
    pub from: u64,
    /// Offset right after the last byte.
    pub to: u64,
}

/// The planned offsets of the storages of a run.
#[derive(Clone, Debug, Default)]
pub struct Arena {
    /// Bytes to reserve.
    pub bytes: u64,
    /// By position in the order: the ranges of the storages that are made there, with their bytes.
    pub made: Vec<Vec<(Span, u64)>>,
    /// By position: the range of its temporaries.
    pub temps: Vec<Option<Span>>,
    /// Everything that is placed: its range and the first and last position of its life.
    placed: Vec<(Span, usize, usize)>,
}

/// Something to place.
struct Item {
    bytes: u64,
    born: usize,
    dies: usize,
    /// The storage; `None` for temporaries of the node at `born`.
    storage: Option<StorageId>,
}

impl Arena {
    /// Places what `memory` counts above static bytes. Each block takes `header_bytes` beside its contents and begins at a
    /// multiple of them.
    pub fn new(memory: &MemoryProfile, header_bytes: u64) -> Arena {
        let steps = memory.frees.len();
        let whole = |bytes: u64| (bytes + header_bytes).next_multiple_of(header_bytes.max(1));
        let mut is_taken = vec![false; memory.storages.len()];
        for by in memory.storages.iter().filter_map(|s| s.taken_by) {
            is_taken[by.0 as usize] = true;
        }
        let mut items = Vec::new();
        for (i, storage) in memory.storages.iter().enumerate() {
            let is_elsewhere = storage.is_static || storage.is_outside;
            if is_elsewhere || storage.bytes < LEAST_BYTES || is_taken[i] {
                continue;
            }
            // A storage lives on in whatever overwrites it.
            let mut last = storage;
            while let Some(by) = last.taken_by {
                last = &memory.storages[by.0 as usize];
            }
            items.push(Item {
                bytes: whole(storage.bytes),
                born: storage.born,
                dies: last.dies.unwrap_or(steps),
                storage: Some(StorageId(i as u32)),
            });
        }
        for (at, bytes) in memory.temp_bytes.iter().enumerate() {
            if *bytes >= LEAST_BYTES {
                items.push(Item {
                    bytes: whole(bytes + TEMP_HEADERS * header_bytes),
                    born: at,
                    dies: at,
                    storage: None,
                });
            }
        }
        items.sort_by_key(|i| (Reverse(i.bytes), i.born, i.storage));
        items.truncate(MOST_PLACED);
        let mut arena = Arena {
            made: vec![Vec::new(); steps],
            temps: vec![None; steps],
            ..Arena::default()
        };
        for (item, from) in items.iter().zip(best(&items, steps)) {
            let span = Span {
                from,
                to: from + item.bytes,
            };
            arena.bytes = arena.bytes.max(span.to);
            arena.placed.push((span, item.born, item.dies));
            match item.storage {
                Some(s) => {
                    let bytes = memory.storages[s.0 as usize].bytes;
                    arena.made[item.born].push((span, bytes));
                }
                None => arena.temps[item.born] = Some(span),
            }
        }
        arena
    }

    /// Proves that everything lies within the arena and that no two that live together overlap.
    ///
    /// # Errors
    /// A `bug`, with the position at which two overlap.
    pub fn check(&self) -> Result<()> {
        let bug = |at: usize| {
            Err(Error::bug(
                "arena",
                format!("storages overlap at step {at}"),
            ))
        };
        let mut starts: Vec<&(Span, usize, usize)> = self.placed.iter().collect();
        starts.sort_by_key(|p| (p.1, p.0.from));
        let mut ends: Vec<&(Span, usize, usize)> = self.placed.iter().collect();
        ends.sort_by_key(|p| p.2);
        let mut ends = ends.into_iter().peekable();
        // What lives now, by where it begins, and where it ends.
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for (span, born, _) in starts {
            while let Some(gone) = ends.next_if(|p| p.2 < *born) {
                live.remove(&gone.0.from);
            }
            let before = live.range(..span.to).next_back();
            if before.is_some_and(|(_, to)| *to > span.from) || span.to > self.bytes {
                return bug(*born);
            }
            live.insert(span.from, span.to);
        }
        Ok(())
    }
}

/// Returns the live bytes at each position.
fn loads(items: &[Item], steps: usize) -> Vec<u64> {
    let (mut born, mut gone) = (vec![0; steps + 2], vec![0; steps + 2]);
    for item in items {
        born[item.born] += item.bytes;
        gone[item.dies + 1] += item.bytes;
    }
    let mut live = 0;
    let changes = born.into_iter().zip(gone);
    changes
        .map(|(born, gone)| {
            live += born;
            live -= gone;
            live
        })
        .collect()
}

/// Returns the offset of each item in the best layout that was found.
fn best(items: &[Item], steps: usize) -> Vec<u64> {
    let loads = loads(items, steps);
    let needed = loads.iter().copied().max().unwrap_or(0);
    // The largest sum of bytes during an item's life, by item.
    let worst: Vec<u64> = (items.iter())
        .map(|i| loads[i.born..=i.dies].iter().copied().max().unwrap_or(0))
        .collect();
    let life = |i: usize| (items[i].dies - items[i].born) as u64;
    let orders: [&dyn Fn(usize) -> (u64, u64); 6] = [
        &|i| (worst[i], items[i].bytes),
        &|i| (worst[i], life(i)),
        &|i| (items[i].bytes, 0),
        &|i| ((steps - items[i].born.min(steps)) as u64, 0),
        &|i| (life(i), items[i].bytes),
        &|i| (items[i].bytes.saturating_mul(life(i) + 1), 0),
    ];
    let mut best: Option<(u64, Vec<u64>)> = None;
    let mut pairs = 0;
    // Items that lay too high move to the front: to a half of their turn, or to three quarters.
    for (to, of) in [(1, 2), (3, 4)] {
        for key in orders {
            let mut order: Vec<usize> = (0..items.len()).collect();
            order.sort_by_key(|i| Reverse(key(*i)));
            for _ in 0..ROUNDS {
                let (bytes, from) = placed(items, &order);
                if best.as_ref().is_none_or(|b| bytes < b.0) {
                    best = Some((bytes, from.clone()));
                }
                let least = best.as_ref().map_or(bytes, |b| b.0);
                pairs += items.len() * items.len() / 2;
                if least <= needed + needed / WASTE || pairs > MOST_PAIRS {
                    return best.map_or(from, |b| b.1);
                }
                // With the gentle move, only items in the upper half of the waste count as too high.
                let most = if of == 2 {
                    needed
                } else {
                    needed.midpoint(least)
                };
                let turn = |(at, i): (usize, &usize)| {
                    let is_high = from[*i] + items[*i].bytes > most;
                    (if is_high { at * to / of } else { at }, *i)
                };
                let mut turns: Vec<(usize, usize)> = order.iter().enumerate().map(turn).collect();
                turns.sort_by_key(|t| t.0);
                order = turns.into_iter().map(|t| t.1).collect();
            }
        }
    }
    best.map_or(Vec::new(), |b| b.1)
}

/// Places items in the given order, each as low as possible. Returns the bytes that this takes and the offset of each.
fn placed(items: &[Item], order: &[usize]) -> (u64, Vec<u64>) {
    let mut from = vec![0; items.len()];
    let mut bytes = 0;
    let mut before: Vec<(usize, usize, Span)> = Vec::with_capacity(items.len());
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for at in order {
        let item = &items[*at];
        taken.clear();
        let together = before
            .iter()
            .filter(|(born, dies, _)| *born <= item.dies && item.born <= *dies);
        taken.extend(together.map(|(_, _, span)| (span.from, span.to)));
        taken.sort_unstable();
        let mut free = 0;
        for (begin, end) in &taken {
            if *begin >= free + item.bytes {
                break;
            }
            free = free.max(*end);
        }
        from[*at] = free;
        let span = Span {
            from: free,
            to: free + item.bytes,
        };
        bytes = bytes.max(span.to);
        before.push((item.born, item.dies, span));
    }
    (bytes, from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::{Binding, Sizes};
    use crate::testing::{Random, random_graph};

    #[test]
    fn nothing_overlaps_and_little_is_wasted() {
        let mut r = Random(11);
        let (mut reserved, mut needed, mut over) = (0, 0, 0);
        for n in 0..200 {
            let g = random_graph(&mut r, 3 + n % 40);
            let sizes = Sizes::new(&g, &Binding::new(&g, &[]).unwrap()).unwrap();
            let mut memory = MemoryProfile::new(&g, &sizes).unwrap();
            // Sizes worth placing.
            memory
                .storages
                .iter_mut()
                .for_each(|s| s.bytes *= LEAST_BYTES);
            memory.temp_bytes.iter_mut().for_each(|b| *b *= LEAST_BYTES);
            let arena = Arena::new(&memory, 64);
            arena.check().unwrap();
            let large = memory
                .storages
                .iter()
                .filter(|s| !s.is_static && s.bytes > 0);
            let made: usize = arena.made.iter().map(Vec::len).sum();
            let taken = memory.taken.iter().flatten().count();
            assert_eq!(made + taken, large.count());
            over += taken;
            reserved += arena.bytes;
            needed += (memory.peak_bytes - memory.static_bytes) * LEAST_BYTES;
        }
        assert!(over > 100, "{over}");
        assert!(
            reserved as f64 <= 1.01 * needed as f64,
            "{reserved} {needed}"
        );
    }

    #[test]
    fn an_overlap_is_found() {
        let span = |from| Span {
            from,
            to: from + 10,
        };
        let arena = |second: u64, born| Arena {
            bytes: 100,
            placed: vec![(span(0), 0, 5), (span(second), born, 9)],
            ..Arena::default()
        };
        assert!(arena(10, 3).check().is_ok() && arena(5, 6).check().is_ok());
        assert!(arena(9, 5).check().is_err() && arena(95, 6).check().is_err());
    }
}
