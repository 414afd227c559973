//! One node of a program: how it is run, by its form in a schedule, its kernel or a transfer.

use super::convert;
use super::kernels::attention::pairs::Pair;
use super::kernels::{self, KernelCx};
use super::later::Later;
use super::operands::Operands;
use super::schedule::Form;
use super::values::Values;
use crate::place::Place;
use ckpt_passes::ir::{Node, NodeId};
use ckpt_passes::ops::transfer::{FETCH, OFFLOAD, RELEASE};
use ckpt_passes::{Error, Result};
use ckpt_torch::cuda;
use std::collections::BTreeSet;
use tch::Tensor;

/// A node, and where its values lie.
pub(super) struct Step<'g> {
    pub id: NodeId,
    pub node: &'g Node,
    pub kernel: kernels::Kernel,
    pub ins: Vec<Option<usize>>,
    pub outs: Vec<usize>,
    /// Slots that nobody reads after this step.
    pub drops: Vec<usize>,
    /// Slots of what was fetched and is read here for the first time.
    pub joins: Vec<usize>,
    /// Whether it is a transfer that may run beside what follows it.
    pub is_beside: bool,
}

/// What a schedule gives a step beside its form.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    /// Contents of small integer values, by slot.
    pub known: &'a [Option<Box<[i64]>>],
    /// The operand that the first result is written over.
    pub over: Option<usize>,
    /// The pair of kernels that is pinned to the node.
    pub pair: Option<Pair>,
    /// Where questions go that are looked at later.
    pub later: Option<&'a Later>,
}

impl Step<'_> {
    /// A kernel that has no deterministic form runs all the same, and its op is noted.
    pub fn run(
        &self,
        form: &Form,
        given: Given,
        values: &mut Values,
        nondeterministic: &mut BTreeSet<&'static str>,
    ) -> Result<()> {
        match form {
            Form::View {
                of,
                dims,
                strides,
                to,
            } => {
                let base = values.tensors[*of].as_ref().ok_or_else(|| self.gone())?;
                let view = ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                values.tensors[*to] = Some(view);
                // What is small and integral is needed on the CPU too.
                if let Some(base) = &values.host[*of] {
                    let view =
                        ckpt_torch::view(base, dims, strides).map_err(convert::torch_error)?;
                    values.host[*to] = Some(view);
                }
                Ok(())
            }
            Form::Constant { contents, to } => values.set(*to, contents.tensor()?),
            Form::Kernel if self.is_beside && self.begin(values)? => Ok(()),
            Form::Kernel => match self.execute(given, values) {
                Err(e) if e.code() == convert::NONDETERMINISTIC => {
                    nondeterministic.insert(self.node.op.name);
                    cuda::refuse_nondeterministic(false);
                    let done = self.execute(given, values);
                    cuda::refuse_nondeterministic(true);
                    done
                }
                done => done,
            },
        }
    }

    /// A transfer, or the end of one, beside the run; `false` where it must be done at once.
    fn begin(&self, values: &mut Values) -> Result<bool> {
        let (lanes, outside, place) = (&mut values.lanes, &values.outside, values.place);
        let operand = |n: usize| self.ins.get(n).copied().flatten();
        let tensor = |n: usize| operand(n).and_then(|s| values.tensors[s].as_ref());
        let moved = tensor(0).ok_or_else(|| self.gone())?;
        let result = match self.node.op {
            op if op == &OFFLOAD => {
                return lanes.leave(outside, moved, &self.node.attrs, self.outs[0]);
            }
            op if op == &RELEASE => match operand(1) {
                Some(left) => lanes.left(left)?,
                None => None,
            },
            _ => lanes.come(outside, moved, (place, self.outs[0]))?,
        };
        let began = result.is_some();
        if began {
            values.tensors[self.outs[0]] = result;
        }
        Ok(began)
    }

    fn gone(&self) -> Box<Error> {
        let name = self.node.op.name;
        Error::bug("run", format!("an operand of {name} is gone"))
    }

    fn execute(&self, given: Given, values: &mut Values) -> Result<()> {
        let mut later = given.later;
        let mut ins = Operands::new(&self.ins, &values.tensors);
        let mut host = Operands::new(&[], &values.host);
        if values.place != Place::Cpu {
            host = Operands::new(&self.ins, &values.host);
            let is_known = |(there, here): (&Option<&Tensor>, &Option<&Tensor>)| {
                there.is_none() || here.is_some()
            };
            // What follows from numbers that are known here is worked out here.
            if ins.list().iter().any(Option::is_some)
                && ins.list().iter().zip(host.list()).all(is_known)
            {
                ins = host;
                host = Operands::new(&[], &values.host);
                later = None;
            }
        }
        let cx = KernelCx {
            op: self.node.op,
            attrs: &self.node.attrs,
            ins: ins.list(),
            host: host.list(),
            known: given.known,
            draws: &values.draws,
            outside: &values.outside,
            slots: &self.ins,
            n_outs: self.outs.len(),
            over: given.over,
            pair: given.pair,
            later,
        };
        let results = (self.kernel)(&cx)?;
        if results.len() != self.outs.len() {
            return Err(Error::bug(
                "kernel",
                format!("{} gave {} results", self.node.op.name, results.len()),
            ));
        }
        for (slot, tensor) in self.outs.iter().zip(results) {
            if self.node.op.is_transfer() && self.node.op != &FETCH {
                values.tensors[*slot] = Some(tensor);
            } else {
                values.set(*slot, tensor)?;
            }
        }
        Ok(())
    }
}
