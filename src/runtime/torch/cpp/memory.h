// What of memory is counted elsewhere than in the allocator.
#pragma once
#include <cstdint>

namespace ckpt {

// Adds to the bytes that are kept as workspaces.
void count_workspace(int64_t bytes);

}  // namespace ckpt
