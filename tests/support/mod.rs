//! What several test binaries share.

#![allow(dead_code, reason = "each test binary uses a part")]

pub mod archive;
pub mod command;
pub mod damaged;
#[cfg(feature = "torch")]
pub mod torch;
