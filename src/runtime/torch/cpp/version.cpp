// Which libtorch was loaded, and which these sources were compiled against.
#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <cstring>
#include <string>

#include "status.h"

extern "C" {

const char* ck_version_built_with() {
  static const std::string text = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
                                  std::to_string(TORCH_VERSION_PATCH);
  return text.c_str();
}

// As the library says it among its build settings; empty if it does not.
int32_t ck_version_loaded(char** version) {
  return ckpt::guarded([&] {
    const std::string config = at::show_config();
    const std::string key = "TORCH_VERSION=";
    std::string found;
    if (const size_t at = config.find(key); at != std::string::npos) {
      const size_t from = at + key.size();
      found = config.substr(from, config.find_first_of(", \n", from) - from);
    }
    *version = strdup(found.c_str());
    if (*version == nullptr) throw std::bad_alloc();
  });
}
}
