//! The protobuf messages of ONNX (IR version 14), and shorthands over their optional fields.
//!
//! The build script generates them from `onnx.proto`, which is that of onnx 1.23.2 (Apache-2.0). Fields newer than that
//! file are dropped when a model is read.

pub use generated::*;

use std::collections::BTreeMap;

#[allow(missing_docs, clippy::all, reason = "generated from onnx.proto")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/onnx.rs"));
}

/// Protobuf messages end at 2 GiB; larger models keep their weights in external files.
pub const MAX_MODEL_BYTES: u64 = i32::MAX as u64;

impl StringStringEntryProto {
    pub fn new(key: &str, value: &str) -> Self {
        StringStringEntryProto {
            key: Some(key.into()),
            value: Some(value.into()),
        }
    }
}

/// The value of a metadata key.
pub fn prop<'a>(props: &'a [StringStringEntryProto], key: &str) -> Option<&'a str> {
    props.iter().find(|p| p.key() == key).map(|p| p.value())
}

/// Returns all metadata by key.
pub fn to_map(props: &[StringStringEntryProto]) -> BTreeMap<String, String> {
    let pairs = props.iter().map(|p| (p.key().into(), p.value().into()));
    pairs.collect()
}

impl NodeProto {
    /// Returns the node's name, or `<op>_<index>` where it has none.
    pub fn name_or_index(&self, index: usize) -> String {
        match self.name() {
            "" => format!("{}_{index}", self.op_type()),
            name => name.to_string(),
        }
    }

    /// One line for messages: `node "fc/MatMul" (MatMul)`.
    pub fn describe(&self) -> String {
        let domain = match self.domain() {
            "" | "ai.onnx" => String::new(),
            d => format!("{d}::"),
        };
        let name = match self.name() {
            "" => self
                .output
                .iter()
                .find(|o| !o.is_empty())
                .map_or("", |o| o.as_str()),
            n => n,
        };
        format!("node \"{name}\" ({domain}{})", self.op_type())
    }
}
