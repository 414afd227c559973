//! Batches for a training graph from text, tokens or tensors in files.
//!
//! [`open`] matches data to the inputs of a graph, and [`Batches`] hands out batches in an order that a seed decides.
//!
//! - Files of tokens (`.bin`, `.npy`) and tensors (`.npz`, `.safetensors`) are mapped, never loaded.
//! - Text is tokenised once, when it is opened, into a temporary file of 4 bytes per token, which is mapped.
//! - Columns of numbers (Parquet, Arrow) are decoded once, into temporary files, which are mapped.
//!
//! Examples are numbered. The order of an epoch is a permutation that is computed, so any position can be resumed at
//! once.

mod batches;
mod chat;
mod columns;
mod files;
mod fingerprint;
mod inputs;
mod order;
mod request;
mod spill;
mod table;
mod text;
mod text_tokenizer;
mod token_files;
mod tokens;
mod writer;

pub use batches::{Batches, no_label_counts};
pub use request::{Batch, DataRequest, Packing, Position, TokenType};

use crate::frontend::file::map;
use crate::tensors::{Tensors, npz, safetensors};
use batches::Source;
use bytes::Bytes;
use chat::ChatTemplate;
use ckpt_passes::ir::Graph;
use ckpt_passes::{Error, Result};
use columns::Columns;
use files::{Format, Shard};
use fingerprint::Fingerprint;
use inputs::DataInputs;
use spill::Spill;
use std::io::Read;
use std::sync::Arc;
use table::TensorSource;
use text_tokenizer::TextTokenizer;
use tokens::{Corpus, Stream, TokenSource};
use writer::TokenWriter;

/// Opens data for a typed graph. Text is tokenised, and columns are decoded, before this returns.
///
/// # Errors
/// Data that is absent, damaged, or does not fit the inputs of the graph. The error names file and line or row.
pub fn open(request: &DataRequest, graph: &Graph) -> Result<Batches> {
    if request.batch == 0 {
        return Err(Error::usage("data", "a batch has no examples").expected("1 or more"));
    }
    let wanted = DataInputs::of(graph)?;
    let mut opened = Opened {
        request,
        wanted: &wanted,
        tokenizer: match &request.tokenizer {
            Some(path) => Some(TextTokenizer::read(path, request.chat_template.as_deref())?),
            None => None,
        },
        template: None,
        corpus: Corpus::default(),
        table: None,
        print: Fingerprint::default(),
        notes: Vec::new(),
    };
    for shard in files::shards(&request.paths)? {
        opened.read(&shard)?;
    }
    opened.finish()
}

/// What was opened so far.
struct Opened<'a> {
    request: &'a DataRequest,
    wanted: &'a DataInputs,
    tokenizer: Option<TextTokenizer>,
    template: Option<ChatTemplate>,
    corpus: Corpus,
    table: Option<TensorSource>,
    print: Fingerprint,
    notes: Vec<String>,
}

impl Opened<'_> {
    fn read(&mut self, shard: &Shard) -> Result<()> {
        let name = shard.path.file_name().unwrap_or_default();
        self.print.put("file", name.as_encoded_bytes());
        match shard.format {
            Format::RawTokens => {
                let stream = token_files::raw(&shard.path, self.request.token_type)?;
                self.add_mapped(stream);
            }
            Format::Npy => self.add_mapped(token_files::numpy(&shard.path)?),
            Format::JsonLines => self.tokenise(shard, "line", |column, out| {
                text::json_lines(shard, column, out)
            })?,
            Format::Text => self.tokenise(shard, "line", |_, out| text::plain(shard, out))?,
            Format::Npz | Format::Safetensors => {
                let bytes = map(&shard.path)?;
                let tensors = match shard.format {
                    Format::Npz => npz::view(&bytes, unpack),
                    _ => safetensors::read(&bytes),
                };
                let tensors = tensors.map_err(|e| e.at(shard.name()))?;
                self.print.put_sample("tensors", &bytes);
                self.add_tensors(shard, tensors)?;
            }
            Format::Parquet | Format::Arrow => {
                let columns = Columns::open(shard)?;
                if columns.is_text(&self.request.text_column, &self.wanted.inputs) {
                    self.tokenise(shard, "row", |column, out| columns.documents(column, out))?;
                } else if let Some(stream) = self.token_lists(columns)? {
                    self.add_written(stream);
                } else {
                    let columns = Columns::open(shard)?;
                    let tensors = columns.tensors(&self.wanted.inputs)?;
                    self.print.put_sample("columns", &map(&shard.path)?);
                    self.add_tensors(shard, tensors)?;
                }
            }
        }
        Ok(())
    }

    fn add_mapped(&mut self, stream: Stream) {
        let bytes = stream.tokens.bytes();
        self.print
            .put_sample("tokens", bytes.map_or(&[], AsRef::as_ref));
        self.corpus.streams.push(stream);
    }

    /// Adds a file of text.
    fn tokenise(
        &mut self,
        shard: &Shard,
        unit: &'static str,
        read: impl FnOnce(&str, &mut TokenWriter) -> Result<()>,
    ) -> Result<()> {
        let tokenizer = self.tokenizer.as_ref().ok_or_else(|| {
            Error::usage("tokenizer", "text needs a tokenizer")
                .at(shard.name())
                .help("give the tokenizer.json of the model with --tokenizer")
        })?;
        let below = tokens::token_input(self.wanted)?.below.unwrap_or(i64::MAX);
        let mut out = TokenWriter::new(tokenizer, &mut self.template, below, shard.name(), unit)?;
        read(&self.request.text_column, &mut out)?;
        let stream = out.finish()?;
        self.add_written(stream);
        Ok(())
    }

    /// Returns the lists of tokens of a file, if they are documents.
    fn token_lists(&self, columns: Columns) -> Result<Option<Stream>> {
        match tokens::token_input(self.wanted) {
            Ok(input) => columns.token_lists(input),
            Err(_) => Ok(None),
        }
    }

    /// Adds tokens that were written to a temporary file.
    fn add_written(&mut self, stream: Stream) {
        let bytes = stream.tokens.bytes();
        self.print.put("text", bytes.map_or(&[], AsRef::as_ref));
        self.corpus.streams.push(stream);
    }

    fn add_tensors(&mut self, shard: &Shard, tensors: Tensors) -> Result<()> {
        let table = self
            .table
            .get_or_insert_with(|| TensorSource::new(self.wanted));
        let ignored = table.add(shard.name(), tensors)?;
        if !ignored.is_empty() {
            let (name, list) = (shard.name(), ignored.join(", "));
            self.notes
                .push(format!("{name}: ignored, for they are no inputs: {list}"));
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Batches> {
        let (request, wanted) = (self.request, self.wanted);
        let source: Arc<dyn Source> = match self.table {
            Some(table) if self.corpus.streams.is_empty() => Arc::new(table),
            Some(_) => {
                return Err(Error::usage(
                    "data",
                    "some files hold tokens or text, and others tensors",
                )
                .help("read one kind at a time"));
            }
            None => {
                self.corpus.end_of_text = self.tokenizer.as_ref().and_then(|t| t.end_of_text);
                if self.tokenizer.is_some() && self.corpus.end_of_text.is_none() {
                    let note = "the tokenizer names no end-of-text token: documents follow each other without one";
                    self.notes.push(note.into());
                }
                let source = TokenSource::new(self.corpus, request, wanted)?;
                self.print.put("sequence", &source.sequence().to_le_bytes());
                let made = format!("{:?} {:?}", request.packing, request.token_type);
                self.print.put("examples", made.as_bytes());
                Arc::new(source)
            }
        };
        check_batches(request, wanted, source.examples())?;
        let order = request.shuffle.then_some(request.seed);
        self.print.put("order", format!("{order:?}").as_bytes());
        Ok(Batches::new(
            source,
            request,
            self.print.finish(),
            self.notes,
        ))
    }
}

/// Writes a compressed array to a temporary file.
fn unpack(array: &mut dyn Read) -> Result<Bytes> {
    let mut spill = Spill::new()?;
    spill.put_all(array)?;
    spill.mapped()
}

/// Checks that the examples make batches that the graph takes.
fn check_batches(request: &DataRequest, wanted: &DataInputs, examples: u64) -> Result<()> {
    let ranks = request.share.1;
    if let Some(fixed) = wanted.fixed_batch() {
        if fixed != request.batch {
            return Err(Error::usage("data", "the graph has another batch size")
                .expected(format!("{fixed} examples"))
                .found(format!("{} examples", request.batch)));
        }
        if !request.drop_last && !examples.is_multiple_of(fixed * ranks) {
            return Err(
                Error::usage("data", "the last batch is shorter than the graph allows")
                    .expected(format!("{} examples", fixed * ranks))
                    .found(format!("{} examples", examples % (fixed * ranks)))
                    .help("leave it out with --drop-last"),
            );
        }
    }
    let least = match request.drop_last {
        true => request.batch * ranks,
        false => ranks,
    };
    if examples < least {
        return Err(
            Error::usage("data", "there are fewer examples than a batch has")
                .expected(format!("{least} examples"))
                .found(format!("{examples} examples")),
        );
    }
    Ok(())
}
