//! A pair of graphs to compare, for example a model and its planned training graph.
//!
//! Two forward graphs or two training graphs are compared as they are. A forward graph and a training graph made from it
//! are compared by gradients: the first is differentiated by the record of the second, without a plan. Where that fuses or
//! cuts ops into chunks, the model as exported can be differentiated beside it, with neither.

use crate::attention::Attention;
use crate::frontend::given::Given;
use crate::frontend::load;
use crate::place::Place;
use crate::provenance::{derivative_order, read_record};
use crate::rng::Rng;
use crate::runtime::generated;
use crate::runtime::session::Session;
use crate::tensors::{self, Tensors, feed};
use ckpt_passes::analysis::gradients::has_backward;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::verify::verify as check_invariants;
use ckpt_passes::ir::{Graph, Tensor};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::joint;
use ckpt_passes::transform::tile::Tiles;
use ckpt_passes::{Error, Result};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Two files to compare, and how they run.
#[derive(Clone, Debug)]
pub struct PairRequest {
    /// The reference.
    pub a: PathBuf,
    /// The graph to compare with it.
    pub b: PathBuf,
    /// A file of tensors; missing inputs are made from the seed.
    pub inputs: Option<PathBuf>,
    /// Seed of the inputs that the file does not give.
    pub seed: u64,
    /// Numbers for named sizes that no tensor of the file fixes.
    pub dims: Vec<(String, i64)>,
    /// Threads that one kernel may use; `None` keeps libtorch's default.
    pub threads: Option<u16>,
    /// Device that runs both graphs.
    pub place: Place,
    /// Source of random numbers for both graphs.
    pub rng: Rng,
    /// Kernels that run the attention nodes of both graphs.
    pub attention: Attention,
    /// Whether a device computes chains of ops with generated kernels.
    pub fused_kernels: bool,
}

impl PairRequest {
    /// Reads the file of tensors; returns none without a file.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn tensors(&self) -> Result<Tensors> {
        match &self.inputs {
            Some(path) => tensors::read(path),
            None => Ok(Tensors::new()),
        }
    }

    /// Returns a graph as it runs: with fused chains, where they are wanted and the device has them.
    ///
    /// # Errors
    /// `error[nvrtc]` if fused chains cannot be compiled.
    pub fn on_device<'g>(&self, graph: &'g Graph) -> Result<Cow<'g, Graph>> {
        let mut graph = Cow::Borrowed(graph);
        if self.fused_kernels && self.place != Place::Cpu {
            generated::fuse_for(self.place, graph.to_mut())?;
        }
        Ok(graph)
    }

    /// Opens one of the graphs to run; `weights` replace initializers of the same name.
    ///
    /// # Errors
    /// See [`Session::new`].
    pub fn open<'g>(
        &self,
        graph: &'g Graph,
        weights: &BTreeMap<String, Tensor>,
    ) -> Result<Session<'g>> {
        let mut session = Session::new(graph, weights, self.threads, self.place, self.rng)?;
        session.attend_by(self.attention);
        Ok(session)
    }
}

/// Two graphs of the same order of differentiation.
pub struct Pair {
    /// The reference; with `kind` `gradients`, the training graph made from it.
    pub a: Graph,
    /// The graph to compare with A.
    pub b: Graph,
    /// `forward`, `training`, or `gradients` where A was differentiated for the comparison.
    pub kind: &'static str,
    /// The loss of that differentiation.
    pub loss: Option<String>,
    /// Warnings about both files, those about A first.
    pub warnings: Vec<String>,
    /// A as it was read, and the record that it was differentiated by, where that fuses or tiles ops.
    rounded: Option<(Graph, Request)>,
}

/// Types a graph and checks it for the runtime.
///
/// # Errors
/// Errors of typing and of the verifier.
pub fn ready(graph: &mut Graph, path: &Path) -> Result<()> {
    infer(graph).map_err(|e| e.at(path.display().to_string()))?;
    if has_backward(graph) {
        joint(graph)?;
    }
    check_invariants(graph)
}

impl Pair {
    /// Reads both graphs. A file without input types takes those of `tensors`, by name.
    ///
    /// # Errors
    /// Files that cannot be read, and graphs that cannot be compared.
    pub fn load(path_a: &Path, path_b: &Path, tensors: &Tensors) -> Result<Pair> {
        let mut given = Given {
            examples: feed::input_types(tensors),
            ..Given::default()
        };
        let mut b = load(path_b, &given)?;
        ready(&mut b.graph, path_b)?;
        // A format without input types takes those that B was made with.
        if let Ok((_, recorded)) = read_record(&b.graph.meta) {
            let types = recorded.inputs.into_iter().map(|i| (i.name, i.ty));
            given.examples.extend(types);
        }
        let mut a = load(path_a, &given)?;
        ready(&mut a.graph, path_a)?;
        let mut warnings = std::mem::take(&mut a.warnings);
        warnings.append(&mut b.warnings);
        let (mut loss, mut rounded) = (None, None);
        let (order_a, order_b) = (derivative_order(&a.graph)?, derivative_order(&b.graph)?);
        if order_b > order_a + 1 {
            return Err(Error::usage(
                "pair",
                format!("B was differentiated {order_b} times, and its record is of the last time"),
            )
            .found(format!("A was differentiated {order_a} times"))
            .help("compare it with the graph that was differentiated once less"));
        }
        let kind = match (has_backward(&a.graph), order_b > order_a) {
            (false, false) => "forward",
            (true, false) if order_a == order_b => "training",
            (true, false) => {
                let what = match order_b {
                    0 => "A has a backward and B has none",
                    _ => "A was differentiated more often than B",
                };
                return Err(Error::usage("pair", what).help(format!(
                    "name them the other way round: {} {}",
                    path_b.display(),
                    path_a.display()
                )));
            }
            (_, true) => {
                let (record, recorded) =
                    read_record(&b.graph.meta).map_err(|e| e.at(path_b.display().to_string()))?;
                if !recorded.inputs.is_empty() || !recorded.output_names.is_empty() {
                    a = load(path_a, &recorded)?;
                }
                loss = Some(record.loss.to_string());
                let is_cut = record.tile != Tiles::default() || record.sequence_chunks > 1;
                if record.fuse || is_cut {
                    rounded = Some((a.graph.clone(), record.clone()));
                }
                compile(&mut a.graph, &record, &mut Watch::default())?;
                "gradients"
            }
        };
        Ok(Pair {
            a: a.graph,
            b: b.graph,
            kind,
            loss,
            warnings,
            rounded,
        })
    }

    /// Returns the gradients of A as it was exported: not fused, not tiled. `None` where [`Pair::a`] is that already, or
    /// was not differentiated here.
    ///
    /// # Errors
    /// What any pass refuses.
    pub fn exported(&self) -> Result<Option<Graph>> {
        let Some((source, record)) = &self.rounded else {
            return Ok(None);
        };
        let mut graph = source.clone();
        let request = Request {
            fuse: false,
            tile: Tiles::default(),
            sequence_chunks: 1,
            ..record.clone()
        };
        compile(&mut graph, &request, &mut Watch::default())?;
        Ok(Some(graph))
    }
}
