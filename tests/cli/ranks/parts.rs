//! `train` on ranks that each have a part of the layers: the numbers of one process, whatever else they keep slices of.

use super::*;

/// Two ranks that share the layers. Both read the same examples.
const TWO: [&str; 6] = ["--ranks", "2", "--mesh", "tp=2", "--dim", "batch=4"];
/// Two pairs of such ranks, each pair with half of the examples.
const FOUR: [&str; 6] = ["--ranks", "4", "--mesh", "dp=2,tp=2", "--dim", "batch=2"];

/// Each rank has a part of attentions and MLPs, and all have the same examples.
#[test]
fn ranks_with_parts_of_layers_are_one_process() {
    let dir = workplace();
    let dir = dir.path();
    // Four ranks compute the loss in chunks, of the classes that each has, and between the blocks their own tokens.
    // Where a gradient is zero but for rounding, AdamW would take a step of its sign. Without a warm-up, 20 steps of 1e-2 move
    // weights by more than their own size, and what bfloat16 rounds grows with them.
    let common = [
        "--optimizer",
        "adamw:eps=1e-3",
        "--steps",
        "20",
        "--warmup",
        "20",
    ];
    let four = [
        "--ranks",
        "4",
        "--mesh",
        "dp=2,tp=2",
        "--dim",
        "batch=2",
        "--clip",
        "0.7",
        "--tile-loss",
        "3",
        "--sequence-parallel",
    ];
    for (model, ranks, most) in [
        ("llama32", &TWO[..], 1e-5),
        ("llama32", &four, 1e-5),
        ("gpt2", &TWO, 1e-5),
        ("llama32_bf16", &TWO, 1e-2),
    ] {
        let file = format!("{model}.onnx");
        let run = |out: &str, more: &[&str]| {
            let all = [&common[..], more].concat();
            run(dir, &file, "uneven.safetensors", out, &all)
        };
        let [a, b] = ["one", "ranks"].map(|out| format!("{model}-{}-{out}", ranks[1]));
        let clip = if ranks.contains(&"--clip") {
            &["--clip", "0.7"][..]
        } else {
            &[]
        };
        let one = run(&a, &[&["--dim", "batch=4"], clip].concat());
        let report = run(&b, ranks);
        assert_eq!(report["tokens"], one["tokens"], "{b}");
        for (x, y) in losses(dir, &a).iter().zip(losses(dir, &b)) {
            assert!((x - y).abs() <= most * x.abs(), "{b}: loss {y}, not {x}");
        }
        let apart = distance(dir, &a, &b);
        assert!(apart <= most, "{b}: weights {apart:e} apart");
        let peak = |report: &Value| report["peak_bytes"].as_u64().unwrap();
        assert!(peak(&report) < peak(&one), "{b}: takes no less");
    }
}

/// Ranks have different numbers of tokens where these are no multiple of the ranks, and one has none. To gather them again changes
/// no bit.
#[test]
fn ranks_share_any_number_of_tokens() {
    let dir = workplace();
    let dir = dir.path();
    let tokens: Vec<u8> = (0..330)
        .flat_map(|i| [(7 * i * i + i) as u8 % 50, 0])
        .collect();
    std::fs::write(dir.join("tokens.bin"), tokens).unwrap();
    let run = |out: &str, more: &[&str]| {
        let base = [
            "train",
            "gpt2.onnx",
            "--loss",
            "causal-lm",
            "--data",
            "tokens.bin",
        ];
        let size = ["--dim", "batch=1", "--dim", "seq=5", "--policy", "none"];
        let steps = [
            "--steps",
            "6",
            "--optimizer",
            "adamw:eps=1e-3",
            "--threads",
            "1",
        ];
        let out = ["--lr", "1e-2", "--format", "json", "--out", out];
        let report = json(&call(dir, &[&base[..], &size, &steps, &out, more].concat()));
        for rank in report["ranks"].as_array().unwrap() {
            assert_eq!(rank["peak_bytes"], rank["predicted_peak_bytes"]);
        }
    };
    run("one", &[]);
    let ranks = ["--ranks", "4", "--mesh", "tp=4", "--sequence-parallel"];
    run("rows", &ranks);
    let gathered = ["--recompute-ops", "GatherRows"];
    run("again", &[&ranks[..], &gathered].concat());
    assert!(weights(dir, "rows") == weights(dir, "again"));
    let apart = distance(dir, "one", "rows");
    assert!(apart <= 1e-5, "weights {apart:e} apart");
}

/// What all ranks of a group would keep alike, each keeps a slice of.
#[test]
fn slices_of_kept_results_change_no_bit() {
    let dir = workplace();
    let dir = dir.path();
    let data = "uneven.safetensors";
    let sliced = [&FOUR[..], &["--shard", "params"]].concat();
    let budget = ["--budget", "85%", "--effort", "first"];
    for (model, ranks, plan) in [
        ("llama32", &TWO[..], &[][..]),
        ("llama32", &sliced, &["--policy", "selective"]),
        ("gpt2", &FOUR, &budget),
        ("llama32_bf16", &TWO, &["--policy", "none"]),
    ] {
        let file = format!("{model}.onnx");
        let run = |out: &str, more: &[&str]| {
            let out = format!("{model}-{}-{}-{out}", ranks[1], plan.join(""));
            let mut all = args(&file, data, &out, &["--steps", "6"]);
            if !plan.is_empty() {
                let at = all.iter().position(|word| *word == "--policy").unwrap();
                all.drain(at..at + 2);
            }
            let all = [&all[..], ranks, plan, more].concat();
            let report = json(&call(dir, &all));
            for rank in report["ranks"].as_array().unwrap() {
                assert_eq!(rank["peak_bytes"], rank["predicted_peak_bytes"], "{out}");
            }
            (report["peak_bytes"].as_u64().unwrap(), weights(dir, &out))
        };
        let (most, whole) = run("whole", &[]);
        let (peak, same) = run("slices", &["--offload", "ranks"]);
        assert!(same == whole, "{model}, {plan:?}: slices change bits");
        if plan.first() != Some(&"--budget") {
            assert!(peak < most, "{model}, {plan:?}: {peak}, not below {most}");
        }
    }
    let plan = |offload: &str, mesh: &[&str]| {
        let all = [
            "plan",
            "gpt2.onnx",
            "--loss",
            "causal-lm",
            "--format",
            "json",
        ];
        let all = [&all[..], &["--policy", "none", "--offload", offload], mesh].concat();
        call(dir, &all)
    };
    for mesh in [&[][..], &["--mesh", "dp=2"]] {
        let done = plan("ranks", mesh);
        assert_eq!(code(&done), 2, "{mesh:?}");
        let says = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(says.contains("no ranks to keep slices"), "{says}");
    }
    let report = |offload: &str| json(&plan(offload, &["--mesh", "tp=2"]));
    let (sliced, whole) = (report("ranks"), report("none"));
    assert!(sliced["slice_bytes"].as_u64().unwrap() > 0);
    let link = |report: &Value| report["link_bytes"].as_u64().unwrap();
    // What a rank does not keep it receives: half of each result.
    let received = link(&sliced) - link(&whole);
    assert!(received >= sliced["slice_bytes"].as_u64().unwrap());
}

/// Of ranks that have the same part of a layer, each keeps a slice of it.
#[test]
fn slices_of_parts_change_no_bit() {
    let dir = workplace();
    let dir = dir.path();
    let data = "uneven.safetensors";
    for (model, shards) in [
        ("llama32", &["grads", "params"][..]),
        ("llama32_bf16", &["params"]),
    ] {
        let file = format!("{model}.onnx");
        let run = |out: &str, more: &[&str]| {
            let out = format!("{model}-{out}");
            let all = [&FOUR[..], &["--steps", "20", "--eval-data", data], more].concat();
            let report = run(dir, &file, data, &out, &all);
            let peak = report["peak_bytes"].as_u64().unwrap();
            (peak, report["eval_loss"].clone(), weights(dir, &out))
        };
        let (most, eval, summed) = run("ddp", &[]);
        for shard in shards {
            let (peak, same_eval, same) = run(shard, &["--shard", shard]);
            assert!(same == summed, "{model}: {shard} differs from DDP");
            assert_eq!(same_eval, eval, "{model}: {shard}");
            assert!(peak < most, "{model}: {shard} takes no less");
        }
    }
}

/// A checkpoint of slices of parts is whole, and goes on with the same bits and on any other ranks.
#[test]
fn slices_of_parts_are_whole_in_checkpoints() {
    let dir = workplace();
    let dir = dir.path();
    let (model, data) = ("llama32_bf16.onnx", "even.safetensors");
    let of = |steps: &'static str, more: &[&'static str]| {
        [&["--steps", steps, "--shard", "params"], &FOUR[..], more].concat()
    };
    run(dir, model, data, "whole", &of("6", &[]));
    run(dir, model, data, "halves", &of("3", &[]));
    let step = |out: &str| dir.join(out).join("checkpoints/step-3");
    run(
        dir,
        model,
        data,
        "one",
        &["--dim", "batch=4", "--steps", "3"],
    );
    assert_eq!(
        command::files(&step("halves")),
        command::files(&step("one"))
    );
    for file in ["parameters.safetensors", "states.safetensors"] {
        let names = |out: &str| {
            let read = tensors::read(&step(out).join(file)).unwrap();
            let types = read.into_iter().map(|(name, t)| (name, t.dtype, t.dims));
            types.collect::<Vec<_>>()
        };
        assert_eq!(names("halves"), names("one"), "{file}");
    }
    let two = ["--ranks", "2", "--steps", "4"];
    goes_on_elsewhere(
        dir,
        (model, data),
        &[
            ("alone", &["--dim", "batch=4", "--steps", "4"][..]),
            (
                "tp",
                &[&two[..], &["--dim", "batch=4", "--mesh", "tp=2"]].concat(),
            ),
            (
                "dp",
                &[&two[..], &["--dim", "batch=2", "--shard", "grads"]].concat(),
            ),
        ],
    );
    run(dir, model, data, "halves", &of("6", &["--resume"]));
    assert!(weights(dir, "whole") == weights(dir, "halves"));
    assert_eq!(losses(dir, "whole"), losses(dir, "halves"));
    // The other way round: slices of parts begin from files of slices.
    let sliced = ["--dim", "batch=2", "--ranks", "2", "--shard", "grads"];
    run(
        dir,
        model,
        data,
        "sliced",
        &[&sliced[..], &["--steps", "3"]].concat(),
    );
    let all = of("4", &["--resume"]);
    let report = run(dir, model, data, "sliced", &all);
    assert_eq!(report["resumed_from"], 3);
    let (before, after) = (losses(dir, "whole")[3], losses(dir, "sliced")[3]);
    assert!(
        (before - after).abs() <= 1e-2 * before,
        "{after}, not {before}"
    );
}

/// Adapters of layers that ranks share: of each pair, the matrix that the part of the layer runs through is in parts.
#[test]
fn adapters_of_parts_of_layers_are_those_of_one_process() {
    let dir = workplace();
    let dir = dir.path();
    let data = "uneven.safetensors";
    for (model, targets) in [("llama32", "*_proj"), ("gpt2", "c_attn,c_proj,c_fc")] {
        let file = format!("{model}.onnx");
        let lora = format!("r=2,alpha=8,targets={targets}");
        let common = [
            "--lora",
            &lora,
            "--optimizer",
            "adamw:eps=1e-3",
            "--eval-data",
            data,
        ];
        let run = |out: &str, more: &[&str]| {
            let all = [&common[..], more].concat();
            run(dir, &file, data, &format!("{model}-{out}"), &all)
        };
        let steps = ["--steps", "20"];
        let peak = |report: &Value| report["peak_bytes"].as_u64().unwrap();
        let one = run("one", &[&steps[..], &["--dim", "batch=4"]].concat());
        let parts = run("parts", &[&steps[..], &TWO].concat());
        assert!(peak(&parts) < peak(&one), "{model}");
        let mesh = run("mesh", &[&steps[..], &FOUR].concat());
        run(
            "slices",
            &[&steps[..], &FOUR, &["--shard", "params"]].concat(),
        );
        let of = |out: &str| format!("{model}-{out}");
        assert!(weights(dir, &of("mesh")) == weights(dir, &of("slices")));
        for (out, report) in [("parts", &parts), ("mesh", &mesh)] {
            let apart = distance(dir, &of("one"), &of(out));
            assert!(apart <= 1e-5, "{model}, {out}: weights {apart:e} apart");
            let eval = |report: &Value| report["eval_loss"].as_f64().unwrap();
            let (x, y) = (eval(&one), eval(report));
            assert!((x - y).abs() <= 1e-5 * x, "{model}, {out}: {y}, not {x}");
        }
        // Adapters move, and the checkpoint has them alone.
        let adapter = |out: &str| {
            let file = dir.join(of(out)).join("adapter/adapter_model.safetensors");
            tensors::read(&file).unwrap()
        };
        let names = |out: &str| adapter(out).into_keys().collect::<Vec<_>>();
        assert_eq!(names("one"), names("parts"));
        let saved = |out: &str| {
            let step = dir.join(of(out)).join("checkpoints/step-20");
            ["parameters", "states"].map(|name| {
                let read = tensors::read(&step.join(format!("{name}.safetensors"))).unwrap();
                let types = read.into_iter().map(|(name, t)| (name, t.dims));
                types.collect::<Vec<_>>()
            })
        };
        assert_eq!(saved("one"), saved("parts"), "{model}");
        // One process goes on from there, and the ranks from its checkpoint.
        let more = [&["--steps", "22", "--resume"][..], &["--dim", "batch=4"]].concat();
        run("parts", &more);
        run(
            "parts",
            &[&["--steps", "24", "--resume"][..], &TWO].concat(),
        );
    }
}

/// Weights that are frozen are in parts too, and stay as they are.
#[test]
fn frozen_weights_are_in_parts_and_stay() {
    let dir = workplace();
    let dir = dir.path();
    let data = "even.safetensors";
    let common = [
        "--dim",
        "batch=4",
        "--steps",
        "6",
        "--freeze",
        "*_proj*",
        "--eval-data",
        data,
    ];
    let one = run(dir, "llama32.onnx", data, "one", &common);
    let two = [&common[..], &["--ranks", "2", "--mesh", "tp=2"]].concat();
    let parts = run(dir, "llama32.onnx", data, "parts", &two);
    let apart = distance(dir, "one", "parts");
    assert!(apart <= 1e-5, "weights {apart:e} apart");
    let peak = |report: &Value| report["peak_bytes"].as_u64().unwrap();
    assert!(peak(&parts) < peak(&one));
    let read = |out: &str| tensors::read(&dir.join(out).join("model.safetensors")).unwrap();
    let (one, parts) = (read("one"), read("parts"));
    let frozen: Vec<_> = one.keys().filter(|name| name.contains("_proj")).collect();
    assert!(frozen.len() >= 7);
    assert!(frozen.iter().all(|name| one[*name] == parts[*name]));
}

/// A checkpoint of ranks that have parts of layers is that of one process.
#[test]
fn parts_of_layers_are_whole_in_checkpoints() {
    let dir = workplace();
    let dir = dir.path();
    let data = "even.safetensors";
    let bf16 = "llama32_bf16.onnx";
    let eval = ["--eval-data", data];
    let of = |steps: &'static str, more: &[&'static str]| {
        [&["--steps", steps], &TWO[..], &eval[..], more].concat()
    };
    run(dir, bf16, data, "whole", &of("6", &[]));
    run(dir, bf16, data, "halves", &of("3", &[]));
    let step = |out: &str| dir.join(out).join("checkpoints/step-3");
    let expected = [
        "manifest.json",
        "parameters.safetensors",
        "states.safetensors",
    ];
    assert_eq!(command::files(&step("halves")), expected);
    let one = ["--dim", "batch=4", "--steps", "3"];
    run(dir, bf16, data, "one", &[&one[..], &eval].concat());
    for file in ["parameters.safetensors", "states.safetensors"] {
        let names = |out: &str| {
            let read = tensors::read(&step(out).join(file)).unwrap();
            let types = read.into_iter().map(|(name, t)| (name, t.dtype, t.dims));
            types.collect::<Vec<_>>()
        };
        assert_eq!(names("halves"), names("one"), "{file}");
    }
    goes_on_elsewhere(
        dir,
        (bf16, data),
        &[
            ("alone", &["--dim", "batch=4", "--steps", "4"][..]),
            (
                "dp",
                &[
                    "--dim", "batch=2", "--steps", "4", "--ranks", "2", "--shard", "grads",
                ],
            ),
            (
                "four",
                &[
                    "--dim",
                    "batch=2",
                    "--steps",
                    "4",
                    "--ranks",
                    "4",
                    "--mesh",
                    "dp=2,tp=2",
                ],
            ),
        ],
    );
    run(dir, bf16, data, "halves", &of("6", &["--resume"]));
    assert!(weights(dir, "whole") == weights(dir, "halves"));
    assert_eq!(losses(dir, "whole"), losses(dir, "halves"));
}

/// A rank of a tensor-parallel mesh that has planned otherwise ends both at once: the plans would not exchange the same.
#[test]
fn a_rank_with_another_plan_of_its_parts_ends_both_before_a_step() {
    let dir = workplace();
    let dir = dir.path();
    let common = ["--mesh", "tp=2", "--dim", "batch=2", "--steps", "2"];
    for (i, (changed, what)) in [
        (&["--layers", "0"][..], "plan"),
        (&["--recompute-ops", "MatMul"], "plan"),
        (&["--offload", "ranks"], "plan"),
        (&["--freeze", "*norm*"], "model"),
    ]
    .into_iter()
    .enumerate()
    {
        let all = args("llama32.onnx", "even.safetensors", "out", &common);
        let other = [&all[..], changed].concat();
        let store = dir.join(format!("store-{i}"));
        let store = [("CKPT_OPT_STORE", store.to_str().unwrap())];
        let ranks = [&other, &all].map(|all| rank(dir, (all != &other).into(), all, &store));
        let [first, second] = ranks.map(ended_at);
        for (done, _) in [&first, &second] {
            assert_eq!(code(done), 5, "{what}: {}", stderr(done));
            let says = format!("the same {what}");
            assert!(stderr(done).contains(&says), "{}", stderr(done));
        }
        let apart = first.1.max(second.1) - first.1.min(second.1);
        assert!(apart < Duration::from_secs(2), "{what}: {apart:?}");
        let steps = std::fs::read(dir.join("out").join(metrics::FILE));
        assert!(steps.is_err(), "{what}: no step may have run");
    }
}

/// As [`ended`], and when that was.
fn ended_at(child: Child) -> (Output, Instant) {
    (ended(child), Instant::now())
}
