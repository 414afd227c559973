//! Batches in order, read ahead on a thread.
//!
//! The position is that of the batches that were handed out. What the thread has read beyond is dropped when the reader
//! moves elsewhere.

use super::inputs::IGNORED;
use super::order::Order;
use super::request::{Batch, DataRequest, Position};
use ckpt_passes::{Error, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

/// Batches that are read ahead.
const AHEAD: usize = 4;

/// Numbered examples, of which batches are made.
pub(super) trait Source: Send + Sync {
    /// Returns how many examples there are.
    fn examples(&self) -> u64;

    /// Returns the batch of these examples.
    ///
    /// # Errors
    /// An example that is not valid for the graph, with its place.
    fn batch(&self, examples: &[u64]) -> Result<Batch>;
}

/// The order in which a source is read.
#[derive(Clone)]
struct Plan {
    source: Arc<dyn Source>,
    /// Examples of a batch, over all processes that share it.
    batch: u64,
    /// Which of how many processes this is.
    share: (u64, u64),
    shuffle: bool,
    seed: u64,
    drop_last: bool,
}

impl Plan {
    /// Returns this process's share of the batch at a position, or `None` at the end of its epoch, and the position after
    /// it. A last batch that has not one example for each process is left out.
    fn read(&self, at: Position) -> (Result<Option<Batch>>, Position) {
        let examples = self.source.examples();
        let end = examples.min(at.example.saturating_add(self.batch));
        let count = end.saturating_sub(at.example);
        let (rank, ranks) = self.share;
        if count < ranks || (count < self.batch && self.drop_last) {
            let after = Position {
                epoch: at.epoch.saturating_add(1),
                example: 0,
            };
            return (Ok(None), after);
        }
        let order = Order::new(examples, self.shuffle, self.seed, at.epoch);
        let own = |rank: u64| at.example + count * rank / ranks;
        let numbers: Vec<u64> = (own(rank)..own(rank + 1))
            .map(|place| order.at(place))
            .collect();
        let after = Position { example: end, ..at };
        let batch = self.source.batch(&numbers);
        // The labels of another process may count.
        let batch = batch.and_then(|batch| match batch.tokens {
            0 if ranks == 1 => Err(no_label_counts()),
            _ => Ok(Some(batch)),
        });
        (batch, after)
    }
}

/// Returns the error for a batch whose loss is a mean of nothing.
pub fn no_label_counts() -> Box<Error> {
    Error::usage("data", "no label of a batch counts in the loss")
        .found(format!("labels that are all {IGNORED}"))
        .help("use a larger batch, or leave such examples out")
}

/// What the thread reads.
type Item = (Result<Option<Batch>>, Position);

/// A thread that reads ahead. It ends when nobody receives any more.
struct Reader {
    items: Option<Receiver<Item>>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start(plan: Plan, mut at: Position) -> Result<Reader> {
        let (sender, items) = sync_channel(AHEAD);
        let read = move || {
            loop {
                let (batch, after) = plan.read(at);
                let failed = batch.is_err();
                if sender.send((batch, after)).is_err() || failed {
                    return;
                }
                at = after;
            }
        };
        let thread = std::thread::Builder::new().name("data".into()).spawn(read);
        let thread = thread.map_err(|e| {
            Error::environment("thread", format!("cannot start the thread that reads: {e}"))
        })?;
        Ok(Reader {
            items: Some(items),
            thread: Some(thread),
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.items = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when its item did not come.
            let _ = thread.join();
        }
    }
}

/// The batches of opened data.
pub struct Batches {
    plan: Plan,
    at: Position,
    reads_ahead: bool,
    reader: Option<Reader>,
    fingerprint: String,
    notes: Vec<String>,
}

impl Batches {
    pub(super) fn new(
        source: Arc<dyn Source>,
        request: &DataRequest,
        fingerprint: String,
        notes: Vec<String>,
    ) -> Batches {
        Batches {
            plan: Plan {
                source,
                batch: request.batch * request.share.1,
                share: request.share,
                shuffle: request.shuffle,
                seed: request.seed,
                drop_last: request.drop_last,
            },
            at: Position::default(),
            reads_ahead: true,
            reader: None,
            fingerprint,
            notes,
        }
    }

    /// Returns the next batch, or `None` once at the end of each epoch; the call after that starts the next epoch.
    ///
    /// # Errors
    /// An example that is not valid for the graph, with its file and line or row. The position stays before its batch.
    #[allow(clippy::should_implement_trait, reason = "a failure is not the end")]
    pub fn next(&mut self) -> Result<Option<Batch>> {
        let (batch, after) = if self.reads_ahead {
            let reader = match self.reader.take() {
                Some(reader) => reader,
                None => Reader::start(self.plan.clone(), self.at)?,
            };
            let item = reader.items.as_ref().and_then(|items| items.recv().ok());
            let item = item.ok_or_else(|| Error::bug("data", "the thread that reads has ended"))?;
            if item.0.is_ok() {
                self.reader = Some(reader);
            }
            item
        } else {
            self.plan.read(self.at)
        };
        let batch = batch?;
        self.at = after;
        Ok(batch)
    }

    /// Returns where reading goes on.
    pub fn position(&self) -> Position {
        self.at
    }

    /// Goes on at a position.
    ///
    /// # Errors
    /// A position beyond the examples.
    pub fn seek(&mut self, position: Position) -> Result<()> {
        if position.example > self.examples() {
            return Err(
                Error::usage("data", "the position is beyond the end of the data")
                    .expected(format!("an example up to {}", self.examples()))
                    .found(position.example.to_string())
                    .help("resume with the data that the checkpoint was made with"),
            );
        }
        self.reader = None;
        self.at = position;
        Ok(())
    }

    /// Sets whether batches are read ahead on a thread; on by default. The batches are the same.
    pub fn read_ahead(&mut self, wanted: bool) {
        self.reader = None;
        self.reads_ahead = wanted;
    }

    /// Returns how many examples an epoch has.
    pub fn examples(&self) -> u64 {
        self.plan.source.examples()
    }

    /// Returns how many batches an epoch has.
    pub fn batches_per_epoch(&self) -> u64 {
        let (whole, rest) = (
            self.examples() / self.plan.batch,
            self.examples() % self.plan.batch,
        );
        let is_read = rest >= self.plan.share.1 && !self.plan.drop_last;
        whole + u64::from(is_read)
    }

    /// Returns a hash of everything that decides what a position means: the data, the tokenizer, and how examples are made
    /// and ordered.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    /// Returns what a user should know about the data.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}
