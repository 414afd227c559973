// Stores and groups of processes ("ranks") over c10d. sums.cpp adds up what ranks have.
#define USE_C10D_GLOO 1
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"
#include "status.h"

namespace {

using Millis = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

// c10d's registry of names holds groups weakly. Never destroyed: the threads of a group whose peer is gone may outlive main.
std::map<std::string, GroupPtr>& held() {
  static auto* groups = new std::map<std::string, GroupPtr>;
  return *groups;
}

const StorePtr& store_of(const void* store) { return *static_cast<const StorePtr*>(store); }

const at::Tensor& tensor_of(const void* tensor) { return *static_cast<const at::Tensor*>(tensor); }

void* made(StorePtr store, int64_t timeout_ms, const char* prefix) {
  store->setTimeout(Millis(timeout_ms));
  return new StorePtr(c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store)));
}

// Bytes of a tensor as a tensor that does not own them: a group may hold on to its tensors for a moment after its work is
// done, and a storage that was freed late would be counted late.
at::Tensor lent(const at::Tensor& tensor, int64_t from, int64_t bytes) {
  TORCH_CHECK(tensor.is_contiguous(), "the tensor is not row-major");
  TORCH_CHECK(from >= 0 && bytes >= 0 && from + bytes <= static_cast<int64_t>(tensor.nbytes()),
              "the slice leaves the tensor");
  auto* data = static_cast<char*>(tensor.data_ptr());
  return at::from_blob(data + from, {bytes}, at::TensorOptions().dtype(at::kByte).device(tensor.device()));
}

// All works end before the first failure is thrown: none may write to a tensor afterwards.
void finish(const std::vector<WorkPtr>& works) {
  std::exception_ptr failure;
  for (const auto& work : works) {
    try {
      work->wait();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

// Slices of a tensor that come from other ranks.
struct Gather {
  std::vector<std::vector<at::Tensor>> slices;
  std::vector<WorkPtr> works;
};

// What makes NCCL's groups, by its names in libtorch's CUDA library: headers of NCCL and CUDA are not needed.
struct Nccl {
  void (*make_options)(void* self, bool is_high_priority);
  // By the C++ ABI a smart pointer is passed by its address, and the callee moves out of it.
  void (*make_group)(void* self, StorePtr* store, int rank, int ranks, OptionsPtr* options);
  int version;
};

const Nccl& nccl() {
  static const Nccl found = [] {
    auto find = [](const char* name) {
      void* at = ckpt::runtime_function<void*>(name);
      TORCH_CHECK(at != nullptr, "libtorch's CUDA library is not loaded, or it has no ", name);
      return at;
    };
    Nccl made{};
    made.version = reinterpret_cast<int (*)()>(find("_ZN4c10d20getNcclVersionNumberEv"))();
    TORCH_CHECK(made.version / 10000 == 2, "NCCL 2 is needed, and its number here is ", made.version);
    made.make_options = reinterpret_cast<decltype(made.make_options)>(find("_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"));
    made.make_group = reinterpret_cast<decltype(made.make_group)>(
        find("_ZN4c10d16ProcessGroupNCCLC1EN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_"
             "typeIS3_EEEEiiNS2_INS0_7OptionsENS5_IS8_EEEE"));
    return made;
  }();
  return found;
}

void* zeroed(size_t bytes) { return std::memset(::operator new(bytes), 0, bytes); }

// Only the library knows how large its objects are (1,112 bytes for the group of 2.11.0), so they get far more.
BackendPtr nccl_group(StorePtr store, int rank, int ranks, Millis timeout) {
  // A rank that is gone is an error of `wait` then. Otherwise a thread of the group ends the process.
  setenv("TORCH_NCCL_BLOCKING_WAIT", "1", /*overwrite=*/0);
  void* memory = zeroed(16384);
  nccl().make_options(memory, false);
  auto options = OptionsPtr::unsafe_steal_from_new(static_cast<c10d::Backend::Options*>(memory));
  options->timeout = timeout;
  memory = zeroed(65536);
  nccl().make_group(memory, &store, rank, ranks, &options);
  return BackendPtr::unsafe_steal_from_new(static_cast<c10d::Backend*>(memory));
}

}  // namespace

extern "C" {

// Checks that libtorch's CUDA library is loaded and has the NCCL that is called here. Returns its version: 22809 is 2.28.9.
int32_t ck_nccl_version(int64_t* version) {
  return ckpt::guarded([&] { *version = nccl().version; });
}

// Connects to the store at a host and port, and serves it where `serve` is not 0. Keys get the prefix. Whether all ranks are
// there is not waited for: whoever reads a key that a rank never wrote names that rank.
int32_t ck_store_tcp(const char* host, int64_t port, int64_t ranks, int32_t serve, int64_t timeout_ms, const char* prefix,
                     void** store) {
  return ckpt::guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = serve != 0;
    options.numWorkers = static_cast<size_t>(ranks);
    options.multiTenant = true;
    options.waitWorkers = false;
    options.timeout = Millis(timeout_ms);
    *store = made(c10::make_intrusive<c10d::TCPStore>(host, options), timeout_ms, prefix);
  });
}

int32_t ck_store_file(const char* path, int64_t ranks, int64_t timeout_ms, const char* prefix, void** store) {
  return ckpt::guarded([&] {
    *store = made(c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(ranks)), timeout_ms, prefix);
  });
}

int32_t ck_store_set(const void* store, const char* key, const char* text) {
  return ckpt::guarded([&] { store_of(store)->set(key, std::string(text)); });
}

// Waits for a key and returns its text, which the caller frees.
int32_t ck_store_get(const void* store, const char* key, int64_t timeout_ms, char** text) {
  return ckpt::guarded([&] {
    store_of(store)->wait({key}, Millis(timeout_ms));
    *text = strdup(store_of(store)->get_to_str(key).c_str());
  });
}

// Adds to a number, which begins at 0, and returns the sum.
int32_t ck_store_add(const void* store, const char* key, int64_t number, int64_t* sum) {
  return ckpt::guarded([&] { *sum = store_of(store)->add(key, number); });
}

void ck_store_drop(void* store) { delete static_cast<StorePtr*>(store); }

// Makes a group of processes, known by its name to `_c10d_functional` as well: over Gloo for tensors on the CPU and, where
// `has_devices` is not 0, over NCCL for those on CUDA devices. `host` is the address to listen at; null for the one that the
// host's name or GLOO_SOCKET_IFNAME gives.
int32_t ck_group_join(const void* store, const char* name, int64_t rank, int64_t ranks, int64_t timeout_ms,
                      const char* host, int32_t has_devices) {
  return ckpt::guarded([&] {
    const auto r = static_cast<int>(rank), n = static_cast<int>(ranks);
    StorePtr own = c10::make_intrusive<c10d::PrefixStore>(name, store_of(store));
    auto options = c10d::ProcessGroupGloo::Options::create(Millis(timeout_ms));
    options->devices.push_back(host == nullptr ? c10d::ProcessGroupGloo::createDefaultDevice()
                                               : c10d::ProcessGroupGloo::createDeviceForHostname(host));
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(own, r, n, options);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(own, r, n);
    using Type = c10d::ProcessGroup::BackendType;
    group->setBackend(c10::kCPU, Type::GLOO, c10::intrusive_ptr<c10d::Backend>(backend));
    group->setDefaultBackend(Type::GLOO);
    if (has_devices != 0) {
      // Gloo has keys of its own in the store.
      StorePtr keys = c10::make_intrusive<c10d::PrefixStore>("nccl", own);
      group->setBackend(c10::kCUDA, Type::NCCL, nccl_group(std::move(keys), r, n, Millis(timeout_ms)));
    }
    group->setGroupName(name);
    c10d::register_process_group(name, group);
    held()[name] = group;
  });
}

int32_t ck_group_leave(const char* name) {
  return ckpt::guarded([&] {
    c10d::unregister_process_group(name);
    held().erase(name);
  });
}

// Begins to fill slice r of a tensor with that of rank r, on all ranks. The tensor lives until ck_group_gathered.
int32_t ck_group_gather(const char* name, const void* tensor, const int64_t* slice_bytes, int64_t ranks, void** gather) {
  return ckpt::guarded([&] {
    auto group = c10d::resolve_process_group(name);
    auto made = std::make_unique<Gather>();
    int64_t from = 0;
    try {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto bytes = slice_bytes[rank];
        if (bytes > 0) {
          made->slices.push_back({lent(tensor_of(tensor), from, bytes)});
          c10d::BroadcastOptions options;
          options.rootRank = rank;
          made->works.push_back(group->broadcast(made->slices.back(), options));
        }
        from += bytes;
      }
    } catch (...) {
      ckpt::guarded([&] { finish(made->works); });
      throw;
    }
    *gather = made.release();
  });
}

// Waits for a gather, which is gone afterwards.
int32_t ck_group_gathered(void* gather) {
  return ckpt::guarded([&] {
    std::unique_ptr<Gather> own(static_cast<Gather*>(gather));
    finish(own->works);
  });
}

// Sums row-major tensors on a device over the ranks of a group, in NCCL's order: in place, or where `slices` is not null, this
// rank's slice of each into the tensor given there.
int32_t ck_group_sum_on_device(const char* name, int64_t ranks, const void* const* tensors, const void* const* slices,
                               int64_t count) {
  return ckpt::guarded([&] {
    auto group = c10d::resolve_process_group(name);
    std::vector<std::vector<at::Tensor>> held;
    std::vector<WorkPtr> works;
    for (int64_t i = 0; i < count; ++i) {
      held.push_back({tensor_of(tensors[i])});
      if (slices == nullptr) {
        works.push_back(group->allreduce(held.back()));
        continue;
      }
      auto slice = tensor_of(slices[i]);
      auto& whole = held.back()[0];
      whole = whole.view(-1);
      // Slices are of one size, and the last ones may go beyond the tensor.
      const auto missing = slice.numel() * ranks - whole.numel();
      if (missing > 0) whole = at::cat({whole, at::zeros({missing}, whole.options())});
      works.push_back(group->_reduce_scatter_base(slice, whole));
    }
    finish(works);
  });
}
}
