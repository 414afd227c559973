//! In-place programs against libtorch's own interpreter: values and gradients, under two plans.

use super::{Saved, given, torch};
use bytes::Bytes;
use ckpt_opt::frontend::torch::{archive::Archive, read};
use ckpt_opt::runtime::executor::Program;
use ckpt_passes::compile::{Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::plan::Policy;
use ckpt_passes::transform::loss::Loss;
use std::collections::BTreeMap;
use tch::{CModule, Tensor};

/// `x` is f32[4, 6], `w` a parameter of that shape; `h` is their product when the body begins.
fn check(body: &str) {
    let values: Vec<f32> = (0..24).map(|i| (i * 7 % 11) as f32 / 4.0 - 1.0).collect();
    let body = format!("w = self.w\nh = torch.mul(x, w)\n{body}");
    let saved = Saved::new("x: Tensor -> Tensor", &body).parameter("w", &[4, 6], &values);
    let zip = saved.zip();
    let input: Vec<f64> = (0..24).map(|i| f64::from(i * 5 % 13) / 8.0 - 0.5).collect();
    let x = torch::tensor(ckpt_passes::ir::DType::F32, &[4, 6], &input);

    let module = CModule::load_data(&mut zip.as_slice()).unwrap_or_else(|e| panic!("{body}\n{e}"));
    let expected = module
        .forward_ts(&[&x])
        .unwrap_or_else(|e| panic!("{body}\n{e}"));
    let count = expected.numel() as i64;
    let weights: Vec<f64> = (0..count).map(|i| (i % 5) as f64 - 2.0).collect();
    let cotangent = torch::tensor(ckpt_passes::ir::DType::F32, &expected.size(), &weights);
    (&expected * &cotangent).sum(tch::Kind::Float).backward();
    let parameters = module.named_parameters().unwrap();
    let gradient = parameters[0].1.grad();

    for policy in [Policy::NONE, Policy::SELECTIVE] {
        let archive = Archive::read(Bytes::from(zip.clone())).unwrap();
        let mut graph = read(&archive, &given(&["x:f32[4,6]"]))
            .unwrap_or_else(|e| panic!("{body}\n{e}"))
            .graph;
        let imported = graph.clone();
        let mut request = Request {
            loss: Loss::parse("vjp").unwrap(),
            plan: policy.into(),
            ..Request::default()
        };
        while let Err(e) = compile(&mut graph, &request, &mut Watch::default()) {
            // A size that nothing bounds is asked for.
            let asked = e.to_string();
            let name = asked
                .split_once("--dim '")
                .and_then(|(_, rest)| rest.split_once('='));
            let (name, _) = name.unwrap_or_else(|| panic!("{body}\n{e}"));
            assert!(name.starts_with('?') && request.dims.is_empty(), "{e}");
            request.dims.push((name.to_string(), 30));
            graph = imported.clone();
        }
        let inputs = BTreeMap::from([
            ("x".to_string(), x.shallow_clone()),
            ("output_0.cotangent".to_string(), cotangent.shallow_clone()),
        ]);
        let run = Program::new(&graph)
            .unwrap()
            .run(&inputs)
            .unwrap_or_else(|e| panic!("{body}\n{e}"));
        let found: BTreeMap<String, Tensor> = run.outputs.into_iter().collect();
        for (name, expected) in [("output_0", &expected), ("w.grad", &gradient)] {
            let found = found
                .get(name)
                .unwrap_or_else(|| panic!("{body}\nno {name}"));
            assert_eq!(found.size(), expected.size(), "{body}\n{name}");
            for (a, b) in torch::numbers(found).iter().zip(torch::numbers(expected)) {
                assert!(
                    (a - b).abs() <= 1e-5 * b.abs().max(1.0),
                    "{body}\n{name}: {a} is not {b}"
                );
            }
        }
    }
}

#[test]
fn writes_change_nothing_that_was_read_before_and_everything_read_after() {
    torch::alone();
    let programs = [
        // The residual was read before it is scaled.
        "r = torch.add(h, x)\n_0 = torch.mul_(h, 2.)\nreturn torch.add(torch.mul(r, r), h)",
        "r = torch.add(h, x)\n_0 = torch.add_(h, r, alpha=3)\n_1 = torch.div_(h, 4.)\nreturn torch.mul(r, h)",
        // A slice is copied into; another view of the same rows was made before.
        "v = torch.select(h, 0, 1)\ns = torch.slice(h, 1, 0, 3)\n_0 = torch.copy_(s, torch.neg(torch.slice(x, 1, 1, 4)))\nreturn torch.add(torch.mul(h, h), v)",
        "s = torch.select(h, 0, 2)\n_0 = torch.copy_(s, torch.select(x, 0, 0))\n_1 = torch.mul_(torch.select(h, 1, 5), 3.)\nreturn torch.mul(h, x)",
        // Views that overlap each other.
        "a = torch.slice(h, 1, 0, 4)\nb = torch.slice(h, 1, 2, 6)\nbefore = torch.mul(b, 2.)\n_0 = torch.add_(a, 1.)\n_1 = torch.mul_(b, 3.)\nreturn torch.add(torch.mul(a, b), before)",
        "t = torch.transpose(h, 0, 1)\nu = torch.slice(torch.transpose(x, 0, 1), 0, 0, 2)\n_0 = torch.mul_(torch.slice(t, 0, 1, 5, 2), u)\nreturn torch.mul(t, t)",
        "v = torch.view(h, [24])\n_0 = torch.mul_(torch.slice(v, 0, 3, 20, 4), 5.)\nreturn torch.mul(h, h)",
        // Rows chosen by index, some of them twice.
        "i = torch.remainder(torch.arange(6), 4)\nu = torch.cat([x, torch.slice(x, 0, 0, 2)])\nold = torch.neg(h)\n_0 = torch.index_put_(h, annotate(List[Optional[Tensor]], [i]), u, True)\nreturn torch.mul(old, h)",
        "i = torch.slice(torch.arange(4), 0, 1, 3)\nold = torch.neg(h)\n_0 = torch.index_put_(h, annotate(List[Optional[Tensor]], [i]), torch.slice(x, 0, 0, 2), False)\nreturn torch.mul(old, h)",
        // An out-of-place result shares nothing with its operand.
        "c = torch.clone(h)\n_0 = torch.mul_(c, 2.)\nreturn torch.add(h, c)",
        // A loop of writes.
        "for i in range(3):\n  _0 = torch.add_(torch.select(h, 0, i), torch.select(h, 0, torch.add(i, 1)))\nreturn torch.mul(h, x)",
        // Floats of 8 bits, which later writes do not change.
        "q = torch.to(h, 24)\n_0 = torch.mul_(h, 2.)\np = torch.to(torch.transpose(q, 0, 1), 6)\nreturn torch.add(torch.mul(torch.transpose(p, 0, 1), x), torch.to(torch.to(h, 23), 6))",
        // Parts whose sizes data decides.
        "n = torch.sum(torch.gt(torch.sum(x, [1]), 1.2))\na, b, = torch.split_with_sizes(h, [int(n), int(torch.rsub(n, 4))])\nreturn torch.add(torch.sum(a, [0]), torch.mul(torch.sum(b, [0]), 3.))",
        // Sizes that data decides: one wherever the same number tells it, as it was when it was read.
        "n = torch.sum(torch.gt(x, 0.2))\nlength = int(n)\n_0 = torch.add_(n, 1)\nz = torch.add(torch.zeros([length, 6]), 3.)\ny = torch.mul(z, torch.unsqueeze(torch.arange(length), 1))\nreturn torch.add(torch.mul(h, torch.sum(y)), n)",
        "n = torch.add(torch.gt(torch.sum(x, [1]), 1.2), 1)\ny = torch.repeat_interleave(h, n, 0)\nreturn torch.sum(torch.mul(y, y), [0])",
        // The rows that data chooses, as a trace takes experts: three of them here.
        "chosen = torch.nonzero(torch.gt(torch.sum(x, [1]), 1.2))\na, b, c, = torch.unbind(chosen)\ni = int(torch.select(a, 0, 0))\nj = int(torch.select(b, 0, 0))\nk = int(torch.select(c, 0, 0))\nreturn torch.mul(torch.add(torch.select(h, 0, i), torch.select(h, 0, k)), torch.select(w, 0, j))",
    ];
    for program in programs {
        check(program);
    }
}

#[test]
fn recurrent_layers_are_those_of_libtorch() {
    torch::alone();
    let start = "s = torch.unsqueeze(torch.slice(torch.slice(h, 0, 0, 2), 1, 0, 2), 0)\n";
    let lstm = "v = torch.view(w, [8, 3])\ny, hn, cn, = torch.lstm(torch.view(x, [4, 2, 3]), [s, s], \
        [v, torch.slice(v, 1, 0, 2)], False, 1, 0., False, False, False)\nreturn torch.add(torch.mul(y, hn), cn)";
    // Two directions with biases, the first axis the batch.
    let gru = "v = torch.view(w, [6, 4])\nu = torch.slice(v, 1, 0, 2)\nb = torch.select(v, 1, 3)\n\
        all = [v, u, b, b, torch.neg(v), u, b, b]\n\
        y, hn, = torch.gru(torch.view(x, [2, 3, 4]), torch.cat([s, s], 0), all, True, 1, 0., False, True, True)\n\
        return torch.mul(torch.select(y, 1, 1), torch.cat([torch.select(hn, 0, 0), torch.select(hn, 0, 1)], 1))";
    let two = "v = torch.view(w, [6, 4])\nu = torch.slice(v, 0, 0, 2)\nt = torch.slice(u, 1, 0, 2)\n\
        y, hn, = torch.rnn_tanh(torch.view(x, [3, 2, 4]), torch.cat([s, s], 0), [u, t, t, torch.neg(t)], False, 2, 0., \
        False, False, False)\nreturn torch.add(y, torch.select(hn, 0, 1))";
    for program in [lstm, gru, two] {
        check(&format!("{start}{program}"));
    }
}

/// A trace of chosen experts holds for data that chooses as many; another number is an error, never a part of the sum.
#[test]
fn another_number_of_chosen_rows_is_an_error() {
    torch::alone();
    let body = "a, b, = torch.unbind(torch.nonzero(torch.gt(x, 0.)))\nreturn torch.mul(a, b)";
    let archive =
        Archive::read(Bytes::from(Saved::new("x: Tensor -> Tensor", body).zip())).unwrap();
    let model = read(&archive, &given(&["x:f32[4]"])).unwrap();
    assert!(
        model.warnings[0].contains("took 2 parts"),
        "{:?}",
        model.warnings
    );
    for (x, ends_well) in [
        ([1.0, 0.0, 2.0, 0.0], true),
        ([1.0, 0.0, 0.0, 0.0], false),
        ([1.0, 1.0, 2.0, 0.0], false),
    ] {
        let x = torch::tensor(ckpt_passes::ir::DType::F32, &[4], &x);
        let ran = Program::new(&model.graph)
            .unwrap()
            .run(&BTreeMap::from([("x".to_string(), x)]));
        assert_eq!(ran.is_ok(), ends_well);
        if let Err(e) = ran {
            assert_eq!(e.code(), "shape", "{e}");
        }
    }
}
