//! Stores and groups of processes ("ranks") over libtorch's c10d. A group sums tensors and gathers slices.
//!
//! Every call that waits for another rank ends within the time limit of its store or group.

use crate::error::{TorchError, check};
use crate::handle;
use crate::sys;
use std::ffi::{CString, c_void};
use std::ptr;
use std::time::Duration;
use tch::{Device, Kind, Tensor};

fn c_string(text: &str) -> Result<CString, TorchError> {
    CString::new(text).map_err(|_| TorchError::refused(format!("{text:?} contains a NUL")))
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Texts and numbers by name, shared by all ranks.
#[derive(Debug)]
pub struct Store(*mut c_void);

// SAFETY: c10d's stores lock a mutex around every use.
unsafe impl Send for Store {}
unsafe impl Sync for Store {}

impl Store {
    /// Connects to the store at a host and port, and serves it for all ranks if `serve` is set. Keys begin with `prefix`.
    ///
    /// # Errors
    /// `Refused` if nobody serves it within the time limit, or the port is taken.
    pub fn tcp(
        (host, port): (&str, u16),
        ranks: usize,
        serve: bool,
        limit: Duration,
        prefix: &str,
    ) -> Result<Store, TorchError> {
        let (host, prefix) = (c_string(host)?, c_string(prefix)?);
        // SAFETY: the strings are NUL-terminated; a place to write to.
        handle::made(|store| unsafe {
            sys::ck_store_tcp(
                host.as_ptr(),
                port.into(),
                ranks as i64,
                serve.into(),
                millis(limit),
                prefix.as_ptr(),
                store,
            )
        })
        .map(Store)
    }

    /// Opens the store in a file, which the first rank makes.
    ///
    /// # Errors
    /// `Refused` if the file cannot be made.
    pub fn file(
        path: &str,
        ranks: usize,
        limit: Duration,
        prefix: &str,
    ) -> Result<Store, TorchError> {
        let (path, prefix) = (c_string(path)?, c_string(prefix)?);
        // SAFETY: the strings are NUL-terminated; a place to write to.
        handle::made(|store| unsafe {
            sys::ck_store_file(
                path.as_ptr(),
                ranks as i64,
                millis(limit),
                prefix.as_ptr(),
                store,
            )
        })
        .map(Store)
    }

    /// Writes a text.
    ///
    /// # Errors
    /// `Refused` if whoever serves the store is gone.
    pub fn set(&self, key: &str, text: &str) -> Result<(), TorchError> {
        let (key, text) = (c_string(key)?, c_string(text)?);
        // SAFETY: the store is alive, the strings are NUL-terminated.
        check(unsafe { sys::ck_store_set(self.0, key.as_ptr(), text.as_ptr()) })
    }

    /// Waits for a text and returns it.
    ///
    /// # Errors
    /// `Refused` if nobody writes it in time, or whoever serves the store is gone.
    pub fn get(&self, key: &str, limit: Duration) -> Result<String, TorchError> {
        let key = c_string(key)?;
        let mut text = ptr::null_mut();
        // SAFETY: the store is alive, the string is NUL-terminated; a place to write to.
        check(unsafe { sys::ck_store_get(self.0, key.as_ptr(), millis(limit), &mut text) })?;
        // SAFETY: on success the text is ours to free.
        Ok(unsafe { handle::take_string(text) })
    }

    /// Adds to a number, which begins at 0, and returns the sum.
    ///
    /// # Errors
    /// `Refused` if whoever serves the store is gone.
    pub fn add(&self, key: &str, number: i64) -> Result<i64, TorchError> {
        let key = c_string(key)?;
        let mut sum = 0;
        // SAFETY: the store is alive, the string is NUL-terminated; a place to write to.
        check(unsafe { sys::ck_store_add(self.0, key.as_ptr(), number, &mut sum) })?;
        Ok(sum)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the handle is ours and freed only here.
        unsafe { sys::ck_store_drop(self.0) }
    }
}

/// Returns the version of NCCL (22809 is 2.28.9), after [`cuda::load`](crate::cuda::load).
///
/// # Errors
/// `Refused` if libtorch's CUDA library is not loaded, or lacks what is called here.
pub fn nccl_version() -> Result<i64, TorchError> {
    let mut version = 0;
    // SAFETY: a place to write to.
    check(unsafe { sys::ck_nccl_version(&mut version) })?;
    Ok(version)
}

/// Makes a group of ranks, under a name that libtorch's `_c10d_functional` operators know, too: over Gloo for tensors on the
/// CPU and, with `has_devices`, over NCCL for those on CUDA devices. `host` is the address to listen at, by default that of the
/// host's name or of the interface in `GLOO_SOCKET_IFNAME`.
///
/// # Errors
/// `Refused` if a rank does not come within the time limit, there is no network, or no NCCL.
pub fn join(
    store: &Store,
    name: &str,
    (rank, ranks): (usize, usize),
    limit: Duration,
    host: Option<&str>,
    has_devices: bool,
) -> Result<(), TorchError> {
    let (name, host) = (c_string(name)?, host.map(c_string).transpose()?);
    let host = host.as_ref().map_or(ptr::null(), |host| host.as_ptr());
    // SAFETY: the store is alive, the strings are NUL-terminated or null where that is allowed.
    check(unsafe {
        sys::ck_group_join(
            store.0,
            name.as_ptr(),
            rank as i64,
            ranks as i64,
            millis(limit),
            host,
            has_devices.into(),
        )
    })
}

/// Leaves a group.
///
/// # Errors
/// `Refused` if there is none of that name.
pub fn leave(name: &str) -> Result<(), TorchError> {
    let name = c_string(name)?;
    // SAFETY: the string is NUL-terminated.
    check(unsafe { sys::ck_group_leave(name.as_ptr()) })
}

/// Sums tensors over the ranks of a group, each element in the order of ranks: in place, or this rank's slices of the sums
/// into `slices`, which are zero where a tensor ends before them. All ranks give as many elements and the same `tag`, an even
/// number that no other sum under way has. On CUDA devices NCCL chooses the order.
///
/// # Errors
/// `Refused` if a rank is gone or does not answer in time; tensors of several types, or of one that is not summed; one that
/// is not row-major or on another device; slices of another size.
pub fn sum(
    (name, rank, ranks): (&str, i64, i64),
    tag: i64,
    tensors: &[Tensor],
    slices: Option<&[Tensor]>,
) -> Result<(), TorchError> {
    let Some((kind, device)) = tensors.first().map(|t| (t.kind(), t.device())) else {
        return Ok(());
    };
    let code = match kind {
        Kind::Int64 => 4,
        Kind::Half => 5,
        Kind::Float => 6,
        Kind::Double => 7,
        Kind::BFloat16 => 15,
        other => return Err(TorchError::refused(format!("{other:?} is not summed"))),
    };
    let fits = |t: &Tensor| t.kind() == kind && t.is_contiguous() && t.device() == device;
    let counts: Vec<i64> = tensors.iter().map(|t| t.numel() as i64).collect();
    let of_slices = slices.unwrap_or_default();
    let size = |n: &i64| n / ranks + i64::from(n % ranks > 0);
    let are_alike = of_slices.is_empty()
        || of_slices
            .iter()
            .map(|t| t.numel() as i64)
            .eq(counts.iter().map(size));
    if !tensors.iter().chain(of_slices).all(fits) || !are_alike || !(0..ranks).contains(&rank) {
        return Err(TorchError::refused(
            "these tensors cannot be summed together",
        ));
    }
    let c_name = c_string(name)?;
    if device != Device::Cpu {
        let lent = |all: &[Tensor]| -> Vec<_> { all.iter().map(handle::lend).collect() };
        let (data, to) = (lent(tensors), slices.map(lent));
        let to = to.as_ref().map_or(ptr::null(), |to| to.as_ptr());
        let count = data.len() as i64;
        // SAFETY: the string, the tensors and the lists of one length are lent for the call.
        return check(unsafe {
            sys::ck_group_sum_on_device(c_name.as_ptr(), ranks, data.as_ptr(), to, count)
        });
    }
    let addresses =
        |all: &[Tensor]| -> Vec<i64> { all.iter().map(|t| t.data_ptr() as i64).collect() };
    let (data, to) = (addresses(tensors), slices.map(addresses));
    // SAFETY: the string and the lists of one length are lent for the call; each address is that of a tensor of so many
    // elements, which is alive until the call has returned and all its messages have ended.
    check(unsafe {
        sys::ck_group_sum(
            c_name.as_ptr(),
            rank,
            ranks,
            tag,
            code,
            data.as_ptr(),
            counts.as_ptr(),
            to.as_ref().map_or(ptr::null(), |to| to.as_ptr()),
            data.len() as i64,
        )
    })
}

/// Returns the bytes of the buffers that [`sum`] has taken in all threads, from the system.
pub fn scratch_bytes() -> u64 {
    // SAFETY: reads a counter.
    unsafe { sys::ck_group_scratch_bytes() }.unsigned_abs()
}

/// Slices of a tensor that come from the ranks that have them. A gather that is dropped is waited for.
#[derive(Debug)]
pub struct Gather {
    handle: *mut c_void,
    /// What is written to lives as long.
    _tensor: Tensor,
}

impl Gather {
    /// Begins to fill slice r of a tensor with that of rank r, on all ranks. These begin the gathers of a group in the same order.
    ///
    /// # Errors
    /// `Refused` if a rank is gone; a tensor that is not row-major or too small.
    pub fn begin(name: &str, tensor: &Tensor, slice_bytes: &[i64]) -> Result<Gather, TorchError> {
        let name = c_string(name)?;
        // SAFETY: the string and the list are lent for the call, which checks sizes; the tensor lives until the gather has ended.
        let handle = handle::made(|gather| unsafe {
            sys::ck_group_gather(
                name.as_ptr(),
                handle::lend(tensor),
                slice_bytes.as_ptr(),
                slice_bytes.len() as i64,
                gather,
            )
        })?;
        Ok(Gather {
            handle,
            _tensor: tensor.shallow_clone(),
        })
    }

    /// Waits until the tensor is whole.
    ///
    /// # Errors
    /// `Refused` if a rank is gone or does not answer in time.
    pub fn wait(mut self) -> Result<(), TorchError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<(), TorchError> {
        match std::mem::replace(&mut self.handle, ptr::null_mut()) {
            none if none.is_null() => Ok(()),
            // SAFETY: the handle is ours and used only here.
            handle => check(unsafe { sys::ck_group_gathered(handle) }),
        }
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        drop(self.finish());
    }
}
