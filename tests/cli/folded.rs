//! Parameters that PyTorch's ONNX exporters folded, merged or stored twice: names, warnings, and PyTorch's gradients.

use crate::support::command;

use command::{call, code, fixture, json, stderr};
use serde_json::Value;
use std::path::Path;

fn file(name: &str) -> String {
    fixture("folded", name).to_str().unwrap().to_string()
}

fn inspected(name: &str, options: &[&str]) -> Value {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = file(&format!("{name}.onnx"));
    let args = [&["inspect", &model as &str, "--format", "json"], options].concat();
    json(&call(here, &args))
}

/// The parameter of a name, or of an alias.
fn parameter<'a>(found: &'a Value, name: &str) -> Option<&'a Value> {
    let mut all = found["parameters"].as_array().unwrap().iter();
    let alias = |p: &Value| {
        let mut aliases = p["aliases"].as_array().unwrap().iter();
        aliases.any(|a| a == name)
    };
    all.find(|p| p["name"] == name || alias(p))
}

fn warnings(found: &Value) -> String {
    let lines = found["warnings"].as_array().unwrap().iter();
    lines
        .map(|l| l.as_str().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn a_name_is_claimed_only_by_the_parameter_itself() {
    let found = inspected("folded", &[]);
    for (name, initializer) in [
        ("groups.weight", "groups.weight"),
        ("groups.bias", "groups.bias"),
        ("scale", "scale"),
        ("rates", "rates"),
        ("gate", "gate"),
        ("raised", "raised"),
        ("token", "token"),
        ("mixed", "mixed"),
        ("sinks", "sinks"),
        ("head.weight", "val_"),
    ] {
        let p = parameter(&found, name).unwrap_or_else(|| panic!("no {name}"));
        assert!(
            p["initializer"].as_str().unwrap().starts_with(initializer),
            "{p}"
        );
        assert_eq!(p["aliases"], serde_json::json!([]), "{p}");
    }
    let warned = warnings(&found);
    for folded in [
        "`norm.weight`",
        "`norm.bias`",
        "`conv.weight`",
        "`conv.bias`",
        "`positions.weight`",
    ] {
        assert!(warned.contains(folded), "{folded}: {warned}");
    }
    assert!(warned.contains("added a constant to `raised`"), "{warned}");
    assert!(
        warned.contains("other than in `token` [1, 1, 16], `sinks` [16]"),
        "{warned}"
    );
    for kept in ["groups", "scale", "rates", "gate", "head", "mixed"] {
        assert!(!warned.contains(kept), "{kept}: {warned}");
    }
    // The kernel is multiplied by a batch norm.
    assert!(parameter(&found, "conv.weight").is_none());
    let kernel = parameter(&found, "conv.weight.folded").unwrap();
    assert_eq!(kernel["folded_from"], serde_json::json!(["conv.weight"]));
    let positions = parameter(&found, "positions.weight");
    assert!(positions.is_none(), "{positions:?}");
    let of = |p: &&Value| p["folded_from"] == serde_json::json!(["positions.weight"]);
    let all = found["parameters"].as_array().unwrap();
    assert_eq!(all.iter().filter(of).count(), 1);
    assert_eq!(all.iter().find(of).unwrap()["trainable"], false);
    // A pattern means what was folded too.
    let trained = inspected("folded", &["--trainable", "positions.*"]);
    let all = trained["parameters"].as_array().unwrap();
    assert_eq!(all.iter().find(of).unwrap()["trainable"], true);
}

#[test]
fn merged_constants_are_parameters_of_their_own() {
    for name in ["fresh", "legacy"] {
        let found = inspected(name, &[]);
        // 2 × (2 norms with 2, 3 linear layers with 2), 1 norm with 2, the table and the head.
        assert_eq!(found["parameters"].as_array().unwrap().len(), 24, "{name}");
        for each in [
            "layers.1.first.weight",
            "layers.1.second.bias",
            "layers.0.mix.bias",
            "norm.bias",
        ] {
            let p = parameter(&found, each).unwrap_or_else(|| panic!("{name}: no {each}"));
            assert_eq!(p["aliases"], serde_json::json!([]), "{p}");
        }
        assert_eq!(warnings(&found), "", "{name}");
    }
}

#[test]
fn a_tied_weight_that_was_stored_twice_is_one() {
    let found = inspected("tied", &[]);
    let table = parameter(&found, "table.weight").unwrap();
    assert_eq!(table["aliases"], serde_json::json!(["head.weight"]));
    let warned = warnings(&found);
    assert!(
        warned.contains("is the transpose of `table.weight`: trained as one weight"),
        "{warned}"
    );
    let left = inspected("tied", &["--no-tie"]);
    assert_eq!(
        parameter(&left, "table.weight").unwrap()["aliases"],
        serde_json::json!([])
    );
    let told = inspected("tied", &["--no-tie", "--tie", "table.weight=head.weight"]);
    assert_eq!(
        parameter(&told, "head.weight").unwrap()["name"],
        "table.weight"
    );
}

#[test]
fn a_tie_that_is_none_is_refused() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (pair, why) in [
        ("table.weight=layers.0.mix.bias", "hold different values"),
        ("table.weight=table.weight", "are one initializer already"),
        ("table.weight=had.weight", "did you mean `head.weight`?"),
        ("table.weight", "--tie takes two parameters"),
    ] {
        let refused = call(
            here,
            &["inspect", &file("tied.onnx"), "--no-tie", "--tie", pair],
        );
        assert_eq!(code(&refused), 2, "{pair}");
        assert!(
            stderr(&refused).contains(why),
            "{pair}: {}",
            stderr(&refused)
        );
    }
}

#[cfg(feature = "torch")]
mod runs {
    use super::*;
    use ckpt_opt::tensors;

    /// Trains a step and compares every gradient that has a name with PyTorch's. Returns their number.
    fn gradients(name: &str, options: &[&str]) -> usize {
        let dir = tempfile::tempdir().unwrap();
        let (model, case) = (file(&format!("{name}.onnx")), file(&format!("{name}.npz")));
        let write = [
            &[
                &model as &str,
                "-o",
                "t.onnx",
                "--loss",
                "vjp",
                "--policy",
                "selective",
            ],
            options,
        ]
        .concat();
        let run: &[&str] = &[
            "run",
            "t.onnx",
            "--inputs",
            &case,
            "--outputs",
            "o.npz",
            "--framework-names",
        ];
        let verify: &[&str] = &["verify", &model, "t.onnx"];
        for args in [&write, run, verify] {
            let done = call(dir.path(), args);
            assert_eq!(code(&done), 0, "{args:?}: {}", stderr(&done));
        }
        let ours = tensors::read(&dir.path().join("o.npz")).unwrap();
        let theirs = tensors::read(Path::new(&case)).unwrap();
        let largest = |t: &ckpt_passes::ir::Tensor| {
            let numbers = (0..t.elements() as usize).map(|i| t.get_f64(i).unwrap().abs());
            numbers.fold(0.0, f64::max)
        };
        let grads = || {
            theirs
                .iter()
                .filter_map(|(k, t)| Some((k.strip_prefix("grad.")?, t)))
        };
        let floor = 1e-7 * grads().map(|(_, t)| largest(t)).fold(0.0, f64::max);
        let mut compared = 0;
        for (parameter, theirs) in grads() {
            let Some(ours) = ours.get(&format!("{parameter}.grad")) else {
                continue;
            };
            assert_eq!(ours.elements(), theirs.elements(), "{parameter}");
            let bound = 1e-5 * largest(theirs) + floor;
            for i in 0..theirs.elements() as usize {
                let (a, b) = (ours.get_f64(i).unwrap(), theirs.get_f64(i).unwrap());
                assert!(
                    (a - b).abs() <= bound,
                    "{name}: {parameter}[{i}]: {a}, PyTorch has {b}"
                );
            }
            compared += 1;
        }
        compared
    }

    #[test]
    fn every_parameter_that_the_file_holds_gets_pytorchs_gradient() {
        // Not the convolution, its batch norm and the positions.
        assert_eq!(gradients("folded", &["--freeze", "conv.*"]), 11);
        assert_eq!(gradients("fresh", &[]), 24);
        assert_eq!(gradients("legacy", &[]), 24);
    }

    #[test]
    fn tied_weights_get_the_sum() {
        // One name less for the head, and one for the shared layer.
        assert_eq!(gradients("tied", &[]), 22);
    }
}
