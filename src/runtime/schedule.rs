//! A graph compiled for inputs of given sizes: what follows from the sizes alone is worked out once, not every run.
//!
//! Contents of small integer values (axes, shapes, arithmetic on shapes) are numbers here, so that kernels read them
//! without asking a tensor, and nodes that compute them only write them down. A view that begins where its operand does
//! is two lists. All this holds only where no size depends on data and every input is row-major, as the memory rules
//! take it to be; elsewhere every node keeps its kernel.
//!
//! On a CPU, results and temporaries that are not small lie in one arena whose offsets follow from their lifetimes
//! (`analysis::arena`): what is resident is what was planned, and no page is new after the first step.
//!
//! What a schedule leaves out is work, never memory: each value still takes the storage that `analysis::memory` gives it.

use super::convert::{self, torch_error};
use super::device;
use super::kernels;
use super::kernels::attention::pairs::Available;
use super::kernels::attention::pairs::pinned::{Pinned, Taken};
use crate::place::Place;
use ckpt_passes::analysis::arena::Span;
use ckpt_passes::analysis::{self, Binding, MemoryProfile, Sizes};
use ckpt_passes::ir::{DType, Graph, Id, Node, NodeId, ValueId};
use ckpt_passes::{Error, Result};
use ckpt_torch::arena::{self, Arena, Offer};
use ckpt_torch::bytes;
use tch::{Kind, Tensor};

/// What a schedule is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Named sizes and their numbers.
    pub dims: Vec<(String, i64)>,
    /// Whether every input is row-major.
    pub row_major: bool,
}

/// A program for inputs of given sizes.
pub struct Schedule {
    key: Key,
    /// Whether no size depends on data and every input is row-major.
    pub(super) is_static: bool,
    /// What is predicted of the memory of a run.
    pub memory: MemoryProfile,
    /// Contents of integer values, by slot.
    pub(super) known: Vec<Option<Box<[i64]>>>,
    /// One a node, in order.
    pub(super) forms: Vec<Form>,
    /// The operand that the first result of each node is written over.
    pub(super) over: Vec<Option<usize>>,
    /// Kernels of attention that are pinned to nodes.
    pub(super) pinned: Pinned,
    /// Where results and temporaries lie.
    pub(super) arena: Option<Places>,
}

/// An arena, and the places in it that each step's kernel is offered.
pub(super) struct Places {
    pub(super) arena: Arena,
    places: Vec<Box<[arena::Place]>>,
}

impl Places {
    fn new(memory: &MemoryProfile) -> Result<Option<Places>> {
        let planned = analysis::arena::Arena::new(memory, arena::HEADER_BYTES);
        planned.check()?;
        if planned.bytes == 0 {
            return Ok(None);
        }
        let place = |span: Span, bytes: i64| arena::Place {
            from: span.from as i64,
            to: span.to as i64,
            bytes,
        };
        let places = planned
            .made
            .iter()
            .zip(&planned.temps)
            .map(|(made, temps)| {
                let made = made.iter().map(|(span, bytes)| place(*span, *bytes as i64));
                // A result that is too small for a place of its own may outlive the temporaries: it stays out.
                let least = -(analysis::arena::LEAST_BYTES as i64);
                made.chain(temps.map(|span| place(span, least))).collect()
            });
        Ok(Some(Places {
            places: places.collect(),
            arena: Arena::new(planned.bytes).map_err(torch_error)?,
        }))
    }

    /// Offers the places of a step.
    pub(super) fn offer(&self, at: usize) -> Option<Offer<'_>> {
        let places = &self.places[at];
        (!places.is_empty()).then(|| self.arena.offer(places))
    }
}

/// How a node is run.
pub(super) enum Form {
    Kernel,
    /// The storage of slot `of` from where that begins, seen otherwise.
    View {
        of: usize,
        to: usize,
        dims: Vec<i64>,
        strides: Vec<i64>,
    },
    /// A new tensor with known contents.
    Constant {
        to: usize,
        contents: Contents,
    },
}

/// The elements of a small tensor.
pub(super) struct Contents {
    kind: Kind,
    dims: Vec<i64>,
    /// Little-endian, row-major.
    bytes: Vec<u8>,
}

impl Contents {
    pub(super) fn tensor(&self) -> Result<Tensor> {
        bytes::copy_from(&self.bytes, self.kind, &self.dims).map_err(torch_error)
    }
}

impl Schedule {
    /// # Errors
    /// A size that has no number at these sizes of the inputs; more memory than there is.
    pub fn new(
        graph: &Graph,
        place: Place,
        key: Key,
        use_arena: bool,
        available: &Available,
    ) -> Result<Schedule> {
        let binding = Binding::new(graph, &key.dims)?;
        let sizes = Sizes::new(graph, &binding)?;
        let mut memory = MemoryProfile::rounded(graph, &sizes, place.granularity_bytes())?;
        let pinned = Pinned::new(graph, &sizes, &memory, place, available);
        memory.replace_temporaries(graph, &pinned.temporaries);
        device::expect_room(place, memory.peak_bytes - memory.static_bytes)?;
        let mut known: Vec<Option<Box<[i64]>>> = vec![None; graph.value_bound()];
        let is_static = sizes.bounded.is_empty() && key.row_major;
        if is_static {
            for (id, _) in graph.values() {
                let ints = sizes.of(id).ints.as_deref();
                known[Id::index(id)] = ints.map(Box::from);
            }
        }
        let mut forms = Vec::with_capacity(graph.order().len());
        for (id, temp_bytes) in graph.order().iter().zip(&memory.temp_bytes) {
            let node = graph.node(*id);
            // A kernel that takes temporaries is run even where its result is known: they were predicted.
            forms.push(match is_static && *temp_bytes == 0 {
                true => form(node, &sizes, &memory)?,
                false => Form::Kernel,
            });
        }
        let may_take = |(id, slot): (&NodeId, &Option<usize>)| {
            let renews = |v: &ValueId| memory.storage(*v).renews.is_some();
            slot.filter(|_| is_static || graph.node(*id).outs.first().is_some_and(renews))
        };
        let over = graph.order().iter().zip(&memory.taken).map(may_take);
        let over = over.collect();
        let arena = match use_arena && is_static && place == Place::Cpu {
            true => Places::new(&memory)?,
            false => None,
        };
        Ok(Schedule {
            key,
            pinned,
            is_static,
            arena,
            over,
            memory,
            known,
            forms,
        })
    }

    /// Bytes reserved for results and temporaries; 0 without an arena.
    pub fn arena_bytes(&self) -> u64 {
        self.arena.as_ref().map_or(0, |a| a.arena.bytes())
    }

    /// How many blocks have found their places in the arena, over all runs.
    pub fn placed(&self) -> u64 {
        self.arena.as_ref().map_or(0, |a| a.arena.placed())
    }

    /// How many nodes of attention run by which kernels.
    pub fn taken(&self) -> Taken {
        self.pinned.taken
    }

    pub fn is_for(&self, key: &Key) -> bool {
        self.key == *key
    }
}

fn form(node: &Node, sizes: &Sizes, memory: &MemoryProfile) -> Result<Form> {
    let [result] = node.outs[..] else {
        return Ok(Form::Kernel);
    };
    let (sized, layout) = (sizes.of(result), memory.layout(result));
    let to = Id::index(result);
    if let Some(of) = layout.view_of {
        let operand = node.ins.get(of).copied().flatten();
        return Ok(match operand {
            Some(operand) if kernels::begins_with_operand(node.op) => Form::View {
                of: Id::index(operand),
                to,
                dims: sized.dims.clone(),
                strides: layout.strides.clone(),
            },
            _ => Form::Kernel,
        });
    }
    let Some(contents) = sized
        .ints
        .as_deref()
        .filter(|_| node.op.effect.recomputable())
    else {
        return Ok(Form::Kernel);
    };
    if contents.len() as u64 != sized.elements() {
        return Err(Error::bug(
            "schedule",
            format!("{} elements are known of {:?}", contents.len(), sized.dims),
        ));
    }
    Ok(match encoded(sized.dtype, contents) {
        Some(bytes) => Form::Constant {
            to,
            contents: Contents {
                kind: convert::kind(sized.dtype)?,
                dims: sized.dims.clone(),
                bytes,
            },
        },
        None => Form::Kernel,
    })
}

/// The numbers as elements of a type that holds them all; `None` for types that are no arithmetic on shapes.
fn encoded(dtype: DType, numbers: &[i64]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(numbers.len() * dtype.size_bytes() as usize);
    for n in numbers {
        match dtype {
            DType::I64 => bytes.extend(n.to_le_bytes()),
            DType::I32 => bytes.extend(i32::try_from(*n).ok()?.to_le_bytes()),
            DType::Bool => bytes.push(u8::try_from(*n).ok().filter(|b| *b <= 1)?),
            _ => return None,
        }
    }
    Some(bytes)
}
