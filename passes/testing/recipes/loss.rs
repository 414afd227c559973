//! Calls of losses over classes: every reduction, labels that are ignored, weights, more axes than one.

use super::call::In::*;
use super::call::Set::*;
use super::call::{C234, M24, Recipe, S as SCALAR, V4, r, recipes};

pub const CALLS: &[Recipe] = recipes! {
    SoftmaxCrossEntropyLoss 1 (Real(M24), Ints(&[3, 0]));
    SoftmaxCrossEntropyLoss 1 (Real(C234), Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2]))
        with [("ignore_index", I(-100))];
    SoftmaxCrossEntropyLoss 2 (Real(M24), Ints(&[3, 0]), Positive(V4)) with [("reduction", S("sum"))];
    SoftmaxCrossEntropyLossGrad 1 (Real(SCALAR), Real(M24), Ints(&[3, 0]));
    SoftmaxCrossEntropyLossGrad 1 (Real(M24), Real(C234), Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2]),
        Positive(&[3]))
        with [("ignore_index", I(-100)), ("reduction", S("none"))];
    NegativeLogLikelihoodLoss 1 (Real(M24), Ints(&[3, 0]));
    NegativeLogLikelihoodLoss 1 (Real(M24), Ints(&[3, 0]), Positive(V4)) with [("reduction", S("none"))];
    NegativeLogLikelihoodLossGrad 1 (Real(SCALAR), Real(M24), Ints(&[3, 0]));
    NegativeLogLikelihoodLossGrad 1 (Real(SCALAR), Real(M24), Ints(&[3, 0]), Positive(V4))
        with [("reduction", S("sum"))];
    ClassLoss 1 (Real(M24), Ints(&[3, 0]));
    ClassLoss 1 (Real(C234), Table(&[2, 4], &[0, 1, 2, 0, -100, 1, 1, 2]), Positive(&[3]))
        with [("ignore_index", I(-100))];
    ClassTerms 2 (Real(M24), Ints(&[3, 0]));
    ClassTerms 2 (Real(C234), Table(&[2, 4], &[0, 1, 2, 0, 2, 1, 1, 2]));
    ClassTermsGrad 1 (Scales(&[2]), Scales(&[2]), Real(M24), Ints(&[3, 0]));
    ClassTermsGrad 1 (Scales(&[2, 4]), Scales(&[2, 4]), Real(C234), Table(&[2, 4], &[0, 1, 2, 0, 2, 1, 1, 2]));
    ClassLoss 1 (Real(M24), Ints(&[3, -1]), Positive(V4))
        with [("ignore_index", I(-1)), ("normalized", I(1))];
};
