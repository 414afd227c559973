//! Damaged files and wrong requests: an error that names the place, never a panic.

use super::*;
use arrow_array::{ArrayRef, RecordBatch, StringArray};
use ckpt_opt::passes::error::Kind;
use ckpt_opt::passes::ir::Tensor;
use parquet::basic::Compression;
use std::sync::Arc;

fn text_request(path: &Path, tokenizer: &Path) -> DataRequest {
    DataRequest {
        tokenizer: Some(tokenizer.to_path_buf()),
        ..request(path, 1, 4)
    }
}

/// Checks that reading fails with a usage error that holds these words.
fn fails(request: &DataRequest, words: &[&str]) {
    let e = read(request, &graph(LABELS)).unwrap_err();
    assert_eq!(e.kind(), Kind::Usage, "{e}");
    for word in words {
        assert!(e.to_string().contains(word), "`{word}` in {e}");
    }
}

#[test]
fn lines_that_are_wrong_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let cases: [(&[u8], &[&str]); 14] = [
        (b"{\"text\": \"a\"}\nnot json\n", &["line 2", "no JSON"]),
        (b"{\"text\": \"a\"}\n\n[1]\n", &["line 3", "no JSON object"]),
        (b"{\"text\": \"a\"", &["line 1"]),
        (
            b"{\"text\": \"a\"}\r\n{\"text\": \"\xff\"}",
            &["line 2", "UTF-8", "column 11"],
        ),
        (b"{\"text\": \"a\0\"}", &["line 1"]),
        (b"\0\0\0\0", &["line 1"]),
        (b"{\"text\": 5}", &["line 1", "no text"]),
        (
            b"{\"body\": \"a\", \"title\": \"b\"}",
            &["line 1", "body, title"],
        ),
        (b"{}", &["line 1", "no fields"]),
        (b"\n \r\n\t\n", &["no text"]),
        (b"{\"text\": \"\"}", &["no text"]),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
            &["line 1", "--chat-template"],
        ),
        (b"{\"text\": \"\\ud800\"}", &["line 1"]),
        (b"{\"text\": \"a\"}", &["file is empty"]),
    ];
    for (i, (content, words)) in cases.iter().enumerate() {
        let path = file(dir.path(), "a.jsonl", if i == 13 { b"" } else { content });
        fails(&text_request(&path, &tokenizer), words);
        assert!(words.len() < 9);
    }
    let deep = format!(
        "{{\"text\": \"a\", \"x\": {}1{}}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    fails(
        &text_request(&file(dir.path(), "a.jsonl", deep.as_bytes()), &tokenizer),
        &["line 1", "recursion"],
    );
    fails(
        &text_request(&file(dir.path(), "a.txt", b"a\nb\n\xc3"), &tokenizer),
        &["line 3", "UTF-8"],
    );
}

#[test]
fn huge_lines_and_lines_of_zeros_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let line = format!("{{\"text\": \"{}\"}}\n", "the ".repeat(1 << 20));
    let path = file(dir.path(), "a.jsonl", line.as_bytes());
    let batches = open(&text_request(&path, &tokenizer), &graph(LABELS)).unwrap();
    // The end of text alone is no example.
    assert_eq!(batches.examples(), 1 << 19);
    let zeros = file(dir.path(), "a.txt", &[0; 100_000]);
    let batches = open(&text_request(&zeros, &tokenizer), &graph(LABELS)).unwrap();
    assert_eq!(batches.examples(), 25_000);
}

/// A sparse file whose only line is longer than any line may be.
#[test]
fn a_line_without_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let path = dir.path().join("a.jsonl");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1 << 29)
        .unwrap();
    fails(
        &text_request(&path, &tokenizer),
        &["line 1", "too long", "256 MiB"],
    );
}

#[test]
fn tokens_that_the_model_lacks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", [1, 2, 3, 4, 5, 300, 7, 8]);
    fails(
        &request(&path, 1, 4),
        &["a.bin, token 5", "token 300", "0 to 299"],
    );
    let mut wide = request(&path, 1, 4);
    wide.token_type = ckpt_opt::train::data::TokenType::U32;
    fails(&wide, &["token 131073"]);
    fails(
        &request(&file(dir.path(), "b.bin", b"abc"), 1, 4),
        &["ends within a token", "3 bytes"],
    );
    fails(
        &request(&bin(dir.path(), "c.bin", [1]), 1, 4),
        &["nothing to learn"],
    );
    let mut tokenizer = byte_tokenizer();
    let added: Vec<_> = (0..60)
        .map(|i| tokenizers::AddedToken::from(format!("<{i}>"), true))
        .collect();
    tokenizer.add_special_tokens(added).unwrap();
    tokenizer
        .save(dir.path().join("large.json"), false)
        .unwrap();
    let path = file(
        dir.path(),
        "a.jsonl",
        b"{\"text\": \"a\"}\n{\"text\": \"b<59>\"}",
    );
    fails(
        &text_request(&path, &dir.path().join("large.json")),
        &["line 2", "`<59>`", "0 to 299"],
    );
}

#[test]
fn requests_that_cannot_be_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let lines = file(dir.path(), "a.jsonl", b"{\"text\": \"ab\"}");
    fails(
        &request(&lines, 1, 4),
        &["error[tokenizer]", "needs a tokenizer", "--tokenizer"],
    );
    fails(
        &text_request(&lines, &dir.path().join("none.json")),
        &["none.json"],
    );
    for (name, content) in [
        ("x.json", &b"{}"[..]),
        ("y.json", b""),
        ("z.json", b"\xff{"),
        ("w.json", b"[]"),
    ] {
        let wrong = file(dir.path(), name, content);
        fails(&text_request(&lines, &wrong), &["no tokenizer", name]);
    }
    fails(&request(&dir.path().join("none.bin"), 1, 4), &["none.bin"]);
    fails(
        &request(&file(dir.path(), "a.csv", b"1"), 1, 4),
        &[".jsonl"],
    );
    let empty = tempfile::tempdir().unwrap();
    fails(&request(empty.path(), 1, 4), &["holds no data"]);
    fails(&DataRequest::default(), &["no data is given"]);
    let path = bin(dir.path(), "a.bin", 0..9);
    fails(&request(&path, 0, 4), &["no examples"]);
    for sequence in [0, 1, 1 << 24, u64::MAX] {
        fails(&request(&path, 1, sequence), &["2 to 16777215"]);
    }
    let mut few = request(&path, 100, 4);
    few.drop_last = true;
    fails(&few, &["fewer examples"]);
    assert_eq!(
        read(&request(&path, u64::MAX, 4), &graph(LABELS))
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn a_damaged_index_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = bin(dir.path(), "a.bin", 1..=4);
    let index = |code: u8, counts: [u64; 2], lengths: &[i32], places: &[i64], documents: &[i64]| {
        let mut bytes = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0".to_vec();
        bytes.push(code);
        bytes.extend(counts.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(lengths.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(places.iter().chain(documents).flat_map(|n| n.to_le_bytes()));
        bytes
    };
    let good = index(8, [2, 3], &[1, 3], &[0, 2], &[0, 1, 2]);
    file(dir.path(), "a.idx", &good);
    assert!(read(&request(&path, 1, 4), &graph(LABELS)).is_ok());
    for wrong in [
        b"no index".to_vec(),
        index(6, [2, 3], &[1, 3], &[0, 2], &[0, 1, 2]),
        index(4, [2, 3], &[1, 3], &[0, 2], &[0, 1, 2]),
        index(8, [2, 3], &[1, -3], &[0, 2], &[0, 1, 2]),
        index(8, [2, 3], &[1, 4], &[0, 2], &[0, 1, 2]),
        index(8, [2, 3], &[1, 2], &[0, 2], &[0, 1, 2]),
        index(8, [2, 3], &[1, 3], &[0, 4], &[0, 1, 2]),
        index(8, [2, 3], &[1, 3], &[0, 2], &[1, 0, 2]),
        index(8, [2, 3], &[1, 3], &[0, 2], &[0, 9, 2]),
        index(8, [u64::MAX, 3], &[1, 3], &[0, 2], &[0, 1, 2]),
        index(8, [2, u64::MAX], &[1, 3], &[0, 2], &[0, 1, 2]),
    ] {
        file(dir.path(), "a.idx", &wrong);
        let e = read(&request(&path, 1, 4), &graph(LABELS)).unwrap_err();
        assert_eq!(e.kind(), Kind::Usage, "{e}");
    }
    for end in 0..good.len() {
        file(dir.path(), "a.idx", &good[..end]);
        assert!(
            read(&request(&path, 1, 4), &graph(LABELS)).is_err(),
            "{end}"
        );
    }
}

/// Reads a file cut at many places, and with bytes changed at many places. Returns how many of them were refused.
fn damaged(path: &Path, request: &DataRequest, graph: &Graph) -> usize {
    let good = std::fs::read(path).unwrap();
    let mut refused = 0;
    let mut check = |bytes: &[u8]| {
        std::fs::write(path, bytes).unwrap();
        if let Err(e) = read(request, graph) {
            assert_ne!(e.kind(), Kind::Bug, "{e}");
            refused += 1;
        }
    };
    let step = good.len().div_ceil(40).max(1);
    for end in (0..good.len()).step_by(step) {
        check(&good[..end]);
    }
    let step = good.len().div_ceil(120).max(1);
    for at in (0..good.len()).step_by(step) {
        for value in [0, 0x7f, 0xff, good[at] ^ 1] {
            let mut bytes = good.clone();
            bytes[at] = value;
            check(&bytes);
        }
    }
    refused
}

#[test]
fn damaged_files_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["the cat", "and a hat"]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    for (name, compression) in [
        ("a.parquet", Compression::SNAPPY),
        ("b.parquet", Compression::UNCOMPRESSED),
    ] {
        let path = super::columns::parquet(dir.path().join(name), &batch, compression);
        let asked = text_request(&path, &tokenizer);
        assert!(read(&asked, &graph(LABELS)).is_ok());
        assert!(damaged(&path, &asked, &graph(LABELS)) > 40);
    }
    let ids = Tensor {
        dims: vec![2, 3],
        ..Tensor::ints(&[7, 8, 1, 9, 1, 1])
    };
    let tensors = [("input_ids".to_string(), ids)].into();
    for name in ["a.npz", "a.safetensors"] {
        let path = dir.path().join(name);
        ckpt_opt::tensors::write(&path, &tensors).unwrap();
        let asked = request(&path, 1, 3);
        assert!(read(&asked, &graph("")).is_ok());
        assert!(damaged(&path, &asked, &graph("")) > 40);
    }
    for format in ["a.arrow", "b.arrow"] {
        let path = dir.path().join(format);
        let out = std::fs::File::create(&path).unwrap();
        if format == "a.arrow" {
            let mut writer = arrow_ipc::writer::FileWriter::try_new(out, &batch.schema()).unwrap();
            writer.write(&batch).and_then(|()| writer.finish()).unwrap();
        } else {
            let mut writer =
                arrow_ipc::writer::StreamWriter::try_new(out, &batch.schema()).unwrap();
            writer.write(&batch).and_then(|()| writer.finish()).unwrap();
        }
        let asked = text_request(&path, &tokenizer);
        assert!(read(&asked, &graph(LABELS)).is_ok());
        assert!(damaged(&path, &asked, &graph(LABELS)) > 20);
    }
}

#[test]
fn a_damaged_tokenizer_is_refused_or_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = tokenizer(dir.path());
    let lines = file(
        dir.path(),
        "a.jsonl",
        b"{\"text\": \"the cat and the hat\"}",
    );
    let refused = damaged(&path, &text_request(&lines, &path), &graph(LABELS));
    assert!(refused > 50, "{refused}");
}
