//! Symbolic sizes: integer expressions in one canonical form.
//!
//! A [`Dim`] is a polynomial with integer coefficients over *atoms*: named sizes (`batch`), data-dependent sizes
//! (`?nonzero.0`), and the operations that polynomials cannot hold (floor division, remainder, min, max, broadcast).
//! Two dims that are equal as polynomials are equal as Rust values, so hashing and comparison need no solver.
//!
//! The arithmetic relies on two facts. A named size is at least 1: an input whose named dimension is 0 is refused. A
//! data-dependent size is at least 0. Equality is yes, no or unknown, and unknown is never taken for yes.

use super::name::Word;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// A size or an index: a canonical integer expression.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim(Repr);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Repr {
    Const(i64),
    /// Sorted by monomial, no zero coefficient, never a lone constant.
    Poly(Arc<Vec<(Monomial, i64)>>),
}

/// A product of atoms, sorted; a power is a repetition; the empty product is the constant term.
pub type Monomial = Vec<Atom>;

/// How many choices and quotients in a sum are replaced by their operands, one after the other, to prove a bound.
const MAX_CASES_DEPTH: u32 = 4;

/// What a polynomial is made of.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Atom {
    /// A named size, at least 1.
    Sym(Arc<str>),
    /// A size that depends on data, at least 0.
    Data(Arc<str>),
    /// Floor division.
    Div(Dim, Dim),
    /// Remainder with the sign of the divisor.
    Mod(Dim, Dim),
    /// The smaller of two.
    Min(Dim, Dim),
    /// The larger of two.
    Max(Dim, Dim),
    /// The result of broadcasting two sizes: if one is 1 the other one, else their common value.
    Broadcast(Dim, Dim),
}

/// The answer to "are these equal in every valid run".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Same {
    /// Equal in every valid run.
    Yes,
    /// Different in every valid run.
    No,
    /// Neither can be proven.
    Unknown,
}

impl From<i64> for Dim {
    fn from(n: i64) -> Dim {
        Dim(Repr::Const(n))
    }
}

impl Dim {
    /// 0.
    pub const ZERO: Dim = Dim(Repr::Const(0));
    /// 1.
    pub const ONE: Dim = Dim(Repr::Const(1));

    /// A named size.
    pub fn symbol(name: &str) -> Dim {
        Dim::from_atom(Atom::Sym(name.into()))
    }

    /// A size that only the data decides.
    pub fn data(name: &str) -> Dim {
        Dim::from_atom(Atom::Data(name.into()))
    }

    /// Returns the size that consists of this atom.
    pub fn from_atom(atom: Atom) -> Dim {
        Dim(Repr::Poly(Arc::new(vec![(vec![atom], 1)])))
    }

    fn from_terms(terms: BTreeMap<Monomial, i64>) -> Dim {
        let terms: Vec<_> = terms.into_iter().filter(|(_, c)| *c != 0).collect();
        match terms.as_slice() {
            [] => Dim::ZERO,
            [(m, c)] if m.is_empty() => Dim::from(*c),
            _ => Dim(Repr::Poly(Arc::new(terms))),
        }
    }

    /// The terms of the polynomial: (product of atoms, coefficient), sorted.
    pub fn terms(&self) -> Vec<(Monomial, i64)> {
        match &self.0 {
            Repr::Const(0) => Vec::new(),
            Repr::Const(n) => vec![(Vec::new(), *n)],
            Repr::Poly(terms) => terms.to_vec(),
        }
    }

    /// Returns the number, if the size is one.
    pub fn as_const(&self) -> Option<i64> {
        match self.0 {
            Repr::Const(n) => Some(n),
            Repr::Poly(_) => None,
        }
    }

    /// The name, if this is just one named size.
    pub fn as_symbol(&self) -> Option<&str> {
        match self.as_atom() {
            Some(Atom::Sym(name)) => Some(name),
            _ => None,
        }
    }

    /// The atom, if this is just one atom.
    pub fn as_atom(&self) -> Option<&Atom> {
        match &self.0 {
            Repr::Poly(terms) => match terms.as_slice() {
                [(m, 1)] if m.len() == 1 => Some(&m[0]),
                _ => None,
            },
            Repr::Const(_) => None,
        }
    }

    /// Returns true if the expression holds the greatest or least int64: arithmetic may have saturated there.
    pub fn may_be_saturated(&self) -> bool {
        let edge = |n: i64| n == i64::MAX || n == i64::MIN;
        match &self.0 {
            Repr::Const(n) => edge(*n),
            Repr::Poly(terms) => terms.iter().any(|(_, c)| edge(*c)),
        }
    }

    /// Returns true if the size is the constant 1.
    pub fn is_one(&self) -> bool {
        *self == Dim::ONE
    }

    /// Returns the sum.
    pub fn add(&self, other: &Dim) -> Dim {
        self.combine(other, 1)
    }

    /// Returns the difference.
    pub fn sub(&self, other: &Dim) -> Dim {
        self.combine(other, -1)
    }

    fn combine(&self, other: &Dim, sign: i64) -> Dim {
        if let (Some(a), Some(b)) = (self.as_const(), other.as_const()) {
            return Dim::from(a.saturating_add(b.saturating_mul(sign)));
        }
        let mut terms: BTreeMap<Monomial, i64> = self.terms().into_iter().collect();
        for (m, c) in other.terms() {
            let entry = terms.entry(m).or_insert(0);
            *entry = entry.saturating_add(c.saturating_mul(sign));
        }
        let sum = Dim::from_terms(terms);
        sum.with_quotient().unwrap_or(sum)
    }

    /// Returns a sum that contains `n mod b - n` or its opposite with `b·floor(n / b)` instead. So a size that is rounded up by
    /// padding, `s + -s mod b`, is a multiple of `b`.
    fn with_quotient(&self) -> Option<Dim> {
        let Repr::Poly(terms) = &self.0 else {
            return None;
        };
        let has = |m: &Monomial, c: i64| terms.iter().any(|(own, k)| own == m && *k == c);
        let cancels = |sign: i64, (m, k): &(Monomial, i64)| {
            m.is_empty() || k.checked_mul(-sign).is_some_and(|c| has(m, c))
        };
        terms.iter().find_map(|(m, sign)| {
            let [Atom::Mod(n, by)] = m.as_slice() else {
                return None;
            };
            let fits = sign.abs() == 1 && n.as_const().is_none();
            if !fits || !n.terms().iter().all(|term| cancels(*sign, term)) {
                return None;
            }
            // sign·(n mod b) = sign·(n - b·floor(n / b)).
            let quotient = n.div(by).mul(by).mul(&Dim::from(-sign));
            let others = terms.iter().filter(|(own, _)| own != m).cloned().collect();
            let others = Dim::from_terms(others).combine(&n.mul(&Dim::from(*sign)), 1);
            Some(others.combine(&quotient, 1))
        })
    }

    /// Returns the product.
    pub fn mul(&self, other: &Dim) -> Dim {
        match (self.as_const(), other.as_const()) {
            (Some(a), Some(b)) => return Dim::from(a.saturating_mul(b)),
            (Some(0), _) | (_, Some(0)) => return Dim::ZERO,
            (Some(1), _) => return other.clone(),
            (_, Some(1)) => return self.clone(),
            _ => {}
        }
        let right = other.terms();
        let mut terms: BTreeMap<Monomial, i64> = BTreeMap::new();
        for (ma, ca) in self.terms() {
            for (mb, cb) in &right {
                let mut m = ma.clone();
                m.extend(mb.iter().cloned());
                m.sort();
                let entry = terms.entry(m).or_insert(0);
                *entry = entry.saturating_add(ca.saturating_mul(*cb));
            }
        }
        Dim::from_terms(terms)
    }

    /// The product of many.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
        dims.into_iter().fold(Dim::ONE, |acc, d| acc.mul(d))
    }

    /// Returns `self / other` if the division is exact for all values of the atoms.
    pub fn exact_div(&self, other: &Dim) -> Option<Dim> {
        if other.as_const() == Some(0) {
            return None;
        }
        if self == other {
            return Some(Dim::ONE);
        }
        if self.as_const() == Some(0) {
            return Some(Dim::ZERO);
        }
        let divisor = other.terms();
        let (lead_m, lead_c) = divisor.last()?.clone();
        let mut rest = self.clone();
        let mut quotient = Dim::ZERO;
        // Long division by the leading term; bounded by the number of terms, since every step removes one.
        for _ in 0..self.terms().len() {
            let Some((m, c)) = rest.terms().last().cloned() else {
                break;
            };
            let mut left = m;
            for atom in &lead_m {
                left.remove(left.iter().position(|a| a == atom)?);
            }
            if c.checked_rem(lead_c) != Some(0) {
                return None;
            }
            let step = Dim::from_terms(BTreeMap::from([(left, c / lead_c)]));
            quotient = quotient.add(&step);
            rest = rest.sub(&step.mul(other));
        }
        (rest == Dim::ZERO).then_some(quotient)
    }

    /// Returns the exact quotient by a size that may be 0. There the quotient has no value, so it counts as 1 or more.
    fn exact_div_by_positive(&self, other: &Dim) -> Option<Dim> {
        let atom = other.as_atom().filter(|_| other.bounds().0 == Some(0))?;
        let rest = Dim::data("divisor - 1");
        let positive = rest.add(&Dim::ONE);
        let moved = self.substitute(&|a| (a == atom).then(|| positive.clone()));
        let quotient = moved.exact_div(&positive)?;
        let is_rest = |a: &Atom| rest.as_atom() == Some(a);
        Some(quotient.substitute(&|a| is_rest(a).then(|| other.sub(&Dim::ONE))))
    }

    /// Returns `q` if this is `b·q` and a rest that is never a whole `b`.
    fn multiples_of(&self, other: &Dim) -> Option<Dim> {
        let b = other.as_const().filter(|b| *b > 1)?;
        let is_multiple = |(_, c): &(Monomial, i64)| c % b == 0;
        let (multiples, rest): (Vec<_>, Vec<_>) = self.terms().into_iter().partition(is_multiple);
        let (least, most) = Dim::from_terms(rest.into_iter().collect()).bounds();
        let within = least.is_some_and(|n| n >= 0) && most.is_some_and(|n| n < b);
        let quotients = multiples.into_iter().map(|(m, c)| (m, c / b));
        within.then(|| Dim::from_terms(quotients.collect()))
    }

    /// Returns `q` and `r` for `b·q + r`, if some terms but not all are multiples of the number `b`.
    fn without_multiples(&self, other: &Dim) -> Option<(Dim, Dim)> {
        let b = other.as_const().filter(|b| *b > 1)?;
        let is_multiple = |(_, c): &(Monomial, i64)| c % b == 0;
        let (multiples, rest): (Vec<_>, Vec<_>) = self.terms().into_iter().partition(is_multiple);
        let quotients = multiples.iter().map(|(m, c)| (m.clone(), c / b));
        let parts = (
            Dim::from_terms(quotients.collect()),
            Dim::from_terms(rest.into_iter().collect()),
        );
        (!multiples.is_empty() && parts.1 != Dim::ZERO).then_some(parts)
    }

    /// Returns a size of the same remainder: `n` instead of `n mod other`, and no multiples of a number `other`.
    fn without_remainders(&self, other: &Dim) -> Dim {
        let mut sum = Dim::ZERO;
        for (m, c) in self.terms() {
            let term = match (m.as_slice(), other.as_const()) {
                ([Atom::Mod(n, by)], _) if by == other => n.mul(&Dim::from(c)),
                (_, Some(b)) if b > 0 && c % b == 0 => continue,
                _ => Dim::from_terms(BTreeMap::from([(m, c)])),
            };
            sum = sum.add(&term);
        }
        sum
    }

    /// Returns the quotient, rounded down. A division by zero is not simplified and has no value.
    pub fn div(&self, other: &Dim) -> Dim {
        match (self.as_const(), other.as_const()) {
            (Some(a), Some(b)) if b != 0 => return Dim::from(floor_div(a, b)),
            _ => {}
        }
        if let Some(whole) = self.multiples_of(other) {
            return whole;
        }
        if let Some((multiples, rest)) = self.without_multiples(other) {
            return multiples.add(&rest.div(other));
        }
        // ⌊-a / b⌋ is -⌈a / b⌉, and ⌈a / b⌉ is ⌊(a + b - 1) / b⌋.
        let is_negative = |(_, c): &(Monomial, i64)| *c < 0;
        if other.as_const().is_some_and(|b| b > 0)
            && self.as_const().is_none()
            && self.terms().iter().all(is_negative)
        {
            return Dim::ZERO.sub(&Dim::ZERO.sub(self).ceil_div(other));
        }
        self.exact_div(other)
            .or_else(|| self.exact_div_by_positive(other))
            .unwrap_or_else(|| match lowest_terms(self, other) {
                Some((a, b)) => a.div(&b),
                None => Dim::from_atom(Atom::Div(self.clone(), other.clone())),
            })
    }

    /// Returns the quotient, rounded up.
    pub fn ceil_div(&self, other: &Dim) -> Dim {
        self.exact_div(other)
            .unwrap_or_else(|| self.add(other).sub(&Dim::ONE).div(other))
    }

    /// Remainder with the sign of the divisor.
    pub fn modulo(&self, other: &Dim) -> Dim {
        match (self.as_const(), other.as_const()) {
            (Some(a), Some(b)) if b != 0 => return Dim::from(floor_mod(a, b)),
            _ => {}
        }
        if self.exact_div(other).is_some() {
            return Dim::ZERO;
        }
        let inner = self.without_remainders(other);
        if inner != *self {
            return inner.modulo(other);
        }
        Dim::from_atom(Atom::Mod(self.clone(), other.clone()))
    }

    /// Returns the smaller of two.
    pub fn smaller(&self, other: &Dim) -> Dim {
        if other.is_at_least(self) {
            return self.clone();
        }
        if self.is_at_least(other) {
            return other.clone();
        }
        let (a, b) = ordered(self, other);
        Dim::from_atom(Atom::Min(a, b))
    }

    /// Returns the smaller of an index and the size of an axis, which is not negative.
    pub fn clamped(&self, size: &Dim) -> Dim {
        let is_inside = |at: &Dim| at.as_const().is_some_and(|n| n <= 0) || size.is_at_least(at);
        match self.as_atom() {
            Some(Atom::Max(a, b)) if is_inside(a) && is_inside(b) => self.clone(),
            _ => self.smaller(size),
        }
    }

    /// Returns `p` and `q` where this is `p / q` of a size, rounded down, and `0 <= p <= q`. No size is negative, so this lies between
    /// 0 and the size.
    pub fn share_of(&self, size: &Dim) -> Option<(i128, i128)> {
        let (of, by) = match self.as_atom() {
            Some(Atom::Div(of, by)) => (of.clone(), by.as_const()?),
            _ => (self.clone(), 1),
        };
        let (own, all) = (of.terms(), size.terms());
        let (p, q) = match (own.first(), all.first()) {
            (None, _) => (0, 1),
            (Some((_, p)), Some((_, q))) => (i128::from(*p), i128::from(*q)),
            (Some(_), None) => return None,
        };
        let is_share = |((m, c), (n, d)): (&(Monomial, i64), &(Monomial, i64))| {
            m == n && i128::from(*c) * q == i128::from(*d) * p
        };
        let is_part = p == 0 || own.len() == all.len() && own.iter().zip(&all).all(is_share);
        let (p, q) = (p * q.signum(), q.abs() * i128::from(by));
        (is_part && by > 0 && 0 <= p && p <= q).then_some((p, q))
    }

    /// Returns the larger of two.
    pub fn larger(&self, other: &Dim) -> Dim {
        if other.is_at_least(self) {
            return other.clone();
        }
        if self.is_at_least(other) {
            return self.clone();
        }
        let (a, b) = ordered(self, other);
        Dim::from_atom(Atom::Max(a, b))
    }

    /// Returns true if the size is proven to be no less than another one in every run.
    fn is_at_least(&self, other: &Dim) -> bool {
        self.sub(other).bounds().0.is_some_and(|least| least >= 0)
    }

    /// Returns `p` and `q` for `min(p, q)`, and `n - a` and `n - b` for `n - max(a, b)`, the length of a slice that
    /// starts at `max(a, b)`.
    fn as_min(&self) -> Option<(Dim, Dim)> {
        if let Some(Atom::Min(p, q)) = self.as_atom() {
            return Some((p.clone(), q.clone()));
        }
        let (Repr::Poly(terms), max) = (&self.0, |m: &Monomial, c: i64| match m.as_slice() {
            [Atom::Max(a, b)] if c == -1 => Some((a.clone(), b.clone())),
            _ => None,
        }) else {
            return None;
        };
        let mut found = terms.iter().filter_map(|(m, c)| max(m, *c));
        let (a, b) = found.next()?;
        if found.next().is_some() {
            return None;
        }
        let n = self.add(&Dim::from_atom(Atom::Max(a.clone(), b.clone())));
        Some((n.sub(&a), n.sub(&b)))
    }

    /// Returns the broadcast of two sizes, or `None` if no run can be valid.
    ///
    /// In a valid run the two are equal or one of them is 1. So if one cannot be 1, it is the result.
    pub fn broadcast(&self, other: &Dim) -> Option<Dim> {
        if self == other || other.is_one() {
            return Some(self.clone());
        }
        if self.is_one() {
            return Some(other.clone());
        }
        if self.same(other) == Same::Yes {
            let is_shorter = other.terms().len() < self.terms().len();
            return Some(if is_shorter { other } else { self }.clone());
        }
        let (a1, b1) = (self.same(&Dim::ONE), other.same(&Dim::ONE));
        if a1 == Same::No && b1 == Same::No && self.same(other) == Same::No {
            return None;
        }
        if a1 == Same::No && (b1 != Same::No || self.as_const().is_some()) {
            return Some(self.clone());
        }
        if b1 == Same::No {
            return Some(other.clone());
        }
        for (x, y) in [(self, other), (other, self)] {
            // No size is negative.
            if matches!(x.as_atom(), Some(Atom::Max(a, b)) if *a == Dim::ZERO && b == y) {
                return Some(y.clone());
            }
            // min(y, k) against y: where it is 1, y is the result; where it is y, too; else the run is not valid. But
            // a minimum of 0 against y = 1 is 0.
            if let Some((p, q)) = x.as_min()
                && (&p == y || &q == y)
                && x.bounds().0.is_some_and(|lo| lo >= 1)
            {
                return Some(y.clone());
            }
        }
        let (a, b) = ordered(self, other);
        Some(Dim::from_atom(Atom::Broadcast(a, b)))
    }

    /// Compares two sizes: equal in every run, in none, or unknown.
    pub fn same(&self, other: &Dim) -> Same {
        if self == other {
            return Same::Yes;
        }
        match self.sub(other).bounds() {
            (Some(0), Some(0)) => Same::Yes,
            (Some(lo), _) if lo > 0 => Same::No,
            (_, Some(hi)) if hi < 0 => Same::No,
            _ => Same::Unknown,
        }
    }

    /// Returns a proven lower and upper bound.
    pub fn bounds(&self) -> (Option<i64>, Option<i64>) {
        let (lo, hi) = self.bounds_within(MAX_CASES_DEPTH);
        match lo {
            Some(0..) => (lo, hi),
            _ if self.is_difference_of_quotients() => (Some(0), hi),
            _ => (lo, hi),
        }
    }

    /// Returns true for `m·floor(a / b) - m·floor(c / d)` with `a / b` no less than `c / d`, such as the length of a chunk of an
    /// axis. Any other atom is divided by 1.
    fn is_difference_of_quotients(&self) -> bool {
        let terms = self.terms();
        let [first, second] = terms.as_slice() else {
            return false;
        };
        let ((more, plus), (less, minus)) = match first.1 > second.1 {
            true => (first, second),
            false => (second, first),
        };
        // The factors of one that the other does not have, as often as it has more of them.
        let without = |m: &Monomial, of: &Monomial| -> Monomial {
            let mut rest = of.clone();
            let is_own = |atom: &&Atom| match rest.iter().position(|other| other == *atom) {
                Some(at) => {
                    rest.remove(at);
                    false
                }
                None => true,
            };
            m.iter().filter(is_own).cloned().collect()
        };
        let (own, other) = (without(more, less), without(less, more));
        let ([a], [b]) = (own.as_slice(), other.as_slice()) else {
            return false;
        };
        let divided = |atom: &Atom| match atom {
            Atom::Div(of, by) => Some((of.clone(), by.as_const().filter(|by| *by > 0)?)),
            _ => Some((Dim::from_atom(atom.clone()), 1)),
        };
        let is_size = |atom: &Atom| atom.bounds(0).0.is_some_and(|least| least >= 0);
        let is_above = || {
            let ((a, by_a), (b, by_b)) = (divided(a)?, divided(b)?);
            let gap = a.mul(&Dim::from(by_b)).sub(&b.mul(&Dim::from(by_a)));
            Some(!gap.may_be_saturated() && gap.bounds_within(0).0? >= 0)
        };
        plus.checked_neg() == Some(*minus) && more.iter().all(is_size) && is_above() == Some(true)
    }

    fn bounds_within(&self, depth: u32) -> (Option<i64>, Option<i64>) {
        let (lo, hi) = self.interval(depth / 2);
        if depth == 0 {
            return (lo, hi);
        }
        let best = |a: Option<i64>, b: Option<i64>| [a, b].into_iter().flatten().max();
        let negative = |n: Option<i64>| n.and_then(i64::checked_neg);
        let less = Dim::ZERO.sub(self).least_by_case(depth - 1);
        (
            best(lo, self.least_by_case(depth - 1)),
            negative(best(negative(hi), less)),
        )
    }

    /// Returns the bounds that follow from the bounds of each atom alone.
    fn interval(&self, depth: u32) -> (Option<i64>, Option<i64>) {
        let (mut lo, mut hi) = (Some(0i64), Some(0i64));
        for (m, c) in self.terms() {
            let (mut mlo, mut mhi) = (Some(1i64), Some(1i64));
            for atom in &m {
                let (alo, ahi) = atom.bounds(depth);
                // Products are only bounded for factors that cannot be negative.
                match alo {
                    Some(l) if l >= 0 && mlo.is_some_and(|x| x >= 0) => {
                        mlo = mlo.map(|x| x.saturating_mul(l));
                        mhi = mhi.zip(ahi).map(|(x, y)| x.saturating_mul(y));
                    }
                    _ => {
                        (mlo, mhi) = if m.len() == 1 {
                            (alo, ahi)
                        } else {
                            (None, None)
                        }
                    }
                }
            }
            let (tlo, thi) = if c >= 0 { (mlo, mhi) } else { (mhi, mlo) };
            lo = lo
                .zip(tlo)
                .map(|(x, y)| x.saturating_add(y.saturating_mul(c)));
            hi = hi
                .zip(thi)
                .map(|(x, y)| x.saturating_add(y.saturating_mul(c)));
        }
        (lo, hi)
    }

    /// Returns a lower bound from sums with an operand of a choice or a quotient in its place, so that it may cancel with
    /// other terms. Choices whose operands must both be tried come first, and quotients, which may be what cancels, last.
    fn least_by_case(&self, depth: u32) -> Option<i64> {
        let rank = |(atom, factor): &(Atom, i64)| match atom {
            Atom::Min(..) if *factor < 0 => Some(1),
            Atom::Max(..) if *factor > 0 => Some(1),
            Atom::Min(..) | Atom::Max(..) | Atom::Broadcast(..) => Some(0),
            Atom::Div(_, by) => by.as_const().filter(|by| *by > 0).map(|_| 2),
            Atom::Sym(_) | Atom::Data(_) | Atom::Mod(..) => None,
        };
        let single = |(m, factor): (Monomial, i64)| match m.as_slice() {
            [atom] => Some((atom.clone(), factor)),
            _ => None,
        };
        let cases = self.terms().into_iter().filter_map(single);
        let (_, (atom, factor)) = cases
            .filter_map(|case| Some((rank(&case)?, case)))
            .min_by_key(|(rank, _)| *rank)?;
        let rest = self.sub(&Dim::from_atom(atom.clone()).mul(&Dim::from(factor)));
        let with = |operand: &Dim, factor: i64| {
            let sum = rest.add(&operand.mul(&Dim::from(factor)));
            sum.bounds_within(depth).0
        };
        match &atom {
            // The smaller of two is no larger than each of them.
            Atom::Min(a, b) if factor < 0 => with(a, factor).max(with(b, factor)),
            Atom::Max(a, b) if factor > 0 => with(a, factor).max(with(b, factor)),
            Atom::Min(a, b) | Atom::Max(a, b) | Atom::Broadcast(a, b) => {
                let (a, b) = (with(a, factor)?, with(b, factor)?);
                Some(a.min(b))
            }
            // `b·floor(n / b)` is at most `n`, and at least `n - b + 1`.
            Atom::Div(n, by) => {
                let by = by.as_const()?;
                if factor % by != 0 {
                    let least = self.mul(&Dim::from(by)).least_by_case(depth)?;
                    return Some(-floor_div(-least, by));
                }
                let lost = if factor > 0 { by - 1 } else { 0 };
                with(&n.sub(&Dim::from(lost)), factor / by)
            }
            Atom::Sym(_) | Atom::Data(_) | Atom::Mod(..) => None,
        }
    }

    /// Returns the value at given sizes, or `None` if a size is missing, a division is by zero, or two sizes do not
    /// broadcast.
    pub fn eval(&self, size_of: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
        let mut sum: i64 = 0;
        if let Repr::Const(n) = self.0 {
            return Some(n);
        }
        for (m, c) in self.terms() {
            let mut product = c;
            for atom in &m {
                product = product.checked_mul(atom.eval(size_of)?)?;
            }
            sum = sum.checked_add(product)?;
        }
        Some(sum)
    }

    /// Replaces named and data-dependent sizes and simplifies the result.
    pub fn substitute(&self, replace: &dyn Fn(&Atom) -> Option<Dim>) -> Dim {
        if let Repr::Const(_) = self.0 {
            return self.clone();
        }
        let mut sum = Dim::ZERO;
        for (m, c) in self.terms() {
            let factors: Vec<Dim> = m.iter().map(|a| a.substitute(replace)).collect();
            sum = sum.add(&Dim::product(&factors).mul(&Dim::from(c)));
        }
        sum
    }

    /// Returns true if only named sizes occur, none that the data decides.
    pub fn is_over_names(&self) -> bool {
        let mut is_known = true;
        self.for_each_leaf(&mut |atom| is_known &= matches!(atom, Atom::Sym(_)));
        is_known
    }

    /// Calls `f` on every named or data-dependent size that occurs.
    pub fn for_each_leaf(&self, f: &mut dyn FnMut(&Atom)) {
        for (m, _) in self.terms() {
            for atom in &m {
                match atom {
                    Atom::Sym(_) | Atom::Data(_) => f(atom),
                    Atom::Div(a, b)
                    | Atom::Mod(a, b)
                    | Atom::Min(a, b)
                    | Atom::Max(a, b)
                    | Atom::Broadcast(a, b) => {
                        a.for_each_leaf(f);
                        b.for_each_leaf(f);
                    }
                }
            }
        }
    }
}

impl Atom {
    fn bounds(&self, depth: u32) -> (Option<i64>, Option<i64>) {
        match self {
            Atom::Sym(_) => (Some(1), None),
            Atom::Data(_) => (Some(0), None),
            Atom::Div(a, b) => match (a.bounds_within(depth), b.bounds_within(depth)) {
                ((Some(alo), ahi), (Some(blo), bhi)) if alo >= 0 && blo >= 1 => {
                    (Some(bhi.map_or(0, |h| alo / h)), ahi.map(|h| h / blo))
                }
                _ => (None, None),
            },
            Atom::Mod(_, b) => match b.bounds_within(depth) {
                (Some(blo), bhi) if blo >= 1 => (Some(0), bhi.map(|h| h - 1)),
                _ => (None, None),
            },
            Atom::Min(a, b) => {
                let ((alo, ahi), (blo, bhi)) = (a.bounds_within(depth), b.bounds_within(depth));
                (
                    alo.zip(blo).map(|(x, y)| x.min(y)),
                    [ahi, bhi].into_iter().flatten().min(),
                )
            }
            Atom::Max(a, b) => {
                let ((alo, ahi), (blo, bhi)) = (a.bounds_within(depth), b.bounds_within(depth));
                (
                    [alo, blo].into_iter().flatten().max(),
                    ahi.zip(bhi).map(|(x, y)| x.max(y)),
                )
            }
            Atom::Broadcast(a, b) => {
                let ((alo, ahi), (blo, bhi)) = (a.bounds_within(depth), b.bounds_within(depth));
                (
                    alo.zip(blo).map(|(x, y)| x.min(y)),
                    ahi.zip(bhi).map(|(x, y)| x.max(y)),
                )
            }
        }
    }

    fn eval(&self, size_of: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
        Some(match self {
            Atom::Sym(name) | Atom::Data(name) => size_of(name)?,
            Atom::Div(a, b) => {
                let (a, b) = (a.eval(size_of)?, b.eval(size_of)?);
                if b == 0 {
                    return None;
                }
                floor_div(a, b)
            }
            Atom::Mod(a, b) => {
                let (a, b) = (a.eval(size_of)?, b.eval(size_of)?);
                if b == 0 {
                    return None;
                }
                floor_mod(a, b)
            }
            Atom::Min(a, b) => a.eval(size_of)?.min(b.eval(size_of)?),
            Atom::Max(a, b) => a.eval(size_of)?.max(b.eval(size_of)?),
            Atom::Broadcast(a, b) => match (a.eval(size_of)?, b.eval(size_of)?) {
                (1, b) => b,
                (a, 1) => a,
                (a, b) if a == b => a,
                _ => return None,
            },
        })
    }

    fn substitute(&self, replace: &dyn Fn(&Atom) -> Option<Dim>) -> Dim {
        if let Some(dim) = replace(self) {
            return dim;
        }
        match self {
            Atom::Sym(_) | Atom::Data(_) => Dim::from_atom(self.clone()),
            Atom::Div(a, b) => a.substitute(replace).div(&b.substitute(replace)),
            Atom::Mod(a, b) => a.substitute(replace).modulo(&b.substitute(replace)),
            Atom::Min(a, b) => a.substitute(replace).smaller(&b.substitute(replace)),
            Atom::Max(a, b) => a.substitute(replace).larger(&b.substitute(replace)),
            Atom::Broadcast(a, b) => {
                let (x, y) = (a.substitute(replace), b.substitute(replace));
                x.broadcast(&y)
                    .unwrap_or_else(|| Dim::from_atom(Atom::Broadcast(x, y)))
            }
        }
    }
}

fn ordered(a: &Dim, b: &Dim) -> (Dim, Dim) {
    if a <= b {
        (a.clone(), b.clone())
    } else {
        (b.clone(), a.clone())
    }
}

/// Floor division; `b` is not zero.
pub fn floor_div(a: i64, b: i64) -> i64 {
    let q = a.wrapping_div(b);
    if (a.wrapping_rem(b) != 0) && ((a < 0) != (b < 0)) {
        q - 1
    } else {
        q
    }
}

/// The remainder of [`floor_div`].
fn floor_mod(a: i64, b: i64) -> i64 {
    a.wrapping_sub(b.wrapping_mul(floor_div(a, b)))
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let terms = match &self.0 {
            Repr::Const(n) => return write!(f, "{n}"),
            Repr::Poly(terms) => terms,
        };
        // Constant last, as people write it.
        let ordered = terms
            .iter()
            .filter(|(m, _)| !m.is_empty())
            .chain(terms.iter().filter(|(m, _)| m.is_empty()));
        for (i, (m, c)) in ordered.enumerate() {
            match (i, *c < 0) {
                (0, true) => write!(f, "-")?,
                (0, false) => {}
                (_, true) => write!(f, " - ")?,
                (_, false) => write!(f, " + ")?,
            }
            let magnitude = c.unsigned_abs();
            let factors: Vec<String> = m.iter().map(|a| a.to_string()).collect();
            match (magnitude, m.is_empty()) {
                (n, true) => write!(f, "{n}")?,
                (1, false) => write!(f, "{}", factors.join("*"))?,
                (n, false) => write!(f, "{n}*{}", factors.join("*"))?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Atom::Sym(name) => write!(f, "{}", Word(name)),
            Atom::Data(name) => write!(f, "?{}", Word(name)),
            Atom::Div(a, b) => write!(f, "floordiv({a}, {b})"),
            Atom::Mod(a, b) => write!(f, "mod({a}, {b})"),
            Atom::Min(a, b) => write!(f, "min({a}, {b})"),
            Atom::Max(a, b) => write!(f, "max({a}, {b})"),
            Atom::Broadcast(a, b) => write!(f, "broadcast({a}, {b})"),
        }
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Debug for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Returns true if two shapes are equal in every valid run.
pub fn same_dims(a: &[Dim], b: &[Dim]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| x.same(y) == Same::Yes)
}

/// Returns the operands of a floor division without their common factor, or `None` if they have none.
///
/// `floor(k·a / (k·b))` is `floor(a / b)` for every `k > 0`. So two programs that count the same elements, one with the
/// batch and one without, get one size.
fn lowest_terms(a: &Dim, b: &Dim) -> Option<(Dim, Dim)> {
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

/// Returns the greatest common divisor, which is not negative.
fn gcd(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
    while b != 0 {
        (a, b) = (b, a % b);
    }
    i64::try_from(a).unwrap_or(1)
}

#[cfg(test)]
mod tests;
