//! Calls of rotary positions, attention and its gradient: masks, bands, groups of heads, ranks, and sizes of 0 and 1.

use super::call::In::*;
use super::call::Set::*;
use super::call::{In, Recipe, Set, r, recipes};

const Q: In = Real(&[2, 2, 3, 4]);
const K: In = Real(&[2, 2, 4, 4]);
const V: In = Real(&[2, 2, 4, 3]);
const DY: In = Real(&[2, 2, 3, 3]);
const CAUSAL: (&str, Set) = ("causal", I(1));
const HALF: (&str, Set) = ("scale", F(0.5));
const BACK: (&str, Set) = ("inverse", I(1));
const ALL_FOUR: (&str, Set) = ("wants", L(&[0, 1, 2, 3]));
/// The second of three queries sees nothing.
const MASK: In = Bools(&[3, 4], &[1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1]);
/// One entry a key of each of two batch entries, the first of which has no keys left.
const PADDING: In = Bools(&[2, 1, 1, 4], &[0, 0, 0, 0, 1, 1, 0, 1]);

/// Documents of two batch entries: two, and three of which the last is that of the first key again.
const SEGMENTS: In = Table(&[2, 4], &[5, 5, 7, 7, -1, 2, 2, -1]);

pub const CALLS: &[Recipe] = recipes! {
    Rotary 1 (Q, Real(&[3, 4]), Real(&[3, 4]));
    Rotary 1 (Q, Real(&[2, 1, 1, 2]), Real(&[1])) with [BACK];
    Attention 2 (Q, K, V) with [HALF];
    Attention 1 (Q, K, V) with [HALF, CAUSAL];
    Attention 2 (Q, K, V, MASK);
    Attention 2 (Q, K, V, PADDING) with [CAUSAL];
    Attention 2 (Q, K, V, Real(&[3, 4])) with [("softcap", F(0.7))];
    Attention 1 (Q, K, V, Real(&[2, 1, 1])) with [CAUSAL];
    Attention 1 (Q, K, V, Real(&[2, 1, 3, 1])) with [("scale", F(-1.5))];
    Attention 1 (Q, K, V, Real(&[1]));
    Attention 1 (Q, K, V) with [("window_left", I(1)), CAUSAL];
    Attention 1 (Q, K, V) with [("window_left", I(0)), ("window_right", I(1)), HALF];
    Attention 1 (Q, K, V) with [("window_right", I(2))];
    // More queries than keys: the first ones see none.
    Attention 2 (Real(&[2, 4, 3]), Real(&[2, 2, 3]), Real(&[2, 2, 4])) with [CAUSAL];
    // Two and four query heads for each key head.
    Attention 1 (Real(&[4, 3, 2]), Real(&[2, 3, 2]), Real(&[2, 3, 4])) with [CAUSAL];
    Attention 1 (Real(&[2, 4, 3, 2]), Real(&[2, 1, 2, 2]), Real(&[2, 1, 2, 2]), Real(&[4, 1, 2]));
    Attention 2 (Real(&[2, 2, 2, 3, 2]), Real(&[2, 2, 1, 3, 2]), Real(&[2, 2, 1, 3, 2]))
        with [CAUSAL, ("window_left", I(1))];
    Attention 2 (Real(&[3, 4]), Real(&[2, 4]), Real(&[2, 3]), Real(&[3, 2]));
    Attention 2 (Real(&[1, 1, 1]), Real(&[1, 1, 1]), Real(&[1, 1, 1]));
    Attention 1 (Real(&[2, 1, 4]), Real(&[2, 4, 4]), Real(&[2, 4, 1])) with [CAUSAL];
    Attention 2 (Real(&[2, 3, 4]), Real(&[2, 0, 4]), Real(&[2, 0, 3]));
    Attention 2 (Real(&[2, 0, 4]), Real(&[2, 3, 4]), Real(&[2, 3, 3]));
    Attention 1 (Real(&[2, 3, 0]), Real(&[2, 4, 0]), Real(&[2, 4, 3]));
    Attention 1 (Real(&[0, 3, 4]), Real(&[0, 4, 4]), Real(&[0, 4, 3])) with [CAUSAL];
    Attention 2 (Q, K, V, Not, SEGMENTS) with [HALF];
    Attention 2 (Q, K, V, Not, Table(&[4], &[1, 1, 2, 2])) with [CAUSAL, ("window_left", I(1))];
    Attention 1 (Q, K, V, MASK, SEGMENTS) with [CAUSAL];
    Attention 1 (Q, K, V, Real(&[2, 1, 3, 4]), Table(&[1, 4], &[1, 2, 2, 1])) with [("softcap", F(0.7))];
    Attention 2 (Real(&[2, 2, 2, 3, 2]), Real(&[2, 2, 1, 3, 2]), Real(&[2, 2, 1, 3, 2]), Not,
        Table(&[2, 1, 3], &[1, 1, 2, 3, 4, 4])) with [CAUSAL];
    Attention 1 (Real(&[3, 4]), Real(&[3, 4]), Real(&[3, 2]), Not, Table(&[3], &[1, 0, 1]));
    AttentionGrad 4 (DY, Q, K, V, Real(&[2, 3, 4])) with [ALL_FOUR, HALF, ("softcap", F(0.7))];
    AttentionGrad 3 (DY, Q, K, V, Not, Not, Not, SEGMENTS) with [("wants", L(&[0, 1, 2])), CAUSAL];
    AttentionGrad 4 (DY, Q, K, V, Real(&[2, 1, 3, 4]), Not, Not, SEGMENTS) with [ALL_FOUR, HALF];
    AttentionGrad 4 (DY, Q, K, V, Real(&[3, 1])) with [ALL_FOUR, CAUSAL];
    AttentionGrad 3 (DY, Q, K, V, Not, Not, Not, Not, Scales(&[2, 2, 3])) with [("wants", L(&[0, 1, 2])), CAUSAL];
    AttentionGrad 1 (DY, Q, K, V, Real(&[1])) with [("wants", L(&[3]))];
    // A saved result, which changes nothing.
    AttentionGrad 4 (DY, Q, K, V, Real(&[3, 4]), DY) with [ALL_FOUR, HALF];
    AttentionGrad 1 (DY, Q, K, V) with [("wants", L(&[2])), CAUSAL];
    AttentionGrad 1 (DY, Q, K, V, MASK) with [("wants", L(&[0]))];
    AttentionGrad 2 (DY, Q, K, V, PADDING)
        with [("wants", L(&[1, 2])), ("window_left", I(1)), ("window_right", I(0))];
    AttentionGrad 3 (Real(&[4, 3, 4]), Real(&[4, 3, 2]), Real(&[2, 3, 2]), Real(&[2, 3, 4]))
        with [("wants", L(&[0, 1, 2])), CAUSAL];
    AttentionGrad 4 (Real(&[2, 4, 3, 2]), Real(&[2, 4, 3, 2]), Real(&[2, 2, 2, 2]), Real(&[2, 2, 2, 2]),
        Real(&[2, 1, 3, 2]))
        with [ALL_FOUR, CAUSAL];
    AttentionGrad 4 (Real(&[1, 1]), Real(&[1, 1]), Real(&[1, 1]), Real(&[1, 1]), Real(&[])) with [ALL_FOUR];
    AttentionGrad 3 (Real(&[2, 3, 4]), Real(&[2, 3, 4]), Real(&[2, 0, 4]), Real(&[2, 0, 4]))
        with [("wants", L(&[0, 1, 2]))];
};
