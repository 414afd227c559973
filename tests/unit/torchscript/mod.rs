//! TorchScript archives from their source: what the reader makes of them, what it refuses and where; with the
//! runtime, that libtorch's own interpreter computes the same values and gradients.

use crate::support::archive;
mod extremes;
#[cfg(feature = "torch")]
mod oracle;
#[cfg(feature = "torch")]
use crate::support::torch;

use archive::Saved;
use bytes::Bytes;
use ckpt_opt::frontend::Model;
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::frontend::torch::archive::Archive;
use ckpt_opt::frontend::torch::read;
use ckpt_passes::Result;
use ckpt_passes::analysis::ranges;

fn given(types: &[&str]) -> Given {
    Given {
        inputs: types.iter().map(|t| InputType::parse(t).unwrap()).collect(),
        ..Given::default()
    }
}

fn model(saved: &Saved, types: &[&str]) -> Result<Model> {
    read(&Archive::read(Bytes::from(saved.zip()))?, &given(types))
}

/// The name and type of each output.
fn outputs(saved: &Saved, types: &[&str]) -> Vec<String> {
    let model = model(saved, types).unwrap_or_else(|e| panic!("{e}"));
    let graph = &model.graph;
    let show = |v: &_| format!("{}: {}", graph.value(*v).name, graph.ty(*v));
    graph.outputs().iter().map(show).collect()
}

fn refused(saved: &Saved, types: &[&str], words: &[&str]) {
    let error = match model(saved, types) {
        Ok(_) => panic!("accepted, expected {words:?}"),
        Err(error) => error.to_string(),
    };
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
    assert!(error.starts_with("error["), "{error}");
}

#[test]
fn complex_tensors_have_sizes_and_types_of_their_own() {
    let body = |last: &str| {
        let text = format!(
            "\
z = torch.to(x, 9)
n = torch.size(z, -1)
k = torch.dim(z)
w = torch.mul(torch.view(z, [n, -1]), k)
return {last}"
        );
        Saved::new("x: Tensor -> Tensor", &text)
    };
    let good = body("torch.view_as_real(w)");
    assert_eq!(
        outputs(&good, &["x:f32[batch,4]"]),
        ["output_0: f32[4, batch, 2]"]
    );
    refused(
        &body("w"),
        &["x:f32[batch,4]"],
        &["the model returns a complex tensor"],
    );
}

#[test]
fn sizes_stay_expressions() {
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 0))
m = torch.floor_divide(torch.mul(n, CONSTANTS.c0), CONSTANTS.c1)
_0 = int(torch.add(m, CONSTANTS.c0))
k = annotate(number, n)
if torch.gt(_0, 4):
  y = torch.mul(x, 2.)
else:
  y = torch.mul(x, 3.)
return torch.add(y, _0)";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[4, 2]);
    assert_eq!(outputs(&saved, &["x:f32[batch]"]), ["output_0: f32[batch]"]);
}

#[test]
fn a_grouped_product_reads_a_transposed_weight_as_it_is_stored() {
    let body = "\
a = torch._grouped_mm(x, w, offs)
return torch._grouped_mm(a, torch.transpose(w, 1, 2), offs)";
    let saved = Saved::new("x: Tensor, w: Tensor, offs: Tensor -> Tensor", body);
    let types = ["x:f32[rows,8]", "w:f32[3,8,4]", "offs:i32[3]"];
    assert_eq!(outputs(&saved, &types), ["output_0: f32[rows, 8]"]);
    let graph = model(&saved, &types).unwrap().graph;
    let nodes = graph.order().iter().map(|id| graph.node(*id));
    let products: Vec<_> = nodes.filter(|n| n.op.name == "GroupedMatMul").collect();
    let w = graph.inputs()[1];
    for (turned, product) in products.iter().enumerate() {
        assert_eq!(product.operand(1), Some(w));
        assert_eq!(product.attrs.int("transB"), turned as i64);
    }
    assert_eq!(products.len(), 2);
    let gradient = "return torch._grouped_mm(torch.transpose(x, 0, 1), w, offs)";
    let gradient = Saved::new("x: Tensor, w: Tensor, offs: Tensor -> Tensor", gradient);
    let of = ["x:f32[rows,8]", "w:f32[rows,4]", "offs:i32[3]"];
    assert_eq!(outputs(&gradient, &of), ["output_0: f32[3, 8, 4]"]);
    let wrong = ["x:f32[rows,8]", "w:f32[3,8,4]", "offs:i32[2]"];
    refused(&saved, &wrong, &["another number of groups"]);
}

#[test]
fn counts_of_sorted_numbers_are_the_ends_of_their_groups() {
    // Whether the product reads the sorted numbers themselves.
    let reads_them = |sorted: &str, counts: &str, groups: i64| {
        let body = format!(
            "\
s, o = torch.sort(ids)
c = torch.histc(torch.to({sorted}, 6), {counts})
ends = torch.cumsum(c, 0, dtype=3)
return torch._grouped_mm(x, w, ends)"
        );
        let saved = Saved::new("x: Tensor, w: Tensor, ids: Tensor -> Tensor", &body);
        let w = format!("w:f32[{groups},8,4]");
        let graph = model(&saved, &["x:f32[rows,8]", &w, "ids:i64[rows]"]);
        let graph = graph.unwrap_or_else(|e| panic!("{e}")).graph;
        let mut nodes = graph.order().iter().map(|id| graph.node(*id));
        let product = nodes.find(|n| n.op.name == "GroupedMatMul").unwrap();
        let maker = product.operand(2).and_then(|v| graph.def_node(v));
        graph.node(maker.unwrap()).op.name == "TopK"
    };
    assert!(reads_them("s", "4, 0, 3", 4));
    assert!(reads_them("s", "128, 0, 127", 128));
    assert!(!reads_them("ids", "4, 0, 3", 4));
    assert!(!reads_them("s", "4, 1, 4", 4));
    assert!(!reads_them("torch.to(s, 11)", "2, 0, 1", 2));
}

#[test]
fn control_flow_that_the_file_decides_is_followed() {
    let body = "\
y = x
for i in range(3):
  if torch.eq(i, 1):
    y = torch.neg(y)
  else:
    y = torch.mul(y, i)
n = 0
_0 = True
while _0:
  y = torch.neg(y)
  n0 = torch.add(n, 1)
  _0, n = torch.lt(n0, 4), n0
parts = [y, x]
_1 = torch.append(parts, y)
d = {\"a\": parts}
training = self.training
if training:
  ops.prim.RaiseException(\"never\")
else:
  pass
return (d[\"a\"], torch.len(parts), None, (parts)[-1])";
    let saved = Saved::new(
        "x: Tensor -> Tuple[List[Tensor], int, NoneType, Tensor]",
        body,
    );
    let model = model(&saved, &["x:f32[3]"]).unwrap_or_else(|e| panic!("{e}"));
    let names: Vec<&str> = model
        .graph
        .order()
        .iter()
        .map(|n| model.graph.node(*n).op.name)
        .collect();
    assert_eq!(names.iter().filter(|n| **n == "Neg").count(), 5);
    assert_eq!(model.graph.outputs().len(), 5);
}

#[test]
fn numbers_that_data_decides_are_refused_with_a_way_out() {
    refused(
        &Saved::new(
            "x: Tensor -> Tensor",
            "n = torch.max(torch.to(x, 4))\nreturn torch.slice(x, 0, 0, int(n), 1)",
        ),
        &["x:f32[4]"],
        &[
            "slice: these arguments",
            "only a run can tell",
            "mask with torch.where",
        ],
    );
}

#[test]
fn control_flow_that_data_decides_is_refused_with_its_line() {
    let branch = "\
if bool(x):
  y = x
else:
  y = torch.neg(x)
return y";
    refused(
        &Saved::new("x: Tensor -> Tensor", branch),
        &["x:f32[]"],
        &["branch", "code/__torch__.py:8"],
    );
    let size = "if torch.gt(torch.size(x, 0), 4):\n  y = x\nelse:\n  y = torch.neg(x)\nreturn y";
    let saved = Saved::new("x: Tensor -> Tensor", size);
    refused(&saved, &["x:f32[batch]"], &["branch", "--input"]);
    assert_eq!(outputs(&saved, &["x:f32[8]"]), ["output_0: f32[8]"]);
    let repeated = "for i in range(torch.size(x, 0)):\n  x = torch.neg(x)\nreturn x";
    let saved = Saved::new("x: Tensor -> Tensor", repeated);
    refused(&saved, &["x:f32[batch]"], &["loop", "code/__torch__.py:8"]);
    assert_eq!(outputs(&saved, &["x:f32[2]"]), ["output_0: f32[2]"]);
    // What is asserted of named sizes is taken to hold, and said.
    let asserted = "if torch.gt(torch.size(x, 0), 4):\n  pass\nelse:\n  ops.prim.RaiseException(\"small\")\nreturn torch.neg(x)";
    let saved = Saved::new("x: Tensor -> Tensor", asserted);
    let warnings = model(&saved, &["x:f32[batch]"]).unwrap().warnings;
    assert!(warnings[0].contains("code/__torch__.py:8"), "{warnings:?}");
    refused(&saved, &["x:f32[3]"], &["raises", "small"]);
}

#[test]
fn a_backward_pass_in_a_program_needs_what_it_saved() {
    let of = |saved: &str| {
        let body = format!(
            "y = torch.softmax(torch.mul(x, self.w), -1)\nreturn torch._softmax_backward_data(x, {saved}, -1, 6)"
        );
        let saved = Saved::new("x: Tensor -> Tensor", &body);
        let saved = saved.parameter("w", &[3], &[1.0, 2.0, 3.0]);
        model(&saved, &["x:f32[2,3]"]).unwrap().warnings
    };
    assert!(of("y").is_empty());
    let detached = of("torch.detach(y)");
    assert!(detached[0].contains("decomposition_table"), "{detached:?}");
    let norm = "_0, _1, _2, = torch.native_layer_norm_backward(x, x, [3], x, x, None, None, [True, False, False])\nreturn _0";
    let saved = Saved::new("x: Tensor -> Tensor", norm);
    refused(&saved, &["x:f32[2,3]"], &["no LayerNormalization"]);
}

#[test]
fn inputs_are_named_and_typed_by_the_user() {
    let saved = Saved::new(
        "x: Tensor,\n    past: List[Tensor],\n    pair: Tuple[Tensor, Tensor],\n    m: Optional[Tensor]=None,\n    k: int=2 -> Tensor",
        "a, b, = past\nreturn torch.mul(torch.add(torch.add(x, a), (pair)[1]), k)",
    );
    refused(
        &saved,
        &[],
        &["x, past, pair.0, pair.1", "m (optional)", "--input"],
    );
    let types = [
        "x:f32[b]",
        "past.0:f32[b]",
        "past.1:f32[b]",
        "pair.0:f32[b]",
        "pair.1:f32[b]",
    ];
    assert_eq!(outputs(&saved, &types), ["output_0: f32[b]"]);
    refused(&saved, &types[..4], &["pair.1"]);
    let mut three = types.to_vec();
    three.push("past.2:f32[b]");
    refused(&saved, &three, &["wrong length"]);
    let mut other = types.to_vec();
    other.push("y:f32[b]");
    refused(&saved, &other, &["no input `y`"]);
    let mut named = given(&types);
    named.output_names = vec!["y".into()];
    let archive = Archive::read(Bytes::from(saved.zip())).unwrap();
    let graph = read(&archive, &named).unwrap().graph;
    assert_eq!(graph.value(graph.outputs()[0]).name, "y");
    named.output_names.push("z".into());
    assert_eq!(read(&archive, &named).err().unwrap().exit_code(), 2);
}

#[test]
fn weights_stay_where_they_are() {
    let mut saved = Saved::new(
        "x: Tensor -> Tensor",
        "w = self.w\nu = self.u\nreturn torch.mul(torch.mul(x, w), u)",
    )
    .parameter("w", &[3], &[1.0, 2.0, 3.0])
    .parameter("u", &[3], &[0.0; 3]);
    // `u` is `w` under another name.
    saved.state[1].storage = 0;
    let zip = Bytes::from(saved.zip());
    let model = read(&Archive::read(zip.clone()).unwrap(), &given(&["x:f32[3]"])).unwrap();
    let inits: Vec<_> = model.graph.inits().collect();
    assert_eq!(inits.len(), 1);
    let (id, value) = inits[0];
    assert_eq!(value.name, "w");
    assert_eq!(model.graph.origins[&id].names, ["w", "u"]);
    let bytes = value.tensor().unwrap().bytes().unwrap();
    assert!(zip.as_ptr_range().contains(&bytes.as_ptr()));
}

#[test]
fn programs_without_end_are_refused() {
    let cases = [
        ("while True:\n  y = x\nreturn x", "too long"),
        (
            "for i in range(9223372036854775807):\n  y = x\nreturn x",
            "too long",
        ),
        ("return (self).forward(x, )", "too deeply"),
        (
            "n = torch.size(x, 0)\nfor i in range(100):\n  n = torch.add(torch.mul(n, n), 1)\nreturn torch.add(x, n)",
            "too large",
        ),
        (
            "l = [x]\nfor i in range(60):\n  l = torch.add(l, l)\nreturn x",
            "too many lists",
        ),
        ("l = [x]\n_0 = torch.append(l, l)\nreturn l", "without end"),
        (
            "l = [x]\n_0 = torch.append(l, l)\nreturn torch.cat(l)",
            "too deeply",
        ),
        (
            "l = [x]\nfor i in range(300000):\n  l = [l]\nreturn l",
            "without end",
        ),
    ];
    for (body, word) in cases {
        refused(
            &Saved::new("x: Tensor -> Tensor", body),
            &["x:f32[b]"],
            &[word],
        );
    }
}

#[test]
fn what_a_program_may_not_do_is_refused_with_its_line() {
    let cases = [
        ("return torch.no_such_op(x)", "no_such_op"),
        ("return torch.add(y, 1)", "no variable `y`"),
        ("return CONSTANTS.c7", "no constant `c7`"),
        ("return (self).nothing(x, )", "no method"),
        ("w = self.nothing\nreturn w", "no attribute"),
        ("return __torch__.nothing(x, )", "nothing"),
        ("return __torch__.other.f(x, )", "no entry"),
        ("return (x)[0]", "no members"),
        ("l = [x]\nreturn (l)[3]", "no member 3"),
        ("a, b, = [x]\nreturn a", "wrong length"),
        ("return torch.size(x, 5)", "axis 5"),
        ("return torch.floordiv(1, 0)", "division by zero"),
        (
            "return torch.mul(9223372036854775807, 9223372036854775807)",
            "64 bits",
        ),
        ("return \"text\"", "returns a string"),
        ("return self", "returns a module"),
        ("return 1.5", "returns a float"),
        ("_0 = eval(\"1\")\nreturn x", "`eval` is not supported"),
    ];
    for (body, word) in cases {
        refused(
            &Saved::new("x: Tensor -> Tensor", body),
            &["x:f32[b]"],
            &[word, "error["],
        );
    }
    refused(
        &Saved::new("x: Tensor -> Tensor", "pass"),
        &["x:f32[b]"],
        &["returns no tensor"],
    );
}

#[test]
fn damaged_archives_are_refused() {
    let saved = Saved::new("x: Tensor -> Tensor", "w = self.w\nreturn torch.mul(x, w)").parameter(
        "w",
        &[2],
        &[1.0, 2.0],
    );
    let without = |name: &str| {
        let mut entries = saved.entries();
        entries.retain(|(n, _)| n != name);
        archive::zip(&entries)
    };
    let with = |name: &str, bytes: &[u8]| {
        let mut entries = saved.entries();
        for entry in entries.iter_mut().filter(|(n, _)| n == name) {
            entry.1 = bytes.to_vec();
        }
        archive::zip(&entries)
    };
    let cases = [
        (without("m/code/__torch__.py"), "weights without a program"),
        (without("m/data.pkl"), "none that PyTorch saves"),
        (without("m/data/0"), "data/0"),
        (with("m/data/0", &[0; 4]), "wrong size"),
        (with("m/code/__torch__.py", b"\xff"), "UTF-8"),
        (
            with("m/code/__torch__.py", b"class N(Module):\n  pass\n"),
            "no class `M`",
        ),
        (with("m/data.pkl", b"\x80\x02N."), "no module"),
        (with("m/data.pkl", b"\x80\x02cos\nsystem\n."), "os.system"),
        // A module in itself.
        (
            with(
                "m/data.pkl",
                b"\x80\x02c__torch__\nM\n)\x81q\x00}(X\x01\0\0\0mh\x00ub.",
            ),
            "in themselves",
        ),
    ];
    for (bytes, word) in cases {
        let read = Archive::read(Bytes::from(bytes)).and_then(|a| read(&a, &given(&["x:f32[2]"])));
        let error = read.err().expect(word);
        assert!(error.to_string().contains(word), "{word}: {error}");
        assert_eq!(error.exit_code(), 2, "{error}");
    }
}

#[test]
fn parameters_that_nothing_reads_are_the_models_too() {
    let saved = Saved::new("x: Tensor -> Tensor", "return torch.mul(x, self.w)")
        .parameter("w", &[2], &[0.5; 2])
        .parameter("idle", &[3, 2], &[1.0; 6]);
    let mut graph = model(&saved, &["x:f32[2]"]).unwrap().graph;
    let request = ckpt_passes::compile::Request {
        loss: ckpt_passes::transform::loss::Loss::Vjp,
        ..Default::default()
    };
    let mut watch = ckpt_passes::driver::Watch::default();
    ckpt_passes::compile::compile(&mut graph, &request, &mut watch).unwrap();
    let outputs = graph.outputs().iter();
    let types = outputs.map(|v| format!("{}: {}", graph.value(*v).name, graph.ty(*v)));
    let types: Vec<String> = types.collect();
    assert!(
        types.contains(&"idle.grad: f32[3, 2]".to_string()),
        "{types:?}"
    );
}

#[test]
fn plain_numbers_decide_no_element_type() {
    let body = "\
i = torch.arange(3)
a = torch.detach(CONSTANTS.c1)
return (torch.mul(i, CONSTANTS.c1), torch.mul(x, CONSTANTS.c1), torch.mul(i, a), torch.add(torch.sum(i), CONSTANTS.c1))";
    let mut saved =
        Saved::new("x: Tensor -> Tuple[Tensor, Tensor, Tensor, Tensor]", body).constants(&[1]);
    saved.numbers = vec![0.1];
    let types = [
        "output_0: f32[3]",
        "output_1: f16[2]",
        "output_2: f64[3]",
        "output_3: f32[]",
    ];
    assert_eq!(outputs(&saved, &["x:f16[2]"]), types);
}

#[test]
fn a_sequence_that_is_padded_to_chunks_and_cut_again_keeps_its_size() {
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 1))
pad = torch.remainder(torch.sub(CONSTANTS.c0, torch.remainder(n, CONSTANTS.c0)), CONSTANTS.c0)
y = torch.pad(x, [0, int(pad)])
chunks = torch.reshape(y, [torch.size(y, 0), -1, 64])
z = torch.reshape(chunks, [torch.size(y, 0), -1])
return torch.slice(z, 1, 0, int(n))";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[64]);
    assert_eq!(outputs(&saved, &["x:f32[b, s]"]), ["output_0: f32[b, s]"]);
}

#[test]
fn sizes_change_in_place() {
    // Two names of one tensor see the change; a copy, a result and a number that was read do not.
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 0))
same = torch.detach(n)
other = torch.clone(n)
twice = torch.mul(n, 2)
read = int(n)
all = torch.mul_(same, torch.size(x, 1))
_0 = torch.add_(all, 1)
h = torch.div(other, CONSTANTS.c0)
_1 = torch.mul_(h, 3)
return torch.reshape(x, [int(n), int(other), int(twice), read, int(h), -1])";
    let sizes = |body: &str| outputs(&saved(body), &["x:f32[2, 5, 264]"]);
    fn saved(body: &str) -> Saved {
        Saved::new("x: Tensor -> Tensor", body).constants(&[2])
    }
    assert_eq!(sizes(body), ["output_0: f32[11, 2, 4, 2, 3, 5]"]);
    let symbolic = "\
n = ops.prim.NumToTensor(torch.size(x, 0))
_0 = torch.mul_(n, torch.size(x, 1))
return torch.reshape(x, [int(n), -1])";
    assert_eq!(
        outputs(&saved(symbolic), &["x:f32[b, s, 4]"]),
        ["output_0: f32[b*s, 4]"]
    );
    // A constant keeps its value for the next run, a view shares memory, and an integer does not become a float.
    for change in [
        "torch.mul_(CONSTANTS.c0, 2)",
        "torch.mul_(n, 0.5)",
        "torch.mul_(torch.unsqueeze(n, 0), 2)",
        "[torch.unsqueeze(n, 0), torch.mul_(n, 2)]",
        "torch.fill_(n, 2)",
    ] {
        let n = "n = ops.prim.NumToTensor(torch.size(x, 0))";
        let body = format!("{n}\n_0 = {change}\nreturn x");
        refused(&saved(&body), &["x:f32[b]"], &["changes a size"]);
    }
}

#[test]
fn roots_of_sizes_are_known() {
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 1))
r = torch.to(torch.pow(torch.sub(n, CONSTANTS.c0), 0.5), 4)
h = torch.div(n, CONSTANTS.c1)
k = int(torch.floor(h))
return torch.reshape(torch.slice(x, 1, 0, int(torch.mul(r, r))), [-1, int(r), int(r), k, 1])";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[1, 11]);
    assert_eq!(
        outputs(&saved, &["x:f32[4, 17]"]),
        ["output_0: f32[4, 4, 4, 1, 1]"]
    );
    refused(&saved, &["x:f32[n, m]"], &["only a run can tell"]);
}

/// The sign of an index decides what it means. Sizes at which it is the other one are refused.
#[test]
fn sizes_that_decide_the_sign_of_an_index_are_limited() {
    // The last rows of a table of 8, as many as the sequence has; and all but the last 5 of the sequence.
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 1))
first = int(torch.sub(CONSTANTS.c0, n))
more = int(torch.sub(n, CONSTANTS.c1))
return (torch.slice(t, 0, first, 9223372036854775807, 1), torch.slice(x, 1, 0, more, 1))";
    let saved =
        Saved::new("x: Tensor, t: Tensor -> Tuple[Tensor, Tensor]", body).constants(&[8, 5]);
    let types = ["x:f32[4,seq]", "t:f32[8]"];
    let model = model(&saved, &types).unwrap();
    assert_eq!(
        outputs(&saved, &types),
        [
            "output_0: f32[-max(0, -seq + 8) + 8]",
            "output_1: f32[4, max(0, seq - 5)]"
        ]
    );
    assert_eq!(ranges::of(&model.graph).unwrap()["seq"], (5, 8));
    assert_eq!(model.warnings.len(), 2, "{:?}", model.warnings);
}

/// Mimi pads frames as it computes them in floats: (ceil((n − window) / stride + 1) − 1) · stride + window − n.
#[test]
fn sizes_that_are_rounded_in_floats_are_known() {
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 1))
frames = torch.add(torch.div(torch.sub(n, CONSTANTS.c2), CONSTANTS.c1), CONSTANTS.c0)
whole = torch.sub(torch.to(torch.ceil(frames), 4), CONSTANTS.c0)
used = torch.add(torch.mul(whole, CONSTANTS.c1), CONSTANTS.c2)
return torch.pad(x, [0, int(torch.sub(used, n))], \"constant\", 0.)";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[1, 4, 7]);
    assert_eq!(
        outputs(&saved, &["x:f32[2,seq]"]),
        ["output_0: f32[2, 4*floordiv(seq, 4) + 3]"]
    );
    for (length, padded) in [(7, 7), (8, 11), (11, 11), (12, 15)] {
        let found = outputs(&saved, &[&format!("x:f32[2, {length}]")]);
        assert_eq!(found, [format!("output_0: f32[2, {padded}]")]);
    }
    // A ratio that is no size stays a tensor.
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 0))
return torch.mul(x, torch.div(n, CONSTANTS.c0))";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[3]);
    assert_eq!(outputs(&saved, &["x:f32[seq]"]), ["output_0: f32[seq]"]);
}

/// XLNet counts its positions down in floats.
#[test]
fn ranges_of_whole_floats_have_known_sizes() {
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 0))
m = torch.neg(n)
return torch.arange(annotate(number, n), annotate(number, m), -1., dtype=6, layout=None, device=torch.device(\"cpu\"), pin_memory=False)";
    let saved = Saved::new("x: Tensor -> Tensor", body);
    assert_eq!(outputs(&saved, &["x:f32[seq]"]), ["output_0: f32[2*seq]"]);
}

#[test]
fn padding_to_the_same_size_is_known() {
    // As timm computes it: (ceil(x / stride) − 1) · stride + window − x, but not below 0.
    let body = "\
n = ops.prim.NumToTensor(torch.size(x, 1))
rows = torch.ceil(torch.div(n, CONSTANTS.c1))
used = torch.add(torch.mul(torch.sub(rows, CONSTANTS.c0), CONSTANTS.c1), CONSTANTS.c2)
pad = torch.clamp(torch.sub(used, n), 0)
left = torch.floor_divide(pad, CONSTANTS.c1)
return torch.pad(x, [int(left), int(torch.sub(pad, left))], \"constant\", 0.)";
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[1, 2, 3]);
    for (length, padded) in [(8, 9), (9, 11)] {
        assert_eq!(
            outputs(&saved, &[&format!("x:f32[4, {length}]")]),
            [format!("output_0: f32[4, {padded}]")]
        );
    }
    let saved = Saved::new("x: Tensor -> Tensor", body).constants(&[1, 2, -3]);
    assert_eq!(outputs(&saved, &["x:f32[4, 9]"]), ["output_0: f32[4, 9]"]);
}
