// Products of rows with many columns, vectors of columns at a time, which have the bits of the
// products with few columns.

#ifndef SPECJAX_WIDE_COLUMNS_H_
#define SPECJAX_WIDE_COLUMNS_H_

#include "vectors.h"

namespace {

// sum[r, v] = the sum over lanes I, I + H, I + 2 H ... of a vector that would hold inputs of row r:
// the inputs of a lane one by one, and lanes as `Sums` adds them. The last two lanes are summed side
// by side, and before each such pair some of the `lines` from `next` on are fetched: all at once,
// they would wait for each other.
template <int R, int V, int H = 1, int I = 0>
ALWAYS_INLINE void WideLanes(const float* w, int64_t in, const Vec* x, int64_t end, Vec* sum,
                            const float* next, int64_t lines) {
  Vec other[R * V];
  if constexpr (2 * H == kLanes) {
    UNROLL
    for (int j = 0; j < R * V; ++j) sum[j] = other[j] = Vec{};
    for (int64_t i = I; i < lines; i += H) __builtin_prefetch(next + i * (kLine / 4), 0, 2);
    for (int64_t k = I; k < end; k += kLanes) {
      // one lane after the other: the columns of both would fill more registers than there are
      const auto add = [&](int64_t at, Vec* to) {
        Vec a[V];
        UNROLL
        for (int v = 0; v < V; ++v) a[v] = Once(x[at * V + v]);
        UNROLL
        for (int r = 0; r < R; ++r) {
          const Vec number = V > 1 ? Once(All(w[r * in + at])) : All(w[r * in + at]);
          UNROLL
          for (int v = 0; v < V; ++v) to[r * V + v] = Fma(number, a[v], to[r * V + v]);
        }
      };
      add(k, sum), add(k + H, other);
    }
  } else {
    WideLanes<R, V, 2 * H, I>(w, in, x, end, sum, next, lines);
    WideLanes<R, V, 2 * H, I + H>(w, in, x, end, other, next, lines);
  }
  UNROLL
  for (int j = 0; j < R * V; ++j) sum[j] += other[j];
}

// y[r, v] = sum_k w[r, k] x[k, v] of R rows and V vectors of columns. From `next` on, `lines` are
// fetched meanwhile.
template <int R, int V>
void Wide(const float* w, const Vec* x, int64_t in, Vec* y, const float* next, int64_t lines) {
  Vec sum[R * V];
  const int64_t end = in / kLanes * kLanes;
  WideLanes<R, V>(w, in, x, end, sum, next, lines);
  for (int64_t k = end; k < in; ++k) {
    UNROLL
    for (int r = 0; r < R; ++r) {
      UNROLL
      for (int v = 0; v < V; ++v)
        sum[r * V + v] = Fma(All(w[r * in + k]), x[k * V + v], sum[r * V + v]);
    }
  }
  UNROLL
  for (int j = 0; j < R * V; ++j) y[j] = sum[j];
}

}  // namespace

#endif  // SPECJAX_WIDE_COLUMNS_H_
