//! Appends or accepts a loss, and says where the backward starts.
//!
//! In: `Typed`. Out: `Typed`, nodes of role `Loss`. The result lists seeds: values and their cotangents. Losses are
//! computed in float32 whatever the logits are; `labels` and `target` are new graph inputs. The causal loss shifts the
//! labels, not the logits: a shifted view of the logits would have to be copied before it can be flattened.

use crate::error::{Error, Result};
use crate::ir::{Attrs, Builder, DType, Graph, Role, Ty, ValueId};
use crate::ops;
use std::fmt;

/// What is differentiated.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Loss {
    /// The model's only scalar float output; else `Vjp`.
    #[default]
    Auto,
    /// Next-token cross-entropy of logits `[.., seq, classes]`; `labels` is the token at each place, −100 is ignored.
    CausalLm,
    /// Cross-entropy of logits `[.., classes]` against `labels`; −100 is ignored.
    CrossEntropy,
    /// Mean squared error against `target`.
    Mse,
    /// An output of the model that is a scalar already.
    Output(String),
    /// Vector-Jacobian product: every float output gets an input `<output>.cotangent`.
    Vjp,
}

impl Loss {
    /// Reads the value of `--loss`.
    pub fn parse(text: &str) -> Result<Loss> {
        Ok(match text {
            "auto" => Loss::Auto,
            "causal-lm" => Loss::CausalLm,
            "cross-entropy" => Loss::CrossEntropy,
            "mse" => Loss::Mse,
            "vjp" => Loss::Vjp,
            other => match other.strip_prefix("output:") {
                Some(name) if !name.is_empty() => Loss::Output(name.into()),
                _ => {
                    return Err(Error::usage("loss", format!("there is no loss `{other}`"))
                        .expected("causal-lm, cross-entropy, mse, output:NAME or vjp"));
                }
            },
        })
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loss::Auto => f.write_str("auto"),
            Loss::CausalLm => f.write_str("causal-lm"),
            Loss::CrossEntropy => f.write_str("cross-entropy"),
            Loss::Mse => f.write_str("mse"),
            Loss::Output(name) => write!(f, "output:{name}"),
            Loss::Vjp => f.write_str("vjp"),
        }
    }
}

/// A value the backward starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    pub value: ValueId,
    /// `None` stands for 1: the value is the scalar loss.
    pub cotangent: Option<ValueId>,
}

/// What the pass did.
#[derive(Clone, Debug)]
pub struct Seeds {
    pub seeds: Vec<Seed>,
    /// The loss that was meant, `Auto` resolved.
    pub loss: Loss,
}

/// Adds the loss to the graph.
///
/// # Errors
/// No output, or more than one, that the loss could apply to; a name the loss needs that is taken.
pub fn add_loss(graph: &mut Graph, loss: &Loss) -> Result<Seeds> {
    let floats: Vec<ValueId> = graph
        .outputs()
        .iter()
        .copied()
        .filter(|v| graph.ty(*v).dtype.is_float())
        .collect();
    if floats.is_empty() {
        return Err(Error::model(
            "loss",
            "the model has no floating-point output to differentiate",
        ));
    }
    match loss {
        Loss::Auto => {
            let scalars: Vec<ValueId> = floats
                .iter()
                .copied()
                .filter(|v| is_scalar(graph, *v))
                .collect();
            match scalars.as_slice() {
                [one] => {
                    let name = graph.value(*one).name.clone();
                    scalar_loss(graph, *one, Loss::Output(name))
                }
                _ => add_loss(graph, &Loss::Vjp),
            }
        }
        Loss::Output(name) => {
            let Some(value) = graph
                .outputs()
                .iter()
                .copied()
                .find(|v| graph.value(*v).name == *name)
            else {
                let known: Vec<&str> = graph
                    .outputs()
                    .iter()
                    .map(|v| graph.value(*v).name.as_str())
                    .collect();
                return Err(
                    Error::usage("loss", format!("the model has no output `{name}`"))
                        .found(format!("outputs {}", known.join(", "))),
                );
            };
            if !is_scalar(graph, value) || !graph.ty(value).dtype.is_float() {
                return Err(Error::usage(
                    "loss",
                    format!("output `{name}` is not a floating-point scalar"),
                )
                .found(graph.ty(value).to_string()));
            }
            scalar_loss(graph, value, loss.clone())
        }
        Loss::Vjp => {
            let mut seeds = Vec::new();
            for value in floats {
                let name = format!("{}.cotangent", graph.value(value).name);
                let ty = graph.ty(value).clone();
                let cotangent = new_input(graph, &name, ty)?;
                seeds.push(Seed {
                    value,
                    cotangent: Some(cotangent),
                });
            }
            Ok(Seeds {
                seeds,
                loss: Loss::Vjp,
            })
        }
        Loss::Mse => {
            let value = only(graph, &floats, 0, "mse")?;
            mse(graph, value)
        }
        Loss::CausalLm => {
            let value = only(graph, &floats, 2, "causal-lm")?;
            cross_entropy(graph, value, true)
        }
        Loss::CrossEntropy => {
            let value = only(graph, &floats, 1, "cross-entropy")?;
            cross_entropy(graph, value, false)
        }
    }
}

fn is_scalar(graph: &Graph, value: ValueId) -> bool {
    graph.ty(value).elements().is_one()
}

/// The one output with at least `rank` axes.
fn only(graph: &Graph, floats: &[ValueId], rank: usize, loss: &str) -> Result<ValueId> {
    let fit: Vec<ValueId> = floats
        .iter()
        .copied()
        .filter(|v| graph.ty(*v).rank() >= rank && (rank == 0 || !is_scalar(graph, *v)))
        .collect();
    match fit.as_slice() {
        [one] => Ok(*one),
        _ => {
            let all: Vec<String> = floats
                .iter()
                .map(|v| format!("{}: {}", graph.value(*v).name, graph.ty(*v)))
                .collect();
            Err(Error::usage(
                "loss",
                format!(
                    "{loss} needs exactly one output it can apply to, {} fit",
                    fit.len()
                ),
            )
            .found(format!("outputs {}", all.join(", ")))
            .help("drop the others with --drop-output, or use --loss vjp"))
        }
    }
}

fn new_input(graph: &mut Graph, name: &str, ty: Ty) -> Result<ValueId> {
    if graph.has_value_name(name) {
        return Err(Error::model(
            "name",
            format!("the loss needs an input `{name}`, but the model uses that name"),
        )
        .help("rename it in the export"));
    }
    Ok(graph.add_input(name, Some(ty)))
}

/// A builder whose nodes belong to the loss.
fn loss_builder(graph: &mut Graph) -> Builder<'_> {
    let mut b = Builder::new(graph);
    b.role = Role::Loss;
    b.prefix = "loss".into();
    b
}

/// Makes `value` the output `loss`: a float32 scalar.
fn scalar_loss(graph: &mut Graph, value: ValueId, loss: Loss) -> Result<Seeds> {
    let (rank, dtype, named) = (
        graph.ty(value).rank(),
        graph.ty(value).dtype,
        graph.value(value).name == "loss",
    );
    if named && rank == 0 && dtype == DType::F32 {
        return Ok(Seeds {
            seeds: vec![Seed {
                value,
                cotangent: None,
            }],
            loss,
        });
    }
    let mut b = loss_builder(graph);
    let mut scalar = b.cast(value, DType::F32)?;
    if rank > 0 {
        let shape = b.ints(&[]);
        scalar = b.emit(&ops::shape::RESHAPE, &[scalar, shape], Attrs::new())?;
    }
    if scalar == value {
        scalar = b.emit(&ops::shape::IDENTITY, &[value], Attrs::new())?;
    }
    if named {
        // The float32 scalar takes its place.
        graph.rename_value(value, "loss/own");
        let others = graph.outputs().iter().copied().filter(|v| *v != value);
        let others = others.collect();
        graph.set_outputs(others);
    }
    finish(graph, scalar, loss)
}

/// Names the scalar `loss` and puts it first among the outputs.
fn finish(graph: &mut Graph, scalar: ValueId, loss: Loss) -> Result<Seeds> {
    if graph.has_value_name("loss") && graph.value(scalar).name != "loss" {
        return Err(Error::model(
            "name",
            "the new output is called `loss`, but the model uses that name",
        )
        .help("use --loss output:loss if that is what you mean"));
    }
    graph.rename_value(scalar, "loss");
    let mut outputs = vec![scalar];
    outputs.extend_from_slice(graph.outputs());
    graph.set_outputs(outputs);
    Ok(Seeds {
        seeds: vec![Seed {
            value: scalar,
            cotangent: None,
        }],
        loss,
    })
}

fn mse(graph: &mut Graph, value: ValueId) -> Result<Seeds> {
    let ty = graph.ty(value).clone();
    let target = new_input(graph, "target", ty)?;
    let mut b = loss_builder(graph);
    let (y, t) = (b.cast(value, DType::F32)?, b.cast(target, DType::F32)?);
    let difference = b.sub(y, t)?;
    let square = b.mul(difference, difference)?;
    let attrs = Attrs::new()
        .with("keepdims", 0)
        .with("noop_with_empty_axes", 0);
    let scalar = b.emit(&ops::reduce::REDUCE_MEAN, &[square], attrs)?;
    finish(graph, scalar, Loss::Mse)
}

fn cross_entropy(graph: &mut Graph, logits: ValueId, shift: bool) -> Result<Seeds> {
    let ty = graph.ty(logits).clone();
    let classes = ty.dims[ty.rank() - 1].clone();
    let label_dims = ty.dims[..ty.rank() - 1].to_vec();
    let last = label_dims.len();
    let labels = new_input(graph, "labels", Ty::new(DType::I64, label_dims))?;
    let mut b = loss_builder(graph);
    let mut wanted = labels;
    if shift {
        // labels[.., 1:], with −100 where no next token is.
        let mut pads = vec![0i64; 2 * last];
        pads[2 * last - 1] = 1;
        let (pads, ignored) = (b.ints(&pads), b.int(-100));
        let padded = b.emit(&ops::concat::PAD, &[labels, pads, ignored], Attrs::new())?;
        let (one, end, axis) = (
            b.ints(&[1]),
            b.ints(&[i64::MAX]),
            b.ints(&[last as i64 - 1]),
        );
        wanted = b.emit(
            &ops::slice::SLICE,
            &[padded, one, end, axis, one],
            Attrs::new(),
        )?;
    }
    let scores = b.cast(logits, DType::F32)?;
    let width = match classes.as_const() {
        Some(n) => n,
        None => {
            return Err(
                Error::model("loss", "the number of classes is not a fixed size")
                    .found(format!("logits {ty}"))
                    .help("the class axis is the last one"),
            );
        }
    };
    let (matrix, vector) = (b.ints(&[-1, width]), b.ints(&[-1]));
    let scores = b.emit(&ops::shape::RESHAPE, &[scores, matrix], Attrs::new())?;
    let wanted = b.emit(&ops::shape::RESHAPE, &[wanted, vector], Attrs::new())?;
    let attrs = Attrs::new()
        .with("reduction", "mean")
        .with("ignore_index", -100);
    let ins = vec![Some(scores), Some(wanted)];
    let scalar = b.emit_n(&ops::loss::SOFTMAX_CROSS_ENTROPY_LOSS, ins, attrs, 1)?[0];
    finish(
        graph,
        scalar,
        if shift {
            Loss::CausalLm
        } else {
            Loss::CrossEntropy
        },
    )
}
