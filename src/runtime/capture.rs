//! When steps are captured and replayed (CUDA graphs).
//!
//! The first step of given sizes is a warm-up: it runs node by node, on the stream that is captured. Afterwards libraries
//! have their workspaces, and the values that the host computes lie on the device. The second step is captured: nothing
//! of it is executed, and its memory stays its own. Then it is replayed, like every later step. Inputs, overwritten
//! parameters and results stay at fixed addresses, and given inputs are copied there before a replay. Where a step cannot
//! be captured, the program goes on node by node and reports why.

use super::deferred_checks::CheckResults;
use super::device;
use super::observed::Observed;
use super::recorder::{Recorder, Recording};
use super::specialization::Specialization;
use crate::place::Place;
use ckpt_passes::{Error, Result};
use std::rc::Rc;
use tch::Tensor;

/// A captured step and its results.
pub(super) struct CapturedStep {
    pub recording: Box<dyn Recording>,
    /// Results that outlive the step, by slot.
    pub results: Vec<(usize, Tensor)>,
    pub checks: CheckResults,
    pub stats: StepStats,
}

/// The memory that a step took, above what was alive before it.
#[derive(Clone, Default)]
pub(super) struct StepStats {
    pub peak_bytes: u64,
    pub requested_bytes: u64,
    /// The most bytes in the swap store.
    pub outside_bytes: u64,
    pub peak_at: Option<usize>,
    pub observed: Observed,
}

/// How a step is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepMode {
    /// Node by node.
    Plain,
    /// Node by node, as the step before a capture.
    WarmUp,
    Capture,
    Replay,
}

#[derive(Default)]
enum Stage {
    #[default]
    Nothing,
    Warm(Rc<Specialization>),
    Ready(Rc<Specialization>, CapturedStep),
}

/// The captured step of a program, for one specialization.
#[derive(Default)]
pub(super) struct Captures {
    recorder: Option<Rc<dyn Recorder>>,
    stage: Stage,
    /// The first reason why steps are not captured although they should be.
    refused: Option<String>,
    has_given_up: bool,
}

impl Captures {
    /// Captures steps from now on, if they can be captured.
    pub fn record(&mut self, place: Place) {
        *self = match device::of(place).recorder() {
            Ok(recorder) => Captures::by(recorder),
            Err(reason) => Captures::refusing(reason),
        };
    }

    /// Captures by a recorder.
    pub fn by(recorder: Rc<dyn Recorder>) -> Captures {
        Captures {
            recorder: Some(recorder),
            ..Captures::default()
        }
    }

    fn refusing(reason: String) -> Captures {
        Captures {
            refused: Some(reason),
            ..Captures::default()
        }
    }

    /// Returns the recorder, if steps are captured.
    pub fn recorder(&self) -> Option<Rc<dyn Recorder>> {
        self.recorder.clone()
    }

    /// Returns why steps are not captured although they should be.
    pub fn refused(&self) -> Option<String> {
        self.refused.clone()
    }

    /// Returns how to run the next step; a watched step runs node by node. `refusal` returns why a step of these sizes
    /// cannot be captured.
    pub fn mode(
        &mut self,
        is_watched: bool,
        specialization: Option<&Rc<Specialization>>,
        refusal: impl FnOnce() -> Option<String>,
    ) -> StepMode {
        if self.recorder.is_none() || self.has_given_up {
            return StepMode::Plain;
        }
        let found = match (&self.stage, specialization) {
            (Stage::Warm(of), Some(now)) if Rc::ptr_eq(of, now) => StepMode::Capture,
            (Stage::Ready(of, _), Some(now)) if Rc::ptr_eq(of, now) => StepMode::Replay,
            _ => StepMode::WarmUp,
        };
        if is_watched {
            self.forget();
            return StepMode::Plain;
        }
        if found != StepMode::WarmUp {
            return found;
        }
        self.forget();
        match refusal() {
            None => StepMode::WarmUp,
            Some(reason) => {
                self.refused.get_or_insert(reason);
                StepMode::Plain
            }
        }
    }

    /// Notes that the warm-up step has run.
    pub fn set_warm(&mut self, specialization: &Rc<Specialization>) {
        self.stage = Stage::Warm(specialization.clone());
    }

    /// Stores a captured step.
    pub fn set_ready(&mut self, specialization: &Rc<Specialization>, recorded: CapturedStep) {
        self.stage = Stage::Ready(specialization.clone(), recorded);
    }

    /// Returns the captured step.
    ///
    /// # Errors
    /// Nothing was captured.
    pub fn ready(&self) -> Result<&CapturedStep> {
        match &self.stage {
            Stage::Ready(_, recorded) => Ok(recorded),
            _ => Err(Error::bug("run", "no step was captured")),
        }
    }

    /// Runs all further steps node by node, on the same stream: libraries have their workspaces there.
    pub fn give_up(&mut self, why: &Error) {
        self.forget();
        self.has_given_up = true;
        self.refused.get_or_insert(why.message().to_string());
    }

    /// Drops the captured step.
    pub fn forget(&mut self) {
        self.stage = Stage::Nothing;
    }
}
