//! Cost graphs from strangers: whatever is wrong with one is said by name, and no file takes more memory than it may.

use crate::support::command;

use command::{call, code, json, stderr, workplace};
use serde_json::{Value, json};
use std::path::Path;

fn write(folder: &Path, name: &str, graph: &Value) {
    std::fs::write(folder.join(name), graph.to_string()).unwrap();
}

#[test]
fn wrong_cost_graphs_are_refused_by_name() {
    let dir = workplace();
    let op = |ins: &[i64], outs: &[i64]| json!({"name": "a", "ins": ins, "outs": outs, "phase": "fwd", "cost": 1});
    let value = |kind: &str| json!({"bytes": 4, "kind": kind, "producer": null});
    let good = json!({
        "ops": [op(&[0], &[1]), op(&[1, 0], &[2])],
        "values": [value("static"), value("act"), value("act")],
        "outputs": [2],
    });
    write(dir.path(), "g.json", &good);
    assert_eq!(
        code(&call(dir.path(), &["plan", "g.json"])),
        0,
        "producers may be left out, and auto is never too little"
    );
    type Edit = fn(&mut Value);
    let cases: &[(Edit, &str)] = &[
        (
            |g| g["ops"][0]["ins"] = json!([2]),
            "which op 1 (`a`) makes later",
        ),
        (|g| g["ops"][0]["ins"] = json!([1]), "which it makes itself"),
        (
            |g| g["ops"][1]["ins"] = json!([3]),
            "value 3, which does not exist",
        ),
        (
            |g| g["ops"][1]["outs"] = json!([9]),
            "value 9, which does not exist",
        ),
        (
            |g| g["ops"][1]["outs"] = json!([1]),
            "every value has one maker",
        ),
        (
            |g| g["ops"][1]["outs"] = json!([2, 2]),
            "every value has one maker",
        ),
        (|g| g["ops"][0]["ins"] = json!([-1]), "not a cost graph"),
        (|g| g["ops"][0]["ins"] = json!([0.5]), "not a cost graph"),
        (|g| g["ops"][0]["cost"] = json!(-1), "a cost of -1"),
        (|g| g["ops"][0]["cost"] = json!(null), "not a cost graph"),
        (|g| g["ops"][0]["cost"] = json!("NaN"), "not a cost graph"),
        (|g| g["ops"][0]["phase"] = json!("opt"), "not a cost graph"),
        (
            |g| g["ops"][0]["flops"] = json!(u64::MAX),
            "FLOPs of all ops",
        ),
        (
            |g| g["ops"][0]["temp_bytes"] = json!(u64::MAX),
            "bytes of all values",
        ),
        (|g| g["values"][1]["bytes"] = json!(-4), "not a cost graph"),
        (
            |g| g["values"][1]["bytes"] = json!(u64::MAX),
            "bytes of all values",
        ),
        (
            |g| g["values"][1]["bytes"] = json!(1e300),
            "not a cost graph",
        ),
        (
            |g| g["values"][1]["kind"] = json!("weight"),
            "not a cost graph",
        ),
        (
            |g| g["values"][1]["kind"] = json!("static"),
            "from the start",
        ),
        (
            |g| g["values"][0]["kind"] = json!("act"),
            "which nothing makes",
        ),
        (
            |g| g["values"][1]["producer"] = json!(1),
            "not made by its producer",
        ),
        (
            |g| g["values"][0]["producer"] = json!(7),
            "not made by its producer",
        ),
        (|g| g["outputs"] = json!([3]), "output value 3"),
        (|g| g["outputs"] = json!({}), "not a cost graph"),
        (|g| g["values"][2]["view_of"] = json!(2), "a view"),
        (|g| g["values"][2]["view_of"] = json!(1), "bytes of its own"),
        (|g| *g = json!([]), "not a cost graph"),
        (|g| *g = json!({"ops": []}), "not a cost graph"),
    ];
    for (edit, says) in cases {
        let mut graph = good.clone();
        edit(&mut graph);
        write(dir.path(), "g.json", &graph);
        let done = call(dir.path(), &["plan", "g.json", "--budget", "90%"]);
        assert_eq!(code(&done), 2, "{graph}: {}", stderr(&done));
        assert!(
            stderr(&done).contains(says),
            "{graph} should say `{says}`: {}",
            stderr(&done)
        );
        assert!(stderr(&done).contains("g.json") && done.stdout.is_empty());
    }
    for (text, says) in [
        (&b""[..], "EOF"),
        (b"{\"ops\": [", "EOF"),
        (b"\x1f\x8b\x08garbage", "g.json"),
        (b"{\"ops\": [{\"cost\": 1e999}]}", "out of range"),
        (b"\xff\xfe", "not a cost graph"),
    ] {
        std::fs::write(dir.path().join("g.json"), text).unwrap();
        let done = call(dir.path(), &["plan", "g.json"]);
        assert_eq!(code(&done), 2, "{}", stderr(&done));
        assert!(stderr(&done).contains(says), "{}", stderr(&done));
    }
    let done = call(dir.path(), &["plan", "graph.json.gz", "--dim", "batch=3"]);
    assert!(code(&done) == 2 && stderr(&done).contains("--dim means nothing"));
    let done = call(dir.path(), &["plan", "no.json"]);
    assert_eq!(code(&done), 2, "{}", stderr(&done));
    // Nothing to do is a plan as well.
    write(
        dir.path(),
        "g.json",
        &json!({"ops": [], "values": [], "outputs": []}),
    );
    assert_eq!(
        json(&call(dir.path(), &["plan", "g.json", "--format", "json"]))["steps"],
        0
    );
}

#[test]
fn a_small_file_cannot_fill_the_memory() {
    let dir = workplace();
    let file = std::fs::File::create(dir.path().join("bomb.json.gz")).unwrap();
    let mut packed = flate2::write::GzEncoder::new(file, flate2::Compression::best());
    let blank = vec![b' '; 1 << 20];
    for _ in 0..12 {
        std::io::Write::write_all(&mut packed, &blank).unwrap();
    }
    packed.finish().unwrap();
    let done = call(dir.path(), &["plan", "bomb.json.gz"]);
    assert_eq!(code(&done), 2, "{}", stderr(&done));
    assert!(
        stderr(&done).contains("larger than 8388608 bytes"),
        "{}",
        stderr(&done)
    );
}
