//! Words for the parts of a layer that the policy `parts:…` rebuilds.

use crate::analysis::cores::Core;
use crate::error::{Error, Result};
use std::fmt;

/// A set of parts, as in `parts:core-attn,norm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Parts(u8);

/// The words, and what else they are called. The last three are inner parts.
const WORDS: [(&str, &[&str]); 8] = [
    ("norm", &["layernorm", "rmsnorm"]),
    ("attention", &["attn", "self-attn"]),
    ("mlp", &[]),
    ("experts", &["moe"]),
    ("conv", &[]),
    ("core-attn", &["core-attention"]),
    ("mlp-act", &[]),
    ("moe-act", &["expert-act"]),
];

impl Parts {
    /// Reads words separated by commas, in lower case with `-` for `_`.
    ///
    /// # Errors
    /// No word, or an unknown one; the error lists the words.
    pub fn parse(text: &str) -> Result<Parts> {
        let mut parts = Parts::default();
        for word in text.split(',').map(str::trim) {
            let place = WORDS
                .iter()
                .position(|(name, others)| *name == word || others.contains(&word));
            let Some(place) = place else {
                let names: Vec<&str> = WORDS.iter().map(|(name, _)| *name).collect();
                return Err(Error::usage(
                    "policy",
                    format!("there is no part `{word}` of a layer"),
                )
                .expected(names.join(", ")));
            };
            parts.0 |= 1 << place;
        }
        Ok(parts)
    }

    /// Whether a part of that word (see [`SubBlock`](crate::analysis::sub_blocks::SubBlock)) is meant.
    pub fn has(self, word: &str) -> bool {
        let place = WORDS.iter().position(|(name, _)| *name == word);
        place.is_some_and(|i| self.0 & 1 << i != 0)
    }

    /// Whether an inner part is meant.
    pub fn has_core(self, core: Core) -> bool {
        self.has(word(core))
    }
}

/// The word of an inner part.
pub fn word(core: Core) -> &'static str {
    match core {
        Core::Attention => "core-attn",
        Core::MlpActivation => "mlp-act",
        Core::ExpertActivation => "moe-act",
    }
}

/// Whether the results that leave a part are rebuilt too: everywhere but in whole branches, which end in a sum of the
/// residual stream.
pub fn discards_output(word: &str) -> bool {
    matches!(word, "norm" | "core-attn" | "mlp-act" | "moe-act")
}

impl fmt::Display for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = WORDS
            .iter()
            .map(|(name, _)| *name)
            .filter(|n| self.has(n))
            .collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use crate::compile::{Request, compile};
    use crate::driver::{Made, Watch};
    use crate::ir::{Graph, NodeId};
    use crate::plan::Policy;
    use crate::testing::{Style, transformer};
    use crate::transform::loss::Loss;
    use std::collections::BTreeSet;

    fn compiled(style: Style, policy: &str) -> crate::error::Result<(Graph, Made)> {
        let mut g = transformer(3, style);
        let request = Request {
            loss: Loss::Vjp,
            policy: Policy::parse(policy)?,
            dims: vec![("b".into(), 2), ("s".into(), 64)],
            ..Request::default()
        };
        let done = compile(&mut g, &request, &mut Watch::default())?;
        Ok((g, done.made.unwrap()))
    }

    fn op_of(made: &Made, id: NodeId) -> usize {
        made.subject
            .map
            .nodes
            .iter()
            .position(|n| *n == id)
            .unwrap()
    }

    /// Ops that are computed again.
    fn again(g: &Graph) -> BTreeSet<&'static str> {
        let copies = g.nodes().filter(|(_, n)| n.recompute_of.is_some());
        copies.map(|(_, n)| n.op.name).collect()
    }

    #[test]
    fn only_the_parts_that_are_named_are_rebuilt() {
        for style in [Style::PreNorm, Style::PostNorm] {
            let (none, _) = compiled(style, "none").unwrap();
            let is_part = |g: &Graph, made: &Made, id: NodeId, word: &str| {
                let op = op_of(made, g.original(id));
                let s = &made.subject.structure;
                s.core_of[op].as_deref() == Some(word)
                    || s.submodule_of[op].is_some_and(|i| s.submodules[i] == word)
            };
            for word in ["norm", "attention", "mlp", "core-attn", "mlp-act"] {
                let (g, made) = compiled(style, &format!("parts:{word}")).unwrap();
                let copies: Vec<NodeId> = g
                    .nodes()
                    .filter(|(_, n)| n.recompute_of.is_some())
                    .map(|(id, _)| id)
                    .collect();
                assert!(!copies.is_empty(), "{word}");
                assert!(
                    copies.iter().all(|id| is_part(&g, &made, *id, word)),
                    "{word}"
                );
                assert_eq!(g.outputs().len(), none.outputs().len());
                let plan = &made.plan;
                assert!(plan.after.peak_bytes <= plan.before.peak_bytes, "{word}");
            }
            let peak = |policy: &str| compiled(style, policy).unwrap().1.plan.after.peak_bytes;
            let (all, core) = (peak("none"), peak("parts:core-attn"));
            assert!(core < all && peak("parts:core-attn,mlp-act") < core);
            assert!(peak("parts:core-attn,mlp,norm") < peak("parts:core-attn"));
        }
    }

    /// The context is not kept for the projection that reads it: the layout steps to it are rebuilt with the core.
    #[test]
    fn nothing_is_kept_behind_a_discarded_core() {
        let (g, made) = compiled(Style::PreNorm, "parts:core-attn").unwrap();
        let ops = again(&g);
        for op in ["MatMul", "Softmax", "Add", "Transpose", "Reshape"] {
            assert!(ops.contains(op), "{op} of {ops:?}");
        }
        let kept = made.plan.decisions.iter().filter(|d| d.kept);
        for decision in kept {
            let id = g.find_node(&decision.name).unwrap();
            let op = op_of(&made, id);
            let core = made.subject.structure.core_of[op].as_deref();
            assert_ne!(core, Some("core-attn"), "{}", decision.name);
        }
    }

    #[test]
    fn a_part_that_no_layer_has_is_an_error() {
        let e = compiled(Style::PreNorm, "parts:moe-act").err().unwrap();
        assert_eq!((e.code(), e.exit_code()), ("policy", 2));
        assert!(
            e.to_string().contains("core-attn, mlp, mlp-act, norm"),
            "{e}"
        );
    }
}
