//! The dual simplex method, for programs in which every variable lies between two bounds: then each basis is dual feasible if variables
//! that are not basic stand at the right one. Slacks have two bounds too, as rows of bounded variables do.
//!
//! The row to leave is chosen by steepest edge (Forrest and Goldfarb, "Steepest-edge simplex algorithms for linear programming",
//! 1992). Variables flip to their other bound as long as this raises the bound (Maros, "A generalized dual phase-2 simplex
//! algorithm", 2003), within Harris's tolerance. Many optima cost the same, so costs are perturbed a little.

use super::factors::Factors;
use super::sparse::{Sparse, dot, subtract};
use crate::solve::work::Work;

/// How far a variable may be beyond its bounds.
const FEASIBLE: f64 = 1e-7;

/// How far a reduced cost may have the wrong sign, in the largest cost.
const OPTIMAL: f64 = 1e-9;

/// The least pivot, and how far it may be off when it is computed by row and by column.
const LEAST_PIVOT: f64 = 1e-7;
const MOST_OFF: f64 = 1e-6;

/// Items of rows below this are taken for 0.
const TINY: f64 = 1e-13;

/// By how much costs are perturbed, in the largest cost and in themselves.
const PERTURBATION: f64 = 1e-6;

/// Exchanges before the basis is factored anew.
const MOST_EXCHANGES: usize = 64;

/// The basis is factored anew if factors grew to this many times the items of the rows.
const MOST_GROWTH: usize = 6;

/// Units of work that each item takes when a basis is factored.
const FACTOR_UNITS: usize = 4;

/// Pivots that turned out too small or wrong before the method gives up.
const MOST_TROUBLES: usize = 20;

/// How far a row that cannot hold moves the duals, in the largest cost.
const RAY: f64 = 1e6;

/// The least weight of steepest edge.
const LEAST_WEIGHT: f64 = 1e-4;

/// Why the method stopped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    /// No cheaper solution exists.
    Optimal,
    /// No solution exists.
    Infeasible,
    /// The basis was factored anew. There is more to do.
    Factored,
    /// Pivots are too small to go on.
    Stuck,
}

/// A program with rows `a · x ≥ b` and variables from 0 to an upper bound.
pub struct BoxedProgram {
    /// By row: its variables and their coefficients, and its demand.
    pub rows: Sparse,
    pub least: Vec<f64>,
    /// By variable: its cost, its upper bound, and a number that decides how its cost is perturbed.
    pub cost: Vec<f64>,
    pub upper: Vec<f64>,
    pub numbers: Vec<u32>,
}

/// A program and a basis. Variables are numbered from 0; the slack of row r is number `columns + r`.
pub struct Simplex {
    by_row: Sparse,
    by_column: Sparse,
    /// Of variables; perturbed, in the unit.
    cost: Vec<f64>,
    unit: f64,
    /// Of rows.
    least: Vec<f64>,
    /// The upper bounds of variables and slacks. The lower ones are 0.
    upper: Vec<f64>,
    /// Whether what is not basic stands at its upper bound.
    is_upper: Vec<bool>,
    /// The row of what is basic.
    row_of: Vec<Option<u32>>,
    /// What is basic in each row, where it stands, and its weight.
    basic: Vec<u32>,
    values: Vec<f64>,
    weights: Vec<f64>,
    /// The reduced costs of what is not basic.
    reduced: Vec<f64>,
    factors: Factors,
}

/// A row of the basis' inverse times the matrix.
struct Row {
    /// The row of the inverse.
    inverse: Vec<f64>,
    /// What it gives for all variables and slacks, and which of them are not 0.
    items: Vec<f64>,
    filled: Vec<u32>,
}

/// Something whose reduced cost reaches 0.
#[derive(Clone, Copy)]
struct Candidate {
    number: u32,
    /// The distance of its reduced cost from 0, and how fast it falls.
    distance: f64,
    speed: f64,
}

impl Candidate {
    /// Whether the reduced cost reaches 0 by then.
    fn is_passed(&self, step: f64) -> bool {
        self.distance <= step * self.speed
    }
}

impl Simplex {
    /// Starts from the basis of the variables and slacks that have a weight (of steepest edge; 0 for others). `unit` is at least the
    /// largest cost.
    pub fn new(program: BoxedProgram, unit: f64, weights: &[f64]) -> Simplex {
        let (rows, columns) = (program.least.len(), program.cost.len());
        let costs = program.cost.iter().zip(&program.numbers);
        let perturbed = costs.map(|(cost, number)| {
            let cost = cost / unit;
            cost + PERTURBATION * (1.0 + cost) * (1.0 + noise(*number))
        });
        let mut upper = program.upper;
        for (line, least) in program.rows.lines().zip(&program.least) {
            let most = line
                .iter()
                .map(|(x, value)| value.max(0.0) * upper[*x as usize]);
            let most: f64 = most.sum();
            upper.push((most - least).max(0.0));
        }
        let mut made = Simplex {
            by_column: program.rows.transposed(columns),
            by_row: program.rows,
            cost: perturbed.collect(),
            unit,
            least: program.least,
            upper,
            is_upper: vec![false; columns + rows],
            row_of: vec![None; columns + rows],
            basic: vec![0; rows],
            values: Vec::new(),
            weights: vec![0.0; rows],
            reduced: vec![0.0; columns + rows],
            factors: Factors::default(),
        };
        made.factor(weights);
        made
    }

    /// Factors the basis of what has a weight, and computes values and reduced costs anew.
    fn factor(&mut self, weights: &[f64]) {
        let (rows, columns) = (self.least.len(), self.cost.len());
        let is_slack: Vec<bool> = weights[columns..]
            .iter()
            .map(|weight| *weight > 0.0)
            .collect();
        let basic: Vec<u32> = (0..columns as u32)
            .filter(|x| weights[*x as usize] > 0.0)
            .collect();
        let (factors, owners) = Factors::new(&is_slack, &basic, &self.by_column);
        self.factors = factors;
        self.row_of.fill(None);
        for (row, owner) in owners.iter().enumerate() {
            let number = owner.map_or(columns + row, |k| basic[k as usize] as usize);
            self.basic[row] = number as u32;
            self.row_of[number] = Some(row as u32);
            // A slack that takes the place of a column had no weight.
            self.weights[row] = if weights[number] > 0.0 {
                weights[number]
            } else {
                1.0
            };
        }
        let costs = self
            .basic
            .iter()
            .map(|number| self.cost.get(*number as usize));
        let mut duals: Vec<f64> = costs.map(|cost| cost.copied().unwrap_or(0.0)).collect();
        self.factors.solve_transposed(&mut duals);
        let mut values = self.least.clone();
        for number in 0..columns + rows {
            let reduced = match (self.row_of[number], number.checked_sub(columns)) {
                (Some(_), _) => 0.0,
                (None, Some(row)) => duals[row],
                (None, None) => self.cost[number] - dot(self.by_column.line(number), &duals),
            };
            self.reduced[number] = reduced;
            if reduced.abs() > OPTIMAL {
                self.is_upper[number] = reduced < 0.0;
            }
            if self.row_of[number].is_none() && self.is_upper[number] {
                self.subtract_column(number, self.upper[number], &mut values);
            }
        }
        self.factors.solve(&mut values);
        self.values = values;
    }

    /// The same for the basis as it is now.
    fn factor_again(&mut self, work: &mut Work) {
        self.factor(&self.weights());
        work.spend((FACTOR_UNITS * (self.factors.len() + self.by_row.len())) as u64);
    }

    /// Multiplies the column of a variable or slack by a factor and subtracts it from a vector.
    fn subtract_column(&self, number: usize, factor: f64, from: &mut [f64]) {
        match number.checked_sub(self.cost.len()) {
            None => subtract(self.by_column.line(number), factor, from),
            Some(row) => from[row] += factor,
        }
    }

    /// Exchanges basic variables until an end.
    pub fn run(&mut self, work: &mut Work) -> End {
        let mut row = Row {
            inverse: vec![0.0; self.least.len()],
            items: vec![0.0; self.upper.len()],
            filled: Vec::new(),
        };
        let mut troubles = 0;
        loop {
            let is_long = self.factors.len() > MOST_GROWTH * (self.least.len() + self.by_row.len());
            if self.factors.exchanges() >= if is_long { 1 } else { MOST_EXCHANGES } {
                self.factor_again(work);
                return End::Factored;
            }
            let is_exact = self.factors.exchanges() == 0;
            work.spend(self.least.len() as u64);
            let Some(at) = self.leaving() else {
                if is_exact {
                    return End::Optimal;
                }
                self.factor_again(work);
                continue;
            };
            self.compute_row(at, &mut row, work);
            let over = self.values[at] - self.target(at);
            let Some((entering, flips)) = self.entering(&row, over, work) else {
                // The bound rises without end in this direction.
                self.move_duals(at, RAY * over.signum(), &row);
                return End::Infeasible;
            };
            let mut column = vec![0.0; self.least.len()];
            self.subtract_column(entering, -1.0, &mut column);
            self.factors.solve(&mut column);
            work.spend(self.factors.len() as u64);
            let pivot = column[at];
            let is_off = (pivot - row.items[entering]).abs() > MOST_OFF * (1.0 + pivot.abs());
            if is_off || pivot.abs() < LEAST_PIVOT {
                troubles += 1;
                if troubles > MOST_TROUBLES {
                    return End::Stuck;
                }
                match is_exact {
                    // Other rows first.
                    true => self.weights[at] *= 1e6,
                    false => self.factor_again(work),
                }
                continue;
            }
            self.flip(&flips, work);
            self.exchange(at, entering, &column, &row, work);
        }
    }

    /// Returns the row whose basic variable violates its bounds most, measured by steepest edge.
    fn leaving(&self) -> Option<usize> {
        let mut best = (0.0, None);
        for (row, (value, weight)) in self.values.iter().zip(&self.weights).enumerate() {
            let over = (-value).max(value - self.upper[self.basic[row] as usize]);
            if over > FEASIBLE && over * over > best.0 * weight {
                best = (over * over / weight, Some(row));
            }
        }
        best.1
    }

    /// The bound beyond which the basic variable of a row is.
    fn target(&self, row: usize) -> f64 {
        match self.values[row] > 0.0 {
            true => self.upper[self.basic[row] as usize],
            false => 0.0,
        }
    }

    /// Computes a row of the inverse, its weight, and its product with the matrix.
    fn compute_row(&mut self, at: usize, row: &mut Row, work: &mut Work) {
        row.inverse.fill(0.0);
        row.inverse[at] = 1.0;
        self.factors.solve_transposed(&mut row.inverse);
        work.spend(self.factors.len() as u64);
        for number in row.filled.drain(..) {
            row.items[number as usize] = 0.0;
        }
        let mut square = 0.0;
        for (r, factor) in row.inverse.iter_mut().enumerate() {
            if factor.abs() < TINY {
                *factor = 0.0;
                continue;
            }
            square += *factor * *factor;
            let slack = self.cost.len() + r;
            row.items[slack] = -*factor;
            row.filled.push(slack as u32);
            let line = self.by_row.line(r);
            for (x, value) in line {
                let item = &mut row.items[*x as usize];
                if *item == 0.0 {
                    row.filled.push(*x);
                    // It stays in the list if the sum gets 0 in between.
                    *item = f64::MIN_POSITIVE;
                }
                *item += *factor * value;
            }
            work.spend(line.len() as u64);
        }
        let (items, row_of) = (&mut row.items, &self.row_of);
        row.filled.retain(|number| {
            let is_basic = row_of[*number as usize].is_some();
            if is_basic {
                items[*number as usize] = 0.0;
            }
            !is_basic
        });
        self.weights[at] = square;
    }

    /// Returns what enters the basis, and what flips to its other bound. `over` is how far the leaving variable is beyond its bound.
    /// `None` if its row cannot hold.
    fn entering(&self, row: &Row, over: f64, work: &mut Work) -> Option<(usize, Vec<u32>)> {
        let sign = over.signum();
        let candidates = row.filled.iter().filter_map(|number| {
            let at = *number as usize;
            let side = if self.is_upper[at] { -1.0 } else { 1.0 };
            let speed = sign * side * row.items[at];
            (speed > OPTIMAL && self.upper[at] > 0.0).then(|| Candidate {
                number: *number,
                distance: (side * self.reduced[at]).max(0.0),
                speed,
            })
        });
        let mut candidates: Vec<Candidate> = candidates.collect();
        let mut slope = over.abs();
        let mut flips = Vec::new();
        while !candidates.is_empty() {
            work.spend(candidates.len() as u64);
            let steps = candidates.iter().map(|c| (c.distance + OPTIMAL) / c.speed);
            let step = steps.fold(f64::INFINITY, f64::min);
            let passed = candidates.iter().filter(|c| c.is_passed(step));
            let falls = passed
                .clone()
                .map(|c| c.speed * self.upper[c.number as usize]);
            slope -= falls.sum::<f64>();
            if slope <= FEASIBLE {
                let fastest =
                    passed.max_by(|a, b| a.speed.total_cmp(&b.speed).then(b.number.cmp(&a.number)));
                return fastest.map(|c| (c.number as usize, flips));
            }
            candidates.retain(|c| {
                if c.is_passed(step) {
                    flips.push(c.number);
                }
                !c.is_passed(step)
            });
        }
        None
    }

    /// Moves variables and slacks to their other bounds.
    fn flip(&mut self, flips: &[u32], work: &mut Work) {
        if flips.is_empty() {
            return;
        }
        let mut change = vec![0.0; self.least.len()];
        for number in flips {
            let number = *number as usize;
            let sign = if self.is_upper[number] { -1.0 } else { 1.0 };
            self.is_upper[number] = !self.is_upper[number];
            self.subtract_column(number, sign * self.upper[number], &mut change);
        }
        self.factors.solve(&mut change);
        work.spend(self.factors.len() as u64);
        for (value, change) in self.values.iter_mut().zip(&change) {
            *value += change;
        }
    }

    /// Exchanges what is basic in a row. `column` is the inverse times the column of what enters.
    fn exchange(&mut self, at: usize, entering: usize, column: &[f64], row: &Row, work: &mut Work) {
        let leaving = self.basic[at] as usize;
        let (is_over, target) = (self.values[at] > 0.0, self.target(at));
        let pivot = column[at];
        let change = (self.values[at] - target) / pivot;
        // A reduced cost that is beyond 0, within the tolerance, counts as 0.
        let is_beyond = (self.reduced[entering] < 0.0) != self.is_upper[entering];
        let step = if is_beyond {
            0.0
        } else {
            self.reduced[entering] / row.items[entering]
        };
        if is_beyond && let Some(cost) = self.cost.get_mut(entering) {
            *cost -= self.reduced[entering];
        }
        self.move_duals(at, step, row);
        self.reduced[entering] = 0.0;
        let mut edge = row.inverse.clone();
        self.factors.solve(&mut edge);
        work.spend((self.factors.len() + self.least.len()) as u64);
        let square = self.weights[at];
        for (r, item) in column.iter().enumerate().filter(|(_, item)| **item != 0.0) {
            self.values[r] -= change * item;
            let share = item / pivot;
            let weight = self.weights[r] - 2.0 * share * edge[r] + share * share * square;
            self.weights[r] = weight.max(share * share).max(LEAST_WEIGHT);
        }
        self.weights[at] = (square / (pivot * pivot)).max(LEAST_WEIGHT);
        let from = if self.is_upper[entering] {
            self.upper[entering]
        } else {
            0.0
        };
        self.values[at] = from + change;
        self.is_upper[leaving] = is_over;
        self.is_upper[entering] = false;
        self.row_of[leaving] = None;
        self.row_of[entering] = Some(at as u32);
        self.basic[at] = entering as u32;
        self.factors.exchange(at, column);
    }

    /// Changes the dual of a row by a step, and with it all reduced costs.
    fn move_duals(&mut self, at: usize, step: f64, row: &Row) {
        for number in &row.filled {
            self.reduced[*number as usize] -= step * row.items[*number as usize];
        }
        self.reduced[self.basic[at] as usize] = -step;
    }

    /// Returns the duals of rows.
    pub fn duals(&self) -> impl Iterator<Item = f64> {
        let slacks = self.reduced[self.cost.len()..].iter();
        slacks.map(|reduced| reduced.max(0.0) * self.unit)
    }

    /// Returns where a variable or slack stands.
    pub fn value(&self, number: usize) -> f64 {
        match self.row_of[number] {
            Some(row) => self.values[row as usize].clamp(0.0, self.upper[number]),
            None if self.is_upper[number] => self.upper[number],
            None => 0.0,
        }
    }

    /// Returns the weights of variables and slacks.
    pub fn weights(&self) -> Vec<f64> {
        let mut weights = vec![0.0; self.upper.len()];
        for (number, weight) in self.basic.iter().zip(&self.weights) {
            weights[*number as usize] = *weight;
        }
        weights
    }
}

/// Returns a pseudo-random number from 0 to 1; the same variable always gets the same one.
fn noise(x: u32) -> f64 {
    // Fibonacci hashing.
    f64::from(x.wrapping_mul(0x9e37_79b9)) / f64::from(u32::MAX)
}
