//! Storage for offloaded tensors: a file each, or the host's memory beside a device.
//!
//! A file has no name, so it disappears after success, error or signal. Its blocks are reserved before they are mapped, so a
//! full disk is an error and not a fault.
//!
//! Touching fresh pages costs more than copying bytes into them. So a free mapping is kept for the next tensor of its
//! length, as long as stored and free bytes together do not exceed the largest number of bytes that were stored at once.
//!
//! For a device, the host's pages are locked while they are mapped, if the system allows it. Transfers from locked pages are
//! fast and overlap other nodes.

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

/// The offloaded tensors of a program.
#[derive(Clone, Debug)]
pub struct SwapStore {
    /// The directory for files; the system's temporary directory if `None`.
    pub folder: Option<PathBuf>,
    /// Whether the host's pages are locked, for a device.
    pub pins: bool,
    /// Whether pages may be mapped and unmapped. They may not while a step is captured, which uses those of its warm-up.
    pub maps: bool,
    mappings: Arc<Mappings>,
}

impl Default for SwapStore {
    fn default() -> SwapStore {
        SwapStore {
            folder: None,
            pins: false,
            maps: true,
            mappings: Arc::default(),
        }
    }
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
            // The pages are unmapped in any case, and nothing reads them any more.
            drop(cuda::unpin(&mut self.map));
        }
    }
}

/// The mappings of a program, shared by threads.
#[derive(Debug, Default)]
struct Mappings(Mutex<Mapped>);

#[derive(Debug, Default)]
struct Mapped {
    /// Bytes that are stored.
    live_bytes: u64,
    /// The most bytes stored since the last reset, and since the program was made.
    peak_bytes: u64,
    most_bytes: u64,
    /// Free mappings, by length and directory.
    free: BTreeMap<(usize, Option<PathBuf>), Vec<Pages>>,
    free_bytes: u64,
    /// Why pages are not locked although they should be.
    refused: Option<String>,
}

impl Mappings {
    fn lock(&self) -> MutexGuard<'_, Mapped> {
        // The data is consistent after any panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mapped {
    /// Counts a tensor and finds a free mapping for it. Unmaps free mappings that exceed the limit, if it may.
    fn take(&mut self, folder: &Option<PathBuf>, len: usize, unmaps: bool) -> Option<Pages> {
        self.live_bytes += len as u64;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.most_bytes = self.most_bytes.max(self.live_bytes);
        let key = (len, folder.clone());
        let found = self.free.get_mut(&key).and_then(Vec::pop);
        if found.is_some() {
            self.free_bytes -= len as u64;
        }
        while unmaps && self.live_bytes + self.free_bytes > self.most_bytes {
            // Unmaps the largest, so that few mappings are lost.
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

/// Bytes in the store, counted while the reservation lives.
struct Reservation {
    len: usize,
    /// The directory of the file; `None` for the host's memory.
    folder: Option<PathBuf>,
    pins: bool,
    maps: bool,
    mappings: Arc<Mappings>,
    pages: Option<Pages>,
}

impl Reservation {
    fn new(store: &SwapStore, folder: Option<PathBuf>, len: usize) -> Reservation {
        let pages = store.mappings.lock().take(&folder, len, store.maps);
        Reservation {
            len,
            folder,
            pins: store.pins,
            maps: store.maps,
            mappings: store.mappings.clone(),
            pages,
        }
    }

    /// Returns the bytes, mapped now if they are not yet.
    fn pages(&mut self) -> Result<&mut Pages> {
        let pages = match (self.pages.take(), &self.folder) {
            (Some(pages), _) => pages,
            (None, _) if !self.maps => {
                return Err(Error::bug(
                    "offload",
                    format!(
                        "a captured step needs {} bytes in which its warm-up left nothing",
                        self.len
                    ),
                ));
            }
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

    /// Locks pages of the host if that is wanted and was never refused.
    fn locked(&self, mut map: MmapMut) -> Pages {
        let mut is_locked = false;
        if self.pins && self.mappings.lock().refused.is_none() {
            match cuda::pin(&mut map) {
                Ok(()) => is_locked = true,
                Err(e) => self.mappings.lock().refused = Some(e.message),
            }
        }
        Pages { map, is_locked }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut mapped = self.mappings.lock();
        mapped.live_bytes -= self.len as u64;
        if let Some(pages) = self.pages.take() {
            let key = (self.len, self.folder.take());
            mapped.free.entry(key).or_default().push(pages);
            mapped.free_bytes += self.len as u64;
        }
    }
}

impl AsRef<[u8]> for Reservation {
    fn as_ref(&self) -> &[u8] {
        self.pages.as_ref().map_or(&[], |pages| &pages.map)
    }
}

/// A tensor in the store. Its bytes are counted, and written or about to be written.
pub struct Stored {
    reservation: Reservation,
    kind: tch::Kind,
    dims: Vec<i64>,
}

impl Stored {
    /// Copies the bytes of a contiguous CPU tensor to the store. Any thread may call this.
    ///
    /// # Errors
    /// Exit code 5: the directory cannot be written to, or has no room.
    pub fn write(mut self, tensor: &Tensor) -> Result<Stored> {
        bytes::read_into(tensor, &mut self.reservation.pages()?.map).map_err(torch_error)?;
        Ok(self)
    }

    /// Maps the bytes for the caller to fill; `None` if their pages are not locked.
    ///
    /// # Errors
    /// Exit code 5: no memory.
    pub fn locked(mut self) -> Result<Option<Stored>> {
        let is_locked = self.reservation.pages()?.is_locked;
        Ok(is_locked.then_some(self))
    }

    /// Returns a read-only tensor on the CPU over the stored bytes.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn tensor(self) -> Result<Tensor> {
        bytes::from_bytes(Arc::new(self.reservation), self.kind, &self.dims).map_err(torch_error)
    }
}

impl SwapStore {
    /// Returns the most bytes stored at once since the last reset.
    pub fn peak_bytes(&self) -> u64 {
        self.mappings.lock().peak_bytes
    }

    /// Returns why the host's pages are not locked, if they should be.
    pub fn refused(&self) -> Option<String> {
        self.mappings.lock().refused.clone()
    }

    /// Sets the peak to the bytes that are stored now.
    pub fn reset_peak(&self) {
        let mut mapped = self.mappings.lock();
        mapped.peak_bytes = mapped.live_bytes;
    }

    /// Reserves bytes for a tensor in a file or in the host's memory.
    ///
    /// # Errors
    /// An element type without plain bytes.
    pub fn begin(&self, tensor: &Tensor, to_file: bool) -> Result<Stored> {
        let element = bytes::element_bytes(tensor.kind()).map_err(torch_error)?;
        let folder = to_file.then(|| self.folder.clone().unwrap_or_else(std::env::temp_dir));
        Ok(Stored {
            reservation: Reservation::new(self, folder, tensor.numel() * element),
            kind: tensor.kind(),
            dims: tensor.size(),
        })
    }

    /// Stores a row-major tensor at once. Returns a read-only tensor on the CPU.
    ///
    /// # Errors
    /// Exit code 5: the folder cannot be written to, or has no room.
    pub fn keep(&self, tensor: &Tensor, to_file: bool) -> Result<Tensor> {
        if tensor.numel() == 0 {
            return bytes::copy_from(&[], tensor.kind(), &tensor.size()).map_err(torch_error);
        }
        let here = tensor.to_device(Device::Cpu);
        self.begin(tensor, to_file)?.write(&here)?.tensor()
    }
}

fn file(folder: &Path, len: usize) -> Result<MmapMut> {
    let place = folder.display().to_string();
    let file = nameless(folder).map_err(|e| no_room(&e, len, &place))?;
    reserve(&file, len).map_err(|e| no_room(&e, len, &place))?;
    // SAFETY: the file has no name, so nobody else changes or shortens it.
    unsafe { MmapMut::map_mut(&file) }.map_err(|e| no_room(&e, len, &place))
}

/// Opens a file without a name. Where a file system cannot make one (Linux's O_TMPFILE), the file loses its name right
/// after it is made. Only a process killed between the two calls leaves an empty file.
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

/// The errors of a file system that cannot make files without a name, and of a kernel that does not know them.
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

/// Returns a new tensor on the CPU of the sizes and type of a stored one, not filled.
///
/// # Errors
/// Not enough memory.
pub fn new_tensor(stored: &Tensor) -> Result<Tensor> {
    let kind = stored.kind();
    if convert::dtype(kind).is_none() {
        return Err(Error::bug(
            "offload",
            format!("a tensor of kind {kind:?} was offloaded"),
        ));
    }
    ckpt_torch::empty(&stored.size(), kind).map_err(torch_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn files_have_no_name_on_any_file_system() {
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
    fn free_mappings_are_reused_and_bounded_by_the_peak() {
        let folder = tempfile::tempdir().unwrap();
        let store = SwapStore {
            folder: Some(folder.path().into()),
            ..SwapStore::default()
        };
        let of = |len: usize, fill: u8| Tensor::from_slice(&vec![fill; len]);
        let mapped = |store: &SwapStore| {
            let mapped = store.mappings.lock();
            let free: usize = mapped.free.values().flatten().map(|p| p.map.len()).sum();
            assert_eq!(free as u64, mapped.free_bytes);
            assert!(mapped.live_bytes + mapped.free_bytes <= mapped.most_bytes);
            (mapped.live_bytes, mapped.free_bytes)
        };
        let mut places = Vec::new();
        for run in 0..3 {
            store.reset_peak();
            let waits = [(5000, 1), (3000, 2), (5000, 3)].map(|(len, fill)| {
                let kept = store.keep(&of(len, fill + run), true).unwrap();
                assert_eq!(kept, of(len, fill + run));
                kept
            });
            let mut there = waits.each_ref().map(|t| t.data_ptr() as usize);
            there.sort_unstable();
            places.push(there);
            assert_eq!(mapped(&store), (13_000, 0));
            assert_eq!(store.peak_bytes(), 13_000);
            drop(waits);
            assert_eq!(mapped(&store), (0, 13_000));
        }
        assert!(places[0] == places[1] && places[1] == places[2]);
        // A captured step maps and unmaps nothing.
        let fixed = SwapStore {
            maps: false,
            ..store.clone()
        };
        assert_eq!(fixed.keep(&of(3000, 4), true).unwrap(), of(3000, 4));
        let told = fixed.keep(&of(4000, 4), true).err().unwrap().to_string();
        assert!(told.contains("4000 bytes"), "{told}");
        assert_eq!(mapped(&store), (0, 13_000));
        // Another length fits only in the place of others.
        let other = store.keep(&of(7000, 9), true).unwrap();
        let (live, free) = mapped(&store);
        assert!(live == 7000 && free > 0 && live + free <= 13_000);
        assert_eq!(other, of(7000, 9));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
