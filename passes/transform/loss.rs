//! Appends or accepts a loss, and returns where the backward pass starts.
//!
//! In: `Typed`. Out: `Typed`, with nodes of role `Loss`. The result lists seeds: values and their cotangents. Losses are
//! computed in float32 whatever the logits are; `labels` and `target` are new graph inputs. The causal loss shifts the
//! labels, not the logits, because a shifted view of the logits would have to be copied before it can be flattened.
//!
//! A loss over classes takes the one output that fits, or the one that comes out of the head ([`class_scores`]). What its
//! shape or its maker shows to be senseless is refused; what may be meant gets a warning.

use crate::analysis::class_scores::{Normalized, heads, is_read, normalized};
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
    /// Negative log-likelihood of log-probabilities `[.., classes]` against `labels`; −100 is ignored.
    Nll,
    /// Mean squared error against `target`.
    Mse,
    /// An output of the model that is a scalar already.
    Output(String),
    /// Vector-Jacobian product: every float output gets an input `<output>.cotangent`.
    Vjp,
}

/// The losses that one word names.
const WORDS: [(&str, Loss); 6] = [
    ("auto", Loss::Auto),
    ("causal-lm", Loss::CausalLm),
    ("cross-entropy", Loss::CrossEntropy),
    ("nll", Loss::Nll),
    ("mse", Loss::Mse),
    ("vjp", Loss::Vjp),
];

const EXPECTED: &str = "causal-lm, cross-entropy, nll, mse, vjp or the name of a scalar output";

impl Loss {
    /// Parses the value of `--loss`. A word that is no loss is the name of an output, with or without `output:`.
    ///
    /// # Errors
    /// An empty name.
    pub fn parse(text: &str) -> Result<Loss> {
        let named = WORDS.into_iter().find(|(word, _)| *word == text);
        match (named, text.strip_prefix("output:").unwrap_or(text)) {
            (Some((_, loss)), _) => Ok(loss),
            (None, "") => Err(Error::usage("loss", "the loss has no name").expected(EXPECTED)),
            (None, name) => Ok(Loss::Output(name.into())),
        }
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
    /// What may not be meant.
    pub warnings: Vec<String>,
}

impl Seeds {
    fn of_scalar(value: ValueId, loss: Loss) -> Seeds {
        let cotangent = None;
        Seeds {
            seeds: vec![Seed { value, cotangent }],
            loss,
            warnings: Vec::new(),
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
                return Err(Error::usage(
                    "loss",
                    format!("`{wanted}` is no loss, and no output of the model"),
                )
                .expected(EXPECTED)
                .found(format!("outputs {}", known.join(", "))));
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
                warnings: Vec::new(),
            })
        }
        Loss::Mse => match floats[..] {
            [value] => mse(graph, value),
            _ => Err(ambiguous(graph, &floats, floats.len(), loss)),
        },
        Loss::CausalLm | Loss::CrossEntropy | Loss::Nll => {
            let value = class_scores(graph, &floats, loss)?;
            let warnings = doubts(graph, value, &floats, loss)?;
            let seeds = class_loss(graph, value, loss)?;
            Ok(Seeds { warnings, ..seeds })
        }
    }
}

impl Loss {
    /// Returns whether it is a loss of scores of classes against labels.
    pub fn is_of_classes(&self) -> bool {
        matches!(self, Loss::CausalLm | Loss::CrossEntropy | Loss::Nll)
    }

    /// Returns the fewest axes of the scores, and their names.
    fn axes(&self) -> (usize, &'static str) {
        match self {
            Loss::CausalLm => (3, "[batch, sequence, classes]"),
            _ => (1, "[.., classes]"),
        }
    }
}

fn is_scalar(graph: &Graph, value: ValueId) -> bool {
    graph.ty(value).elements().is_one()
}

/// Returns the error for a loss that several outputs, or none, fit.
fn ambiguous(graph: &Graph, floats: &[ValueId], count: usize, loss: &Loss) -> Box<Error> {
    let line = |v: &ValueId| format!("{}: {}", graph.value(*v).name, graph.ty(*v));
    let all: Vec<String> = floats.iter().map(line).collect();
    let what = format!("{loss} needs exactly one output it can apply to, {count} fit");
    let error = Error::usage("loss", what).found(format!("outputs {}", all.join(", ")));
    let (rank, axes) = loss.axes();
    match (count, loss.is_of_classes()) {
        (0, true) if *loss == Loss::CausalLm && floats.iter().any(|v| graph.ty(*v).rank() >= 2) => {
            error
                .expected(format!(
                    "scores {axes}: at least {rank} axes, one of them the sequence"
                ))
                .help("use --loss cross-entropy for one label a row")
        }
        (0, true) => error
            .expected(format!("scores {axes}"))
            .help("use --loss vjp, or mse"),
        _ => error.help("drop the others with --drop-output, or use --loss vjp"),
    }
}

/// Returns the output of scores: the only one that fits, else the one that comes out of the head, else the only one that
/// nothing else reads.
fn class_scores(graph: &Graph, floats: &[ValueId], loss: &Loss) -> Result<ValueId> {
    let fit = fitting(graph, floats, loss);
    let mut unread = fit.clone();
    unread.retain(|v| !is_read(graph, *v));
    for found in [&fit, &heads(graph, &fit), &unread] {
        if let [one] = found[..] {
            return Ok(one);
        }
    }
    Err(ambiguous(graph, floats, fit.len(), loss))
}

/// Returns the outputs whose shape fits scores; of log-probabilities those that a log-softmax makes, if it makes some.
fn fitting(graph: &Graph, floats: &[ValueId], loss: &Loss) -> Vec<ValueId> {
    let mut fit = floats.to_vec();
    fit.retain(|v| graph.ty(*v).rank() >= loss.axes().0 && !is_scalar(graph, *v));
    let is_log = |v: &ValueId| normalized(graph, *v) == Some(Normalized::LogSoftmax);
    if *loss == Loss::Nll && fit.iter().any(is_log) {
        fit.retain(is_log);
    }
    fit
}

/// Returns the one output that comes out of the head, whether or not it stays an output.
pub fn head(graph: &Graph, loss: &Loss) -> Option<ValueId> {
    let mut floats = graph.outputs().to_vec();
    floats.retain(|v| graph.ty(*v).dtype.is_float());
    match heads(graph, &fitting(graph, &floats, loss))[..] {
        [one] if loss.is_of_classes() => Some(one),
        _ => None,
    }
}

/// Returns what may not be meant by a loss of these scores.
///
/// # Errors
/// A loss that no data can make sense of.
fn doubts(graph: &Graph, scores: ValueId, floats: &[ValueId], loss: &Loss) -> Result<Vec<String>> {
    let (name, ty) = (&graph.value(scores).name, graph.ty(scores));
    let classes = &ty.dims[ty.rank() - 1];
    if classes.is_one() {
        let what =
            format!("`{name}` scores one class: its {loss} is 0 whatever the model computes");
        return Err(Error::usage("loss", what)
            .found(ty.to_string())
            .help("use --loss mse, or a loss in the model and --loss output:NAME"));
    }
    let mut doubts = Vec::new();
    if fitting(graph, floats, loss).len() > 1 {
        doubts.push(format!("the loss {loss} is of output `{name}`: {ty}"));
    }
    match (normalized(graph, scores), *loss == Loss::Nll) {
        (Some(Normalized::Softmax), true) => {
            let what = format!("nll takes log-probabilities, and a softmax makes `{name}`");
            return Err(Error::usage("loss", what)
                .expected("the output of a log-softmax")
                .help("export the scores before the softmax and use --loss cross-entropy, or log_softmax instead of softmax"));
        }
        (Some(Normalized::Softmax), false) => doubts.push(format!(
            "{loss} takes the softmax of `{name}`, which a softmax makes already: gradients vanish. Export the scores before it, or their log_softmax with --loss nll"
        )),
        (Some(Normalized::LogSoftmax), false) => doubts.push(format!(
            "{loss} takes the log-softmax of `{name}`, which a log-softmax makes already: the same numbers, computed twice. Use --loss nll"
        )),
        (None, true) => doubts.push(format!(
            "nll takes log-probabilities, and no log-softmax makes `{name}`: if these are scores, use --loss cross-entropy"
        )),
        (Some(Normalized::LogSoftmax), true) | (None, false) => {}
    }
    Ok(doubts)
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

fn class_loss(graph: &mut Graph, logits: ValueId, loss: &Loss) -> Result<Seeds> {
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
    let op = match loss {
        Loss::Nll => &ops::loss::NEGATIVE_LOG_LIKELIHOOD_LOSS,
        _ => &ops::loss::SOFTMAX_CROSS_ENTROPY_LOSS,
    };
    let scalar = b.emit_n(op, ins, attrs, 1)?[0];
    finish(graph, scalar, loss.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text;

    fn warnings(maker: &str, loss: &Loss) -> Vec<String> {
        let source = format!(
            "graph @g typed (%x: f32[n, 4]) -> (%y) {{
  init %w : f32[4, 10] = splat 0.5
  %s = MatMul %x, %w : f32[n, 10]
  %y = {maker} %s : f32[n, 10]
}}
"
        );
        let mut graph = text::parse(&source).unwrap();
        add_loss(&mut graph, loss).unwrap().warnings
    }

    #[test]
    fn a_loss_of_what_a_softmax_made_is_told() {
        let doubt = |maker: &str, loss: Loss| warnings(maker, &loss).join("; ");
        let vanishing = doubt("Softmax", Loss::CrossEntropy);
        assert!(vanishing.contains("gradients vanish") && vanishing.contains("--loss nll"));
        assert!(doubt("LogSoftmax", Loss::CrossEntropy).contains("--loss nll"));
        assert!(doubt("Tanh", Loss::Nll).contains("--loss cross-entropy"));
        assert_eq!(doubt("Tanh", Loss::CrossEntropy), "");
        assert_eq!(doubt("LogSoftmax", Loss::Nll), "");
    }

    #[test]
    fn a_softmax_over_another_axis_makes_no_probabilities() {
        let doubt = warnings("Softmax", &Loss::CrossEntropy);
        assert_eq!(doubt.len(), 1);
        let source = "graph @g typed (%x: f32[n, 10]) -> (%y) {
  %y = Softmax %x {axis = 0} : f32[n, 10]
}
";
        let mut graph = text::parse(source).unwrap();
        let seeds = add_loss(&mut graph, &Loss::CrossEntropy).unwrap();
        assert!(seeds.warnings.is_empty());
    }
}
