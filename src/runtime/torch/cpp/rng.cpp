// Seeds and states of CPU random generators. tch reaches neither the state nor any generator but the default one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <mutex>

#include "status.h"

extern "C" {

int32_t ck_rng_seed(uint64_t seed) {
  return ckpt::guarded([&] {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
}

int32_t ck_rng_state(void** tensor) {
  return ckpt::guarded([&] {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    *tensor = new at::Tensor(generator.get_state());
  });
}

int32_t ck_rng_set_state(const void* tensor) {
  return ckpt::guarded([&] {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*static_cast<const at::Tensor*>(tensor));
  });
}

int32_t ck_generator_new(uint64_t seed, void** generator) {
  return ckpt::guarded([&] { *generator = new at::Generator(at::detail::createCPUGenerator(seed)); });
}

int32_t ck_generator_seed(void* handle, uint64_t seed) {
  return ckpt::guarded([&] {
    auto* generator = static_cast<at::Generator*>(handle);
    std::lock_guard<std::mutex> lock(generator->mutex());
    generator->set_current_seed(seed);
  });
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
