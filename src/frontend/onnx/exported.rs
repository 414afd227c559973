//! What PyTorch's dynamo exporter did to parameters before it wrote a file.
//!
//! The exporter computes with parameters ahead of time. It folds the transpose of a linear layer, but also `exp(scale)` or
//! a batch norm, into a new initializer. It also stores tensors of equal contents once, so that unrelated norms of ones
//! share an initializer. The metadata tells which parameters each initializer was computed from (`folded_from`), what the
//! model's parameters are (`graph_signature`), and which of them each node was traced with (`fx_node`).
//!
//! An initializer gets a parameter's name only if it holds that parameter, perhaps in another layout ([`Relation`]).
//! [`unmerge`] gives merged constants back to each of their parameters.

use super::tensor::ReadTensor;
use crate::onnx::proto::{
    GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, ValueInfoProto,
};
use ckpt_passes::Result;
use ckpt_passes::ir::{Origin, Tensor};
use std::collections::{BTreeMap, BTreeSet};

/// The key of a node's module paths, outermost first, and the traced operation.
pub const SCOPES: &str = "pkg.torch.onnx.name_scopes";
const FX_NODE: &str = "pkg.torch.onnx.fx_node";
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";
const PERSISTENT: &str = "pkg.torch.export.graph_signature.InputSpec.persistent";
const FOLDED_FROM: &str = "pkg.onnxscript.optimizer.folded_from";
const SIGNATURE: &str = "pkg.torch.export.ExportedProgram.graph_signature";
const PARAMETER: &str = "PARAMETER";

/// The ops of PyTorch that the exporter lowers in such a way that their parameters only change layout or precision.
const KEEPING: &[&str] = &[
    "_fused_rms_norm",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
];

/// Those of them whose parameters are vectors, one number for each channel.
const VECTORS: &[&str] = &[
    "_prelu_kernel",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "native_group_norm",
    "prelu",
];

/// The ops of PyTorch that keep elements and their order. `cast` is what the exporter calls a conversion.
const RESHAPING: &[&str] = &[
    "_to_copy",
    "_unsafe_view",
    "alias",
    "clone",
    "contiguous",
    "detach",
    "flatten",
    "lift_fresh_copy",
    "reshape",
    "squeeze",
    "to",
    "type_as",
    "unflatten",
    "unsqueeze",
    "view",
];

/// Those of them that keep sizes, or add an axis of size 1.
const KEEPS_SIZES: &[&str] = &[
    "_to_copy",
    "alias",
    "clone",
    "contiguous",
    "detach",
    "lift_fresh_copy",
    "to",
    "type_as",
    "unsqueeze",
];

/// The ops of PyTorch that transpose a matrix.
const TURNING: &[&str] = &["numpy_t", "permute", "t", "transpose"];

/// PyTorch's ops that create constants.
const CONSTANTS: &[&str] = &["full", "scalar_tensor"];

/// How an initializer follows from the one parameter that it was computed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Relation {
    /// It holds the parameter, perhaps transposed or reshaped.
    Same {
        /// The initializer is the transpose.
        transposed: bool,
        /// Axes of size 1 that it has and the parameter lacks.
        added_axes: AddedAxes,
    },
    /// It holds elementwise functions of the parameter, applied in this order.
    Applied {
        /// PyTorch's names of the functions.
        functions: Vec<String>,
        /// The initializer is transposed.
        transposed: bool,
        /// Axes of size 1 that it has and the parameter lacks.
        added_axes: AddedAxes,
    },
    /// It holds something else, such as rows of a table.
    Other,
}

/// Axes of size 1 that an initializer has and its parameter lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedAxes {
    /// So many.
    Count(usize),
    /// The file does not tell, for PyTorch changed the shape by `view` or `reshape`. A parameter with one axis that is longer
    /// than 1 is taken to be a vector.
    Viewed,
}

impl AddedAxes {
    /// The shape is the parameter's.
    pub const NONE: AddedAxes = AddedAxes::Count(0);
}

/// What the lowering of an op of PyTorch does to a parameter.
enum Lowering {
    /// It transposes a matrix.
    Transposes,
    /// It changes shape or precision at most.
    Keeps,
    /// It adds axes of size 1 to a vector.
    MakesColumns,
    /// It may change values.
    Changes,
    /// The file does not tell the op.
    Unknown,
}

/// What a model input of the traced program is.
#[derive(Clone, Copy)]
struct Kind {
    is_parameter: bool,
    is_persistent: bool,
}

/// The exporter's metadata about the initializers of a file.
pub struct Export<'a> {
    /// The framework's names of parameters, by traced names: `p_model_norm_weight` is `model.norm.weight`.
    parameters: BTreeMap<String, String>,
    /// The framework's names alone.
    names: BTreeSet<String>,
    /// Kinds of the initializers that were model inputs of the traced program, by name.
    kinds: BTreeMap<&'a str, Kind>,
    /// The values from which each folded initializer was computed, intermediate values included.
    sources: BTreeMap<&'a str, Vec<String>>,
    /// The nodes that read each initializer.
    readers: BTreeMap<&'a str, Vec<&'a NodeProto>>,
}

impl<'a> Export<'a> {
    /// Reads the metadata of a file. Files of other exporters have none.
    pub fn read(model: &ModelProto, file: &'a GraphProto) -> Export<'a> {
        let parameters = signature(model, file);
        let mut export = Export {
            names: parameters.values().cloned().collect(),
            parameters,
            kinds: BTreeMap::new(),
            sources: BTreeMap::new(),
            readers: BTreeMap::new(),
        };
        let initializers: BTreeSet<&str> = file.initializer.iter().map(|t| t.name()).collect();
        for info in &file.value_info {
            let name = info.name();
            if !initializers.contains(name) {
                continue;
            }
            if let Some(kind) = prop(&info.metadata_props, KIND) {
                let kind = Kind {
                    is_parameter: kind == PARAMETER,
                    is_persistent: prop(&info.metadata_props, PERSISTENT) == Some("True"),
                };
                export.kinds.insert(name, kind);
            }
            if let Some(sources) = prop(&info.metadata_props, FOLDED_FROM) {
                export.sources.insert(name, python_strings(sources));
            }
        }
        for node in &file.node {
            for name in node.input.iter().map(String::as_str) {
                if initializers.contains(name) {
                    export.readers.entry(name).or_default().push(node);
                }
            }
        }
        export
    }

    /// Returns the parameters that a folded initializer was computed from.
    fn parameters_of(&self, name: &str) -> Vec<&str> {
        let is_parameter = |s: &&str| match self.names.is_empty() {
            false => self.names.contains(*s),
            true => s.contains('.'),
        };
        let sources = self.sources.get(name).into_iter().flatten();
        sources.map(String::as_str).filter(is_parameter).collect()
    }

    /// Returns what the file tells about an initializer of this rank; `None` where it tells nothing.
    pub fn origin(&self, name: &str, rank: usize) -> Option<Origin> {
        if let Some(kind) = self.kinds.get(name) {
            return Some(Origin {
                names: vec![name.to_string()],
                is_parameter: Some(kind.is_parameter),
                is_persistent: kind.is_persistent,
                ..Origin::default()
            });
        }
        let is_listed = !self.parameters.is_empty();
        // A rewrite, such as that of a batch norm into the convolution before it, replaced the contents, and may add a bias.
        let rewritten = name.strip_suffix("_bias").unwrap_or(name);
        let rewritten = [name, rewritten].into_iter().find(|n| {
            !self.kinds.is_empty() && self.names.contains(*n) && !self.kinds.contains_key(*n)
        });
        if let Some(parameter) = rewritten {
            return Some(Origin {
                folded_from: vec![parameter.to_string()],
                is_parameter: Some(true),
                ..Origin::default()
            });
        }
        if !self.sources.contains_key(name) {
            return None;
        }
        let parameters = self.parameters_of(name);
        let mut origin = Origin {
            is_parameter: is_listed.then_some(!parameters.is_empty()),
            ..Origin::default()
        };
        match (parameters.as_slice(), self.relation(name, rank)) {
            ([], _) if !is_listed => return None,
            ([one], Relation::Same { transposed, .. }) => {
                origin.names = vec![one.to_string()];
                origin.transposed = transposed;
            }
            (several, _) => {
                origin.folded_from = several.iter().map(|p| p.to_string()).collect();
                origin.frozen = !several.is_empty();
            }
        }
        Some(origin)
    }

    /// Returns how a folded initializer of this rank follows from its parameter.
    pub fn relation(&self, name: &str, rank: usize) -> Relation {
        let parameters = self.parameters_of(name);
        let [parameter] = parameters.as_slice() else {
            return Relation::Other;
        };
        let traced = |s: &&String| s != parameter && !is_internal(s);
        let sources = &self.sources[name];
        let mut steps: Vec<&str> = sources.iter().filter(traced).map(|s| plain(s)).collect();
        let (mut turns, mut added_axes) = (0, AddedAxes::NONE);
        if is_internal(name) {
            match self.lowering(name) {
                Lowering::Transposes => turns += 1,
                Lowering::Keeps => {}
                Lowering::MakesColumns => {
                    added_axes = AddedAxes::Count(rank.saturating_sub(1));
                }
                // Without metadata of nodes, only weights of products are recognised.
                Lowering::Unknown if rank == 2 && self.is_factor(name) => turns += 1,
                Lowering::Unknown | Lowering::Changes => return Relation::Other,
            }
        } else {
            steps.push(plain(name));
        }
        turns += steps.iter().filter(|s| TURNING.contains(s)).count();
        let known =
            |s: &str| RESHAPING.contains(&s) || TURNING.contains(&s) || CONSTANTS.contains(&s);
        let functions: Vec<String> = steps
            .iter()
            .filter(|s| !known(s))
            .map(|s| s.to_string())
            .collect();
        let reshapes = steps.iter().any(|s| RESHAPING.contains(s));
        if turns > 0 && rank > 1 && (rank != 2 || (reshapes && turns > 1)) {
            return Relation::Other;
        }
        let transposed = rank == 2 && turns % 2 == 1;
        let unsqueezes = steps.iter().filter(|s| **s == "unsqueeze").count();
        let mut others = steps
            .iter()
            .filter(|s| RESHAPING.contains(s) && !KEEPS_SIZES.contains(s));
        if turns == 0 {
            match others.next() {
                None if unsqueezes > 0 => added_axes = AddedAxes::Count(unsqueezes),
                Some(_) => added_axes = AddedAxes::Viewed,
                None => {}
            }
        }
        match functions.is_empty() {
            true => Relation::Same {
                transposed,
                added_axes,
            },
            false => Relation::Applied {
                functions,
                transposed,
                added_axes,
            },
        }
    }

    /// Returns what the lowering that made an initializer without a traced name does to parameters.
    fn lowering(&self, name: &str) -> Lowering {
        let mut found = Lowering::Unknown;
        for reader in self.readers.get(name).into_iter().flatten() {
            let traced = prop(&reader.metadata_props, FX_NODE);
            let Some(target) = traced.and_then(target) else {
                continue;
            };
            found = match target {
                "linear" => Lowering::Transposes,
                "index" if indexes_first_axes(traced.unwrap_or_default()) => Lowering::Keeps,
                target if VECTORS.contains(&target) => Lowering::MakesColumns,
                target if KEEPING.contains(&target) => Lowering::Keeps,
                _ => return Lowering::Changes,
            };
        }
        found
    }

    /// Returns true if every reader multiplies by the initializer.
    fn is_factor(&self, name: &str) -> bool {
        let is_product = |n: &&NodeProto| matches!(n.op_type(), "MatMul" | "Gemm");
        let readers = self.readers.get(name);
        readers.is_some_and(|all| all.iter().all(is_product))
    }

    /// Returns the parameters that the file neither holds nor was folded from, by whether a node was traced with them.
    pub fn missing(&self, held: &BTreeSet<&str>) -> (Vec<String>, Vec<String>) {
        let mut mentioned: BTreeSet<&str> = BTreeSet::new();
        for reader in self.readers.values().flatten() {
            mentioned.extend(prop(&reader.metadata_props, FX_NODE).map_or(Vec::new(), words));
        }
        let (mut folded, mut unused) = (Vec::new(), Vec::new());
        for (traced, name) in &self.parameters {
            if held.contains(name.as_str()) {
                continue;
            }
            match mentioned.contains(traced.as_str()) {
                true => folded.push(name.clone()),
                false => unused.push(name.clone()),
            }
        }
        (folded, unused)
    }

    /// Returns the operands that stand for parameters which the file stores under the name of another parameter: index of
    /// the node, slot, and the framework's name.
    fn stand_ins(&self, file: &'a GraphProto) -> Vec<(usize, usize, &str)> {
        let known = self.known();
        let mut found = Vec::new();
        for (index, node) in file.node.iter().enumerate() {
            let Some(traced) = prop(&node.metadata_props, FX_NODE) else {
                continue;
            };
            let mut asked: Vec<&str> = words(traced)
                .into_iter()
                .filter_map(|word| self.parameters.get(word).map(String::as_str))
                .collect();
            let mut slots = Vec::new();
            for (slot, input) in node.input.iter().enumerate() {
                let held = match self.kinds.get(input.as_str()) {
                    Some(kind) if kind.is_parameter => vec![input.as_str()],
                    _ => self.parameters_of(input),
                };
                let [held] = held.as_slice() else { continue };
                match asked.iter().position(|name| name == held) {
                    Some(own) => drop(asked.remove(own)),
                    None => slots.push((slot, *held)),
                }
            }
            asked.retain(|name| !known.contains(name));
            let single = slots.len() == 1 && asked.len() == 1;
            for (slot, held) in slots {
                let kind = |name: &str| name.rsplit('.').next().map(str::to_string);
                let alike = |name: &&&str| single || kind(name) == kind(held);
                let mut fitting = asked.iter().filter(alike);
                if let (Some(name), None) = (fitting.next(), fitting.next()) {
                    found.push((index, slot, *name));
                }
            }
        }
        found
    }

    /// Returns further names of initializers: of tied weights, which the file stores under one of their names. A node was
    /// traced with the other name, or stands in the module that has it.
    pub fn aliases(&self, file: &'a GraphProto) -> BTreeMap<&'a str, Vec<&str>> {
        let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let mut add = |initializer: &'a str, name| {
            let names = found.entry(initializer).or_default();
            if !names.contains(&name) {
                names.push(name);
            }
        };
        for (index, slot, name) in self.stand_ins(file) {
            add(file.node[index].input[slot].as_str(), name);
        }
        let known = self.known();
        for (initializer, readers) in &self.readers {
            if !self
                .kinds
                .get(initializer)
                .is_some_and(|kind| kind.is_parameter)
            {
                continue;
            }
            let kind = initializer.rsplit('.').next().unwrap_or_default();
            for scopes in readers
                .iter()
                .filter_map(|n| prop(&n.metadata_props, SCOPES))
            {
                // The last entry is the traced operation.
                let paths = python_strings(scopes);
                let module = paths
                    .iter()
                    .rev()
                    .nth(1)
                    .map(|path| format!("{path}.{kind}"));
                let name = module.and_then(|name| self.names.get(&name).map(String::as_str));
                if let Some(name) = name.filter(|name| !known.contains(name)) {
                    add(initializer, name);
                }
            }
        }
        found
    }

    /// Returns the parameters that the file holds under their own names, or from which initializers were folded.
    fn known(&self) -> BTreeSet<&str> {
        let folded = self.sources.keys().flat_map(|n| self.parameters_of(n));
        self.kinds.keys().copied().chain(folded).collect()
    }
}

/// Gives each parameter that the exporter merged with others of equal contents an initializer of its own. Only constants
/// (all elements equal, such as the ones of fresh norms) are parted: other equal weights are tied. `None` where nothing is
/// merged.
///
/// # Errors
/// See [`ReadTensor`].
pub fn unmerge(
    model: &ModelProto,
    file: &GraphProto,
    read: &mut ReadTensor,
) -> Result<Option<GraphProto>> {
    let export = Export::read(model, file);
    let stand_ins = export.stand_ins(file);
    if stand_ins.is_empty() {
        return Ok(None);
    }
    let stored: BTreeMap<&str, &TensorProto> =
        file.initializer.iter().map(|t| (t.name(), t)).collect();
    let mut constant: BTreeMap<&str, bool> = BTreeMap::new();
    let mut parted = file.clone();
    let mut own: BTreeSet<&str> = BTreeSet::new();
    for (index, slot, name) in stand_ins {
        let shared = file.node[index].input[slot].as_str();
        let Some(tensor) = stored.get(shared) else {
            continue;
        };
        let is_constant = match constant.get(shared) {
            Some(known) => *known,
            None => *constant
                .entry(shared)
                .or_insert(holds_one_number(&read(tensor)?)),
        };
        if !is_constant || stored.contains_key(name) {
            continue;
        }
        if own.insert(name) {
            parted.initializer.push(TensorProto {
                name: Some(name.to_string()),
                ..(*tensor).clone()
            });
            parted.value_info.push(ValueInfoProto {
                name: Some(name.to_string()),
                metadata_props: vec![StringStringEntryProto::new(KIND, PARAMETER)],
                ..ValueInfoProto::default()
            });
        }
        parted.node[index].input[slot] = name.to_string();
    }
    Ok((!own.is_empty()).then_some(parted))
}

/// Returns true if all elements of a tensor are the same.
pub fn holds_one_number(tensor: &Tensor) -> bool {
    let size = tensor.dtype.size_bytes() as usize;
    let bytes = tensor.bytes();
    bytes.is_some_and(|b| b.len() >= size && b[size..] == b[..b.len() - size])
}

/// Returns the names of parameters by their traced names.
fn signature(model: &ModelProto, file: &GraphProto) -> BTreeMap<String, String> {
    let mut parameters = BTreeMap::new();
    let props = file.metadata_props.iter().chain(&model.metadata_props);
    for prop in props.filter(|p| p.key() == SIGNATURE) {
        for line in prop.value().lines() {
            let Some((traced, rest)) = line.trim().split_once(": PARAMETER target=") else {
                continue;
            };
            if let Some(name) = python_strings(rest).into_iter().next() {
                parameters.insert(traced.to_string(), name);
            }
        }
    }
    parameters
}

fn prop<'p>(props: &'p [StringStringEntryProto], key: &str) -> Option<&'p str> {
    props.iter().find(|p| p.key() == key).map(|p| p.value())
}

/// Returns the names in the text of a traced node, in their order.
fn words(traced: &str) -> Vec<&str> {
    traced
        .split(|c: char| !(c.is_alphanumeric() || c == '_'))
        .filter(|w| !w.is_empty())
        .collect()
}

/// Returns the op of a traced node: `linear` for `… target=torch.ops.aten.linear.default](args = …`.
fn target(traced: &str) -> Option<&str> {
    let (_, rest) = traced.split_once("target=torch.ops.aten.")?;
    rest.split(['.', ']']).next()
}

/// Returns true if the indices of a traced `index` stand before the axes without one. The lowering transposes the operand
/// otherwise.
fn indexes_first_axes(traced: &str) -> bool {
    let list = traced
        .split_once(", [")
        .and_then(|(_, rest)| rest.split_once(']'));
    list.is_some_and(|(indices, _)| {
        let mut after = indices.split(", ").skip_while(|i| i.starts_with('%'));
        indices.starts_with('%') && after.all(|i| !i.starts_with('%'))
    })
}

/// Returns true for names that the exporter gives to values within the lowering of an op: `val_12`.
fn is_internal(name: &str) -> bool {
    let number = name.strip_prefix("val_");
    number.is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns the op after which a traced value is named: `exp` for `exp_1`.
fn plain(name: &str) -> &str {
    let op = match name.rsplit_once('_') {
        Some((op, n)) if !op.is_empty() && n.bytes().all(|b| b.is_ascii_digit()) => op,
        _ => name,
    };
    op.strip_suffix("_default").unwrap_or(op)
}

/// Returns the strings of a Python list literal such as `['', 'model', "it's"]`.
pub fn python_strings(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut chars = text.chars();
    while let Some(quote) = chars.find(|c| *c == '\'' || *c == '"') {
        let mut item = String::new();
        while let Some(c) = chars.next() {
            match c {
                c if c == quote => break,
                '\\' => item.extend(chars.next()),
                c => item.push(c),
            }
        }
        found.push(item);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::python_strings;

    #[test]
    fn list_literals() {
        assert_eq!(
            python_strings(r#"['', 'model.layers.0', "it's", 'a\'b']"#),
            ["", "model.layers.0", "it's", "a'b"]
        );
        assert!(python_strings("[]").is_empty());
    }
}
