//! Unit tests of the adapters: settings, the distribution of A, and which weights are linear layers.

use super::*;
use crate::ir::Graph;
use crate::text;

fn added(source: &str, lora: &str) -> Result<(Graph, Adapters)> {
    let mut graph = text::parse(source).unwrap();
    let adapters = add_adapters(&mut graph, &Lora::parse(lora)?)?;
    crate::ir::verify::verify(&graph)?;
    Ok((graph, adapters))
}

fn refusal(source: &str, lora: &str) -> String {
    added(source, lora).err().unwrap().to_string()
}

#[test]
fn settings_are_read_and_printed() {
    let lora = Lora::parse("r=16,alpha=32,targets=*q_proj*, *v_proj*,seed=-3").unwrap();
    assert_eq!((lora.rank, lora.alpha, lora.seed), (16, 32.0, -3));
    assert_eq!(lora.targets, ["*q_proj*", "*v_proj*"]);
    assert_eq!(lora.scale(), 2.0);
    let all = "r=4,alpha=1.5,dropout=0.1,rslora=true,dtype=f32,seed=7,targets=a,b";
    let lora = Lora::parse(all).unwrap();
    assert_eq!(lora.to_string(), all);
    assert_eq!(lora.scale(), 0.75);
    for (wrong, told) in [
        ("", "`` is not a setting"),
        ("r=4", "no layer is named"),
        ("q_proj", "`q_proj` is not a setting"),
        ("r=4,q_proj,targets=a", "`q_proj` is not a setting"),
        ("targets=", "`targets` cannot be ``"),
        ("targets=a,", "`` is not a setting"),
        ("r=0,targets=a", "`r` cannot be `0`"),
        ("r=4294967295,targets=a", "`r` cannot be"),
        ("alpha=0,targets=a", "`alpha` cannot be `0`"),
        ("alpha=nan,targets=a", "`alpha` cannot be `nan`"),
        ("dropout=1,targets=a", "`dropout` cannot be `1`"),
        ("rslora=1,targets=a", "`rslora` cannot be `1`"),
        ("dtype=f16,targets=a", "`dtype` cannot be `f16`"),
        ("seed=x,targets=a", "`seed` cannot be `x`"),
        ("rank=4,targets=a", "there is no setting `rank`"),
        ("r=4,r=4,targets=a", "`r` is set twice"),
    ] {
        let error = Lora::parse(wrong).unwrap_err();
        assert_eq!((error.code(), error.exit_code()), ("lora", 2), "{wrong}");
        assert!(error.to_string().contains(told), "{wrong}: {error}");
    }
}

#[test]
fn a_is_kaiming_uniform_and_depends_on_name_and_seed_alone() {
    let first = uniform("a.lora_A.weight", 0, DType::F32, [64, 400]);
    let numbers = |t: &Tensor| -> Vec<f64> { (0..64 * 400).filter_map(|i| t.get_f64(i)).collect() };
    let all = numbers(&first);
    let bound = 1.0 / 400f64.sqrt();
    assert!(all.iter().all(|x| x.abs() <= bound));
    // Mean and variance of uniform numbers, within five standard errors.
    let n = all.len() as f64;
    let mean = all.iter().sum::<f64>() / n;
    let variance = all.iter().map(|x| x * x).sum::<f64>() / n;
    assert!(mean.abs() < 5.0 * bound / (3.0 * n).sqrt(), "{mean}");
    let expected = bound * bound / 3.0;
    assert!(
        (variance / expected - 1.0).abs() < 5.0 * (0.8 / n).sqrt(),
        "{variance}"
    );
    assert_eq!(first, uniform("a.lora_A.weight", 0, DType::F32, [64, 400]));
    assert_ne!(first, uniform("b.lora_A.weight", 0, DType::F32, [64, 400]));
    assert_ne!(first, uniform("a.lora_A.weight", 1, DType::F32, [64, 400]));
}

#[test]
fn weights_that_are_no_linear_layers_are_refused_by_name() {
    let two = |op: &str| {
        format!(
            "graph @g typed (%x: f32[2, 4, 4], %i: i64[2]) -> (%y, %z) {{
  init %fc : f32[4, 4] = [{v}]
  init %other : f32[4, 4] = [{v}]
  init %experts : f32[2, 4, 4] = [{v}, {v}]
  %y = MatMul %x, %fc : f32[2, 4, 4]
  %z = {op}
}}
",
            v = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"
        )
    };
    let cases = [
        (
            "MatMul %other, %x : f32[2, 4, 4]",
            "other",
            "operand 0 of MatMul",
        ),
        ("MatMul %x, %experts : f32[2, 4, 4]", "experts", "3 axes"),
        ("Mul %x, %other : f32[2, 4, 4]", "other", "read by Mul"),
        (
            "Gather %other, %i : f32[2, 4]",
            "other",
            "table of a lookup",
        ),
    ];
    for (op, name, told) in cases {
        let alone = refusal(&two(op), &format!("targets={name}"));
        assert!(alone.contains(told) && alone.contains(name), "{alone}");
        assert!(alone.contains("found: fc\n"), "{alone}");
        // Beside another target it gets a warning.
        let (_, adapters) = added(&two(op), &format!("targets=fc,{name}")).unwrap();
        assert_eq!(
            adapters.initializers,
            ["fc.lora_A.weight", "fc.lora_B.weight"]
        );
        assert!(adapters.warnings[0].contains(told), "{adapters:?}");
    }
    let missing = refusal(&two(cases[0].0), "targets=fc,q_proj");
    assert!(
        missing.contains("`q_proj` matches no linear layer"),
        "{missing}"
    );
}

#[test]
fn a_tied_table_gets_no_adapter() {
    let source = "graph @g typed (%i: i64[n]) -> (%y) {
  init %table : f32[3, 2] = [1, 2, 3, 4, 5, 6]
  %row = Gather %table, %i : f32[n, 2]
  %turned = Transpose %table {perm=[1, 0]} : f32[2, 3]
  %y = MatMul %row, %turned : f32[n, 3]
}
";
    assert!(refusal(source, "targets=table").contains("table of a lookup"));
}

#[test]
fn words_are_ends_of_module_paths() {
    let source = "graph @g typed (%x: f32[n, 2]) -> (%y) {
  init %a : f32[2, 2] = [1, 2, 3, 4] origin \"h.0.proj.weight\" parameter
  init %b : f32[2, 2] = [1, 2, 3, 4] origin \"h.0.c_proj.weight\" parameter
  init %c : f32[2] = [1, 2] origin \"h.0.c_proj.bias\" parameter
  %u = MatMul %x, %a : f32[n, 2]
  %v = MatMul %u, %b : f32[n, 2]
  %y = Add %v, %c : f32[n, 2]
}
";
    let of = |targets: &str| {
        let lora = format!("r=1,targets={targets}");
        added(source, &lora).unwrap().1.initializers.len() / 2
    };
    assert_eq!(of("proj"), 1);
    assert_eq!(of("0.proj"), 1);
    assert_eq!(of("*proj"), 2);
    assert_eq!(of("h.0.c_proj.weight"), 1);
    assert_eq!(of("a"), 1);
    let bias = refusal(source, "targets=*.bias");
    assert!(bias.contains("matches no linear layer"), "{bias}");
}

#[test]
fn what_the_user_names_is_trained_beside_the_adapters() {
    let adapters = Adapters {
        initializers: vec!["fc.lora_A.weight".into()],
        ..Adapters::default()
    };
    let mut asked = Selection::default();
    assert_eq!(adapters.selection(&asked).trainable, ["fc.lora_A.weight"]);
    asked.trainable.push("*norm*".into());
    let both = adapters.selection(&asked).trainable;
    assert_eq!(both, ["*norm*", "fc.lora_A.weight"]);
}

#[test]
fn a_matrix_made_of_codes_is_a_layer_of_their_name() {
    let source = |more: &str| {
        format!(
            "graph @g typed (%x: f32[n, 2]) -> (%y, %z) {{
  init %h.fc.weight_Q4 : u8[3] = [16, 50, 84]
  init %scale : f32[] = 2.0
  %w = Dequantize %h.fc.weight_Q4, %scale {{bits=4, shape=[3, 2]}} : f32[3, 2]
  %t = Transpose %w {{perm=[1, 0]}} : f32[2, 3]
  %y = MatMul %x, %t : f32[n, 3]
  {more}
}}
"
        )
    };
    let alone = source("%z = Identity %x : f32[n, 2]");
    let (graph, adapters) = added(&alone, "r=1,targets=fc").unwrap();
    assert_eq!(
        adapters.initializers,
        ["h.fc.lora_A.weight", "h.fc.lora_B.weight"]
    );
    let dims = |name: &str| {
        let mut inits = graph.inits().map(|(_, v)| v);
        let found = inits.find(|v| v.name == name);
        found.and_then(|v| v.tensor()).unwrap().dims.clone()
    };
    assert_eq!(dims("h.fc.lora_A.weight"), [1, 2]);
    assert_eq!(dims("h.fc.lora_B.weight"), [3, 1]);
    let twice = source(
        "%v = Dequantize %h.fc.weight_Q4, %scale {bits=4, shape=[2, 3]} : f32[2, 3]
  %z = MatMul %x, %v : f32[n, 3]",
    );
    let told = refusal(&twice, "r=1,targets=fc");
    assert!(told.contains("is made into more than one matrix"), "{told}");
}
