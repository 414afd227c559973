//! Captured steps, with a recorder that works without a device.

use super::super::capture::Captures;
use super::super::recorder::{Recorder, Recording, Work};
use super::*;
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::optimize::optimize;
use crate::runtime::convert;
use crate::tensors::feed::Feed;
use crate::tensors::{Tensors, random};
use ckpt_passes::analysis::gradients::STEP;
use ckpt_passes::analysis::sizes::dim_kinds;
use ckpt_passes::compile::Request;
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Graph, Tensor as Constant};
use ckpt_passes::plan::{Offload, OffloadSet, OffloadTarget, PlanRequest, Policy};
use ckpt_passes::text;
use ckpt_passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_torch::bytes;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind};

/// A recorder without a device: a replay does the step again and puts its results where they were.
#[derive(Default)]
struct Double {
    captures: Cell<usize>,
    replays: Rc<Cell<usize>>,
    fails: bool,
}

/// Whether the step was done as it was captured, which a device would not have done.
struct Again(Cell<bool>, Rc<Cell<usize>>);

impl Recorder for Double {
    fn aside(&self, work: Work) -> Result<()> {
        work()
    }

    fn capture(&self, work: Work) -> Result<Box<dyn Recording>> {
        if self.fails {
            return Err(Error::bug(
                "torch",
                "operation not permitted when stream is capturing",
            ));
        }
        self.captures.set(self.captures.get() + 1);
        work()?;
        Ok(Box::new(Again(Cell::new(true), self.replays.clone())))
    }
}

impl Recording for Again {
    fn replay(&self, again: Work) -> Result<()> {
        self.1.set(self.1.get() + 1);
        match self.0.replace(false) {
            true => Ok(()),
            false => again(),
        }
    }
}

impl Program<'_> {
    fn graphs(&mut self) -> &mut Captures {
        self.captures.get_mut()
    }

    fn forget_graphs(&self) {
        self.captures.borrow_mut().forget();
    }

    fn input_places(&self) -> Vec<usize> {
        let values = self.values.borrow();
        let places = values.train_state.places();
        places.map(|t| t.data_ptr() as usize).collect()
    }
}

type Inputs = BTreeMap<String, Tensor>;

fn training(name: &str, optimizer: Option<&str>) -> Graph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    let path = root.join(name).join("model.onnx");
    let mut graph = load(&path, &Given::default()).unwrap().graph;
    let request = Request {
        fuse: true,
        drop_outputs: vec!["*".into()],
        updates: UpdateOptions {
            optimizer: optimizer.map(|text| Optimizer::parse(text).unwrap()),
            fuse: optimizer.is_some(),
            ..UpdateOptions::default()
        },
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap();
    graph
}

fn inputs(graph: &Graph, (batch, seq): (i64, i64), seed: u64, step: i64) -> Inputs {
    let mut feed = Feed::new(graph, Tensors::new()).unwrap();
    feed.start_training(graph);
    let named = dim_kinds(graph);
    let dims = [("batch".to_string(), batch), ("seq".to_string(), seq)];
    let dims: Vec<_> = dims
        .into_iter()
        .filter(|(name, _)| named.iter().any(|(n, _)| n == name))
        .collect();
    random::fill(graph, &mut feed, &dims, seed).unwrap();
    if let Some(n) = feed.inputs.get_mut(STEP) {
        *n = Constant::int(step);
    }
    let given = feed.inputs.iter();
    given
        .map(|(name, t)| (name.clone(), convert::tensor(name, t).unwrap()))
        .collect()
}

/// A program that captures with a double.
fn captured(graph: &Graph, fails: bool) -> (Program<'_>, Rc<Double>) {
    let double = Rc::new(Double {
        fails,
        ..Double::default()
    });
    let mut program = Program::new(graph).unwrap();
    *program.graphs() = Captures::by(double.clone());
    (program, double)
}

/// Names and bits of what a run gives.
fn bits(run: &Run) -> Vec<(String, Vec<u8>)> {
    let read = |t: &Tensor| bytes::read(&t.contiguous()).unwrap();
    run.outputs
        .iter()
        .map(|(n, t)| (n.clone(), read(t)))
        .collect()
}

fn places(run: &Run) -> Vec<usize> {
    let outputs = run.outputs.iter();
    outputs.map(|(_, t)| t.data_ptr() as usize).collect()
}

#[test]
fn a_step_is_captured_once_and_replayed_on_what_is_given() {
    for name in ["gpt2", "bert", "llama32"] {
        let graph = training(name, None);
        let plain = Program::new(&graph).unwrap();
        let (program, double) = captured(&graph, false);
        let mut seen = Vec::new();
        for step in 0..5 {
            let given = inputs(&graph, (2, 8), step as u64, 1);
            let run = program.run(&given).unwrap();
            assert_eq!(run.is_replayed, step > 0, "{name}");
            assert!(
                bits(&run) == bits(&plain.run(&given).unwrap()),
                "{name} {step}"
            );
            if step > 0 {
                seen.push((places(&run), program.input_places(), run.peak_bytes));
            }
        }
        assert!(
            seen.windows(2).all(|w| w[0] == w[1]),
            "{name}: something has moved"
        );
        assert_eq!((double.captures.get(), double.replays.get()), (1, 4));
        // Other sizes are captured anew, and a watched run is none.
        for (sizes, replayed) in [((2, 6), false), ((2, 6), true), ((2, 8), false)] {
            let given = inputs(&graph, sizes, 9, 1);
            let run = program.run(&given).unwrap();
            assert_eq!(run.is_replayed, replayed, "{name}");
            assert!(
                bits(&run) == bits(&plain.run(&given).unwrap()),
                "{name} {sizes:?}"
            );
        }
        assert_eq!(double.captures.get(), 2);
        let given = inputs(&graph, (2, 8), 3, 1);
        let (run, moments) = program.run_traced(&given).unwrap();
        assert!(!run.is_replayed && moments.len() == program.nodes());
        assert_eq!(program.graphs_refused(), None);
    }
}

#[test]
fn training_goes_on_in_replays() {
    for (name, optimizer) in [
        ("gpt2", "adamw"),
        ("llama32", "sgd:momentum=0.9,weight_decay=0.1,dampening=0.2"),
        ("bert", "sgd"),
    ] {
        let graph = training(name, Some(optimizer));
        // Node by node by the same rules, and by those of a CPU.
        let (by_node, _) = captured(&graph, false);
        let plain = Program::new(&graph).unwrap();
        let (program, double) = captured(&graph, false);
        for program in [&by_node, &plain, &program] {
            program.go_on(true);
        }
        for step in 0..20 {
            let given = inputs(&graph, (2, 8), step as u64, step + 1);
            by_node.forget_graphs();
            let (run, same) = (program.run(&given).unwrap(), by_node.run(&given).unwrap());
            assert!(!same.is_replayed && run.is_replayed == (step > 0));
            assert!(bits(&run) == bits(&same), "{name} {optimizer}: step {step}");
            if optimizer == "adamw" && step > 0 {
                // What rounds otherwise takes another way where a gradient is nothing but rounding.
                continue;
            }
            let near = plain.run(&given).unwrap();
            for ((name, a), (_, b)) in run.outputs.iter().zip(&near.outputs) {
                assert!(a.allclose(b, 1e-3, 1e-5, true), "{name} in step {step}");
            }
        }
        assert_eq!((double.captures.get(), double.replays.get()), (1, 19));
        // From what is given, where it lies.
        program.go_on(false);
        by_node.go_on(false);
        by_node.forget_graphs();
        let given = inputs(&graph, (2, 8), 1, 1);
        let same = by_node.run(&given).unwrap();
        for _ in 0..2 {
            let run = program.run(&given).unwrap();
            assert!(run.is_replayed && bits(&run) == bits(&same), "{name}");
        }
    }
}

#[test]
fn a_capture_that_fails_is_told_once_and_training_goes_on() {
    let graph = training("gpt2", Some("sgd:momentum=0.9,weight_decay=0.1"));
    let (program, _) = captured(&graph, true);
    let plain = Program::new(&graph).unwrap();
    program.go_on(true);
    plain.go_on(true);
    for step in 0..4 {
        let given = inputs(&graph, (2, 8), step as u64, step + 1);
        let (run, near) = (program.run(&given).unwrap(), plain.run(&given).unwrap());
        assert!(!run.is_replayed);
        for ((name, a), (_, b)) in run.outputs.iter().zip(&near.outputs) {
            assert!(a.allclose(b, 1e-4, 1e-6, true), "{name} in step {step}");
        }
    }
    let why = program.graphs_refused().unwrap();
    assert!(
        why.contains("not permitted when stream is capturing"),
        "{why}"
    );
}

#[test]
fn an_index_out_of_range_is_told_after_a_replay_as_before() {
    let source = "graph @g imported (%table: f32[4, 2], %at: i64[3]) -> (%y) {
  %y = Gather %table, %at {axis=0}
}
";
    let mut graph = text::parse(source).unwrap();
    ckpt_passes::transform::infer::infer(&mut graph).unwrap();
    let (program, _) = captured(&graph, false);
    let plain = Program::new(&graph).unwrap();
    let table = Tensor::from_slice(&[0f32, 1., 2., 3., 4., 5., 6., 7.]).view([4, 2]);
    let given = |at: [i64; 3]| {
        let at = Tensor::from_slice(&at);
        Inputs::from([("table".into(), table.shallow_clone()), ("at".into(), at)])
    };
    for at in [[0, -1, 3], [-4, 2, 2], [1, 1, -2]] {
        let (run, same) = (program.run(&given(at)), plain.run(&given(at)));
        assert!(bits(&run.unwrap()) == bits(&same.unwrap()), "{at:?}");
    }
    for at in [[0, 4, 1], [-5, 0, 0]] {
        let told = program.run(&given(at)).err().unwrap().to_string();
        assert_eq!(told, plain.run(&given(at)).err().unwrap().to_string());
    }
    let run = program.run(&given([3, 2, 1])).unwrap();
    assert!(run.is_replayed && bits(&run) == bits(&plain.run(&given([3, 2, 1])).unwrap()));
}

/// Two streams of one seed, one of another, and a stream that is drawn twice.
const RANDOM: &str =
    "graph @g imported (%x: f32[3, 40], %seed: i64[], %other: i64[1]) -> (%a, %b, %c, %u) {
  init %one : i64[] = 1
  init %two : i64[] = 5000000000
  init %low : f32[] = 0.1
  init %high : f32[] = 0.5
  init %dims : i64[2] = [7, 9]
  %a = Dropout %x, %low, %seed, %one
  %n = Neg %a
  %b = Dropout %n, %low, %seed, %one
  %c = Dropout %b, %high, %other, %two
  %u = SeededUniform %dims, %seed, %two
}
";

#[test]
fn replays_draw_by_the_seeds_of_their_step() {
    let mut graph = text::parse(RANDOM).unwrap();
    ckpt_passes::transform::infer::infer(&mut graph).unwrap();
    // As a device draws, and as a CPU does.
    let (mut program, double) = captured(&graph, false);
    program.use_blocks_of(DeviceKind::Cuda);
    let plain = Program::new(&graph).unwrap();
    let mut seen = BTreeSet::new();
    for step in 0..6i64 {
        let x = Tensor::ones([3, 40], (Kind::Float, Device::Cpu)) * (step + 1);
        let seeds = [("seed", step / 2 - (1 << 40)), ("other", step % 2)];
        let mut given = Inputs::from([("x".into(), x)]);
        given.insert(seeds[0].0.into(), Tensor::from(seeds[0].1));
        given.insert(seeds[1].0.into(), Tensor::from_slice(&[seeds[1].1]));
        let run = program.run(&given).unwrap();
        assert_eq!(run.is_replayed, step > 0);
        let same = plain.run(&given).unwrap();
        assert!(bits(&run) == bits(&same), "step {step}");
        let masks = run.outputs.iter().map(|(_, y)| y.ne(0.));
        seen.insert(format!(
            "{:?}",
            masks
                .map(|m| Vec::<bool>::try_from(m.view([-1])).unwrap())
                .collect::<Vec<_>>()
        ));
        let (keys, checks) = (3 * 2 * 4, 16 * graph.order().len() as u64);
        let inputs = 480 + 8 + 8;
        assert_eq!(
            program.staying_bytes(),
            keys + inputs + checks,
            "step {step}"
        );
    }
    assert_eq!(seen.len(), 6, "a seed was not read again");
    assert_eq!((double.captures.get(), double.replays.get()), (1, 5));
    assert_eq!(program.graphs_refused(), None);
}

#[test]
fn kernels_of_a_device_do_not_wait_for_it_in_a_captured_step() {
    for name in ["gpt2", "bert", "llama32", "llama32_mask"] {
        let graph = training(name, Some("adamw"));
        let (mut program, _) = captured(&graph, false);
        program.use_blocks_of(DeviceKind::Cuda);
        let mut plain = Program::new(&graph).unwrap();
        plain.use_blocks_of(DeviceKind::Cuda);
        for step in 0..3 {
            let given = inputs(&graph, (2, 8), step as u64, step + 1);
            let run = program
                .run(&given)
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(run.is_replayed, step > 0, "{name}");
            assert!(run.outputs.len() == plain.run(&given).unwrap().outputs.len());
        }
    }
}

/// A training graph of GPT-2 that offloads the inputs of its blocks.
fn offloading(target: OffloadTarget) -> Graph {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/gpt2/model.onnx");
    let mut graph = load(&root, &Given::default()).unwrap().graph;
    let request = Request {
        fuse: true,
        drop_outputs: vec!["*".into()],
        plan: PlanRequest {
            offload: Offload {
                set: OffloadSet::LayerInputs,
                to: target,
                ..Offload::default()
            },
            ..Policy::NONE.into()
        },
        dims: vec![("batch".into(), 2), ("seq".into(), 8)],
        ..Request::default()
    };
    optimize(&mut graph, &request, &mut Watch::default()).unwrap();
    graph
}

#[test]
fn a_captured_step_offloads_to_the_pages_of_its_warm_up() {
    let graph = offloading(OffloadTarget::Host);
    let (program, double) = captured(&graph, false);
    let plain = Program::new(&graph).unwrap();
    for step in 0..5 {
        let given = inputs(&graph, (2, 8), step as u64, 1);
        let (run, same) = (program.run(&given).unwrap(), plain.run(&given).unwrap());
        assert_eq!(run.is_replayed, step > 0);
        assert!(bits(&run) == bits(&same), "{step}");
        assert!(run.outside_peak_bytes > 0);
        assert_eq!(run.outside_peak_bytes, same.outside_peak_bytes);
    }
    assert_eq!((double.captures.get(), double.replays.get()), (1, 4));
    assert_eq!(program.graphs_refused(), None);
}

#[test]
fn transfers_that_cannot_be_captured_say_why() {
    for (target, streams, reason) in [
        (OffloadTarget::Disk, true, "a file cannot be written"),
        (OffloadTarget::Host, false, "run one after the other"),
    ] {
        let graph = offloading(target);
        let (mut program, double) = captured(&graph, false);
        program.use_streams(streams);
        for _ in 0..3 {
            let given = inputs(&graph, (2, 8), 1, 1);
            assert!(!program.run(&given).unwrap().is_replayed);
        }
        let why = program.graphs_refused().unwrap();
        assert!(why.contains(reason) && double.captures.get() == 0, "{why}");
    }
}

#[test]
fn what_cannot_be_captured_says_why() {
    let random = "graph @g imported (%x: f32[4], %seed: i64[]) -> (%y) {
  init %stream : i64[] = 1
  init %ratio : f32[] = 0.5
  %next = Add %seed, %stream
  %y = Dropout %x, %ratio, %next, %stream
}
";
    let sized_by_data = "graph @g imported (%x: f32[4]) -> (%y) {
  %y = NonZero %x
}
";
    let grouped = "graph @g imported (%x: f32[4], %seed: i64[]) -> (%y) {
  init %w : f32[2, 1, 1] = [1, 2]
  init %axes : i64[1] = [1]
  init %four : i64[1] = [4]
  %rows = Unsqueeze %x, %axes
  %group = Expand %seed, %four
  %y = GroupedMatMul %rows, %w, %group
}
";
    for (source, reason) in [
        (random, "draws by numbers that the step computes"),
        (sized_by_data, "depend on data"),
        (grouped, "has read the groups of rows"),
    ] {
        let mut graph = text::parse(source).unwrap_or_else(|e| panic!("{e}"));
        ckpt_passes::transform::infer::infer(&mut graph).unwrap();
        let (program, double) = captured(&graph, false);
        let x = Tensor::from_slice(&[1f32, 0., 2., 3.]);
        let given = Inputs::from([("x".into(), x), ("seed".into(), Tensor::from(3i64))]);
        for _ in 0..3 {
            assert!(!program.run(&given).unwrap().is_replayed);
        }
        let why = program.graphs_refused().unwrap();
        assert!(why.contains(reason) && double.captures.get() == 0, "{why}");
    }
    let mut graph =
        text::parse("graph @g imported (%x: f32[4]) -> (%y) {\n  %y = Neg %x\n}\n").unwrap();
    ckpt_passes::transform::infer::infer(&mut graph).unwrap();
    let mut program = Program::new(&graph).unwrap();
    program.use_graphs(true);
    assert!(program.graphs_refused().unwrap().contains("on the CPU"));
}
