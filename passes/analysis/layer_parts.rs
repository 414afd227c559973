//! Finds the blocks of a model that ranks can share, each rank with its part of the weights: tensor parallelism.
//!
//! A block ends at a product that sums over parts: the output projection of an attention, the last product of an MLP. What it
//! reads is needed in parts, and so on backward ([`parted`]), through heads and hidden units, until parts of weights are
//! reached. Their products read the whole input of the block. So every rank computes its heads or hidden units alone, and the
//! block's result is the sum over ranks. The search uses the dataflow only, not names.
//!
//! A block also ends at a loss over classes, whose scores are needed in parts: each rank has some of the classes. A lookup of
//! tokens is a block of its own: each rank has some rows of the table, often those of the classes.
//!
//! A block is taken if all readers of its parts belong to blocks that are taken. Everything else stays whole on every rank.

use crate::error::Result;
use crate::ir::op::{Effect, OpClass};
use crate::ir::typing::Contents;
use crate::ir::{Def, Dim, Graph, Node, NodeId, SecondaryMap, Use, ValueId};
use crate::ops::batch_axes::{PartCx, Summed, parted, summed};
use crate::ops::collective::{Part, slice_of};
use crate::ops::index::GATHER;
use crate::ops::loss::{CLASS_LOSS, SOFTMAX_CROSS_ENTROPY_LOSS};
use std::collections::{BTreeMap, BTreeSet};

/// What ranks share of a graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerParts {
    /// The values that ranks have parts of, by index.
    pub parts: BTreeMap<ValueId, Part>,
    /// The nodes that compute parts of their results.
    pub nodes: BTreeSet<NodeId>,
    /// The operands of these that every rank computes whole without any weight, and takes its part of.
    pub own: BTreeMap<ValueId, Part>,
    /// The products whose results are summed over ranks.
    pub sums: BTreeSet<NodeId>,
    /// The losses of which each rank has the scores of some classes.
    pub losses: BTreeSet<NodeId>,
    /// The lookups in tables of which each rank has some rows.
    pub lookups: BTreeSet<NodeId>,
    /// By node, the operand that lists sizes and the places in its list that are those of a part.
    pub sizes: BTreeMap<NodeId, (usize, Vec<usize>)>,
    /// Products whose weight stays whole on every rank, and losses whose scores do, each with the reason.
    pub whole: Vec<(NodeId, String)>,
}

/// A block is taken only if its result has at most this many elements for each hidden unit. Otherwise the sum over ranks costs more
/// than the parts save, as with a low-rank adapter alone.
const LEAST_HIDDEN: i64 = 4;

/// A table is shared only if it has at least this many rows for each element of a row. Otherwise its parts save less than the sum over ranks
/// of what is looked up costs, as with positions and kinds of tokens.
const LEAST_ROWS: i64 = 2;

/// A block that ranks can share, as far as its own nodes say.
#[derive(Default)]
struct Block {
    parts: BTreeMap<ValueId, Part>,
    /// What its nodes read whole.
    read_whole: BTreeSet<ValueId>,
    nodes: BTreeSet<NodeId>,
    own: BTreeMap<ValueId, Part>,
    sizes: BTreeMap<NodeId, (usize, Vec<usize>)>,
    /// A size of which the last ranks may have fewer indices, with copies of the last one after them.
    padded: Option<i64>,
}

struct Search<'a> {
    cx: PartCx<'a>,
    is_weight: SecondaryMap<ValueId, bool>,
    /// Values that no weight and no random number makes.
    is_given: SecondaryMap<ValueId, bool>,
    ranks: i64,
}

impl Search<'_> {
    /// Follows what is needed for the sum of a product, back to weights.
    fn product(&self, id: NodeId, summed: Summed) -> std::result::Result<Block, String> {
        let graph = self.cx.graph;
        let node = graph.node(id);
        let mut block = Block::default();
        let operands = node.operand(0).zip(node.operand(1));
        let (left, right) = operands.ok_or("an operand is missing")?;
        let made = graph.ty(right).dims.get(1 - summed.right.axis);
        let made = made.and_then(|d| d.as_const()).unwrap_or(0);
        let has_few = summed.right.size() * LEAST_HIDDEN < made;
        self.weight(right, summed.right, &mut block)?;
        let mut block = self.follow(block, left, summed.left)?;
        if has_few {
            return Err("it has few hidden units beside what ranks would add up".into());
        }
        block.read_whole.extend(node.operand(2));
        self.checked(block)
    }

    /// Follows the scores of a loss over classes back to weights.
    fn loss(&self, id: NodeId) -> std::result::Result<Block, String> {
        let graph = self.cx.graph;
        let node = graph.node(id);
        let scores = node.operand(0).ok_or("an operand is missing")?;
        let is_read = |v: &&ValueId| graph.is_output(**v) || !graph.value(**v).uses().is_empty();
        if let Some(read) = node.outs.iter().skip(1).find(is_read) {
            return Err(self.of(*read, "is read, which needs all scores"));
        }
        let classes = graph.ty(scores).dims.get(1).and_then(|d| d.as_const());
        let classes = classes.ok_or("the number of its classes is not a constant")?;
        let block = Block {
            padded: Some(classes),
            ..Block::default()
        };
        let block = self.follow(block, scores, Part::of(1, classes))?;
        let elements = block.parts.keys().map(|v| self.weight_elements(*v)).max();
        if elements.unwrap_or(0) > classes * classes * LEAST_HIDDEN {
            return Err("it has few classes beside what ranks would add up".into());
        }
        self.checked(block)
    }

    /// Returns the block of a lookup whose indices are an input of the graph.
    fn lookup(&self, id: NodeId) -> std::result::Result<Block, String> {
        let graph = self.cx.graph;
        let node = graph.node(id);
        let operands = node.operand(0).zip(node.operand(1));
        let (table, indices) = operands.ok_or("an operand is missing")?;
        if graph.value(source(graph, indices)).def != Def::Input || node.attrs.int("axis") != 0 {
            return Err("no input selects its rows".into());
        }
        let dims = graph.ty(table).static_dims().unwrap_or_default();
        let rows = *dims.first().ok_or("the size of its table is not known")?;
        if rows < LEAST_ROWS * dims[1..].iter().product::<i64>() {
            return Err("its table has few rows beside what ranks would add up".into());
        }
        let mut block = Block {
            padded: Some(rows),
            ..Block::default()
        };
        self.weight(table, Part::of(0, rows), &mut block)?;
        Ok(block)
    }

    fn weight_elements(&self, value: ValueId) -> i64 {
        match self.cx.graph.value(value).def {
            Def::Init(_) => self.cx.graph.ty(value).elements().as_const().unwrap_or(0),
            _ => 0,
        }
    }

    /// Follows the part of a value that a block needs, back to weights.
    fn follow(
        &self,
        mut block: Block,
        value: ValueId,
        part: Part,
    ) -> std::result::Result<Block, String> {
        let graph = self.cx.graph;
        let mut open = vec![(value, part)];
        let mut leaves = 0;
        while let Some((value, part)) = open.pop() {
            if let Some(known) = block.parts.get(&value).or(block.own.get(&value)) {
                match *known == part {
                    true => continue,
                    false => return Err(self.of(value, "is needed in two ways")),
                }
            }
            self.check(value, &part, &block)?;
            let can_take = self.can_take(value, &part);
            let Def::Node { node: id, slot } = graph.value(value).def else {
                match self.leaf(value) {
                    Err(_) if can_take => drop(block.own.insert(value, part)),
                    found => {
                        found?;
                        leaves += 1;
                        block.parts.insert(value, part);
                    }
                }
                continue;
            };
            let needed = match parted(&self.cx, id, slot, &part) {
                Err(_) if can_take => {
                    block.own.insert(value, part);
                    continue;
                }
                needed => needed.map_err(|why| format!("{}: {why}", graph.describe(id)))?,
            };
            let node = graph.node(id);
            if needed.outs[slot] != part {
                return Err(self.of(value, "is needed in two ways"));
            }
            for (out, part) in node.outs.iter().zip(needed.outs) {
                self.check(*out, &part, &block)?;
                if block
                    .parts
                    .insert(*out, part.clone())
                    .is_some_and(|p| p != part)
                {
                    return Err(self.of(*out, "is needed in two ways"));
                }
            }
            for (v, part) in node.ins.iter().zip(needed.ins) {
                match (*v, part) {
                    (Some(v), Some(part)) => open.push((v, part)),
                    (Some(v), None) => drop(block.read_whole.insert(v)),
                    (None, _) => {}
                }
            }
            if let Some(sizes) = needed.sizes {
                let listed = node.operand(sizes.0).and_then(|v| self.cx.contents.get(v));
                listed.ok_or_else(|| format!("{}: its sizes are not known", graph.describe(id)))?;
                block.sizes.insert(id, sizes);
            }
            block.nodes.insert(id);
        }
        match leaves {
            0 => Err("no other weight makes what it reads".into()),
            _ => Ok(block),
        }
    }

    /// Returns true for a value that every rank has whole, and can take the part of: a constant such as the slopes of ALiBi.
    fn can_take(&self, value: ValueId, part: &Part) -> bool {
        let ty = self.cx.graph.ty(value);
        let leads = ty.dims[..part.axis].iter().all(Dim::is_one);
        self.is_given[value] && leads && part.pieces.len() == 1
    }

    /// Checks that nothing is read whole and in parts.
    fn checked(&self, block: Block) -> std::result::Result<Block, String> {
        let both = block
            .read_whole
            .iter()
            .find(|v| block.parts.contains_key(v));
        match both {
            Some(v) => Err(self.of(*v, "is needed in two ways")),
            None => Ok(block),
        }
    }

    /// Follows the weight of a product to its initializer.
    fn weight(
        &self,
        mut value: ValueId,
        mut part: Part,
        block: &mut Block,
    ) -> std::result::Result<(), String> {
        let graph = self.cx.graph;
        loop {
            self.check(value, &part, block)?;
            let Def::Node { node: id, slot } = graph.value(value).def else {
                self.leaf(value)?;
                block.parts.insert(value, part);
                return Ok(());
            };
            let needed = parted(&self.cx, id, slot, &part)
                .map_err(|why| format!("{}: {why}", graph.describe(id)))?;
            let node = graph.node(id);
            let is_view = node.op.is_layout() || node.op.class == OpClass::Cast;
            let first = needed.ins.into_iter().next().flatten();
            let (Some(x), Some(first), true) = (node.operand(0), first, is_view) else {
                return Err("its second operand is no weight".into());
            };
            block.parts.insert(value, part);
            block.nodes.insert(id);
            if let Some(sizes) = needed.sizes {
                block.sizes.insert(id, sizes);
            }
            (value, part) = (x, first);
        }
    }

    /// Checks that every rank gets as much of a value, or that copies may fill up what it has.
    fn check(&self, value: ValueId, part: &Part, block: &Block) -> std::result::Result<(), String> {
        let dims = &self.cx.graph.ty(value).dims;
        let size = dims.get(part.axis).and_then(|d| d.as_const());
        if size != Some(part.size()) {
            return Err(self.of(value, "has another size than its part"));
        }
        // The last rank has an index of its own, too.
        let has_own = |n: i64| slice_of(n, self.ranks, self.ranks - 1).1 > 0;
        let is_shared = match block.padded {
            Some(n) if n % self.ranks != 0 => part.pieces == [n] && has_own(n),
            _ => part.is_even(self.ranks),
        };
        match is_shared {
            true => Ok(()),
            false => {
                let pieces: Vec<String> = part.pieces.iter().map(i64::to_string).collect();
                let pieces = pieces.join(" + ");
                let what = format!(
                    "has an axis of {pieces}, which is no multiple of {}",
                    self.ranks
                );
                Err(self.of(value, &what))
            }
        }
    }

    /// Checks that a value that no node makes is a weight, trained or frozen.
    fn leaf(&self, value: ValueId) -> std::result::Result<(), String> {
        match (&self.cx.graph.value(value).def, self.is_weight[value]) {
            (Def::Init(_), true) => Ok(()),
            (Def::Init(_), false) => Err(self.of(value, "is no weight")),
            _ => Err(self.of(value, "is an input, which every rank has whole")),
        }
    }

    fn of(&self, value: ValueId, what: &str) -> String {
        format!("`{}` {what}", self.cx.graph.value(value).name)
    }
}

/// Finds the blocks of a forward graph that `ranks` can share, with these weights. Where blocks exclude each other, the one with
/// more elements in parts is taken.
///
/// # Errors
/// None but bugs: the graph is typed.
pub fn layer_parts(graph: &Graph, weights: &[ValueId], ranks: u32) -> Result<LayerParts> {
    let contents = Contents::known(graph)?;
    let mut is_weight = SecondaryMap::new(graph.value_bound(), false);
    let mut is_given = SecondaryMap::new(graph.value_bound(), true);
    for id in weights {
        (is_weight[*id], is_given[*id]) = (true, false);
    }
    for id in graph.order() {
        let node = graph.node(*id);
        let is_pure = node.op.effect == Effect::Pure;
        let all = is_pure && node.operands().all(|v| is_given[v]);
        node.outs.iter().for_each(|v| is_given[*v] = all);
    }
    let search = Search {
        cx: PartCx {
            graph,
            contents: &contents,
        },
        is_weight,
        is_given,
        ranks: ranks.into(),
    };
    let mut reasons: BTreeMap<NodeId, String> = BTreeMap::new();
    let mut blocks: BTreeMap<NodeId, Block> = BTreeMap::new();
    let mut found = LayerParts::default();
    let mut read_whole: BTreeSet<ValueId> = BTreeSet::new();
    let mut candidates: Vec<(NodeId, Block)> = Vec::new();
    for id in graph.order() {
        let node = graph.node(*id);
        let block = match node.op.class {
            _ if is_loss(node) => search.loss(*id),
            _ if node.op == &GATHER => search.lookup(*id),
            OpClass::Product | OpClass::BiasedProduct => match summed(graph, *id) {
                Some(summed) => search.product(*id, summed),
                None => Err("it is no product with a matrix".into()),
            },
            _ => continue,
        };
        match block {
            Ok(block) => candidates.push((*id, block)),
            Err(why) => drop(reasons.insert(*id, why)),
        }
    }
    let elements = |block: &Block| -> i64 {
        let parts = block.parts.keys();
        parts.map(|v| search.weight_elements(*v)).sum()
    };
    candidates.sort_by_key(|(_, block)| std::cmp::Reverse(elements(block)));
    for (id, block) in candidates {
        let is_other = |(v, part): (&ValueId, &Part)| {
            let known = found.parts.get(v).or(found.own.get(v));
            known.is_some_and(|p| p != part)
        };
        let sums = block.nodes.iter().any(|n| blocks.contains_key(n));
        let both = block.parts.keys().any(|v| read_whole.contains(v))
            || block.read_whole.iter().any(|v| found.parts.contains_key(v));
        if both
            || sums
            || found.nodes.contains(&id)
            || block.parts.iter().chain(&block.own).any(is_other)
        {
            reasons.insert(id, "another block has its operands in another way".into());
            continue;
        }
        found.parts.extend(block.parts.clone());
        found.own.extend(block.own.clone());
        found.nodes.extend(&block.nodes);
        read_whole.extend(&block.read_whole);
        blocks.insert(id, block);
    }
    // What reads a part must be in a block, until no block goes.
    loop {
        let nodes: BTreeSet<NodeId> = blocks
            .values()
            .flat_map(|b| b.nodes.iter().copied())
            .collect();
        let reader = |v: &ValueId| {
            let uses = graph.value(*v).uses().iter();
            let is_sum = |u: &Use| blocks.contains_key(&u.node) && u.slot < 2;
            let mut uses = uses.filter(|u| !nodes.contains(&u.node) && !is_sum(u));
            match graph.is_output(*v) {
                true => Some("is an output".to_string()),
                false => uses
                    .next()
                    .map(|u| format!("is also read by {}", graph.describe(u.node))),
            }
        };
        let gone: Vec<(NodeId, String)> = blocks
            .iter()
            .filter_map(|(id, block)| {
                let (v, what) = block.parts.keys().find_map(|v| Some((*v, reader(v)?)))?;
                Some((*id, search.of(v, &what)))
            })
            .collect();
        if gone.is_empty() {
            break;
        }
        for (id, why) in gone {
            blocks.remove(&id);
            reasons.insert(id, why);
        }
    }
    found = LayerParts::default();
    for (id, block) in blocks {
        found.parts.extend(block.parts);
        found.nodes.extend(block.nodes);
        found.own.extend(block.own);
        found.sizes.extend(block.sizes);
        let node = graph.node(id);
        let ends = match node.op == &GATHER {
            true => &mut found.lookups,
            false if is_loss(node) => &mut found.losses,
            false => &mut found.sums,
        };
        ends.insert(id);
    }
    let is_shared = |id: &NodeId| found.sums.contains(id) || found.nodes.contains(id);
    let whole = graph.order().iter().filter(|id| !is_shared(id));
    let is_told = |id: &NodeId| {
        let node = graph.node(*id);
        is_loss(node) || (node.op != &GATHER && reads_weight(graph, &search.is_weight, *id))
    };
    found.whole = whole
        .filter_map(|id| Some((*id, reasons.remove(id)?)))
        .filter(|(id, _)| is_told(id))
        .collect();
    Ok(found)
}

/// Returns true for a loss over classes that ranks can share.
fn is_loss(node: &Node) -> bool {
    let is_normalized = || node.attrs.int("normalized") != 0;
    node.op == &SOFTMAX_CROSS_ENTROPY_LOSS || (node.op == &CLASS_LOSS && !is_normalized())
}

/// Returns true for a product with a weight, perhaps transposed or cast.
fn reads_weight(graph: &Graph, is_weight: &SecondaryMap<ValueId, bool>, id: NodeId) -> bool {
    let second = graph.node(id).operand(1);
    second.is_some_and(|value| is_weight[source(graph, value)])
}

/// Returns the value that another one is made of by ops that change layout or precision only.
fn source(graph: &Graph, mut value: ValueId) -> ValueId {
    while let Some(maker) = graph.def_node(value).map(|id| graph.node(id)) {
        match maker.operand(0) {
            Some(x) if maker.op.is_layout() || maker.op.class == OpClass::Cast => value = x,
            _ => break,
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::params::{Selection, parameters};
    use crate::text;
    use crate::transform::infer::infer;

    fn found(nodes: &str, inits: &str) -> (Graph, LayerParts) {
        let source = format!("graph @g imported (%x: f32[b, s, 8]) -> (%y) {{\n{inits}{nodes}}}\n");
        let mut graph = text::parse(&source).unwrap();
        infer(&mut graph).unwrap();
        let all = parameters(&graph, &Selection::default()).unwrap();
        let trained: Vec<ValueId> = all.iter().map(|p| p.value).collect();
        let parts = layer_parts(&graph, &trained, 2).unwrap();
        (graph, parts)
    }

    fn named(graph: &Graph, parts: &LayerParts) -> Vec<(String, Part)> {
        let inits = graph.inits().filter_map(|(id, v)| {
            let part = parts.parts.get(&id)?;
            Some((v.name.clone(), part.clone()))
        });
        inits.collect()
    }

    /// Queries, keys and values side by side in one weight, taken apart before there are heads.
    #[test]
    fn a_fused_weight_is_divided_piece_by_piece() {
        let inits = "  init %qkv : f32[8, 24] = splat 0.5\n  init %o : f32[8, 8] = splat 0.5\n  \
                     init %three : i64[3] = [8, 8, 8]\n  init %heads : i64[4] = [0, 0, 4, 2]\n  init %flat : i64[3] = [0, 0, 8]\n";
        let heads = |v: &str| {
            format!(
                "  %{v}1 = Reshape %{v}, %heads\n  %{v}2 = Transpose %{v}1 {{perm=[0, 2, 1, 3]}}\n"
            )
        };
        let nodes = format!(
            "  %h = MatMul %x, %qkv\n  %q, %k, %v = Split %h, %three {{axis=2}}\n{}{}{}  \
             %a = Attention %q2, %k2, %v2 {{causal=1}}\n  %a1 = Transpose %a {{perm=[0, 2, 1, 3]}}\n  \
             %a2 = Reshape %a1, %flat\n  %p = MatMul %a2, %o\n  %y = Add %x, %p\n",
            heads("q"),
            heads("k"),
            heads("v")
        );
        let (graph, parts) = found(&nodes, inits);
        let qkv = Part {
            axis: 1,
            pieces: vec![8, 8, 8],
        };
        let expected = [("qkv".to_string(), qkv), ("o".to_string(), Part::of(0, 8))];
        assert_eq!(named(&graph, &parts), expected);
        assert_eq!((parts.sums.len(), parts.whole.len()), (1, 0));
    }

    /// Each rank has the scores of some classes, of an odd number, and the rows of these tokens; what else reads the scores leaves both whole.
    #[test]
    fn classes_and_tokens_are_shared_together() {
        let source = |outputs: &str| {
            format!(
                "graph @g imported (%t: i64[b], %l: i64[b]) -> ({outputs}) {{\n  init %w : f32[9, 4] = splat 0.5\n  \
                 %x = Gather %w, %t\n  %turned = Transpose %w\n  %scores = MatMul %x, %turned\n  \
                 %loss = SoftmaxCrossEntropyLoss %scores, %l\n}}\n"
            )
        };
        let of = |outputs: &str| {
            let mut graph = text::parse(&source(outputs)).unwrap();
            infer(&mut graph).unwrap();
            let weight = graph.find_value("w").unwrap();
            (weight, layer_parts(&graph, &[weight], 2).unwrap())
        };
        let (weight, parts) = of("%loss");
        assert_eq!(parts.parts.get(&weight), Some(&Part::of(0, 9)));
        assert_eq!((parts.losses.len(), parts.lookups.len()), (1, 1));
        let (_, parts) = of("%loss, %scores");
        assert!(parts.parts.is_empty());
        let is_told = parts
            .whole
            .iter()
            .any(|(_, why)| why == "`scores` is an output");
        assert!(is_told, "{:?}", parts.whole);
    }

    /// Each rank takes its part of a constant for each head, and its share of gates and values that take turns.
    #[test]
    fn constants_of_heads_and_units_that_take_turns_are_shared() {
        let inits = "  init %q : f32[8, 8] = splat 0.5\n  init %k : f32[8, 8] = splat 0.5\n  init %v : f32[8, 8] = splat 0.5\n  \
                     init %o : f32[8, 8] = splat 0.5\n  init %n : i64[4, 1, 1] = [1, 2, 3, 4]\n  init %last : i64[1] = [2]\n  \
                     init %axes : i64[2] = [1, 2]\n  init %heads : i64[4] = [0, 0, 4, 2]\n  init %flat : i64[3] = [0, 0, 8]\n";
        let heads = |v: &str| {
            format!(
                "  %{v}0 = MatMul %x, %{v}\n  %{v}1 = Reshape %{v}0, %heads\n  %{v}2 = Transpose %{v}1 {{perm=[0, 2, 1, 3]}}\n"
            )
        };
        let nodes = format!(
            "{}{}{}  %slopes = Cast %n {{to=f32}}\n  %far = ReduceMean %x, %last {{keepdims=0}}\n  %u = Unsqueeze %far, %axes\n  \
             %bias = Mul %u, %slopes\n  %a = Attention %q2, %k2, %v2, %bias\n  %a1 = Transpose %a {{perm=[0, 2, 1, 3]}}\n  \
             %a2 = Reshape %a1, %flat\n  %y = MatMul %a2, %o\n",
            heads("q"),
            heads("k"),
            heads("v")
        );
        let (graph, parts) = found(&nodes, inits);
        assert_eq!((parts.sums.len(), parts.whole.len()), (1, 0));
        let slopes = graph.find_value("n").unwrap();
        assert_eq!(parts.own, BTreeMap::from([(slopes, Part::of(0, 4))]));

        let inits = "  init %up : f32[8, 16] = splat 0.5\n  init %down : f32[8, 8] = splat 0.5\n  init %no : i64[1] = [0]\n  \
                     init %one : i64[1] = [1]\n  init %end : i64[1] = [16]\n  init %two : i64[1] = [2]\n";
        let nodes = "  %h = MatMul %x, %up\n  %g = Slice %h, %no, %end, %two, %two\n  %u = Slice %h, %one, %end, %two, %two\n  \
                     %i = Mul %g, %u\n  %y = MatMul %i, %down\n";
        let (graph, parts) = found(nodes, inits);
        let expected = [("up", Part::of(1, 16)), ("down", Part::of(0, 8))];
        assert_eq!(
            named(&graph, &parts),
            expected.map(|(n, part)| (n.to_string(), part))
        );
    }

    /// Of an adapter, B is in parts where its layer makes hidden units, and A where its layer reads them. Their rank is not shared.
    #[test]
    fn adapters_follow_the_parts_of_their_layer() {
        let inits = "  init %up : f32[8, 32] = splat 0.5\n  init %down : f32[32, 8] = splat 0.5\n  \
                     init %a1 : f32[8, 2] = splat 0.5\n  init %b1 : f32[2, 32] = splat 0.5\n  \
                     init %a2 : f32[32, 2] = splat 0.5\n  init %b2 : f32[2, 8] = splat 0.5\n";
        let nodes = "  %h = MatMul %x, %up\n  %s1 = MatMul %x, %a1\n  %d1 = MatMul %s1, %b1\n  \
                     %h1 = Add %h, %d1\n  %i = Tanh %h1\n  %o = MatMul %i, %down\n  %s2 = MatMul %i, %a2\n  \
                     %d2 = MatMul %s2, %b2\n  %y = Add %o, %d2\n";
        let (graph, parts) = found(nodes, inits);
        let expected = [("up", 1), ("down", 0), ("b1", 1), ("a2", 0)];
        let expected = expected.map(|(name, axis)| (name.to_string(), Part::of(axis, 32)));
        assert_eq!(named(&graph, &parts), expected);
        assert_eq!(parts.sums.len(), 2);
        let alone = "  %s1 = MatMul %x, %a1\n  %y = MatMul %s1, %b1\n";
        let (_, parts) = found(alone, &inits[inits.find("  init %a1").unwrap()..]);
        assert!(parts.parts.is_empty());
        assert!(
            parts.whole[1].1.contains("few hidden units"),
            "{:?}",
            parts.whole
        );
    }

    /// In a chain of products every second one sums, and a norm over hidden units keeps its block whole.
    #[test]
    fn what_reads_all_hidden_units_stays_whole() {
        let inits = "  init %a : f32[8, 6] = splat 0.5\n  init %b : f32[6, 8] = splat 0.5\n  \
                     init %g : f32[6] = splat 0.5\n";
        let chain = "  %h = MatMul %x, %a\n  %i = Tanh %h\n  %y = MatMul %i, %b\n";
        let (graph, parts) = found(chain, inits);
        let expected = [
            ("a".to_string(), Part::of(1, 6)),
            ("b".to_string(), Part::of(0, 6)),
        ];
        assert_eq!(named(&graph, &parts), expected);
        let normed = "  %h = MatMul %x, %a\n  %i = RMSNormalization %h, %g\n  %y = MatMul %i, %b\n";
        let (_, parts) = found(normed, inits);
        assert!(parts.parts.is_empty());
        assert!(
            parts.whole[1].1.contains("norms along the axis"),
            "{:?}",
            parts.whole
        );
        let read_twice = "  %h = MatMul %x, %a\n  %i = Tanh %h\n  %j = MatMul %i, %b\n  %m = ReduceMax %i {keepdims=0}\n  %y = Add %j, %m\n";
        let (_, parts) = found(read_twice, inits);
        assert!(parts.parts.is_empty());
        assert!(
            parts.whole[1].1.contains("is also read by"),
            "{:?}",
            parts.whole
        );
    }
}
