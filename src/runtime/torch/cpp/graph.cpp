// CUDA graphs: captures the work that a step submits to a stream and replays it in one call.
//
// libtorch's own class is used, because it keeps a private memory pool for each graph. The class is in libtorch's CUDA
// library, which is not linked and whose headers need CUDA's. So its members are called through their mangled names, with the
// object as first argument, as in the C++ ABI of Linux. `version.cpp` ensures that the library is of the release that these
// sources were written for.
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
// Other threads may use the device during a capture.
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

// A stream for captures; the default stream cannot be captured.
struct CaptureStream {
  c10::Stream stream;
  void* handle;
  // The target of a dummy kernel.
  at::Tensor token;
};

// Room for an at::cuda::CUDAGraph, which takes 104 bytes in this release (its last member lies at 97).
struct alignas(alignof(std::max_align_t)) Room {
  std::byte bytes[512];
};

struct Graph {
  const CaptureStream* stream;
  std::unique_ptr<Room> room;
  bool is_capturing;
};

// Destroys a graph that is not capturing.
void destroy(Graph& graph) {
  if (graph.room) library().destruct(graph.room.get());
  graph.room.reset();
}

// Ends a failed capture. libtorch cleans up only if CUDA's capture ends without error, and a failed capture does not. So this
// ends the failed capture through CUDA, then captures one dummy kernel and ends that capture through libtorch. If this fails
// too, the object is leaked, because the allocator still refers to it.
void abandon(Graph& graph) noexcept {
  graph.is_capturing = false;
  try {
    const auto& cuda = library();
    const c10::StreamGuard here(graph.stream->stream);
    void* spoiled = nullptr;
    cuda.end_capture(graph.stream->handle, &spoiled);
    if (spoiled != nullptr) cuda.graph_destroy(spoiled);
    // Clears the error, which would otherwise be reported for the next kernel.
    cuda.last_error();
    TORCH_CHECK(cuda.begin_capture(graph.stream->handle, CAPTURE_MODE_THREAD_LOCAL) == SUCCESS);
    graph.stream->token.zero_();
    cuda.capture_end(graph.room.get());
    destroy(graph);
  } catch (...) {
    static_cast<void>(graph.room.release());
  }
}

}  // namespace

extern "C" {

// Checks that the loaded library has every name.
int32_t ck_graph_find() {
  return ckpt::guarded([] { library(); });
}

// Creates a stream for captures. Returns CK_REFUSED if a name is missing.
int32_t ck_graph_stream(int64_t device, void** capture_stream) {
  return ckpt::guarded([&] {
    library();
    const c10::impl::VirtualGuardImpl guard(at::kCUDA);
    const c10::Device place(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    const c10::Stream stream = guard.getStreamFromGlobalPool(place);
    TORCH_CHECK(stream != guard.getDefaultStream(place), "there is no stream beside the default one");
    const c10::StreamGuard here(stream);
    auto token = at::zeros({1}, at::TensorOptions().device(place));
    *capture_stream = new CaptureStream{stream, guard.getStreamNativeHandle(stream), std::move(token)};
  });
}

void ck_graph_stream_drop(void* capture_stream) { delete static_cast<CaptureStream*>(capture_stream); }

// Makes the stream current for this thread until `ck_graph_leave`.
int32_t ck_graph_enter(const void* capture_stream, void** guard) {
  return ckpt::guarded([&] { *guard = new c10::StreamGuard(static_cast<const CaptureStream*>(capture_stream)->stream); });
}

void ck_graph_leave(void* guard) { delete static_cast<c10::StreamGuard*>(guard); }

// Starts to capture the work that this thread submits to the stream, which must be current. Captured work is not executed.
// Its memory comes from a new pool of the graph. The device must be idle.
int32_t ck_graph_begin(const void* capture_stream, void** made) {
  return ckpt::guarded([&] {
    const auto& cuda = library();
    auto graph = std::make_unique<Graph>();
    graph->stream = static_cast<const CaptureStream*>(capture_stream);
    // The graph cannot use cached free blocks, and they cannot be released during a capture.
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

// Ends the capture and instantiates the graph. `nodes` counts its kernels and copies.
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

// Submits the graph to its stream. The host does not wait.
int32_t ck_graph_replay(void* made) {
  return ckpt::guarded([&] {
    auto& graph = *static_cast<Graph*>(made);
    const c10::StreamGuard here(graph.stream->stream);
    library().replay(graph.room.get());
  });
}

// Frees a graph in any state; a running capture is abandoned. The device must have finished the graph's work.
void ck_graph_drop(void* made) {
  const std::unique_ptr<Graph> graph(static_cast<Graph*>(made));
  if (graph->is_capturing) {
    abandon(*graph);
    return;
  }
  destroy(*graph);
  // Clears an error of the instantiation.
  library().last_error();
}
}
