//! Event files of TensorBoard: scalars by step.
//!
//! The one crate that writes them, tensorboard-rs 0.5.9, needs protobuf 2, which has RUSTSEC-2024-0437. The format is records
//! (length, masked CRC-32C of the length, content, masked CRC-32C of the content) of the message `Event`; source:
//! `tensorflow/core/lib/io/record_writer.cc` and `tensorflow/core/util/event.proto`.

use super::metrics::StepMetrics;
use crate::emit::file::write_error;
use ckpt_passes::Result;
use prost::Message;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// How the names of event files begin.
pub const PREFIX: &str = "events.out.tfevents.";
const VERSION: &str = "brain.Event:2";
/// `SessionLog.START`: events of this step and later ones, which an earlier file holds, do not count.
const START: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, tag = "2")]
    simple_value: f32,
}

#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// An open event file.
pub struct EventFile {
    path: PathBuf,
    file: File,
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

fn record(content: &[u8]) -> Vec<u8> {
    const MASK: u32 = 0xa282_ead8;
    let masked = |bytes: &[u8]| {
        crc32c::crc32c(bytes)
            .rotate_right(15)
            .wrapping_add(MASK)
            .to_le_bytes()
    };
    let length = (content.len() as u64).to_le_bytes();
    [&length[..], &masked(&length), content, &masked(content)].concat()
}

impl EventFile {
    /// Makes a file in a folder, for the steps after `step`.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn after(folder: &Path, step: u64) -> Result<EventFile> {
        let name = format!("{PREFIX}{}.{}", now() as u64, std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
        let mut events = EventFile { path, file };
        events.write(Event {
            file_version: Some(VERSION.into()),
            ..Event::default()
        })?;
        if step > 0 {
            events.write(Event {
                step: step as i64 + 1,
                session_log: Some(SessionLog { status: START }),
                ..Event::default()
            })?;
        }
        Ok(events)
    }

    fn write(&mut self, event: Event) -> Result<()> {
        let event = Event {
            wall_time: now(),
            ..event
        };
        let written = self.file.write_all(&record(&event.encode_to_vec()));
        written.map_err(|e| write_error(&self.path, &e))
    }

    /// Appends a step.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn add(&mut self, step: &StepMetrics) -> Result<()> {
        let scalars = [
            ("loss/train", Some(step.loss)),
            ("loss/eval", step.eval_loss),
            ("perplexity/eval", step.perplexity),
            ("lr", Some(step.lr)),
            ("grad_norm", step.grad_norm),
            (
                "tokens_per_second",
                Some(step.tokens as f64 / step.seconds.max(1e-9)),
            ),
            ("memory/peak_bytes", Some(step.peak_bytes as f64)),
            (
                "memory/predicted_peak_bytes",
                Some(step.predicted_peak_bytes as f64),
            ),
        ];
        let value = scalars.into_iter().filter_map(|(tag, number)| {
            Some(Scalar {
                tag: tag.into(),
                simple_value: number? as f32,
            })
        });
        self.write(Event {
            step: step.step as i64,
            summary: Some(Summary {
                value: value.collect(),
            }),
            ..Event::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_framed_as_tensorboard_reads_them() {
        // CRC-32C of "123456789" is e3069283, by the catalogue of CRC algorithms.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let dir = tempfile::tempdir().unwrap();
        let mut events = EventFile::after(dir.path(), 4).unwrap();
        let step = StepMetrics {
            step: 5,
            loss: 0.5,
            ..StepMetrics::default()
        };
        events.add(&step).unwrap();
        let mut bytes = std::fs::read(&events.path).unwrap();
        let mut read = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let rest = bytes.split_off(length + 16);
            let content = &bytes[12..12 + length];
            assert_eq!(bytes, record(content));
            read.push(Event::decode(content).unwrap());
            bytes = rest;
        }
        assert_eq!(read.len(), 3);
        assert_eq!(read[0].file_version.as_deref(), Some(VERSION));
        assert_eq!(
            (read[1].step, read[1].session_log.clone()),
            (5, Some(SessionLog { status: START }))
        );
        let loss = &read[2].summary.as_ref().unwrap().value[0];
        assert_eq!(
            (read[2].step, loss.tag.as_str(), loss.simple_value),
            (5, "loss/train", 0.5)
        );
    }
}
