//! Checks that two graphs compute the same values, by running both on the same inputs.
//!
//! Two forward graphs, or two training graphs, are compared output by output. A training graph is compared with the forward
//! graph that it was made from in two ways:
//! - With the forward graph differentiated by the record in the training graph, without a plan. Equality of all bits proves
//!   that the plan changed nothing.
//! - Where ops were fused or tiled, which rounds differently: with the forward graph as it was exported, differentiated
//!   without either, within a stated tolerance.
//!
//! All run in our runtime, on one device, with the same threads and at the same sizes: those that the training graph was
//! planned for, unless others are given.

use crate::comparison::{Pair, PairRequest};
use crate::measure::at_sizes;
use crate::provenance::keys;
use crate::tensors::compare::{Comparison, Difference, Tolerance, compare};
use crate::tensors::feed::Feed;
use crate::tensors::{Tensors, random};
use ckpt_passes::analysis::sdpa::choice::AttentionKernels;
use ckpt_passes::error::Kind;
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::ops::blockwise::numbers;
use ckpt_passes::transform::optimizer::UPDATED;
use ckpt_passes::transform::widen::{wide_tensor, widened};
use ckpt_passes::{Error, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Tolerance for rounding in float32 and float64: relative to the largest element of the tensor, and to the largest element
/// of all tensors.
pub const ROUNDING: (f64, f64) = (1e-5, 1e-7);

/// A graph with 16-bit numbers is compared with float64. Its largest error in a tensor may be so many times that of the other
/// graph, and so many units in the last place of the tensor's largest element more: the largest of few errors is chance.
pub const HALF: (f64, f64) = (1.1, 4.0);

/// One of the graphs, and the memory of its run.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    /// Hash of the file, without weights in other files.
    pub sha256: String,
    /// Peak that the memory plan predicts, static bytes included.
    pub predicted_peak_bytes: u64,
    /// Measured; 0 where the device does not report it.
    pub peak_bytes: u64,
    /// Bytes that are resident throughout: weights, constants and inputs.
    pub static_bytes: u64,
    /// The kernels of its attention nodes.
    pub attention: AttentionKernels,
}

/// What the outputs of B were compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Against {
    /// Those of A, as it is.
    A,
    /// Those of A, differentiated as B records, with the same ops fused and tiled, without a plan.
    Unplanned,
    /// Those of A as it was exported, differentiated with nothing fused or tiled, without a plan.
    Exported,
}

impl Against {
    fn words(self) -> &'static str {
        match self {
            Against::A => "A",
            Against::Unplanned => "the same graph without a plan",
            Against::Exported => "the model as exported: not planned, not fused, not tiled",
        }
    }
}

/// The largest difference, as a share of what is allowed.
#[derive(Clone, Debug, Serialize)]
pub struct Largest {
    /// The output.
    pub name: String,
    /// The elements.
    #[serde(flatten)]
    pub at: Difference,
    /// The difference of the two.
    pub difference: f64,
    /// What is allowed there.
    pub allowed: f64,
}

/// The comparison of B's outputs with those of one other graph.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// The other graph.
    pub against: Against,
    /// Whether both have the same outputs, and each agrees within what `by` allows.
    pub agrees: bool,
    /// `bits`, `tolerance` (as requested), or `rounding` (if only one of the two was fused or tiled).
    pub by: &'static str,
    /// Tolerance as requested; zeros where none was given.
    pub tolerance: Tolerance,
    /// Tolerance for rounding, in words; `None` unless `by` is `rounding`.
    pub rounding: Option<String>,
    /// The difference that is nearest to its tolerance or farthest beyond it; `None` where all bits are equal.
    pub largest: Option<Largest>,
    /// Elements that are NaN in the other graph. Where `by` is `rounding`, they are not compared.
    pub undefined: u64,
    /// Outputs of the other graph that B does not have.
    pub missing: Vec<String>,
    /// Outputs of B that the other graph does not have.
    pub unknown: Vec<String>,
    /// One comparison for each output that both graphs have.
    pub outputs: Vec<Comparison>,
}

/// What was compared, and the result. `verify` writes it as JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Certificate {
    /// Path of graph A.
    pub a: String,
    /// Path of graph B.
    pub b: String,
    /// The runs of A and B, and of A as exported where that is a third.
    pub runs: Vec<Ran>,
    /// `forward`, `training`, or `gradients` where A was differentiated for the comparison.
    pub kind: &'static str,
    /// Whether every comparison agrees.
    pub equal: bool,
    /// The first comparison.
    #[serde(flatten)]
    pub compared: Compared,
    /// The comparison with the model as exported, where the first one is with ops fused or tiled.
    pub exported: Option<Compared>,
    /// The loss for which A was differentiated; `None` unless `kind` is `gradients`.
    pub loss: Option<String>,
    /// Sizes of all runs.
    pub dims: BTreeMap<String, i64>,
    /// Inputs that were generated from the seed.
    pub made_inputs: Vec<String>,
    /// Seed of the inputs in `made_inputs`.
    pub seed: u64,
    /// Device on which the graphs ran.
    pub device: String,
    /// Number of threads as requested; `None` for libtorch's own choice.
    pub threads: Option<u16>,
    /// The source of random numbers.
    pub rng: String,
    /// Version of ckpt-opt that compared the graphs.
    pub version: &'static str,
    /// Warnings about the files and their inputs, about attention kernels that were not used, and about comparisons that
    /// could not be made.
    pub warnings: Vec<String>,
}

/// Runs and compares two graphs. The certificate reports a difference; it is no error here. Without a tolerance, bits must be
/// equal, and outputs that were rounded differently within [`ROUNDING`].
///
/// # Errors
/// Graphs that cannot be compared or run.
pub fn verify(request: &PairRequest, tolerance: Option<Tolerance>) -> Result<Certificate> {
    let tensors = request.tensors()?;
    let mut pair = Pair::load(&request.a, &request.b, &tensors)?;
    let mut warnings = std::mem::take(&mut pair.warnings);
    let mut feed = Feed::new(&pair.b, tensors)?;
    warnings.append(&mut feed.notes);
    let made_inputs: Vec<String> = feed
        .missing(&pair.b)
        .iter()
        .map(|(n, _)| n.to_string())
        .collect();
    let binding = random::fill(&pair.b, &mut feed, &request.dims, request.seed)?;
    let run = |graph: &Graph, path: &Path| run(request, &feed, graph, path);
    let (left, ran_a, mut refused) = run(&pair.a, &request.a)?;
    let (right, ran_b, also) = run(&pair.b, &request.b)?;
    refused.extend(also);
    let mut runs = vec![ran_a, ran_b];
    let exported = pair.exported()?;
    let made = |graph: &Graph| {
        [keys::FUSE, keys::TILE, keys::TILE_MLP, keys::TILE_SEQUENCE]
            .map(|key| graph.meta.get(key).cloned())
    };
    let measure = match (tolerance, pair.kind) {
        (Some(tolerance), _) => Measure::Given(tolerance),
        (None, "training") if made(&pair.a) != made(&pair.b) => {
            Measure::rounding(request, &feed, &pair.a)?
        }
        (None, _) => Measure::Given(Tolerance::default()),
    };
    let against = match (pair.kind, &exported) {
        ("gradients", Some(_)) => Against::Unplanned,
        ("gradients", None) => Against::Exported,
        _ => Against::A,
    };
    let compared = Compared::new(against, &left, &right, &measure)?;
    drop(left);
    let with_exported = |graph: Graph| -> Result<(Compared, Ran, Vec<String>)> {
        let (values, ran, also) = run(&graph, &request.a)?;
        let measure = match tolerance {
            Some(given) if !given.is_exact() => Measure::Given(given),
            _ => Measure::rounding(request, &feed, &graph)?,
        };
        let compared = Compared::new(Against::Exported, &values, &right, &measure)?;
        Ok((compared, ran, also))
    };
    let exported = match exported.map(with_exported).transpose() {
        Ok(None) => None,
        Ok(Some((compared, ran, also))) => {
            refused.extend(also);
            runs.push(ran);
            Some(compared)
        }
        // Tiling may be why the planned graph fits at all.
        Err(e) if e.kind() == Kind::Environment => {
            let other = Against::Exported.words();
            warnings.push(format!("not compared with {other}: {}", e.message()));
            None
        }
        Err(e) => return Err(e),
    };
    warnings.extend(refused);
    Ok(Certificate {
        a: request.a.display().to_string(),
        b: request.b.display().to_string(),
        runs,
        kind: pair.kind,
        equal: compared.agrees && exported.as_ref().is_none_or(|c| c.agrees),
        compared,
        exported,
        loss: pair.loss,
        dims: binding
            .iter()
            .map(|(n, size)| (n.to_string(), size))
            .collect(),
        made_inputs,
        seed: request.seed,
        device: request.place.to_string(),
        threads: request.threads,
        rng: request.rng.to_string(),
        version: env!("CARGO_PKG_VERSION"),
        warnings,
    })
}

/// Runs one graph. Returns its outputs, its memory, and why attention kernels were not used.
fn run(
    request: &PairRequest,
    feed: &Feed,
    graph: &Graph,
    path: &Path,
) -> Result<(Tensors, Ran, Vec<String>)> {
    // All graphs must read the same inputs.
    let unknown = graph
        .inputs()
        .iter()
        .map(|v| &graph.value(*v).name)
        .find(|n| !feed.inputs.contains_key(*n));
    if let Some(name) = unknown {
        return Err(Error::verification(
            "verify",
            format!("A has an input `{name}` that B does not have"),
        )
        .at(path.display().to_string()));
    }
    let graph = request.on_device(graph)?;
    let session = request.open(&graph, &feed.weights)?;
    let done = session
        .run(&feed.inputs)
        .map_err(|e| e.at(path.display().to_string()))?;
    if done.nondeterministic.is_empty() {
        let ran = Ran {
            sha256: sha256(path)?,
            predicted_peak_bytes: done.predicted_peak_bytes,
            peak_bytes: done.peak_bytes,
            static_bytes: done.static_bytes,
            attention: done.attention,
        };
        let refused = done.attention_refused.into_iter().collect();
        return Ok((done.outputs, ran, refused));
    }
    let ops: Vec<&str> = done.nondeterministic.into_iter().collect();
    Err(Error::usage(
        "nondeterministic",
        format!(
            "{} cannot prove anything about these ops: it has no deterministic kernel for them",
            request.place
        ),
    )
    .at(path.display().to_string())
    .found(ops.join(", "))
    .help("verify on the CPU: --device cpu"))
}

/// Returns the hash of a file in hexadecimal digits.
fn sha256(path: &Path) -> Result<String> {
    let unread = |e: std::io::Error| {
        Error::usage("file", format!("cannot read the file: {e}")).at(path.display().to_string())
    };
    let mut hash = Sha256::new();
    let mut file = std::fs::File::open(path).map_err(unread)?;
    std::io::copy(&mut file, &mut hash).map_err(unread)?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Returns the largest magnitude of a tensor's finite elements.
fn largest(tensor: &Tensor) -> f64 {
    let elements = (0..tensor.elements() as usize).filter_map(|i| tensor.get_f64(i));
    elements
        .map(f64::abs)
        .filter(|x| x.is_finite())
        .fold(0.0, f64::max)
}

/// What differences are allowed.
enum Measure {
    Given(Tolerance),
    /// Those of rounding.
    Rounding(Option<Truth>),
}

/// What a graph with 16-bit numbers gives in float64.
struct Truth {
    values: Tensors,
    /// The unit in the last place of 1 in its coarsest type.
    unit: f64,
}

impl Measure {
    /// Returns the measure for what is rounded otherwise than in `graph`.
    fn rounding(request: &PairRequest, feed: &Feed, graph: &Graph) -> Result<Measure> {
        let unit = |dtype: DType| match dtype {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => 0.0,
        };
        let types = graph.values().map(|(_, value)| value.ty().dtype);
        let unit = types.map(unit).fold(0.0, f64::max);
        if unit == 0.0 {
            return Ok(Measure::Rounding(None));
        }
        let wide = widened(graph)?;
        let tensors = |list: &Tensors| -> Result<Tensors> {
            let wide = |(name, t): (&String, &Tensor)| Ok((name.clone(), wide_tensor(name, t)?));
            list.iter().map(wide).collect()
        };
        let session = request.open(&wide, &tensors(&feed.weights)?)?;
        let values = session.run(&tensors(&feed.inputs)?)?.outputs;
        Ok(Measure::Rounding(Some(Truth { values, unit })))
    }

    fn words(&self) -> Option<String> {
        let (own, all) = ROUNDING;
        match self {
            Measure::Given(_) => None,
            Measure::Rounding(None) => Some(format!(
                "{own:e} of the tensor's largest element and {all:e} of the largest of all"
            )),
            Measure::Rounding(Some(_)) => {
                let (factor, units) = HALF;
                Some(format!(
                    "against float64 {factor} times the error of the other graph, and {units} units in the last place of the tensor's largest element"
                ))
            }
        }
    }

    /// Compares an output of B with that of the other graph. Returns what is allowed too. `of_all` is the largest element of
    /// all outputs.
    fn compare(
        &self,
        name: &str,
        a: &Tensor,
        b: &Tensor,
        of_all: f64,
    ) -> Result<(Comparison, Tolerance)> {
        let (reference, found, tolerance) = match self {
            Measure::Given(tolerance) => return Ok((compare(name, a, b, *tolerance), *tolerance)),
            // Rounding may move a number to the other side of the bound between two codes.
            Measure::Rounding(_) if is_codes(name, a) => {
                (decoded(name, a), decoded(name, b), LARGEST_STEP)
            }
            Measure::Rounding(truth) => {
                let truth = truth
                    .as_ref()
                    .and_then(|t| Some((t.values.get(name)?, t.unit)));
                match truth.filter(|_| a.dtype == b.dtype) {
                    None => {
                        let atol = ROUNDING.0 * largest(a) + ROUNDING.1 * of_all;
                        (a.clone(), b.clone(), atol)
                    }
                    Some((exact, unit)) => {
                        let other = wide_tensor(name, a)?;
                        let error = compare(name, exact, &other, Tolerance::default());
                        let atol =
                            HALF.0 * error.max_abs_difference + HALF.1 * unit * largest(exact);
                        (exact.clone(), wide_tensor(name, b)?, atol)
                    }
                }
            }
        };
        let tolerance = Tolerance {
            rtol: 0.0,
            atol: tolerance,
        };
        let found = with_undefined(&reference, found);
        Ok((compare(name, &reference, &found, tolerance), tolerance))
    }
}

/// The largest difference of numbers that neighbouring codes stand for, and a little for rounding.
const LARGEST_STEP: f64 = 0.9 / 64.0 + 1e-6;

/// Returns the numbers that codes stand for, as shares of their scales.
fn decoded(name: &str, codes: &Tensor) -> Tensor {
    let is_square = name.trim_end_matches(UPDATED).ends_with("_sq");
    let numbers = numbers(if is_square { 2 } else { 1 });
    let of = |code: &u8| f64::from(numbers[usize::from(*code)]);
    match codes.bytes() {
        Some(bytes) => Tensor::rounded(DType::F32, &codes.dims, bytes.iter().map(of)),
        None => codes.clone(),
    }
}

/// Returns true for an 8-bit state of an optimizer.
fn is_codes(name: &str, tensor: &Tensor) -> bool {
    tensor.dtype == DType::U8 && name.ends_with(UPDATED)
}

/// Returns the indices of the elements that are NaN, in row-major order.
fn undefined(tensor: &Tensor) -> impl Iterator<Item = usize> + '_ {
    let is_nan = |i: &usize| tensor.get_f64(*i).is_some_and(f64::is_nan);
    (0..tensor.elements() as usize).filter(is_nan)
}

/// Returns `found` with the reference's NaNs. A fused op is defined where the ops that it replaces divide 0 by 0, such as a
/// softmax of a row that is masked as a whole: there is nothing to compare with.
fn with_undefined(reference: &Tensor, found: Tensor) -> Tensor {
    let size = reference.dtype.size_bytes() as usize;
    let (Some(from), Some(to)) = (reference.bytes(), found.bytes()) else {
        return found;
    };
    let mut at = undefined(reference).peekable();
    if at.peek().is_none() || reference.dtype != found.dtype || reference.dims != found.dims {
        return found;
    }
    let mut bytes = to.to_vec();
    for i in at {
        let element = i * size..(i + 1) * size;
        bytes[element.clone()].copy_from_slice(&from[element]);
    }
    Tensor::new(found.dtype, found.dims.clone(), bytes)
}

impl Compared {
    fn new(
        against: Against,
        left: &Tensors,
        right: &Tensors,
        measure: &Measure,
    ) -> Result<Compared> {
        let only = |x: &Tensors, y: &Tensors| {
            x.keys()
                .filter(|n| !y.contains_key(*n))
                .cloned()
                .collect::<Vec<String>>()
        };
        let of_all = match measure {
            Measure::Rounding(_) => {
                let numbers = left.iter().filter(|(name, t)| !is_codes(name, t));
                numbers.map(|(_, t)| largest(t)).fold(0.0, f64::max)
            }
            Measure::Given(_) => 0.0,
        };
        let (mut outputs, mut nearest): (Vec<Comparison>, Option<(f64, Largest)>) = (vec![], None);
        for (name, b) in right {
            let Some(a) = left.get(name) else { continue };
            let (compared, tolerance) = measure.compare(name, a, b, of_all)?;
            let is_told = !(is_codes(name, b) && matches!(measure, Measure::Rounding(_)));
            if let Some(at) = compared.largest.as_ref().filter(|_| is_told) {
                let difference = compared.max_abs_difference;
                let allowed = tolerance.atol + tolerance.rtol * at.a.abs();
                let share = difference / allowed;
                if nearest.as_ref().is_none_or(|(most, _)| share > *most) {
                    let found = Largest {
                        name: name.clone(),
                        at: at.clone(),
                        difference,
                        allowed,
                    };
                    nearest = Some((share, found));
                }
            }
            outputs.push(compared);
        }
        let (missing, unknown) = (only(left, right), only(right, left));
        let (by, tolerance) = match measure {
            Measure::Rounding(_) => ("rounding", Tolerance::default()),
            Measure::Given(tolerance) if tolerance.is_exact() => ("bits", *tolerance),
            Measure::Given(tolerance) => ("tolerance", *tolerance),
        };
        Ok(Compared {
            against,
            agrees: missing.is_empty() && unknown.is_empty() && outputs.iter().all(|c| c.equal),
            by,
            tolerance,
            rounding: measure.words(),
            largest: nearest.map(|(_, largest)| largest),
            undefined: left.values().map(|t| undefined(t).count() as u64).sum(),
            missing,
            unknown,
            outputs,
        })
    }

    /// Returns an error that names the first difference, if there is one.
    fn judge(&self, place: String) -> Result<()> {
        if self.agrees {
            return Ok(());
        }
        let list = |names: &[String]| names.join(", ");
        if !self.missing.is_empty() || !self.unknown.is_empty() {
            let what = "the graphs do not have the same outputs";
            return Err(Error::verification("verify", what).at(place).found(format!(
                "only in A: [{}]; only in B: [{}]",
                list(&self.missing),
                list(&self.unknown)
            )));
        }
        let wrong: Vec<&Comparison> = self.outputs.iter().filter(|c| !c.equal).collect();
        let Some(first) = wrong.first() else {
            return Err(Error::bug("verify", "a difference without a place"));
        };
        let head = format!(
            "{} of {} outputs differ, first `{}`",
            wrong.len(),
            self.outputs.len(),
            first.name
        );
        let mut error = Error::verification("verify", head).at(place);
        if self.against != Against::A {
            error = error.at(format!("compared with {}", self.against.words()));
        }
        if let Some(rounding) = &self.rounding {
            error = error.expected(format!("differences within {rounding}"));
        }
        Err(match (&first.types, &first.first) {
            (Some((a, b)), _) => error.expected(a.clone()).found(b.clone()),
            (None, Some(d)) => {
                error
                    .expected(format!("{:e} at {:?}", d.a, d.index))
                    .found(format!(
                        "{:e}; {} of {} elements differ, by {:e} at most",
                        d.b, first.different, first.elements, first.max_abs_difference
                    ))
            }
            (None, None) => error,
        })
    }

    /// Formats the result as one line.
    fn human(&self) -> String {
        let other = self.against.words();
        let how = match self.by {
            "bits" => return format!("equal bit for bit to {other}\n"),
            how => format!("equal within {how} to {other}"),
        };
        let left_out = match self.undefined {
            0 => String::new(),
            n => format!("    {n} values are NaN there and were not compared\n"),
        };
        let Some(at) = &self.largest else {
            return format!("{how}; no bit differs\n{left_out}");
        };
        let allowed = match &self.rounding {
            Some(words) => format!("{:.1e} is allowed: {words}", at.allowed),
            None => format!("{:.1e} is allowed", at.allowed),
        };
        format!(
            "{how}\n    the largest difference is {:.1e}, in {} at {:?} ({allowed})\n{left_out}",
            at.difference, at.name, at.at.index
        )
    }
}

impl Certificate {
    /// Returns an error that names the first difference, if there is one.
    ///
    /// # Errors
    /// Kind `Verification` unless everything is equal.
    pub fn judge(&self) -> Result<()> {
        let place = || format!("{} against {}", self.b, self.a);
        let all = [Some(&self.compared), self.exported.as_ref()];
        all.into_iter().flatten().try_for_each(|c| c.judge(place()))
    }

    /// Formats the result: what was compared, then one line for each comparison.
    pub fn human(&self) -> String {
        let outputs = &self.compared.outputs;
        let elements: u64 = outputs.iter().map(|c| c.elements).sum();
        let what = match &self.loss {
            Some(loss) => format!("gradients and outputs (loss {loss})"),
            None => format!("{} outputs", self.kind),
        };
        let mut out = format!(
            "{what}: {} tensors, {elements} values{}\n",
            outputs.len(),
            at_sizes(&self.dims)
        );
        for compared in [Some(&self.compared), self.exported.as_ref()]
            .into_iter()
            .flatten()
        {
            out.push_str("  ");
            out.push_str(&compared.human());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = Tensor::new(DType::F32, [values.len() as u64], bytes);
        [("g".to_string(), tensor)].into()
    }

    fn compared(left: &[f32], right: &[f32], measure: &Measure) -> Compared {
        let (left, right) = (floats(left), floats(right));
        Compared::new(Against::Exported, &left, &right, measure).unwrap()
    }

    #[test]
    fn a_code_may_be_its_neighbour_where_gradients_are_rounded_otherwise() {
        let codes = |x: u8, name: &str| -> Tensors {
            let codes = Tensor::new(DType::U8, [2], vec![x, 255]);
            [(name.to_string(), codes)].into_iter().collect()
        };
        let agrees = |x: u8, name: &str, measure: &Measure| {
            let against = Against::Exported;
            let compared = Compared::new(against, &codes(7, name), &codes(x, name), measure);
            compared.unwrap().agrees
        };
        let rounding = Measure::Rounding(None);
        assert!(agrees(8, "w.exp_avg.updated", &rounding));
        assert!(!agrees(11, "w.exp_avg.updated", &rounding));
        assert!(!agrees(8, "image", &rounding));
        let bits = Measure::Given(Tolerance::default());
        assert!(!agrees(8, "w.exp_avg.updated", &bits));
    }

    #[test]
    fn rounding_is_told_from_a_difference() {
        let rounding = Measure::Rounding(None);
        let near = compared(&[1.0, 100.0], &[1.0, 100.0005], &rounding);
        let largest = near.largest.unwrap();
        assert!(near.agrees && largest.difference < largest.allowed);
        assert_eq!(largest.at.index, [1]);
        let far = compared(&[1.0, 100.0], &[1.01, 100.0], &rounding);
        assert!(!far.agrees && far.largest.unwrap().at.index == [0]);
    }

    #[test]
    fn what_is_undefined_is_counted_and_left_out() {
        let rounding = Measure::Rounding(None);
        let nan = compared(&[f32::NAN, 2.0], &[1.0, 2.0], &rounding);
        assert_eq!((nan.agrees, nan.undefined), (true, 1));
        assert!(nan.human().contains("1 values are NaN"));
        let ours = compared(&[1.0, 2.0], &[f32::NAN, 2.0], &rounding);
        assert_eq!((ours.agrees, ours.undefined), (false, 0));
        let bits = Measure::Given(Tolerance::default());
        assert!(!compared(&[f32::NAN, 2.0], &[1.0, 2.0], &bits).agrees);
    }

    #[test]
    fn sixteen_bits_are_measured_by_their_error() {
        let exact = Tensor::new(
            DType::F64,
            [2],
            [1.0f64, 3.0].map(f64::to_le_bytes).concat(),
        );
        let half = |a: f32, b: f32| -> Tensors {
            let bytes = [a, b]
                .map(|x| half::bf16::from_f32(x).to_le_bytes())
                .concat();
            [("g".to_string(), Tensor::new(DType::BF16, [2], bytes))].into()
        };
        let measure = |unit| {
            Measure::Rounding(Some(Truth {
                values: [("g".to_string(), exact.clone())].into(),
                unit,
            }))
        };
        let judged = |a: f32, b: f32, unit: f64| {
            let (left, right) = (half(1.0, 3.125), half(a, b));
            Compared::new(Against::Exported, &left, &right, &measure(unit))
                .unwrap()
                .agrees
        };
        // The other graph is off by an eighth.
        assert!(judged(1.125, 3.0, 0.0) && !judged(1.25, 3.0, 0.0));
        assert!(judged(1.25, 3.0, 1.0 / 64.0));
    }
}
