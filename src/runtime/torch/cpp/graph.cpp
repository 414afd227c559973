// CUDA graphs: what a step sends to a stream is written down once and then sent as one.
//
// libtorch's own class does it, which keeps the memory that a graph uses away from everybody else. The class lives in
// libtorch's CUDA library, which is not linked and whose headers ask for CUDA's: its members are called by the names that
// they have there, with the object first, as the C++ ABI of Linux has it. The library is of the release that these sources
// were written for, or nothing is opened (`version.cpp`).
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "runtime.h"
#include "status.h"

namespace {

using ckpt::runtime_function;

// Values of the CUDA runtime's enumerations.
constexpr int SUCCESS = 0;
// What other threads do with the device is no part of a capture and does not spoil it.
constexpr int CAPTURE_MODE_THREAD_LOCAL = 1;

// The members of at::cuda::CUDAGraph that are called.
struct Library {
  void (*construct)(void* self, bool keep_graph);
  void (*destruct)(void* self);
  void (*capture_begin)(void* self, c10::MempoolId_t pool, int mode);
  void (*capture_end)(void* self);
  void (*instantiate)(void* self);
  void* (*raw_cuda_graph)(void* self);
  void (*replay)(void* self);
  // Of the CUDA runtime.
  int (*begin_capture)(void* stream, int mode);
  int (*end_capture)(void* stream, void** graph);
  int (*graph_destroy)(void* graph);
  int (*graph_nodes)(void* graph, void* nodes, size_t* count);
  int (*last_error)();
};

struct Name {
  const char* text;
  size_t member;
};

constexpr Name NAMES[] = {
    {"_ZN2at4cuda9CUDAGraphC1Eb", offsetof(Library, construct)},
    {"_ZN2at4cuda9CUDAGraphD1Ev", offsetof(Library, destruct)},
    {"_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode", offsetof(Library, capture_begin)},
    {"_ZN2at4cuda9CUDAGraph11capture_endEv", offsetof(Library, capture_end)},
    {"_ZN2at4cuda9CUDAGraph11instantiateEv", offsetof(Library, instantiate)},
    {"_ZN2at4cuda9CUDAGraph14raw_cuda_graphEv", offsetof(Library, raw_cuda_graph)},
    {"_ZN2at4cuda9CUDAGraph6replayEv", offsetof(Library, replay)},
    {"cudaStreamBeginCapture", offsetof(Library, begin_capture)},
    {"cudaStreamEndCapture", offsetof(Library, end_capture)},
    {"cudaGraphDestroy", offsetof(Library, graph_destroy)},
    {"cudaGraphGetNodes", offsetof(Library, graph_nodes)},
    {"cudaGetLastError", offsetof(Library, last_error)},
};

const Library& library() {
  static const Library found = [] {
    Library made{};
    for (const Name& name : NAMES) {
      void* address = runtime_function<void*>(name.text);
      TORCH_CHECK(address != nullptr, "libtorch's CUDA library has no ", name.text);
      *reinterpret_cast<void**>(reinterpret_cast<char*>(&made) + name.member) = address;
    }
    return made;
  }();
  return found;
}

// A stream that graphs are captured on: not the default one, which cannot be captured.
struct Side {
  c10::Stream stream;
  void* handle;
  // Something to write to.
  at::Tensor token;
};

// Room for an at::cuda::CUDAGraph, which takes 104 bytes in this release (its last member lies at 97).
struct alignas(alignof(std::max_align_t)) Room {
  std::byte bytes[512];
};

struct Graph {
  const Side* side;
  std::unique_ptr<Room> room;
  bool is_capturing;
};

// Lets go of an object that never began to capture or has ended its capture.
void destroy(Graph& graph) {
  if (graph.room) library().destruct(graph.room.get());
  graph.room.reset();
}

// Ends a capture that failed. libtorch ends its part only where CUDA's capture ends well, and a spoiled one does not: that
// one is ended without it, and an empty one in its place with it. Where even that fails the object stays, since the
// allocator goes on to ask it.
void abandon(Graph& graph) noexcept {
  graph.is_capturing = false;
  try {
    const auto& cuda = library();
    const c10::StreamGuard here(graph.side->stream);
    void* spoiled = nullptr;
    cuda.end_capture(graph.side->handle, &spoiled);
    if (spoiled != nullptr) cuda.graph_destroy(spoiled);
    // A refusal is remembered and would be taken for that of the next kernel.
    cuda.last_error();
    TORCH_CHECK(cuda.begin_capture(graph.side->handle, CAPTURE_MODE_THREAD_LOCAL) == SUCCESS);
    graph.side->token.zero_();
    cuda.capture_end(graph.room.get());
    destroy(graph);
  } catch (...) {
    static_cast<void>(graph.room.release());
  }
}

}  // namespace

extern "C" {

// Whether every name is there, once the library is loaded.
int32_t ck_graph_find() {
  return ckpt::guarded([] { library(); });
}

// A new stream for steps that are captured; CK_REFUSED where a name is missing.
int32_t ck_graph_side(int64_t device, void** side) {
  return ckpt::guarded([&] {
    library();
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    const c10::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    const c10::Stream stream = guard.getStreamFromGlobalPool(place);
    TORCH_CHECK(stream != guard.getDefaultStream(place), "there is no stream beside the default one");
    const c10::StreamGuard here(stream);
    auto token = at::zeros({1}, at::TensorOptions().device(place));
    *side = new Side{stream, guard.getStreamNativeHandle(stream), std::move(token)};
  });
}

void ck_graph_side_drop(void* side) { delete static_cast<Side*>(side); }

// From here on what this thread sends to the device goes to the stream, until `ck_graph_leave`.
int32_t ck_graph_enter(const void* side, void** guard) {
  return ckpt::guarded([&] { *guard = new c10::StreamGuard(static_cast<const Side*>(side)->stream); });
}

void ck_graph_leave(void* guard) { delete static_cast<c10::StreamGuard*>(guard); }

// Begins to write down what this thread sends to the stream, which is the current one; nothing of it is done. Memory is new
// and stays the graph's own. The device is idle.
int32_t ck_graph_begin(const void* side, void** made) {
  return ckpt::guarded([&] {
    const auto& cuda = library();
    auto graph = std::make_unique<Graph>();
    graph->side = static_cast<const Side*>(side);
    // What is free belongs to others from now on, and cannot be given back while a capture runs.
    at::getDeviceAllocator(at::kCUDA)->emptyCache();
    graph->room = std::make_unique<Room>();
    cuda.construct(graph->room.get(), /*keep_graph=*/true);
    try {
      cuda.capture_begin(graph->room.get(), c10::MempoolId_t{0, 0}, CAPTURE_MODE_THREAD_LOCAL);
    } catch (...) {
      abandon(*graph);
      throw;
    }
    graph->is_capturing = true;
    *made = graph.release();
  });
}

// Ends the capture and makes it ready to be sent. `nodes`: how many kernels and copies it holds.
int32_t ck_graph_end(void* made, int64_t* nodes) {
  return ckpt::guarded([&] {
    const auto& cuda = library();
    auto& graph = *static_cast<Graph*>(made);
    try {
      cuda.capture_end(graph.room.get());
    } catch (...) {
      abandon(graph);
      throw;
    }
    graph.is_capturing = false;
    size_t count = 0;
    const int code = cuda.graph_nodes(cuda.raw_cuda_graph(graph.room.get()), nullptr, &count);
    TORCH_CHECK(code == SUCCESS && count > 0, "the step sent nothing to the stream that is captured");
    cuda.instantiate(graph.room.get());
    *nodes = static_cast<int64_t>(count);
  });
}

// Sends it to the stream. The host does not wait.
int32_t ck_graph_replay(void* made) {
  return ckpt::guarded([&] {
    auto& graph = *static_cast<Graph*>(made);
    const c10::StreamGuard here(graph.side->stream);
    library().replay(graph.room.get());
  });
}

// Whatever became of it: a capture that runs is abandoned. The device has done what it was sent.
void ck_graph_drop(void* made) {
  const std::unique_ptr<Graph> graph(static_cast<Graph*>(made));
  if (graph->is_capturing) {
    abandon(*graph);
    return;
  }
  destroy(*graph);
  // What instantiation refused is remembered too.
  library().last_error();
}
}
