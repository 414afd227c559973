//! Writing by index: every reduction, places that meet, axes counted from the end.

use super::{In, Recipe, Set, r};

pub const CALLS: &[Recipe] = &[
    r(
        "ScatterElements",
        1,
        &[
            In::Real(&[2, 3]),
            In::Table(&[1, 3], &[0, 1, 1]),
            In::Real(&[1, 3]),
        ],
        &[("axis", Set::I(0))],
    ),
    r(
        "ScatterElements",
        1,
        &[
            In::Real(&[2, 3]),
            In::Table(&[2, 2], &[0, 0, 1, 2]),
            In::Real(&[2, 2]),
        ],
        &[("axis", Set::I(1)), ("reduction", Set::S("add"))],
    ),
    r(
        "ScatterElements",
        1,
        &[
            In::Real(&[2, 3]),
            In::Table(&[2, 2], &[0, 0, 1, 2]),
            In::Real(&[2, 2]),
        ],
        &[("axis", Set::I(1)), ("reduction", Set::S("mul"))],
    ),
    r(
        "ScatterElements",
        1,
        &[
            In::Real(&[2, 3]),
            In::Table(&[2, 2], &[0, 0, 1, 2]),
            In::Real(&[2, 2]),
        ],
        &[("axis", Set::I(-1)), ("reduction", Set::S("max"))],
    ),
    r(
        "ScatterND",
        1,
        &[
            In::Real(&[3, 4]),
            In::Table(&[2, 1], &[2, 0]),
            In::Real(&[2, 4]),
        ],
        &[],
    ),
    r(
        "ScatterND",
        1,
        &[
            In::Real(&[3, 4]),
            In::Table(&[2, 1], &[1, 1]),
            In::Real(&[2, 4]),
        ],
        &[("reduction", Set::S("mul"))],
    ),
    r(
        "ScatterND",
        1,
        &[
            In::Real(&[3, 4]),
            In::Table(&[3, 2], &[1, 1, 0, 2, 1, 1]),
            In::Real(&[3]),
        ],
        &[("reduction", Set::S("min"))],
    ),
    r(
        "ScatterND",
        1,
        &[
            In::Real(&[3, 4]),
            In::Table(&[2, 1], &[1, 1]),
            In::Real(&[2, 4]),
        ],
        &[("reduction", Set::S("add"))],
    ),
    r(
        "ScatterND",
        1,
        &[
            In::Real(&[3, 4]),
            In::Table(&[3, 2], &[1, 1, 0, 2, 1, 1]),
            In::Real(&[3]),
        ],
        &[("reduction", Set::S("add"))],
    ),
    r(
        "OneHot",
        1,
        &[In::Ints(&[1, 0, 3]), In::Int(4), In::Table(&[2], &[0, 1])],
        &[],
    ),
    r(
        "OneHot",
        1,
        &[In::Ints(&[1, 0, 3]), In::Int(4), In::Real(&[2])],
        &[("axis", Set::I(0))],
    ),
];
