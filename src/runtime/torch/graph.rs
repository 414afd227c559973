//! CUDA graphs: captures the work that a step submits to a device and replays it in one call.
//!
//! CUDA must be open ([`crate::cuda::open`]).

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::c_void;
use std::rc::Rc;

/// A stream for captures.
#[derive(Clone)]
pub struct CaptureStream(Rc<Stream>);

struct Stream(*mut c_void);

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `CaptureStream::new` and dropped once, with its last owner.
        unsafe { sys::ck_graph_stream_drop(self.0) }
    }
}

impl CaptureStream {
    /// Creates a stream.
    ///
    /// # Errors
    /// A device that was not opened; a libtorch that lacks a function that graphs need.
    pub fn new(device: usize) -> Result<CaptureStream, TorchError> {
        // SAFETY: a place to write to.
        let stream = handle::made(|stream| unsafe { sys::ck_graph_stream(device as i64, stream) })?;
        Ok(CaptureStream(Rc::new(Stream(stream))))
    }

    /// Makes the stream current for this thread until the guard is dropped. Guards must be dropped in reverse order.
    ///
    /// # Errors
    /// The device fails.
    pub fn enter(&self) -> Result<On, TorchError> {
        // SAFETY: the stream is ours; a place to write to.
        handle::made(|guard| unsafe { sys::ck_graph_enter(self.0.0, guard) }).map(On)
    }

    /// Starts to capture the work that this thread submits to the stream, which must be [current](CaptureStream::enter).
    /// Captured work is not executed. The device must be idle.
    ///
    /// # Errors
    /// The device fails.
    pub fn begin(&self) -> Result<Graph, TorchError> {
        // SAFETY: the stream is ours and outlives the graph; a place to write to.
        let graph = handle::made(|graph| unsafe { sys::ck_graph_begin(self.0.0, graph) })?;
        Ok(Graph {
            graph,
            _stream: self.clone(),
        })
    }
}

/// Keeps a [`CaptureStream`] current while it lives.
pub struct On(*mut c_void);

impl Drop for On {
    fn drop(&mut self) {
        // SAFETY: made by `enter` and dropped once, on the same thread: it is not `Send`.
        unsafe { sys::ck_graph_leave(self.0) }
    }
}

/// A captured step, or one that is being captured. Dropping it during the capture abandons the capture.
pub struct Graph {
    graph: *mut c_void,
    _stream: CaptureStream,
}

impl Graph {
    /// Ends the capture and returns the number of its kernels and copies. After an error, the graph must be dropped.
    ///
    /// # Errors
    /// The host waited for the device or queried it, which cannot be captured; nothing was submitted.
    pub fn end(&mut self) -> Result<u64, TorchError> {
        let mut nodes = 0;
        // SAFETY: made by `begin`; a place to write to.
        check(unsafe { sys::ck_graph_end(self.graph, &mut nodes) })?;
        Ok(nodes.unsigned_abs())
    }

    /// Submits the graph to its stream. The host does not wait.
    ///
    /// # Errors
    /// The device fails; the capture did not end.
    pub fn replay(&self) -> Result<(), TorchError> {
        // SAFETY: made by `begin`.
        check(unsafe { sys::ck_graph_replay(self.graph) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `begin` and dropped once.
        unsafe { sys::ck_graph_drop(self.graph) }
    }
}

/// Checks that libtorch's CUDA library, which must be loaded, has every function that graphs need.
///
/// # Errors
/// The first missing function.
pub fn find() -> Result<(), TorchError> {
    // SAFETY: nothing is passed.
    check(unsafe { sys::ck_graph_find() })
}
