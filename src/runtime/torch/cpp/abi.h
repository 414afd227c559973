// The types of the C interface between these sources and the Rust side. The functions are the `extern "C"` ones in the
// sources. `sys.rs` declares all of them: change both together.
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

// The contribution of a tile to the gradients; null for gradients that are not wanted. `dy` is [h, r, e], `dlse` float32
// [h, r, 1] or null. `dq` [h, r, d] is written; `dk` and `dv` (float32, shaped as k and v) are added to. Buffers of float32:
// `dy_copy` like `q_copy`, `slopes` [h, r, n] for dq and dk, `capped` [h, r, n] for capped scores.
struct CkTileGradients {
  const void *dy, *dlse, *dy_copy, *slopes, *capped;
  const void *dq, *dk, *dv;
};
