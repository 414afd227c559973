//! Lower bounds on linear programs: minimize cost · x, where rows demand `a · x ≥ b` and every variable lies between 0 and 1.
//!
//! The method is the primal-dual hybrid gradient method (Chambolle and Pock, "A First-Order Primal-Dual Algorithm for Convex
//! Problems", 2011) with reflected Halpern steps, restarts and a weight that is adapted at them (Lu and Yang,
//! "Restarted Halpern PDHG for Linear Programming", 2024). Any duals y ≥ 0 prove a bound, b · y plus what each variable
//! can lower at most: converged or not, what is returned is a bound.

use super::work::Work;

/// A linear program with rows `a · x ≥ b` and variables between 0 and 1.
#[derive(Clone, Default)]
pub struct LinearProgram {
    /// What all solutions cost.
    constant: f64,
    cost: Vec<f64>,
    /// The row, the variable and the coefficient of each term, by row.
    terms: Vec<(u32, u32, f64)>,
    least: Vec<f64>,
    /// The variables that are 0 (false) or 1 (true) in all solutions that still matter ([`LinearProgram::fix`]).
    pub fixed: Vec<Option<bool>>,
}

/// A bound, what proves it, and where the method ended: the next one may start there.
#[derive(Clone, Default)]
pub struct Bounded {
    /// A lower bound on the cost, at least 0.
    pub bound: f64,
    /// The duals that prove the bound, by row.
    pub duals: Vec<f64>,
    /// The last primal variables; they may break rows a little.
    pub point: Vec<f64>,
    /// The last duals. From the best ones, which belong to another primal point, the method goes astray.
    pub last: Vec<f64>,
    /// The weight between primal and dual steps; 0 before the first.
    weight: f64,
}

/// Iterations between two looks at the bound.
const LOOK: usize = 25;

/// Length of a step, in what is the longest that surely converges.
const LENGTH: f64 = 0.998;

/// A restart follows when the fixed-point error fell to the first of these shares, or to the second and rises again,
/// or when a run is as long as this share of all iterations.
const ENOUGH: f64 = 0.2;
const SOME: f64 = 0.8;
const LONG: f64 = 0.36;

/// Passes that even out rows and columns.
const SCALINGS: usize = 10;

/// A look counts as a gain if it closes this share of the distance to the bound that is enough.
const GAIN: f64 = 5e-3;

/// Looks without a gain before a program counts as solved.
pub const LONG_PATIENCE: usize = 60;

/// The same for the program of a branch.
pub const SHORT_PATIENCE: usize = 24;

/// A sparse matrix by rows.
struct Matrix {
    items: Vec<(u32, f64)>,
    /// Runs of rows that have the same number of terms: the number of rows, and the number of terms.
    runs: Vec<(usize, usize)>,
}

impl Matrix {
    fn new(rows: usize, terms: impl Iterator<Item = (u32, u32, f64)> + Clone) -> Matrix {
        let mut start = vec![0usize; rows + 1];
        for (row, ..) in terms.clone() {
            start[row as usize + 1] += 1;
        }
        let lengths = start[1..].chunk_by(|a, b| a == b);
        let runs = lengths.map(|run| (run.len(), run[0])).collect();
        for row in 0..rows {
            start[row + 1] += start[row];
        }
        let mut items = vec![(0, 0.0); start[rows]];
        for (row, column, value) in terms {
            let at = &mut start[row as usize];
            items[*at] = (column, value);
            *at += 1;
        }
        Matrix { items, runs }
    }

    /// Writes the product of each row with a vector.
    fn multiply(&self, x: &[f64], products: &mut [f64]) {
        let (mut items, mut products) = (&self.items[..], products);
        for (rows, length) in &self.runs {
            let (these, others) = items.split_at(rows * length);
            let (to, rest) = std::mem::take(&mut products).split_at_mut(*rows);
            match length {
                0 => to.fill(0.0),
                1 => multiply_rows(these, 1, x, to),
                2 => multiply_rows(these, 2, x, to),
                3 => multiply_rows(these, 3, x, to),
                4 => multiply_rows(these, 4, x, to),
                more => multiply_rows(these, *more, x, to),
            }
            (items, products) = (others, rest);
        }
    }
}

/// Writes the products of rows of one length. Inlined, so that loops over short rows are unrolled.
#[inline(always)]
fn multiply_rows(items: &[(u32, f64)], length: usize, x: &[f64], products: &mut [f64]) {
    for (row, product) in items.chunks_exact(length).zip(products) {
        *product = row.iter().map(|(at, value)| value * x[*at as usize]).sum();
    }
}

/// An iterate: primal and dual variables, and the transposed matrix times the duals.
#[derive(Clone)]
struct Point {
    primal: Vec<f64>,
    dual: Vec<f64>,
    pull: Vec<f64>,
}

impl LinearProgram {
    /// Adds a variable and returns it.
    pub fn variable(&mut self, cost: f64) -> u32 {
        self.cost.push(cost);
        self.fixed.push(None);
        self.cost.len() as u32 - 1
    }

    /// Makes a variable free of cost.
    pub fn set_free(&mut self, x: u32) {
        self.cost[x as usize] = 0.0;
    }

    /// Adds the demand that `terms` add up to at least `least`.
    pub fn at_least(&mut self, least: f64, terms: impl IntoIterator<Item = (u32, f64)>) {
        let row = self.least.len() as u32;
        self.terms
            .extend(terms.into_iter().map(|(x, c)| (row, x, c)));
        self.least.push(least);
    }

    /// Returns the number of variables so far.
    pub fn columns(&self) -> usize {
        self.cost.len()
    }

    /// Returns the number of rows so far.
    pub fn rows(&self) -> usize {
        self.least.len()
    }

    /// Returns a lower bound on the cost. Costs are not negative. Starts at what is known of a program with the first rows of this
    /// one. Stops at a bound of `enough`, when the work is spent, or after `patience` looks without a gain.
    pub fn lower_bound(
        &self,
        enough: f64,
        patience: usize,
        known: &Bounded,
        work: &mut Work,
    ) -> Bounded {
        let (program, rows, columns) = self.reduced();
        work.spend(4 * self.terms.len() as u64);
        let pick = |of: &[f64], at: &[u32]| -> Vec<f64> {
            let of = at.iter().map(|at| of.get(*at as usize));
            of.map(|value| value.copied().unwrap_or(0.0)).collect()
        };
        let begin = Bounded {
            point: pick(&known.point, &columns),
            last: pick(&known.last, &rows),
            weight: known.weight,
            ..Bounded::default()
        };
        let made = program.solve(enough, patience, &begin, work);
        let spread = |of: &[f64], at: &[u32], all: &mut [f64]| {
            for (value, at) in of.iter().zip(at) {
                all[*at as usize] = *value;
            }
        };
        let fixed = self
            .fixed
            .iter()
            .map(|is_one| f64::from(u8::from(*is_one == Some(true))));
        let mut point: Vec<f64> = fixed.collect();
        let (mut duals, mut last) = (vec![0.0; self.rows()], vec![0.0; self.rows()]);
        spread(&made.point, &columns, &mut point);
        spread(&made.duals, &rows, &mut duals);
        spread(&made.last, &rows, &mut last);
        let mut bound = self.proven(&duals).0.max(0.0);
        // The duals that were known may still prove more.
        let before = self.proven(&known.duals).0;
        if before > bound {
            bound = before;
            duals.clone_from(&known.duals);
            duals.resize(self.rows(), 0.0);
        }
        Bounded {
            bound,
            duals,
            point,
            last,
            weight: made.weight,
        }
    }

    /// Returns a smaller program, without fixed variables and without rows that always hold; and the numbers that its rows and
    /// variables have here. Both are sorted by their number of terms, so that [`Matrix::multiply`] is fast.
    fn reduced(&self) -> (LinearProgram, Vec<u32>, Vec<u32>) {
        let is_free = |x: u32| self.fixed[x as usize].is_none();
        let is_one = |x: u32| self.fixed[x as usize] == Some(true);
        let mut lengths = vec![0u32; self.cost.len()];
        let mut rows = Vec::new();
        for terms in self.terms.chunk_by(|a, b| a.0 == b.0) {
            let ones = terms.iter().filter(|(_, x, _)| is_one(*x));
            let least = self.least[terms[0].0 as usize] - ones.map(|t| t.2).sum::<f64>();
            let free: Vec<(u32, f64)> = (terms.iter().filter(|(_, x, _)| is_free(*x)))
                .map(|(_, x, c)| (*x, *c))
                .collect();
            if least > free.iter().map(|t| t.1.min(0.0)).sum() {
                free.iter().for_each(|(x, _)| lengths[*x as usize] += 1);
                rows.push((terms[0].0, least, free));
            }
        }
        rows.sort_by_key(|(.., terms)| terms.len());
        let all = 0..self.cost.len() as u32;
        let mut columns: Vec<u32> = all.clone().filter(|x| is_free(*x)).collect();
        columns.sort_by_key(|x| lengths[*x as usize]);
        let mut program = LinearProgram {
            constant: all
                .filter(|x| is_one(*x))
                .map(|x| self.cost[x as usize])
                .sum(),
            ..LinearProgram::default()
        };
        let mut new = vec![0; self.cost.len()];
        for x in &columns {
            new[*x as usize] = program.variable(self.cost[*x as usize]);
        }
        for (_, least, terms) in &rows {
            program.at_least(*least, terms.iter().map(|(x, c)| (new[*x as usize], *c)));
        }
        let rows = rows.iter().map(|(row, ..)| *row).collect();
        (program, rows, columns)
    }

    /// Fixes variables on which all solutions of zeros and ones that cost less than `enough` agree. The other value would raise the
    /// bound that `duals` prove to `enough`, or break a row ("reduced cost fixing" and "bound propagation"; Savelsbergh,
    /// "Preprocessing and probing techniques for mixed integer programming problems", 1994). Returns whether such a solution may
    /// exist.
    pub fn fix(&mut self, duals: &[f64], enough: f64, work: &mut Work) -> bool {
        let (bound, reduced) = self.proven(duals);
        work.spend(self.terms.len() as u64);
        for (fixed, reduced) in self.fixed.iter_mut().zip(reduced) {
            if fixed.is_none() && bound + reduced.abs() > enough {
                *fixed = Some(reduced < 0.0);
            }
        }
        let mut more = bound < enough;
        while more {
            more = false;
            work.spend(self.terms.len() as u64);
            for row in self.terms.chunk_by(|a, b| a.0 == b.0) {
                let (mut most, mut size) = (0.0, 0.0);
                for (_, x, value) in row {
                    size += value.abs();
                    most += match self.fixed[*x as usize] {
                        Some(true) => *value,
                        Some(false) => 0.0,
                        None => value.max(0.0),
                    };
                }
                let spare = most - self.least[row[0].0 as usize] + ROUNDING * size;
                if spare < 0.0 {
                    return false;
                }
                for (_, x, value) in row {
                    let fixed = &mut self.fixed[*x as usize];
                    if fixed.is_none() && value.abs() > spare {
                        *fixed = Some(*value > 0.0);
                        more = true;
                    }
                }
            }
        }
        bound < enough
    }

    /// Returns a lower bound, and then fixes what it can. The bound is `enough` if every solution costs at least that much, and never
    /// higher.
    pub fn bound_and_fix(
        &mut self,
        enough: f64,
        patience: usize,
        known: &Bounded,
        work: &mut Work,
    ) -> Bounded {
        let mut made = self.lower_bound(enough, patience, known, work);
        if !self.fix(&made.duals, enough, work) {
            made.bound = enough;
        }
        made.bound = made.bound.min(enough);
        made
    }

    fn solve(&self, enough: f64, patience: usize, known: &Bounded, work: &mut Work) -> Bounded {
        let (rows, columns) = (self.least.len(), self.cost.len());
        let unit = self.cost.iter().copied().fold(0.0, f64::max).max(1.0);
        let (row_scale, column_scale) = self.scales();
        work.spend((SCALINGS * self.terms.len()) as u64);
        let scaled = self.terms.iter().map(|(row, column, value)| {
            let value = value * row_scale[*row as usize] * column_scale[*column as usize];
            (*row, *column, value)
        });
        let by_row = Matrix::new(rows, scaled.clone());
        let by_column = Matrix::new(columns, scaled.map(|(r, c, value)| (c, r, value)));
        let least: Vec<f64> = self
            .least
            .iter()
            .zip(&row_scale)
            .map(|(b, s)| b * s)
            .collect();
        let cost: Vec<f64> = (self.cost.iter().zip(&column_scale))
            .map(|(c, s)| c / unit * s)
            .collect();
        let upper: Vec<f64> = column_scale.iter().map(|s| 1.0 / s).collect();
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut weight = match (norm(&cost), norm(&least)) {
            (cost, least) if cost > 0.0 && least > 0.0 => cost / least,
            _ => 1.0,
        };
        let mut now = Point {
            primal: vec![0.0; columns],
            dual: vec![0.0; rows],
            pull: vec![0.0; columns],
        };
        if known.weight > 0.0 {
            weight = known.weight;
        }
        for ((x, known), scale) in now.primal.iter_mut().zip(&known.point).zip(&column_scale) {
            *x = known / scale;
        }
        for ((y, known), scale) in now.dual.iter_mut().zip(&known.last).zip(&row_scale) {
            *y = known / unit / scale;
        }
        by_column.multiply(&now.dual, &mut now.pull);
        let (mut anchor, mut next) = (now.clone(), now.clone());
        let base = self.constant / unit;
        let value = |point: &Point| base + dual_value(point, &least, &cost, &upper);
        let mut best = (value(&now), now.dual.clone());
        let (mut age, mut first, mut last) = (0usize, 0.0, f64::INFINITY);
        let (mut idle, mut gained) = (0, 0.0);
        let (mut towards, mut sums) = (vec![0.0; columns], vec![0.0; rows]);
        for round in 0.. {
            let step = LENGTH / weight;
            let steps = next.primal.iter_mut().zip(&mut towards).zip(&now.primal);
            let costs = now.pull.iter().zip(&cost).zip(&upper);
            for (((next, towards), now), ((pull, cost), upper)) in steps.zip(costs) {
                *next = (now - step * (cost - pull)).clamp(0.0, *upper);
                *towards = 2.0 * *next - now;
            }
            by_row.multiply(&towards, &mut sums);
            let steps = next.dual.iter_mut().zip(&now.dual).zip(&least).zip(&sums);
            for (((next, now), least), sum) in steps {
                *next = (now + LENGTH * weight * (least - sum)).max(0.0);
            }
            by_column.multiply(&next.dual, &mut next.pull);
            work.spend((by_row.items.len() + rows + columns) as u64);
            if round % LOOK == 0 {
                let value = value(&next);
                if value > best.0 {
                    best.0 = value;
                    best.1.clone_from(&next.dual);
                }
                idle += 1;
                if best.0 > gained + GAIN * (enough / unit - gained) {
                    (idle, gained) = (0, best.0);
                }
                let is_solved = (best.0 > 0.0 || columns == 0) && idle > patience;
                if work.spent() || is_solved || best.0 * unit >= enough {
                    break;
                }
            }
            let error = distance(&next, &now, weight);
            if age == 0 {
                first = error;
            }
            let is_less = error <= ENOUGH * first || (error <= SOME * first && error > last);
            last = error;
            if age > 5 && (is_less || age as f64 >= LONG * round as f64) {
                let moved = |a: &[f64], b: &[f64]| -> f64 {
                    a.iter()
                        .zip(b)
                        .map(|(a, b)| (a - b) * (a - b))
                        .sum::<f64>()
                        .sqrt()
                };
                let primal = moved(&next.primal, &anchor.primal);
                let dual = moved(&next.dual, &anchor.dual);
                if primal > 1e-9 && dual > 1e-9 {
                    weight = (weight * dual / primal).sqrt();
                }
                now.clone_from(&next);
                anchor.clone_from(&next);
                (age, last) = (0, f64::INFINITY);
                continue;
            }
            let share = (age + 1) as f64 / (age + 2) as f64;
            let halpern = |now: &mut [f64], next: &[f64], anchor: &[f64]| {
                for ((now, next), anchor) in now.iter_mut().zip(next).zip(anchor) {
                    *now = share * (2.0 * next - *now) + (1.0 - share) * anchor;
                }
            };
            halpern(&mut now.primal, &next.primal, &anchor.primal);
            halpern(&mut now.dual, &next.dual, &anchor.dual);
            halpern(&mut now.pull, &next.pull, &anchor.pull);
            age += 1;
        }
        let unscaled = |duals: &[f64]| -> Vec<f64> {
            let duals = duals.iter().zip(&row_scale);
            duals.map(|(y, s)| y * s * unit).collect()
        };
        let duals = unscaled(&best.1);
        let primal = next.primal.iter().zip(&column_scale);
        Bounded {
            bound: best.0 * unit,
            duals,
            last: unscaled(&next.dual),
            point: primal.map(|(x, scale)| x * scale).collect(),
            weight,
        }
    }

    /// Returns what duals prove, as the program was given, with room for rounding, and what each variable adds to it.
    fn proven(&self, duals: &[f64]) -> (f64, Vec<f64>) {
        let mut reduced = self.cost.clone();
        let rows = self.least.iter().zip(duals).map(|(b, y)| b * y);
        let mut sum: f64 = rows.clone().sum();
        let mut size: f64 = rows.map(f64::abs).sum();
        for (row, column, value) in &self.terms {
            let pull = value * duals.get(*row as usize).unwrap_or(&0.0);
            reduced[*column as usize] -= pull;
            size += pull.abs();
        }
        let least = reduced
            .iter()
            .zip(&self.fixed)
            .map(|(c, fixed)| match fixed {
                Some(true) => *c,
                Some(false) => 0.0,
                None => c.min(0.0),
            });
        sum += least.sum::<f64>();
        (sum - ROUNDING * size, reduced)
    }

    /// Returns factors for rows and columns that even out the matrix (Ruiz, 2001), and then bound its norm by 1 (Pock and Chambolle, 2011).
    fn scales(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut rows, mut columns) = (vec![1.0; self.least.len()], vec![1.0; self.cost.len()]);
        for pass in 0..=SCALINGS {
            let mut of_rows = vec![0.0f64; rows.len()];
            let mut of_columns = vec![0.0f64; columns.len()];
            for (row, column, value) in &self.terms {
                let (row, column) = (*row as usize, *column as usize);
                let value = (value * rows[row] * columns[column]).abs();
                let add = |sum: &mut f64| match pass < SCALINGS {
                    true => *sum = sum.max(value),
                    false => *sum += value,
                };
                add(&mut of_rows[row]);
                add(&mut of_columns[column]);
            }
            let even = |scales: &mut [f64], of: &[f64]| {
                for (scale, of) in scales.iter_mut().zip(of).filter(|(_, of)| **of > 0.0) {
                    *scale /= of.sqrt();
                }
            };
            even(&mut rows, &of_rows);
            even(&mut columns, &of_columns);
        }
        (rows, columns)
    }
}

/// The share of the sizes of all terms that their sum may be off by.
const ROUNDING: f64 = 1e-10;

/// Returns the bound that the duals of a point prove.
fn dual_value(point: &Point, least: &[f64], cost: &[f64], upper: &[f64]) -> f64 {
    let rows: f64 = least.iter().zip(&point.dual).map(|(b, y)| b * y).sum();
    let columns = cost.iter().zip(&point.pull).zip(upper);
    rows + columns
        .map(|((cost, pull), upper)| ((cost - pull) * upper).min(0.0))
        .sum::<f64>()
}

/// Returns how far a step went, in the norm in which the method converges.
fn distance(next: &Point, now: &Point, weight: f64) -> f64 {
    let (mut primal, mut dual, mut both) = (0.0, 0.0, 0.0);
    for x in 0..now.primal.len() {
        let step = next.primal[x] - now.primal[x];
        primal += step * step;
        both += step * (next.pull[x] - now.pull[x]);
    }
    for (next, now) in next.dual.iter().zip(&now.dual) {
        dual += (next - now) * (next - now);
    }
    (weight * primal + dual / weight - 2.0 * LENGTH * both)
        .max(0.0)
        .sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::work::Random;

    /// A cover of the edges of an odd cycle: half of each vertex is the optimum, and any duals stay below it.
    #[test]
    fn bounds_rise_to_the_optimum_and_never_above_it() {
        let mut program = LinearProgram::default();
        let vertices: Vec<u32> = (0..5).map(|_| program.variable(2.0)).collect();
        for at in 0..5 {
            program.at_least(1.0, [(vertices[at], 1.0), (vertices[(at + 1) % 5], 1.0)]);
        }
        for units in [1, 100, 1000, 1_000_000] {
            let known = Bounded::default();
            let made = program.lower_bound(1e9, LONG_PATIENCE, &known, &mut Work::new(units));
            let bound = made.bound;
            assert!(
                bound <= 5.0 && made.duals.iter().all(|y| *y >= 0.0),
                "{bound}"
            );
            assert!(units < 1_000_000 || bound > 4.99, "{bound}");
        }
    }

    /// What all choices of 0 and 1 cost is never below the bound.
    #[test]
    fn no_choice_costs_less_than_a_bound() {
        let mut r = Random::new(3);
        for n in 0..300 {
            let mut program = LinearProgram::default();
            for _ in 0..6 {
                program.variable([0.0, 1.0, 7.5, 1e6][r.below(4)]);
            }
            for _ in 0..1 + r.below(8) {
                let mut terms = Vec::new();
                for x in 0..6 {
                    if r.below(3) == 0 {
                        terms.push((x, r.below(9) as f64 - 3.0));
                    }
                }
                program.at_least(r.below(6) as f64 - 2.0, terms);
            }
            let cheapest = (0..64u32)
                .filter_map(|set| {
                    let x = |at: u32| f64::from(set >> at & 1);
                    let mut rows = vec![0.0; program.least.len()];
                    for (row, at, value) in &program.terms {
                        rows[*row as usize] += value * x(*at);
                    }
                    let holds = rows
                        .iter()
                        .zip(&program.least)
                        .all(|(sum, least)| sum >= least);
                    holds.then(|| {
                        (0..6)
                            .map(|at| program.cost[at as usize] * x(at))
                            .sum::<f64>()
                    })
                })
                .fold(f64::INFINITY, f64::min);
            let known = Bounded::default();
            let bound = program
                .lower_bound(1e9, LONG_PATIENCE, &known, &mut Work::new(100_000))
                .bound;
            assert!(bound <= cheapest * (1.0 + 1e-9), "{n}: {bound} {cheapest}");
        }
    }
}
