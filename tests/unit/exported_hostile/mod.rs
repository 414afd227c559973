//! Exported programs that are damaged, lie, or mean harm: a clear error, bounded memory, no panic.

use crate::support::archive;
mod program;

use archive::zip;
use bytes::Bytes;
use ckpt_opt::frontend::Model;
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::frontend::torch::archive::Archive;
use ckpt_opt::frontend::torch::read;
use ckpt_passes::analysis::ranges;
use ckpt_passes::analysis::sizes::Binding;
use ckpt_passes::{Kind, Result};
use program::{Program, int, meta, node, symbol, tensor};
use serde_json::{Value, json};

fn given(types: &[&str]) -> Given {
    Given {
        inputs: types.iter().map(|t| InputType::parse(t).unwrap()).collect(),
        ..Given::default()
    }
}

fn model(bytes: Vec<u8>, types: &[&str]) -> Result<Model> {
    read(&Archive::read(Bytes::from(bytes))?, &given(types))
}

fn outputs(program: &Program, types: &[&str]) -> Vec<String> {
    let model = model(zip(&program.entries()), types).unwrap_or_else(|e| panic!("{e}"));
    let graph = &model.graph;
    let show = |v: &_| format!("{}: {}", graph.value(*v).name, graph.ty(*v));
    graph.outputs().iter().map(show).collect()
}

/// The archive is refused, as a bad model, with these words.
fn refused(bytes: Vec<u8>, words: &[&str]) {
    let error = match model(bytes, &[]) {
        Ok(_) => panic!("accepted, expected {words:?}"),
        Err(error) => error,
    };
    assert_ne!(error.kind(), Kind::Bug, "{error}");
    for word in words {
        let text = error.to_string();
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

fn negated() -> Vec<Value> {
    vec![node(
        "torch.ops.aten.neg.default",
        &[("self", tensor("linear"))],
        tensor("y"),
    )]
}

fn plain() -> Program {
    Program::new(&negated(), &[])
}

/// The program with a value of its JSON replaced.
fn with(pointer: &str, value: Value) -> Vec<u8> {
    let mut program = plain();
    *program.model.pointer_mut(pointer).expect(pointer) = value;
    zip(&program.entries())
}

/// The archive with an entry replaced.
fn with_entry(name: &str, content: Vec<u8>) -> Vec<u8> {
    let mut entries = plain().entries();
    let entry = entries.iter_mut().find(|(n, _)| n == name).expect(name);
    entry.1 = content;
    zip(&entries)
}

fn weight(change: impl Fn(&mut Value)) -> Vec<u8> {
    let mut program = plain();
    change(&mut program.weights["config"]["w"]);
    zip(&program.entries())
}

#[test]
fn the_programs_are_good_before_they_are_damaged() {
    assert_eq!(outputs(&plain(), &[]), ["y: f32[s0, 3]"]);
    assert_eq!(outputs(&Program::rich(), &[]), ["y: f32[3*s0]"]);
    assert_eq!(
        outputs(&Program::rich(), &["x:f32[batch, 4]"]),
        ["y: f32[3*batch]"]
    );
}

#[test]
fn what_an_op_writes_into_is_self_whatever_others_call_it() {
    let args = [
        ("self", tensor("linear")),
        ("p", json!({"as_float": 0.1})),
        ("train", json!({"as_bool": false})),
    ];
    let dropped = node("torch.ops.aten.dropout_.default", &args, tensor("y"));
    assert_eq!(
        outputs(&Program::new(&[dropped], &[]), &[]),
        ["y: f32[s0, 3]"]
    );
}

/// `x[..., :4]` of four elements is an `alias`. Only decomposition makes one of `detach`.
#[test]
fn an_alias_is_no_detach_unless_the_program_was_decomposed() {
    let args = [("self", tensor("linear"))];
    let alias = node("torch.ops.aten.alias.default", &args, tensor("y"));
    let mut program = Program::new(&[alias], &[]);
    let warnings = |program: &Program| model(zip(&program.entries()), &[]).unwrap().warnings;
    assert_eq!(warnings(&program), Vec::<String>::new());
    program.model["verifiers"] = json!(["ATEN"]);
    assert!(warnings(&program)[0].contains("was decomposed"));
}

#[test]
fn complex_numbers_are_taken_only_where_they_are_meant() {
    let parts = [("real", tensor("linear")), ("imag", tensor("linear"))];
    let made = node("torch.ops.aten.complex.default", &parts, tensor("z"));
    let of = |op: &str, x: &str| {
        let target = format!("torch.ops.aten.{op}.default");
        node(&target, &[("self", tensor(x))], tensor("y"))
    };
    let then = |op: &str, told: i64| {
        let type_of_z = meta(told, &[symbol("s0"), int(3)]);
        Program::new(&[made.clone(), of(op, "z")], &[("z", type_of_z)])
    };
    // 10: complex64.
    let seen = then("view_as_real", 10);
    assert_eq!(outputs(&seen, &[]), ["y: f32[s0, 3, 2]"]);
    assert_eq!(outputs(&then("abs", 10), &[]), ["y: f32[s0, 3]"]);
    for (program, words) in [
        (
            then("tanh", 10),
            ["tanh: these arguments", "a complex tensor"],
        ),
        (then("conj", 10), ["`y` is complex", "view_as_real"]),
        (
            then("abs", 7),
            ["expected: a real tensor", "found: a complex"],
        ),
        (
            then("abs", 11),
            ["expected: f64[s0, 3]", "found: f32[s0, 3]"],
        ),
        (
            Program::new(&[of("view_as_complex", "linear")], &[]),
            ["not of two parts", "f32[s0, 3]"],
        ),
        (
            Program::new(&[of("fft_fftn", "linear"), of("tanh_", "y")], &[]),
            ["a complex tensor is written to", "view_as_real"],
        ),
    ] {
        refused(zip(&program.entries()), &words);
    }
    let sum = node(
        "torch.ops.aten.sum.default",
        &[("self", tensor("linear"))],
        tensor("z"),
    );
    let scalar = |op: &str| zip(&Program::new(&[sum.clone(), of(op, "z")], &[]).entries());
    refused(scalar("fft_fft"), &["a scalar has no axis"]);
    refused(scalar("fft_rfft"), &["a scalar has no axis"]);
    let none = [("self", tensor("linear")), ("n", int(0))];
    let none = node("torch.ops.aten.fft_fft.default", &none, tensor("y"));
    refused(
        zip(&Program::new(&[none], &[]).entries()),
        &["there is nothing to transform"],
    );
}

#[test]
fn json_that_is_none() {
    let text = |text: &str| with_entry("m/models/model.json", text.as_bytes().to_vec());
    refused(text(""), &["JSON"]);
    refused(text("[1, 2"), &["JSON"]);
    let version = "{\"schema_version\": {\"major\": 8, \"minor\": 1}, ";
    let deep = |open: &str, close: &str| {
        let (open, close) = (open.repeat(200_000), close.repeat(200_000));
        text(&format!("{version}\"graph_module\": {open}{close}}}"))
    };
    refused(deep("[", "]"), &["error[pt2]"]);
    refused(deep("{\"graph\": ", "}"), &["error[pt2]"]);
    let ignored = format!("{}{}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    refused(text(&format!("{version}\"x\": {ignored}}}")), &["pt2"]);
    refused(
        text("{\"schema_version\": {\"major\": 7, \"minor\": 9}}"),
        &["7.9"],
    );
    refused(
        text("{\"schema_version\": {\"major\": 1e400, \"minor\": 9}}"),
        &["JSON"],
    );
    refused(text("\u{0}"), &["JSON"]);
    let twice = plain().model.to_string().replacen("\"p_w\":", "\"x\":", 1);
    refused(text(&twice), &["\"x\" is there twice"]);
}

#[test]
fn numbers_out_of_range() {
    let sizes = "/graph_module/graph/tensor_values/x/sizes";
    let huge: Value = serde_json::from_str("99999999999999999999").unwrap();
    refused(with(sizes, json!([{"as_int": huge}, int(4)])), &["damaged"]);
    refused(with(sizes, json!([int(-5), int(4)])), &["negative"]);
    refused(with(sizes, json!(vec![int(1); 5000])), &["axes"]);
    refused(with(sizes, json!([int(i64::MAX), int(4)])), &["error["]);
    let dtype = "/graph_module/graph/tensor_values/x/dtype";
    refused(with(dtype, json!(i64::MIN)), &["element type"]);
    refused(with(dtype, json!(7.5)), &["damaged"]);
}

#[test]
fn expressions_that_grow() {
    let sizes = "/graph_module/graph/tensor_values/x/sizes";
    let sized = |text: String| with(sizes, json!([{"as_expr": {"expr_str": text}}, int(4)]));
    let deep = format!(
        "{}Symbol('s'){}",
        "Add(Integer(1), ".repeat(50_000),
        ")".repeat(50_000)
    );
    refused(sized(deep), &["too"]);
    let wide: Vec<String> = (0..30).map(|i| format!("Symbol('t{i}')")).collect();
    let wide = format!("Add({})", wide.join(", "));
    refused(sized(format!("Pow({wide}, Integer(16))")), &["too large"]);
    refused(sized("Sin(Symbol('s'))".into()), &["Sin"]);
    refused(sized("Symbol('a b')".into()), &["plain"]);
    // Squared again and again, by nodes.
    let mut program = Program::rich();
    let at = 2;
    for i in 0..200 {
        let from = |i: usize| match i {
            0 => "mul".to_string(),
            i => format!("n{i}"),
        };
        let name = |name: String| json!({"as_sym_int": {"as_name": name}});
        let (last, next) = (from(2 * i), from(2 * i + 1));
        let square = [("", name(last.clone())), ("", name(last))];
        let more = [("", name(next.clone())), ("", int(7))];
        program
            .nodes()
            .insert(at + 2 * i + 1, node("_operator.mul", &square, name(next)));
        let plus = node("_operator.add", &more, name(from(2 * i + 2)));
        program.nodes().insert(at + 2 * i + 2, plus);
    }
    refused(zip(&program.entries()), &["error[size]"]);
    // Sizes that are said to be products of each other.
    let mut program = plain();
    for i in 1..60 {
        let (a, b, c) = (format!("a{i}"), format!("b{i}"), format!("c{i}"));
        let of = |n: usize| format!("Symbol('q{n:02}')");
        let squared = format!(
            "Mul(Add({}, Integer(1)), Add({}, Integer(1)))",
            of(i - 1),
            of(i - 1)
        );
        let ints = &mut program.model["graph_module"]["graph"]["sym_int_values"];
        ints[&a] = json!({"as_expr": {"expr_str": of(i)}});
        ints[&b] = json!({"as_expr": {"expr_str": squared}});
        let name = |name: &str| json!({"as_sym_int": {"as_name": name}});
        let truth = json!({"as_sym_bool": {"as_name": c}});
        let equal = node(
            "_operator.eq",
            &[("", name(&a)), ("", name(&b))],
            truth.clone(),
        );
        let assert = "torch.ops.aten._assert_scalar.default";
        program.nodes().extend([
            equal,
            node(assert, &[("", truth)], json!({"as_none": true})),
        ]);
    }
    refused(zip(&program.entries()), &["too large"]);
}

#[test]
fn references_to_nothing_or_in_a_circle() {
    let first = "/graph_module/graph/nodes/0/inputs/0/arg";
    refused(
        with(first, tensor("nowhere")),
        &["nothing defines", "nowhere"],
    );
    refused(with(first, tensor("y")), &["nothing defines", "y"]);
    refused(with(first, tensor("linear")), &["nothing defines"]);
    let out = "/graph_module/graph/nodes/1/outputs/0";
    refused(with(out, tensor("linear")), &["`linear` is defined twice"]);
    refused(
        with("/graph_module/graph/outputs/0", tensor("x")),
        &["disagree", "y"],
    );
    refused(
        with("/graph_module/graph/inputs/0", tensor("x")),
        &["disagree", "p_w"],
    );
    let specs = "/graph_module/signature/input_specs/0/parameter/parameter_name";
    refused(with(specs, json!("other")), &["no weight `other`"]);
    refused(
        with("/graph_module/signature/input_specs", json!([])),
        &["different inputs"],
    );
    refused(
        with(
            "/graph_module/graph/nodes/1/target",
            json!("torch.ops.aten.gone.default"),
        ),
        &["op gone"],
    );
    refused(
        with("/graph_module/graph/nodes/1/target", json!("os.system")),
        &["os.system"],
    );
    refused(
        with("/graph_module/graph/nodes/1/target", json!("torch.ops")),
        &["not supported"],
    );
    // A graph in itself, as far as JSON can say so.
    let mut inner = json!({"inputs": [], "outputs": [], "nodes": [], "tensor_values": {}});
    for _ in 0..17 {
        let args = [
            ("", json!({"as_bool": false})),
            ("", json!({"as_graph": {"name": "g", "graph": inner}})),
        ];
        let around = node(
            "torch.ops.higher_order.wrap_with_set_grad_enabled",
            &args,
            json!({"as_none": true}),
        );
        inner = json!({"inputs": [], "outputs": [], "nodes": [around], "tensor_values": {}});
    }
    let nodes = inner["nodes"].clone();
    refused(with("/graph_module/graph/nodes", nodes), &["error[pt2]"]);
}

#[test]
fn types_that_are_not_what_the_file_tells() {
    let linear = "/graph_module/graph/tensor_values/linear";
    refused(
        with(linear, meta(7, &[symbol("s0"), int(5)])),
        &["`linear`", "f32[s0, 5]"],
    );
    refused(
        with(linear, meta(5, &[symbol("s0"), int(3)])),
        &["`linear`", "i64"],
    );
    refused(with(linear, meta(7, &[int(3)])), &["`linear`"]);
    refused(
        with(
            "/graph_module/graph/tensor_values/p_w",
            meta(8, &[int(3), int(4)]),
        ),
        &["`p_w`", "weight `w`"],
    );
}

#[test]
fn weights_that_lie() {
    refused(
        with_entry("m/data/weights/weight_0", vec![0; 47]),
        &["weight `w`", "ends before"],
    );
    refused(
        with_entry("m/data/weights/weight_0", Vec::new()),
        &["weight `w`"],
    );
    for path in [
        "../../../etc/passwd",
        "/etc/passwd",
        "weight_1",
        "",
        "../models/model.json\0",
    ] {
        refused(weight(|w| w["path_name"] = json!(path)), &["no entry"]);
    }
    refused(weight(|w| w["tensor_meta"] = json!(null)), &["weight `w`"]);
    refused(
        weight(|w| w["tensor_meta"]["dtype"] = json!(99)),
        &["element type 99"],
    );
    refused(
        weight(|w| w["tensor_meta"]["dtype"] = json!(8)),
        &["weight `w`"],
    );
    refused(
        weight(|w| w["tensor_meta"]["sizes"] = json!([int(1 << 40), int(1 << 40)])),
        &["out of range"],
    );
    refused(
        weight(|w| w["tensor_meta"]["strides"] = json!([int(i64::MAX), int(1)])),
        &["ends before"],
    );
    refused(
        weight(|w| w["tensor_meta"]["strides"] = json!([int(1)])),
        &["as many strides"],
    );
    refused(
        weight(|w| w["tensor_meta"]["sizes"] = json!([int(-3), int(4)])),
        &["no number"],
    );
    refused(
        weight(|w| w["tensor_meta"]["storage_offset"] = int(i64::MAX)),
        &["ends before"],
    );
    // Nothing is read of an empty tensor, wherever it is said to be.
    refused(
        weight(|w| {
            w["tensor_meta"]["sizes"] = json!([int(0), int(4)]);
            w["tensor_meta"]["storage_offset"] = int(i64::MAX);
        }),
        &["`p_w`"],
    );
    let expanded = weight(|w| {
        w["tensor_meta"]["sizes"] = json!([int(1 << 30), int(4)]);
        w["tensor_meta"]["strides"] = json!([int(0), int(1)]);
    });
    refused(expanded, &["larger than its storage"]);
    let table = with_entry(
        "m/data/weights/model_weights_config.json",
        b"{\"config\": 1}".to_vec(),
    );
    refused(table, &["model_weights_config.json"]);
}

#[test]
fn a_small_file_fills_no_memory() {
    // Many weights, each another strided look at one storage.
    let mut program = plain();
    program.raw[0].1 = vec![0; 1 << 16];
    for i in 0..64 {
        let name = format!("w{i}");
        let mut looked = meta(7, &[int(2), int(8000)]);
        looked["strides"] = json!([int(1), int(2)]);
        looked["storage_offset"] = int(i);
        program.weights["config"][&name] = json!({"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": looked});
        let specs = &mut program.model["graph_module"]["signature"]["input_specs"];
        let spec =
            json!({"parameter": {"arg": {"name": format!("p_{name}")}, "parameter_name": name}});
        specs.as_array_mut().unwrap().push(spec);
        let inputs = &mut program.model["graph_module"]["graph"]["inputs"];
        inputs
            .as_array_mut()
            .unwrap()
            .push(tensor(&format!("p_{name}")));
    }
    let mut three = program.clone();
    let strided = program.model["graph_module"]["signature"]["input_specs"].clone();
    assert_eq!(strided.as_array().unwrap().len(), 66);
    for list in [
        "/graph_module/signature/input_specs",
        "/graph_module/graph/inputs",
    ] {
        let list = three
            .model
            .pointer_mut(list)
            .unwrap()
            .as_array_mut()
            .unwrap();
        list.truncate(5);
    }
    assert_eq!(outputs(&three, &[]), ["y: f32[s0, 3]"]);
    // Rank 3, so that none of them is a transposed matrix.
    let mut deep = program;
    for i in 0..64 {
        let looked = &mut deep.weights["config"][&format!("w{i}")]["tensor_meta"];
        looked["sizes"] = json!([int(2), int(2), int(4000)]);
        looked["strides"] = json!([int(1), int(2), int(4)]);
    }
    refused(zip(&deep.entries()), &["strided parts of one storage"]);
}

#[test]
fn pickled_weights_are_read_and_never_run() {
    let saved =
        archive::Saved::new("x: Tensor -> Tensor", "return x").parameter("w", &[3, 4], &[0.5; 12]);
    let pickled = |content: Vec<u8>| {
        let mut program = plain();
        program.weights["config"]["w"]["use_pickle"] = json!(true);
        program.raw[0].1 = content;
        zip(&program.entries())
    };
    let nested = |data: Vec<u8>| {
        let mut entries = saved.entries();
        entries.retain(|(name, _)| name != "m/data.pkl");
        entries.push(("m/data.pkl".into(), data));
        zip(&entries)
    };
    let good = nested(saved.tensor_pickle(0));
    let read = model(pickled(good.clone()), &[]).unwrap_or_else(|e| panic!("{e}"));
    let (id, value) = read.graph.inits().next().unwrap();
    assert_eq!(value.name, "w");
    assert!(!read.graph.origins[&id].frozen);
    assert_eq!(
        &value.tensor().unwrap().bytes().unwrap()[..4],
        0.5f32.to_le_bytes()
    );
    refused(
        pickled(nested(b"\x80\x02cos\nsystem\n.".to_vec())),
        &["weight `w`", "os.system"],
    );
    refused(
        pickled(nested(b"\x80\x02N.".to_vec())),
        &["weight `w`", "no tensor"],
    );
    refused(pickled(b"\x80\x02N.".to_vec()), &["weight `w`", "archive"]);
    let mut cut = saved.entries();
    cut.retain(|(name, _)| name != "m/data/0" && name != "m/data.pkl");
    cut.push(("m/data.pkl".into(), saved.tensor_pickle(0)));
    refused(pickled(zip(&cut)), &["weight `w`", "data/0"]);
}

#[test]
fn sizes_of_inputs_are_held_against_the_program() {
    let program = plain();
    assert_eq!(outputs(&program, &["x:f32[7, 4]"]), ["y: f32[7, 3]"]);
    assert_eq!(outputs(&program, &["x:f32[1, 4]"]), ["y: f32[1, 3]"]);
    let wrong = |program: &Program, types: &[&str], words: &[&str]| {
        let error = match model(zip(&program.entries()), types) {
            Ok(_) => panic!("accepted {types:?}"),
            Err(error) => error,
        };
        assert_eq!(error.exit_code(), 2, "{error}");
        for word in words {
            assert!(
                error.to_string().contains(word),
                "{word:?} is not in: {error}"
            );
        }
    };
    wrong(
        &program,
        &["x:f32[65, 4]"],
        &["`s0` is outside the range", "1 to 64"],
    );
    wrong(&program, &["x:f32[0, 4]"], &["input `x`"]);
    wrong(&program, &["x:f32[7, 5]"], &["x", "4]"]);
    wrong(&program, &["x:f64[7, 4]"], &["x", "f32"]);
    wrong(&program, &["x:f32[7]"], &["x"]);
    // A second input, twice as long less one.
    let mut program = plain();
    let twice = "Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))";
    let graph = &mut program.model["graph_module"]["graph"];
    graph["tensor_values"]["z"] = meta(7, &[json!({"as_expr": {"expr_str": twice}})]);
    graph["inputs"].as_array_mut().unwrap().push(tensor("z"));
    let specs = &mut program.model["graph_module"]["signature"]["input_specs"];
    specs
        .as_array_mut()
        .unwrap()
        .push(json!({"user_input": {"arg": tensor("z")}}));
    assert_eq!(outputs(&program, &["z:f32[9]"]), ["y: f32[5, 3]"]);
    assert_eq!(
        outputs(&program, &["z:f32[9]", "x:f32[5, 4]"]),
        ["y: f32[5, 3]"]
    );
    wrong(&program, &["z:f32[9]", "x:f32[6, 4]"], &["z", "11"]);
    wrong(&program, &["z:f32[8]"], &["2*s0 - 1"]);
    wrong(&program, &["z:f32[201]"], &["outside the range"]);
}

#[test]
fn ranges_hold_for_what_is_planned() {
    let mut graph = model(zip(&plain().entries()), &[]).unwrap().graph;
    ckpt_passes::transform::infer::infer(&mut graph).unwrap();
    let at = |size: i64| Binding::new(&graph, &[("s0".into(), size)]);
    assert_eq!(at(64).unwrap().get("s0"), Some(64));
    let error = at(65).unwrap_err();
    assert_eq!((error.exit_code(), error.code()), (2, "dim"), "{error}");
    // Under another name, and none where the user fixed the size.
    let named = model(zip(&plain().entries()), &["x:f32[rows, 4]"])
        .unwrap()
        .graph;
    assert_eq!(ranges::of(&named).unwrap()["rows"], (1, 64));
    let fixed = model(zip(&plain().entries()), &["x:f32[7, 4]"])
        .unwrap()
        .graph;
    assert!(ranges::of(&fixed).unwrap().is_empty());
}

/// The program with names for its sizes.
fn named(names: &Value) -> Vec<u8> {
    let mut entries = plain().entries();
    let entry = ("extra/ckpt_opt.json", names.to_string());
    let folder = entries[0].0.split('/').next().unwrap().to_string();
    entries.push((format!("{folder}/{}", entry.0), entry.1.into_bytes()));
    zip(&entries)
}

#[test]
fn sizes_have_the_names_that_an_export_gave_them() {
    let model = model(named(&json!({"sizes": {"s0": "batch"}})), &[]).unwrap();
    let output = model.graph.outputs()[0];
    assert_eq!(model.graph.ty(output).to_string(), "f32[batch, 3]");
    for bad in ["", "s0", "a b", "../x", "1"] {
        refused(
            named(&json!({"sizes": {"s0": bad}})),
            &["cannot be the name"],
        );
    }
    refused(
        named(&json!({"sizes": {"s0": "n", "s1": "n"}})),
        &["cannot be the name"],
    );
    refused(named(&json!([])), &["names of sizes are damaged"]);
}

/// A program with a collective of so many arguments behind `linear`.
fn collective(name: &str, args: &[(&str, Value)]) -> Value {
    let target = format!("torch.ops._c10d_functional.{name}.default");
    let group = [("group_name", json!({"as_string": "0"}))];
    let args = [&[("input", tensor("linear"))], args, &group].concat();
    node(&target, &args, tensor("y"))
}

#[test]
fn collectives_without_an_equivalent_are_refused_by_name() {
    let word = |text: &str| json!({"as_string": text});
    let sum = ("reduce_op", word("sum"));
    let all_reduce = collective("all_reduce", std::slice::from_ref(&sum));
    let waited = [("tensor", tensor("y"))];
    let waited = node(
        "torch.ops._c10d_functional.wait_tensor.default",
        &waited,
        tensor("z"),
    );
    let good = Program::new(&[all_reduce.clone(), waited], &[]);
    assert_eq!(outputs(&good, &[]), ["y: f32[s0, 3]"]);
    let at = "node 1 (torch.ops._c10d_functional.";
    let sizes = json!({"as_ints": [1, 1]});
    let pairs = [
        ("output_split_sizes", sizes.clone()),
        ("input_split_sizes", sizes),
    ];
    let mean = ("reduce_op", word("avg"));
    for (name, args, words) in [
        ("broadcast", &[("src", int(0))][..], "no such op over ranks"),
        ("all_to_all_single", &pairs, "no such op over ranks"),
        (
            "all_reduce_coalesced",
            std::slice::from_ref(&sum),
            "once for each tensor",
        ),
        ("all_reduce", &[mean], "`reduce_op` avg"),
        (
            "reduce_scatter_tensor",
            &[sum.clone(), ("group_size", int(2))],
            "a multiple of 2",
        ),
        (
            "reduce_scatter_tensor",
            &[sum.clone(), ("group_size", int(0))],
            "no such number of ranks",
        ),
        (
            "all_gather_into_tensor",
            &[("group_size", int(-1))],
            "no such number of ranks",
        ),
    ] {
        let program = Program::new(&[collective(name, args)], &[]);
        refused(zip(&program.entries()), &[at, name, words]);
    }
    let again = |args: &[(&str, Value)], group: &str| {
        let mut second = collective("all_gather_into_tensor", args);
        second["outputs"] = json!([tensor("y2")]);
        second["inputs"][2]["arg"] = word(group);
        let mut first = second.clone();
        (first["outputs"], first["inputs"][1]["arg"]) = (json!([tensor("y")]), int(2));
        first["inputs"][2]["arg"] = word("0");
        zip(&Program::new(&[first, second], &[]).entries())
    };
    refused(
        again(&[("group_size", int(2))], "7"),
        &["error[ranks]", "several groups", "the group `7`"],
    );
    refused(
        again(&[("group_size", int(3))], "0"),
        &["two sizes", "3 ranks"],
    );
}
