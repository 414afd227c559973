//! Pairs of PyTorch's kernels of attention, by the one that a CPU has: it goes the same way as those of a device.
use crate::support::torch;

use ckpt_opt::frontend::given::Given;
use ckpt_opt::frontend::load;
use ckpt_opt::runtime::convert;
use ckpt_opt::runtime::executor::Program;
use ckpt_opt::runtime::kernels::attention::check::{CheckedCase, judge};
use ckpt_opt::runtime::kernels::attention::sdpa;
use ckpt_opt::runtime::kernels::{self, KernelCx};
use ckpt_opt::tensors::random;
use ckpt_passes::analysis::sdpa::choice::AttentionKernels;
use ckpt_passes::analysis::sdpa::{SdpaBackend, SdpaBackends};
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{Attrs, DType, Graph, OpDef, Phase, Ty};
use ckpt_passes::ops::attention::{ATTENTION, ATTENTION_GRAD};
use ckpt_passes::ops::{Builder, EmitExt};
use ckpt_passes::plan::Policy;
use ckpt_passes::text;
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Tensor};

fn of_the_cpu() -> SdpaBackends {
    SdpaBackends {
        list: vec![SdpaBackend::Cpu],
        ..SdpaBackends::default()
    }
}

const TYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

fn kindred(dtype: DType, size: i64, causal: bool, grouped: bool) -> CheckedCase {
    CheckedCase {
        dtype,
        size,
        value_size: size,
        causal,
        grouped,
    }
}

#[test]
fn the_cpu_has_a_pair_that_passes_the_check() {
    torch::alone();
    for dtype in TYPES {
        for (size, causal, grouped) in [
            (64, true, false),
            (64, false, true),
            (40, true, true),
            (128, false, false),
        ] {
            let kindred = kindred(dtype, size, causal, grouped);
            let verdict = judge(kindred, Device::Cpu, &|cx| sdpa::run(SdpaBackend::Cpu, cx));
            assert_eq!(verdict, Ok(()), "{kindred:?}");
        }
    }
}

/// The check of a pair that goes wrong in one way: a result, by position, is changed.
fn verdict(dtype: DType, at: usize, change: impl Fn(&Tensor) -> Tensor) -> String {
    let broken = |cx: &KernelCx| {
        let mut results = sdpa::run(SdpaBackend::Cpu, cx)?;
        let first = if cx.op == &ATTENTION_GRAD { 2 } else { 0 };
        if let Some(result) = at.checked_sub(first).and_then(|i| results.get_mut(i)) {
            *result = change(result);
        }
        Ok(results)
    };
    let verdict = judge(kindred(dtype, 64, true, true), Device::Cpu, &broken);
    verdict.expect_err(&format!("{dtype}, result {at}"))
}

#[test]
fn a_broken_pair_is_refused() {
    torch::alone();
    let names = ["the result", "the log-sum-exp", "dq", "dk", "dv"];
    // Too large by more than rounding in every place together.
    for (dtype, factor) in [(DType::F32, 1.02), (DType::BF16, 1.5)] {
        for (at, name) in names.iter().enumerate() {
            let larger = |x: &Tensor| x * factor;
            let nothing = |x: &Tensor| x.zeros_like();
            let no_number = |x: &Tensor| {
                let y = x.copy();
                let _ = y.flatten(0, -1).get(17).fill_(f64::NAN);
                y
            };
            let changes: [&dyn Fn(&Tensor) -> Tensor; 3] = [&larger, &nothing, &no_number];
            for change in changes {
                let why = verdict(dtype, at, change);
                assert!(why.starts_with(name) && why.contains("rounding"), "{why}");
            }
        }
    }
    // Other bits each time, however few.
    let calls = std::cell::Cell::new(0);
    let why = verdict(DType::F32, 2, |x| {
        calls.set(calls.get() + 1);
        x * (1.0 + f64::from(calls.get()) * 2e-7)
    });
    assert!(why.contains("other bits"), "{why}");
    let why = verdict(DType::F32, 2, |x| x.to_kind(Kind::Double));
    assert!(why.contains("dq is no row-major Float"), "{why}");
    let refusal = |_: &KernelCx| Err(ckpt_passes::Error::bug("torch", "not on this device"));
    let why = judge(kindred(DType::F32, 64, true, false), Device::Cpu, &refusal).unwrap_err();
    assert!(why.contains("not on this device"), "{why}");
    // The causal mask at the other end.
    let other = |cx: &KernelCx| {
        let attrs = cx.attrs.clone().with("causal", 0);
        sdpa::run(
            SdpaBackend::Cpu,
            &KernelCx {
                attrs: &attrs,
                ..*cx
            },
        )
    };
    assert!(judge(kindred(DType::BF16, 64, true, false), Device::Cpu, &other).is_err());
}

/// One node on operands as they lie.
struct One {
    graph: Graph,
    feed: BTreeMap<String, Tensor>,
}

impl One {
    fn new(row: &'static OpDef, attrs: &Attrs, ins: &[&Tensor], outs: usize) -> One {
        let mut graph = Graph::new("one");
        let mut feed = BTreeMap::new();
        let mut slots = Vec::new();
        for (i, x) in ins.iter().enumerate() {
            let dims: Vec<ckpt_passes::ir::Dim> = x.size().into_iter().map(Into::into).collect();
            let name = format!("x{i}");
            let ty = Ty::new(convert::dtype(x.kind()).unwrap(), dims);
            slots.push(Some(graph.add_input(&name, Some(ty))));
            feed.insert(name, x.shallow_clone());
        }
        // The same node twice, as a node and its copy.
        let mut b = Builder::new(&mut graph);
        let mut all = Vec::new();
        for _ in 0..2 {
            let made = b.emit_n(row, slots.clone(), attrs.clone(), outs);
            all.extend(made.unwrap_or_else(|e| panic!("{e}")));
        }
        graph.set_outputs(all);
        graph.phase = Phase::Typed;
        One { graph, feed }
    }

    /// Results, and which kernels gave them.
    fn run(&self, available: SdpaBackends) -> (Vec<Tensor>, AttentionKernels) {
        let mut program = Program::new(&self.graph).unwrap();
        program.attend_with(available);
        let taken = program.specialization(&self.feed).unwrap().taken();
        let run = program.run(&self.feed).unwrap_or_else(|e| panic!("{e}"));
        (run.outputs.into_iter().map(|(_, x)| x).collect(), taken)
    }
}

fn close(found: &Tensor, expected: &Tensor, kind: Kind, what: &str) {
    let allowed = match kind {
        Kind::Double => 1e-12,
        Kind::Float => 1e-5,
        Kind::Half => 4.0 / 2048.0,
        _ => 4.0 / 256.0,
    };
    assert_eq!(found.size(), expected.size(), "{what}");
    assert_eq!(found.kind(), expected.kind(), "{what}");
    let (a, b) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let gap = (&a - &b).abs().max().double_value(&[]);
    let largest = b.abs().max().double_value(&[]).max(0.5);
    assert!(gap <= allowed * largest, "{what}: {gap} of {largest}");
}

/// q, k, v and dy of some axes, with heads inside where there are heads.
fn operands(lead: &[i64], heads: Option<[i64; 2]>, rows: [i64; 2], size: i64) -> [Tensor; 4] {
    tch::manual_seed(11);
    let make = |head: usize, rows: i64| {
        let mut dims = lead.to_vec();
        match heads {
            None => dims.extend([rows, size]),
            Some(heads) => dims.extend([rows, heads[head], size]),
        }
        let x = Tensor::randn(&dims, (Kind::Double, Device::Cpu));
        match heads {
            None => x,
            Some(_) => x.transpose(-2, -3),
        }
    };
    [
        make(0, rows[0]),
        make(1, rows[1]),
        make(1, rows[1]),
        make(0, rows[0]),
    ]
}

/// Leading axes, query and key heads, queries and keys, size of a head, causal or not.
type Case = (&'static [i64], Option<[i64; 2]>, [i64; 2], i64, i64);

#[test]
fn nodes_by_a_pair_give_what_tiles_give() {
    torch::alone();
    let cases: [Case; 7] = [
        (&[2], Some([4, 4]), [90, 90], 24, 1),
        (&[2], Some([4, 2]), [90, 90], 24, 1),
        (&[2], Some([4, 2]), [90, 130], 16, 0),
        (&[2, 3], Some([2, 1]), [40, 40], 8, 1),
        (&[], Some([2, 2]), [70, 70], 12, 1),
        (&[], None, [50, 60], 8, 0),
        (&[1], Some([1, 1]), [1, 1], 8, 1),
    ];
    for (lead, heads, rows, size, causal) in cases {
        for dtype in TYPES {
            let what = format!("{lead:?} {heads:?} {rows:?} {size} {causal} {dtype}");
            let kind = convert::kind(dtype).unwrap();
            let [q, k, v, dy] = operands(lead, heads, rows, size).map(|x| x.to_kind(kind));
            let attrs = Attrs::new().with("scale", 0.25f32).with("causal", causal);
            let back = attrs.clone().with("wants", vec![0, 1, 2]);
            for (row, attrs, ins, outs) in [
                (&ATTENTION, &attrs, vec![&q, &k, &v], 2),
                (&ATTENTION_GRAD, &back, vec![&dy, &q, &k, &v], 3),
            ] {
                let one = One::new(row, attrs, &ins, outs);
                let (found, taken) = one.run(of_the_cpu());
                assert_eq!((taken.flash, taken.tiles), (2, 0), "{what}");
                let (expected, taken) = one.run(SdpaBackends::default());
                assert_eq!((taken.flash, taken.tiles), (0, 2), "{what}");
                for i in 0..outs {
                    close(
                        &found[i],
                        &expected[i],
                        kind,
                        &format!("{} {i} {what}", row.name),
                    );
                    let copy = &found[outs + i];
                    assert!(torch::same_bits(&found[i], copy), "{} {i} {what}", row.name);
                    assert!(found[i].is_contiguous());
                }
            }
        }
    }
}

/// The tiles' block is not taken by a pair: what a run predicts is what the pair takes.
#[test]
fn a_run_predicts_the_blocks_of_its_kernels() {
    torch::alone();
    let [q, k, v, dy] = operands(&[2], Some([4, 2]), [64, 64], 16).map(|x| x.to_kind(Kind::Float));
    let attrs = Attrs::new().with("causal", 1).with("wants", vec![0, 1, 2]);
    let one = One::new(&ATTENTION_GRAD, &attrs, &[&dy, &q, &k, &v], 3);
    let memory = |available: SdpaBackends| {
        let mut program = Program::new(&one.graph).unwrap();
        program.attend_with(available);
        let feed = one.feed.iter().map(|(n, x)| (n.clone(), x.contiguous()));
        program
            .specialization(&feed.collect())
            .unwrap()
            .memory
            .clone()
    };
    let (pair, tiles) = (memory(of_the_cpu()), memory(SdpaBackends::default()));
    // Result, log-sum-exp, and as every gradient comes turned a copy of the largest, or the forward beside all.
    let q_bytes = 2 * 4 * 64 * 16 * 4;
    assert_eq!(pair.temp_bytes, [q_bytes + 2 * 4 * 64 * 4; 2]);
    assert!(tiles.temp_bytes[0] > 0 && tiles.temp_bytes != pair.temp_bytes);
    for memory in [&pair, &tiles] {
        let most = memory.timeline_bytes.iter().max().unwrap();
        assert_eq!(memory.peak_bytes, memory.static_bytes + most);
        assert_eq!(memory.at, Some(one.graph.order()[1]));
    }
    assert_eq!(
        pair.peak_bytes + tiles.temp_bytes[1],
        tiles.peak_bytes + pair.temp_bytes[1]
    );
}

/// Only some gradients are wanted, and the result alone.
#[test]
fn what_is_not_wanted_is_left_out() {
    torch::alone();
    let [q, k, v, dy] = operands(&[2], Some([2, 2]), [40, 40], 8).map(|x| x.to_kind(Kind::Float));
    let all = Attrs::new().with("causal", 1).with("wants", vec![0, 1, 2]);
    let all = One::new(&ATTENTION_GRAD, &all, &[&dy, &q, &k, &v], 3);
    let all = all.run(of_the_cpu()).0;
    for wants in [vec![0], vec![1], vec![0, 2], vec![2]] {
        let attrs = Attrs::new().with("causal", 1).with("wants", wants.clone());
        let some = One::new(&ATTENTION_GRAD, &attrs, &[&dy, &q, &k, &v], wants.len());
        for (want, found) in wants.iter().zip(some.run(of_the_cpu()).0) {
            assert!(torch::same_bits(&found, &all[*want as usize]), "{want}");
        }
    }
}

/// What the library would do otherwise stays in tiles.
#[test]
fn what_a_pair_does_not_mean_takes_tiles() {
    torch::alone();
    let [q, k, v, _] = operands(&[2], Some([2, 2]), [20, 30], 8).map(|x| x.to_kind(Kind::Float));
    let bias = Tensor::zeros([30], (Kind::Float, Device::Cpu));
    let causal = Attrs::new().with("causal", 1);
    let cap = Attrs::new().with("softcap", 3.0f32);
    let window = Attrs::new().with("window_left", 5);
    let none = Attrs::new();
    for (attrs, ins) in [
        (&causal, vec![&q, &k, &v]),
        (&cap, vec![&q, &k, &v]),
        (&window, vec![&q, &k, &v]),
        (&none, vec![&q, &k, &v, &bias]),
    ] {
        let one = One::new(&ATTENTION, attrs, &ins, 1);
        let (found, taken) = one.run(of_the_cpu());
        assert_eq!((taken.flash, taken.tiles), (0, 2), "{attrs:?}");
        let expected = one.run(SdpaBackends::default()).0;
        assert!(torch::same_bits(&found[0], &expected[0]), "{attrs:?}");
    }
}

/// A step with every layer computed again takes the pair for nodes, copies and gradients alike: the same bits as without a
/// plan, and others than those of tiles.
#[test]
fn a_plan_changes_no_bit_of_a_pair() {
    torch::alone();
    let dims = vec![("batch".to_string(), 2), ("seq".to_string(), 24)];
    let run = |policy: Policy, available: Option<SdpaBackends>| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/llama32/model.onnx");
        let mut graph = load(&path, &Given::default()).unwrap().graph;
        let request = Request {
            loss: Loss::parse("causal-lm").unwrap(),
            plan: policy.into(),
            dims: dims.clone(),
            fuse: true,
            ..Request::default()
        };
        compile(&mut graph, &request, &mut Watch::default()).unwrap();
        let inputs = random::inputs(&graph, &dims, 3).unwrap();
        let inputs: BTreeMap<String, Tensor> = inputs
            .iter()
            .map(|(name, x)| (name.clone(), convert::tensor(name, x).unwrap()))
            .collect();
        let mut program = Program::new(&graph).unwrap();
        if let Some(available) = available {
            program.attend_with(available);
        }
        let taken = program.specialization(&inputs).unwrap().taken();
        let outputs = program.run(&inputs).unwrap().outputs;
        let outputs: BTreeMap<String, Tensor> = outputs.into_iter().collect();
        (outputs, taken)
    };
    let (plain, few) = run(Policy::NONE, Some(of_the_cpu()));
    let (again, many) = run(Policy::FULL, Some(of_the_cpu()));
    assert!(few.flash > 1 && few.tiles == 0, "{few:?}");
    assert!(many.flash > few.flash && many.tiles == 0, "{many:?}");
    let (tiles, none) = run(Policy::NONE, None);
    assert_eq!((none.flash, none.tiles), (0, few.flash));
    let mut other_bits = 0;
    for (name, x) in &plain {
        assert!(torch::same_bits(x, &again[name]), "{name}");
        close(x, &tiles[name], Kind::Float, name);
        other_bits += u32::from(!torch::same_bits(x, &tiles[name]));
    }
    assert!(other_bits > 0, "the pair was never run");
}

/// A step compiled for a device whose kernels read the saved result and log-sum-exp: each forward runs once without a plan,
/// and a plan that computes it again changes no bit.
#[test]
fn a_gradient_reads_saved_results() {
    torch::alone();
    let mut source = String::from(
        "graph @g imported (%x0: bf16[2, 70, 64]) -> (%x3) {
  init %heads : i64[4] = [2, 70, 4, 16]
  init %rows : i64[3] = [2, 70, 64]
",
    );
    for i in 0..3 {
        for name in ["q", "k", "v", "o"] {
            source += &format!("  init %w{name}{i} : bf16[64, 64] = splat 0.03125\n");
        }
        for name in ["q", "k", "v"] {
            source += &format!(
                "  %{name}m{i} = MatMul %x{i}, %w{name}{i}
  %{name}r{i} = Reshape %{name}m{i}, %heads
  %{name}{i} = Transpose %{name}r{i} {{perm=[0, 2, 1, 3]}}
"
            );
        }
        source += &format!(
            "  %y{i} = Attention %q{i}, %k{i}, %v{i} {{causal=1, scale=0.25}}
  %t{i} = Transpose %y{i} {{perm=[0, 2, 1, 3]}}
  %r{i} = Reshape %t{i}, %rows
  %o{i} = MatMul %r{i}, %wo{i}
  %x{} = Add %x{i}, %o{i}
",
            i + 1
        );
    }
    source += "}\n";
    let compiled = |policy: Policy, device: ckpt_passes::analysis::Device| {
        let mut graph = text::parse(&source).unwrap();
        let request = Request {
            loss: Loss::Vjp,
            plan: policy.into(),
            device,
            ..Request::default()
        };
        compile(&mut graph, &request, &mut Watch::default()).unwrap();
        graph
    };
    let run = |graph: &Graph, available: SdpaBackends| {
        let inputs = random::inputs(graph, &[], 3).unwrap();
        let inputs: BTreeMap<String, Tensor> = inputs
            .iter()
            .map(|(name, x)| (name.clone(), convert::tensor(name, x).unwrap()))
            .collect();
        let mut program = Program::new(graph).unwrap();
        let is_fused = !available.list.is_empty();
        program.attend_with(available);
        let predicted = program.specialization(&inputs).unwrap().memory.peak_bytes;
        let before = kernels::calls();
        let done = program.run(&inputs).unwrap();
        // Blocks inside the CPU's kernels are not counted.
        assert!(is_fused || done.peak_bytes == predicted);
        let calls = kernels::calls();
        let often = SdpaBackend::Cpu.names().map(|name| {
            let count = |calls: &BTreeMap<&str, u64>| calls.get(name).copied().unwrap_or(0);
            count(&calls) - count(&before)
        });
        (done.outputs, often)
    };
    let h100 = ckpt_passes::analysis::Device::built_in("h100").unwrap();
    let [plain, again] = [Policy::NONE, Policy::FULL].map(|p| compiled(p, h100.clone()));
    let for_a_cpu = compiled(Policy::NONE, Default::default());
    let (expected, [forward, backward]) = run(&for_a_cpu, of_the_cpu());
    assert_eq!([forward, backward], [6, 3]);
    let (in_tiles, _) = run(&for_a_cpu, SdpaBackends::default());
    for (graph, forwards) in [(&plain, backward), (&again, 2 * backward)] {
        let (found, often) = run(graph, of_the_cpu());
        assert_eq!(often, [forwards, backward]);
        for ((name, a), (_, b)) in expected.iter().zip(&found) {
            assert!(torch::same_bits(a, b), "{name}");
        }
        // Tiles do not read the operands.
        let (tiles, often) = run(graph, SdpaBackends::default());
        assert_eq!(often, [0, 0]);
        for ((name, a), (_, b)) in in_tiles.iter().zip(&tiles) {
            assert!(torch::same_bits(a, b), "{name}");
        }
    }
}
