//! Gives every value a type.
//!
//! In: `Imported`. Out: `Typed`. One sweep in schedule order; shape arithmetic is followed symbolically (see
//! `ir/typing.rs`). What a file claims about intermediate types is not believed: exporters write sizes of 0 where they
//! do not know one. Only an op we do not know keeps the types its file gives.

use crate::error::{Error, Result};
use crate::ir::op::Domain;
use crate::ir::typing::{Contents, type_node};
use crate::ir::{Graph, Phase};

/// Types the whole graph and returns what it learnt of small integer values.
///
/// # Errors
/// The first node whose operands its op refuses, or an unknown op whose result types the file does not give.
pub fn infer(graph: &mut Graph) -> Result<Contents> {
    for input in graph.inputs() {
        let value = graph.value(*input);
        if value.ty.is_none() {
            return Err(
                Error::model("type", format!("graph input `{}` has no type", value.name))
                    .help(format!("give one with --input {}:DTYPE[DIMS]", value.name)),
            );
        }
    }
    let mut contents = Contents::of(graph);
    for id in graph.order().to_vec() {
        if graph.node(id).op.domain == Domain::Opaque {
            for out in &graph.node(id).outs {
                if graph.value(*out).ty.is_none() {
                    return Err(Error::model(
                        "op",
                        format!("the file gives no type for `{}`", graph.value(*out).name),
                    )
                    .at(graph.describe(id))
                    .help("export with shape inference, or replace this op"));
                }
            }
            continue;
        }
        let typed = type_node(graph, id, &contents)?;
        let outs = graph.node(id).outs.clone();
        for (value, (ty, ints)) in outs.into_iter().zip(typed) {
            graph.set_type(value, ty);
            contents.set(value, ints);
        }
    }
    graph.phase = graph.phase.max(Phase::Typed);
    Ok(contents)
}
