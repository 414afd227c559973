//! Steps that a device is sent as one: captured once for inputs of given sizes, then replayed.
//!
//! The first step of such sizes runs node by node, on the stream that is captured: libraries have their workspaces then,
//! and what the host computes for the device lies there. The second is captured: nothing of it is done, its memory is its
//! own from then on, and then it is replayed as every one after it. Inputs, parameters that are written over and results
//! lie where they lay; what is given is copied there before a replay. Where a step cannot be captured the program goes on
//! node by node, and says why.

use super::convert::torch_error;
use super::executor::Program;
use super::kernels::copy_into;
use super::later::{Answers, Later};
use super::schedule::Schedule;
use super::values::Values;
use crate::place::Place;
use crate::rng::Rng;
use ckpt_passes::ir::op::Effect;
use ckpt_passes::{Error, Result};
use ckpt_torch::graph;
use std::collections::BTreeSet;
use std::rc::Rc;
use tch::Tensor;

/// Work of a step.
pub(super) type Work<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Captures steps.
pub(super) trait Recorder {
    /// Does work that is not the default stream's.
    fn aside(&self, work: Work) -> Result<()>;

    /// Captures work, within [`Recorder::aside`]; nothing of it is done. The device is idle. After an error nothing of the
    /// capture is left.
    fn capture(&self, work: Work) -> Result<Box<dyn Recording>>;
}

/// A step that was captured.
pub(super) trait Recording {
    /// Does it. `again` does the same node by node, for a recorder that cannot.
    fn replay(&self, again: Work) -> Result<()>;
}

/// A CUDA device.
struct Device(graph::SecondaryMap);

impl Recorder for Device {
    fn aside(&self, work: Work) -> Result<()> {
        let _on = self.0.enter().map_err(torch_error)?;
        work()
    }

    fn capture(&self, work: Work) -> Result<Box<dyn Recording>> {
        let mut graph = self.0.begin().map_err(torch_error)?;
        // The first error is the reason; what CUDA says of the capture then follows from it.
        work()?;
        graph.end().map_err(torch_error)?;
        Ok(Box::new(graph))
    }
}

impl Recording for graph::Graph {
    fn replay(&self, _: Work) -> Result<()> {
        graph::Graph::replay(self).map_err(torch_error)
    }
}

/// What a replay needs and what it gives back.
pub(super) struct Recorded {
    pub recording: Box<dyn Recording>,
    /// Results that outlive the step, by slot.
    pub results: Vec<(usize, Tensor)>,
    pub answers: Answers,
    pub figures: Figures,
}

/// What a step measured of its memory, above what was alive before it.
#[derive(Clone, Default)]
pub(super) struct Figures {
    pub peak_bytes: u64,
    pub requested_bytes: u64,
    pub peak_at: Option<usize>,
    pub nondeterministic: BTreeSet<&'static str>,
}

/// How a step is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Node by node.
    Plain,
    /// The same, as one that is captured next.
    WarmUp,
    Capture,
    Replay,
}

#[derive(Default)]
enum Stage {
    #[default]
    Nothing,
    Warm(Rc<Schedule>),
    Ready(Rc<Schedule>, Recorded),
}

/// The captured steps of a program: those of one schedule.
#[derive(Default)]
pub(super) struct Graphs {
    recorder: Option<Rc<dyn Recorder>>,
    stage: Stage,
    /// Why steps are not captured though they should be: the first reason.
    refused: Option<String>,
    has_given_up: bool,
}

impl Graphs {
    /// Steps are captured from now on, if they can be.
    pub fn record(&mut self, place: Place) {
        *self = match place {
            Place::Cpu => Graphs::refusing("a run on the CPU has none".into()),
            Place::Cuda(n) => match graph::SecondaryMap::new(n) {
                Ok(side) => Graphs::by(Rc::new(Device(side))),
                Err(e) => Graphs::refusing(e.message),
            },
        };
    }

    pub fn by(recorder: Rc<dyn Recorder>) -> Graphs {
        Graphs {
            recorder: Some(recorder),
            ..Graphs::default()
        }
    }

    fn refusing(reason: String) -> Graphs {
        Graphs {
            refused: Some(reason),
            ..Graphs::default()
        }
    }

    pub fn recorder(&self) -> Option<Rc<dyn Recorder>> {
        self.recorder.clone()
    }

    pub fn refused(&self) -> Option<String> {
        self.refused.clone()
    }

    /// How the next step is done, node by node where it is watched; `refusal` says why one of such sizes cannot be
    /// captured.
    pub fn turn(
        &mut self,
        is_watched: bool,
        schedule: Option<&Rc<Schedule>>,
        refusal: impl FnOnce() -> Option<String>,
    ) -> Turn {
        if self.recorder.is_none() || self.has_given_up {
            return Turn::Plain;
        }
        let found = match (&self.stage, schedule) {
            (Stage::Warm(of), Some(now)) if Rc::ptr_eq(of, now) => Turn::Capture,
            (Stage::Ready(of, _), Some(now)) if Rc::ptr_eq(of, now) => Turn::Replay,
            _ => Turn::WarmUp,
        };
        if is_watched {
            self.forget();
            return Turn::Plain;
        }
        if found != Turn::WarmUp {
            return found;
        }
        self.forget();
        match refusal() {
            None => Turn::WarmUp,
            Some(reason) => {
                self.refused.get_or_insert(reason);
                Turn::Plain
            }
        }
    }

    /// The step of such sizes has run as one that is captured.
    pub fn is_warm(&mut self, schedule: &Rc<Schedule>) {
        self.stage = Stage::Warm(schedule.clone());
    }

    pub fn is_ready(&mut self, schedule: &Rc<Schedule>, recorded: Recorded) {
        self.stage = Stage::Ready(schedule.clone(), recorded);
    }

    /// # Errors
    /// Nothing was captured.
    pub fn ready(&self) -> Result<&Recorded> {
        match &self.stage {
            Stage::Ready(_, recorded) => Ok(recorded),
            _ => Err(Error::bug("run", "no step was captured")),
        }
    }

    /// Steps are done node by node from now on, where they were before: libraries have their workspaces there.
    pub fn give_up(&mut self, why: &Error) {
        self.forget();
        self.has_given_up = true;
        self.refused.get_or_insert(why.message().to_string());
    }

    /// Lets go of what was captured.
    pub fn forget(&mut self) {
        self.stage = Stage::Nothing;
    }
}

impl Program<'_> {
    /// Captures a step whose inputs lie where they stay.
    pub(super) fn captured(
        &self,
        schedule: &Schedule,
        values: &mut Values,
        recorder: &dyn Recorder,
    ) -> Result<Recorded> {
        let mut made = None;
        let recording = recorder.capture(&mut || {
            let later = Later::default();
            let figures = self.steps_of(Some(schedule), values, Some(&later), &mut |_| Ok(()))?;
            made = Some((figures, later.answers()?));
            Ok(())
        })?;
        let (figures, answers) =
            made.ok_or_else(|| Error::bug("run", "what was captured is no step"))?;
        let outlive = self.outputs().map(|(_, slot)| slot);
        let slots: BTreeSet<usize> = outlive.chain(values.statics.results()).collect();
        let result = |slot: usize| Some((slot, values.tensors[slot].as_ref()?.shallow_clone()));
        Ok(Recorded {
            recording,
            results: slots.into_iter().filter_map(result).collect(),
            answers,
            figures,
        })
    }

    /// Does a step that was captured; its results lie where they were.
    pub(super) fn replay(
        &self,
        schedule: &Schedule,
        values: &mut Values,
        recorded: &Recorded,
    ) -> Result<()> {
        recorded.recording.replay(&mut || {
            let later = Later::default();
            self.steps_of(Some(schedule), values, Some(&later), &mut |_| Ok(()))?;
            for (slot, result) in &recorded.results {
                if let Some(new) = &values.tensors[*slot] {
                    copy_into(result, new)?;
                }
            }
            match (&recorded.answers.numbers, later.answers()?.numbers) {
                (Some(numbers), Some(new)) => copy_into(numbers, &new),
                _ => Ok(()),
            }
        })?;
        for (slot, result) in &recorded.results {
            values.tensors[*slot] = Some(result.shallow_clone());
        }
        Ok(())
    }

    /// Why no step of such sizes can be captured.
    pub(super) fn uncaptured(&self, schedule: Option<&Schedule>, rng: Rng) -> Option<String> {
        if !schedule.is_some_and(|s| s.is_static) {
            return Some("sizes depend on data, or an input is not row-major".into());
        }
        let transfer = self.ops().find(|op| op.is_transfer());
        if let Some(op) = transfer {
            return Some(format!("{} moves results by way of the host", op.name));
        }
        let random = self.ops().find(|op| op.effect == Effect::Seeded)?;
        Some(match rng {
            Rng::Counter => format!("{} draws on the host", random.name),
            _ => format!("{} draws from a generator on the host", random.name),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::given::Given;
    use crate::frontend::load;
    use crate::optimize::optimize;
    use crate::runtime::convert;
    use crate::tensors::feed::Feed;
    use crate::tensors::{Tensors, random};
    use ckpt_passes::analysis::sizes::dim_kinds;
    use ckpt_passes::compile::Request;
    use ckpt_passes::driver::Watch;
    use ckpt_passes::ir::{Graph, Tensor as Constant};
    use ckpt_passes::text;
    use ckpt_passes::transform::optimizer::{Optimizer, STEP};
    use ckpt_torch::bytes;
    use std::cell::Cell;
    use std::collections::BTreeMap;
    use std::path::Path;

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
        fn graphs(&mut self) -> &mut Graphs {
            self.graphs.get_mut()
        }

        fn forget_graphs(&self) {
            self.graphs.borrow_mut().forget();
        }

        fn input_places(&self) -> Vec<usize> {
            let values = self.values.borrow();
            let places = values.statics.places();
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
            optimizer: optimizer.map(|text| Optimizer::parse(text).unwrap()),
            fuse_optimizer: optimizer.is_some(),
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
        *program.graphs() = Graphs::by(double.clone());
        (program, double)
    }

    /// Names and bits of what a run gives.
    fn bits(run: &super::super::executor::Run) -> Vec<(String, Vec<u8>)> {
        let read = |t: &Tensor| bytes::read(&t.contiguous()).unwrap();
        run.outputs
            .iter()
            .map(|(n, t)| (n.clone(), read(t)))
            .collect()
    }

    fn places(run: &super::super::executor::Run) -> Vec<usize> {
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

    #[test]
    fn what_cannot_be_captured_says_why() {
        let random = "graph @g imported (%x: f32[4], %seed: i64[]) -> (%y) {
  init %stream : i64[] = 1
  init %ratio : f32[] = 0.5
  %y = Dropout %x, %ratio, %seed, %stream
}
";
        let sized_by_data = "graph @g imported (%x: f32[4]) -> (%y) {
  %y = NonZero %x
}
";
        for (source, reason) in [
            (random, "draws on the host"),
            (sized_by_data, "depend on data"),
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
}
