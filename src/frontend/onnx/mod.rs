//! ONNX files: protobuf on disk to [`Graph`](ckpt_passes::ir::Graph).
//!
//! [`mod@file`] maps and decodes, [`external`] and [`tensor`] bring weights without copying them, [`import`] builds the
//! graph: [`attributes`] of its nodes, [`types`] of its values, [`upgrade`] for older forms, [`decompose`] for foreign ops,
//! [`names`] and [`legacy`] for what the file tells about names, [`exported`] and [`restored`] for parameters that the exporter
//! folded or merged.

mod attributes;
mod claims;
mod decompose;
mod exported;
pub mod external;
pub mod file;
mod functions;
mod gradients;
pub mod import;
mod legacy;
pub mod names;
mod outputs;
mod restored;
mod sequences;
pub mod tensor;
pub mod types;
pub mod upgrade;

pub use crate::onnx::proto;

use super::file::recognise_other;
use super::given::Given;
use super::reader::{Frontend, Model};
use ckpt_passes::Result;
use std::path::Path;

/// The reader of ONNX files.
pub struct Onnx;

impl Frontend for Onnx {
    fn name(&self) -> &'static str {
        "ONNX"
    }

    fn recognises(&self, _path: &Path, head: &[u8]) -> bool {
        recognise_other(head).is_none()
    }

    fn read(&self, path: &Path, given: &Given) -> Result<Model> {
        given.refuse_output_names(self.name())?;
        let model = file::open(path)?;
        let mut files = external::Files::beside(path);
        let imported = import::import(&model, &mut |t| tensor::read(t, &mut files))
            .map_err(|e| e.at(path.display().to_string()))?;
        Ok(Model {
            graph: imported.graph,
            warnings: imported.warnings,
            recorded: Vec::new(),
        })
    }
}
