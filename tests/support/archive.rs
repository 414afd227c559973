//! Small TorchScript archives from their source, laid out as libtorch reads them.

use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A float32 tensor of the model's state: name, sizes, strides, whether it is trained.
pub struct State {
    pub name: &'static str,
    /// Storage; two of one are tied or overlap.
    pub storage: usize,
    pub sizes: Vec<u32>,
    pub strides: Vec<u32>,
    pub offset: u32,
    pub requires_grad: bool,
}

/// A model of one class, `M`, whose code follows the class's header.
#[derive(Default)]
pub struct Saved {
    pub state: Vec<State>,
    pub storages: Vec<Vec<f32>>,
    /// 0-d int64 constants, `CONSTANTS.cN`.
    pub constants: Vec<i64>,
    /// 0-d float64 constants, numbered behind those.
    pub numbers: Vec<f64>,
    /// Methods of `M`, indented by two.
    pub methods: String,
    /// What stands after the class: functions.
    pub functions: String,
}

impl Saved {
    /// A model whose `forward` has this signature (without `self`) and body, a line a statement.
    pub fn new(signature: &str, body: &str) -> Saved {
        Saved::default().method("forward", signature, body)
    }

    pub fn method(mut self, name: &str, signature: &str, body: &str) -> Saved {
        let lines: String = body.lines().map(|l| format!("    {l}\n")).collect();
        let (args, result) = signature.split_once(" -> ").unwrap();
        self.methods +=
            &format!("  def {name}(self: __torch__.M,\n    {args}) -> {result}:\n{lines}");
        self
    }

    /// A parameter with its own storage.
    pub fn parameter(mut self, name: &'static str, sizes: &[u32], values: &[f32]) -> Saved {
        let mut strides = vec![1; sizes.len()];
        for i in (1..sizes.len()).rev() {
            strides[i - 1] = strides[i] * sizes[i];
        }
        self.state.push(State {
            name,
            storage: self.storages.len(),
            sizes: sizes.to_vec(),
            strides,
            offset: 0,
            requires_grad: true,
        });
        self.storages.push(values.to_vec());
        self
    }

    pub fn constants(mut self, values: &[i64]) -> Saved {
        self.constants = values.to_vec();
        self
    }

    pub fn code(&self) -> String {
        let names: String = self
            .state
            .iter()
            .map(|s| format!("\"{}\", ", s.name))
            .collect();
        let types: String = self
            .state
            .iter()
            .map(|s| format!("  {} : Tensor\n", s.name))
            .collect();
        format!(
            "class M(Module):\n  __parameters__ = [{names}]\n  __buffers__ = []\n{types}  training : bool\n  _is_full_backward_hook : Optional[bool]\n{}{}",
            self.methods, self.functions
        )
    }

    pub fn data(&self) -> Vec<u8> {
        let mut p = b"\x80\x02c__torch__\nM\n)\x81}(".to_vec();
        string(&mut p, "training");
        p.push(0x89);
        string(&mut p, "_is_full_backward_hook");
        p.push(b'N');
        for state in &self.state {
            string(&mut p, state.name);
            let elements = self.storages[state.storage].len() as u32;
            tensor(&mut p, "FloatStorage", state.storage, elements, state);
        }
        p.extend(b"ub.");
        p
    }

    /// A pickle of a tensor of the state alone, as `torch.save` writes it.
    #[allow(dead_code, reason = "for archives of another format")]
    pub fn tensor_pickle(&self, which: usize) -> Vec<u8> {
        let state = &self.state[which];
        let elements = self.storages[state.storage].len() as u32;
        let mut p = b"\x80\x02".to_vec();
        tensor(&mut p, "FloatStorage", state.storage, elements, state);
        p.push(b'.');
        p
    }

    fn constants_pickle(&self) -> Vec<u8> {
        let mut p = b"\x80\x02(".to_vec();
        for i in 0..self.constants.len() + self.numbers.len() {
            let storage = ["LongStorage", "DoubleStorage"][usize::from(i >= self.constants.len())];
            let scalar = State {
                name: "",
                storage: i,
                sizes: Vec::new(),
                strides: Vec::new(),
                offset: 0,
                requires_grad: false,
            };
            tensor(&mut p, storage, i, 1, &scalar);
        }
        p.extend(b"t.");
        p
    }

    pub fn entries(&self) -> Vec<(String, Vec<u8>)> {
        let mut entries = vec![
            ("m/data.pkl".to_string(), self.data()),
            ("m/code/__torch__.py".to_string(), self.code().into_bytes()),
            ("m/constants.pkl".to_string(), self.constants_pickle()),
            ("m/version".to_string(), b"3\n".to_vec()),
            ("m/byteorder".to_string(), b"little".to_vec()),
        ];
        for (i, storage) in self.storages.iter().enumerate() {
            let bytes = storage.iter().flat_map(|x| x.to_le_bytes()).collect();
            entries.push((format!("m/data/{i}"), bytes));
        }
        let ints = self.constants.iter().map(|n| n.to_le_bytes());
        let all = ints.chain(self.numbers.iter().map(|x| x.to_le_bytes()));
        for (i, bytes) in all.enumerate() {
            entries.push((format!("m/constants/{i}"), bytes.to_vec()));
        }
        entries
    }

    pub fn zip(&self) -> Vec<u8> {
        zip(&self.entries())
    }
}

/// Stored entries, each aligned to 64 bytes.
pub fn zip(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .with_alignment(64);
        writer.start_file(name.as_str(), options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn string(p: &mut Vec<u8>, text: &str) {
    p.push(b'X');
    p.extend((text.len() as u32).to_le_bytes());
    p.extend(text.as_bytes());
}

fn int(p: &mut Vec<u8>, n: u32) {
    p.push(b'J');
    p.extend(n.to_le_bytes());
}

fn ints(p: &mut Vec<u8>, list: &[u32]) {
    p.push(b'(');
    for n in list {
        int(p, *n);
    }
    p.push(b't');
}

fn tensor(p: &mut Vec<u8>, storage: &str, key: usize, elements: u32, state: &State) {
    p.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
    string(p, "storage");
    p.extend(format!("ctorch\n{storage}\n").bytes());
    string(p, &key.to_string());
    string(p, "cpu");
    int(p, elements);
    p.extend(b"tQ");
    int(p, state.offset);
    ints(p, &state.sizes);
    ints(p, &state.strides);
    p.push(0x88 + u8::from(!state.requires_grad));
    p.extend(b"ccollections\nOrderedDict\n)RtR");
}
