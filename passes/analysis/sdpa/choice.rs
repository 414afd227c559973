//! The attention kernel of each node, chosen once for the sizes of the inputs.

use super::{Facts, SdpaBackend, SdpaBackends, scratch};
use crate::analysis::{Device, MemoryProfile, Sizes};
use crate::error::Result;
use crate::ir::op::Sized;
use crate::ir::{Graph, Node};
use crate::ops::attention::{ATTENTION, ATTENTION_GRAD, DLSE, GRAD_SEGMENTS, LSE, SEGMENTS, Y};
use scratch::ForwardResult;
use serde::Serialize;
use std::collections::BTreeSet;

/// How many attention nodes use which kernels, gradients and recomputations included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AttentionKernels {
    /// Nodes that run PyTorch's flash kernels, those for the CPU included.
    pub flash: u64,
    /// Nodes that run PyTorch's memory-efficient kernels.
    pub efficient: u64,
    /// Nodes that run in tiles, without a kernel of PyTorch.
    pub tiles: u64,
}

impl AttentionKernels {
    /// Returns a line for people; nothing if all attention runs in tiles.
    pub fn line(&self) -> Option<String> {
        let AttentionKernels {
            flash,
            efficient,
            tiles,
        } = self;
        (flash + efficient > 0).then(|| {
            format!("attention: {flash} by flash, {efficient} by efficient, {tiles} in tiles")
        })
    }

    fn count(&mut self, pair: Option<SdpaBackend>) {
        *match pair {
            Some(SdpaBackend::Flash | SdpaBackend::Cpu) => &mut self.flash,
            Some(SdpaBackend::Efficient) => &mut self.efficient,
            None => &mut self.tiles,
        } += 1;
    }
}

/// Returns the memory on the device of a profile, whose attention nodes run by PyTorch's kernels where these accept them.
///
/// # Errors
/// See [`MemoryProfile::new`].
pub fn memory_on(
    graph: &Graph,
    sizes: &Sizes,
    device: &Device,
) -> Result<(MemoryProfile, AttentionKernels)> {
    let (mut memory, choice) = choice_on(graph, sizes, device)?;
    memory.replace_temporaries(graph, &choice.temporaries);
    Ok((memory, choice.taken))
}

/// Returns the choice for the device of a profile, and the memory if all attention ran in tiles.
///
/// # Errors
/// See [`MemoryProfile::new`].
pub fn choice_on(
    graph: &Graph,
    sizes: &Sizes,
    device: &Device,
) -> Result<(MemoryProfile, SdpaChoice)> {
    let granularity = device.granularity_bytes;
    let memory = MemoryProfile::of_device(graph, sizes, device.kind, granularity)?;
    let available = SdpaBackends::of_profile(device);
    let choice = SdpaChoice::new(graph, sizes, &memory, &available, |_, _| Ok(()));
    Ok((memory, choice))
}

/// The choice for each node of a program.
#[derive(Default)]
pub struct SdpaChoice {
    /// The backend of each node, in order; `None` for tiles.
    pub backends: Vec<Option<SdpaBackend>>,
    /// How many of the attention nodes use which kernels.
    pub taken: AttentionKernels,
    /// Bytes that backends need beside results, by position.
    pub temporaries: Vec<(usize, u64)>,
    /// The same in requested bytes, before the allocator rounds blocks up.
    pub requested_temporaries: Vec<(usize, u64)>,
    /// Why backends are not used that could be.
    pub refused: BTreeSet<String>,
}

impl SdpaChoice {
    /// Chooses by the operands' layouts in `memory`, and counts blocks of its size. Where sizes depend on data, attention runs
    /// in tiles. `admit` says why a backend is not used for a node that it accepts.
    pub fn new(
        graph: &Graph,
        sizes: &Sizes,
        memory: &MemoryProfile,
        available: &SdpaBackends,
        admit: impl Fn(SdpaBackend, &Facts) -> std::result::Result<(), String>,
    ) -> SdpaChoice {
        let mut pinned = SdpaChoice {
            refused: available.refused.iter().cloned().collect(),
            ..SdpaChoice::default()
        };
        for (at, id) in graph.order().iter().enumerate() {
            let node = graph.node(*id);
            let is_attention = node.op == &ATTENTION || node.op == &ATTENTION_GRAD;
            let mut pair = None;
            // No kernel of PyTorch takes the cotangent of the log-sum-exp.
            let may_fuse = is_attention && node.operand(DLSE).is_none();
            if may_fuse && sizes.bounded.is_empty() && !available.list.is_empty() {
                pair = pinned.choose(at, node, (sizes, memory), available, &admit);
            }
            if is_attention {
                pinned.taken.count(pair);
            }
            pinned.backends.push(pair);
        }
        pinned
    }

    fn choose(
        &mut self,
        at: usize,
        node: &Node,
        (sizes, memory): (&Sizes, &MemoryProfile),
        available: &SdpaBackends,
        admit: &impl Fn(SdpaBackend, &Facts) -> std::result::Result<(), String>,
    ) -> Option<SdpaBackend> {
        let mut ins: Vec<Option<Sized>> = node
            .ins
            .iter()
            .map(|value| {
                value.map(|value| Sized {
                    strides: memory.layout(value).strides.clone(),
                    ..sizes.of(value).clone()
                })
            })
            .collect();
        let dy = match node.op == &ATTENTION_GRAD {
            true => {
                // As the forward row has them.
                let segments = ins.get_mut(GRAD_SEGMENTS).and_then(Option::take);
                let dy = ins.remove(0)?;
                ins.resize(SEGMENTS, None);
                ins.push(segments);
                Some(dy)
            }
            false => None,
        };
        let facts = Facts::of(&node.attrs, &ins)?;
        let pair = available.choose(&facts)?;
        if let Err(why) = admit(pair, &facts) {
            self.refused.insert(why);
            return None;
        }
        let [Some(q), Some(k), Some(v)] = ins.get(..3)? else {
            return None;
        };
        let result = match (&dy, node.operand(Y), node.operand(LSE)) {
            (Some(dy), Some(y), Some(_)) => match sizes.of(y).dims.len() == dy.dims.len() {
                true => ForwardResult::RowMajor,
                false => ForwardResult::HeadsInside,
            },
            _ => ForwardResult::Recomputed,
        };
        let shape = scratch::Node {
            facts: &facts,
            q,
            k,
            v,
            dy: dy.as_ref(),
            wants: node.attrs.opt_ints("wants").unwrap_or_default(),
            wants_lse: dy.is_none() && node.outs.len() > 1,
            result,
        };
        let bytes_in = |granularity| scratch::bytes(pair, available, &shape, granularity);
        let (bytes, requested_bytes) = (bytes_in(memory.granularity_bytes)?, bytes_in(1)?);
        self.temporaries.push((at, bytes));
        self.requested_temporaries.push((at, requested_bytes));
        Some(pair)
    }
}
