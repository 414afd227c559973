//! The files of a request: shards of folders in the order of their names, and formats by the ends of names.

use crate::frontend::file::io_error;
use ckpt_passes::{Error, Result};
use std::path::{Path, PathBuf};

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    JsonLines,
    Text,
    Parquet,
    Arrow,
    RawTokens,
    Npy,
    Npz,
    Safetensors,
}

/// Formats by the end of a name.
const ENDS: [(&str, Format); 11] = [
    ("jsonl", Format::JsonLines),
    ("ndjson", Format::JsonLines),
    ("txt", Format::Text),
    ("parquet", Format::Parquet),
    ("arrow", Format::Arrow),
    ("feather", Format::Arrow),
    ("ipc", Format::Arrow),
    ("bin", Format::RawTokens),
    ("npy", Format::Npy),
    ("npz", Format::Npz),
    ("safetensors", Format::Safetensors),
];

/// A file to read.
#[derive(Clone, Debug)]
pub(super) struct Shard {
    /// `-` for stdin.
    pub path: PathBuf,
    pub format: Format,
}

impl Shard {
    /// Returns the path, for messages.
    pub fn name(&self) -> String {
        match self.is_stdin() {
            true => "stdin".into(),
            false => self.path.display().to_string(),
        }
    }

    /// Returns whether this is stdin.
    pub fn is_stdin(&self) -> bool {
        self.path == Path::new("-")
    }
}

fn format(path: &Path) -> Option<Format> {
    let end = path.extension()?.to_str()?.to_lowercase();
    ENDS.iter()
        .find(|(e, _)| *e == end)
        .map(|(_, format)| *format)
}

/// Lists the files of a request. Of a folder, files of other formats and hidden ones are not read.
///
/// # Errors
/// No path; a path that is absent, empty or of no known format; stdin twice.
pub(super) fn shards(paths: &[PathBuf]) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for path in paths {
        if path == Path::new("-") {
            let format = Format::JsonLines;
            shards.push(Shard {
                path: path.clone(),
                format,
            });
            continue;
        }
        let meta = std::fs::metadata(path).map_err(|e| io_error("open the data", path, &e))?;
        if meta.is_dir() {
            shards.extend(folder(path)?);
        } else {
            let format =
                format(path).ok_or_else(|| no_format("the data has an unknown format", path))?;
            shards.push(Shard {
                path: path.clone(),
                format,
            });
        }
    }
    if shards.is_empty() {
        return Err(
            Error::usage("data", "no data is given").help("give files or folders with --data")
        );
    }
    if shards.iter().filter(|s| s.is_stdin()).count() > 1 {
        return Err(Error::usage("data", "stdin can be read only once"));
    }
    for shard in shards.iter().filter(|s| !s.is_stdin()) {
        let path = &shard.path;
        let meta = std::fs::metadata(path).map_err(|e| io_error("open the data", path, &e))?;
        if meta.len() == 0 && meta.is_file() {
            return Err(Error::usage("data", "the file is empty").at(shard.name()));
        }
    }
    Ok(shards)
}

fn folder(path: &Path) -> Result<Vec<Shard>> {
    let failed = |e: std::io::Error| io_error("read the folder of data", path, &e);
    let mut shards = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let is_hidden = path
            .file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with('.'));
        if let Some(format) = format(&path).filter(|_| !is_hidden && path.is_file()) {
            shards.push(Shard { path, format });
        }
    }
    if shards.is_empty() {
        return Err(no_format("the folder holds no data", path));
    }
    shards.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(shards)
}

fn no_format(what: &str, path: &Path) -> Box<Error> {
    let ends: Vec<String> = ENDS.iter().map(|(end, _)| format!(".{end}")).collect();
    Error::usage("data", what)
        .at(path.display().to_string())
        .expected(format!("a name that ends in {}", ends.join(", ")))
}
