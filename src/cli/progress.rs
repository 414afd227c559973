//! Progress on stderr: a line that appears when a step takes longer than a second, on terminals only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// True where stderr gets errors only.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Limits stderr to errors, or lifts the limit.
pub fn set_quiet(is_quiet: bool) {
    QUIET.store(is_quiet, Ordering::Relaxed);
}

/// Returns true where stderr gets errors only.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// A line of progress, shown until it is dropped.
pub struct Progress {
    /// Sends the next text; dropping it ends the line.
    done: Option<Sender<String>>,
    thread: Option<JoinHandle<()>>,
}

/// Shows `what` if it takes longer than a second.
pub fn step(what: impl Into<String>) -> Progress {
    use std::io::IsTerminal;
    if !std::io::stderr().is_terminal() || is_quiet() {
        return Progress {
            done: None,
            thread: None,
        };
    }
    let (done, wait) = channel::<String>();
    let mut what = what.into();
    let thread = std::thread::spawn(move || {
        let started = Instant::now();
        loop {
            let left = Duration::from_secs(1).saturating_sub(started.elapsed());
            match wait.recv_timeout(left) {
                Ok(next) => what = next,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let template = if plain {
            "{spinner} {msg} {elapsed}"
        } else {
            "{spinner:.cyan} {msg} {elapsed}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what);
        bar.enable_steady_tick(Duration::from_millis(120));
        // Until the sender is gone.
        while let Ok(next) = wait.recv() {
            bar.set_message(next);
        }
        bar.finish_and_clear();
    });
    Progress {
        done: Some(done),
        thread: Some(thread),
    }
}

impl Progress {
    /// Shows the next stage.
    pub fn say(&self, what: String) {
        if let Some(done) = &self.done {
            // An ended thread shows nothing.
            let _ = done.send(what);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.done.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
