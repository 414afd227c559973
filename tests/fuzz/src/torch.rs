//! Targets of the readers of PyTorch's archives: the zip, the pickle in it, the code, and the JSON of programs.

use crate::common::{files, ours, root};
use crate::program::Program;
use crate::saved::{Saved, zip};
use bytes::Bytes;
use ckpt_opt::frontend::given::{Given, InputType};
use ckpt_opt::frontend::torch::archive::Archive;
use serde_json::{Value, json};

/// Small models that between them use most of the language.
fn models() -> Vec<Saved> {
    let looped = "\
w = self.w
h = torch.mul(x, w)
n = ops.prim.NumToTensor(torch.size(x, 0))
_0 = int(torch.floor_divide(torch.mul(n, CONSTANTS.c0), CONSTANTS.c1))
parts = [h, x]
for i in range(3):
  _1 = torch.append(parts, torch.mul(h, i))
  if torch.eq(i, 1):
    h = torch.neg(h)
  else:
    pass
_2 = torch.add_(torch.slice(h, 0, 0, 1), 2.)
d = {\"a\": parts}
a, b, = (d[\"a\"])[0], h
return (torch.view(a, [_0, -1]), __torch__.helper(b, 2, ))";
    let mut first = Saved::new("x: Tensor -> Tuple[Tensor, Tensor]", looped)
        .parameter("w", &[2, 3], &[0.5; 6])
        .constants(&[4, 4]);
    first.functions =
        "def helper(x: Tensor,\n    n: int=1) -> Tensor:\n  y = torch.mul(x, n)\n  return y\n"
            .into();
    let calls = "\
w = self.w
u = getattr(self, \"u\")
y = (self).again(torch.transpose(x, 0, 1), )
n = 0
_0 = True
while _0:
  n0 = torch.add(n, 1)
  _0, n = torch.lt(n0, 3), n0
if torch.__isnot__(w, None):
  z = unchecked_cast(Tensor, w)
else:
  z = u
return torch.matmul(y, torch.softmax(torch.add(z, u), -1))";
    let second = Saved::new("x: Tensor -> Tensor", calls)
        .method(
            "again",
            "x: Tensor -> Tensor",
            "return torch.reshape(x, [3, -1])",
        )
        .parameter("w", &[2, 3], &[0.25; 6])
        .parameter("u", &[3], &[1.0, 2.0, 3.0]);
    vec![first, second]
}

fn entries_of(which: usize, replaced: &str, content: &[u8]) -> Vec<u8> {
    let mut entries = models().swap_remove(which % 2).entries();
    for entry in entries.iter_mut().filter(|(name, _)| name == replaced) {
        entry.1 = content.to_vec();
    }
    zip(&entries)
}

pub fn archives() -> Vec<Vec<u8>> {
    models().iter().map(Saved::zip).collect()
}

pub fn pickles() -> Vec<Vec<u8>> {
    models().iter().map(Saved::data).collect()
}

pub fn code() -> Vec<Vec<u8>> {
    models().iter().map(|m| m.code().into_bytes()).collect()
}

/// Reads the directory, every entry, and the model.
pub fn run_archive(input: &[u8]) -> Result<bool, String> {
    let archive = match Archive::read(Bytes::copy_from_slice(input)) {
        Ok(archive) => archive,
        Err(e) => return ours(&e),
    };
    for name in archive.names() {
        if let Err(e) = archive.content(name, 1 << 24) {
            ours(&e)?;
        }
    }
    let given = Given {
        inputs: InputType::parse("x:f32[2,3]").into_iter().collect(),
        ..Given::default()
    };
    match ckpt_opt::frontend::torch::read(&archive, &given) {
        Ok(model) => {
            ckpt_passes::ir::verify::verify(&model.graph).map_err(|e| e.to_string())?;
            Ok(true)
        }
        Err(e) => ours(&e),
    }
}

/// The models with another pickle.
pub fn run_pickle(input: &[u8]) -> Result<bool, String> {
    let first = run_archive(&entries_of(0, "m/data.pkl", input))?;
    Ok(first | run_archive(&entries_of(1, "m/data.pkl", input))?)
}

/// The models with other code.
pub fn run_code(input: &[u8]) -> Result<bool, String> {
    let first = run_archive(&entries_of(0, "m/code/__torch__.py", input))?;
    Ok(first | run_archive(&entries_of(1, "m/code/__torch__.py", input))?)
}

/// The parts of an archive that are JSON, and the sizes of the entries beside them.
const PARTS: [(&str, &str); 3] = [
    ("model", "models/model.json"),
    ("weights", "data/weights/model_weights_config.json"),
    ("constants", "data/constants/model_constants_config.json"),
];

/// A seed, from the contents of an archive's entries; `None` for an archive that is no program.
fn seed_of(archive: &Archive) -> Option<Vec<u8>> {
    let mut seed = json!({});
    for (key, name) in PARTS {
        let text = archive.content(name, 1 << 24).ok()?;
        seed[key] = serde_json::from_slice(&text).ok()?;
    }
    let sizes: Value = archive
        .names()
        .filter(|name| !PARTS.iter().any(|(_, part)| part == name))
        .filter(|name| name.starts_with("data/"))
        .map(|name| (name.to_string(), json!(archive.size_bytes(name))))
        .collect::<serde_json::Map<String, Value>>()
        .into();
    seed["sizes"] = sizes;
    Some(seed.to_string().into_bytes())
}

pub fn programs() -> Vec<Vec<u8>> {
    let small = zip(&Program::rich().entries());
    let fixtures = files(&root().join("fixtures/exported"), "pt2");
    let all = [small].into_iter().chain(fixtures);
    // What is small is mutated more often: it runs faster, and its parts are hit more often.
    let seeds: Vec<Vec<u8>> = all
        .filter_map(|bytes| seed_of(&Archive::read(Bytes::from(bytes)).ok()?))
        .collect();
    let small = seeds[0].clone();
    std::iter::repeat_n(small, 3 * seeds.len())
        .chain(seeds)
        .collect()
}

/// The archive that a seed describes; what is no such JSON is a program's.
pub fn run_program(input: &[u8]) -> Result<bool, String> {
    let tree = serde_json::from_slice::<Value>(input).unwrap_or(Value::Null);
    let mut entries = vec![("m/archive_format".to_string(), b"pt2".to_vec())];
    for (key, name) in PARTS {
        let text = match tree.get(key) {
            Some(part) => part.to_string().into_bytes(),
            None if key == "model" => input.to_vec(),
            None => continue,
        };
        entries.push((format!("m/{name}"), text));
    }
    for (name, size) in tree["sizes"].as_object().into_iter().flatten() {
        let size = size.as_u64().unwrap_or(0).min(1 << 16) as usize;
        if name.starts_with("data/") && !entries.iter().any(|(n, _)| n[2..] == **name) {
            entries.push((format!("m/{name}"), vec![0; size]));
        }
    }
    run_archive(&zip(&entries))
}
