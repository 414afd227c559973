//! Attributes of the file's nodes, converted to the kinds that rows ask for, and the contents of `Constant`.

use super::import::Importer;
use crate::onnx::proto::attribute_proto::AttributeType;
use crate::onnx::proto::{AttributeProto, NodeProto};
use ckpt_passes::ir::{Attr, AttrKind, DType, Tensor};
use ckpt_passes::{Error, Result};

impl Importer<'_, '_> {
    /// `Constant`: its tensor, under the name of its result.
    pub(super) fn constant(&mut self, node: &NodeProto) -> Result<()> {
        let (Some(attribute), Some(name)) = (node.attribute.first(), node.output.first()) else {
            bail!("attribute", "Constant without a value");
        };
        let floats = |v: &[f32]| -> Vec<u8> { v.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let tensor = match attribute.name() {
            "value" => {
                let Some(tensor) = &attribute.t else {
                    bail!("attribute", "Constant: `value` is not a tensor");
                };
                return self.initializer(name, tensor);
            }
            "value_int" => Tensor::int(attribute.i()),
            "value_ints" => Tensor::ints(&attribute.ints),
            "value_float" => Tensor::new(DType::F32, [], floats(&[attribute.f()])),
            "value_floats" => Tensor::new(
                DType::F32,
                [attribute.floats.len() as u64],
                floats(&attribute.floats),
            ),
            other => {
                bail!("attribute", "Constant: `{other}` is not supported");
            }
        };
        self.claim_name(name)?;
        let id = self.graph.add_init(name, tensor);
        self.contents.read_init(&self.graph, id);
        self.scope.insert(name.clone(), id);
        Ok(())
    }

    /// Converts an attribute to the kind that the op's row asks for.
    ///
    /// # Errors
    /// The file has another kind, or an element type that we do not have.
    pub(super) fn attribute(&mut self, attribute: &AttributeProto, kind: AttrKind) -> Result<Attr> {
        let value = match (kind, attribute.r#type(), &attribute.t) {
            (AttrKind::DType, AttributeType::Int, _) => {
                let code = i32::try_from(attribute.i()).unwrap_or(0);
                Some(Attr::DType(DType::from_onnx_code(code).ok_or_else(
                    || Error::model("type", format!("element type {code} is not supported")),
                )?))
            }
            (AttrKind::Tensor, AttributeType::Tensor, Some(tensor)) => {
                Some(Attr::Tensor((self.read)(tensor)?))
            }
            _ => plain(attribute).filter(|value| value.kind() == kind),
        };
        value.ok_or_else(|| {
            Error::model(
                "attribute",
                format!("attribute `{}` is of the wrong kind", attribute.name()),
            )
            .expected(kind.to_string())
            .found(attribute.r#type().as_str_name())
        })
    }
}

/// Converts an attribute to our kind of its value; `None` for tensors, graphs, types and strings that are not UTF-8.
pub(super) fn plain(attribute: &AttributeProto) -> Option<Attr> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    Some(match attribute.r#type() {
        AttributeType::Int => Attr::Int(attribute.i()),
        AttributeType::Float => Attr::Float(attribute.f()),
        AttributeType::String => Attr::Str(text(attribute.s())?),
        AttributeType::Ints => Attr::Ints(attribute.ints.clone()),
        AttributeType::Floats => Attr::Floats(attribute.floats.clone()),
        AttributeType::Strings => {
            let strings = attribute.strings.iter();
            Attr::Strs(strings.map(|s| text(s)).collect::<Option<_>>()?)
        }
        _ => return None,
    })
}
