//! Calls of rotary positions, attention and its gradient: masks, bands, groups of heads, ranks, and sizes of 0 and 1.

use super::In::*;
use super::Set::*;
use super::{Recipe, r};

const Q: super::In = Real(&[2, 2, 3, 4]);
const K: super::In = Real(&[2, 2, 4, 4]);
const V: super::In = Real(&[2, 2, 4, 3]);
const DY: super::In = Real(&[2, 2, 3, 3]);
const CAUSAL: (&str, super::Set) = ("causal", I(1));
const HALF: (&str, super::Set) = ("scale", F(0.5));
const BACK: (&str, super::Set) = ("inverse", I(1));
const ALL_FOUR: (&str, super::Set) = ("wants", L(&[0, 1, 2, 3]));
/// The second of three queries sees nothing.
const MASK: super::In = Bools(&[3, 4], &[1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1]);
/// One entry a key of each of two batch entries, the first of which has no keys left.
const PADDING: super::In = Bools(&[2, 1, 1, 4], &[0, 0, 0, 0, 1, 1, 0, 1]);

pub const CALLS: &[Recipe] = &[
    r("Rotary", 1, &[Q, Real(&[3, 4]), Real(&[3, 4])], &[]),
    r("Rotary", 1, &[Q, Real(&[2, 1, 1, 2]), Real(&[1])], &[BACK]),
    r("Attention", 2, &[Q, K, V], &[HALF]),
    r("Attention", 1, &[Q, K, V], &[HALF, CAUSAL]),
    r("Attention", 2, &[Q, K, V, MASK], &[]),
    r("Attention", 2, &[Q, K, V, PADDING], &[CAUSAL]),
    r(
        "Attention",
        2,
        &[Q, K, V, Real(&[3, 4])],
        &[("softcap", F(0.7))],
    ),
    r("Attention", 1, &[Q, K, V, Real(&[2, 1, 1])], &[CAUSAL]),
    r(
        "Attention",
        1,
        &[Q, K, V, Real(&[2, 1, 3, 1])],
        &[("scale", F(-1.5))],
    ),
    r("Attention", 1, &[Q, K, V, Real(&[1])], &[]),
    r("Attention", 1, &[Q, K, V], &[("window_left", I(1)), CAUSAL]),
    r(
        "Attention",
        1,
        &[Q, K, V],
        &[("window_left", I(0)), ("window_right", I(1)), HALF],
    ),
    r("Attention", 1, &[Q, K, V], &[("window_right", I(2))]),
    // More queries than keys: the first ones see none.
    r(
        "Attention",
        2,
        &[Real(&[2, 4, 3]), Real(&[2, 2, 3]), Real(&[2, 2, 4])],
        &[CAUSAL],
    ),
    // Two and four query heads for each key head.
    r(
        "Attention",
        1,
        &[Real(&[4, 3, 2]), Real(&[2, 3, 2]), Real(&[2, 3, 4])],
        &[CAUSAL],
    ),
    r(
        "Attention",
        1,
        &[
            Real(&[2, 4, 3, 2]),
            Real(&[2, 1, 2, 2]),
            Real(&[2, 1, 2, 2]),
            Real(&[4, 1, 2]),
        ],
        &[],
    ),
    r(
        "Attention",
        2,
        &[
            Real(&[2, 2, 2, 3, 2]),
            Real(&[2, 2, 1, 3, 2]),
            Real(&[2, 2, 1, 3, 2]),
        ],
        &[CAUSAL, ("window_left", I(1))],
    ),
    r(
        "Attention",
        2,
        &[Real(&[3, 4]), Real(&[2, 4]), Real(&[2, 3]), Real(&[3, 2])],
        &[],
    ),
    r(
        "Attention",
        2,
        &[Real(&[1, 1, 1]), Real(&[1, 1, 1]), Real(&[1, 1, 1])],
        &[],
    ),
    r(
        "Attention",
        1,
        &[Real(&[2, 1, 4]), Real(&[2, 4, 4]), Real(&[2, 4, 1])],
        &[CAUSAL],
    ),
    r(
        "Attention",
        2,
        &[Real(&[2, 3, 4]), Real(&[2, 0, 4]), Real(&[2, 0, 3])],
        &[],
    ),
    r(
        "Attention",
        2,
        &[Real(&[2, 0, 4]), Real(&[2, 3, 4]), Real(&[2, 3, 3])],
        &[],
    ),
    r(
        "Attention",
        1,
        &[Real(&[2, 3, 0]), Real(&[2, 4, 0]), Real(&[2, 4, 3])],
        &[],
    ),
    r(
        "Attention",
        1,
        &[Real(&[0, 3, 4]), Real(&[0, 4, 4]), Real(&[0, 4, 3])],
        &[CAUSAL],
    ),
    r(
        "AttentionGrad",
        4,
        &[DY, Q, K, V, Real(&[2, 3, 4])],
        &[ALL_FOUR, HALF, ("softcap", F(0.7))],
    ),
    r(
        "AttentionGrad",
        4,
        &[DY, Q, K, V, Real(&[3, 1])],
        &[ALL_FOUR, CAUSAL],
    ),
    r(
        "AttentionGrad",
        1,
        &[DY, Q, K, V, Real(&[1])],
        &[("wants", L(&[3]))],
    ),
    r(
        "AttentionGrad",
        1,
        &[DY, Q, K, V],
        &[("wants", L(&[2])), CAUSAL],
    ),
    r(
        "AttentionGrad",
        1,
        &[DY, Q, K, V, MASK],
        &[("wants", L(&[0]))],
    ),
    r(
        "AttentionGrad",
        2,
        &[DY, Q, K, V, PADDING],
        &[
            ("wants", L(&[1, 2])),
            ("window_left", I(1)),
            ("window_right", I(0)),
        ],
    ),
    r(
        "AttentionGrad",
        3,
        &[
            Real(&[4, 3, 4]),
            Real(&[4, 3, 2]),
            Real(&[2, 3, 2]),
            Real(&[2, 3, 4]),
        ],
        &[("wants", L(&[0, 1, 2])), CAUSAL],
    ),
    r(
        "AttentionGrad",
        4,
        &[
            Real(&[2, 4, 3, 2]),
            Real(&[2, 4, 3, 2]),
            Real(&[2, 2, 2, 2]),
            Real(&[2, 2, 2, 2]),
            Real(&[2, 1, 3, 2]),
        ],
        &[ALL_FOUR, CAUSAL],
    ),
    r(
        "AttentionGrad",
        4,
        &[
            Real(&[1, 1]),
            Real(&[1, 1]),
            Real(&[1, 1]),
            Real(&[1, 1]),
            Real(&[]),
        ],
        &[ALL_FOUR],
    ),
    r(
        "AttentionGrad",
        3,
        &[
            Real(&[2, 3, 4]),
            Real(&[2, 3, 4]),
            Real(&[2, 0, 4]),
            Real(&[2, 0, 4]),
        ],
        &[("wants", L(&[0, 1, 2]))],
    ),
];
