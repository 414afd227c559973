//! What is common to all updates of a step: the factor of the gradient, and whether the step applies.
//!
//! The factor divides by the number of micro-batches and by the scale of the loss, and clips by the global norm as
//! `torch.nn.utils.clip_grad_norm_` does. The norm is computed in float32 from all gradients, which therefore live until
//! then.

use super::names::{APPLY, LOSS_SCALE, RESTART, fail, input, named};
use super::options::UpdateOptions;
use crate::analysis::gradients::{FOUND_INF, GRAD_NORM};
use crate::error::{Error, Result};
use crate::ir::{Attrs, DType, Graph, Role, Ty, ValueId};
use crate::ops::collective::ALL_REDUCE;
use crate::ops::extreme::MIN;
use crate::ops::logic::{AND, LESS_OR_EQUAL, NOT};
use crate::ops::names::SQRT;
use crate::ops::optimizer::L2_NORM;
use crate::ops::{Builder, EmitExt};
use crate::transform::loss::Seed;
use std::collections::BTreeSet;

/// What `clip_grad_norm_` adds to the norm.
const CLIP_EPS: f64 = 1e-6;

/// Has the backward pass of a scalar loss start from the input [`LOSS_SCALE`].
///
/// # Errors
/// No scalar loss; a name that is taken.
pub fn scale_loss(graph: &mut Graph, seeds: &mut [Seed]) -> Result<()> {
    let [Seed { value, cotangent }] = seeds else {
        return Err(no_loss());
    };
    if cotangent.is_some() {
        return Err(no_loss());
    }
    let scale = input(graph, LOSS_SCALE, Ty::new(DType::F32, []))?;
    let dtype = graph.ty(*value).dtype;
    let mut b = Builder::new(graph);
    b.role = Role::Backward;
    *cotangent = Some(b.cast(scale, dtype)?);
    Ok(())
}

fn no_loss() -> Box<Error> {
    fail("there is no loss to scale: the backward pass does not start from a scalar".into())
        .help("name a loss with --loss, or leave --loss-scale out")
}

/// The inputs that decide how a step is scaled and whether it applies.
pub(super) struct Scaling {
    pub apply: Option<ValueId>,
    pub restart: Option<ValueId>,
    loss_scale: Option<ValueId>,
}

/// What the norm of all gradients is summed over, beside this rank's.
#[derive(Default)]
pub(super) struct Sums {
    /// The group whose ranks have slices of all gradients.
    pub slices: Option<Attrs>,
    /// The group whose ranks have parts of some.
    pub parts: Option<Attrs>,
    /// These.
    pub of_parts: BTreeSet<ValueId>,
}

impl Sums {
    /// Emits the norm of all gradients. One that ranks have parts of counts with all of them, and any other once.
    fn norm(&self, b: &mut Builder, gradients: &[ValueId]) -> Result<ValueId> {
        let (own, whole): (Vec<ValueId>, Vec<ValueId>) =
            gradients.iter().partition(|g| self.of_parts.contains(g));
        let mut norm = match (&self.parts, own.is_empty()) {
            (Some(group), false) => {
                let own = global_norm(b, &own)?;
                let mut sum = square_sum(b, own, group)?;
                if !whole.is_empty() {
                    let whole = global_norm(b, &whole)?;
                    let square = b.mul(whole, whole)?;
                    sum = b.add(sum, square)?;
                }
                b.op(SQRT, &[sum])?
            }
            _ => global_norm(b, gradients)?,
        };
        if let Some(group) = &self.slices {
            let sum = square_sum(b, norm, group)?;
            norm = b.op(SQRT, &[sum])?;
        }
        Ok(norm)
    }
}

/// Emits the sum over a group of the squares of a number.
fn square_sum(b: &mut Builder, x: ValueId, group: &Attrs) -> Result<ValueId> {
    let square = b.mul(x, x)?;
    b.emit(&ALL_REDUCE, &[square], group.clone())
}

/// The operands that all updates of a step share.
pub(super) struct Shared {
    pub lr: ValueId,
    pub step: Option<ValueId>,
    pub grad_scale: Option<ValueId>,
    pub apply: Option<ValueId>,
    grad_norm: Option<ValueId>,
    found_inf: Option<ValueId>,
}

impl Shared {
    /// Returns the outputs that tell what happened.
    pub fn outputs(&self) -> impl Iterator<Item = ValueId> {
        self.grad_norm.into_iter().chain(self.found_inf)
    }
}

impl Scaling {
    /// Adds the inputs.
    pub fn inputs(graph: &mut Graph, options: &UpdateOptions) -> Result<Scaling> {
        let mut truth = |name: &str| match options.accumulate {
            Some(_) => input(graph, name, Ty::new(DType::Bool, [])).map(Some),
            None => Ok(None),
        };
        let (apply, restart) = (truth(APPLY)?, truth(RESTART)?);
        let mut inputs = graph.inputs().iter().copied();
        let loss_scale = match options.loss_scale {
            true => {
                let scale = inputs.find(|v| graph.value(*v).name == LOSS_SCALE);
                Some(scale.ok_or_else(no_loss)?)
            }
            false => None,
        };
        Ok(Scaling {
            apply,
            restart,
            loss_scale,
        })
    }

    /// Emits the nodes, for gradients that are sums over the micro-batches, or for a rank's slices or parts of them.
    pub fn emit(
        &self,
        b: &mut Builder,
        (options, sums): (&UpdateOptions, &Sums),
        gradients: &[ValueId],
        (lr, step): (ValueId, Option<ValueId>),
    ) -> Result<Shared> {
        let number = |b: &mut Builder, x: f64| b.scalar(DType::F32, x);
        let mean = options.accumulate.map(|n| 1.0 / f64::from(n));
        let mut grad_scale = mean.map(|mean| number(b, mean));
        if let Some(loss_scale) = self.loss_scale {
            let mean = number(b, mean.unwrap_or(1.0));
            grad_scale = Some(b.div(mean, loss_scale)?);
        }
        let mut shared = Shared {
            lr,
            step,
            grad_scale,
            apply: self.apply,
            grad_norm: None,
            found_inf: None,
        };
        let needs_norm = options.clip.is_some() || self.loss_scale.is_some();
        if !needs_norm || gradients.is_empty() {
            return Ok(shared);
        }
        let mut norm = sums.norm(b, gradients)?;
        if self.loss_scale.is_some() {
            let most = number(b, f64::from(f32::MAX));
            // A comparison with NaN is false.
            let is_finite = b.op(&LESS_OR_EQUAL, &[norm, most])?;
            shared.apply = Some(match self.apply {
                Some(apply) => b.op(&AND, &[apply, is_finite])?,
                None => is_finite,
            });
            let found_inf = b.op(&NOT, &[is_finite])?;
            shared.found_inf = Some(named(b, found_inf, FOUND_INF)?);
        }
        if let Some(scale) = grad_scale {
            norm = b.mul(norm, scale)?;
        }
        if let Some(most) = options.clip {
            let (eps, most, one) = (number(b, CLIP_EPS), number(b, most.into()), number(b, 1.0));
            let sum = b.add(norm, eps)?;
            let ratio = b.div(most, sum)?;
            let factor = b.op(&MIN, &[ratio, one])?;
            shared.grad_scale = Some(match grad_scale {
                Some(scale) => b.mul(factor, scale)?,
                None => factor,
            });
        }
        shared.grad_norm = Some(named(b, norm, GRAD_NORM)?);
        Ok(shared)
    }
}

/// Emits the norm of a tensor as a scalar.
pub(super) fn scalar_norm(b: &mut Builder, v: ValueId) -> Result<ValueId> {
    let norm = b.op(&L2_NORM, &[v])?;
    b.reshape(norm, &[])
}

/// Emits the norm of the norms of all gradients.
fn global_norm(b: &mut Builder, gradients: &[ValueId]) -> Result<ValueId> {
    if let [only] = *gradients {
        return scalar_norm(b, only);
    }
    let norms = gradients.iter().map(|g| b.op(&L2_NORM, &[*g]));
    let norms = norms.collect::<Result<Vec<ValueId>>>()?;
    let list = b.concat(&norms, 0)?;
    scalar_norm(b, list)
}
