//! What a caller asks of the data, and what it gets.

use crate::tensors::Tensors;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The element type of a raw token file (`.bin`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenType {
    /// uint16, as nanoGPT writes it.
    #[default]
    U16,
    /// uint32.
    U32,
}

/// How documents become examples of the sequence length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// Documents follow each other, and an example is the next `sequence` tokens.
    #[default]
    Pack,
    /// An example is a document, or the next `sequence` tokens of a longer one, padded.
    Pad,
}

/// What to read, and how it becomes batches.
#[derive(Clone, Debug)]
pub struct DataRequest {
    /// Files, folders of shards, or `-` for JSON lines from stdin.
    pub paths: Vec<PathBuf>,
    /// The `tokenizer.json` for text.
    pub tokenizer: Option<PathBuf>,
    /// A Jinja template for chats, or a `tokenizer_config.json` that holds one. Without it, the one beside the tokenizer.
    pub chat_template: Option<PathBuf>,
    /// The element type of `.bin` files without an index.
    pub token_type: TokenType,
    /// Examples of a batch.
    pub batch: u64,
    /// Which of how many processes reads: each takes its share of every batch, which has `batch` examples for each of them.
    pub share: (u64, u64),
    /// Tokens of an example. Without it, the size that the graph has or was planned for.
    pub sequence: Option<u64>,
    /// How documents become examples.
    pub packing: Packing,
    /// The seed of the order.
    pub seed: u64,
    /// Whether each epoch has an order of its own; else examples come in the order of the files.
    pub shuffle: bool,
    /// Whether the last batch of an epoch is left out if it is short.
    pub drop_last: bool,
    /// The field or column that holds text.
    pub text_column: String,
}

impl Default for DataRequest {
    fn default() -> DataRequest {
        DataRequest {
            paths: Vec::new(),
            tokenizer: None,
            chat_template: None,
            token_type: TokenType::default(),
            batch: 1,
            share: (0, 1),
            sequence: None,
            packing: Packing::default(),
            seed: 0,
            shuffle: true,
            drop_last: false,
            text_column: "text".into(),
        }
    }
}

/// The inputs of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Tensors by the names of graph inputs, with the batch axis.
    pub inputs: Tensors,
    /// Tokens that count in the loss, at least 1 unless the batch is shared; examples, where the graph takes no `labels`.
    pub tokens: u64,
}

/// Where reading goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The next example in the order of that epoch, from 0.
    pub example: u64,
}
