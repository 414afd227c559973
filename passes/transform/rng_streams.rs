//! Gives random nodes that the user names a seed of their own: a named stream.
//!
//! In: any phase. Out: the same. Every random node draws by the graph input `rng_seed`; those of the stream `NAME` draw
//! by a new input `rng_seed.NAME` instead. So a caller can hold some masks while others change: dropouts inside a
//! tensor-parallel region differ from rank to rank, those outside must not (Shoeybi et al., "Megatron-LM", 2019, §3).
//! All nodes with the same draws (copies, gradient, mask) move to the stream together.

use crate::error::{Error, Result};
use crate::glob;
use crate::ir::{DType, Graph, Node, NodeId, Ty, ValueId};
use crate::ops::random::{SEED, key_slots};
use std::collections::BTreeMap;
use std::fmt;

/// Returns the graph input that random ops draw by, which is added if there is none.
///
/// # Errors
/// Another value has its name.
pub(super) fn seed_input(graph: &mut Graph) -> Result<ValueId> {
    let ty = Ty::scalar(DType::I64);
    let mut inputs = graph.inputs().iter().copied();
    match inputs.find(|v| graph.value(*v).name == SEED) {
        Some(seed) if *graph.ty(seed) == ty => Ok(seed),
        None if !graph.has_value_name(SEED) => Ok(graph.add_input(SEED, Some(ty))),
        _ => Err(Error::usage(
            "rng",
            format!("`{SEED}` is taken, and new random ops need it for the seed"),
        )
        .help("rename it in the model, or leave out dropout= and --stochastic-rounding")),
    }
}

/// The value of `--rng-stream`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RngStream {
    /// Its name, the suffix of its seed input.
    pub name: String,
    /// Patterns over names of nodes and paths of modules; at least one.
    pub patterns: Vec<String>,
}

impl RngStream {
    /// Parses `NAME=PATTERN` or `NAME=PATTERN,PATTERN`.
    ///
    /// # Errors
    /// An empty name or one with other characters than letters, digits, `.`, `_`, `-`; a pattern that is empty, given twice or
    /// a stream of its own.
    pub fn parse(text: &str) -> Result<RngStream> {
        let (name, patterns) = text.split_once('=').unwrap_or((text, ""));
        let patterns: Vec<String> = patterns.split(',').map(|p| p.trim().to_string()).collect();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let name = name.trim();
        if name.is_empty() || !name.chars().all(is_plain) || patterns.iter().any(String::is_empty) {
            return Err(
                Error::usage("rng", "this names no stream of random numbers")
                    .expected("NAME=PATTERN, such as tensor-parallel=*.attn.*; NAME of letters, digits, `.`, `_`, `-`")
                    .found(text),
            );
        }
        if let Some(second) = patterns.iter().find(|p| p.contains('=')) {
            let what = format!("`{second}` is a second stream in one --rng-stream");
            let each = format!(
                "--rng-stream '{name}={}' --rng-stream '{second}'",
                patterns[0]
            );
            return Err(Error::usage("rng", what)
                .help(format!("give each stream an option of its own: {each}"))
                .found(text));
        }
        for (i, pattern) in patterns.iter().enumerate() {
            if patterns[..i].contains(pattern) {
                let what = format!("the stream `{name}` has the pattern `{pattern}` twice");
                return Err(Error::usage("rng", what).found(text));
            }
        }
        Ok(RngStream {
            name: name.into(),
            patterns,
        })
    }

    fn matches(&self, node: &Node) -> bool {
        self.patterns.iter().any(|pattern| is_named(pattern, node))
    }
}

impl fmt::Display for RngStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.patterns.join(","))
    }
}

/// Returns whether a pattern matches the name of a node or the path of a module that it is in.
fn is_named(pattern: &str, node: &Node) -> bool {
    let scopes = node.loc.scopes.iter().map(|(path, _)| path.as_str());
    let mut names = scopes.chain([node.name.as_str(), node.loc.node.as_str()]);
    names.any(|name| glob::matches(pattern, name))
}

/// Divides the random nodes of a graph into streams.
///
/// # Errors
/// A name given twice, or taken in the graph; a pattern without a node, a node in two streams.
pub fn divide(graph: &mut Graph, streams: &[RngStream]) -> Result<()> {
    if streams.is_empty() {
        return Ok(());
    }
    // Random nodes, by the number of their draws.
    let mut random: BTreeMap<ValueId, Vec<NodeId>> = BTreeMap::new();
    for (id, node) in graph.nodes() {
        if let Some(number) = key_slots(node.op).and_then(|(_, at)| node.ins[at]) {
            random.entry(number).or_default().push(id);
        }
    }
    let mut taken: BTreeMap<ValueId, &RngStream> = BTreeMap::new();
    for (i, stream) in streams.iter().enumerate() {
        if streams[..i].iter().any(|s| s.name == stream.name) {
            let what = format!("--rng-stream names `{}` twice", stream.name);
            return Err(Error::usage("rng", what)
                .help("give all patterns of a stream at once: NAME=PATTERN,PATTERN"));
        }
        let mut own: Vec<ValueId> = random.keys().copied().collect();
        own.retain(|number| {
            let mut nodes = random[number].iter();
            nodes.any(|n| stream.matches(graph.node(*n)))
        });
        let nodes = || own.iter().flat_map(|number| &random[number]);
        let is_void = |p: &&String| !nodes().any(|n| is_named(p, graph.node(*n)));
        if let Some(pattern) = stream.patterns.iter().find(is_void) {
            return Err(no_match(graph, &random, stream, pattern));
        }
        for number in &own {
            if let Some(other) = taken.insert(*number, stream) {
                let node = graph.describe(random[number][0]);
                let (a, b) = (&other.name, &stream.name);
                let what = format!("a random node belongs to two streams, `{a}` and `{b}`");
                return Err(Error::usage("rng", what).at(node));
            }
        }
        let name = format!("{SEED}.{}", stream.name);
        if graph.has_value_name(&name) {
            let what = format!("`{name}` is taken in the model");
            return Err(Error::usage("rng", what).help("name the stream otherwise"));
        }
        let seed = graph.add_input(&name, Some(Ty::scalar(DType::I64)));
        for id in own.iter().flat_map(|number| &random[number]) {
            if let Some((slot, _)) = key_slots(graph.node(*id).op) {
                graph.set_operand(*id, slot, Some(seed));
            }
        }
    }
    let is_unread = |v: &ValueId| graph.value(*v).uses().is_empty() && !graph.is_output(*v);
    let mut inputs = graph.inputs().iter().copied();
    let shared = inputs.find(|v| graph.value(*v).name == SEED);
    if let Some(seed) = shared.filter(is_unread) {
        graph.remove_source(seed);
    }
    Ok(())
}

/// Builds the error for a pattern without nodes.
fn no_match(
    graph: &Graph,
    random: &BTreeMap<ValueId, Vec<NodeId>>,
    stream: &RngStream,
    pattern: &str,
) -> Box<Error> {
    const SHOWN: usize = 12;
    let names = random.values().map(|nodes| &graph.node(nodes[0]).name[..]);
    let names: Vec<&str> = names.take(SHOWN).collect();
    let what = match stream.patterns.len() {
        1 => format!("--rng-stream `{stream}` matches no random node"),
        _ => format!("`{pattern}` of --rng-stream `{stream}` matches no random node"),
    };
    Error::usage("rng", what).found(match random.len() {
        0 => "the model draws nothing at random".into(),
        n => format!("{n} random nodes, such as {}", names.join(", ")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{Request, compile};
    use crate::driver::Watch;
    use crate::text;

    const MODEL: &str = "graph @g typed (%x: f32[4], %rng_seed: i64[]) -> (%z) {
  init %w : f32[4] = [1, 2, 3, 4]
  init %r : f32[] = 0.5
  init %one : i64[] = 1
  init %two : i64[] = 2
  %a = Mul %x, %w : f32[4]
scope \"attn\":
  %y = Dropout %a, %r, %rng_seed, %one : f32[4]
scope \"mlp\":
  %b = Mul %y, %w : f32[4]
  %z = Dropout %b, %r, %rng_seed, %two : f32[4]
}
";

    fn model() -> Graph {
        text::parse(MODEL).unwrap_or_else(|e| panic!("{e}"))
    }

    fn streams(list: &[&str]) -> Vec<RngStream> {
        list.iter().map(|s| RngStream::parse(s).unwrap()).collect()
    }

    fn seeds(graph: &Graph) -> Vec<String> {
        let nodes = graph.order().iter().map(|id| graph.node(*id));
        let seeds = nodes.filter_map(|n| n.ins[key_slots(n.op)?.0]);
        seeds.map(|v| graph.value(v).name.clone()).collect()
    }

    #[test]
    fn named_nodes_draw_by_a_seed_of_their_own() {
        let mut g = model();
        divide(&mut g, &[]).unwrap();
        assert_eq!(seeds(&g), [SEED, SEED]);
        divide(&mut g, &streams(&["tp=attn"])).unwrap();
        assert_eq!(seeds(&g), ["rng_seed.tp", SEED]);
        let mut g = model();
        divide(&mut g, &streams(&["a=attn", "b=mlp,z*"])).unwrap();
        assert_eq!(seeds(&g), ["rng_seed.a", "rng_seed.b"]);
        assert!(g.find_value(SEED).is_none());
    }

    #[test]
    fn gradients_and_copies_go_with_their_node() {
        let mut g = model();
        let request = Request {
            rng_streams: streams(&["tp=attn"]),
            ..Request::default()
        };
        compile(&mut g, &request, &mut Watch::default()).unwrap();
        let mut counts = BTreeMap::new();
        for seed in seeds(&g) {
            *counts.entry(seed).or_insert(0) += 1;
        }
        assert!(
            counts["rng_seed.tp"] >= 2 && counts[SEED] >= 2,
            "{counts:?}"
        );
        // The same of a graph that has its backward.
        let mut g = model();
        compile(&mut g, &Request::default(), &mut Watch::default()).unwrap();
        compile(&mut g, &request, &mut Watch::default()).unwrap();
        assert_eq!(
            seeds(&g).iter().filter(|s| *s == "rng_seed.tp").count(),
            counts["rng_seed.tp"]
        );
    }

    #[test]
    fn refusals() {
        for wrong in [
            "",
            "tp",
            "tp=",
            "=attn",
            "t p=attn",
            "tp=a,,b",
            "a=d1,b=d2",
            "a=d,a=d",
            "tp=d,d",
        ] {
            assert_eq!(
                RngStream::parse(wrong).unwrap_err().exit_code(),
                2,
                "{wrong}"
            );
        }
        let message = |list: &[&str]| {
            divide(&mut model(), &streams(list))
                .unwrap_err()
                .to_string()
        };
        assert!(message(&["tp=attn", "tp=mlp"]).contains("names `tp` twice"));
        assert!(message(&["tp=*", "q=mlp"]).contains("belongs to two streams, `tp` and `q`"));
        assert!(message(&["tp=layers.*"]).contains("2 random nodes, such as"));
        assert!(message(&["tp=attn,layers.*"]).contains("`layers.*` of --rng-stream `tp=attn"));
        let second = RngStream::parse("a=d1,b=d2").unwrap_err().to_string();
        assert!(
            second.contains("--rng-stream 'a=d1' --rng-stream 'b=d2'"),
            "{second}"
        );
        let mut taken = model();
        taken.add_input("rng_seed.tp", Some(Ty::scalar(DType::I64)));
        let e = divide(&mut taken, &streams(&["tp=attn"])).unwrap_err();
        assert!(e.to_string().contains("`rng_seed.tp` is taken"), "{e}");
    }
}
