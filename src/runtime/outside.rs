//! Where results wait that have left the device's memory: a file each, or the host's memory beside a device.
//!
//! A file has no name, so that nothing is left of it after success, error or signal. Its
//! blocks are reserved before they are mapped, so that a full disk is an error and not a fault. What waits is counted
//! from the outside, by what is mapped. Pages that were never touched cost more than the bytes that are copied into them, so what
//! is free again stays mapped for the next result of its length, as long as what waits and what is free together are no
//! more than what waited at most at once. Beside a device the host's pages are locked in its memory while they are mapped, as
//! long as it allows that, so that transfers are fast and can run beside other nodes.

use super::convert::{self, torch_error};
use ckpt_passes::{Error, Result};
use ckpt_torch::{bytes, cuda};
use memmap2::MmapMut;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::{Device, Tensor};

/// What is outside during the runs of a program.
#[derive(Clone, Debug, Default)]
pub struct Outside {
    /// The folder for files; the system's for temporary files if `None`.
    pub folder: Option<PathBuf>,
    /// Whether pages of the host's memory are locked, for a device.
    pub pins: bool,
    room: Arc<Room>,
}

/// Mapped pages.
#[derive(Debug)]
struct Pages {
    map: MmapMut,
    is_locked: bool,
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.is_locked {
            // They are unmapped whatever is said, and nothing reads them any more.
            drop(cuda::unpin(&mut self.map));
        }
    }
}

/// What is mapped.
#[derive(Debug, Default)]
struct Room(Mutex<Mapped>);

#[derive(Debug, Default)]
struct Mapped {
    /// What waits.
    live_bytes: u64,
    /// The most of that since the last reset, and since there is a program.
    peak_bytes: u64,
    most_bytes: u64,
    /// What nothing waits in any more, by its length and folder.
    free: BTreeMap<(usize, Option<PathBuf>), Vec<Pages>>,
    free_bytes: u64,
    /// Why pages are not locked that should be.
    refused: Option<String>,
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, Mapped> {
        // Numbers and mappings are whole after any panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mapped {
    /// Counts a result that begins to wait, and finds a mapping that is free for it. What must go for it goes.
    fn take(&mut self, folder: &Option<PathBuf>, len: usize) -> Option<Pages> {
        self.live_bytes += len as u64;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.most_bytes = self.most_bytes.max(self.live_bytes);
        let key = (len, folder.clone());
        let found = self.free.get_mut(&key).and_then(Vec::pop);
        if found.is_some() {
            self.free_bytes -= len as u64;
        }
        while self.live_bytes + self.free_bytes > self.most_bytes {
            // The largest, so that few go.
            let Some(mut last) = self.free.last_entry() else {
                break;
            };
            match last.get_mut().pop() {
                Some(pages) => self.free_bytes -= pages.map.len() as u64,
                None => drop(last.remove()),
            }
        }
        found
    }
}

/// Room for so many bytes outside, counted while it lives.
struct Counted {
    len: usize,
    /// Where the file goes; `None` for the host's memory.
    folder: Option<PathBuf>,
    pins: bool,
    room: Arc<Room>,
    pages: Option<Pages>,
}

impl Counted {
    fn new(outside: &Outside, folder: Option<PathBuf>, len: usize) -> Counted {
        let pages = outside.room.lock().take(&folder, len);
        Counted {
            len,
            folder,
            pins: outside.pins,
            room: outside.room.clone(),
            pages,
        }
    }

    /// The bytes, mapped now if they are not yet.
    fn pages(&mut self) -> Result<&mut Pages> {
        let pages = match (self.pages.take(), &self.folder) {
            (Some(pages), _) => pages,
            (None, Some(folder)) => Pages {
                map: file(folder, self.len)?,
                is_locked: false,
            },
            (None, None) => {
                let map = MmapMut::map_anon(self.len)
                    .map_err(|e| no_room(&e, self.len, "the host's memory"))?;
                self.locked(map)
            }
        };
        Ok(self.pages.insert(pages))
    }

    /// Pages of the host's memory, locked where that is wanted and never was refused.
    fn locked(&self, mut map: MmapMut) -> Pages {
        let mut is_locked = false;
        if self.pins && self.room.lock().refused.is_none() {
            match cuda::pin(&mut map) {
                Ok(()) => is_locked = true,
                Err(e) => self.room.lock().refused = Some(e.message),
            }
        }
        Pages { map, is_locked }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut mapped = self.room.lock();
        mapped.live_bytes -= self.len as u64;
        if let Some(pages) = self.pages.take() {
            let key = (self.len, self.folder.take());
            mapped.free.entry(key).or_default().push(pages);
            mapped.free_bytes += self.len as u64;
        }
    }
}

/// Bytes that wait, given back with the tensor over them.
struct Waiting(Counted);

impl AsRef<[u8]> for Waiting {
    fn as_ref(&self) -> &[u8] {
        self.0.pages.as_ref().map_or(&[], |pages| &pages.map)
    }
}

/// A transfer out that has its room counted and nothing written yet.
pub struct Leaving {
    counted: Counted,
    kind: tch::Kind,
    dims: Vec<i64>,
}

impl Leaving {
    /// Copies the bytes of a contiguous CPU tensor out. Touches nothing but bytes: any thread may do it.
    ///
    /// # Errors
    /// Exit code 5: the folder cannot be written to, or has no room.
    pub fn write(mut self, tensor: &Tensor) -> Result<Left> {
        bytes::read_into(tensor, &mut self.counted.pages()?.map).map_err(torch_error)?;
        Ok(self.left())
    }

    /// Room for it in locked pages, for somebody else to fill; `None` where they are not locked.
    ///
    /// # Errors
    /// Exit code 5: no memory.
    pub fn locked(mut self) -> Result<Option<Left>> {
        let is_locked = self.counted.pages()?.is_locked;
        Ok(is_locked.then(|| self.left()))
    }

    fn left(self) -> Left {
        Left {
            waiting: Waiting(self.counted),
            kind: self.kind,
            dims: self.dims,
        }
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
        self.room.lock().peak_bytes
    }

    /// Why pages of the host's memory are not locked, if they should be.
    pub fn refused(&self) -> Option<String> {
        self.room.lock().refused.clone()
    }

    pub fn reset_peak(&self) {
        let mut mapped = self.room.lock();
        mapped.peak_bytes = mapped.live_bytes;
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
            counted: Counted::new(self, folder, tensor.numel() * element),
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
    .help("name another folder with --offload-dir, or in the environment as TMPDIR")
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
    #[test]
    fn what_is_free_again_is_taken_again_and_never_more_is_mapped_than_waited_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let outside = Outside {
            folder: Some(folder.path().into()),
            ..Outside::default()
        };
        let of = |len: usize, fill: u8| Tensor::from_slice(&vec![fill; len]);
        let mapped = |outside: &Outside| {
            let mapped = outside.room.lock();
            let free: usize = mapped.free.values().flatten().map(|p| p.map.len()).sum();
            assert_eq!(free as u64, mapped.free_bytes);
            assert!(mapped.live_bytes + mapped.free_bytes <= mapped.most_bytes);
            (mapped.live_bytes, mapped.free_bytes)
        };
        let mut places = Vec::new();
        for run in 0..3 {
            outside.reset_peak();
            let waits = [(5000, 1), (3000, 2), (5000, 3)].map(|(len, fill)| {
                let kept = outside.keep(&of(len, fill + run), true).unwrap();
                assert_eq!(kept, of(len, fill + run));
                kept
            });
            let mut there = waits.each_ref().map(|t| t.data_ptr() as usize);
            there.sort_unstable();
            places.push(there);
            assert_eq!(mapped(&outside), (13_000, 0));
            assert_eq!(outside.peak_bytes(), 13_000);
            drop(waits);
            assert_eq!(mapped(&outside), (0, 13_000));
        }
        assert!(places[0] == places[1] && places[1] == places[2]);
        // Another length fits only in the place of others.
        let other = outside.keep(&of(7000, 9), true).unwrap();
        let (live, free) = mapped(&outside);
        assert!(live == 7000 && free > 0 && live + free <= 13_000);
        assert_eq!(other, of(7000, 9));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
