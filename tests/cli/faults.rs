//! What the environment refuses while the command runs: memory, disk, the right libtorch. Exit 5, a message that says
//! which, and no file beside those that were there.

#![cfg(target_os = "linux")]

use crate::support::command;

use ckpt_opt::emit::save::{INSIDE_LIMIT_BYTES, Saving, save};
use ckpt_passes::ir::{DType, Data, External, Graph, Tensor, Ty};
use ckpt_passes::ops::{Builder, EmitExt};
use command::{call, code, command_with, files, stderr, workplace};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

/// Has the system refuse the process more of a resource than `most`.
pub fn limited(mut command: Command, resource: libc::__rlimit_resource_t, most: u64) -> Command {
    // SAFETY: only calls that may stand between fork and exec.
    unsafe {
        command.pre_exec(move || {
            // Without this a file that grows too large ends the process; with it the write fails, as on a full disk.
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            let limit = libc::rlimit {
                rlim_cur: most,
                rlim_max: most,
            };
            match libc::setrlimit(resource, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
}

/// Runs where no file can grow beyond some bytes.
fn on_a_full_disk(dir: &Path, args: &[&str], room_bytes: u64) -> Output {
    limited(command_with(dir, args), libc::RLIMIT_FSIZE, room_bytes)
        .output()
        .unwrap()
}

/// Bytes that fit before the disk is full: none, and fewer than any file that is written needs.
const ROOMS_BYTES: [u64; 2] = [0, 150];

fn a_full_disk_leaves_nothing(dir: &Path, calls: &[&[&str]]) {
    let before = files(dir);
    for args in calls {
        for room_bytes in ROOMS_BYTES {
            let done = on_a_full_disk(dir, args, room_bytes);
            let said = stderr(&done);
            assert_eq!(code(&done), 5, "{args:?}: {said}");
            assert!(said.contains("error[write]"), "{args:?}: {said}");
            assert_eq!(files(dir), before, "{args:?}");
        }
    }
}

#[test]
fn a_full_disk_is_told_by_every_writer_of_the_compiler() {
    let dir = workplace();
    let calls: [&[&str]; 8] = [
        &["model.onnx", "-o", "t.onnx", "--policy", "full"],
        &["model.onnx", "-o", "t.ckir", "--policy", "full"],
        &["model.onnx", "--stop-after", "infer", "--dump", "."],
        &[
            "plan",
            "graph.json.gz",
            "--budget",
            "80%",
            "--effort",
            "first",
            "--plan-out",
            "p.json",
        ],
        &[
            "frontier",
            "graph.json.gz",
            "--svg",
            "f.svg",
            "--points",
            "2",
            "--effort",
            "first",
        ],
        &[
            "explain",
            "model.onnx",
            "--policy",
            "full",
            "--report",
            "r.html",
        ],
        &[
            "explain",
            "model.onnx",
            "--policy",
            "full",
            "--report",
            "r.trace.json",
        ],
        &[
            "explain",
            "model.onnx",
            "--policy",
            "full",
            "--report",
            "r.pickle",
        ],
    ];
    a_full_disk_leaves_nothing(dir.path(), &calls);
    // A device that is always full is no file that could be replaced.
    let full = Path::new("/dev/full");
    for args in [
        &["model.onnx", "-o", "/dev/full"][..],
        &[
            "plan",
            "graph.json.gz",
            "--budget",
            "80%",
            "--plan-out",
            "/dev/full",
        ],
    ] {
        let done = call(dir.path(), args);
        assert_eq!(code(&done), 5, "{}", stderr(&done));
        assert!(
            stderr(&done).contains("error[write]") && stderr(&done).contains("free some space")
        );
        assert!(!std::fs::symlink_metadata(full).unwrap().is_file());
    }
}

/// A model whose weights are more than go inside a file: they lie in a file with a hole, which takes no disk.
fn heavy(dir: &Path) {
    const ELEMENTS: u64 = INSIDE_LIMIT_BYTES / 4 + 1;
    let mut graph = Graph::new("heavy");
    let x = graph.add_input("x", Some(Ty::new(DType::F32, [1.into()])));
    let place = External {
        location: "weights.bin".into(),
        offset: 0,
        length: 4 * ELEMENTS,
    };
    let w = Tensor {
        dtype: DType::F32,
        dims: vec![ELEMENTS],
        data: Data::Absent(place),
    };
    let w = graph.add_init("w", w);
    let y = Builder::new(&mut graph).mul(x, w).unwrap();
    graph.set_outputs(vec![y]);
    let how = Saving {
        input: None,
        weights: Default::default(),
        inside_limit_bytes: INSIDE_LIMIT_BYTES,
    };
    save(&graph, &dir.join("heavy.onnx"), &how).unwrap();
    let weights = std::fs::File::create(dir.join("weights.bin")).unwrap();
    weights.set_len(4 * ELEMENTS).unwrap();
}

#[test]
fn a_disk_that_is_full_within_a_sidecar_leaves_neither_file() {
    let dir = tempfile::tempdir().unwrap();
    heavy(dir.path());
    a_full_disk_leaves_nothing(dir.path(), &[&["heavy.onnx", "-o", "t.onnx"]]);
    // The model's file would fit, and much of the sidecar.
    let before = files(dir.path());
    let done = on_a_full_disk(dir.path(), &["heavy.onnx", "-o", "t.onnx"], 3 << 20);
    assert_eq!(code(&done), 5, "{}", stderr(&done));
    assert!(stderr(&done).contains("t.onnx.data"), "{}", stderr(&done));
    assert_eq!(files(dir.path()), before);
}

#[test]
fn a_result_that_nobody_can_take_is_told() {
    let dir = workplace();
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut inspect = command_with(dir.path(), &["inspect", "model.onnx"]);
    inspect.stdout(full);
    let done = inspect.output().unwrap();
    assert_eq!(code(&done), 5, "{}", stderr(&done));
    assert!(stderr(&done).contains("error[stdout]"), "{}", stderr(&done));
}

#[cfg(feature = "torch")]
mod running {
    use super::*;
    use command::{command, fixture, json};

    fn trained(dir: &Path) {
        let args = [
            "model.onnx",
            "-o",
            "t.onnx",
            "--loss",
            "causal-lm",
            "--policy",
            "full",
        ];
        assert_eq!(code(&call(dir, &args)), 0);
    }

    #[test]
    fn a_full_disk_is_told_by_every_writer_of_the_runtime() {
        let dir = workplace();
        trained(dir.path());
        let run =
            |more: &[&'static str]| [&["run", "t.onnx", "--inputs", "case.npz"], more].concat();
        a_full_disk_leaves_nothing(
            dir.path(),
            &[
                &run(&["--outputs", "o.npz"]),
                &run(&["--outputs", "o.safetensors"]),
                &run(&["--trace", "trace.json"]),
                &["verify", "model.onnx", "t.onnx", "--certificate", "c.json"],
                &[
                    "profile",
                    "model.onnx",
                    "-o",
                    "p.json",
                    "--runs",
                    "1",
                    "--warm-up",
                    "0",
                ],
            ],
        );
    }

    #[test]
    fn a_full_disk_is_told_by_calibrate() {
        let dir = workplace();
        let before = files(dir.path());
        let args = |to: &'static str| {
            let sizes = ["--max-rows", "8", "--vector-bytes", "64", "--runs", "1"];
            [&["calibrate", "--threads", "1", "-o", to], &sizes[..]].concat()
        };
        let done = call(dir.path(), &args("/dev/full"));
        assert_eq!(code(&done), 5, "{}", stderr(&done));
        assert!(stderr(&done).contains("error[write]"), "{}", stderr(&done));
        // What it moves out of memory and back has no room either.
        let done = on_a_full_disk(dir.path(), &args("d.json"), 0);
        assert_eq!(code(&done), 5, "{}", stderr(&done));
        let said = stderr(&done);
        assert!(
            said.contains("error[offload]") && said.contains("TMPDIR"),
            "{said}"
        );
        assert_eq!(files(dir.path()), before);
    }

    /// Ones repeated into `elements` numbers, twice over.
    fn wide(elements: u64) -> String {
        format!(
            "graph @g typed (%x: f32[n]) -> (%y) {{
  init %to : i64[1] = [{elements}]
  %wide = Expand %x, %to : f32[{elements}]
  %y = Exp %wide : f32[{elements}]
}}
"
        )
    }

    #[test]
    fn memory_that_cannot_be_had_is_told() {
        let dir = workplace();
        trained(dir.path());
        for (name, elements) in [
            ("all.ckir", 1 << 50),
            ("large.ckir", 1 << 30),
            ("out.ckir", 1 << 27),
        ] {
            std::fs::write(dir.path().join(name), wide(elements)).unwrap();
        }
        let before = files(dir.path());
        let run = |args: &[&str], room_bytes: Option<u64>| {
            let mut command = command(dir.path());
            command
                .args(["run", "--seed", "1", "--threads", "1"])
                .args(args);
            let done = match room_bytes {
                Some(most) => limited(command, libc::RLIMIT_AS, most).output(),
                None => command.output(),
            };
            let done = done.unwrap();
            let said = stderr(&done);
            assert_eq!(code(&done), 5, "{args:?}: {said}");
            assert!(said.contains("error[memory]"), "{args:?}: {said}");
            assert!(said.lines().count() < 6, "no backtrace: {said}");
            assert_eq!(files(dir.path()), before, "{args:?}");
            said
        };
        // More than any machine has: in results, and in an input that is made up.
        let said = run(&["all.ckir"], None);
        assert!(said.contains("a run takes"), "{said}");
        let said = run(
            &["t.onnx", "--dim", "batch=1000000000000", "--dim", "seq=100"],
            None,
        );
        assert!(said.contains("cannot allocate"), "{said}");
        // More than this process may have: all at once, and single blocks, which name their node.
        let gib = 1 << 30;
        run(&["large.ckir"], Some(3 * gib));
        let said = run(&["large.ckir", "--arena", "off"], Some(3 * gib));
        assert!(
            said.contains("cannot allocate") && said.contains("at: node"),
            "{said}"
        );
        // The result is there, and its copy does not fit.
        let said = run(&["out.ckir", "--outputs", "o.npz"], Some(9 * gib / 4));
        assert!(said.contains("cannot allocate"), "{said}");
        assert!(!said.contains("at: node"), "{said}");
    }

    #[test]
    fn an_input_that_does_not_fit_is_named_with_its_type() {
        use ckpt_opt::tensors::{self, Tensors};
        use ckpt_passes::ir::{DType, Tensor};
        let dir = workplace();
        trained(dir.path());
        let case = tensors::read(&fixture("gpt2", "case.npz")).unwrap();
        let ids = case["in.input_ids"].clone();
        let mut shape = ids.dims.to_vec();
        shape.push(1);
        let wrong: [(&str, &str, Tensor, &[&str]); 4] = [
            (
                "name",
                "ids",
                ids.clone(),
                &["input_ids: i64[batch, seq]", "no inputs: ids"],
            ),
            (
                "dtype",
                "input_ids",
                Tensor::new(
                    DType::F32,
                    ids.dims.clone(),
                    vec![0; 4 * ids.elements() as usize],
                ),
                &["`input_ids`", "expected: i64[batch, seq]", "found: f32["],
            ),
            (
                "rank",
                "input_ids",
                Tensor::new(DType::I64, shape, ids.bytes().unwrap().to_vec()),
                &["`input_ids`", "expected: i64[batch, seq]", ", 1]"],
            ),
            (
                "shape",
                "labels",
                Tensor::new(DType::I64, [1, 3], vec![0; 24]),
                &["`labels`", "expected: i64[batch, seq]", "found: i64[1, 3]"],
            ),
        ];
        for (what, name, tensor, says) in wrong {
            let mut given = Tensors::from([("labels".to_string(), case["labels"].clone())]);
            if what == "shape" {
                given.insert("input_ids".into(), ids.clone());
            }
            given.insert(name.into(), tensor);
            tensors::write(&dir.path().join("wrong.npz"), &given).unwrap();
            let done = call(dir.path(), &["run", "t.onnx", "--inputs", "wrong.npz"]);
            let said = stderr(&done);
            assert_eq!(code(&done), 2, "{what}: {said}");
            assert!(said.contains("error[input]"), "{what}: {said}");
            for part in says {
                assert!(said.contains(part), "{what}: `{part}` in {said}");
            }
        }
    }

    /// Stands in for the libtorch that is loaded where its release is asked for.
    const OTHER: &str = r#"
        #include <string>
        namespace at { std::string show_config() { return "Build settings: X=1, TORCH_VERSION=2.9.1, Y=2"; } }
    "#;

    #[test]
    fn another_release_of_libtorch_is_refused() {
        let dir = workplace();
        std::fs::write(dir.path().join("other.cpp"), OTHER).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let made = Command::new(compiler)
            .args([
                "-shared",
                "-fPIC",
                "-D_GLIBCXX_USE_CXX11_ABI=1",
                "-o",
                "libother.so",
                "other.cpp",
            ])
            .current_dir(dir.path())
            .status()
            .unwrap();
        assert!(made.success());
        let run = |other: bool| {
            let mut command = command(dir.path());
            command.args([
                "run",
                "model.onnx",
                "--inputs",
                "case.npz",
                "--format",
                "json",
            ]);
            if other {
                command.env("LD_PRELOAD", dir.path().join("libother.so"));
            }
            command.output().unwrap()
        };
        json(&run(false));
        let done = run(true);
        let said = stderr(&done);
        assert_eq!(code(&done), 5, "{said}");
        for part in [
            "error[libtorch]",
            "expected: libtorch 2.11.0",
            "found: libtorch 2.9.1",
        ] {
            assert!(said.contains(part), "{said}");
        }
    }
}
