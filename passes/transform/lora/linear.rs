//! Linear layers in the dataflow: matrices that products read on their right side.

use super::request::{Lora, fail};
use crate::analysis::params::{Parameter, Selection, parameters};
use crate::error::Result;
use crate::glob;
use crate::ir::op::OpClass;
use crate::ir::{DType, Graph, Node, NodeId, ValueId};
use crate::ops::{cast, matmul, shape};

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
}

/// Returns all linear layers of a typed forward graph.
///
/// # Errors
/// See [`parameters`].
pub fn linear_layers(graph: &Graph) -> Result<Vec<LinearLayer>> {
    let parameters = parameters(graph, &Selection::default())?;
    let found = parameters.iter().filter_map(|p| linear(graph, p).ok());
    let layers = found.map(|layer| LinearLayer {
        weight: layer.weight,
        module: layer.module,
        out_first: layer.turned,
    });
    Ok(layers.collect())
}

/// Returns the name of the module that a weight belongs to.
fn module(name: &str) -> &str {
    name.strip_suffix(WEIGHT).unwrap_or(name)
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
    let all = parameters(graph, &Selection::default())?;
    let mut hits = vec![false; lora.targets.len()];
    let (mut layers, mut refused) = (Vec::new(), Vec::new());
    for parameter in &all {
        let mut named = false;
        for (hit, pattern) in hits.iter_mut().zip(&lora.targets) {
            let matches = is_target(graph, parameter, pattern);
            // Biases and norms beside a layer are no targets of their own.
            *hit |= matches && graph.ty(parameter.value).rank() > 1;
            named |= matches;
        }
        if !named || graph.ty(parameter.value).rank() < 2 {
            continue;
        }
        match linear(graph, parameter) {
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
        .filter(|p| linear(graph, p).is_ok())
        .map(|p| p.name.as_str())
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
fn linear(graph: &Graph, parameter: &Parameter) -> Result<Linear, String> {
    let weight = parameter.value;
    if !parameter.folded_from.is_empty() {
        let from = parameter.folded_from.join(", ");
        return Err(format!(
            "is no weight of the model: the exporter computed it from {from}"
        ));
    }
    let mut layer = Linear {
        weight,
        module: module(&parameter.name).to_string(),
        ins: 0,
        outs: 0,
        turned: false,
        dtype: graph.ty(weight).dtype,
        sites: Vec::new(),
    };
    // Values that hold the weight, and whether as its transpose.
    let mut open = vec![(weight, false)];
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
        }
    }
    let dims = graph.value(weight).tensor().map(|t| t.dims.as_slice());
    let (Some(&[rows, columns]), false) = (dims, layer.sites.is_empty()) else {
        return Err("is read by no product".into());
    };
    (layer.ins, layer.outs) = match layer.turned {
        true => (columns, rows),
        false => (rows, columns),
    };
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
