//! Emits the chunks of a sequence one after the other, and joins or adds up what is read whole.

use super::placement::{Placement, fail, refusal};
use crate::analysis::Layers;
use crate::error::{Error, Result};
use crate::ir::typing::Contents;
use crate::ir::{Attrs, Dim, Graph, Node, NodeId, SecondaryMap, Tensor, ValueId};
use crate::ops::batch_axes::positions::{Part, Place, Positions};
use crate::ops::batch_axes::{each_loss, is_mean_loss};
use crate::ops::concat::CONCAT;
use crate::ops::fill::RANGE;
use crate::ops::loss::{CLASS_LOSS, label_weight};
use crate::ops::random::{key_slots, stream};
use crate::ops::reduce::{REDUCE_MEAN, REDUCE_SUM};
use crate::ops::rule::compute_type;
use crate::ops::slice::SLICE;
use crate::ops::{Builder, EmitExt};
use crate::plan::annotations::LayerChunk;
use crate::transform::loss::Seed;
use crate::transform::order::append_after_operands;
use crate::transform::sizes::Sizes;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What the pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chunked {
    /// The number of chunks.
    pub chunks: usize,
    /// Nodes that append a chunk of keys or values to those before.
    pub prefixes: Vec<NodeId>,
    /// Outputs that exist whole, because they are outputs.
    pub joined: Vec<String>,
    /// Attentions that only their bias makes causal. A query whose keys it hides all weighs the keys up to its chunk equally;
    /// without chunks, it weighs those of the whole sequence.
    pub biased: Vec<String>,
    /// The chunk and layer of each node that was emitted.
    pub placed: Vec<(NodeId, LayerChunk)>,
}

impl Chunked {
    /// Returns the chunk and layer of each node of `graph`, which other passes may have changed. A node that they made is with
    /// the last of its operands.
    pub fn layer_chunks(&self, graph: &Graph) -> SecondaryMap<NodeId, Option<LayerChunk>> {
        let mut places = SecondaryMap::new(graph.node_bound(), None);
        for (id, place) in self
            .placed
            .iter()
            .filter(|(id, _)| graph.contains_node(*id))
        {
            places[*id] = Some(*place);
        }
        for id in graph.order() {
            let of = |v: ValueId| graph.def_node(v).and_then(|maker| places[maker]);
            let last = || graph.node(*id).operands().filter_map(of).max();
            places[*id] = places[*id].or_else(last);
        }
        places
    }
}

/// Emits the chunks that begin at `cuts` and redirects readers outside, outputs and seeds to what they make together.
///
/// # Errors
/// What typing refuses; sizes that cannot be computed in the graph.
pub fn emit(
    graph: &mut Graph,
    contents: Contents,
    placement: &Placement,
    cuts: &[Dim],
    seeds: &mut [Seed],
) -> Result<Chunked> {
    let layer = layer_numbers(graph)?;
    let mut placed = Vec::new();
    let is_biased = |id: &&NodeId| {
        let node = graph.node(**id);
        let is_added = node
            .operand(3)
            .is_some_and(|v| graph.ty(v).dtype.is_float());
        let is_alone = node.attrs.int("causal") == 0 && node.attrs.int("window_right") != 0;
        placement.fits[**id].is_some() && is_added && is_alone
    };
    let biased = placement.causal_biases.iter().filter(is_biased);
    let biased = biased.map(|id| graph.node(*id).name.clone()).collect();
    let old = graph.order().to_vec();
    let sizes = Sizes::of_inputs(graph);
    let read_whole = seeds.iter().map(|seed| seed.value);
    let read_whole = read_whole.chain(graph.outputs().iter().copied());
    let is_cut = |v: &ValueId| placement.place[*v].is_some() && !placement.is_light[*v];
    let joined: BTreeSet<ValueId> = read_whole.filter(is_cut).collect();
    let b = Builder::resume(graph, contents);
    let mut emitter = Emitter {
        b,
        placement,
        cuts,
        sizes,
        at: 0,
        now: FxHashMap::default(),
        windows: FxHashMap::default(),
        keys: FxHashMap::default(),
        sums: FxHashMap::default(),
        pieces: joined.iter().map(|v| (*v, Vec::new())).collect(),
        prefixes: Vec::new(),
    };
    let cut: Vec<NodeId> = old
        .iter()
        .copied()
        .filter(|id| placement.fits[*id].is_some())
        .collect();
    for at in 0..cuts.len() - 1 {
        emitter.at = at;
        emitter.now.clear();
        emitter.windows.clear();
        for id in &cut {
            let from = emitter.b.graph.order().len();
            emitter.node(*id)?;
            let place = LayerChunk {
                chunk: at as u32,
                layer: layer[*id],
            };
            let made = &emitter.b.graph.order()[from..];
            placed.extend(made.iter().map(|id| (*id, place)));
        }
        for v in &joined {
            let place = placement.place[*v].clone().expect("it has a place");
            let piece = emitter.chunk_of(*v, &place)?;
            emitter.pieces.entry(*v).or_default().push(piece);
        }
    }
    let moved = emitter.finish(&cut, &joined)?;
    let prefixes = std::mem::take(&mut emitter.prefixes);
    let name = |v: &ValueId| emitter.b.graph.value(moved[v]).name.clone();
    let names = joined
        .iter()
        .filter(|v| moved.contains_key(v))
        .map(name)
        .collect();
    for seed in seeds {
        seed.value = moved.get(&seed.value).copied().unwrap_or(seed.value);
    }
    let mut order = Vec::with_capacity(graph.order().len());
    let mut done = SecondaryMap::new(graph.node_bound(), false);
    let new = &graph.order()[old.len()..];
    for id in new.iter().chain(&old) {
        append_after_operands(graph, *id, &mut done, &mut order)?;
    }
    graph.set_order(order);
    Ok(Chunked {
        chunks: cuts.len() - 1,
        prefixes,
        joined: names,
        biased,
        placed,
    })
}

/// Returns the number of each node's layer, as [`LayerChunk`] counts them.
fn layer_numbers(graph: &Graph) -> Result<SecondaryMap<NodeId, u32>> {
    let layers = Layers::new(graph)?;
    let after = layers.list.len() as u32 + 1;
    let mut number = SecondaryMap::new(graph.node_bound(), 0);
    for id in graph.order() {
        let follows = |v: ValueId| graph.def_node(v).is_some_and(|maker| number[maker] > 0);
        number[*id] = match layers.of[*id] {
            Some(layer) => layer as u32 + 1,
            None if graph.node(*id).operands().any(follows) => after,
            None => 0,
        };
    }
    Ok(number)
}

struct Emitter<'a, 'g> {
    b: Builder<'g>,
    placement: &'a Placement,
    cuts: &'a [Dim],
    sizes: Sizes,
    /// The chunk that is emitted.
    at: usize,
    /// Values of this chunk, by the whole value and the axis of the positions.
    now: FxHashMap<(ValueId, usize), ValueId>,
    /// What this chunk reads of keys and values, by the first chunk of it.
    windows: FxHashMap<(ValueId, usize), ValueId>,
    /// All chunks of keys and values so far, and the last prefix that was made of them.
    keys: FxHashMap<ValueId, Keys>,
    /// Sums over positions so far.
    sums: FxHashMap<ValueId, ValueId>,
    /// Chunks of values that are joined in the end.
    pieces: FxHashMap<ValueId, Vec<ValueId>>,
    prefixes: Vec<NodeId>,
}

#[derive(Default)]
struct Keys {
    chunks: Vec<ValueId>,
    /// The number of chunks in it, and the prefix.
    prefix: Option<(usize, ValueId)>,
}

fn bug(what: &str) -> Box<Error> {
    Error::bug("sequence", what)
}

fn along(axis: usize) -> Attrs {
    Attrs::new().with("axis", axis as i64)
}

impl Emitter<'_, '_> {
    /// Returns where this chunk begins and ends in a value with so many positions: the last chunk takes the rest.
    fn bounds(&self, place: &Place) -> (Dim, Dim) {
        let end = match self.at + 2 == self.cuts.len() {
            true => &place.len,
            false => &self.cuts[self.at + 1],
        };
        (self.cuts[self.at].clone(), end.clone())
    }

    /// Emits sizes as an int64 vector, or one of them as a scalar.
    fn sizes(&mut self, scalar: bool, dims: &[Dim]) -> Result<ValueId> {
        if let (false, Some(known)) = (
            scalar,
            dims.iter().map(Dim::as_const).collect::<Option<Vec<i64>>>(),
        ) {
            return Ok(self.b.ints(&known));
        }
        let built = self.sizes.build(&mut self.b, scalar, dims)?;
        built.ok_or_else(|| {
            let dims: Vec<String> = dims.iter().map(Dim::to_string).collect();
            fail("the sequence cannot be cut: a size is not known before the step")
                .found(dims.join(", "))
        })
    }

    fn slice(&mut self, v: ValueId, axis: usize, start: &Dim, end: &Dim) -> Result<ValueId> {
        let start = self.sizes(false, std::slice::from_ref(start))?;
        let end = self.sizes(false, std::slice::from_ref(end))?;
        let (axis, one) = (self.b.ints(&[axis as i64]), self.b.ints(&[1]));
        self.b
            .emit(&SLICE, &[v, start, end, axis, one], Attrs::new())
    }

    /// Returns the positions of this chunk of a value.
    fn chunk_of(&mut self, v: ValueId, place: &Place) -> Result<ValueId> {
        if let Some(chunk) = self.now.get(&(v, place.axis)) {
            return Ok(*chunk);
        }
        let fit = self
            .placement
            .fit_of_result(self.b.graph, &self.b.contents, v, place);
        let chunk = match (self.b.graph.def_node(v), fit) {
            (Some(id), Some(fit)) => self.emit(id, &fit)?[0],
            _ if self.placement.is_sliced(self.b.graph, v, place) => {
                let (start, end) = self.bounds(place);
                self.b.prefix = format!("{}/chunk", self.b.graph.value(v).name);
                self.slice(v, place.axis, &start, &end)?
            }
            _ => return Err(bug("a value has no chunks").at(self.b.graph.value(v).name.clone())),
        };
        self.now.insert((v, place.axis), chunk);
        Ok(chunk)
    }

    /// Emits a node for this chunk.
    fn node(&mut self, id: NodeId) -> Result<()> {
        let placement = self.placement;
        let fit = placement.fits[id]
            .as_ref()
            .ok_or_else(|| bug("a node has no fit"))?;
        let outs = self.b.graph.node(id).outs.clone();
        let chunks = self.emit(id, fit)?;
        for ((v, place), chunk) in outs.iter().zip(&fit.outs).zip(chunks) {
            match place {
                Some(place) => {
                    self.now.insert((*v, place.axis), chunk);
                }
                None => self.add_up(*v, chunk)?,
            }
        }
        Ok(())
    }

    fn add_up(&mut self, v: ValueId, term: ValueId) -> Result<()> {
        let sum = match self.sums.get(&v).copied() {
            None => term,
            Some(sum) => self.b.add(sum, term)?,
        };
        self.sums.insert(v, sum);
        Ok(())
    }

    /// Emits what a node makes of this chunk: a term, where the result is a sum over positions.
    fn emit(&mut self, id: NodeId, fit: &Positions) -> Result<Vec<ValueId>> {
        let node = self.b.graph.node(id).clone();
        let mut ins = Vec::with_capacity(node.ins.len());
        for (v, part) in node.ins.iter().zip(&fit.ins) {
            ins.push(match v {
                Some(v) => self.part(*v, part)?,
                None => None,
            });
        }
        if let Some((_, slot)) = key_slots(node.op) {
            // One stream for all chunks would drop the same elements of each.
            let name = format!("{}/chunk{}/stream", node.name, self.at);
            ins[slot] = Some(self.b.constant(&name, Tensor::int(stream(&name))));
        }
        self.b.loc = node.loc.clone();
        self.b.role = node.role;
        self.b.prefix = format!("{}/chunk", node.name);
        let is_sum = fit.outs[0].is_none();
        if let (true, Some(attrs)) = (is_sum, each_loss(&node)) {
            let each = self.b.emit_n(&CLASS_LOSS, ins, attrs, 1)?[0];
            let all = Attrs::new().with("keepdims", 0);
            return Ok(vec![self.b.emit(&REDUCE_SUM, &[each], all)?]);
        }
        if is_sum {
            let x = ins[0].ok_or_else(|| bug("a sum has no operand"))?;
            let wide = compute_type(self.b.ty(x).dtype);
            ins[0] = Some(self.b.cast(x, wide)?);
            return self.b.emit_n(&REDUCE_SUM, ins, node.attrs, 1);
        }
        if let (Some(Part::Chunk(from)), Some(Some(to))) = (fit.ins.first(), fit.outs.first())
            && node.op == &SLICE
            && let Some(chunk) = self.first_positions(&node, &ins, from, to)?
        {
            return Ok(vec![chunk]);
        }
        let Some(at) = fit.ins.iter().position(|part| *part == Part::Sizes) else {
            return self.b.emit_n(node.op, ins, node.attrs, node.outs.len());
        };
        let place = fit.outs[0]
            .as_ref()
            .ok_or_else(|| bug("a result has no place"))?;
        let (start, end) = self.bounds(place);
        if node.op == &RANGE {
            let first = ins_known(&self.b, node.ins[0])
                .ok_or_else(|| bug("a range has no first number"))?;
            let (start, end) = (start.add(&first), end.add(&first));
            let ends = [self.sizes(true, &[start])?, self.sizes(true, &[end])?];
            let one = self.b.int(1);
            return Ok(vec![self.b.emit(
                &RANGE,
                &[ends[0], ends[1], one],
                Attrs::new(),
            )?]);
        }
        let mut dims = self.b.ty(node.outs[0]).dims.clone();
        dims[place.axis] = place.size(&end.sub(&start));
        ins[at] = Some(self.sizes(false, &dims)?);
        self.b.emit_n(node.op, ins, node.attrs, 1)
    }

    /// Emits a slice that takes the first positions. Returns `None` for one along other axes.
    fn first_positions(
        &mut self,
        node: &Node,
        ins: &[Option<ValueId>],
        from: &Place,
        to: &Place,
    ) -> Result<Option<ValueId>> {
        let mut x = ins[0].ok_or_else(|| bug("a slice has no operand"))?;
        let lists = [1, 2, 3].map(|slot| node.operand(slot).and_then(|v| self.b.contents.get(v)));
        let lists = lists.map(|ints| ints.map(<[Dim]>::to_vec));
        let rank = self.b.rank(x) as i64;
        let [Some(starts), Some(ends), axes] = lists else {
            return Ok(None);
        };
        let axes: Vec<Dim> =
            axes.unwrap_or_else(|| (0..starts.len() as i64).map(Dim::from).collect());
        let normal = |a: &Dim| a.as_const().map(|a| if a < 0 { a + rank } else { a });
        let Some(at) = axes
            .iter()
            .position(|a| normal(a) == Some(from.axis as i64))
        else {
            return Ok(None);
        };
        if self.at + 2 == self.cuts.len() && from.len != to.len {
            let end = to.len.sub(&self.cuts[self.at]);
            x = self.slice(x, from.axis, &Dim::ZERO, &end)?;
        }
        let others = |list: &[Dim]| -> Vec<Dim> {
            let all = list.iter().enumerate().filter(|(i, _)| *i != at);
            all.map(|(_, d)| d.clone()).collect()
        };
        if axes.len() == 1 {
            return Ok(Some(x));
        }
        let [starts, ends, axes] = [starts, ends, axes].map(|list| others(&list));
        let [starts, ends, axes] = [
            self.sizes(false, &starts)?,
            self.sizes(false, &ends)?,
            self.sizes(false, &axes)?,
        ];
        let mut operands = vec![x, starts, ends, axes];
        if let Some(steps) = node.operand(4).and_then(|v| self.b.contents.get(v)) {
            let steps = others(steps);
            operands.push(self.sizes(false, &steps)?);
        }
        Ok(Some(self.b.emit(&SLICE, &operands, Attrs::new())?))
    }

    fn part(&mut self, v: ValueId, part: &Part) -> Result<Option<ValueId>> {
        Ok(Some(match part {
            Part::Whole => v,
            Part::Sizes => return Ok(None),
            Part::Chunk(place) => self.chunk_of(v, place)?,
            Part::Prefix(place, window) => self.prefix_of(v, place, *window)?,
            Part::Mask { rows, columns } => {
                let own = match rows {
                    Some(rows) => self.chunk_of(v, rows)?,
                    None => v,
                };
                match columns {
                    Some((place, window)) => {
                        let start = self.cuts[self.first_chunk(*window)].clone();
                        let (_, end) = self.bounds(place);
                        self.b.prefix = format!("{}/chunk", self.b.graph.value(v).name);
                        self.slice(own, place.axis, &start, &end)?
                    }
                    None => own,
                }
            }
        }))
    }

    /// Returns the first chunk that has a position of the window before this chunk. With sizes that are not numbers that
    /// may be any.
    fn first_chunk(&self, window: Option<i64>) -> usize {
        let start = self.cuts[self.at].as_const();
        let Some((start, window)) = start.zip(window) else {
            return 0;
        };
        let ends = self.cuts[1..].iter().map_while(Dim::as_const);
        ends.take_while(|end| *end <= start - window).count()
    }

    /// Returns the positions of a value up to the last of this chunk, as far as a window reaches.
    fn prefix_of(&mut self, v: ValueId, place: &Place, window: Option<i64>) -> Result<ValueId> {
        let first = self.first_chunk(window);
        if let Some(prefix) = self.windows.get(&(v, first)) {
            return Ok(*prefix);
        }
        let chunk = self.chunk_of(v, place)?;
        let keys = self.keys.entry(v).or_default();
        if keys.chunks.len() <= self.at {
            keys.chunks.push(chunk);
        }
        let (pieces, is_chain) = match (first, keys.prefix) {
            (0, Some((count, prefix))) => ([&[prefix], &keys.chunks[count..]].concat(), true),
            (0, None) => (keys.chunks.clone(), true),
            _ => (keys.chunks[first..].to_vec(), false),
        };
        let prefix = match &pieces[..] {
            [one] => *one,
            many => {
                self.b.prefix = format!("{}/prefix", self.b.graph.value(v).name);
                let prefix = self.b.emit(&CONCAT, many, along(place.axis))?;
                if is_chain {
                    self.prefixes.extend(self.b.graph.def_node(prefix));
                }
                prefix
            }
        };
        self.windows.insert((v, first), prefix);
        if is_chain {
            let count = self.at + 1;
            self.keys.entry(v).or_default().prefix = Some((count, prefix));
        }
        Ok(prefix)
    }

    /// Emits sums and joined values, and redirects all readers to them. Returns the new values.
    fn finish(
        &mut self,
        cut: &[NodeId],
        joined: &BTreeSet<ValueId>,
    ) -> Result<FxHashMap<ValueId, ValueId>> {
        let mut moved = FxHashMap::default();
        for id in cut {
            let node = self.b.graph.node(*id).clone();
            self.b.loc = node.loc.clone();
            self.b.role = node.role;
            self.b.prefix = node.name.clone();
            for v in &node.outs {
                if let Some(sum) = self.sums.get(v).copied() {
                    let whole = self.whole_sum(*id, &node, sum)?;
                    moved.insert(*v, whole);
                } else if joined.contains(v) {
                    let place = self.placement.place[*v]
                        .as_ref()
                        .ok_or_else(|| bug("a result has no place"))?;
                    if !place.is_own_axis() {
                        return Err(refusal(
                            self.b.graph,
                            *id,
                            "its result is an output, and merges positions with other axes",
                        ));
                    }
                    let whole = self.b.emit(&CONCAT, &self.pieces[v], along(place.axis))?;
                    moved.insert(*v, whole);
                }
            }
        }
        for (v, new) in &moved {
            let name = self.b.graph.value(*v).name.clone();
            self.b.graph.rename_value(*v, &format!("{name}/whole"));
            self.b.graph.rename_value(*new, &name);
            self.b.graph.replace_uses(*v, *new);
        }
        Ok(moved)
    }

    /// Emits the result of a node that adds up positions from the sum of all chunks.
    fn whole_sum(&mut self, id: NodeId, node: &Node, sum: ValueId) -> Result<ValueId> {
        let out = self.b.ty(node.outs[0]).clone();
        let dtype = self.b.ty(sum).dtype;
        let mut whole = sum;
        if is_mean_loss(node) {
            let labels = node.operand(1).ok_or_else(|| bug("a loss has no labels"))?;
            let total = label_weight(&mut self.b, labels, node.operand(2), &node.attrs, dtype)?;
            whole = self.b.div(sum, total)?;
        } else if node.op == &REDUCE_MEAN {
            let x = node
                .operand(0)
                .ok_or_else(|| bug("a mean has no operand"))?;
            let count = self.b.ty(x).elements().exact_div(&out.elements());
            let count = count.ok_or_else(|| {
                refusal(
                    self.b.graph,
                    id,
                    "it is a mean of an unknown number of elements",
                )
            })?;
            let count = self.sizes(true, &[count])?;
            let count = self.b.cast(count, dtype)?;
            whole = self.b.div(sum, count)?;
        }
        self.b.cast(whole, out.dtype)
    }
}

fn ins_known(b: &Builder, v: Option<ValueId>) -> Option<Dim> {
    b.contents.get(v?)?.first().cloned()
}
