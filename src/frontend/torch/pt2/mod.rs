//! `torch.export` archives (`.pt2`): a graph in JSON and raw weights in, a graph out.
//!
//! [`schema`] is the JSON. [`sympy`] reads its symbolic sizes, and [`sizes`] knows what they stand for. [`weights`] finds
//! parameters and buffers. [`replay`] walks the nodes and passes every op to [`super::aten`]. The file names its inputs,
//! outputs, parameters, modules and overloads. It also gives the type of every result, which the reader checks.

mod replay;
pub mod schema;
mod sizes;
mod sympy;
pub mod weights;

use super::archive::Archive;
use super::aten::{Kind, Lowering};
use super::value::TensorId;
use crate::frontend::Model;
use crate::frontend::given::Given;
use ckpt_passes::ir::{Graph, Phase};
use ckpt_passes::{Error, Result};
use replay::{Replay, damaged, output_name};
use schema::{Argument, InputSpec, OutputSpec, Program};
use sizes::Sizes;
use std::collections::{BTreeMap, BTreeSet};

const MODEL: &str = "models/model.json";
const NAMES: &str = "extra/ckpt_opt.json";

/// The largest JSON that is read. A program of a few thousand nodes takes a few megabytes.
const MAX_JSON_BYTES: u64 = 512 << 20;

/// The version of the schema that this reader knows (torch/_export/serde/schema.py). Older ones differ.
const MAJOR_VERSION: i64 = 8;

/// Returns true if an archive is an exported program.
pub fn is_program(archive: &Archive) -> bool {
    archive.contains(MODEL)
}

/// Reads the model of an archive.
///
/// # Errors
/// A program that is damaged, of another schema, or with ops that the op table does not have.
pub fn read(archive: &Archive, given: &Given) -> Result<Model> {
    let text = archive.content(MODEL, MAX_JSON_BYTES)?;
    let program = parse(&text)?;
    let names = match archive.contains(NAMES) {
        true => size_names(&archive.content(NAMES, MAX_JSON_BYTES)?)?,
        false => BTreeMap::new(),
    };
    build(&program, &names, &weights::Weights::read(archive)?, given)
}

/// Reads the JSON of a program.
///
/// # Errors
/// Text that is no program, or a program of another version of the schema.
pub fn parse(text: &[u8]) -> Result<Program> {
    let version: schema::Versioned = serde_json::from_slice(text)
        .map_err(|e| Error::model("pt2", format!("the program is no valid JSON: {e}")))?;
    if version.schema_version.major != MAJOR_VERSION {
        return Err(Error::model(
            "pt2",
            "the program is of a version of the format that is not supported",
        )
        .expected(format!("{MAJOR_VERSION}, of PyTorch 2.6 and later"))
        .found(format!(
            "{}.{}",
            version.schema_version.major, version.schema_version.minor
        ))
        .help("export it again with such a PyTorch"));
    }
    serde_json::from_slice(text)
        .map_err(|e| Error::model("pt2", format!("the program is damaged: {e}")))
}

/// Reads the names of sizes that `ckpt_opt.export` writes beside a program, which has only PyTorch's own (`s27`).
fn size_names(text: &[u8]) -> Result<BTreeMap<String, String>> {
    let names: schema::Names = serde_json::from_slice(text).map_err(|e| {
        Error::model("pt2", format!("the names of sizes are damaged: {e}")).at(NAMES)
    })?;
    Ok(names.sizes)
}

/// Replays a program with its weights. `names` has other names for its named sizes.
///
/// # Errors
/// See [`read`].
pub fn build(
    program: &Program,
    names: &BTreeMap<String, String>,
    weights: &weights::Weights,
    given: &Given,
) -> Result<Model> {
    let mut graph = Graph::new("main");
    graph.phase = Phase::Imported;
    let mut lowering = Lowering::new(&mut graph);
    lowering.is_decomposed = !program.verifiers.iter().any(|name| name == "TRAINING");
    let module = &program.graph_module;
    let mut replay = Replay::new(&mut lowering, Sizes::new(&program.range_constraints));
    replay.sizes.learn(&module.graph)?;
    replay.sizes.rename(names)?;
    replay.say(&module.graph, given)?;
    sources(&mut replay, program, weights, given)?;
    replay.declare_ranges()?;
    replay.run(&module.graph, 0)?;
    let (results, mut warnings) = results(&replay, program)?;
    let names: Vec<String> = results.iter().map(|(name, _)| name.clone()).collect();
    let names = given.output_names_or(results.len(), |i| names[i].clone())?;
    let mut seen = BTreeSet::new();
    for (name, (own, tensor)) in names.iter().zip(&results) {
        // A tensor that is returned twice has one name in the file.
        let name = match seen.insert(name.clone()) {
            true => name.clone(),
            false => format!("{own}.{}", seen.len()),
        };
        lowering.output(&name, *tensor)?;
    }
    warnings.extend(lowering.finish()?);
    Ok(Model {
        graph,
        warnings,
        recorded: Vec::new(),
    })
}

/// Declares the weights of a program by their names, and its inputs with their types.
fn sources(
    replay: &mut Replay,
    program: &Program,
    weights: &weights::Weights,
    given: &Given,
) -> Result<()> {
    let module = &program.graph_module;
    let specs = &module.signature.input_specs;
    if specs.len() != module.graph.inputs.len() {
        bail!("pt2", "the signature and the graph have different inputs");
    }
    for (spec, declared) in specs.iter().zip(&module.graph.inputs) {
        let own = match spec {
            InputSpec::Parameter { arg, .. }
            | InputSpec::Buffer { arg, .. }
            | InputSpec::TensorConstant { arg, .. } => Some(arg.name.as_str()),
            InputSpec::UserInput { arg } => output_name(arg),
            _ => None,
        };
        if own.is_some() && own != output_name(declared) {
            return Err(damaged(format!(
                "the signature and the graph disagree about the input `{}`",
                own.unwrap_or("")
            )));
        }
        match spec {
            InputSpec::Parameter { arg, name }
            | InputSpec::Buffer { arg, name, .. }
            | InputSpec::TensorConstant { arg, name } => {
                let kind = match spec {
                    InputSpec::Parameter { .. } => Kind::Parameter { trainable: true },
                    InputSpec::Buffer { persistent, .. } => Kind::Buffer {
                        persistent: *persistent,
                    },
                    _ => Kind::Constant,
                };
                replay.weight((&arg.name, name), &module.graph, weights, kind)?;
            }
            InputSpec::UserInput { arg } => match arg {
                Argument::AsTensor(arg) => replay.input(&arg.name, &module.graph, given)?,
                // The program is specialised to a number or string.
                Argument::AsNone(_)
                | Argument::AsInt(_)
                | Argument::AsFloat(_)
                | Argument::AsBool(_)
                | Argument::AsString(_) => {}
                other => {
                    return Err(Error::model(
                        "inputs",
                        format!("an input that is {} is not supported", other.kind()),
                    )
                    .help("export with tensors as inputs"));
                }
            },
            InputSpec::ConstantInput {} => {}
            InputSpec::CustomObj {} | InputSpec::Token {} => {
                bail!("inputs", "objects and tokens as inputs are not supported");
            }
        }
    }
    Ok(())
}

type Results = Vec<(String, TensorId)>;

/// Returns the tensors that the program returns, with their names, and warnings about everything else it returns.
fn results(replay: &Replay, program: &Program) -> Result<(Results, Vec<String>)> {
    let module = &program.graph_module;
    let mut found = Results::new();
    let mut warnings = Vec::new();
    if module.signature.output_specs.len() != module.graph.outputs.len() {
        bail!("pt2", "the signature and the graph have different outputs");
    }
    let specs = module.signature.output_specs.iter();
    for (spec, declared) in specs.zip(&module.graph.outputs) {
        match spec {
            OutputSpec::UserOutput {
                arg: Argument::AsTensor(arg),
            }
            | OutputSpec::LossOutput { arg }
                if output_name(declared) != Some(&arg.name) =>
            {
                return Err(damaged(format!(
                    "the signature and the graph disagree about the output `{}`",
                    arg.name
                )));
            }
            OutputSpec::UserOutput {
                arg: Argument::AsTensor(arg),
            }
            | OutputSpec::LossOutput { arg } => {
                found.push((arg.name.clone(), replay.tensor(&arg.name)?));
            }
            OutputSpec::UserOutput {
                arg: Argument::AsNone(_),
            } => {}
            OutputSpec::UserOutput { arg } => warnings.push(format!(
                "an output that is {} is left out: only tensors are outputs",
                arg.kind()
            )),
            OutputSpec::BufferMutation { buffer_name, .. } => warnings.push(format!(
                "the new value of the buffer `{buffer_name}` is not kept after the step"
            )),
            OutputSpec::UserInputMutation {
                user_input_name, ..
            } => warnings.push(format!(
                "the new value of the input `{user_input_name}` is not given back"
            )),
            OutputSpec::ParameterMutation { parameter_name, .. } => warnings.push(format!(
                "the new value of the parameter `{parameter_name}` is not kept after the step"
            )),
            OutputSpec::GradientToParameter {} | OutputSpec::GradientToUserInput {} => {
                return Err(Error::model(
                    "outputs",
                    "a program with gradients of its own is not supported",
                )
                .help("export the forward pass"));
            }
            OutputSpec::Token {} => {
                bail!("outputs", "tokens as outputs are not supported");
            }
        }
    }
    Ok((found, warnings))
}
