//! Matches the tensors of a file to the inputs of a graph.
//!
//! Keys are input names, `in.NAME`, or `cot.NAME` for the input `NAME.cotangent`. A tensor with the name of an initializer
//! replaces that weight. A tensor that matches nothing is ignored, and a note lists it.

use super::named::Tensors;
use ckpt_passes::analysis::gradients::{self, STEP, Start};
use ckpt_passes::ir::{DType, Graph, Tensor, Ty, ValueId};
use ckpt_passes::transform::optimizer::{APPLY, LOSS_SCALE, RESTART};
use ckpt_passes::{Error, Result};
use half::{bf16, f16};
use std::collections::BTreeMap;

/// Tensors matched to a graph.
#[derive(Clone, Debug, Default)]
pub struct Feed {
    /// Tensors for inputs of the graph, by input name without prefix.
    pub inputs: Tensors,
    /// Tensors that replace weights of the graph, by initializer name.
    pub weights: Tensors,
    /// Notes about unused tensors.
    pub notes: Vec<String>,
}

/// Returns the types of tensors, by the names of the inputs that they may match.
pub fn input_types(tensors: &Tensors) -> BTreeMap<String, Ty> {
    let name = |key: &str| key.strip_prefix("in.").unwrap_or(key).to_string();
    tensors
        .iter()
        .filter(|(key, _)| !key.starts_with("cot.") && !key.starts_with("out."))
        .map(|(key, tensor)| (name(key), tensor.ty()))
        .collect()
}

impl Feed {
    /// Matches `tensors` to inputs and weights of a typed graph.
    ///
    /// # Errors
    /// A tensor of the wrong element type or shape; two for one input.
    pub fn new(graph: &Graph, tensors: Tensors) -> Result<Feed> {
        let inputs: BTreeMap<&str, ValueId> = graph
            .inputs()
            .iter()
            .map(|v| (graph.value(*v).name.as_str(), *v))
            .collect();
        let weights: BTreeMap<&str, ValueId> =
            graph.inits().map(|(id, v)| (v.name.as_str(), id)).collect();
        let mut feed = Feed::default();
        let mut ignored = Vec::new();
        for (key, tensor) in tensors {
            let cotangent = key.strip_prefix("cot.").map(|n| format!("{n}.cotangent"));
            let names = [
                Some(key.as_str()),
                key.strip_prefix("in."),
                cotangent.as_deref(),
            ];
            let input = names
                .into_iter()
                .flatten()
                .find_map(|n| inputs.get_key_value(n));
            if let Some((name, id)) = input {
                check(graph.ty(*id), &tensor, &format!("input `{name}`"))?;
                if feed.inputs.insert(name.to_string(), tensor).is_some() {
                    return Err(Error::usage(
                        "input",
                        format!("two tensors are given for input `{name}`"),
                    )
                    .found(format!("`{key}` and another name of it")));
                }
            } else if let Some((name, id)) = weights.get_key_value(key.as_str()) {
                check(graph.ty(*id), &tensor, &format!("weight `{name}`"))?;
                feed.weights.insert(name.to_string(), tensor);
            } else {
                ignored.push(key);
            }
        }
        if !ignored.is_empty() {
            feed.notes.push(format!(
                "ignored, for they are no inputs: {}",
                ignored.join(", ")
            ));
        }
        Ok(feed)
    }

    /// Sets what training starts from where it is missing: optimizer states ([`gradients::start`]), step number 1, a scale
    /// of the loss of 1, and that the step applies. A master weight stays missing where its parameter has no data.
    pub fn start_training(&mut self, graph: &Graph) {
        for id in gradients::states(graph) {
            let name = &graph.value(id).name;
            if self.inputs.contains_key(name) {
                continue;
            }
            let first = match gradients::start(graph, id) {
                Start::Zeros => zeros(graph.ty(id)),
                Start::Widened(parameter) => {
                    let parameter = graph.value(parameter);
                    let weight = self.weights.get(&parameter.name);
                    let weight = weight.or_else(|| parameter.tensor());
                    let whole = weight.and_then(widened);
                    // A rank's slice or part is made where the rank is known.
                    whole.filter(|_| graph.ty(id).dims == parameter.ty().dims)
                }
            };
            self.inputs
                .extend(first.map(|tensor| (name.clone(), tensor)));
        }
        let named = |name: &str| graph.inputs().iter().any(|v| graph.value(*v).name == name);
        let defaults = [
            (STEP, gradients::counts_steps(graph), Tensor::int(1)),
            (APPLY, named(RESTART), Tensor::new(DType::Bool, [], vec![1])),
            (LOSS_SCALE, true, Tensor::scalar(DType::F32, 1.0)),
        ];
        for (name, is_meant, tensor) in defaults {
            if is_meant && named(name) {
                self.inputs.entry(name.into()).or_insert(tensor);
            }
        }
    }

    /// Returns the inputs without a tensor.
    pub fn missing<'g>(&self, graph: &'g Graph) -> Vec<(&'g str, &'g Ty)> {
        let all = graph
            .inputs()
            .iter()
            .map(|v| (graph.value(*v).name.as_str(), graph.ty(*v)));
        all.filter(|(name, _)| !self.inputs.contains_key(*name))
            .collect()
    }

    /// Checks that no input is missing.
    ///
    /// # Errors
    /// Lists all missing inputs with their types.
    pub fn complete(&self, graph: &Graph) -> Result<()> {
        let missing = self.missing(graph);
        if missing.is_empty() {
            return Ok(());
        }
        let list: Vec<String> = missing
            .iter()
            .map(|(name, ty)| format!("{name}: {ty}"))
            .collect();
        let error = Error::usage(
            "input",
            format!(
                "{} of {} inputs are missing",
                missing.len(),
                graph.inputs().len()
            ),
        )
        .expected(list.join("\n"));
        let notes = self.notes.iter();
        Err(notes.fold(error, |e, note| e.found(note.clone())).help(
            "give them with --inputs FILE (npz or safetensors), or make them up with --seed N",
        ))
    }

    /// Returns the named sizes that the given inputs determine.
    pub fn sizes(&self, graph: &Graph) -> BTreeMap<String, i64> {
        let mut sizes = BTreeMap::new();
        for id in graph.inputs() {
            let value = graph.value(*id);
            let Some(tensor) = self.inputs.get(&value.name) else {
                continue;
            };
            for (dim, size) in value.ty().dims.iter().zip(&tensor.dims) {
                if let Some(name) = dim.as_symbol() {
                    sizes.entry(name.to_string()).or_insert(*size as i64);
                }
            }
        }
        sizes
    }
}

/// Returns zeros of a type; `None` if it names sizes.
fn zeros(ty: &Ty) -> Option<Tensor> {
    let dims: Vec<u64> = ty.static_dims()?.iter().map(|d| *d as u64).collect();
    let bytes = dims.iter().product::<u64>() * ty.dtype.size_bytes();
    Some(Tensor::new(ty.dtype, dims, vec![0; bytes as usize]))
}

/// Returns a tensor in float32, if it is of 16 bits and its contents are here.
pub fn widened(tensor: &Tensor) -> Option<Tensor> {
    let halves = tensor.bytes()?.chunks_exact(2).map(|b| [b[0], b[1]]);
    let bytes: Vec<u8> = match tensor.dtype {
        DType::BF16 => halves
            .flat_map(|b| bf16::from_le_bytes(b).to_f32().to_le_bytes())
            .collect(),
        DType::F16 => halves
            .flat_map(|b| f16::from_le_bytes(b).to_f32().to_le_bytes())
            .collect(),
        _ => return None,
    };
    Some(Tensor::new(DType::F32, tensor.dims.clone(), bytes))
}

fn check(ty: &Ty, tensor: &Tensor, what: &str) -> Result<()> {
    let fits = |(dim, size): (&ckpt_passes::ir::Dim, &u64)| {
        dim.as_const().is_none_or(|n| n == *size as i64)
    };
    let same = ty.dtype == tensor.dtype && ty.rank() == tensor.dims.len();
    if same && ty.dims.iter().zip(&tensor.dims).all(fits) {
        return Ok(());
    }
    Err(
        Error::usage("input", format!("{what} cannot take this tensor"))
            .expected(ty.to_string())
            .found(tensor.ty().to_string()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::text;

    fn graph() -> Graph {
        text::parse(
            "graph @g typed (%x: f32[n, 2], %y.cotangent: f32[n, 2]) -> (%y) {
  init %w : f32[2] = [1, 2]
  %y = Mul %x, %w : f32[n, 2]
}
",
        )
        .unwrap()
    }

    fn floats(dims: &[u64]) -> Tensor {
        Tensor::new(
            DType::F32,
            dims,
            vec![0; 4 * dims.iter().product::<u64>() as usize],
        )
    }

    #[test]
    fn keys_name_inputs_cotangents_and_weights() {
        let g = graph();
        let keys = [
            ("in.x", vec![3, 2]),
            ("cot.y", vec![3, 2]),
            ("w", vec![2]),
            ("out.y", vec![1]),
        ];
        let tensors = keys
            .iter()
            .map(|(k, d)| (k.to_string(), floats(d)))
            .collect();
        let feed = Feed::new(&g, tensors).unwrap();
        assert_eq!(feed.inputs.keys().collect::<Vec<_>>(), ["x", "y.cotangent"]);
        assert!(feed.weights.contains_key("w") && feed.notes[0].contains("out.y"));
        assert_eq!(feed.sizes(&g)["n"], 3);
        feed.complete(&g).unwrap();
    }

    #[test]
    fn errors_state_the_types_of_missing_and_wrong_inputs() {
        let g = graph();
        let one = Feed::new(&g, [("x".to_string(), floats(&[1, 2]))].into()).unwrap();
        let e = one.complete(&g).unwrap_err();
        assert!(e.to_string().contains("y.cotangent: f32[n, 2]"), "{e}");
        let wrong = |tensors: &[(&str, Tensor)]| {
            Feed::new(
                &g,
                tensors
                    .iter()
                    .map(|(k, t)| (k.to_string(), t.clone()))
                    .collect(),
            )
            .unwrap_err()
            .exit_code()
        };
        assert_eq!(wrong(&[("x", floats(&[1, 3]))]), 2);
        assert_eq!(wrong(&[("x", Tensor::ints(&[1]))]), 2);
        assert_eq!(
            wrong(&[("x", floats(&[1, 2])), ("in.x", floats(&[1, 2]))]),
            2
        );
    }
}
