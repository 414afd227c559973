//! Calls of optimizer steps.

use super::In::{Int, Not, Positive, Real, Scalar};
use super::Set::F;
use super::{M23, Recipe, S, V3, r};

const DECAYS: (&str, super::Set) = ("weight_decay", F(0.1));
const ADAM: [(&str, super::Set); 4] = [
    ("beta1", F(0.9)),
    ("beta2", F(0.999)),
    ("eps", F(1e-8)),
    DECAYS,
];

pub const CALLS: &[Recipe] = &[
    r("Sgd", 1, &[Real(M23), Real(M23), Scalar(0.5)], &[]),
    r("Sgd", 1, &[Real(S), Real(S), Scalar(0.5)], &[DECAYS]),
    r(
        "Sgd",
        1,
        &[Real(V3), Real(V3), Scalar(0.5), Real(V3)],
        &[("momentum", F(0.9)), DECAYS],
    ),
    r(
        "Momentum",
        1,
        &[Real(M23), Real(M23)],
        &[("momentum", F(0.9))],
    ),
    r(
        "Momentum",
        1,
        &[Real(M23), Real(M23), Real(M23), Int(1)],
        &[("momentum", F(0.9)), ("dampening", F(0.5)), DECAYS],
    ),
    r(
        "Momentum",
        1,
        &[Real(V3), Real(V3), Not, Int(2)],
        &[("momentum", F(0.9)), ("dampening", F(0.5))],
    ),
    r("AdamMean", 1, &[Real(M23), Real(M23)], &[("beta", F(0.9))]),
    r(
        "AdamSquare",
        1,
        &[Positive(M23), Real(M23)],
        &[("beta", F(0.999))],
    ),
    r(
        "AdamW",
        1,
        &[Real(M23), Real(M23), Positive(M23), Scalar(0.1), Int(3)],
        &ADAM,
    ),
    r(
        "AdamW",
        1,
        &[Real(S), Real(S), Positive(S), Scalar(0.1), Int(1)],
        &[ADAM[0], ADAM[1], ADAM[2]],
    ),
];
