#include "team.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

namespace {

// By default the order of MKL's sums depends on the number of threads (seen with AVX2 and 3 threads). MKL's strict
// reproducible mode fixes the order. MKL reads the variable at its first product, so it is set when this library loads. A
// value that the user set stays.
__attribute__((constructor)) void fix_order_of_sums() { setenv("MKL_CBWR", "AUTO,STRICT", 0); }

// libtorch loads OpenMP's library into the process. Without it, one thread does all work.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*thread)();
  int (*threads)();
  OpenMp() {
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread = reinterpret_cast<decltype(thread)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    threads = reinterpret_cast<decltype(threads)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  }
  bool found() const { return parallel != nullptr && thread != nullptr && threads != nullptr; }
};

const OpenMp& open_mp() {
  static const OpenMp found;
  return found;
}

// Products with fewer multiplications run on one thread.
constexpr int64_t kLeastWork = 1 << 18;

struct Team {
  const std::function<void(int64_t)>* each;
  int64_t units;
  std::atomic<bool> failed{false};
  void run(int64_t first, int64_t step) {
    try {
      for (int64_t unit = first; unit < units; unit += step) (*each)(unit);
    } catch (...) {
      failed.store(true);
    }
  }
};

void run(void* data) {
  // The team may be smaller than requested.
  static_cast<Team*>(data)->run(open_mp().thread(), open_mp().threads());
}

}  // namespace

namespace ckpt {

int64_t threads_for(int64_t multiplications) {
  return multiplications < kLeastWork || !open_mp().found() ? 1 : at::get_num_threads();
}

void share_out(int64_t threads, int64_t units, const std::function<void(int64_t)>& each) {
  Team team{&each, units};
  if (threads == 1 || units <= 1) {
    team.run(0, 1);
  } else {
    open_mp().parallel(run, &team, static_cast<unsigned>(threads), 0);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !team.failed.load(), "cannot allocate blocks for a product");
}

}  // namespace ckpt
