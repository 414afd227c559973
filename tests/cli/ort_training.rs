//! `train --export ort-training` and `convert --to ort-training`; and ONNX Runtime's own steps with what they wrote.

use crate::support::command;
use crate::training::{args, done, fails, words, workplace};

use ckpt_opt::tensors::{self, Tensors};
use ckpt_passes::ir::{DType, Tensor};
use command::{fixture, json};
use std::path::Path;
use std::process::Command;

/// A Python that has onnxruntime-training, NumPy, and no onnxruntime beside it.
const PYTHON: &str = "CKPT_OPT_ORT_TRAINING";
const FILES: [&str; 4] = [
    "checkpoint",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "training_model.onnx",
];

#[test]
fn a_run_leaves_what_onnx_runtime_trains_on_with() {
    let dir = workplace();
    let more = ["--steps 2 --export ort-training --format json"];
    let report = json(&done(dir.path(), &args("run", &more)));
    let said = report["warnings"].to_string();
    assert!(said.contains("decays all parameters alike"), "{said}");
    let folder = dir.path().join("run/ort-training");
    let mut files = command::files(&folder);
    files.sort();
    assert_eq!(files, FILES);
    // The same plan by hand, with the weights of the checkpoint.
    let plan = "model.onnx -o t.onnx --loss causal-lm --dim batch=2 --dim seq=16 --policy full --drop-output * -q";
    done(dir.path(), &words(plan));
    let convert = "convert t.onnx run/checkpoints/step-2 --to ort-training -o made --format json";
    let made = json(&done(dir.path(), &words(convert)));
    assert!(made["changed"].as_u64().unwrap() > 10, "{made}");
    for file in ["checkpoint", "eval_model.onnx", "optimizer_model.onnx"] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert_eq!(read(&folder), read(&dir.path().join("made")), "{file}");
    }
    let quiet = ["--steps 2 --export ort-training --weight-decay 0 --format json"];
    let report = json(&done(dir.path(), &args("quiet", &quiet)));
    assert_eq!(report["warnings"].as_array().unwrap().len(), 0, "{report}");
}

#[test]
fn what_cannot_be_exported_is_refused_before_the_first_step() {
    let dir = workplace();
    let more = ["--steps 2 --export ort-training --optimizer lion"];
    fails(
        dir.path(),
        &args("run", &more),
        2,
        &["[ort-training]", "found: lion"],
    );
    assert!(!dir.path().join("run/model.safetensors").exists());
    let onnx = words("convert model.onnx --to onnx -o o.onnx --optimizer adamw");
    fails(
        dir.path(),
        &onnx,
        2,
        &["[convert]", "leave --optimizer out"],
    );
    let forward = words("convert model.onnx --to ort-training -o made");
    fails(
        dir.path(),
        &forward,
        2,
        &["no backward pass", "make one first"],
    );
}

/// Three steps of ONNX Runtime from the folder, against three of ours with the optimizer in the graph.
#[test]
#[ignore = "needs CKPT_OPT_ORT_TRAINING, a Python 3.11 with onnxruntime-training 1.19.2 (see `python tools ort_training --help`)"]
fn onnx_runtime_trains_as_we_do() {
    let python = std::env::var(PYTHON).expect(PYTHON);
    let dir = tempfile::tempdir().unwrap();
    let optimizer = "adamw:eps=1e-3,weight_decay=0.1";
    for model in ["gpt2", "llama32"] {
        let source = fixture(model, "model.onnx").display().to_string();
        let plan = "--loss causal-lm --policy full --drop-output * -q";
        let plan = |file: &str| format!("{source} -o {file} {plan}");
        done(dir.path(), &words(&plan("t.onnx")));
        done(
            dir.path(),
            &words(&format!("{} --optimizer {optimizer}", plan("o.onnx"))),
        );
        let convert =
            format!("convert t.onnx --to ort-training --optimizer {optimizer} -o made -q");
        done(dir.path(), &words(&convert));
        let ids: Vec<u8> = (0..32i64)
            .flat_map(|i| (i * 7 % 50).to_le_bytes())
            .collect();
        let ids = Tensor::new(DType::I64, [2, 16], ids);
        let mut batch = Tensors::from([("input_ids".into(), ids.clone()), ("labels".into(), ids)]);
        batch.insert("lr".into(), Tensor::scalar(DType::F32, 0.01));
        batch.insert("step".into(), Tensor::int(1));
        tensors::write(&dir.path().join("batch.npz"), &batch).unwrap();
        done(
            dir.path(),
            &words("run o.onnx --inputs batch.npz --steps 3 --warm-up 0 --outputs run.npz -q"),
        );
        for more in [&[][..], &["--keep-recomputation"]] {
            let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("tools");
            let run = Command::new(&python)
                .arg(tools)
                .args(words(
                    "ort_training made --inputs batch.npz --lr 0.01 --expect run.npz",
                ))
                .args(more)
                .current_dir(dir.path())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&run.stdout);
            assert!(
                run.status.success(),
                "{said}{}",
                String::from_utf8_lossy(&run.stderr)
            );
            assert!(said.contains("parameters and the loss"), "{said}");
        }
    }
}
