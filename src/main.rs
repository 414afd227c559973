//! The `ckpt-opt` command.
fn main() {}
