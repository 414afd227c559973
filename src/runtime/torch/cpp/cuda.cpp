// CUDA through libtorch's device-neutral interface; needs none of CUDA's headers.
//
// libtorch's CUDA library is loaded on demand, because loading takes 0.3 s and 240 MB. The library registers its kernels
// and hooks while it loads. Afterwards libtorch's own interface gives allocator statistics, synchronisation, the device's
// memory and the switches for deterministic kernels. libtorch caches the hooks at a process's first CUDA query, so the
// library must be loaded before that query.
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "runtime.h"
#include "status.h"

namespace {

using ckpt::runtime_function;

c10::DeviceIndex index_of(int64_t device) { return static_cast<c10::DeviceIndex>(device); }

int64_t sum_of(const c10::CachingAllocator::StatArray& stats, bool peak) {
  const auto& all = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return peak ? all.peak : all.current;
}

// A stream for copies that overlap kernels.
struct CopyStream {
  c10::Stream stream;
};

}  // namespace

extern "C" {

// Loads the library. Calls nothing of libtorch, so that its version may be checked afterwards, which asks for CUDA. Returns
// CK_REFUSED with the loader's message if the library is missing or does not fit.
int32_t ck_cuda_load() {
  return ckpt::guarded([] {
    // RTLD_GLOBAL: the linear algebra libraries that it loads later look up its symbols.
    if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      const char* reason = dlerror();
      throw std::runtime_error(reason == nullptr ? "libtorch_cuda.so could not be loaded" : reason);
    }
  });
}

// Counts the devices, once the library is loaded: 0 on a machine without a device or driver.
int32_t ck_cuda_count(int64_t* devices) {
  return ckpt::guarded([&] {
    // hasCUDA would also ask for a device.
    TORCH_CHECK(at::Context::hasCUDART(), "libtorch_cuda.so was loaded, but libtorch asked for CUDA before and found none");
    *devices = at::hasCUDA() ? at::accelerator::deviceCount() : 0;
  });
}

// Makes `device` current and enables deterministic kernels in the full precision of the type. The caller has set
// CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads at its first use.
int32_t ck_cuda_prepare(int64_t device) {
  return ckpt::guarded([&] {
    auto& context = at::globalContext();
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicCuDNN(true);
    context.setBenchmarkCuDNN(false);
    context.setAllowTF32CuBLAS(false);
    context.setAllowTF32CuDNN(false);
    context.setAllowFP16ReductionCuBLAS(false);
    context.setAllowBF16ReductionCuBLAS(false);
    context.setAllowFP16AccumulationCuBLAS(false);
    context.lazyInitDevice(at::kCUDA);
    at::accelerator::setDeviceIndex(index_of(device));
  });
}

// Sets whether libtorch refuses kernels without a deterministic form.
void ck_cuda_refuse_nondeterministic(int32_t refuse) {
  at::globalContext().setDeterministicAlgorithms(refuse != 0, /*warn_only=*/false);
}

// Waits until the device has finished all submitted work.
int32_t ck_cuda_synchronize(int64_t device) {
  return ckpt::guarded([&] { at::accelerator::synchronizeDevice(index_of(device)); });
}

// Reads the bytes of the allocator's blocks and the requested bytes in them: current values and peaks since the last reset;
// then the peak of the bytes that it reserved for blocks.
int32_t ck_cuda_memory_stats(int64_t device, int64_t* live, int64_t* peak, int64_t* requested_live,
                             int64_t* requested_peak, int64_t* reserved_peak) {
  return ckpt::guarded([&] {
    const auto stats = at::getDeviceAllocator(at::kCUDA)->getDeviceStats(index_of(device));
    *live = sum_of(stats.allocated_bytes, false);
    *peak = sum_of(stats.allocated_bytes, true);
    *requested_live = sum_of(stats.requested_bytes, false);
    *requested_peak = sum_of(stats.requested_bytes, true);
    *reserved_peak = sum_of(stats.reserved_bytes, true);
  });
}

int32_t ck_cuda_memory_reset_peak(int64_t device) {
  return ckpt::guarded([&] { at::getDeviceAllocator(at::kCUDA)->resetPeakStats(index_of(device)); });
}

// Reads the compute capability as one number (8.6 is 86) and the number of multiprocessors.
int32_t ck_cuda_properties(int64_t device, int64_t* capability, int64_t* processors) {
  return ckpt::guarded([&] {
    static const auto attribute = runtime_function<int (*)(int*, int, int)>("cudaDeviceGetAttribute");
    TORCH_CHECK(attribute != nullptr, "the CUDA runtime does not say what its devices are");
    const auto read = [&](int which) {
      int value = 0;
      const int code = attribute(&value, which, static_cast<int>(device));
      TORCH_CHECK(code == 0, "the CUDA runtime does not say attribute ", which, " of its device: error ", code);
      return static_cast<int64_t>(value);
    };
    // The numbers of cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor and …Minor.
    constexpr int multiprocessors = 16, major = 75, minor = 76;
    *capability = 10 * read(major) + read(minor);
    *processors = read(multiprocessors);
  });
}

// Reads free and total bytes of the device.
int32_t ck_cuda_memory_info(int64_t device, int64_t* free_bytes, int64_t* total_bytes) {
  return ckpt::guarded([&] {
    const auto info = at::getDeviceAllocator(at::kCUDA)->getMemoryInfo(index_of(device));
    *free_bytes = static_cast<int64_t>(info.first);
    *total_bytes = static_cast<int64_t>(info.second);
  });
}

// Locks pages of host memory, so that copies from and to them overlap kernels. The pages must be unlocked before they are
// unmapped.
int32_t ck_cuda_pin(void* data, int64_t len) {
  return ckpt::guarded([&] {
    static const auto lock = runtime_function<int (*)(void*, size_t, unsigned)>("cudaHostRegister");
    static const auto last_error = runtime_function<int (*)()>("cudaGetLastError");
    TORCH_CHECK(lock != nullptr && last_error != nullptr, "the CUDA runtime cannot lock pages");
    const int code = lock(data, static_cast<size_t>(len), 0);
    // Clears the error, which would otherwise be reported for the next kernel.
    if (code != 0) last_error();
    TORCH_CHECK(code == 0, "the CUDA runtime does not lock ", len, " bytes: error ", code);
  });
}

int32_t ck_cuda_unpin(void* data) {
  return ckpt::guarded([&] {
    static const auto unlock = runtime_function<int (*)(void*)>("cudaHostUnregister");
    TORCH_CHECK(unlock != nullptr, "the CUDA runtime cannot unlock pages");
    // Submitted work may still use the pages.
    at::accelerator::synchronizeDevice(at::accelerator::getDeviceIndex());
    const int code = unlock(data);
    TORCH_CHECK(code == 0, "the CUDA runtime does not unlock pages: error ", code);
  });
}

int32_t ck_cuda_copy_stream(int64_t device, void** copy_stream) {
  return ckpt::guarded([&] {
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    *copy_stream = new CopyStream{guard.getNewStream(c10::Device(at::kCUDA, index_of(device)))};
  });
}

void ck_cuda_copy_stream_drop(void* copy_stream) { delete static_cast<CopyStream*>(copy_stream); }

// Copies one tensor over another of the same type and dims. The copy starts after all work submitted before it and overlaps
// work submitted later; `done` is an event to wait for. One tensor is on the device, the other in locked pages.
int32_t ck_cuda_copy_stream_copy(void* copy_stream, const void* from, const void* to, void** done) {
  return ckpt::guarded([&] {
    const auto& stream = static_cast<CopyStream*>(copy_stream)->stream;
    const auto& source = *static_cast<const at::Tensor*>(from);
    const at::Tensor target = *static_cast<const at::Tensor*>(to);
    TORCH_CHECK(source.sizes() == target.sizes() && source.scalar_type() == target.scalar_type() &&
                    source.is_contiguous() && target.is_contiguous(),
                "only tensors of one type and row-major dims are copied beside a run");
    c10::Event ready(at::kCUDA);
    ready.record(at::accelerator::getCurrentStream(stream.device_index()));
    ready.block(stream);
    {
      const c10::StreamGuard here(stream);
      target.copy_(source, /*non_blocking=*/true);
    }
    auto event = std::make_unique<c10::Event>(at::kCUDA);
    event->record(stream);
    *done = event.release();
  });
}

// Makes work submitted from now on wait for a copy.
int32_t ck_cuda_await(const void* done, int64_t device) {
  return ckpt::guarded([&] {
    static_cast<const c10::Event*>(done)->block(at::accelerator::getCurrentStream(index_of(device)));
  });
}

void ck_cuda_copy_done_drop(void* done) { delete static_cast<c10::Event*>(done); }
}
