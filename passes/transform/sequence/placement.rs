//! Finds the positions of a sequence in every value of a forward graph.
//!
//! The search starts at an axis of one input, and follows it forward through the ops. Inputs are tried in turn, until causal
//! attention is found along the positions of one. Values without a place are the same for all chunks, or are cut
//! where a node reads some of their positions: tables of positions, masks and labels.
//!
//! Values that are narrow, such as token numbers and padding masks, may exist whole, so an op without a rule may make
//! them. Everything else is refused.

use crate::analysis::attention::mask::{Step, mask};
use crate::analysis::residual_stream::Flow;
use crate::analysis::sizes::{Binding, DimKind, dim_kinds};
use crate::analysis::symbolic_elements::Elements;
use crate::error::{Error, Result};
use crate::ir::op::{BatchAxes, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{DType, Def, Dim, Graph, NodeId, SecondaryMap, ValueId};
use crate::ops::attention::ATTENTION;
use crate::ops::batch_axes::positions::{Part, Place, Positions, PositionsCx, positions};
use crate::ops::batch_axes::{Reason, is_mean_loss};
use crate::ops::concat::CONCAT;
use crate::ops::shape::{SHAPE, SIZE};
use crate::ops::softmax::SOFTMAX;
use crate::transform::loss::Seed;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Returns an error of `--tile-sequence`.
pub fn fail(what: impl Into<String>) -> Box<Error> {
    Error::usage("tile", what)
}

/// Values with at most so many elements for a position may exist whole.
const NARROW_ELEMENTS: i64 = 8;

/// Where positions lie, and how nodes treat them.
pub struct Placement {
    /// The number of positions.
    pub len: Dim,
    /// The place of the positions, in values that are computed chunk by chunk.
    pub place: SecondaryMap<ValueId, Option<Place>>,
    /// How the nodes that are computed chunk by chunk treat positions.
    pub fits: SecondaryMap<NodeId, Option<Positions>>,
    /// Values that may exist whole.
    pub is_light: SecondaryMap<ValueId, bool>,
    /// Attentions whose bias is proven to hide every key behind the query.
    pub causal_biases: BTreeSet<NodeId>,
    /// Whether some positions of a value can be had without the others, as far as that was asked.
    can_cut: RefCell<FxHashMap<(ValueId, Place), bool>>,
}

impl Placement {
    /// Finds the positions that causal attention lies along.
    ///
    /// # Errors
    /// No such positions; the first node that cannot be computed chunk by chunk.
    pub fn find(
        graph: &Graph,
        contents: &Contents,
        seeds: &[Seed],
        binding: &Binding,
    ) -> Result<Placement> {
        let mut refused: Option<Box<Error>> = None;
        let causal_biases = causal_biases(graph)?;
        for (input, axis) in candidates(graph) {
            let causal_biases = causal_biases.clone();
            match Placement::from(
                graph,
                contents,
                seeds,
                binding,
                causal_biases,
                (input, axis),
            ) {
                Ok(Some(found)) => return Ok(found),
                // The first refusal is reported, because the first input is that of the tokens.
                Err(error) => refused = refused.or(Some(error)),
                Ok(None) => {}
            }
        }
        Err(refused.unwrap_or_else(|| {
            fail("there is no causal attention along a sequence of inputs")
                .help("leave --tile-sequence out")
        }))
    }

    /// Follows the positions along an axis of an input. Returns `None` where no attention reads keys along them.
    fn from(
        graph: &Graph,
        contents: &Contents,
        seeds: &[Seed],
        binding: &Binding,
        causal_biases: BTreeSet<NodeId>,
        (input, axis): (ValueId, usize),
    ) -> Result<Option<Placement>> {
        let len = graph.ty(input).dims[axis].clone();
        let mut found = Placement {
            len: len.clone(),
            place: SecondaryMap::new(graph.value_bound(), None),
            fits: SecondaryMap::new(graph.node_bound(), None),
            is_light: SecondaryMap::new(graph.value_bound(), false),
            causal_biases,
            can_cut: RefCell::default(),
        };
        found.place[input] = Some(Place::own_axis(axis, len));
        let size = |dims: &[Dim]| Dim::product(dims).eval(&|name| binding.get(name));
        let positions_at = size(&graph.ty(input).dims[..=axis]).unwrap_or(1);
        let is_narrow = |v: ValueId| {
            let elements = size(&graph.ty(v).dims);
            elements.is_some_and(|n| n <= NARROW_ELEMENTS.saturating_mul(positions_at))
        };
        for (id, value) in graph.values() {
            if matches!(value.def, Def::Input) {
                found.is_light[id] = is_narrow(id);
            }
        }
        let mut is_causal = false;
        let mut totals: SecondaryMap<ValueId, bool> = SecondaryMap::new(graph.value_bound(), false);
        for id in graph.order().iter().copied() {
            let node = graph.node(id);
            let is_known = |v: &ValueId| contents.get(*v).is_some();
            if node.op == &SHAPE || node.op == &SIZE || node.outs.iter().all(is_known) {
                for v in &node.outs {
                    found.is_light[*v] = true;
                }
                continue;
            }
            let is_constant = |v: ValueId| matches!(graph.value(v).def, Def::Init(_));
            let reads = |map: &SecondaryMap<ValueId, bool>| node.operands().any(|v| map[v]);
            let is_light = node.operands().all(|v| found.is_light[v] || is_constant(v));
            for v in &node.outs {
                found.is_light[*v] = is_light && is_narrow(*v);
                totals[*v] = reads(&totals);
            }
            if !node.operands().any(|v| found.place[v].is_some()) {
                continue;
            }
            match found.fit(graph, contents, id) {
                Ok(_) if reads(&totals) => {
                    return Err(refusal(graph, id, "it reads a sum over all positions"));
                }
                Ok(fit) => {
                    is_causal |= fit.ins.iter().any(|part| matches!(part, Part::Prefix(..)));
                    for (v, place) in node.outs.iter().zip(&fit.outs) {
                        totals[*v] = place.is_none();
                        found.place[*v] = place.clone();
                    }
                    found.fits[id] = Some(fit);
                }
                Err(_)
                    if node
                        .operands()
                        .all(|v| found.place[v].is_none() || found.is_light[v]) => {}
                Err(why) => {
                    let why = unrecognised(graph, id).unwrap_or(why);
                    return Err(refusal(graph, id, why));
                }
            }
        }
        let reaches = |seed: &Seed| totals[seed.value] || found.place[seed.value].is_some();
        Ok((is_causal && seeds.iter().any(reaches)).then_some(found))
    }

    /// Returns how a node treats positions, if its operands can be had so.
    fn fit(
        &self,
        graph: &Graph,
        contents: &Contents,
        id: NodeId,
    ) -> std::result::Result<Positions, Reason> {
        let cx = PositionsCx {
            graph,
            contents,
            place: &|v| self.place[v].clone(),
            has_causal_bias: &|id| self.causal_biases.contains(&id),
        };
        let fit = positions(&cx, id, None)?;
        for (v, part) in graph.node(id).ins.iter().zip(&fit.ins) {
            let Some(v) = *v else { continue };
            self.check(graph, contents, v, part)?;
        }
        let node = graph.node(id);
        if is_mean_loss(node) {
            // The mean divides by the weight of all labels.
            let labels = node.operand(1).ok_or("an operand is missing")?;
            self.check(graph, contents, labels, &Part::Whole)?;
        }
        match fit.outs[0].is_none() && node.outs.len() > 1 {
            true => Err("its log-probabilities are read"),
            false => Ok(fit),
        }
    }

    /// Checks that a part of a value can be had.
    fn check(
        &self,
        graph: &Graph,
        contents: &Contents,
        v: ValueId,
        part: &Part,
    ) -> std::result::Result<(), Reason> {
        let whole = |v: ValueId| match self.place[v].is_some() && !self.is_light[v] {
            true => Err("it reads all positions of an operand"),
            false => Ok(()),
        };
        match part {
            Part::Sizes => Ok(()),
            Part::Whole => whole(v),
            Part::Chunk(place) | Part::Prefix(place, _) => self.can_cut(graph, contents, v, place),
            Part::Mask { rows, .. } => match rows {
                Some(rows) if self.place[v].is_none() => self.can_cut(graph, contents, v, rows),
                _ => whole(v),
            },
        }
    }

    /// Checks that some positions of a value can be had without the others.
    fn can_cut(
        &self,
        graph: &Graph,
        contents: &Contents,
        v: ValueId,
        place: &Place,
    ) -> std::result::Result<(), Reason> {
        match &self.place[v] {
            Some(own) if own == place => return Ok(()),
            Some(_) if self.is_light[v] && place.is_own_axis() => return Ok(()),
            Some(_) => return Err("its operands have positions along different axes"),
            None => {}
        }
        let key = (v, place.clone());
        let known = self.can_cut.borrow().get(&key).copied();
        let can = known.unwrap_or_else(|| {
            self.is_sliced(graph, v, place)
                || self.fit_of_result(graph, contents, v, place).is_some()
        });
        self.can_cut.borrow_mut().insert(key, can);
        match can {
            true => Ok(()),
            false => Err("an operand can only be computed for all positions at once"),
        }
    }

    /// Returns true for values of which a slice may be taken: they exist whole anyway, or are narrow.
    pub fn is_sliced(&self, graph: &Graph, v: ValueId, place: &Place) -> bool {
        let exists = graph.def_node(v).is_none();
        (exists || self.is_light[v]) && place.is_own_axis()
    }

    /// Returns how the node that makes a value without a place would compute some positions of it; `None` where it
    /// cannot.
    pub fn fit_of_result(
        &self,
        graph: &Graph,
        contents: &Contents,
        v: ValueId,
        place: &Place,
    ) -> Option<Positions> {
        let id = graph.def_node(v)?;
        let node = graph.node(id);
        if contents.get(v).is_some() || self.place[v].is_some() || node.outs.len() != 1 {
            return None;
        }
        let cx = PositionsCx {
            graph,
            contents,
            place: &|v| self.place[v].clone(),
            has_causal_bias: &|id| self.causal_biases.contains(&id),
        };
        let fit = positions(&cx, id, Some(place)).ok()?;
        let mut parts = node.ins.iter().zip(&fit.ins);
        let fits = parts.all(|(v, part)| match v {
            Some(v) => self.check(graph, contents, *v, part).is_ok(),
            None => true,
        });
        fits.then_some(fit)
    }
}

/// Returns the attentions whose bias is proven to hide every key behind the query, whatever the data.
fn causal_biases(graph: &Graph) -> Result<BTreeSet<NodeId>> {
    let flow = Flow::new(graph)?;
    let mut elements = Elements::new(graph, &flow);
    let mut is_causal = |id: &NodeId| {
        let node = graph.node(*id);
        let [Some(q), Some(k), Some(bias)] = [0, 1, 3].map(|slot| node.operand(slot)) else {
            return false;
        };
        let (q, k) = (&graph.ty(q).dims, &graph.ty(k).dims);
        let ([lead @ .., _], [.., keys, _]) = (&q[..], &k[..]) else {
            return false;
        };
        let Some(queries) = lead.last() else {
            return false;
        };
        let step = match graph.ty(bias).dtype {
            DType::Bool => Step::Fill {
                condition: bias,
                keep: true,
                fill: f64::NEG_INFINITY,
            },
            _ => Step::Bias(bias),
        };
        let dims = [lead, std::slice::from_ref(keys)].concat();
        let found = mask(graph, &flow, &mut elements, &[step], &dims);
        found.proven.is_causal(queries, keys)
    };
    let order = graph.order().iter().copied();
    let attentions = order.filter(|id| graph.node(*id).op == &ATTENTION);
    Ok(attentions.filter(|id| is_causal(id)).collect())
}

/// Returns inputs with an axis that may be that of a sequence: integers first, which are tokens.
fn candidates(graph: &Graph) -> Vec<(ValueId, usize)> {
    let kinds = dim_kinds(graph);
    let axis = |v: ValueId| {
        let dims = &graph.ty(v).dims;
        let named = dims.iter().position(|d| {
            let kind = d.as_symbol().and_then(|name| kinds.get(name));
            kind == Some(&DimKind::Sequence)
        });
        let axis = named.or((dims.len() == 1).then_some(0)).unwrap_or(1);
        dims.get(axis).map(|_| axis)
    };
    let inputs = graph.inputs().iter().copied();
    let mut found: Vec<(ValueId, usize)> = inputs.filter_map(|v| Some((v, axis(v)?))).collect();
    found.sort_by_key(|(v, _)| !graph.ty(*v).dtype.is_int());
    found
}

/// Returns the reason to refuse a product that makes the scores of an attention: that no `Attention` was made of it.
fn unrecognised(graph: &Graph, id: NodeId) -> Option<Reason> {
    let is_product = matches!(
        graph.node(id).op.class,
        OpClass::Product | OpClass::BiasedProduct
    );
    let mut open = vec![(id, false)];
    let mut seen = BTreeSet::new();
    while let Some((id, is_joined)) = open.pop().filter(|_| is_product) {
        for user in graph
            .node(id)
            .outs
            .iter()
            .flat_map(|v| graph.value(*v).uses())
        {
            let node = graph.node(user.node);
            let joins = node.op == &CONCAT;
            match (node.op == &SOFTMAX, is_joined) {
                (true, true) => {
                    return Some(
                        "it makes scores of an attention that joins them with others before the softmax, and only one column in \
                         front of or behind the scores (an attention sink) is recognised",
                    );
                }
                (true, false) => {
                    return Some("it makes scores of an attention that is not recognised as one");
                }
                _ if (joins || node.op.axes == BatchAxes::Pointwise) && seen.insert(user.node) => {
                    open.push((user.node, is_joined || joins));
                }
                _ => {}
            }
        }
    }
    None
}

/// Returns the error for a node that cannot be computed chunk by chunk.
pub fn refusal(graph: &Graph, id: NodeId, why: &str) -> Box<Error> {
    fail(format!("the sequence cannot be cut: {why}"))
        .at(graph.describe(id))
        .help("leave --tile-sequence out, or use --tile-loss and --tile-mlp")
}
