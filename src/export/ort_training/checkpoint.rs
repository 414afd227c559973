//! The file `checkpoint` of ONNX Runtime's on-device training: parameters by name, in a flatbuffer.
//!
//! The schema is `onnxruntime/core/flatbuffers/schema/ort_training_checkpoint.fbs` and, for tensors, `ort.fbs` of
//! ONNX Runtime 1.19. Constants here are the places of fields in the tables of that schema.

use ckpt_passes::ir::Tensor;
use ckpt_passes::{Error, Result};
use flatbuffers::{
    FlatBufferBuilder, TableFinishedWIPOffset, WIPOffset, field_index_to_field_offset as slot,
};

/// The version of the schema.
const VERSION: i32 = 2;
const IDENTIFIER: &str = "ODTC";
/// The most bytes of parameters. A flatbuffer has 31-bit offsets, and tables and names need some of them.
const MAX_BYTES: u64 = (1 << 31) - (1 << 24);

/// Fields of `Checkpoint`.
mod root {
    pub const VERSION: u16 = 0;
    pub const MODULE_STATE: u16 = 1;
}

/// Fields of `ModuleState`.
mod module_state {
    pub const REQUIRES_GRAD: u16 = 0;
    pub const FROZEN: u16 = 1;
}

/// Fields of `Tensor`.
mod tensor {
    pub const NAME: u16 = 0;
    pub const DIMS: u16 = 2;
    pub const DATA_TYPE: u16 = 3;
    pub const RAW_DATA: u16 = 4;
}

type Table = WIPOffset<TableFinishedWIPOffset>;

/// Returns the content of the file. Moments of the optimizer are not in it: ONNX Runtime begins with zeros.
///
/// # Errors
/// A parameter whose content is absent; more bytes than a flatbuffer holds.
pub fn encode(trained: &[(&str, Tensor)], frozen: &[(&str, Tensor)]) -> Result<Vec<u8>> {
    let all = trained.iter().chain(frozen);
    let sizes = all.map(|(_, t)| t.elements() * t.dtype.size_bytes());
    let bytes: u64 = sizes.sum();
    if bytes > MAX_BYTES {
        let what = "the parameters exceed the 2 GiB that a checkpoint of ONNX Runtime holds";
        return Err(Error::model("format", what)
            .expected(format!("at most {MAX_BYTES} bytes"))
            .found(format!("{bytes} bytes"))
            .help("write a smaller model, or use --to onnx"));
    }
    let mut builder = FlatBufferBuilder::with_capacity(bytes as usize + (1 << 16));
    let requires_grad = tensors(&mut builder, trained)?;
    let frozen = tensors(&mut builder, frozen)?;
    let requires_grad = builder.create_vector(&requires_grad);
    let frozen = builder.create_vector(&frozen);
    let table = builder.start_table();
    builder.push_slot_always(slot(module_state::REQUIRES_GRAD), requires_grad);
    builder.push_slot_always(slot(module_state::FROZEN), frozen);
    let state = builder.end_table(table);
    let table = builder.start_table();
    builder.push_slot_always(slot(root::VERSION), VERSION);
    builder.push_slot_always(slot(root::MODULE_STATE), state);
    let root = builder.end_table(table);
    builder.finish(root, Some(IDENTIFIER));
    let (mut content, start) = builder.collapse();
    content.drain(..start);
    Ok(content)
}

fn tensors(builder: &mut FlatBufferBuilder, tensors: &[(&str, Tensor)]) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (name, content) in tensors {
        let absent = || {
            let what = format!("the file that holds `{name}` is absent");
            Error::environment("weights", what)
        };
        let raw = builder.create_vector(content.bytes().ok_or_else(absent)?.as_ref());
        let dims: Vec<i64> = content.dims.iter().map(|d| *d as i64).collect();
        let dims = builder.create_vector(&dims);
        let name = builder.create_string(name);
        let table = builder.start_table();
        builder.push_slot_always(slot(tensor::NAME), name);
        builder.push_slot_always(slot(tensor::DIMS), dims);
        builder.push_slot_always(slot(tensor::DATA_TYPE), content.dtype.onnx_code());
        builder.push_slot_always(slot(tensor::RAW_DATA), raw);
        tables.push(builder.end_table(table));
    }
    Ok(tables)
}
