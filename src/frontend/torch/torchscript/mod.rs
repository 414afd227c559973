//! TorchScript archives (`torch.jit.save`): code and modules in, a graph out.
//!
//! [`modules`] reads the objects and [`code`] finds their source ([`lexer`], [`parse`], [`ast`]). [`replay`] walks the source
//! ([`calls`], [`state`], [`super::scalars`], [`item`]) and passes every op to [`super::aten`]. The archive has no shapes, so
//! the user gives the types of inputs ([`inputs`]). The program's shape arithmetic becomes expressions over named sizes.

mod ast;
mod calls;
mod code;
mod inputs;
mod item;
mod lexer;
mod modules;
mod parse;
mod replay;
mod state;

use super::archive::Archive;
use super::aten::Lowering;
use super::value::{TensorId, Value};
use crate::frontend::Model;
use crate::frontend::given::Given;
use ckpt_passes::ir::{Graph, Phase};
use ckpt_passes::{Error, Result};
use code::Code;
use item::Item;
use modules::Modules;
use replay::Replay;
use std::rc::Rc;

/// The largest depth of lists among the results.
const MAX_NESTING: usize = 16;

/// Returns true if an archive is TorchScript.
pub fn is_torchscript(archive: &Archive) -> bool {
    archive.contains("data.pkl") && archive.names().any(|n| n.starts_with("code/"))
}

/// Reads the model of an archive.
///
/// # Errors
/// Inputs whose types are not given; a program that is damaged, or whose control flow the file does not decide.
pub fn read(archive: &Archive, given: &Given) -> Result<Model> {
    let code = Code::new(archive);
    let modules = Modules::read(archive, &code)?;
    let class = modules.class(&code, modules.root())?;
    let forward = class.as_ref().and_then(|c| c.method("forward"));
    let Some(forward) = forward else {
        bail!("code", "the model has no `forward`");
    };
    let signature = inputs::signature(forward.function(), given)
        .map_err(|e| e.at(forward.place(forward.function().line)))?;
    let missing = inputs::missing(&signature, given);
    if !missing.is_empty() {
        return Err(inputs::wanted(&signature, &missing, archive));
    }
    inputs::refuse_others(&signature, given)?;
    let mut graph = Graph::new("main");
    graph.phase = Phase::Imported;
    let mut lowering = Lowering::new(&mut graph);
    let mut replay = Replay::new(archive, &code, &modules, &mut lowering);
    let mut recorded = Vec::new();
    let mut args = Vec::new();
    for input in &signature {
        let Some(name) = input.name() else { continue };
        args.push((name.into(), replay.input(input, given, &mut recorded)?));
    }
    let root: Rc<str> = "".into();
    let result = replay.call_method(modules.root(), &root, "forward", Vec::new(), args)?;
    replay.declare_unread()?;
    let mut tensors = Vec::new();
    replay.results(&result, &mut tensors, 0)?;
    let mut warnings = std::mem::take(&mut replay.warnings);
    let names = given.output_names_or(tensors.len(), |i| format!("output_{i}"))?;
    for (name, tensor) in names.iter().zip(tensors) {
        lowering.output(name, tensor)?;
    }
    warnings.extend(lowering.finish()?);
    Ok(Model {
        graph,
        warnings,
        recorded,
    })
}

impl Replay<'_, '_> {
    /// Collects the tensors of a result in order, without those that are `None`.
    fn results(&mut self, item: &Item, tensors: &mut Vec<TensorId>, depth: usize) -> Result<()> {
        let strange = |kind: &str| {
            Err(Error::model("outputs", format!("the model returns {kind}"))
                .expected("tensors, or lists, tuples and dictionaries of them"))
        };
        match item {
            Item::Value(Value::Tensor(tensor)) => tensors.push(*tensor),
            Item::Number(_) | Item::Real(_) | Item::Ratio(_) => {
                tensors.push(calls::in_tensor(self.lowering, item)?);
            }
            Item::Value(Value::Int(n)) => tensors.push(self.lowering.number(n)?),
            Item::Value(Value::None) => {}
            Item::Container(_) if depth == MAX_NESTING => {
                return strange("lists in lists without end");
            }
            Item::Container(at) => {
                for item in self.containers.get(*at).values() {
                    self.results(&item, tensors, depth + 1)?;
                }
            }
            other => return strange(other.kind()),
        }
        Ok(())
    }
}
