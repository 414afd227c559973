//! Adapters in a set of tensors, and weights with adapters merged into them.

use crate::tensors::Tensors;
use ckpt_passes::ir::{DType, Graph, Tensor, ValueId};
use ckpt_passes::transform::lora::{A, B, Lora, linear_layers};
use ckpt_passes::transform::optimizer::UPDATED;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// What PEFT puts before the names of modules.
pub const PEFT_PREFIX: &str = "base_model.model.";

/// The adapter of one weight.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// The name of the module.
    pub module: String,
    /// [rank, in].
    pub a: Tensor,
    /// [out, rank].
    pub b: Tensor,
    /// The initializer that it belongs to.
    pub weight: ValueId,
    /// The initializer is [out, in].
    pub out_first: bool,
    scale: f64,
}

/// Matrices of adapters, by module: A and B.
pub type Pairs = BTreeMap<String, [Option<Tensor>; 2]>;

/// Parts a set into matrices of adapters, by module, and all other tensors. A value after the step wins over the one before.
pub fn split(tensors: &Tensors) -> (Pairs, Tensors) {
    let (mut pairs, mut others) = (Pairs::new(), Tensors::new());
    for (name, tensor) in tensors {
        let plain = name.strip_suffix(UPDATED).unwrap_or(name);
        let plain = plain.strip_prefix(PEFT_PREFIX).unwrap_or(plain);
        let ends = [(A, 0), (B, 1)];
        let module = ends
            .iter()
            .find_map(|(end, slot)| Some((plain.strip_suffix(end)?, *slot)));
        match module {
            Some((module, slot)) => {
                pairs.entry(module.into()).or_default()[slot] = Some(tensor.clone())
            }
            None => {
                others.insert(name.clone(), tensor.clone());
            }
        }
    }
    (pairs, others)
}

/// Returns the adapters of a typed model.
///
/// # Errors
/// An adapter that lacks a matrix, belongs to no linear layer of the model or does not fit it; adapters without a scale.
pub fn adapters(graph: &Graph, pairs: Pairs, lora: Option<&Lora>) -> Result<Vec<Adapter>> {
    if pairs.is_empty() {
        return Ok(Vec::new());
    }
    let Some(lora) = lora else {
        let what = "the weights hold adapters, and nothing tells their scale";
        return Err(Error::usage("lora", what).help("give --lora as in training"));
    };
    let layers = linear_layers(graph)?;
    let layers: BTreeMap<&str, _> = layers.iter().map(|l| (l.module.as_str(), l)).collect();
    let mut adapters = Vec::new();
    for (module, pair) in pairs {
        let [Some(a), Some(b)] = pair else {
            let what = format!("the adapter of `{module}` lacks one of its two matrices");
            return Err(
                Error::usage("lora", what).expected(format!("`{module}{A}` and `{module}{B}`"))
            );
        };
        let Some(layer) = layers.get(module.as_str()) else {
            let what = format!("the model has no linear layer `{module}` for an adapter");
            return Err(Error::usage("lora", what).help(
                "give the model that was trained; `ckpt-opt inspect MODEL` lists its parameters",
            ));
        };
        let (rank, ins, outs) = (u64::from(lora.rank), layer.ins, layer.outs);
        if a.dims != [rank, ins] || b.dims != [outs, rank] {
            let what = format!("the adapter of `{module}` does not fit the layer and --lora");
            return Err(Error::usage("lora", what)
                .expected(format!("[{rank}, {ins}] and [{outs}, {rank}]"))
                .found(format!("{:?} and {:?}", a.dims, b.dims)));
        }
        adapters.push(Adapter {
            module,
            a,
            b,
            weight: layer.weight,
            out_first: layer.out_first,
            scale: lora.scale(),
        });
    }
    Ok(adapters)
}

impl Adapter {
    /// Returns a weight plus `scale·B·A`, in the weight's layout. All sums are in float32 and rounded once to the
    /// weight's type.
    ///
    /// # Errors
    /// A weight whose file is absent, or that is quantised.
    pub fn merged(&self, weight: &Tensor) -> Result<Tensor> {
        if !weight.dtype.is_float() {
            let what = format!(
                "the weight of `{}` is quantised: no adapter can be merged into it",
                self.module
            );
            return Err(Error::usage("lora", what)
                .help("write the adapters alone with --to peft, or merge them into the weights before they were quantised"));
        }
        let absent = || {
            let what = format!("the weight of `{}` is absent", self.module);
            Error::environment("weights", what)
        };
        let [mut a, mut b] = [
            numbers(&self.a).ok_or_else(absent)?,
            numbers(&self.b).ok_or_else(absent)?,
        ];
        let (rank, ins, outs) = (
            self.a.dims[0] as usize,
            self.a.dims[1] as usize,
            self.b.dims[0] as usize,
        );
        // Rows of the result are sums of rows of A, or of columns of B.
        let (rows, columns) = match self.out_first {
            true => (outs, ins),
            false => {
                (a, b) = (turned(&b, outs, rank), turned(&a, rank, ins));
                (ins, outs)
            }
        };
        let mut sum = numbers(weight).ok_or_else(absent)?;
        let mut delta = vec![0.0f32; columns];
        for row in 0..rows {
            delta.fill(0.0);
            for k in 0..rank {
                let factor = b[row * rank + k];
                let from = &a[k * columns..(k + 1) * columns];
                for (d, x) in delta.iter_mut().zip(from) {
                    *d += factor * x;
                }
            }
            for (s, d) in sum[row * columns..].iter_mut().zip(&delta) {
                *s += self.scale as f32 * d;
            }
        }
        Ok(Tensor::rounded(
            weight.dtype,
            &weight.dims,
            sum.into_iter().map(f64::from),
        ))
    }
}

/// Returns all elements of a floating-point tensor.
fn numbers(tensor: &Tensor) -> Option<Vec<f32>> {
    let bytes = tensor.bytes()?;
    let f32s = bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    Some(match tensor.dtype {
        DType::F32 => f32s.collect(),
        _ => (0..tensor.elements() as usize)
            .filter_map(|i| Some(tensor.get_f64(i)? as f32))
            .collect(),
    })
}

/// Returns the transpose of a matrix.
fn turned(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let at = |i: usize| matrix[i % rows * columns + i / rows];
    (0..rows * columns).map(at).collect()
}
