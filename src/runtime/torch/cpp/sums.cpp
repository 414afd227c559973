// Sums over the ranks of a group, in the order of ranks: each element is added up on one rank, in float32 or wider, and rounded
// once. So its bits depend neither on the algorithm of a library nor on what is exchanged together.
//
// Tensors are taken as one list of elements and exchanged in rounds of a few MiB, point to point, so that the buffers of
// a round are all that is taken beside the tensors. What lies in one piece is sent and received where it is.
#define USE_C10D_GLOO 1
#include <ATen/ops/from_blob.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "status.h"

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Bytes of a round over all ranks.
constexpr int64_t kRoundBytes = 4 << 20;

std::atomic<int64_t> g_scratch_bytes{0};

struct Span {
  char* at;
  int64_t bytes;
};
using Spans = std::vector<Span>;

int64_t bytes_of(const Spans& spans) {
  int64_t all = 0;
  for (const auto& span : spans) all += span.bytes;
  return all;
}

void pack(const Spans& from, char* to) {
  for (const auto& span : from) {
    std::memcpy(to, span.at, span.bytes);
    to += span.bytes;
  }
}

void unpack(const char* from, const Spans& to) {
  for (const auto& span : to) {
    std::memcpy(span.at, from, span.bytes);
    from += span.bytes;
  }
}

// A buffer that grows and is kept, from the system: it is counted beside the peak.
class Buffer {
 public:
  char* of(int64_t bytes) {
    if (bytes > size_) {
      data_.reset(new char[bytes]);
      g_scratch_bytes += bytes - size_;
      size_ = bytes;
    }
    return data_.get();
  }
  ~Buffer() { g_scratch_bytes -= size_; }

 private:
  std::unique_ptr<char[]> data_;
  int64_t size_ = 0;
};

// Those of a thread.
struct Buffers {
  Buffer sent, received, own;
};

Buffers& buffers() {
  static thread_local Buffers own;
  return own;
}

template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<c10::Half> {
  using Type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using Type = float;
};

// Writes the sum of as many lists as there are ranks. `to` may be one of them.
template <class T>
void add_up(const std::vector<const char*>& lists, char* to, int64_t bytes) {
  using W = typename Wide<T>::Type;
  constexpr int64_t kBlock = 1024;
  W sum[kBlock];
  const auto count = bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const auto n = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const T*>(lists[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<W>(first[i]);
    for (size_t rank = 1; rank < lists.size(); ++rank) {
      const auto* next = reinterpret_cast<const T*>(lists[rank]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<W>(next[i]);
    }
    auto* out = reinterpret_cast<T*>(to) + begin;
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(sum[i]);
  }
}

using AddUp = void (*)(const std::vector<const char*>&, char*, int64_t);

AddUp adder(int32_t type) {
  switch (static_cast<at::ScalarType>(type)) {
    case at::kFloat: return add_up<float>;
    case at::kDouble: return add_up<double>;
    case at::kHalf: return add_up<c10::Half>;
    case at::kBFloat16: return add_up<c10::BFloat16>;
    case at::kLong: return add_up<int64_t>;
    default: TORCH_CHECK(false, "tensors of this type are not summed");
  }
}

// Messages between this rank and others. All have ended when it is destroyed: none may touch memory afterwards.
class Messages {
 public:
  explicit Messages(const c10::intrusive_ptr<c10d::Backend>& backend) : backend_(backend) {}

  void send(const char* from, int64_t bytes, int rank, int tag) { begin(const_cast<char*>(from), bytes, rank, tag, true); }
  void receive(char* to, int64_t bytes, int rank, int tag) { begin(to, bytes, rank, tag, false); }

  void wait() {
    auto failure = drained();
    if (failure) std::rethrow_exception(failure);
  }

  ~Messages() { drained(); }

 private:
  void begin(char* at, int64_t bytes, int rank, int tag, bool sends) {
    // The backend counts its messages without a lock.
    static std::mutex mutex;
    std::vector<at::Tensor> one{at::from_blob(at, {bytes}, at::TensorOptions().dtype(at::kByte))};
    std::lock_guard<std::mutex> lock(mutex);
    works_.push_back(sends ? backend_->send(one, rank, tag) : backend_->recv(one, rank, tag));
  }

  std::exception_ptr drained() {
    std::exception_ptr failure;
    for (auto& work : works_) {
      try {
        work->wait();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    works_.clear();
    return failure;
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<WorkPtr> works_;
};

// One rank among others.
struct Place {
  c10::intrusive_ptr<c10d::Backend> backend;
  int64_t rank, ranks;
  int tag;
};

// Sums the region of each rank on that rank, into `sum`, which is as large as its own region. With `gathers`, `sum` is
// that region, and the others' regions are filled with theirs.
void run_round(const Place& place, const std::vector<Spans>& regions, const Spans& sum, AddUp add_up, bool gathers) {
  auto& scratch = buffers();
  const auto me = place.rank;
  const auto own_bytes = bytes_of(regions[me]);
  int64_t packed = 0;
  for (int64_t rank = 0; rank < place.ranks; ++rank) {
    if (rank != me && regions[rank].size() > 1) packed += bytes_of(regions[rank]);
  }
  char* sent = scratch.sent.of(packed);
  char* received = scratch.received.of(std::max(own_bytes * (place.ranks - 1), gathers ? packed : 0));
  char* own = scratch.own.of(regions[me].size() > 1 || sum.size() > 1 ? own_bytes : 0);
  Messages messages(place.backend);
  std::vector<const char*> lists(place.ranks);
  char* to = received;
  for (int64_t rank = 0; rank < place.ranks; ++rank) {
    const auto bytes = bytes_of(regions[rank]);
    if (rank == me) {
      lists[rank] = regions[me].size() == 1 ? regions[me][0].at : own;
      if (lists[rank] == own) pack(regions[me], own);
      continue;
    }
    if (own_bytes > 0) {
      messages.receive(to, own_bytes, static_cast<int>(rank), place.tag);
      lists[rank] = to;
      to += own_bytes;
    }
    if (bytes > 0) {
      const auto* from = regions[rank][0].at;
      if (regions[rank].size() > 1) {
        pack(regions[rank], sent);
        from = sent;
        sent += bytes;
      }
      messages.send(from, bytes, static_cast<int>(rank), place.tag);
    }
  }
  messages.wait();
  char* total = sum.size() == 1 ? sum[0].at : own;
  if (own_bytes > 0) {
    add_up(lists, total, own_bytes);
    if (total == own) unpack(own, sum);
  }
  if (!gathers) return;
  Messages answers(place.backend);
  to = received;
  for (int64_t rank = 0; rank < place.ranks; ++rank) {
    const auto bytes = bytes_of(regions[rank]);
    if (rank == me) continue;
    if (own_bytes > 0) answers.send(total, own_bytes, static_cast<int>(rank), place.tag + 1);
    if (bytes > 0) {
      const bool is_whole = regions[rank].size() == 1;
      answers.receive(is_whole ? regions[rank][0].at : to, bytes, static_cast<int>(rank), place.tag + 1);
      if (!is_whole) to += bytes;
    }
  }
  answers.wait();
  to = received;
  for (int64_t rank = 0; rank < place.ranks; ++rank) {
    if (rank == me || regions[rank].size() < 2) continue;
    unpack(to, regions[rank]);
    to += bytes_of(regions[rank]);
  }
}

// The next elements of a list of tensors, as pieces of them.
class Cursor {
 public:
  Cursor(const int64_t* data, const int64_t* counts, int64_t tensors, int64_t width)
      : data_(data), counts_(counts), tensors_(tensors), width_(width) {}

  Spans take(int64_t elements) {
    Spans spans;
    while (elements > 0 && tensor_ < tensors_) {
      const auto n = std::min(elements, counts_[tensor_] - done_);
      if (n > 0) spans.push_back({reinterpret_cast<char*>(data_[tensor_]) + done_ * width_, n * width_});
      done_ += n;
      elements -= n;
      if (done_ == counts_[tensor_]) ++tensor_, done_ = 0;
    }
    return spans;
  }

 private:
  const int64_t *data_, *counts_;
  int64_t tensors_, width_, tensor_ = 0, done_ = 0;
};

int64_t slice_size(int64_t elements, int64_t ranks) { return elements / ranks + (elements % ranks > 0); }

void sum_whole(const Place& place, const int64_t* data, const int64_t* counts, int64_t tensors, int64_t width,
               AddUp add_up) {
  int64_t left = 0;
  for (int64_t i = 0; i < tensors; ++i) left += counts[i];
  Cursor cursor(data, counts, tensors, width);
  while (left > 0) {
    auto chunk = std::min(left, std::max(kRoundBytes / width, place.ranks));
    left -= chunk;
    const auto size = slice_size(chunk, place.ranks);
    std::vector<Spans> regions;
    for (int64_t rank = 0; rank < place.ranks; ++rank) {
      const auto n = std::min(size, chunk);
      regions.push_back(cursor.take(n));
      chunk -= n;
    }
    run_round(place, regions, regions[place.rank], add_up, true);
  }
}

void sum_slices(const Place& place, const int64_t* data, const int64_t* counts, const int64_t* slices, int64_t tensors,
                int64_t width, AddUp add_up) {
  const auto most = std::max<int64_t>(kRoundBytes / width / place.ranks, 1);
  std::vector<Spans> regions(place.ranks);
  Spans sum;
  int64_t filled = 0;
  const auto flush = [&] {
    if (filled > 0) run_round(place, regions, sum, add_up, false);
    for (auto& region : regions) region.clear();
    sum.clear();
    filled = 0;
  };
  for (int64_t i = 0; i < tensors; ++i) {
    const auto count = counts[i], size = slice_size(count, place.ranks);
    auto* slice = reinterpret_cast<char*>(slices[i]);
    for (int64_t from = 0; from < size;) {
      const auto n = std::min(size - from, most - filled);
      for (int64_t rank = 0; rank < place.ranks; ++rank) {
        const auto begin = std::min(rank * size + from, count), end = std::min(rank * size + from + n, count);
        const auto bytes = (std::min(end, std::min((rank + 1) * size, count)) - begin) * width;
        if (bytes <= 0) continue;
        regions[rank].push_back({reinterpret_cast<char*>(data[i]) + begin * width, bytes});
        if (rank == place.rank) sum.push_back({slice + from * width, bytes});
      }
      from += n;
      filled += n;
      if (filled == most) flush();
    }
    const auto own = std::max<int64_t>(std::min(size, count - place.rank * size), 0);
    std::memset(slice + own * width, 0, (size - own) * width);
  }
  flush();
}

}  // namespace

extern "C" {

// Sums row-major CPU tensors of one type, given by their addresses and numbers of elements, over the ranks of a group: in
// place, or where `slices` is not null, this rank's slice of each into the address given there. All ranks give the same
// numbers and the same tag, which no other call in flight has; the next tag is taken as well.
int32_t ck_group_sum(const char* name, int64_t rank, int64_t ranks, int64_t tag, int32_t type, const int64_t* data,
                     const int64_t* counts, const int64_t* slices, int64_t tensors) {
  return ckpt::guarded([&] {
    const auto group = c10d::resolve_process_group(name);
    const Place place{group->getBackend(c10::DeviceType::CPU), rank, ranks, static_cast<int>(tag)};
    const auto add_up = adder(type);
    const auto width = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(type)));
    if (slices == nullptr) {
      sum_whole(place, data, counts, tensors, width, add_up);
    } else {
      sum_slices(place, data, counts, slices, tensors, width, add_up);
    }
  });
}

// Bytes of the buffers that sums have taken.
int64_t ck_group_scratch_bytes() { return g_scratch_bytes.load(); }
}
