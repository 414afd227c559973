//! The words for sub-blocks of layers that the policy `parts:…` takes.

use super::annotations::OpAnnotations;
use super::index::OpIdx;
use ckpt_error::{Error, Result};
use std::fmt;

/// A row of the table of sub-blocks.
struct SubBlockDef {
    word: &'static str,
    aliases: &'static [&'static str],
    /// Whether a rebuilt sub-block keeps its results. A whole branch ends in a sum of the residual stream, which is kept.
    keeps_output: bool,
}

/// Every sub-block. The last three are inner ones: cores of attentions, activations of MLPs and of experts.
static SUB_BLOCKS: [SubBlockDef; 8] = [
    row("norm", &["layernorm", "rmsnorm"], false),
    row("attention", &["attn", "self-attn"], true),
    row("mlp", &[], true),
    row("experts", &["moe"], true),
    row("conv", &[], true),
    row("core-attn", &["core-attention"], false),
    row("mlp-act", &[], false),
    row("moe-act", &["expert-act"], false),
];

const fn row(
    word: &'static str,
    aliases: &'static [&'static str],
    keeps_output: bool,
) -> SubBlockDef {
    SubBlockDef {
        word,
        aliases,
        keeps_output,
    }
}

/// A set of sub-blocks, as in `parts:core-attn,norm`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SubBlocks(u8);

impl SubBlocks {
    /// The set without sub-blocks.
    pub const EMPTY: SubBlocks = SubBlocks(0);

    /// Reads words separated by commas, in lower case with `-` for `_`.
    ///
    /// # Errors
    /// `error[policy]` for an unknown or missing word; the error lists the words.
    pub fn parse(text: &str) -> Result<SubBlocks> {
        let mut set = SubBlocks::default();
        for word in text.split(',').map(str::trim) {
            let is_meant = |row: &SubBlockDef| row.word == word || row.aliases.contains(&word);
            let Some(at) = SUB_BLOCKS.iter().position(is_meant) else {
                let what = format!("no sub-block of a layer is called `{word}`");
                let words: Vec<&str> = SubBlocks::words().collect();
                return Err(Error::usage("policy", what).expected(words.join(", ")));
            };
            set.0 |= 1 << at;
        }
        Ok(set)
    }

    /// Returns all words.
    pub fn words() -> impl Iterator<Item = &'static str> {
        SUB_BLOCKS.iter().map(|row| row.word)
    }

    fn rows(self) -> impl Iterator<Item = &'static SubBlockDef> {
        let rows = SUB_BLOCKS.iter().enumerate();
        rows.filter_map(move |(at, row)| (self.0 & 1 << at != 0).then_some(row))
    }

    fn contains(self, word: &str) -> bool {
        self.rows().any(|row| row.word == word)
    }

    /// Returns the word of this set that an op falls under: its sub-block, else its inner sub-block.
    pub fn word_of(self, annotations: &OpAnnotations, op: OpIdx) -> Option<&str> {
        let whole = annotations.sub_block_of[op].map(|s| annotations.sub_blocks[s].as_str());
        let whole = whole.filter(|word| self.contains(word));
        let inner = annotations.core_of[op].as_deref();
        whole.or(inner.filter(|word| self.contains(word)))
    }

    /// Returns whether a rebuilt sub-block of that word keeps its results.
    pub fn keeps_output(word: &str) -> bool {
        SUB_BLOCKS
            .iter()
            .any(|row| row.word == word && row.keeps_output)
    }
}

impl fmt::Display for SubBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.rows().map(|row| row.word).collect();
        f.write_str(&words.join(","))
    }
}
