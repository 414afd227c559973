//! Linear layers in the dataflow: matrices that products read on their right side, as they are or made of quantised codes.

use super::request::{Lora, fail};
use crate::analysis::params::{Parameter, Selection, names, parameters};
use crate::error::Result;
use crate::glob;
use crate::ir::op::OpClass;
use crate::ir::{DType, Graph, Node, NodeId, SecondaryMap, Tensor, ValueId};
use crate::ops::{cast, matmul, shape};
use std::collections::BTreeSet;

/// So many layers are named in an error.
const SHOWN: usize = 12;
const WEIGHT: &str = ".weight";

/// One product with a weight.
pub(super) struct Site {
    pub product: NodeId,
    /// The node that makes the result: the product, or the sum with the bias.
    pub last: NodeId,
    pub result: ValueId,
    pub x: ValueId,
    /// The product reads the transpose of `x`.
    pub x_transposed: bool,
    /// The factor of the product.
    pub alpha: f32,
}

/// A weight with all products that read it.
pub(super) struct Linear {
    pub weight: ValueId,
    /// The name of the weight without `.weight`.
    pub module: String,
    pub ins: u64,
    pub outs: u64,
    /// The initializer is [out, in]; products read its transpose.
    pub turned: bool,
    /// The element type of the products.
    pub dtype: DType,
    pub sites: Vec<Site>,
}

/// A linear layer, for those who merge adapters into weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearLayer {
    /// The initializer.
    pub weight: ValueId,
    /// The name of its module, which names of adapters begin with.
    pub module: String,
    /// The initializer is [out, in], not [in, out].
    pub out_first: bool,
    /// Columns of A.
    pub ins: u64,
    /// Rows of B.
    pub outs: u64,
}

/// A weight that may belong to a linear layer.
struct Candidate {
    parameter: Parameter,
    /// The value that holds the matrix: the initializer, or what is made of its codes.
    matrix: ValueId,
    /// More than one matrix is made of the codes.
    is_shared: bool,
}

/// Returns parameters, and matrices that are made of quantised codes where products read them.
fn candidates(graph: &Graph) -> Result<Vec<Candidate>> {
    let all = parameters(graph, &Selection::default())?.into_iter();
    let mut all: Vec<Candidate> = all
        .map(|parameter| Candidate {
            matrix: parameter.value,
            parameter,
            is_shared: false,
        })
        .collect();
    let codes = codes(graph);
    let mut found = BTreeSet::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let is_product = matches!(node.op.class, OpClass::Product | OpClass::BiasedProduct);
        let Some(mut matrix) = node.operand(1).filter(|_| is_product) else {
            continue;
        };
        while let Some(maker) = graph.def_node(matrix).map(|id| graph.node(id)) {
            match maker.operand(0) {
                Some(x) if passes_on(graph, maker, x).is_some() => matrix = x,
                _ => break,
            }
        }
        let Some(codes) = codes[matrix].filter(|v| *v != matrix && found.insert(matrix)) else {
            continue;
        };
        let mut names = names(graph, codes).map(str::to_string);
        let name = names.next().unwrap_or_default();
        let parameter = Parameter {
            value: codes,
            name,
            aliases: names.collect(),
            transposed: false,
            folded_from: Vec::new(),
            trainable: false,
        };
        let mut is_shared = false;
        for other in all.iter_mut().filter(|c| c.parameter.value == codes) {
            (other.is_shared, is_shared) = (true, true);
        }
        all.push(Candidate {
            parameter,
            matrix,
            is_shared,
        });
    }
    Ok(all)
}

/// Returns whether elements of the type may be codes of a quantised weight.
fn is_code(dtype: DType) -> bool {
    dtype.is_int() || dtype.is_float8()
}

/// Returns the codes of each value that is made of initializers alone: the largest initializer of integers or floats of 8 bits
/// among them.
fn codes(graph: &Graph) -> SecondaryMap<ValueId, Option<ValueId>> {
    let n = graph.value_bound();
    let mut constant = SecondaryMap::new(n, false);
    let mut codes: SecondaryMap<ValueId, Option<ValueId>> = SecondaryMap::new(n, None);
    for (id, value) in graph.inits() {
        constant[id] = true;
        codes[id] = Some(id).filter(|_| is_code(value.ty().dtype));
    }
    let size = |v: &ValueId| graph.value(*v).tensor().map_or(0, Tensor::size_bytes);
    for id in graph.order() {
        let node = graph.node(*id);
        if node.ins.is_empty() || !node.operands().all(|v| constant[v]) {
            continue;
        }
        let largest = node.operands().filter_map(|v| codes[v]).max_by_key(size);
        for out in &node.outs {
            constant[*out] = true;
            codes[*out] = largest;
        }
    }
    codes
}

/// Returns all linear layers of a typed forward graph.
///
/// # Errors
/// See [`parameters`].
pub fn linear_layers(graph: &Graph) -> Result<Vec<LinearLayer>> {
    let all = candidates(graph)?;
    let found = all.iter().filter_map(|c| linear(graph, c).ok());
    let layers = found.map(|layer| LinearLayer {
        weight: layer.weight,
        module: layer.module,
        out_first: layer.turned,
        ins: layer.ins,
        outs: layer.outs,
    });
    Ok(layers.collect())
}

/// Returns the name of the module that a weight belongs to. Quantisers put more behind the name of the weight (`.weight_Q4`), or
/// give it another one (`.qweight`).
fn module(name: &str) -> &str {
    let end = [WEIGHT, ".qweight"].map(|end| name.rfind(end).map(|at| (at, at + end.len())));
    let end = end.into_iter().flatten().max();
    let is_end = |at: usize| name.len() == at || name[at..].starts_with(['_', '.']);
    end.filter(|(_, behind)| is_end(*behind))
        .map_or(name, |(at, _)| &name[..at])
}

/// Returns true if a pattern names the weight or its module. A word without wildcards is also the end of a module's path:
/// `q_proj`, as in PEFT.
fn is_target(graph: &Graph, parameter: &Parameter, pattern: &str) -> bool {
    let initializer = &graph.value(parameter.value).name;
    let names = parameter.aliases.iter().chain(&parameter.folded_from);
    let mut names = names.chain([&parameter.name, initializer]);
    names.any(|name| {
        let path = module(name);
        let is_end = |rest: &str| rest.is_empty() || rest.ends_with('.');
        glob::matches(pattern, name)
            || glob::matches(pattern, path)
            || path.strip_suffix(pattern).is_some_and(is_end)
    })
}

/// Returns the layers that the request names, in the order of their weights, and warnings about weights that match and
/// are none.
///
/// # Errors
/// A target that names no layer.
pub(super) fn targets(graph: &Graph, lora: &Lora) -> Result<(Vec<Linear>, Vec<String>)> {
    let all = candidates(graph)?;
    let mut hits = vec![false; lora.targets.len()];
    let (mut layers, mut refused) = (Vec::new(), Vec::new());
    for candidate in &all {
        let (parameter, rank) = (&candidate.parameter, graph.ty(candidate.matrix).rank());
        let mut named = false;
        for (hit, pattern) in hits.iter_mut().zip(&lora.targets) {
            let matches = is_target(graph, parameter, pattern);
            // Biases and norms beside a layer are no targets of their own.
            *hit |= matches && rank > 1;
            named |= matches;
        }
        if !named || rank < 2 {
            continue;
        }
        match linear(graph, candidate) {
            Ok(layer) => layers.push(layer),
            Err(why) => refused.push(format!("`{}` {why}", parameter.name)),
        }
    }
    let missed = hits.iter().position(|hit| !hit);
    let what = match (missed, layers.is_empty(), refused.first()) {
        (Some(i), ..) => format!("target `{}` matches no linear layer", lora.targets[i]),
        (None, true, Some(why)) => format!("no linear layer gets an adapter: {why}"),
        _ => {
            let tell = |why: String| {
                format!("no adapter for a weight that a target of --lora names: {why}")
            };
            return Ok((layers, refused.into_iter().map(tell).collect()));
        }
    };
    let known: Vec<&str> = all
        .iter()
        .filter(|c| linear(graph, c).is_ok())
        .map(|c| c.parameter.name.as_str())
        .collect();
    let more = match known.len().saturating_sub(SHOWN) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    let found = match known.is_empty() {
        true => "no linear layer at all".into(),
        false => format!("{}{more}", known[..known.len().min(SHOWN)].join(", ")),
    };
    let error = fail(what).found(found);
    Err(match missed.and(refused.first()) {
        Some(why) => error.help(format!("not {why}")),
        None => error.help("`ckpt-opt inspect MODEL` lists all parameters"),
    })
}

/// Returns the layer of a weight, or why it is none.
fn linear(graph: &Graph, candidate: &Candidate) -> Result<Linear, String> {
    let Candidate {
        parameter, matrix, ..
    } = candidate;
    let weight = parameter.value;
    if !parameter.folded_from.is_empty() {
        let from = parameter.folded_from.join(", ");
        return Err(format!(
            "is no weight of the model: the exporter computed it from {from}"
        ));
    }
    if candidate.is_shared {
        return Err("is made into more than one matrix".into());
    }
    let mut layer = Linear {
        weight,
        module: module(&parameter.name).to_string(),
        ins: 0,
        outs: 0,
        turned: false,
        dtype: graph.ty(*matrix).dtype,
        sites: Vec::new(),
    };
    // Values that hold the weight, and whether as its transpose.
    let mut open = vec![(*matrix, false)];
    while let Some((value, turned)) = open.pop() {
        if graph.is_output(value) {
            return Err("is a graph output".into());
        }
        for reader in graph.value(value).uses() {
            let node = graph.node(reader.node);
            if let Some(turns) = passes_on(graph, node, value) {
                open.push((node.outs[0], turned ^ turns));
                continue;
            }
            let site = site(graph, reader.node, reader.slot)?;
            let turned = turned ^ (attr(node, "transB") != 0);
            let is_first = layer.sites.is_empty();
            let dtype = graph.ty(value).dtype;
            if !is_first && (turned, dtype) != (layer.turned, layer.dtype) {
                return Err("is read by products in two layouts or types".into());
            }
            (layer.turned, layer.dtype) = (turned, dtype);
            layer.sites.push(site);
            let dims = graph.ty(value).static_dims();
            let Some([rows, columns]) = dims.as_deref().map(|d| [d[0] as u64, d[1] as u64]) else {
                return Err("has sizes that are not fixed".into());
            };
            (layer.ins, layer.outs) = match attr(node, "transB") {
                0 => (rows, columns),
                _ => (columns, rows),
            };
        }
    }
    if layer.sites.is_empty() {
        return Err("is read by no product".into());
    }
    layer.sites.sort_by_key(|site| site.product);
    Ok(layer)
}

fn attr(node: &Node, name: &str) -> i64 {
    node.attrs.opt_int(name).unwrap_or(0)
}

/// Returns whether a node passes a matrix on as its transpose; `None` where it passes on something else.
fn passes_on(graph: &Graph, node: &Node, value: ValueId) -> Option<bool> {
    let is_matrix = graph.ty(value).rank() == 2;
    match node.op {
        op if op == &shape::TRANSPOSE && is_matrix => {
            Some(node.attrs.opt_ints("perm").is_none_or(|p| p == [1, 0]))
        }
        op if op == &cast::CAST || op == &shape::IDENTITY => Some(false),
        _ => None,
    }
}

/// Returns the product that reads a weight in a slot, or why it is no linear layer.
fn site(graph: &Graph, id: NodeId, slot: usize) -> Result<Site, String> {
    let node = graph.node(id);
    let op = node.op_name();
    match node.op.class {
        OpClass::Product | OpClass::BiasedProduct => {}
        OpClass::Convolution => return Err("is the weight of a convolution".into()),
        _ => {
            let spec = node.op.ins.get(slot).or(node.op.ins.last());
            return Err(match spec.is_some_and(|s| s.weight) {
                true => format!("is the table of a lookup ({op})"),
                false => format!("is read by {op}, which is no matrix product"),
            });
        }
    }
    let read = node.operand(slot).map_or(0, |v| graph.ty(v).rank());
    let (Some(x), true) = (node.operand(0), slot == 1) else {
        return Err(format!("is operand {slot} of {op}, not its right side"));
    };
    if read != 2 {
        return Err(format!(
            "has {read} axes, one matrix for each expert or head"
        ));
    }
    if node.op != &matmul::MATMUL && node.op != &matmul::GEMM {
        return Err(format!("is read by {op}"));
    }
    let result = node.outs[0];
    let (last, result) = with_bias(graph, result).unwrap_or((id, result));
    Ok(Site {
        product: id,
        last,
        result,
        x,
        x_transposed: attr(node, "transA") != 0,
        alpha: node.attrs.opt_float("alpha").unwrap_or(1.0),
    })
}

/// Returns the sum of a product with its bias, a vector that depends on no input, if nothing else reads the product.
fn with_bias(graph: &Graph, product: ValueId) -> Option<(NodeId, ValueId)> {
    let [only] = graph.value(product).uses() else {
        return None;
    };
    let node = graph.node(only.node);
    if graph.is_output(product) || node.op != &crate::ops::arith::ADD {
        return None;
    }
    let mut bias = node.operands().find(|v| *v != product)?;
    if graph.ty(bias).rank() > 1 {
        return None;
    }
    while let Some(id) = graph.def_node(bias) {
        let maker = graph.node(id);
        let is_plain = maker.op.is_layout() || maker.op == &cast::CAST;
        bias = maker.operand(0).filter(|_| is_plain)?;
    }
    graph.value(bias).tensor()?;
    Some((only.node, node.outs[0]))
}
