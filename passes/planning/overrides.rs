//! What a user overrides of a policy, as text: which layers, which ops. Text is parsed once, never evaluated.
//!
//! A name is letters, digits and a few signs, with `*` and `?` as wildcards; anything else is refused here, before a
//! graph is looked at. An op is spelled as in ONNX (`MatMul`) or as in ATen (`aten.mm`, `aten.mm.default`,
//! `torch.ops.aten.mm.default`, `aten::mm`). [`resolve`](super::resolve) finds what the overrides mean in a graph.

use crate::error::{Error, Result};
use crate::glob;
use crate::ir::OpDef;
use crate::ops::{self, aten};
use crate::plan::constraint::Constraint;
use std::fmt;

/// Signs that names may hold beside letters and digits.
const SIGNS: &str = "_.:/-[]$#~@+";

const EXAMPLES: &str =
    "an op (MatMul, aten.mm, torch.ops.aten.mm.default) or a name pattern (layers.*.mlp)";

/// A name, with `*` and `?` as wildcards: of a class, a module path or a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamePattern(String);

impl NamePattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// `error[selection]` for an empty name, or a sign that no name holds.
    pub fn parse(text: &str) -> Result<NamePattern> {
        let text = text.trim();
        let refused = |what: String| {
            Err(Error::usage("selection", what)
                .expected(EXAMPLES)
                .help("other signs in a name can be matched by `?`"))
        };
        if text.is_empty() {
            return refused("a name is empty".into());
        }
        let stands = |c: char| c.is_alphanumeric() || SIGNS.contains(c) || c == '*' || c == '?';
        match text.chars().find(|c| !stands(*c)) {
            Some(sign) => refused(format!("`{text}`: `{sign}` cannot stand in a name")),
            None => Ok(NamePattern(text.into())),
        }
    }

    /// Returns the pattern as it was written.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns whether the pattern matches the whole of `name`.
    pub fn matches(&self, name: &str) -> bool {
        glob::matches(&self.0, name)
    }

    /// Returns whether the pattern matches a module path or its end: `layers.*.mlp` matches `model.layers.3.mlp`.
    pub fn matches_path(&self, path: &str) -> bool {
        let ends = path.match_indices('.').map(|(i, _)| &path[i + 1..]);
        !path.is_empty() && std::iter::once(path).chain(ends).any(|p| self.matches(p))
    }

    /// Returns whether the pattern matches a class: the name in the file, or a longer one that ends in it (`torch.nn.Linear`).
    pub fn matches_class(&self, class: &str) -> bool {
        self.matches(class) || self.0.rsplit(['.', ':']).next() == Some(class)
    }
}

/// The ops that an override is about.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// Every op of this row.
    Row(&'static OpDef),
    /// An op in ATen's spelling: its name (`aten.mm`) and overload, if one was given.
    Traced {
        /// Namespace and name: `aten.mm`.
        name: String,
        /// Name of the overload; `None` and `default` match every overload.
        overload: Option<String>,
    },
    /// Nodes by name.
    Nodes(NamePattern),
    /// Nodes by module path, or by name.
    Modules(NamePattern),
}

impl Target {
    /// Reads an op, or a pattern of node names.
    ///
    /// # Errors
    /// A sign that neither holds.
    pub fn op(text: &str) -> Result<Target> {
        let pattern = NamePattern::parse(text)?;
        let word = pattern.text();
        let dotted = word.replace("::", ".");
        let spelled = dotted.strip_prefix("torch.ops.");
        if spelled.is_some() || dotted.starts_with("aten.") {
            let spelled = spelled.unwrap_or(&dotted);
            let parts: Vec<&str> = spelled.split('.').collect();
            let plain =
                |p: &&str| !p.is_empty() && p.chars().all(|c| c.is_alphanumeric() || c == '_');
            return match parts.as_slice() {
                [namespace, name, rest @ ..] if rest.len() < 2 && parts.iter().all(plain) => {
                    Ok(Target::Traced {
                        name: format!("{namespace}.{name}"),
                        overload: rest.first().map(|o| o.to_string()),
                    })
                }
                _ => Err(
                    Error::usage("selection", format!("`{word}` is not an ATen op"))
                        .expected("aten.NAME, aten.NAME.OVERLOAD or torch.ops.aten.NAME.OVERLOAD"),
                ),
            };
        }
        Ok(match ops::find(word) {
            Some(row) => Target::Row(row),
            None => Target::Nodes(pattern),
        })
    }

    /// Returns what a plain word means as PyTorch's name of an op: `addmm`, `torch.addmm` and `F.gelu` as `aten.addmm` and
    /// `aten.gelu`. `None` for any other word.
    pub fn alias(&self) -> Option<Target> {
        let Target::Nodes(pattern) = self else {
            return None;
        };
        let word = pattern.text();
        let modules = ["torch.nn.functional.", "torch.", "F."];
        let plain = modules.iter().find_map(|m| word.strip_prefix(m));
        let name = format!("aten.{}", plain.unwrap_or(word).to_lowercase());
        let is_known = aten::names().contains(name.as_str());
        is_known.then_some(Target::Traced {
            name,
            overload: None,
        })
    }

    /// Reads a module path or node name.
    ///
    /// # Errors
    /// A sign that no name holds.
    pub fn module(text: &str) -> Result<Target> {
        Ok(Target::Modules(NamePattern::parse(text)?))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Row(row) => f.write_str(row.name),
            Target::Traced {
                name,
                overload: None,
            } => f.write_str(name),
            Target::Traced {
                name,
                overload: Some(o),
            } => write!(f, "{name}.{o}"),
            Target::Nodes(p) | Target::Modules(p) => f.write_str(p.text()),
        }
    }
}

/// One override of a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// Whether the results of the ops are kept or recomputed.
    pub constraint: Constraint,
    /// The ops that the constraint applies to.
    pub target: Target,
}

impl Override {
    /// Returns the option that says it.
    pub fn option(&self) -> &'static str {
        match (self.constraint, &self.target) {
            (_, Target::Modules(_)) => "--recompute",
            (Constraint::Keep, _) => "--save-ops",
            (Constraint::Recompute, _) => "--recompute-ops",
        }
    }
}

impl fmt::Display for Override {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.option(), self.target)
    }
}

/// Everything a user overrides beside the policy itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyOverrides {
    /// Modules, by class or path, that take the place of the layers found in the dataflow.
    pub layers: Vec<NamePattern>,
    /// The policy applies only to nodes in a module of such a path, or with such a name.
    pub scope: Vec<NamePattern>,
    /// Only every N-th of the layers.
    pub every: Option<usize>,
    /// Only the first N of the layers.
    pub first: Option<usize>,
    /// In the order they were given; later ones win.
    pub overrides: Vec<Override>,
}

impl PolicyOverrides {
    /// Returns whether the overrides say where a policy applies.
    pub fn restrict(&self) -> bool {
        !self.layers.is_empty()
            || !self.scope.is_empty()
            || self.every.is_some()
            || self.first.is_some()
    }

    /// Returns whether nothing is overridden.
    pub fn is_empty(&self) -> bool {
        !self.restrict() && self.overrides.is_empty()
    }
}

/// The options that say the same.
impl fmt::Display for PolicyOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words: Vec<String> = Vec::new();
        words.extend(self.layers.iter().map(|p| format!("--layers {}", p.text())));
        words.extend(self.scope.iter().map(|p| format!("--scope {}", p.text())));
        words.extend(self.every.map(|n| format!("--every {n}")));
        words.extend(self.first.map(|n| format!("--first {n}")));
        words.extend(self.overrides.iter().map(|o| o.to_string()));
        f.write_str(&words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_op_in_every_spelling() {
        assert_eq!(
            Target::op("MatMul").unwrap(),
            Target::Row(ops::find("MatMul").unwrap())
        );
        for (text, overload) in [
            ("aten.mm", None),
            ("aten::mm", None),
            ("torch.ops.aten.mm", None),
            ("aten.mm.default", Some("default")),
            ("torch.ops.aten.mm.default", Some("default")),
        ] {
            let name = "aten.mm".to_string();
            let overload = overload.map(str::to_string);
            assert_eq!(
                Target::op(text).unwrap(),
                Target::Traced { name, overload },
                "{text}"
            );
        }
        for pattern in [
            "*/mlp/*",
            "node_linear_3",
            "matmul",
            "/model/layers.0/MatMul",
        ] {
            assert!(
                matches!(Target::op(pattern).unwrap(), Target::Nodes(_)),
                "{pattern}"
            );
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for text in [
            "__import__('os')",
            "",
            " ",
            "a b",
            "x;y",
            "$(ls)",
            "a`b`",
            "lambda:{}",
            "a=b",
            "torch.ops.aten",
            "torch.ops.aten.mm.default.more",
            "aten.",
            "aten.*",
        ] {
            let e = Target::op(text).unwrap_err();
            assert_eq!((e.code(), e.exit_code()), ("selection", 2), "{text}");
        }
    }

    #[test]
    fn paths_match_from_a_dot_on() {
        let p = |text: &str| NamePattern::parse(text).unwrap();
        assert!(p("layers.*.mlp").matches_path("model.layers.3.mlp"));
        assert!(p("model.layers.3.mlp").matches_path("model.layers.3.mlp"));
        assert!(p("mlp").matches_path("model.layers.3.mlp"));
        assert!(!p("lp").matches_path("model.layers.3.mlp"));
        assert!(!p("layers.*.mlp").matches_path("model.layers.3.mlp.gate"));
        assert!(!p("*").matches_path(""));
        assert!(p("torch.nn.Linear").matches_class("Linear") && p("Lin*").matches_class("Linear"));
        assert!(!p("near").matches_class("Linear"));
    }
}
