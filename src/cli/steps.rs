//! The progress line of `train`.

use super::progress::is_quiet;
use ckpt_opt::train::metrics::StepMetrics;
use ckpt_opt::units::bytes;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// The progress of a training run.
pub struct Steps {
    bar: ProgressBar,
    /// Whether each step is a line of its own.
    prints: bool,
    shown: u64,
}

impl Steps {
    /// Shows `done` of `total` steps, on terminals; with `prints` each step as a line.
    pub fn new(done: u64, total: u64, prints: bool) -> Steps {
        let is_shown = std::io::stderr().is_terminal() && !is_quiet();
        let target = match is_shown {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} ETA {eta}") {
            bar.set_style(style);
        }
        bar.set_position(done);
        bar.reset_eta();
        Steps {
            bar,
            prints,
            shown: done,
        }
    }

    /// Shows a step.
    pub fn show(&mut self, step: &StepMetrics) {
        let speed = step.tokens as f64 / step.seconds.max(1e-9);
        let mut text = format!(
            "loss {:.4} · {speed:.0} tokens/s · peak {} of {} predicted",
            step.loss,
            bytes(step.peak_bytes),
            bytes(step.predicted_peak_bytes)
        );
        if let Some(loss) = step.eval_loss {
            text += &format!(" · evaluation {loss:.4}");
        }
        if self.prints && !is_quiet() {
            self.pause(|| anstream::eprintln!("step {}: {text}", step.step));
        }
        self.bar.set_message(text);
        self.bar.inc(step.step - self.shown);
        self.shown = step.step;
    }

    /// Prints something else on stderr.
    pub fn pause(&self, print: impl FnOnce()) {
        self.bar.suspend(print);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
