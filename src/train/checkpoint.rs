//! Checkpoints: folders `step-N` that are whole or not there.
//!
//! A checkpoint is written to a folder beside its place. Its files are flushed to disk, and then the folder is renamed. So
//! a process that is killed, or a disk that is full, leaves the earlier checkpoints as they were. Parameters and optimizer
//! states are safetensors files under the names of the graph; `manifest.json` holds the hash of each file and everything
//! else by which a run goes on. A file lock keeps two runs out of one folder.

use crate::emit::file::write_error;
use crate::frontend::file::{io_error, map};
use crate::runtime::ranks::Ranks;
use crate::tensors::Tensors;
use crate::tensors::safetensors::{self, Entry, Meta};
use crate::train::data::Position;
use ckpt_passes::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Folder of the checkpoints in that of a run.
pub const FOLDER: &str = "checkpoints";
/// The file that a run holds locked.
const LOCK: &str = ".lock";
const MANIFEST: &str = "manifest.json";
/// `export::checkpoint` reads it too.
const PARAMETERS: &str = "parameters.safetensors";
const STATES: &str = "states.safetensors";
/// How the names of folders begin that are not finished.
const PARTIAL: &str = ".partial-";
const FORMAT: u32 = 1;

/// Everything of a checkpoint but tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of this form.
    pub format: u32,
    /// The version of ckpt-opt that wrote it.
    pub version: String,
    /// The steps that were done.
    pub step: u64,
    /// Those of them that left the parameters alone, because gradients overflowed.
    pub skipped: u64,
    /// The scale of the loss, where the graph takes one.
    pub loss_scale: Option<f64>,
    /// Steps without an overflow since the scale last changed.
    pub good_steps: u64,
    /// Tokens in all steps.
    pub tokens: u64,
    /// The seed of the order of the data and of random ops.
    pub seed: u64,
    /// Where the data goes on.
    pub position: Position,
    /// A hash of the data and how it is read.
    pub data: String,
    /// A hash of the tokenizer, if there is one.
    pub tokenizer: Option<String>,
    /// A hash of the model: its weights and the training graph without a plan.
    pub model: String,
    /// A hash of the graph with its plan.
    pub plan: String,
    /// The options that decide the numbers of a step.
    pub settings: String,
    /// How many ranks have a file of states each; 0 where one file holds all states.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slices: usize,
    /// The files of the checkpoint by name.
    pub files: BTreeMap<String, FileHash>,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// Returns the name of the file with the states of a rank.
fn states_of(rank: usize) -> String {
    match rank {
        0 => STATES.into(),
        _ => format!("states-{rank}.safetensors"),
    }
}

/// What a file must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHash {
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256 in hexadecimal.
    pub sha256: String,
}

/// A checkpoint that was read. Its tensors are mapped.
pub struct Checkpoint {
    /// Its folder.
    pub path: PathBuf,
    /// Everything but tensors.
    pub manifest: Manifest,
    /// Parameters by the names of their initializers.
    pub parameters: Tensors,
    /// Optimizer states by the names of their inputs, from each file.
    pub states: Vec<Tensors>,
}

/// The tensors to write: what they are, and which of them are parameters.
pub struct Content {
    /// Words about the parameters, for tools that read only their file.
    pub meta: Meta,
    /// The parameters.
    pub parameters: Vec<Entry>,
    /// The optimizer states.
    pub states: Vec<Entry>,
}

/// Writes the contents of one tensor.
pub type Source<'a> = &'a mut dyn FnMut(&Entry, &mut dyn Write) -> io::Result<()>;

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

/// Keeps other runs out of a folder while it lives.
pub struct Lock(#[expect(dead_code, reason = "holding the file is what it is for")] File);

/// Locks the folder of a run.
///
/// # Errors
/// Another run has it; a disk that refuses.
pub fn lock(folder: &Path) -> Result<Lock> {
    std::fs::create_dir_all(folder).map_err(|e| write_error(folder, &e))?;
    let path = folder.join(LOCK);
    let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Lock(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => {
            Err(Error::usage("out", "another run writes to this folder")
                .at(folder.display().to_string())
                .help("wait for it, or choose another --out"))
        }
        // Some file systems have no locks.
        Err(_) => Ok(Lock(file)),
    }
}

/// Returns a SHA-256 in hexadecimal.
pub fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// At least so many bytes are hashed by a thread while they are written.
const LEAST_BESIDE_BYTES: usize = 1 << 20;

/// Hashes what is written.
struct Hashed<W> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl<W: Write> Hashed<W> {
    fn new(out: W) -> Hashed<W> {
        Hashed {
            out,
            hash: Sha256::new(),
            bytes: 0,
        }
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Hashed { out, hash, .. } = self;
        if bytes.len() < LEAST_BESIDE_BYTES {
            hash.update(bytes);
            out.write_all(bytes)?;
        } else {
            std::thread::scope(|scope| {
                scope.spawn(|| hash.update(bytes));
                out.write_all(bytes)
            })?;
        }
        self.bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Checkpoints {
    /// Opens the checkpoints in the folder of a run, of which at most `keep` stay. Removes what a killed process has not
    /// finished.
    ///
    /// # Errors
    /// A disk that refuses.
    pub fn open(run: &Path, keep: usize) -> Result<Checkpoints> {
        let folder = run.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(|e| write_error(&folder, &e))?;
        let checkpoints = Checkpoints { folder, keep };
        for name in checkpoints.names()? {
            if name.starts_with(PARTIAL) {
                let path = checkpoints.folder.join(name);
                std::fs::remove_dir_all(&path).map_err(|e| write_error(&path, &e))?;
            }
        }
        Ok(checkpoints)
    }

    fn names(&self) -> Result<Vec<String>> {
        let failed = |e: io::Error| io_error("read the folder of checkpoints", &self.folder, &e);
        let entries = std::fs::read_dir(&self.folder).map_err(failed)?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<io::Result<_>>().map_err(failed)
    }

    /// Returns the steps that have a checkpoint, in order.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let names = self.names()?;
        let step = |name: &String| name.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> = names.iter().filter_map(step).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Returns the folder of a step's checkpoint.
    pub fn path(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }

    /// Returns the newest checkpoint's folder, if there is one.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        Ok(self.steps()?.last().map(|step| self.path(*step)))
    }

    /// Sees the checkpoints in the folder of a run that another rank has opened.
    pub fn beside(run: &Path) -> Checkpoints {
        Checkpoints {
            folder: run.join(FOLDER),
            keep: usize::MAX,
        }
    }

    fn partial(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{PARTIAL}step-{step}"))
    }

    /// Writes the states that this rank keeps to the checkpoint that rank 0 is writing.
    ///
    /// # Errors
    /// A disk that refuses; rank 0 has not begun in time.
    pub fn write_slices(
        &self,
        step: u64,
        states: Vec<Entry>,
        source: Source,
        ranks: &Ranks,
    ) -> Result<PathBuf> {
        ranks.hear(&format!("checkpoint {step}"), 0)?;
        let path = self.partial(step).join(states_of(ranks.rank));
        let hash = write_tensors(&path, (Meta::new(), states), source);
        let hash = hash.map_err(|e| write_error(&path, &e))?;
        let text = serde_json::to_string(&hash);
        let text = text.map_err(|e| Error::bug("checkpoint", e.to_string()))?;
        ranks.tell(&format!("slices of checkpoint {step}"), &text)?;
        Ok(self.path(step))
    }

    /// Writes a checkpoint, and removes the oldest of too many. Where `ranks` are given, each of the others writes its states
    /// to a file of its own ([`Checkpoints::write_slices`]), and the manifest comes last.
    ///
    /// # Errors
    /// A disk that refuses, or a rank that does not write: nothing of the checkpoint is left then, and the others stay.
    pub fn write(
        &self,
        mut manifest: Manifest,
        content: Content,
        source: Source,
        ranks: Option<&Ranks>,
    ) -> Result<PathBuf> {
        let (step, path) = (manifest.step, self.path(manifest.step));
        let partial = self.partial(step);
        let write = || {
            std::fs::create_dir(&partial)?;
            if let Some(ranks) = ranks {
                let told = ranks.tell(&format!("checkpoint {step}"), "");
                told.map_err(io::Error::other)?;
            }
            let files = [
                (PARAMETERS, content.meta, content.parameters),
                (STATES, Meta::new(), content.states),
            ];
            for (name, meta, entries) in files {
                let hash = write_tensors(&partial.join(name), (meta, entries), source)?;
                manifest.files.insert(name.into(), hash);
            }
            for rank in 1..ranks.map_or(0, |ranks| ranks.ranks) {
                let text = ranks.map(|r| r.hear(&format!("slices of checkpoint {step}"), rank));
                let text = text.transpose().map_err(io::Error::other)?;
                let hash = serde_json::from_str(&text.unwrap_or_default())?;
                manifest.files.insert(states_of(rank), hash);
            }
            manifest.slices = ranks.map_or(0, |ranks| ranks.ranks);
            let mut file = File::create(partial.join(MANIFEST))?;
            file.write_all(&serde_json::to_vec_pretty(&manifest)?)?;
            file.sync_all()?;
            sync(&partial)?;
            if path.exists() {
                let old = self.folder.join(format!("{PARTIAL}old"));
                std::fs::rename(&path, &old)?;
                std::fs::rename(&partial, &path)?;
                std::fs::remove_dir_all(&old)?;
            } else {
                std::fs::rename(&partial, &path)?;
            }
            sync(&self.folder)
        };
        if let Err(e) = write() {
            // An error here is ignored: the first one is reported.
            let _ = std::fs::remove_dir_all(&partial);
            let kept = match self.newest()? {
                Some(newest) => format!("the last checkpoint is whole: {}", newest.display()),
                None => "there is no earlier checkpoint".into(),
            };
            return Err(write_error(&path, &e).help(kept));
        }
        let steps = self.steps()?;
        let surplus = steps.len().saturating_sub(self.keep.max(1));
        for step in &steps[..surplus] {
            let old = self.path(*step);
            std::fs::remove_dir_all(&old).map_err(|e| write_error(&old, &e))?;
        }
        Ok(path)
    }

    /// Reads the newest checkpoint, if there is one, and checks each of its files.
    ///
    /// # Errors
    /// A checkpoint that is damaged; the error names the one before it.
    pub fn read(&self) -> Result<Option<Checkpoint>> {
        let steps = self.steps()?;
        let Some(newest) = steps.last() else {
            return Ok(None);
        };
        let path = self.path(*newest);
        let read = read(&path).map_err(|e| {
            let next = match steps.iter().rev().nth(1) {
                Some(step) => format!(
                    "remove {} and --resume goes on from {}",
                    path.display(),
                    self.path(*step).display()
                ),
                None => "there is no earlier checkpoint; remove it to begin anew".into(),
            };
            e.help(next)
        });
        read.map(Some)
    }
}

/// Writes tensors to a file and flushes it to disk.
fn write_tensors(
    path: &Path,
    (meta, entries): (Meta, Vec<Entry>),
    source: Source,
) -> io::Result<FileHash> {
    let file = File::create(path)?;
    let mut out = Hashed::new(BufWriter::with_capacity(1 << 20, file));
    safetensors::stream(&mut out, meta, entries, source)?;
    out.flush()?;
    out.out.get_ref().sync_all()?;
    Ok(FileHash {
        bytes: out.bytes,
        sha256: hex(out.hash),
    })
}

/// Flushes the entries of a folder. Some file systems cannot do that.
fn sync(folder: &Path) -> io::Result<()> {
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

fn read(path: &Path) -> Result<Checkpoint> {
    let damaged = |what: String| {
        Error::usage("checkpoint", format!("the checkpoint is damaged: {what}"))
            .at(path.display().to_string())
    };
    let text = std::fs::read(path.join(MANIFEST));
    let text = text.map_err(|e| damaged(format!("{MANIFEST} cannot be read: {e}")))?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|e| damaged(format!("{MANIFEST} is no manifest: {e}")))?;
    if manifest.format != FORMAT {
        let what = "the checkpoint is of another version of ckpt-opt";
        return Err(Error::usage("checkpoint", what)
            .at(path.display().to_string())
            .expected(format!("format {FORMAT}"))
            .found(format!("format {}", manifest.format)));
    }
    let tensors = |name: &str| -> Result<Tensors> {
        let file = path.join(name);
        let wanted = manifest.files.get(name);
        let wanted = wanted.ok_or_else(|| damaged(format!("{MANIFEST} does not list {name}")))?;
        let bytes = map(&file).map_err(|e| damaged(format!("{name}: {}", e.message())))?;
        if bytes.len() as u64 != wanted.bytes {
            return Err(damaged(format!("{name} has another length"))
                .expected(format!("{} bytes", wanted.bytes))
                .found(format!("{} bytes", bytes.len())));
        }
        let found = hex(Sha256::new_with_prefix(&bytes));
        if found != wanted.sha256 {
            return Err(damaged(format!("{name} has another content"))
                .expected(format!("SHA-256 {}", wanted.sha256))
                .found(found));
        }
        safetensors::read(&bytes).map_err(|e| damaged(format!("{name}: {}", e.message())))
    };
    Ok(Checkpoint {
        path: path.to_path_buf(),
        parameters: tensors(PARAMETERS)?,
        states: (0..manifest.slices.max(1))
            .map(|rank| tensors(&states_of(rank)))
            .collect::<Result<_>>()?,
        manifest,
    })
}

impl Manifest {
    /// The number of this form, for manifests to come.
    pub const FORMAT: u32 = FORMAT;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_passes::ir::DType;

    fn manifest(step: u64) -> Manifest {
        Manifest {
            format: FORMAT,
            version: "0".into(),
            step,
            skipped: 0,
            loss_scale: None,
            good_steps: 0,
            tokens: 1,
            seed: 2,
            position: Position::default(),
            data: "d".into(),
            tokenizer: None,
            model: "m".into(),
            plan: "p".into(),
            settings: String::new(),
            slices: 0,
            files: BTreeMap::new(),
        }
    }

    fn content() -> Content {
        let entry = |name: &str, n| Entry {
            name: name.into(),
            dtype: DType::U8,
            dims: vec![n],
        };
        Content {
            meta: Meta::new(),
            parameters: vec![entry("w", 3)],
            states: vec![entry("w.momentum", 5)],
        }
    }

    fn write(checkpoints: &Checkpoints, step: u64) -> Result<PathBuf> {
        let mut source = |entry: &Entry, out: &mut dyn Write| {
            out.write_all(&vec![step as u8; entry.dims[0] as usize])
        };
        checkpoints.write(manifest(step), content(), &mut source, None)
    }

    #[test]
    fn the_newest_is_read_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path(), 2).unwrap();
        assert!(checkpoints.read().unwrap().is_none());
        (1..=3).for_each(|step| drop(write(&checkpoints, step).unwrap()));
        assert_eq!(checkpoints.steps().unwrap(), [2, 3]);
        // Written again, as after a restart from an earlier one.
        write(&checkpoints, 3).unwrap();
        let found = checkpoints.read().unwrap().unwrap();
        assert_eq!((found.manifest.step, found.manifest.seed), (3, 2));
        assert_eq!(found.parameters["w"].bytes().unwrap().as_ref(), [3; 3]);
        assert_eq!(
            found.states[0]["w.momentum"].bytes().unwrap().as_ref(),
            [3; 5]
        );
    }

    #[test]
    fn what_is_not_finished_is_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path(), 2).unwrap();
        write(&checkpoints, 1).unwrap();
        let mut source = |_: &Entry, out: &mut dyn Write| {
            out.write_all(&[0])?;
            Err(io::ErrorKind::StorageFull.into())
        };
        let failed = checkpoints.write(manifest(2), content(), &mut source, None);
        let failed = failed.unwrap_err();
        assert_eq!((failed.exit_code(), failed.code()), (5, "write"));
        assert!(failed.to_string().contains("step-1"), "{failed}");
        let left = checkpoints.names().unwrap();
        assert_eq!(left, ["step-1"]);
        std::fs::create_dir(checkpoints.folder.join(".partial-step-2")).unwrap();
        let again = Checkpoints::open(dir.path(), 2).unwrap();
        assert_eq!(again.names().unwrap(), ["step-1"]);
    }

    #[test]
    fn damage_is_told_with_the_checkpoint_before() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::open(dir.path(), 2).unwrap();
        let broken = |name: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>, says: &str| {
            (1..=2).for_each(|step| drop(write(&checkpoints, step).unwrap()));
            let path = checkpoints.path(2).join(name);
            std::fs::write(&path, change(std::fs::read(&path).unwrap())).unwrap();
            let e = checkpoints.read().err().unwrap();
            assert_eq!((e.exit_code(), e.code()), (2, "checkpoint"));
            assert!(e.to_string().contains(says), "{e}");
            assert!(e.to_string().contains("goes on from"), "{e}");
        };
        let cut = |bytes: Vec<u8>| bytes[..bytes.len() - 1].to_vec();
        let flip = |mut bytes: Vec<u8>| {
            *bytes.last_mut().unwrap() ^= 1;
            bytes
        };
        broken(PARAMETERS, &cut, "another length");
        broken(STATES, &flip, "another content");
        broken(MANIFEST, &cut, "no manifest");
        broken(MANIFEST, &|_| Vec::new(), "no manifest");
    }

    #[test]
    fn a_folder_has_one_run() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        assert_eq!(lock(dir.path()).err().unwrap().code(), "out");
        drop(held);
        lock(dir.path()).unwrap();
    }
}
