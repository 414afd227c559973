// A tile of attention, some queries of some heads, and its part in the gradients: products, mask, softmax and sums in one
// go, where libtorch's ops would each pass over the scores and let the threads meet (the exact algorithm is that of Rabe
// and Staats 2021, arXiv 2112.05682, and Dao et al. 2022, arXiv 2205.14135).
//
// Computed in float32; operands and results may be of a 16-bit type and have any strides. Each element is a sum in one
// order, whatever the number of threads.
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "abi.h"
#include "bytes.h"
#include "gemm.h"
#include "status.h"
#include "team.h"

#if defined(__x86_64__)

namespace {

using ckpt::first_lanes;
using ckpt::kRows;
using ckpt::Matrix;
using ckpt::Product;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

bool is_read(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

Cube cube(const void* tensor, const char* what, std::initializer_list<int64_t> dims, bool is_written = false) {
  if (tensor == nullptr) return {};
  const auto& x = *static_cast<const at::Tensor*>(tensor);
  TORCH_CHECK(x.is_cpu() && x.sizes() == at::IntArrayRef(dims.begin(), dims.size()), what, " of a tile: ", x.sizes(),
              " where ", at::IntArrayRef(dims.begin(), dims.size()), " was expected");
  TORCH_CHECK(is_read(x.scalar_type()) || x.scalar_type() == at::kBool, what, " of a tile: type ", x.scalar_type());
  TORCH_CHECK(!is_written || !ckpt::is_borrowed(x), what, " of a tile: its bytes are lent and must not be written");
  auto* data = static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
  return {data, x.scalar_type(), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), x.stride(2)};
}

// The same, of float32 whose rows have no gaps: what products are written to.
Cube buffer(const void* tensor, const char* what, std::initializer_list<int64_t> dims) {
  const Cube x = cube(tensor, what, dims, true);
  TORCH_CHECK(x.is_null() || (x.type == at::kFloat && (x.column == 1 || x.columns == 1)), what,
              " of a tile: no rows of float32");
  return x;
}

// A row as float32.
CKPT_AVX512 void read_row(const Cube& x, int64_t h, int64_t i, float* to) {
  const char* from = x.at(h, i);
  const int64_t n = x.columns;
  int64_t j = 0;
  if (x.type == at::kFloat) {
    if (x.column == 1) {
      std::memcpy(to, from, n * sizeof(float));
      return;
    }
    for (; j < n; ++j) to[j] = reinterpret_cast<const float*>(from)[j * x.column];
    return;
  }
  const auto* words = reinterpret_cast<const uint16_t*>(from);
  const bool is_half = x.type == at::kHalf;
  if (x.column == 1) {
    for (; j + 16 <= n; j += 16) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + j));
      const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(word), 16);
      _mm512_storeu_ps(to + j, is_half ? _mm512_cvtph_ps(word) : _mm512_castsi512_ps(wide));
    }
  }
  for (; j < n; ++j) {
    const uint16_t word = words[j * x.column];
    to[j] = is_half ? static_cast<float>(c10::Half(word, c10::Half::from_bits()))
                    : static_cast<float>(c10::BFloat16(word, c10::BFloat16::from_bits()));
  }
}

// The nearest bfloat16, ties to even; NaN stays NaN.
CKPT_AVX512 inline __m256i to_bfloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(rounded, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(high, is_nan, _mm512_set1_epi32(0x7fc0)));
}

// A row of float32, in the type of `y`.
CKPT_AVX512 void write_row(const Cube& y, int64_t h, int64_t i, const float* from) {
  const int64_t n = y.columns;
  char* to = y.at(h, i);
  int64_t j = 0;
  if (y.type == at::kFloat) {
    if (y.column == 1) {
      std::memcpy(to, from, n * sizeof(float));
      return;
    }
    for (; j < n; ++j) reinterpret_cast<float*>(to)[j * y.column] = from[j];
    return;
  }
  auto* words = reinterpret_cast<uint16_t*>(to);
  const bool is_half = y.type == at::kHalf;
  if (y.column == 1) {
    for (; j + 16 <= n; j += 16) {
      const __m512 x = _mm512_loadu_ps(from + j);
      const __m256i word = is_half ? _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : to_bfloat16(x);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + j), word);
    }
  }
  for (; j < n; ++j) words[j * y.column] = is_half ? c10::Half(from[j]).x : c10::BFloat16(from[j]).x;
}

// exp(x), to about one unit in the last place: x = n·ln 2 + r, and a polynomial for exp(r) (coefficients of Cephes' expf).
// 0 from −104 down, NaN for NaN.
CKPT_AVX512 inline __m512 exponential(__m512 x) {
  // The second operand where one is NaN.
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  const __m512 one = _mm512_set1_ps(1.0f);
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, one));
  return _mm512_scalef_ps(p, n);
}

// tanh(x): an odd polynomial for small x (coefficients of Cephes' tanhf), else from an exponential.
CKPT_AVX512 inline __m512 hyperbolic_tangent(__m512 x) {
  const __m512 square = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-5.70498872745e-3f);
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(2.06390887954e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-5.37397155531e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(1.33314422036e-1f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-3.33332819422e-1f));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(p, square), x, x);
  const __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  const __m512 e = exponential(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
  // (1 − e) / (1 + e), with the sign of x.
  const __m512 large = _mm512_sub_ps(_mm512_div_ps(two, _mm512_add_ps(one, e)), one);
  const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 with_sign = _mm512_mask_sub_ps(large, below, _mm512_setzero_ps(), large);
  const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(with_sign, is_small, small);
}

// scores = cap·tanh(scores); the tanh is kept in `kept` if that is not null.
CKPT_AVX512 void cap_row(float* scores, float* kept, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    const __m512 t = hyperbolic_tangent(_mm512_maskz_loadu_ps(mask, scores + j));
    if (kept != nullptr) _mm512_mask_storeu_ps(kept + j, mask, t);
    _mm512_mask_storeu_ps(scores + j, mask, _mm512_mul_ps(t, _mm512_set1_ps(cap)));
  }
}

// Adds a row of a bias, or hides what is false.
CKPT_AVX512 void apply_row(const Cube& bias, int64_t h, int64_t i, float* scores, int64_t n) {
  const char* from = bias.at(h, i);
  const bool is_mask = bias.type == at::kBool;
  const auto* terms = reinterpret_cast<const float*>(from);
  int64_t j = 0;
  if (bias.column == 1) {
    for (; j + 16 <= n; j += 16) {
      __m512 x = _mm512_loadu_ps(scores + j);
      if (is_mask) {
        const __m512i seen = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
        x = _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), _mm512_test_epi32_mask(seen, seen), x);
      } else {
        x = _mm512_add_ps(x, _mm512_loadu_ps(terms + j));
      }
      _mm512_storeu_ps(scores + j, x);
    }
  }
  for (; j < n; ++j) {
    if (!is_mask) {
      scores[j] += terms[j * bias.column];
    } else if (from[j * bias.column] == 0) {
      scores[j] = -kInfinity;
    }
  }
}

CKPT_AVX512 inline float reduce(__m512 x, bool to_largest) {
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x);
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      lanes[i] = to_largest ? std::max(lanes[i], lanes[i + step]) : lanes[i] + lanes[i + step];
    }
  }
  return lanes[0];
}

struct Softmax {
  float top, sum;
};

// exp(score − largest score) in place, for scores `first` to `end` of `n`; 0 for the others. The largest is at least the
// lowest number, so that the weights of a query that sees no key are 0 and not NaN.
CKPT_AVX512 Softmax exponentials(float* scores, int64_t first, int64_t end, int64_t n) {
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + end, scores + n, 0.0f);
  __m512 largest = _mm512_set1_ps(std::numeric_limits<float>::lowest());
  for (int64_t j = first; j < end; j += 16) {
    const __mmask16 mask = first_lanes(end - j);
    largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(largest, mask, scores + j));
  }
  Softmax softmax{reduce(largest, true), 0.0f};
  const __m512 top = _mm512_set1_ps(softmax.top);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = first; j < end; j += 16) {
    const __mmask16 mask = first_lanes(end - j);
    const __m512 e = exponential(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, scores + j), top));
    _mm512_mask_storeu_ps(scores + j, mask, e);
    sum = _mm512_mask_add_ps(sum, mask, sum, e);
  }
  softmax.sum = reduce(sum, false);
  return softmax;
}

CKPT_AVX512 void divide(float* x, int64_t n, float divisor) {
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    _mm512_mask_storeu_ps(x + j, mask, _mm512_div_ps(_mm512_maskz_loadu_ps(mask, x + j), _mm512_set1_ps(divisor)));
  }
}

// slopes = p·(slopes − Σ p·slopes), and times 1 − tanh² where scores were capped.
CKPT_AVX512 void slopes_of_scores(float* slopes, const float* p, const float* capped, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, p + j), _mm512_maskz_loadu_ps(mask, slopes + j), sum);
  }
  const __m512 mean = _mm512_set1_ps(reduce(sum, false));
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, slopes + j), mean);
    x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, p + j));
    if (capped != nullptr) {
      const __m512 t = _mm512_maskz_loadu_ps(mask, capped + j);
      x = _mm512_fnmadd_ps(x, _mm512_mul_ps(t, t), x);
    }
    _mm512_mask_storeu_ps(slopes + j, mask, x);
  }
}

// Some queries of some heads, and the keys that they may see.
struct Tile {
  int64_t heads, rows, keys, size, value_size;
  Cube q, k, v, bias;
  Cube scores, sums, result, q_copy;
  float scale, softcap;
  int64_t first, end;
  bool empty_is_nan;

  explicit Tile(const CkTile& t)
      : scale(static_cast<float>(t.scale)),
        softcap(static_cast<float>(t.softcap)),
        first(t.first),
        end(t.end),
        empty_is_nan(t.empty_is_nan != 0) {
    const auto sizes = [](const void* x) { return static_cast<const at::Tensor*>(x)->sizes(); };
    TORCH_CHECK(sizes(t.q).size() == 3 && sizes(t.v).size() == 3, "a tile's operands have three axes");
    heads = sizes(t.q)[0], rows = sizes(t.q)[1], size = sizes(t.q)[2];
    keys = sizes(t.v)[1], value_size = sizes(t.v)[2];
    q = cube(t.q, "queries", {heads, rows, size});
    k = cube(t.k, "keys", {heads, keys, size});
    v = cube(t.v, "values", {heads, keys, value_size});
    bias = cube(t.bias, "the bias", {heads, rows, keys});
    scores = buffer(t.scores, "scores", {heads, rows, keys});
    sums = buffer(t.sums, "sums", {heads, rows, 1});
    result = t.result == nullptr ? Cube{} : buffer(t.result, "the result", {heads, rows, sizes(t.result)[2]});
    q_copy = buffer(t.q_copy, "copied queries", {heads, rows, size});
    TORCH_CHECK(k.type == at::kFloat && v.type == at::kFloat, "keys and values of a tile are float32");
    TORCH_CHECK(q.type == at::kFloat || !q_copy.is_null(), "no place for copied queries");
    TORCH_CHECK(bias.is_null() || bias.type == at::kFloat || bias.type == at::kBool, "a tile's bias: type ", bias.type);
    TORCH_CHECK(size > 0 && keys > 0, "a tile without keys");
  }

  // As a product reads them.
  Matrix queries(int64_t h) const { return q_copy.is_null() ? q.matrix(h) : q_copy.matrix(h); }

  int64_t work() const { return heads * rows * keys * (size + value_size); }

  // How many parts the rows of a head are cut into so that all threads have as much to do.
  int64_t parts(int64_t threads, int64_t of) const {
    if (heads >= 4 * threads) return 1;
    return std::clamp<int64_t>(threads / std::gcd(threads, heads), 1, std::max<int64_t>(of / kRows, 1));
  }

  // The weights exp(score − largest score) of rows i0 to i1; `each` is told a row, the largest and the sum.
  template <class Each>
  void weigh(int64_t h, int64_t i0, int64_t i1, const Cube& capped, Each&& each) const {
    if (!q_copy.is_null()) {
      for (int64_t i = i0; i < i1; ++i) read_row(q, h, i, q_copy.floats(h, i));
    }
    const float factor = softcap == 0.0f ? scale : static_cast<float>(static_cast<double>(scale) / softcap);
    Product product{rows, keys, size, queries(h), k.matrix(h).transposed(), {}, factor, 0.0f, scores.floats(h), scores.row};
    ckpt::multiply_rectangle(product, i0, i1, 0, keys);
    for (int64_t i = i0; i < i1; ++i) {
      float* row = scores.floats(h, i);
      if (softcap != 0.0f) cap_row(row, capped.is_null() ? nullptr : capped.floats(h, i), keys, softcap);
      if (!bias.is_null()) apply_row(bias, h, i, row, keys);
      const int64_t from = first == INT64_MIN ? 0 : std::clamp<int64_t>(first + i, 0, keys);
      const int64_t to = end == INT64_MAX ? keys : std::clamp<int64_t>(end + i, from, keys);
      each(i, exponentials(row, from, to, keys));
    }
  }

  // The largest score has the weight 1, so that a sum is 0 or at least 1.
  float divisor(float sum) const { return empty_is_nan || !(sum < 1.0f) ? sum : 1.0f; }
};

int64_t bound(int64_t size, int64_t part, int64_t parts) {
  const int64_t panels = (size + kRows - 1) / kRows;
  return std::min(size, panels * part / parts * kRows);
}

}  // namespace

extern "C" {

int32_t ck_attend(const CkTile* of, const void* to, const void* statistics) {
  return ckpt::guarded([&] {
    const Tile tile(*of);
    const Cube y = cube(to, "the result", {tile.heads, tile.rows, tile.value_size}, true);
    const Cube lse = buffer(statistics, "log-sum-exps", {tile.heads, tile.rows, 1});
    TORCH_CHECK(!tile.result.is_null() && tile.result.columns == tile.value_size, "no place for a tile's result");
    TORCH_CHECK(!tile.sums.is_null(), "no place for a tile's sums");
    const int64_t threads = ckpt::threads_for(tile.work()), parts = tile.parts(threads, tile.rows);
    ckpt::share_out(threads, tile.heads * parts, [&](int64_t unit) {
      const int64_t h = unit / parts, part = unit % parts;
      const int64_t i0 = bound(tile.rows, part, parts), i1 = bound(tile.rows, part + 1, parts);
      if (i0 == i1) return;
      tile.weigh(h, i0, i1, {}, [&](int64_t row, Softmax softmax) {
        *tile.sums.floats(h, row) = tile.divisor(softmax.sum);
        if (!lse.is_null()) *lse.floats(h, row) = std::log(softmax.sum) + softmax.top;
      });
      Product product{tile.rows, tile.value_size, tile.keys, tile.scores.matrix(h), tile.v.matrix(h), {}, 1.0f, 0.0f,
                      tile.result.floats(h), tile.result.row};
      ckpt::multiply_rectangle(product, i0, i1, 0, tile.value_size);
      for (int64_t i = i0; i < i1; ++i) {
        divide(tile.result.floats(h, i), tile.value_size, *tile.sums.floats(h, i));
        write_row(y, h, i, tile.result.floats(h, i));
      }
    });
  });
}

int32_t ck_attend_back(const CkTile* of, const CkTileGradients* to) {
  return ckpt::guarded([&] {
    const Tile tile(*of);
    const Cube dy = cube(to->dy, "the cotangent", {tile.heads, tile.rows, tile.value_size});
    const Cube dy_copy = buffer(to->dy_copy, "the copied cotangent", {tile.heads, tile.rows, tile.value_size});
    const Cube slopes = buffer(to->slopes, "slopes", {tile.heads, tile.rows, tile.keys});
    const Cube capped = buffer(to->capped, "capped scores", {tile.heads, tile.rows, tile.keys});
    const Cube dq = cube(to->dq, "the queries' gradient", {tile.heads, tile.rows, tile.size}, true);
    const Cube dk = buffer(to->dk, "the keys' gradient", {tile.heads, tile.keys, tile.size});
    const Cube dv = buffer(to->dv, "the values' gradient", {tile.heads, tile.keys, tile.value_size});
    TORCH_CHECK(dy.type == at::kFloat || !dy_copy.is_null(), "no place for the copied cotangent");
    TORCH_CHECK(!slopes.is_null() || (dq.is_null() && dk.is_null()), "no place for slopes");
    TORCH_CHECK(tile.softcap == 0.0f || slopes.is_null() || !capped.is_null(), "no place for capped scores");
    TORCH_CHECK(dq.is_null() || (!tile.result.is_null() && tile.result.columns == tile.size),
                "no place for the queries' gradient");
    const auto cotangent = [&](int64_t h) { return dy_copy.is_null() ? dy.matrix(h) : dy_copy.matrix(h); };
    const auto of_queries = [&](int64_t h, int64_t i0, int64_t i1) {
      tile.weigh(h, i0, i1, slopes.is_null() ? Cube{} : capped, [&](int64_t row, Softmax softmax) {
        divide(tile.scores.floats(h, row), tile.keys, tile.divisor(softmax.sum));
      });
      if (!dy_copy.is_null()) {
        for (int64_t i = i0; i < i1; ++i) read_row(dy, h, i, dy_copy.floats(h, i));
      }
      if (slopes.is_null()) return;
      Product product{tile.rows, tile.keys, tile.value_size, cotangent(h), tile.v.matrix(h).transposed(), {}, 1.0f, 0.0f,
                      slopes.floats(h), slopes.row};
      ckpt::multiply_rectangle(product, i0, i1, 0, tile.keys);
      for (int64_t i = i0; i < i1; ++i) {
        const float* kept = capped.is_null() ? nullptr : capped.floats(h, i);
        slopes_of_scores(slopes.floats(h, i), tile.scores.floats(h, i), kept, tile.keys);
      }
      if (dq.is_null()) return;
      Product back{tile.rows, tile.size, tile.keys, slopes.matrix(h), tile.k.matrix(h), {}, tile.scale, 0.0f,
                   tile.result.floats(h), tile.result.row};
      ckpt::multiply_rectangle(back, i0, i1, 0, tile.size);
      for (int64_t i = i0; i < i1; ++i) write_row(dq, h, i, tile.result.floats(h, i));
    };
    const auto add = [&](const Cube& sum, const Matrix& weights, const Matrix& x, float factor, int64_t h, int64_t j0,
                         int64_t j1) {
      if (sum.is_null()) return;
      Product product{tile.keys, sum.columns, tile.rows, weights, x, sum.matrix(h), factor, 1.0f, sum.floats(h), sum.row};
      ckpt::multiply_rectangle(product, j0, j1, 0, sum.columns);
    };
    const auto of_keys = [&](int64_t h, int64_t j0, int64_t j1) {
      add(dv, tile.scores.matrix(h).transposed(), cotangent(h), 1.0f, h, j0, j1);
      if (!dk.is_null()) add(dk, slopes.matrix(h).transposed(), tile.queries(h), tile.scale, h, j0, j1);
    };
    const int64_t threads = ckpt::threads_for(tile.work());
    const int64_t down = tile.parts(threads, tile.rows), across = tile.parts(threads, tile.keys);
    if (down == 1 && across == 1) {
      ckpt::share_out(threads, tile.heads, [&](int64_t h) {
        of_queries(h, 0, tile.rows);
        of_keys(h, 0, tile.keys);
      });
      return;
    }
    ckpt::share_out(threads, tile.heads * down, [&](int64_t unit) {
      const int64_t h = unit / down, part = unit % down;
      const int64_t i0 = bound(tile.rows, part, down), i1 = bound(tile.rows, part + 1, down);
      if (i0 < i1) of_queries(h, i0, i1);
    });
    ckpt::share_out(threads, tile.heads * across, [&](int64_t unit) {
      const int64_t h = unit / across, part = unit % across;
      const int64_t j0 = bound(tile.keys, part, across), j1 = bound(tile.keys, part + 1, across);
      if (j0 < j1) of_keys(h, j0, j1);
    });
  });
}
}

#else

extern "C" {
int32_t ck_attend(const CkTile*, const void*, const void*) {
  return ckpt::report(CK_REFUSED, "this processor has no products of ours");
}
int32_t ck_attend_back(const CkTile*, const CkTileGradients*) {
  return ckpt::report(CK_REFUSED, "this processor has no products of ours");
}
}

#endif
