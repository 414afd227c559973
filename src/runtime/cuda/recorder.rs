//! Captures steps as CUDA graphs.

use crate::runtime::convert::torch_error;
use crate::runtime::recorder::{Recorder, Recording, Work};
use ckpt_passes::Result;
use ckpt_torch::graph::{CaptureStream, Graph};

/// Captures on its own stream, because the default stream cannot be captured.
pub struct GraphRecorder(CaptureStream);

impl GraphRecorder {
    /// Creates a recorder for a device.
    ///
    /// # Errors
    /// Why the device or this libtorch has no graphs.
    pub fn new(device: usize) -> std::result::Result<GraphRecorder, String> {
        let stream = CaptureStream::new(device).map_err(|e| e.message)?;
        Ok(GraphRecorder(stream))
    }
}

impl Recorder for GraphRecorder {
    fn aside(&self, work: Work) -> Result<()> {
        let _on = self.0.enter().map_err(torch_error)?;
        work()
    }

    fn capture(&self, work: Work) -> Result<Box<dyn Recording>> {
        let mut graph = self.0.begin().map_err(torch_error)?;
        // Reports the first error; CUDA's errors about the capture follow from it.
        work()?;
        graph.end().map_err(torch_error)?;
        Ok(Box::new(graph))
    }
}

impl Recording for Graph {
    fn replay(&self, _: Work) -> Result<()> {
        Graph::replay(self).map_err(torch_error)
    }
}
