//! One foreign node as a whole model, read.

use ckpt_opt::frontend::onnx::import::{Imported, import};
use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto,
    attribute_proto::AttributeType,
    tensor_shape_proto::{Dimension, dimension},
    type_proto,
};
use ckpt_opt::frontend::onnx::tensor;
use ckpt_passes::Result;
use ckpt_passes::ir::{DType, Graph, Phase, Ty};

pub const ORT: &str = "com.microsoft";

/// One node under test and its operands: name, element type, sizes or names of sizes; an empty name for none.
pub struct One {
    pub node: NodeProto,
    pub inputs: Vec<ValueInfoProto>,
    /// Nodes after it.
    pub more: Vec<NodeProto>,
    opset: i64,
    initializers: Vec<TensorProto>,
    outputs: Vec<String>,
}

pub fn one(domain: &str, op: &str, operands: &[(&str, DType, &[&str])], results: &[&str]) -> One {
    let node = NodeProto {
        name: Some("block/op".into()),
        domain: Some(domain.into()),
        op_type: Some(op.into()),
        input: operands.iter().map(|(n, ..)| n.to_string()).collect(),
        output: results.iter().map(|n| n.to_string()).collect(),
        metadata_props: vec![StringStringEntryProto::new("from", "a test")],
        ..NodeProto::default()
    };
    let given = operands.iter().filter(|(n, ..)| !n.is_empty());
    One {
        node,
        inputs: given.map(|(n, d, dims)| input(n, *d, dims)).collect(),
        more: Vec::new(),
        opset: 23,
        initializers: Vec::new(),
        outputs: results
            .iter()
            .filter(|n| !n.is_empty())
            .map(|n| n.to_string())
            .collect(),
    }
}

pub fn input(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = dims.iter().map(|d| Dimension {
        denotation: None,
        value: Some(match d.parse() {
            Ok(n) => dimension::Value::DimValue(n),
            Err(_) => dimension::Value::DimParam(d.to_string()),
        }),
    });
    let tensor = type_proto::Tensor {
        elem_type: Some(dtype.onnx_code()),
        shape: Some(TensorShapeProto { dim: dim.collect() }),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            denotation: None,
            value: Some(type_proto::Value::TensorType(tensor)),
        }),
        ..ValueInfoProto::default()
    }
}

impl One {
    pub fn int(self, name: &str, value: i64) -> One {
        self.attribute(int(name, value))
    }

    pub fn float(self, name: &str, value: f32) -> One {
        self.attribute(AttributeProto {
            name: Some(name.into()),
            r#type: Some(AttributeType::Float as i32),
            f: Some(value),
            ..AttributeProto::default()
        })
    }

    pub fn attribute(mut self, attribute: AttributeProto) -> One {
        self.node.attribute.push(attribute);
        self
    }

    pub fn opset(mut self, opset: i64) -> One {
        self.opset = opset;
        self
    }

    /// A boolean scalar that is part of the file.
    pub fn flag(mut self, name: &str, on: bool) -> One {
        self.initializers.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::Bool.onnx_code()),
            raw_data: Some(vec![u8::from(on)].into()),
            ..TensorProto::default()
        });
        self
    }

    /// An int64 scalar that is part of the file.
    pub fn whole(self, name: &str, number: i64) -> One {
        self.stored(name, &[], &[number])
    }

    /// An int64 vector that is part of the file.
    pub fn list(self, name: &str, numbers: &[i64]) -> One {
        self.stored(name, &[numbers.len() as i64], numbers)
    }

    fn stored(mut self, name: &str, dims: &[i64], numbers: &[i64]) -> One {
        self.inputs.retain(|i| i.name() != name);
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.initializers.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::I64.onnx_code()),
            dims: dims.to_vec(),
            raw_data: Some(bytes.into()),
            ..TensorProto::default()
        });
        self
    }

    /// A float32 scalar that is part of the file.
    pub fn number(mut self, name: &str, number: f32) -> One {
        self.inputs.retain(|i| i.name() != name);
        self.initializers.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::F32.onnx_code()),
            raw_data: Some(number.to_le_bytes().to_vec().into()),
            ..TensorProto::default()
        });
        self
    }

    pub fn outputs(mut self, outputs: &[&str]) -> One {
        self.outputs = outputs.iter().map(|n| n.to_string()).collect();
        self
    }

    pub fn read(self) -> Result<Imported> {
        let import_of = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.into()),
            version: Some(version),
        };
        let mut imports = vec![import_of("", self.opset)];
        if !self.node.domain().is_empty() {
            imports.push(import_of(self.node.domain(), 1));
        }
        let outputs = self.outputs.iter().map(|name| ValueInfoProto {
            name: Some(name.clone()),
            ..ValueInfoProto::default()
        });
        let model = ModelProto {
            ir_version: Some(10),
            opset_import: imports,
            graph: Some(GraphProto {
                name: Some("g".into()),
                output: outputs.collect(),
                node: [vec![self.node], self.more].concat(),
                input: self.inputs,
                initializer: self.initializers,
                ..GraphProto::default()
            }),
            ..ModelProto::default()
        };
        let mut files = ckpt_opt::frontend::onnx::external::Files::beside("none.onnx".as_ref());
        let imported = import(&model, &mut |t| tensor::read(t, &mut files))?;
        ckpt_passes::ir::verify::verify(&imported.graph)?;
        Ok(imported)
    }

    /// A graph whose nodes all have the standing of the node they come from.
    pub fn graph(self) -> Graph {
        let graph = self.read().unwrap_or_else(|e| panic!("{e}")).graph;
        assert_eq!(graph.phase, Phase::Typed);
        for id in graph.order() {
            let node = graph.node(*id);
            assert!(node.name.starts_with("block/op/"), "{}", node.name);
            assert_eq!(node.loc.node, "block/op");
            assert_eq!(node.meta.get("from").map(String::as_str), Some("a test"));
        }
        graph
    }

    /// The words of the error.
    pub fn refusal(self) -> String {
        match self.read() {
            Ok(_) => panic!("it was read"),
            Err(e) => e.to_string(),
        }
    }
}

pub fn text(name: &str, value: &'static str) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::String as i32),
        s: Some(value.as_bytes().into()),
        ..AttributeProto::default()
    }
}

pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

pub fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Ints as i32),
        ints: values.to_vec(),
        ..AttributeProto::default()
    }
}

pub fn ops(graph: &Graph) -> String {
    let names: Vec<&str> = graph
        .order()
        .iter()
        .map(|n| graph.node(*n).op.name)
        .collect();
    names.join(" ")
}

pub fn output(graph: &Graph, slot: usize) -> (String, String) {
    let value = graph.value(graph.outputs()[slot]);
    (
        value.name.clone(),
        value.ty.as_ref().map_or("?".into(), Ty::to_string),
    )
}

pub const X: (&str, DType, &[&str]) = ("x", DType::F32, &["b", "s", "8"]);
pub const SKIP: (&str, DType, &[&str]) = ("skip", DType::F32, &["b", "s", "8"]);
pub const NONE: (&str, DType, &[&str]) = ("", DType::F32, &[]);

pub fn vector(name: &'static str) -> (&'static str, DType, &'static [&'static str]) {
    (name, DType::F32, &["8"])
}
