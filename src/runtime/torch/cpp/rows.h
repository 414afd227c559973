// Row operations of attention tiles: type conversion, softmax and its gradient, sixteen elements at a time. The order of a
// sum depends only on the length of the row.
#pragma once
#include <c10/core/ScalarType.h>

#include "gemm.h"

#if defined(__x86_64__)

namespace ckpt {

// A tensor of three axes; strides in elements.
struct Cube {
  char* data;
  at::ScalarType type;
  int64_t heads, rows, columns;
  int64_t head, row, column;

  char* at(int64_t h, int64_t i, int64_t j = 0) const {
    const int64_t bytes = type == at::kFloat ? 4 : type == at::kBool ? 1 : 2;
    return data + (h * head + i * row + j * column) * bytes;
  }
  float* floats(int64_t h, int64_t i = 0) const { return reinterpret_cast<float*>(at(h, i)); }
  // One head of float32.
  Matrix matrix(int64_t h) const { return {floats(h), row, column}; }
  bool is_null() const { return data == nullptr; }
};

// Reads a row as float32.
void read_row(const Cube& x, int64_t h, int64_t i, float* to);

// Writes a row of float32 in the type of `y`.
void write_row(const Cube& y, int64_t h, int64_t i, const float* from);

// scores = cap·tanh(scores). Stores the tanh in `kept` unless that is null.
void cap_row(float* scores, float* kept, int64_t n, float cap);

// Adds a row of a bias, or sets scores to −∞ where a mask is false.
void apply_row(const Cube& bias, int64_t h, int64_t i, float* scores, int64_t n);

struct Softmax {
  float top, sum;
};

// Replaces scores `first` to `end` of `n` by exp(score − largest score) and the others by 0. The largest score is clamped to
// the lowest finite number, so a query that sees no key has weights of 0 and not NaN.
Softmax exponentials(float* scores, int64_t first, int64_t end, int64_t n);

void divide(float* x, int64_t n, float divisor);

// slopes = p·(slopes − Σ p·slopes + of_lse), times 1 − tanh² for capped scores. `capped` is null for others. `of_lse` is the
// cotangent of the row's log-sum-exp.
void slopes_of_scores(float* slopes, const float* p, const float* capped, float of_lse, int64_t n);

}  // namespace ckpt
#endif
