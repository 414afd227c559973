//! A CUDA device.
//!
//! The device is opened before libtorch's first CUDA query. Kernels are deterministic and use the full precision of their
//! types. The CUDA allocator reports its blocks. Library workspaces (cuBLAS) come from it too and are kept, so they are
//! allocated before the first measured step.

mod copy_streams;
mod recorder;

use super::backend::{Backend, Memory, Stats};
use super::convert::{tch_error, torch_error};
use super::library;
use super::recorder::Recorder;
use super::transfers::Transfers;
use crate::place::Place;
use ckpt_passes::analysis::sdpa::SdpaBackends;
use ckpt_passes::{Error, Result};
use ckpt_torch::{bytes, cuda};
use copy_streams::CopyStreams;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// A CUDA device, by its number.
#[derive(Clone, Copy)]
pub struct Cuda(pub usize);

/// The settings under which libtorch runs cuBLAS deterministically.
const CUBLAS_DETERMINISTIC: [&str; 2] = [":4096:8", ":16:8"];

impl Backend for Cuda {
    fn open(&self) -> Result<()> {
        // Before the version is checked: libtorch then looks for CUDA, once for the whole process.
        let loaded = cuda::load();
        library::open()?;
        let index = self.0;
        let (name, wanted) = Place::CUBLAS_SETTING;
        let found = std::env::var(name).unwrap_or_default();
        if !CUBLAS_DETERMINISTIC.contains(&found.as_str()) {
            return Err(
                Error::environment("cuda", "cuBLAS is not set to be deterministic")
                    .expected(format!("{name}={wanted} in the environment"))
                    .found(match found.as_str() {
                        "" => format!("{name} is not set"),
                        other => format!("{name}={other}"),
                    }),
            );
        }
        let devices = loaded.and_then(|()| cuda::count()).map_err(|e| {
            Error::environment("cuda", "libtorch's CUDA library cannot be loaded")
                .expected(format!("libtorch_cuda.so and the CUDA libraries that it needs, in {}", library::folders()))
                .found(e.message)
                .help(
                    "install torch 2.11.0 for Python with its nvidia packages, and put its `lib` folder and theirs into \
                     LD_LIBRARY_PATH, as tools/cuda-checks does; or run on the CPU: --device cpu",
                )
        })?;
        if devices == 0 {
            return Err(Error::environment("cuda", "there is no CUDA device")
                .expected("an NVIDIA driver (libcuda.so.1) and a device that it can use")
                .found("libtorch's CUDA library is loaded and sees 0 devices")
                .help("run on the CPU: --device cpu"));
        }
        if index >= devices {
            return Err(
                Error::environment("cuda", format!("there is no device cuda:{index}"))
                    .found(format!("cuda:0 to cuda:{}", devices - 1)),
            );
        }
        cuda::open(index).map_err(|e| {
            Error::environment("cuda", format!("the device cuda:{index} cannot be used"))
                .found(e.message)
        })
    }

    fn device(&self) -> Device {
        Device::Cuda(self.0)
    }

    fn name(&self) -> String {
        Place::Cuda(self.0).to_string()
    }

    fn bytes(&self) -> Result<Stats> {
        cuda::stats(self.0).map_err(torch_error)
    }

    fn reset_peak(&self) -> Result<()> {
        cuda::reset_peak(self.0).map_err(torch_error)
    }

    fn memory(&self) -> Result<Option<Memory>> {
        let (free_bytes, total_bytes) = cuda::memory_info(self.0).map_err(torch_error)?;
        Ok(Some(Memory {
            total_bytes,
            used_bytes: total_bytes.saturating_sub(free_bytes),
        }))
    }

    fn synchronize(&self) -> Result<()> {
        cuda::synchronize(self.0).map_err(torch_error)
    }

    fn workspace_bytes(&self) -> Option<u64> {
        None
    }

    fn empty(&self, dims: &[i64], kind: Kind) -> Result<Tensor> {
        Tensor::f_empty(dims, (kind, self.device())).map_err(|e| tch_error(&e))
    }

    fn edit_bytes(&self, x: &mut Tensor, edit: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let mut host = x.to_device(Device::Cpu);
        bytes::edit(&mut host, edit).map_err(torch_error)?;
        x.f_copy_(&host).map_err(|e| tch_error(&e))
    }

    /// None where the device does not say what it is.
    fn sdpa_backends(&self) -> SdpaBackends {
        match cuda::properties(self.0) {
            Ok(found) => SdpaBackends::cuda(found.capability, found.processors),
            Err(e) => SdpaBackends {
                refused: Some(format!("attention runs in tiles: {}", e.message)),
                ..SdpaBackends::default()
            },
        }
    }

    fn recorder(&self) -> std::result::Result<Rc<dyn Recorder>, String> {
        let recorder = recorder::GraphRecorder::new(self.0);
        recorder.map(|r| Rc::new(r) as Rc<dyn Recorder>)
    }

    fn transfers(&self) -> Box<dyn Transfers> {
        Box::new(CopyStreams::new(self.0))
    }

    fn is_host(&self) -> bool {
        false
    }
}
