//! Writes output files completely or not at all.
//!
//! A [`Batch`] writes each file to a temporary file in the folder of its target and flushes it to disk. Then it renames all of
//! them, the model last, so that a reader that finds the model also finds its sidecar. If anything fails, no temporary file
//! remains, and new files of the batch are removed again. A link is followed: its target is replaced. A pipe or device
//! (`/dev/null`) is written to directly, because it cannot be replaced.

use ckpt_passes::{Error, Result};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Files that appear together.
#[derive(Default)]
pub struct Batch {
    files: Vec<(PathBuf, NamedTempFile)>,
}

/// The target of a path: a file that can be replaced, or something else.
enum Target {
    File(PathBuf),
    Stream,
}

fn target(path: &Path) -> Target {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Target::Stream,
        Ok(_) => Target::File(std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())),
        Err(_) => Target::File(path.to_path_buf()),
    }
}

/// Returns the error for output that the operating system refuses, for example because the disk is full.
pub fn write_error(path: &Path, e: &std::io::Error) -> Box<Error> {
    let error = Error::environment("write", format!("cannot write the output: {e}"))
        .at(path.display().to_string());
    match e.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
            error.help("free some space")
        }
        std::io::ErrorKind::NotFound => error.help("create the folder first"),
        _ => error,
    }
}

/// Returns the folder of a file.
pub fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

impl Batch {
    /// Returns a batch without files.
    pub fn new() -> Batch {
        Batch::default()
    }

    /// Writes one file of the batch. It gets its name in [`Batch::publish`]. A pipe or device gets its content now.
    ///
    /// # Errors
    /// Kind `Environment` for a file that cannot be written, kind `Usage` for the name of a folder.
    pub fn add(
        &mut self,
        path: &Path,
        content: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()> {
        if path.is_dir() || path.file_name().is_none() {
            return Err(
                Error::usage("output", "the output is a folder").at(path.display().to_string())
            );
        }
        let failed = |e: std::io::Error| write_error(path, &e);
        let path = &match target(path) {
            Target::File(real) => real,
            Target::Stream => {
                let stream = File::options().write(true).open(path).map_err(failed)?;
                let mut out = BufWriter::with_capacity(1 << 20, stream);
                return content(&mut out).and_then(|()| out.flush()).map_err(failed);
            }
        };
        let mut builder = tempfile::Builder::new();
        builder.prefix(".ckpt-opt-");
        #[cfg(unix)]
        {
            // The umask applies, as for any other new file.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(std::fs::Permissions::from_mode(0o666));
        }
        let temporary = builder.tempfile_in(folder(path)).map_err(failed)?;
        let mut out = BufWriter::with_capacity(1 << 20, temporary.as_file());
        content(&mut out).map_err(failed)?;
        out.flush().map_err(failed)?;
        drop(out);
        temporary.as_file().sync_all().map_err(failed)?;
        self.files.push((path.to_path_buf(), temporary));
        Ok(())
    }

    /// Gives all files their names, in the order in which they were added.
    ///
    /// # Errors
    /// Kind `Environment` if a rename fails. New files are removed then. A file that was replaced before the failure stays
    /// replaced, because its old content is gone.
    pub fn publish(self) -> Result<()> {
        let mut created: Vec<PathBuf> = Vec::new();
        for (path, temporary) in self.files {
            let is_new = std::fs::symlink_metadata(&path).is_err();
            if let Err(e) = temporary.persist(&path) {
                for gone in &created {
                    // An error here is ignored: the first one is reported.
                    let _ = std::fs::remove_file(gone);
                }
                return Err(write_error(&path, &e.error));
            }
            if is_new {
                created.push(path.clone());
            }
            // The rename must reach the disk, too. Some file systems cannot sync folders.
            if let Ok(dir) = File::open(folder(&path)) {
                let _ = dir.sync_all();
            }
        }
        Ok(())
    }
}

/// Writes one file completely or not at all.
///
/// # Errors
/// As [`Batch::add`] and [`Batch::publish`].
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut batch = Batch::new();
    batch.add(path, |out| out.write_all(bytes))?;
    batch.publish()
}

/// Fails if writing `output` would replace one of `inputs`: the model, or a file with its mapped weights.
///
/// # Errors
/// `usage[output]` with the file.
pub fn refuse_overwrite(output: &Path, inputs: &[PathBuf]) -> Result<()> {
    let Ok(output_id) = std::fs::canonicalize(output) else {
        return Ok(());
    };
    for input in inputs {
        if std::fs::canonicalize(input).is_ok_and(|p| p == output_id) {
            return Err(Error::usage("output", "the output would replace an input")
                .at(output.display().to_string())
                .help("choose another name with -o"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut all: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        all.sort();
        all
    }

    #[test]
    fn both_files_appear_or_none() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("m.onnx.data"), dir.path().join("m.onnx"));
        let mut batch = Batch::new();
        batch.add(&a, |out| out.write_all(b"weights")).unwrap();
        batch.add(&b, |out| out.write_all(b"model")).unwrap();
        assert!(!a.exists() && !b.exists());
        batch.publish().unwrap();
        assert_eq!(names(dir.path()), ["m.onnx", "m.onnx.data"]);
        assert_eq!(std::fs::read(&b).unwrap(), b"model");
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("m.onnx");
        let mut batch = Batch::new();
        batch
            .add(&dir.path().join("m.data"), |out| out.write_all(b"weights"))
            .unwrap();
        let full = || Err(std::io::Error::from(std::io::ErrorKind::StorageFull));
        let e = batch
            .add(&target, |out| out.write_all(b"half").and_then(|()| full()))
            .unwrap_err();
        assert_eq!((e.exit_code(), e.code()), (5, "write"));
        drop(batch);
        assert_eq!(names(dir.path()), [] as [&str; 0]);
        let mut batch = Batch::new();
        batch
            .add(&dir.path().join("m.data"), |out| out.write_all(b"weights"))
            .unwrap();
        batch.add(&target, |out| out.write_all(b"model")).unwrap();
        std::fs::create_dir(&target).unwrap();
        assert_eq!(batch.publish().unwrap_err().exit_code(), 5);
        assert_eq!(names(dir.path()), ["m.onnx"]);
        assert_eq!(names(&target), [] as [&str; 0]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_a_device_is_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (link, real) = (dir.path().join("link"), dir.path().join("real"));
        std::fs::write(&real, b"old").unwrap();
        std::os::unix::fs::symlink("real", &link).unwrap();
        write_whole(&link, b"new").unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read(&real).unwrap(), b"new");
        let null = Path::new("/dev/null");
        write_whole(null, b"gone").unwrap();
        assert!(!std::fs::symlink_metadata(null).unwrap().is_file());
        assert_eq!(names(dir.path()), ["link", "real"]);
    }

    #[test]
    fn an_input_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (model, other) = (dir.path().join("m.onnx"), dir.path().join("./n.onnx"));
        std::fs::write(&model, b"x").unwrap();
        let inputs = [model.clone()];
        assert_eq!(
            refuse_overwrite(&dir.path().join("./m.onnx"), &inputs)
                .unwrap_err()
                .exit_code(),
            2
        );
        refuse_overwrite(&other, &inputs).unwrap();
    }
}
