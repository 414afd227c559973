//! Operators by name: mixed arguments and results, defaults, schema text, and every refusal.

use crate::support::torch::alone;
use ckpt_torch::rng::Generator;
use ckpt_torch::tch::{Device, Kind, Tensor};
use ckpt_torch::{Arg, ErrorKind, Op, Ret, TorchError, args};

fn op(name: &str) -> Op {
    Op::find(name).unwrap()
}

fn floats(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(&tensor.flatten(0, -1)).unwrap()
}

/// The message of a call that libtorch, or the check in front of it, must refuse.
fn refusal(result: Result<Vec<Ret>, TorchError>) -> String {
    let error = result.expect_err("the call must be refused");
    assert_eq!(error.kind, ErrorKind::Refused, "{error}");
    error.message
}

#[test]
fn schema_text_is_libtorchs_own() {
    alone();
    assert_eq!(
        op("aten::add.Tensor").schema(),
        "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
    );
    assert_eq!(
        op("aten::native_layer_norm_backward").schema(),
        "aten::native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, \
         Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
    );
    assert_eq!(op("aten::add.Tensor").name(), "aten::add.Tensor");
    assert_eq!(op("aten::relu").name(), "aten::relu");
}

#[test]
fn unknown_operators_are_refused_by_name() {
    alone();
    for name in ["aten::no_such_op", "aten::add.NoSuch", "", "add", "a\0b"] {
        let error = Op::find(name).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Refused);
        assert!(
            name.contains('\0') || error.message.contains(name),
            "{error}"
        );
    }
}

#[test]
fn an_operator_can_be_used_from_many_threads() {
    alone();
    let add = op("aten::add.Tensor");
    std::thread::scope(|scope| {
        for start in 0..4 {
            scope.spawn(move || {
                let a = Tensor::from_slice(&[start as f32; 8]);
                for _ in 0..200 {
                    let again = op("aten::add.Tensor");
                    assert_eq!(
                        again.schema().as_ptr(),
                        add.schema().as_ptr(),
                        "looked up once"
                    );
                    let sum = again.call_one(args![&a, &a]).unwrap();
                    assert_eq!(floats(&sum), [2.0 * start as f32; 8]);
                }
            });
        }
    });
}

#[test]
fn layer_norm_backward_with_every_output_mask() {
    alone();
    // x̂ = (x − μ)·r with μ = 2.5, r = 1/√1.25; dbias = Σ_rows g, dweight = Σ_rows g·x̂, dx = r·(gw − mean(gw) − x̂·mean(gw·x̂)).
    let x = Tensor::from_slice(&[1f32, 2., 3., 4., 4., 3., 2., 1.]).reshape([2, 4]);
    let g = Tensor::from_slice(&[1f32, 0., -1., 2., 3., 1., 0.5, 0.]).reshape([2, 4]);
    let w = Tensor::from_slice(&[1f32, 2., 0.5, -1.]);
    let b = Tensor::zeros([4], (Kind::Float, Device::Cpu));
    let forward = op("aten::native_layer_norm")
        .call(args![&x, &[4], &w, &b, 0.0])
        .unwrap();
    let [_, mean, rstd]: [Tensor; 3] = forward
        .into_iter()
        .map(|ret| ret.into_tensor().unwrap())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    assert_eq!(floats(&mean), [2.5, 2.5]);

    let r = 1.0 / 1.25f64.sqrt();
    let (xs, gs, ws) = (floats(&x), floats(&g), floats(&w));
    let (mut dx, mut dw, mut db) = (vec![0f64; 8], vec![0f64; 4], vec![0f64; 4]);
    for row in 0..2 {
        let at = |k: usize| row * 4 + k;
        let xhat: Vec<f64> = (0..4).map(|k| (f64::from(xs[at(k)]) - 2.5) * r).collect();
        let gw: Vec<f64> = (0..4)
            .map(|k| f64::from(gs[at(k)]) * f64::from(ws[k]))
            .collect();
        let mean_gw = gw.iter().sum::<f64>() / 4.0;
        let mean_gwx = gw.iter().zip(&xhat).map(|(a, b)| a * b).sum::<f64>() / 4.0;
        for k in 0..4 {
            dx[at(k)] = r * (gw[k] - mean_gw - xhat[k] * mean_gwx);
            dw[k] += f64::from(gs[at(k)]) * xhat[k];
            db[k] += f64::from(gs[at(k)]);
        }
    }

    let backward = op("aten::native_layer_norm_backward");
    for bits in 0..8u8 {
        let mask = [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0];
        let results = backward
            .call(args![&g, &x, &[4], &mean, &rstd, Some(&w), &b, &mask])
            .unwrap();
        assert_eq!(results.len(), 3);
        for ((result, wanted), expected) in results.into_iter().zip(mask).zip([&dx, &dw, &db]) {
            match result {
                Ret::Tensor(tensor) => {
                    assert!(wanted);
                    for (got, expected) in floats(&tensor).iter().zip(expected) {
                        assert!(
                            (f64::from(*got) - expected).abs() < 1e-5,
                            "{got} for {expected}"
                        );
                    }
                }
                Ret::None => assert!(!wanted),
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn arguments_left_out_take_their_defaults_and_numbers_convert() {
    alone();
    let a = Tensor::from_slice(&[1f32, 2.]);
    let b = Tensor::from_slice(&[10f32, 20.]);
    let add = op("aten::add.Tensor");
    let sum = |extra: &[Arg]| {
        let args: Vec<Arg> = args![&a, &b].iter().chain(extra).copied().collect();
        floats(&add.call_one(&args).unwrap())
    };
    assert_eq!(sum(&[]), [11., 22.]);
    assert_eq!(sum(args![3]), [31., 62.]);
    assert_eq!(sum(args![0.5]), [6., 12.]);
    // An integer for `float eps`.
    let x = Tensor::from_slice(&[3f32, 5.]);
    let norm = op("aten::layer_norm").call_one(args![&x, &[2], Arg::None, Arg::None, 0]);
    assert_eq!(floats(&norm.unwrap()), [-1., 1.]);
    // One number for `int[2]`.
    let image = Tensor::from_slice(&[0f32, 1., 2., 3.]).reshape([1, 1, 2, 2]);
    let pooled = op("aten::max_pool2d").call_one(args![&image, 2]).unwrap();
    assert_eq!(
        (pooled.size(), floats(&pooled)),
        (vec![1, 1, 1, 1], vec![3.])
    );
}

#[test]
fn every_kind_of_argument_arrives() {
    alone();
    let x = Tensor::from_slice(&[1f32, 2., 3., 4.]);
    let (head, tail) = (x.narrow(0, 0, 1), x.narrow(0, 1, 3));
    let joined = op("aten::cat").call_one(args![&[&tail, &head], 0]).unwrap();
    assert_eq!(floats(&joined), [2., 3., 4., 1.]);

    let matrix = x.reshape([2, 2]);
    let column = Tensor::from_slice(&[1i64]);
    let picked = op("aten::index.Tensor")
        .call_one(args![&matrix, &[None, Some(&column)]])
        .unwrap();
    assert_eq!(floats(&picked), [2., 4.]);

    let zeros = op("aten::zeros")
        .call_one(args![&[2, 0, 3], Kind::BFloat16, Arg::None, Device::Cpu])
        .unwrap();
    assert_eq!(
        (zeros.size(), zeros.kind()),
        (vec![2, 0, 3], Kind::BFloat16)
    );

    let gelu = op("aten::gelu");
    let exact = gelu.call_one(args![&x, "none"]).unwrap();
    let approximate = gelu.call_one(args![&x, "tanh"]).unwrap();
    assert_ne!(floats(&exact), floats(&approximate));
    assert!(
        (floats(&exact)[0] - 0.841_345).abs() < 1e-5
            && (floats(&approximate)[0] - 0.841_192).abs() < 1e-5
    );

    // `float[]?`, here with a size given as none.
    let small = Tensor::from_slice(&[5f32]).reshape([1, 1, 1, 1]);
    let grown = op("aten::upsample_nearest2d.vec")
        .call_one(args![&small, Arg::None, &[2.0, 3.0]])
        .unwrap();
    assert_eq!(
        (grown.size(), floats(&grown)),
        (vec![1, 1, 2, 3], vec![5.; 6])
    );

    // `Scalar[]`, and a list as result.
    let scaled = op("aten::_foreach_add.ScalarList")
        .call(args![&[&head, &tail], &[0.5, 10.0]])
        .unwrap();
    let [Ret::Tensors(scaled)] = &scaled[..] else {
        panic!("{scaled:?}")
    };
    assert_eq!(
        (floats(&scaled[0]), floats(&scaled[1])),
        (vec![1.5], vec![12., 13., 14.])
    );

    // A generator: the same seed gives the same bits, and the default generator is not touched.
    let (first, second) = (Generator::new(7).unwrap(), Generator::new(7).unwrap());
    let draw = |generator| {
        floats(
            &op("aten::rand.generator")
                .call_one(args![&[16], generator, Kind::Float])
                .unwrap(),
        )
    };
    assert_eq!(draw(&first), draw(&second));
    assert_ne!(draw(&first), draw(&Generator::new(8).unwrap()));
}

#[test]
fn every_kind_of_result_arrives() {
    alone();
    let x = Tensor::from_slice(&[1f32, 2., 3., 4.]).reshape([2, 2]);
    let one = |name: &str, args: &[Arg]| op(name).call(args).unwrap().remove(0);
    assert!(matches!(one("aten::equal", args![&x, &x]), Ret::Bool(true)));
    assert!(matches!(one("aten::size.int", args![&x, 1]), Ret::Int(2)));
    assert!(
        matches!(one("aten::q_scale", args![&x.quantize_per_tensor(0.25, 0, Kind::QUInt8)]), Ret::Double(s) if s == 0.25)
    );
    assert!(
        matches!(one("aten::_local_scalar_dense", args![&x.sum(Kind::Float)]), Ret::Double(s) if s == 10.0)
    );
    let Ret::Tensors(parts) = one("aten::split.Tensor", args![&x, 1]) else {
        panic!()
    };
    assert_eq!(
        parts.iter().map(floats).collect::<Vec<_>>(),
        [[1., 2.], [3., 4.]]
    );
    let none = op("aten::_foreach_zero_").call(args![&[&x]]).unwrap();
    assert!(none.is_empty(), "an operator without results");
    assert_eq!(floats(&x), [0.; 4]);
}

#[test]
fn results_we_cannot_hold_are_an_error() {
    alone();
    let complex = Tensor::ones([1], (Kind::ComplexFloat, Device::Cpu));
    let message = refusal(op("aten::_local_scalar_dense").call(args![&complex.reshape([])]));
    assert!(message.contains("no counterpart"), "{message}");
}

#[test]
fn wrong_arguments_are_refused_before_the_call() {
    alone();
    let x = Tensor::from_slice(&[1f32, 2.]);
    let add = op("aten::add.Tensor");
    let message = refusal(add.call(args![&x]));
    assert!(
        message.contains("aten::add.Tensor: argument 1 `other` is missing"),
        "{message}"
    );
    let message = refusal(add.call(args![&x, 1]));
    assert!(
        message.contains("argument 1 `other` wants Tensor, got Int"),
        "{message}"
    );
    let message = refusal(add.call(args![&x, Arg::None]));
    assert!(message.contains("got None"), "{message}");
    let message = refusal(add.call(args![&x, &x, 1, 1]));
    assert!(
        message.contains("takes 3 arguments, 4 were given"),
        "{message}"
    );
    refusal(op("aten::relu").call(args![&[&x]]));
    refusal(op("aten::sum.dim_IntList").call(args![&x, &[0.0]]));
    refusal(op("aten::sum.dim_IntList").call(args![&x, &[0], 1.0]));
    refusal(op("aten::gelu").call(args![&x, true]));
    refusal(op("aten::zeros").call(args![&[1], Arg::None, Arg::None, Device::Mps]));
    refusal(op("aten::zeros").call(args![&[1], Arg::None, Arg::None, Device::Cuda(1000)]));
    refusal(op("aten::cat").call(args![&[Some(&x), None], 0]));
}

#[test]
fn what_libtorch_refuses_comes_back_without_a_backtrace() {
    alone();
    let a = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    let message = refusal(op("aten::mm").call(args![&a, &a]));
    assert!(
        message.contains("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        "{message}"
    );
    assert!(!message.contains("frame #"), "{message}");
    refusal(op("aten::gelu").call(args![&a, "no such approximation"]));
    refusal(op("aten::select.int").call(args![&a, 0, 9]));
    refusal(op("aten::relu").call(args![&Tensor::new()]));
    let several = op("aten::split.Tensor").call_one(args![&a, 1]);
    assert_eq!(several.unwrap_err().kind, ErrorKind::Refused);
}

#[test]
fn nothing_is_recorded_for_autograd() {
    alone();
    let x = Tensor::from_slice(&[1f32, 2.]).set_requires_grad(true);
    let y = op("aten::mul.Tensor").call_one(args![&x, &x]).unwrap();
    assert!(!y.requires_grad());
}

/// What a forward leaves undefined is handed to its backward as it is; nowhere else may an undefined tensor stand.
#[test]
fn an_undefined_tensor_is_an_argument_where_one_is_wanted() {
    alone();
    let backward = op("aten::_scaled_dot_product_flash_attention_for_cpu_backward");
    let x = Tensor::ones([1, 1, 4, 8], (Kind::Float, Device::Cpu));
    let mut args = vec![Arg::NoTensor];
    args.extend([&x; 5].map(Arg::Tensor));
    args.extend(args![0.0, false]);
    // Without a gradient of its result it has none to give.
    let found = backward.call(&args).unwrap();
    assert!(found.iter().all(|r| matches!(r, Ret::None)) && found.len() == 3);
    let written = refusal(op("aten::add_.Tensor").call(args![Arg::NoTensor, &x]));
    assert!(
        written.contains("`self`") && written.contains("NoTensor"),
        "{written}"
    );
    let number = refusal(op("aten::mul.Scalar").call(args![&x, Arg::NoTensor]));
    assert!(number.contains("got NoTensor"), "{number}");
}
