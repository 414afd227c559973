//! The order of examples: a permutation that is computed, not stored.
//!
//! A Feistel network permutes the numbers of `2·bits` binary digits, whatever its round function is. A number beyond the
//! examples is permuted again until it is one of them (cycle walking), so the network permutes the examples, too. The
//! numbers of the network are fewer than four times the examples, so four tries are enough on average.

use crate::rng::mix;

/// Rounds of the network. Four make a pseudorandom permutation if the round function is one (Luby, Rackoff 1988).
const ROUNDS: u64 = 6;

/// The order of the examples of one epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    examples: u64,
    /// Binary digits of half a number.
    bits: u32,
    /// `None` for the order of the files.
    key: Option<u64>,
}

impl Order {
    /// Returns the order of an epoch.
    pub fn new(examples: u64, shuffle: bool, seed: u64, epoch: u64) -> Order {
        let digits = u64::BITS - examples.saturating_sub(1).leading_zeros();
        let key = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ mix(epoch.wrapping_add(1)));
        Order {
            examples,
            bits: digits.div_ceil(2).max(1),
            key: shuffle.then_some(key),
        }
    }

    /// Returns the example at `place`, which is less than the number of examples.
    pub fn at(&self, place: u64) -> u64 {
        let Some(key) = self.key else {
            return place;
        };
        let mut number = self.permute(place, key);
        while number >= self.examples {
            number = self.permute(number, key);
        }
        number
    }

    fn permute(&self, number: u64, key: u64) -> u64 {
        let mask = u64::MAX >> (u64::BITS - self.bits);
        let (mut left, mut right) = (number >> self.bits & mask, number & mask);
        for round in 0..ROUNDS {
            let keyed = mix(key.wrapping_add(round)) ^ right;
            (left, right) = (right, left ^ mix(keyed) & mask);
        }
        left << self.bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(examples: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let order = Order::new(examples, true, seed, epoch);
        (0..examples).map(|place| order.at(place)).collect()
    }

    #[test]
    fn each_example_comes_once() {
        for examples in (1..130).chain([255, 256, 257, 1000, 4097, 65_536, 100_003]) {
            let mut order = all(examples, 7, 3);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..examples), "{examples}");
        }
    }

    #[test]
    fn seeds_and_epochs_have_their_own_order() {
        let first = all(1000, 1, 0);
        assert_eq!(first, all(1000, 1, 0));
        assert_ne!(first, all(1000, 1, 1));
        assert_ne!(first, all(1000, 2, 0));
        let kept: Vec<u64> = (0..9).map(|i| Order::new(9, false, 1, 4).at(i)).collect();
        assert!(kept.into_iter().eq(0..9));
    }

    /// Of a random permutation, neighbours are neighbours again about twice, and one example stays in its place.
    #[test]
    fn the_order_looks_random() {
        let order = all(10_000, 5, 0);
        let close = order
            .windows(2)
            .filter(|w| w[0].abs_diff(w[1]) == 1)
            .count();
        let fixed = order.iter().enumerate().filter(|(i, n)| *i as u64 == **n);
        assert!(close < 12 && fixed.count() < 9);
        let early: u64 = order[..1000].iter().sum();
        assert!((4_500_000..5_500_000).contains(&early), "{early}");
    }

    #[test]
    fn the_largest_numbers_are_permuted() {
        let order = Order::new(u64::MAX, true, 1, 1);
        assert_ne!(order.at(0), order.at(u64::MAX - 1));
    }
}
