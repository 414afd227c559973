//! The inputs of a saved model: names from the signature of `forward`, types from the user.
//!
//! Each member of a list or tuple of tensors is an input: `past.0`, `past.1`, …. A list has as many members as the user
//! gives. The archive holds the inputs of the trace. They serve for the message that asks for types.

use super::ast::{Expr, ExprKind, Function};
use super::item::{Content, Item};
use super::modules::read_pickle;
use super::replay::Replay;
use crate::frontend::given::{Given, InputType};
use crate::frontend::torch::archive::Archive;
use crate::frontend::torch::pickle::{Object, Pickle, Ref};
use crate::frontend::torch::stored::stored_tensor;
use crate::frontend::torch::value::Value;
use ckpt_passes::ir::{Dim, Ty};
use ckpt_passes::{Error, Result};

/// The largest depth of tuples.
const MAX_NESTING: usize = 8;

/// An argument of `forward`.
#[derive(Debug)]
pub(super) enum Input {
    Tensor {
        name: String,
        optional: bool,
    },
    Members {
        name: String,
        tuple: bool,
        members: Vec<Input>,
    },
    /// A number or string with a default.
    Plain,
}

impl Input {
    /// Returns the argument's name; nothing for an argument that keeps its default.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Input::Tensor { name, .. } | Input::Members { name, .. } => Some(name),
            Input::Plain => None,
        }
    }
}

/// Returns the arguments of `forward`, without the module.
///
/// # Errors
/// An argument that is no tensor and has no default.
pub(super) fn signature(forward: &Function, given: &Given) -> Result<Vec<Input>> {
    let parameters = forward.parameters.get(1..).unwrap_or(&[]);
    parameters
        .iter()
        .map(|p| {
            let ty = p.ty.as_ref();
            match input(&p.name, ty, given, p.default.is_some(), 0) {
                Some(input) => Ok(input),
                None if p.default.is_some() => Ok(Input::Plain),
                None => Err(Error::model(
                    "inputs",
                    format!("the argument `{}` is no tensor", p.name),
                )
                .help("trace the model with torch.jit.trace: then it takes tensors only")),
            }
        })
        .collect()
}

fn input(
    name: &str,
    ty: Option<&Expr>,
    given: &Given,
    optional: bool,
    depth: usize,
) -> Option<Input> {
    let tensor = |optional| {
        Some(Input::Tensor {
            name: name.to_string(),
            optional,
        })
    };
    let Some(ty) = ty else {
        return tensor(optional);
    };
    let (word, inner) = match &ty.kind {
        ExprKind::Name(word) => (word, None),
        ExprKind::Subscript(of, inner) => match &of.kind {
            ExprKind::Name(word) => (word, Some(&**inner)),
            _ => return None,
        },
        _ => return None,
    };
    if depth == MAX_NESTING {
        return None;
    }
    match (&**word, inner) {
        ("Tensor", None) => tensor(optional),
        ("Optional", Some(inner)) => input(name, Some(inner), given, true, depth + 1),
        ("List", Some(inner)) => {
            let mut members = Vec::new();
            loop {
                let member = format!("{name}.{}", members.len());
                if !given.speaks_of(&member) {
                    break;
                }
                members.push(input(&member, Some(inner), given, false, depth + 1)?);
            }
            Some(Input::Members {
                name: name.to_string(),
                tuple: false,
                members,
            })
        }
        ("Tuple", Some(inner)) => {
            let types = match &inner.kind {
                ExprKind::Tuple(types) => types.as_slice(),
                _ => std::slice::from_ref(inner),
            };
            let members = types
                .iter()
                .enumerate()
                .map(|(i, ty)| input(&format!("{name}.{i}"), Some(ty), given, false, depth + 1));
            Some(Input::Members {
                name: name.to_string(),
                tuple: true,
                members: members.collect::<Option<_>>()?,
            })
        }
        _ => None,
    }
}

/// Calls `leaf` with the name of each input and whether it is optional.
fn visit<'a>(inputs: &'a [Input], leaf: &mut dyn FnMut(&'a str, bool)) {
    for input in inputs {
        match input {
            Input::Tensor { name, optional } => leaf(name, *optional),
            // The name of a list without members stands for them.
            Input::Members {
                name,
                members,
                tuple: false,
            } if members.is_empty() => leaf(name, false),
            Input::Members { members, .. } => visit(members, leaf),
            Input::Plain => {}
        }
    }
}

/// Returns the inputs that need a type and have none.
pub(super) fn missing<'a>(inputs: &'a [Input], given: &Given) -> Vec<&'a str> {
    let mut missing = Vec::new();
    visit(inputs, &mut |name, optional| {
        if !optional && given.type_of(name).is_none() {
            missing.push(name);
        }
    });
    missing
}

/// Fails if a type is given for an input that the model does not have.
pub(super) fn refuse_others(inputs: &[Input], given: &Given) -> Result<()> {
    let mut names = Vec::new();
    visit(inputs, &mut |name, _| names.push(name));
    match given
        .inputs
        .iter()
        .find(|i| !names.contains(&i.name.as_str()))
    {
        None => Ok(()),
        Some(other) => Err(Error::usage(
            "input",
            format!("the model has no input `{}`", other.name),
        )
        .found(format!("inputs {}", names.join(", ")))),
    }
}

/// Returns the error that asks for types.
pub(super) fn wanted(inputs: &[Input], missing: &[&str], archive: &Archive) -> Box<Error> {
    let mut all = Vec::new();
    visit(inputs, &mut |name, optional| {
        all.push(match optional {
            true => format!("{name} (optional)"),
            false => name.to_string(),
        });
    });
    let message = format!(
        "TorchScript tells no types of inputs, and {} given for {}",
        if missing.len() == 1 {
            "none is"
        } else {
            "none are"
        },
        missing.join(", ")
    );
    let traced = traced(archive).unwrap_or_default();
    let mut names = Vec::new();
    for input in inputs {
        match input {
            Input::Tensor { name, .. } => names.push(name.clone()),
            // The rest of the traced inputs are taken for its members.
            Input::Members { name, .. } => {
                let rest = traced.len().saturating_sub(names.len());
                names.extend((0..rest).map(|i| format!("{name}.{i}")));
            }
            Input::Plain => {}
        }
    }
    let options: Vec<String> = match traced.len() == names.len() && !names.is_empty() {
        true => names
            .into_iter()
            .zip(traced)
            .map(|(name, ty)| format!("--input '{}'", InputType { name, ty }))
            .collect(),
        false => missing
            .iter()
            .map(|n| format!("--input '{n}:DTYPE[DIMS]'"))
            .collect(),
    };
    Error::usage("input", message)
        .found(format!("inputs {}", all.join(", ")))
        .help(format!(
            "{}, sizes as numbers or names such as batch; or --inputs FILE with examples",
            options.join(" ")
        ))
}

/// Returns the types of the tensors that the model was traced with, if the archive has them.
fn traced(archive: &Archive) -> Option<Vec<Ty>> {
    let pickle = read_pickle(archive, "traced_inputs.pkl").ok()?;
    // `restore_type_tag({"forward": …}, type)`.
    let root = match pickle.get(pickle.root()) {
        Object::Call { arguments, .. } => *pickle.items(*arguments)?.first()?,
        _ => pickle.root(),
    };
    let Object::Dict(methods) = pickle.get(root) else {
        return None;
    };
    let (_, inputs) = methods
        .iter()
        .find(|(name, _)| pickle.str(*name) == Some("forward"))?;
    let mut types = Vec::new();
    collect(&pickle, *inputs, &mut types, 0)?;
    Some(types)
}

/// Collects the types of tensors. Returns nothing if one is complex, because no input here is.
fn collect(pickle: &Pickle, at: Ref, types: &mut Vec<Ty>, depth: usize) -> Option<()> {
    if depth > MAX_NESTING || types.len() > 256 {
        return Some(());
    }
    if let Ok(Some(tensor)) = stored_tensor(pickle, at) {
        let dims = tensor.window.sizes.iter().map(|d| Dim::from(*d as i64));
        types.push(Ty::new(tensor.dtype, dims.collect::<Vec<_>>()));
        return (!tensor.is_complex).then_some(());
    }
    let items = match pickle.get(at) {
        Object::Call { arguments, .. } => match pickle.items(*arguments) {
            Some([first, ..]) => std::slice::from_ref(first),
            _ => &[],
        },
        _ => pickle.items(at).unwrap_or(&[]),
    };
    for item in items {
        collect(pickle, *item, types, depth + 1)?;
    }
    Some(())
}

impl Replay<'_, '_> {
    /// Declares an argument's inputs.
    pub(super) fn input(
        &mut self,
        input: &Input,
        given: &Given,
        recorded: &mut Vec<InputType>,
    ) -> Result<Item> {
        match input {
            Input::Tensor { name, .. } => match given.type_of(name) {
                Some(ty) => {
                    let tensor = self.lowering.input(name, ty.clone())?;
                    recorded.push(InputType {
                        name: name.clone(),
                        ty: ty.clone(),
                    });
                    Ok(Item::Value(Value::Tensor(tensor)))
                }
                None => Ok(Item::NONE),
            },
            Input::Members { tuple, members, .. } => {
                let mut items = Vec::with_capacity(members.len());
                for member in members {
                    items.push(self.input(member, given, recorded)?);
                }
                self.containers.add(match tuple {
                    true => Content::Tuple(items),
                    false => Content::List(items),
                })
            }
            Input::Plain => Ok(Item::NONE),
        }
    }
}
