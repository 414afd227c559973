// Our own products of float32 matrices, for the code that is built on them. Available only if `ck_gemm_is_ours`.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <algorithm>
#define CKPT_AVX512 __attribute__((target("avx512f")))

namespace ckpt {

struct Matrix {
  const float* data;
  int64_t row, column;  // strides
  const float* at(int64_t i, int64_t j) const { return data + i * row + j * column; }
  Matrix transposed() const { return {data, column, row}; }
};

// out [m, n] = alpha a [m, k] b [k, n] + beta c; rows of `out` are contiguous.
struct Product {
  int64_t m, n, k;
  Matrix a, b, c;  // `c.data` may be null, or `out`
  float alpha, beta;
  float* out;
  int64_t out_row;
};

// Rows of the result that the kernel computes at once. Rectangle bounds should be multiples of this.
constexpr int64_t kRows = 12;

// Computes rows i0 to i1 and columns j0 to j1 of the result in this thread. The bits do not depend on the bounds. Throws
// OutOfMemoryError.
void multiply_rectangle(const Product& product, int64_t i0, int64_t i1, int64_t j0, int64_t j1);

inline __mmask16 first_lanes(int64_t n) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(n, 0, 16)) - 1);
}

}  // namespace ckpt
#endif
