//! Writing by index: every reduction, places that meet, axes counted from the end.

use super::call::{In, Recipe, Set, r, recipes};

pub const CALLS: &[Recipe] = recipes! {
    ScatterElements 1 (In::Real(&[2, 3]), In::Table(&[1, 3], &[0, 1, 1]), In::Real(&[1, 3]))
        with [("axis", Set::I(0))];
    ScatterElements 1 (In::Real(&[2, 3]), In::Table(&[2, 2], &[0, 0, 1, 2]), In::Real(&[2, 2]))
        with [("axis", Set::I(1)), ("reduction", Set::S("add"))];
    ScatterElements 1 (In::Real(&[2, 3]), In::Table(&[2, 2], &[0, 0, 1, 2]), In::Real(&[2, 2]))
        with [("axis", Set::I(1)), ("reduction", Set::S("mul"))];
    ScatterElements 1 (In::Real(&[2, 3]), In::Table(&[2, 2], &[0, 0, 1, 2]), In::Real(&[2, 2]))
        with [("axis", Set::I(-1)), ("reduction", Set::S("max"))];
    ScatterND 1 (In::Real(&[3, 4]), In::Table(&[2, 1], &[2, 0]), In::Real(&[2, 4]));
    ScatterND 1 (In::Real(&[3, 4]), In::Table(&[2, 1], &[1, 1]), In::Real(&[2, 4]))
        with [("reduction", Set::S("mul"))];
    ScatterND 1 (In::Real(&[3, 4]), In::Table(&[3, 2], &[1, 1, 0, 2, 1, 1]), In::Real(&[3]))
        with [("reduction", Set::S("min"))];
    ScatterND 1 (In::Real(&[3, 4]), In::Table(&[2, 1], &[1, 1]), In::Real(&[2, 4]))
        with [("reduction", Set::S("add"))];
    ScatterND 1 (In::Real(&[3, 4]), In::Table(&[3, 2], &[1, 1, 0, 2, 1, 1]), In::Real(&[3]))
        with [("reduction", Set::S("add"))];
    OneHot 1 (In::Ints(&[1, 0, 3]), In::Int(4), In::Table(&[2], &[0, 1]));
    OneHot 1 (In::Ints(&[1, 0, 3]), In::Int(4), In::Real(&[2])) with [("axis", Set::I(0))];
};
