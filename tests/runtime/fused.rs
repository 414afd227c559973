//! Fused chains: their arithmetic is that of the nodes' own kernels, bit for bit, where libtorch's functions are taken from
//! libtorch; and the arithmetic of these functions is libtorch's but for rounding.
use crate::support::torch;

use ckpt_opt::comparison::ready;
use ckpt_opt::frontend;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_opt::runtime::generated::{Operand, Shape, check_compiler, compiled_bytes, source};
use ckpt_opt::runtime::kernels::fused::{Libtorch, on_host, space};
use ckpt_opt::tensors::{self, feed::Feed};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::arithmetic::{Functions, LIBRARY};
use ckpt_passes::ir::{DType, Graph, same_dims};
use ckpt_passes::plan::Policy;
use ckpt_passes::testing::models::{Model, random, single};
use ckpt_passes::testing::{Random, recipes};
use ckpt_passes::transform::chains::{FUSED, PROGRAM, arithmetic, fuse_chains, program};
use ckpt_passes::transform::collectives::has_collectives;
use ckpt_passes::transform::loss::Loss;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tch::Tensor;

/// Makes libtorch's sigmoid and others give the same bits in every layout. Its code for AVX gives others at the end of a row,
/// where too few elements are left for a vector.
const LAYOUT_FREE: (&str, &str) = ("ATEN_CPU_CAPABILITY", "default");

fn outputs(graph: &Graph, inputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let run = Program::new(graph).unwrap().run(inputs);
    let run = run.unwrap_or_else(|e| panic!("{}: {e}", torch::ops(graph)));
    run.outputs
        .into_iter()
        .map(|(n, x)| (n, x.copy().contiguous()))
        .collect()
}

/// Returns the fused graph, and its number of chains of several nodes.
fn fused(graph: &Graph) -> (Graph, usize) {
    let mut fused = graph.clone();
    let (nodes, chains) = fuse_chains(&mut fused);
    (fused, nodes - chains)
}

/// Returns the graph with the results of all chains as outputs, in their order.
fn with_results(graph: &Graph, names: &[String]) -> Graph {
    let mut graph = graph.clone();
    for name in names {
        let value = graph.find_value(name).unwrap();
        if !graph.is_output(value) {
            graph.add_output(value);
        }
    }
    graph
}

/// Checks that sizes and peak of both graphs are known before they run, and that the fused one takes no more.
fn check_peaks(graph: &Graph, fused: &Graph, inputs: &BTreeMap<String, Tensor>) {
    let peak = |graph: &Graph| {
        let program = Program::new(graph).unwrap();
        let specialization = program.specialization(inputs);
        let specialization =
            specialization.unwrap_or_else(|e| panic!("{}: {e}", torch::ops(graph)));
        specialization.requested_growth_bytes
    };
    let (apart, together) = (peak(graph), peak(fused));
    assert!(
        together <= apart,
        "{together} bytes, not {apart}: {}",
        torch::ops(graph)
    );
}

/// Returns whether two tensors have the same bits; all NaNs are equal.
fn same(x: &Tensor, y: &Tensor) -> bool {
    let numbers = |x: &Tensor| x.where_self(&x.isnan().logical_not(), &x.zeros_like());
    torch::same_bits(&x.isnan(), &y.isnan()) && torch::same_bits(&numbers(x), &numbers(y))
}

/// Names the results of chains, and the outputs, in which the fused graph differs from the graph.
fn differing(graph: &Graph, fused: &Graph, inputs: &BTreeMap<String, Tensor>) -> Vec<String> {
    let chains = fused.order().iter().map(|id| fused.node(*id));
    let results = chains.filter(|n| n.op == &FUSED).flat_map(|n| &n.outs);
    let names = results.map(|v| fused.value(*v).name.clone());
    // Terms of a sum are no value of the graph.
    let names: Vec<String> = names.filter(|n| graph.find_value(n).is_some()).collect();
    check_peaks(graph, fused, inputs);
    let of = |graph: &Graph| outputs(&with_results(graph, &names), inputs);
    let (expected, found) = (of(graph), of(fused));
    assert!(expected.keys().eq(found.keys()));
    let all = names
        .iter()
        .chain(expected.keys().filter(|n| !names.contains(n)));
    let differs = |(name, x): (&String, &Tensor)| {
        let most = (x.to_kind(tch::Kind::Double) - found[name].to_kind(tch::Kind::Double)).abs();
        let most = f64::try_from(most.max()).unwrap_or_default();
        (!same(x, &found[name])).then(|| format!("`{name}` by {most:e}"))
    };
    all.map(|name| (name, &expected[name]))
        .filter_map(differs)
        .take(3)
        .collect()
}

/// The rows that have scalar arithmetic, by recipe.
fn rows() -> impl Iterator<Item = &'static recipes::Recipe> {
    recipes::ALL.iter().filter(|recipe| {
        let model = single(recipe, DType::F32, &mut Random(1));
        model.is_ok_and(|m| {
            m.graph
                .order()
                .iter()
                .any(|id| arithmetic(&m.graph, *id).is_some())
        })
    })
}

/// libtorch's functions of one number, but none of those that are stated as arithmetic.
struct Elementary;

impl Functions for Elementary {
    fn call(&self, name: &str, operands: &[&[f32]]) -> Option<Vec<f32>> {
        let is_elementary = LIBRARY.iter().any(|(known, _)| *known == name);
        is_elementary
            .then(|| Libtorch.call(name, operands))
            .flatten()
    }

    fn row_sums(&self, x: &[f32], width: usize) -> Vec<f32> {
        Libtorch.row_sums(x, width)
    }
}

/// The operands of a model with one node, in order.
fn operands(model: &Model) -> Vec<Tensor> {
    let given = torch::feeds(model);
    let node = model.graph.node(model.graph.order()[0]);
    let tensor = |v| match model.graph.value(v).tensor() {
        Some(constant) => convert::tensor("constant", constant).unwrap(),
        None => given[&model.graph.value(v).name].shallow_clone(),
    };
    node.operands().map(tensor).collect()
}

#[test]
fn rows_compute_what_their_kernels_compute() {
    if !torch::is_process_with(
        "fused::rows_compute_what_their_kernels_compute",
        &[LAYOUT_FREE],
    ) {
        return;
    }
    torch::alone();
    let mut r = Random(23);
    let (mut tried, mut broken) = (BTreeSet::new(), BTreeSet::new());
    for recipe in rows() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let model = single(recipe, dtype, &mut r).unwrap();
            let (fused, _) = fused(&model.graph);
            if fused.order().iter().all(|id| fused.node(*id).op != &FUSED) {
                continue;
            }
            tried.insert(recipe.op);
            // In float16, libtorch rounds every step of this gradient.
            if (recipe.op, dtype) == ("SigmoidGrad", DType::F16) {
                continue;
            }
            for what in differing(&model.graph, &fused, &torch::feeds(&model)) {
                broken.insert(format!("{} {dtype}: {what}", recipe.op));
            }
        }
    }
    assert!(tried.len() >= 35, "{tried:?}");
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The generated kernel computes this arithmetic, not libtorch's functions.
#[test]
fn the_arithmetic_of_libtorchs_functions_is_theirs_but_for_rounding() {
    torch::alone();
    let mut r = Random(29);
    for recipe in rows() {
        let model = single(recipe, DType::F32, &mut r).unwrap();
        let (fused, _) = fused(&model.graph);
        let [id] = fused.order() else { continue };
        let program = program(fused.node(*id).attrs.str(PROGRAM)).unwrap();
        let operands = operands(&model);
        let operands: Vec<&Tensor> = operands.iter().collect();
        let dims = space(&operands);
        let of = |functions: &dyn Functions| on_host(&program, &operands, &dims, functions);
        for (a, b) in of(&Libtorch).concat().iter().zip(of(&Elementary).concat()) {
            let within = 4e-6 * (1.0 + a.abs());
            assert!(
                (a - b).abs() <= within || a.is_nan(),
                "{}: {a} {b}",
                recipe.op
            );
        }
    }
}

#[test]
fn random_chains_give_the_bits_of_their_nodes() {
    if !torch::is_process_with(
        "fused::random_chains_give_the_bits_of_their_nodes",
        &[LAYOUT_FREE],
    ) {
        return;
    }
    torch::alone();
    let mut r = Random(31);
    let (mut longer, mut broken) = (0, Vec::new());
    let names: BTreeSet<&str> = rows().map(|recipe| recipe.op).collect();
    for dtype in [DType::F32, DType::BF16] {
        let mut names = names.clone();
        if dtype == DType::BF16 {
            // Of 10,000 elements, libtorch rounds one of this gradient other than it rounds that of float32.
            names.remove("GeluGrad");
        }
        for _ in 0..150 {
            let model = random(&mut r, 12, dtype, false, &|x| names.contains(x.op));
            let (fused, joined) = fused(&model.graph);
            longer += joined;
            let found = differing(&model.graph, &fused, &torch::feeds(&model));
            if !found.is_empty() {
                broken.push((torch::ops(&model.graph), found));
            }
        }
    }
    assert!(longer > 300, "{longer}");
    assert!(broken.is_empty(), "{} {broken:#?}", broken.len());
}

/// A node whose result nobody reads keeps its place, and takes part in no chain.
#[test]
fn nodes_that_nothing_reads_stay() {
    let text = "graph @g typed (%x: f32[4]) -> (%y) {
  %dead = Exp %x : f32[4]
  %half = Sin %x : f32[4]
  %y = Cos %half : f32[4]
}
";
    let graph = ckpt_passes::text::parse(text).unwrap();
    let (fused, joined) = fused(&graph);
    let ops: Vec<&str> = fused
        .order()
        .iter()
        .map(|id| fused.node(*id).op.name)
        .collect();
    assert_eq!((ops.as_slice(), joined), (["Exp", "Fused"].as_slice(), 1));
}

/// A graph of a fixture, with its name and its inputs' file.
type Fixture = (String, Graph, PathBuf);

/// The training graphs of all fixtures, without a plan and with every layer recomputed; a forward graph where a fixture has no
/// gradients.
fn fixtures() -> Vec<Fixture> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let mut paths: Vec<PathBuf> = Vec::new();
    for sub in std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
    {
        let files = std::fs::read_dir(sub).into_iter().flatten();
        paths.extend(files.map(|e| e.unwrap().path()));
    }
    paths.retain(|p| {
        p.extension()
            .is_some_and(|e| ["onnx", "pt2"].iter().any(|x| e == *x))
    });
    paths.sort();
    let mut all = Vec::new();
    for path in paths {
        for policy in [Policy::NONE, Policy::FULL] {
            let mut graph = frontend::read(&path).unwrap().graph;
            let has = |name: &str| graph.inputs().iter().any(|v| graph.value(*v).name == name);
            let loss = if has("input_ids") && !has("labels") {
                "causal-lm"
            } else {
                "vjp"
            };
            let request = |loss| Request {
                loss: Loss::parse(loss).unwrap(),
                plan: policy.into(),
                ..Request::default()
            };
            let mut trained = graph.clone();
            let done = compile(&mut trained, &request(loss), &mut Watch::default());
            if done.is_ok() {
                graph = trained;
            } else if compile(&mut graph, &request("vjp"), &mut Watch::default()).is_err() {
                graph = frontend::read(&path).unwrap().graph;
                ready(&mut graph, &path).unwrap();
            }
            let name = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap();
            let own = path.with_extension("npz");
            let inputs = if own.exists() {
                own
            } else {
                path.with_file_name("case.npz")
            };
            all.push((format!("{} {policy}", name.display()), graph, inputs));
        }
    }
    all
}

#[test]
fn training_steps_of_the_fixtures_give_the_same_bits_fused() {
    if !torch::is_process_with(
        "fused::training_steps_of_the_fixtures_give_the_same_bits_fused",
        &[LAYOUT_FREE],
    ) {
        return;
    }
    torch::alone();
    let (mut chains, mut broken) = (0, Vec::new());
    // One process plays no ranks.
    let alone = fixtures()
        .into_iter()
        .filter(|(_, graph, _)| !has_collectives(graph));
    for (name, graph, file) in alone {
        let mut feed = Feed::new(&graph, tensors::read(&file).unwrap()).unwrap();
        tensors::random::fill(&graph, &mut feed, &[], 1).unwrap();
        let inputs = feed.inputs.iter();
        let inputs = inputs.map(|(n, x)| (n.clone(), convert::tensor(n, x).unwrap()));
        let (fused, joined) = fused(&graph);
        let count = fused.nodes().filter(|(_, n)| n.op == &FUSED).count();
        println!("{name}: {count} chains, {joined} nodes joined");
        let found = differing(&graph, &fused, &inputs.collect());
        if !found.is_empty() {
            broken.push((name, found));
        }
        chains += count;
    }
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(chains > 1000, "{chains}");
}

/// The chains of all fixtures, forward and backward, and of all rows, for every architecture. Compiling needs no device.
#[test]
fn generated_kernels_compile() {
    if let Err(error) = check_compiler() {
        assert_eq!(error.code(), "nvrtc");
        assert!(std::env::var_os("CI").is_none(), "{error}");
        println!("skipped: {error}");
        return;
    }
    let mut kernels: BTreeMap<(String, Vec<DType>), Shape> = BTreeMap::new();
    let mut add = |graph: &Graph| {
        let (fused, _) = fused(graph);
        for (_, node) in fused.nodes().filter(|(_, n)| n.op == &FUSED) {
            let out = fused.ty(node.outs[0]);
            let operand = |v| Operand {
                dtype: fused.ty(v).dtype,
                is_dense: same_dims(&fused.ty(v).dims, &out.dims),
            };
            let shape = Shape {
                operands: node.operands().map(operand).collect(),
                rank: out.rank().max(1),
                is_large: kernels.len() % 2 == 1,
            };
            let types = shape.operands.iter().map(|x| x.dtype).collect();
            kernels
                .entry((node.attrs.str(PROGRAM).to_string(), types))
                .or_insert(shape);
        }
    };
    for (_, graph, _) in fixtures() {
        add(&graph);
    }
    for recipe in rows() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            add(&single(recipe, dtype, &mut Random(41)).unwrap().graph);
        }
    }
    println!("{} kernels", kernels.len());
    assert!(kernels.len() > 100, "{}", kernels.len());
    for ((text, _), shape) in kernels {
        let program = text.parse().unwrap();
        for capability in [80, 90, 100] {
            match compiled_bytes(&program, &shape, capability) {
                Ok(bytes) => assert!(bytes > 1000, "{text}"),
                Err(e) => panic!("{e}\n{text}{}", source(&program, &shape)),
            }
        }
    }
}

#[test]
fn programs_are_read_as_they_are_written() {
    let mut r = Random(37);
    for recipe in rows() {
        let model = single(recipe, DType::BF16, &mut r).unwrap();
        let (fused, _) = fused(&model.graph);
        for (_, node) in fused.nodes().filter(|(_, n)| n.op == &FUSED) {
            let text = program(node.attrs.str(PROGRAM)).unwrap().to_string();
            assert_eq!(text, node.attrs.str(PROGRAM), "{}", recipe.op);
        }
    }
}
