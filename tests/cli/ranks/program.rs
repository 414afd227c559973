//! Exported programs with collectives of their own.

use super::*;
use ckpt_opt::frontend::load;

/// PyTorch's gradients are those of the mean of both ranks' losses, computed in one process.
#[test]
fn a_program_with_collectives_trains_on_two_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let here = dir.path();
    let path = fixture("exported", "ranks.pt2");
    let program = path.to_str().unwrap();
    let case = tensors::read(&fixture("exported", "ranks.npz")).unwrap();
    let data = Tensors::from([("x".into(), case["in.x"].clone())]);
    tensors::write(&here.join("x.safetensors"), &data).unwrap();
    let args = [
        "train",
        program,
        "--loss",
        "output:mean",
        "--data",
        "x.safetensors",
        "--dim",
        "s77=3",
        "--ranks",
        "2",
        "--steps",
        "1",
        "--shuffle",
        "off",
        "--optimizer",
        "sgd",
        "--lr",
        "1",
        "--policy",
        "none",
        "--out",
        "out",
        "--format",
        "json",
    ];
    let report = json(&call(here, &args));
    for rank in report["ranks"].as_array().unwrap() {
        assert_eq!(rank["peak_bytes"], rank["predicted_peak_bytes"], "{rank}");
    }
    let near = |found: f64, expected: f64, what: &str| {
        assert!(
            (found - expected).abs() < 1e-6,
            "{what}: {found} instead of {expected}"
        );
    };
    near(
        losses(here, "out")[0],
        case["out.mean"].get_f64(0).unwrap(),
        "loss",
    );
    let graph = load(&path, &Default::default()).unwrap().graph;
    let trained = tensors::read(&here.join("out/model.safetensors")).unwrap();
    for name in ["rows", "sums"] {
        let begun = graph
            .value(graph.find_value(name).unwrap())
            .tensor()
            .unwrap();
        let (now, gradient) = (&trained[name], &case[&format!("grad.{name}")]);
        for i in 0..begun.elements() as usize {
            let of = |tensor: &Tensor| tensor.get_f64(i).unwrap();
            near(of(now), of(begun) - of(gradient), name);
        }
    }
}

#[test]
fn a_rank_of_a_program_with_collectives_runs_alone() {
    let path = fixture("exported", "ranks.pt2");
    let run = |rank: &[&str]| {
        let base = [
            "run",
            path.to_str().unwrap(),
            "--seed",
            "1",
            "--dim",
            "s77=3",
        ];
        call(Path::new("."), &[&base[..], rank].concat())
    };
    let played = run(&["--rank", "1/2"]);
    assert_eq!(code(&played), 0, "{}", stderr(&played));
    assert!(stderr(&played).contains("their group `0` is taken for all ranks"));
    let other = run(&["--rank", "1/3"]);
    assert_eq!(code(&other), 2);
    assert!(
        stderr(&other).contains("another number of ranks"),
        "{}",
        stderr(&other)
    );
}
