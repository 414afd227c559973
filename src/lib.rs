//! `ckpt-opt`: everything that touches the world around the compiler in `ckpt_passes`.
//!
//! [`frontend`] turns foreign files into graphs, [`emit`] turns graphs into files. Dependencies run from here to
//! `ckpt_passes`, never back.

pub mod emit;
pub mod frontend;
#[cfg(feature = "torch")]
pub mod runtime;
