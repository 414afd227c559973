//! Calls of lookups by index.

use super::call::In::{Int, Ints, Real, Table};
use super::call::Set::I;
use super::call::{C234, M23, M24, M34, Recipe, r, recipes};

pub const CALLS: &[Recipe] = recipes! {
    Gather 1 (Real(M34), Table(&[2, 2], &[0, 2, -1, 0]));
    Gather 1 (Real(C234), Int(1)) with [("axis", I(1))];
    GatherGrad 1 (Ints(&[3, 4]), Ints(&[2, 0]), Real(M24));
    // Added to what is there, a repeated index too.
    GatherGrad 1 (Ints(&[3, 4]), Table(&[3], &[2, 0, -1]), Real(M34), Real(M34));
    GatherGrad 1 (Ints(&[2, 3, 4]), Table(&[2], &[1, -2]), Real(&[2, 2, 4]), Real(C234))
        with [("axis", I(1))];
    GatherElements 1 (Real(M23), Table(&[2, 2], &[0, 2, 1, 1])) with [("axis", I(1))];
    GatherND 1 (Real(C234), Table(&[2, 2], &[0, 2, 1, 1]));
    // Repeated and negative tuples; whole elements; axes that go together.
    GatherND 1 (Real(C234), Table(&[3, 2], &[1, -1, 1, 2, -2, 0]));
    GatherND 1 (Real(M23), Table(&[1, 3, 2], &[1, 2, 0, -3, 1, 2]));
    GatherND 1 (Real(C234), Table(&[2, 3, 1], &[2, 0, -1, 1, 1, 1])) with [("batch_dims", I(1))];
    GatherND 1 (Real(C234), Table(&[2, 3, 1], &[3, -4, 0, 1, 1, -1])) with [("batch_dims", I(2))];
    NonZero 1 (Table(&[2, 2], &[0, 1, 1, 1]));
};
