//! Appends or accepts a loss, and returns where the backward pass starts.
//!
//! In: `Typed`. Out: `Typed`, with nodes of role `Loss`. The result lists seeds: values and their cotangents. Losses are
//! computed in float32 whatever the logits are; `labels` and `target` are new graph inputs. The causal loss shifts the
//! labels, not the logits, because a shifted view of the logits would have to be copied before it can be flattened.

use crate::error::{Error, Result};
use crate::ir::{Attrs, DType, Graph, Role, Ty, ValueId};
use crate::ops;
use crate::ops::{Builder, EmitExt};
use std::fmt;

/// What is differentiated.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Loss {
    /// The model's only scalar float output; else `Vjp`.
    #[default]
    Auto,
    /// Next-token cross-entropy of logits `[.., seq, classes]`; `labels` is the token at each position, −100 is ignored.
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

/// The losses that one word names.
const WORDS: [(&str, Loss); 5] = [
    ("auto", Loss::Auto),
    ("causal-lm", Loss::CausalLm),
    ("cross-entropy", Loss::CrossEntropy),
    ("mse", Loss::Mse),
    ("vjp", Loss::Vjp),
];

impl Loss {
    /// Parses the value of `--loss`.
    ///
    /// # Errors
    /// A word that is no loss.
    pub fn parse(text: &str) -> Result<Loss> {
        let named = WORDS.into_iter().find(|(word, _)| *word == text);
        let output = || text.strip_prefix("output:").filter(|name| !name.is_empty());
        named
            .map(|(_, loss)| loss)
            .or_else(|| Some(Loss::Output(output()?.into())))
            .ok_or_else(|| {
                Error::usage("loss", format!("there is no loss `{text}`"))
                    .expected("causal-lm, cross-entropy, mse, output:NAME or vjp")
            })
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Loss::Output(name) = self {
            return write!(f, "output:{name}");
        }
        let named = WORDS.into_iter().find(|(_, loss)| loss == self);
        f.write_str(named.map_or("", |(word, _)| word))
    }
}

/// A value that the backward pass starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed {
    /// The value.
    pub value: ValueId,
    /// `None` stands for 1: the value is the scalar loss.
    pub cotangent: Option<ValueId>,
}

/// What the pass did.
#[derive(Clone, Debug)]
pub struct Seeds {
    /// The seeds of autodiff.
    pub seeds: Vec<Seed>,
    /// The loss that was added, with `Auto` resolved.
    pub loss: Loss,
}

impl Seeds {
    fn of_scalar(value: ValueId, loss: Loss) -> Seeds {
        let cotangent = None;
        Seeds {
            seeds: vec![Seed { value, cotangent }],
            loss,
        }
    }
}

/// Adds the loss to the graph.
///
/// # Errors
/// No output, or more than one, that the loss could apply to; a name the loss needs that is taken.
pub fn add_loss(graph: &mut Graph, loss: &Loss) -> Result<Seeds> {
    let outputs = graph.outputs().to_vec();
    let mut floats = outputs.clone();
    floats.retain(|v| graph.ty(*v).dtype.is_float());
    if floats.is_empty() {
        return Err(Error::model(
            "loss",
            "the model has no floating-point output to differentiate",
        ));
    }
    match loss {
        Loss::Auto => {
            let mut scalars = floats.iter().filter(|v| is_scalar(graph, **v));
            match (scalars.next(), scalars.next()) {
                (Some(one), None) => {
                    let name = graph.value(*one).name.clone();
                    scalar_loss(graph, *one, Loss::Output(name))
                }
                _ => add_loss(graph, &Loss::Vjp),
            }
        }
        Loss::Output(wanted) => {
            let name = |v: &ValueId| graph.value(*v).name.as_str();
            let Some(value) = outputs.iter().find(|v| name(v) == wanted).copied() else {
                let known: Vec<&str> = outputs.iter().map(name).collect();
                return Err(
                    Error::usage("loss", format!("the model has no output `{wanted}`"))
                        .found(format!("outputs {}", known.join(", "))),
                );
            };
            if !is_scalar(graph, value) || !graph.ty(value).dtype.is_float() {
                let what = format!("output `{wanted}` is not a floating-point scalar");
                return Err(Error::usage("loss", what).found(graph.ty(value).to_string()));
            }
            scalar_loss(graph, value, loss.clone())
        }
        Loss::Vjp => {
            let mut seeds = Vec::new();
            for value in floats {
                let name = format!("{}.cotangent", graph.value(value).name);
                let ty = graph.ty(value).clone();
                let cotangent = Some(new_input(graph, &name, ty)?);
                seeds.push(Seed { value, cotangent });
            }
            Ok(Seeds {
                seeds,
                loss: Loss::Vjp,
            })
        }
        Loss::Mse => {
            let value = only(graph, &floats, 0, loss)?;
            mse(graph, value)
        }
        Loss::CausalLm | Loss::CrossEntropy => {
            let rank = if *loss == Loss::CausalLm { 2 } else { 1 };
            let value = only(graph, &floats, rank, loss)?;
            cross_entropy(graph, value, loss)
        }
    }
}

fn is_scalar(graph: &Graph, value: ValueId) -> bool {
    graph.ty(value).elements().is_one()
}

/// Returns the one output with at least `rank` axes.
fn only(graph: &Graph, floats: &[ValueId], rank: usize, loss: &Loss) -> Result<ValueId> {
    let mut fit = floats.to_vec();
    fit.retain(|v| graph.ty(*v).rank() >= rank && (rank == 0 || !is_scalar(graph, *v)));
    if let [one] = fit[..] {
        return Ok(one);
    }
    let line = |v: &ValueId| format!("{}: {}", graph.value(*v).name, graph.ty(*v));
    let all: Vec<String> = floats.iter().map(line).collect();
    let count = fit.len();
    let what = format!("{loss} needs exactly one output it can apply to, {count} fit");
    Err(Error::usage("loss", what)
        .found(format!("outputs {}", all.join(", ")))
        .help("drop the others with --drop-output, or use --loss vjp"))
}

fn new_input(graph: &mut Graph, name: &str, ty: Ty) -> Result<ValueId> {
    if graph.has_value_name(name) {
        let what = format!("the loss needs an input `{name}`, but the model uses that name");
        return Err(Error::model("name", what).help("rename it in the export"));
    }
    Ok(graph.add_input(name, Some(ty)))
}

/// Returns a builder whose nodes belong to the loss.
fn loss_builder(graph: &mut Graph) -> Builder<'_> {
    let mut b = Builder::new(graph);
    b.role = Role::Loss;
    b.prefix = "loss".into();
    b
}

/// Makes `value` the output `loss`: a float32 scalar.
fn scalar_loss(graph: &mut Graph, value: ValueId, loss: Loss) -> Result<Seeds> {
    let (rank, dtype) = (graph.ty(value).rank(), graph.ty(value).dtype);
    let has_name = graph.value(value).name == "loss";
    if has_name && rank == 0 && dtype == DType::F32 {
        return Ok(Seeds::of_scalar(value, loss));
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
    if has_name {
        // The float32 scalar takes its place.
        graph.rename_value(value, "loss/own");
        let mut others = graph.outputs().to_vec();
        others.retain(|v| *v != value);
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
    graph.set_outputs([&[scalar][..], graph.outputs()].concat());
    Ok(Seeds::of_scalar(scalar, loss))
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

fn cross_entropy(graph: &mut Graph, logits: ValueId, loss: &Loss) -> Result<Seeds> {
    let ty = graph.ty(logits).clone();
    let classes = ty.dims[ty.rank() - 1].clone();
    let label_dims = ty.dims[..ty.rank() - 1].to_vec();
    let last = label_dims.len();
    let labels = new_input(graph, "labels", Ty::new(DType::I64, label_dims))?;
    let mut b = loss_builder(graph);
    let mut wanted = labels;
    if *loss == Loss::CausalLm {
        // labels[.., 1:], with −100 where there is no next token.
        let mut pads = vec![0i64; 2 * last];
        pads[2 * last - 1] = 1;
        let (pads, ignored) = (b.ints(&pads), b.int(-100));
        let padded = b.emit(&ops::concat::PAD, &[labels, pads, ignored], Attrs::new())?;
        let (one, end) = (b.ints(&[1]), b.ints(&[i64::MAX]));
        let axis = b.ints(&[last as i64 - 1]);
        let operands = [padded, one, end, axis, one];
        wanted = b.emit(&ops::slice::SLICE, &operands, Attrs::new())?;
    }
    let scores = b.cast(logits, DType::F32)?;
    let Some(width) = classes.as_const() else {
        return Err(
            Error::model("loss", "the number of classes is not a fixed size")
                .found(format!("logits {ty}"))
                .help("the class axis is the last one"),
        );
    };
    let (matrix, vector) = (b.ints(&[-1, width]), b.ints(&[-1]));
    let scores = b.emit(&ops::shape::RESHAPE, &[scores, matrix], Attrs::new())?;
    let wanted = b.emit(&ops::shape::RESHAPE, &[wanted, vector], Attrs::new())?;
    let attrs = Attrs::new()
        .with("reduction", "mean")
        .with("ignore_index", -100);
    let ins = vec![Some(scores), Some(wanted)];
    let scalar = b.emit_n(&ops::loss::SOFTMAX_CROSS_ENTROPY_LOSS, ins, attrs, 1)?[0];
    finish(graph, scalar, loss.clone())
}
