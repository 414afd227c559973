//! Convolutions whose padding the reader works out.

use super::one::*;
use ckpt_passes::ir::{DType, Graph};

const KERNEL: (&str, DType, &[&str]) = ("w", DType::F32, &["6", "4", "3", "2"]);

fn image(sizes: &'static [&'static str]) -> (&'static str, DType, &'static [&'static str]) {
    ("x", DType::F32, sizes)
}

fn pads(graph: &Graph) -> Vec<i64> {
    let last = graph.node(*graph.order().last().unwrap());
    last.attrs.ints("pads").to_vec()
}

#[test]
fn padding_that_the_file_leaves_open() {
    let fixed = image(&["b", "4", "6", "7"]);
    let conv = |x, auto: &'static str| {
        one("", "Conv", &[x, KERNEL], &["y"]).attribute(text("auto_pad", auto))
    };
    let upper = conv(fixed, "SAME_UPPER")
        .attribute(ints("strides", &[1, 3]))
        .graph();
    assert_eq!(ops(&upper), "Conv");
    assert_eq!(output(&upper, 0).1, "f32[b, 6, 6, 3]");
    assert_eq!(pads(&upper), [1, 0, 1, 1]);
    let lower = conv(fixed, "SAME_LOWER")
        .attribute(ints("strides", &[1, 3]))
        .graph();
    assert_eq!(pads(&lower), [1, 1, 1, 0]);
    // A stride of 1 takes the same padding at every size.
    let open = image(&["b", "4", "h", "w"]);
    assert_eq!(pads(&conv(open, "SAME_UPPER").graph()), [1, 0, 1, 1]);
    let far = conv(open, "SAME_UPPER")
        .attribute(ints("strides", &[2, 2]))
        .graph();
    assert!(ops(&far).ends_with("Concat Pad Conv"), "{}", ops(&far));
    let said = conv(fixed, "SAME").read();
    assert!(
        said.err()
            .unwrap()
            .to_string()
            .contains("unknown value of `auto_pad`")
    );
}

#[test]
fn padding_that_the_result_tells() {
    let x = image(&["b", "6", "5", "w"]);
    let spread =
        || one("", "ConvTranspose", &[x, KERNEL], &["y"]).attribute(ints("strides", &[2, 2]));
    let same = spread().attribute(text("auto_pad", "SAME_UPPER")).graph();
    assert_eq!(output(&same, 0).1, "f32[b, 4, 10, 2*w]");
    assert_eq!(pads(&same), [0, 0, 1, 0]);
    let said = spread()
        .attribute(ints("output_shape", &[10, 12]))
        .refusal();
    assert!(
        said.contains("a result of these sizes is not supported"),
        "{said}"
    );
    // One more than the windows cover is zeros at the end; of two nobody knows where they are.
    let fixed = image(&["b", "6", "5", "5"]);
    let longer = |size| {
        one("", "ConvTranspose", &[fixed, KERNEL], &["y"])
            .attribute(ints("strides", &[3, 3]))
            .attribute(ints("output_shape", &[size, 14]))
    };
    let graph = longer(16).graph();
    assert_eq!(output(&graph, 0).1, "f32[b, 4, 16, 14]");
    assert_eq!(pads(&graph), [0, 0, 0, 0]);
    let said = longer(17).refusal();
    assert!(said.contains("of these sizes is not supported"), "{said}");
}
