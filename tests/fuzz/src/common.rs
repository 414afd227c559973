//! What all targets share: the files of the repository, and which errors are a reader's own.

use ckpt_passes::Kind;
use std::path::{Path, PathBuf};

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files with that ending, in the order of their paths.
pub(crate) fn files(folder: &Path, ending: &str) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.extension().is_some_and(|e| e == ending) {
            found.extend(std::fs::read(path));
        }
    }
    found
}

/// Returns `Ok(false)` for an input that was refused.
///
/// # Errors
/// The message of an error that calls the input our bug.
pub(crate) fn ours(e: &ckpt_passes::Error) -> Result<bool, String> {
    if e.kind() == Kind::Bug {
        Err(e.to_string())
    } else {
        Ok(false)
    }
}
