//! Generates missing inputs from a seed, so that they are valid for the graph.
//!
//! Floats are uniform in [-1, 1). Integers are at least 0 and less than the size of what they index: the smallest table or
//! number of classes that they reach through layout ops, else 2. Inputs of an optimizer are plausible: small learning rates,
//! step numbers from 1, squares that are not negative. Each input depends only on the seed and its own name.

use super::feed::Feed;
use super::named::Tensors;
use crate::rng::mix;
use ckpt_passes::Result;
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::analysis::{Binding, Sizes, planned_sizes};
use ckpt_passes::ir::op::Indices;
use ckpt_passes::ir::{DType, Graph, NodeId, Tensor, ValueId, float8};
use ckpt_passes::transform::optimizer::{APPLY, LOSS_SCALE};
use half::{bf16, f16};
use std::collections::BTreeMap;

/// Generates the inputs that `feed` lacks. Named sizes come from its inputs, then from `dims`, then from those that the graph
/// was planned for, then from defaults.
///
/// # Errors
/// Sizes that cannot be bound; a damaged record of sizes.
pub fn fill(graph: &Graph, feed: &mut Feed, dims: &[(String, i64)], seed: u64) -> Result<Binding> {
    let mut given = feed.sizes(graph);
    for (name, size) in dims {
        given.entry(name.clone()).or_insert(*size);
    }
    let named = dim_kinds(graph);
    for (name, size) in planned_sizes::of(graph)? {
        if named.contains_key(&name) {
            given.entry(name).or_insert(size);
        }
    }
    let given: Vec<(String, i64)> = given.into_iter().collect();
    let binding = match feed.missing(graph).is_empty() {
        true => Binding::of_run(graph, &given)?,
        false => Binding::new(graph, &given)?,
    };
    let sizes = Sizes::new(graph, &binding)?;
    let bounds = index_bounds(graph, &sizes);
    for id in graph.inputs() {
        let value = graph.value(*id);
        if feed.inputs.contains_key(&value.name) {
            continue;
        }
        let shape: Vec<u64> = sizes.dims(*id).iter().map(|d| *d as u64).collect();
        let below = bounds.get(id).copied().unwrap_or(2);
        let mut source = Source::new(seed, &value.name);
        source.kind = kind(graph, *id);
        feed.inputs.insert(
            value.name.clone(),
            source.tensor(value.ty().dtype, shape, below),
        );
    }
    Ok(binding)
}

/// The meaning of an input's numbers.
#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    Any,
    /// A learning rate, a step number, or a mean of squares, for an optimizer.
    Rate,
    Step,
    Square,
    /// That an update applies.
    Yes,
}

fn kind(graph: &Graph, input: ValueId) -> Numbers {
    match graph.value(input).name.as_str() {
        APPLY if graph.ty(input).dtype == DType::Bool => return Numbers::Yes,
        LOSS_SCALE => return Numbers::Square,
        _ => {}
    }
    let uses = graph.value(input).uses().iter();
    let mut updates = uses.filter(|u| graph.node(u.node).op.is_update());
    let Some(used) = updates.next() else {
        return Numbers::Any;
    };
    match graph.node(used.node).op.ins[used.slot].name {
        "lr" => Numbers::Rate,
        "step" => Numbers::Step,
        "square" | "mean_scales" | "square_scales" => Numbers::Square,
        _ => Numbers::Any,
    }
}

/// Generates all inputs of a graph.
///
/// # Errors
/// See [`fill`].
pub fn inputs(graph: &Graph, dims: &[(String, i64)], seed: u64) -> Result<Tensors> {
    let mut feed = Feed::default();
    fill(graph, &mut feed, dims, seed)?;
    Ok(feed.inputs)
}

/// Returns one more than the largest valid index, for each integer input that is used as an index.
pub fn index_bounds(graph: &Graph, sizes: &Sizes) -> BTreeMap<ValueId, i64> {
    let mut bounds = BTreeMap::new();
    for input in graph
        .inputs()
        .iter()
        .filter(|v| graph.ty(**v).dtype.is_int())
    {
        let mut seen = std::collections::BTreeSet::from([*input]);
        let mut stack = vec![*input];
        while let Some(value) = stack.pop() {
            for used in graph.value(value).uses() {
                if let Some(bound) = indexed(graph, sizes, used.node, used.slot) {
                    let least = bounds.entry(*input).or_insert(i64::MAX);
                    *least = bound.min(*least);
                    continue;
                }
                let node = graph.node(used.node);
                if node.op.is_layout() || node.op.indices == Indices::PassedOn {
                    stack.extend(node.outs.iter().filter(|v| seen.insert(**v)));
                }
            }
        }
    }
    bounds
}

/// Returns the length of the axis that operand `slot` of a node indexes; `None` if it indexes nothing.
fn indexed(graph: &Graph, sizes: &Sizes, id: NodeId, slot: usize) -> Option<i64> {
    let node = graph.node(id);
    let dims = |slot: usize| node.ins.get(slot).copied().flatten().map(|v| sizes.dims(v));
    let along = |slot: usize, axis: i64| {
        let dims = dims(slot)?;
        let axis = if axis < 0 {
            axis + dims.len() as i64
        } else {
            axis
        };
        dims.get(usize::try_from(axis).ok()?).copied()
    };
    match (node.op.indices, slot) {
        (Indices::OfAxis, 1) => along(0, node.attrs.opt_int("axis").unwrap_or(0)),
        (Indices::Tuples, 1) => dims(0)?.iter().copied().min(),
        (Indices::Classes, 1) => along(0, 1),
        (Indices::OfSize, 0) => node.attrs.opt_int("size"),
        (Indices::Depth, 0) => sizes.of(node.ins[1]?).ints.as_ref()?.first().copied(),
        _ => None,
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014), seeded by a number and a name.
struct Source {
    state: u64,
    kind: Numbers,
}

impl Source {
    fn new(seed: u64, name: &str) -> Source {
        let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ b as u64).wrapping_mul(0x0100_0000_01b3)
        });
        Source {
            state: seed ^ fnv,
            kind: Numbers::Any,
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// Returns a multiple of 2⁻²³ (exact in float32), uniform in [-1, 1). Squares are its magnitude, learning rates a 128th of
    /// that.
    fn float(&mut self) -> f64 {
        let x = (self.next() >> 40) as f64 / (1 << 23) as f64 - 1.0;
        match self.kind {
            Numbers::Rate => x.abs() / 128.0,
            Numbers::Square => x.abs(),
            Numbers::Any | Numbers::Step | Numbers::Yes => x,
        }
    }

    fn tensor(&mut self, dtype: DType, dims: Vec<u64>, below: i64) -> Tensor {
        let n = dims.iter().product::<u64>();
        let mut bytes = Vec::with_capacity((n * dtype.size_bytes()) as usize);
        for _ in 0..n {
            // An empty table has no valid index; any number will do.
            let int = (self.next() % below.max(1) as u64) as i64;
            let int = int + i64::from(self.kind == Numbers::Step);
            match dtype {
                DType::F32 => bytes.extend((self.float() as f32).to_le_bytes()),
                DType::F64 => bytes.extend(self.float().to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f64(self.float()).to_le_bytes()),
                DType::BF16 => bytes.extend(bf16::from_f64(self.float()).to_le_bytes()),
                _ if dtype.is_float8() => {
                    bytes.push(float8::encoded(dtype, self.float(), true));
                }
                DType::I64 | DType::U64 => bytes.extend(int.to_le_bytes()),
                DType::I32 | DType::U32 => {
                    bytes.extend((int.min(i32::MAX as i64) as i32).to_le_bytes())
                }
                DType::I16 | DType::U16 => {
                    bytes.extend((int.min(i16::MAX as i64) as i16).to_le_bytes())
                }
                // Codes of a mean of squares: none near 0, which the step divides by.
                DType::U8 if self.kind == Numbers::Square => bytes.push(128 | int as u8),
                DType::I8 | DType::U8 => bytes.push(int.min(i8::MAX as i64) as u8),
                DType::Bool => {
                    bytes.push(((int & 1) != 0 || self.kind == Numbers::Yes) as u8);
                }
                _ => {}
            }
        }
        Tensor::new(dtype, dims, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::compile::{Request, compile};
    use ckpt_passes::driver::Watch;
    use ckpt_passes::transform::loss::Loss;
    use ckpt_passes::transform::tile::{Tile, Tiles};

    #[test]
    fn indices_stay_below_the_smallest_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gpt2/model.onnx");
        let mut graph = crate::frontend::read(std::path::Path::new(path))
            .unwrap()
            .graph;
        ckpt_passes::transform::infer::infer(&mut graph).unwrap();
        let dims = [("batch".to_string(), 3), ("seq".to_string(), 50)];
        let made = inputs(&graph, &dims, 7).unwrap();
        let ids = &made["input_ids"];
        assert_eq!(ids.dims, [3, 50]);
        let all: Vec<i64> = (0..150).filter_map(|i| ids.get_i64(i)).collect();
        assert!(all.len() == 150 && all.iter().all(|i| (0..347).contains(i)));
        assert!(all.iter().any(|i| *i > 100), "the whole table is in reach");
        assert_eq!(inputs(&graph, &dims, 7).unwrap(), made);
        assert_ne!(inputs(&graph, &dims, 8).unwrap(), made);
    }

    #[test]
    fn sizes_are_those_that_the_graph_was_planned_for() {
        let source =
            "graph @g typed (%x: f32[batch, seq]) -> (%y) {\n  %y = Tanh %x : f32[batch, seq]\n}\n";
        let mut graph = ckpt_passes::text::parse(source).unwrap();
        let planned = [("batch", 4), ("seq", 9), ("gone", 2)];
        planned_sizes::record(&mut graph, planned.into_iter());
        assert_eq!(inputs(&graph, &[], 0).unwrap()["x"].dims, [4, 9]);
        let given = [("seq".to_string(), 5)];
        assert_eq!(inputs(&graph, &given, 0).unwrap()["x"].dims, [4, 5]);
    }

    #[test]
    fn inputs_do_not_depend_on_how_the_step_is_computed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gpt2/model.onnx");
        let made = |loss: Loss, tile: Tiles, fuse: bool| {
            let mut graph = crate::frontend::read(std::path::Path::new(path))
                .unwrap()
                .graph;
            let request = Request {
                loss,
                tile,
                fuse,
                drop_outputs: vec!["logits".into()],
                ..Request::default()
            };
            compile(&mut graph, &request, &mut Watch::default()).unwrap();
            inputs(&graph, &[("batch".into(), 2), ("seq".into(), 6)], 1).unwrap()
        };
        let cut = |loss: Tile, mlp: Tile| Tiles { loss, mlp };
        for loss in [Loss::CausalLm, Loss::CrossEntropy] {
            let whole = made(loss.clone(), Tiles::default(), true);
            let labels = &whole["labels"];
            assert!((0..12).any(|i| labels.get_i64(i) > Some(100)), "{labels:?}");
            for (tile, fuse) in [
                (cut(Tile::Chunks(3), Tile::Off), true),
                (cut(Tile::Chunks(3), Tile::Chunks(2)), true),
                (cut(Tile::Off, Tile::Chunks(2)), false),
            ] {
                assert!(made(loss.clone(), tile, fuse) == whole, "{tile:?}");
            }
        }
    }

    #[test]
    fn floats_are_in_range() {
        let mut source = Source::new(1, "x");
        let tensor = source.tensor(DType::F32, vec![1000], 2);
        let all: Vec<f64> = (0..1000).filter_map(|i| tensor.get_f64(i)).collect();
        assert!(all.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!(all.iter().any(|x| *x > 0.9) && all.iter().any(|x| *x < -0.9));
    }
}
