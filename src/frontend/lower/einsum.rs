//! `Einsum` (ONNX Einsum-12) as diagonals, sums, products of matrices and transpositions.
//!
//! Operands are joined from left to right. A label that no later operand or result needs is summed out as soon as possible:
//! by a sum if one operand has it, by a product of matrices if two have it. Two operands that share no such label are
//! multiplied elementwise. Axes of an ellipsis are labels too, counted from the right, and they broadcast.

use super::call::{Call, Lowered, one};
use ckpt_passes::Result;
use ckpt_passes::ir::{Dim, Same, ValueId};
use ckpt_passes::ops::EmitExt;
use ckpt_passes::ops::matmul::MATMUL;
use ckpt_passes::ops::reduce::{REDUCE_SUM, reduce_axes};
use ckpt_passes::ops::shape::RESHAPE;
use std::collections::BTreeSet;

/// The label of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    /// An axis of an ellipsis, by its distance from the right. Outermost axes come first.
    Unnamed(std::cmp::Reverse<usize>),
    Named(char),
}

/// A tensor and the label of each of its axes.
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

/// One term of the equation: labels before and after the ellipsis, and whether there is one.
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

    /// Returns the labels of an operand whose ellipsis stands for `unnamed` axes.
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
pub fn einsum(call: &mut Call) -> Lowered {
    let equation = call.attr_text("equation", "")?.replace(' ', "");
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
        let rank = call.rank(v);
        if rank < named || (rank > named && !pattern.ellipsis) {
            return Err(call
                .fail("shape", format!("`{text}` does not fit operand {slot}"))
                .found(call.ty(v).to_string()));
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
    one(last.v)
}

/// Returns the result of an equation without an arrow: axes of ellipses, then labels that occur once, in alphabetical order.
fn implicit(terms: &[Term]) -> Vec<Label> {
    let all: Vec<Label> = terms.iter().flat_map(|t| t.labels.clone()).collect();
    let times = |l: &Label| all.iter().filter(|m| *m == l).count();
    let distinct: BTreeSet<Label> = all.iter().copied().collect();
    distinct
        .into_iter()
        .filter(|l| matches!(l, Label::Unnamed(_)) || times(l) == 1)
        .collect()
}

/// Takes the diagonal of axes that share a label, in the place of the first.
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
        // With both axes in front and merged, the diagonal is every (size + 1)-th element.
        let mut perm = vec![first, second];
        perm.extend((0..rank).filter(|i| *i != first && *i != second));
        let size = call.axis_size(term.v, first)?;
        let axes: Vec<i64> = perm.iter().map(|a| *a as i64).collect();
        let mut sizes = vec![call.ints(&[-1])];
        for axis in &perm[2..] {
            sizes.push(call.axis_vector(term.v, *axis)?);
        }
        let places = call.positions(term.v, first)?;
        let unit = call.int(1);
        let step = call.add(size, unit)?;
        let places = call.mul(places, step)?;
        let front = call.transpose(term.v, &axes)?;
        let shape = call.concat(&sizes, 0)?;
        let flat = call.op(&RESHAPE, &[front, shape])?;
        term.v = call.gather(flat, places, 0)?;
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

/// Permutes the axes of `term` to the order of `labels`, all of which it has.
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

/// Multiplies two terms, and sums over the labels that both have and nothing else needs.
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
        let axes = |from: usize, count: usize| -> Vec<i64> {
            (from..from + count).map(|axis| axis as i64).collect()
        };
        let behind = axes(a.labels.len(), columns.len());
        let between = axes(batch.len(), rows.len());
        let left = call.unsqueeze(a.v, &behind)?;
        let right = call.unsqueeze(b.v, &between)?;
        let v = call.mul(left, right)?;
        return Ok(Term { v, labels });
    }
    arrange(call, &mut b, &[&batch[..], &summed, &columns].concat())?;
    let n = batch.len();
    let left = matrices(call, a.v, n, rows.len())?;
    let right = matrices(call, b.v, n, summed.len())?;
    let product = call.op(&MATMUL, &[left, right])?;
    if rows.len() == 1 && columns.len() == 1 {
        return Ok(Term { v: product, labels });
    }
    let mut sizes = call.axis_vectors(product, ..n)?;
    sizes.extend(call.axis_vectors(a.v, n..n + rows.len())?);
    sizes.extend(call.axis_vectors(b.v, n + summed.len()..)?);
    let v = call.reshape_to_all(product, &sizes)?;
    Ok(Term { v, labels })
}

/// Fails if a named label has two sizes; axes of an ellipsis broadcast.
fn check_sizes(call: &Call, a: &Term, b: &Term, label: Label) -> Result<()> {
    let (Label::Named(name), Some(i), Some(j)) = (label, a.axis(label), b.axis(label)) else {
        return Ok(());
    };
    let (x, y) = (&call.dims(a.v)[i], &call.dims(b.v)[j]);
    if x.same(y) == Same::No {
        return Err(call
            .fail("shape", format!("label `{name}` has two sizes"))
            .found(format!("{x} and {y}")));
    }
    Ok(())
}

/// Keeps the first `n` axes of `v`, and merges the next `rows` into one and the rest into one.
fn matrices(call: &mut Call, v: ValueId, n: usize, rows: usize) -> Result<ValueId> {
    let rank = call.rank(v);
    if rows == 1 && rank == n + 2 {
        return Ok(v);
    }
    let mut sizes = call.axis_vectors(v, ..n)?;
    for group in [n..n + rows, n + rows..rank] {
        sizes.push(product_of(call, v, group)?);
    }
    call.reshape_to_all(v, &sizes)
}

/// Returns the product of some sizes as a vector of one element.
fn product_of(call: &mut Call, v: ValueId, axes: std::ops::Range<usize>) -> Result<ValueId> {
    let whole = Dim::product(&call.dims(v)[axes.clone()]);
    if let Some(n) = whole.as_const() {
        return Ok(call.ints(&[n]));
    }
    let mut product: Option<ValueId> = None;
    for axis in axes {
        let size = call.axis_vector(v, axis)?;
        product = Some(match product {
            None => size,
            Some(so_far) => call.mul(so_far, size)?,
        });
    }
    Ok(product.unwrap_or_else(|| call.ints(&[1])))
}
