//! Sizes that a trace fixed: a model exported for one batch and sequence has them in the targets of its reshapes.
//!
//! `Reshape([seq, batch, 64] → [16, 4, 16])` runs only where both shapes hold equally many elements. Typing accepts it,
//! because the shapes may agree; at given numbers they do or do not. A reshape that keeps its elements at every size
//! fixes nothing and is not listed. Sizes that the data decides are not checked here.

use crate::ir::{Dim, Graph, NodeId, Same};
use crate::ops::shape::RESHAPE;
use std::collections::BTreeSet;

/// Two element counts that have to be equal in every run.
#[derive(Clone, Debug, PartialEq)]
pub struct BakedSize {
    /// The reshape.
    pub node: NodeId,
    /// Elements of its operand.
    pub operand: Dim,
    /// Elements of its result.
    pub result: Dim,
}

impl BakedSize {
    /// Returns both counts at these sizes if they differ.
    pub fn broken(&self, size_of: &dyn Fn(&str) -> Option<i64>) -> Option<(i64, i64)> {
        let pair = (self.operand.eval(size_of)?, self.result.eval(size_of)?);
        (pair.0 != pair.1).then_some(pair)
    }
}

/// Returns the baked sizes of a typed graph's forward nodes in schedule order, each pair of counts once.
pub fn baked_sizes(graph: &Graph) -> Vec<BakedSize> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let Some(operand) = node.operand(0) else {
            continue;
        };
        if node.op != &RESHAPE || !node.is_forward() {
            continue;
        }
        let (operand, result) = (
            graph.ty(operand).elements(),
            graph.ty(node.outs[0]).elements(),
        );
        let may_differ = operand.same(&result) != Same::Yes;
        if may_differ
            && operand.is_over_names()
            && result.is_over_names()
            && seen.insert((operand.to_string(), result.to_string()))
        {
            found.push(BakedSize {
                node: *id,
                operand,
                result,
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Binding;
    use crate::text;

    /// Traced at a batch of 2 and a sequence of 3; the first reshape holds at any size.
    const TRACED: &str = "graph @g typed (%x: f32[batch, seq, 4]) -> (%y) {
  init %any : i64[3] = [0, 0, -1]
  init %traced : i64[3] = [3, 4, 2]
  init %open : i64[2] = [-1, 12]
  %a = Reshape %x, %any {allowzero = 0} : f32[batch, seq, 4]
  %b = Reshape %a, %traced {allowzero = 0} : f32[3, 4, 2]
  %y = Reshape %b, %open {allowzero = 0} : f32[2, 12]
}
";

    #[test]
    fn a_traced_reshape_fixes_its_sizes() {
        let graph = text::parse(TRACED).unwrap();
        let found = baked_sizes(&graph);
        assert_eq!(found.len(), 1, "{found:?}");
        let at = |b: i64, s: i64| found[0].broken(&|n| Some(if n == "batch" { b } else { s }));
        assert_eq!((at(2, 3), at(1, 6), at(2, 4)), (None, None, Some((32, 24))));
    }

    #[test]
    fn defaults_fit_the_trace_and_sizes_that_cannot_are_refused() {
        let graph = text::parse(TRACED).unwrap();
        let given = |dims: &[(&str, i64)]| {
            let dims: Vec<(String, i64)> = dims.iter().map(|(n, s)| (n.to_string(), *s)).collect();
            Binding::new(&graph, &dims).map(|b| (b.get("batch").unwrap(), b.get("seq").unwrap()))
        };
        // The batch stays what it is assumed to be where the sequence can shrink.
        assert_eq!(given(&[]).unwrap(), (1, 6));
        assert_eq!(given(&[("batch", 2)]).unwrap(), (2, 3));
        assert_eq!(given(&[("seq", 2)]).unwrap(), (3, 2));
        assert_eq!(given(&[("seq", 3), ("batch", 2)]).unwrap(), (2, 3));
        for bad in [
            &[("batch", 4)][..],
            &[("seq", 5)],
            &[("seq", 3), ("batch", 1)],
        ] {
            let e = given(bad).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("dim", 2), "{bad:?}");
            assert!(e.to_string().contains("24 elements"), "{e}");
        }
    }
}
