//! A decoder with a mixture of experts as PyTorch exports it: it sorts the tokens by expert, multiplies them, and restores their order.

use super::Random;
use crate::ir::Graph;
use crate::text;

/// Returns a model of one causal attention and four experts, of which each token takes two. `between` is a line between the
/// two products of the experts, which makes `%z` of `%y`.
pub fn mixture_of_experts(between: &str) -> Graph {
    let mut random = Random::new(5);
    let mut weight = |name: &str, dims: &[usize]| {
        let numbers = (0..dims.iter().product()).map(|_| (random.unit() - 0.5).to_string());
        let numbers: Vec<String> = numbers.collect();
        format!("  init %{name} : f32{dims:?} = [{}]\n", numbers.join(", "))
    };
    let weights: String = [
        ("table", &[50, 8][..]),
        ("router", &[8, 4]),
        ("up", &[4, 8, 12]),
        ("biases", &[4, 12]),
        ("down", &[4, 8, 12]),
        ("head", &[8, 50]),
    ]
    .iter()
    .map(|(name, dims)| weight(name, dims))
    .collect();
    let source = format!(
        "graph @mixture imported (%input_ids: i64[batch, seq]) -> (%logits) {{
{weights}  init %all : i64[1] = [-1]
  init %axis_0 : i64[1] = [0]
  init %axis_1 : i64[1] = [1]
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %two : i64[] = 2
  init %pair : i64[1] = [2]
  init %wide : i64[2] = [-1, 8]
  init %pairs : i64[3] = [-1, 2, 8]
  %x = Gather %table, %input_ids
  %q = Unsqueeze %x, %axis_1
  %a = Attention %q, %q, %q {{causal=1}}
  %mixed = Squeeze %a, %axis_1
  %h = Add %x, %mixed
  %rows = Reshape %h, %wide
  %scores = MatMul %rows, %router
  %shares = Softmax %scores {{axis=1}}
  %top, %which = TopK %shares, %pair {{axis=1}}
  %share = Reshape %top, %all
  %expert = Reshape %which, %all
  %count = Shape %expert
  %sorted, %order = TopK %expert, %count {{axis=0, largest=0}}
  %rest = Mod %order, %two
  %whole = Sub %order, %rest
  %token = Div %whole, %two
  %taken = Gather %rows, %token
  %own_share = Gather %share, %order
  %y = GroupedMatMul %taken, %up, %sorted
{between}
  %made = GroupedMatMul %z, %down, %sorted {{transB=1}}
  %column = Unsqueeze %own_share, %axis_1
  %weighted = Mul %made, %column
  %empty = Expand %zero, %count
  %n = Squeeze %count, %axis_0
  %numbers = Range %zero, %n, %one
  %places = Unsqueeze %order, %all
  %back = ScatterND %empty, %places, %numbers
  %again = Gather %weighted, %back
  %both = Reshape %again, %pairs
  %sum = ReduceSum %both, %axis_1 {{keepdims=0}}
  %shape = Shape %h
  %out = Reshape %sum, %shape
  %last = Add %h, %out
  %logits = MatMul %last, %head
}}
"
    );
    text::parse(&source).unwrap_or_else(|e| panic!("{e}"))
}
