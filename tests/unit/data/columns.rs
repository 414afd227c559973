//! Columns of Parquet and Arrow files.

use super::*;
use arrow_array::builder::{ListBuilder, StringBuilder, StructBuilder};
use arrow_array::{
    Array, ArrayRef, FixedSizeListArray, Float64Array, Int32Array, Int64Array, ListArray,
    RecordBatch, StringArray, types,
};
use arrow_schema::{DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::fs::File;
use std::sync::Arc;

fn table(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    RecordBatch::try_from_iter(columns).unwrap()
}

pub(super) fn parquet(path: PathBuf, batch: &RecordBatch, compression: Compression) -> PathBuf {
    let properties = WriterProperties::builder().set_compression(compression);
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties.build())).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    path
}

/// Writes a batch in all formats that hold columns.
fn all_formats(folder: &Path, batch: &RecordBatch) -> Vec<PathBuf> {
    let zstd = Compression::ZSTD(ZstdLevel::default());
    let mut paths = vec![
        parquet(folder.join("a.parquet"), batch, Compression::SNAPPY),
        parquet(folder.join("b.parquet"), batch, zstd),
        parquet(folder.join("c.parquet"), batch, Compression::UNCOMPRESSED),
    ];
    paths.push(folder.join("a.arrow"));
    let mut writer =
        arrow_ipc::writer::FileWriter::try_new(File::create(&paths[3]).unwrap(), &batch.schema())
            .unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    paths.push(folder.join("b.arrow"));
    let mut writer =
        arrow_ipc::writer::StreamWriter::try_new(File::create(&paths[4]).unwrap(), &batch.schema())
            .unwrap();
    writer.write(batch).unwrap();
    writer.finish().unwrap();
    paths
}

fn strings(all: &[&str]) -> ArrayRef {
    Arc::new(StringArray::from(all.to_vec()))
}

#[test]
fn a_column_of_text_is_read_as_lines_are() {
    let dir = tempfile::tempdir().unwrap();
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
    let batch = table(vec![("id", ids), ("text", strings(&["the cat", "é"]))]);
    let expected = [encoded("the cat"), vec![END], encoded("é"), vec![END]].concat();
    for path in all_formats(dir.path(), &batch) {
        let mut asked = request(&path, 1, expected.len() as u64);
        asked.tokenizer = Some(tokenizer(dir.path()));
        let all = read(&asked, &graph(LABELS)).unwrap();
        assert_eq!(ints(&all[0], "input_ids"), expected, "{path:?}");
        asked.text_column = "body".into();
        let e = read(&asked, &graph(LABELS)).unwrap_err();
        assert!(e.to_string().contains("id, text"), "{e}");
    }
}

#[test]
fn chats_are_lists_of_messages() {
    let dir = tempfile::tempdir().unwrap();
    let fields = ["role", "content"].map(|name| Field::new(name, DataType::Utf8, true));
    let mut list = ListBuilder::new(StructBuilder::from_fields(fields.to_vec(), 4));
    for (role, content) in [("user", "a"), ("assistant", "bc")] {
        for (i, text) in [role, content].into_iter().enumerate() {
            list.values()
                .field_builder::<StringBuilder>(i)
                .unwrap()
                .append_value(text);
        }
        list.values().append(true);
    }
    list.append(true);
    let batch = table(vec![("messages", Arc::new(list.finish()))]);
    let template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}";
    let template = file(dir.path(), "t.jinja", template.as_bytes());
    for path in all_formats(dir.path(), &batch) {
        let mut asked = request(&path, 1, 6);
        asked.tokenizer = Some(tokenizer(dir.path()));
        asked.chat_template = Some(template.clone());
        let all = read(&asked, &graph(LABELS)).unwrap();
        let letters = encoded("uaabc");
        assert_eq!(ints(&all[0], "input_ids"), [&letters[..], &[END]].concat());
        assert_eq!(
            ints(&all[0], "labels"),
            [&[-100; 3][..], &letters[3..], &[-100]].concat()
        );
    }
}

fn regression() -> Graph {
    parse(
        "graph @g typed (%x: f32[batch, 2, 2], %target: i64[batch]) -> (%y) {
  %y = Tanh %x : f32[batch, 2, 2]
}
",
    )
    .unwrap()
}

/// Rows `[[first, first + 1], [first + 2, first + 3]]`.
fn squares(firsts: &[f64]) -> ArrayRef {
    let values: Vec<f64> = firsts
        .iter()
        .flat_map(|f| (0..4).map(move |i| f + f64::from(i)))
        .collect();
    let item = |of: DataType| Arc::new(Field::new_list_field(of, true));
    let inner = FixedSizeListArray::new(
        item(DataType::Float64),
        2,
        Arc::new(Float64Array::from(values)),
        None,
    );
    let of = item(inner.data_type().clone());
    Arc::new(FixedSizeListArray::new(of, 2, Arc::new(inner), None))
}

#[test]
fn columns_of_numbers_are_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let target: ArrayRef = Arc::new(Int32Array::from(vec![5, 6, 7]));
    let batch = table(vec![
        ("target", target),
        ("unused", strings(&["", "", ""])),
        ("x", squares(&[0.0, 10.0, 20.5])),
    ]);
    for path in all_formats(dir.path(), &batch) {
        let all = read(&request(&path, 2, 1), &regression()).unwrap();
        assert_eq!(all[0].inputs["x"].dims, [2, 2, 2]);
        assert_eq!(
            floats(&all[0], "x"),
            [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0]
        );
        assert_eq!(floats(&all[1], "x"), [20.5, 21.5, 22.5, 23.5]);
        assert_eq!(ints(&all[0], "target"), [5, 6]);
    }
    // More rows than are decoded at once.
    let many: Vec<f64> = (0..1000).map(f64::from).collect();
    let target: ArrayRef = Arc::new(Int32Array::from((0..1000).collect::<Vec<i32>>()));
    let batch = table(vec![("target", target), ("x", squares(&many))]);
    for path in all_formats(dir.path(), &batch) {
        let all = read(&request(&path, 1000, 1), &regression()).unwrap();
        assert!(ints(&all[0], "target").into_iter().eq(0..1000));
        assert_eq!(floats(&all[0], "x")[3999], 1002.0);
    }
}

#[test]
fn tokens_in_lists_of_one_length_are_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let lists = |rows: Vec<Vec<i64>>| -> ArrayRef {
        let rows = rows
            .into_iter()
            .map(|r| Some(r.into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<types::Int64Type, _, _>(
            rows,
        ))
    };
    let even = table(vec![("input_ids", lists(vec![vec![1, 2], vec![3, 4]]))]);
    for path in all_formats(dir.path(), &even) {
        let all = read(&request(&path, 2, 2), &graph("")).unwrap();
        assert_eq!(ints(&all[0], "input_ids"), [1, 2, 3, 4]);
    }
    let fails = |batch: &RecordBatch, words: &[&str]| {
        for path in all_formats(dir.path(), batch) {
            let e = read(&request(&path, 1, 2), &graph("")).unwrap_err();
            assert_eq!(e.exit_code(), 2);
            words
                .iter()
                .for_each(|w| assert!(e.to_string().contains(w), "{w} in {e}"));
        }
    };
    let rows = || lists(vec![vec![1, 2, 3], vec![4], vec![5, 6]]);
    let labels = |third: i64| lists(vec![vec![-100, 2, third], vec![4], vec![5, 6]]);
    // Lists of several lengths are documents, one after the other.
    for path in all_formats(dir.path(), &table(vec![("input_ids", rows())])) {
        let all = read(&request(&path, 1, 2), &graph("")).unwrap();
        let ids: Vec<i64> = all.iter().flat_map(|b| ints(b, "input_ids")).collect();
        assert_eq!(ids, [1, 2, 3, 4, 5, 6]);
    }
    let masked = table(vec![("input_ids", rows()), ("labels", labels(3))]);
    for path in all_formats(dir.path(), &masked) {
        let all = read(&request(&path, 1, 2), &graph(LABELS)).unwrap();
        let own: Vec<i64> = all.iter().flat_map(|b| ints(b, "labels")).collect();
        assert_eq!(own, [-100, 2, 3, 4, 5, 6]);
    }
    let other = table(vec![("input_ids", rows()), ("labels", labels(7))]);
    fails(&other, &["label 7 is not its own token, 3", "row 1"]);
    let large = table(vec![("input_ids", lists(vec![vec![1], vec![2, 300]]))]);
    fails(&large, &["token 300 has no row", "row 2", "0 to 299"]);
    let beyond = table(vec![("input_ids", lists(vec![vec![1, 2], vec![3, 300]]))]);
    fails(&beyond, &["row 1", "300", "0 to 299"]);
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![1.0]));
    fails(&table(vec![("input_ids", floats)]), &["i64", "Float64"]);
    let nulls: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None]));
    fails(&table(vec![("input_ids", nulls)]), &["no value at row 2"]);
    fails(&table(vec![("input_ids", strings(&["a"]))]), &["Utf8"]);
    let large: ArrayRef = Arc::new(Int64Array::from(vec![1 << 40]));
    let small = parse("graph @g typed (%x: i32[batch]) -> (%y) {\n  %y = Neg %x : i32[batch]\n}\n")
        .unwrap();
    let path = parquet(
        dir.path().join("d.parquet"),
        &table(vec![("x", large)]),
        Compression::SNAPPY,
    );
    let e = read(&request(&path, 1, 2), &small).unwrap_err();
    assert!(e.to_string().contains("too large"), "{e}");
}
