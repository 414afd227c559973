//! The one error type: what libtorch, or the checks in front of it, refused.

use crate::sys;
use std::ffi::CStr;
use std::fmt;

/// Which of the two kinds of failure it was; they lead to different exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The call is wrong: unknown operator, arguments that do not fit, a shape libtorch refuses.
    Refused,
    /// There is not enough memory for it.
    OutOfMemory,
}

/// A failed call, with libtorch's own message where it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TorchError {
    /// Whether the call was refused or memory ran out.
    pub kind: ErrorKind,
    /// Message of libtorch, or of the check in front of it.
    pub message: String,
}

impl TorchError {
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        TorchError {
            kind: ErrorKind::Refused,
            message: message.into(),
        }
    }

    /// The same error, saying what was being done.
    pub(crate) fn within(self, what: &str) -> Self {
        TorchError {
            message: format!("{what}: {}", self.message),
            ..self
        }
    }
}

impl fmt::Display for TorchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TorchError {}

/// Turns a status of the C interface, just returned on this thread, into a result.
pub(crate) fn check(status: i32) -> Result<(), TorchError> {
    let kind = match status {
        sys::OK => return Ok(()),
        sys::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        _ => ErrorKind::Refused,
    };
    // SAFETY: the message is a NUL-terminated string that lives until this thread's next failing call.
    let message = unsafe { CStr::from_ptr(sys::ck_last_message()) };
    Err(TorchError {
        kind,
        message: message.to_string_lossy().trim_end().to_owned(),
    })
}
