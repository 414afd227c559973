//! The arithmetic of several nodes as one list of steps, with its text.

use super::{Expr, LIBRARY, OPS, Op};
use crate::ty::DType;
use std::fmt;
use std::str::FromStr;

/// One step; it refers to earlier steps by number.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// An element of an input, or of its other half.
    Load {
        /// The number of the input.
        input: usize,
        /// Whether it is the element in the other half of the last axis.
        partner: bool,
    },
    /// [`Expr::FirstHalf`].
    FirstHalf,
    /// [`Expr::RowLength`].
    RowLength,
    /// A number.
    Number(f32),
    /// An exact function.
    Apply(Op, Vec<usize>),
    /// Rounds to a type; to bool, 1 unless it is 0.
    Round(DType, usize),
    /// The sum over a row.
    RowSum(usize),
    /// A function of a library. `arithmetic` is the step that computes the same; a function of [`LIBRARY`] has none.
    Call {
        /// Its name.
        name: String,
        /// Its operands.
        operands: Vec<usize>,
        /// The same as arithmetic.
        arithmetic: Option<usize>,
    },
}

impl Step {
    /// Returns the steps that it reads, without the arithmetic of a call.
    pub fn operands(&self) -> &[usize] {
        match self {
            Step::Apply(_, operands) | Step::Call { operands, .. } => operands,
            Step::Round(_, of) | Step::RowSum(of) => std::slice::from_ref(of),
            _ => &[],
        }
    }
}

/// Where an operand of a node comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An input of the program.
    Input(usize),
    /// A step.
    Step(usize),
}

/// The arithmetic of a chain of nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// The steps; equal ones occur once.
    pub steps: Vec<Step>,
    /// The step and the type of each result.
    pub results: Vec<(usize, DType)>,
}

impl Program {
    fn push(&mut self, step: Step) -> usize {
        let found = self.steps.iter().position(|s| *s == step);
        found.unwrap_or_else(|| {
            self.steps.push(step);
            self.steps.len() - 1
        })
    }

    /// Appends the results of a node, rounded to their types, and returns their steps. `None` if the node reads a step in
    /// the other half of a row: only an input has one.
    pub fn inline(
        &mut self,
        node: &[Expr],
        operands: &[Option<Source>],
        types: &[DType],
    ) -> Option<Vec<usize>> {
        let narrow = *types.first()?;
        let rounded = |program: &mut Program, (expr, dtype): (&Expr, &DType)| {
            let step = program.expr(expr, operands, narrow)?;
            Some(program.round(*dtype, step))
        };
        node.iter().zip(types).map(|r| rounded(self, r)).collect()
    }

    fn round(&mut self, dtype: DType, step: usize) -> usize {
        match dtype {
            DType::F32 => step,
            _ => self.push(Step::Round(dtype, step)),
        }
    }

    fn expr(&mut self, e: &Expr, from: &[Option<Source>], narrow: DType) -> Option<usize> {
        let all = |program: &mut Program, list: &[Expr]| -> Option<Vec<usize>> {
            list.iter().map(|e| program.expr(e, from, narrow)).collect()
        };
        let load = |input, partner| Step::Load { input, partner };
        let step = match e {
            Expr::Operand(i) => match (*from.get(*i)?)? {
                Source::Step(step) => return Some(step),
                Source::Input(input) => load(input, false),
            },
            Expr::Partner(i) => match (*from.get(*i)?)? {
                Source::Step(_) => return None,
                Source::Input(input) => load(input, true),
            },
            Expr::FirstHalf => Step::FirstHalf,
            Expr::RowLength => Step::RowLength,
            Expr::Number(n) => Step::Number(*n),
            Expr::Apply(op, operands) => Step::Apply(*op, all(self, operands)?),
            Expr::Round(e) => {
                let step = self.expr(e, from, narrow)?;
                return Some(self.round(narrow, step));
            }
            Expr::RowSum(e) => Step::RowSum(self.expr(e, from, narrow)?),
            // No kernel adds elements of several rows.
            Expr::SumToResult(_) => return None,
            Expr::Call(name, operands, arithmetic) => Step::Call {
                name: (*name).into(),
                operands: all(self, operands)?,
                arithmetic: match arithmetic {
                    Some(e) => Some(self.expr(e, from, narrow)?),
                    None => None,
                },
            },
        };
        Some(self.push(step))
    }

    /// Returns the inputs that are only read at the index of the result: a result may overwrite them.
    pub fn inputs_in_place(&self) -> Vec<usize> {
        let read = |wanted: bool| {
            self.steps.iter().filter_map(move |step| match step {
                Step::Load { input, partner } if *partner == wanted => Some(*input),
                _ => None,
            })
        };
        let mut own: Vec<usize> = read(false)
            .filter(|i| !read(true).any(|p| p == *i))
            .collect();
        own.sort_unstable();
        own
    }

    /// Returns, for each step, whether it has one value for a whole row.
    pub fn row_steps(&self) -> Vec<bool> {
        let mut rows: Vec<bool> = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let is_row = match step {
                Step::Load { .. } | Step::FirstHalf => false,
                Step::RowLength | Step::Number(_) | Step::RowSum(_) => true,
                _ => step.operands().iter().all(|s| rows[*s]),
            };
            rows.push(is_row);
        }
        rows
    }

    /// Returns whether rows are summed.
    pub fn sums_rows(&self) -> bool {
        self.steps.iter().any(|s| matches!(s, Step::RowSum(_)))
    }
}

/// One line for each step, then one for each result.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in &self.steps {
            match step {
                Step::Load { input, partner } => {
                    write!(f, "{} {input}", if *partner { "partner" } else { "load" })?;
                }
                Step::FirstHalf => write!(f, "first_half")?,
                Step::RowLength => write!(f, "row_length")?,
                Step::Number(n) => write!(f, "number {n:?}")?,
                Step::Apply(op, _) => write!(f, "{}", op.row().name)?,
                Step::Round(dtype, _) => write!(f, "{dtype}")?,
                Step::RowSum(_) => write!(f, "row_sum")?,
                Step::Call {
                    name, arithmetic, ..
                } => match arithmetic {
                    Some(step) => write!(f, "call {name} {step}")?,
                    None => write!(f, "{name}")?,
                },
            }
            for operand in step.operands() {
                write!(f, " {operand}")?;
            }
            writeln!(f)?;
        }
        for (step, dtype) in &self.results {
            writeln!(f, "result {dtype} {step}")?;
        }
        Ok(())
    }
}

impl FromStr for Program {
    type Err = String;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Program, String> {
        let mut program = Program::default();
        for line in text.lines() {
            let read = program.read(line);
            read.ok_or_else(|| format!("`{line}` is no step of a fused chain"))?;
        }
        Ok(program)
    }
}

impl Program {
    fn read(&mut self, line: &str) -> Option<()> {
        let dtype = |name: &str| DType::ALL.into_iter().find(|d| d.name() == name);
        let words: Vec<&str> = line.split(' ').collect();
        let (first, rest) = words.split_first()?;
        let at = |i: usize| rest.get(i)?.parse::<usize>().ok();
        let numbers = |from: usize| -> Option<Vec<usize>> {
            let parsed = rest.get(from..)?.iter().map(|w| w.parse().ok());
            let steps: Vec<usize> = parsed.collect::<Option<_>>()?;
            steps.iter().all(|s| *s < self.steps.len()).then_some(steps)
        };
        let step = match *first {
            "load" | "partner" => Step::Load {
                input: at(0)?,
                partner: *first == "partner",
            },
            "first_half" => Step::FirstHalf,
            "row_length" => Step::RowLength,
            "number" => Step::Number(rest.first()?.parse().ok()?),
            "row_sum" => Step::RowSum(*numbers(0)?.first()?),
            "call" => Step::Call {
                name: (*rest.first()?).into(),
                operands: numbers(2)?,
                arithmetic: at(1),
            },
            "result" => {
                let step = *numbers(1)?.first()?;
                self.results.push((step, dtype(rest.first()?)?));
                return Some(());
            }
            name => {
                if let Some(dtype) = dtype(name) {
                    Step::Round(dtype, *numbers(0)?.first()?)
                } else if let Some(row) = OPS.iter().find(|row| row.name == name) {
                    let operands = numbers(0)?;
                    if operands.len() != row.arity {
                        return None;
                    }
                    Step::Apply(row.op, operands)
                } else {
                    LIBRARY.iter().find(|(known, _)| *known == name)?;
                    Step::Call {
                        name: name.into(),
                        operands: numbers(0)?,
                        arithmetic: None,
                    }
                }
            }
        };
        self.steps.push(step);
        Some(())
    }
}
