//! Seeds and states. The default generator is one for the process, so that these are one test.

use crate::support::torch::alone;
use ckpt_torch::tch::{Device, Kind, Tensor};
use ckpt_torch::{ErrorKind, Op, args, bytes, rng};

fn dropout_mask() -> Vec<u8> {
    let x = Tensor::ones([1000], (Kind::Float, Device::Cpu));
    let results = Op::find("aten::native_dropout")
        .unwrap()
        .call(args![&x, 0.5, true]);
    bytes::read(&results.unwrap().remove(1).into_tensor().unwrap()).unwrap()
}

#[test]
fn the_same_seed_or_state_draws_the_same_bits() {
    let _turn = alone();
    rng::seed(1).unwrap();
    let first = dropout_mask();
    let state = rng::state().unwrap();
    let second = dropout_mask();
    assert_ne!(first, second);
    rng::set_state(&state).unwrap();
    assert_eq!(dropout_mask(), second);
    rng::seed(1).unwrap();
    assert_eq!(dropout_mask(), first);
    rng::seed(2).unwrap();
    assert_ne!(dropout_mask(), first);

    // A generator of one's own leaves the default one alone, and can be started anew.
    let generator = rng::Generator::new(5).unwrap();
    let draw = || {
        let x = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
        let bernoulli = Op::find("aten::bernoulli.p").unwrap();
        let drawn = bernoulli.call_one(args![&x, 0.5, &generator]).unwrap();
        bytes::read(&drawn).unwrap()
    };
    rng::set_state(&state).unwrap();
    let (one, two) = (draw(), draw());
    assert_ne!(one, two);
    generator.seed(5).unwrap();
    assert_eq!(draw(), one);
    assert_eq!(dropout_mask(), second);

    let not_a_state = Tensor::zeros([3], (Kind::Uint8, Device::Cpu));
    assert_eq!(
        rng::set_state(&not_a_state).unwrap_err().kind,
        ErrorKind::Refused
    );
}
