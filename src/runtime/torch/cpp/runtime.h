// The CUDA runtime, which libtorch's CUDA library has loaded, by the names of its functions.
#pragma once
#include <dlfcn.h>

namespace ckpt {

// Null where nothing of that name is loaded.
template <class Function>
Function runtime_function(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace ckpt
