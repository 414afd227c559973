// The message of this thread's last failure.
#include "status.h"

#include <cstdlib>
#include <string>

static thread_local std::string last_message;

namespace ckpt {

int32_t report(Status status, const char* message) noexcept {
  try {
    last_message = message;
  } catch (...) {
    last_message.clear();
  }
  return status;
}

}  // namespace ckpt

extern "C" {
const char* ck_last_message() { return last_message.c_str(); }
void ck_free(void* memory) { std::free(memory); }
}
