//! A graph compiled for inputs of given sizes: computes once what follows from the sizes alone.
//!
//! Small integer values (axes, shapes, arithmetic on shapes) become numbers. Kernels read them without asking a tensor, and
//! the nodes that compute them only write constants. A view that begins where its operand does becomes sizes and strides.
//! This needs sizes that do not depend on data and row-major inputs, as the memory rules assume. Otherwise every node keeps
//! its kernel.
//!
//! On a CPU, all but small results and temporaries lie in one arena, at offsets planned from their lifetimes
//! (`analysis::arena`). So resident memory is what was planned, and no page is new after the first step.
//!
//! A specialization saves work, never memory: each value still takes the storage that `analysis::memory` gives it.

use super::convert::{self, torch_error};
use super::device;
use super::fused_updates::{self, UpdateCall};
use super::kernels;
use super::kernels::attention::check;
use crate::place::Place;
use ckpt_passes::analysis::arena::Span;
use ckpt_passes::analysis::liveness::Liveness;
use ckpt_passes::analysis::sdpa::SdpaBackends;
use ckpt_passes::analysis::sdpa::choice::{AttentionKernels, SdpaChoice};
use ckpt_passes::analysis::{self, Binding, MemoryProfile, Sizes};
use ckpt_passes::ir::op::DeviceKind;
use ckpt_passes::ir::{DType, Graph, Id, Node, NodeId, ValueId};
use ckpt_passes::{Error, Result};
use ckpt_torch::arena::{self, Arena, Offer};
use ckpt_torch::bytes;
use tch::{Kind, Tensor};

/// The sizes that a specialization is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecializationKey {
    /// The numbers of named sizes.
    pub dims: Vec<(String, i64)>,
    /// Whether every input is row-major.
    pub row_major: bool,
}

/// A program for inputs of given sizes.
pub struct Specialization {
    key: SpecializationKey,
    /// Whether no size depends on data and every input is row-major.
    pub(super) is_static: bool,
    /// The predicted memory of a run.
    pub memory: MemoryProfile,
    /// Whether that is an upper bound, for data decides some sizes.
    pub peak_is_bound: bool,
    /// The predicted peak above static in requested bytes, before the allocator rounds blocks up.
    pub requested_growth_bytes: u64,
    /// The contents of integer values, by slot.
    pub(super) known: Vec<Option<Box<[i64]>>>,
    /// The form of each node, in order.
    pub(super) forms: Vec<NodeForm>,
    /// The operand that the first result of each node overwrites.
    pub(super) overwrites: Vec<Option<usize>>,
    /// Slots that no node after each position reads.
    pub(super) frees: Vec<Vec<usize>>,
    /// The attention kernels that are pinned to nodes.
    pub(super) pinned: SdpaChoice,
    /// The addresses of results and temporaries.
    pub(super) arena: Option<ArenaPlan>,
}

/// An arena, with the places that each step's kernel is offered.
pub(super) struct ArenaPlan {
    pub(super) arena: Arena,
    places: Vec<Box<[arena::Place]>>,
}

impl ArenaPlan {
    fn new(memory: &MemoryProfile) -> Result<Option<ArenaPlan>> {
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
                // A result that is too small for a place of its own may outlive the temporaries, so it is not placed.
                let least = -(analysis::arena::LEAST_BYTES as i64);
                made.chain(temps.map(|span| place(span, least))).collect()
            });
        Ok(Some(ArenaPlan {
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

/// How a node runs.
pub(super) enum NodeForm {
    Kernel,
    /// The storage of slot `of`, from its beginning, with other sizes and strides.
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
    /// A node of an update that a later call computes.
    DeferredUpdate,
    /// The last node of updates that one call computes.
    Updates(UpdateCall),
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

impl Specialization {
    /// Compiles a graph for inputs of given sizes.
    ///
    /// # Errors
    /// A size that these input sizes do not determine; more memory than there is.
    pub fn new(
        graph: &Graph,
        (place, blocks_of): (Place, DeviceKind),
        key: SpecializationKey,
        use_arena: bool,
        available: &SdpaBackends,
    ) -> Result<Specialization> {
        let binding = Binding::of_run(graph, &key.dims)?;
        let sizes = Sizes::new(graph, &binding)?;
        let mut memory =
            MemoryProfile::of_device(graph, &sizes, blocks_of, place.granularity_bytes())?;
        let pinned = SdpaChoice::new(graph, &sizes, &memory, available, |backend, facts| {
            check::admitted(backend, facts, device::of(place).device())
        });
        memory.replace_temporaries(graph, &pinned.temporaries);
        let mut requested = MemoryProfile::of_device(graph, &sizes, blocks_of, 1)?;
        requested.replace_temporaries(graph, &pinned.requested_temporaries);
        device::expect_room(place, memory.peak_bytes - memory.static_bytes)?;
        let mut known: Vec<Option<Box<[i64]>>> = vec![None; graph.value_bound()];
        let is_static = !sizes.is_bound() && key.row_major;
        if is_static {
            for (id, _) in graph.values() {
                let ints = sizes.of(id).ints.as_deref();
                known[Id::index(id)] = ints.map(Box::from);
            }
        }
        let mut forms = Vec::with_capacity(graph.order().len());
        for (id, temp_bytes) in graph.order().iter().zip(&memory.temp_bytes) {
            let node = graph.node(*id);
            // A kernel with temporaries runs even where its result is known: they were predicted.
            forms.push(match is_static && *temp_bytes == 0 {
                true => form(node, &sizes, &memory)?,
                false => NodeForm::Kernel,
            });
        }
        for (at, call) in fused_updates::calls(graph, &memory) {
            forms[at] = call.map_or(NodeForm::DeferredUpdate, NodeForm::Updates);
        }
        let may_take = |(id, slot): (&NodeId, &Option<usize>)| {
            let renews = |v: &ValueId| memory.storage(*v).renews.is_some();
            slot.filter(|_| is_static || graph.node(*id).outs.first().is_some_and(renews))
        };
        let overwrites = graph.order().iter().zip(&memory.taken).map(may_take);
        let overwrites = overwrites.collect();
        let frees = Liveness::with_updates(graph, &memory.fused_updates).frees(graph);
        let slots = |values: Vec<ValueId>| values.into_iter().map(Id::index).collect();
        let frees = frees.into_iter().map(slots).collect();
        let arena = match use_arena && is_static && device::of(place).is_host() {
            true => ArenaPlan::new(&memory)?,
            false => None,
        };
        Ok(Specialization {
            key,
            pinned,
            is_static,
            requested_growth_bytes: requested.peak_bytes - requested.static_bytes,
            peak_is_bound: sizes.is_bound(),
            arena,
            overwrites,
            frees,
            memory,
            known,
            forms,
        })
    }

    /// Returns the bytes reserved for results and temporaries; 0 without an arena.
    pub fn arena_bytes(&self) -> u64 {
        self.arena.as_ref().map_or(0, |a| a.arena.bytes())
    }

    /// Returns how many blocks found their places in the arena, over all runs.
    pub fn placed(&self) -> u64 {
        self.arena.as_ref().map_or(0, |a| a.arena.placed())
    }

    /// Returns the first element of an integer value that the sizes determine.
    pub(super) fn number(&self, slot: usize) -> Option<i64> {
        self.known[slot].as_deref()?.first().copied()
    }

    /// Counts the attention nodes by kernel.
    pub fn taken(&self) -> AttentionKernels {
        self.pinned.taken
    }

    /// Returns whether this was compiled for these sizes.
    pub fn is_for(&self, key: &SpecializationKey) -> bool {
        self.key == *key
    }
}

fn form(node: &Node, sizes: &Sizes, memory: &MemoryProfile) -> Result<NodeForm> {
    let [result] = node.outs[..] else {
        return Ok(NodeForm::Kernel);
    };
    let (sized, layout) = (sizes.of(result), memory.layout(result));
    let to = Id::index(result);
    if let Some(of) = layout.view_of {
        let operand = node.ins.get(of).copied().flatten();
        return Ok(match operand {
            Some(operand) if kernels::begins_with_operand(node.op) => NodeForm::View {
                of: Id::index(operand),
                to,
                dims: sized.dims.clone(),
                strides: layout.strides.clone(),
            },
            _ => NodeForm::Kernel,
        });
    }
    let Some(contents) = sized
        .ints
        .as_deref()
        .filter(|_| node.op.effect.recomputable())
    else {
        return Ok(NodeForm::Kernel);
    };
    if contents.len() as u64 != sized.elements() {
        return Err(Error::bug(
            "specialization",
            format!("{} elements are known of {:?}", contents.len(), sized.dims),
        ));
    }
    Ok(match encoded(sized.dtype, contents) {
        Some(bytes) => NodeForm::Constant {
            to,
            contents: Contents {
                kind: convert::kind(sized.dtype)?,
                dims: sized.dims.clone(),
                bytes,
            },
        },
        None => NodeForm::Kernel,
    })
}

/// Encodes numbers as elements of a type; `None` for a type that cannot hold them or that shapes do not use.
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
