//! Examples of tokens: documents packed into windows, or padded.
//!
//! Streams of tokens stay mapped files, and follow each other as one sequence. With [`Packing::Pack`] an example is a window
//! of it. Otherwise, and where some tokens are not learned, a mapped table lists the examples.

use super::batches::Source;
use super::inputs::{DataInput, DataInputs, IGNORED, LABELS, POSITIONS, lowest, put};
use super::request::{Batch, DataRequest, Packing};
use super::spill::Spill;
use crate::tensors::Tensors;
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use std::ops::Range;

/// The bit of a token of our own files that says that it is not learned.
pub(super) const MASKED: u32 = 1 << 31;

/// The tokens of one file, in order.
pub(super) struct Stream {
    /// The file, for messages.
    pub name: String,
    /// A vector of integers.
    pub tokens: Tensor,
    /// Whether [`MASKED`] is used.
    pub has_masks: bool,
    /// Where documents start, ascending, as int64; `None` where nobody says.
    pub documents: Option<Tensor>,
}

/// Streams and the end-of-text token that ends their documents.
#[derive(Default)]
pub(super) struct Corpus {
    pub streams: Vec<Stream>,
    pub end_of_text: Option<u32>,
}

/// The part of a batch that a graph input holds.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Part {
    Tokens,
    Labels,
    /// 1 for a token, 0 for padding.
    Mask,
    /// Which tokens each token may see: those before it in its document.
    Pairs,
    /// The number of the document in the example.
    Documents,
    /// The place in the document, by example.
    Positions,
    /// The place in the example, the same for all.
    SharedPositions,
    Zeros,
}

/// One example: up to `sequence` tokens.
struct Row {
    ids: Vec<u32>,
    is_learned: Vec<bool>,
    /// Places where a document starts, besides 0.
    starts: Vec<usize>,
}

impl Row {
    /// Returns the number of labels that count in a causal loss.
    fn learned(&self) -> u64 {
        self.is_learned.iter().skip(1).filter(|l| **l).count() as u64
    }
}

/// A corpus as examples for a graph.
pub(super) struct TokenSource {
    corpus: Corpus,
    /// The place of each stream in the sequence of all, and the end.
    offsets: Vec<u64>,
    parts: Vec<(DataInput, Part)>,
    sequence: u64,
    /// Begin and end of each example; `None` for equal windows.
    table: Option<Tensor>,
    examples: u64,
    /// Whether the graph keeps documents of a window apart.
    separates: bool,
    below: i64,
}

impl TokenSource {
    /// Matches a corpus to the inputs of a graph, and divides it into examples.
    ///
    /// # Errors
    /// An input that tokens cannot fill; no sequence length; no tokens.
    pub fn new(corpus: Corpus, request: &DataRequest, wanted: &DataInputs) -> Result<TokenSource> {
        if !wanted.is_causal {
            let loss = wanted.loss.as_deref().unwrap_or_default();
            return Err(Error::usage("data", "tokens and text train the next token")
                .expected("a graph with the loss causal-lm")
                .found(format!("a graph with the loss {loss}"))
                .help(
                    "give tensors by the names of the inputs, with labels or target among them",
                ));
        }
        let tokens = token_input(wanted)?;
        let parts = wanted.inputs.iter().map(|input| {
            let part = part(input, &tokens.name).ok_or_else(|| unknown(input))?;
            Ok((input.clone(), part))
        });
        let parts: Vec<(DataInput, Part)> = parts.collect::<Result<_>>()?;
        let separates = parts
            .iter()
            .any(|(_, p)| matches!(p, Part::Pairs | Part::Documents | Part::Positions));
        let mut offsets = vec![0u64];
        for stream in &corpus.streams {
            offsets.push(offsets[offsets.len() - 1] + stream.tokens.elements());
        }
        let mut source = TokenSource {
            corpus,
            offsets,
            sequence: sequence(request, wanted, tokens)?,
            below: tokens.below.unwrap_or(i64::from(MASKED)),
            parts,
            table: None,
            examples: 0,
            separates,
        };
        source.divide(request.packing)?;
        if source.examples == 0 {
            return Err(
                Error::usage("data", "there is nothing to learn in the data")
                    .expected("at least one token after another")
                    .found(format!("{} tokens", source.total())),
            );
        }
        Ok(source)
    }

    /// Returns the tokens of an example.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    fn total(&self) -> u64 {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Divides the corpus into examples. Examples without a label that counts are left out.
    fn divide(&mut self, packing: Packing) -> Result<()> {
        let total = self.total();
        let has_masks = self.corpus.streams.iter().any(|s| s.has_masks);
        if packing == Packing::Pack && !has_masks {
            let rest = total % self.sequence;
            self.examples = total / self.sequence + u64::from(rest > 1 && self.sequence > 1);
            return Ok(());
        }
        let mut table = Spill::new()?;
        let mut examples = 0;
        let (mut stream, mut document) = (0, 0);
        let mut begin = 0;
        while begin < total {
            let mut end = total.min(begin + self.sequence);
            if packing == Packing::Pad {
                while self.offsets[stream + 1] <= begin {
                    (stream, document) = (stream + 1, 0);
                }
                end = end.min(self.offsets[stream + 1]);
                let here = begin - self.offsets[stream];
                while self.document(stream, document).is_some_and(|s| s <= here) {
                    document += 1;
                }
                if let Some(next) = self.document(stream, document) {
                    end = end.min(self.offsets[stream] + next);
                }
            }
            // Streams without masks are checked when they are read.
            if end - begin > 1 && (!has_masks || self.row(begin..end)?.learned() > 0) {
                table.put_u64(begin)?;
                table.put_u64(end)?;
                examples += 1;
            }
            begin = end;
        }
        self.examples = examples;
        self.table = Some(table.finish(DType::I64)?);
        Ok(())
    }

    /// Returns where a document starts in its stream.
    fn document(&self, stream: usize, document: u64) -> Option<u64> {
        let starts = self.corpus.streams[stream].documents.as_ref()?;
        u64::try_from(starts.get_i64(usize::try_from(document).ok()?)?).ok()
    }

    /// Returns the first document of a stream that starts after `place`.
    fn document_after(&self, stream: usize, place: u64) -> u64 {
        let starts = self.corpus.streams[stream].documents.as_ref();
        let (mut low, mut high) = (0, starts.map_or(0, Tensor::elements));
        while low < high {
            let middle = low + (high - low) / 2;
            match self.document(stream, middle) {
                Some(start) if start <= place => low = middle + 1,
                _ => high = middle,
            }
        }
        low
    }

    fn span(&self, example: u64) -> Result<Range<u64>> {
        let Some(table) = &self.table else {
            let begin = example * self.sequence;
            return Ok(begin..self.total().min(begin + self.sequence));
        };
        let at = |i: u64| table.get_i64(i as usize).map(|n| n as u64);
        let span = at(2 * example).zip(at(2 * example + 1));
        let (begin, end) =
            span.ok_or_else(|| Error::bug("data", "the table of examples is short"))?;
        Ok(begin..end)
    }

    /// Reads tokens and checks them.
    ///
    /// # Errors
    /// A token that the model has no row for.
    fn row(&self, span: Range<u64>) -> Result<Row> {
        let length = (span.end - span.start) as usize;
        let mut row = Row {
            ids: Vec::with_capacity(length),
            is_learned: Vec::with_capacity(length),
            starts: Vec::new(),
        };
        let mut stream = self
            .offsets
            .partition_point(|o| *o <= span.start)
            .saturating_sub(1);
        let mut at = span.start;
        while at < span.end {
            let (first, end) = (self.offsets[stream], self.offsets[stream + 1].min(span.end));
            if at == first && !row.ids.is_empty() {
                row.starts.push(row.ids.len());
            }
            self.read(stream, at - first..end - first, &mut row)?;
            (at, stream) = (end, stream + 1);
        }
        if self.separates {
            // The end of one document says nothing about the beginning of the next.
            for start in &row.starts {
                row.is_learned[*start] = false;
            }
        }
        Ok(row)
    }

    /// Appends tokens of a stream to a row.
    fn read(&self, stream: usize, span: Range<u64>, row: &mut Row) -> Result<()> {
        let Stream {
            name,
            tokens,
            has_masks,
            documents,
        } = &self.corpus.streams[stream];
        let base = row.ids.len();
        for i in span.clone() {
            let number = tokens.get_i64(i as usize).unwrap_or(-1);
            let is_masked = *has_masks && number & i64::from(MASKED) != 0;
            let id = if is_masked {
                number ^ i64::from(MASKED)
            } else {
                number
            };
            if !(0..self.below).contains(&id) {
                return Err(beyond(id, self.below)
                    .at(format!("{name}, token {i}"))
                    .help("check --token-type"));
            }
            let ends = documents.is_none() && self.corpus.end_of_text.map(i64::from) == Some(id);
            row.ids.push(id as u32);
            row.is_learned.push(!is_masked);
            if ends && i + 1 < span.end {
                row.starts.push(row.ids.len());
            }
        }
        let mut next = self.document_after(stream, span.start);
        while let Some(start) = self.document(stream, next).filter(|s| *s < span.end) {
            row.starts.push(base + (start - span.start) as usize);
            next += 1;
        }
        Ok(())
    }

    /// Appends what an input holds for one example.
    fn put(&self, bytes: &mut Vec<u8>, dtype: DType, part: Part, row: &Row) {
        let sequence = self.sequence as usize;
        let filled = row.ids.len();
        let padding = self.corpus.end_of_text.unwrap_or(0);
        // Padding is a document of its own, so that each of its rows of a mask has something to see.
        let starts: Vec<usize> = [0]
            .into_iter()
            .chain(row.starts.iter().copied())
            .chain([filled])
            .collect();
        let document_of = |t: usize| starts.partition_point(|s| *s <= t) - 1;
        let start_of = |t: usize| starts[document_of(t)];
        for t in 0..sequence {
            let number = match part {
                Part::Tokens => f64::from(row.ids.get(t).copied().unwrap_or(padding)),
                Part::Labels => match row.is_learned.get(t) {
                    Some(true) => f64::from(row.ids[t]),
                    _ => IGNORED as f64,
                },
                Part::Mask => f64::from(u8::from(t < filled)),
                Part::Documents => document_of(t) as f64,
                Part::Positions => (t - start_of(t)) as f64,
                Part::SharedPositions => t as f64,
                Part::Zeros => 0.0,
                Part::Pairs => {
                    for s in 0..sequence {
                        let sees = (start_of(t)..=t).contains(&s);
                        put(
                            bytes,
                            dtype,
                            match (sees, dtype.is_float()) {
                                (true, true) => 0.0,
                                (false, true) => lowest(dtype),
                                (sees, false) => f64::from(u8::from(sees)),
                            },
                        );
                    }
                    continue;
                }
            };
            put(bytes, dtype, number);
        }
    }
}

impl Source for TokenSource {
    fn examples(&self) -> u64 {
        self.examples
    }

    fn batch(&self, examples: &[u64]) -> Result<Batch> {
        let rows = examples.iter().map(|e| self.row(self.span(*e)?));
        let rows: Vec<Row> = rows.collect::<Result<_>>()?;
        let tokens = rows.iter().map(Row::learned).sum();
        if tokens == 0 {
            return Err(
                Error::usage("data", "no token of a batch counts in the loss")
                    .found("documents of one token")
                    .help("use a larger batch, or leave such documents out"),
            );
        }
        let mut inputs = Tensors::new();
        for (input, part) in &self.parts {
            let (dtype, rank) = (input.ty.dtype, input.ty.rank());
            let mut bytes = Vec::new();
            let rows = match part {
                Part::SharedPositions => &rows[..1],
                _ => &rows[..],
            };
            rows.iter()
                .for_each(|row| self.put(&mut bytes, dtype, *part, row));
            let (count, sequence) = (rows.len() as u64, self.sequence);
            let dims = match (part, rank) {
                (Part::Pairs, _) => vec![count, 1, sequence, sequence],
                (_, 1) => vec![sequence],
                _ => vec![count, sequence],
            };
            inputs.insert(input.name.clone(), Tensor::new(dtype, dims, bytes));
        }
        Ok(Batch { inputs, tokens })
    }
}

/// Returns the error for a token that the model does not have.
pub(super) fn beyond(id: i64, below: i64) -> Box<Error> {
    Error::usage(
        "data",
        format!("token {id} has no row in the model's table"),
    )
    .expected(format!("0 to {}", below - 1))
    .help("use the tokenizer of the model")
}

/// Returns the input that takes tokens: `input_ids`, or else the only one of its kind.
pub(super) fn token_input(wanted: &DataInputs) -> Result<&DataInput> {
    if let Some(input) = wanted.get("input_ids") {
        return Ok(input);
    }
    let fits = |input: &&DataInput| {
        input.ty.rank() == 2 && input.ty.dtype.is_int() && part(input, "").is_none()
    };
    let mut found = wanted.inputs.iter().filter(fits);
    match (found.next(), found.next()) {
        (Some(input), None) => Ok(input),
        _ => {
            let names: Vec<&str> = wanted.inputs.iter().map(|i| i.name.as_str()).collect();
            Err(Error::usage("data", "the graph has no input for tokens")
                .expected("`input_ids`, integers [batch, sequence]")
                .found(names.join(", "))
                .help("give tensors by the names of the inputs (.npz, .safetensors, .parquet)"))
        }
    }
}

/// Returns what an input holds, by its name and shape; `None` for one that tokens cannot fill.
fn part(input: &DataInput, tokens: &str) -> Option<Part> {
    let is_shared = |axis: usize| input.ty.dims[axis].is_one();
    let counts = input.ty.dtype.is_int();
    Some(match (input.name.as_str(), input.ty.rank()) {
        (name, 2) if name == tokens && counts => Part::Tokens,
        (LABELS, 2) if counts => Part::Labels,
        ("attention_mask", 2) => Part::Mask,
        ("attention_mask", 4) if is_shared(1) => Part::Pairs,
        (POSITIONS, 2) if counts && !is_shared(0) => Part::Positions,
        (POSITIONS, 1 | 2) if counts => Part::SharedPositions,
        ("document_ids" | "segment_ids" | "seq_idx", 2) if counts => Part::Documents,
        ("token_type_ids", 2) => Part::Zeros,
        _ => return None,
    })
}

fn unknown(input: &DataInput) -> Box<Error> {
    Error::usage(
        "data",
        format!("tokens say nothing about input `{}`", input.name),
    )
    .expected("input_ids, labels, attention_mask, position_ids, document_ids, segment_ids, seq_idx or token_type_ids")
    .found(input.ty.to_string())
    .help("export the model without it, or give tensors by the names of the inputs")
}

/// Returns the tokens of an example: as requested, or as the graph has it or was planned for.
fn sequence(request: &DataRequest, wanted: &DataInputs, tokens: &DataInput) -> Result<u64> {
    let fixed = tokens.ty.dims[1]
        .as_const()
        .and_then(|n| u64::try_from(n).ok());
    let length = request.sequence.or_else(|| wanted.size(tokens, 1));
    let length = length.ok_or_else(|| {
        Error::usage("data", "nobody says how many tokens an example has")
            .at(format!("input `{}`: {}", tokens.name, tokens.ty))
            .help("give the size of that axis, as --dim seq=1024")
    })?;
    if let Some(fixed) = fixed.filter(|n| *n != length) {
        return Err(
            Error::usage("data", "the graph has another sequence length")
                .expected(format!("{fixed} tokens"))
                .found(format!("{length} tokens")),
        );
    }
    // A batch of this length takes less than an exabyte, whatever its type.
    match length {
        2..=0xff_ffff => Ok(length),
        _ => Err(
            Error::usage("data", format!("an example cannot have {length} tokens"))
                .expected("2 to 16777215"),
        ),
    }
}
