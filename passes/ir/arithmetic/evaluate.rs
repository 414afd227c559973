//! Computes a program on the host, step by step over all elements.

use super::{Program, Step};
use crate::ty::DType;

/// The functions of the library that a program is compared with.
pub trait Functions {
    /// Computes a function, if the library computes it as one. Functions of [`LIBRARY`](super::LIBRARY) must be there.
    fn call(&self, name: &str, operands: &[&[f32]]) -> Option<Vec<f32>>;

    /// Sums rows of `width` elements.
    fn row_sums(&self, x: &[f32], width: usize) -> Vec<f32>;
}

/// The elements that a program is computed for: `rows` rows of `width`.
pub struct Elements<'a> {
    /// The number of rows.
    pub rows: usize,
    /// The size of the last axis.
    pub width: usize,
    /// Returns the elements of an input in the order of the results; of the other half of each row if the flag is set.
    pub load: &'a dyn Fn(usize, bool) -> Vec<f32>,
}

/// The values of a step: one for each element, or one for each row.
struct Values {
    list: Vec<f32>,
    of_rows: bool,
}

impl Program {
    /// Returns the elements of each result, in float32.
    ///
    /// # Panics
    /// A function that `functions` lacks and whose arithmetic is not given.
    pub fn evaluate(&self, elements: &Elements, functions: &dyn Functions) -> Vec<Vec<f32>> {
        let of_rows = self.row_steps();
        let mut done: Vec<Option<Values>> = self.steps.iter().map(|_| None).collect();
        for (step, _) in &self.results {
            self.compute(*step, &of_rows, &mut done, elements, functions);
        }
        let full = |(step, _): &(usize, DType)| {
            let values = done[*step].as_ref().expect("computed above");
            spread(values, elements)
        };
        self.results.iter().map(full).collect()
    }

    /// Computes a step and what it needs.
    fn compute(
        &self,
        at: usize,
        of_rows: &[bool],
        done: &mut Vec<Option<Values>>,
        elements: &Elements,
        functions: &dyn Functions,
    ) {
        if done[at].is_some() {
            return;
        }
        let step = &self.steps[at];
        for operand in step.operands() {
            self.compute(*operand, of_rows, done, elements, functions);
        }
        let count = match of_rows[at] {
            true => elements.rows,
            false => elements.rows * elements.width,
        };
        let value = |done: &[Option<Values>], step: usize, i: usize| {
            let values = done[step].as_ref().expect("operands come first");
            match values.of_rows && !of_rows[at] {
                true => values.list[i / elements.width],
                false => values.list[i],
            }
        };
        let list = match step {
            Step::Load { input, partner } => (elements.load)(*input, *partner),
            Step::FirstHalf => {
                let is_first = |i: usize| i % elements.width < elements.width / 2;
                (0..count).map(|i| f32::from(is_first(i))).collect()
            }
            Step::RowLength => vec![elements.width as f32; count],
            Step::Number(n) => vec![*n; count],
            Step::Apply(op, operands) => {
                let element = |i: usize| {
                    let mut given = [0.0; 3];
                    for (to, operand) in given.iter_mut().zip(operands) {
                        *to = value(done, *operand, i);
                    }
                    (op.row().run)(given)
                };
                (0..count).map(element).collect()
            }
            Step::Round(dtype, of) => (0..count)
                .map(|i| rounded(*dtype, value(done, *of, i)))
                .collect(),
            Step::RowSum(of) => {
                let values = done[*of].as_ref().expect("operands come first");
                functions.row_sums(&spread(values, elements), elements.width)
            }
            Step::Call {
                name,
                operands,
                arithmetic,
            } => {
                let all = |operand: &usize| (0..count).map(|i| value(done, *operand, i)).collect();
                let lists: Vec<Vec<f32>> = operands.iter().map(all).collect();
                let lists: Vec<&[f32]> = lists.iter().map(Vec::as_slice).collect();
                match (functions.call(name, &lists), arithmetic) {
                    (Some(values), _) => values,
                    (None, Some(arithmetic)) => {
                        self.compute(*arithmetic, of_rows, done, elements, functions);
                        (0..count).map(|i| value(done, *arithmetic, i)).collect()
                    }
                    (None, None) => panic!("the library has no {name}"),
                }
            }
        };
        done[at] = Some(Values {
            list,
            of_rows: of_rows[at],
        });
    }
}

/// Returns one value for each element.
fn spread(values: &Values, elements: &Elements) -> Vec<f32> {
    match values.of_rows {
        true => (values.list.iter())
            .flat_map(|v| std::iter::repeat_n(*v, elements.width))
            .collect(),
        false => values.list.clone(),
    }
}

/// Rounds to a type, to nearest and ties to even.
fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => half::f16::from_f32(value).to_f32(),
        DType::BF16 => half::bf16::from_f32(value).to_f32(),
        DType::Bool => f32::from(value != 0.0),
        _ => value,
    }
}
