//! Calls of optimizer steps.

use super::call::In::{Bools, Int, Not, Positive, Real, Scalar};
use super::call::Set::F;
use super::call::{In, M23, Recipe, S, Set, V3, r, recipes};

const DECAYS: (&str, Set) = ("weight_decay", F(0.1));
const ADAM: [(&str, Set); 4] = [
    ("beta1", F(0.9)),
    ("beta2", F(0.999)),
    ("eps", F(1e-8)),
    DECAYS,
];

const YES: In = Bools(&[], &[1]);
const NO: In = Bools(&[], &[0]);

pub const CALLS: &[Recipe] = recipes! {
    Sgd 1 (Real(M23), Real(M23), Scalar(0.5));
    Sgd 1 (Real(S), Real(S), Scalar(0.5)) with [DECAYS];
    Sgd 1 (Real(V3), Real(V3), Scalar(0.5), Real(V3)) with [("momentum", F(0.9)), DECAYS];
    Sgd 1 (Real(M23), Real(M23), Scalar(0.5), Not, Scalar(0.25), YES) with [DECAYS];
    Sgd 1 (Real(V3), Real(V3), Scalar(0.5), Real(V3), Scalar(0.25), NO) with [("momentum", F(0.9)), DECAYS];
    Momentum 1 (Real(M23), Real(M23)) with [("momentum", F(0.9))];
    Momentum 1 (Real(M23), Real(M23), Real(M23), Int(1))
        with [("momentum", F(0.9)), ("dampening", F(0.5)), DECAYS];
    Momentum 1 (Real(V3), Real(V3), Not, Int(2)) with [("momentum", F(0.9)), ("dampening", F(0.5))];
    Momentum 1 (Real(M23), Real(M23), Real(M23), Not, Scalar(0.25), YES) with [("momentum", F(0.9)), DECAYS];
    Momentum 1 (Real(M23), Real(M23), Not, Not, Not, NO) with [("momentum", F(0.9))];
    AdamMean 1 (Real(M23), Real(M23)) with [("beta", F(0.9))];
    AdamMean 1 (Real(M23), Real(M23), Scalar(0.25), YES) with [("beta", F(0.9))];
    AdamMean 1 (Real(S), Real(S), Not, NO) with [("beta", F(0.9))];
    AdamSquare 1 (Positive(M23), Real(M23)) with [("beta", F(0.999))];
    AdamSquare 1 (Positive(M23), Real(M23), Scalar(0.25), YES) with [("beta", F(0.999))];
    AdamSquare 1 (Positive(V3), Real(V3), Scalar(0.25), NO) with [("beta", F(0.999))];
    AdamW 1 (Real(M23), Real(M23), Positive(M23), Scalar(0.1), Int(3)) with ADAM;
    AdamW 1 (Real(S), Real(S), Positive(S), Scalar(0.1), Int(1)) with [ADAM[0], ADAM[1], ADAM[2]];
    AdamW 1 (Real(M23), Real(M23), Positive(M23), Scalar(0.1), Int(3), YES) with ADAM;
    AdamW 1 (Real(V3), Real(V3), Positive(V3), Scalar(0.1), Int(3), NO) with ADAM;
    Lion 1 (Real(M23), Real(M23), Real(M23), Scalar(0.1)) with [ADAM[0], DECAYS];
    Lion 1 (Real(S), Real(S), Real(S), Scalar(0.1), Scalar(0.25), YES) with [ADAM[0]];
    Lion 1 (Real(V3), Real(V3), Real(V3), Scalar(0.1), Not, NO) with [ADAM[0]];
    AddGradient 1 (Real(M23), Real(M23), NO);
    AddGradient 1 (Real(S), Real(S), YES);
    Replace 1 (Real(M23), Real(M23));
    Replace 1 (Bools(&[], &[0]), YES);
    L2Norm 1 (Real(M23));
    L2Norm 1 (Real(S));
};
