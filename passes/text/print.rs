//! Graph to text. The language is described in [the module](super).
//!
//! Printing never fails. A graph that breaks its invariants is printed too, for dumps, but its text may not be
//! readable.

use super::literal::{Content, Show, float32, hash};
use crate::ir::name::{Name, Quoted, Word};
use crate::ir::{Attr, Graph, Id, Loc, NodeId, Origin, Phase, Role, Ty, ValueId};
use std::fmt::{self, Write};

/// A longer header has one line for each input and output.
const MAX_HEADER_CHARS: usize = 110;

/// Returns the graph as text, with hashes of large constants.
pub fn print(graph: &Graph) -> String {
    text(graph, Show::Short)
}

/// Returns the graph as text, with the contents of all constants that are present.
pub fn print_full(graph: &Graph) -> String {
    text(graph, Show::Full)
}

/// Returns a hash of the graph. It is cheap, because constants count by the address of their contents. Hashes of
/// different runs cannot be compared.
pub fn digest(graph: &Graph) -> u64 {
    hash(text(graph, Show::Identity).as_bytes())
}

fn text(graph: &Graph, show: Show) -> String {
    let mut out = String::new();
    Printer {
        graph,
        show,
        out: &mut out,
    }
    .graph()
    .expect("a string takes any text");
    out
}

struct Printer<'a> {
    graph: &'a Graph,
    show: Show,
    out: &'a mut String,
}

/// Returns the word for a phase in the text form.
pub fn phase_word(phase: Phase) -> &'static str {
    match phase {
        Phase::Imported => "imported",
        Phase::Typed => "typed",
        Phase::Training => "training",
        Phase::Rewritten => "rewritten",
    }
}

/// Returns the word for a role in the text form.
pub(super) fn role_word(role: Role) -> &'static str {
    match role {
        Role::Forward => "forward",
        Role::Loss => "loss",
        Role::Backward => "backward",
    }
}

impl Printer<'_> {
    fn graph(&mut self) -> fmt::Result {
        let g = self.graph;
        self.header()?;
        for (key, value) in &g.meta {
            writeln!(self.out, "  meta {} = {}", Word(key), Quoted(value))?;
        }
        for (id, value) in g.inits() {
            let Some(tensor) = value.tensor() else {
                continue;
            };
            write!(
                self.out,
                "  init {} : {} = {}",
                Name('%', &value.name),
                tensor.ty(),
                Content {
                    tensor,
                    show: self.show
                }
            )?;
            if let Some(origin) = g.origins.get(&id) {
                self.origin(origin)?;
            }
            self.out.push('\n');
        }
        let mut role = Role::Forward;
        let mut scopes = &Loc::default().scopes;
        for id in g.order() {
            if !g.contains_node(*id) {
                writeln!(self.out, "  ; {id:?} was removed")?;
                continue;
            }
            let node = g.node(*id);
            if node.recompute_of.is_some_and(|o| g.contains_node(o)) {
                // A copy is where its original is, or says so itself: labels are about originals.
                self.node(*id)?;
                continue;
            }
            if node.role != role {
                role = node.role;
                writeln!(self.out, "{}:", role_word(role))?;
            }
            if node.loc.scopes != *scopes {
                scopes = &node.loc.scopes;
                self.scope(scopes)?;
                self.out.push_str(":\n");
            }
            self.node(*id)?;
        }
        self.out.push_str("}\n");
        Ok(())
    }

    fn header(&mut self) -> fmt::Result {
        let g = self.graph;
        let mut inputs = Vec::new();
        for id in g.inputs() {
            let keep = std::mem::take(self.out);
            write!(self.out, "{}: ", self.value(*id))?;
            self.ty(g
                .contains_value(*id)
                .then(|| g.value(*id).ty.as_ref())
                .flatten())?;
            if let Some(origin) = g.origins.get(id) {
                self.origin(origin)?;
            }
            inputs.push(std::mem::replace(self.out, keep));
        }
        let outputs: Vec<String> = g.outputs().iter().map(|id| self.value(*id)).collect();
        let head = format!("graph {} {}", Name('@', &g.name), phase_word(g.phase));
        let line = format!(
            "{head} ({}) -> ({}) {{",
            inputs.join(", "),
            outputs.join(", ")
        );
        if line.chars().count() <= MAX_HEADER_CHARS {
            return writeln!(self.out, "{line}");
        }
        let list = |items: &[String]| match items {
            [] => "()".to_string(),
            _ => format!("(\n    {}\n  )", items.join(",\n    ")),
        };
        writeln!(
            self.out,
            "{head} {} -> {} {{",
            list(&inputs),
            list(&outputs)
        )
    }

    fn scope(&mut self, scopes: &[(String, Option<String>)]) -> fmt::Result {
        self.out.push_str("scope");
        for (i, (path, class)) in scopes.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { " " });
            write!(self.out, "{}", Quoted(path))?;
            if let Some(class) = class {
                write!(self.out, " is {}", Quoted(class))?;
            }
        }
        Ok(())
    }

    fn node(&mut self, id: NodeId) -> fmt::Result {
        let g = self.graph;
        let node = g.node(id);
        let results: Vec<String> = node.outs.iter().map(|v| self.value(*v)).collect();
        write!(self.out, "  {} = {}", results.join(", "), node.op.name)?;
        for (i, operand) in node.ins.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { " " });
            match operand {
                Some(v) => self.out.push_str(&self.value(*v)),
                None => self.out.push('_'),
            }
        }
        self.attrs(id)?;
        let types: Vec<Option<&Ty>> = node
            .outs
            .iter()
            .map(|v| {
                g.contains_value(*v)
                    .then(|| g.value(*v).ty.as_ref())
                    .flatten()
            })
            .collect();
        if types.iter().any(Option::is_some) {
            for (i, ty) in types.into_iter().enumerate() {
                self.out.push_str(if i > 0 { ", " } else { " : " });
                self.ty(ty)?;
            }
        }
        let first = node.outs.first().filter(|v| g.contains_value(**v));
        if first.is_none_or(|v| g.value(*v).name != node.name) {
            write!(self.out, " name {}", Quoted(&node.name))?;
        }
        let original = node.recompute_of.filter(|o| g.contains_node(*o));
        if node.recompute_of.is_some() {
            let of = original.and_then(|o| g.node(o).outs.first());
            let of = of.map_or("?".to_string(), |v| self.value(*v));
            write!(self.out, " recompute_of {of}")?;
        }
        if let Some(segment) = node.segment {
            write!(self.out, " segment {segment}")?;
        }
        if let Some(o) = original {
            let source = g.node(o);
            if node.role != source.role {
                write!(self.out, " role {}", role_word(node.role))?;
            }
            if node.loc.scopes != source.loc.scopes {
                self.out.push(' ');
                self.scope(&node.loc.scopes)?;
            }
        }
        let place = original.map_or(node.name.as_str(), |o| g.node(o).loc.node.as_str());
        if node.loc.node != place {
            write!(self.out, " {}", Name('@', &node.loc.node))?;
        }
        if !node.meta.is_empty() {
            for (i, (key, value)) in node.meta.iter().enumerate() {
                self.out.push_str(if i > 0 { ", " } else { " meta {" });
                write!(self.out, "{}={}", Word(key), Quoted(value))?;
            }
            self.out.push('}');
        }
        self.out.push('\n');
        Ok(())
    }

    fn attrs(&mut self, id: NodeId) -> fmt::Result {
        let node = self.graph.node(id);
        let mut opened = false;
        for (name, value) in node.attrs.iter() {
            let spec = node.op.attrs.iter().find(|s| s.name == name);
            let default = spec.and_then(|s| s.default_value());
            if default.is_some_and(|d| same_bits(&d, value)) {
                continue;
            }
            self.out.push_str(if opened { ", " } else { " {" });
            opened = true;
            write!(self.out, "{}=", Word(name))?;
            self.attr(value)?;
        }
        if opened {
            self.out.push('}');
        }
        Ok(())
    }

    fn attr(&mut self, value: &Attr) -> fmt::Result {
        match value {
            Attr::Int(v) => write!(self.out, "{v}"),
            Attr::Float(v) => float32(self.out, *v),
            Attr::Str(v) => write!(self.out, "{}", Quoted(v)),
            Attr::Ints(v) => self.list("", v, |out, x| write!(out, "{x}")),
            Attr::Floats(v) => self.list("floats", v, |out, x| float32(out, *x)),
            Attr::Strs(v) => self.list("strs", v, |out, x| write!(out, "{}", Quoted(x))),
            Attr::DType(v) => write!(self.out, "{v}"),
            Attr::Tensor(t) => write!(
                self.out,
                "tensor {} {}",
                t.ty(),
                Content {
                    tensor: t,
                    show: self.show
                }
            ),
        }
    }

    fn list<T>(
        &mut self,
        kind: &str,
        items: &[T],
        print: impl Fn(&mut String, &T) -> fmt::Result,
    ) -> fmt::Result {
        self.out.push_str(kind);
        self.out.push('[');
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(", ");
            }
            print(self.out, item)?;
        }
        self.out.push(']');
        Ok(())
    }

    fn origin(&mut self, origin: &Origin) -> fmt::Result {
        self.out.push_str(" origin");
        for (i, name) in origin.names.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { " " });
            write!(self.out, "{}", Quoted(name))?;
        }
        if origin.transposed {
            self.out.push_str(" transposed");
        }
        match origin.is_parameter {
            Some(true) => self.out.push_str(" parameter"),
            Some(false) => self.out.push_str(" buffer"),
            None => {}
        }
        if origin.is_persistent {
            self.out.push_str(" persistent");
        }
        if origin.frozen {
            self.out.push_str(" frozen");
        }
        for (i, name) in origin.folded_from.iter().enumerate() {
            self.out.push_str(if i > 0 { ", " } else { " folded " });
            write!(self.out, "{}", Quoted(name))?;
        }
        Ok(())
    }

    fn ty(&mut self, ty: Option<&Ty>) -> fmt::Result {
        match ty {
            Some(ty) => write!(self.out, "{ty}"),
            None => write!(self.out, "?"),
        }
    }

    fn value(&self, id: ValueId) -> String {
        if !self.graph.contains_value(id) {
            return format!("%?removed.{}", id.index());
        }
        Name('%', &self.graph.value(id).name).to_string()
    }
}

/// Equality that tells -0.0 from 0.0 and a NaN from nothing, so that what is left out comes back exactly.
fn same_bits(a: &Attr, b: &Attr) -> bool {
    match (a, b) {
        (Attr::Float(x), Attr::Float(y)) => x.to_bits() == y.to_bits(),
        _ => a == b,
    }
}
