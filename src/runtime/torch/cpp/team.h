// Threads that share work out: those of libtorch's OpenMP.
#pragma once
#include <cstdint>
#include <functional>

namespace ckpt {

// How many threads so many multiplications are worth: one, or as many as libtorch may use.
int64_t threads_for(int64_t multiplications);

// Runs `each` for every unit from 0 to `units`, by that many threads. Which of them runs which unit is not said, so that
// no result may depend on it. Throws OutOfMemoryError if one throws: memory is all that can be missing in them.
void share_out(int64_t threads, int64_t units, const std::function<void(int64_t)>& each);

}  // namespace ckpt
