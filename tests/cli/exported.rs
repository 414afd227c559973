//! Exported programs: what is read, and with the runtime, PyTorch's own outputs and gradients.

use crate::support::command;

use command::{call, code, fixture, json, stderr};
use std::path::Path;

/// A program by name, or a file that has an ending already.
fn program(name: &str) -> String {
    let file = match name.contains('.') {
        true => name.to_string(),
        false => format!("{name}.pt2"),
    };
    fixture("exported", &file).to_str().unwrap().to_string()
}

fn inspected(name: &str) -> serde_json::Value {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    json(&call(
        here,
        &["inspect", &program(name), "--format", "json"],
    ))
}

#[test]
fn names_ties_layers_and_frozen_weights_are_the_programs() {
    let found = inspected("block");
    let parameters = found["parameters"].as_array().unwrap();
    let of = |name: &str| parameters.iter().find(|p| p["name"] == name).unwrap();
    assert_eq!(parameters.len(), 23);
    assert_eq!(
        of("table.weight")["aliases"],
        serde_json::json!(["head.weight"])
    );
    assert_eq!(of("layers.1.down.weight")["trainable"], false);
    assert_eq!(of("layers.1.up.weight")["transposed"], true);
    assert_eq!(of("layers.1.q.weight")["transposed"], false);
    let blocks = found["blocks"].as_array().unwrap();
    assert_eq!(blocks.len(), 2, "{blocks:?}");
    assert!(blocks.iter().all(|b| b["class"] == "Block"));
    assert_eq!(found["inputs"][0]["name"], "tokens");
}

#[test]
fn tables_that_ops_are_written_with_are_no_parameters() {
    let found = inspected("wide");
    let parameters = found["parameters"].as_array().unwrap();
    let names: Vec<&str> = parameters
        .iter()
        .filter_map(|p| p["name"].as_str())
        .collect();
    assert_eq!(names, ["w", "m"]);
}

#[test]
fn dropouts_of_training_mode_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let made = call(
        dir.path(),
        &[&program("train"), "-o", "t.onnx", "--policy", "none"],
    );
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    let inputs = &inspected("train")["inputs"];
    assert!(
        inputs
            .as_array()
            .unwrap()
            .iter()
            .any(|i| i["name"] == "rng_seed"),
        "{inputs}"
    );
    let ops = &inspected("train")["ops"];
    // One behind the table, one inside the attention of each layer.
    let dropouts = ops.as_object().map(|o| &o["ckpt::Dropout"]);
    assert_eq!(dropouts, Some(&serde_json::json!(3)), "{ops}");
    assert!(inspected("block")["ops"].get("ckpt::Dropout").is_none());
}

#[test]
fn inputs_may_be_given_other_sizes() {
    let dir = tempfile::tempdir().unwrap();
    let given = |ty: &str| {
        call(
            dir.path(),
            &[
                "inspect",
                &program("block"),
                "--input",
                ty,
                "--format",
                "json",
            ],
        )
    };
    let found = json(&given("tokens:i64[batch,7]"));
    assert_eq!(
        found["outputs"][0]["shape"],
        serde_json::json!(["batch", 7, 31])
    );
    for wrong in ["tokens:f32[batch,7]", "tokens:i64[7]", "other:i64[2]"] {
        let refused = given(wrong);
        assert_eq!(code(&refused), 2, "{wrong}: {}", stderr(&refused));
    }
}

#[cfg(feature = "torch")]
mod runs {
    use super::*;
    use ckpt_opt::tensors::{self, Tensors};

    fn outputs(dir: &Path, name: &str, policy: &str) -> Tensors {
        let (model, to) = (format!("{policy}.onnx"), format!("{policy}.npz"));
        let stem = name.split('.').next().unwrap();
        let case = fixture("exported", &format!("{stem}.npz"));
        let case = case.to_str().unwrap();
        let (file, loss) = (program(name), ["--loss", "vjp", "--policy", policy]);
        let mut make = vec![&file as &str, "-o", &model];
        make.extend(loss);
        let last = if stem == "block" {
            "linear_10"
        } else {
            "linear_2"
        };
        if name.ends_with(".pt") {
            // A trace tells neither types of inputs nor names of outputs.
            make.extend(["--inputs", case, "--output-names", last]);
        }
        for args in [
            make,
            vec!["run", &model, "--inputs", case, "--outputs", &to],
        ] {
            let done = call(dir, &args);
            assert_eq!(code(&done), 0, "{}", stderr(&done));
        }
        tensors::read(&dir.join(to)).unwrap()
    }

    /// Outputs and gradients within 10⁻⁵ of the largest element, NaN where PyTorch has it.
    fn agrees(name: &str, least: usize) {
        let dir = tempfile::tempdir().unwrap();
        let ours = outputs(dir.path(), name, "none");
        let stem = name.split('.').next().unwrap();
        let case = tensors::read(&fixture("exported", &format!("{stem}.npz"))).unwrap();
        let mut compared = 0;
        for (key, theirs) in &case {
            let key = match key.split_once('.') {
                Some(("out", name)) => name.to_string(),
                Some(("grad", name)) => format!("{name}.grad"),
                _ => continue,
            };
            let ours = ours.get(&key).unwrap_or_else(|| panic!("{name}: no {key}"));
            assert_eq!(ours.dtype, theirs.dtype, "{name}: {key}");
            let turned = ours.dims != theirs.dims;
            let flipped: Vec<u64> = theirs.dims.iter().rev().copied().collect();
            assert!(!turned || ours.dims == flipped, "{name}: {key}");
            let n = theirs.elements() as usize;
            let at = |i: usize| match (turned, ours.dims.last()) {
                (true, Some(rows)) => {
                    let (rows, columns) = (*rows as usize, n / *rows as usize);
                    (i % columns) * rows + i / columns
                }
                _ => i,
            };
            let largest = (0..n)
                .map(|i| theirs.get_f64(i).unwrap().abs())
                .fold(1e-3, f64::max);
            for i in 0..n {
                let (a, b) = (ours.get_f64(at(i)).unwrap(), theirs.get_f64(i).unwrap());
                let same = a == b || (a - b).abs() <= 1e-5 * largest || a.is_nan() && b.is_nan();
                assert!(same, "{name}: {key}[{i}]: {a}, PyTorch has {b}");
            }
            compared += 1;
        }
        assert!(compared >= least, "{name}: {compared} compared");
    }

    #[test]
    fn a_transformer_gives_pytorchs_outputs_and_gradients() {
        agrees("block", 22);
    }

    #[test]
    fn its_trace_gives_the_same() {
        agrees("block.pt", 22);
    }

    #[test]
    fn writes_change_nothing_that_was_read_before() {
        agrees("inplace", 13);
    }

    #[test]
    fn many_ops_give_pytorchs_outputs_and_gradients() {
        agrees("ops", 71);
    }

    #[test]
    fn ops_that_are_defined_by_others_give_them_too() {
        agrees("wide", 48);
    }

    #[test]
    fn what_is_decomposed_to_core_aten_gives_the_same() {
        agrees("core", 48);
    }

    #[test]
    fn gradients_of_gradients_are_pytorchs() {
        agrees("forces", 20);
    }

    #[test]
    fn quantised_weights_give_pytorchs_too() {
        agrees("quantised", 2);
    }

    #[test]
    fn casts_to_floats_of_8_bits_give_pytorchs_too() {
        agrees("float8", 3);
    }

    #[test]
    fn numbers_computed_from_sizes_give_pytorchs_too() {
        agrees("sizes", 11);
    }

    #[test]
    fn complex_numbers_and_fourier_transforms_give_pytorchs_too() {
        agrees("complex", 8);
        agrees("complex.pt", 8);
    }

    #[test]
    fn recomputed_dropouts_drop_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (kept, again) = (
            outputs(dir.path(), "train", "none"),
            outputs(dir.path(), "train", "full"),
        );
        assert_eq!(kept.len(), again.len());
        for (name, tensor) in &kept {
            assert_eq!(tensor.bytes(), again[name].bytes(), "{name}");
        }
    }
}
