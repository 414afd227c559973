//! Attributes of the file's nodes as ours: by the kind that the op's row says, and the contents of `Constant`.

use super::import::Importer;
use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, NodeProto};
use ckpt_passes::ir::{Attr, AttrKind, DType, Tensor};
use ckpt_passes::{Error, Result};

impl Importer<'_, '_> {
    /// `Constant`: its tensor, under the name of its result.
    pub(super) fn constant(&mut self, node: &NodeProto) -> Result<()> {
        let (Some(attribute), Some(name)) = (node.attribute.first(), node.output.first()) else {
            return Err(Error::model("attribute", "Constant without a value"));
        };
        let floats = |v: &[f32]| -> Vec<u8> { v.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let tensor = match attribute.name() {
            "value" => {
                let Some(tensor) = &attribute.t else {
                    return Err(Error::model(
                        "attribute",
                        "Constant: `value` is not a tensor",
                    ));
                };
                (self.read)(tensor)?
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
                return Err(Error::model(
                    "attribute",
                    format!("Constant: `{other}` is not supported"),
                ));
            }
        };
        self.claim_name(name)?;
        let id = self.graph.add_init(name, tensor);
        self.contents.read_init(&self.graph, id);
        self.scope.insert(name.clone(), id);
        Ok(())
    }

    /// An attribute as the row's kind of it.
    ///
    /// # Errors
    /// The file has another kind, or an element type that we do not have.
    pub(super) fn attribute(&mut self, attribute: &AttributeProto, kind: AttrKind) -> Result<Attr> {
        let wrong = || {
            let found =
                AttributeType::try_from(attribute.r#type()).map_or("?", |t| t.as_str_name());
            Error::model(
                "attribute",
                format!("attribute `{}` is of the wrong kind", attribute.name()),
            )
            .expected(kind.to_string())
            .found(found)
        };
        let string = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| wrong());
        Ok(match (kind, AttributeType::try_from(attribute.r#type())) {
            (AttrKind::Int, Ok(AttributeType::Int)) => Attr::Int(attribute.i()),
            (AttrKind::Float, Ok(AttributeType::Float)) => Attr::Float(attribute.f()),
            (AttrKind::Str, Ok(AttributeType::String)) => Attr::Str(string(attribute.s())?),
            (AttrKind::Ints, Ok(AttributeType::Ints)) => Attr::Ints(attribute.ints.clone()),
            (AttrKind::Floats, Ok(AttributeType::Floats)) => Attr::Floats(attribute.floats.clone()),
            (AttrKind::Strs, Ok(AttributeType::Strings)) => Attr::Strs(
                attribute
                    .strings
                    .iter()
                    .map(|s| string(s))
                    .collect::<Result<_>>()?,
            ),
            (AttrKind::DType, Ok(AttributeType::Int)) => {
                let code = i32::try_from(attribute.i()).unwrap_or(0);
                Attr::DType(DType::from_onnx_code(code).ok_or_else(|| {
                    Error::model("type", format!("element type {code} is not supported"))
                })?)
            }
            (AttrKind::Tensor, Ok(AttributeType::Tensor)) => match &attribute.t {
                Some(tensor) => Attr::Tensor((self.read)(tensor)?),
                None => return Err(wrong()),
            },
            _ => return Err(wrong()),
        })
    }
}
