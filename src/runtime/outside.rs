//! Where results wait that have left the device's memory: a file each, or the host's memory beside a device.
//!
//! A file has no name, so that nothing is left of it after success, error or signal. Its
//! blocks are reserved before they are mapped, so that a full disk is an error and not a fault. What waits is counted
//! from the outside, by what is mapped.

use super::convert::{self, torch_error};
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use memmap2::{Mmap, MmapMut};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tch::{Device, Tensor};

/// What is outside during the runs of a program.
#[derive(Clone, Debug, Default)]
pub struct Outside {
    /// The folder for files; the system's for temporary files if `None`.
    pub folder: Option<PathBuf>,
    count: Arc<Count>,
}

#[derive(Debug, Default)]
struct Count {
    live: AtomicU64,
    peak: AtomicU64,
}

/// Room for so many bytes outside, counted while it lives.
struct Counted {
    bytes: u64,
    count: Arc<Count>,
}

impl Counted {
    fn new(count: &Arc<Count>, bytes: u64) -> Counted {
        let live = count.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        count.peak.fetch_max(live, Ordering::Relaxed);
        Counted {
            bytes,
            count: count.clone(),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Bytes that wait, given back with the tensor over them.
struct Waiting {
    map: Mmap,
    _counted: Counted,
}

impl AsRef<[u8]> for Waiting {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// A transfer out that has its room counted and nothing written yet.
pub struct Leaving {
    counted: Counted,
    /// Where the file goes; `None` for the host's memory.
    folder: Option<PathBuf>,
    kind: tch::Kind,
    dims: Vec<i64>,
}

impl Leaving {
    /// Copies the bytes of a contiguous CPU tensor out. Touches nothing but bytes: any thread may do it.
    ///
    /// # Errors
    /// Exit code 5: the folder cannot be written to, or has no room.
    pub fn write(self, tensor: &Tensor) -> Result<Left> {
        let len = self.counted.bytes as usize;
        let mut map = match &self.folder {
            Some(folder) => file(folder, len)?,
            None => MmapMut::map_anon(len).map_err(|e| no_room(&e, len, "the host's memory"))?,
        };
        bytes::read_into(tensor, &mut map).map_err(torch_error)?;
        let map = map
            .make_read_only()
            .map_err(|e| no_room(&e, len, "a mapping"))?;
        Ok(Left {
            waiting: Waiting {
                map,
                _counted: self.counted,
            },
            kind: self.kind,
            dims: self.dims,
        })
    }
}

/// What is outside.
pub struct Left {
    waiting: Waiting,
    kind: tch::Kind,
    dims: Vec<i64>,
}

impl Left {
    /// A read-only tensor on the CPU over what is outside.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn tensor(self) -> Result<Tensor> {
        bytes::from_bytes(Arc::new(self.waiting), self.kind, &self.dims).map_err(torch_error)
    }
}

impl Outside {
    /// The most bytes that waited at once since the last reset.
    pub fn peak_bytes(&self) -> u64 {
        self.count.peak.load(Ordering::Relaxed)
    }

    pub fn reset_peak(&self) {
        let live = self.count.live.load(Ordering::Relaxed);
        self.count.peak.store(live, Ordering::Relaxed);
    }

    /// Counts the room that a tensor takes outside.
    ///
    /// # Errors
    /// An element type without plain bytes.
    pub fn begin(&self, tensor: &Tensor, on_disk: bool) -> Result<Leaving> {
        let element = bytes::element_bytes(tensor.kind()).map_err(torch_error)?;
        // The memory of a CPU run is the host's: there only a file is outside.
        let folder = (on_disk || tensor.device() == Device::Cpu)
            .then(|| self.folder.clone().unwrap_or_else(std::env::temp_dir));
        Ok(Leaving {
            counted: Counted::new(&self.count, (tensor.numel() * element) as u64),
            folder,
            kind: tensor.kind(),
            dims: tensor.size(),
        })
    }

    /// A copy of a row-major tensor outside the device's memory: a read-only tensor on the CPU.
    ///
    /// # Errors
    /// Exit code 5: the folder cannot be written to, or has no room.
    pub fn keep(&self, tensor: &Tensor, on_disk: bool) -> Result<Tensor> {
        if tensor.numel() == 0 {
            return bytes::copy_from(&[], tensor.kind(), &tensor.size()).map_err(torch_error);
        }
        let here = match tensor.device() {
            Device::Cpu => tensor.shallow_clone(),
            _ => tensor.to_device(Device::Cpu),
        };
        self.begin(tensor, on_disk)?.write(&here)?.tensor()
    }
}

fn file(folder: &Path, len: usize) -> Result<MmapMut> {
    let place = folder.display().to_string();
    let file = nameless(folder).map_err(|e| no_room(&e, len, &place))?;
    reserve(&file, len).map_err(|e| no_room(&e, len, &place))?;
    // SAFETY: the file has no name, so nobody else changes or shortens it.
    unsafe { MmapMut::map_mut(&file) }.map_err(|e| no_room(&e, len, &place))
}

/// A file without a name. Where a file system cannot make one (O_TMPFILE of Linux), it loses its name right after it is
/// made: only a process killed between the two calls leaves an empty file.
fn nameless(folder: &Path) -> std::io::Result<File> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .mode(0o600)
        .open(folder);
    match opened {
        Err(e) if CANNOT.contains(&e.raw_os_error().unwrap_or(0)) => unlinked(folder),
        opened => opened,
    }
}

/// What a file system says that has no files without a name, and a kernel that knows of none.
const CANNOT: [i32; 3] = [libc::EOPNOTSUPP, libc::EISDIR, libc::ENOENT];

fn unlinked(folder: &Path) -> std::io::Result<File> {
    let file = tempfile::Builder::new()
        .prefix(".ckpt-opt-")
        .tempfile_in(folder)?;
    // Closing a named file of this kind removes its name.
    let (file, path) = file.into_parts();
    path.close()?;
    Ok(file)
}

fn reserve(file: &File, len: usize) -> std::io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(std::io::Error::other)?;
    // SAFETY: the descriptor is open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code)),
    }
}

fn no_room(error: &std::io::Error, len: usize, place: &str) -> Box<Error> {
    Error::environment(
        "offload",
        format!("{len} bytes cannot wait in {place}: {error}"),
    )
    .help("name another folder with --offload-dir")
}

/// What waits, in a new tensor on the CPU.
///
/// # Errors
/// Not enough memory.
pub fn fetched(outside: &Tensor) -> Result<Tensor> {
    let here = new_tensor(outside)?;
    super::kernels::copy_into(&here, outside)?;
    Ok(here)
}

/// A new tensor on the CPU for what waits, not filled.
///
/// # Errors
/// Not enough memory.
pub fn new_tensor(outside: &Tensor) -> Result<Tensor> {
    let kind = outside.kind();
    if convert::dtype(kind).is_none() {
        return Err(Error::bug(
            "offload",
            format!("a tensor of kind {kind:?} waits"),
        ));
    }
    ckpt_torch::empty(&outside.size(), kind).map_err(torch_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn files_have_no_name_whatever_the_file_system_can_do() {
        let folder = tempfile::tempdir().unwrap();
        let empty = || std::fs::read_dir(folder.path()).unwrap().count() == 0;
        for make in [nameless, unlinked] {
            let mut file = make(folder.path()).unwrap();
            assert!(empty());
            file.write_all(b"waits").unwrap();
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "waits");
            assert!(empty());
        }
        assert!(nameless(&folder.path().join("none")).is_err());
    }
}
