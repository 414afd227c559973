//! Calls that dequantise.

use super::call::In::{Bytes, Not, Real, Scales};
use super::call::Set::{I, L};
use super::call::{In, M13, M23, Recipe, S, Set, V3, r, recipes};

const SIX: &[i64] = &[2, 3];
const ODD: &[i64] = &[3, 3];
const CODES: In = Bytes(M23, &[0, 1, 127, 128, 200, 255]);
const PAIRS: In = Bytes(V3, &[0x10, 0x8f, 0x72]);
const FIVE: In = Bytes(&[5], &[0x10, 0x8f, 0x72, 0xa5, 0x04]);
const ONE: In = Scales(S);
/// Blocks of two rows, of which the last is not whole.
const ROWS: &[i64] = &[2, 3];
/// Blocks of two columns.
const COLUMNS: &[i64] = &[3, 2];
const SIXTEEN: &[i64] = &[16];
const EIGHT: [(&str, Set); 1] = [("shape", L(SIX))];
const FOUR: [(&str, Set); 3] = [("bits", I(4)), ("shape", L(SIX)), ("signed", I(1))];
const DOWN: [(&str, Set); 4] = [
    ("bits", I(4)),
    ("block", I(2)),
    ("shape", L(ODD)),
    ("signed", I(1)),
];
const ALONG: [(&str, Set); 4] = [
    ("axis", I(-1)),
    ("bits", I(4)),
    ("block", I(2)),
    ("shape", L(ODD)),
];

const HIGH: [(&str, Set); 3] = [("bits", I(4)), ("high_first", I(1)), ("shape", L(ODD))];

pub const CALLS: &[Recipe] = recipes! {
    Dequantize 1 (CODES, ONE) with EIGHT;
    Dequantize 1 (CODES, Real(M13), Real(M13)) with EIGHT;
    Dequantize 1 (PAIRS, ONE, ONE) with FOUR;
    Dequantize 1 (FIVE, Real(ROWS), Real(ROWS)) with DOWN;
    Dequantize 1 (FIVE, Real(COLUMNS), Real(COLUMNS)) with ALONG;
    Dequantize 1 (FIVE, Real(COLUMNS), Not, Real(SIXTEEN)) with ALONG;
    Dequantize 1 (FIVE, ONE) with HIGH;
};
