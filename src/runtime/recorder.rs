//! The interface to whatever captures a step and replays it.

use ckpt_passes::Result;

/// The work of a step.
pub type Work<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Captures steps.
pub trait Recorder {
    /// Runs work on the stream that is captured, not on the default stream.
    ///
    /// # Errors
    /// The work's; the device fails.
    fn aside(&self, work: Work) -> Result<()>;

    /// Captures work within [`Recorder::aside`], while the device is idle. Nothing of it is executed. After an error,
    /// nothing of the capture is left.
    ///
    /// # Errors
    /// The work's, or the reason why it cannot be captured.
    fn capture(&self, work: Work) -> Result<Box<dyn Recording>>;
}

/// A captured step.
pub trait Recording {
    /// Executes the step. `recompute` runs it node by node, for a recorder that cannot replay.
    ///
    /// # Errors
    /// The device fails.
    fn replay(&self, recompute: Work) -> Result<()>;
}
