//! Sparse matrices, line by line: each line is a row or each is a column.

/// A matrix of lines. An item is a place in the line and what stands there.
#[derive(Clone, Default)]
pub struct Sparse {
    /// Where each line ends.
    ends: Vec<usize>,
    items: Vec<(u32, f64)>,
}

impl Sparse {
    /// Returns a matrix from items (line, place, value), in any order.
    pub fn new(lines: usize, items: impl Iterator<Item = (u32, u32, f64)> + Clone) -> Sparse {
        let mut starts = vec![0usize; lines + 1];
        for (line, ..) in items.clone() {
            starts[line as usize + 1] += 1;
        }
        for line in 0..lines {
            starts[line + 1] += starts[line];
        }
        let mut sorted = vec![(0, 0.0); starts[lines]];
        for (line, place, value) in items {
            let at = &mut starts[line as usize];
            sorted[*at] = (place, value);
            *at += 1;
        }
        // Each start has moved to the end of its line.
        starts.truncate(lines);
        Sparse {
            ends: starts,
            items: sorted,
        }
    }

    /// Returns the same matrix with lines and places exchanged. Places are below `places`.
    pub fn transposed(&self, places: usize) -> Sparse {
        let lines = (0..).zip(self.lines());
        Sparse::new(
            places,
            lines
                .flat_map(|(at, line)| line.iter().map(move |(place, value)| (*place, at, *value))),
        )
    }

    /// Appends a line.
    pub fn push(&mut self, line: impl IntoIterator<Item = (u32, f64)>) {
        self.items.extend(line);
        self.ends.push(self.items.len());
    }

    /// Returns the items of a line.
    pub fn line(&self, at: usize) -> &[(u32, f64)] {
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.items[start..self.ends[at]]
    }

    /// Returns all lines.
    pub fn lines(&self) -> impl Iterator<Item = &[(u32, f64)]> + Clone {
        (0..self.ends.len()).map(|at| self.line(at))
    }

    /// Returns the number of items.
    pub fn len(&self) -> usize {
        self.items.len()
    }
}

/// Returns the sum of the products of items with what stands at their places in a vector.
pub fn dot(items: &[(u32, f64)], vector: &[f64]) -> f64 {
    items
        .iter()
        .map(|(at, value)| value * vector[*at as usize])
        .sum()
}

/// Subtracts items, times a factor, from what stands at their places in a vector.
pub fn subtract(items: &[(u32, f64)], factor: f64, vector: &mut [f64]) {
    for (at, value) in items {
        vector[*at as usize] -= value * factor;
    }
}
