//! Separate random generators.

use crate::support::torch::alone;
use ckpt_torch::tch::{Device, Kind, Tensor};
use ckpt_torch::{Op, args, bytes, rng::Generator};

#[test]
fn equal_states_draw_equal_bits() {
    alone();
    let draw = |generator: &Generator| {
        let x = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
        let bernoulli = Op::find("aten::bernoulli.p").unwrap();
        let drawn = bernoulli.call_one(args![&x, 0.5, generator]).unwrap();
        bytes::read(&drawn).unwrap()
    };
    let generator = Generator::new(5).unwrap();
    let first = draw(&generator);
    let clone = generator.try_clone().unwrap();
    let second = draw(&generator);
    assert_ne!(first, second);
    assert_eq!(draw(&clone), second);
    assert_eq!(draw(&Generator::new(5).unwrap()), first);
    assert_ne!(draw(&Generator::new(6).unwrap()), first);
}
