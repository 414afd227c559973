//! The report of `inspect`: a JSON object for programs, tables for people.

use super::sharing::{self, WeightSharing};
use super::sub_blocks::{self, SubBlock};
use crate::units::bytes;
use ckpt_passes::Result;
use ckpt_passes::analysis::attention::summary::{AttentionSummary, summaries};
use ckpt_passes::analysis::gradients::{gradient_of, has_backward, trained};
use ckpt_passes::analysis::index_bounds::index_bounds;
use ckpt_passes::analysis::params::{Selection, parameters};
use ckpt_passes::analysis::sharing::KvSharing;
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, DimKind, Layers, tied_weights};
use ckpt_passes::ir::op::Domain;
use ckpt_passes::ir::{Dim, Graph, Role, Ty, ValueId};
use ckpt_passes::transform::optimizer::{STATES, UPDATED};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A size: a number, or an expression over names.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Size {
    /// A size that the model fixes.
    Fixed(i64),
    /// A named size, or an expression over named sizes.
    Named(String),
}

/// An input or output of the graph.
#[derive(Clone, Debug, Serialize)]
pub struct Port {
    /// Name of the value in the graph.
    pub name: String,
    /// Name of the element type, as in `f32`.
    pub dtype: &'static str,
    /// One size for each axis; empty for a scalar.
    pub shape: Vec<Size>,
}

/// A parameter of the model, under the framework's name and the file's.
#[derive(Clone, Debug, Serialize)]
pub struct Parameter {
    /// The framework's name, where the file tells it; else the initializer's.
    pub name: String,
    /// Name of the initializer in the graph.
    pub initializer: String,
    /// Other names of a tied weight.
    pub aliases: Vec<String>,
    /// Whether it is stored as the transpose of the framework's parameter.
    pub transposed: bool,
    /// The framework's parameters from which the exporter computed it, where it is none of them.
    pub folded_from: Vec<String>,
    /// Whether it gets a gradient; in a forward graph, whether it would.
    pub trainable: bool,
    /// Name of the initializer's element type.
    pub dtype: &'static str,
    /// Sizes of the initializer as stored.
    pub shape: Vec<Size>,
    #[serde(skip)]
    size_bytes: u64,
}

/// A layer of the model.
#[derive(Clone, Debug, Serialize)]
pub struct Block {
    /// Its number, in model order.
    pub index: usize,
    /// Module class and path, where the file names them.
    pub class: Option<String>,
    /// Module path; `None` where the file names none, or where two layers share it.
    pub path: Option<String>,
    /// Equal layers have the same number.
    pub run: usize,
    /// Kinds of its sub-blocks: `attention+mlp` and the like.
    pub kind: String,
    /// Number of its nodes.
    pub nodes: usize,
    /// Name of its first node.
    pub first: String,
    /// Name of the node of the residual stream that closes it.
    pub last: String,
    /// Its sub-blocks: norms, attention, MLP and the like.
    pub parts: Vec<SubBlock>,
}

/// A named size, and the number that planning uses for it.
#[derive(Clone, Debug, Serialize)]
pub struct NamedDim {
    /// `batch` or `sequence`.
    pub kind: &'static str,
    /// The size that planning assumes without `--dim`.
    pub default: i64,
    /// The largest size at which the model reads no row beyond its tables, such as learned positions; null without one.
    pub largest: Option<i64>,
}

/// Everything that is known about a model without running it.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Name of the graph in the file; may be empty.
    pub name: String,
    /// `forward`, `training` (it has a backward pass) or `planned` (it has recompute nodes too).
    pub graph: &'static str,
    /// All inputs, those with optimizer state included.
    pub inputs: Vec<Port>,
    /// All outputs, gradients and updated parameters included.
    pub outputs: Vec<Port>,
    /// In the order of the initializers.
    pub parameters: Vec<Parameter>,
    /// The layers, in order.
    pub blocks: Vec<Block>,
    /// All attentions of the forward pass, in order.
    pub attentions: Vec<AttentionSummary>,
    /// Layers whose keys or values other layers read.
    pub kv_sharing: Vec<KvSharing>,
    /// Parameters that several layers read.
    pub shared_weights: Vec<WeightSharing>,
    /// How often each op occurs.
    pub ops: BTreeMap<String, usize>,
    /// Named sizes, by name.
    pub dims: BTreeMap<String, NamedDim>,
    /// The file's metadata, with the record of an earlier rewrite.
    pub meta: BTreeMap<String, String>,
    /// Warnings about how the file was read, and about tied weights.
    pub warnings: Vec<String>,
    #[serde(skip)]
    nodes: [usize; 4],
}

fn size(d: &Dim) -> Size {
    match d.as_const() {
        Some(n) => Size::Fixed(n),
        None => Size::Named(d.to_string()),
    }
}

fn shape(ty: &Ty) -> Vec<Size> {
    ty.dims.iter().map(size).collect()
}

impl Inspection {
    /// Inspects a typed graph.
    ///
    /// # Errors
    /// A pattern of `selection` that matches no parameter.
    pub fn new(graph: &Graph, selection: &Selection, warnings: Vec<String>) -> Result<Inspection> {
        let port = |id: &ValueId| {
            let value = graph.value(*id);
            Port {
                name: value.name.clone(),
                dtype: value.ty().dtype.name(),
                shape: shape(value.ty()),
            }
        };
        let frozen: Vec<String> = frozen(graph);
        let parameters = parameters(graph, selection)?;
        let mut warnings = warnings;
        warnings.extend(tied_weights::warnings(graph, &parameters));
        let parameters = parameters.into_iter().map(|p| {
            let value = graph.value(p.value);
            Parameter {
                trainable: p.trainable && !frozen.contains(&value.name),
                name: p.name,
                initializer: value.name.clone(),
                aliases: p.aliases,
                transposed: p.transposed,
                folded_from: p.folded_from,
                dtype: value.ty().dtype.name(),
                shape: shape(value.ty()),
                size_bytes: value.tensor().map_or(0, |t| t.size_bytes()),
            }
        });
        let parameters = parameters.collect();
        let found = Layers::new(graph)?;
        let attentions = summaries(graph, &found.attentions, &found.of)?;
        let kv_sharing = found.kv_sharing.clone();
        let shared_weights = sharing::shared_weights(graph, &found);
        let of_layers = sub_blocks::sub_blocks(graph, &found)?;
        let blocks = found
            .list
            .into_iter()
            .zip(of_layers)
            .map(|(b, parts)| Block {
                index: b.index,
                class: b.class,
                path: b.path,
                run: b.repeat,
                kind: b.kind,
                nodes: b.nodes.len(),
                first: graph.node(b.first).name.clone(),
                last: graph.node(b.last).name.clone(),
                parts,
            });
        let blocks = blocks.collect();
        let mut ops: BTreeMap<String, usize> = BTreeMap::new();
        let mut nodes = [0; 4];
        for (_, node) in graph.nodes() {
            let name = match node.op.domain {
                Domain::Onnx { .. } => node.op.name.to_string(),
                Domain::Ckpt => format!("{}::{}", Domain::CKPT, node.op.name),
                Domain::Opaque => {
                    let part = |key| node.attrs.opt_str(key).unwrap_or("");
                    match part("domain") {
                        "" => part("op_type").to_string(),
                        domain => format!("{domain}::{}", part("op_type")),
                    }
                }
            };
            *ops.entry(name).or_insert(0) += 1;
            nodes[match (node.recompute_of, node.role) {
                (Some(_), _) => 3,
                (None, Role::Forward) => 0,
                (None, Role::Loss) => 1,
                (None, Role::Backward) => 2,
            }] += 1;
        }
        let assumed = Binding::new(graph, &[]).ok();
        let bounds = index_bounds(graph)?;
        let dims = dim_kinds(graph).into_iter().map(|(name, kind)| {
            let word = match kind {
                DimKind::Batch => "batch",
                DimKind::Sequence => "sequence",
            };
            let assumed = assumed.as_ref().and_then(|binding| binding.get(&name));
            let sizes = bounds.iter().filter_map(|b| b.largest_size(&name));
            let dim = NamedDim {
                kind: word,
                default: assumed.unwrap_or(kind.default_size()),
                largest: sizes.min(),
            };
            (name, dim)
        });
        Ok(Inspection {
            name: graph.name.clone(),
            graph: match (nodes[3] > 0, has_backward(graph)) {
                (true, _) => "planned",
                (false, true) => "training",
                (false, false) => "forward",
            },
            inputs: graph.inputs().iter().map(port).collect(),
            outputs: graph.outputs().iter().map(port).collect(),
            parameters,
            blocks,
            attentions,
            kv_sharing,
            shared_weights,
            ops,
            dims: dims.collect(),
            meta: graph.meta.clone(),
            warnings,
            nodes,
        })
    }

    /// Returns tables for people, without warnings.
    pub fn human(&self) -> String {
        let mut out = String::new();
        let [forward, loss, backward, recompute] = self.nodes;
        let what = match self.graph {
            "forward" => "a forward graph".to_string(),
            "training" => "a training graph: it has a backward pass".to_string(),
            _ => format!("a planned training graph: {recompute} nodes recompute values"),
        };
        let _ = writeln!(
            out,
            "{}: {what}",
            if self.name.is_empty() {
                "graph"
            } else {
                &self.name
            }
        );
        let _ = writeln!(
            out,
            "nodes: {forward} forward, {loss} loss, {backward} backward, {recompute} recompute"
        );
        for (title, ports) in [("inputs", &self.inputs), ("outputs", &self.outputs)] {
            let ports: Vec<&Port> = ports
                .iter()
                .filter(|p| !self.comes_with_parameter(&p.name))
                .collect();
            let _ = writeln!(out, "\n{title}");
            for port in ports {
                let _ = writeln!(
                    out,
                    "  {:<28} {}",
                    port.name,
                    typed(port.dtype, &port.shape)
                );
            }
        }
        if !self.dims.is_empty() {
            let _ = writeln!(out, "\nnamed sizes");
        }
        for (name, dim) in &self.dims {
            let most = dim.largest.map(|n| format!(", at most {n}"));
            let _ = writeln!(
                out,
                "  {name:<28} {} size, {} unless --dim {name}=N{}",
                dim.kind,
                dim.default,
                most.unwrap_or_default()
            );
        }
        let all: u64 = self.parameters.iter().map(|p| p.size_bytes).sum();
        let _ = writeln!(
            out,
            "\nparameters: {}, {}",
            self.parameters.len(),
            bytes(all)
        );
        let widest = self.parameters.iter().map(|p| p.name.len()).max();
        let wide = widest.unwrap_or(0).min(60);
        for p in &self.parameters {
            let mut notes = Vec::new();
            if p.initializer != p.name {
                notes.push(format!("initializer {}", p.initializer));
            }
            if p.transposed {
                notes.push("transposed".into());
            }
            if !p.folded_from.is_empty() {
                notes.push(format!("folded from {}", p.folded_from.join(", ")));
            }
            if !p.aliases.is_empty() {
                notes.push(format!("also {}", p.aliases.join(", ")));
            }
            if !p.trainable {
                notes.push("frozen".into());
            }
            let line = format!(
                "  {:<wide$} {:<22} {}",
                p.name,
                typed(p.dtype, &p.shape),
                notes.join("; ")
            );
            let _ = writeln!(out, "{}", line.trim_end());
        }
        let _ = writeln!(
            out,
            "\nlayers: {}; with the nodes of each sub-block, + where it is added to the residual stream",
            self.blocks.len()
        );
        for b in &self.blocks {
            let label = b.class.as_deref().or(b.path.as_deref()).unwrap_or("-");
            let _ = writeln!(
                out,
                "  {:<4} {label:<24} {:<18} {:>5} nodes  {} .. {}",
                b.index, b.kind, b.nodes, b.first, b.last
            );
            let _ = writeln!(out, "       {}", sub_blocks::human(&b.parts));
        }
        self.attention_table(&mut out);
        out.push_str(&sharing::human(&self.kv_sharing));
        for s in &self.shared_weights {
            let _ = writeln!(
                out,
                "  {} read the same weights: {}",
                sharing::layers(&s.blocks),
                s.parameters.join(", ")
            );
        }
        let ops: Vec<String> = self
            .ops
            .iter()
            .map(|(name, n)| format!("{name} {n}"))
            .collect();
        let _ = writeln!(out, "\nops: {}", ops.join(", "));
        out
    }

    fn attention_table(&self, out: &mut String) {
        let _ = writeln!(out, "\nattentions: {}", self.attentions.len());
        for a in &self.attentions {
            let text = |s: &Option<Dim>| s.as_ref().map_or("?".into(), Dim::to_string);
            let mut notes = vec![format!("mask {}", a.mask)];
            if a.causal {
                notes.insert(0, "causal".into());
            }
            if a.segments {
                notes.push("segments".into());
            }
            notes.extend(a.window.map(|w| format!("window {w}")));
            notes.extend(a.scale.map(|s| format!("scale {s:.6}")));
            notes.extend(a.softcap.map(|c| format!("softcap {c}")));
            notes.push(AttentionSummary::form(a.fused).into());
            notes.extend(a.obstacle.clone());
            let _ = writeln!(
                out,
                "  {:<4} layer {:<4} {} heads of {}, {} for keys  {}",
                a.index,
                a.layer.map_or("-".into(), |b| b.to_string()),
                text(&a.heads),
                text(&a.head_size),
                text(&a.kv_heads),
                notes.join(", ")
            );
        }
    }

    /// Returns true for the port of a gradient, an updated parameter or optimizer state.
    fn comes_with_parameter(&self, name: &str) -> bool {
        let of = |n: &str| self.parameters.iter().any(|p| p.initializer == n);
        let updated = name.strip_suffix(UPDATED);
        let stored = updated.unwrap_or(name);
        let mut ends = STATES.iter();
        let state = ends.find_map(|end| stored.strip_suffix(end));
        gradient_of(name).is_some_and(of) || updated.is_some_and(of) || state.is_some_and(of)
    }
}

/// Returns the initializers without a gradient, by name; none in a graph without a backward pass.
fn frozen(graph: &Graph) -> Vec<String> {
    let trained = trained(graph);
    if trained.is_empty() {
        return Vec::new();
    }
    let frozen = graph.inits().filter(|(id, _)| !trained.contains_key(id));
    frozen.map(|(_, v)| v.name.clone()).collect()
}

fn typed(dtype: &str, shape: &[Size]) -> String {
    let sizes: Vec<String> = shape
        .iter()
        .map(|s| match s {
            Size::Fixed(n) => n.to_string(),
            Size::Named(name) => name.clone(),
        })
        .collect();
    format!("{dtype}[{}]", sizes.join(", "))
}
