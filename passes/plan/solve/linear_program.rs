//! Lower bounds on linear programs: minimize cost · x, where rows demand `a · x ≥ b` and every variable lies between 0 and 1.
//!
//! The dual simplex method solves them ([`simplex`]). Few of the rows matter, so it is given those that a solution breaks, until
//! none is broken. Any duals y ≥ 0 prove a bound, b · y plus what each variable can lower at most: solved or not, what is returned is
//! a bound.

mod factors;
mod simplex;
mod sparse;

use super::work::Work;
use simplex::{BoxedProgram, End, Simplex};
use sparse::Sparse;

/// A linear program with rows `a · x ≥ b` and variables between 0 and 1.
#[derive(Clone, Default)]
pub struct LinearProgram {
    cost: Vec<f64>,
    /// The variables of each row, and their coefficients.
    rows: Sparse,
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
    /// The last variables.
    pub point: Vec<f64>,
    /// The last basis.
    pub basis: Basis,
    /// Whether the method was given each row.
    pub is_in: Vec<bool>,
    /// Whether it was stopped before the end.
    is_open: bool,
}

/// A basis: the steepest-edge weights of basic variables and of basic slacks; 0 for others.
#[derive(Clone, Default)]
pub struct Basis {
    /// By variable.
    pub variables: Vec<f64>,
    /// By row.
    pub slacks: Vec<f64>,
}

impl Basis {
    /// Grows to more variables and rows. New variables are not basic; the slacks of new rows are.
    pub fn extend(&mut self, variables: usize, rows: usize) {
        self.variables.resize(variables, 0.0);
        self.slacks.resize(rows, 1.0);
    }
}

/// The rows that the dual simplex method is given, its variables, and the place of each variable among them.
struct Part {
    rows: Vec<u32>,
    variables: Vec<u32>,
    place: Vec<Option<u32>>,
}

/// A row is broken if its sum is below its demand by more than this, and has room if it is above by more than this.
const BROKEN: f64 = 1e-6;

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
        self.rows.push(terms);
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

    /// Returns a lower bound on the cost; costs must not be negative. Starts from a solution of an earlier program, whose rows and
    /// variables are the first ones of this program. Stops at a bound of `enough`, or when the work is spent.
    pub fn lower_bound(&self, enough: f64, known: &Bounded, work: &mut Work) -> Bounded {
        let mut made = known.clone();
        made.basis.extend(self.columns(), self.rows());
        made.duals.resize(self.rows(), 0.0);
        made.point.resize(self.columns(), 0.0);
        for (x, fixed) in made.point.iter_mut().zip(&self.fixed) {
            *x = fixed.map_or(*x, |is_one| f64::from(u8::from(is_one)));
        }
        made.bound = self.proven(&made.duals).0.max(0.0);
        made.is_in.resize(self.rows(), false);
        // What was fixed since may break rows that the method already has.
        made.is_open |= self.breaks_any(&made);
        while self.add_broken(&mut made, work) || made.is_open {
            let part = self.part(&made);
            let mut simplex = self.simplex(&part, &made.basis);
            let end = loop {
                let end = simplex.run(work);
                let mut duals = vec![0.0; self.rows()];
                for (row, dual) in part.rows.iter().zip(simplex.duals()) {
                    duals[*row as usize] = dual;
                }
                let bound = self.proven(&duals).0;
                work.spend(self.rows.len() as u64);
                if bound > made.bound {
                    (made.bound, made.duals) = (bound, duals);
                }
                if end != End::Factored || made.bound >= enough || work.spent() {
                    break end;
                }
            };
            self.save(&part, &simplex, &mut made);
            made.is_open = end == End::Factored;
            if end != End::Optimal || made.bound >= enough || work.spent() {
                break;
            }
        }
        self.drop_roomy(&mut made);
        made
    }

    /// Returns the rows that the method is given, and those of their variables that are free or basic.
    fn part(&self, made: &Bounded) -> Part {
        let rows = (0..self.rows() as u32).filter(|row| made.is_in[*row as usize]);
        let rows: Vec<u32> = rows.collect();
        let mut place = vec![None; self.columns()];
        let mut variables = Vec::new();
        let items = rows.iter().flat_map(|row| self.rows.line(*row as usize));
        for x in items.map(|(x, _)| *x as usize) {
            if place[x].is_none() && (self.fixed[x].is_none() || made.basis.variables[x] > 0.0) {
                place[x] = Some(variables.len() as u32);
                variables.push(x as u32);
            }
        }
        Part {
            rows,
            variables,
            place,
        }
    }

    /// Sets up the dual simplex method for a part. It starts from the last basis.
    fn simplex(&self, part: &Part, basis: &Basis) -> Simplex {
        let mut rows = Sparse::default();
        let mut least = Vec::new();
        for row in part.rows.iter().map(|row| *row as usize) {
            let line = self.rows.line(row);
            let ones = line
                .iter()
                .filter(|(x, _)| self.fixed[*x as usize] == Some(true));
            least.push(self.least[row] - ones.map(|(_, value)| value).sum::<f64>());
            rows.push(
                line.iter()
                    .filter_map(|(x, value)| Some((part.place[*x as usize]?, *value))),
            );
        }
        let variables = || part.variables.iter().map(|x| *x as usize);
        let slacks = part.rows.iter().map(|row| basis.slacks[*row as usize]);
        let weights: Vec<f64> = variables()
            .map(|x| basis.variables[x])
            .chain(slacks)
            .collect();
        let program = BoxedProgram {
            rows,
            least,
            cost: variables().map(|x| self.cost[x]).collect(),
            upper: variables()
                .map(|x| f64::from(u8::from(self.fixed[x].is_none())))
                .collect(),
            numbers: part.variables.clone(),
        };
        let unit = self.cost.iter().copied().fold(1.0, f64::max);
        Simplex::new(program, unit, &weights)
    }

    /// Copies the method's last point and basis into `made`.
    fn save(&self, part: &Part, simplex: &Simplex, made: &mut Bounded) {
        let weights = simplex.weights();
        let (variables, slacks) = weights.split_at(part.variables.len());
        for (row, weight) in part.rows.iter().zip(slacks) {
            made.basis.slacks[*row as usize] = *weight;
        }
        let fixed = self.fixed.iter();
        made.point = fixed
            .map(|fixed| f64::from(u8::from(*fixed == Some(true))))
            .collect();
        for (at, (x, weight)) in part.variables.iter().zip(variables).enumerate() {
            made.basis.variables[*x as usize] = *weight;
            if self.fixed[*x as usize].is_none() {
                made.point[*x as usize] = simplex.value(at);
            }
        }
    }

    /// Returns whether the last point breaks a row that the method had.
    fn breaks_any(&self, made: &Bounded) -> bool {
        let rows = self.rows.lines().zip(&self.least).zip(&made.is_in);
        let mut rows = rows.filter(|(_, is_in)| **is_in).map(|(row, _)| row);
        rows.any(|(line, least)| sparse::dot(line, &made.point) < least - BROKEN)
    }

    /// Selects the rows whose slack is not basic and those that the last point breaks. Returns whether it breaks a new one.
    fn add_broken(&self, made: &mut Bounded, work: &mut Work) -> bool {
        work.spend(self.rows.len() as u64);
        let mut any = false;
        for (row, line) in self.rows.lines().enumerate() {
            let is_broken = || sparse::dot(line, &made.point) < self.least[row] - BROKEN;
            if made.basis.slacks[row] == 0.0 {
                made.is_in[row] = true;
            } else if !made.is_in[row] && is_broken() {
                (made.is_in[row], any) = (true, true);
            }
        }
        any
    }

    /// Drops rows that have room at the last point, so that the next program is small.
    fn drop_roomy(&self, made: &mut Bounded) {
        for (row, line) in self.rows.lines().enumerate() {
            let has_room = || sparse::dot(line, &made.point) > self.least[row] + BROKEN;
            if made.is_in[row] && made.basis.slacks[row] > 0.0 && has_room() {
                made.is_in[row] = false;
            }
        }
    }

    /// Fixes variables on which all solutions of zeros and ones that cost less than `enough` agree. The other value would raise the
    /// bound that `duals` prove to `enough`, or break a row ("reduced cost fixing" and "bound propagation"; Savelsbergh,
    /// "Preprocessing and probing techniques for mixed integer programming problems", 1994). Returns whether such a solution may
    /// exist.
    pub fn fix(&mut self, duals: &[f64], enough: f64, work: &mut Work) -> bool {
        let (bound, reduced) = self.proven(duals);
        work.spend(self.rows.len() as u64);
        for (fixed, reduced) in self.fixed.iter_mut().zip(reduced) {
            if fixed.is_none() && bound + reduced.abs() > enough {
                *fixed = Some(reduced < 0.0);
            }
        }
        let mut more = bound < enough;
        while more {
            more = false;
            work.spend(self.rows.len() as u64);
            for (row, least) in self.rows.lines().zip(&self.least) {
                let (mut most, mut size) = (0.0, 0.0);
                for (x, value) in row {
                    size += value.abs();
                    most += match self.fixed[*x as usize] {
                        Some(true) => *value,
                        Some(false) => 0.0,
                        None => value.max(0.0),
                    };
                }
                let spare = most - least + ROUNDING * size;
                if spare < 0.0 {
                    return false;
                }
                for (x, value) in row {
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
    pub fn bound_and_fix(&mut self, enough: f64, known: &Bounded, work: &mut Work) -> Bounded {
        let mut made = self.lower_bound(enough, known, work);
        if !self.fix(&made.duals, enough, work) {
            made.bound = enough;
        }
        made.bound = made.bound.min(enough);
        made
    }

    /// Returns what duals prove, as the program was given, with room for rounding, and what each variable adds to it.
    fn proven(&self, duals: &[f64]) -> (f64, Vec<f64>) {
        let mut reduced = self.cost.clone();
        let rows = self.least.iter().zip(duals).map(|(b, y)| b * y);
        let mut sum: f64 = rows.clone().sum();
        let mut size: f64 = rows.map(f64::abs).sum();
        for (row, dual) in self
            .rows
            .lines()
            .zip(duals)
            .filter(|(_, dual)| **dual != 0.0)
        {
            for (x, value) in row {
                let pull = value * dual;
                reduced[*x as usize] -= pull;
                size += pull.abs();
            }
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
}

/// The share of the sizes of all terms that their sum may be off by.
const ROUNDING: f64 = 1e-10;

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
            let made = program.lower_bound(1e9, &known, &mut Work::new(units));
            let bound = made.bound;
            assert!(
                bound <= 5.0 && made.duals.iter().all(|y| *y >= 0.0),
                "{bound}"
            );
            assert!(units < 1_000_000 || bound > 4.99, "{bound}");
        }
    }

    /// Solved to the end, the bound is what the point costs, and the point keeps all rows.
    #[test]
    fn solutions_cost_what_is_proven() {
        let mut r = Random::new(4);
        let (mut solved, mut raised) = (0, 0);
        for n in 0..300 {
            let mut program = LinearProgram::default();
            let mut known = Bounded::default();
            for _ in 0..20 {
                program.variable([0.0, 1.0, 7.5, 30.0][r.below(4)]);
            }
            // Rows that some choice of 0 and 1 keeps; a few at a time.
            let choice: Vec<f64> = (0..20).map(|_| r.below(2) as f64).collect();
            for _ in 0..4 {
                for _ in 0..8 {
                    let row: Vec<(u32, f64)> = (0..4)
                        .map(|at| (at * 5 + r.below(5) as u32, r.below(9) as f64 - 3.0))
                        .filter(|term| term.1 != 0.0)
                        .collect();
                    program.at_least(sparse::dot(&row, &choice) - r.unit(), row);
                }
                let before = known.bound;
                known = program.lower_bound(1e9, &known, &mut Work::new(10_000_000));
                raised += usize::from(known.bound > before + 0.1);
                let costs = program.cost.iter().zip(&known.point);
                let cost: f64 = costs.map(|(cost, x)| cost * x).sum();
                assert!(
                    (cost - known.bound).abs() < 0.05,
                    "{n}: {cost} {}",
                    known.bound
                );
                for (row, least) in program.rows.lines().zip(&program.least) {
                    let sum = sparse::dot(row, &known.point);
                    assert!(sum > least - 1e-5, "{n}: {sum} {least}");
                }
                solved += 1;
            }
        }
        assert!(solved == 1200 && raised > 300, "{solved} {raised}");
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
                    for (sum, row) in rows.iter_mut().zip(program.rows.lines()) {
                        *sum = row.iter().map(|(at, value)| value * x(*at)).sum();
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
                .lower_bound(1e9, &known, &mut Work::new(100_000))
                .bound;
            assert!(bound <= cheapest * (1.0 + 1e-9), "{n}: {bound} {cheapest}");
        }
    }
}
