//! Progress on stderr: a line that appears when a step takes longer than a second, on terminals only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Shown until it is dropped.
pub struct Progress {
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Shows `what` from the second second on.
pub fn step(what: impl Into<String>) -> Progress {
    use std::io::IsTerminal;
    if !std::io::stderr().is_terminal() {
        return Progress {
            done: None,
            thread: None,
        };
    }
    let (done, wait) = channel::<()>();
    let what = what.into();
    let thread = std::thread::spawn(move || {
        if wait.recv_timeout(Duration::from_secs(1)) != Err(RecvTimeoutError::Timeout) {
            return;
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
        let _ = wait.recv();
        bar.finish_and_clear();
    });
    Progress {
        done: Some(done),
        thread: Some(thread),
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
