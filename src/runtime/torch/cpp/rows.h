// Rows of a tile of attention: element types, softmax and its gradient, sixteen elements at a time. Sums are made in one
// order, which follows from the length of a row alone.
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

// A row as float32.
void read_row(const Cube& x, int64_t h, int64_t i, float* to);

// A row of float32, in the type of `y`.
void write_row(const Cube& y, int64_t h, int64_t i, const float* from);

// scores = cap·tanh(scores); the tanh is kept in `kept` if that is not null.
void cap_row(float* scores, float* kept, int64_t n, float cap);

// Adds a row of a bias, or hides what is false.
void apply_row(const Cube& bias, int64_t h, int64_t i, float* scores, int64_t n);

struct Softmax {
  float top, sum;
};

// exp(score − largest score) in place, for scores `first` to `end` of `n`; 0 for the others. The largest is at least the
// lowest number, so that the weights of a query that sees no key are 0 and not NaN.
Softmax exponentials(float* scores, int64_t first, int64_t end, int64_t n);

void divide(float* x, int64_t n, float divisor);

// slopes = p·(slopes − Σ p·slopes), and times 1 − tanh² where scores were capped, else `capped` is null.
void slopes_of_scores(float* slopes, const float* p, const float* capped, int64_t n);

}  // namespace ckpt
#endif
