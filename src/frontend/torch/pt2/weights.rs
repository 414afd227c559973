//! Where an archive keeps parameters, buffers and constants: raw bytes, found through two tables of names.

use super::super::archive::Archive;
use super::super::aten::{Kind, Lowering, TensorId, Weight};
use super::schema::{Payload, Size, TensorMeta, WeightsConfig};
use bytes::Bytes;
use ckpt_passes::ir::DType;
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;

const MAX_CONFIG_BYTES: u64 = 256 << 20;

/// The folders of weights and of constants, with their tables.
const FOLDERS: [(&str, &str); 2] = [
    ("data/weights", "data/weights/model_weights_config.json"),
    (
        "data/constants",
        "data/constants/model_constants_config.json",
    ),
];

/// All tensors of an archive by name.
#[derive(Default)]
pub struct Weights {
    found: BTreeMap<String, Stored>,
}

struct Stored {
    /// The entry, which is what ties weights.
    path: String,
    payload: Payload,
    bytes: Bytes,
}

impl Weights {
    /// Reads the tables; contents stay in the file.
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
    /// One that is not there, or not raw; see [`Lowering::weight`].
    pub fn declare(
        &self,
        lowering: &mut Lowering,
        name: &str,
        parameter: bool,
    ) -> Result<TensorId> {
        let place = |e: Box<Error>| e.at(format!("the weight `{name}`"));
        let stored = self
            .found
            .get(name)
            .ok_or_else(|| Error::model("data", format!("the archive has no weight `{name}`")))?;
        let meta = match (&stored.payload.tensor_meta, stored.payload.use_pickle) {
            (Some(meta), false) => meta,
            _ => {
                return Err(place(
                    Error::model("data", "a weight that was saved by pickle is not supported")
                        .help("export with plain tensors as parameters"),
                ));
            }
        };
        let dims = numbers(&meta.sizes).map_err(place)?;
        let strides = numbers(&meta.strides).map_err(place)?;
        let offset = match &meta.storage_offset {
            None => 0,
            Some(offset) => number(offset).map_err(place)?,
        };
        let kind = match parameter {
            true => Kind::Parameter {
                trainable: meta.requires_grad,
            },
            false => Kind::Buffer,
        };
        lowering.weight(&Weight {
            name,
            kind,
            storage: &stored.path,
            bytes: stored.bytes.clone(),
            dtype: dtype(meta).map_err(place)?,
            dims: &dims,
            strides: &strides,
            offset,
        })
    }
}

fn number(size: &Size) -> Result<u64> {
    match size {
        Size::AsInt(n) if *n >= 0 => Ok(*n as u64),
        _ => Err(Error::model(
            "data",
            "a size, stride or offset is no number",
        )),
    }
}

fn numbers(sizes: &[Size]) -> Result<Vec<u64>> {
    sizes.iter().map(number).collect()
}

/// The element type of a tensor, by the schema's numbers (`ScalarType` of torch/_export/serde/schema.py).
pub fn dtype(meta: &TensorMeta) -> Result<DType> {
    dtype_of(meta.dtype)
}

pub fn dtype_of(code: i64) -> Result<DType> {
    Ok(match code {
        1 => DType::U8,
        2 => DType::I8,
        3 => DType::I16,
        4 => DType::I32,
        5 => DType::I64,
        6 => DType::F16,
        7 => DType::F32,
        8 => DType::F64,
        12 => DType::Bool,
        13 => DType::BF16,
        28 => DType::U16,
        other => {
            return Err(Error::model(
                "type",
                format!("element type {other} of the program is not supported"),
            ));
        }
    })
}
