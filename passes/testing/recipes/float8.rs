//! Calls that store floats of 8 bits, and that read them.

use super::call::In::{Float8, Real, Scales};
use super::call::Set::{D, I};
use super::call::{C234, M13, M23, Recipe, S, Set, V3, r, recipes};
use crate::ir::DType;

const TO_E4M3: [(&str, Set); 1] = [("to", D(DType::F8E4M3FN))];
const TO_E5M2: [(&str, Set); 2] = [("saturate", I(0)), ("to", D(DType::F8E5M2))];
const TO_F32: [(&str, Set); 1] = [("to", D(DType::F32))];
const TO_BF16: [(&str, Set); 1] = [("to", D(DType::BF16))];
const TO_F64: [(&str, Set); 1] = [("to", D(DType::F64))];

pub const CALLS: &[Recipe] = recipes! {
    Cast 1 (Real(M23)) with TO_E4M3;
    Cast 1 (Real(C234)) with TO_E5M2;
    Cast 1 (Float8(M23)) with TO_F32;
    Cast 1 (Float8(M23)) with TO_E5M2;
    Identity 1 (Float8(M23));
    Transpose 1 (Float8(M23));
    QuantizeFloat8 1 (Real(M23), Scales(S)) with TO_E4M3;
    QuantizeFloat8 1 (Real(C234), Scales(&[3, 1])) with TO_E5M2;
    QuantizeFloat8 1 (Real(M23), Real(M13)) with TO_E4M3;
    DequantizeFloat8 1 (Float8(M23), Scales(S)) with TO_F32;
    DequantizeFloat8 1 (Float8(M23), Real(V3)) with TO_BF16;
    DequantizeFloat8 1 (Float8(M23), Scales(M13)) with TO_F64;
};
