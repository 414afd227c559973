//! Every kernel keeps the promise of its row: the types that `infer` gave, the storages and strides that `memory` gave,
//! and its temporaries to the byte.
use crate::support::torch;

use ckpt_opt::runtime::draws::Draws;
use ckpt_opt::runtime::swap_store::SwapStore;
use ckpt_opt::runtime::{convert, kernels};
use ckpt_passes::analysis::{Binding, Sizes};
use ckpt_passes::ir::op::{MemoryCx, Place, Sized};
use ckpt_passes::ir::{Attrs, DType, Def, Dim, Graph, NodeId, Ty, ValueId};
use ckpt_passes::ops::accumulate::{ACCUMULATE, ADD_PRODUCT};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::testing::models::{Model, single};
use ckpt_passes::testing::recipes::{In, Set};
use ckpt_passes::testing::{Random, recipes};
use ckpt_torch::{memory, storage_id};
use std::collections::{BTreeMap, BTreeSet};
use tch::Tensor;

/// How the contents of a graph input lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    RowMajor,
    /// Axes in reverse order.
    Reversed,
    /// Every other element of a larger tensor.
    Holes,
    /// The first axis has stride 0.
    Repeated,
}

impl Lie {
    fn apply(self, x: &Tensor) -> Tensor {
        let rank = x.dim() as i64;
        let reverse: Vec<i64> = (0..rank).rev().collect();
        match self {
            Lie::RowMajor => x.copy(),
            _ if rank == 0 => x.copy(),
            Lie::Reversed => x.permute(&reverse).contiguous().permute(&reverse),
            Lie::Holes => {
                let last = x.size()[rank as usize - 1];
                let twice = Tensor::stack(&[x, x], -1).flatten(rank - 1, rank);
                twice.slice(rank - 1, 0, 2 * last, 2)
            }
            Lie::Repeated => x.narrow(0, 0, x.size()[0].min(1)).expand(x.size(), false),
        }
    }
}

fn sized(graph: &Graph, sizes: &Sizes, id: ValueId, x: &Tensor) -> Sized {
    Sized {
        dtype: graph.ty(id).dtype,
        dims: x.size(),
        strides: x.stride(),
        ints: sizes.of(id).ints.clone(),
    }
}

/// Strides agree on every axis that has more than one element.
fn same_strides(x: &Tensor, strides: &[i64]) -> bool {
    let (size, found) = (x.size(), x.stride());
    x.numel() == 0 || (0..size.len()).all(|i| size[i] == 1 || found[i] == strides[i])
}

/// Runs one node's kernel and tells what it broke.
fn check(
    graph: &Graph,
    sizes: &Sizes,
    id: NodeId,
    values: &mut BTreeMap<ValueId, Tensor>,
) -> Vec<String> {
    let node = graph.node(id);
    let ins: Vec<Option<&Tensor>> = node.ins.iter().map(|v| v.map(|v| &values[&v])).collect();
    let state = (&Draws::default(), &SwapStore::default());
    let cx = kernels::KernelCx::new(node.op, &node.attrs, &ins, node.outs.len(), state);
    let kernel = kernels::find(node.op).unwrap();
    memory::reset_peak();
    let before = memory::live_bytes();
    let results = kernel(&cx).unwrap_or_else(|e| panic!("{}: {e}", graph.describe(id)));
    let (peak, after) = (memory::peak_bytes() - before, memory::live_bytes() - before);

    let mut broken = Vec::new();
    let sized_ins: Vec<Option<Sized>> = node
        .ins
        .iter()
        .map(|v| v.map(|v| sized(graph, sizes, v, &values[&v])))
        .collect();
    let outs: Vec<Sized> = node
        .outs
        .iter()
        .zip(&results)
        .map(|(v, x)| Sized::contiguous(graph.ty(*v).dtype, x.size()))
        .collect();
    let footprint = (node.op.memory)(&MemoryCx {
        attrs: &node.attrs,
        ins: &sized_ins,
        outs: &outs,
        device: cx.device,
    });
    let mut fresh_bytes = 0;
    for (i, (place, x)) in footprint.outs.iter().zip(&results).enumerate() {
        let ty = graph.ty(node.outs[i]);
        if convert::dtype(x.kind()) != Some(ty.dtype) {
            broken.push(format!("result {i} is {:?}, typed {ty}", x.kind()));
        }
        let data_decides = ty.dims.iter().any(|d| d.to_string().contains('?'));
        if !data_decides && x.size() != sizes.of(node.outs[i]).dims {
            broken.push(format!("result {i} is {:?}, typed {ty}", x.size()));
        }
        match place {
            Place::Fresh => {
                fresh_bytes += outs[i].bytes();
                if !x.is_contiguous() {
                    broken.push(format!("result {i} has strides {:?}", x.stride()));
                }
            }
            Place::Outside => {
                if !x.is_contiguous() {
                    broken.push(format!("result {i} has strides {:?}", x.stride()));
                }
            }
            Place::View { of, strides } => {
                if !same_strides(x, strides) {
                    let found = x.stride();
                    broken.push(format!("view {i} has strides {found:?}, not {strides:?}"));
                }
                let base = ins[*of].unwrap();
                if x.numel() > 0 && storage_id(x).unwrap() != storage_id(base).unwrap() {
                    broken.push(format!("view {i} is not of operand {of}"));
                }
            }
        }
    }
    if after != fresh_bytes {
        broken.push(format!("keeps {after} bytes, not {fresh_bytes}"));
    }
    if peak != after + footprint.temp_bytes {
        let found = peak - after;
        broken.push(format!(
            "takes {found} temporary bytes, not {}",
            footprint.temp_bytes
        ));
    }
    for slot in &footprint.in_place_operands {
        let what = written_over(&cx, *slot, &results, footprint.temp_bytes);
        broken.extend(what.map(|what| format!("over operand {slot}: {what}")));
    }
    let operands: Vec<String> = ins
        .iter()
        .map(|x| {
            x.map_or("-".into(), |x| {
                format!("{:?}{:?}:{:?}", x.kind(), x.size(), x.stride())
            })
        })
        .collect();
    let place = format!(
        "{} {:?} ({})",
        node.op.name,
        node.attrs,
        operands.join(", ")
    );
    for (v, x) in node.outs.iter().zip(results) {
        values.insert(*v, x);
    }
    broken
        .into_iter()
        .map(|b| format!("{place}: {b}"))
        .collect()
}

/// Runs a kernel with its first result over a copy of operand `slot`; tells what differs from `expected`.
fn written_over(
    cx: &kernels::KernelCx,
    slot: usize,
    expected: &[Tensor],
    temp_bytes: u64,
) -> Option<String> {
    let operand = cx.ins[slot].unwrap().copy();
    let mut ins = cx.ins.to_vec();
    ins[slot] = Some(&operand);
    let over = kernels::KernelCx {
        ins: &ins,
        overwrites: Some(slot),
        ..*cx
    };
    memory::reset_peak();
    let before = memory::live_bytes();
    let results = kernels::find(cx.op).unwrap()(&over).unwrap_or_else(|e| panic!("{e}"));
    let (peak, after) = (memory::peak_bytes() - before, memory::live_bytes() - before);
    let others: usize = results[1..]
        .iter()
        .map(|x| x.numel() * x.kind().elt_size_in_bytes())
        .sum();
    let bits = |x: &Tensor| ckpt_torch::bytes::read(x).unwrap();
    if results[0].numel() > 0 && storage_id(&results[0]).unwrap() != storage_id(&operand).unwrap() {
        return Some("the result is elsewhere".into());
    }
    if (after, peak) != (others as u64, others as u64 + temp_bytes) {
        return Some(format!("keeps {after} bytes and takes {peak}"));
    }
    let same = |(a, b): (&Tensor, &Tensor)| a.size() == b.size() && bits(a) == bits(b);
    (!results.iter().zip(expected).all(same)).then(|| "other bits".into())
}

/// Runs every node of a graph, inputs lying as `lie` says, and tells what was broken.
fn check_all(model: &Model, dims: &[(String, i64)], lie: Lie) -> Vec<String> {
    let _no_grad = tch::no_grad_guard();
    let graph = &model.graph;
    // A size that the data decide needs a number here; only the typing of its own node would read it.
    let decided = graph.values().flat_map(|(_, v)| v.ty().dims.iter());
    let decided = decided
        .map(ToString::to_string)
        .filter(|d| d.starts_with('?'));
    let decided: BTreeSet<(String, i64)> = decided.map(|name| (name, 16)).collect();
    let dims: Vec<(String, i64)> = dims.iter().cloned().chain(decided).collect();
    let sizes = Sizes::new(graph, &Binding::new(graph, &dims).unwrap()).unwrap();
    let mut values = BTreeMap::new();
    for (id, value) in graph.inits() {
        if let Def::Init(constant) = &value.def {
            values.insert(id, convert::tensor(&value.name, constant).unwrap());
        }
    }
    for (id, dims, numbers) in &model.feeds {
        let x = torch::tensor(graph.ty(*id).dtype, dims, numbers);
        values.insert(*id, lie.apply(&x));
    }
    let mut broken = Vec::new();
    for id in graph.order() {
        broken.extend(check(graph, &sizes, *id, &mut values));
    }
    broken
}

pub fn none_broken(broken: BTreeSet<String>) {
    let lines: Vec<String> = broken.into_iter().collect();
    assert!(
        lines.is_empty(),
        "{} promises broken:\n{}",
        lines.len(),
        lines.join("\n")
    );
}

#[test]
fn every_row_alone() {
    torch::alone();
    let mut r = Random(21);
    let mut broken = BTreeSet::new();
    for recipe in recipes::ALL {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let model = single(recipe, dtype, &mut r).unwrap();
            for lie in [Lie::RowMajor, Lie::Reversed, Lie::Holes, Lie::Repeated] {
                broken.extend(check_all(&model, &[], lie));
            }
        }
    }
    none_broken(broken);
}

/// A recipe of 25 times the rows and columns; `None` where it takes something else than matrices.
pub fn of_larger_matrices(recipe: &recipes::Recipe) -> Option<recipes::Recipe> {
    let larger = |operand: &In| -> Option<In> {
        let dims: fn(&'static [i64]) -> Option<&'static [i64]> = |dims| {
            let sizes = dims.iter().map(|d| if *d > 1 { d * 25 } else { *d });
            (dims.len() <= 2).then(|| &*Vec::leak(sizes.collect()))
        };
        Some(match *operand {
            In::Real(of) => In::Real(dims(of)?),
            In::Positive(of) => In::Positive(dims(of)?),
            In::Large(of) => In::Large(dims(of)?),
            In::Truth(of) => In::Truth(dims(of)?),
            In::Not | In::Scalar(_) => *operand,
            _ => return None,
        })
    };
    let ins: Vec<In> = recipe.ins.iter().map(larger).collect::<Option<_>>()?;
    let ins: &'static [In] = ins.leak();
    Some(recipes::Recipe { ins, ..*recipe })
}

/// Matrices of several thousand elements. libtorch copies and transposes those by other code than small ones.
#[test]
fn every_row_of_matrices_with_large_ones() {
    torch::alone();
    let mut r = Random(31);
    let mut broken = BTreeSet::new();
    let mut tried = BTreeSet::new();
    for recipe in recipes::ALL {
        let Some(recipe) = of_larger_matrices(recipe) else {
            continue;
        };
        for dtype in [DType::F32, DType::BF16] {
            // An attribute may hold a size.
            let Ok(model) = single(&recipe, dtype, &mut r) else {
                continue;
            };
            tried.insert(recipe.op);
            for lie in [Lie::RowMajor, Lie::Reversed] {
                broken.extend(check_all(&model, &[], lie));
            }
        }
    }
    assert!(tried.len() > 60, "{} rows tried", tried.len());
    none_broken(broken);
}

/// Sizes at which libtorch uses several threads, and sums that take several blocks: what a kernel takes depends on
/// neither.
#[test]
fn larger_operands_and_several_threads() {
    torch::alone();
    let mut r = Random(22);
    let mut broken = BTreeSet::new();
    for recipe in large() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let model = single(&recipe, dtype, &mut r).unwrap_or_else(|e| panic!("{e}"));
            for threads in [1, 4] {
                tch::set_num_threads(threads);
                for lie in [Lie::RowMajor, Lie::Reversed] {
                    broken.extend(check_all(&model, &[], lie));
                }
            }
        }
    }
    tch::set_num_threads(1);
    none_broken(broken);
}

#[test]
fn narrow_terms_of_wide_sums() {
    torch::alone();
    let mut r = Random(23);
    let mut broken = BTreeSet::new();
    let sizes: [&[i64]; 5] = [&[2500, 700], &[2, 1_300_000], &[5], &[], &[0, 4]];
    for (sum, part) in [
        (DType::F32, DType::BF16),
        (DType::F32, DType::F16),
        (DType::F64, DType::F32),
    ] {
        for dims in sizes {
            let mut graph = Graph::new("sum");
            let n = dims.iter().product::<i64>() as usize;
            let mut feeds = Vec::new();
            for (name, dtype) in [("sum", sum), ("part", part)] {
                let known: Vec<Dim> = dims.iter().map(|d| Dim::from(*d)).collect();
                let ty = Ty::new(dtype, known);
                let numbers = (0..n).map(|_| r.below(2000) as f64 / 7.0).collect();
                feeds.push((graph.add_input(name, Some(ty)), dims.to_vec(), numbers));
            }
            let operands = [feeds[0].0, feeds[1].0];
            let mut b = Builder::new(&mut graph);
            let total = b.emit(&ACCUMULATE, &operands, Attrs::new()).unwrap();
            graph.set_outputs(vec![total]);
            let model = Model { graph, feeds };
            for lie in [Lie::RowMajor, Lie::Reversed, Lie::Repeated] {
                broken.extend(check_all(&model, &[], lie));
            }
        }
    }
    none_broken(broken);
}

#[test]
fn products_added_to_sums() {
    torch::alone();
    let mut r = Random(29);
    let mut broken = BTreeSet::new();
    let (long, wide) = ([70_000, 64, 3], [3, 64, 70_000]);
    for (sum, narrow, sizes) in [
        (
            DType::F32,
            DType::F32,
            [[70, 30, 50], [1, 1, 5], [3, 0, 4], [0, 3, 4]],
        ),
        (
            DType::F64,
            DType::F32,
            [[70, 30, 50], long, [3, 0, 4], [4, 3, 0]],
        ),
        (
            DType::F32,
            DType::BF16,
            [[70, 30, 50], long, [3, 0, 4], wide],
        ),
    ] {
        for [m, k, n] in sizes {
            for (flip_a, flip_b) in [(0, 0), (1, 1)] {
                let turned = |flip: i64, rows: i64, columns: i64| match flip {
                    0 => vec![rows, columns],
                    _ => vec![columns, rows],
                };
                let mut graph = Graph::new("sum");
                let mut feeds = Vec::new();
                for (name, dtype, dims) in [
                    ("sum", sum, vec![m, n]),
                    ("a", narrow, turned(flip_a, m, k)),
                    ("b", narrow, turned(flip_b, k, n)),
                ] {
                    let known: Vec<Dim> = dims.iter().map(|d| Dim::from(*d)).collect();
                    let count: i64 = dims.iter().product();
                    let numbers = (0..count).map(|_| r.below(2000) as f64 / 700.0).collect();
                    let input = graph.add_input(name, Some(Ty::new(dtype, known)));
                    feeds.push((input, dims, numbers));
                }
                let operands = [feeds[0].0, feeds[1].0, feeds[2].0];
                let attrs = Attrs::new().with("transA", flip_a).with("transB", flip_b);
                let mut b = Builder::new(&mut graph);
                let total = b.emit(&ADD_PRODUCT, &operands, attrs).unwrap();
                graph.set_outputs(vec![total]);
                let model = Model { graph, feeds };
                for lie in [Lie::RowMajor, Lie::Reversed] {
                    broken.extend(check_all(&model, &[], lie));
                }
            }
        }
    }
    none_broken(broken);
}

type Call = (
    &'static str,
    usize,
    &'static [In],
    &'static [(&'static str, Set)],
);

const WIDE: In = In::Real(&[3, 200, 256]);
const ROW: In = In::Real(&[256]);
/// More than a block of RMS norm.
const WIDER: In = In::Real(&[3, 500, 1024]);
const WIDER_ROW: In = In::Real(&[1024]);
/// Calls of several thousand elements, and sums of several blocks.
pub fn large() -> impl Iterator<Item = recipes::Recipe> {
    LARGE.iter().map(|(op, outs, ins, attrs)| recipes::Recipe {
        op,
        outs: *outs,
        ins,
        attrs,
    })
}

const LARGE: &[Call] = &[
    (
        "GatherGrad",
        1,
        &[
            In::Ints(&[80, 60]),
            In::Ints(&[7, 3]),
            In::Real(&[2, 60]),
            In::Real(&[80, 60]),
        ],
        &[],
    ),
    ("LayerNormalization", 3, &[WIDE, ROW, ROW], &[]),
    (
        "LayerNormGrad",
        3,
        &[WIDE, WIDE, ROW],
        &[("wants", Set::L(&[0, 1, 2]))],
    ),
    (
        "LayerNormGrad",
        2,
        &[WIDE, WIDE, ROW],
        &[("wants", Set::L(&[1, 2]))],
    ),
    (
        "LayerNormGrad",
        1,
        &[WIDE, WIDE, ROW],
        &[("wants", Set::L(&[0]))],
    ),
    (
        "LayerNormGrad",
        3,
        &[WIDE, WIDE, In::Real(&[200, 1])],
        &[("axis", Set::I(1)), ("wants", Set::L(&[0, 1, 2]))],
    ),
    ("RMSNormalization", 1, &[WIDE, ROW], &[]),
    (
        "RMSNormGrad",
        2,
        &[WIDE, WIDE, ROW],
        &[("wants", Set::L(&[0, 1]))],
    ),
    (
        "RMSNormGrad",
        1,
        &[WIDE, WIDE, ROW],
        &[("wants", Set::L(&[1]))],
    ),
    ("RMSNormalization", 1, &[WIDER, WIDER_ROW], &[]),
    (
        "RMSNormGrad",
        2,
        &[WIDER, WIDER, WIDER_ROW],
        &[("wants", Set::L(&[0, 1]))],
    ),
    (
        "RMSNormGrad",
        1,
        &[WIDER, WIDER, WIDER_ROW],
        &[("wants", Set::L(&[0]))],
    ),
    (
        "RMSNormGrad",
        2,
        &[WIDER, WIDER, In::Real(&[500, 1])],
        &[("axis", Set::I(1)), ("wants", Set::L(&[0, 1]))],
    ),
    ("Softmax", 1, &[WIDE], &[]),
    ("SoftmaxGrad", 1, &[WIDE, WIDE], &[]),
    ("ReduceSum", 1, &[WIDE, In::Ints(&[0, 2])], &[]),
    ("ReduceMean", 1, &[WIDE, In::Ints(&[-1])], &[]),
    ("SumToShape", 1, &[WIDE, In::Ints(&[256])], &[]),
    ("MatMul", 1, &[WIDE, In::Real(&[256, 64])], &[]),
    (
        "MatMul",
        1,
        &[In::Real(&[256, 300]), In::Real(&[300, 347])],
        &[],
    ),
    (
        "MatMul",
        1,
        &[In::Real(&[2, 3, 70, 64]), In::Real(&[2, 3, 64, 90])],
        &[],
    ),
    (
        "Gemm",
        1,
        &[
            In::Real(&[300, 256]),
            In::Real(&[300, 347]),
            In::Real(&[347]),
        ],
        &[("transA", Set::I(1))],
    ),
    (
        "GatherGrad",
        1,
        &[In::Ints(&[3, 256]), In::Ints(&[2, 0]), In::Real(&[2, 256])],
        &[],
    ),
    ("Gelu", 1, &[WIDE], &[]),
    (
        "Conv",
        1,
        &[IMAGE, In::Real(&[24, 8, 3, 3]), In::Real(&[24])],
        &[
            ("group", Set::I(2)),
            ("pads", Set::L(&[1, 1, 1, 1])),
            ("strides", Set::L(&[2, 1])),
        ],
    ),
    ("Conv", 1, &[IMAGE, In::Real(&[24, 16, 1, 1])], &[]),
    (
        "ConvInputGrad",
        1,
        &[
            In::Real(&[2, 24, 100, 200]),
            In::Real(&[24, 16, 2, 2]),
            In::Ints(&[2, 16, 201, 201]),
        ],
        &[("strides", Set::L(&[2, 1]))],
    ),
    (
        "ConvWeightGrad",
        1,
        &[
            IMAGE,
            In::Real(&[2, 24, 200, 200]),
            In::Ints(&[24, 16, 3, 3]),
        ],
        &[("pads", Set::L(&[1, 1, 1, 1]))],
    ),
    (
        "Attention",
        2,
        &[
            In::Real(&[2, 6, 70, 32]),
            In::Real(&[2, 3, 130, 32]),
            In::Real(&[2, 3, 130, 16]),
            In::Real(&[70, 130]),
        ],
        &[("causal", Set::I(1))],
    ),
    (
        "AttentionGrad",
        4,
        &[
            In::Real(&[2, 6, 70, 16]),
            In::Real(&[2, 6, 70, 32]),
            In::Real(&[2, 3, 130, 32]),
            In::Real(&[2, 3, 130, 16]),
            In::Real(&[6, 1, 1]),
        ],
        &[
            ("causal", Set::I(1)),
            ("window_left", Set::I(80)),
            ("softcap", Set::F(3.0)),
            ("wants", Set::L(&[0, 1, 2, 3])),
        ],
    ),
    // One query of one head over so many keys that libtorch would reduce them in several threads.
    (
        "AttentionGrad",
        4,
        &[
            In::Real(&[1, 1, 2]),
            In::Real(&[1, 1, 2]),
            In::Real(&[1, 70_000, 2]),
            In::Real(&[1, 70_000, 2]),
            In::Real(&[1]),
        ],
        &[("wants", Set::L(&[0, 1, 2, 3]))],
    ),
];

/// Large enough for several blocks of windows.
const IMAGE: In = In::Real(&[2, 16, 200, 200]);
