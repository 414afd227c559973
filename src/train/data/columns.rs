//! Columns of Parquet and Arrow files. They are decoded once, in order: text becomes tokens, numbers become tensors in
//! temporary files.

use super::files::{Format, Shard};
use super::inputs::{DataInput, LABELS, put, put_int};
use super::spill::Spill;
use super::text::MESSAGES;
use super::tokens::{MASKED, Stream, beyond};
use super::writer::TokenWriter;
use crate::frontend::file::{io_error, map};
use crate::tensors::Tensors;
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_integer_array, types};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use ckpt_passes::ir::{DType, Tensor};
use ckpt_passes::{Error, Result};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Number, Value};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Rows that are decoded at once.
const ROWS: usize = 256;

/// An open file of columns.
pub(super) struct Columns {
    name: String,
    source: Source,
    schema: SchemaRef,
}

enum Source {
    Parquet(Box<ParquetRecordBatchReaderBuilder<bytes::Bytes>>),
    File(Box<FileReader<BufReader<File>>>),
    Stream(Box<StreamReader<BufReader<File>>>),
}

/// Batches of rows.
type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

/// Decodes a part of a file. The decoders check less than they should, so a panic of theirs is a damaged file, too.
fn decode<T, E: Display>(name: &str, part: impl FnOnce() -> Result<T, E>) -> Result<T> {
    let found = match catch_unwind(AssertUnwindSafe(part)) {
        Ok(Ok(decoded)) => return Ok(decoded),
        Ok(Err(e)) => e.to_string(),
        Err(_) => "contents that the decoder fails on".into(),
    };
    Err(
        Error::usage("data", "the file is damaged, or uses what is not supported")
            .at(name)
            .found(found),
    )
}

impl Columns {
    /// Opens a file.
    ///
    /// # Errors
    /// A file that is absent or damaged.
    pub fn open(shard: &Shard) -> Result<Columns> {
        let name = shard.name();
        if shard.format == Format::Parquet {
            let bytes = map(&shard.path)?;
            let builder = decode(&name, || ParquetRecordBatchReaderBuilder::try_new(bytes))?;
            let schema = builder.schema().clone();
            let source = Source::Parquet(Box::new(builder));
            return Ok(Columns {
                name,
                source,
                schema,
            });
        }
        let failed = |e: std::io::Error| io_error("open the data", &shard.path, &e);
        let mut file = File::open(&shard.path).map_err(failed)?;
        let mut head = Vec::new();
        file.by_ref()
            .take(6)
            .read_to_end(&mut head)
            .map_err(failed)?;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let file = BufReader::with_capacity(1 << 18, file);
        let (source, schema) = if head == b"ARROW1" {
            let reader = decode(&name, || FileReader::try_new(file, None))?;
            let schema = reader.schema();
            (Source::File(Box::new(reader)), schema)
        } else {
            let reader = decode(&name, || StreamReader::try_new(file, None))?;
            let schema = reader.schema();
            (Source::Stream(Box::new(reader)), schema)
        };
        Ok(Columns {
            name,
            source,
            schema,
        })
    }

    /// Returns whether the file is read as text: it has such a column, and not one for each input.
    pub fn is_text(&self, column: &str, inputs: &[DataInput]) -> bool {
        let has = |name: &str| self.schema.index_of(name).is_ok();
        !inputs.iter().all(|input| has(&input.name)) && (has(column) || has(MESSAGES))
    }

    /// Decodes some columns, in the order of the schema.
    fn batches(self, wanted: &dyn Fn(&Schema) -> Vec<usize>) -> Result<Batches> {
        let columns = wanted(&self.schema);
        Ok(match self.source {
            Source::Parquet(builder) => {
                let mask = ProjectionMask::roots(builder.parquet_schema(), columns);
                let builder = builder.with_projection(mask).with_batch_size(ROWS);
                Box::new(decode(&self.name, || builder.build())?)
            }
            Source::File(reader) => Box::new(reader.map(move |b| b?.project(&columns))),
            Source::Stream(reader) => Box::new(reader.map(move |b| b?.project(&columns))),
        })
    }

    /// Adds the texts or chats of a column.
    ///
    /// # Errors
    /// A damaged file; a row without text.
    pub fn documents(self, column: &str, out: &mut TokenWriter) -> Result<()> {
        let name = self.name.clone();
        let index = self
            .schema
            .index_of(column)
            .or_else(|_| self.schema.index_of(MESSAGES));
        let index = decode(&name, || index)?;
        let is_chat = self.schema.field(index).name() != column;
        let mut row = 0u64;
        let mut batches = self.batches(&|_| vec![index])?;
        while let Some(batch) = decode(&name, || batches.next().transpose())? {
            for i in 0..batch.num_rows() {
                row += 1;
                let added = match (json(batch.column(0), i), is_chat) {
                    (Some(Value::String(text)), false) => out.text(row, &text),
                    (Some(messages), true) => out.chat(row, &messages, None),
                    (other, _) => Err(Error::usage("data", format!("`{column}` is no text"))
                        .found(match other {
                            Some(Value::Null) => "null".into(),
                            _ => batch.column(0).data_type().to_string(),
                        })),
                };
                added.map_err(|e| e.at(format!("{name}, row {row}")))?;
            }
        }
        Ok(())
    }

    /// Returns the rows of a column of tokens as documents, if they are lists of several lengths. Where there is a column of
    /// labels, tokens whose label is negative are not learned.
    ///
    /// # Errors
    /// A damaged file; no integers; a token that the model does not have; labels that are other tokens; nulls.
    pub fn token_lists(self, input: &DataInput) -> Result<Option<Stream>> {
        let is_list = |field: &Field| {
            matches!(
                field.data_type(),
                DataType::List(_) | DataType::LargeList(_)
            )
        };
        let tokens = self.schema.index_of(&input.name).ok();
        let Some(tokens) = tokens.filter(|i| is_list(self.schema.field(*i))) else {
            return Ok(None);
        };
        let labels = self.schema.index_of(LABELS).ok();
        let name = self.name.clone();
        let mut wanted: Vec<usize> = labels.into_iter().chain([tokens]).collect();
        wanted.sort_unstable();
        let below = input.below.unwrap_or(i64::from(MASKED));
        let (mut ids, mut starts) = (Spill::new()?, Spill::new()?);
        let (mut row, mut written, mut has_masks) = (0u64, 0u64, false);
        let (mut lengths, mut failed) = (BTreeSet::new(), None);
        let mut batches = self.batches(&|_| wanted.clone())?;
        while let Some(batch) = decode(&name, || batches.next().transpose())? {
            let column = |name: &str| batch.column_by_name(name);
            for i in 0..batch.num_rows() {
                row += 1;
                let at = |e: Box<Error>| e.at(format!("{name}, row {row}"));
                let read = |column: &ArrayRef| list(column, i, row - 1);
                let own = column(&input.name).map(read).transpose().map_err(at)?;
                let own = own.unwrap_or_default();
                lengths.insert(own.len());
                let labels = column(LABELS).map(read).transpose();
                let made = labels.and_then(|labels| masked(&own, labels.as_deref(), below));
                match made {
                    Ok(own) if !own.is_empty() => {
                        starts.put_u64(written)?;
                        written += own.len() as u64;
                        has_masks |= own.iter().any(|id| id & MASKED != 0);
                        own.iter().try_for_each(|id| ids.put(&id.to_le_bytes()))?;
                    }
                    Ok(_) => {}
                    Err(e) => drop(failed.get_or_insert(at(e))),
                }
            }
        }
        // Lists of one length are examples, whose labels may be any.
        if lengths.len() < 2 {
            return Ok(None);
        }
        if let Some(e) = failed {
            return Err(e);
        }
        Ok(Some(Stream {
            name,
            tokens: ids.finish(DType::U32)?,
            has_masks,
            documents: Some(starts.finish(DType::I64)?),
        }))
    }

    /// Decodes the columns of some inputs as tensors in temporary files. Integers are converted to the integers of an input,
    /// and floats to its floats.
    ///
    /// # Errors
    /// A missing column; a damaged file; a type that an input does not have; rows of different lengths; nulls.
    pub fn tensors(self, inputs: &[DataInput]) -> Result<Tensors> {
        let name = self.name.clone();
        let indices = |schema: &Schema| {
            let mut all: Vec<usize> = inputs
                .iter()
                .filter_map(|i| schema.index_of(&i.name).ok())
                .collect();
            all.sort_unstable();
            all
        };
        let mut out: Vec<(&DataInput, Spill, Option<Vec<u64>>)> = Vec::new();
        for input in inputs {
            if self.schema.index_of(&input.name).is_err() {
                let names: Vec<&str> = self
                    .schema
                    .fields()
                    .iter()
                    .map(|f| f.name().as_str())
                    .collect();
                let what = format!(
                    "there is no column for input `{}`, and none with text",
                    input.name
                );
                return Err(Error::usage("data", what)
                    .at(name)
                    .expected(input.ty.to_string())
                    .found(names.join(", "))
                    .help("call a column by the name of each input, or name the column that holds the text"));
            }
            out.push((input, Spill::new()?, None));
        }
        let mut rows = 0u64;
        let mut batches = self.batches(&indices)?;
        while let Some(batch) = decode(&name, || batches.next().transpose())? {
            for (input, spill, shape) in &mut out {
                let at = |e: Box<Error>| e.at(format!("{name}, column `{}`", input.name));
                let column = batch.column_by_name(&input.name);
                let column =
                    column.ok_or_else(|| at(Error::usage("data", "the column is missing")))?;
                let mut bytes = Vec::new();
                let found = values(column, input.ty.dtype, rows, &mut bytes).map_err(at)?;
                if batch.num_rows() > 0 && shape.get_or_insert_with(|| found.clone()) != &found {
                    return Err(at(uneven(
                        rows + 1,
                        shape.as_ref().map_or(0, |s| s.iter().product()),
                    )));
                }
                spill.put(&bytes)?;
            }
            rows += batch.num_rows() as u64;
        }
        let tensors = out.into_iter().map(|(input, spill, shape)| {
            let dims = [
                vec![rows],
                shape.unwrap_or_else(|| vec![1; input.ty.rank() - 1]),
            ]
            .concat();
            Ok((
                input.name.clone(),
                Tensor::new(input.ty.dtype, dims, spill.mapped()?),
            ))
        });
        tensors.collect()
    }
}

/// Returns the tokens of a document, of which those with negative labels are not learned.
fn masked(tokens: &[i64], labels: Option<&[i64]>, below: i64) -> Result<Vec<u32>> {
    if labels.is_some_and(|labels| labels.len() != tokens.len()) {
        let what = "there is not one label for each token";
        return Err(Error::usage("data", what).expected(format!("{} labels", tokens.len())));
    }
    let ids = tokens.iter().enumerate().map(|(i, id)| {
        let label = labels.map_or(*id, |labels| labels[i]);
        if !(0..below).contains(id) {
            return Err(beyond(*id, below));
        }
        if label >= 0 && label != *id {
            let what = format!("label {label} is not its own token, {id}");
            return Err(Error::usage("data", what)
                .expected("the token, or -100 where it is not learned")
                .help("give lists of one length, the sequence length, for other labels"));
        }
        Ok(*id as u32 | if label < 0 { MASKED } else { 0 })
    });
    ids.collect()
}

/// Returns the integers of a list in a row.
fn list(column: &ArrayRef, row: usize, rows: u64) -> Result<Vec<i64>> {
    let mut bytes = Vec::new();
    values(&column.slice(row, 1), DType::I64, rows, &mut bytes)?;
    let numbers = bytes.as_chunks::<8>().0.iter();
    Ok(numbers.map(|b| i64::from_le_bytes(*b)).collect())
}

fn uneven(row: u64, expected: u64) -> Box<Error> {
    Error::usage(
        "data",
        format!("the values at row {row} have another length"),
    )
    .expected(format!(
        "lists of one length in all rows, as the first with {expected}"
    ))
}

/// Appends the values of a column as numbers of a type, and returns the shape of a row. `rows` are before it.
fn values(column: &ArrayRef, dtype: DType, rows: u64, bytes: &mut Vec<u8>) -> Result<Vec<u64>> {
    if let Some(row) = (0..column.len()).find(|i| column.is_null(*i)) {
        return Err(Error::usage(
            "data",
            format!("there is no value at row {}", rows + row as u64 + 1),
        ));
    }
    let items: ArrayRef;
    let length;
    if let Some(list) = column.as_list_opt::<i32>() {
        (items, length) = flat(
            list.values(),
            list.value_offsets().iter().map(|o| *o as i64),
            rows,
        )?;
    } else if let Some(list) = column.as_list_opt::<i64>() {
        (items, length) = flat(list.values(), list.value_offsets().iter().copied(), rows)?;
    } else if let Some(list) = column.as_fixed_size_list_opt() {
        length = list.value_length() as usize;
        items = list
            .values()
            .slice(list.offset() * length, list.len() * length);
    } else {
        numbers(column, dtype, rows, bytes)?;
        return Ok(Vec::new());
    }
    let inner = values(&items, dtype, 0, bytes)
        .map_err(|e| e.at(format!("within the lists from row {}", rows + 1)))?;
    Ok([vec![length as u64], inner].concat())
}

/// Returns the items of lists of one length, and the length.
fn flat(
    items: &ArrayRef,
    offsets: impl Iterator<Item = i64>,
    rows: u64,
) -> Result<(ArrayRef, usize)> {
    let offsets: Vec<usize> = offsets.map(|o| usize::try_from(o).unwrap_or(0)).collect();
    let lengths: Vec<usize> = offsets
        .windows(2)
        .map(|w| w[1].saturating_sub(w[0]))
        .collect();
    let first = lengths.first().copied().unwrap_or(0);
    if let Some(row) = lengths.iter().position(|l| *l != first) {
        return Err(uneven(rows + row as u64 + 1, first as u64));
    }
    let begin = offsets.first().copied().unwrap_or(0);
    Ok((items.slice(begin, lengths.len() * first), first))
}

/// Appends numbers: integers as integers, floats as floats, booleans as booleans.
fn numbers(column: &ArrayRef, dtype: DType, rows: u64, bytes: &mut Vec<u8>) -> Result<()> {
    let kind = column.data_type();
    let wrong = || {
        Error::usage("data", "the column has another type")
            .expected(dtype.to_string())
            .found(kind.to_string())
    };
    if let Some(values) = column.as_boolean_opt() {
        if dtype != DType::Bool {
            return Err(wrong());
        }
        values.values().iter().for_each(|v| bytes.push(u8::from(v)));
        return Ok(());
    }
    if kind.is_floating() {
        if !dtype.is_float() {
            return Err(wrong());
        }
        let mut all = |value: f64| put(bytes, dtype, value);
        match kind {
            DataType::Float64 => column
                .as_primitive::<types::Float64Type>()
                .values()
                .iter()
                .for_each(|v| all(*v)),
            DataType::Float32 => column
                .as_primitive::<types::Float32Type>()
                .values()
                .iter()
                .for_each(|v| all(f64::from(*v))),
            _ => column
                .as_primitive::<types::Float16Type>()
                .values()
                .iter()
                .for_each(|v| all(v.to_f64())),
        }
        return Ok(());
    }
    let Some((least, most)) = dtype
        .int_range()
        .filter(|_| dtype.is_int() && kind.is_integer())
    else {
        return Err(wrong());
    };
    downcast_integer_array!(
        column => {
            for (i, value) in column.values().iter().enumerate() {
                let value = i64::try_from(i128::from(*value)).ok();
                let value = value.filter(|v| (least..=most).contains(v));
                let value = value.ok_or_else(|| {
                    Error::usage("data", format!("the number at row {} is too large", rows + i as u64 + 1))
                        .expected(format!("{least} to {most}"))
                })?;
                put_int(bytes, dtype, value);
            }
            Ok(())
        }
        _ => Err(wrong()),
    )
}

/// Returns the value of a row, for text and messages; `None` for types that these do not have.
fn json(column: &ArrayRef, row: usize) -> Option<Value> {
    if column.is_null(row) {
        return Some(Value::Null);
    }
    let list = |items: ArrayRef| -> Option<Value> {
        let all = (0..items.len()).map(|i| json(&items, i));
        Some(Value::Array(all.collect::<Option<_>>()?))
    };
    Some(match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => column.as_string::<i64>().value(row).into(),
        DataType::Utf8View => column.as_string_view().value(row).into(),
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Int64 => column.as_primitive::<types::Int64Type>().value(row).into(),
        DataType::Float64 => {
            Number::from_f64(column.as_primitive::<types::Float64Type>().value(row))?.into()
        }
        DataType::List(_) => list(column.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(column.as_list::<i64>().value(row))?,
        DataType::Struct(fields) => {
            let mut object = Map::new();
            for (field, values) in fields.iter().zip(column.as_struct().columns()) {
                // A field that a message does not have is null in its column.
                match json(values, row)? {
                    Value::Null => None,
                    value => object.insert(field.name().clone(), value),
                };
            }
            Value::Object(object)
        }
        _ => return None,
    })
}
