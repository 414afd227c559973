//! Archives good and bad, made by another writer of zip.

use super::*;
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// An archive as PyTorch lays it out: a stored weight and a deflated text.
fn good(names: &[&str]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (i, name) in names.iter().enumerate() {
        let method = match i % 2 {
            0 => CompressionMethod::Stored,
            _ => CompressionMethod::Deflated,
        };
        let options = SimpleFileOptions::default().compression_method(method);
        writer.start_file(*name, options).unwrap();
        writer.write_all(&content(i)).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn content(i: usize) -> Vec<u8> {
    format!("entry {i} ").repeat(50).into_bytes()
}

fn open(bytes: &[u8]) -> Result<Archive> {
    Archive::read(Bytes::copy_from_slice(bytes))
}

fn refused(bytes: &[u8], word: &str) {
    let error = match open(bytes) {
        Ok(_) => panic!("accepted, but expected {word:?}"),
        Err(error) => error,
    };
    assert_eq!(error.code(), "archive");
    assert!(error.to_string().contains(word), "{error}");
}

/// Where `needle` is for the `n`th time.
fn position(bytes: &[u8], needle: &[u8], n: usize) -> usize {
    let mut hits = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(needle));
    hits.nth(n).unwrap()
}

fn set(bytes: &mut [u8], at: usize, new: &[u8]) {
    bytes[at..at + new.len()].copy_from_slice(new);
}

#[test]
fn stored_entries_are_slices_of_the_file() {
    let bytes = Bytes::from(good(&["m/data/0", "m/code/a.py"]));
    let archive = Archive::read(bytes.clone()).unwrap();
    assert_eq!(archive.names().collect::<Vec<_>>(), ["code/a.py", "data/0"]);
    let weight = archive.mapped("data/0").unwrap();
    assert_eq!(weight, content(0));
    assert!(bytes.as_ptr_range().contains(&weight.as_ptr()));
    assert_eq!(
        archive.text("code/a.py", 1000).unwrap().as_bytes(),
        content(1)
    );
    assert!(archive.content("code/a.py", 10).is_err());
    assert!(archive.mapped("data/1").is_err());
}

#[test]
fn names_that_leave_the_folder_or_repeat_are_refused() {
    refused(&good(&["m/../../x"]), "plain path");
    refused(&good(&["m/./x"]), "plain path");
    refused(&good(&["/m/x"]), "relative");
    refused(&good(&["m/a\\b"]), "relative");
    refused(&good(&["x"]), "outside");
    refused(&good(&["m/x", "n/x"]), "several root folders");
    let mut bytes = good(&["m/aa", "m/ab"]);
    for n in 0..2 {
        let at = position(&bytes, b"m/ab", n);
        set(&mut bytes, at, b"m/aa");
        if n == 0 {
            refused(&bytes, "disagree");
            let second = position(&bytes, b"m/ab", 0);
            set(&mut bytes, second, b"m/aa");
            break;
        }
    }
    refused(&bytes, "twice");
}

#[test]
fn a_directory_that_lies_is_refused() {
    let names = ["m/data/0", "m/code/a.py"];
    let bytes = good(&names);
    for cut in 0..bytes.len() {
        assert!(open(&bytes[..cut]).is_err(), "cut at {cut}");
    }
    let central = |n| position(&bytes, b"PK\x01\x02", n);
    let end = position(&bytes, b"PK\x05\x06", 0);
    let changed = |at: usize, new: &[u8], word: &str| {
        let mut bytes = bytes.clone();
        set(&mut bytes, at, new);
        refused(&bytes, word);
    };
    changed(central(0) + 20, &[9, 0], "two sizes");
    changed(central(1) + 20, &[9, 0], "disagree");
    changed(central(1) + 24, &[9, 0], "disagree");
    changed(central(0) + 8, &[1], "encrypted");
    changed(central(0) + 10, &[12], "method 12");
    changed(central(1) + 42, &[0, 0, 0, 0], "disagree");
    changed(central(1) + 42, &[0, 0, 0, 0x70], "not inside");
    changed(central(1) + 42, &[0xff; 4], "zip64");
    changed(end + 4, &[1], "several parts");
    changed(end + 8, &[1], "several parts");
    changed(end + 8, &[9, 0, 9, 0], "lists");
    changed(end + 8, &[0xfe, 0xff, 0xfe, 0xff], "lists");
    changed(end + 8, &[1, 0, 1, 0], "wrong size");
    changed(end + 12, &[0xff; 4], "zip64");
    changed(end + 16, &[0xff, 0xff, 0xff, 0x7f], "not inside");
}

#[test]
fn overlapping_entries_are_refused() {
    // Two lines of the directory that name the same bytes: the usual bomb.
    let bytes = good(&["m/aa"]);
    let start = position(&bytes, b"PK\x01\x02", 0);
    let end = position(&bytes, b"PK\x05\x06", 0);
    let mut bomb = bytes[..end].to_vec();
    bomb.extend_from_slice(&bytes[start..end]);
    let mut record = bytes[end..].to_vec();
    set(&mut record, 8, &[2, 0, 2, 0]);
    set(&mut record, 12, &(2 * (end - start) as u32).to_le_bytes());
    bomb.extend(record);
    let archive = open(&bomb);
    assert!(
        archive
            .is_err_and(|e| e.to_string().contains("twice") || e.to_string().contains("overlap"))
    );
}

#[test]
fn damaged_content_is_refused() {
    let mut bytes = good(&["m/data/0", "m/code/a.py"]);
    let at = position(&bytes, b"entry 0", 0);
    bytes[at] ^= 1;
    let archive = open(&bytes).unwrap();
    assert!(
        archive
            .content("data/0", 1000)
            .unwrap_err()
            .to_string()
            .contains("checksum")
    );
    // What is only mapped is not read.
    assert!(archive.mapped("data/0").is_ok());
}

#[test]
fn a_bomb_is_refused_before_it_is_inflated() {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let zeros = vec![0; 33 << 20];
    for i in 0..2 {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        writer.start_file(format!("m/{i}"), options).unwrap();
        writer.write_all(&zeros).unwrap();
    }
    let mut bytes = writer.finish().unwrap().into_inner();
    let archive = open(&bytes).unwrap();
    assert!(archive.mapped("0").is_ok());
    let error = archive.mapped("1").unwrap_err();
    assert!(
        error.to_string().contains("inflates to too much"),
        "{error}"
    );
    // A size that deflate cannot reach, in both places.
    for (signature, offset) in [(b"PK\x01\x02", 24), (b"PK\x03\x04", 22)] {
        let at = position(&bytes, signature, 0);
        set(&mut bytes, at + offset, &0x7fff_0000u32.to_le_bytes());
    }
    assert!(open(&bytes).unwrap().mapped("0").is_err());
    // One byte less than there is.
    for (signature, offset) in [(b"PK\x01\x02", 24), (b"PK\x03\x04", 22)] {
        let at = position(&bytes, signature, 0);
        set(&mut bytes, at + offset, &((33u32 << 20) - 1).to_le_bytes());
    }
    assert!(open(&bytes).unwrap().mapped("0").is_err());
}

#[test]
fn zip64_is_read() {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .large_file(true);
    writer.start_file("m/data/0", options).unwrap();
    writer.write_all(&content(0)).unwrap();
    let mut bytes = writer.finish().unwrap().into_inner();
    assert_eq!(open(&bytes).unwrap().mapped("data/0").unwrap(), content(0));
    // The end record of 64 bits, as libtorch writes it always.
    let end = position(&bytes, b"PK\x05\x06", 0);
    let start = position(&bytes, b"PK\x01\x02", 0);
    let mut wide = b"PK\x06\x06".to_vec();
    wide.extend(44u64.to_le_bytes());
    wide.extend([45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for number in [1, 1, (end - start) as u64, start as u64] {
        wide.extend(number.to_le_bytes());
    }
    wide.extend(b"PK\x06\x07\0\0\0\0");
    wide.extend((end as u64).to_le_bytes());
    wide.extend(1u32.to_le_bytes());
    let mut record = bytes.split_off(end);
    set(&mut record, 8, &[0xff; 12]);
    bytes.extend(wide);
    bytes.extend(record);
    assert_eq!(open(&bytes).unwrap().mapped("data/0").unwrap(), content(0));
    let at = position(&bytes, b"PK\x06\x07", 0);
    set(&mut bytes, at + 8, &u64::MAX.to_le_bytes());
    refused(&bytes, "zip64 record");
}
