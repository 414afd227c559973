//! Files of tokens: windows, documents, order, positions.

use super::*;
use ckpt_opt::passes::compile::Request;
use ckpt_opt::passes::driver::Watch;
use ckpt_opt::passes::transform::loss::Loss;
use ckpt_opt::passes::transform::optimizer::{Optimizer, UpdateOptions};
use ckpt_opt::train::data::{Packing, Position, TokenType};
use std::collections::BTreeSet;

/// Writes the index of Megatron for tokens of type uint16.
fn index(folder: &Path, name: &str, lengths: &[i32], documents: &[i64]) -> PathBuf {
    let mut bytes = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((documents.len() as u64).to_le_bytes());
    bytes.extend(lengths.iter().flat_map(|n| n.to_le_bytes()));
    let mut at = 0i64;
    for length in lengths {
        bytes.extend(at.to_le_bytes());
        at += 2 * i64::from(*length);
    }
    bytes.extend(documents.iter().flat_map(|n| n.to_le_bytes()));
    file(folder, name, &bytes)
}

#[test]
fn windows_follow_each_other_and_the_last_is_padded() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 1..=10);
    let graph = graph(&format!("{LABELS}, %attention_mask: i64[batch, seq]"));
    let all = read(&request(&path, 2, 4), &graph).unwrap();
    assert_eq!(all.len(), 2);
    assert_eq!(ints(&all[0], "input_ids"), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(ints(&all[0], "labels"), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(all[0].inputs["labels"].dims, [2, 4]);
    // The first label of a row has no scores.
    assert_eq!(all[0].tokens, 6);
    assert_eq!(ints(&all[1], "input_ids"), [9, 10, 0, 0]);
    assert_eq!(ints(&all[1], "labels"), [9, 10, -100, -100]);
    assert_eq!(ints(&all[1], "attention_mask"), [1, 1, 0, 0]);
    assert_eq!(all[1].tokens, 1);
    let mut whole = request(&path, 2, 4);
    whole.drop_last = true;
    let mut batches = open(&whole, &graph).unwrap();
    assert_eq!((batches.examples(), batches.batches_per_epoch()), (3, 1));
    assert_eq!(epoch(&mut batches).len(), 1);
}

#[test]
fn wider_tokens_and_numpy_vectors_are_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let narrow = bin(dir.path(), "a.bin", 1..=9);
    let bytes: Vec<u8> = (1u32..=9).flat_map(u32::to_le_bytes).collect();
    let wide = file(dir.path(), "b.bin", &bytes);
    let values: Vec<i64> = (1..=9).collect();
    let tensor = ckpt_opt::passes::ir::Tensor::ints(&values);
    let mut array = ckpt_opt::tensors::npy::header("x", &tensor).unwrap();
    array.extend(tensor.bytes().unwrap().as_ref());
    let vector = file(dir.path(), "c.npy", &array);
    let graph = graph(LABELS);
    let expected = read(&request(&narrow, 1, 4), &graph).unwrap();
    let mut as_wide = request(&wide, 1, 4);
    as_wide.token_type = TokenType::U32;
    assert_eq!(read(&as_wide, &graph).unwrap(), expected);
    assert_eq!(read(&request(&vector, 1, 4), &graph).unwrap(), expected);
}

#[test]
fn documents_are_kept_apart_where_the_graph_can() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 1..=12);
    // Documents of 3, 2 + 2 and 5 tokens.
    index(dir.path(), "a.idx", &[3, 2, 2, 5], &[0, 1, 3, 4]);
    let plain = read(&request(&path, 1, 6), &graph(LABELS)).unwrap();
    assert_eq!(ints(&plain[0], "labels"), [1, 2, 3, 4, 5, 6]);
    let inputs = ", %labels: i64[batch, seq], %position_ids: i32[batch, seq]";
    let apart = read(&request(&path, 1, 6), &graph(inputs)).unwrap();
    assert_eq!(ints(&apart[0], "position_ids"), [0, 1, 2, 0, 1, 2]);
    assert_eq!(ints(&apart[0], "labels"), [1, 2, 3, -100, 5, 6]);
    assert_eq!(apart[0].tokens, 4);
    assert_eq!(ints(&apart[1], "position_ids"), [0, 0, 1, 2, 3, 4]);
    assert_eq!(ints(&apart[1], "labels"), [7, -100, 9, 10, 11, 12]);
    let inputs = ", %labels: i64[batch, seq], %document_ids: i64[batch, seq]";
    let numbered = read(&request(&path, 1, 6), &graph(inputs)).unwrap();
    assert_eq!(ints(&numbered[0], "document_ids"), [0, 0, 0, 1, 1, 1]);
    assert_eq!(ints(&numbered[1], "document_ids"), [0, 1, 1, 1, 1, 1]);
    assert_eq!(numbered[0].tokens, 4);
    let shared = ", %labels: i64[batch, seq], %position_ids: i64[1, seq]";
    let shared = read(&request(&path, 2, 6), &graph(shared)).unwrap();
    assert_eq!(ints(&shared[0], "position_ids"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(shared[0].inputs["position_ids"].dims, [1, 6]);
    assert_eq!(shared[0].tokens, 10);
}

#[test]
fn a_mask_of_pairs_hides_other_documents_and_the_future() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 1..=7);
    index(dir.path(), "a.idx", &[2, 5], &[0, 1, 2]);
    let inputs = |dtype: &str| format!("{LABELS}, %attention_mask: {dtype}[batch, 1, seq, seq]");
    let all = read(&request(&path, 1, 4), &graph(&inputs("bool"))).unwrap();
    assert_eq!(all[0].inputs["attention_mask"].dims, [1, 1, 4, 4]);
    let sees = [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1];
    assert_eq!(ints(&all[0], "attention_mask"), sees);
    // Padding sees itself, so no row of the softmax is empty.
    let padded = [1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1];
    assert_eq!(ints(&all[1], "attention_mask"), padded);
    let added = read(&request(&path, 1, 4), &graph(&inputs("f16"))).unwrap();
    let added = floats(&added[0], "attention_mask");
    let expected = sees.map(|s| if s == 1 { 0.0 } else { -65504.0 });
    assert_eq!(added, expected);
}

#[test]
fn padding_keeps_each_document_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 1..=12);
    index(dir.path(), "a.idx", &[3, 1, 7, 1], &[0, 1, 2, 3, 4]);
    let mut padded = request(&path, 1, 4);
    padded.packing = Packing::Pad;
    let all = read(&padded, &graph(LABELS)).unwrap();
    let rows: Vec<Vec<i64>> = all.iter().map(|b| ints(b, "labels")).collect();
    // A document of one token has nothing to learn, and one of 7 tokens is two examples.
    assert_eq!(rows, [[1, 2, 3, -100], [5, 6, 7, 8], [9, 10, 11, -100]]);
}

#[test]
fn shards_of_a_folder_follow_each_other() {
    let dir = tempfile::tempdir().unwrap();
    bin(dir.path(), "2.bin", 4..=6);
    bin(dir.path(), "1.bin", 1..=3);
    bin(dir.path(), ".hidden.bin", [99]);
    file(dir.path(), "README.md", b"no data");
    let inputs = ", %position_ids: i64[batch, seq]";
    let all = read(&request(dir.path(), 1, 6), &graph(inputs)).unwrap();
    assert_eq!(ints(&all[0], "input_ids"), [1, 2, 3, 4, 5, 6]);
    assert_eq!(ints(&all[0], "position_ids"), [0, 1, 2, 0, 1, 2]);
}

fn shuffled(path: &Path) -> DataRequest {
    DataRequest {
        shuffle: true,
        seed: 5,
        ..request(path, 3, 4)
    }
}

#[test]
fn every_epoch_has_each_example_once_in_its_own_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..84);
    let mut batches = open(&shuffled(&path), &graph(LABELS)).unwrap();
    let mut orders = BTreeSet::new();
    for _ in 0..3 {
        let tokens: Vec<i64> = epoch(&mut batches)
            .iter()
            .flat_map(|b| ints(b, "input_ids"))
            .collect();
        let mut sorted = tokens.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..84));
        orders.insert(tokens);
    }
    assert_eq!(orders.len(), 3);
    assert_eq!(
        batches.position(),
        Position {
            epoch: 3,
            example: 0
        }
    );
}

#[test]
fn reading_goes_on_at_any_position_as_if_it_had_never_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..80);
    let graph = graph(LABELS);
    let mut batches = open(&shuffled(&path), &graph).unwrap();
    let mut positions = vec![batches.position()];
    let mut all = Vec::new();
    for _ in 0..20 {
        all.push(batches.next().unwrap());
        positions.push(batches.position());
    }
    // 20 examples are 7 batches, and then the epoch ends.
    assert_eq!(all.iter().position(Option::is_none), Some(7));
    assert_eq!(all[6].as_ref().unwrap().inputs["labels"].dims, [2, 4]);
    for ahead in [true, false] {
        for (i, position) in positions[..20].iter().enumerate() {
            let mut resumed = open(&shuffled(&path), &graph).unwrap();
            resumed.read_ahead(ahead);
            resumed.seek(*position).unwrap();
            assert_eq!(resumed.position(), *position);
            for (j, expected) in all.iter().enumerate().skip(i) {
                assert_eq!(
                    resumed.next().unwrap(),
                    *expected,
                    "from {i}, batch {j}, ahead {ahead}"
                );
                assert_eq!(resumed.position(), positions[j + 1]);
            }
        }
    }
    let mut moved = open(&shuffled(&path), &graph).unwrap();
    for i in [3usize, 1, 12, 0] {
        moved.seek(positions[i]).unwrap();
        assert_eq!(moved.next().unwrap(), all[i]);
    }
    let beyond = Position {
        epoch: 0,
        example: 21,
    };
    assert_eq!(moved.seek(beyond).unwrap_err().exit_code(), 2);
    let last = Position {
        epoch: u64::MAX,
        example: 20,
    };
    moved.seek(last).unwrap();
    assert_eq!(moved.next().unwrap(), None);
    let text = serde_json::to_string(&positions[3]).unwrap();
    assert_eq!(
        serde_json::from_str::<Position>(&text).unwrap(),
        positions[3]
    );
}

#[test]
fn the_fingerprint_tells_other_data_but_not_another_place() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = bin(dir.path(), "a.bin", 0..80);
    let graph = graph(LABELS);
    let print = |request: &DataRequest| open(request, &graph).unwrap().fingerprint();
    let first = print(&shuffled(&path));
    assert_eq!(first, print(&shuffled(&bin(other.path(), "a.bin", 0..80))));
    let mut seen = BTreeSet::from([first.clone()]);
    let mut asked = shuffled(&path);
    asked.batch = 7;
    assert_eq!(first, print(&asked), "a position counts examples");
    for change in [
        |r: &mut DataRequest| r.sequence = Some(5),
        |r: &mut DataRequest| r.packing = Packing::Pad,
        |r: &mut DataRequest| r.seed = 6,
        |r: &mut DataRequest| r.shuffle = false,
        |r: &mut DataRequest| r.paths.push(r.paths[0].clone()),
    ] {
        let mut asked = shuffled(&path);
        change(&mut asked);
        assert!(seen.insert(print(&asked)), "{asked:?}");
    }
    assert!(seen.insert(print(&shuffled(&bin(other.path(), "b.bin", 0..80)))));
    assert!(seen.insert(print(&shuffled(&bin(other.path(), "a.bin", 1..81)))));
}

#[test]
fn a_large_file_is_sampled_and_an_end_that_changes_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = |last: u16| (0..400_000u32).map(|i| (i % 200) as u16).chain([last]);
    let print = |last| {
        let path = bin(dir.path(), "a.bin", tokens(last));
        open(&request(&path, 1, 64), &graph(LABELS))
            .unwrap()
            .fingerprint()
    };
    assert_eq!(print(1), print(1));
    assert_ne!(print(1), print(2));
}

#[test]
fn fixed_sizes_of_the_graph_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..36);
    let source = "graph @g typed (%input_ids: i64[4, 6]) -> (%y) {
  init %w : f32[300, 2] = splat 0.5
  %y = Gather %w, %input_ids : f32[4, 6, 2]
}
";
    let graph = parse(source).unwrap();
    let mut asked = request(&path, 4, 6);
    let e = read(&asked, &graph).unwrap_err();
    assert!(e.to_string().contains("--drop-last"), "{e}");
    asked.drop_last = true;
    assert_eq!(read(&asked, &graph).unwrap().len(), 1);
    asked.sequence = None;
    assert_eq!(read(&asked, &graph).unwrap().len(), 1);
    asked.sequence = Some(5);
    assert_eq!(read(&asked, &graph).unwrap_err().exit_code(), 2);
    let mut other = request(&path, 3, 6);
    other.drop_last = true;
    assert_eq!(read(&other, &graph).unwrap_err().exit_code(), 2);
}

#[test]
fn the_sequence_is_what_the_graph_was_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..36);
    let mut graph = graph(LABELS);
    let mut asked = request(&path, 1, 6);
    asked.sequence = None;
    let e = read(&asked, &graph).unwrap_err();
    assert!(e.to_string().contains("--dim seq"), "{e}");
    graph
        .meta
        .insert("ckpt.dims".into(), r#"{"batch": 1, "seq": 9}"#.into());
    assert_eq!(read(&asked, &graph).unwrap().len(), 4);
}

#[test]
fn only_a_causal_loss_learns_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..36);
    let mut graph = graph(LABELS);
    graph
        .meta
        .insert("ckpt.loss".into(), "cross-entropy".into());
    let e = read(&request(&path, 1, 6), &graph).unwrap_err();
    assert!(e.to_string().contains("causal-lm"), "{e}");
    let cache = super::graph(", %past_key: f32[batch, 2, past, 4]");
    let e = read(&request(&path, 1, 6), &cache).unwrap_err();
    assert!(e.to_string().contains("past_key"), "{e}");
}

/// A compiled step says itself which tokens and labels it has, and takes the batches.
#[test]
fn a_compiled_model_takes_the_batches() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", (0..64).map(|i| i * 5));
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/gpt2/model.onnx");
    let mut model = ckpt_opt::load(model.as_ref(), &Default::default()).unwrap();
    let asked = Request {
        loss: Loss::CausalLm,
        updates: UpdateOptions {
            optimizer: Some(Optimizer::ADAMW),
            ..UpdateOptions::default()
        },
        dims: vec![("batch".into(), 2), ("seq".into(), 8)],
        ..Request::default()
    };
    ckpt_opt::optimize(&mut model.graph, &asked, &mut Watch::default()).unwrap();
    let mut batches = open(&shuffled(&path), &model.graph).unwrap();
    let batch = batches.next().unwrap().unwrap();
    let names: Vec<&String> = batch.inputs.keys().collect();
    // Learning rate, step and optimizer states are not the data's.
    assert_eq!(names, ["input_ids", "labels"]);
    let e = read(
        &request(&bin(dir.path(), "b.bin", [1, 347]), 1, 8),
        &model.graph,
    )
    .unwrap_err();
    assert!(e.to_string().contains("0 to 346"), "{e}");
    let ids = ckpt_opt::passes::ir::Tensor::ints(&[1, 2]);
    let ids = ckpt_opt::passes::ir::Tensor {
        dims: vec![1, 2],
        ..ids
    };
    let labels = ckpt_opt::passes::ir::Tensor::ints(&[1, 347]);
    let labels = ckpt_opt::passes::ir::Tensor {
        dims: vec![1, 2],
        ..labels
    };
    let given = [
        ("input_ids".to_string(), ids),
        ("labels".to_string(), labels),
    ]
    .into();
    let path = dir.path().join("a.npz");
    ckpt_opt::tensors::write(&path, &given).unwrap();
    let e = read(&request(&path, 1, 2), &model.graph).unwrap_err();
    assert!(e.to_string().contains("0 to 346, or -100"), "{e}");
}

#[test]
fn processes_take_their_shares_of_the_batches_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 0..4 * 22);
    let graph = graph(LABELS);
    let one = DataRequest {
        batch: 6,
        ..shuffled(&path)
    };
    let whole = read(&one, &graph).unwrap();
    assert_eq!(whole.len(), 4);
    let share = |rank, ranks, drop_last| {
        let share = DataRequest {
            batch: 6 / ranks,
            share: (rank, ranks),
            drop_last,
            ..one.clone()
        };
        let batches = open(&share, &graph).unwrap();
        (batches.batches_per_epoch(), read(&share, &graph).unwrap())
    };
    for ranks in [1, 2, 3] {
        let shares: Vec<_> = (0..ranks).map(|rank| share(rank, ranks, false)).collect();
        for (i, batch) in whole.iter().enumerate() {
            let all = shares
                .iter()
                .flat_map(|(_, all)| ints(&all[i], "input_ids"));
            assert!(all.eq(ints(batch, "input_ids")), "batch {i} of {ranks}");
        }
        assert!(shares.iter().all(|(n, all)| (*n, all.len()) == (4, 4)));
    }
    // The last batch has 4 examples: not one for each of 6 processes.
    let (n, all) = share(5, 6, false);
    assert_eq!((n, all.len()), (3, 3));
    let (n, all) = share(0, 2, true);
    assert_eq!((n, all.len()), (3, 3));
    let none = DataRequest {
        batch: 1,
        share: (0, 23),
        ..one
    };
    let refused = open(&none, &graph).err().unwrap();
    assert!(refused.to_string().contains("fewer examples"), "{refused}");
}
