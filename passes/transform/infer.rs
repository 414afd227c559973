//! Gives every value a type.
//!
//! In: `Imported`. Out: `Typed`. One sweep in schedule order follows shape arithmetic symbolically (see `ir/typing.rs`).
//! Intermediate types that a file gives are ignored, because exporters write sizes of 0 where they do not know one. Only
//! an unknown op keeps the types of its file.

use crate::error::{Error, Result};
use crate::ir::op::Domain;
use crate::ir::typing::{Contents, type_node};
use crate::ir::{Graph, Phase};

/// Types the whole graph. Returns the known contents of small integer values.
///
/// # Errors
/// A graph input without a type; the first node whose operands its op refuses; an unknown op whose result types the file
/// does not give.
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
            let mut outs = graph.node(id).outs.iter().map(|v| graph.value(*v));
            if let Some(untyped) = outs.find(|value| value.ty.is_none()) {
                let what = format!("the file gives no type for `{}`", untyped.name);
                return Err(Error::model("op", what)
                    .at(graph.describe(id))
                    .help("export with shape inference, or replace this op"));
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
