// A CPU allocator for libtorch that counts requested bytes exactly.
//
// libtorch's own statistics are per thread (profiler hooks) or absent (CPU), and resident memory includes pages that malloc
// keeps. Here every block carries its size in a header, so any thread can free it and live bytes stay exact.
//
// Libraries below libtorch use the same allocator for scratch. oneDNN packs the operands of 16-bit products, and the size of
// the packed data depends on the processor's caches, its instructions and the number of threads, so no plan can predict it.
// Inside a scratch scope such a block comes from a workspace: a few blocks per thread, kept between calls and counted
// separately. With AMX, oneDNN takes two at once.
//
// An arena is one reserved range of addresses. While places in it are offered, a thread's allocation goes to the first free
// place for that many bytes. An allocation without a place comes from malloc, so a wrong plan costs memory and time but never
// changes a value.
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>

#include "abi.h"
#include "memory.h"
#include "status.h"

namespace {

// libtorch's kernels assume 64-byte alignment of fresh storages; the header keeps it.
constexpr size_t kAlignment = 64;

struct WorkspaceBlock;

struct alignas(kAlignment) Header {
  int64_t bytes;              // requested bytes, which are counted
  WorkspaceBlock* workspace;  // null unless the block is a workspace's
  CkArena* arena;             // null unless the block is in an arena
};
static_assert(sizeof(Header) == kAlignment, "data follows the header directly");

}  // namespace

// `blocks` maps the start of each block, header included, to its end. The arena lives until its owner has dropped it and its
// last block is freed.
struct CkArena {
  char* base;
  size_t length;
  std::mutex mutex;
  std::map<size_t, size_t> blocks;
  bool owned = true;
  int64_t placed = 0;

  // Returns a block of `length` bytes within from..to, or null if there is no room.
  void* place(size_t from, size_t to, size_t length) {
    const std::lock_guard<std::mutex> guard(mutex);
    auto next = blocks.upper_bound(from);
    if (next != blocks.begin()) from = std::max(from, std::prev(next)->second);
    for (; next != blocks.end() && next->first < to; ++next) {
      if (next->first >= from && next->first - from >= length) break;
      from = std::max(from, next->second);
    }
    if (from > to || to - from < length) return nullptr;
    blocks.emplace(from, from + length);
    ++placed;
    return base + from;
  }

  void drop(const void* block) {
    bool last = false;
    {
      const std::lock_guard<std::mutex> guard(mutex);
      blocks.erase(static_cast<size_t>(static_cast<const char*>(block) - base));
      last = !owned && blocks.empty();
    }
    if (last) destroy();
  }

  void disown() {
    bool last = false;
    {
      const std::lock_guard<std::mutex> guard(mutex);
      owned = false;
      last = blocks.empty();
    }
    if (last) destroy();
  }

 private:
  void destroy() {
    munmap(base, length);
    delete this;
  }
};

namespace {

// The places that are offered to the running thread.
struct Offer {
  CkArena* arena = nullptr;
  const CkPlace* places = nullptr;
  int64_t count = 0;
};
thread_local Offer offer;

void* placed(size_t bytes) {
  const size_t length = (bytes + sizeof(Header) + kAlignment - 1) / kAlignment * kAlignment;
  for (int64_t i = 0; i < offer.count; ++i) {
    const CkPlace& place = offer.places[i];
    const auto size = static_cast<int64_t>(bytes);
    if (place.bytes >= 0 ? size != place.bytes : size < -place.bytes) continue;
    if (void* block = offer.arena->place(static_cast<size_t>(place.from), static_cast<size_t>(place.to), length)) {
      return block;
    }
  }
  return nullptr;
}

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> allocations{0};

// Bytes of all workspaces.
std::atomic<int64_t> workspace_bytes{0};

// A block for scratch of libraries. If it is in use when its thread ends, it is leaked.
struct WorkspaceBlock {
  Header* block = nullptr;
  std::atomic<bool> lent{false};

  ~WorkspaceBlock() {
    if (!lent.load()) drop();
  }

  void drop() {
    if (block == nullptr) return;
    workspace_bytes.fetch_sub(block->bytes, std::memory_order_relaxed);
    std::free(block);
    block = nullptr;
  }

  // Returns the block, grown to `bytes`; null if it is in use or there is no memory.
  void* lend(size_t bytes) {
    if (lent.load()) return nullptr;
    if (block == nullptr || static_cast<size_t>(block->bytes) < bytes) {
      drop();
      void* fresh = nullptr;
      if (posix_memalign(&fresh, kAlignment, bytes + sizeof(Header)) != 0) return nullptr;
      block = new (fresh) Header{static_cast<int64_t>(bytes), this, nullptr};
      workspace_bytes.fetch_add(block->bytes, std::memory_order_relaxed);
    }
    lent.store(true);
    return block + 1;
  }
};

// A thread's blocks. Calls ask for them in the same order, so each keeps to one purpose and its size.
struct Workspace {
  std::array<WorkspaceBlock, 4> blocks;
  int scopes = 0;

  void* lend(size_t bytes) {
    for (WorkspaceBlock& block : blocks) {
      if (void* data = block.lend(bytes)) return data;
    }
    return nullptr;
  }
};

thread_local Workspace workspace;

void count(int64_t bytes) {
  const int64_t live = live_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  allocations.fetch_add(1, std::memory_order_relaxed);
  int64_t peak = peak_bytes.load(std::memory_order_relaxed);
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  if (header->workspace != nullptr) {
    header->workspace->lent.store(false);
    return;
  }
  live_bytes.fetch_sub(header->bytes, std::memory_order_relaxed);
  if (header->arena != nullptr) {
    header->arena->drop(header);
  } else {
    std::free(header);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    // Sizes near the top of the address space come from overflowed shapes. The limit leaves room to round up.
    constexpr size_t kLargest = static_cast<size_t>(std::numeric_limits<int64_t>::max()) / 2;
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < kLargest, "cannot allocate ", bytes, " bytes");
    // What the workspace does not have is counted like any other block.
    if (workspace.scopes > 0) {
      if (void* data = workspace.lend(bytes)) return {data, data, &release, cpu};
    }
    void* block = offer.count > 0 ? placed(bytes) : nullptr;
    CkArena* arena = block == nullptr ? nullptr : offer.arena;
    if (block == nullptr && posix_memalign(&block, kAlignment, bytes + sizeof(Header)) != 0) block = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "cannot allocate ", bytes, " bytes");
    Header* header = new (block) Header{static_cast<int64_t>(bytes), nullptr, arena};
    count(header->bytes);
    void* data = header + 1;
    return {data, data, &release, cpu};
  }

  // c10 may allocate and free without a DataPtr; that needs data and context to be the same pointer, as above.
  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

namespace ckpt {

void count_workspace(int64_t bytes) { workspace_bytes.fetch_add(bytes, std::memory_order_relaxed); }

}  // namespace ckpt

extern "C" {

// The allocator is never freed, because storages point at it until the process ends.
void ck_memory_install() { c10::SetAllocator(c10::DeviceType::CPU, new CountingAllocator, /*priority=*/10); }

void ck_memory_stats(int64_t* live, int64_t* peak, int64_t* count) {
  *live = live_bytes.load(std::memory_order_relaxed);
  *peak = peak_bytes.load(std::memory_order_relaxed);
  *count = allocations.load(std::memory_order_relaxed);
}

// Begins or ends a scratch scope of the calling thread. Scopes nest.
void ck_memory_scratch(int32_t begin) { workspace.scopes += begin != 0 ? 1 : -1; }

int64_t ck_memory_workspace_bytes() { return workspace_bytes.load(std::memory_order_relaxed); }

// Reserves an arena. It is released once `ck_arena_free` was called and its last block is freed.
int32_t ck_arena_new(int64_t bytes, CkArena** arena) {
  return ckpt::guarded([&] {
    const auto length = static_cast<size_t>(bytes);
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, base != MAP_FAILED, "cannot reserve ", bytes, " bytes");
    auto* made = new CkArena{};
    made->base = static_cast<char*>(base);
    made->length = length;
    *arena = made;
  });
}

void ck_arena_free(CkArena* arena) { arena->disown(); }

// Counts the blocks that were placed so far.
int64_t ck_arena_placed(CkArena* arena) {
  const std::lock_guard<std::mutex> guard(arena->mutex);
  return arena->placed;
}

// Directs this thread's allocations to the places that fit, until `ck_arena_withdraw`. The places are lent.
void ck_arena_offer(CkArena* arena, const CkPlace* places, int64_t count) { offer = Offer{arena, places, count}; }

void ck_arena_withdraw() { offer = Offer{}; }

void ck_memory_reset_peak() { peak_bytes.store(live_bytes.load(std::memory_order_relaxed), std::memory_order_relaxed); }
}
