// A CPU allocator for libtorch that counts requested bytes exactly.
//
// libtorch's own statistics are per thread (profiler hooks) or absent (CPU); resident memory includes what malloc keeps.
// Here every block carries its size in a header, so that live bytes are known whichever thread frees it.
//
// Libraries below libtorch take scratch through the same allocator: oneDNN packs the operands of 16-bit products, in
// bytes that follow from the processor's caches, its instructions and the number of threads, not from the product alone.
// No plan can state them. Inside a scratch scope such a block comes from a workspace, as a device's libraries have one:
// one block a thread, kept from call to call and counted apart.
//
// An arena is one reserved stretch of memory. What a thread allocates while places in it are offered goes to the first
// place that takes so many bytes and is free; whatever finds none comes from malloc, so that a plan that is wrong costs
// memory and time, never a value.
#include <c10/core/Allocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
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

struct Workspace;

struct alignas(kAlignment) Header {
  int64_t bytes;         // what the caller asked for: the number that is counted
  size_t mapped_length;  // 0: the block came from malloc or an arena
  Workspace* workspace;  // whose block it is; null for all others
  CkArena* arena;        // null: the block came from elsewhere
};
static_assert(sizeof(Header) == kAlignment, "data follows the header at once");

}  // namespace

// Blocks by where they begin, headers included, and where they end. Lives until its owner and its last block are gone.
struct CkArena {
  char* base;
  size_t length;
  std::mutex mutex;
  std::map<size_t, size_t> blocks;
  bool owned = true;
  int64_t placed = 0;

  // A block of `length` bytes within from..to, if there is room; null without.
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

// What the running thread is offered.
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
// Blocks from this size on are mapped, and so go back to the system the moment they die.
std::atomic<int64_t> mmap_threshold{std::numeric_limits<int64_t>::max()};

// Bytes of all workspaces.
std::atomic<int64_t> workspace_bytes{0};

// A thread's block for libraries' scratch. A block that is still lent when its thread ends is left alone.
struct Workspace {
  Header* block = nullptr;
  std::atomic<bool> lent{false};
  int scopes = 0;

  ~Workspace() {
    if (!lent.load()) drop();
  }

  void drop() {
    if (block == nullptr) return;
    workspace_bytes.fetch_sub(block->bytes, std::memory_order_relaxed);
    std::free(block);
    block = nullptr;
  }

  // The block if it is free, grown to `bytes`; null if it is lent or there is no memory.
  void* lend(size_t bytes) {
    if (lent.load()) return nullptr;
    if (block == nullptr || static_cast<size_t>(block->bytes) < bytes) {
      drop();
      void* fresh = nullptr;
      if (posix_memalign(&fresh, kAlignment, bytes + sizeof(Header)) != 0) return nullptr;
      block = new (fresh) Header{static_cast<int64_t>(bytes), 0, this, nullptr};
      workspace_bytes.fetch_add(block->bytes, std::memory_order_relaxed);
    }
    lent.store(true);
    return block + 1;
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
  } else if (header->mapped_length != 0) {
    munmap(header, header->mapped_length);
  } else {
    std::free(header);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    // Sizes near the top of the address space come from overflowed shapes; leave room to round up.
    constexpr size_t kLargest = static_cast<size_t>(std::numeric_limits<int64_t>::max()) / 2;
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < kLargest, "cannot allocate ", bytes, " bytes");
    // A second block at once is no scratch: it is counted like any other.
    if (workspace.scopes > 0) {
      if (void* data = workspace.lend(bytes)) return {data, data, &release, cpu};
    }
    void* block = offer.count > 0 ? placed(bytes) : nullptr;
    CkArena* arena = block == nullptr ? nullptr : offer.arena;
    size_t mapped_length = 0;
    if (block != nullptr) {
      // Taken from the arena.
    } else if (static_cast<int64_t>(bytes) >= mmap_threshold.load(std::memory_order_relaxed)) {
      static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
      mapped_length = (bytes + sizeof(Header) + page - 1) / page * page;
      block = mmap(nullptr, mapped_length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED) block = nullptr;
    } else if (posix_memalign(&block, kAlignment, bytes + sizeof(Header)) != 0) {
      block = nullptr;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "cannot allocate ", bytes, " bytes");
    Header* header = new (block) Header{static_cast<int64_t>(bytes), mapped_length, nullptr, arena};
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

// Never freed: storages point at it until the process ends.
void ck_memory_install() { c10::SetAllocator(c10::DeviceType::CPU, new CountingAllocator, /*priority=*/10); }

void ck_memory_set_mmap_threshold(int64_t bytes) { mmap_threshold.store(bytes, std::memory_order_relaxed); }

void ck_memory_stats(int64_t* live, int64_t* peak, int64_t* count) {
  *live = live_bytes.load(std::memory_order_relaxed);
  *peak = peak_bytes.load(std::memory_order_relaxed);
  *count = allocations.load(std::memory_order_relaxed);
}

// Scopes nest; they are the calling thread's.
void ck_memory_scratch(int32_t begin) { workspace.scopes += begin != 0 ? 1 : -1; }

int64_t ck_memory_workspace_bytes() { return workspace_bytes.load(std::memory_order_relaxed); }

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

int64_t ck_arena_placed(CkArena* arena) {
  const std::lock_guard<std::mutex> guard(arena->mutex);
  return arena->placed;
}

void ck_arena_offer(CkArena* arena, const CkPlace* places, int64_t count) { offer = Offer{arena, places, count}; }

void ck_arena_withdraw() { offer = Offer{}; }

void ck_memory_reset_peak() { peak_bytes.store(live_bytes.load(std::memory_order_relaxed), std::memory_order_relaxed); }
}
