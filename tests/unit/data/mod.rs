//! Data for training: files of every format as batches, and hostile ones.

mod columns;
mod hostile;
mod tensors;
mod text;
mod tokens;

use ckpt_opt::passes::Error;
use ckpt_opt::passes::ir::Graph;
use ckpt_opt::passes::text::parse;
use ckpt_opt::train::data::{Batch, Batches, DataRequest, open};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// A graph with a table of 300 rows and these inputs besides `input_ids`.
fn graph(others: &str) -> Graph {
    let source = format!(
        "graph @g typed (%input_ids: i64[batch, seq]{others}) -> (%y) {{
  init %w : f32[300, 2] = splat 0.5
  %y = Gather %w, %input_ids : f32[batch, seq, 2]
}}
"
    );
    parse(&source).unwrap()
}

const LABELS: &str = ", %labels: i64[batch, seq]";

fn request(path: &Path, batch: u64, sequence: u64) -> DataRequest {
    DataRequest {
        paths: vec![path.to_path_buf()],
        batch,
        sequence: Some(sequence),
        shuffle: false,
        ..DataRequest::default()
    }
}

/// Returns all batches of an epoch.
fn epoch(batches: &mut Batches) -> Vec<Batch> {
    std::iter::from_fn(|| batches.next().unwrap()).collect()
}

/// Opens data and returns the batches of an epoch, or what is wrong with them.
fn read(request: &DataRequest, graph: &Graph) -> Result<Vec<Batch>, Box<Error>> {
    let mut batches = open(request, graph)?;
    let mut all = Vec::new();
    while let Some(batch) = batches.next()? {
        all.push(batch);
    }
    Ok(all)
}

/// Returns the integers of an input.
fn ints(batch: &Batch, input: &str) -> Vec<i64> {
    let tensor = &batch.inputs[input];
    let all = 0..tensor.elements() as usize;
    all.map(|i| tensor.get_i64(i).unwrap()).collect()
}

fn floats(batch: &Batch, input: &str) -> Vec<f64> {
    let tensor = &batch.inputs[input];
    let all = 0..tensor.elements() as usize;
    all.map(|i| tensor.get_f64(i).unwrap()).collect()
}

/// Writes a `.bin` of uint16.
fn bin(folder: &Path, name: &str, tokens: impl IntoIterator<Item = u16>) -> PathBuf {
    let bytes: Vec<u8> = tokens.into_iter().flat_map(u16::to_le_bytes).collect();
    file(folder, name, &bytes)
}

fn file(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Returns a tokenizer of bytes, with `the` and the end of text, token 258.
fn byte_tokenizer() -> Tokenizer {
    let mut letters: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    letters.sort_unstable();
    let mut vocab: HashMap<String, u32> = letters.iter().map(|c| c.to_string()).zip(0..).collect();
    vocab.insert("th".into(), 256);
    vocab.insert("the".into(), 257);
    let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
    let merges = vec![pair("t", "h"), pair("th", "e")];
    let vocab: tokenizers::models::bpe::Vocab = vocab.into_iter().collect();
    let model = BPE::builder().vocab_and_merges(vocab, merges);
    let mut tokenizer = Tokenizer::new(model.build().unwrap());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer
        .add_special_tokens([AddedToken::from("<|endoftext|>", true)])
        .unwrap();
    tokenizer
}

/// The token that ends a text.
const END: i64 = 258;

/// Writes the tokenizer beside the data.
fn tokenizer(folder: &Path) -> PathBuf {
    let path = folder.join("tokenizer.json");
    byte_tokenizer().save(&path, false).unwrap();
    path
}

/// Returns the tokens of a text.
fn encoded(text: &str) -> Vec<i64> {
    let encoding = byte_tokenizer().encode(text, false).unwrap();
    encoding.get_ids().iter().map(|id| i64::from(*id)).collect()
}
