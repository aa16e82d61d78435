// Products of the rows of a matrix with up to eight columns, all in bfloat16, by the processor's dot
// products of pairs (AVX-512 BF16).

#ifndef SPECJAX_FEW_DOTS_H_
#define SPECJAX_FEW_DOTS_H_

#include "bfloat16.h"
#include "tasks.h"
#include "vectors.h"

// GCC before 11 does not know them.
#if defined(__AVX512BW__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#include <cpuid.h>
#if !defined(SPECJAX_WITHOUT_DOTS) && (defined(__AVX512BF16__) || !defined(__clang__))
#define SPECJAX_DOTS  // Clang's assembler knows only what it compiles for
#endif
#endif

namespace {

[[maybe_unused]] constexpr int kPairs = 2 * kLanes;  // bfloat16 numbers of a vector

#if defined(SPECJAX_DOTS)

// x [in, columns] -> [columns, Pitch(in, 2)], filled up with zeros.
inline const Half* PackHalves(const Half* x, int64_t in, int64_t columns) {
  const int64_t pitch = Pitch(in, sizeof(Half));
  Half* rows = reinterpret_cast<Half*>(Scratch(0, columns * pitch / 2));
  for (int64_t k = 0; k < in; ++k)
    for (int64_t m = 0; m < columns; ++m) rows[m * pitch + k] = x[k * columns + m];
  for (int64_t m = 0; m < columns; ++m) std::fill(rows + m * pitch + in, rows + (m + 1) * pitch, Half{0});
  return rows;
}

// y[r, m] = sum_k w[r, k] x[m, k] of R rows of length `in` and M columns; rows of sums are `columns`
// apart, and the `next` rows of weights are fetched.
template <int R, int M, typename Fetching>
ALWAYS_INLINE void FewDots(const Half* w, const Half* x, float* y, int64_t in, Fetching& next,
                           int64_t columns) {
  const int64_t pitch = Pitch(in, sizeof(Half));
  Vec sum[R * M];
  UNROLL
  for (int i = 0; i < R * M; ++i) sum[i] = Vec{};
  for (int64_t k = 0; k < in; k += kPairs) {
    const bool due = next.Step();
    const uint32_t held = in - k >= kPairs ? ~0u : (1u << (in - k)) - 1;
    __m512i a[R];
    UNROLL
    for (int r = 0; r < R; ++r) {
      a[r] = _mm512_maskz_loadu_epi16(held, w + r * in + k);
      if (due) next.template Next<2>();
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      const __m512i b = _mm512_loadu_si512(x + m * pitch + k);
      UNROLL
      for (int r = 0; r < R; ++r) asm("vdpbf16ps %2, %1, %0" : "+v"(sum[r * M + m]) : "v"(b), "v"(a[r]));
    }
  }
  alignas(64) float total[(R * M + kLanes - 1) / kLanes * kLanes];
  StoreAll<R * M>(total, [&](int i) { return sum[i]; });
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) y[r * columns + m] = total[r * M + m];
}

template <int M, int R, typename Fetching>
void DotRows(const Half* w, const Half* x, float* y, int64_t in, int64_t rows, Fetching next,
             int64_t columns) {
  int64_t r = 0;
  for (; r + R <= rows; r += R) FewDots<R, M>(w + r * in, x, y + r * columns, in, next, columns);
  for (; r < rows; ++r) FewDots<1, M>(w + r * in, x, y + r * columns, in, next, columns);
}

template <typename Fetching>
using Dots = void (*)(const Half*, const Half*, float*, int64_t, int64_t, Fetching, int64_t);
template <typename Fetching, int kFirst, int... M>
constexpr std::array<Dots<Fetching>, sizeof...(M)> DotTable(std::integer_sequence<int, M...>) {
  return {{&DotRows<M + kFirst, DotRowsOf(M + kFirst), Fetching>...}};
}
constexpr auto kDotRows = DotTable<Fetch, 1>(Counts{});
constexpr auto kDotParts = DotTable<FetchPart, kLeastShare>(ShareCounts{});
constexpr int64_t kMostOfBlock = 256 << 10;  // bytes: two blocks of more may not fit the L2 cache

#endif  // SPECJAX_DOTS

}  // namespace

#endif  // SPECJAX_FEW_DOTS_H_
