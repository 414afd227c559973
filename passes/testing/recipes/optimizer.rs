//! Calls of optimizer steps.

use super::call::In::{Int, Not, Positive, Real, Scalar};
use super::call::Set::F;
use super::call::{M23, Recipe, S, Set, V3, r, recipes};

const DECAYS: (&str, Set) = ("weight_decay", F(0.1));
const ADAM: [(&str, Set); 4] = [
    ("beta1", F(0.9)),
    ("beta2", F(0.999)),
    ("eps", F(1e-8)),
    DECAYS,
];

pub const CALLS: &[Recipe] = recipes! {
    Sgd 1 (Real(M23), Real(M23), Scalar(0.5));
    Sgd 1 (Real(S), Real(S), Scalar(0.5)) with [DECAYS];
    Sgd 1 (Real(V3), Real(V3), Scalar(0.5), Real(V3)) with [("momentum", F(0.9)), DECAYS];
    Momentum 1 (Real(M23), Real(M23)) with [("momentum", F(0.9))];
    Momentum 1 (Real(M23), Real(M23), Real(M23), Int(1))
        with [("momentum", F(0.9)), ("dampening", F(0.5)), DECAYS];
    Momentum 1 (Real(V3), Real(V3), Not, Int(2)) with [("momentum", F(0.9)), ("dampening", F(0.5))];
    AdamMean 1 (Real(M23), Real(M23)) with [("beta", F(0.9))];
    AdamSquare 1 (Positive(M23), Real(M23)) with [("beta", F(0.999))];
    AdamW 1 (Real(M23), Real(M23), Positive(M23), Scalar(0.1), Int(3)) with ADAM;
    AdamW 1 (Real(S), Real(S), Positive(S), Scalar(0.1), Int(1)) with [ADAM[0], ADAM[1], ADAM[2]];
};
