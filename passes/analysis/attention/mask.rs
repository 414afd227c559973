//! Which keys a query may see: what is proven of a mask, and what has to stay an operand.
//!
//! A mask is a sum of biases and a conjunction of booleans. A step that is proven to be a band, `-left <= key - query <=
//! right`, whatever the data, needs no tensor. Neither does a step that hides what is of another document than the query, by a
//! number for each place: such segments, and a band inside each, are all that packed sequences need. What else the data decides
//! (padding, position biases) needs a tensor.

use super::mask_saturation::may_hide;
use crate::analysis::residual_stream::Flow;
use crate::analysis::symbolic_elements::{
    Condition, Element, Elements, index_variable, is_index_free,
};
use crate::ir::{DType, Dim, Graph, Node, Same, ValueId};
use crate::ops::{arith, cast, logic, reduce, shape};

/// A bias this low leaves nothing of a weight in float32, unless all of its row are as low.
pub const HIDDEN: f64 = -1e30;
/// Numbers up to this one are meant to hide a key.
const LOW: f64 = -1e3;
/// Longest walk from a mask to the boolean that it selects by.
const MAX_STEPS: usize = 8;
/// Most nodes of a conjunction that are taken apart.
const MAX_NODES: usize = 64;

/// One step of the graph that masks scores.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The value is added to the scores.
    Bias(ValueId),
    /// Scores are replaced by `fill` where the boolean is not `keep`.
    Fill {
        /// The boolean.
        condition: ValueId,
        /// The value of the boolean where scores stay.
        keep: bool,
        /// The number that replaces scores.
        fill: f64,
    },
}

/// A mask tensor of a fused op.
#[derive(Clone, Debug, PartialEq)]
pub enum MaskOperand {
    /// A floating-point tensor that is added.
    Bias(ValueId),
    /// A boolean tensor: keys where it is `keep` are seen.
    Keep {
        /// The tensor.
        value: ValueId,
        /// The value of its elements for keys that are seen.
        keep: bool,
    },
}

/// Query `i` sees key `j` only if `-left <= j - i <= right`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Band {
    /// Most keys behind the query; `None` for no bound.
    pub left: Option<Dim>,
    /// Most keys ahead of the query; `None` for no bound.
    pub right: Option<Dim>,
}

/// Query `i` sees key `j` only if both are of one segment, as documents of a packed sequence are. There are as many keys as
/// queries.
#[derive(Clone, Debug, PartialEq)]
pub struct Segments {
    /// The segment number at each place, integers. The last axis runs over queries and keys. Each earlier axis has size 1 or is a
    /// leading axis of the scores; these are in order and end right before the axis of heads.
    pub value: ValueId,
    /// The index of query `i`'s number. An axis of size 1 that is none of the scores has index 0.
    pub at: Vec<Dim>,
}

/// All masking of one attention.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mask {
    /// What is proven of all steps together.
    pub proven: Band,
    /// What a fused op does by attributes; `segments` and `operands` do the rest.
    pub band: Band,
    /// The documents that a fused op keeps apart.
    pub segments: Option<Segments>,
    /// Mask tensors of a fused op.
    pub operands: Vec<MaskOperand>,
    /// Band and segments are proven to show every query some key.
    pub band_shows_all: bool,
    /// A query that sees no key weighs all keys equally, because one low number replaces all of its scores.
    pub empty_rows_are_uniform: bool,
    /// Why no fused op masks this way.
    pub obstacle: Option<&'static str>,
}

impl Mask {
    fn add(&mut self, operand: &MaskOperand) {
        if !self.operands.contains(operand) {
            self.operands.push(operand.clone());
        }
    }

    /// Takes what is known of a piece, and returns true, if a band and one set of segments are all that both are.
    fn takes(&mut self, known: &Shown, queries: &Dim, keys: &Dim) -> bool {
        let band = self.band.and(&known.band);
        let mut both = self.segments.iter().chain(&known.segments);
        let segments = both.next();
        let fits = known.exact
            && band.aligned(queries, keys).is_some()
            && both.all(|other| Some(other) == segments);
        if fits {
            self.segments = segments.cloned();
            self.band = band;
        }
        fits
    }
}

impl Band {
    /// Returns the band of both at once.
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

    /// Returns true if the last query sees exactly the keys up to the last one, and each earlier query one fewer; or if
    /// query `i` sees the keys up to key `i`.
    pub fn is_causal(&self, queries: &Dim, keys: &Dim) -> bool {
        self.right
            .as_ref()
            .is_some_and(|right| *right == Dim::ZERO || right.same(&keys.sub(queries)) == Same::Yes)
    }

    /// Returns the most keys that a query sees.
    pub fn width(&self) -> Option<i64> {
        let (left, right) = (self.left.as_ref()?, self.right.as_ref()?);
        left.add(right).add(&Dim::ONE).as_const().filter(|w| *w > 0)
    }

    /// Returns (left, right) counted from the diagonal on which the last query meets the last key, where the bounds that
    /// there are are numbers and not negative.
    pub fn aligned(&self, queries: &Dim, keys: &Dim) -> Option<(Option<i64>, Option<i64>)> {
        let offset = keys.sub(queries);
        // `Some(None)` is no bound, `None` a bound that is no such number.
        let number = |bound: Option<Dim>| match bound.map(|d| d.as_const().filter(|n| *n >= 0)) {
            None => Some(None),
            Some(n) => n.map(Some),
        };
        Some((
            number(self.left.as_ref().map(|left| left.add(&offset)))?,
            number(self.right.as_ref().map(|right| right.sub(&offset)))?,
        ))
    }

    /// Returns true if every query is proven to see some key.
    fn shows_all(&self, queries: &Dim, keys: &Dim) -> bool {
        let is_sure = |d: Dim| d.bounds().0.is_some_and(|lo| lo >= 0);
        let right = self.right.as_ref().is_none_or(|r| is_sure(r.clone()));
        let left = self.left.as_ref().is_none_or(|l| {
            let reaches = is_sure(keys.sub(queries).add(l));
            reaches && self.right.as_ref().is_none_or(|r| is_sure(l.add(r)))
        });
        right && left && is_sure(keys.sub(&Dim::ONE))
    }
}

/// Returns what steps that mask scores of shape `dims` do together, the outermost step first.
///
/// Minus infinity hides a key whatever else a query sees. A low finite number does not where all of its row are as low:
/// with scores (2, 1) and a bias of (−1e9, −1e9), the softmax is that of (2, 1), and has a gradient. A finite step
/// therefore becomes a band or a boolean only where that gives the same result for every row.
pub fn mask<'g>(
    graph: &'g Graph,
    flow: &Flow,
    elements: &mut Elements<'g>,
    steps: &[Step],
    dims: &[Dim],
) -> Mask {
    let [.., queries, keys] = dims else {
        return Mask::default();
    };
    let mut reader = Reader {
        graph,
        elements,
        dims,
    };
    let read: Vec<Vec<Piece>> = steps.iter().map(|step| reader.step(step)).collect();
    let pieces = || read.iter().flatten();
    let mut mask = Mask {
        proven: pieces().fold(Band::default(), |all, p| all.and(&p.known.band)),
        ..Mask::default()
    };
    let mut hides = |elements: &mut Elements, operand: &MaskOperand| match operand {
        MaskOperand::Bias(value) => may_hide(graph, flow, elements, *value),
        MaskOperand::Keep { .. } => true,
    };
    // Bands and segments stand alone where they show each query some key, and nothing beside them hides one.
    let mut alone = mask.clone();
    let rest: Vec<&Piece> = pieces()
        .filter(|p| !alone.takes(&p.known, queries, keys))
        .collect();
    let stands_alone = alone.band.shows_all(queries, keys)
        && !rest.iter().any(|p| hides(reader.elements, &p.operand));
    if stands_alone {
        for piece in rest {
            alone.add(&piece.operand);
        }
        alone.band_shows_all = true;
        return alone;
    }
    let is_low = |step: &Step| matches!(step, Step::Fill { fill, .. } if *fill > f64::NEG_INFINITY);
    if let Some(innermost) = steps.iter().rposition(is_low) {
        let outer = &steps[..innermost];
        let learns = |s: &Step| matches!(s, Step::Bias(v) if flow.active[*v]);
        mask.obstacle = fill_obstacle(reader.elements, steps, &mut hides).or(outer
            .iter()
            .any(learns)
            .then_some("a bias that is trained is added to what the mask has replaced"));
        mask.empty_rows_are_uniform = mask.obstacle.is_none();
    }
    for (step, mut pieces) in steps.iter().zip(read) {
        match step {
            // A bias is one tensor unless some piece of it is a band whatever else is seen.
            Step::Bias(value) if !pieces.is_empty() && !pieces.iter().any(|p| p.absolute) => {
                pieces = vec![Piece::bias(*value, Shown::default(), false)];
            }
            // Rows that see no key are handled, so a low number hides as minus infinity does.
            Step::Fill {
                condition,
                keep,
                fill,
            } if *fill > f64::NEG_INFINITY => pieces = reader.conjunction(*condition, *keep),
            Step::Bias(_) | Step::Fill { .. } => {}
        }
        for piece in &pieces {
            if !piece.absolute || !mask.takes(&piece.known, queries, keys) {
                mask.add(&piece.operand);
            }
        }
    }
    mask.band_shows_all = mask.band.shows_all(queries, keys);
    mask
}

/// Returns why scores that low numbers replace differ from hidden keys with equal weights in rows that see none; `None`
/// where they do not differ.
fn fill_obstacle(
    elements: &mut Elements,
    steps: &[Step],
    hides: &mut dyn FnMut(&mut Elements, &MaskOperand) -> bool,
) -> Option<&'static str> {
    let mut number = None;
    steps.iter().find_map(|step| match step {
        Step::Fill { fill, .. } if *fill > HIDDEN => {
            Some("the mask replaces scores by a number that is not low")
        }
        Step::Fill { fill, .. } => (*number.get_or_insert(*fill) != *fill)
            .then_some("masks replace scores by different numbers"),
        Step::Bias(value) => hides(elements, &MaskOperand::Bias(*value)).then_some(
            "one mask is added and another replaces scores, so that rows that see no key differ",
        ),
    })
}

/// What is known of one boolean.
#[derive(Clone, Debug, Default)]
struct Shown {
    band: Band,
    segments: Option<Segments>,
    /// The boolean is the band within the segments, and nothing else.
    exact: bool,
}

/// A piece of a step that may stand beside a band.
struct Piece {
    known: Shown,
    /// Hidden keys are minus infinity, so they are hidden even where nothing else is seen.
    absolute: bool,
    operand: MaskOperand,
}

impl Piece {
    fn bias(value: ValueId, known: Shown, absolute: bool) -> Piece {
        Piece {
            known,
            absolute,
            operand: MaskOperand::Bias(value),
        }
    }
}

/// Returns the band of `row - column + c >= 0` or `column - row + c >= 0`, with no other index in `d`, which is at least 0.
fn inequality(d: &Dim, row: &Dim, column: &Dim) -> Option<Band> {
    let across = column.sub(row);
    let bound = |d: Dim| Some(d).filter(is_index_free);
    let (right, left) = (bound(d.add(&across)), bound(d.sub(&across)));
    match (right, left) {
        (None, None) => None,
        (None, left) => Some(Band { left, right: None }),
        (right, _) => Some(Band { left: None, right }),
    }
}

/// Reads the steps of one mask.
struct Reader<'a, 'g> {
    graph: &'g Graph,
    elements: &'a mut Elements<'g>,
    /// The shape of the scores.
    dims: &'a [Dim],
}

impl<'g> Reader<'_, 'g> {
    /// Returns the pieces of a step.
    fn step(&mut self, step: &Step) -> Vec<Piece> {
        match *step {
            Step::Bias(value) => self.bias(value),
            Step::Fill {
                condition,
                keep,
                fill: f64::NEG_INFINITY,
            } => self.conjunction(condition, keep),
            Step::Fill {
                condition,
                keep,
                fill,
            } => {
                let mut piece = self.boolean(condition, keep);
                piece.known.exact &= fill <= HIDDEN;
                piece.absolute = false;
                vec![piece]
            }
        }
    }

    /// Returns what a condition on a query and a key says.
    fn shown(&mut self, condition: &Condition) -> Shown {
        let (row, column) = self.row_and_column();
        let conjuncts = condition.conjuncts();
        let segments = conjuncts.iter().find_map(|c| self.segments(c, conjuncts));
        let mut band = Band::default();
        let mut exact = true;
        for conjunct in conjuncts {
            let one = match (conjunct, &segments) {
                (Condition::AtLeast0(d), _) => inequality(d, &row, &column),
                (Condition::Difference { .. }, Some(s)) => self.within(s, conjunct),
                _ => None,
            };
            match one {
                Some(one) => band = band.and(&one),
                None => exact = false,
            }
        }
        Shown {
            band,
            segments,
            exact,
        }
    }

    fn row_and_column(&self) -> (Dim, Dim) {
        let rank = self.dims.len();
        (index_variable(rank - 2), index_variable(rank - 1))
    }

    /// Returns an index of a query as the same index of a key.
    fn of_key(&self, at: &[Dim]) -> Vec<Dim> {
        let (row, column) = self.row_and_column();
        let turned = |d: &Dim| if *d == row { &column } else { d }.clone();
        at.iter().map(turned).collect()
    }

    /// Returns the segments that a conjunct compares: that of the query is at least that of the key, and another conjunct says the
    /// opposite.
    fn segments(&self, conjunct: &Condition, all: &[Condition]) -> Option<Segments> {
        let Condition::Difference {
            value,
            at: [own, other],
            least: 0,
        } = conjunct
        else {
            return None;
        };
        let [lead @ .., _, queries, keys] = self.dims else {
            return None;
        };
        let opposite = Condition::Difference {
            value: *value,
            at: [other.clone(), own.clone()],
            least: 0,
        };
        let ([head @ .., last], [sizes @ .., length]) = (&own[..], &*self.graph.ty(*value).dims)
        else {
            return None;
        };
        // Axes of the scores up to the last before the heads.
        let axes = || head.iter().zip(sizes).filter(|(i, _)| **i != Dim::ZERO);
        let first = lead.len().checked_sub(axes().count())?;
        let is_aligned = |(axis, (i, size)): (usize, (&Dim, &Dim))| {
            *i == index_variable(axis) && lead[axis] == *size
        };
        let is_dropped = |(i, size): (&Dim, &Dim)| *i != Dim::ZERO || size.is_one();
        let fits = *other == self.of_key(own)
            && *last == self.row_and_column().0
            && length == keys
            && queries == keys
            && all.contains(&opposite)
            && head.iter().zip(sizes).all(is_dropped)
            && (first..).zip(axes()).all(is_aligned);
        fits.then(|| Segments {
            value: *value,
            at: own.clone(),
        })
    }

    /// Returns the band that a comparison of two elements is between a query and a key of one segment: none for the segments
    /// themselves, and that of the places where the elements are positions that count from the start of each segment.
    fn within(&mut self, segments: &Segments, conjunct: &Condition) -> Option<Band> {
        let Condition::Difference {
            value,
            at: [a, b],
            least,
        } = conjunct
        else {
            return None;
        };
        let (row, column) = self.row_and_column();
        let own = &segments.at;
        if *value == segments.value && *least == 0 {
            let other = self.of_key(own);
            let is_equality = [a, b] == [own, &other] || [a, b] == [&other, own];
            return is_equality.then(Band::default);
        }
        let is_of_query = *b == self.of_key(a);
        if !is_of_query && *a != self.of_key(b) {
            return None;
        }
        let of = (*value, if is_of_query { &a[..] } else { &b[..] });
        let counter = (segments.value, &own[..]);
        if !self.elements.counts_jumps(counter, of, self.dims.len() - 2) {
            return None;
        }
        let rise = match is_of_query {
            true => row.sub(&column),
            false => column.sub(&row),
        };
        inequality(&rise.sub(&Dim::from(*least)), &row, &column)
    }

    /// Returns a boolean as one piece.
    fn boolean(&mut self, value: ValueId, keep: bool) -> Piece {
        let known = match self.elements.ask(value, self.dims) {
            Element::Bool(condition) if keep => self.shown(&condition),
            Element::Bool(condition) => self.shown(&condition.negated()),
            _ => Shown::default(),
        };
        Piece {
            known,
            absolute: true,
            operand: MaskOperand::Keep { value, keep },
        }
    }

    fn bias(&mut self, value: ValueId) -> Vec<Piece> {
        let low = f64::NEG_INFINITY;
        match self.elements.ask(value, self.dims) {
            // The same number everywhere does not change a softmax.
            e if e.number().is_some_and(f64::is_finite) => Vec::new(),
            Element::Either(condition, a, b) if a == 0.0 && b <= LOW || b == 0.0 && a <= LOW => {
                let (keep, fill) = if a == 0.0 { (true, b) } else { (false, a) };
                if fill == low
                    && let Some((boolean, same)) = self.selected(value)
                {
                    return self.conjunction(boolean, same);
                }
                let condition = if keep { condition } else { condition.negated() };
                let mut known = self.shown(&condition);
                known.exact &= fill <= HIDDEN;
                match self.summands(value).filter(|_| !known.exact) {
                    Some(both) => both.into_iter().flat_map(|v| self.bias(v)).collect(),
                    None => vec![Piece::bias(value, known, fill == low)],
                }
            }
            _ => match (self.selected(value), self.summands(value)) {
                (Some((boolean, same)), _) => self.conjunction(boolean, same),
                (None, Some(both)) => both.into_iter().flat_map(|v| self.bias(v)).collect(),
                (None, None) => vec![Piece::bias(value, Shown::default(), false)],
            },
        }
    }

    /// Returns the operands of a sum of two masks.
    fn summands(&self, value: ValueId) -> Option<[ValueId; 2]> {
        let node = self.graph.node(self.graph.def_node(value)?);
        let is_add = |id| self.graph.node(id).op == &arith::ADD;
        match node.ins[..] {
            [Some(a), Some(b)] if node.op == &arith::ADD => {
                // Only two levels of additions: deeper ones are another computation.
                let mut makers = [a, b].into_iter().filter_map(|v| self.graph.def_node(v));
                (!makers.any(is_add)).then_some([a, b])
            }
            _ => None,
        }
    }

    /// Returns the operand of a node that only shows it: the identity, an expansion, a cast from a type that `is_shown`
    /// accepts.
    fn shown_operand(&self, node: &Node, is_shown: fn(DType) -> bool) -> Option<ValueId> {
        let x = node.operand(0)?;
        let shows = node.op == &shape::IDENTITY
            || node.op == &shape::EXPAND
            || (node.op == &cast::CAST && is_shown(self.graph.ty(x).dtype));
        shows.then_some(x)
    }

    /// Returns the boolean of `Where(boolean, 0, -inf)`, and whether it keeps (or hides) where it is true.
    fn selected(&mut self, mut value: ValueId) -> Option<(ValueId, bool)> {
        for _ in 0..MAX_STEPS {
            let node = self.graph.node(self.graph.def_node(value)?);
            if node.op == &logic::WHERE {
                let (boolean, then, otherwise) = (node.ins[0]?, node.ins[1]?, node.ins[2]?);
                let (then, otherwise) = (
                    self.elements.number(then)?,
                    self.elements.number(otherwise)?,
                );
                return match (then, otherwise) {
                    (0.0, f64::NEG_INFINITY) => Some((boolean, true)),
                    (f64::NEG_INFINITY, 0.0) => Some((boolean, false)),
                    _ => None,
                };
            }
            value = self.shown_operand(node, DType::is_float)?;
        }
        None
    }

    /// Returns the booleans that must all hold for a boolean mask: one piece where all is known, else as few as there
    /// are.
    fn conjunction(&mut self, value: ValueId, keep: bool) -> Vec<Piece> {
        let all = self.boolean(value, keep);
        if all.known.exact {
            return vec![all];
        }
        let graph = self.graph;
        let mut open = vec![(value, keep)];
        let mut pieces = Vec::new();
        let mut visited = 0;
        while let Some((v, keep)) = open.pop() {
            visited += 1;
            let node = graph.def_node(v).map(|n| graph.node(n));
            match node.filter(|_| visited <= MAX_NODES) {
                // All operands keep, or none of the operands hides.
                Some(n) if n.op == if keep { &logic::AND } else { &logic::OR } => {
                    open.extend(n.operands().rev().map(|x| (x, keep)));
                }
                Some(n) if n.op == &logic::NOT => open.extend(n.ins[0].map(|x| (x, !keep))),
                node => match node.and_then(|n| self.shown_operand(n, |d| d == DType::Bool)) {
                    Some(x) => open.push((x, keep)),
                    None => pieces.push(self.boolean(v, keep)),
                },
            }
        }
        pieces
    }
}

/// Returns the mask that `value` is with rows set to 0 in which every key is hidden, and the boolean that is true in the
/// other rows: `Where(alive, mask, 0)` with `alive = max(mask) > -inf`.
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
    if greater.op != &logic::GREATER
        || elements.number(zero)? != 0.0
        || elements.number(greater.ins[1]?)? != f64::NEG_INFINITY
    {
        return None;
    }
    let top = graph.node(graph.def_node(greater.ins[0]?)?);
    let is_max = top.op == &reduce::REDUCE_MAX && top.attrs.int("keepdims") == 1;
    let of = top.ins[0]? == mask && is_max;
    let axes = elements.constants(top.operand(1)?)?;
    let last = graph.ty(mask).rank() as i64 - 1;
    (of && matches!(axes[..], [a] if a == -1 || a == last)).then_some((mask, alive))
}
