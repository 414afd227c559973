//! Text and chats as tokens.

use super::*;
use ckpt_opt::train::data::Packing;
use std::io::Write;
use std::process::{Command, Stdio};

fn text_request(folder: &Path, name: &str, content: &[u8], sequence: u64) -> DataRequest {
    DataRequest {
        tokenizer: Some(tokenizer(folder)),
        ..request(&file(folder, name, content), 1, sequence)
    }
}

/// Returns the tokens of all examples, one after the other.
fn tokens(request: &DataRequest, input: &str) -> Vec<i64> {
    let all = read(request, &graph(LABELS)).unwrap();
    all.iter().flat_map(|b| ints(b, input)).collect()
}

#[test]
fn documents_end_with_the_end_of_text() {
    let dir = tempfile::tempdir().unwrap();
    let lines = b"{\"text\": \"the cat\"}\n\n{\"text\": \"\"}\n{\"n\": 1, \"text\": \"\\u00e9\\u0000<|endoftext|>\"}";
    let expected = [encoded("the cat"), vec![END], encoded("é\0"), vec![END]].concat();
    let asked = text_request(dir.path(), "a.jsonl", lines, expected.len() as u64);
    assert_eq!(tokens(&asked, "input_ids"), expected);
    assert_eq!(tokens(&asked, "labels"), expected);
    assert_eq!(encoded("the cat")[0], 257);
    let apart = read(&asked, &graph(", %position_ids: i64[batch, seq]")).unwrap();
    assert_eq!(
        ints(&apart[0], "position_ids"),
        [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    );
    assert_eq!(apart[0].tokens, 8);
}

#[test]
fn windows_lines_and_byte_order_marks_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let unix = b"{\"text\": \"the\"}\n{\"text\": \"end\"}\n";
    let windows = b"\xef\xbb\xbf{\"text\": \"the\"}\r\n\r\n{\"text\": \"end\"}\r\n";
    let expected = tokens(&text_request(dir.path(), "a.jsonl", unix, 6), "input_ids");
    assert_eq!(
        tokens(
            &text_request(dir.path(), "b.jsonl", windows, 6),
            "input_ids"
        ),
        expected
    );
}

#[test]
fn another_field_can_hold_the_text() {
    let dir = tempfile::tempdir().unwrap();
    let mut asked = text_request(
        dir.path(),
        "a.jsonl",
        b"{\"text\": 1, \"body\": \"the end\"}",
        6,
    );
    asked.text_column = "body".into();
    assert_eq!(
        tokens(&asked, "input_ids"),
        [encoded("the end"), vec![END]].concat()
    );
}

#[test]
fn padded_documents_are_examples() {
    let dir = tempfile::tempdir().unwrap();
    let lines = b"{\"text\": \"abc\"}\n{\"text\": \"abcdefg\"}\n";
    let mut asked = text_request(dir.path(), "a.jsonl", lines, 5);
    asked.packing = Packing::Pad;
    let all = read(&asked, &graph(LABELS)).unwrap();
    let rows: Vec<Vec<i64>> = all.iter().map(|b| ints(b, "labels")).collect();
    let letters = encoded("abcdefg");
    assert_eq!(rows[0], [&letters[..3], &[END, -100]].concat());
    assert_eq!(rows[1], letters[..5]);
    assert_eq!(rows[2], [&letters[5..], &[END, -100, -100]].concat());
    // Padding is the end of text.
    assert_eq!(ints(&all[0], "input_ids")[4], END);
    assert_eq!(all.iter().map(|b| b.tokens).sum::<u64>(), 3 + 4 + 2);
}

/// A file of several pieces has the tokens of the whole text.
#[test]
fn long_texts_are_cut_between_words() {
    let dir = tempfile::tempdir().unwrap();
    let mut content = String::new();
    for i in 0..60_000 {
        content.push_str(["the ", "cat, ", "ate é ", "the  ", "end.\n", "\n\n"][i * 7 % 11 % 6]);
    }
    assert!(content.len() > 1 << 17);
    let expected = [encoded(&content), vec![END]].concat();
    let asked = text_request(
        dir.path(),
        "a.txt",
        content.as_bytes(),
        expected.len() as u64,
    );
    assert_eq!(tokens(&asked, "input_ids"), expected);
    let line = serde_json::json!({ "text": content }).to_string();
    let asked = text_request(
        dir.path(),
        "a.jsonl",
        line.as_bytes(),
        expected.len() as u64,
    );
    assert_eq!(tokens(&asked, "input_ids"), expected);
}

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m['content'].strip() }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

#[test]
fn only_the_assistant_is_learned() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]}"#;
    let text = "<user>the</><assistant>yes</><user>and</><assistant>no</>";
    let ids = encoded(text);
    let mut asked = text_request(dir.path(), "a.jsonl", line.as_bytes(), ids.len() as u64 + 1);
    asked.chat_template = Some(file(dir.path(), "t.jinja", TEMPLATE.as_bytes()));
    let all = read(&asked, &graph(LABELS)).unwrap();
    assert_eq!(ints(&all[0], "input_ids"), [&ids[..], &[END]].concat());
    let learned: Vec<i64> = ints(&all[0], "labels")
        .into_iter()
        .filter(|l| *l != -100)
        .collect();
    assert_eq!(learned, [encoded("yes</>"), encoded("no</>")].concat());
    assert_eq!(all[0].tokens, 11);

    // The same template from the configuration beside the tokenizer.
    asked.chat_template = None;
    let e = read(&asked, &graph(LABELS)).unwrap_err();
    assert_eq!(e.code(), "chat-template");
    assert!(e.to_string().contains("--chat-template"), "{e}");
    let config = serde_json::json!({ "chat_template": TEMPLATE, "eos_token": "<|endoftext|>" });
    file(
        dir.path(),
        "tokenizer_config.json",
        config.to_string().as_bytes(),
    );
    assert_eq!(read(&asked, &graph(LABELS)).unwrap(), all);

    // Windows in which the assistant says nothing are left out.
    asked.sequence = Some(6);
    let some = read(&asked, &graph(LABELS)).unwrap();
    assert!(some.len() < ids.len() / 6 && some.iter().all(|b| b.tokens > 0));
    let counted: u64 = some.iter().map(|b| b.tokens).sum();
    assert!((6..=11).contains(&counted));
}

#[test]
fn the_tokenizer_cuts_and_pads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let asked = text_request(dir.path(), "a.jsonl", b"{\"text\": \"abcdefgh\"}", 9);
    let expected = tokens(&asked, "input_ids");
    let mut cutting = byte_tokenizer();
    let limit = tokenizers::TruncationParams {
        max_length: 3,
        ..Default::default()
    };
    cutting.with_truncation(Some(limit)).unwrap();
    cutting.with_padding(Some(tokenizers::PaddingParams::default()));
    cutting
        .save(asked.tokenizer.as_ref().unwrap(), false)
        .unwrap();
    assert_eq!(tokens(&asked, "input_ids"), expected);
}

#[test]
fn the_end_of_text_is_what_the_configuration_names() {
    let dir = tempfile::tempdir().unwrap();
    let asked = text_request(
        dir.path(),
        "a.jsonl",
        b"{\"text\": \"ab\"}\n{\"text\": \"cd\"}",
        3,
    );
    let batches = open(&asked, &graph(LABELS)).unwrap();
    assert!(batches.notes().is_empty());
    let config = serde_json::json!({ "eos_token": { "content": "!" } });
    file(
        dir.path(),
        "tokenizer_config.json",
        config.to_string().as_bytes(),
    );
    assert_eq!(tokens(&asked, "input_ids"), encoded("ab!cd!"));
    let config = serde_json::json!({ "eos_token": "nothing" });
    file(
        dir.path(),
        "tokenizer_config.json",
        config.to_string().as_bytes(),
    );
    let batches = open(&asked, &graph(LABELS)).unwrap();
    assert!(batches.notes()[0].contains("end-of-text"));
}

#[test]
fn other_text_of_the_same_length_has_another_fingerprint() {
    let dir = tempfile::tempdir().unwrap();
    let print = |text: &str| {
        let line = serde_json::json!({ "text": text }).to_string();
        open(
            &text_request(dir.path(), "a.jsonl", line.as_bytes(), 4),
            &graph(LABELS),
        )
        .unwrap()
        .fingerprint()
    };
    assert_eq!(print("abcdef"), print("abcdef"));
    assert_ne!(print("abcdef"), print("abcdeg"));
}

/// What the next test runs in a process of its own, for the standard input of this one is not ours.
#[test]
fn reads_stdin_if_asked_to() {
    let Ok(folder) = std::env::var("DATA_FROM_STDIN") else {
        return;
    };
    let asked = DataRequest {
        tokenizer: Some(Path::new(&folder).join("tokenizer.json")),
        ..request(Path::new("-"), 1, 8)
    };
    match read(&asked, &graph(LABELS)) {
        Ok(all) => println!("read {:?}", ints(&all[0], "input_ids")),
        Err(e) => println!("{e}"),
    }
}

#[test]
fn lines_come_from_stdin() {
    let dir = tempfile::tempdir().unwrap();
    tokenizer(dir.path());
    let run = |input: &[u8], temporary: &Path| {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "data::text::reads_stdin_if_asked_to",
                "--nocapture",
            ])
            .env("DATA_FROM_STDIN", dir.path())
            .env("TMPDIR", temporary)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // A child that has refused already does not read.
        let _ = child.stdin.take().unwrap().write_all(input);
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
    };
    let output = run(b"{\"text\": \"the cat\"}\n{\"text\": \"an\"}\n", dir.path());
    let expected = [encoded("the cat"), vec![END], encoded("an")].concat();
    assert!(output.contains(&format!("read {expected:?}")), "{output}");
    assert!(run(b"{\"text\": \"a\"}\nnot json\n", dir.path()).contains("stdin, line 2"));
    assert!(run(b"", dir.path()).contains("no text"));
    let refused = run(b"{\"text\": \"a\"}\n", &dir.path().join("none"));
    assert!(
        refused.contains("error[spill]") && refused.contains("TMPDIR"),
        "{refused}"
    );
}
