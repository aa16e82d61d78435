// Products of rows with many columns, a vector of columns at a time, which have the bits of the
// products with few columns.

#ifndef SPECJAX_WIDE_COLUMNS_H_
#define SPECJAX_WIDE_COLUMNS_H_

#include "vectors.h"

namespace {

// sum[r] = the sum over lanes I, I + H, I + 2 H ... of a vector that would hold inputs of row r: the
// inputs of a lane one by one, and lanes as `Sums` adds them.
template <int R, int H = 1, int I = 0>
ALWAYS_INLINE void WideLanes(const float* w, int64_t in, const float* x, int64_t end, Vec* sum) {
  if constexpr (H == kLanes) {
    UNROLL
    for (int r = 0; r < R; ++r) sum[r] = Vec{};
    for (int64_t k = I; k < end; k += kLanes) {
      const Vec b = Load(x + k * kLanes);
      UNROLL
      for (int r = 0; r < R; ++r) sum[r] = Fma(All(w[r * in + k]), b, sum[r]);
    }
  } else {
    Vec other[R];
    WideLanes<R, 2 * H, I>(w, in, x, end, sum);
    WideLanes<R, 2 * H, I + H>(w, in, x, end, other);
    UNROLL
    for (int r = 0; r < R; ++r) sum[r] += other[r];
  }
}

// y[r, lane] = sum_k w[r, k] x[k, lane].
template <int R>
void Wide(const float* w, const float* x, int64_t in, Vec* y) {
  const int64_t end = in / kLanes * kLanes;
  WideLanes<R>(w, in, x, end, y);
  for (int64_t k = end; k < in; ++k) {
    const Vec b = Load(x + k * kLanes);
    for (int r = 0; r < R; ++r) y[r] = Fma(All(w[r * in + k]), b, y[r]);
  }
}

}  // namespace

#endif  // SPECJAX_WIDE_COLUMNS_H_
