//! What the tests of the runtime share: tensors for the feeds of a model, and one measurement at a time.

use ckpt_opt::runtime::convert;
use ckpt_passes::ir::{DType, Graph, Tensor as Constant};
use ckpt_passes::testing::models::Model;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::Tensor;

/// Gives this test its turn, until its thread ends: the allocator's counters belong to the process, so no other test may make or
/// drop tensors meanwhile. A test calls this before it makes its first tensor.
pub fn alone() {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: MutexGuard<'static, ()> = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    }
    HELD.with(|_| ());
    ckpt_torch::memory::install();
    // A second installation changes nothing.
    ckpt_torch::memory::install();
}

/// Returns true in a process that runs only the test `name`; elsewhere runs it in one and returns false.
pub fn is_own_process(name: &str) -> bool {
    is_process_with(name, &[])
}

/// As [`is_own_process`], with environment variables that libtorch reads when it is loaded.
pub fn is_process_with(name: &str, variables: &[(&str, &str)]) -> bool {
    const MARK: &str = "CKPT_OPT_TEST_ALONE";
    if std::env::var_os(MARK).is_some_and(|alone| alone == name) {
        return true;
    }
    alone();
    let done = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(MARK, name)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let shown = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
    let (stdout, stderr) = (shown(&done.stdout), shown(&done.stderr));
    assert!(done.status.success(), "{name}:\n{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "{name} did not run:\n{stdout}");
    false
}

/// A tensor of any element type from row-major numbers.
pub fn tensor(dtype: DType, dims: &[i64], values: &[f64]) -> Tensor {
    let _no_grad = tch::no_grad_guard();
    Tensor::from_slice(values)
        .reshape(dims)
        .to_kind(convert::kind(dtype).unwrap())
}

/// The inputs of a model by name.
pub fn feeds(model: &Model) -> BTreeMap<String, Tensor> {
    let graph = &model.graph;
    let one = |(id, dims, values): &(_, Vec<i64>, Vec<f64>)| {
        let value = graph.value(*id);
        (value.name.clone(), tensor(value.ty().dtype, dims, values))
    };
    model.feeds.iter().map(one).collect()
}

/// The elements, row-major, as float64.
pub fn numbers(x: &Tensor) -> Vec<f64> {
    let flat = x.to_kind(tch::Kind::Double).contiguous().reshape([-1]);
    Vec::<f64>::try_from(flat).unwrap()
}

/// Equal shape, element type and bits; every NaN is like any other of the same bits.
pub fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind()
        && a.size() == b.size()
        && ckpt_torch::bytes::read(a).unwrap() == ckpt_torch::bytes::read(b).unwrap()
}

/// Asserts that both maps hold the same names and that each pair of tensors differs by at most `share` of its largest element.
pub fn assert_within(
    found: &BTreeMap<String, Tensor>,
    expected: &BTreeMap<String, Tensor>,
    share: f64,
    what: &str,
) {
    assert!(found.keys().eq(expected.keys()), "{what}");
    for (name, a) in expected {
        let [a, b] = [a, &found[name]].map(|x| x.to_kind(tch::Kind::Double));
        let most = a.abs().max().double_value(&[]).max(1e-6);
        let gap = (&a - &b).abs().max().double_value(&[]);
        assert!(
            gap <= share * most,
            "{what}: {name} is off by {gap} of {most}"
        );
    }
}

/// The names of a graph's ops, for messages.
pub fn ops(graph: &Graph) -> String {
    let names: Vec<&str> = graph
        .order()
        .iter()
        .map(|id| graph.node(*id).op.name)
        .collect();
    names.join(" ")
}

/// The largest magnitude of an element.
pub fn largest(t: &Constant) -> f64 {
    let all = (0..t.elements() as usize).filter_map(|i| t.get_f64(i));
    all.fold(0.0, |most, x| most.max(x.abs()))
}

/// Fails unless two tensors agree as docs/benchmarks.md allows against PyTorch in float32.
pub fn assert_close(what: &str, found: &Constant, expected: &Constant, floor: f64) {
    assert_eq!(found.dims, expected.dims, "{what}");
    let allowed = 1e-5 * largest(expected) + floor;
    for i in 0..expected.elements() as usize {
        let (a, b) = (found.get_f64(i).unwrap(), expected.get_f64(i).unwrap());
        assert!(
            (a - b).abs() <= allowed,
            "{what}[{i}]: {a} and {b}, {allowed} allowed"
        );
    }
}
