//! One node of a program, and how it runs: by a precomputed form, its kernel or a transfer.

use super::convert;
use super::deferred_checks::DeferredChecks;
use super::device;
use super::fused_updates;
use super::kernels::{self, KernelCx};
use super::observed::Observed;
use super::operands::Operands;
use super::specialization::NodeForm;
use super::values::Values;
use ckpt_passes::analysis::sdpa::SdpaBackend;
use ckpt_passes::ir::{Node, NodeId};
use ckpt_passes::ops::random::{key_slots, ratio_slot};
use ckpt_passes::ops::transfer::{OFFLOAD, RELEASE, TO, TO_DISK};
use ckpt_passes::{Error, Result};
use ckpt_torch::cuda;
use std::cell::Cell;
use tch::Tensor;

/// A node and the slots of its values.
pub(super) struct Step<'g> {
    pub id: NodeId,
    pub node: &'g Node,
    pub kernel: kernels::Kernel,
    pub ins: Vec<Option<usize>>,
    pub outs: Vec<usize>,
    /// Slots that no later step reads.
    pub frees: Vec<usize>,
    /// Slots of fetched values that this step is the first to read.
    pub arrivals: Vec<usize>,
    /// Whether it is a transfer that may run beside the nodes after it.
    pub may_overlap: bool,
}

/// What a specialization gives a step beside its form.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    /// Contents of small integer values, by slot.
    pub known: &'a [Option<Box<[i64]>>],
    /// The operand that the first result overwrites.
    pub overwrites: Option<usize>,
    /// The fused attention kernels that are pinned to the node.
    pub pair: Option<SdpaBackend>,
    /// Collects deferred checks, in a step that must not wait for the device.
    pub deferred: Option<&'a DeferredChecks>,
}

impl Step<'_> {
    /// Runs the node. A kernel without a deterministic form runs as it is, and its op is added to `seen`.
    pub fn run(
        &self,
        form: &NodeForm,
        given: Given,
        values: &mut Values,
        seen: &mut Observed,
    ) -> Result<()> {
        match form {
            NodeForm::View {
                of,
                dims,
                strides,
                to,
            } => {
                let base = values.tensors[*of].as_ref().ok_or_else(|| self.gone())?;
                let view = ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                values.tensors[*to] = Some(view);
                // The host needs small integer values too.
                if let Some(base) = &values.host[*of] {
                    let view =
                        ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                    values.host[*to] = Some(view);
                }
                Ok(())
            }
            NodeForm::Constant { contents, to } => values.set(*to, contents.tensor()?),
            NodeForm::DeferredUpdate => self.make_updated(given, values),
            NodeForm::Updates(call) => {
                self.make_updated(given, values)?;
                let tensors = call.tensors(&values.tensors)?;
                let update =
                    |cx: &KernelCx| kernels::optimizer::update(cx, &call.formula, &tensors);
                self.with_operands(given, values, seen, update)
            }
            NodeForm::Kernel if self.may_overlap && self.begin_transfer(values)? => Ok(()),
            NodeForm::Kernel => match self.execute(given, values, seen) {
                Err(e) if e.code() == convert::NONDETERMINISTIC => {
                    seen.nondeterministic.insert(self.node.op.name);
                    cuda::refuse_nondeterministic(false);
                    let done = self.execute(given, values, seen);
                    cuda::refuse_nondeterministic(true);
                    done
                }
                done => done,
            },
        }
    }

    /// Begins or ends a transfer that runs beside other nodes; `false` where it must be done at once.
    fn begin_transfer(&self, values: &mut Values) -> Result<bool> {
        if !values.overlap_transfers {
            return Ok(false);
        }
        let (transfers, store) = (&mut values.transfers, &values.store);
        let tensor = |n: usize| self.operand(n).and_then(|s| values.tensors[s].as_ref());
        let (moved, slot) = (tensor(0).ok_or_else(|| self.gone())?, self.outs[0]);
        let result = match self.node.op {
            op if op == &OFFLOAD => {
                let to_disk = self.node.attrs.str(TO) == TO_DISK;
                return transfers.begin_offload(store, moved, to_disk, slot);
            }
            op if op == &RELEASE => match self.operand(1) {
                Some(stored) => transfers.finish_offload(stored)?,
                None => None,
            },
            _ if moved.numel() == 0 => None,
            _ => transfers.begin_fetch(store, moved, slot)?,
        };
        let began = result.is_some();
        if began {
            values.tensors[slot] = result;
        }
        Ok(began)
    }

    /// Returns the slots of seed and stream of a random node.
    pub fn key(&self) -> Option<(usize, usize)> {
        let (seed, stream) = key_slots(self.node.op)?;
        Some((self.operand(seed)?, self.operand(stream)?))
    }

    /// Returns the slot of a dropout's ratio.
    pub fn ratio(&self) -> Option<usize> {
        self.operand(ratio_slot(self.node.op)?)
    }

    fn operand(&self, n: usize) -> Option<usize> {
        self.ins.get(n).copied().flatten()
    }

    /// Returns why a transfer cannot be part of a captured step.
    pub fn uncaptured(&self, values: &Values) -> Option<&'static str> {
        if !values.overlap_transfers {
            return Some("transfers run one after the other");
        }
        if self.node.op == &OFFLOAD && self.node.attrs.str(TO) == TO_DISK {
            return Some("a file cannot be written from within a graph");
        }
        if !self.may_overlap {
            return Some("other nodes read the stored result, or none the fetched one");
        }
        values.transfers.uncaptured(&values.store)
    }

    fn make_updated(&self, given: Given, values: &mut Values) -> Result<()> {
        let old = self.ins[0].ok_or_else(|| self.gone())?;
        fused_updates::make_result(
            (old, self.outs[0]),
            given.overwrites.is_some(),
            &mut values.tensors,
        )
    }

    fn gone(&self) -> Box<Error> {
        let name = self.node.op.name;
        Error::bug("run", format!("an operand of {name} is gone"))
    }

    fn execute(&self, given: Given, values: &mut Values, seen: &mut Observed) -> Result<()> {
        let results = self.with_operands(given, values, seen, self.kernel)?;
        if results.len() != self.outs.len() {
            return Err(Error::bug(
                "kernel",
                format!("{} returned {} results", self.node.op.name, results.len()),
            ));
        }
        for (slot, tensor) in self.outs.iter().zip(results) {
            if self.node.op == &OFFLOAD || self.node.op == &RELEASE {
                values.tensors[*slot] = Some(tensor);
            } else {
                values.set(*slot, tensor)?;
            }
        }
        Ok(())
    }

    /// Calls a kernel with the node's operands and attributes.
    fn with_operands<T>(
        &self,
        given: Given,
        values: &Values,
        seen: &mut Observed,
        kernel: impl Fn(&KernelCx) -> Result<T>,
    ) -> Result<T> {
        let mut deferred = given.deferred;
        let mut ins = Operands::new(&self.ins, &values.tensors);
        let mut host = Operands::new(&[], &values.host);
        if !device::of(values.place).is_host() {
            host = Operands::new(&self.ins, &values.host);
            let is_known = |(there, here): (&Option<&Tensor>, &Option<&Tensor>)| {
                there.is_none() || here.is_some()
            };
            // The host computes what follows from numbers that it knows.
            if ins.list().iter().any(Option::is_some)
                && ins.list().iter().zip(host.list()).all(is_known)
            {
                ins = host;
                host = Operands::new(&[], &values.host);
                deferred = None;
            }
        }
        let ties = Cell::new(false);
        let cx = KernelCx {
            op: self.node.op,
            attrs: &self.node.attrs,
            ins: ins.list(),
            host: host.list(),
            known: given.known,
            draws: &values.draws,
            store: &values.store,
            slots: &self.ins,
            n_outs: self.outs.len(),
            overwrites: given.overwrites,
            device: values.blocks_of,
            pair: given.pair,
            deferred,
            ties: Some(&ties),
        };
        let results = kernel(&cx)?;
        if ties.get() {
            seen.ties.insert(self.id);
        }
        Ok(results)
    }
}
