//! Which keys a query may see: what is proven of a mask, and what has to stay an operand.
//!
//! A mask is a sum of biases and a conjunction of booleans. Each part that is proven to be a band, `-left <= key - query
//! <= right`, whatever the data, needs no tensor; what the data decides (padding, position biases) does.

use crate::analysis::symbolic_elements::{Condition, Element, Elements, index_variable};
use crate::ir::{Dim, Graph, Same, ValueId};
use crate::ops::{arith, cast, logic, reduce, shape};

/// A bias this low leaves nothing of a weight in float32, unless all of its row are as low.
pub const HIDDEN: f64 = -1e30;
/// From here on a number is meant to hide a key.
const LOW: f64 = -1e3;

/// One step by which scores are masked, as the graph has it.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Added to the scores.
    Bias(ValueId),
    /// Scores are replaced by `fill` where the boolean is not `keep`.
    Fill {
        condition: ValueId,
        keep: bool,
        fill: f64,
    },
}

/// What a fused op is given.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// A floating-point tensor that is added.
    Bias(ValueId),
    /// A boolean tensor: keys where it is `keep` are seen.
    Keep { value: ValueId, keep: bool },
}

/// Query `i` sees key `j` only if `-left <= j - i <= right`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Band {
    pub left: Option<Dim>,
    pub right: Option<Dim>,
}

/// All of an attention's masking.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mask {
    /// What is proven of all parts together.
    pub proven: Band,
    /// What a fused op does by attributes; the rest are `parts`.
    pub band: Band,
    pub parts: Vec<Part>,
    /// Every query is proven to see some key, as far as the band says.
    pub band_shows_all: bool,
    /// A query that sees no key weighs all keys alike: what hides keys is one low number in place of their scores.
    pub all_alike: bool,
    /// Why no fused op masks so.
    pub obstacle: Option<&'static str>,
}

impl Mask {
    fn add(&mut self, part: &Part) {
        if !self.parts.contains(part) {
            self.parts.push(part.clone());
        }
    }
}

impl Band {
    /// Both at once.
    fn and(&self, other: &Band) -> Band {
        let least = |a: &Option<Dim>, b: &Option<Dim>| match (a, b) {
            (Some(a), Some(b)) => Some(a.smaller(b)),
            (a, b) => a.clone().or(b.clone()),
        };
        Band {
            left: least(&self.left, &other.left),
            right: least(&self.right, &other.right),
        }
    }

    /// Whether the last query sees exactly the keys up to the last one, and each earlier query one fewer; or query `i`
    /// the keys up to key `i`.
    pub fn is_causal(&self, queries: &Dim, keys: &Dim) -> bool {
        self.right
            .as_ref()
            .is_some_and(|right| *right == Dim::ZERO || right.same(&keys.sub(queries)) == Same::Yes)
    }

    /// How many keys a query sees at most.
    pub fn width(&self) -> Option<i64> {
        let (left, right) = (self.left.as_ref()?, self.right.as_ref()?);
        left.add(right).add(&Dim::ONE).as_const().filter(|w| *w > 0)
    }

    /// The band counted from the diagonal on which the last query meets the last key: (left, right), where both are
    /// numbers that are not negative.
    pub fn aligned(&self, queries: &Dim, keys: &Dim) -> Option<(Option<i64>, Option<i64>)> {
        let offset = keys.sub(queries);
        let number = |d: Dim| d.as_const().filter(|n| *n >= 0);
        let left = match &self.left {
            Some(left) => Some(number(left.add(&offset))?),
            None => None,
        };
        let right = match &self.right {
            Some(right) => Some(number(right.sub(&offset))?),
            None => None,
        };
        Some((left, right))
    }

    /// Whether every query is proven to see some key.
    fn shows_all(&self, queries: &Dim, keys: &Dim) -> bool {
        let sure = |d: Dim| d.bounds().0.is_some_and(|lo| lo >= 0);
        let right = self.right.as_ref().is_none_or(|r| sure(r.clone()));
        let left = self.left.as_ref().is_none_or(|l| {
            let reaches = sure(keys.sub(queries).add(l));
            reaches && self.right.as_ref().is_none_or(|r| sure(l.add(r)))
        });
        right && left && sure(keys.sub(&Dim::ONE))
    }
}

/// What steps that mask scores of shape `dims`, the outermost first, do together. `hides` says of a bias whether it may
/// be as low as [`HIDDEN`] somewhere, `learns` whether it has a gradient.
///
/// Minus infinity hides a key whatever else is seen. A low number does not where all of its row is as low: such a row is a
/// softmax like any other, with a gradient of its own. So a finite part stands for a band, or for a boolean, only where it
/// comes to the same for every row.
pub fn mask(
    graph: &Graph,
    elements: &mut Elements,
    steps: &[Step],
    dims: &[Dim],
    hides: &mut dyn FnMut(&mut Elements, ValueId) -> bool,
    learns: &dyn Fn(ValueId) -> bool,
) -> Mask {
    let [.., queries, keys] = dims else {
        return Mask::default();
    };
    let read: Vec<Vec<Piece>> = steps
        .iter()
        .map(|step| pieces_of(graph, elements, step, dims))
        .collect();
    let pieces = || read.iter().flatten();
    let mut mask = Mask::default();
    for piece in pieces() {
        mask.proven = mask.proven.and(&piece.known.band);
    }
    let mut hides = |elements: &mut Elements, part: &Part| match part {
        Part::Bias(value) => hides(elements, *value),
        Part::Keep { .. } => true,
    };
    // Bands stand alone where they show each query some key, and nothing beside them hides one.
    let band = pieces().filter(|p| p.known.exact);
    let band = band.fold(Band::default(), |all, p| all.and(&p.known.band));
    let rest = || pieces().filter(|p| !p.known.exact);
    let stands_alone = band.aligned(queries, keys).is_some()
        && band.shows_all(queries, keys)
        && !rest().any(|p| hides(elements, &p.part));
    if stands_alone {
        for piece in rest() {
            mask.add(&piece.part);
        }
        mask.band = band;
        mask.band_shows_all = true;
        return mask;
    }
    let is_low = |step: &Step| matches!(step, Step::Fill { fill, .. } if *fill > f64::NEG_INFINITY);
    if let Some(innermost) = steps.iter().rposition(is_low) {
        let is_late = steps[..innermost]
            .iter()
            .any(|s| matches!(s, Step::Bias(v) if learns(*v)));
        mask.obstacle = unlike(elements, steps, &mut hides)
            .or(is_late.then_some("a bias that is trained is added to what the mask has replaced"));
        mask.all_alike = mask.obstacle.is_none();
    }
    for (step, mut pieces) in steps.iter().zip(read) {
        match step {
            // What is added is one tensor unless some part of it is a band whatever else is seen.
            Step::Bias(value) if !pieces.is_empty() && !pieces.iter().any(|p| p.absolute) => {
                pieces = vec![Piece {
                    known: Shown::default(),
                    absolute: false,
                    part: Part::Bias(*value),
                }];
            }
            // With rows that see no key looked after, a low number hides as minus infinity does.
            Step::Fill {
                condition,
                keep,
                fill,
            } if *fill > f64::NEG_INFINITY => {
                pieces.clear();
                conjunction(graph, elements, *condition, *keep, dims, &mut pieces);
            }
            Step::Bias(_) | Step::Fill { .. } => {}
        }
        for piece in &pieces {
            let band = mask.band.and(&piece.known.band);
            if piece.known.exact && piece.absolute && band.aligned(queries, keys).is_some() {
                mask.band = band;
            } else {
                mask.add(&piece.part);
            }
        }
    }
    mask.band_shows_all = mask.band.shows_all(queries, keys);
    mask
}

/// What a step consists of, as far as it may stand beside a band.
fn pieces_of(graph: &Graph, elements: &mut Elements, step: &Step, dims: &[Dim]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    match step {
        Step::Bias(value) => bias(graph, elements, *value, dims, &mut pieces),
        Step::Fill {
            condition,
            keep,
            fill,
        } if *fill == f64::NEG_INFINITY => {
            conjunction(graph, elements, *condition, *keep, dims, &mut pieces);
        }
        Step::Fill {
            condition,
            keep,
            fill,
        } => {
            let mut found = known(elements, *condition, *keep, dims);
            found.exact &= *fill <= HIDDEN;
            pieces.push(Piece {
                known: found,
                absolute: false,
                part: Part::Keep {
                    value: *condition,
                    keep: *keep,
                },
            });
        }
    }
    pieces
}

/// Why scores that are replaced by a low number do not give what keys that are not seen do, with equal weights for all keys
/// in rows where none is; `None` where they do.
fn unlike(
    elements: &mut Elements,
    steps: &[Step],
    hides: &mut dyn FnMut(&mut Elements, &Part) -> bool,
) -> Option<&'static str> {
    let mut number = None;
    for step in steps {
        match step {
            Step::Fill { fill, .. } if *fill > HIDDEN => {
                return Some("the mask replaces scores by a number that is not low");
            }
            Step::Fill { fill, .. } if *number.get_or_insert(*fill) != *fill => {
                return Some("masks replace scores by different numbers");
            }
            Step::Bias(value) if hides(elements, &Part::Bias(*value)) => {
                return Some(
                    "one mask is added and another replaces scores, so that rows that see no key differ",
                );
            }
            Step::Fill { .. } | Step::Bias(_) => {}
        }
    }
    None
}

/// What is known of one boolean.
#[derive(Clone, Debug, Default)]
struct Shown {
    band: Band,
    /// The band is all there is to it.
    exact: bool,
}

struct Piece {
    known: Shown,
    /// What is hidden is minus infinity, so that it is hidden even where nothing else is seen.
    absolute: bool,
    part: Part,
}

fn known(elements: &mut Elements, value: ValueId, keep: bool, dims: &[Dim]) -> Shown {
    match elements.ask(value, dims) {
        Element::Bool(condition) if keep => shown(&condition, dims.len()),
        Element::Bool(condition) => shown(&condition.not(), dims.len()),
        _ => Shown::default(),
    }
}

fn shown(condition: &Condition, rank: usize) -> Shown {
    let (row, column) = (index_variable(rank - 2), index_variable(rank - 1));
    let mut band = Band::default();
    let mut exact = true;
    for part in condition.conjuncts() {
        let Some(one) = inequality(part, &row, &column) else {
            exact = false;
            continue;
        };
        band = band.and(&one);
    }
    Shown { band, exact }
}

/// `row - column + c >= 0` or `column - row + c >= 0`, with no other index in it.
fn inequality(condition: &Condition, row: &Dim, column: &Dim) -> Option<Band> {
    let Condition::AtLeast0(d) = condition else {
        return None;
    };
    let across = column.sub(row);
    let free = |rest: &Dim| {
        let mut free = true;
        rest.for_each_leaf(&mut |atom| {
            if let crate::ir::Atom::Data(name) = atom {
                free &= !name.starts_with('#');
            }
        });
        free
    };
    let (right, left) = (d.add(&across), d.sub(&across));
    if free(&right) {
        return Some(Band {
            left: None,
            right: Some(right),
        });
    }
    free(&left).then_some(Band {
        left: Some(left),
        right: None,
    })
}

fn bias(
    graph: &Graph,
    elements: &mut Elements,
    value: ValueId,
    dims: &[Dim],
    pieces: &mut Vec<Piece>,
) {
    let whole = |known: Shown, absolute: bool| Piece {
        known,
        absolute,
        part: Part::Bias(value),
    };
    let low = f64::NEG_INFINITY;
    match elements.ask(value, dims) {
        // The same number everywhere leaves a softmax as it is.
        e if e.number().is_some_and(f64::is_finite) => {}
        Element::Either(condition, a, b) if a == 0.0 && b <= LOW || b == 0.0 && a <= LOW => {
            let (keep, fill) = if a == 0.0 { (true, b) } else { (false, a) };
            if fill == low
                && let Some((boolean, same)) = selected(graph, elements, value)
            {
                return conjunction(graph, elements, boolean, same, dims, pieces);
            }
            let condition = if keep { condition } else { condition.not() };
            let mut found = shown(&condition, dims.len());
            found.exact &= fill <= HIDDEN;
            match adds(graph, value) {
                Some(both) if !found.exact => {
                    for part in both {
                        bias(graph, elements, part, dims, pieces);
                    }
                }
                _ => pieces.push(whole(found, fill == low)),
            }
        }
        _ => match (selected(graph, elements, value), adds(graph, value)) {
            (Some((boolean, same)), _) => {
                conjunction(graph, elements, boolean, same, dims, pieces);
            }
            (None, Some(both)) => {
                for part in both {
                    bias(graph, elements, part, dims, pieces);
                }
            }
            (None, None) => pieces.push(whole(Shown::default(), false)),
        },
    }
}

/// The operands of a sum of two masks, neither of which the sum broadcasts beyond itself.
fn adds(graph: &Graph, value: ValueId) -> Option<[ValueId; 2]> {
    let node = graph.node(graph.def_node(value)?);
    if node.op != &arith::ADD {
        return None;
    }
    let [Some(a), Some(b)] = node.ins.as_slice() else {
        return None;
    };
    // Of two layers of additions only: what is deeper is a computation of its own.
    let deeper = [a, b].iter().any(|v| {
        graph
            .def_node(**v)
            .is_some_and(|n| graph.node(n).op == &arith::ADD)
    });
    (!deeper).then_some([*a, *b])
}

/// The boolean of `Where(boolean, 0, -inf)`, and whether it keeps (or hides) where it is true.
fn selected(graph: &Graph, elements: &mut Elements, mut value: ValueId) -> Option<(ValueId, bool)> {
    for _ in 0..8 {
        let node = graph.node(graph.def_node(value)?);
        let x = node.ins.first().copied().flatten()?;
        if node.op == &logic::WHERE {
            let (then, otherwise) = (node.ins[1]?, node.ins[2]?);
            let keep = elements.number(then)? == 0.0;
            let (seen, hidden) = if keep {
                (then, otherwise)
            } else {
                (otherwise, then)
            };
            let fits =
                elements.number(seen)? == 0.0 && elements.number(hidden)? == f64::NEG_INFINITY;
            return fits.then_some((x, keep));
        }
        let passes = node.op == &shape::IDENTITY
            || node.op == &shape::EXPAND
            || (node.op == &cast::CAST && graph.ty(x).dtype.is_float());
        if !passes {
            return None;
        }
        value = x;
    }
    None
}

/// The parts of a boolean mask that must all hold: each known one apart, the others as few as there are.
fn conjunction(
    graph: &Graph,
    elements: &mut Elements,
    value: ValueId,
    keep: bool,
    dims: &[Dim],
    pieces: &mut Vec<Piece>,
) {
    let piece = |known: Shown, value: ValueId, keep: bool| Piece {
        known,
        absolute: true,
        part: Part::Keep { value, keep },
    };
    let all = known(elements, value, keep, dims);
    if all.exact {
        return pieces.push(piece(all, value, keep));
    }
    let mut open = vec![(value, keep)];
    let mut parts: Vec<(ValueId, bool, Shown)> = Vec::new();
    let mut steps = 0;
    while let Some((v, keep)) = open.pop() {
        steps += 1;
        let node = graph.def_node(v).map(|n| graph.node(n));
        match node {
            _ if steps > 64 => {
                let found = known(elements, v, keep, dims);
                parts.push((v, keep, found));
            }
            // All of the parts keep, or not any of the parts hides.
            Some(n) if n.op == if keep { &logic::AND } else { &logic::OR } => {
                open.extend(n.ins.iter().flatten().rev().map(|x| (*x, keep)));
            }
            Some(n) if n.op == &logic::NOT => open.extend(n.ins[0].map(|x| (x, !keep))),
            Some(n)
                if n.op == &shape::IDENTITY
                    || n.op == &shape::EXPAND
                    || (n.op == &cast::CAST
                        && n.ins[0]
                            .is_some_and(|x| graph.ty(x).dtype == crate::ir::DType::Bool)) =>
            {
                open.extend(n.ins[0].map(|x| (x, keep)));
            }
            _ => {
                let found = known(elements, v, keep, dims);
                parts.push((v, keep, found));
            }
        }
    }
    for (v, keep, found) in parts {
        pieces.push(piece(found, v, keep));
    }
}

/// The mask that `value` is with rows set to 0 in which every key is hidden, and the boolean that says which rows are not:
/// `Where(alive, mask, 0)` with `alive = max(mask) > -inf`.
pub fn without_dead_rows(
    graph: &Graph,
    elements: &mut Elements,
    value: ValueId,
) -> Option<(ValueId, ValueId)> {
    let node = graph.node(graph.def_node(value)?);
    if node.op != &logic::WHERE {
        return None;
    }
    let (alive, mask, zero) = (node.ins[0]?, node.ins[1]?, node.ins[2]?);
    let greater = graph.node(graph.def_node(alive)?);
    if greater.op != &logic::GREATER || elements.number(zero)? != 0.0 {
        return None;
    }
    if elements.number(greater.ins[1]?)? != f64::NEG_INFINITY {
        return None;
    }
    let top = graph.node(graph.def_node(greater.ins[0]?)?);
    let of = top.ins[0]? == mask && top.op == &reduce::REDUCE_MAX && top.attrs.int("keepdims") == 1;
    let axes = elements.constants(top.ins.get(1).copied().flatten()?)?;
    let rank = graph.ty(mask).rank() as i64;
    (of && matches!(axes.as_slice(), [a] if *a == -1 || *a == rank - 1)).then_some((mask, alive))
}
