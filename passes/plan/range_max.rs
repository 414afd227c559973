//! Range maximum queries: on a list that changes ([`RangeMax`]), and on a fixed list ([`MaxTable`]).

use std::ops::Range;

/// A list of numbers: a segment tree, bottom-up. Changes and questions take the logarithm of its length.
#[derive(Clone)]
pub struct RangeMax {
    /// A power of two: number `i` is node `width + i`.
    width: usize,
    /// By node, the largest number below it, without what is added above it.
    most: Vec<i64>,
    /// By node, what is added to all numbers below it.
    added: Vec<i64>,
}

impl RangeMax {
    /// Returns the numbers as they are.
    pub fn new(numbers: &[i64]) -> RangeMax {
        let width = numbers.len().next_power_of_two().max(1);
        let mut most = vec![i64::MIN / 4; 2 * width];
        most[width..width + numbers.len()].copy_from_slice(numbers);
        for i in (1..width).rev() {
            most[i] = most[2 * i].max(most[2 * i + 1]);
        }
        RangeMax {
            width,
            most,
            added: vec![0; 2 * width],
        }
    }

    /// Adds to all numbers in a range.
    pub fn add(&mut self, range: Range<usize>, amount: i64) {
        if range.is_empty() || amount == 0 {
            return;
        }
        let (mut l, mut r) = (range.start + self.width, range.end + self.width);
        let (left, right) = (l, r - 1);
        while l < r {
            if l & 1 == 1 {
                self.most[l] += amount;
                self.added[l] += amount;
                l += 1;
            }
            if r & 1 == 1 {
                r -= 1;
                self.most[r] += amount;
                self.added[r] += amount;
            }
            l >>= 1;
            r >>= 1;
        }
        self.refresh(left);
        self.refresh(right);
    }

    fn refresh(&mut self, leaf: usize) {
        let mut i = leaf >> 1;
        while i > 0 {
            self.most[i] = self.most[2 * i].max(self.most[2 * i + 1]) + self.added[i];
            i >>= 1;
        }
    }

    /// Returns the largest number.
    pub fn largest(&self) -> i64 {
        self.most[1]
    }

    /// Returns the largest number in a range that is not empty.
    pub fn largest_in(&self, range: Range<usize>) -> i64 {
        let (mut l, mut r) = (range.start + self.width, range.end - 1 + self.width);
        let (mut left, mut right) = (self.most[l], self.most[r]);
        while l >> 1 != r >> 1 {
            if l & 1 == 0 {
                left = left.max(self.most[l + 1]);
            }
            if r & 1 == 1 {
                right = right.max(self.most[r - 1]);
            }
            l >>= 1;
            r >>= 1;
            left += self.added[l];
            right += self.added[r];
        }
        let mut largest = left.max(right);
        l >>= 1;
        while l > 0 {
            largest += self.added[l];
            l >>= 1;
        }
        largest
    }
}

/// A fixed list of numbers: a sparse table (Bender and Farach-Colton, "The LCA problem revisited", 2000). Queries take constant time.
pub struct MaxTable {
    len: usize,
    /// The rows of the table, concatenated. Each is as long as the list. Entry `i` of row `k` is the largest of the 2^k numbers from `i` on.
    most: Vec<i64>,
}

impl MaxTable {
    /// Returns the table of a list.
    pub fn new(numbers: &[i64]) -> MaxTable {
        let len = numbers.len();
        let mut most = numbers.to_vec();
        let mut half = 1;
        while 2 * half <= len {
            let row = most.len() - len;
            most.extend_from_within(row..);
            let (before, new) = most.split_at_mut(row + len);
            for (new, right) in new.iter_mut().zip(&before[row + half..]) {
                *new = (*new).max(*right);
            }
            half *= 2;
        }
        MaxTable { len, most }
    }

    /// Returns the largest number in a range that is not empty.
    pub fn largest_in(&self, range: Range<usize>) -> i64 {
        let k = (range.end - range.start).ilog2();
        let row = &self.most[k as usize * self.len..];
        row[range.start].max(row[range.end - (1 << k)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    #[test]
    fn every_range_has_the_largest_of_its_numbers() {
        let mut r = Random(3);
        for len in 1..20 {
            let mut numbers: Vec<i64> = (0..len).map(|_| r.below(50) as i64).collect();
            let mut tree = RangeMax::new(&numbers);
            let range = |r: &mut Random| {
                let (a, b) = (r.below(len), r.below(len));
                a.min(b)..a.max(b) + 1
            };
            for _ in 0..100 {
                let (changed, amount) = (range(&mut r), r.below(19) as i64 - 9);
                tree.add(changed.clone(), amount);
                numbers[changed].iter_mut().for_each(|n| *n += amount);
                let asked = range(&mut r);
                let largest = |numbers: &[i64]| *numbers.iter().max().unwrap();
                assert_eq!(
                    tree.largest_in(asked.clone()),
                    largest(&numbers[asked.clone()])
                );
                assert_eq!(tree.largest(), largest(&numbers));
                let table = MaxTable::new(&numbers);
                assert_eq!(table.largest_in(asked.clone()), largest(&numbers[asked]));
            }
        }
    }
}
