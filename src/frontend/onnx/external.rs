//! Weights in external files (ONNX, "External Data").
//!
//! A hostile model could name any path. So the path must be relative, name no parent, and go through no symbolic link below
//! the model's folder. The file must be a regular one with a single hard link. It is opened once without following links,
//! checked after it is open, and mapped. Tensors are slices of the mapping. If a file is missing, its tensors are
//! [`Data::Absent`]: such a model can still be inspected, planned and rewritten.

use crate::frontend::file::{io_error, map_file};
use crate::onnx::proto::StringStringEntryProto;
use bytes::Bytes;
use ckpt_passes::ir::{Data, External};
use ckpt_passes::{Error, Result};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The external files of one model, each mapped at most once.
pub struct Files {
    folder: PathBuf,
    /// `None` for a file that does not exist.
    mapped: BTreeMap<Arc<str>, Option<Bytes>>,
}

impl Files {
    /// Returns the files in the folder of a model.
    pub fn beside(model: &Path) -> Files {
        let folder = match model.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
            _ => PathBuf::from("."),
        };
        Files {
            folder,
            mapped: BTreeMap::new(),
        }
    }

    /// Returns the content that the `external_data` entries of a tensor of `size_bytes` describe.
    ///
    /// # Errors
    /// `external` for a location that leaves the folder or goes through a link, damaged numbers, a length other than that of
    /// the tensor, and a file that ends before the tensor does.
    pub fn read(&mut self, entries: &[StringStringEntryProto], size_bytes: u64) -> Result<Data> {
        let mut location = None;
        let mut offset = 0;
        let mut length = size_bytes;
        for entry in entries {
            match entry.key() {
                "location" => location = Some(entry.value()),
                "offset" => offset = number(entry.key(), entry.value())?,
                "length" => length = number(entry.key(), entry.value())?,
                // "checksum", and keys that exporters add.
                _ => {}
            }
        }
        let location =
            location.ok_or_else(|| Error::model("external", "external data has no location"))?;
        if length != size_bytes {
            return Err(
                Error::model("external", "external data has the wrong length")
                    .expected(format!("{size_bytes} bytes, from type and shape"))
                    .found(format!("{length} bytes in \"{}\"", shown(location))),
            );
        }
        let end = offset
            .checked_add(length)
            .filter(|end| *end <= i64::MAX as u64)
            .ok_or_else(|| Error::model("external", format!("offset {offset} is out of range")))?;
        let relative = check_location(location)?;
        let key: Arc<str> = Arc::from(location);
        if !self.mapped.contains_key(&key) {
            let bytes = open_below(&self.folder, &relative)?;
            self.mapped.insert(key.clone(), bytes);
        }
        let external = External {
            location: key.clone(),
            offset,
            length,
        };
        let Some(bytes) = &self.mapped[&key] else {
            return Ok(Data::Absent(external));
        };
        if end > bytes.len() as u64 {
            return Err(
                Error::model("external", "the external file ends before the tensor does")
                    .expected(format!("at least {end} bytes in \"{}\"", shown(location)))
                    .found(format!("{} bytes", bytes.len())),
            );
        }
        Ok(Data::Here {
            bytes: bytes.slice(offset as usize..end as usize),
            origin: Some(external),
        })
    }
}

fn number(key: &str, text: &str) -> Result<u64> {
    text.parse().map_err(|_| {
        Error::model("external", format!("external data has a bad {key}"))
            .expected("a number of bytes")
            .found(format!("\"{}\"", shown(text)))
    })
}

/// Returns a text of the file for messages, cut and escaped.
fn shown(text: &str) -> String {
    let cut: String = text.chars().take(80).collect();
    cut.escape_debug().to_string()
}

/// Returns the components of a location below the model's folder.
///
/// # Errors
/// A location that is empty or absolute, names a parent, or contains a backslash, a NUL or a colon as its second character.
/// The latter mean something else on other systems.
pub fn check_location(location: &str) -> Result<Vec<String>> {
    let refuse = |why: &str| {
        Err(
            Error::model("external", format!("an external file's location {why}"))
                .expected("a path that stays in the model's folder")
                .found(format!("\"{}\"", shown(location))),
        )
    };
    if location.contains(['\\', '\0']) || location.as_bytes().get(1) == Some(&b':') {
        return refuse("is not a portable path");
    }
    let mut parts = Vec::new();
    for component in Path::new(location).components() {
        match component {
            Component::Normal(part) => parts.push(part.to_string_lossy().into_owned()),
            Component::CurDir => {}
            Component::ParentDir => return refuse("names a parent folder"),
            Component::RootDir | Component::Prefix(_) => return refuse("is absolute"),
        }
    }
    if parts.is_empty() {
        return refuse("names no file");
    }
    Ok(parts)
}

/// Opens and maps a file below `folder`; returns `None` if it does not exist.
fn open_below(folder: &Path, parts: &[String]) -> Result<Option<Bytes>> {
    let mut path = folder.to_path_buf();
    for (i, part) in parts.iter().enumerate() {
        path.push(part);
        let meta = match std::fs::symlink_metadata(&path) {
            Ok(meta) => meta,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io_error("open an external file", &path, &e)),
        };
        if meta.file_type().is_symlink() {
            return Err(link_error(&path, "a symbolic link"));
        }
        if i + 1 < parts.len() && !meta.is_dir() {
            return Err(
                Error::model("external", "an external file's folder is not a folder")
                    .at(path.display().to_string()),
            );
        }
    }
    let file = open_without_links(&path)?;
    let meta = file
        .metadata()
        .map_err(|e| io_error("open an external file", &path, &e))?;
    if !meta.is_file() {
        return Err(
            Error::model("external", "an external file is not a regular file")
                .at(path.display().to_string()),
        );
    }
    if hard_links(&meta) > 1 {
        return Err(link_error(&path, "one of several hard links"));
    }
    if meta.len() == 0 {
        return Ok(Some(Bytes::new()));
    }
    let bytes = map_file(&file).map_err(|e| io_error("map an external file", &path, &e))?;
    Ok(Some(bytes))
}

fn link_error(path: &Path, what: &str) -> Box<Error> {
    Error::model("external", "an external file is a link")
        .at(path.display().to_string())
        .expected("a regular file of its own in the model's folder")
        .found(what)
        .help("copy the weights beside the model")
}

#[cfg(unix)]
fn open_without_links(path: &Path) -> Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // Opening a pipe would block until another process writes to it.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(|e| {
            if e.raw_os_error() == Some(libc::ELOOP) {
                return link_error(path, "a symbolic link");
            }
            io_error("open an external file", path, &e)
        })
}

#[cfg(not(unix))]
fn open_without_links(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .open(path)
        .map_err(|e| io_error("open an external file", path, &e))
}

#[cfg(unix)]
fn hard_links(meta: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(meta)
}

#[cfg(not(unix))]
fn hard_links(_: &std::fs::Metadata) -> u64 {
    1
}
