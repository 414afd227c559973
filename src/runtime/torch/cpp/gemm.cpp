// Products of float32 matrices for processors with AVX-512 that are not Intel's. There MKL runs its slower AVX2 code.
//
// Panels of both operands are packed into blocks that fit the caches, and a small kernel multiplies a panel of `a` by one
// of `b` in registers (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). Operands may have
// any strides, because packing reads them; no operand is copied whole. The bits of an element depend only on its row, its
// column and the inner size, not on layout or number of threads. Each thread computes rectangles of the result, on
// libtorch's OpenMP threads.
#include "gemm.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "abi.h"
#include "bytes.h"
#include "memory.h"
#include "status.h"
#include "team.h"

#if defined(__x86_64__)

namespace {

using ckpt::first_lanes;
using ckpt::kRows;
using ckpt::Matrix;
using ckpt::Product;

// Columns of the kernel's rectangle. With kRows rows, 24 of the 32 registers hold sums.
constexpr int64_t kColumns = 32;
// A block's inner size, columns of `b` (they stay in the L2 cache beside the lines fetched for the next block, one panel of
// `a` in L1), and rows of `a`.
constexpr int64_t kInner = 384;
constexpr int64_t kBlockColumns = 192;
constexpr int64_t kBlockRows = 128 * kRows;
// With at most this many rows, contiguous rows of `b` are read in place, because packing them costs more than it gains.
constexpr int64_t kFewRows = 4 * kRows;

// `count` products of one shape. The other fields are the distances between an operand's matrices.
struct Batch {
  Product first;
  int64_t count, a, b, c, out;
  Product at(int64_t i) const {
    Product p = first;
    p.a.data += i * a, p.b.data += i * b, p.out += i * out;
    if (p.c.data != nullptr) p.c.data += i * c;
    return p;
  }
};

// A thread's packed blocks, kept between calls.
struct Blocks {
  float* memory = nullptr;
  static constexpr size_t kBytes = sizeof(float) * kInner * (kBlockRows + kBlockColumns);
  float* a() {
    if (memory == nullptr) {
      void* fresh = nullptr;
      TORCH_CHECK_WITH(OutOfMemoryError, posix_memalign(&fresh, 64, kBytes) == 0, "cannot allocate ", kBytes, " bytes");
      memory = static_cast<float*>(fresh);
      ckpt::count_workspace(static_cast<int64_t>(kBytes));
    }
    return memory;
  }
  float* b() { return a() + kInner * kBlockRows; }
  ~Blocks() {
    if (memory == nullptr) return;
    std::free(memory);
    ckpt::count_workspace(-static_cast<int64_t>(kBytes));
  }
};
thread_local Blocks blocks;

// Transposes `rows` (at most 16) rows of 16 elements.
CKPT_AVX512 void transpose(const float* from, int64_t from_row, int64_t rows, float* to, int64_t to_row) {
  __m512 x[16], y[16];
  for (int r = 0; r < 16; ++r) x[r] = r < rows ? _mm512_loadu_ps(from + r * from_row) : _mm512_setzero_ps();
  for (int r = 0; r < 16; r += 2) {
    y[r] = _mm512_unpacklo_ps(x[r], x[r + 1]);
    y[r + 1] = _mm512_unpackhi_ps(x[r], x[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    x[r] = _mm512_shuffle_ps(y[r], y[r + 2], 0x44);
    x[r + 1] = _mm512_shuffle_ps(y[r], y[r + 2], 0xee);
    x[r + 2] = _mm512_shuffle_ps(y[r + 1], y[r + 3], 0x44);
    x[r + 3] = _mm512_shuffle_ps(y[r + 1], y[r + 3], 0xee);
  }
  for (int r = 0; r < 4; ++r) {
    const __m512 low = _mm512_shuffle_f32x4(x[r], x[r + 4], 0x88), high = _mm512_shuffle_f32x4(x[r], x[r + 4], 0xdd);
    const __m512 low2 = _mm512_shuffle_f32x4(x[r + 8], x[r + 12], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(x[r + 8], x[r + 12], 0xdd);
    const __mmask16 mask = first_lanes(rows);
    _mm512_mask_storeu_ps(to + r * to_row, mask, _mm512_shuffle_f32x4(low, low2, 0x88));
    _mm512_mask_storeu_ps(to + (r + 4) * to_row, mask, _mm512_shuffle_f32x4(high, high2, 0x88));
    _mm512_mask_storeu_ps(to + (r + 8) * to_row, mask, _mm512_shuffle_f32x4(low, low2, 0xdd));
    _mm512_mask_storeu_ps(to + (r + 12) * to_row, mask, _mm512_shuffle_f32x4(high, high2, 0xdd));
  }
}

// Packs rows into consecutive panels of `kRows` rows, each k-major. The last panel may have fewer rows.
CKPT_AVX512 void pack_rows(const Matrix& a, int64_t i0, int64_t rows, int64_t k0, int64_t inner, float* to) {
  for (int64_t i = 0; i < rows; i += kRows) {
    const int64_t height = std::min(kRows, rows - i);
    const float* from = a.at(i0 + i, k0);
    int64_t k = 0;
    if (a.column == 1) {
      for (; k + 16 <= inner; k += 16) transpose(from + k, a.row, height, to + k * height, height);
    } else if (a.row == 1) {
      const __mmask16 mask = first_lanes(height);
      for (; k < inner; ++k) {
        _mm512_mask_storeu_ps(to + k * height, mask, _mm512_maskz_loadu_ps(mask, from + k * a.column));
      }
    }
    for (; k < inner; ++k) {
      for (int64_t r = 0; r < height; ++r) to[k * height + r] = from[r * a.row + k * a.column];
    }
    to += height * inner;
  }
}

// Packs columns into consecutive k-major panels of `kColumns` columns, the last one padded with zeros.
CKPT_AVX512 void pack_columns(const Matrix& b, int64_t k0, int64_t inner, int64_t j0, int64_t columns, float* to) {
  if (b.column == 1) {
    // Row by row, because each row may lie on another page.
    for (int64_t k = 0; k < inner; ++k) {
      const float* from = b.at(k0 + k, j0);
      float* panel = to + k * kColumns;
      for (int64_t j = 0; j < columns; j += kColumns, panel += kColumns * inner) {
        _mm512_storeu_ps(panel, _mm512_maskz_loadu_ps(first_lanes(columns - j), from + j));
        _mm512_storeu_ps(panel + 16, _mm512_maskz_loadu_ps(first_lanes(columns - j - 16), from + j + 16));
      }
    }
    return;
  }
  for (int64_t j = 0; j < columns; j += kColumns, to += kColumns * inner) {
    const int64_t width = std::min(kColumns, columns - j);
    const float* from = b.at(k0, j0 + j);
    int64_t k = 0;
    if (b.row == 1 && width == kColumns) {
      for (; k + 16 <= inner; k += 16) {
        transpose(from + k, b.column, 16, to + k * kColumns, kColumns);
        transpose(from + k + 16 * b.column, b.column, 16, to + k * kColumns + 16, kColumns);
      }
    }
    for (; k < inner; ++k) {
      for (int64_t q = 0; q < kColumns; ++q) to[k * kColumns + q] = q < width ? from[k * b.row + q * b.column] : 0.0f;
    }
  }
}

// Cache lines that packing a block will read. The kernel fetches them while it computes, because otherwise packing waits for
// memory. The last line of a row is left out if the row does not start on a line.
class Prefetch {
 public:
  // Nothing to fetch.
  Prefetch() = default;
  Prefetch(const Matrix& b, int64_t k0, int64_t inner, int64_t j0, int64_t columns) : at_(b.at(k0, j0)) {
    if (b.column == 1) {
      rows_ = inner, stride_ = b.row, row_end_ = columns;
    } else if (b.row == 1) {
      rows_ = columns, stride_ = b.column, row_end_ = inner;
    }
  }
  CKPT_AVX512 void next() {
    if (rows_ == 0) return;
    _mm_prefetch(reinterpret_cast<const char*>(at_ + in_row_), _MM_HINT_T1);
    in_row_ += 16;
    if (in_row_ >= row_end_) in_row_ = 0, at_ += stride_, --rows_;
  }

 private:
  const float* at_ = nullptr;
  int64_t rows_ = 0, stride_ = 0, row_end_ = 0, in_row_ = 0;
};

// How a sum becomes an element of `out`: alpha·sum, plus beta times the term of `c`.
struct Epilogue {
  float alpha, beta;
  const float* c;  // null: nothing is added
  int64_t c_row, c_column;
  float* out;
  int64_t out_row;
  int64_t columns;
};

CKPT_AVX512 inline void finish(const Epilogue& e, int64_t i, int64_t first, __m512 sum) {
  const __mmask16 mask = first_lanes(e.columns - first);
  if (mask == 0) return;
  sum = _mm512_mul_ps(sum, _mm512_set1_ps(e.alpha));
  if (e.c != nullptr) {
    const float* c = e.c + i * e.c_row + first * e.c_column;
    __m512 term;
    if (e.c_column == 1) {
      term = _mm512_maskz_loadu_ps(mask, c);
    } else if (e.c_column == 0) {
      term = _mm512_set1_ps(*c);
    } else {
      alignas(64) float gathered[16] = {};
      for (int64_t j = 0; j < 16 && first + j < e.columns; ++j) gathered[j] = c[j * e.c_column];
      term = _mm512_load_ps(gathered);
    }
    sum = _mm512_fmadd_ps(term, _mm512_set1_ps(e.beta), sum);
  }
  _mm512_mask_storeu_ps(e.out + i * e.out_row + first, mask, sum);
}

// Steps of the kernel's loop for each line that it fetches.
constexpr int64_t kStepsPerLine = 8;

// Multiplies `Rows` rows of a panel by a panel of columns whose rows are `b_row` apart.
template <int Rows>
CKPT_AVX512 void multiply(const float* a, const float* b, int64_t b_row, int64_t inner, const Epilogue& e,
                          Prefetch& prefetch) {
  __m512 sums[Rows][2];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inner; ++k) {
    if (k % kStepsPerLine == 0) prefetch.next();
    const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const __m512 x = _mm512_set1_ps(a[r]);
      sums[r][0] = _mm512_fmadd_ps(x, b0, sums[r][0]);
      sums[r][1] = _mm512_fmadd_ps(x, b1, sums[r][1]);
    }
    a += Rows;
    b += b_row;
  }
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    finish(e, r, 0, sums[r][0]);
    finish(e, r, 16, sums[r][1]);
  }
}

using Kernel = void (*)(const float*, const float*, int64_t, int64_t, const Epilogue&, Prefetch&);
constexpr Kernel kKernels[kRows + 1] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>, multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
};

}  // namespace

namespace ckpt {

void multiply_rectangle(const Product& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  float* packed_a = blocks.a();
  float* packed_b = blocks.b();
  const bool reads_b = p.b.column == 1 && i1 - i0 <= kFewRows;
  for (int64_t k0 = 0; k0 < p.k; k0 += kInner) {
    const int64_t inner = std::min(kInner, p.k - k0);
    for (int64_t i = i0; i < i1; i += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, i1 - i);
      pack_rows(p.a, i, rows, k0, inner, packed_a);
      for (int64_t j = j0; j < j1; j += kBlockColumns) {
        const int64_t columns = std::min(kBlockColumns, j1 - j);
        // Few rows read whole panels in place. A narrower last panel is packed, for its padding.
        const int64_t in_place = reads_b ? columns / kColumns * kColumns : 0;
        pack_columns(p.b, k0, inner, j + in_place, columns - in_place, packed_b + in_place * inner);
        Prefetch prefetch;
        if (!reads_b) {
          const bool is_last = j + kBlockColumns >= j1;
          const int64_t next_j = is_last ? j0 : j + kBlockColumns;
          const int64_t next_k = is_last && i + kBlockRows >= i1 ? k0 + kInner : k0;
          if (next_k < p.k) {
            prefetch = {p.b, next_k, std::min(kInner, p.k - next_k), next_j, std::min(kBlockColumns, j1 - next_j)};
          }
        }
        for (int64_t r = 0; r < rows; r += kRows) {
          const int64_t height = std::min(kRows, rows - r);
          for (int64_t q = 0; q < columns; q += kColumns) {
            const int64_t width = std::min(kColumns, columns - q);
            float* out = p.out + (i + r) * p.out_row + j + q;
            Epilogue e{p.alpha, p.beta, nullptr, p.c.row, p.c.column, out, p.out_row, width};
            if (k0 > 0) {
              e.beta = 1.0f, e.c = out, e.c_row = p.out_row, e.c_column = 1;
            } else if (p.c.data != nullptr) {
              e.c = p.c.at(i + r, j + q);
            }
            const bool direct = q < in_place;
            const float* b = direct ? p.b.at(k0, j + q) : packed_b + q * inner;
            kKernels[height](packed_a + r * inner, b, direct ? p.b.row : kColumns, inner, e, prefetch);
          }
        }
      }
    }
  }
}

}  // namespace ckpt

namespace {

void multiply_all(const Batch& batch) {
  const Product& p = batch.first;
  const int64_t threads = ckpt::threads_for(batch.count * p.m * p.n * p.k);
  // Threads take whole products if these divide evenly, else rectangles of each product.
  const int64_t each = batch.count % threads == 0 ? 1 : threads;
  int64_t down = 1, across = each;
  // Chooses the split that packs the fewest elements.
  for (int64_t rows = 1; rows <= each; ++rows) {
    if (each % rows == 0 && p.m / rows + p.n / (each / rows) < p.m / down + p.n / across) {
      down = rows, across = each / rows;
    }
  }
  ckpt::share_out(threads, batch.count * each, [&](int64_t unit) {
    // Bounds are whole panels, so the bits do not depend on the number of threads.
    const auto cut = [](int64_t size, int64_t panel, int64_t i, int64_t of) {
      const int64_t panels = (size + panel - 1) / panel;
      return std::min(size, panels * i / of * panel);
    };
    const int64_t at = unit % each, i = at / across, j = at % across;
    const int64_t i0 = cut(p.m, kRows, i, down), i1 = cut(p.m, kRows, i + 1, down);
    const int64_t j0 = cut(p.n, kColumns, j, across), j1 = cut(p.n, kColumns, j + 1, across);
    if (i0 < i1 && j0 < j1) ckpt::multiply_rectangle(batch.at(unit / each), i0, i1, j0, j1);
  });
}

// Whether `x` is a matrix or a batch of matrices that products can read.
bool is_readable(const at::Tensor& x, int64_t rank) {
  return x.defined() && x.dim() == rank && x.scalar_type() == at::kFloat && x.is_cpu() && x.layout() == at::kStrided;
}

Matrix matrix(const at::Tensor& x) { return {x.const_data_ptr<float>(), x.stride(-2), x.stride(-1)}; }

}  // namespace

extern "C" {

int32_t ck_gemm_is_ours() {
  static const bool ours = __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel");
  return ours ? 1 : 0;
}

// out = alpha a b + beta c, for matrices or batches of matrices. `c` may be null; it has the result's dims, and strides of 0
// broadcast it.
int32_t ck_gemm(const void* a, const void* b, const void* c, double alpha, double beta, const void* out) {
  return ckpt::guarded([&] {
    const auto& x = *static_cast<const at::Tensor*>(a);
    const auto& y = *static_cast<const at::Tensor*>(b);
    const auto& to = *static_cast<const at::Tensor*>(out);
    const int64_t rank = to.dim();
    TORCH_CHECK((rank == 2 || rank == 3) && is_readable(x, rank) && is_readable(y, rank) && is_readable(to, rank),
                "a product takes float32 matrices on the CPU");
    Product p{};
    p.m = to.size(-2), p.n = to.size(-1), p.k = x.size(-1);
    TORCH_CHECK(x.size(-2) == p.m && y.size(-2) == p.k && y.size(-1) == p.n, "the sizes of a product do not fit");
    TORCH_CHECK(to.stride(-1) == 1 || p.n <= 1, "the rows of a product are not contiguous");
    TORCH_CHECK(p.k > 0, "a product over nothing");
    TORCH_CHECK(!ckpt::is_borrowed(to), "the tensor's bytes are lent and must not be written");
    p.a = matrix(x), p.b = matrix(y);
    p.alpha = static_cast<float>(alpha), p.beta = static_cast<float>(beta);
    p.out = static_cast<float*>(to.data_ptr());
    p.out_row = to.stride(-2);
    Batch batch{p, 1, 0, 0, 0, 0};
    if (rank == 3) {
      batch.count = to.size(0);
      TORCH_CHECK(x.size(0) == batch.count && y.size(0) == batch.count, "the batches of a product do not fit");
      batch.a = x.stride(0), batch.b = y.stride(0), batch.out = to.stride(0);
    }
    if (c != nullptr && beta != 0.0) {
      const auto& z = *static_cast<const at::Tensor*>(c);
      TORCH_CHECK(is_readable(z, rank) && z.sizes() == to.sizes(), "the summand of a product does not fit");
      batch.first.c = matrix(z);
      batch.c = rank == 3 ? z.stride(0) : 0;
    }
    if (batch.count > 0 && p.m > 0 && p.n > 0) multiply_all(batch);
  });
}
}

#else

extern "C" {
int32_t ck_gemm_is_ours() { return 0; }
int32_t ck_gemm(const void*, const void*, const void*, double, double, const void*) {
  return ckpt::report(CK_REFUSED, "this processor has no products of ours");
}
}

#endif
