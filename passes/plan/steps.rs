//! Schedules: the steps that ops run in, are recomputed in, and have their results moved in.

use super::index::OpIdx;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One step of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Runs an op. A later run than the first is a recomputation.
    Run(OpIdx),
    /// Begins to copy the results of an op out of the device's memory.
    Offload(OpIdx),
    /// Frees offloaded results on the device once they have left it.
    Release(OpIdx),
    /// Begins to copy offloaded results back. They take memory from here on.
    Fetch(OpIdx),
}

impl Step {
    /// Returns the op that runs or whose results are moved.
    pub fn op(self) -> OpIdx {
        let (Step::Run(op) | Step::Offload(op) | Step::Release(op) | Step::Fetch(op)) = self;
        op
    }

    /// Returns true for every step that runs no op.
    pub fn is_move(self) -> bool {
        !matches!(self, Step::Run(_))
    }
}

impl From<OpIdx> for Step {
    fn from(op: OpIdx) -> Step {
        Step::Run(op)
    }
}

impl From<&OpIdx> for Step {
    fn from(op: &OpIdx) -> Step {
        Step::Run(*op)
    }
}

impl From<&Step> for Step {
    fn from(step: &Step) -> Step {
        *step
    }
}

/// The steps of a plan. A file has them as numbers: the number of an op counts three for every offloaded op before it, which
/// run, move and release it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Numbers", into = "Numbers")]
pub struct Schedule {
    /// Runs of ops and moves of their results, in order.
    pub steps: Vec<Step>,
    /// Ops whose results are offloaded, in order.
    pub offloaded: Vec<OpIdx>,
}

/// Returns the steps with every `Offload` right after its op, and every `Release` once, between that and the first fetch:
/// where it is, else right after the `Offload`.
pub fn settled(steps: &[Step]) -> Vec<Step> {
    #[derive(Default)]
    struct Moves {
        has_fetch: bool,
        is_released_in_time: bool,
        is_released: bool,
    }
    let mut moves: BTreeMap<OpIdx, Moves> = BTreeMap::new();
    for step in steps.iter().filter(|step| step.is_move()) {
        let own = moves.entry(step.op()).or_default();
        own.has_fetch |= matches!(step, Step::Fetch(_));
        own.is_released_in_time |= matches!(step, Step::Release(_)) && !own.has_fetch;
    }
    let mut settled = Vec::with_capacity(steps.len());
    for step in steps {
        match (step, moves.get_mut(&step.op())) {
            (Step::Run(op), Some(own)) => {
                settled.extend([Step::Run(*op), Step::Offload(*op)]);
                if !own.is_released_in_time {
                    own.is_released = true;
                    settled.push(Step::Release(*op));
                }
            }
            (Step::Offload(_), _) => {}
            (Step::Release(_), Some(own)) => {
                if !std::mem::replace(&mut own.is_released, true) {
                    settled.push(*step);
                }
            }
            _ => settled.push(*step),
        }
    }
    settled
}

/// A schedule as files have it.
#[derive(Serialize, Deserialize)]
struct Numbers {
    schedule: Vec<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    offloaded: Vec<OpIdx>,
}

impl Schedule {
    /// Returns the schedule of some steps.
    pub fn new(steps: Vec<Step>) -> Schedule {
        let moved = steps.iter().filter(|step| step.is_move());
        let offloaded: BTreeSet<OpIdx> = moved.map(|step| step.op()).collect();
        Schedule {
            offloaded: offloaded.into_iter().collect(),
            steps,
        }
    }

    /// Returns the number of a step in files. Moving out and moving back have the same.
    pub fn number(&self, step: Step) -> usize {
        let before = self.offloaded.partition_point(|op| *op < step.op());
        let first = step.op().0 + 2 * before;
        match step {
            Step::Run(_) => first,
            Step::Offload(_) | Step::Fetch(_) => first + 1,
            Step::Release(_) => first + 2,
        }
    }

    /// Returns the numbers of all steps in files.
    pub fn numbers(&self) -> Vec<usize> {
        self.steps.iter().map(|step| self.number(*step)).collect()
    }
}

impl From<Schedule> for Numbers {
    fn from(schedule: Schedule) -> Numbers {
        Numbers {
            schedule: schedule.numbers(),
            offloaded: schedule.offloaded,
        }
    }
}

impl From<Numbers> for Schedule {
    fn from(numbers: Numbers) -> Schedule {
        let mut offloaded = numbers.offloaded;
        offloaded.sort_unstable();
        offloaded.dedup();
        let first_numbers: Vec<usize> = offloaded
            .iter()
            .enumerate()
            .map(|(before, op)| op.0.saturating_add(2 * before))
            .collect();
        let mut has_left = vec![false; offloaded.len()];
        let step = |number: &usize| {
            let Some(at) = first_numbers
                .partition_point(|n| n <= number)
                .checked_sub(1)
            else {
                return Step::Run(OpIdx(*number));
            };
            let op = offloaded[at];
            match number - first_numbers[at] {
                0 => Step::Run(op),
                1 if std::mem::replace(&mut has_left[at], true) => Step::Fetch(op),
                1 => Step::Offload(op),
                2 => Step::Release(op),
                _ => Step::Run(OpIdx(number - 2 * (at + 1))),
            }
        };
        Schedule {
            steps: numbers.schedule.iter().map(step).collect(),
            offloaded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_number_the_three_steps_of_an_offloaded_op() {
        let steps = [
            Step::Run(OpIdx(0)),
            Step::Run(OpIdx(1)),
            Step::Offload(OpIdx(1)),
            Step::Run(OpIdx(2)),
            Step::Release(OpIdx(1)),
            Step::Run(OpIdx(3)),
            Step::Offload(OpIdx(3)),
            Step::Release(OpIdx(3)),
            Step::Run(OpIdx(4)),
            Step::Fetch(OpIdx(3)),
            Step::Fetch(OpIdx(1)),
            Step::Run(OpIdx(2)),
        ];
        let schedule = Schedule::new(steps.to_vec());
        assert_eq!(schedule.offloaded, [OpIdx(1), OpIdx(3)]);
        assert_eq!(schedule.numbers(), [0, 1, 2, 4, 3, 5, 6, 7, 8, 6, 2, 4]);
        let text = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), schedule);
    }
}
