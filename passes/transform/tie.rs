//! Replaces copies of a weight by the weight, or by a view of its transpose.
//!
//! In and out: `Typed`, before autodiff. The copies are those of [`ties`]. The weight then
//! gets the sum of the gradients, as in the framework, and takes the copy's names as aliases.

use crate::analysis::params::{Selection, parameters};
use crate::analysis::tied_weights::{Tie, TieRequest, ties};
use crate::error::Result;
use crate::ir::{Attrs, Graph, Origin};
use crate::ops::{self, Builder, EmitExt};

/// What was tied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tied {
    /// Names of the initializers: the one that stays, and its copy.
    pub pairs: Vec<(String, String)>,
    /// Lines for the user about what was tied, and about equal weights that were not.
    pub lines: Vec<String>,
}

/// Ties the trained parameters of a typed forward graph that are copies of one weight.
///
/// # Errors
/// See [`parameters`] and [`ties`].
pub fn tie(graph: &mut Graph, selection: &Selection, request: &TieRequest) -> Result<Tied> {
    let parameters = parameters(graph, selection)?;
    let found = ties(graph, &parameters, request)?;
    let name = |tie: &Tie| {
        let name = |id| graph.value(id).name.clone();
        (name(tie.kept), name(tie.copy))
    };
    let pairs = found.found.iter().map(name).collect();
    let mut lines = replace(graph, &found.found)?;
    lines.extend(found.warnings);
    Ok(Tied { pairs, lines })
}

/// Replaces each copy. Returns one line for each, which says what was tied.
fn replace(graph: &mut Graph, ties: &[Tie]) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for tie in ties {
        let name = graph.value(tie.copy).name.clone();
        let before = graph.order().len();
        let mut seen = tie.kept;
        if tie.transposed {
            let mut builder = Builder::new(graph);
            builder.prefix = format!("{name}.tied");
            let attrs = Attrs::new().with("perm", vec![1, 0]);
            seen = builder.emit(&ops::shape::TRANSPOSE, &[tie.kept], attrs)?;
        }
        let (old, new) = graph.order().split_at(before);
        graph.set_order([new, old].concat());
        graph.replace_uses(tie.copy, seen);
        let kept_name = graph.value(tie.kept).name.clone();
        let copied = graph.origins.remove(&tie.copy).unwrap_or_default();
        let origin = graph.origins.entry(tie.kept).or_insert_with(|| Origin {
            names: vec![kept_name.clone()],
            ..Origin::default()
        });
        for alias in copied.names {
            if !origin.names.contains(&alias) {
                origin.names.push(alias);
            }
        }
        graph.remove_source(tie.copy);
        let how = if tie.transposed {
            "the transpose of "
        } else {
            ""
        };
        lines.push(format!(
            "`{name}` is {how}`{kept_name}`: trained as one weight (--no-tie trains each by itself)"
        ));
    }
    Ok(lines)
}
