//! Quotients in lowest terms: what both sides have in common and is never 0 is cancelled.
//!
//! `floor(k·a / (k·b))` is `floor(a / b)` for every `k > 0`, so two programs that count the same elements, one with the batch
//! and one without, get one size.

use super::{Atom, Dim, Monomial};

/// The operands of a floor division without their common factor; `None` where there is none.
pub(super) fn lowest_terms(a: &Dim, b: &Dim) -> Option<(Dim, Dim)> {
    let below = b.terms();
    let [(atoms, coefficient)] = below.as_slice() else {
        return None;
    };
    let above = a.terms();
    let number = above.iter().fold(*coefficient, |n, (_, c)| gcd(n, *c));
    let mut shared: Monomial = Monomial::new();
    for (i, atom) in atoms.iter().enumerate() {
        // Sizes that depend on data may be 0.
        let times = |m: &[Atom]| m.iter().filter(|x| *x == atom).count();
        let rank = times(&atoms[..=i]);
        if matches!(atom, Atom::Sym(_)) && above.iter().all(|(m, _)| times(m) >= rank) {
            shared.push(atom.clone());
        }
    }
    if above.is_empty() || number <= 1 && shared.is_empty() {
        return None;
    }
    let common = shared
        .into_iter()
        .fold(Dim::from(number), |n, atom| n.mul(&Dim::from_atom(atom)));
    Some((a.exact_div(&common)?, b.exact_div(&common)?))
}

/// Not negative.
fn gcd(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
    while b != 0 {
        (a, b) = (b, a % b);
    }
    i64::try_from(a).unwrap_or(1)
}
