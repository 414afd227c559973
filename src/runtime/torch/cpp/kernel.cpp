// Kernels from generated CUDA C++ source: compiled by NVRTC, loaded and launched through the driver.
//
// Neither library is linked and no header of CUDA's is needed: their functions are called by name. NVRTC comes with PyTorch's
// wheels and compiles on machines without a device.
#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <cstring>
#include <string>
#include <vector>

#include "status.h"

namespace {

// A function of a library that is loaded on demand by one of its names.
template <class Function>
Function function(std::initializer_list<const char*> names, const char* symbol) {
  void* library = nullptr;
  for (const char* name : names) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  TORCH_CHECK(library != nullptr, *names.begin(), " could not be loaded: ", dlerror());
  void* address = dlsym(library, symbol);
  TORCH_CHECK(address != nullptr, *names.begin(), " has no ", symbol);
  return reinterpret_cast<Function>(address);
}

template <class Function>
Function nvrtc_function(const char* symbol) {
  return function<Function>({"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}, symbol);
}

template <class Function>
Function driver_function(const char* symbol) {
  return function<Function>({"libcuda.so.1"}, symbol);
}

// The functions of NVRTC; a program is a pointer, and 0 is success.
struct Nvrtc {
  int (*create)(void**, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(void*, int, const char* const*);
  int (*log_size)(void*, size_t*);
  int (*log)(void*, char*);
  int (*cubin_size)(void*, size_t*);
  int (*cubin)(void*, char*);
  int (*destroy)(void**);
};

const Nvrtc& nvrtc() {
  static const Nvrtc found{
      nvrtc_function<decltype(Nvrtc::create)>("nvrtcCreateProgram"),
      nvrtc_function<decltype(Nvrtc::compile)>("nvrtcCompileProgram"),
      nvrtc_function<decltype(Nvrtc::log_size)>("nvrtcGetProgramLogSize"),
      nvrtc_function<decltype(Nvrtc::log)>("nvrtcGetProgramLog"),
      nvrtc_function<decltype(Nvrtc::cubin_size)>("nvrtcGetCUBINSize"),
      nvrtc_function<decltype(Nvrtc::cubin)>("nvrtcGetCUBIN"),
      nvrtc_function<decltype(Nvrtc::destroy)>("nvrtcDestroyProgram"),
  };
  return found;
}

struct Driver {
  int (*load)(void** module, const void* image);
  int (*get)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared, void* stream,
                void** parameters, void** extra);
};

const Driver& driver() {
  static const Driver found{
      driver_function<decltype(Driver::load)>("cuModuleLoadData"),
      driver_function<decltype(Driver::get)>("cuModuleGetFunction"),
      driver_function<decltype(Driver::launch)>("cuLaunchKernel"),
  };
  return found;
}

// Destroys a program at the end of its block.
struct Compilation {
  void* program = nullptr;
  ~Compilation() {
    if (program != nullptr) nvrtc().destroy(&program);
  }
};

}  // namespace

extern "C" {

// Compiles a source for a compute capability (80, 90, ...). Calls `take` once with the binary, which is freed afterwards.
int32_t ck_kernel_compile(const char* source, int64_t capability, void (*take)(void* to, const char* data, int64_t size),
                          void* to) {
  return ckpt::guarded([&] {
    const auto& library = nvrtc();
    Compilation made;
    int code = library.create(&made.program, source, "fused.cu", 0, nullptr, nullptr);
    TORCH_CHECK(code == 0, "NVRTC makes no program: error ", code);
    const std::string target = "--gpu-architecture=sm_" + std::to_string(capability);
    const char* const options[] = {target.c_str(), "--fmad=false", "--std=c++17"};
    code = library.compile(made.program, 3, options);
    size_t size = 0;
    if (code != 0) {
      library.log_size(made.program, &size);
      std::string log(size, '\0');
      library.log(made.program, log.data());
      TORCH_CHECK(false, "NVRTC refuses a generated kernel for sm_", capability, ": ", log);
    }
    TORCH_CHECK(library.cubin_size(made.program, &size) == 0 && size > 0, "NVRTC gives no binary");
    std::vector<char> binary(size);
    TORCH_CHECK(library.cubin(made.program, binary.data()) == 0, "NVRTC gives no binary");
    take(to, binary.data(), static_cast<int64_t>(size));
  });
}

// Loads the kernel `fused` of a binary into the current context. It stays loaded.
int32_t ck_kernel_load(const void* binary, void** kernel) {
  return ckpt::guarded([&] {
    void* module = nullptr;
    int code = driver().load(&module, binary);
    TORCH_CHECK(code == 0, "the driver does not load a generated kernel: error ", code);
    code = driver().get(kernel, module, "fused");
    TORCH_CHECK(code == 0, "the driver does not find a generated kernel: error ", code);
  });
}

// Submits a kernel to the current stream of a device. Its parameters are the tensors' data and `space`, by value.
int32_t ck_kernel_launch(void* kernel, int64_t device, const void* const* tensors, int64_t count, const void* space, int64_t blocks,
                         int64_t threads) {
  return ckpt::guarded([&] {
    std::vector<const void*> data(static_cast<size_t>(count));
    std::vector<void*> parameters(data.size() + 1);
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = static_cast<const at::Tensor*>(tensors[i])->const_data_ptr();
      parameters[i] = &data[i];
    }
    parameters.back() = const_cast<void*>(space);
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    const c10::Stream stream = guard.getStream(c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
    const int code = driver().launch(kernel, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0,
                                     guard.getStreamNativeHandle(stream), parameters.data(), nullptr);
    TORCH_CHECK(code == 0, "the driver does not launch a generated kernel: error ", code);
  });
}
}
