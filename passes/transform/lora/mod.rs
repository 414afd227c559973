//! Adds low-rank adapters (LoRA) to linear layers: `y` becomes `y + (x·Aᵀ)·Bᵀ·scale`.
//!
//! In and out: `Typed`, a forward graph before fusion and loss, so that all later passes see what an export with its
//! adapters in place would show. A weight `<module>.weight` gets the initializers `<module>.lora_A.weight` [rank, in] and
//! `<module>.lora_B.weight` [out, rank], as in PEFT (Hu et al., "LoRA", 2021). The scale is `alpha / rank`, or
//! `alpha / √rank` with `rslora` (Kalajdzievski, 2023). It multiplies `x·Aᵀ`, the smallest of the three products.
//!
//! A is drawn as PyTorch's linear layers draw their weights (Kaiming-uniform with `a = √5`): element `i` is
//! `(2·u(i) − 1) / √in`. `u(i)` is the draw of [`random`](crate::ops::random) for the seed, the stream of the adapter's name and
//! element `i`, in 2⁻²⁴. So a weight depends on nothing but seed, name and shape. B is zero: before the first step the
//! model computes what it did.
//!
//! A layer is found in the dataflow ([`linear`]): a matrix that reaches the right side of a product, perhaps transposed or
//! cast. The sum comes after the bias, as in PyTorch.

mod linear;
mod request;

use super::rng_streams::seed_input;
use crate::analysis::params::Selection;
use crate::error::{Error, Result};
use crate::ir::{Attrs, DType, Graph, NodeId, Origin, Tensor, ValueId};
use crate::ops::random::{BITS, DROPOUT, Key, stream};
use crate::ops::shape::{TRANSPOSE, transpose};
use crate::ops::{Builder, EmitExt, cast, matmul};
use linear::{Linear, Site};
pub use linear::{LinearLayer, linear_layers};
pub use request::Lora;
use std::collections::BTreeMap;

/// Suffix of the matrix that reads the layer's operand, [rank, in].
pub const A: &str = ".lora_A.weight";
/// Suffix of the matrix that makes the layer's result, [out, rank].
pub const B: &str = ".lora_B.weight";

/// What was added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adapters {
    /// Names of the new initializers, an A and a B for each weight.
    pub initializers: Vec<String>,
    /// Lines for the user about weights that match and got no adapter.
    pub warnings: Vec<String>,
}

impl Adapters {
    /// Returns which parameters are trained: the adapters alone, or with what the user names.
    pub fn selection(&self, asked: &Selection) -> Selection {
        let mut selection = asked.clone();
        selection
            .trainable
            .extend(self.initializers.iter().cloned());
        selection
    }
}

/// Adds an adapter to every linear layer whose weight a target names.
///
/// # Errors
/// A target without a layer, a rank above 2³¹, adapters that are there already.
pub fn add_adapters(graph: &mut Graph, lora: &Lora) -> Result<Adapters> {
    let (layers, warnings) = linear::targets(graph, lora)?;
    let mut adapters = Adapters {
        warnings,
        ..Adapters::default()
    };
    let seed = match lora.dropout > 0.0 {
        true => Some(seed_input(graph)?),
        false => None,
    };
    // New nodes, by the node that they come after.
    let mut behind: BTreeMap<NodeId, Vec<NodeId>> = BTreeMap::new();
    let before = graph.order().len();
    let mut b = Builder::new(graph);
    for layer in layers {
        let pair = initializers(b.graph, &layer, lora, &mut adapters)?;
        for (i, site) in layer.sites.iter().enumerate() {
            let from = b.graph.order().len();
            add(&mut b, &layer, site, pair, lora, seed, i)?;
            let new = b.graph.order()[from..].to_vec();
            behind.entry(site.last).or_default().extend(new);
        }
    }
    let old = graph.order()[..before].to_vec();
    let mut order = Vec::with_capacity(graph.order().len());
    for id in old {
        order.push(id);
        order.extend(behind.remove(&id).into_iter().flatten());
    }
    graph.set_order(order);
    Ok(adapters)
}

/// Adds the two initializers of a layer.
fn initializers(
    graph: &mut Graph,
    layer: &Linear,
    lora: &Lora,
    adapters: &mut Adapters,
) -> Result<(ValueId, ValueId)> {
    let (rank, dtype) = (u64::from(lora.rank), lora.dtype.unwrap_or(layer.dtype));
    let mut init = |suffix: &str, tensor: &dyn Fn(&str) -> Tensor| {
        let name = format!("{}{suffix}", layer.module);
        if graph.has_value_name(&name) {
            let what = format!("`{name}` exists: the layer has an adapter already");
            return Err(Error::usage("lora", what)
                .help("leave --lora out and train what is there: --trainable '*lora_*'"));
        }
        let id = graph.add_init(&name, tensor(&name));
        let origin = Origin {
            names: vec![name.clone()],
            is_parameter: Some(true),
            ..Origin::default()
        };
        graph.origins.insert(id, origin);
        adapters.initializers.push(name);
        Ok(id)
    };
    let a = init(A, &|name| {
        uniform(name, lora.seed, dtype, [rank, layer.ins])
    })?;
    let zeros = Tensor::new(
        dtype,
        [layer.outs, rank],
        vec![0; (layer.outs * rank * dtype.size_bytes()) as usize],
    );
    let b = init(B, &|_| zeros.clone())?;
    Ok((a, b))
}

/// Returns a matrix of uniform numbers between ∓1/√columns; see the module's text.
fn uniform(name: &str, seed: i64, dtype: DType, dims: [u64; 2]) -> Tensor {
    let key = Key::new(seed, stream(name));
    let bound = (dims[1] as f64).sqrt().recip();
    let unit = f64::from(1u32 << BITS);
    let element = |i| (2.0 * f64::from(key.draw(i)) / unit - 1.0) * bound;
    Tensor::rounded(dtype, &dims, (0..dims[0] * dims[1]).map(element))
}

/// Adds the product of one site and puts the sum in the place of its result.
fn add(
    b: &mut Builder,
    layer: &Linear,
    site: &Site,
    (weight_a, weight_b): (ValueId, ValueId),
    lora: &Lora,
    seed: Option<ValueId>,
    number: usize,
) -> Result<()> {
    b.prefix = format!("{}.lora", layer.module);
    b.loc = Default::default();
    let scopes = b.graph.node(site.product).loc.scopes.clone();
    std::sync::Arc::make_mut(&mut b.loc).scopes = scopes;
    let dtype = b.ty(weight_a).dtype;
    let y = site.result;
    let uses = b.graph.value(y).uses().to_vec();
    let mut x = cast_to(b, site.x, dtype)?;
    if site.x_transposed {
        x = transpose(b, x, vec![1, 0])?;
    }
    if let Some(seed) = seed {
        let ratio = constant(b, DType::F32, f64::from(lora.dropout));
        let name = match number {
            0 => format!("{}.stream", b.prefix),
            n => format!("{}.stream.{n}", b.prefix),
        };
        let number = b.constant(&name, Tensor::int(stream(&name)));
        x = b.op(&DROPOUT, &[x, ratio, seed, number])?;
    }
    let turn = Attrs::new().with("perm", vec![1, 0]);
    let a = b.emit(&TRANSPOSE, &[weight_a], turn.clone())?;
    let mut small = b.op(&matmul::MATMUL, &[x, a])?;
    let scale = lora.scale() * f64::from(site.alpha);
    if scale != 1.0 {
        let scale = constant(b, dtype, scale);
        small = b.mul(small, scale)?;
    }
    let wide = b.emit(&TRANSPOSE, &[weight_b], turn)?;
    let delta = b.op(&matmul::MATMUL, &[small, wide])?;
    let base = cast_to(b, y, dtype)?;
    let sum = b.add(base, delta)?;
    let sum = cast_to(b, sum, b.ty(y).dtype)?;
    for reader in uses {
        b.graph.set_operand(reader.node, reader.slot, Some(sum));
    }
    if b.graph.is_output(y) {
        let name = b.graph.value(y).name.clone();
        b.graph.rename_value(y, &format!("{name}/base"));
        b.graph.rename_value(sum, &name);
        let outputs = b.graph.outputs().iter();
        let outputs = outputs.map(|v| if *v == y { sum } else { *v }).collect();
        b.graph.set_outputs(outputs);
    }
    Ok(())
}

/// Returns a scalar that readers of the written file do not take for a parameter.
fn constant(b: &mut Builder, dtype: DType, value: f64) -> ValueId {
    let id = b.scalar(dtype, value);
    let name = b.graph.value(id).name.clone();
    b.graph
        .origins
        .entry(id)
        .or_insert_with(|| Origin::constant(&name));
    id
}

/// Casts a value; returns the value itself where it has that type.
fn cast_to(b: &mut Builder, v: ValueId, dtype: DType) -> Result<ValueId> {
    if b.ty(v).dtype == dtype {
        return Ok(v);
    }
    b.emit(&cast::CAST, &[v], Attrs::new().with("to", dtype))
}

#[cfg(test)]
mod tests;
