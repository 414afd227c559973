//! Where results wait that have left the device's memory: a file each, or the host's memory beside a device.
//!
//! A file has no name: it is unlinked as it is opened, so that nothing is left of it after success, error or signal. Its
//! blocks are reserved before they are mapped, so that a full disk is an error and not a fault. What waits is counted
//! from the outside, by what is mapped.

use super::convert::{self, torch_error};
use ckpt_passes::{Error, Result};
use ckpt_torch::bytes;
use memmap2::{Mmap, MmapMut};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
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

/// Bytes that wait, given back with the tensor over them.
struct Waiting {
    map: Mmap,
    count: Arc<Count>,
}

impl AsRef<[u8]> for Waiting {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let bytes = self.map.len() as u64;
        self.count.live.fetch_sub(bytes, Ordering::Relaxed);
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

    /// A copy of a row-major tensor outside the device's memory: a read-only tensor on the CPU.
    ///
    /// # Errors
    /// Exit code 5: the folder cannot be written to, or has no room.
    pub fn keep(&self, tensor: &Tensor, on_disk: bool) -> Result<Tensor> {
        let here = match tensor.device() {
            Device::Cpu => tensor.shallow_clone(),
            _ => tensor.to_device(Device::Cpu),
        };
        let (kind, dims) = (tensor.kind(), tensor.size());
        let element = bytes::element_bytes(kind).map_err(torch_error)?;
        let len = tensor.numel() * element;
        if len == 0 {
            return bytes::copy_from(&[], kind, &dims).map_err(torch_error);
        }
        // The memory of a CPU run is the host's: there only a file is outside.
        let mut map = match on_disk || tensor.device() == Device::Cpu {
            true => self.file(len)?,
            false => MmapMut::map_anon(len).map_err(|e| no_room(&e, len, "the host's memory"))?,
        };
        bytes::read_into(&here, &mut map).map_err(torch_error)?;
        let map = map
            .make_read_only()
            .map_err(|e| no_room(&e, len, "a mapping"))?;
        let live = self.count.live.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
        self.count.peak.fetch_max(live, Ordering::Relaxed);
        let count = self.count.clone();
        let waiting = Arc::new(Waiting { map, count });
        bytes::from_bytes(waiting, kind, &dims).map_err(torch_error)
    }

    fn file(&self, len: usize) -> Result<MmapMut> {
        let folder = self.folder.clone().unwrap_or_else(std::env::temp_dir);
        let place = folder.display().to_string();
        let file = tempfile::tempfile_in(&folder).map_err(|e| no_room(&e, len, &place))?;
        reserve(&file, len).map_err(|e| no_room(&e, len, &place))?;
        // SAFETY: the file has no name, so nobody else changes or shortens it.
        unsafe { MmapMut::map_mut(&file) }.map_err(|e| no_room(&e, len, &place))
    }
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
    let kind = outside.kind();
    if convert::dtype(kind).is_none() {
        return Err(Error::bug(
            "offload",
            format!("a tensor of kind {kind:?} waits"),
        ));
    }
    let here = ckpt_torch::empty(&outside.size(), kind).map_err(torch_error)?;
    super::kernels::copy_into(&here, outside)?;
    Ok(here)
}
