//! The passes there are, and what they are given.

use super::{After, Changed, Pass};
use crate::ir::Phase;
use crate::transform;

/// What was asked for: the options that passes read.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Numbers for named sizes, for planning only.
    pub dims: Vec<(String, i64)>,
}

/// What passes share: the request, and what one pass leaves for the next.
#[derive(Default)]
pub struct Cx {
    pub options: Options,
    /// What the user should know.
    pub warnings: Vec<String>,
}

const ANY: &[Phase] = &[
    Phase::Imported,
    Phase::Typed,
    Phase::Training,
    Phase::Rewritten,
];

/// Every pass.
pub static ALL: &[&Pass] = &[&INFER, &STRIP, &DCE];

static INFER: Pass = Pass {
    name: "infer",
    from: ANY,
    to: After::AtLeast(Phase::Typed),
    follows: None,
    idempotent: true,
    run: |graph, _| {
        transform::infer::infer(graph)?;
        Ok(Changed::Yes)
    },
};

static STRIP: Pass = Pass {
    name: "strip",
    from: &[Phase::Training, Phase::Rewritten],
    to: After::Exactly(Phase::Training),
    follows: None,
    idempotent: true,
    run: |graph, _| {
        transform::remat::strip_again(graph);
        Ok(Changed::Yes)
    },
};

static DCE: Pass = Pass {
    name: "dce",
    from: ANY,
    to: After::Same,
    follows: None,
    idempotent: true,
    run: |graph, _| Ok(transform::dce::dce(graph).into()),
};
