//! A budget that no plan fits into, as data until somebody prints it.

use super::budget::{self, Basis};
use super::index::ValueIdx;
use super::input::PlanInput;
use super::problem::Problem;
use super::solve::min_peak::MinPeak;
use ckpt_error::{Error, Held, Kind, Shortfall};

/// Why there is no plan.
#[derive(Clone, Debug)]
pub enum Failure {
    /// No plan fits into the budget.
    Infeasible(Box<Infeasible>),
    /// Everything else.
    Invalid(Box<Error>),
}

/// The numbers of a budget that no plan fits into.
#[derive(Clone, Debug)]
pub struct Infeasible {
    /// In the terms of budgets.
    pub shortfall: Shortfall,
    /// Whether constraints of the user limit what plans can do.
    pub is_constrained: bool,
}

impl Failure {
    /// Returns whether a larger budget may have a plan.
    pub fn is_infeasible(&self) -> bool {
        match self {
            Failure::Infeasible(_) => true,
            Failure::Invalid(error) => error.kind() == Kind::Budget,
        }
    }

    /// Returns the smallest budget for which a plan is known.
    pub fn min_budget_bytes(&self) -> Option<u64> {
        match self {
            Failure::Infeasible(why) => Some(why.shortfall.smallest_feasible_bytes),
            Failure::Invalid(_) => None,
        }
    }
}

impl From<Box<Error>> for Failure {
    fn from(error: Box<Error>) -> Failure {
        Failure::Invalid(error)
    }
}

impl From<Failure> for Box<Error> {
    fn from(failure: Failure) -> Box<Error> {
        match failure {
            Failure::Infeasible(why) => why.into_error(),
            Failure::Invalid(error) => error,
        }
    }
}

const SHOWN_TENSORS: usize = 8;

impl Infeasible {
    /// Returns the numbers of a budget, given as a peak, that is below every peak known.
    pub fn new(input: &PlanInput, budget_bytes: u64, min_peak: &MinPeak) -> Infeasible {
        let problem = &input.problem;
        let held = |(value, bytes): &(ValueIdx, u64)| Held {
            name: tensor_name(problem, *value),
            bytes: *bytes,
        };
        Infeasible {
            shortfall: Shortfall {
                budget_bytes: input.shown(budget_bytes),
                smallest_feasible_bytes: input.shown(min_peak.reached_bytes),
                is_proven: min_peak.is_proven(),
                budget_on: input.basis.name(),
                static_bytes: min_peak.static_bytes,
                peak_at: min_peak.op.map(|op| problem.ops[op].name.clone()),
                tensors: min_peak.tensors.iter().map(held).collect(),
            },
            is_constrained: !input.hard_constraints().is_empty(),
        }
    }

    /// Returns the error to print, exit code 3.
    pub fn into_error(self) -> Box<Error> {
        let why = &self.shortfall;
        let smallest = why.smallest_feasible_bytes;
        let known = match why.is_proven {
            true => "possible",
            false => "known to be possible",
        };
        let mut error = Error::budget(format!(
            "no plan fits into {} bytes of {}; {smallest} is the smallest that is {known}",
            why.budget_bytes, why.budget_on,
        ));
        if let Some(op) = &why.peak_at {
            error = error.at(format!("`{op}`, while it runs"));
        }
        let mut found = Vec::new();
        if why.budget_on == Basis::Peak.name() {
            found.push(format!(
                "{} bytes of parameters and inputs",
                why.static_bytes
            ));
        }
        let (shown, others) = why.tensors.split_at(why.tensors.len().min(SHOWN_TENSORS));
        found.extend(
            shown
                .iter()
                .map(|t| format!("{} bytes: {}", t.bytes, t.name)),
        );
        if !others.is_empty() {
            found.push(format!("and {} smaller ones", others.len()));
        }
        error = error
            .found(found.join("\n"))
            .help(format!("--budget {smallest}"));
        if let Some(question) = budget::question(why.budget_bytes) {
            error = error.help(question);
        }
        if self.is_constrained {
            error = error.help("what --layers, --save-ops and the like settle was taken as given");
        }
        error.short_of(self.shortfall)
    }
}

/// Returns the name of a value for people: that of the op that makes it.
pub fn tensor_name(problem: &Problem, value: ValueIdx) -> String {
    let Some(producer) = problem.values[value].producer else {
        return format!("value {value}, there from the start");
    };
    let op = &problem.ops[producer];
    match op.outs.iter().position(|v| *v == value) {
        Some(at) if op.outs.len() > 1 => format!("result {at} of `{}`", op.name),
        _ => format!("result of `{}`", op.name),
    }
}
