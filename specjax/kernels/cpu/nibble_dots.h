// Products of rows of four-bit weights, of which value - zero is multiplied by the scale of their group
// of inputs, with a few columns by the processor's own dot products of bytes (AVX-512 VNNI).
//
// The products of a tile of 32 inputs are summed exactly, and the sum is rounded once and multiplied
// by the scale of the weights. Every fourth tile adds to the same one of four sums of floats, which are
// added as (0 + 1) + (2 + 3) and multiplied by the scale of the column. So a column has the same bits
// beside any others.

#ifndef SPECJAX_NIBBLE_DOTS_H_
#define SPECJAX_NIBBLE_DOTS_H_

#include "byte_columns.h"
#include "tasks.h"
#include "vectors.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS)

// Rows of weights of four bits.
struct NibbleRows {
  const uint8_t* values;  // [rows, in / 2]
  const float* scales;    // [rows, groups]
  const int8_t* zeros;    // the same, or null
  int64_t bytes, groups, group;
};

constexpr int kNibbleRows = 4;  // at a time: with the tiles of a vector they fill a vector of sums

// The scales of four rows for `tiles` of four tiles from input k on: [4 tiles, 4 rows].
ALWAYS_INLINE Vec TileScales(const NibbleRows& w, int64_t k, int64_t tiles, const int64_t* rows) {
  const auto at = [&](int r) { return w.scales + rows[r] * w.groups + k / w.group; };
  if (tiles == 4 && w.group == kTile) {
    __m512 all = _mm512_castps128_ps512(_mm_loadu_ps(at(0)));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(at(1)), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(at(2)), 2);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(at(3)), 3);
    const IntVec turned = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(turned), all);
  }
  alignas(64) float found[kLanes] = {};
  for (int64_t t = 0; t < tiles; ++t)
    for (int r = 0; r < kNibbleRows; ++r)
      found[t * kNibbleRows + r] = w.scales[rows[r] * w.groups + (k + t * kTile) / w.group];
  return Load(found);
}

// y[r, m] for `rows` rows, up to four, and M columns over the inputs k ... end - 1, of which a block
// of x consists. Rows `ahead` are fetched.
template <int M, bool kZeros>
ALWAYS_INLINE void FewNibbles(const NibbleRows& w, const FewColumns& x, int64_t column, float* y,
                              int64_t k, int64_t end, int64_t rows, int64_t ahead, To to) {
  constexpr int R = kNibbleRows;
  const int64_t begin = k, deep = end - k, length = x.Length(deep);
  const int64_t at[R] = {0, std::min<int64_t>(1, rows - 1), std::min<int64_t>(2, rows - 1), rows - 1};
  const int8_t* from = x.At(k, column);
  const __m512i mask = _mm512_set1_epi8(15);
  Vec total[M];
  UNROLL
  for (int m = 0; m < M; ++m) total[m] = Vec{};
  Fetch next(w.values + ahead * w.bytes + k / 2, deep / 2, w.bytes);
  for (; k < end; k += 2 * kBytes) {
    const int64_t left = std::min<int64_t>(kBytes, (end - k) / 2);
    const __mmask64 held = left == kBytes ? ~0ull : (1ull << left) - 1;
    __m512i even[R], odd[R];
    UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512i both = _mm512_maskz_loadu_epi8(held, w.values + at[r] * w.bytes + k / 2);
      even[r] = _mm512_and_si512(both, mask);
      odd[r] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      if constexpr (kZeros) {
        const __m512i zeros =
            TileZeros(w.zeros + at[r] * w.groups, w.group, k, left / (kTile / 2));
        const __m512i more = _mm512_sub_epi8(_mm512_set1_epi8(kMore), zeros);
        even[r] = _mm512_add_epi8(even[r], more);
        odd[r] = _mm512_add_epi8(odd[r], more);
      }
      next.Next();
    }
    const Vec scale = TileScales(w, k, left / (kTile / 2), at);
    UNROLL
    for (int m = 0; m < M; ++m) {
      const int8_t *high = from + 2 * m * length + (k - begin), *low = high + length;
      const __m512i x0 = _mm512_loadu_si512(high), x1 = _mm512_loadu_si512(high + kBytes);
      const __m512i x2 = _mm512_loadu_si512(low), x3 = _mm512_loadu_si512(low + kBytes);
      __m512i s[R];
      UNROLL
      for (int r = 0; r < R; ++r) {
        s[r] = _mm512_setzero_si512();
        AddDots(s[r], even[r], x0);
        AddDots(s[r], odd[r], x1);
        s[r] = _mm512_slli_epi32(s[r], 8);
        AddDots(s[r], even[r], x2);
        AddDots(s[r], odd[r], x3);
      }
      // lanes [4 tiles, 4 parts of a sum] of each row -> [4 tiles, 4 rows]
      const auto fold = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
      };
      const __m512i a = fold(s[0], s[1]), b = fold(s[2], s[3]);
      const __m512i sum = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
      __m512i less = reinterpret_cast<__m512i>(x.sums[k / (2 * kBytes) * x.columns + column + m]);
      if constexpr (kZeros) less = _mm512_slli_epi32(less, 1);  // kMore times in place of kMiddle
      total[m] = Fma(Floats(_mm512_sub_epi32(sum, less)), scale, total[m]);
    }
  }
  UNROLL
  for (int m = 0; m < M; ++m) {
    const __m512 pairs = total[m] + _mm512_shuffle_f32x4(total[m], total[m], 0xb1);
    const __m512 all = pairs + _mm512_shuffle_f32x4(pairs, pairs, 0x4e);
    alignas(16) float made[R];
    _mm_store_ps(made, _mm512_castps512_ps128(Once(all * x.scales[x.Index(begin, column + m)])));
    for (int64_t r = 0; r < rows; ++r) to(y, r, m, made[r]);
  }
}

template <int M>
void NibblesBy(const NibbleRows& w, const FewColumns& x, int64_t column, float* y, int64_t k,
               int64_t end, int64_t rows, To to) {
  const int64_t ahead = Fetch::Ahead(kNibbleRows, (end - k) / 2);
  for (int64_t r = 0; r < rows; r += kNibbleRows) {
    const int64_t at = r * w.groups;
    const int8_t* zeros = w.zeros == nullptr ? w.zeros : w.zeros + at;
    const NibbleRows some{w.values + r * w.bytes, w.scales + at, zeros, w.bytes, w.groups, w.group};
    (w.zeros == nullptr ? &FewNibbles<M, false> : &FewNibbles<M, true>)(
        some, x, column, y + r * to.down, k, end, std::min<int64_t>(kNibbleRows, rows - r), ahead, to);
  }
}

using NibbleBy = void (*)(const NibbleRows&, const FewColumns&, int64_t, float*, int64_t, int64_t,
                          int64_t, To);
template <int... M>
constexpr std::array<NibbleBy, sizeof...(M)> NibbleTable(std::integer_sequence<int, M...>) {
  return {{&NibblesBy<M + 1>...}};
}
constexpr auto kNibblesBy = NibbleTable(Counts{});

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_NIBBLE_DOTS_H_
