//! Graphs without a device: what they need of libtorch's CUDA library is there.

use crate::support::torch::alone;
use ckpt_torch::{cuda, graph};

#[test]
fn every_name_that_graphs_need_is_in_the_library() {
    alone();
    // The library loads without a device, but not without the CUDA libraries that it needs.
    if let Err(e) = cuda::load() {
        println!(
            "skipped: libtorch's CUDA library cannot be loaded here: {}",
            e.message
        );
        return;
    }
    graph::find().unwrap();
}
