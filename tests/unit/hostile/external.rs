//! Weights in external files: paths, links, lengths.

use super::{changed, read, refused, refused_in};
use ckpt_opt::frontend;
use ckpt_opt::frontend::onnx::proto::{
    ModelProto, StringStringEntryProto, tensor_proto::DataLocation,
};
use ckpt_passes::ir::Data;

fn with_external(entries: &[(&str, &str)]) -> ModelProto {
    changed(|g| {
        let w = &mut g.initializer[0];
        w.raw_data = None;
        w.data_location = Some(DataLocation::External as i32);
        w.external_data = entries
            .iter()
            .map(|(k, v)| StringStringEntryProto {
                key: Some(k.to_string()),
                value: Some(v.to_string()),
            })
            .collect();
    })
}

#[test]
fn external_paths_stay_in_the_folder() {
    for path in [
        "../../etc/passwd",
        "/etc/passwd",
        "a/../../w",
        "..",
        "C:\\w",
        "a\\..\\w",
        "",
    ] {
        refused(
            &with_external(&[("location", path)]),
            "external",
            "location",
        );
    }
    refused(
        &with_external(&[("location", "w"), ("offset", "-1")]),
        "external",
        "bad offset",
    );
    refused(
        &with_external(&[("location", "w"), ("offset", "18446744073709551615")]),
        "external",
        "out of range",
    );
    refused(
        &with_external(&[("location", "w"), ("length", "9")]),
        "external",
        "wrong length",
    );
    refused(&with_external(&[]), "external", "no location");
    let mut both = with_external(&[("location", "w")]);
    both.graph.as_mut().unwrap().initializer[0].raw_data = Some(vec![0; 8].into());
    refused(&both, "data", "both");
}

#[test]
fn external_files_are_mapped_once_or_absent() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_external(&[("location", "sub/w.bin"), ("offset", "4")]);
    let content = |m: frontend::Model| {
        let w = m.graph.find_value("w").unwrap();
        m.graph.value(w).tensor().unwrap().data.clone()
    };
    let absent = read(dir.path(), &model).unwrap_or_else(|e| panic!("{e}"));
    assert!(matches!(content(absent), Data::Absent(_)));
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("sub/w.bin"), [9; 11]).unwrap();
    refused_in(dir.path(), &model, "external", "ends before");
    std::fs::write(dir.path().join("sub/w.bin"), [9; 12]).unwrap();
    let here = content(read(dir.path(), &model).unwrap_or_else(|e| panic!("{e}")));
    let Data::Here {
        bytes,
        origin: Some(origin),
    } = here
    else {
        panic!("{here:?}")
    };
    assert_eq!(
        (&bytes[..], origin.offset, origin.length),
        (&[9; 8][..], 4, 8)
    );
    std::fs::remove_file(dir.path().join("sub/w.bin")).unwrap();
    std::fs::create_dir(dir.path().join("sub/w.bin")).unwrap();
    refused_in(dir.path(), &model, "external", "not a regular file");
}

#[cfg(unix)]
#[test]
fn links_are_refused() {
    use std::os::unix::fs::symlink;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), [1; 8]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    symlink(outside.path().join("secret"), dir.path().join("w")).unwrap();
    refused_in(
        dir.path(),
        &with_external(&[("location", "w")]),
        "external",
        "symbolic link",
    );
    symlink(outside.path(), dir.path().join("folder")).unwrap();
    refused_in(
        dir.path(),
        &with_external(&[("location", "folder/secret")]),
        "external",
        "symbolic link",
    );
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    refused_in(
        dir.path(),
        &with_external(&[("location", "dangling")]),
        "external",
        "symbolic link",
    );
    std::fs::write(dir.path().join("one"), [1; 8]).unwrap();
    std::fs::hard_link(dir.path().join("one"), dir.path().join("two")).unwrap();
    refused_in(
        dir.path(),
        &with_external(&[("location", "two")]),
        "external",
        "hard links",
    );
}
