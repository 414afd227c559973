//! Every op of the table can be executed.
#![cfg(feature = "torch")]

use ckpt_opt::runtime::kernels;
use ckpt_passes::ops;

#[test]
fn every_row_has_a_kernel() {
    let without: Vec<&str> = ops::all()
        .filter(|op| **op != ops::opaque::OPAQUE && kernels::find(op).is_none())
        .map(|op| op.name)
        .collect();
    assert!(
        without.is_empty(),
        "src/runtime/kernels has none of {without:?}"
    );
    assert!(kernels::find(&ops::opaque::OPAQUE).is_none());
}
