//! CUDA graphs: what a step sends to a device, written down once and sent as one from then on.
//!
//! CUDA must have been opened ([`crate::cuda::open`]).

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::c_void;
use std::rc::Rc;

/// A stream for steps that are captured.
#[derive(Clone)]
pub struct CaptureStream(Rc<Stream>);

struct Stream(*mut c_void);

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `CaptureStream::new` and dropped once, after all that holds on to it.
        unsafe { sys::ck_graph_side_drop(self.0) }
    }
}

impl CaptureStream {
    /// # Errors
    /// A device that was not opened; a libtorch without what this needs of it.
    pub fn new(device: usize) -> Result<CaptureStream, TorchError> {
        // SAFETY: a place to write to.
        let stream = handle::made(|stream| unsafe { sys::ck_graph_side(device as i64, stream) })?;
        Ok(CaptureStream(Rc::new(Stream(stream))))
    }

    /// From here on what this thread sends to the device goes to this stream, until the guard is dropped. Guards are
    /// dropped in reverse.
    ///
    /// # Errors
    /// The device fails.
    pub fn enter(&self) -> Result<On, TorchError> {
        // SAFETY: the stream is ours; a place to write to.
        handle::made(|guard| unsafe { sys::ck_graph_enter(self.0.0, guard) }).map(On)
    }

    /// Begins to write down what this thread sends to this stream, which it must have [entered](CaptureStream::enter). Nothing of it
    /// is done. The device is idle.
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

/// While it lives, work goes to a [`CaptureStream`].
pub struct On(*mut c_void);

impl Drop for On {
    fn drop(&mut self) {
        // SAFETY: made by `enter` and dropped once, on the same thread: it is not `Send`.
        unsafe { sys::ck_graph_leave(self.0) }
    }
}

/// What was written down, or is being. Dropped while it is, it is abandoned, and nothing of it was done.
pub struct Graph {
    graph: *mut c_void,
    _stream: CaptureStream,
}

impl Graph {
    /// Ends the capture; returns how many kernels and copies it holds. The graph is to be dropped where it fails.
    ///
    /// # Errors
    /// The host waited for the device meanwhile or asked it something, which cannot be captured; nothing was sent.
    pub fn end(&mut self) -> Result<u64, TorchError> {
        let mut nodes = 0;
        // SAFETY: made by `begin`; a place to write to.
        check(unsafe { sys::ck_graph_end(self.graph, &mut nodes) })?;
        Ok(nodes.unsigned_abs())
    }

    /// Sends it to its stream. The host does not wait.
    ///
    /// # Errors
    /// The device fails; the capture has not ended.
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

/// Whether libtorch's CUDA library, which must be loaded, has all that graphs need of it.
///
/// # Errors
/// The first name that it lacks.
pub fn find() -> Result<(), TorchError> {
    // SAFETY: nothing is passed.
    check(unsafe { sys::ck_graph_find() })
}
