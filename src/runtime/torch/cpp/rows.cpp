#include "rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>
#include <limits>

#if defined(__x86_64__)

namespace {

using ckpt::first_lanes;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
CKPT_AVX512 inline __m256i to_bfloat16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_srli_epi32(rounded, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(high, is_nan, _mm512_set1_epi32(0x7fc0)));
}

// exp(x), to about one unit in the last place: x = n·ln 2 + r, and a polynomial for exp(r) (coefficients of Cephes' expf).
// 0 from −104 down, NaN for NaN.
CKPT_AVX512 inline __m512 exponential(__m512 x) {
  // max returns its second operand if one is NaN.
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

// tanh(x): an odd polynomial for small x (coefficients of Cephes' tanhf), else computed from an exponential.
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

}  // namespace

namespace ckpt {

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

CKPT_AVX512 void cap_row(float* scores, float* kept, int64_t n, float cap) {
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    const __m512 t = hyperbolic_tangent(_mm512_maskz_loadu_ps(mask, scores + j));
    if (kept != nullptr) _mm512_mask_storeu_ps(kept + j, mask, t);
    _mm512_mask_storeu_ps(scores + j, mask, _mm512_mul_ps(t, _mm512_set1_ps(cap)));
  }
}

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

CKPT_AVX512 void slopes_of_scores(float* slopes, const float* p, const float* capped, float of_lse, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t j = 0; j < n; j += 16) {
    const __mmask16 mask = first_lanes(n - j);
    sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, p + j), _mm512_maskz_loadu_ps(mask, slopes + j), sum);
  }
  const __m512 mean = _mm512_set1_ps(reduce(sum, false) - of_lse);
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

}  // namespace ckpt
#endif
