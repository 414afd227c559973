//! Print and parse are exact inverses, errors say where, and no text makes the parser panic.

use super::*;
use crate::ir::{Atom, Data, Dim};

/// Everything the language has, in canonical form.
const ALL: &str = r#"graph @"a graph" rewritten (%x: f32[batch, 1 + seq, 64], %y: f32[64] origin "p.y" buffer) -> (%s, %x) {
  meta producer = "py\"torch\"\n"
  init %w : f32[64] = hash "0123456789abcdef" origin "fc.weight", "tied.weight" transposed parameter
  init %far : f32[2, 2] = file "w.bin" offset 4096 length 16
  init %n : f32[3] = [nan(0x7fc00001), -inf, -0.0]
  init %h : f16[2] = [0.099975586, 65504.0]
  init %b : bool[2] = [true, false]
  init %empty : i64[0] = []
  init %zeros : f32[4, 4] = splat 0.0
  init %u : u64[] = 18446744073709551615
  %x.1 = Add %x, %y : f32[batch, seq + 1, 64] name "fc/Add"
scope "model.layers.0" is "Layer", "model.layers.0.fc":
  %"odd name" = Mul %x.1, %w : f32[batch, seq + 1, 64] @fc/Mul meta {"a key"="v", ckpt.l="w"}
  %sh = Shape %x {end=2} : i64[2]
  %c = Cast %sh {to=f32} : f32[2]
backward:
  %g = Neg %"odd name" : f32[batch, seq + 1, 64] @fc/Mul
scope:
  %s = SumToShape %g, %sh : f32[batch, seq + 1]
  %x.1/recompute = Add %x, %y : f32[batch, seq + 1, 64] recompute_of %x.1 segment 3
  %g/recompute = Neg %"odd name" : f32[batch, seq + 1, 64] recompute_of %g role loss scope "other" is "Other", "o" @place
  %g/recompute.2 = Neg %"odd name" : f32[batch, seq + 1, 64] recompute_of %g scope meta {k="v"}
}
"#;

fn canonical() -> String {
    // The order of terms is the printer's.
    ALL.replace("1 + seq", "seq + 1")
}

#[test]
fn canonical_text_is_a_fixed_point() {
    let text = canonical();
    // Whether the header is one line or many is the printer's choice.
    let once = print(&parse(&text).unwrap_or_else(|e| panic!("{e}")));
    assert_eq!(print(&parse(&once).unwrap()), once);
    let body = |t: &str| t.split_once("{\n").unwrap().1.to_string();
    assert_eq!(body(&once), body(&text));
}

#[test]
fn spelling_does_not_matter() {
    let loose = ALL
        .replace(", ", " ,  ")
        .replace("  %", "%")
        .replace("\n", "   ; note\n\n");
    assert_eq!(print(&parse(&loose).unwrap()), print(&parse(ALL).unwrap()));
}

#[test]
fn a_hash_is_not_content() {
    let g = parse(ALL).unwrap();
    let w = g.value(g.find_value("w").unwrap()).tensor().unwrap();
    assert!(matches!(w.data, Data::Absent(_)));
    let filled = parse_filled(ALL).unwrap();
    let w = filled
        .value(filled.find_value("w").unwrap())
        .tensor()
        .unwrap();
    assert_eq!(w.bytes().map(|b| b.len()), Some(256));
    assert_eq!(print_full(&filled), print_full(&parse_filled(ALL).unwrap()));
    assert_eq!(
        print_full(&parse(&print_full(&filled)).unwrap()),
        print_full(&filled)
    );
}

#[test]
fn sizes_read_back() {
    let (a, b, q) = (Dim::symbol("a"), Dim::symbol("b c"), Dim::data("nz/x.0"));
    let two = Dim::from(2);
    let cases = [
        Dim::from(i64::MAX),
        Dim::from(-3),
        a.add(&b).mul(&a.sub(&two)),
        a.div(&two).mul(&two),
        q.modulo(&a),
        q.smaller(&a),
        b.larger(&q.add(&two)),
        a.broadcast(&b).unwrap(),
        Dim::from_atom(Atom::Broadcast(Dim::from(3), Dim::from(4))),
        a.div(&Dim::ZERO),
    ];
    for dim in cases {
        assert_eq!(parse_dim(&dim.to_string()).unwrap(), dim, "{dim}");
    }
    assert_eq!(parse_dim("(a + 1)*2 - a").unwrap(), a.add(&two));
    assert_eq!(parse_dim("-3//2").unwrap(), Dim::from(-2));
    assert_eq!(parse_dim("1 - 3//2").unwrap(), Dim::ZERO);
}

#[test]
fn names_of_dimensions_are_read_as_expressions_only_where_they_are() {
    let seq = Dim::symbol("seq");
    assert_eq!(parse_dim_param("seq + 1"), seq.add(&Dim::ONE));
    assert_eq!(parse_dim_param("2*seq"), seq.add(&seq));
    for negated in [
        "max(0, -seq + 64)",
        "min(-seq, 4)",
        "-max(0, -seq + 64) + 64",
    ] {
        let dim = parse_dim(negated).unwrap();
        assert_eq!(parse_dim_param(negated), dim, "{negated}");
        assert_eq!(dim.as_symbol(), None, "{negated}");
    }
    assert_eq!(parse_dim_param("floordiv(seq, 2)"), seq.div(&Dim::from(2)));
    assert_eq!(
        parse_dim_param("(seq - 1)//2"),
        seq.sub(&Dim::ONE).div(&Dim::from(2))
    );
    for name in [
        "sequence-length",
        "batch size",
        "-1",
        "7",
        "?",
        "",
        "a/b",
        "f(x)",
        "unk__0",
    ] {
        assert_eq!(parse_dim_param(name), Dim::symbol(name), "{name}");
    }
}

#[test]
fn errors_say_where() {
    let graph = |line: &str| {
        format!(
            "graph @g typed (%x: f32[2]) -> () {{\n  init %c : f32[9] = splat 0.5\n  {line}\n}}\n"
        )
    };
    let cases = [
        ("%y = Add %x, %z : f32[2]", "I2", "line 3, column 16"),
        ("%x = Neg %x : f32[2]", "I1", "line 3, column 3"),
        ("%y = Negate %x : f32[2]", "op", "line 3, column 8"),
        ("%y = Add %x : f32[2]", "arity", "line 3, column 3"),
        (
            "%y = Neg %x {axis=1} : f32[2]",
            "attribute",
            "line 3, column 3",
        ),
        (
            "%y = Cast %x {to=1} : f32[2]",
            "attribute",
            "line 3, column 3",
        ),
        ("%y = Cast %x : f32[2]", "attribute", "line 3, column 3"),
        ("%y = Neg %x : f32[2], f32[2]", "parse", "line 3, column 31"),
        (
            "%y = Neg %x : f32[2] recompute_of %x",
            "recompute",
            "line 3, column 37",
        ),
        ("%y = Neg %x : f32[2] colour", "parse", "line 3, column 24"),
        ("%y = Neg %x : f32[2", "parse", "line 3, column 22"),
        ("init %d : f32[2] = [1.0]", "parse", "line 3, column 27"),
        ("init %d : i8[1] = [300]", "parse", "line 3, column 25"),
        (
            "init %d : f32[9999999999] = splat 0.0",
            "parse",
            "line 3, column 36",
        ),
        (
            "init %d : f32[9999999999, 9999999999] = hash \"0\"",
            "parse",
            "line 3, column 42",
        ),
        (
            "init %d : f32[seq] = hash \"0\"",
            "parse",
            "line 3, column 13",
        ),
        ("init %d : f16[] = 1e9", "parse", "line 3, column 24"),
    ];
    for (line, code, place) in cases {
        let error = parse(&graph(line)).map(|g| print(&g)).unwrap_err();
        let at = error.notes().find(|(label, _)| *label == "at").unwrap().1;
        assert_eq!(
            (error.code(), at.lines().next().unwrap()),
            (code, place),
            "{error}"
        );
        assert_eq!(error.exit_code(), 2);
    }
    let error = parse(&graph("%y = Neg %x : f32[3]"))
        .map(|g| print(&g))
        .unwrap_err();
    assert_eq!((error.code(), error.exit_code()), ("verify", 2));
}

#[test]
fn enormous_expressions_are_refused_quickly() {
    let deep = format!("{}1{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(parse_dim(&deep).is_err());
    let wide = vec!["(a + b + c + d + e + f)"; 40].join("*");
    assert!(parse_dim(&wide).is_err());
    let tall = vec!["a"; 10_000].join("*");
    assert!(parse_dim(&tall).is_err());
    assert!(parse_dim(&"-".repeat(100_000)).is_err());
}

/// Cuts, repeats and overwrites pieces of a valid text: whatever comes out parses or is refused, and what parses
/// prints to a text that reads back the same.
#[test]
fn mangled_text_never_panics() {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut random = move |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % n.max(1)
    };
    let pieces = [
        "%",
        "@",
        "\"",
        "\\u{",
        "[",
        "]",
        "{",
        "}",
        ":",
        "?",
        "-",
        "9223372036854775808",
        "nan(0x",
        "\n",
        "é",
        ";",
        "//",
        "*",
    ];
    for _ in 0..4000 {
        let mut text = ALL.to_string();
        for _ in 0..=random(3) {
            let cut = |i: usize| (i..).find(|i| text.is_char_boundary(*i)).unwrap();
            let (a, b) = (cut(random(text.len())), cut(random(text.len())));
            let (a, b) = (a.min(b), a.max(b).min(a.min(b) + 40));
            let b = (b..).find(|i| text.is_char_boundary(*i)).unwrap();
            let piece = match random(3) {
                0 => String::new(),
                1 => pieces[random(pieces.len())].to_string(),
                _ => text[a..b].repeat(2),
            };
            text.replace_range(a..b, &piece);
        }
        if let Ok(graph) = parse(&text) {
            let once = print(&graph);
            assert_eq!(
                print(&parse(&once).unwrap_or_else(|e| panic!("{e}\n{once}"))),
                once
            );
        }
    }
}
