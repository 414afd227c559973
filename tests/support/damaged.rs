//! Files that are wrong in one way each, made from fixtures; their names say what is wrong with them.

use super::archive::Saved;
use super::command::fixture;
use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, StringStringEntryProto,
    attribute_proto::AttributeType, tensor_proto::DataLocation,
};
use prost::Message;
use std::io::{Cursor, Read, Write};
use std::path::Path;

/// The GPT-2 fixture with one thing changed.
fn changed(change: impl FnOnce(&mut ModelProto, &mut GraphProto)) -> Vec<u8> {
    let bytes = std::fs::read(fixture("gpt2", "model.onnx")).unwrap();
    let mut model = ModelProto::decode(bytes.as_slice()).unwrap();
    let mut graph = model.graph.take().unwrap();
    change(&mut model, &mut graph);
    model.graph = Some(graph);
    model.encode_to_vec()
}

fn node(op_type: &str, input: &str, output: &str) -> NodeProto {
    NodeProto {
        name: Some("added".into()),
        op_type: Some(op_type.into()),
        input: vec![input.into()],
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

/// An archive of `exported` with the entries that end in `end` replaced.
fn repacked(file: &str, end: &str, content: &[u8]) -> Vec<u8> {
    let bytes = std::fs::read(fixture("exported", file)).unwrap();
    let mut source = zip::ZipArchive::new(Cursor::new(bytes)).unwrap();
    let mut target = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let plain =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    let mut replaced = 0;
    for i in 0..source.len() {
        let mut entry = source.by_index(i).unwrap();
        let name = entry.name().to_string();
        let mut old = Vec::new();
        entry.read_to_end(&mut old).unwrap();
        target.start_file(name.clone(), plain).unwrap();
        let is_meant = name.ends_with(end);
        replaced += usize::from(is_meant);
        target
            .write_all(if is_meant { content } else { &old })
            .unwrap();
    }
    assert!(replaced > 0, "{file} has no {end}");
    target.finish().unwrap().into_inner()
}

fn archive(name: &str, content: &[u8]) -> Vec<u8> {
    let mut target = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let plain = zip::write::SimpleFileOptions::default();
    target.start_file(name, plain).unwrap();
    target.write_all(content).unwrap();
    target.finish().unwrap().into_inner()
}

fn place_weights(graph: &mut GraphProto, location: &str) {
    let large = graph
        .initializer
        .iter_mut()
        .find(|t| t.raw_data().len() > 4096);
    let tensor = large.expect("a weight of some size");
    tensor.raw_data = None;
    tensor.data_location = Some(DataLocation::External as i32);
    tensor.external_data = vec![StringStringEntryProto::new("location", location)];
}

/// Writes them all into `folder`.
pub fn write(folder: &Path) {
    let sub = AttributeProto {
        name: Some("then_branch".into()),
        r#type: Some(AttributeType::Graph as i32),
        g: Some(GraphProto::default()),
        ..AttributeProto::default()
    };
    let function = FunctionProto {
        name: Some("f".into()),
        domain: Some("local".into()),
        ..FunctionProto::default()
    };
    let files: [(&str, Vec<u8>); 19] = [
        (
            "cycle.onnx",
            changed(|_, g| g.node[0].input[0] = g.node[0].output[0].clone()),
        ),
        (
            "data.onnx",
            changed(|_, g| g.initializer[0].raw_data = Some(vec![0; 3].into())),
        ),
        (
            "external.onnx",
            changed(|_, g| place_weights(g, "../weights")),
        ),
        (
            "absent.onnx",
            changed(|_, g| place_weights(g, "weights.data")),
        ),
        (
            "function.onnx",
            changed(|m, _| m.functions = vec![function.clone(), function]),
        ),
        (
            "twice.onnx",
            changed(|_, g| g.node.push(node("Neg", "input_ids", "logits"))),
        ),
        ("outputs.onnx", changed(|_, g| g.output.clear())),
        (
            "body.onnx",
            changed(|_, g| {
                let mut branch = node("If", "logits", "extra");
                branch.attribute.push(sub);
                g.node.push(branch);
            }),
        ),
        (
            "opset.onnx",
            changed(|m, _| m.opset_import[0].version = Some(99)),
        ),
        ("version.onnx", changed(|m, _| m.ir_version = Some(1))),
        (
            "code.pt",
            repacked("block.pt", ".py", b"class Model(Module):\n  def forward("),
        ),
        (
            "pickle.pt",
            repacked("block.pt", "/data.pkl", b"\x80\x02cposix\nsystem\n."),
        ),
        (
            "json.pt2",
            repacked("train.pt2", "models/model.json", b"{\"graph\": "),
        ),
        (
            "inputs.pt",
            Saved::new("x: Tensor,\n    k: int -> Tensor", "return torch.mul(x, k)").zip(),
        ),
        (
            "outputs.pt",
            Saved::new("x: Tensor -> Tensor", "return \"text\"").zip(),
        ),
        (
            "size.pt",
            Saved::new("x: Tensor -> Tensor", "return torch.floordiv(1, 0)").zip(),
        ),
        (
            "memory.pt",
            Saved::new(
                "x: Tensor -> Tensor",
                "y = torch.expand(x, [3, 4])\n_0 = torch.add_(y, 1)\nreturn y",
            )
            .zip(),
        ),
        ("npy.npz", archive("in.tokens.npy", b"no array")),
        ("other.npz", archive("in.tokens.txt", b"no array")),
    ];
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
}
