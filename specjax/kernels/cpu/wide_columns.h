// Products of the rows of a matrix with many columns: a vector holds one input of as many columns
// as it has lanes.

#ifndef SPECJAX_WIDE_COLUMNS_H_
#define SPECJAX_WIDE_COLUMNS_H_

#include "bfloat16.h"
#include "vectors.h"

namespace {

constexpr int kWideRows = 6;  // rows in flight

// y[r, lane] = sum_k w[r * row + k * step] x[k, lane]: a vector holds columns.
template <int R>
inline void Wide(const float* w, int64_t row, int64_t step, const float* x, int64_t in, Vec* y) {
  Vec sum[R];
  UNROLL
  for (int r = 0; r < R; ++r) sum[r] = Vec{};
  for (int64_t k = 0; k < in; ++k) {
    const Vec b = Load(x + k * kLanes);
    UNROLL
    for (int r = 0; r < R; ++r) sum[r] += w[r * row + k * step] * b;
  }
  UNROLL
  for (int r = 0; r < R; ++r) y[r] = sum[r];
}

// The same for rows that are read from memory: those after them are fetched ahead. Two sums a row
// halve the rounding.
template <int R>
inline void WideAhead(const float* w, const float* x, int64_t in, int64_t deep, Vec* y) {
  Vec even[R], odd[R];
  UNROLL
  for (int r = 0; r < R; ++r) even[r] = odd[r] = Vec{};
  int64_t k = 0;
  for (; k + 16 <= deep; k += 16) {
    UNROLL
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (r + R) * in + k);
    UNROLL
    for (int j = 0; j < 16; j += 2) {
      const Vec b = Load(x + (k + j) * kLanes), c = Load(x + (k + j + 1) * kLanes);
      UNROLL
      for (int r = 0; r < R; ++r) even[r] += w[r * in + k + j] * b;
      UNROLL
      for (int r = 0; r < R; ++r) odd[r] += w[r * in + k + j + 1] * c;
    }
  }
  for (; k < deep; ++k) {
    const Vec b = Load(x + k * kLanes);
    UNROLL
    for (int r = 0; r < R; ++r) even[r] += w[r * in + k] * b;
  }
  UNROLL
  for (int r = 0; r < R; ++r) y[r] = even[r] + odd[r];
}

// `rows` rows of a weight matrix, `stride` apart, by packed columns; the rows stay in the L1 cache
// meanwhile.
void WideRows(const float* w, int64_t stride, const float* packed, float* y, int64_t in,
              int64_t deep, int64_t rows, int64_t columns, To to) {
  for (int64_t r = 0; r < rows; r += kWideRows) {
    const int64_t n = std::min<int64_t>(kWideRows, rows - r);
    for (int64_t m = 0; m < columns; m += kLanes) {
      Vec sums[kWideRows];
      if (n == kWideRows) {
        WideAhead<kWideRows>(w + r * stride, packed + m * in, stride, deep, sums);
      } else {
        for (int64_t i = 0; i < n; ++i)
          WideAhead<1>(w + (r + i) * stride, packed + m * in, stride, deep, sums + i);
      }
      for (int64_t i = 0; i < n; ++i)
        for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - m); ++lane)
          to(y, r + i, m + lane, sums[i][lane]);
    }
  }
}

// The same of bfloat16: a row's numbers are spread over lanes one by one, so they are made floats.
void WideRows(const Half* w, int64_t stride, const float* packed, float* y, int64_t in,
              int64_t deep, int64_t rows, int64_t columns, To to) {
  float* whole = Scratch(1, 2 * kWideRows * deep);  // room for what is fetched ahead
  for (int64_t r = 0; r < rows; r += kWideRows) {
    const int64_t n = std::min<int64_t>(kWideRows, rows - r);
    for (int64_t i = 0; i < n; ++i) {
      const Half* from = w + (r + i) * stride;
      int64_t k = 0;
      for (; k + kLanes <= deep; k += kLanes) Store(whole + i * deep + k, Load(from + k));
      for (; k < deep; ++k) whole[i * deep + k] = Number(from[k]);
    }
    WideRows(whole, deep, packed, y + r * to.down, in, deep, n, columns, to);
  }
}

// x [in, columns] -> blocks of kLanes columns, each [in, kLanes], times `scale`; zeros fill up.
float* PackWide(int slot, const float* x, int64_t in, int64_t columns, float scale) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  float* packed = Scratch(slot, blocks * in * kLanes);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = std::min<int64_t>(kLanes, columns - b * kLanes);
    for (int64_t k = 0; k < in; ++k) {
      float* to = packed + (b * in + k) * kLanes;
      for (int64_t m = 0; m < n; ++m) to[m] = x[k * columns + b * kLanes + m] * scale;
      for (int64_t m = n; m < kLanes; ++m) to[m] = 0.0f;
    }
  }
  return packed;
}

}  // namespace

#endif  // SPECJAX_WIDE_COLUMNS_H_
