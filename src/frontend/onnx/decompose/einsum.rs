//! `Einsum` (ONNX Einsum-12) as diagonals, sums, products of matrices and transpositions.
//!
//! Operands are joined from left to right. A label that nothing needs any more is summed out as soon as possible: by a
//! sum where one operand alone has it, by a product of matrices where two have it. Two operands that share no such label
//! are multiplied elementwise. Axes behind an ellipsis are labels like any other, counted from the right, and broadcast.

use super::{Call, Out};
use ckpt_passes::Result;
use ckpt_passes::ir::{Attrs, Dim, ValueId};
use ckpt_passes::ops::index::GATHER;
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::reduce::{REDUCE_SUM, reduce_axes};
use std::collections::BTreeSet;

/// What an axis is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    /// Behind an ellipsis: this far from the right. Outermost ones come first.
    Unnamed(std::cmp::Reverse<usize>),
    Named(char),
}

/// A tensor and the label of each axis.
#[derive(Clone, Debug)]
struct Term {
    v: ValueId,
    labels: Vec<Label>,
}

impl Term {
    fn axis(&self, label: Label) -> Option<usize> {
        self.labels.iter().position(|l| *l == label)
    }
}

/// One side of the equation for one operand: labels before the ellipsis, after it, and whether there is one.
struct Pattern {
    before: Vec<char>,
    after: Vec<char>,
    ellipsis: bool,
}

impl Pattern {
    fn parse(call: &Call, text: &str) -> Result<Pattern> {
        let (before, after) = match text.split_once("...") {
            Some((before, after)) => (before, Some(after)),
            None => (text, None),
        };
        let letters = |part: &str| -> Result<Vec<char>> {
            match part.chars().find(|c| !c.is_ascii_alphabetic()) {
                None => Ok(part.chars().collect()),
                Some(odd) => {
                    Err(call.fail("attribute", format!("`{odd}` in the equation is no label")))
                }
            }
        };
        Ok(Pattern {
            before: letters(before)?,
            after: letters(after.unwrap_or(""))?,
            ellipsis: after.is_some(),
        })
    }

    /// Labels of an operand that has `unnamed` axes behind its ellipsis.
    fn labels(&self, unnamed: usize) -> Vec<Label> {
        let named = |c: &char| Label::Named(*c);
        let hidden = (0..unnamed)
            .rev()
            .map(|k| Label::Unnamed(std::cmp::Reverse(k)));
        self.before
            .iter()
            .map(named)
            .chain(hidden)
            .chain(self.after.iter().map(named))
            .collect()
    }
}

/// `Einsum`: sums of products over labelled axes.
pub fn einsum(call: &mut Call) -> Result<Option<Vec<Out>>> {
    let equation = call.string("equation", "")?.replace(' ', "");
    let (left, right) = match equation.split_once("->") {
        Some((left, right)) => (left, Some(right)),
        None => (equation.as_str(), None),
    };
    let mut terms = Vec::new();
    let mut widest = 0;
    for (slot, text) in left.split(',').enumerate() {
        let v = call.need(slot, "Inputs")?;
        let pattern = Pattern::parse(call, text)?;
        let named = pattern.before.len() + pattern.after.len();
        let rank = call.b.rank(v);
        if rank < named || (rank > named && !pattern.ellipsis) {
            return Err(call
                .fail("shape", format!("`{text}` does not fit operand {slot}"))
                .found(call.b.ty(v).to_string()));
        }
        widest = widest.max(rank - named);
        terms.push(Term {
            v,
            labels: pattern.labels(rank - named),
        });
    }
    let result = match right {
        Some(text) => {
            let pattern = Pattern::parse(call, text)?;
            if widest > 0 && !pattern.ellipsis {
                return Err(call.unsupported("an ellipsis that the result does not have"));
            }
            pattern.labels(widest)
        }
        None => implicit(&terms),
    };
    let known: BTreeSet<Label> = terms.iter().flat_map(|t| t.labels.clone()).collect();
    let distinct: BTreeSet<Label> = result.iter().copied().collect();
    if distinct.len() != result.len() || !distinct.is_subset(&known) {
        return Err(call
            .fail(
                "attribute",
                "a label of the result is given twice or is no operand's",
            )
            .found(equation));
    }
    let mut joined: Option<Term> = None;
    for i in 0..terms.len() {
        let mut term = terms[i].clone();
        diagonals(call, &mut term)?;
        let mut needed: BTreeSet<Label> = distinct.clone();
        needed.extend(terms[i + 1..].iter().flat_map(|t| t.labels.iter().copied()));
        let elsewhere = joined.iter().flat_map(|t| t.labels.iter().copied());
        let kept: BTreeSet<Label> = needed.iter().copied().chain(elsewhere).collect();
        sum_out(call, &mut term, &kept)?;
        joined = Some(match joined {
            None => term,
            Some(so_far) => join(call, so_far, term, &needed)?,
        });
    }
    let Some(mut last) = joined else {
        return Err(call.fail("arity", "no operands"));
    };
    sum_out(call, &mut last, &distinct)?;
    arrange(call, &mut last, &result)?;
    Ok(Some(vec![Out::Value(last.v)]))
}

/// Without an arrow: what is behind an ellipsis, then the labels that occur once, in the order of the alphabet.
fn implicit(terms: &[Term]) -> Vec<Label> {
    let all: Vec<Label> = terms.iter().flat_map(|t| t.labels.clone()).collect();
    let times = |l: &Label| all.iter().filter(|m| *m == l).count();
    let distinct: BTreeSet<Label> = all.iter().copied().collect();
    distinct
        .into_iter()
        .filter(|l| matches!(l, Label::Unnamed(_)) || times(l) == 1)
        .collect()
}

/// A label that an operand has twice stands for the diagonal of those axes, which take the place of the first.
fn diagonals(call: &mut Call, term: &mut Term) -> Result<()> {
    loop {
        let rank = term.labels.len();
        let pair = (0..rank).find_map(|i| {
            let second = (i + 1..rank).find(|j| term.labels[*j] == term.labels[i])?;
            Some((i, second))
        });
        let Some((first, second)) = pair else {
            return Ok(());
        };
        // Both axes to the front and as one: the diagonal is every (size + 1)-th of its elements.
        let mut perm = vec![first, second];
        perm.extend((0..rank).filter(|i| *i != first && *i != second));
        let size = call.axis_size(term.v, first)?;
        let axes: Vec<i64> = perm.iter().map(|a| *a as i64).collect();
        let mut sizes = vec![call.b.ints(&[-1])];
        for axis in &perm[2..] {
            sizes.push(call.axis_vector(term.v, *axis)?);
        }
        let places = call.positions(term.v, first)?;
        let unit = call.b.int(1);
        let step = call.b.add(size, unit)?;
        let places = call.b.mul(places, step)?;
        let front = call.transpose(term.v, &axes)?;
        let shape = call.concat(&sizes, 0)?;
        let flat = call.b.emit(
            &ckpt_passes::ops::shape::RESHAPE,
            &[front, shape],
            Attrs::new(),
        )?;
        term.v = call
            .b
            .emit(&GATHER, &[flat, places], Attrs::new().with("axis", 0))?;
        term.labels = perm
            .iter()
            .filter(|a| **a != second)
            .map(|a| term.labels[*a])
            .collect();
    }
}

/// Sums over the axes whose labels are not `kept`.
fn sum_out(call: &mut Call, term: &mut Term, kept: &BTreeSet<Label>) -> Result<()> {
    let axes: Vec<usize> = (0..term.labels.len())
        .filter(|i| !kept.contains(&term.labels[*i]))
        .collect();
    term.v = reduce_axes(&mut call.b, &REDUCE_SUM, term.v, &axes, false)?;
    term.labels.retain(|l| kept.contains(l));
    Ok(())
}

/// The axes of `term` in the order of `labels`, all of which it has.
fn arrange(call: &mut Call, term: &mut Term, labels: &[Label]) -> Result<()> {
    let perm: Vec<i64> = labels
        .iter()
        .filter_map(|l| term.axis(*l))
        .map(|a| a as i64)
        .collect();
    if perm.iter().enumerate().any(|(i, a)| i as i64 != *a) {
        term.v = call.transpose(term.v, &perm)?;
    }
    term.labels = labels.to_vec();
    Ok(())
}

/// The product of two terms, summed over the labels that both have and nothing needs.
fn join(call: &mut Call, mut a: Term, mut b: Term, needed: &BTreeSet<Label>) -> Result<Term> {
    let of = |t: &Term, other: &Term, shared: bool, wanted: bool| -> Vec<Label> {
        let chosen = |l: &&Label| {
            other.labels.contains(l) == shared && (!shared || needed.contains(l) == wanted)
        };
        t.labels.iter().filter(chosen).copied().collect()
    };
    let mut batch = of(&a, &b, true, true);
    batch.sort_unstable();
    let summed = of(&a, &b, true, false);
    let (rows, columns) = (of(&a, &b, false, true), of(&b, &a, false, true));
    for label in batch.iter().chain(&summed) {
        check_sizes(call, &a, &b, *label)?;
    }
    arrange(call, &mut a, &[&batch[..], &rows, &summed].concat())?;
    let labels = [&batch[..], &rows, &columns].concat();
    if summed.is_empty() {
        arrange(call, &mut b, &[&batch[..], &columns].concat())?;
        let behind: Vec<i64> = (0..columns.len())
            .map(|i| (a.labels.len() + i) as i64)
            .collect();
        let between: Vec<i64> = (0..rows.len()).map(|i| (batch.len() + i) as i64).collect();
        let left = unsqueezed(call, a.v, &behind)?;
        let right = unsqueezed(call, b.v, &between)?;
        let v = call.b.mul(left, right)?;
        return Ok(Term { v, labels });
    }
    arrange(call, &mut b, &[&batch[..], &summed, &columns].concat())?;
    let n = batch.len();
    let left = matrices(call, a.v, n, rows.len())?;
    let right = matrices(call, b.v, n, summed.len())?;
    let product = call.b.emit(&MATMUL, &[left, right], Attrs::new())?;
    if rows.len() == 1 && columns.len() == 1 {
        return Ok(Term { v: product, labels });
    }
    let mut sizes = Vec::with_capacity(labels.len());
    for axis in 0..n {
        sizes.push(call.axis_vector(product, axis)?);
    }
    for i in 0..rows.len() {
        sizes.push(call.axis_vector(a.v, n + i)?);
    }
    for i in 0..columns.len() {
        sizes.push(call.axis_vector(b.v, n + summed.len() + i)?);
    }
    let shape = match sizes.as_slice() {
        [] => call.b.ints(&[]),
        sizes => call.concat(sizes, 0)?,
    };
    let v = call.reshape_to(product, shape)?;
    Ok(Term { v, labels })
}

/// Behind an ellipsis, sizes broadcast; a named label has one size.
fn check_sizes(call: &Call, a: &Term, b: &Term, label: Label) -> Result<()> {
    let (Label::Named(name), Some(i), Some(j)) = (label, a.axis(label), b.axis(label)) else {
        return Ok(());
    };
    let (x, y) = (&call.dims(a.v)[i], &call.dims(b.v)[j]);
    if x.same(y) == ckpt_passes::ir::Same::No {
        return Err(call
            .fail("shape", format!("label `{name}` has two sizes"))
            .found(format!("{x} and {y}")));
    }
    Ok(())
}

fn unsqueezed(call: &mut Call, v: ValueId, axes: &[i64]) -> Result<ValueId> {
    if axes.is_empty() {
        return Ok(v);
    }
    call.unsqueeze(v, axes)
}

/// `v` with its first `n` axes as they are, the next `rows` as one, and the rest as one.
fn matrices(call: &mut Call, v: ValueId, n: usize, rows: usize) -> Result<ValueId> {
    let rank = call.b.rank(v);
    if rows == 1 && rank == n + 2 {
        return Ok(v);
    }
    let mut sizes = Vec::with_capacity(n + 2);
    for axis in 0..n {
        sizes.push(call.axis_vector(v, axis)?);
    }
    for group in [n..n + rows, n + rows..rank] {
        sizes.push(product_of(call, v, group)?);
    }
    let shape = call.concat(&sizes, 0)?;
    call.reshape_to(v, shape)
}

/// The product of some sizes, as a vector of one element.
fn product_of(call: &mut Call, v: ValueId, axes: std::ops::Range<usize>) -> Result<ValueId> {
    let whole = Dim::product(&call.dims(v)[axes.clone()]);
    if let Some(n) = whole.as_const() {
        return Ok(call.b.ints(&[n]));
    }
    let mut product: Option<ValueId> = None;
    for axis in axes {
        let size = call.axis_vector(v, axis)?;
        product = Some(match product {
            None => size,
            Some(so_far) => call.b.mul(so_far, size)?,
        });
    }
    Ok(product.unwrap_or_else(|| call.b.ints(&[1])))
}
