//! Mutations: of protobuf as a tree of fields, of text as lines, and of bytes where structure is to break.

use ckpt_opt::frontend::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, ValueInfoProto, attribute_proto::AttributeType,
};
use prost::Message;

/// SplitMix64: small, seeded, the same everywhere.
pub struct Random(u64);

impl Random {
    /// Returns a generator whose numbers depend on the seed alone.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number, uniform over all of `u64`.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }
}

/// One field of a protobuf message: where its tag begins, where its content is, and its wire type.
struct Field {
    start: usize,
    content: std::ops::Range<usize>,
    wire: u8,
}

fn varint(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// The fields of a message; `None` if the bytes are none.
fn fields(bytes: &[u8]) -> Option<Vec<Field>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        let tag = varint(bytes, &mut at)?;
        let wire = (tag & 7) as u8;
        let content = match wire {
            0 => {
                let begin = at;
                varint(bytes, &mut at)?;
                begin..at
            }
            1 => at..at + 8,
            5 => at..at + 4,
            2 => {
                let length = usize::try_from(varint(bytes, &mut at)?).ok()?;
                at..at.checked_add(length)?
            }
            _ => return None,
        };
        if content.end > bytes.len() || tag >> 3 == 0 {
            return None;
        }
        at = content.end;
        found.push(Field {
            start,
            content,
            wire,
        });
    }
    Some(found)
}

fn put_varint(value: u64, out: &mut Vec<u8>) {
    prost::encoding::encode_varint(value, out);
}

/// Numbers at which readers break.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    23,
    127,
    128,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Changes one field somewhere in the tree; lengths around it are made right again, so that the change is reached.
fn change(random: &mut Random, bytes: &[u8], donor: &[u8], depth: usize) -> Vec<u8> {
    let Some(found) = fields(bytes).filter(|f| !f.is_empty()) else {
        return garble(random, bytes);
    };
    let field = &found[random.below(found.len())];
    let (before, after) = (&bytes[..field.start], &bytes[field.content.end..]);
    let whole = &bytes[field.start..field.content.end];
    let mut out = before.to_vec();
    let tag_end = {
        let mut at = field.start;
        let _ = varint(bytes, &mut at);
        at
    };
    let tag = &bytes[field.start..tag_end];
    let inner = &bytes[field.content.clone()];
    let descend = field.wire == 2 && depth < 12 && inner.len() > 1 && random.below(8) != 0;
    if descend {
        let changed = change(random, inner, donor, depth + 1);
        out.extend(tag);
        put_varint(changed.len() as u64, &mut out);
        out.extend(changed);
    } else {
        match random.below(7) {
            0 => {}
            1 => {
                out.extend(whole);
                out.extend(whole);
            }
            2 => {
                // Another field of the same message in its place, or beside it.
                let other = &found[random.below(found.len())];
                out.extend(&bytes[other.start..other.content.end]);
                if random.below(2) == 0 {
                    out.extend(whole);
                }
            }
            3 => {
                // A field of another model, under this field's tag.
                if let Some(theirs) = fields(donor).filter(|f| !f.is_empty()) {
                    let theirs = &theirs[random.below(theirs.len())];
                    let content = &donor[theirs.content.clone()];
                    out.extend(tag);
                    if field.wire == 2 {
                        put_varint(content.len() as u64, &mut out);
                    }
                    out.extend(content);
                }
            }
            _ if field.wire == 0 => {
                out.extend(tag);
                let edge = EDGES[random.below(EDGES.len())];
                put_varint(edge, &mut out);
            }
            _ if field.wire == 2 => {
                let garbled = garble(random, inner);
                out.extend(tag);
                put_varint(garbled.len() as u64, &mut out);
                out.extend(garbled);
            }
            _ => {
                out.extend(tag);
                out.extend(inner.iter().map(|_| random.next_u64() as u8));
            }
        }
    }
    out.extend(after);
    out
}

/// Changes bytes without regard to structure.
fn garble(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    if out.is_empty() {
        return vec![random.next_u64() as u8];
    }
    for _ in 0..=random.below(3) {
        let at = random.below(out.len());
        match random.below(5) {
            0 => out[at] ^= 1 << random.below(8),
            1 => out[at] = random.next_u64() as u8,
            2 => out.truncate(at.max(1)),
            3 => out.insert(at, random.next_u64() as u8),
            _ => {
                let end = (at + 1 + random.below(16)).min(out.len());
                let piece = out[at..end].to_vec();
                out.extend(piece);
            }
        }
    }
    out
}

/// One to four changes of a model. Small models are chosen more often: more runs a second, more of them reach the end.
pub fn protobuf(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    // The planned model follows the small ones.
    let small = small_models().len() + 1;
    let pick = |random: &mut Random| {
        let n = if random.below(8) == 0 {
            seeds.len()
        } else {
            small.min(seeds.len())
        };
        &seeds[random.below(n)]
    };
    let mut bytes = pick(random).clone();
    for _ in 0..=random.below(4) {
        let donor = pick(random);
        bytes = if random.below(12) == 0 {
            garble(random, &bytes)
        } else {
            change(random, &bytes, donor, 0)
        };
    }
    bytes
}

/// Bytes of a seed with a few of them changed, cut out, doubled, or replaced by those of another seed.
pub fn bytes(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut input = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(6) {
        if input.is_empty() {
            break;
        }
        let at = random.below(input.len());
        let length = random.below(16).min(input.len() - at);
        match random.below(6) {
            0 => input[at] ^= 1 << random.below(8),
            1 => input[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.below(6)],
            2 => drop(input.drain(at..at + length)),
            3 => {
                let copied = input[at..at + length].to_vec();
                let to = random.below(input.len());
                input.splice(to..to, copied);
            }
            4 => input[at..at + length].fill(0xff),
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                let length = length.min(other.len() - from);
                input.splice(at..at, other[from..from + length].to_vec());
            }
        }
    }
    input
}

/// Changes of a text: lines and words are dropped, doubled, swapped, taken from another text.
pub fn lines(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let whole = text(&seeds[random.below(seeds.len())]);
    // A golden holds a header, an input, a line `---` and an expectation: each part is a text of its own.
    let parts: Vec<&str> = whole.split("---\n").collect();
    let part = parts[random.below(parts.len())];
    let mut lines: Vec<String> = part
        .lines()
        .filter(|l| !l.starts_with("test "))
        .map(str::to_string)
        .collect();
    let donor = text(&seeds[random.below(seeds.len())]);
    let donors: Vec<&str> = donor.lines().collect();
    for _ in 0..random.below(4) {
        if lines.is_empty() {
            break;
        }
        let at = random.below(lines.len());
        match random.below(6) {
            0 => drop(lines.remove(at)),
            1 => lines.insert(at, lines[at].clone()),
            2 => {
                let other = random.below(lines.len());
                lines.swap(at, other);
            }
            3 if !donors.is_empty() => {
                lines.insert(at, donors[random.below(donors.len())].to_string())
            }
            4 => lines[at] = text(&garble(random, lines[at].as_bytes())),
            _ => {
                let mut words: Vec<&str> = lines[at].split(' ').collect();
                let (i, j) = (random.below(words.len()), random.below(words.len()));
                words.swap(i, j);
                lines[at] = words.join(" ");
            }
        }
    }
    lines.join("\n").into_bytes()
}

fn node(op: &str, ins: &[&str], outs: &[&str], attributes: Vec<AttributeProto>) -> NodeProto {
    let strings = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
    NodeProto {
        op_type: Some(op.into()),
        input: strings(ins),
        output: strings(outs),
        attribute: attributes,
        ..NodeProto::default()
    }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

/// `name: elem[n, 3, 4]` with the first axis named.
fn value(name: &str, elem: u8) -> ValueInfoProto {
    // tensor_type { elem_type, shape { dim { dim_param: "n" } dim { dim_value: 3 } dim { dim_value: 4 } } }
    let ty: [u8; 19] = [
        10, 17, 8, elem, 18, 13, 10, 3, 18, 1, b'n', 10, 2, 8, 3, 10, 2, 8, 4,
    ];
    let ty = ckpt_opt::frontend::onnx::proto::TypeProto::decode(&ty[..]).ok();
    ValueInfoProto {
        name: Some(name.into()),
        r#type: ty,
        ..ValueInfoProto::default()
    }
}

fn ints(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(7),
        dims: vec![values.len() as i64],
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn model(nodes: Vec<NodeProto>, inits: Vec<TensorProto>, functions: Vec<FunctionProto>) -> Vec<u8> {
    let import = |domain: &str, version| OperatorSetIdProto {
        domain: Some(domain.into()),
        version: Some(version),
    };
    let graph = GraphProto {
        name: Some("g".into()),
        node: nodes,
        initializer: inits,
        input: vec![value("x", 1)],
        output: vec![ValueInfoProto {
            name: Some("y".into()),
            ..ValueInfoProto::default()
        }],
        value_info: vec![value("t", 1)],
        ..GraphProto::default()
    };
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![import("", 18), import("f", 1)],
        graph: Some(graph),
        functions,
        ..ModelProto::default()
    }
    .encode_to_vec()
}

/// Small models that between them use most of what a reader looks at.
pub fn small_models() -> Vec<Vec<u8>> {
    let call = |ins: &[&str], outs: &[&str]| NodeProto {
        domain: Some("f".into()),
        ..node("F", ins, outs, vec![int("k", 1)])
    };
    let mut referring = int("axis", 0);
    (referring.i, referring.ref_attr_name) = (None, Some("k".into()));
    let function = FunctionProto {
        name: Some("F".into()),
        domain: Some("f".into()),
        input: vec!["a".into()],
        output: vec!["b".into()],
        attribute: vec!["k".into()],
        node: vec![node("Softmax", &["a"], &["b"], vec![referring])],
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(18),
        }],
        ..FunctionProto::default()
    };
    let opaque = NodeProto {
        domain: Some("f".into()),
        ..node("Unknown", &["x", ""], &["t"], vec![])
    };
    vec![
        model(
            vec![node("Add", &["x", "x"], &["y"], vec![])],
            vec![],
            vec![],
        ),
        model(
            vec![
                node("Shape", &["x"], &["s"], vec![]),
                node("Gather", &["s", "i"], &["d"], vec![int("axis", 0)]),
                node("Concat", &["d", "r"], &["to"], vec![int("axis", 0)]),
                node("Reshape", &["x", "to"], &["y"], vec![int("allowzero", 1)]),
            ],
            vec![ints("i", &[0]), ints("r", &[12])],
            vec![],
        ),
        model(
            vec![call(&["x"], &["t"]), call(&["t"], &["y"])],
            vec![],
            vec![function],
        ),
        model(
            vec![
                node("ReduceMean", &["x", "a"], &["m"], vec![int("keepdims", 1)]),
                node("Sub", &["x", "m"], &["t"], vec![]),
                node("Slice", &["t", "zero", "two", "one"], &["u"], vec![]),
                node(
                    "Split",
                    &["u"],
                    &["v", "w"],
                    vec![int("axis", 1), int("num_outputs", 2)],
                ),
                node("MatMul", &["v", "k"], &["y"], vec![]),
            ],
            vec![
                ints("a", &[-1]),
                ints("zero", &[0]),
                ints("two", &[2]),
                ints("one", &[1]),
                TensorProto {
                    name: Some("k".into()),
                    data_type: Some(1),
                    dims: vec![4, 2],
                    raw_data: Some(vec![0; 32].into()),
                    ..TensorProto::default()
                },
            ],
            vec![],
        ),
        model(
            vec![opaque, node("Neg", &["t"], &["y"], vec![])],
            vec![],
            vec![],
        ),
    ]
}
