//! The CUDA door from outside. What needs a device is ignored; where there is one, add `-- --include-ignored`. `tools/cuda-checks`
//! makes the same checks without Rust.

use crate::promises::{large, none_broken, of_larger_matrices};
use crate::support::command;
use crate::support::torch;

use ckpt_opt::attention::Attention;
use ckpt_opt::place::Place;
use ckpt_opt::rng::Rng;
use ckpt_opt::runtime::kernels::attention::check::{CheckedCase, judge};
use ckpt_opt::runtime::kernels::attention::sdpa;
use ckpt_opt::runtime::session::Session;
use ckpt_opt::tensors::{Tensors, random};
use ckpt_passes::analysis::sdpa::SdpaBackend;
use ckpt_passes::analysis::sdpa::choice::AttentionKernels;
use ckpt_passes::ir::{DType, Graph, Tensor};
use ckpt_passes::testing::recipes::In;
use ckpt_passes::testing::{Random, models, recipes};
use ckpt_passes::text;
use command::{call, code, fixture, json, stderr, workplace};
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::path::Path;

const RUN: [&str; 6] = [
    "run",
    "model.onnx",
    "--inputs",
    "case.npz",
    "--device",
    "cuda",
];

/// As `torch::alone`. A device is opened before libtorch first asks for one, as it does for the CPU too.
fn alone_on_a_device() {
    torch::alone();
    ckpt_opt::runtime::device::of(Place::Cuda(0))
        .open()
        .unwrap();
}

const NEEDS: &str = "this test needs a machine with an NVIDIA device";

fn train(folder: &Path, policy: &str, out: &str) {
    let args = [
        "model.onnx",
        "-o",
        out,
        "--loss",
        "causal-lm",
        "--policy",
        policy,
    ];
    assert_eq!(code(&call(folder, &args)), 0);
}

fn run(folder: &Path, model: &str, more: &[&str]) -> Value {
    let mut args = vec!["run", model, "--inputs", "case.npz", "--format", "json"];
    args.extend(more);
    json(&call(folder, &args))
}

#[test]
fn a_device_that_is_not_there_is_told_and_ends_with_5() {
    let dir = workplace();
    // With a driver: no such device. Without: what was looked for, where, and what to do.
    for verb in [
        &["run", "model.onnx"][..],
        &["verify", "model.onnx", "model.onnx"],
    ] {
        let mut args = verb.to_vec();
        args.extend(["--inputs", "case.npz", "--device", "cuda:126"]);
        let done = call(dir.path(), &args);
        let said = stderr(&done);
        assert_eq!(code(&done), 5, "{said}");
        assert!(
            said.contains("error[cuda]") && done.stdout.is_empty(),
            "{said}"
        );
        assert!(
            said.contains("cuda:0 to") || said.contains("--device cpu"),
            "{said}"
        );
    }
    let wrong = call(dir.path(), &["run", "model.onnx", "--device", "gpu"]);
    assert_eq!(code(&wrong), 2);
}

/// A stand-in for libtorch's CUDA library. Like PyTorch's on a machine without a GPU, it finds no device.
const NO_DEVICE: &str = "
#include <ATen/detail/CUDAHooksInterface.h>
#include <cstdio>
#include <cstdlib>
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override {
    for (const char* name : {\"PYTORCH_ALLOC_CONF\", \"PYTORCH_CUDA_ALLOC_CONF\"})
      if (const char* value = std::getenv(name)) std::fprintf(stderr, \"%s=%s\\n\", name, value);
    return false;
  }
  bool hasCUDART() const override { return true; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
";

/// libtorch looks for CUDA once in a process, also to tell its version. The library must be loaded before.
#[test]
fn the_cuda_library_is_loaded_before_libtorch_looks_for_it() {
    let dir = workplace();
    let libtorch = std::env::var("LIBTORCH").unwrap();
    std::fs::write(dir.path().join("cuda.cpp"), NO_DEVICE).unwrap();
    let compiled = std::process::Command::new("c++")
        .args([
            "-std=c++20",
            "-shared",
            "-fPIC",
            "cuda.cpp",
            "-o",
            "libtorch_cuda.so",
        ])
        .arg(format!("-I{libtorch}/include"))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");
    let folders = format!("{}:{libtorch}/lib", dir.path().display());
    const NEW: &str = "PYTORCH_ALLOC_CONF=expandable_segments:True";
    const OLD: &str = "PYTORCH_CUDA_ALLOC_CONF=backend:native";
    for (args, set_by_user, status) in [
        (&RUN[..], false, 5),
        (&RUN[..], true, 5),
        (&["doctor"][..], false, 0),
    ] {
        let mut command = command::command(dir.path());
        command.args(args).env("LD_LIBRARY_PATH", &folders);
        command.env_remove("PYTORCH_ALLOC_CONF");
        command.env_remove("PYTORCH_CUDA_ALLOC_CONF");
        if set_by_user {
            let (name, value) = OLD.split_once('=').unwrap();
            command.env(name, value);
        }
        let done = command.output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), stderr(&done));
        assert_eq!(code(&done), status, "{said}");
        assert!(
            said.contains("library is loaded and sees 0 devices"),
            "{said}"
        );
        // Set before libtorch initializes CUDA, unless the user has set it.
        assert_eq!(said.contains(NEW), !set_by_user, "{said}");
        assert_eq!(said.contains(OLD), set_by_user, "{said}");
    }
}

/// The folder of pip's packages, in the environment.
const WHEELS: &str = "CKPT_OPT_WHEELS";

#[test]
#[ignore = "needs CKPT_OPT_WHEELS, a site-packages folder with torch 2.11.0 and its nvidia packages, and no CUDA device"]
fn pips_cuda_libraries_see_no_device() {
    let dir = workplace();
    let wheels = std::env::var_os(WHEELS).unwrap_or_else(|| panic!("{WHEELS} is not set"));
    let wheels = Path::new(&wheels);
    let mut folders = vec![wheels.join("torch/lib")];
    for package in std::fs::read_dir(wheels.join("nvidia")).unwrap() {
        folders.push(package.unwrap().path().join("lib"));
    }
    let folders = std::env::join_paths(folders).unwrap();
    for (args, status) in [
        (&RUN[..], 5),
        (
            &["verify", "model.onnx", "model.onnx", "--device", "cuda"][..],
            5,
        ),
        (&["doctor"][..], 0),
    ] {
        let mut command = command::command(dir.path());
        let done = command.args(args).env("LD_LIBRARY_PATH", &folders).output();
        let done = done.unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), stderr(&done));
        assert_eq!(code(&done), status, "{said}");
        assert!(
            said.contains("library is loaded and sees 0 devices"),
            "{said}"
        );
    }
}

#[test]
fn a_setting_that_is_not_deterministic_is_refused() {
    let dir = workplace();
    let mut command = command::command(dir.path());
    command.args(RUN);
    let done = command
        .env("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        .output()
        .unwrap();
    assert_eq!(code(&done), 5);
    assert!(
        stderr(&done).contains("CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        "{}",
        stderr(&done)
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn planned_gradients_equal_unplanned_ones_on_a_device() {
    let dir = workplace();
    for policy in ["full", "selective", "submodule"] {
        train(dir.path(), policy, "t.onnx");
        let args = [
            "verify",
            "model.onnx",
            "t.onnx",
            "--inputs",
            "case.npz",
            "--device",
            "cuda",
        ];
        let done = call(dir.path(), &args);
        assert_eq!(code(&done), 0, "{policy}: {}\n{NEEDS}", stderr(&done));
        assert!(String::from_utf8_lossy(&done.stdout).contains("equal bit for bit"));
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn a_device_repeats_itself_and_counts_its_memory() {
    let dir = workplace();
    for name in ["gpt2", "llama32"] {
        std::fs::copy(fixture(name, "model.onnx"), dir.path().join("model.onnx")).unwrap();
        std::fs::copy(fixture(name, "case.npz"), dir.path().join("case.npz")).unwrap();
        train(dir.path(), "full", "t.onnx");
        let report = run(
            dir.path(),
            "t.onnx",
            &["--device", "cuda", "--outputs", "a.npz"],
        );
        run(
            dir.path(),
            "t.onnx",
            &["--device", "cuda", "--outputs", "b.npz"],
        );
        let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
        assert!(
            file("a.npz") == file("b.npz"),
            "{name}: another run gave other bits"
        );
        let bytes = |key: &str| report[key].as_u64().unwrap();
        assert_eq!(report["device"], "cuda:0");
        // Layers are at least what was asked for, and no less than what the plan says can be alive at all.
        assert!(bytes("measured_peak_bytes") >= bytes("requested_peak_bytes"));
        assert!(bytes("requested_peak_bytes") > bytes("static_bytes"));
        assert!(report["workspace_bytes"].as_u64().is_some());
    }
}

fn warnings(report: &Value) -> String {
    report["warnings"].to_string()
}

#[test]
fn graphs_on_a_cpu_are_warned_of_and_change_nothing() {
    let dir = workplace();
    let plain = run(dir.path(), "model.onnx", &["--outputs", "a.npz"]);
    let asked = ["--outputs", "b.npz", "--steps", "3", "--cuda-graphs", "on"];
    let asked = run(dir.path(), "model.onnx", &asked);
    let reason = "steps are not replayed as CUDA graphs: a run on the CPU has none";
    assert!(warnings(&asked).contains(reason), "{}", warnings(&asked));
    assert!(!warnings(&plain).contains("CUDA graphs"));
    assert!(plain["replayed_steps"] == 0 && asked["replayed_steps"] == 0);
    let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    assert!(file("a.npz") == file("b.npz"));
    let wrong = call(dir.path(), &["run", "model.onnx", "--cuda-graphs", "yes"]);
    assert_eq!(code(&wrong), 2);
}

#[test]
#[ignore = "needs a CUDA device"]
fn replayed_steps_give_the_bits_of_steps_node_by_node() {
    let dir = workplace();
    for optimizer in [&[][..], &["--optimizer", "adamw", "--fuse-optimizer"]] {
        let train = [
            "model.onnx",
            "-o",
            "t.onnx",
            "--loss",
            "causal-lm",
            "--policy",
            "full",
        ];
        assert_eq!(
            code(&call(dir.path(), &[&train[..], optimizer].concat())),
            0
        );
        for steps in ["1", "2", "20"] {
            let step = |switch: &str, out: &str| {
                let more = ["--device", "cuda", "--steps", steps, "--outputs", out];
                run(
                    dir.path(),
                    "t.onnx",
                    &[&more[..], &["--cuda-graphs", switch]].concat(),
                )
            };
            let (off, on) = (step("off", "a.npz"), step("on", "b.npz"));
            let done = on["replayed_steps"].to_string();
            assert!(
                off["replayed_steps"] == 0 && done == steps,
                "{}",
                warnings(&on)
            );
            let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
            assert!(file("a.npz") == file("b.npz"), "{steps} steps: other bits");
        }
    }
}

/// Whole numbers whose sums are exact in float32, and in 16 bits are not.
fn sums_of_narrow_products_are_exact(place: Place) {
    torch::alone();
    let (rows, inner, columns) = (5, 600, 3);
    for narrow in [DType::BF16, DType::F16] {
        for (a, b, flips) in [
            ([rows, inner], [inner, columns], ""),
            ([inner, rows], [columns, inner], "{transA=1, transB=1}"),
        ] {
            let source = format!(
                "graph @g imported (%s: f32[{rows}, {columns}], %a: {}{a:?}, %b: {}{b:?}) -> (%t) {{
  %t = AddProduct %s, %a, %b {flips}
}}
",
                narrow.name(),
                narrow.name()
            );
            let mut graph = text::parse(&source).unwrap();
            ckpt_passes::transform::infer::infer(&mut graph).unwrap();
            let filled = |dtype: DType, dims: [usize; 2], x: f64| {
                let one = Tensor::scalar(dtype, x);
                let size = dtype.size_bytes() as usize;
                let bytes = one.bytes().unwrap()[..size].repeat(dims[0] * dims[1]);
                Tensor::new(dtype, dims.map(|d| d as u64), bytes)
            };
            let given = [
                ("s", filled(DType::F32, [rows, columns], 3.0)),
                ("a", filled(narrow, a, 7.0)),
                ("b", filled(narrow, b, 1.0)),
            ];
            let inputs = given
                .map(|(name, x)| (name.to_string(), x))
                .into_iter()
                .collect();
            let session = Session::new(&graph, &Default::default(), None, place, Rng::default());
            let found = session.unwrap().run(&inputs).unwrap();
            let want = filled(DType::F32, [rows, columns], 3.0 + 7.0 * inner as f64);
            assert_eq!(found.outputs["t"], want, "{}", narrow.name());
        }
    }
}

#[test]
fn sums_of_narrow_products_are_exact_on_the_cpu() {
    sums_of_narrow_products_are_exact(Place::Cpu);
}

#[test]
#[ignore = "needs a CUDA device"]
fn sums_of_narrow_products_are_exact_on_a_device() {
    sums_of_narrow_products_are_exact(Place::Cuda(0));
}

/// Attention and its gradient, causal, 16 query heads of 4 key heads: by which kernels they run, and in what memory.
fn attention_runs_by(place: Place, attention: Attention, expected: AttentionKernels) {
    torch::alone();
    let source = "graph @g imported (%dy: bf16[2, 16, 300, 64], %q: bf16[2, 16, 300, 64], %k: bf16[2, 4, 300, 64], \
                  %v: bf16[2, 4, 300, 64]) -> (%y, %dq, %dk, %dv) {
  %y = Attention %q, %k, %v {causal=1, scale=0.125}
  %dq, %dk, %dv = AttentionGrad %dy, %q, %k, %v {causal=1, scale=0.125, wants=[0, 1, 2]}
}
";
    let mut graph = text::parse(source).unwrap();
    ckpt_passes::transform::infer::infer(&mut graph).unwrap();
    let inputs = random::inputs(&graph, &[], 0).unwrap();
    let mut session =
        Session::new(&graph, &Default::default(), None, place, Rng::default()).unwrap();
    session.attend_by(attention);
    let (first, second) = (session.run(&inputs).unwrap(), session.run(&inputs).unwrap());
    assert_eq!(first.attention_refused, Default::default());
    assert_eq!(first.attention, expected);
    assert_eq!(first.outputs, second.outputs);
    let (peak, predicted) = (second.peak_bytes, second.predicted_peak_bytes);
    assert!(peak <= predicted, "{peak} bytes, {predicted} predicted");
}

const IN_TILES: AttentionKernels = AttentionKernels {
    flash: 0,
    efficient: 0,
    tiles: 2,
};

#[test]
fn attention_runs_in_tiles_on_the_cpu() {
    attention_runs_by(Place::Cpu, Attention::Auto, IN_TILES);
}

#[test]
#[ignore = "needs a CUDA device"]
fn attention_runs_by_pairs_on_a_device() {
    let by_flash = AttentionKernels {
        flash: 2,
        efficient: 0,
        tiles: 0,
    };
    attention_runs_by(Place::Cuda(0), Attention::Auto, by_flash);
    attention_runs_by(Place::Cuda(0), Attention::Tiles, IN_TILES);
}

#[test]
#[ignore = "needs a CUDA device"]
fn pairs_keep_on_a_device_what_is_assumed_of_them() {
    alone_on_a_device();
    let kinds = [
        (SdpaBackend::Flash, 64, 64, true),
        (SdpaBackend::Flash, 128, 128, true),
        (SdpaBackend::Flash, 40, 40, true),
        (SdpaBackend::Efficient, 192, 128, false),
        (SdpaBackend::Efficient, 64, 32, false),
        (SdpaBackend::Efficient, 320, 320, false),
    ];
    for dtype in [DType::BF16, DType::F16] {
        for (pair, size, value_size, may_group) in kinds {
            for (causal, grouped) in [(true, false), (false, may_group)] {
                let kindred = CheckedCase {
                    dtype,
                    size,
                    value_size,
                    causal,
                    grouped,
                };
                let verdict = judge(kindred, tch::Device::Cuda(0), &|cx| sdpa::run(pair, cx));
                assert_eq!(verdict, Ok(()), "{pair:?} {kindred:?}");
            }
        }
    }
}

/// What a run of one node on a device differs in from one on the CPU, and from what was predicted.
fn differences(graph: &Graph, inputs: &Tensors, relative: f64) -> Vec<String> {
    let run =
        |place| Session::new(graph, &Tensors::new(), None, place, Rng::default())?.run(inputs);
    let (on_cpu, done) = match (run(Place::Cpu), run(Place::Cuda(0))) {
        (Ok(on_cpu), Ok(done)) => (on_cpu, done),
        // What a size that the data decide could be is not known.
        (Err(_), Err(_)) => return Vec::new(),
        (Err(e), _) | (_, Err(e)) => return vec![e.to_string()],
    };
    let mut found = Vec::new();
    let (peak, predicted) = (done.requested_peak_bytes, done.predicted_requested_bytes);
    // Constants are computed on the host.
    if peak != predicted && !inputs.is_empty() && !(done.peak_is_bound && peak < predicted) {
        found.push(format!("{peak} bytes requested, {predicted} predicted"));
    }
    for (name, expected) in &on_cpu.outputs {
        let result = &done.outputs[name];
        let allowed = relative * torch::largest(expected).clamp(0.1, f64::MAX);
        let at = |i| Some((result.get_f64(i)?, expected.get_f64(i)?));
        let pairs = (0..expected.elements() as usize).filter_map(at);
        let is_far = |(a, b): &(f64, f64)| {
            a != b
                && !(a.is_nan() && b.is_nan())
                && (a - b).abs().partial_cmp(&allowed) != Some(Ordering::Less)
        };
        if let Some((a, b)) = pairs.clone().find(is_far) {
            found.push(format!("{name}: {a} and {b} on the CPU, {allowed} allowed"));
        }
        if result.dims != expected.dims {
            found.push(format!(
                "{name}: {:?} and {:?} on the CPU",
                result.dims, expected.dims
            ));
        }
    }
    found
}

#[test]
#[ignore = "needs a CUDA device"]
fn every_row_gives_on_a_device_what_it_gives_on_the_cpu_in_the_predicted_memory() {
    alone_on_a_device();
    let mut r = Random(21);
    // Not one query over 70,000 keys: libtorch splits its sums into parts, which take some hundred bytes more.
    let one_query = |x: &In| matches!(x, In::Real([1, 70_000, _]));
    let large = large().filter(|recipe| !recipe.ins.iter().any(one_query));
    let all = recipes::ALL
        .iter()
        .map(|recipe| recipes::Recipe { ..*recipe });
    let larger = recipes::ALL.iter().filter_map(of_larger_matrices);
    let mut found = BTreeSet::new();
    for recipe in all.chain(larger).chain(large) {
        for (dtype, relative) in [
            (DType::F32, 2e-5),
            // libtorch's kernel for a device computes HardSwish by a float32 constant.
            (
                DType::F64,
                if recipe.op == "HardSwish" {
                    1e-6
                } else {
                    1e-12
                },
            ),
            (DType::F16, 4e-3),
            (DType::BF16, 3e-2),
        ] {
            let Ok(model) = models::single(&recipe, dtype, &mut r) else {
                continue;
            };
            let feed = |(id, dims, numbers): &(_, Vec<i64>, Vec<f64>)| {
                let value = model.graph.value(*id);
                let tensor = models::tensor(value.ty().dtype, dims, numbers);
                (value.name.clone(), tensor)
            };
            let inputs = model.feeds.iter().map(feed).collect();
            for what in differences(&model.graph, &inputs, relative) {
                let shown = text::print(&model.graph).replace('\n', " ");
                let shown: String = shown.chars().rev().take(400).collect();
                let shown: String = shown.chars().rev().collect();
                found.insert(format!("{} {dtype}: {what}: {shown}", recipe.op));
            }
        }
    }
    none_broken(found);
}
