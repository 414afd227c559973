//! The ONNX format, as its reader ([`frontend::onnx`](crate::frontend::onnx)) and its writer ([`emit`](crate::emit)) share
//! it: the protobuf messages, the changelog of ops, our metadata, and how nodes and functions are written.

pub mod keys;
pub mod messages;
pub mod proto;
pub mod versions;
