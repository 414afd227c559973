//! Checks that two graphs compute the same values, by running both on the same inputs.
//!
//! Two forward graphs, or two training graphs, are compared output by output. To compare a forward graph with a training graph
//! made from it, the forward graph is first differentiated, by the record in the training graph and without a plan. Equality
//! then proves that the plan changed no bit of any gradient. Both run in our runtime, on one device, with the same threads.

use crate::comparison::{Pair, PairRequest};
use crate::measure::at_sizes;
use crate::provenance::keys;
use crate::runtime::sdpa_choice::AttentionKernels;
use crate::tensors::compare::{Comparison, Tolerance, compare};
use crate::tensors::feed::Feed;
use crate::tensors::{Tensors, random};
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::{Error, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::Path;

/// Tolerance for rounding: relative to the largest element of the tensor, and to the largest element of all tensors.
pub const ROUNDING: (f64, f64) = (1e-5, 1e-7);

/// One of the two graphs, and the memory of its run.
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

/// What was compared, and the result. `verify` writes it as JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Certificate {
    /// Path of graph A.
    pub a: String,
    /// Path of graph B.
    pub b: String,
    /// The runs of A and B.
    pub runs: [Ran; 2],
    /// `forward`, `training`, or `gradients` where A was differentiated for the comparison.
    pub kind: &'static str,
    /// Whether both have the same outputs, and each agrees within what `by` allows.
    pub equal: bool,
    /// `bits`, `tolerance` (as requested), or `rounding` (if only one of the two was fused).
    pub by: &'static str,
    /// Tolerance as requested; zeros where none was given.
    pub tolerance: Tolerance,
    /// The loss for which A was differentiated; `None` unless `kind` is `gradients`.
    pub loss: Option<String>,
    /// Sizes of both runs.
    pub dims: BTreeMap<String, i64>,
    /// Inputs that were generated from the seed.
    pub made_inputs: Vec<String>,
    /// Seed of the inputs in `made_inputs`.
    pub seed: u64,
    /// Device on which both graphs ran.
    pub device: String,
    /// Number of threads as requested; `None` for libtorch's own choice.
    pub threads: Option<u16>,
    /// The source of random numbers.
    pub rng: String,
    /// Version of ckpt-opt that compared the graphs.
    pub version: &'static str,
    /// Outputs of A that B does not have.
    pub missing: Vec<String>,
    /// Outputs of B that A does not have.
    pub unknown: Vec<String>,
    /// One comparison for each output that both graphs have.
    pub outputs: Vec<Comparison>,
    /// Warnings about the files and their inputs, and about attention kernels that were not used.
    pub warnings: Vec<String>,
}

/// Runs and compares two graphs. The certificate reports a difference; it is no error here. Without a tolerance, bits must be
/// equal. If only one of two training graphs was fused, each tensor must be equal within rounding ([`ROUNDING`]).
///
/// # Errors
/// Graphs that cannot be compared or run.
pub fn verify(request: &PairRequest, tolerance: Option<Tolerance>) -> Result<Certificate> {
    let tensors = request.tensors()?;
    let Pair {
        a,
        b,
        kind,
        loss,
        mut warnings,
    } = Pair::load(&request.a, &request.b, &tensors)?;
    let mut feed = Feed::new(&b, tensors)?;
    warnings.append(&mut feed.notes);
    let made_inputs: Vec<String> = feed
        .missing(&b)
        .iter()
        .map(|(n, _)| n.to_string())
        .collect();
    let binding = random::fill(&b, &mut feed, &request.dims, request.seed)?;
    let run = |graph: &Graph, path: &Path| {
        // Both graphs must read the same inputs.
        let unknown = graph
            .inputs()
            .iter()
            .map(|v| &graph.value(*v).name)
            .find(|n| !feed.inputs.contains_key(*n));
        if let Some(name) = unknown {
            return Err(Error::verification(format!(
                "A has an input `{name}` that B does not have"
            ))
            .at(path.display().to_string()));
        }
        let session = request.open(graph, &feed.weights)?;
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
            return Ok((done.outputs, ran, done.attention_refused));
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
    };
    let (left, ran_a, mut refused) = run(&a, &request.a)?;
    let (right, ran_b, also) = run(&b, &request.b)?;
    refused.extend(also);
    warnings.extend(refused);
    let only = |x: &Tensors, y: &Tensors| {
        x.keys()
            .filter(|n| !y.contains_key(*n))
            .cloned()
            .collect::<Vec<String>>()
    };
    let (missing, unknown) = (only(&left, &right), only(&right, &left));
    let pairs = right
        .iter()
        .filter_map(|(name, b)| Some((name, left.get(name)?, b)));
    let made = |graph: &Graph| {
        [keys::FUSE, keys::TILE, keys::TILE_MLP].map(|key| graph.meta.get(key).cloned())
    };
    let rounding = tolerance.is_none() && kind == "training" && made(&a) != made(&b);
    let tolerance = tolerance.unwrap_or_default();
    let most = if rounding {
        left.values().map(largest).fold(0.0, f64::max)
    } else {
        0.0
    };
    let allowed = |a: &Tensor| match rounding {
        true => Tolerance {
            rtol: 0.0,
            atol: ROUNDING.0 * largest(a) + ROUNDING.1 * most,
        },
        false => tolerance,
    };
    let outputs: Vec<Comparison> = pairs
        .map(|(n, a, b)| compare(n, a, b, allowed(a)))
        .collect();
    let equal = missing.is_empty() && unknown.is_empty() && outputs.iter().all(|c| c.equal);
    Ok(Certificate {
        a: request.a.display().to_string(),
        b: request.b.display().to_string(),
        runs: [ran_a, ran_b],
        kind,
        equal,
        by: match (rounding, tolerance.is_exact()) {
            (true, _) => "rounding",
            (_, true) => "bits",
            _ => "tolerance",
        },
        tolerance,
        loss,
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
        missing,
        unknown,
        outputs,
        warnings,
    })
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

impl Certificate {
    /// Returns an error that names the first difference, if there is one.
    ///
    /// # Errors
    /// Kind `Verification` unless everything is equal.
    pub fn judge(&self) -> Result<()> {
        if self.equal {
            return Ok(());
        }
        let place = format!("{} against {}", self.b, self.a);
        let list = |names: &[String]| names.join(", ");
        if !self.missing.is_empty() || !self.unknown.is_empty() {
            return Err(
                Error::verification("the graphs do not have the same outputs")
                    .at(place)
                    .found(format!(
                        "only in A: [{}]; only in B: [{}]",
                        list(&self.missing),
                        list(&self.unknown)
                    )),
            );
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
        let error = Error::verification(head).at(place);
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
    pub fn human(&self) -> String {
        let elements: u64 = self.outputs.iter().map(|c| c.elements).sum();
        let how = match (
            self.by,
            self.outputs
                .iter()
                .map(|c| c.max_abs_difference)
                .fold(0.0, f64::max),
        ) {
            ("bits", _) => "equal bit for bit".to_string(),
            (how, most) => format!("equal within {how}, {most:e} apart at most"),
        };
        let what = match &self.loss {
            Some(loss) => format!("gradients and outputs (loss {loss})"),
            None => format!("{} outputs", self.kind),
        };
        format!(
            "{what}: {} tensors, {elements} values {how}{}\n",
            self.outputs.len(),
            at_sizes(&self.dims)
        )
    }
}
