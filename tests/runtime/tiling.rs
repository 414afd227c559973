//! A head and loss computed part by part gives the loss and the gradients of the whole, in every form of loss.
use crate::support::torch;

use ckpt_opt::runtime::executor::Program;
use ckpt_passes::compile::{Compiled, Request, compile};
use ckpt_passes::driver::Watch;
use ckpt_passes::ir::{DType, Graph};
use ckpt_passes::plan::Policy;
use ckpt_passes::text;
use ckpt_passes::transform::dce::dce;
use ckpt_passes::transform::loss::Loss;
use ckpt_passes::transform::tile::{Tile, Tiles, tile};
use std::collections::BTreeMap;
use tch::{Kind, Tensor};
use torch::tensor;

const CLASSES: i64 = 11;

/// Heads and losses; `%h` are activations of `batch` × `seq` tokens, `%labels` their classes.
const FORMS: &[(&str, &str)] = &[
    (
        "mean with class weights and ignored labels",
        "%z = MatMul %h, %w
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "sum over rows with a bias, in one op",
        "%flat = Reshape %h, %narrow
  %s = Gemm %flat, %w, %bias
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"sum\", ignore_index=-100}",
    ),
    (
        "a soft cap, log-probabilities, then their mean",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %d = Div %b, %cap
  %t = Tanh %d
  %c = Mul %t, %cap
  %s = Reshape %c, %matrix
  %p = LogSoftmax %s
  %l = Reshape %labels, %vector
  %total = NegativeLogLikelihoodLoss %p, %l, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "label smoothing by hand",
        "%z = MatMul %h, %w
  %p = LogSoftmax %z
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %all = ReduceMean %p, %last
  %few = Mul %all, %small
  %both = Add %hit, %few
  %mean = ReduceMean %both {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "one loss a token and a penalty on the normaliser",
        "%z = MatMul %h, %w
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %each = SoftmaxCrossEntropyLoss %s, %l {reduction=\"none\", ignore_index=-100}
  %n = ReduceLogSumExp %s, %last {keepdims=0}
  %square = Mul %n, %n
  %penalty = Mul %square, %small
  %both = Add %each, %penalty
  %total = ReduceMean %both {keepdims=0}",
    ),
    (
        "scores of all tokens but the last",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %some = Slice %b, %start, %stop, %second
  %s = Reshape %some, %matrix
  %rest = Slice %labels, %one, %end, %second
  %l = Reshape %rest, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "classes behind the batch, with weights and one loss a token",
        "%z = MatMul %h, %w
  %s = Transpose %z {perm=[0, 2, 1]}
  %mean = SoftmaxCrossEntropyLoss %s, %labels, %weights {reduction=\"mean\", ignore_index=-100}
  %each = SoftmaxCrossEntropyLoss %s, %labels {reduction=\"none\", ignore_index=-100}
  %plain = ReduceMean %each {keepdims=0}
  %total = Add %mean, %plain",
    ),
    (
        "no op that compares classes",
        "%z = MatMul %h, %w
  %n = ReduceLogSumExp %z, %last {keepdims=0}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %z, %at {axis=-1}
  %own = Squeeze %hit, %last
  %d = Sub %n, %own
  %total = ReduceMean %d {keepdims=0}",
    ),
    (
        "probabilities",
        "%z = MatMul %h, %w
  %p = Softmax %z {axis=-1}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %log = Log %hit
  %mean = ReduceMean %log {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "a transposed weight",
        "%wt = Transpose %tied {perm=[1, 0]}
  %z = MatMul %h, %wt
  %s = Reshape %z, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "log-probabilities of whole sequences, compared with those of a frozen head",
        "%z = MatMul %h, %w
  %p = LogSoftmax %z
  %q = MatMul %x, %frozen
  %r = LogSoftmax %q
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %own = GatherElements %p, %at {axis=-1}
  %theirs = GatherElements %r, %at {axis=-1}
  %d = Sub %own, %theirs
  %each = ReduceSum %d, %axes {keepdims=0}
  %s = Sigmoid %each
  %log = Log %s
  %mean = ReduceMean %log {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "a ratio of probabilities that is clipped, and an entropy, each normalised by sequence",
        "%z = MatMul %h, %w
  %b = Add %z, %bias
  %p = LogSoftmax %b
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %last
  %hit = GatherElements %p, %at {axis=-1}
  %own = Squeeze %hit, %last
  %stopped = StopGradient %own
  %d = Sub %own, %stopped
  %ratio = Exp %d
  %capped = Min %ratio, %cap
  %mean = ReduceMean %own, %second
  %centred = Sub %own, %mean
  %gain = Mul %capped, %centred
  %e = Exp %p
  %pe = Mul %e, %p
  %entropy = ReduceSum %pe, %last {keepdims=0}
  %both = Add %gain, %entropy
  %each = ReduceMean %both, %second {keepdims=0}
  %square = Mul %each, %each
  %total = ReduceMean %square {keepdims=0}",
    ),
    (
        "classes of pixels, with weights",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %total = SoftmaxCrossEntropyLoss %s, %labels, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "log-probabilities of pixels, with an entropy",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel
  %p = LogSoftmax %s {axis=1}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %at = Unsqueeze %safe, %second
  %hit = GatherElements %p, %at {axis=1}
  %e = Exp %p
  %pe = Mul %e, %p
  %entropy = ReduceSum %pe, %second
  %both = Add %hit, %entropy
  %mean = ReduceMean %both {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "shares of classes in each picture",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %p = Softmax %s {axis=1}
  %hot = OneHot %labels, %eleven, %values
  %hot_t = Transpose %hot {perm=[0, 2, 1]}
  %own = Mul %p, %hot_t
  %some = ReduceSum %own, %pixels {keepdims=0}
  %all = ReduceSum %p, %pixels {keepdims=0}
  %more = Add %all, %cap
  %each = Div %some, %more
  %total = ReduceMean %each {keepdims=0}",
    ),
    (
        "shares of classes in all pictures",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %p = Softmax %s {axis=1}
  %square = Mul %p, %p
  %some = ReduceSum %square, %outer {keepdims=0}
  %all = ReduceSum %p, %outer {keepdims=0}
  %more = Add %all, %cap
  %each = Div %some, %more
  %total = ReduceMean %each {keepdims=0}",
    ),
    (
        "independent classes of pixels, and the mean of all",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %p = Sigmoid %s
  %log = Log %p
  %total = ReduceMean %log {keepdims=0}",
    ),
    (
        "neighbouring pixels mixed",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %window, %bias {pads=[1, 1]}
  %total = SoftmaxCrossEntropyLoss %s, %labels, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "time steps before the batch, then a sum of paths",
        "%z = MatMul %h, %w
  %p = LogSoftmax %z {axis=-1}
  %time = Transpose %p {perm=[1, 0, 2]}
  %zero = Less %labels, %none
  %safe = Where %zero, %none, %labels
  %turned = Transpose %safe {perm=[1, 0]}
  %at = Unsqueeze %turned, %last
  %hit = GatherElements %time, %at {axis=-1}
  %own = Squeeze %hit, %last
  %paths = CumSum %own, %none
  %each = ReduceLogSumExp %paths, %first {keepdims=0}
  %mean = ReduceMean %each {keepdims=0}
  %total = Neg %mean",
    ),
    (
        "the surest class",
        "%z = MatMul %h, %w
  %at = ArgMax %z {axis=-1}
  %hit = GatherElements %z, %at {axis=-1}
  %n = ReduceLogSumExp %z, %last
  %unsure = Sub %n, %hit
  %which = ArgMax %z {axis=-1, keepdims=0}
  %gain = Cast %which {to=f64}
  %own = Squeeze %unsure, %last
  %d = Mul %own, %gain
  %total = ReduceMean %d {keepdims=0}",
    ),
    (
        "rows compared with themselves, by a product and in one op",
        "%flat = Reshape %h, %narrow
  %turned = Transpose %flat {perm=[1, 0]}
  %z = MatMul %flat, %turned
  %d = Div %z, %cap
  %p = LogSoftmax %d
  %y = Gemm %flat, %flat {transB=1}
  %q = LogSoftmax %y
  %e = Exp %p
  %pe = Mul %e, %q
  %each = ReduceSum %pe, %last {keepdims=0}
  %total = ReduceMean %each {keepdims=0}",
    ),
    (
        "rows and columns of rows compared with themselves",
        "%flat = Reshape %h, %narrow
  %turned = Transpose %flat {perm=[1, 0]}
  %z = MatMul %flat, %turned
  %d = Div %z, %cap
  %p = LogSoftmax %d {axis=-1}
  %q = LogSoftmax %d {axis=0}
  %e = Exp %p
  %both = Mul %e, %q
  %each = ReduceSum %both, %last {keepdims=0}
  %n = ReduceLogSumExp %d, %first {keepdims=0}
  %sum = Sub %each, %n
  %total = ReduceMean %sum {keepdims=0}",
    ),
    (
        "a class of each row beside sampled ones",
        "%z = MatMul %h, %w
  %own = ReduceSum %h, %last {keepdims=1}
  %all = Concat %own, %z {axis=-1}
  %p = LogSoftmax %all {axis=-1}
  %hit = Slice %p, %start, %one, %last
  %total = ReduceMean %hit {keepdims=0}",
    ),
    (
        "pieces of the classes",
        "%z = MatMul %h, %w
  %near = Slice %z, %start, %third, %last
  %far = Slice %z, %third, %end, %last
  %n = ReduceLogSumExp %far, %last {keepdims=1}
  %some = Concat %near, %n {axis=-1}
  %p = LogSoftmax %some {axis=-1}
  %hit = Slice %p, %start, %one, %last
  %total = ReduceMean %hit {keepdims=0}",
    ),
    (
        "the mean of all rows",
        "%z = MatMul %h, %w
  %p = Softmax %z {axis=-1}
  %m = ReduceMean %p, %rows {keepdims=0}
  %log = Log %m
  %pe = Mul %m, %log
  %total = ReduceSum %pe {keepdims=0}",
    ),
    (
        "running sums along the classes",
        "%z = MatMul %h, %w
  %sums = CumSum %z, %minus
  %n = ReduceLogSumExp %sums, %last {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "some scores of each row",
        "%z = MatMul %h, %w
  %top, %which = TopK %z, %second
  %p = Tanh %top
  %labelled = OneHot %which, %eleven, %values {axis=-1}
  %m = ReduceMean %labelled, %three {keepdims=0}
  %n = ReduceLogSumExp %m {keepdims=0}
  %all = Mul %p, %n
  %total = ReduceMean %all {keepdims=0}",
    ),
    (
        "a mixture of probabilities",
        "%pair = Concat %h, %x {axis=-1}
  %split = Reshape %pair, %two
  %z = MatMul %split, %w
  %p = Softmax %z {axis=-1}
  %mixed = ReduceMean %p, %third {keepdims=0}
  %log = Log %mixed
  %s = Reshape %log, %matrix
  %l = Reshape %labels, %vector
  %total = NegativeLogLikelihoodLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "scores normalised over all rows",
        "%z = MatMul %h, %w
  %m = ReduceMean %z, %rows {keepdims=1}
  %off = Sub %z, %m
  %square = Mul %off, %off
  %v = ReduceMean %square, %rows {keepdims=1}
  %more = Add %v, %small
  %spread = Sqrt %more
  %n = Div %off, %spread
  %s = Reshape %n, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "a temperature of each example",
        "%z = MatMul %h, %w
  %m = ReduceMean %h, %axes {keepdims=1}
  %e = Exp %m
  %d = Div %z, %e
  %s = Reshape %d, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "scores with a norm of their own",
        "%z = MatMul %h, %w
  %n = LayerNormalization %z, %weights, %bias
  %s = Reshape %n, %matrix
  %l = Reshape %labels, %vector
  %total = SoftmaxCrossEntropyLoss %s, %l {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "the largest score of each row, added to columns",
        "%flat = Reshape %h, %narrow
  %turned = Transpose %flat {perm=[1, 0]}
  %z = MatMul %flat, %turned
  %top = ReduceMax %z, %last {keepdims=0}
  %sum = Add %z, %top
  %n = ReduceLogSumExp %sum, %last {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "a mean embedding of the classes",
        "%z = MatMul %h, %w
  %p = Softmax %z {axis=-1}
  %pm = Reshape %p, %matrix
  %e = Gemm %pm, %tied
  %square = Mul %e, %e
  %total = ReduceMean %square {keepdims=0}",
    ),
    (
        "shares of each class, then of each row",
        "%z = MatMul %h, %w
  %s = Reshape %z, %matrix
  %e = Exp %s
  %t = Transpose %e {perm=[1, 0]}
  %class = ReduceSum %t, %last {keepdims=1}
  %of_class = Div %t, %class
  %row = ReduceSum %of_class, %first {keepdims=1}
  %shares = Div %of_class, %row
  %q = Transpose %shares {perm=[1, 0]}
  %p = LogSoftmax %s
  %each = Mul %q, %p
  %total = ReduceMean %each {keepdims=0}",
    ),
];

/// Losses without a product that is as wide as its operands' rows, or whose rows have sizes that only a step knows.
const OF_PAIRS: &[(&str, &str)] = &[
    (
        "distances of rows and classes",
        "%flat = Reshape %h, %narrow
  %each = Unsqueeze %flat, %second
  %off = Sub %each, %tied
  %square = Mul %off, %off
  %far = ReduceSum %square, %last {keepdims=0}
  %near = Neg %far
  %n = ReduceLogSumExp %near, %last {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "distances of rows and rows",
        "%flat = Reshape %h, %narrow
  %each = Unsqueeze %flat, %second
  %other = Mul %flat, %cap
  %all = Unsqueeze %other, %first
  %off = Sub %each, %all
  %square = Mul %off, %off
  %far = ReduceSum %square, %last
  %near = Squeeze %far, %last
  %n = ReduceLogSumExp %near, %last {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "differences of all pairs of rows",
        "%own = ReduceSum %h, %last {keepdims=0}
  %flat = Reshape %own, %vector
  %each = Unsqueeze %flat, %second
  %off = Sub %each, %flat
  %s = Sigmoid %off
  %total = ReduceMean %s {keepdims=0}",
    ),
    (
        "hard choices with the slope of soft ones",
        "%z = MatMul %h, %w
  %p = Softmax %z {axis=-1}
  %which = ArgMax %p {axis=-1, keepdims=0}
  %hard = OneHot %which, %eleven, %values {axis=-1}
  %stopped = StopGradient %p
  %off = Sub %hard, %stopped
  %choice = Add %off, %p
  %e = MatMul %choice, %tied
  %square = Mul %e, %e
  %total = ReduceMean %square {keepdims=0}",
    ),
    (
        "all pairs of tokens of an example as one list",
        "%turned = Transpose %x {perm=[0, 2, 1]}
  %z = MatMul %h, %turned
  %list = Reshape %z, %listed
  %p = LogSoftmax %list {axis=-1}
  %e = Exp %p
  %pe = Mul %e, %p
  %each = ReduceSum %pe, %last {keepdims=0}
  %total = ReduceMean %each {keepdims=0}",
    ),
    (
        "the nearest tokens of every example, for the tokens of every other",
        "%flat = Reshape %x, %narrow
  %turned = Transpose %flat {perm=[1, 0]}
  %own = Reshape %h, %narrow
  %z = MatMul %own, %turned
  %of = Shape %labels
  %tokens = Shape %h {end=2}
  %sizes = Concat %tokens, %of {axis=0}
  %apart = Reshape %z, %sizes
  %near = ReduceMax %apart, %last {keepdims=0}
  %scores = ReduceSum %near, %second {keepdims=0}
  %p = LogSoftmax %scores
  %e = Exp %p
  %pe = Mul %e, %p
  %each = ReduceSum %pe, %last {keepdims=0}
  %total = ReduceMean %each {keepdims=0}",
    ),
];

/// Losses that only some sizes let be cut, or none. Their values stay what they were.
const SEVERAL_WAYS: &[(&str, &str)] = &[
    (
        "numbers of each example that are read as those of each token, too",
        "%z = MatMul %h, %w
  %m = ReduceMean %h, %axes {keepdims=1}
  %e = Exp %m
  %d = Div %z, %e
  %apart = Unsqueeze %d, %third
  %other = Mul %apart, %e
  %n = ReduceLogSumExp %other, %last {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "sums of columns, expanded",
        "%flat = Reshape %h, %narrow
  %turned = Transpose %flat {perm=[1, 0]}
  %z = MatMul %flat, %turned
  %t = Transpose %z {perm=[1, 0]}
  %e = Exp %t
  %class = ReduceSum %e, %last {keepdims=1}
  %of = Shape %t
  %wide = Expand %class, %of
  %shares = Div %e, %wide
  %n = ReduceLogSumExp %shares, %first {keepdims=0}
  %total = ReduceMean %n {keepdims=0}",
    ),
    (
        "rows that only a step can count",
        "%counts = GreaterOrEqual %labels, %none
  %which = NonZero %counts
  %at = Transpose %which {perm=[1, 0]}
  %some = GatherND %h, %at
  %z = MatMul %some, %w
  %n = ReduceLogSumExp %z, %last {keepdims=0}
  %total = ReduceSum %n {keepdims=0}",
    ),
];

/// Heads and losses that mix the tokens or pixels of an example, but no examples.
const BY_EXAMPLE: &[(&str, &str)] = &[
    (
        "scores that are interpolated",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %left = Gather %s, %before {axis=2}
  %right = Gather %s, %behind {axis=2}
  %some = Mul %left, %small
  %more = Add %some, %right
  %some_labels = Concat %labels, %labels {axis=1}
  %total = SoftmaxCrossEntropyLoss %more, %some_labels, %weights {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "scores that are multiplied with a matrix",
        "%t = Transpose %h {perm=[0, 2, 1]}
  %s = Conv %t, %kernel, %bias
  %more = MatMul %s, %resize
  %some_labels = Concat %labels, %labels {axis=1}
  %total = SoftmaxCrossEntropyLoss %more, %some_labels {reduction=\"mean\", ignore_index=-100}",
    ),
    (
        "tokens that point at tokens",
        "%q = MatMul %h, %w
  %k = MatMul %x, %w
  %kt = Transpose %k {perm=[0, 2, 1]}
  %z = MatMul %q, %kt
  %p = LogSoftmax %z {axis=-1}
  %e = Exp %p
  %pe = Mul %e, %p
  %each = ReduceSum %pe, %last {keepdims=0}
  %total = ReduceMean %each {keepdims=0}",
    ),
];

fn model(form: &str, sizes: &str) -> Graph {
    let list = |n: usize, f: &dyn Fn(usize) -> f64| {
        let all: Vec<String> = (0..n).map(|i| format!("{:.3}", f(i))).collect();
        all.join(", ")
    };
    let weights = list(44, &|i| ((i * 37 % 23) as f64 - 11.0) / 7.0);
    let window = list(132, &|i| ((i * 41 % 23) as f64 - 11.0) / 17.0);
    let resize = list(50, &|i| ((i * 29 % 31) as f64 - 9.0) / 19.0);
    let bias = list(11, &|i| (i as f64 - 5.0) / 9.0);
    let class = list(11, &|i| 0.5 + (i % 4) as f64);
    text::parse(&format!(
        "graph @g imported (%x: f64[{sizes}, 4], %labels: i64[{sizes}]) -> (%total) {{
  init %scale : f64[4] = [1.5, -0.5, 0.75, 2]
  init %w : f64[4, 11] = [{weights}]
  init %tied : f64[11, 4] = [{weights}]
  init %frozen : f64[4, 11] = [{weights}]
  init %bias : f64[11] = [{bias}]
  init %weights : f64[11] = [{class}]
  init %cap : f64[] = 3
  init %small : f64[] = 0.125
  init %none : i64[] = 0
  init %minus : i64[] = -1
  init %rows : i64[2] = [0, 1]
  init %three : i64[3] = [0, 1, 2]
  init %matrix : i64[2] = [-1, 11]
  init %narrow : i64[2] = [-1, 4]
  init %vector : i64[1] = [-1]
  init %last : i64[1] = [-1]
  init %start : i64[1] = [0]
  init %stop : i64[1] = [-1]
  init %one : i64[1] = [1]
  init %end : i64[1] = [9223372036854775807]
  init %second : i64[1] = [1]
  init %axes : i64[2] = [1, 2]
  init %first : i64[1] = [0]
  init %third : i64[1] = [2]
  init %pixels : i64[1] = [2]
  init %outer : i64[2] = [0, 2]
  init %two : i64[4] = [0, 0, 2, 4]
  init %listed : i64[2] = [0, -1]
  init %eleven : i64[] = 11
  init %values : f64[2] = [0, 1]
  init %kernel : f64[11, 4, 1] = [{weights}]
  init %before : i64[10] = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
  init %behind : i64[10] = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
  init %resize : f64[5, 10] = [{resize}]
  init %window : f64[11, 4, 3] = [{window}]
  %h = Mul %x, %scale
  {form}
}}
"
    ))
    .unwrap_or_else(|e| panic!("{e}"))
}

fn request(graph: &Graph, tile: Tile, plan: Policy) -> Request {
    let mut request = Request {
        loss: Loss::Output("total".into()),
        plan: plan.into(),
        tile: Tiles {
            loss: tile,
            ..Tiles::default()
        },
        ..Request::default()
    };
    request.selection.trainable = ["w", "tied", "bias", "scale", "kernel", "window"]
        .map(String::from)
        .to_vec();
    request.selection.trainable.retain(|name| {
        graph
            .find_value(name)
            .is_some_and(|v| !graph.value(v).uses().is_empty())
    });
    request
}

fn training(form: &str, sizes: &str, tile: Tile) -> (Graph, Vec<(String, usize)>) {
    let (graph, done) = compiled(form, sizes, tile);
    assert_eq!(done.warnings, Vec::<String>::new());
    (graph, done.tiled)
}

fn compiled(form: &str, sizes: &str, tile: Tile) -> (Graph, Compiled) {
    let mut graph = model(form, sizes);
    let request = request(&graph, tile, Policy::NONE);
    let done = compile(&mut graph, &request, &mut Watch::default());
    let done = done.unwrap_or_else(|e| panic!("{e}"));
    (graph, done)
}

fn run(graph: &Graph, feed: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let program = Program::new(graph).unwrap_or_else(|e| panic!("{e}"));
    let done = program.run(feed).unwrap_or_else(|e| panic!("{e}"));
    done.outputs.into_iter().collect()
}

fn feed(batch: i64, seq: i64, label: impl Fn(usize) -> i64) -> BTreeMap<String, Tensor> {
    let n = (batch * seq) as usize;
    let x: Vec<f64> = (0..4 * n)
        .map(|i| ((i * 29 % 31) as f64 - 15.0) / 13.0)
        .collect();
    let labels: Vec<f64> = (0..n).map(|i| label(i) as f64).collect();
    BTreeMap::from([
        ("x".to_string(), tensor(DType::F64, &[batch, seq, 4], &x)),
        (
            "labels".to_string(),
            tensor(DType::I64, &[batch, seq], &labels),
        ),
    ])
}

fn compare(name: &str, whole: &Graph, parts: &Graph, feed: &BTreeMap<String, Tensor>) {
    let (a, b) = (run(whole, feed), run(parts, feed));
    assert_eq!(
        a.keys().collect::<Vec<_>>(),
        b.keys().collect::<Vec<_>>(),
        "{name}"
    );
    for (output, a) in &a {
        let b = &b[output];
        assert_eq!(
            (a.kind(), a.size()),
            (b.kind(), b.size()),
            "{name}: {output}"
        );
        let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
        assert!(
            a.isnan().equal(&b.isnan()),
            "{name}: {output} has NaN in other places"
        );
        let most = a
            .abs()
            .nan_to_num(0.0, None, None)
            .max()
            .double_value(&[])
            .max(1e-3);
        let gap = (&a - &b)
            .abs()
            .nan_to_num(0.0, None, None)
            .max()
            .double_value(&[]);
        let least = if output == "loss" { 1e-6 } else { 1e-12 };
        assert!(
            gap <= least * most,
            "{name}: {output} is off by {gap}, its largest element is {most}"
        );
    }
}

#[test]
fn parts_make_the_whole() {
    torch::alone();
    for (name, form) in FORMS {
        for (sizes, batch, seq) in [("batch, seq", 3, 5), ("3, 5", 3, 5), ("batch, seq", 1, 1)] {
            if seq == 1 && form.contains("Slice") {
                continue; // one token has no next one
            }
            let (whole, none) = training(form, sizes, Tile::Off);
            assert_eq!(none, []);
            for n in [2, 4, 15, 40] {
                let (parts, tiled) = training(form, sizes, Tile::Chunks(n));
                let products = form.matches(" = MatMul").count().max(1);
                // The columns; the joined pieces; labels and cotangents of some scores; sums that are computed before.
                let more = match *name {
                    "scores normalised over all rows" => 4,
                    "shares of each class, then of each row" => 2,
                    "the largest score of each row, added to columns" => 2,
                    _ if name.contains("columns") || name.contains("pieces") => 1,
                    _ if name.contains("some scores") => 2,
                    _ => 0,
                };
                assert_eq!(tiled.len(), products + more, "{name}");
                let some = feed(batch, seq, |i| {
                    if i % 5 == 3 {
                        -100
                    } else {
                        (i as i64 * 7) % CLASSES
                    }
                });
                compare(name, &whole, &parts, &some);
                compare(name, &whole, &parts, &feed(batch, seq, |_| -100));
            }
        }
    }
}

#[test]
fn pairs_are_scores_too_and_rows_may_have_sizes_that_a_step_tells() {
    torch::alone();
    for (name, form) in OF_PAIRS {
        let (whole, _) = training(form, "batch, seq", Tile::Off);
        for n in [2, 15] {
            let (parts, tiled) = training(form, "batch, seq", Tile::Chunks(n));
            let counts: Vec<usize> = tiled.iter().map(|(_, count)| *count).collect();
            // Scores that are narrow beside the pairs they are made of are a region of their own.
            assert!(
                [&[n][..], &[n, n]].contains(&&counts[..]),
                "{name}: {counts:?}"
            );
            // Chunks without rows, too.
            for (batch, seq) in [(3, 5), (1, 2), (6, 1)] {
                compare(name, &whole, &parts, &feed(batch, seq, |_| 1));
            }
        }
    }
    let pairs = OF_PAIRS.iter().filter(|(name, _)| name.contains("rows"));
    for (name, form) in pairs {
        let (parts, _) = training(form, "32, 4", Tile::Chunks(8));
        let size = |v: &ckpt_passes::ir::Value| v.ty.as_ref()?.elements().as_const();
        let most = parts.values().filter_map(|(_, v)| size(v)).max();
        // An eighth of all pairs, with four features where these are compared.
        assert!(most <= Some(128 * 128 / 8 * 4), "{name}: {most:?}");
    }
}

#[test]
fn what_rows_share_in_several_ways_keeps_its_meaning() {
    torch::alone();
    for (name, form) in SEVERAL_WAYS {
        for (sizes, batch, seq) in [("batch, seq", 3, 3), ("5, 5", 5, 5), ("batch, 2", 2, 2)] {
            let (whole, _) = compiled(form, sizes, Tile::Off);
            for n in [2, 15] {
                let (parts, _) = compiled(form, sizes, Tile::Chunks(n));
                let some = |i: usize| if i % 3 == 1 { -100 } else { 1 };
                compare(name, &whole, &parts, &feed(batch, seq, some));
            }
        }
    }
}

/// Returns one form for two: the sum of both losses.
fn both(a: &str, b: &str) -> String {
    let made: Vec<&str> = b
        .lines()
        .filter_map(|line| line.split_once(" = "))
        .flat_map(|(made, _)| made.trim().split(", "))
        .collect();
    let renamed = b.split_inclusive([' ', ',', '\n']).map(|word| {
        let name = word.trim_end_matches([' ', ',', '\n']);
        match made.contains(&name) {
            true => word.replacen(name, &format!("{name}.b"), 1),
            false => word.to_string(),
        }
    });
    let renamed: String = renamed.collect();
    let a = a.replace("%total =", "%total.a =");
    format!("{a}\n  {renamed}\n  %total = Add %total.a, %total.b")
}

/// Regions that are found in one round share operands and what is computed before them.
#[test]
fn losses_beside_each_other_keep_their_operands() {
    torch::alone();
    let some = feed(3, 5, |i| {
        if i % 5 == 3 {
            -100
        } else {
            (i as i64 * 7) % CLASSES
        }
    });
    let all: Vec<_> = FORMS.iter().chain(OF_PAIRS).collect();
    for (i, (name, form)) in all.iter().enumerate() {
        for step in [1, 5] {
            let (other, beside) = all[(i + step) % all.len()];
            let form = both(form, beside);
            let name = format!("{name} and {other}");
            let (whole, _) = compiled(&form, "3, 5", Tile::Off);
            let (parts, done) = compiled(&form, "3, 5", Tile::Chunks(4));
            assert!(!done.tiled.is_empty(), "{name}: {:?}", done.warnings);
            compare(&name, &whole, &parts, &some);
        }
    }
}

/// Copies that let a region exist go again where it is not cut in the end.
#[test]
fn what_is_not_cut_stays_as_it_was() {
    for (name, form) in FORMS.iter().chain(BY_EXAMPLE).chain(OF_PAIRS) {
        let (mut graph, _) = compiled(form, "3, 5", Tile::Off);
        dce(&mut graph);
        let before = graph.order().len();
        let first = tile(&mut graph, &|_, _| 1).unwrap_or_else(|e| panic!("{e}"));
        assert!(first.regions.is_empty());
        assert!(first.rewritten || graph.order().len() == before, "{name}");
        // A rewritten reduction stays, and is not rewritten again.
        dce(&mut graph);
        let text = text::print(&graph);
        tile(&mut graph, &|_, _| 1).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(text, text::print(&graph), "{name}");
    }
}

#[test]
fn examples_are_cut_where_tokens_of_an_example_are_mixed() {
    torch::alone();
    let some = feed(3, 5, |i| {
        if i % 5 == 3 {
            -100
        } else {
            (i as i64 * 7) % CLASSES
        }
    });
    for (name, form) in BY_EXAMPLE {
        let (whole, _) = training(form, "3, 5", Tile::Off);
        for n in [2, 3, 40] {
            let (parts, tiled) = training(form, "3, 5", Tile::Chunks(n));
            let counts: Vec<usize> = tiled.iter().map(|(_, count)| *count).collect();
            assert_eq!(counts, [n.min(3)], "{name}");
            compare(name, &whole, &parts, &some);
        }
        let (_, alone) = compiled(form, "1, 5", Tile::Chunks(2));
        let said = &alone.warnings;
        let why = ["one example only", "rows are mixed by a product"];
        let is_said = said[0].contains("stay whole") && why.iter().any(|why| said[0].contains(why));
        assert!(is_said, "{name}: {said:?}");
    }
}

#[test]
fn a_plan_changes_no_bit_and_peaks_where_predicted() {
    torch::alone();
    let some = feed(3, 5, |i| (i as i64 * 7) % CLASSES);
    let image = |(name, _): &&(&str, &str)| name.contains("pixel") || name.contains("picture");
    for (name, form) in FORMS.iter().filter(image).chain(BY_EXAMPLE) {
        let (kept, _) = training(form, "3, 5", Tile::Chunks(3));
        let mut graph = model(form, "3, 5");
        let request = request(&graph, Tile::Chunks(3), Policy::SELECTIVE);
        let done = compile(&mut graph, &request, &mut Watch::default());
        let plan = done.unwrap_or_else(|e| panic!("{e}")).planned.unwrap();
        let program = Program::new(&graph).unwrap_or_else(|e| panic!("{e}"));
        let ran = program.run(&some).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(ran.peak_bytes, plan.outcome.plan.after.peak_bytes, "{name}");
        let unplanned = run(&kept, &some);
        for (output, x) in ran.outputs {
            assert!(x.equal(&unplanned[&output]), "{name}: {output}");
        }
    }
}

#[test]
fn no_part_holds_all_scores() {
    let named = [
        "mean with class",
        "columns",
        "sampled",
        "pieces",
        "mean of all",
        "running",
        "normalised over all",
        "temperature of each",
        "norm of their own",
        "largest score",
        "mean embedding",
        "shares of each class",
    ];
    for name in named {
        let (_, form) = FORMS.iter().find(|(n, _)| n.contains(name)).unwrap();
        let (parts, tiled) = training(form, "32, 4", Tile::Chunks(8));
        assert_eq!(tiled[0].1, 8);
        let scores = match name {
            "columns" | "largest score" => 128 * 128,
            _ => 128 * (CLASSES - 2),
        };
        let wide = |v: &ckpt_passes::ir::Value| {
            let n = v.ty.as_ref().and_then(|t| t.elements().as_const());
            n.is_some_and(|n| n >= scores)
        };
        let none = !parts.values().any(|(_, v)| wide(v));
        assert!(none, "{name}: {}", text::print(&parts));
    }
}

#[test]
fn scores_that_are_an_output_stay_whole_and_say_why() {
    let mut graph = model(FORMS[0].1, "batch, seq");
    let scores = graph.find_value("s").unwrap();
    graph.add_output(scores);
    let mut request = Request {
        loss: Loss::Output("total".into()),
        plan: Policy::NONE.into(),
        tile: Tiles {
            loss: Tile::Chunks(4),
            ..Tiles::default()
        },
        ..Request::default()
    };
    request.selection.trainable = vec!["w".into()];
    let done =
        compile(&mut graph, &request, &mut Watch::default()).unwrap_or_else(|e| panic!("{e}"));
    assert!(done.tiled.is_empty());
    assert!(
        done.warnings[0].contains("an output of the model"),
        "{:?}",
        done.warnings
    );
}

#[test]
fn a_sum_of_narrow_terms_has_the_bits_of_a_cast_and_an_add() {
    torch::alone();
    let graph = text::parse(
        "graph @g typed (%sum: f32[r, c], %part: bf16[r, c]) -> (%a, %b) {
  %a = Accumulate %sum, %part : f32[r, c]
  %wide = Cast %part {to=f32} : f32[r, c]
  %b = Add %sum, %wide : f32[r, c]
}
",
    )
    .unwrap_or_else(|e| panic!("{e}"));
    for (r, c) in [(2500, 700), (3, 5), (1, 1)] {
        let numbers = |step: i64| -> Vec<f64> {
            let number = |i: i64| ((i * step % 1009) as f64 - 500.0) / 37.0;
            (0..r * c).map(number).collect()
        };
        let feed = BTreeMap::from([
            ("sum".into(), tensor(DType::F32, &[r, c], &numbers(29))),
            ("part".into(), tensor(DType::BF16, &[r, c], &numbers(31))),
        ]);
        let done = run(&graph, &feed);
        assert!(done["a"].equal(&done["b"]), "{r} {c}");
    }
}
