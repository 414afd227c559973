//! Small `torch.export` archives from their JSON, laid out as PyTorch writes them.

use serde_json::{Value, json};

/// A program: its JSON, the tables of weights and constants, and what they name.
#[derive(Clone)]
pub struct Program {
    pub model: Value,
    pub weights: Value,
    pub constants: Value,
    /// Names below the archive's folder, and contents.
    pub raw: Vec<(String, Vec<u8>)>,
}

pub fn symbol(name: &str) -> Value {
    json!({"as_expr": {"expr_str": format!("Symbol('{name}', positive=True, integer=True)"), "hint": {"as_int": 5}}})
}

/// The type of a row-major tensor; `dtype` is PyTorch's number (7: float32, 5: int64).
pub fn meta(dtype: i64, sizes: &[Value]) -> Value {
    let mut stride = 1;
    let mut strides: Vec<Value> = Vec::new();
    for size in sizes.iter().rev() {
        strides.insert(0, json!({"as_int": stride}));
        stride *= size["as_int"].as_i64().unwrap_or(1);
    }
    json!({"dtype": dtype, "sizes": sizes, "requires_grad": false, "device": {"type": "cpu", "index": null},
        "strides": strides, "storage_offset": {"as_int": 0}, "layout": 7})
}

pub fn int(n: i64) -> Value {
    json!({"as_int": n})
}

pub fn tensor(name: &str) -> Value {
    json!({"as_tensor": {"name": name}})
}

/// `out = target(args)`; each argument with its name.
pub fn node(target: &str, args: &[(&str, Value)], out: Value) -> Value {
    let inputs: Vec<Value> = args
        .iter()
        .map(|(name, arg)| json!({"name": name, "arg": arg, "kind": 1}))
        .collect();
    json!({"target": target, "inputs": inputs, "outputs": Value::Array(vec![out]), "metadata": {"nn_module_stack": "L__self__,,m.M"}})
}

impl Program {
    /// `x: f32[s0, 4]` and the parameter `w: f32[3, 4]` in, `linear(x, w)` and what follows out; the nodes are given
    /// `linear` and end with a tensor `y`.
    pub fn new(nodes: &[Value], values: &[(&str, Value)]) -> Program {
        let mut all = vec![node(
            "torch.ops.aten.linear.default",
            &[("input", tensor("x")), ("weight", tensor("p_w"))],
            tensor("linear"),
        )];
        all.extend_from_slice(nodes);
        let weight = meta(7, &[int(3), int(4)]);
        let mut types = json!({
            "x": meta(7, &[symbol("s0"), int(4)]),
            "p_w": weight,
            "linear": meta(7, &[symbol("s0"), int(3)]),
        });
        for (name, ty) in values {
            types[name] = ty.clone();
        }
        let graph = json!({
            "inputs": [tensor("p_w"), tensor("x")], "outputs": [tensor("y")], "nodes": all,
            "tensor_values": types, "sym_int_values": {"sym_size": symbol("s0")}, "sym_bool_values": {},
            "is_single_tensor_return": false,
        });
        let signature = json!({
            "input_specs": [
                {"parameter": {"arg": {"name": "p_w"}, "parameter_name": "w"}},
                {"user_input": {"arg": tensor("x")}},
            ],
            "output_specs": [{"user_output": {"arg": tensor("y")}}],
        });
        let mut parameter = weight;
        parameter["requires_grad"] = json!(true);
        Program {
            model: json!({
                "graph_module": {"graph": graph, "signature": signature, "module_call_graph": []},
                "opset_version": {"aten": 10}, "range_constraints": {"s0": {"min_val": 2, "max_val": 64}},
                "schema_version": {"major": 8, "minor": 17}, "verifiers": ["TRAINING"], "torch_version": "2.11.0",
            }),
            weights: json!({"config": {"w": {
                "path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": parameter,
            }}}),
            constants: json!({"config": {}}),
            raw: vec![("data/weights/weight_0".into(), vec![0; 48])],
        }
    }

    /// One that uses most of what a reader looks at.
    pub fn rich() -> Program {
        let reshaped = node(
            "torch.ops.aten.view.default",
            &[
                ("self", tensor("linear")),
                ("size", json!({"as_sym_ints": [{"as_name": "mul"}]})),
            ],
            tensor("view"),
        );
        let inner = json!({
            "inputs": [tensor("view")], "outputs": [tensor("cos")],
            "nodes": [node("torch.ops.aten.cos.default", &[("self", tensor("view"))], tensor("cos"))],
            "tensor_values": {}, "sym_int_values": {},
        });
        let region = node(
            "torch.ops.higher_order.wrap_with_set_grad_enabled",
            &[
                ("", json!({"as_bool": false})),
                ("", json!({"as_graph": {"name": "g", "graph": inner}})),
                ("", tensor("view")),
            ],
            tensor("cos_1"),
        );
        let joined = node(
            "torch.ops.aten.cat.default",
            &[(
                "tensors",
                json!({"as_tensors": [{"name": "cos_1"}, {"name": "view"}]}),
            )],
            tensor("cat"),
        );
        let parts = node(
            "torch.ops.aten.chunk.default",
            &[("self", tensor("cat")), ("chunks", int(2))],
            json!({"as_tensors": [{"name": "a"}, {"name": "b"}]}),
        );
        let size = node(
            "torch.ops.aten.sym_size.int",
            &[("self", tensor("x")), ("dim", int(0))],
            json!({"as_sym_int": {"as_name": "sym_size"}}),
        );
        let times = node(
            "_operator.mul",
            &[
                ("", json!({"as_sym_int": {"as_name": "sym_size"}})),
                ("", json!({"as_sym_int": {"as_int": 3}})),
            ],
            json!({"as_sym_int": {"as_name": "mul"}}),
        );
        let sum = node(
            "torch.ops.aten.add.Tensor",
            &[
                ("self", tensor("a")),
                ("other", tensor("b")),
                ("alpha", json!({"as_float": "Infinity"})),
            ],
            tensor("y"),
        );
        Program::new(&[size, times, reshaped, region, joined, parts, sum], &[])
    }

    #[allow(dead_code, reason = "the fuzzer changes programs in its own ways")]
    pub fn nodes(&mut self) -> &mut Vec<Value> {
        let nodes = &mut self.model["graph_module"]["graph"]["nodes"];
        nodes.as_array_mut().expect("a list of nodes")
    }

    /// Everything in the archive, below its folder.
    pub fn entries(&self) -> Vec<(String, Vec<u8>)> {
        let text = |v: &Value| v.to_string().into_bytes();
        let mut entries = vec![
            ("m/models/model.json".to_string(), text(&self.model)),
            (
                "m/data/weights/model_weights_config.json".to_string(),
                text(&self.weights),
            ),
            (
                "m/data/constants/model_constants_config.json".to_string(),
                text(&self.constants),
            ),
            ("m/archive_format".to_string(), b"pt2".to_vec()),
        ];
        let raw = self.raw.iter().map(|(n, b)| (format!("m/{n}"), b.clone()));
        entries.extend(raw);
        entries
    }
}
