//! Attentions in the forms exporters write, and near misses: what the analysis says of each.

use ckpt_passes::analysis::Layers;
use ckpt_passes::analysis::attention::summary::summaries;
use ckpt_passes::ir::Dim;
use ckpt_passes::ops::attention::ATTENTION;
use ckpt_passes::text::parse;
use ckpt_passes::transform::fuse::fuse;
use ckpt_passes::transform::infer::infer;

/// Constants that the graphs below use.
const INITS: &str = "
  init %zero : i64[] = 0
  init %one : i64[] = 1
  init %three : i64[] = 3
  init %a0 : i64[1] = [0]
  init %a1 : i64[1] = [1]
  init %a2 : i64[1] = [2]
  init %a3 : i64[1] = [3]
  init %last : i64[1] = [-1]
  init %s : f32[] = 0.25
  init %root : f32[] = 0.5
  init %four : f32[1] = [4.0]
  init %none : f32[] = 0.0
  init %low : f32[] = -inf
  init %min : f32[] = -3.4028235e38
  init %ten : f32[] = -10000.0
  init %tiny : f32[] = 1e-10
  init %true : bool[] = true
  init %till : i64[1] = [9223372036854775807]
";

/// Positions of queries as a column and of keys as a row, and whether a query comes first: all [seq, seq] or wider.
const POSITIONS: &str = "
  %len = Shape %q {start=2, end=3}
  %count = Squeeze %len
  %range = Range %zero, %count, %one
  %row = Unsqueeze %range, %a1
  %column = Unsqueeze %range, %a0
  %seen = LessOrEqual %column, %row
";

fn graph(body: &str, output: &str) -> String {
    format!(
        "graph @g imported (%q: f32[batch, 8, seq, 16], %k: f32[batch, 8, seq, 16], \
         %v: f32[batch, 8, seq, 16], %kv: f32[batch, 2, seq, 16], %pad: bool[batch, 1, 1, seq], \
         %doc: i64[batch, seq], %part: i64[batch, seq], %bias: f32[8, seq, seq], %big: f32[batch, 8, seq, seq]) -> ({output}) {{{INITS}{body}}}\n"
    )
}

/// One line an attention.
fn said(body: &str, output: &str) -> Vec<String> {
    let text = graph(body, output);
    let mut g = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    infer(&mut g).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let blocks = Layers::new(&g).unwrap();
    let size = |d: &Option<Dim>| d.as_ref().map_or("?".into(), Dim::to_string);
    summaries(&g, &blocks.attentions, &blocks.of)
        .unwrap()
        .iter()
        .map(|r| {
            let mut line = format!(
                "{}/{} of {}",
                size(&r.heads),
                size(&r.kv_heads),
                size(&r.head_size)
            );
            if r.causal {
                line += " causal";
            }
            if r.segments {
                line += " segments";
            }
            if let Some(w) = r.window {
                line += &format!(" window {w}");
            }
            line += &format!(" {}", r.mask);
            if let Some(scale) = r.scale {
                line += &format!(" scale {scale}");
            }
            if let Some(cap) = r.softcap {
                line += &format!(" softcap {cap}");
            }
            if let Some(why) = &r.obstacle {
                line += &format!("; {why}");
            }
            line
        })
        .collect()
}

/// How many attentions become one op.
fn fused(body: &str, output: &str) -> usize {
    let mut g = parse(&graph(body, output)).unwrap();
    infer(&mut g).unwrap();
    fuse(&mut g).unwrap();
    let nodes = g.order().iter().map(|id| g.node(*id));
    nodes.filter(|n| n.op == &ATTENTION).count()
}

fn one(body: &str) -> String {
    let lines = said(body, "%y");
    assert_eq!(lines.len(), 1, "{lines:?}\n{body}");
    lines[0].clone()
}

const SCORES: &str = "
  %kt = Transpose %k {perm=[0, 1, 3, 2]}
  %qk = MatMul %q, %kt
";

#[test]
fn scales() {
    let tail = "
  %p = Softmax %z
  %y = MatMul %p, %v
";
    for (body, scale) in [
        ("%z = Mul %qk, %s", "0.25"),
        ("%z = Mul %s, %qk", "0.25"),
        ("%z = Div %qk, %four", "0.25"),
        ("%z = Identity %qk", "1"),
    ] {
        assert_eq!(
            one(&format!("{SCORES}  {body}{tail}")),
            format!("8/8 of 16 none scale {scale}")
        );
    }
    // One over the root of the size, computed, on both sides: half on the keys behind a detour through three axes.
    let split = "
  %shape = Shape %q
  %size = Slice %shape, %last, %to, %a0
  %f = Cast %size {to=f32}
  %r = Sqrt %f
  %half = Reciprocal %r
  %both = Sqrt %half
  %qs = Mul %q, %both
  %flat = Reshape %k, %merged
  %turned = Transpose %flat {perm=[0, 2, 1]}
  %apart = Reshape %turned, %split
  %ks = Mul %both, %apart
  %z = MatMul %qs, %ks
";
    let shapes = "
  init %to : i64[1] = [9223372036854775807]
  init %sixteen : i64[1] = [16]
  init %eight : i64[1] = [8]
  %b = Shape %q {start=0, end=1}
  %n = Shape %q {start=2, end=3}
  %merged = Concat %last, %n, %sixteen {axis=0}
  %split = Concat %b, %eight, %sixteen, %n {axis=0}
";
    assert_eq!(
        one(&format!("{shapes}{split}{tail}")),
        "8/8 of 16 none scale 0.25"
    );
}

#[test]
fn masks() {
    for (body, expected) in [
        (
            "%m = Where %seen, %none, %low\n %z = Add %qk, %m",
            "causal none",
        ),
        (
            "%m = Where %seen, %none, %min\n %z = Add %m, %qk",
            "causal none",
        ),
        ("%z = Where %seen, %qk, %low", "causal none"),
        ("%z = Where %seen, %qk, %min", "causal none"),
        (
            "%hide = Not %seen\n %z = Where %hide, %low, %qk",
            "causal none",
        ),
        // Low enough to mean a mask, too high to be one for certain.
        (
            "%m = Where %seen, %none, %ten\n %z = Add %qk, %m",
            "causal additive",
        ),
        (
            "%all = Or %seen, %true\n %m = Where %all, %none, %low\n %z = Add %qk, %m",
            "none",
        ),
        (
            "%both = And %seen, %pad\n %m = Where %both, %none, %low\n %z = Add %qk, %m",
            "causal bool",
        ),
        // A row of nothing but lowest numbers is a softmax of its own: the bias stays whole.
        (
            "%both = And %seen, %pad\n %m = Where %both, %none, %min\n %z = Add %qk, %m",
            "causal additive",
        ),
        ("%m = Where %pad, %none, %low\n %z = Add %qk, %m", "bool"),
        ("%z = Add %qk, %bias", "additive"),
        (
            "%m = Where %seen, %none, %low\n %n = Add %m, %bias\n %z = Add %qk, %n",
            "causal additive",
        ),
        (
            "%from = Sub %row, %three\n %near = Greater %column, %from\n %w = And %near, %seen\n \
          %m = Where %w, %none, %low\n %z = Add %qk, %m",
            "causal window 3 none",
        ),
        (
            "%gap = Sub %row, %column\n %far = Abs %gap\n %near = Less %gap, %three\n %back = Neg %gap\n \
          %front = Less %back, %three\n %w = And %near, %front\n %z = Where %w, %qk, %low",
            "window 5 none",
        ),
        (
            "%square = Concat %len, %len {axis=0}\n %ones = ConstantOfShape %square {value=tensor f32[1] [1.0]}\n \
          %tri = Trilu %ones {upper=0}\n %off = Equal %tri, %none\n %m = Where %off, %low, %none\n \
          %z = Add %qk, %m",
            "causal none",
        ),
        // The other triangle.
        (
            "%m = GreaterOrEqual %column, %row\n %z = Where %m, %qk, %low",
            "none",
        ),
    ] {
        let body =
            format!("{POSITIONS}{SCORES}  {body}\n  %p = Softmax %z\n  %y = MatMul %p, %v\n");
        let expected = format!("8/8 of 16 {expected} scale 1");
        if body.contains("%m = GreaterOrEqual") {
            // Query i sees keys from i on: a band, but not a causal one; nothing stays to be an operand.
            assert_eq!(one(&body), expected);
            continue;
        }
        assert_eq!(one(&body), expected, "{body}");
    }
}

/// A query sees the keys of its own document: numbers of documents are compared, or positions that start again.
#[test]
fn packed_sequences() {
    let tail = "
  %p = Softmax %z
  %y = MatMul %p, %v
";
    let documents = "
  %own = Unsqueeze %doc, %a2
  %other = Unsqueeze %doc, %a1
  %same3 = Equal %own, %other
  %same = Unsqueeze %same3, %a1
  %within = And %seen, %same
";
    let said = |body: &str| one(&format!("{POSITIONS}{SCORES}{documents}{body}{tail}"));
    for (body, expected) in [
        (
            "%m = Where %same, %none, %low\n %z = Add %qk, %m",
            "segments none",
        ),
        (
            "%m = Where %within, %none, %min\n %z = Add %qk, %m",
            "causal segments none",
        ),
        ("%z = Where %within, %qk, %low", "causal segments none"),
        (
            "%no = Not %within\n %z = Where %no, %min, %qk",
            "causal segments none",
        ),
        // Two masks, one after the other.
        (
            "%m = Where %seen, %none, %low\n %z1 = Add %qk, %m\n %z = Where %same, %z1, %low",
            "causal segments none",
        ),
        // By a difference.
        (
            "%d = Sub %other, %own\n %e = Equal %d, %zero\n %f = Unsqueeze %e, %a1\n %z = Where %f, %qk, %low",
            "segments none",
        ),
        // Numbers that many documents share: one for all places, by row.
        (
            "%all = And %within, %pad\n %z = Where %all, %qk, %low",
            "causal segments bool",
        ),
        // Two numbers for each place: one as segments, the other as it is.
        (
            "%o2 = Unsqueeze %part, %a2\n %k2 = Unsqueeze %part, %a1\n %e2 = Equal %o2, %k2\n \
             %e4 = Unsqueeze %e2, %a1\n %all = And %within, %e4\n %z = Where %all, %qk, %low",
            "causal segments bool",
        ),
        // One side of a comparison, or two values, or another row: no segments.
        (
            "%e = LessOrEqual %other, %own\n %f = Unsqueeze %e, %a1\n %z = Where %f, %qk, %low",
            "bool",
        ),
        (
            "%k2 = Unsqueeze %part, %a1\n %e2 = Equal %own, %k2\n %f = Unsqueeze %e2, %a1\n \
             %z = Where %f, %qk, %low",
            "bool",
        ),
        ("%or = Or %seen, %same\n %z = Where %or, %qk, %low", "bool"),
        // Off by one: the key before.
        (
            "%d = Sub %other, %own\n %e = Equal %d, %one\n %f = Unsqueeze %e, %a1\n %z = Where %f, %qk, %low",
            "bool",
        ),
        // Of the first entry of the batch only.
        (
            "%first = Slice %doc, %a0, %a1, %a0\n %o2 = Unsqueeze %first, %a2\n %k2 = Unsqueeze %first, %a1\n \
             %e2 = Equal %o2, %k2\n %f = Unsqueeze %e2, %a1\n %z = Where %f, %qk, %low",
            "bool",
        ),
    ] {
        let line = said(body);
        let expected = format!("8/8 of 16 {expected} scale 1");
        assert_eq!(line, expected, "{body}");
    }
    // transformers writes the causal mask with positions that start again, of segments that these positions make.
    let jumps = "
  %first = Slice %doc, %a0, %a1, %a1
  %before = Sub %first, %one
  %all = Concat %before, %doc {axis=1}
  %head = Slice %all, %a0, %last, %a1
  %tail = Slice %all, %a1, %till, %a1
  %step = Sub %tail, %head
  %goes = Equal %step, %one
  %jump = Not %goes
  %jumps = Cast %jump {to=i64}
  %number = CumSum %jumps, %one
  %so = Unsqueeze %number, %a2
  %sk = Unsqueeze %number, %a1
  %apart = Equal %so, %sk
  %own = Unsqueeze %doc, %a2
  %other = Unsqueeze %doc, %a1
  %near = Sub %own, %three
";
    let tail = "
  %x = And %apart, %ordered
  %f = Unsqueeze %x, %a1
  %m = Where %f, %none, %low
  %z = Add %qk, %m
  %p = Softmax %z
  %y = MatMul %p, %v
";
    let causal = "%ordered = LessOrEqual %other, %own";
    let window =
        "%a = LessOrEqual %other, %own\n %b = Greater %other, %near\n %ordered = And %a, %b";
    for (change, ordered, expected) in [
        (("", ""), causal, "causal segments none"),
        (("", ""), window, "causal segments window 3 none"),
        (("", ""), "%ordered = Greater %own, %other", "bool"),
        // Segments that say nothing of positions within: they start where a position is 0, or grow on their own.
        (
            ("%jump = Not %goes", "%jump = Equal %doc, %zero"),
            causal,
            "bool",
        ),
        (
            ("%jump = Not %goes", "%jump = Equal %step, %one"),
            causal,
            "bool",
        ),
        (("%step, %one", "%step, %three"), causal, "bool"),
        (
            (
                "%number = CumSum %jumps, %one",
                "%number = CumSum %jumps, %one {exclusive=1}",
            ),
            causal,
            "bool",
        ),
        (
            (
                "%number = CumSum %jumps, %one",
                "%number = CumSum %jumps, %one {reverse=1}",
            ),
            causal,
            "bool",
        ),
        (
            (
                "%number = CumSum %jumps, %one",
                "%number = CumSum %jumps, %zero",
            ),
            causal,
            "bool",
        ),
    ] {
        let jumps = match change.0 {
            "" => jumps.to_string(),
            from => {
                assert!(jumps.contains(from));
                jumps.replace(from, change.1)
            }
        };
        let line = one(&format!("{POSITIONS}{SCORES}{jumps}{ordered}{tail}"));
        assert_eq!(
            line,
            format!("8/8 of 16 {expected} scale 1"),
            "{change:?} {ordered}"
        );
    }
}

#[test]
fn softcap_casts_and_guards() {
    let cap = "
  init %fifty : f32[] = 50.0
  %small = Div %qk, %fifty
  %t = Tanh %small
  %big2 = Mul %t, %fifty
";
    let rest = "
  %m = Where %seen, %none, %low
  %z = Add %big2, %m
  %wide = Cast %z {to=f64}
  %soft = Softmax %wide
  %p = Cast %soft {to=f32}
  %nan = IsNaN %p
  %safe = Where %nan, %none, %p
  %y = MatMul %safe, %v
";
    assert_eq!(
        one(&format!("{POSITIONS}{SCORES}{cap}{rest}")),
        "8/8 of 16 causal none scale 1 softcap 50"
    );
}

#[test]
fn grouped_queries() {
    let shapes = "
  init %eight : i64[1] = [8]
  init %sixteen : i64[1] = [16]
  init %two : i64[1] = [2]
  init %four4 : i64[1] = [4]
  %b = Shape %q {start=0, end=1}
  %n = Shape %q {start=2, end=3}
  %wide = Concat %b, %two, %four4, %n, %sixteen {axis=0}
  %flat = Concat %b, %eight, %n, %sixteen {axis=0}
";
    let repeat = |name: &str| {
        format!(
            "
  %{name}5 = Unsqueeze %kv, %a2
  %{name}e = Expand %{name}5, %wide
  %{name}r = Reshape %{name}e, %flat
"
        )
    };
    let rest = "
  %kt = Transpose %kr {perm=[0, 1, 3, 2]}
  %qk = MatMul %q, %kt
  %p = Softmax %qk
  %y = MatMul %p, %vr
";
    let both = repeat("k") + &repeat("v");
    assert_eq!(
        one(&format!("{shapes}{both}{rest}")),
        "8/2 of 16 none scale 1"
    );
    // Heads in the other order (0 1 0 1 …) are another thing than heads that repeat.
    let tiled = both.replace("%a2", "%a1").replace("%wide", "%other");
    let other = "  %other = Concat %b, %four4, %two, %n, %sixteen {axis=0}\n";
    assert_eq!(
        one(&format!("{shapes}{other}{tiled}{rest}")),
        "8/8 of 16 none scale 1"
    );
}

#[test]
fn masks_that_are_scaled_with_the_scores() {
    let scaled = |mask: &str, by: &str| {
        let scores = format!("  %m = {mask}\n  %a = Add %qk, %m\n  %z = {by}\n");
        let rest = "  %p = Softmax %z\n  %y = MatMul %p, %v\n";
        one(&format!("{POSITIONS}{SCORES}{scores}{rest}"))
    };
    let known = "8/8 of 16 causal none scale 0.25";
    assert_eq!(scaled("Where %seen, %none, %low", "Mul %a, %s"), known);
    assert_eq!(scaled("Where %seen, %none, %min", "Div %a, %four"), known);
    let why = "the mask is scaled with the scores";
    for (mask, by) in [
        ("Where %seen, %none, %ten", "Mul %a, %s"),
        ("Where %seen, %none, %min", "Mul %a, %tiny"),
        ("Identity %bias", "Mul %a, %s"),
    ] {
        let found = scaled(mask, by);
        assert!(found.ends_with(why), "{mask} {by}: {found}");
    }
    // Beside a mask that may hide the other keys of a query, the lower number decides.
    for outer in ["Add %b, %m2", "Where %pad, %b, %min"] {
        let found = one(&format!(
            "{POSITIONS}{SCORES}  %m = Where %seen, %none, %min
  %m2 = Where %pad, %none, %min
  %a = Add %qk, %m
  %b = Mul %a, %s
  %z = {outer}
  %p = Softmax %z
  %y = MatMul %p, %v
"
        ));
        assert!(found.ends_with(why) || found.contains("differ"), "{found}");
    }
}

/// A column that is joined to the scores before the softmax and dropped after it.
#[test]
fn sinks() {
    let rows = "
  init %sink : f32[1, 8, 1, 1] = splat 0.5
  init %two : f32[1, 8, 1, 2] = splat 0.5
  %shape = Shape %q {start=0, end=3}
  %rows = Concat %shape, %a1 {axis=0}
  %wide = Concat %shape, %a2 {axis=0}
  %column = Expand %sink, %rows
  %columns = Expand %two, %wide
  %count = Shape %q {start=2, end=3}
  %more = Add %count, %a1
";
    let step = |joined: &str, softmax: &str, kept: &str| {
        let scores = format!("{SCORES}{rows}  %z = Mul %qk, %s\n");
        let softmax = format!("{joined} {{axis=3}}\n{softmax}");
        let rest = format!("  %p = Slice %both, {kept}, %a3\n  %y = MatMul %p, %v\n");
        scores + &softmax + &rest
    };
    let behind = "  %all = Concat %z, %column";
    let before = "  %all = Concat %column, %z";
    let (first, last) = ("%a0, %count", "%a1, %more");
    let shifted =
        |shift: &str| format!("{shift}  %less = Sub %all, %max\n  %both = Softmax %less\n");
    let plain = "  %both = Softmax %all {axis=3}\n";
    let largest = shifted("  %max = ReduceMax %all, %a3 {keepdims=1}\n");
    let chosen =
        shifted("  %best = ArgMax %all {axis=3}\n  %max = GatherElements %all, %best {axis=3}\n");
    for softmax in [plain, &largest, &chosen] {
        for (joined, kept) in [(behind, first), (before, last)] {
            let body = step(joined, softmax, kept);
            assert_eq!(one(&body), "8/8 of 16 none scale 0.25", "{body}");
            assert_eq!(fused(&body, "%y"), 1, "{body}");
        }
    }
    let of_others = shifted("  %max = ReduceMax %big, %a3 {keepdims=1}\n");
    let scaled = "  %less = Mul %all, %s\n  %both = Softmax %less\n";
    let capped = "  %less = Tanh %all\n  %both = Softmax %less\n";
    let masked = "  %less = Add %all, %tiny\n  %both = Softmax %less\n";
    let inside = "  %max = ReduceMax %z, %a3 {keepdims=1}\n  %less = Sub %z, %max\n  %all = Concat %less, %column";
    for (joined, softmax, kept) in [
        // The wrong column is dropped.
        (behind, plain, last),
        (before, plain, first),
        // Two columns; only the scores are shifted, or by other scores.
        ("  %all = Concat %z, %columns", plain, first),
        (inside, plain, first),
        (behind, &of_others, first),
        // The sink is scaled, capped or masked too.
        (behind, scaled, first),
        (behind, capped, first),
        (behind, masked, first),
    ] {
        let body = step(joined, softmax, kept);
        assert_eq!(fused(&body, "%y"), 0, "{body}");
    }
    // The weight of the sink, or the shift, is read elsewhere.
    let body = step(behind, plain, first);
    let weight = format!("{body}  %w = Slice %both, %count, %more, %a3\n");
    assert_eq!(fused(&weight, "%y, %w"), 0);
    let body = step(behind, &largest, first);
    assert_eq!(fused(&body, "%y, %max"), 0);
    // A sink from outside may be as low as what hides a key.
    let given = "Slice %big, %a0, %a1, %a3";
    let body = step(behind, plain, first).replace("Expand %sink, %rows", given);
    assert_eq!(fused(&body, "%y"), 0);
}

#[test]
fn what_is_read_elsewhere_is_no_one_op() {
    let body = format!("{SCORES}  %p = Softmax %qk\n  %y = MatMul %p, %v\n");
    let out = said(&body, "%y, %p");
    assert_eq!(
        out,
        ["8/8 of 16 none scale 1; the probabilities are an output of the model"]
    );
    let out = said(&body, "%y, %qk");
    assert_eq!(
        out,
        ["8/8 of 16 none scale 1; the scores are read elsewhere, too"]
    );
    let twice = format!("{body}  %w = MatMul %p, %k\n");
    let out = said(&twice, "%y, %w");
    assert_eq!(
        out,
        ["8/8 of 16 none scale 1; the probabilities are read elsewhere, too"]
    );
    let dropped =
        format!("{SCORES}  %p = Softmax %qk\n  %d = Mul %p, %big\n  %y = MatMul %d, %v\n");
    let out = said(&dropped, "%y");
    assert!(
        out[0].ends_with("before they weigh the values (dropout)"),
        "{out:?}"
    );
}

#[test]
fn products_that_are_no_attention() {
    for body in [
        // Probabilities over another axis.
        format!("{SCORES}  %p = Softmax %qk {{axis=2}}\n  %y = MatMul %p, %v\n"),
        // A classifier's softmax.
        "  %p = Softmax %big\n  %y = Neg %p\n".to_string(),
    ] {
        let lines = said(&body, "%y");
        assert!(
            lines.iter().all(|l| l.starts_with("?/?")),
            "{lines:?}\n{body}"
        );
    }
}
