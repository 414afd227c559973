//! The factors of a basis matrix: B = L U, times what later exchanges of columns changed.
//!
//! Pivots are chosen to create few new nonzero items (Markowitz, 1957): first the only item of a row or column, then the item of a
//! short column that lies in the shortest row. Items that are too small are never pivots. Each exchange of a column multiplies the
//! inverse by one more matrix ("product form of the inverse"; Dantzig and Orchard-Hays, 1954).

use super::sparse::{Sparse, dot, subtract};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Items below this are taken for 0.
const TINY: f64 = 1e-12;

/// A pivot is at least as large as the first, and at least this share of the largest item of its column.
const LEAST: f64 = 1e-8;
const STABLE: f64 = 0.05;

/// The factors of a basis. Rows and columns of the basis matrix both go by the row in which a column has its pivot.
#[derive(Default)]
pub struct Factors {
    /// The rows, in the order of their pivots.
    order: Vec<u32>,
    /// One over the pivot of each row.
    inverse: Vec<f64>,
    /// The rows with items in L, in the order of their pivots, and these items.
    lower_rows: Vec<u32>,
    lower: Sparse,
    /// U without pivots, by column and by row.
    by_column: Sparse,
    by_row: Sparse,
    /// The rows whose columns were exchanged, one over the pivot of each, and the other items of the new columns.
    exchanged: Vec<(u32, f64)>,
    exchanges: Sparse,
}

/// Factors while they are made.
struct Elimination {
    factors: Factors,
    /// The items of each column that are in rows without pivot.
    open: Vec<Vec<(u32, f64)>>,
    /// Those in rows with a pivot.
    done: Vec<Vec<(u32, f64)>>,
    /// For each row, the columns that have an item there, and some that had one.
    columns_of: Vec<Vec<u32>>,
    /// How many columns without pivot have an item in each row.
    counts: Vec<u32>,
    /// Rows that may have one item left.
    singles: Vec<u32>,
    /// Columns by their number of open items; outdated if the number is another now.
    shortest: BinaryHeap<Reverse<(usize, u32)>>,
    /// The column that has its pivot in each row.
    owner: Vec<Option<u32>>,
    /// Items of U: column, row, value.
    upper: Vec<(u32, u32, f64)>,
}

impl Factors {
    /// Factors the basis of some columns of a matrix and of the slacks of some rows, which are negative unit columns. Returns also
    /// the index in `columns` of the column that has its pivot in each row, or `None` for a slack. Columns that depend on others
    /// get no pivot, and slacks take their place.
    pub fn new(is_slack: &[bool], columns: &[u32], matrix: &Sparse) -> (Factors, Vec<Option<u32>>) {
        let rows = is_slack.len();
        let mut made = Elimination {
            factors: Factors {
                inverse: vec![-1.0; rows],
                ..Factors::default()
            },
            open: Vec::with_capacity(columns.len()),
            done: Vec::with_capacity(columns.len()),
            columns_of: vec![Vec::new(); rows],
            counts: vec![0; rows],
            singles: Vec::new(),
            shortest: BinaryHeap::new(),
            owner: vec![None; rows],
            upper: Vec::new(),
        };
        let slacks = (0..rows as u32).filter(|row| is_slack[*row as usize]);
        made.factors.order.extend(slacks);
        for (k, column) in columns.iter().enumerate() {
            let items = matrix.line(*column as usize).iter();
            let (done, open): (Vec<_>, Vec<_>) =
                items.partition(|(row, _)| is_slack[*row as usize]);
            for (row, _) in &open {
                made.columns_of[*row as usize].push(k as u32);
                made.counts[*row as usize] += 1;
            }
            made.shortest.push(Reverse((open.len(), k as u32)));
            made.open.push(open);
            made.done.push(done);
        }
        made.singles
            .extend((0..rows as u32).filter(|row| made.counts[*row as usize] == 1));
        let mut places = vec![None; rows];
        while let Some((row, k)) = made.next_pivot() {
            made.eliminate(row, k, &mut places);
        }
        let Elimination {
            mut factors,
            owner,
            upper,
            ..
        } = made;
        let left = (0..rows as u32)
            .filter(|row| owner[*row as usize].is_none() && !is_slack[*row as usize]);
        factors.order.extend(left);
        factors.by_column = Sparse::new(rows, upper.iter().copied());
        factors.by_row = factors.by_column.transposed(rows);
        (factors, owner)
    }

    /// Solves B z = v in place.
    pub fn solve(&self, v: &mut [f64]) {
        for (row, items) in self.lower_rows.iter().zip(self.lower.lines()) {
            let x = v[*row as usize];
            if x != 0.0 {
                subtract(items, x, v);
            }
        }
        for row in self.order.iter().rev() {
            let row = *row as usize;
            if v[row] != 0.0 {
                v[row] *= self.inverse[row];
                subtract(self.by_column.line(row), v[row], v);
            }
        }
        for ((row, inverse), items) in self.exchanged.iter().zip(self.exchanges.lines()) {
            let row = *row as usize;
            if v[row] != 0.0 {
                v[row] *= inverse;
                subtract(items, v[row], v);
            }
        }
    }

    /// Solves Bᵀ y = v in place.
    pub fn solve_transposed(&self, v: &mut [f64]) {
        for (at, (row, inverse)) in self.exchanged.iter().enumerate().rev() {
            let sum = dot(self.exchanges.line(at), v);
            v[*row as usize] = (v[*row as usize] - sum) * inverse;
        }
        for row in &self.order {
            let row = *row as usize;
            if v[row] != 0.0 {
                v[row] *= self.inverse[row];
                subtract(self.by_row.line(row), v[row], v);
            }
        }
        for (at, row) in self.lower_rows.iter().enumerate().rev() {
            v[*row as usize] -= dot(self.lower.line(at), v);
        }
    }

    /// Exchanges the column that has its pivot in a row; `column` is B⁻¹ times the new one.
    pub fn exchange(&mut self, row: usize, column: &[f64]) {
        let items = column.iter().enumerate();
        let items = items.filter(|(at, value)| *at != row && value.abs() > TINY);
        self.exchanges
            .push(items.map(|(at, value)| (at as u32, *value)));
        self.exchanged.push((row as u32, 1.0 / column[row]));
    }

    /// Returns the number of exchanges.
    pub fn exchanges(&self) -> usize {
        self.exchanged.len()
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.order.len() + self.lower.len() + self.by_column.len() + self.exchanges.len()
    }
}

impl Elimination {
    /// Returns the row and the column of the next pivot.
    fn next_pivot(&mut self) -> Option<(u32, u32)> {
        while let Some(row) = self.singles.pop() {
            let of = self.columns_of[row as usize].iter();
            let mut of = of.filter(|k| self.open[**k as usize].iter().any(|(at, _)| *at == row));
            if self.counts[row as usize] == 1
                && let Some(k) = of.next()
                && self.stable(*k).any(|(at, _)| *at == row)
            {
                return Some((row, *k));
            }
        }
        while let Some(Reverse((count, k))) = self.shortest.pop() {
            if count == self.open[k as usize].len()
                && let Some((row, _)) = self
                    .stable(k)
                    .min_by_key(|(row, _)| (self.counts[*row as usize], *row))
            {
                return Some((*row, k));
            }
        }
        None
    }

    /// Returns the items of a column that can be pivots.
    fn stable(&self, k: u32) -> impl Iterator<Item = &(u32, f64)> {
        let items = &self.open[k as usize];
        let most = items
            .iter()
            .map(|(_, value)| value.abs())
            .fold(0.0, f64::max);
        let least = LEAST.max(STABLE * most);
        items.iter().filter(move |(_, value)| value.abs() >= least)
    }

    /// Makes an item a pivot, and subtracts multiples of its column from others. `places` has room for each row, and is empty.
    fn eliminate(&mut self, row: u32, k: u32, places: &mut [Option<u32>]) {
        let items = std::mem::take(&mut self.open[k as usize]);
        let pivot = items
            .iter()
            .find(|(at, _)| *at == row)
            .map_or(1.0, |item| item.1);
        self.owner[row as usize] = Some(k);
        self.factors.order.push(row);
        self.factors.inverse[row as usize] = 1.0 / pivot;
        let done = std::mem::take(&mut self.done[k as usize]);
        self.upper
            .extend(done.into_iter().map(|(at, value)| (row, at, value)));
        let below: Vec<(u32, f64)> = (items.iter().filter(|(at, _)| *at != row))
            .map(|(at, value)| (*at, value / pivot))
            .collect();
        for (at, _) in &items {
            self.lose(*at);
        }
        for other in std::mem::take(&mut self.columns_of[row as usize]) {
            let items = &mut self.open[other as usize];
            let Some(at) = items.iter().position(|(at, _)| *at == row) else {
                continue;
            };
            let (_, factor) = items.swap_remove(at);
            self.done[other as usize].push((row, factor));
            if !below.is_empty() {
                self.combine(&below, factor, other, places);
            }
            let count = self.open[other as usize].len();
            self.shortest.push(Reverse((count, other)));
        }
        if !below.is_empty() {
            self.factors.lower_rows.push(row);
            self.factors.lower.push(below);
        }
    }

    /// Subtracts items, times a factor, from a column.
    fn combine(&mut self, below: &[(u32, f64)], factor: f64, k: u32, places: &mut [Option<u32>]) {
        let items = &mut self.open[k as usize];
        for (place, (row, _)) in items.iter().enumerate() {
            places[*row as usize] = Some(place as u32);
        }
        for (row, value) in below {
            if let Some(place) = places[*row as usize] {
                items[place as usize].1 -= value * factor;
            } else {
                items.push((*row, -value * factor));
                self.columns_of[*row as usize].push(k);
                self.counts[*row as usize] += 1;
            }
        }
        items
            .iter()
            .for_each(|(row, _)| places[*row as usize] = None);
        let (kept, lost) = std::mem::take(items)
            .into_iter()
            .partition(|(_, value)| value.abs() > TINY);
        *items = kept;
        let lost: Vec<(u32, f64)> = lost;
        lost.iter().for_each(|(row, _)| self.lose(*row));
    }

    /// Counts one item less in a row.
    fn lose(&mut self, row: u32) {
        let count = &mut self.counts[row as usize];
        *count -= 1;
        if *count == 1 {
            self.singles.push(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::work::Random;

    const ROWS: usize = 12;

    /// Returns the column of what is basic in a row.
    fn column(matrix: &Sparse, basic: &[Option<u32>], row: usize) -> Vec<f64> {
        let mut column = vec![0.0; ROWS];
        match basic[row] {
            Some(k) => subtract(matrix.line(k as usize), -1.0, &mut column),
            None => column[row] = -1.0,
        }
        column
    }

    /// Returns how far solutions with random right sides are off, by columns and by rows.
    fn error(factors: &Factors, columns: &[Vec<f64>], r: &mut Random) -> f64 {
        let side: Vec<f64> = (0..ROWS).map(|_| r.unit()).collect();
        let (mut z, mut y) = (side.clone(), side.clone());
        factors.solve(&mut z);
        factors.solve_transposed(&mut y);
        let mut most = 0.0f64;
        for at in 0..ROWS {
            let sum: f64 = (0..ROWS).map(|k| columns[k][at] * z[k]).sum();
            let product: f64 = (0..ROWS).map(|row| columns[at][row] * y[row]).sum();
            most = most
                .max((sum - side[at]).abs())
                .max((product - side[at]).abs());
        }
        most
    }

    #[test]
    fn factors_solve_what_the_basis_says_before_and_after_exchanges() {
        let mut r = Random::new(5);
        let (mut exchanges, mut dropped) = (0, 0);
        for n in 0..300 {
            let mut matrix = Sparse::default();
            for _ in 0..16 {
                let rows = (0..ROWS as u32).filter(|_| r.below(4) == 0);
                let line: Vec<(u32, f64)> = rows
                    .collect::<Vec<_>>()
                    .into_iter()
                    .map(|row| (row, r.below(7) as f64 - 3.0))
                    .filter(|item| item.1 != 0.0)
                    .collect();
                matrix.push(line);
            }
            let is_slack: Vec<bool> = (0..ROWS).map(|_| r.below(3) == 0).collect();
            let chosen: Vec<u32> = (0..10).collect();
            let (mut factors, basic) = Factors::new(&is_slack, &chosen, &matrix);
            dropped += chosen.len() - basic.iter().flatten().count();
            let mut columns: Vec<Vec<f64>> =
                (0..ROWS).map(|row| column(&matrix, &basic, row)).collect();
            let size = |column: &Vec<f64>| column.iter().map(|x| x.abs()).fold(0.0, f64::max);
            assert!(columns.iter().all(|c| size(c) > 0.0));
            for k in 10..16 {
                let error = error(&factors, &columns, &mut r);
                assert!(error < 1e-6, "{n}: {error}");
                let mut new = vec![0.0; ROWS];
                subtract(matrix.line(k), -1.0, &mut new);
                let mut item = new.clone();
                factors.solve(&mut item);
                let far = (0..ROWS).filter(|row| item[*row].abs() > 0.1);
                if let Some(row) = far.max_by(|a, b| item[*a].abs().total_cmp(&item[*b].abs())) {
                    factors.exchange(row, &item);
                    columns[row] = new;
                    exchanges += 1;
                }
            }
        }
        assert!(exchanges > 1000 && dropped > 20, "{exchanges} {dropped}");
    }
}
