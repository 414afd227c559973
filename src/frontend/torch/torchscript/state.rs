//! The contents of a saved model's objects: attributes, tensors of its state, constants of its code.

use super::ast::Name;
use super::item::{Content, Item, Real, Shared};
use super::modules::read_pickle;
use super::replay::{Replay, bad};
use crate::frontend::torch::aten::{Kind, Weight};
use crate::frontend::torch::pickle::{Object, Ref};
use crate::frontend::torch::stored::{StoredTensor, stored_tensor};
use crate::frontend::torch::value::{TensorId, Value};
use ckpt_passes::analysis::params::is_running_statistic;
use ckpt_passes::ir::{DType, Dim};
use ckpt_passes::{Error, Result};

impl Replay<'_, '_> {
    /// Returns `object.name`.
    pub(super) fn attribute_of(&mut self, of: &Item, name: &str) -> Result<Item> {
        let Item::Module(module, path) = of else {
            return Err(bad(format!("{} has no attribute `{name}`", of.kind())));
        };
        let found = self.modules.attributes(*module)?;
        let found = found
            .into_iter()
            .find(|(n, _)| *n == name)
            .map(|(_, at)| at);
        if let Some(at) = found {
            let full = match &**path {
                "" => name.to_string(),
                path => format!("{path}.{name}"),
            };
            return self.stored(at, &full, 0);
        }
        let class = self.modules.class(self.code, *module)?;
        let value = class.as_ref().and_then(|c| {
            let constants = &c.class().constants;
            constants.iter().find(|(n, _)| **n == *name).map(|(_, v)| v)
        });
        let literal = value.and_then(|v| Item::literal(&v.kind));
        literal.ok_or_else(|| bad(format!("the module `{path}` has no attribute `{name}`")))
    }

    /// Returns the value of an attribute from the model's pickle.
    fn stored(&mut self, at: Ref, path: &str, depth: usize) -> Result<Item> {
        let pickle = &self.modules.pickle;
        if self.modules.class_name(at).is_some() {
            return Ok(Item::Module(at, path.into()));
        }
        if let Some(tensor) = stored_tensor(pickle, at)? {
            if let Some(known) = self.tensors.get(&at) {
                return Ok(Item::Value(tensor.seen(*known)));
            }
            let declared = self.weight(&tensor, path)?;
            self.tensors.insert(at, declared);
            return Ok(Item::Value(tensor.seen(declared)));
        }
        let strange = || {
            bad(format!(
                "the attribute `{path}` is of a kind that is not supported"
            ))
        };
        if depth > 8 {
            return Err(strange());
        }
        let mut all = |items: &[Ref]| -> Result<Vec<Item>> {
            items
                .iter()
                .map(|i| self.stored(*i, path, depth + 1))
                .collect()
        };
        Ok(match pickle.get(at) {
            Object::None => Item::NONE,
            Object::Bool(b) => Item::of(*b),
            Object::Int(n) => Item::of(*n),
            Object::Float(x) => Item::of(*x),
            Object::Str(text) => Item::Value(Value::Str(text.clone())),
            Object::List(items) => {
                let items = all(items)?;
                self.containers.add(Content::List(items))?
            }
            Object::Tuple(items) => {
                let items = all(items)?;
                self.containers.add(Content::Tuple(items))?
            }
            Object::Dict(items) => {
                let mut pairs = Vec::with_capacity(items.len());
                for (key, value) in items {
                    pairs.push((
                        self.stored(*key, path, depth + 1)?,
                        self.stored(*value, path, depth + 1)?,
                    ));
                }
                self.containers.add(Content::Dict(pairs))?
            }
            // `restore_type_tag(value, type)` and `build_intlist(values)` are their first argument.
            Object::Call {
                function,
                arguments,
                ..
            } => match (pickle.global(*function), pickle.items(*arguments)) {
                (Some(("torch.jit._pickle", _)), Some([value, ..])) => {
                    self.stored(*value, path, depth + 1)?
                }
                _ => return Err(strange()),
            },
            _ => return Err(strange()),
        })
    }

    /// Declares a tensor of the model, under all its names.
    fn weight(&mut self, tensor: &StoredTensor, path: &str) -> Result<TensorId> {
        let names = self.modules.names_of(tensor);
        let kind = match names {
            Some(n) if n.is_parameter => Kind::Parameter {
                trainable: n.tensor.requires_grad,
            },
            // The file does not tell which buffers are persistent. Running statistics are.
            Some(n) if n.is_buffer => Kind::Buffer {
                persistent: n.paths.iter().any(|path| is_running_statistic(path)),
            },
            _ => Kind::Constant,
        };
        let own = [path.to_string()];
        let paths = names.map_or(own.as_slice(), |n| n.paths.as_slice());
        let mut declared = self.declare(tensor, &paths[0], kind, "data")?;
        for alias in &paths[1..] {
            declared = self.declare(tensor, alias, kind, "data")?;
        }
        Ok(declared)
    }

    /// Declares the parameters that nothing reads. They belong to the model, and their gradients are 0.
    ///
    /// # Errors
    /// See [`crate::frontend::torch::aten::Lowering::weight`].
    pub(super) fn declare_unread(&mut self) -> Result<()> {
        let modules = self.modules;
        for names in modules.names.iter().filter(|n| n.is_parameter) {
            self.weight(&names.tensor, &names.paths[0])?;
        }
        Ok(())
    }

    fn declare(
        &mut self,
        tensor: &StoredTensor,
        name: &str,
        kind: Kind,
        folder: &str,
    ) -> Result<TensorId> {
        let storage = format!("{folder}/{}", tensor.key);
        let bytes = self.archive.mapped(&storage)?;
        if bytes.len() as u64 != tensor.storage_bytes() {
            return Err(Error::model(
                "archive",
                format!("the entry {storage:?} has the wrong size"),
            )
            .at(format!("tensor `{name}`"))
            .expected(format!("{} bytes", tensor.storage_bytes()))
            .found(format!("{} bytes", bytes.len())));
        }
        self.lowering.weight(&Weight {
            name,
            kind,
            storage: &storage,
            bytes,
            dtype: tensor.dtype,
            dims: &tensor.window.sizes,
            strides: &tensor.window.strides,
            offset: tensor.window.offset,
        })
    }

    /// Returns `CONSTANTS.cN`. An integer or a float64 without axes is a number that the program wrote.
    pub(super) fn constant(&mut self, name: &Name) -> Result<Item> {
        if self.constants.is_none() {
            self.constants = Some(read_pickle(self.archive, "constants.pkl")?);
        }
        let none = || bad(format!("there is no constant `{name}`"));
        let pickle = self.constants.as_ref().ok_or_else(none)?;
        let index: usize = name
            .strip_prefix('c')
            .and_then(|n| n.parse().ok())
            .ok_or_else(none)?;
        let all = pickle.items(pickle.root()).unwrap_or(&[]);
        let at = *all.get(index).ok_or_else(none)?;
        let tensor = stored_tensor(pickle, at)?.ok_or_else(|| {
            bad(format!(
                "the constant `{name}` is of a kind that is not supported"
            ))
        })?;
        if let Some(number) = self.number(&tensor)? {
            return Ok(number);
        }
        let declared = self.declare(
            &tensor,
            &format!("CONSTANTS.{name}"),
            Kind::Constant,
            "constants",
        )?;
        Ok(Item::Value(tensor.seen(declared)))
    }

    /// Returns the content of an int64 or float64 scalar; nothing for any other tensor.
    fn number(&self, tensor: &StoredTensor) -> Result<Option<Item>> {
        if !matches!(tensor.dtype, DType::I64 | DType::F64) || !tensor.window.sizes.is_empty() {
            return Ok(None);
        }
        let bytes = self.archive.mapped(&format!("constants/{}", tensor.key))?;
        let start = usize::try_from(tensor.window.offset.saturating_mul(8)).unwrap_or(usize::MAX);
        let Some(number) = bytes.get(start..).and_then(|b| b.first_chunk::<8>()) else {
            return Ok(None);
        };
        Ok(Some(match tensor.dtype {
            DType::I64 => {
                let number = Dim::from(i64::from_le_bytes(*number));
                Item::Number(Shared::fixed(number))
            }
            _ => {
                let value = f64::from_le_bytes(*number);
                Item::Real(Shared::fixed(Real { value, plain: true }))
            }
        }))
    }
}
