//! Names of what updates read and make, and the inputs and nodes that bear them.

use crate::error::{Error, Result};
use crate::ir::{Attrs, Graph, OpDef, Ty, ValueId};
use crate::ops::{Builder, EmitExt};

/// Name of the input that is the learning rate.
pub const LR: &str = "lr";
/// Suffix of what an update makes.
pub const UPDATED: &str = ".updated";
/// Suffix of a rank's slice or part of a parameter.
pub const SHARD: &str = ".shard";
/// Suffix of the momentum of SGD.
pub const MOMENTUM: &str = ".momentum";
/// Suffix of a mean of gradients.
pub const EXP_AVG: &str = ".exp_avg";
/// Suffix of a mean of squared gradients.
pub const EXP_AVG_SQ: &str = ".exp_avg_sq";
/// Suffix of the block scales of an 8-bit mean of gradients.
pub const EXP_AVG_SCALES: &str = ".exp_avg_absmax";
/// Suffix of the block scales of an 8-bit mean of squared gradients.
pub const EXP_AVG_SQ_SCALES: &str = ".exp_avg_sq_absmax";
/// Suffix of a mean of squared gradients of rows.
pub const ROW_VAR: &str = ".row_var";
/// Suffix of a mean of squared gradients of columns.
pub const COL_VAR: &str = ".col_var";
/// Suffix of a mean of squared gradients of a vector.
pub const VARIANCE: &str = ".variance";
/// Suffix of the sum of gradients.
pub const ACCUMULATED: &str = ".accumulated";
/// Suffix of a float32 master weight.
pub const MASTER: &str = ".master";
/// Suffixes of states.
pub const STATES: [&str; 10] = [
    MOMENTUM,
    EXP_AVG,
    EXP_AVG_SQ,
    EXP_AVG_SCALES,
    EXP_AVG_SQ_SCALES,
    ROW_VAR,
    COL_VAR,
    VARIANCE,
    ACCUMULATED,
    MASTER,
];

pub(super) fn fail(text: String) -> Box<Error> {
    Error::usage("optimizer", text)
}

/// Name of the input that tells the last of the micro-batches of an update.
pub const APPLY: &str = "apply";
/// Name of the state that is true before the first micro-batch of an update, except in the first step.
pub const RESTART: &str = "restart";
/// Name of the input that the backward pass starts from.
pub const LOSS_SCALE: &str = "loss_scale";

/// Adds a graph input.
pub(super) fn input(graph: &mut Graph, name: &str, ty: Ty) -> Result<ValueId> {
    check_free(graph, name)?;
    Ok(graph.add_input(name, Some(ty)))
}

fn check_free(graph: &Graph, name: &str) -> Result<()> {
    match graph.has_value_name(name) {
        true => Err(Error::model(
            "name",
            format!("the optimizer has a value `{name}`, but the model uses that name"),
        )),
        false => Ok(()),
    }
}

/// Emits an update of `old` and names its result after it.
pub(super) fn emit_update(
    b: &mut Builder,
    op: &'static OpDef,
    ins: Vec<Option<ValueId>>,
    attrs: Attrs,
    old: ValueId,
) -> Result<ValueId> {
    let name = format!("{}{UPDATED}", b.graph.value(old).name);
    check_free(b.graph, &name)?;
    let new = emit_optional(b, op, ins, attrs)?;
    b.graph.rename_value(new, &name);
    Ok(new)
}

/// Emits a node of one result, of which the last operands may not be given.
pub(super) fn emit_optional(
    b: &mut Builder,
    op: &'static OpDef,
    mut ins: Vec<Option<ValueId>>,
    attrs: Attrs,
) -> Result<ValueId> {
    while ins.last() == Some(&None) {
        ins.pop();
    }
    Ok(b.emit_n(op, ins, attrs, 1)?[0])
}

/// Gives a value a name of its own.
pub(super) fn named(b: &mut Builder, v: ValueId, name: &str) -> Result<ValueId> {
    check_free(b.graph, name)?;
    b.graph.rename_value(v, name);
    Ok(v)
}
