// The C interface between these sources and the Rust side. `sys.rs` mirrors it: change both together.
//
// Rules: no function throws. A function that can fail returns a Status and leaves the reason in ck_last_message() of the same
// thread. A `void*` tensor is an `at::Tensor*`, lent when it is an argument and owned by the caller when it is a result. Other
// returned memory is freed with ck_free.
#pragma once
#include <cstddef>
#include <cstdint>

enum Status : int32_t { CK_OK = 0, CK_REFUSED = 1, CK_OUT_OF_MEMORY = 2 };

enum Tag : int32_t {
  CK_NONE = 0,
  CK_TENSOR = 1,
  CK_INT = 2,
  CK_DOUBLE = 3,
  CK_BOOL = 4,
  CK_INTS = 5,
  CK_DOUBLES = 6,
  CK_BOOLS = 7,
  CK_STR = 8,
  CK_TENSORS = 9,
  CK_OPT_TENSORS = 10,
  CK_DEVICE = 11,
  CK_GENERATOR = 12,
  CK_NO_TENSOR = 13,
};

// One argument or result. `len` counts the elements behind `p`; for a device it is the index and `i` the type.
struct CkValue {
  int32_t tag;
  int64_t len;
  union {
    int64_t i;
    double d;
    const void* p;
  };
};

struct CkOp;
struct CkArena;

// A range of an arena for one block of `bytes`. A negative `bytes` admits any blocks of at least `-bytes`.
struct CkPlace {
  int64_t from;
  int64_t to;
  int64_t bytes;
};

// A tile of attention: some queries of some heads, and the keys that they may see. All tensors are lent and have three axes.
// Operands: `q` [h, r, d], `k` [h, n, d], `v` [h, n, e] (float32; a gradient reads `v` for dq and dk only), `bias` [h, r, n]
// (float32 or bool) or null. Buffers of float32: `scores` [h, r, n], `sums` [h, r, 1] for the result only, `result` [h, r, e]
// ([h, r, d] for a gradient), `q_copy` [h, r, d] if `q` has another type, else null. Row i sees the keys from `first` + i
// (INT64_MIN: all) to `end` + i (INT64_MAX: all).
struct CkTile {
  const void *q, *k, *v, *bias;
  const void *scores, *sums, *result, *q_copy;
  double scale, softcap;
  int64_t first, end;
  int32_t empty_is_nan;
};

// The contribution of a tile to the gradients; null for gradients that are not wanted. `dy` is [h, r, e]. `dq` [h, r, d] is
// written; `dk` and `dv` (float32, shaped as k and v) are added to. Buffers of float32: `dy_copy` like `q_copy`, `slopes`
// [h, r, n] for dq and dk, `capped` [h, r, n] for capped scores.
struct CkTileGradients {
  const void *dy, *dy_copy, *slopes, *capped;
  const void *dq, *dk, *dv;
};

extern "C" {
const char* ck_last_message();
void ck_free(void* memory);
const char* ck_version_built_with();
int32_t ck_version_loaded(char** version);

int32_t ck_op_find(const char* name, const char* overload, CkOp** op, char** schema, int64_t* returns);
// If `results` is null, the operator's results are dropped and `result_count` is not written.
int32_t ck_op_call(const CkOp* op, const CkValue* args, int64_t arg_count, CkValue* results, int64_t capacity,
                   int64_t* result_count);

int32_t ck_gemm_is_ours();
int32_t ck_gemm(const void* a, const void* b, const void* c, double alpha, double beta, const void* out);
// Available only if ck_gemm_is_ours. `lse` (float32, [h, r, 1]) may be null.
int32_t ck_attend(const CkTile* tile, const void* y, const void* lse);
int32_t ck_attend_back(const CkTile* tile, const CkTileGradients* gradients);

void ck_memory_install();
void ck_memory_stats(int64_t* live_bytes, int64_t* peak_bytes, int64_t* allocations);
void ck_memory_reset_peak();
void ck_memory_scratch(int32_t begin);
int64_t ck_memory_workspace_bytes();

// Reserves an arena. It is released once `ck_arena_free` was called and its last block is freed.
int32_t ck_arena_new(int64_t bytes, CkArena** arena);
void ck_arena_free(CkArena* arena);
// Counts the blocks allocated so far.
int64_t ck_arena_placed(CkArena* arena);
// Directs this thread's allocations to the places that fit, until `ck_arena_withdraw`. The places are lent.
void ck_arena_offer(CkArena* arena, const CkPlace* places, int64_t count);
void ck_arena_withdraw();

int32_t ck_tensor_borrow(const void* data, const int64_t* dims, int64_t rank, int32_t scalar_type, void* owner,
                         void (*drop_owner)(void*), void** tensor);
int32_t ck_tensor_copy(const void* data, int64_t len, const int64_t* dims, int64_t rank, int32_t scalar_type,
                       void** tensor);
int32_t ck_tensor_empty(const int64_t* dims, int64_t rank, int32_t scalar_type, void** tensor);
int32_t ck_tensor_view(const void* tensor, const int64_t* dims, const int64_t* strides, int64_t rank, void** view);
int32_t ck_tensor_bytes(const void* tensor, int32_t for_writing, void** data, int64_t* len);
int32_t ck_tensor_storage(const void* tensor, int64_t* id);

int32_t ck_cuda_load(int64_t* devices);
int32_t ck_cuda_prepare(int64_t device);
void ck_cuda_refuse_nondeterministic(int32_t refuse);
int32_t ck_cuda_synchronize(int64_t device);
int32_t ck_cuda_memory_stats(int64_t device, int64_t* live, int64_t* peak, int64_t* requested_live,
                             int64_t* requested_peak);
int32_t ck_cuda_memory_reset_peak(int64_t device);
int32_t ck_cuda_memory_info(int64_t device, int64_t* free_bytes, int64_t* total_bytes);

int32_t ck_graph_find();
int32_t ck_graph_stream(int64_t device, void** capture_stream);
void ck_graph_stream_drop(void* capture_stream);
int32_t ck_graph_enter(const void* capture_stream, void** guard);
void ck_graph_leave(void* guard);
int32_t ck_graph_begin(const void* capture_stream, void** made);
int32_t ck_graph_end(void* made, int64_t* nodes);
int32_t ck_graph_replay(void* made);
void ck_graph_drop(void* made);

int32_t ck_generator_new(uint64_t seed, void** generator);
int32_t ck_generator_clone(void* generator, void** clone);
void ck_generator_free(void* generator);
}
