//! The modules of a saved model: `data.pkl` as objects with attributes, and the names of its tensors.
//!
//! An object may be an attribute of several others (a shared module), and so may a tensor (a tied weight). The name of a
//! tensor is its first path in the order of the file, as in PyTorch's `named_parameters`. Its other paths are aliases.

use super::code::{ClassAt, Code};
use crate::frontend::torch::archive::Archive;
use crate::frontend::torch::pickle::{MAX_PICKLE_BYTES, Object, Pickle, Ref, load};
use crate::frontend::torch::stored::{StoredTensor, is_tensor_global, stored_tensor};
use ckpt_passes::{Error, Result};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The largest depth of modules.
const MAX_DEPTH: usize = 100;

/// The largest number of paths of all modules and tensors.
const MAX_PATHS: usize = 1 << 21;

/// A saved model without its code.
pub struct Modules {
    pub pickle: Pickle,
    /// All names of each tensor, in the order of the file.
    pub names: Vec<Names>,
    index: BTreeMap<TensorKey, usize>,
    classes: RefCell<BTreeMap<(String, String), ClassAt>>,
}

/// The storage and elements of a tensor. Tensors with equal keys are one.
type TensorKey = (String, u64, Vec<u64>, Vec<u64>);

/// The names of one tensor.
pub struct Names {
    pub tensor: StoredTensor,
    pub paths: Vec<String>,
    pub is_parameter: bool,
    pub is_buffer: bool,
}

fn key(tensor: &StoredTensor) -> TensorKey {
    (
        tensor.key.clone(),
        tensor.window.offset,
        tensor.window.sizes.clone(),
        tensor.window.strides.clone(),
    )
}

/// Returns true for the globals that a model's pickles name.
fn allowed(module: &str, name: &str) -> bool {
    is_tensor_global(module, name)
        || module == "__torch__"
        || module.starts_with("__torch__.")
        || (module == "torch.jit._pickle"
            && matches!(
                name,
                "restore_type_tag"
                    | "build_intlist"
                    | "build_doublelist"
                    | "build_boollist"
                    | "build_tensorlist"
            ))
}

/// Reads a pickle of the archive.
///
/// # Errors
/// An entry that is not there or damaged, a pickle that is not one of a model.
pub fn read_pickle(archive: &Archive, name: &str) -> Result<Pickle> {
    let bytes = archive.content(name, MAX_PICKLE_BYTES)?;
    load(&bytes, &allowed).map_err(|e| e.at(format!("entry {name:?}")))
}

impl Modules {
    /// Reads `data.pkl` and names what is in it.
    ///
    /// # Errors
    /// A pickle that is damaged or whose root is no module; modules in themselves.
    pub fn read(archive: &Archive, code: &Code) -> Result<Modules> {
        let mut modules = Modules {
            pickle: read_pickle(archive, "data.pkl")?,
            names: Vec::new(),
            index: BTreeMap::new(),
            classes: RefCell::default(),
        };
        let mut walk = Walk {
            code,
            open: Vec::new(),
            paths: 0,
        };
        let root = modules.root();
        if modules.class_name(root).is_none() {
            bail!("pickle", "the archive's root object is no module");
        }
        walk.visit(&mut modules, root, "")?;
        Ok(modules)
    }

    /// Returns the module that is the model.
    pub fn root(&self) -> Ref {
        self.pickle.root()
    }

    /// Returns the module and name of an object's class; nothing for anything but an object of a class of the archive.
    pub fn class_name(&self, at: Ref) -> Option<(&str, &str)> {
        match self.pickle.get(at) {
            Object::Instance { class, .. } => self
                .pickle
                .global(*class)
                .filter(|(module, _)| module.starts_with("__torch__")),
            _ => None,
        }
    }

    /// Returns the class of an object.
    ///
    /// # Errors
    /// A class that the archive has no code of.
    pub fn class(&self, code: &Code, at: Ref) -> Result<Option<ClassAt>> {
        let Some((module, name)) = self.class_name(at) else {
            return Ok(None);
        };
        let key = (module.to_string(), name.to_string());
        if let Some(known) = self.classes.borrow().get(&key) {
            return Ok(Some(known.clone()));
        }
        let class = code.class(module, name)?;
        self.classes.borrow_mut().insert(key, class.clone());
        Ok(Some(class))
    }

    /// Returns the attributes of an object.
    ///
    /// # Errors
    /// A state that is no dictionary of names.
    pub fn attributes(&self, at: Ref) -> Result<Vec<(&str, Ref)>> {
        let damaged = || Error::model("pickle", "a module's state is damaged");
        let Object::Instance {
            state: Some(state), ..
        } = self.pickle.get(at)
        else {
            return Ok(Vec::new());
        };
        let Object::Dict(items) = self.pickle.get(*state) else {
            return Err(damaged());
        };
        items
            .iter()
            .map(|(name, value)| Ok((self.pickle.str(*name).ok_or_else(damaged)?, *value)))
            .collect()
    }

    /// Returns the names of a tensor of the model.
    pub fn names_of(&self, tensor: &StoredTensor) -> Option<&Names> {
        self.index.get(&key(tensor)).map(|at| &self.names[*at])
    }
}

struct Walk<'a> {
    code: &'a Code<'a>,
    /// The modules on the path to the current one. A module in itself would have no end.
    open: Vec<Ref>,
    paths: usize,
}

impl Walk<'_> {
    fn visit(&mut self, modules: &mut Modules, at: Ref, path: &str) -> Result<()> {
        if self.open.contains(&at) || self.open.len() == MAX_DEPTH {
            return Err(
                Error::model("pickle", "modules are nested too deeply, or in themselves")
                    .at(format!("module `{path}`")),
            );
        }
        self.open.push(at);
        let class = modules.class(self.code, at)?;
        let attributes: Vec<(String, Ref)> = modules
            .attributes(at)?
            .into_iter()
            .map(|(name, value)| (name.to_string(), value))
            .collect();
        for (name, value) in attributes {
            let full = match path {
                "" => name.clone(),
                _ => format!("{path}.{name}"),
            };
            self.paths += 1;
            if self.paths > MAX_PATHS {
                bail!("pickle", "the model has too many modules");
            }
            if let Some(tensor) = stored_tensor(&modules.pickle, value)? {
                let listed = |list: &[super::ast::Name]| list.iter().any(|n| **n == *name);
                let class = class.as_ref().map(ClassAt::class);
                let is_parameter = class.is_some_and(|c| listed(&c.parameters));
                let is_buffer = class.is_some_and(|c| listed(&c.buffers));
                modules.add(tensor, full, is_parameter, is_buffer);
            } else if modules.class_name(value).is_some() {
                self.visit(modules, value, &full)?;
            }
        }
        self.open.pop();
        Ok(())
    }
}

impl Modules {
    fn add(&mut self, tensor: StoredTensor, path: String, is_parameter: bool, is_buffer: bool) {
        let at = *self.index.entry(key(&tensor)).or_insert(self.names.len());
        if at == self.names.len() {
            self.names.push(Names {
                tensor,
                paths: Vec::new(),
                is_parameter: false,
                is_buffer: false,
            });
        }
        let names = &mut self.names[at];
        names.paths.push(path);
        names.is_parameter |= is_parameter;
        names.is_buffer |= is_buffer;
    }
}
