//! The parameters, buffers and constants of an archive: raw bytes, found through two tables of names.
//!
//! A tensor of a subclass is stored as `torch.save` writes it: an archive in the archive, with a pickle that describes it.
//! It is read if it is a plain tensor. An object that only its class can build is refused, never built.

use super::super::archive::Archive;
use super::super::aten::{Kind, Lowering, Weight, complex_of_code, dtype_of_code};
use super::super::pickle;
use super::super::stored::{MAX_RANK, Window, is_tensor_global, stored_tensor};
use super::super::value::Value;
use super::schema::{Payload, Size, TensorMeta, WeightsConfig};
use bytes::Bytes;
use ckpt_passes::ir::DType;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

/// The largest table that is read.
const MAX_CONFIG_BYTES: u64 = 256 << 20;

/// The largest pickle of one tensor.
const MAX_PICKLE_BYTES: u64 = 1 << 20;

/// The folders of weights and of constants, each with its table.
const FOLDERS: [(&str, &str); 2] = [
    ("data/weights", "data/weights/model_weights_config.json"),
    (
        "data/constants",
        "data/constants/model_constants_config.json",
    ),
];

/// The tensors of an archive by name.
#[derive(Default)]
pub struct Weights {
    found: BTreeMap<String, Stored>,
}

struct Stored {
    /// The entry of the archive. Weights in one entry are tied.
    path: String,
    payload: Payload,
    bytes: Bytes,
}

impl Weights {
    /// Reads the tables. The contents stay in the file.
    ///
    /// # Errors
    /// A table that is damaged, or names an entry that is not there.
    pub fn read(archive: &Archive) -> Result<Weights> {
        let mut weights = Weights::default();
        for (folder, table) in FOLDERS {
            if !archive.contains(table) {
                continue;
            }
            let text = archive.content(table, MAX_CONFIG_BYTES)?;
            let config: WeightsConfig = serde_json::from_slice(&text)
                .map_err(|e| Error::model("pt2", format!("{table} is damaged: {e}")))?;
            for (name, payload) in config.config {
                let path = format!("{folder}/{}", payload.path_name);
                let bytes = archive.mapped(&path)?;
                weights.found.entry(name).or_insert(Stored {
                    path,
                    payload,
                    bytes,
                });
            }
        }
        Ok(weights)
    }

    /// Declares the weight of that name.
    ///
    /// # Errors
    /// A weight that is missing or of no known kind; see [`Lowering::weight`].
    pub fn declare(&self, lowering: &mut Lowering, name: &str, kind: Kind) -> Result<Value> {
        let place = |e: Box<Error>| e.at(format!("the weight `{name}`"));
        let stored = self
            .found
            .get(name)
            .ok_or_else(|| Error::model("data", format!("the archive has no weight `{name}`")))?;
        if stored.payload.use_pickle {
            return pickled(lowering, stored, name, kind).map_err(place);
        }
        let Some(meta) = &stored.payload.tensor_meta else {
            return Err(place(Error::model("data", "the file tells no type of it")));
        };
        check_rank(meta).map_err(place)?;
        let dims = numbers(&meta.sizes).map_err(place)?;
        let strides = numbers(&meta.strides).map_err(place)?;
        let offset = match &meta.storage_offset {
            None => 0,
            Some(offset) => number(offset).map_err(place)?,
        };
        let parts = complex_of(meta.dtype);
        let mut window = Window {
            offset,
            sizes: dims,
            strides,
        };
        if parts.is_some() {
            window = window.of_pairs().map_err(place)?;
        }
        let tensor = lowering.weight(&Weight {
            name,
            kind: trained(kind, meta.requires_grad),
            storage: &stored.path,
            bytes: stored.bytes.clone(),
            dtype: parts.map_or_else(|| dtype(meta).map_err(place), Ok)?,
            dims: &window.sizes,
            strides: &window.strides,
            offset: window.offset,
        })?;
        Ok(match parts {
            Some(_) => Value::Complex(tensor),
            None => Value::Tensor(tensor),
        })
    }
}

/// Returns the kind of a weight whose `requires_grad` is known.
fn trained(kind: Kind, trainable: bool) -> Kind {
    match kind {
        Kind::Parameter { .. } => Kind::Parameter { trainable },
        other => other,
    }
}

/// Declares a tensor that `torch.save` wrote.
fn pickled(lowering: &mut Lowering, stored: &Stored, name: &str, kind: Kind) -> Result<Value> {
    let archive = Archive::read(stored.bytes.clone())?;
    let text = archive.content("data.pkl", MAX_PICKLE_BYTES)?;
    let help = "export with plain tensors as parameters: a subclass of tensors is built by its own code, which is never run";
    let pickle = pickle::load(&text, &is_tensor_global).map_err(|e| e.help(help))?;
    let tensor = stored_tensor(&pickle, pickle.root())?
        .ok_or_else(|| Error::model("pickle", "there is no tensor in its pickle").help(help))?;
    let entry = format!("data/{}", tensor.key);
    let declared = lowering.weight(&Weight {
        name,
        kind: trained(kind, tensor.requires_grad),
        storage: &format!("{}/{entry}", stored.path),
        bytes: archive.mapped(&entry)?,
        dtype: tensor.dtype,
        dims: &tensor.window.sizes,
        strides: &tensor.window.strides,
        offset: tensor.window.offset,
    })?;
    Ok(tensor.seen(declared))
}

/// Fails for more axes than PyTorch's own kernels take.
///
/// # Errors
/// See above.
pub fn check_rank(meta: &TensorMeta) -> Result<()> {
    match meta.sizes.len() <= MAX_RANK && meta.strides.len() <= MAX_RANK {
        true => Ok(()),
        false => bail!(
            "type",
            "a tensor of {} axes is not supported",
            meta.sizes.len()
        ),
    }
}

fn number(size: &Size) -> Result<u64> {
    match size {
        Size::AsInt(n) if *n >= 0 => Ok(*n as u64),
        _ => bail!("data", "a size, stride or offset is no number"),
    }
}

fn numbers(sizes: &[Size]) -> Result<Vec<u64>> {
    sizes.iter().map(number).collect()
}

/// Returns the type of the parts of a complex tensor, by the schema's number.
pub fn complex_of(code: i64) -> Option<DType> {
    complex_of_code(code.saturating_sub(1))
}

/// Returns the element type of a tensor.
pub fn dtype(meta: &TensorMeta) -> Result<DType> {
    dtype_of(meta.dtype)
}

/// Returns the element type of one of the schema's numbers (`ScalarType` of torch/_export/serde/schema.py).
///
/// # Errors
/// A number that is not supported.
pub fn dtype_of(code: i64) -> Result<DType> {
    // The schema counts from 1 what PyTorch counts from 0, up to bool. The later types are in another order.
    let known = match code {
        13 => Some(DType::BF16),
        28 => Some(DType::U16),
        29 => Some(DType::F8E4M3FN),
        30 => Some(DType::F8E5M2),
        31 => Some(DType::F8E4M3FNUZ),
        32 => Some(DType::F8E5M2FNUZ),
        1..=12 => dtype_of_code(code - 1),
        _ => None,
    };
    known.ok_or_else(|| {
        let what = format!("element type {code} of the program is not supported");
        Error::model("type", what)
    })
}
