//! Rows that hold for all choices of 0 and 1, made from one that holds: mixed-integer rounding with complemented variables (Marchand
//! and Wolsey, "Aggregation and Mixed Integer Rounding to Solve MIPs", 2001).

/// What a sum of variables, each 0 or 1, is at most.
pub struct Packing {
    /// Variables and their factors.
    pub terms: Vec<(u32, i64)>,
    /// The most that they add up to.
    pub most: i64,
}

/// A row that cuts a point off: the terms add up to at most `most`.
#[derive(Debug)]
pub struct Rounded {
    /// Variables and their factors.
    pub terms: Vec<(u32, f64)>,
    /// The most that they add up to.
    pub most: f64,
    /// How far the point is behind it.
    distance: f64,
}

/// The divisors that are tried for the unit of the best row.
const PARTS: [i64; 4] = [2, 3, 4, 8];

/// Most variables that are tried turned.
const MOST_TURNS: usize = 20;

/// Values nearer to 0 or 1 count as whole.
const WHOLE: f64 = 1e-3;

/// A row is kept only if the point violates it by at least this much.
const NEAR: f64 = 1e-3;

impl Packing {
    /// Returns the row that cuts `point` off most clearly; `None` if none does.
    pub fn round(&self, point: &[f64]) -> Option<Rounded> {
        let at = |x: u32| point[x as usize];
        // A turned variable counts by what it lacks of 1.
        let mut turned: Vec<bool> = self.terms.iter().map(|(x, _)| at(*x) > 0.5).collect();
        let mut units: Vec<i64> = (self.terms.iter())
            .filter(|(x, _)| (WHOLE..=1.0 - WHOLE).contains(&at(*x)))
            .map(|(_, factor)| factor.abs())
            .filter(|unit| *unit > 0)
            .collect();
        units.sort_unstable();
        units.dedup();
        let mut best: Option<(Rounded, i64, i64)> = None;
        let offer = |best: &mut Option<(Rounded, i64, i64)>, turned: &[bool], unit, times| {
            let made = self.rounded(point, turned, unit, times);
            let least = best.as_ref().map_or(NEAR, |best| best.0.distance);
            let is_better = made.as_ref().is_some_and(|made| made.distance > least);
            if is_better {
                *best = made.map(|made| (made, unit, times));
            }
            is_better
        };
        for unit in units {
            offer(&mut best, &turned, unit, 1);
        }
        let unit = best.as_ref()?.1;
        for parts in PARTS {
            offer(&mut best, &turned, unit, parts);
        }
        let mut order: Vec<usize> = (0..self.terms.len())
            .filter(|n| (WHOLE..=1.0 - WHOLE).contains(&at(self.terms[*n].0)))
            .collect();
        let far = |n: &usize| (at(self.terms[*n].0) - 0.5).abs();
        order.sort_by(|a, b| far(a).total_cmp(&far(b)).then(a.cmp(b)));
        for n in order.into_iter().take(MOST_TURNS) {
            let (unit, times) = (best.as_ref()?.1, best.as_ref()?.2);
            turned[n] = !turned[n];
            if !offer(&mut best, &turned, unit, times) {
                turned[n] = !turned[n];
            }
        }
        best.map(|best| best.0)
    }

    /// Returns the row in which `times` the terms are counted in whole units; `None` if nothing is rounded off.
    fn rounded(&self, point: &[f64], turned: &[bool], unit: i64, times: i64) -> Option<Rounded> {
        let terms = || self.terms.iter().zip(turned);
        let taken: i64 = terms().filter(|(_, t)| **t).map(|(term, _)| term.1).sum();
        let (unit, times) = (i128::from(unit), i128::from(times));
        let room = i128::from(self.most - taken) * times;
        let (whole, rest) = (room.div_euclid(unit), room.rem_euclid(unit));
        if rest == 0 {
            return None;
        }
        let mut made = Rounded {
            terms: Vec::with_capacity(self.terms.len()),
            most: whole as f64,
            distance: 0.0,
        };
        let (mut sum, mut square) = (0.0, 0.0);
        for ((x, factor), turned) in terms() {
            let factor = times * i128::from(if *turned { -factor } else { *factor });
            let over = (factor.rem_euclid(unit) - rest).max(0) as f64 / (unit - rest) as f64;
            let part = factor.div_euclid(unit) as f64 + over;
            if part == 0.0 {
                continue;
            }
            let value = point[*x as usize];
            square += part * part;
            if *turned {
                sum += part * (1.0 - value);
                made.most -= part;
                made.terms.push((*x, -part));
            } else {
                sum += part * value;
                made.terms.push((*x, part));
            }
        }
        made.distance = (sum - whole as f64) / f64::sqrt(square);
        Some(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::work::Random;

    /// A third of each item fills the sack, but only one item fits.
    #[test]
    fn a_point_between_choices_is_cut_off() {
        let sack = Packing {
            terms: vec![(0, 3), (1, 3), (2, 3)],
            most: 5,
        };
        let made = sack.round(&[0.56, 0.55, 0.55]).unwrap();
        assert_eq!(made.terms, [(0, 1.0), (1, 1.0), (2, 1.0)]);
        assert_eq!(made.most, 1.0);
        assert!(sack.round(&[1.0, 0.0, 0.0]).is_none());
    }

    #[test]
    fn what_holds_for_all_choices_holds_after_rounding() {
        let mut r = Random::new(7);
        let mut cuts = 0;
        for n in 0..2000 {
            let size = [9, 40, 1 << 40][r.below(3)];
            let factor = |r: &mut Random| r.below(2 * size) as i64 - size as i64 / 2;
            let sack = Packing {
                terms: (0..8).map(|x| (x, factor(&mut r))).collect(),
                most: factor(&mut r),
            };
            let point: Vec<f64> = (0..8).map(|_| r.unit()).collect();
            let Some(made) = sack.round(&point) else {
                continue;
            };
            let value = |x: u32| point[x as usize];
            let at_point: f64 = made.terms.iter().map(|(x, part)| part * value(*x)).sum();
            assert!(at_point > made.most, "{n}");
            let size: f64 = made.terms.iter().map(|t| t.1.abs()).sum();
            cuts += 1;
            for set in 0..256u32 {
                let taken = |x: u32| set >> x & 1 == 1;
                let whole = sack.terms.iter().filter(|t| taken(t.0)).map(|t| t.1);
                let parts = made.terms.iter().filter(|t| taken(t.0)).map(|t| t.1);
                if whole.sum::<i64>() <= sack.most {
                    assert!(parts.sum::<f64>() <= made.most + 1e-12 * size, "{n} {set}");
                }
            }
        }
        assert!(cuts > 500, "{cuts}");
    }
}
