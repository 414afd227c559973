// A tile of attention (some queries of some heads) and its contribution to the gradients, computed in one call: products,
// mask, softmax and sums. Separate libtorch ops would each pass over the scores and synchronize the threads. The algorithm is
// that of Rabe and Staats 2021 (arXiv 2112.05682) and Dao et al. 2022 (arXiv 2205.14135).
//
// Tiles are computed in float32. Operands and results may have a 16-bit type and any strides. Each element is summed in one
// order, whatever the number of threads.
#include <ATen/core/Tensor.h>

#include <cmath>
#include <numeric>

#include "abi.h"
#include "bytes.h"
#include "gemm.h"
#include "rows.h"
#include "status.h"
#include "team.h"

#if defined(__x86_64__)

namespace {

using ckpt::Cube;
using ckpt::kRows;
using ckpt::Matrix;
using ckpt::Product;
using ckpt::Softmax;

bool is_read(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

Cube cube(const void* tensor, const char* what, std::initializer_list<int64_t> dims, bool is_written = false,
          bool may_hide = false) {
  if (tensor == nullptr) return {};
  const auto& x = *static_cast<const at::Tensor*>(tensor);
  TORCH_CHECK(x.is_cpu() && x.sizes() == at::IntArrayRef(dims.begin(), dims.size()), what, " of a tile: ", x.sizes(),
              " where ", at::IntArrayRef(dims.begin(), dims.size()), " was expected");
  TORCH_CHECK(is_read(x.scalar_type()) || (may_hide && x.scalar_type() == at::kBool), what, " of a tile: type ", x.scalar_type());
  TORCH_CHECK(!is_written || !ckpt::is_borrowed(x), what, " of a tile: its bytes are lent and must not be written");
  auto* data = static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
  return {data, x.scalar_type(), x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), x.stride(2)};
}

// As `cube`, for a float32 buffer with contiguous rows, to which products can be written.
Cube buffer(const void* tensor, const char* what, std::initializer_list<int64_t> dims) {
  const Cube x = cube(tensor, what, dims, true);
  TORCH_CHECK(x.is_null() || (x.type == at::kFloat && (x.column == 1 || x.columns == 1)), what,
              " of a tile: no rows of float32");
  return x;
}

// CkTile after its checks.
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
    bias = cube(t.bias, "the bias", {heads, rows, keys}, false, true);
    scores = buffer(t.scores, "scores", {heads, rows, keys});
    sums = buffer(t.sums, "sums", {heads, rows, 1});
    result = t.result == nullptr ? Cube{} : buffer(t.result, "the result", {heads, rows, sizes(t.result)[2]});
    q_copy = buffer(t.q_copy, "copied queries", {heads, rows, size});
    TORCH_CHECK(k.type == at::kFloat, "keys of a tile: type ", k.type);
    TORCH_CHECK(q.type == at::kFloat || !q_copy.is_null(), "no place for copied queries");
    TORCH_CHECK(bias.is_null() || bias.type == at::kFloat || bias.type == at::kBool, "a tile's bias: type ", bias.type);
    TORCH_CHECK(size > 0 && keys > 0, "a tile without keys");
  }

  // The queries of a head as an operand of a product.
  Matrix queries(int64_t h) const { return q_copy.is_null() ? q.matrix(h) : q_copy.matrix(h); }

  int64_t work() const { return heads * rows * keys * (size + value_size); }

  // Into how many parts to split the `of` rows of a head, so that all threads get equal work.
  int64_t parts(int64_t threads, int64_t of) const {
    if (heads >= 4 * threads) return 1;
    return std::clamp<int64_t>(threads / std::gcd(threads, heads), 1, std::max<int64_t>(of / kRows, 1));
  }

  // Computes the weights exp(score − largest score) of rows i0 to i1. Calls `each` with the row and its Softmax.
  template <class Each>
  void weigh(int64_t h, int64_t i0, int64_t i1, const Cube& capped, Each&& each) const {
    if (!q_copy.is_null()) {
      for (int64_t i = i0; i < i1; ++i) ckpt::read_row(q, h, i, q_copy.floats(h, i));
    }
    const float factor = softcap == 0.0f ? scale : static_cast<float>(static_cast<double>(scale) / softcap);
    Product product{rows, keys, size, queries(h), k.matrix(h).transposed(), {}, factor, 0.0f, scores.floats(h), scores.row};
    ckpt::multiply_rectangle(product, i0, i1, 0, keys);
    for (int64_t i = i0; i < i1; ++i) {
      float* row = scores.floats(h, i);
      if (softcap != 0.0f) ckpt::cap_row(row, capped.is_null() ? nullptr : capped.floats(h, i), keys, softcap);
      if (!bias.is_null()) ckpt::apply_row(bias, h, i, row, keys);
      const int64_t from = first == INT64_MIN ? 0 : std::clamp<int64_t>(first + i, 0, keys);
      const int64_t to = end == INT64_MAX ? keys : std::clamp<int64_t>(end + i, from, keys);
      each(i, ckpt::exponentials(row, from, to, keys));
    }
  }

  // The largest score has weight 1, so a sum is 0 or at least 1.
  float divisor(float sum) const { return empty_is_nan || !(sum < 1.0f) ? sum : 1.0f; }
};

int64_t bound(int64_t size, int64_t part, int64_t parts) {
  const int64_t panels = (size + kRows - 1) / kRows;
  return std::min(size, panels * part / parts * kRows);
}

}  // namespace

extern "C" {

// Available only if ck_gemm_is_ours. `statistics` is the log-sum-exp (float32, [h, r, 1]) or null.
int32_t ck_attend(const CkTile* of, const void* to, const void* statistics) {
  return ckpt::guarded([&] {
    const Tile tile(*of);
    const Cube y = cube(to, "the result", {tile.heads, tile.rows, tile.value_size}, true);
    const Cube lse = buffer(statistics, "log-sum-exps", {tile.heads, tile.rows, 1});
    TORCH_CHECK(!tile.result.is_null() && tile.result.columns == tile.value_size, "no place for a tile's result");
    TORCH_CHECK(tile.v.type == at::kFloat, "values of a tile: type ", tile.v.type);
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
        ckpt::divide(tile.result.floats(h, i), tile.value_size, *tile.sums.floats(h, i));
        ckpt::write_row(y, h, i, tile.result.floats(h, i));
      }
    });
  });
}

int32_t ck_attend_back(const CkTile* of, const CkTileGradients* to) {
  return ckpt::guarded([&] {
    const Tile tile(*of);
    const Cube dy = cube(to->dy, "the cotangent", {tile.heads, tile.rows, tile.value_size});
    const Cube dlse = cube(to->dlse, "the cotangent of log-sum-exps", {tile.heads, tile.rows, 1});
    const Cube dy_copy = buffer(to->dy_copy, "the copied cotangent", {tile.heads, tile.rows, tile.value_size});
    const Cube slopes = buffer(to->slopes, "slopes", {tile.heads, tile.rows, tile.keys});
    const Cube capped = buffer(to->capped, "capped scores", {tile.heads, tile.rows, tile.keys});
    const Cube dq = cube(to->dq, "the queries' gradient", {tile.heads, tile.rows, tile.size}, true);
    const Cube dk = buffer(to->dk, "the keys' gradient", {tile.heads, tile.keys, tile.size});
    const Cube dv = buffer(to->dv, "the values' gradient", {tile.heads, tile.keys, tile.value_size});
    TORCH_CHECK(dlse.is_null() || dlse.type == at::kFloat, "the cotangent of log-sum-exps of a tile: type ", dlse.type);
    TORCH_CHECK(dy.type == at::kFloat || !dy_copy.is_null(), "no place for the copied cotangent");
    TORCH_CHECK(!slopes.is_null() || (dq.is_null() && dk.is_null()), "no place for slopes");
    TORCH_CHECK(slopes.is_null() || tile.v.type == at::kFloat, "values of a tile: type ", tile.v.type);
    TORCH_CHECK(tile.softcap == 0.0f || slopes.is_null() || !capped.is_null(), "no place for capped scores");
    TORCH_CHECK(dq.is_null() || (!tile.result.is_null() && tile.result.columns == tile.size),
                "no place for the queries' gradient");
    const auto cotangent = [&](int64_t h) { return dy_copy.is_null() ? dy.matrix(h) : dy_copy.matrix(h); };
    const auto of_queries = [&](int64_t h, int64_t i0, int64_t i1) {
      tile.weigh(h, i0, i1, slopes.is_null() ? Cube{} : capped, [&](int64_t row, Softmax softmax) {
        ckpt::divide(tile.scores.floats(h, row), tile.keys, tile.divisor(softmax.sum));
      });
      if (!dy_copy.is_null()) {
        for (int64_t i = i0; i < i1; ++i) ckpt::read_row(dy, h, i, dy_copy.floats(h, i));
      }
      if (slopes.is_null()) return;
      Product product{tile.rows, tile.keys, tile.value_size, cotangent(h), tile.v.matrix(h).transposed(), {}, 1.0f, 0.0f,
                      slopes.floats(h), slopes.row};
      ckpt::multiply_rectangle(product, i0, i1, 0, tile.keys);
      for (int64_t i = i0; i < i1; ++i) {
        const float* kept = capped.is_null() ? nullptr : capped.floats(h, i);
        const float of_lse = dlse.is_null() ? 0.0f : *dlse.floats(h, i);
        ckpt::slopes_of_scores(slopes.floats(h, i), tile.scores.floats(h, i), kept, of_lse, tile.keys);
      }
      if (dq.is_null()) return;
      Product back{tile.rows, tile.size, tile.keys, slopes.matrix(h), tile.k.matrix(h), {}, tile.scale, 0.0f,
                   tile.result.floats(h), tile.result.row};
      ckpt::multiply_rectangle(back, i0, i1, 0, tile.size);
      for (int64_t i = i0; i < i1; ++i) ckpt::write_row(dq, h, i, tile.result.floats(h, i));
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
