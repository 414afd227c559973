//! Values of sequence type: lists of tensors that are known when the file is read.
//!
//! A name of a sequence stands for the values of its elements. An op that takes a sequence apart or extends it only
//! changes such lists; `SplitToSequence` and `ConcatFromSequence` emit nodes (see
//! [`lower`](crate::frontend::lower)).

use super::import::Importer;
use crate::frontend::lower::Out;
use crate::onnx::proto::NodeProto;
use ckpt_passes::ir::{Dim, Tensor, ValueId};
use ckpt_passes::{Error, Result};

/// The largest number of elements that all sequences of a file name together.
const MAX_ELEMENTS: usize = 1 << 20;

impl Importer<'_, '_> {
    /// Reads a node of the standard domain that takes or returns a sequence. Returns false for any other node.
    pub(super) fn sequence(&mut self, node: &NodeProto, index: usize) -> Result<bool> {
        let op = node.op_type();
        let first = node.input.first().and_then(|name| self.sequences.get(name));
        let list = match (op, first) {
            ("SplitToSequence", None) => {
                let ins = self.operands(node)?;
                let Some(outs) = self.lowered(node, "", index, &ins)? else {
                    bail!("type", "{op}: the type of its operand is not known");
                };
                outs.into_iter()
                    .filter_map(|out| match out {
                        Out::Value(v) => Some(v),
                        Out::Absent(_) => None,
                    })
                    .collect()
            }
            ("SequenceEmpty", None) => Vec::new(),
            ("SequenceConstruct", None) => self.operands(node)?.into_iter().flatten().collect(),
            ("Identity", Some(list)) => list.clone(),
            ("ConcatFromSequence", Some(list)) => {
                let ins: Vec<Option<ValueId>> = list.iter().copied().map(Some).collect();
                return self.decompose(node, "", index, &ins);
            }
            ("SequenceLength", Some(list)) => {
                let length = Tensor::int(list.len() as i64);
                let length = self.graph.add_init("length", length);
                self.contents.read_init(&self.graph, length);
                return self.alias(node, length);
            }
            ("SequenceAt", Some(list)) => {
                let list = list.clone();
                let at = self.place(node, 1, list.len())?;
                return match list.get(at) {
                    Some(value) => self.alias(node, *value),
                    None => Err(outside(op, at as i64, list.len())),
                };
            }
            ("SequenceErase", Some(list)) => {
                let mut list = list.clone();
                let at = self.place(node, 1, list.len())?;
                if at >= list.len() {
                    return Err(outside(op, at as i64, list.len()));
                }
                list.remove(at);
                list
            }
            ("SequenceInsert", Some(list)) => {
                let mut list = list.clone();
                let element = self.operands(node)?.get(1).copied().flatten();
                let element = element
                    .ok_or_else(|| Error::model("arity", "SequenceInsert: `tensor` is missing"))?;
                let at = match node.input.get(2).is_some_and(|name| !name.is_empty()) {
                    true => self.place(node, 2, list.len())?,
                    false => list.len(),
                };
                if at > list.len() {
                    return Err(outside(op, at as i64, list.len()));
                }
                list.insert(at, element);
                list
            }
            _ => return self.refuse_sequences(node),
        };
        let held: usize = self.sequences.values().map(Vec::len).sum();
        if held + list.len() > MAX_ELEMENTS {
            bail!(
                "onnx",
                "the sequences of the file have more than {MAX_ELEMENTS} elements"
            );
        }
        let [name] = node.output.as_slice() else {
            bail!("arity", "{op}: it has one result");
        };
        self.claim_name(name)?;
        self.sequences.insert(name.clone(), list);
        Ok(true)
    }

    /// Fails if a node that knows no sequences reads one.
    fn refuse_sequences(&self, node: &NodeProto) -> Result<bool> {
        match node
            .input
            .iter()
            .find(|name| self.sequences.contains_key(*name))
        {
            None => Ok(false),
            Some(name) => Err(Error::model(
                "op",
                format!(
                    "{}: the operand `{name}` is a sequence of tensors",
                    node.op_type()
                ),
            )
            .expected("a tensor")
            .help(
                "ops that take sequences apart or join them are supported; export without others",
            )),
        }
    }

    /// Gives a value another name, that of the node's result.
    fn alias(&mut self, node: &NodeProto, value: ValueId) -> Result<bool> {
        let [name] = node.output.as_slice() else {
            bail!("arity", "{}: it has one result", node.op_type());
        };
        self.claim_name(name)?;
        self.scope.insert(name.clone(), value);
        Ok(true)
    }

    /// Returns the place in a sequence that an operand holds, counted from the front.
    fn place(&self, node: &NodeProto, slot: usize, length: usize) -> Result<usize> {
        let place = self.operands(node)?.get(slot).copied().flatten();
        let known = place.and_then(|v| self.contents.get(v)?.first().and_then(Dim::as_const));
        let Some(place) = known else {
            let what = format!("{}: the place in the sequence is not known", node.op_type());
            return Err(Error::model("op", what).help("a place that data decides is not supported"));
        };
        let from_front = if place < 0 {
            place + length as i64
        } else {
            place
        };
        usize::try_from(from_front).map_err(|_| outside(node.op_type(), place, length))
    }
}

fn outside(op: &str, place: i64, length: usize) -> Box<Error> {
    Error::model("shape", format!("{op}: there is no element {place}"))
        .found(format!("a sequence of {length} elements"))
}
