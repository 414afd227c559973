//! Calls of random ops, and of ops on bits, which their bodies are made of.

use super::call::In::*;
use super::call::{C234, In, M23, Recipe, S, Set, V3, r, recipes};

const BITS: &[i64] = &[0, 5, -7, 1 << 40, 12, i64::MAX];
const BYTES: In = Bytes(M23, &[1, 2, 3, 4, 5, 255]);
const BY: In = Bytes(V3, &[0, 1, 3]);

pub const CALLS: &[Recipe] = recipes! {
    BitwiseAnd 1 (Table(M23, BITS), Ints(&[6, 3, -1]));
    BitwiseOr 1 (Table(M23, BITS), Ints(&[6, 3, -1]));
    BitwiseXor 1 (Table(M23, BITS), Ints(&[6, 3, -1]));
    BitwiseNot 1 (Table(M23, BITS));
    BitShift 1 (BYTES, BY) with [("direction", Set::S("LEFT"))];
    BitShift 1 (BYTES, BY) with [("direction", Set::S("RIGHT"))];
    Dropout 1 (Real(C234), Scalar(0.4), Int(7), Int(1 << 40));
    Dropout 1 (Real(S), Scalar(0.5), Int(-3), Int(2));
    Dropout 1 (Real(&[2, 0]), Scalar(0.5), Int(-3), Int(2));
    SeededUniform 1 (Ints(&[2, 3]), Int(-5), Int(9));
    SeededUniform 1 (Ints(&[]), Int(5), Int(9));
    StochasticRound 1 (Narrow(M23), Real(M23), Int(-3), Int(2));
};
