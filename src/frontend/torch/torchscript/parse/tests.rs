//! Text of the dialect and what becomes of it.

use super::*;

fn body(text: &str) -> Vec<Stmt> {
    let indented: String = text.lines().map(|l| format!("  {l}\n")).collect();
    let mut file = parse(&format!("def f(x: Tensor) -> Tensor:\n{indented}")).unwrap();
    file.functions.remove(0).body
}

fn value(text: &str) -> ExprKind {
    match body(&format!("y = {text}")).remove(0).kind {
        StmtKind::Assign(_, value) => value.kind,
        other => panic!("{other:?}"),
    }
}

fn refused(text: &str, line: u32) {
    let error = parse(text).unwrap_err();
    assert_eq!(error.code(), "code", "{text:?}");
    let place = format!("line {line}");
    let at = error
        .notes()
        .any(|(label, at)| label == "at" && at == place);
    assert!(at, "{text:?}: {error}, expected {place}");
}

#[test]
fn literals() {
    assert_eq!(value("9223372036854775807"), ExprKind::Int(i64::MAX));
    assert_eq!(value("-9223372036854775808"), ExprKind::Int(i64::MIN));
    assert_eq!(value("0."), ExprKind::Float(0.0));
    assert_eq!(value("1.0000000000000001e-05"), ExprKind::Float(1e-5));
    assert_eq!(
        value(r#""a\"b\n\x41\101""#),
        ExprKind::Str("a\"b\nAA".into())
    );
    assert_eq!(value("()"), ExprKind::Tuple(Vec::new()));
    assert!(matches!(value("(1,)"), ExprKind::Tuple(items) if items.len() == 1));
    assert_eq!(value("(1)"), ExprKind::Int(1));
    assert!(matches!(value("[1, 2, ]"), ExprKind::List(items) if items.len() == 2));
    assert!(matches!(value(r#"{"a": 1, "b": 2}"#), ExprKind::Dict(items) if items.len() == 2));
    assert!(matches!(value("-x"), ExprKind::Negative(_)));
}

#[test]
fn calls_and_members() {
    let ExprKind::Call(call) = value("(m).forward(x, None, dtype=6, )") else {
        panic!();
    };
    assert_eq!(call.function.dotted().as_deref(), Some("m.forward"));
    assert_eq!((call.args.len(), call.keywords.len()), (2, 1));
    assert!(matches!(
        value("(torch.size(x))[0]"),
        ExprKind::Subscript(..)
    ));
    assert!(matches!(
        value("annotate(List[Optional[Tensor]], [x])"),
        ExprKind::Call(_)
    ));
}

#[test]
fn statements() {
    let text = "\
a, b, = x
_10, n, x5 = torch.lt(n0, 3), n0, x6
c: int = 3
if a:
  pass
else:
  for i in range(3):
    b = i
while c:
  c = d
torch.append(a, b)
return (a, b)";
    let kinds: Vec<StmtKind> = body(text).into_iter().map(|s| s.kind).collect();
    assert!(matches!(&kinds[0], StmtKind::Unpack(names, _) if names.len() == 2));
    assert!(
        matches!(&kinds[1], StmtKind::Unpack(names, Expr { kind: ExprKind::Tuple(v), .. }) if names.len() == 3 && v.len() == 3)
    );
    assert!(matches!(&kinds[2], StmtKind::Assign(..)));
    assert!(
        matches!(&kinds[3], StmtKind::If { otherwise, .. } if matches!(otherwise[0].kind, StmtKind::For { .. }))
    );
    assert!(matches!(&kinds[4], StmtKind::While { body, .. } if body.len() == 1));
    assert!(matches!(&kinds[5], StmtKind::Expr(_)));
    assert!(matches!(&kinds[6], StmtKind::Return(Some(_))));
}

#[test]
fn classes() {
    let text = r#"class M(Module):
  __parameters__ = ["w", ]
  __buffers__ = ["b", ]
  w : Tensor
  training : bool
  n : Final[int] = 3
  __annotations__["0"] = __torch__.Sub
  def forward(self: __torch__.M,
    x: Tensor,
    m: Optional[Tensor]=None) -> Tuple[Tensor, Tensor]:
    return (x, x)
def helper(x: Tensor) -> Tensor:
  return x
"#;
    let file = parse(text).unwrap();
    let class = &file.classes[0];
    assert_eq!((&*class.name, &*class.base), ("M", "Module"));
    assert_eq!((&*class.parameters[0], &*class.buffers[0]), ("w", "b"));
    assert_eq!(&*class.constants[0].0, "n");
    let forward = &class.methods[0];
    assert_eq!((forward.parameters.len(), forward.line), (3, 8));
    assert!(forward.parameters[2].default.is_some());
    assert_eq!(forward.body[0].line, 11);
    assert_eq!(&*file.functions[0].name, "helper");
}

#[test]
fn what_is_not_the_dialect_is_refused_with_its_line() {
    refused("import os\n", 1);
    refused("def f(x):\n  y = x + 1\n", 2);
    refused("def f(x):\n  y = lambda: 1\n", 2);
    refused("def f(x):\n  x.y = 1\n", 2);
    refused("def f(x):\n  y = (1\n", 3);
    refused("def f(x):\n  y = 1)\n", 2);
    refused("def f(x):\n  y = \"abc\n", 2);
    refused("def f(x):\n  y = 99999999999999999999\n", 2);
    refused("def f(x):\n  y = 9223372036854775808\n", 2);
    refused("def f(x):\n  y = 1j\n", 2);
    refused("def f(x):\n    y = 1\n  z = 2\n", 3);
    refused("def f(x):\ny = 1\n", 2);
    refused("def f(x) -> Tensor:", 1);
}

#[test]
fn nesting_is_bounded() {
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("-", ""),
        ("f(", ")"),
        ("{1: ", "}"),
    ] {
        let deep = format!(
            "def f(x):\n  y = {}1{}\n",
            open.repeat(50_000),
            close.repeat(50_000)
        );
        assert!(parse(&deep).is_err(), "{open}");
    }
    let long = format!("def f(x):\n  y = x{}\n", ".a".repeat(50_000));
    assert!(parse(&long).is_err());
    let mut blocks = "def f(x):\n".to_string();
    for depth in 1..2000 {
        blocks += &format!("{}if x:\n", " ".repeat(depth));
    }
    assert!(parse(&blocks).is_err());
}
