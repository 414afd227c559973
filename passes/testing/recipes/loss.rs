//! Calls of losses over classes: every reduction, labels that are ignored, weights, more axes than one.

use super::In::*;
use super::Set::*;
use super::{C234, M24, Recipe, S as SCALAR, V4, r};

pub const CALLS: &[Recipe] = &[
    r(
        "SoftmaxCrossEntropyLoss",
        1,
        &[Real(M24), Ints(&[3, 0])],
        &[],
    ),
    r(
        "SoftmaxCrossEntropyLoss",
        1,
        &[Real(C234), Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2])],
        &[("ignore_index", I(-100))],
    ),
    r(
        "SoftmaxCrossEntropyLoss",
        2,
        &[Real(M24), Ints(&[3, 0]), Positive(V4)],
        &[("reduction", S("sum"))],
    ),
    r(
        "SoftmaxCrossEntropyLossGrad",
        1,
        &[Real(SCALAR), Real(M24), Ints(&[3, 0])],
        &[],
    ),
    r(
        "SoftmaxCrossEntropyLossGrad",
        1,
        &[
            Real(M24),
            Real(C234),
            Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2]),
            Positive(&[3]),
        ],
        &[("ignore_index", I(-100)), ("reduction", S("none"))],
    ),
    r(
        "NegativeLogLikelihoodLoss",
        1,
        &[Real(M24), Ints(&[3, 0])],
        &[],
    ),
    r(
        "NegativeLogLikelihoodLoss",
        1,
        &[Real(M24), Ints(&[3, 0]), Positive(V4)],
        &[("reduction", S("none"))],
    ),
    r(
        "NegativeLogLikelihoodLossGrad",
        1,
        &[Real(SCALAR), Real(M24), Ints(&[3, 0])],
        &[],
    ),
    r(
        "NegativeLogLikelihoodLossGrad",
        1,
        &[Real(SCALAR), Real(M24), Ints(&[3, 0]), Positive(V4)],
        &[("reduction", S("sum"))],
    ),
    r("ClassLoss", 1, &[Real(M24), Ints(&[3, 0])], &[]),
    r(
        "ClassLoss",
        1,
        &[
            Real(C234),
            Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2]),
            Positive(&[3]),
        ],
        &[("ignore_index", I(-100))],
    ),
    r(
        "ClassLoss",
        1,
        &[Real(M24), Ints(&[3, -1]), Positive(V4)],
        &[("ignore_index", I(-1)), ("normalized", I(1))],
    ),
];
