//! Floats of 8 bits: conversions are libtorch's and ONNX's, gradients are PyTorch's, a plan changes no bit and takes the memory
//! that was predicted, and it can keep one byte an element.

use crate::support::torch::{self, assert_close, largest};

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::optimize::optimize;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_opt::runtime::session::{Measured, Session};
use ckpt_opt::tensors::{Tensors, random, read};
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::float8::{decoded, encoded};
use ckpt_passes::ir::{DType, Graph, OpDef, Role};
use ckpt_passes::ops::float8::{DEQUANTIZE_FLOAT8, QUANTIZE_FLOAT8};
use ckpt_passes::ops::transfer::OFFLOAD;
use ckpt_passes::plan::constraint::Constraint;
use ckpt_passes::plan::{Budget, Effort, Offload, OffloadSet, PlanRequest, Policy};
use ckpt_passes::planning::overrides::{Override, PolicyOverrides, Target};
use ckpt_passes::text;
use ckpt_passes::transform::autodiff::autodiff;
use ckpt_passes::transform::loss::{Loss, Seed};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const TYPES: [DType; 4] = [
    DType::F8E4M3FN,
    DType::F8E5M2,
    DType::F8E4M3FNUZ,
    DType::F8E5M2FNUZ,
];

/// Layers of the fixture, and elements of both activations of a row that a layer quantises.
const LAYERS: u64 = 3;
const WIDTH: u64 = 16 + 24;

fn path(name: &str) -> PathBuf {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/float8");
    fixtures.join(name)
}

/// Runs a graph in text, differentiated for its inputs but those that start with `d`: these are the cotangents of its outputs.
fn run_text(source: &str, feed: &BTreeMap<String, tch::Tensor>) -> BTreeMap<String, tch::Tensor> {
    let mut graph = text::parse(source).unwrap_or_else(|e| panic!("{e}"));
    let inputs = graph.inputs().to_vec();
    let is_cotangent = |v: &&_| graph.value(**v).name.starts_with('d');
    let cotangents: Vec<_> = inputs.iter().filter(is_cotangent).copied().collect();
    let wanted: Vec<_> = inputs
        .iter()
        .copied()
        .filter(|v| !cotangents.contains(v))
        .collect();
    let outputs = graph.outputs().to_vec();
    let seeds: Vec<Seed> = (outputs.into_iter().zip(&cotangents))
        .map(|(value, dy)| Seed {
            value,
            cotangent: Some(*dy),
        })
        .collect();
    if !seeds.is_empty() {
        autodiff(&mut graph, &seeds, &wanted).unwrap_or_else(|e| panic!("{e}"));
    }
    let done = Program::new(&graph).unwrap().run(feed).unwrap();
    done.outputs.into_iter().collect()
}

fn is_same(a: f64, b: f64) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

/// Every pattern of the upper 16 bits of a float32, with lower bits on and beside the middle between two of them.
#[test]
fn casts_round_as_libtorch_does_and_saturate_as_onnx_says() {
    torch::alone();
    for dtype in TYPES {
        let cast = |x: &tch::Tensor, attrs: &str| {
            let source = format!(
                "graph @g typed (%x: f32[65536]) -> (%y) {{\n  %y = Cast %x {{{attrs}to={dtype}}} : {dtype}[65536]\n}}\n"
            );
            let feed = [("x".to_string(), x.shallow_clone())].into();
            ckpt_torch::bytes::read(&run_text(&source, &feed)["y"]).unwrap()
        };
        for low in [0u32, 1, 0x8000, 0xffff] {
            let numbers: Vec<f32> = (0..=0xffffu32)
                .map(|b| f32::from_bits(b << 16 | low))
                .collect();
            let x = tch::Tensor::from_slice(&numbers);
            let theirs = x.to_kind(convert::kind(dtype).unwrap());
            let theirs = ckpt_torch::bytes::read(&theirs).unwrap();
            let (plain, saturated) = (cast(&x, "saturate=0, "), cast(&x, ""));
            for (i, number) in numbers.iter().enumerate() {
                let number = f64::from(*number);
                let own = |saturate| decoded(dtype, encoded(dtype, number, saturate));
                for (what, code, expected) in [
                    ("libtorch", theirs[i], own(false)),
                    ("the cast", plain[i], own(false)),
                    ("the saturating cast", saturated[i], own(true)),
                ] {
                    let found = decoded(dtype, code);
                    assert!(
                        is_same(found, expected),
                        "{dtype}, {what}: {number} is {found}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_cast_there_and_back_has_pytorchs_gradient() {
    torch::alone();
    let x = tch::Tensor::from_slice(&[1.0f32, -0.3, 500.0, 0.001, 17.3, -448.0]);
    let dy = tch::Tensor::from_slice(&[1.03f32, 0.0004, 2.0, -7.7, 300.1, 1000.0]);
    for dtype in [DType::F8E4M3FN, DType::F8E5M2] {
        let kind = convert::kind(dtype).unwrap();
        let leaf = x.copy().set_requires_grad(true);
        let y = leaf.to_kind(kind).to_kind(tch::Kind::Float);
        (&y * &dy).sum(tch::Kind::Float).backward();
        let source = format!(
            "graph @g typed (%x: f32[6], %dy: f32[6]) -> (%y) {{
  %q = Cast %x {{saturate=0, to={dtype}}} : {dtype}[6]
  %y = Cast %q {{to=f32}} : f32[6]
}}
"
        );
        let feed = [("x".to_string(), x.copy()), ("dy".to_string(), dy.copy())].into();
        let found = run_text(&source, &feed);
        for (name, expected) in [("y", &y), ("x.grad", &leaf.grad())] {
            let pairs = torch::numbers(&found[name])
                .into_iter()
                .zip(torch::numbers(expected));
            for (ours, theirs) in pairs {
                assert!(
                    is_same(ours, theirs),
                    "{dtype} {name}: {ours}, PyTorch has {theirs}"
                );
            }
        }
    }
}

/// One value by its own scale, by another one, and by both; numbers beyond the largest, and a view in between.
#[test]
fn what_is_quantised_passes_on_the_gradient_of_what_it_stands_for() {
    torch::alone();
    let x = tch::Tensor::from_slice(&[1.0f32, -0.3, 5000.0, 0.001, 17.3, -448.0]).view([2, 3]);
    let dy = tch::Tensor::from_slice(&[1.03f32, 0.0004, 2.0, -7.7, 300.1, 1000.0]).view([2, 3]);
    let head = "graph @g typed (%x: f32[2, 3], %dy: f32[2, 3]) -> (%y) {
  init %s : f32[3] = [0.5, 0.75, 1.5]
  init %t : f32[] = 3.0
  %q = QuantizeFloat8 %x, %s {to=f8e4m3fn} : f8e4m3fn[2, 3]
";
    let s = tch::Tensor::from_slice(&[0.5f32, 0.75, 1.5]);
    let other = 3.0 / &s;
    for (body, expected) in [
        (
            "%y = DequantizeFloat8 %q, %s {to=f32} : f32[2, 3]",
            dy.copy(),
        ),
        (
            "%y = DequantizeFloat8 %q, %t {to=f32} : f32[2, 3]",
            &dy * &other,
        ),
        (
            "%a = DequantizeFloat8 %q, %s {to=f32} : f32[2, 3]
  %b = DequantizeFloat8 %q, %t {to=f32} : f32[2, 3]
  %y = Add %a, %b : f32[2, 3]",
            &dy + &dy * &other,
        ),
        (
            "%v = Transpose %q {perm=[1, 0]} : f8e4m3fn[3, 2]
  %w = DequantizeFloat8 %v, %t {to=f32} : f32[3, 2]
  %y = Transpose %w {perm=[1, 0]} : f32[2, 3]",
            &dy * &other,
        ),
    ] {
        let feed = [("x".to_string(), x.copy()), ("dy".to_string(), dy.copy())].into();
        let found = &run_text(&format!("{head}  {body}\n}}\n"), &feed)["x.grad"];
        let gap = (found - &expected).abs() / expected.abs();
        assert!(
            gap.max().double_value(&[]) < 1e-6,
            "{body}\n{found}\n{expected}"
        );
    }
    // Straight through means bit for bit, also in 16 bits.
    let source = "graph @g typed (%x: bf16[6], %dy: bf16[6]) -> (%y) {
  init %s : f32[] = 0.3
  %q = QuantizeFloat8 %x, %s {to=f8e5m2} : f8e5m2[6]
  %y = DequantizeFloat8 %q, %s {to=bf16} : bf16[6]
}
";
    let narrow = |t: &tch::Tensor| t.view([6]).to_kind(tch::Kind::BFloat16);
    let feed = [
        ("x".to_string(), narrow(&x)),
        ("dy".to_string(), narrow(&dy)),
    ]
    .into();
    let found = run_text(source, &feed);
    assert!(torch::same_bits(&found["x.grad"], &narrow(&dy)));
}

fn case(form: &str) -> Tensors {
    read(&path(&format!("{form}.npz"))).unwrap()
}

fn compiled(
    form: &str,
    plan: impl Into<PlanRequest>,
    recomputed: &[&str],
    rows: i64,
) -> (Graph, Vec<String>) {
    let file = path(&format!("{form}.onnx"));
    let mut graph = load(&file, &Given::default())
        .unwrap_or_else(|e| panic!("{form}: {e}"))
        .graph;
    let overrides = recomputed.iter().map(|op| Override {
        constraint: Constraint::Recompute,
        target: Target::op(op).unwrap(),
    });
    let request = Request {
        plan: plan.into(),
        fuse: true,
        loss: Loss::parse("output:loss").unwrap(),
        dims: vec![("rows".into(), rows)],
        overrides: PolicyOverrides {
            overrides: overrides.collect(),
            ..PolicyOverrides::default()
        },
        ..Request::default()
    };
    let done = optimize(&mut graph, &request, &mut Watch::default());
    let done = done.unwrap_or_else(|e| panic!("{form}: {e}"));
    (graph, done.warnings)
}

fn run(graph: &Graph, inputs: &Tensors) -> Measured {
    let folder = tempfile::tempdir().unwrap();
    let mut session =
        Session::new(graph, &Default::default(), None, Place::Cpu, Rng::default()).unwrap();
    session.wait_in(folder.path().into());
    let measured = session.run(inputs).unwrap();
    assert_eq!(measured.peak_bytes, measured.predicted_peak_bytes);
    assert_eq!(
        measured.outside_peak_bytes,
        measured.predicted_outside_bytes
    );
    measured
}

#[test]
fn training_in_8_bits_has_pytorchs_gradients_and_no_plan_changes_a_bit() {
    torch::alone();
    for (form, trained) in [("current", 6), ("delayed", 6), ("wide", 6), ("stored", 3)] {
        let case = case(form);
        let given = |prefix: &'static str| {
            let named = case
                .iter()
                .filter_map(move |(k, t)| Some((k.strip_prefix(prefix)?, t)));
            named.map(|(k, t)| (k.to_string(), t.clone()))
        };
        let inputs: Tensors = given("in.").collect();
        let (plain, warnings) = compiled(form, Policy::NONE, &[], 6);
        let one = run(&plain, &inputs);
        for (name, expected) in given("out.") {
            assert_close(
                &format!("{form}: {name}"),
                &one.outputs[&name],
                &expected,
                1e-6,
            );
        }
        let floor = 1e-7 * given("grad.").map(|(_, t)| largest(&t)).fold(0.0, f64::max);
        for (name, expected) in given("grad.") {
            let found = &one.outputs[&format!("{name}.grad")];
            assert_close(&format!("{form}: {name}"), found, &expected, floor);
        }
        assert_eq!(given("grad.").count(), trained, "{form}");
        let gradients = one.outputs.keys().filter(|k| k.ends_with(".grad"));
        assert_eq!(
            gradients.count(),
            trained,
            "{form}: {:?}",
            one.outputs.keys()
        );
        let is_told = warnings
            .iter()
            .any(|w| w.contains("no gradient flows into `scale`"));
        // Scales follow from values that depend on parameters, but in the first layer.
        assert_eq!(
            is_told,
            ["current", "stored"].contains(&form),
            "{form}: {warnings:?}"
        );
        for plan in ["selective", "full"] {
            let (graph, _) = compiled(form, Policy::parse(plan).unwrap(), &[], 6);
            assert_eq!(run(&graph, &inputs).outputs, one.outputs, "{form}: {plan}");
        }
    }
}

/// Returns how many nodes of an op are recomputations, and how many are not.
fn count(graph: &Graph, op: &'static OpDef) -> (usize, usize) {
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let (again, first): (Vec<_>, Vec<_>) = nodes
        .filter(|n| n.op == op)
        .partition(|n| n.recompute_of.is_some());
    (again.len(), first.len())
}

/// The bytes of values in 8 bits that the backward pass reads from the forward pass.
fn kept_bytes(graph: &Graph, rows: i64) -> u64 {
    let size = |name: &str| (name == "rows").then_some(rows);
    let is_late = |id| {
        let node = graph.node(id);
        node.role == Role::Backward || node.recompute_of.is_some()
    };
    let kept = graph.values().filter(|(id, v)| {
        let made = graph.def_node(*id).is_some_and(|n| !is_late(n));
        v.ty().dtype.is_float8() && made && v.uses().iter().any(|r| is_late(r.node))
    });
    // Not those of weights, whose sizes are fixed.
    let activations = kept.filter(|(_, v)| v.ty().static_dims().is_none());
    let bytes = activations.filter_map(|(_, v)| v.ty().elements().eval(&size));
    bytes.sum::<i64>() as u64
}

#[test]
fn a_plan_keeps_one_byte_an_element_and_dequantises_again() {
    torch::alone();
    const ROWS: i64 = 512;
    let again = ["DequantizeFloat8"];
    let (none, _) = compiled("current", Policy::NONE, &[], ROWS);
    let (lean, _) = compiled("current", Policy::NONE, &again, ROWS);
    let budget = PlanRequest {
        effort: Effort::First,
        ..Budget::Percent(60.0).into()
    };
    let (planned, _) = compiled("current", budget, &[], ROWS);
    let inputs = random::inputs(&none, &[("rows".into(), ROWS)], 5).unwrap();
    let whole = run(&none, &inputs);
    let payload = LAYERS * WIDTH * ROWS as u64;
    assert_eq!(kept_bytes(&none, ROWS), 0);
    assert_eq!(kept_bytes(&lean, ROWS), payload);
    let measured = run(&lean, &inputs);
    assert_eq!(measured.outputs, whole.outputs);
    // Three bytes of four are gone, but for the largest value that is dequantised at the moment of the peak.
    let saved = 3 * payload - 4 * 24 * ROWS as u64;
    let gap = whole.peak_bytes - measured.peak_bytes;
    assert!(gap >= saved, "{gap} of {saved} bytes");
    let measured = run(&planned, &inputs);
    assert_eq!(measured.outputs, whole.outputs);
    assert!(
        kept_bytes(&planned, ROWS) > 0,
        "the plan keeps nothing in 8 bits"
    );
    assert!(count(&planned, &DEQUANTIZE_FLOAT8).0 > 0);
    assert_eq!(count(&lean, &QUANTIZE_FLOAT8).0, 0);
}

#[test]
fn what_is_quantised_is_offloaded_once_and_as_one_byte_an_element() {
    torch::alone();
    const ROWS: i64 = 256;
    let offload = Offload {
        set: OffloadSet::All,
        ..Offload::default()
    };
    let request = || PlanRequest {
        offload,
        ..Policy::NONE.into()
    };
    for again in [&[][..], &["DequantizeFloat8"]] {
        let (plain, _) = compiled("current", Policy::NONE, &[], ROWS);
        let (graph, _) = compiled("current", request(), again, ROWS);
        let inputs = random::inputs(&plain, &[("rows".into(), ROWS)], 5).unwrap();
        assert_eq!(run(&graph, &inputs).outputs, run(&plain, &inputs).outputs);
        let mut moved = BTreeMap::new();
        for id in graph.order() {
            let node = graph.node(*id);
            if node.op == &OFFLOAD {
                *moved.entry(node.operand(0).unwrap()).or_insert(0) += 1;
            }
        }
        assert!(
            !moved.is_empty() && moved.values().all(|n| *n == 1),
            "{moved:?}"
        );
        let made_by = |op: &'static OpDef| {
            let makers = moved.keys().filter_map(|v| graph.def_node(*v));
            makers.filter(|n| graph.node(*n).op == op).count()
        };
        let (codes, numbers) = (made_by(&QUANTIZE_FLOAT8), made_by(&DEQUANTIZE_FLOAT8));
        // Never a value in both forms.
        match again.is_empty() {
            true => assert!(
                codes == 0 && numbers >= 2 * LAYERS as usize,
                "{codes} {numbers}"
            ),
            false => assert!(
                codes >= 2 * LAYERS as usize && numbers == 0,
                "{codes} {numbers}"
            ),
        }
    }
}
