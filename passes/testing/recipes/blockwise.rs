//! Calls of AdamW with 8-bit states.

use super::call::In::{Bools, Bytes, Int, Not, Real, Scalar, Scales};
use super::call::Set::{F, I};
use super::call::{In, M23, Recipe, Set, r, recipes};

const V1: &[i64] = &[1];
const V6: &[i64] = &[6];
const SETTINGS: [(&str, Set); 4] = [
    ("beta1", F(0.9)),
    ("beta2", F(0.999)),
    ("eps", F(1e-8)),
    ("weight_decay", F(0.1)),
];
const FIRST: [(&str, Set); 2] = [("beta", F(0.9)), ("power", I(1))];
const SECOND: [(&str, Set); 2] = [("beta", F(0.999)), ("power", I(2))];
const MEAN: In = Bytes(V6, &[0, 40, 127, 128, 200, 255]);
const SQUARE: In = Bytes(V6, &[0, 1, 90, 128, 200, 255]);
/// Two blocks, of which the last is not whole.
const LONG: &[i64] = &[2, 150];
const TWO: &[i64] = &[2];
const ZEROS: In = Bytes(&[300], &[0; 300]);
const YES: In = Bools(&[], &[1]);
const NO: In = Bools(&[], &[0]);

pub const CALLS: &[Recipe] = recipes! {
    AdamW8bit 1 (Real(M23), Real(M23), Scalar(0.1), Int(3), MEAN, Scales(V1), SQUARE, Scales(V1)) with SETTINGS;
    AdamW8bit 1 (Real(LONG), Real(LONG), Scalar(0.1), Int(1), ZEROS, Scales(TWO), ZEROS, Scales(TWO), Scalar(0.25), YES)
        with SETTINGS;
    AdamW8bit 1 (Real(M23), Real(M23), Scalar(0.1), Int(3), MEAN, Scales(V1), SQUARE, Scales(V1), Not, NO) with SETTINGS;
    MomentScales 1 (MEAN, Scales(V1), Real(M23)) with FIRST;
    MomentScales 1 (SQUARE, Scales(V1), Real(M23), Scalar(0.25), YES) with SECOND;
    MomentScales 1 (ZEROS, Scales(TWO), Real(LONG)) with SECOND;
    MomentScales 1 (MEAN, Scales(V1), Real(M23), Not, NO) with FIRST;
    MomentCodes 1 (MEAN, Real(M23), Scales(V1), Scales(V1)) with FIRST;
    MomentCodes 1 (SQUARE, Real(M23), Scales(V1), Scales(V1), Scalar(0.25), YES) with SECOND;
    MomentCodes 1 (ZEROS, Real(LONG), Scales(TWO), Scales(TWO)) with FIRST;
    MomentCodes 1 (SQUARE, Real(M23), Scales(V1), Scales(V1), Not, NO) with SECOND;
};
