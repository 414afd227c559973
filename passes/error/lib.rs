//! One error type for the whole compiler.
//!
//! An error says what is wrong, where, what was expected and found, and what to do next. Three families are told
//! apart at a glance: `error[...]` is the user's model, request or environment, `bug[...]` is ours. The kind fixes the
//! exit code, so that no caller has to guess it.

pub mod glob;
pub mod near;

use serde::Serialize;
use std::fmt;

/// Who has to act, and the exit code that goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The model file is wrong or not supported. Exit 2.
    Model,
    /// The request is wrong: an option, a name, a pattern. Exit 2.
    Usage,
    /// We are wrong. Exit 1.
    Bug,
    /// No plan fits the budget. Exit 3.
    Budget,
    /// Two graphs that should agree do not, or numbers of a run are not finite. Exit 4.
    Verification,
    /// No memory, no disk, no device, no libtorch. Exit 5.
    Environment,
}

/// An error with everything a reader needs to act on it.
#[derive(Clone, Debug)]
pub struct Error {
    kind: Kind,
    code: &'static str,
    message: String,
    notes: Vec<(&'static str, String)>,
    shortfall: Option<Box<Shortfall>>,
}

/// A budget that no plan fits into, in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shortfall {
    /// The budget that was asked for.
    pub budget_bytes: u64,
    /// The smallest budget for which a plan is known.
    pub smallest_feasible_bytes: u64,
    /// Whether nothing smaller is possible at all.
    pub is_proven: bool,
    /// What the two are on: `peak`, or `peak above static` for a cost graph.
    pub budget_on: &'static str,
    /// Bytes that are alive during the whole step.
    pub static_bytes: u64,
    /// The node whose operands, results and temporaries set it; `None` where the outputs together are larger.
    pub peak_at: Option<String>,
    /// What is alive then beside static values, largest first.
    pub tensors: Vec<Held>,
}

/// A tensor that takes memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Name of the tensor.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// The result of a fallible function of the compiler.
pub type Result<T, E = Box<Error>> = std::result::Result<T, E>;

impl Error {
    fn new(kind: Kind, code: &'static str, message: impl Into<String>) -> Box<Error> {
        Box::new(Error {
            kind,
            code,
            message: message.into(),
            notes: Vec::new(),
            shortfall: None,
        })
    }

    /// The model is malformed or uses something unsupported. `code` names the rule: `shape`, `type`, `op`, `cycle`, …
    pub fn model(code: &'static str, message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Model, code, message)
    }

    /// The request is wrong: an option, a name, a pattern.
    pub fn usage(code: &'static str, message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Usage, code, message)
    }

    /// An invariant of ours is broken. Never the user's fault.
    pub fn bug(code: &'static str, message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Bug, code, message)
    }

    /// No plan fits the budget.
    pub fn budget(message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Budget, "budget", message)
    }

    /// Two graphs that should agree do not, or a run gave numbers that it should not.
    pub fn verification(code: &'static str, message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Verification, code, message)
    }

    /// The environment lacks something: memory, disk, a device, libtorch.
    pub fn environment(code: &'static str, message: impl Into<String>) -> Box<Error> {
        Error::new(Kind::Environment, code, message)
    }

    fn note(mut self: Box<Self>, label: &'static str, text: impl Into<String>) -> Box<Error> {
        self.notes.push((label, text.into()));
        self
    }

    /// Where: the file, node and layer.
    pub fn at(self: Box<Self>, place: impl Into<String>) -> Box<Error> {
        self.note("at", place)
    }

    /// What was expected.
    pub fn expected(self: Box<Self>, text: impl Into<String>) -> Box<Error> {
        self.note("expected", text)
    }

    /// What was found.
    pub fn found(self: Box<Self>, text: impl Into<String>) -> Box<Error> {
        self.note("found", text)
    }

    /// The next thing to do.
    pub fn help(self: Box<Self>, text: impl Into<String>) -> Box<Error> {
        self.note("help", text)
    }

    /// The numbers of a budget that nothing fits into, for programs.
    pub fn short_of(mut self: Box<Self>, shortfall: Shortfall) -> Box<Error> {
        self.shortfall = Some(Box::new(shortfall));
        self
    }

    /// Returns the numbers of a budget that nothing fits into.
    pub fn shortfall(&self) -> Option<&Shortfall> {
        self.shortfall.as_deref()
    }

    /// Returns who has to act.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the code, which names the broken rule.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Returns the message without its notes.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The labelled lines below the message, in the order they were added.
    pub fn notes(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.notes
            .iter()
            .map(|(label, text)| (*label, text.as_str()))
    }

    /// Returns the exit code of the command line.
    pub fn exit_code(&self) -> i32 {
        match self.kind {
            Kind::Bug => 1,
            Kind::Model | Kind::Usage => 2,
            Kind::Budget => 3,
            Kind::Verification => 4,
            Kind::Environment => 5,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.kind == Kind::Bug {
            "bug"
        } else {
            "error"
        };
        write!(f, "{family}[{}]: {}", self.code, self.message)?;
        for (label, text) in &self.notes {
            let mut lines = text.lines();
            write!(f, "\n  {label}: {}", lines.next().unwrap_or(""))?;
            for line in lines {
                write!(f, "\n    {line}")?;
            }
        }
        Ok(())
    }
}

impl std::error::Error for Error {}
