//! Load a model, turn it into its checkpointed training graph, say what that cost.
//!
//! The written graph records what was asked for (`ckpt.loss`, `ckpt.policy`, …), so that `verify` can differentiate the
//! original in the same way and compare.

use crate::emit::file::{refuse_overwrite, write_whole};
use crate::emit::save::{INSIDE_LIMIT_BYTES, Saving, save};
use crate::frontend::given::{Given, InputType};
use crate::frontend::{self, Model};
use crate::planning::task::{Planned, Task};
use crate::report::account::Account;
use crate::report::summary::{Measured, Summary};
use ckpt_passes::analysis::params::Selection;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::{Timings, Watch};
use ckpt_passes::ir::{Data, Graph};
use ckpt_passes::transform::infer::infer;
use ckpt_passes::transform::joint::has_backward;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::optimizer::Optimizer;
use ckpt_passes::transform::remat::strip_again;
use ckpt_passes::transform::rng_streams::Stream;
use ckpt_passes::transform::tile::{Tile, Tiles};
use ckpt_passes::{Error, Result, text};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Keys under which a written graph records how it was made.
pub mod record {
    pub const VERSION: &str = "ckpt.version";
    pub const LOSS: &str = "ckpt.loss";
    /// How often the model was differentiated, where that is more than once: the record is of the last time.
    pub const ORDER: &str = "ckpt.order";
    pub const POLICY: &str = "ckpt.policy";
    /// `exact`, or `rounded` where ops were fused or tiled.
    pub const NUMERICS: &str = "ckpt.numerics";
    /// `true` where ops were fused.
    pub const FUSE: &str = "ckpt.fuse";
    /// Into how many parts the head and the loss were cut, where they were.
    pub const TILE: &str = "ckpt.tile";
    /// The same for chains of ops on tokens.
    pub const TILE_MLP: &str = "ckpt.tile_mlp";
    /// What updates the parameters, and `true` where each update runs as soon as its gradient is complete.
    pub const OPTIMIZER: &str = "ckpt.optimizer";
    pub const FUSE_OPTIMIZER: &str = "ckpt.fuse_optimizer";
    /// JSON lists of patterns.
    pub const TRAINABLE: &str = "ckpt.trainable";
    pub const FREEZE: &str = "ckpt.freeze";
    pub const DROP_OUTPUT: &str = "ckpt.drop_output";
    /// A JSON list of `NAME=PATTERN,…`.
    pub const RNG_STREAM: &str = "ckpt.rng_stream";
    /// A JSON list of `NAME:DTYPE[DIMS]`.
    pub const INPUT: &str = "ckpt.input";
    /// A JSON list, where the model's file does not name its outputs.
    pub const OUTPUT_NAMES: &str = "ckpt.output_names";
}

/// Reads a model of any known format; `given` says what the file does not, or differently.
///
/// # Errors
/// See [`frontend::read_as`]; a type for an input that there is not.
pub fn load(path: &Path, given: &Given) -> Result<Model> {
    let mut model = frontend::read_as(path, given)?;
    for given in &given.inputs {
        let found = model
            .graph
            .inputs()
            .iter()
            .copied()
            .find(|v| model.graph.value(*v).name == given.name);
        let Some(id) = found else {
            let known: Vec<&str> = model
                .graph
                .inputs()
                .iter()
                .map(|v| model.graph.value(*v).name.as_str())
                .collect();
            return Err(
                Error::usage("input", format!("the model has no input `{}`", given.name))
                    .found(format!("inputs {}", known.join(", "))),
            );
        };
        model.graph.set_type(id, given.ty.clone());
    }
    let types = match model.recorded.is_empty() {
        true => &given.inputs,
        false => &model.recorded,
    };
    if !types.is_empty() {
        let list: Vec<String> = types.iter().map(|t| t.to_string()).collect();
        let meta = &mut model.graph.meta;
        meta.insert(record::INPUT.into(), list_text(&list));
    }
    if !given.output_names.is_empty() {
        let names = list_text(&given.output_names);
        model.graph.meta.insert(record::OUTPUT_NAMES.into(), names);
    }
    if !given.inputs.is_empty() {
        // What the file claims about results rests on the types it claims for inputs.
        infer(&mut model.graph).map_err(|e| e.at(path.display().to_string()))?;
    }
    Ok(model)
}

/// Writes `graph`, which was read from `source`, to `output`: text if its name ends in `.ckir`, else ONNX. Returns what
/// the user should know.
///
/// # Errors
/// See [`save`].
pub fn write(
    graph: &Graph,
    source: &Path,
    output: &Path,
    link_weights: bool,
) -> Result<Vec<String>> {
    if output.extension().is_some_and(|e| e == "ckir") {
        refuse_overwrite(output, &[source.to_path_buf()])?;
        write_whole(output, text::print_full(graph).as_bytes())?;
        return Ok(Vec::new());
    }
    let how = Saving {
        input: Some(source),
        link_weights,
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    };
    save(graph, output, &how)?;
    let absent: BTreeSet<&str> = graph
        .inits()
        .filter_map(|(_, v)| match v.tensor().map(|t| &t.data) {
            Some(Data::Absent(place)) => Some(place.location.as_ref()),
            _ => None,
        })
        .collect();
    let warn = |file: &str| {
        format!("the weights file `{file}` is absent: the output needs it beside itself to run")
    };
    Ok(absent.into_iter().map(warn).collect())
}

/// What came of an optimisation.
pub struct Outcome {
    /// `None` where the pipeline was stopped before it planned, or planned without rewriting.
    pub summary: Option<Summary>,
    /// What was planned, and the plan, to be shown; `None` where the pipeline was stopped before it planned.
    pub planned: Option<(Task, Planned)>,
    pub timings: Timings,
    pub warnings: Vec<String>,
}

/// Turns `graph` into its checkpointed training graph and reports on it.
///
/// # Errors
/// What any pass refuses.
pub fn optimize(graph: &mut Graph, request: &Request, watch: &mut Watch) -> Result<Outcome> {
    let before = order(graph)?;
    let compiled = compile(graph, request, watch)?;
    if compiled.loss.is_some() {
        forget_earlier(graph, before);
    }
    let fused = !compiled.fused.is_empty();
    let most = |tiled: &[(String, usize)]| tiled.iter().map(|(_, parts)| *parts).max();
    let (parts, mlp_parts) = (most(&compiled.tiled), most(&compiled.tiled_mlps));
    let policy = compiled
        .made
        .as_ref()
        .map_or("none", |made| &made.plan.policy);
    write_record(graph, request, policy, compiled.loss.as_ref(), fused);
    for (key, parts) in [(record::TILE, parts), (record::TILE_MLP, mlp_parts)] {
        if let Some(parts) = parts {
            let meta = &mut graph.meta;
            meta.insert(record::NUMERICS.into(), "rounded".into());
            meta.insert(key.into(), parts.to_string());
        }
    }
    if let Some(optimizer) = &request.optimizer {
        let meta = &mut graph.meta;
        meta.insert(record::OPTIMIZER.into(), optimizer.to_string());
        if request.fuse_optimizer {
            meta.insert(record::FUSE_OPTIMIZER.into(), "true".into());
        }
    }
    let mut unplanned = graph.clone();
    strip_again(&mut unplanned);
    let mut summary = None;
    if let Some(made) = &compiled.made
        && graph.phase == ckpt_passes::ir::Phase::Rewritten
    {
        let before = Measured::new(&unplanned, &made.binding, &made.subject.device)?;
        summary = Some(Summary::new(graph, &compiled, made, &before.rows)?);
    }
    let mut planned = None;
    if let Some(made) = compiled.made {
        let choices = (made.choices, request.overrides.to_string());
        let warnings = compiled.warnings.clone();
        let task = Task {
            loss: compiled.loss.map(|l| l.to_string()),
            is_measured: request.times.is_some(),
            loss_parts: parts,
            mlp_parts,
            tried: compiled.tried,
            ..Task::made(&unplanned, made.subject, choices, &made.binding, warnings)?
        };
        let plan = Planned {
            plan: made.plan,
            seconds: made.seconds,
            smallest_bytes: made.smallest_bytes,
        };
        if let Some(short) = summary.take() {
            summary = Some(short.with(&Account::new(&task, &plan)?));
        }
        planned = Some((task, plan));
    }
    Ok(Outcome {
        summary,
        planned,
        timings: compiled.timings,
        warnings: compiled.warnings,
    })
}

/// How often a graph was differentiated, as far as it says.
///
/// # Errors
/// A record that is no such number.
pub fn order(graph: &Graph) -> Result<u32> {
    match graph.meta.get(record::ORDER) {
        _ if !has_backward(graph) => Ok(0),
        None => Ok(1),
        Some(text) => text.parse().ok().filter(|n| *n > 1).ok_or_else(|| {
            let what = format!(
                "metadata `{}` is not how often a graph was differentiated",
                record::ORDER
            );
            Error::model("record", what)
                .expected("a number above 1")
                .found(text)
        }),
    }
}

/// Of a graph that was just differentiated, and `before` times before: drops what it says of how it was made then.
fn forget_earlier(graph: &mut Graph, before: u32) {
    use record::{FUSE_OPTIMIZER, OPTIMIZER, ORDER, OUTPUT_NAMES, TILE, TILE_MLP};
    let meta = &mut graph.meta;
    for key in [ORDER, TILE, TILE_MLP, OPTIMIZER, FUSE_OPTIMIZER] {
        meta.remove(key);
    }
    if before > 0 {
        meta.remove(OUTPUT_NAMES);
        meta.insert(ORDER.into(), before.saturating_add(1).to_string());
    }
}

fn list_text(list: &[String]) -> String {
    serde_json::to_string(list).unwrap_or_default()
}

/// A graph that had its backward keeps what it says about its loss and what was trained.
fn write_record(
    graph: &mut Graph,
    request: &Request,
    policy: &str,
    loss: Option<&Loss>,
    fused: bool,
) {
    let meta = &mut graph.meta;
    meta.insert(record::VERSION.into(), env!("CARGO_PKG_VERSION").into());
    meta.insert(record::POLICY.into(), policy.into());
    meta.entry(record::NUMERICS.into())
        .or_insert_with(|| "exact".into());
    if let Some(loss) = loss {
        let numerics = if fused { "rounded" } else { "exact" };
        meta.insert(record::NUMERICS.into(), numerics.into());
        meta.remove(record::FUSE);
        if fused {
            meta.insert(record::FUSE.into(), "true".into());
        }
        meta.insert(record::LOSS.into(), loss.to_string());
        let streams: Vec<String> = request.rng_streams.iter().map(Stream::to_string).collect();
        let lists = [
            (record::RNG_STREAM, &streams),
            (record::TRAINABLE, &request.selection.trainable),
            (record::FREEZE, &request.selection.freeze),
            (record::DROP_OUTPUT, &request.drop_outputs),
        ];
        for (key, list) in lists {
            meta.remove(key);
            if !list.is_empty() {
                meta.insert(key.into(), list_text(list));
            }
        }
    }
}

/// How a written graph was made, as far as its values depend on it: what to ask for to get the same values from the
/// forward graph. The policy is not part of it, because plans never change a value.
///
/// # Errors
/// A graph without the record.
pub fn read_record(meta: &BTreeMap<String, String>) -> Result<(Request, Given)> {
    let Some(loss) = meta.get(record::LOSS) else {
        return Err(Error::model(
            "record",
            "the training graph does not say which loss it was made with",
        )
        .expected(format!(
            "metadata `{}`, as ckpt-opt writes it",
            record::LOSS
        ))
        .help("compare two training graphs instead, or two forward graphs"));
    };
    let list = |key: &str| -> Result<Vec<String>> {
        meta.get(key).map_or(Ok(Vec::new()), |t| {
            serde_json::from_str(t).map_err(|e| {
                Error::model(
                    "record",
                    format!("metadata `{key}` is not a JSON list of strings: {e}"),
                )
            })
        })
    };
    let truth = |key: &str| match meta.get(key).map(String::as_str) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(Error::model(
            "record",
            format!("metadata `{key}` is not a truth value"),
        )
        .expected("true or false")
        .found(other)),
    };
    let optimizer = meta.get(record::OPTIMIZER).map(|t| Optimizer::parse(t));
    let parts = |key: &str| match meta.get(key) {
        None => Ok(Tile::Off),
        Some(parts) => Tile::parse(parts),
    };
    let tile = Tiles {
        loss: parts(record::TILE)?,
        mlp: parts(record::TILE_MLP)?,
    };
    let inputs = list(record::INPUT)?;
    let request = Request {
        loss: Loss::parse(loss)?,
        policy: ckpt_passes::plan::Policy::None,
        selection: Selection {
            trainable: list(record::TRAINABLE)?,
            freeze: list(record::FREEZE)?,
        },
        drop_outputs: list(record::DROP_OUTPUT)?,
        rng_streams: list(record::RNG_STREAM)?
            .iter()
            .map(|t| Stream::parse(t))
            .collect::<Result<_>>()?,
        fuse: truth(record::FUSE)?,
        tile,
        optimizer: optimizer.transpose()?,
        fuse_optimizer: truth(record::FUSE_OPTIMIZER)?,
        ..Request::default()
    };
    let given = Given {
        inputs: inputs
            .iter()
            .map(|t| InputType::parse(t))
            .collect::<Result<_>>()?,
        output_names: list(record::OUTPUT_NAMES)?,
        ..Given::default()
    };
    Ok((request, given))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_out_and_in_keeps_weights() {
        let source = "graph @g typed (%x: f32[2]) -> (%y) {
  init %w : f32[2] = [1, 2]
  %y = Add %x, %w : f32[2]
}
";
        let graph = text::parse(source).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("g.ckir");
        write(&graph, Path::new("none.onnx"), &path, false).unwrap();
        let back = load(&path, &Given::default()).unwrap().graph;
        assert_eq!(text::print_full(&back), text::print_full(&graph));
        let again = write(&graph, &path, &path, false).unwrap_err();
        assert_eq!((again.code(), again.exit_code()), ("output", 2));
    }

    #[test]
    fn the_record_is_read_back() {
        let mut graph = Graph::new("g");
        let mut request = Request {
            drop_outputs: vec!["present.*".into()],
            ..Request::default()
        };
        request.rng_streams = vec![Stream::parse("tp=*.attn,*.mlp").unwrap()];
        request.selection.freeze = vec!["emb\"ed*".into()];
        assert_eq!(read_record(&graph.meta).err().unwrap().exit_code(), 2);
        write_record(&mut graph, &request, "full", Some(&Loss::CausalLm), true);
        let (read, given) = read_record(&graph.meta).unwrap();
        assert_eq!(
            (read.loss, read.drop_outputs),
            (Loss::CausalLm, request.drop_outputs.clone())
        );
        assert_eq!(read.rng_streams, request.rng_streams);
        assert_eq!(read.selection.freeze, request.selection.freeze);
        assert!(given.inputs.is_empty() && read.selection.trainable.is_empty());
        assert!(read.fuse);
        // Planning it again, now with its backward, keeps the record.
        write_record(&mut graph, &Request::default(), "none", None, false);
        assert_eq!(graph.meta[record::NUMERICS], "rounded");
        assert_eq!(graph.meta[record::LOSS], "causal-lm");
        assert!(graph.meta.contains_key(record::FREEZE));
    }
}
