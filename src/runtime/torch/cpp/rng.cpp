// CPU random generators. tch can only seed the default one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

#include "status.h"

extern "C" {

int32_t ck_generator_new(uint64_t seed, void** generator) {
  return ckpt::guarded([&] { *generator = new at::Generator(at::detail::createCPUGenerator(seed)); });
}

int32_t ck_generator_clone(void* handle, void** generator) {
  return ckpt::guarded([&] {
    auto* original = static_cast<at::Generator*>(handle);
    std::lock_guard<std::mutex> lock(original->mutex());
    *generator = new at::Generator(original->clone());
  });
}

void ck_generator_free(void* handle) { delete static_cast<at::Generator*>(handle); }
}
