//! Typed graphs over all op rows: one call of an op, or a random chain of calls.
//!
//! Every graph comes with contents for its inputs, so that it can also be run. Sizes are small; with `symbolic` the
//! sizes of the inputs are names, bound by [`SIZES`].

use super::Random;
use super::recipes::{self, In, Recipe};
use crate::error::Result;
use crate::ir::{DType, Dim, Graph, Phase, Tensor, Ty, ValueId};
use crate::ops::{Builder, EmitExt};

/// The names of sizes in symbolic models, and their numbers.
pub const SIZES: [(&str, i64); 3] = [("two", 2), ("three", 3), ("four", 4)];

/// A graph and what to run it on.
pub struct Model {
    /// The graph to run.
    pub graph: Graph,
    /// Row-major contents of each input, in the order of the inputs, with its sizes.
    pub feeds: Vec<(ValueId, Vec<i64>, Vec<f64>)>,
}

/// A tensor of a floating-point type, rounded to nearest.
pub fn tensor(dtype: DType, dims: &[i64], values: &[f64]) -> Tensor {
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|v| {
            Tensor::scalar(dtype, *v)
                .bytes()
                .map(|b| b.to_vec())
                .unwrap_or_default()
        })
        .collect();
    Tensor::new(
        dtype,
        dims.iter().map(|d| *d as u64).collect::<Vec<_>>(),
        bytes,
    )
}

fn ints(dtype: DType, dims: &[i64], values: &[i64]) -> Tensor {
    let floats: Vec<f64> = values.iter().map(|v| *v as f64).collect();
    tensor(dtype, dims, &floats)
}

/// What a model is made with.
struct Maker<'r> {
    r: &'r mut Random,
    dtype: DType,
    symbolic: bool,
    feeds: Vec<(ValueId, Vec<i64>, Vec<f64>)>,
    /// Floating-point values of the model's type and their sizes.
    pool: Vec<(ValueId, Vec<i64>)>,
    made: usize,
}

impl Maker<'_> {
    fn dim(&self, n: i64) -> Dim {
        let name = SIZES.iter().find(|(_, size)| self.symbolic && *size == n);
        name.map_or(Dim::from(n), |(name, _)| Dim::symbol(name))
    }

    /// A value for an operand: an input, a weight, a constant, or (only `Real`) something computed before.
    fn operand(&mut self, b: &mut Builder, of: In, weights: bool) -> Option<ValueId> {
        let dims: &[i64] = match of {
            In::Not => return None,
            In::Real(dims) | In::Positive(dims) | In::Large(dims) | In::Truth(dims) => dims,
            In::Ints(v) => return Some(b.ints(v)),
            In::Int(v) => return Some(b.int(v)),
            In::Table(dims, v) => return Some(b.constant("table", ints(DType::I64, dims, v))),
            In::Bytes(dims, v) => return Some(b.constant("bytes", ints(DType::U8, dims, v))),
            In::Scales(dims) => {
                let elements = dims.iter().product::<i64>();
                let values: Vec<f64> = (1..=elements).map(|i| i as f64 + 0.5).collect();
                let wide = crate::ops::rule::compute_type(self.dtype);
                return Some(b.constant("scales", tensor(wide, dims, &values)));
            }
            In::Float8(dims) => {
                let elements = dims.iter().product::<i64>();
                let sign = |i: i64| if i % 2 == 0 { -0.5 } else { 0.5 };
                let values: Vec<f64> = (1..=elements).map(|i| sign(i) * i as f64).collect();
                return Some(b.constant("float8", tensor(DType::F8E4M3FN, dims, &values)));
            }
            In::Narrow(dims) => {
                let dims: Vec<u64> = dims.iter().map(|d| *d as u64).collect();
                let count = dims.iter().product::<u64>();
                let zeros = (0..count).map(|_| 0.0);
                return Some(b.constant("narrow", Tensor::rounded(DType::BF16, &dims, zeros)));
            }
            In::Bools(dims, v) => return Some(b.constant("mask", ints(DType::Bool, dims, v))),
            In::Scalar(v) => return Some(b.scalar(self.dtype, v)),
        };
        if matches!(of, In::Real(_)) && self.r.below(10) < 7 {
            let fit: Vec<ValueId> = self
                .pool
                .iter()
                .filter(|(_, d)| d == dims)
                .map(|(v, _)| *v)
                .collect();
            if !fit.is_empty() {
                return Some(fit[fit.len() - 1 - self.r.below(fit.len().min(4))]);
            }
        }
        self.made += 1;
        let values = recipes::contents(of, self.r, self.made)?;
        if weights && matches!(of, In::Real(_)) && self.r.below(2) == 0 {
            let name = format!("w{}", self.made);
            return Some(b.graph.add_init(&name, tensor(self.dtype, dims, &values)));
        }
        let ty = Ty::new(
            self.dtype,
            dims.iter().map(|d| self.dim(*d)).collect::<Vec<_>>(),
        );
        let id = b.graph.add_input(&format!("x{}", self.made), Some(ty));
        self.feeds.push((id, dims.to_vec(), values));
        Some(id)
    }

    /// Emits one call; `Ok(None)` where the op does not take these operands (symbolic sizes that cannot be compared).
    fn call(&mut self, b: &mut Builder, recipe: &Recipe, weights: bool) -> Result<Vec<ValueId>> {
        let row = recipe.row().expect("a recipe names a row");
        let ins = recipe
            .ins
            .iter()
            .map(|of| self.operand(b, *of, weights))
            .collect();
        b.emit_n(row, ins, recipe.attrs(self.dtype), recipe.outs)
    }

    fn remember(&mut self, graph: &Graph, outs: &[ValueId]) {
        for out in outs {
            let ty = graph.ty(*out);
            let size = |name: &str| {
                SIZES
                    .iter()
                    .find(|(n, _)| *n == name)
                    .map(|(_, size)| *size)
            };
            let dims: Option<Vec<i64>> = ty.dims.iter().map(|d| d.eval(&size)).collect();
            if let (true, Some(dims)) = (ty.dtype == self.dtype, dims) {
                self.pool.push((*out, dims));
            }
        }
    }
}

/// One call: floating-point operands are inputs, results are outputs.
///
/// # Errors
/// The op refuses its own recipe.
pub fn single(recipe: &Recipe, dtype: DType, r: &mut Random) -> Result<Model> {
    let mut graph = Graph::new(recipe.op);
    let mut maker = Maker {
        r,
        dtype,
        symbolic: false,
        feeds: Vec::new(),
        pool: Vec::new(),
        made: 0,
    };
    let outs = maker.call(&mut Builder::new(&mut graph), recipe, false)?;
    graph.set_outputs(outs);
    graph.phase = Phase::Typed;
    let feeds = maker.feeds;
    Ok(Model { graph, feeds })
}

/// A chain of about `calls` calls of ops that `takes` accepts, with weights; what nobody reads is an output.
pub fn random(
    r: &mut Random,
    calls: usize,
    dtype: DType,
    symbolic: bool,
    takes: &dyn Fn(&Recipe) -> bool,
) -> Model {
    let usable: Vec<&Recipe> = recipes::ALL
        .iter()
        .filter(|x| x.row().is_some() && takes(x))
        .collect();
    let mut graph = Graph::new("random");
    let mut maker = Maker {
        r,
        dtype,
        symbolic,
        feeds: Vec::new(),
        pool: Vec::new(),
        made: 0,
    };
    let mut b = Builder::new(&mut graph);
    for _ in 0..calls {
        let recipe = usable[maker.r.below(usable.len())];
        match maker.call(&mut b, recipe, true) {
            Ok(outs) => maker.remember(b.graph, &outs),
            Err(_) => {
                // The node is there, untyped; symbolic sizes did not fit.
                let last = *b.graph.order().last().expect("just emitted");
                b.graph.remove_nodes(&|id| id == last);
            }
        }
    }
    let ends: Vec<ValueId> = graph
        .nodes()
        .flat_map(|(_, n)| n.outs.iter().copied())
        .filter(|v| graph.value(*v).uses().is_empty())
        .collect();
    graph.set_outputs(ends);
    graph.phase = Phase::Typed;
    let feeds = maker.feeds;
    Model { graph, feeds }
}
