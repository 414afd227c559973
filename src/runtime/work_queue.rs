//! A thread that does work in turn, beside the nodes of a step.

use ckpt_passes::{Error, Result};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;

/// Works that a queue holds before the run waits.
const CAPACITY: usize = 16;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that starts with its first work.
#[derive(Default)]
pub struct WorkQueue {
    running: Option<(SyncSender<Job>, JoinHandle<()>)>,
}

impl WorkQueue {
    /// Begins work, after all that was begun before. Waits while the queue is full.
    ///
    /// # Errors
    /// No thread.
    pub fn begin<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Receiver<Result<T>>> {
        let (done, result) = channel();
        let job: Job = Box::new(move || {
            let outcome = work();
            // Nobody waits if the run was abandoned.
            drop(done.send(outcome));
        });
        if self.running.is_none() {
            let (jobs, queue) = sync_channel::<Job>(CAPACITY);
            let thread = std::thread::Builder::new()
                .name("beside the step".into())
                .spawn(move || queue.into_iter().for_each(|job| job()))
                .map_err(|e| {
                    Error::environment("thread", format!("no thread for work beside the step: {e}"))
                        .help("--async-transfers off and --bucket 0 need none")
                })?;
            self.running = Some((jobs, thread));
        }
        let sent = self.running.as_ref().map(|(jobs, _)| jobs.send(job));
        match sent {
            Some(Ok(())) => Ok(result),
            _ => Err(Error::bug("queue", "a queue has ended")),
        }
    }

    /// Waits for work.
    ///
    /// # Errors
    /// Those of the work.
    pub fn wait<T>(result: &Receiver<Result<T>>) -> Result<T> {
        let ended = |_| Err(Error::bug("queue", "a queue ended before its work"));
        result.recv().unwrap_or_else(ended)
    }
}

impl Drop for WorkQueue {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.running.take() {
            drop(jobs);
            drop(thread.join());
        }
    }
}
