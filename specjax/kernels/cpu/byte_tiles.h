// Products of rows of weights in eight or four bits with many columns, by the processor's own dot
// products of bytes.
//
// A vector holds four inputs of each of 16 rows, and meets four inputs of one column in all lanes, so
// that nothing is summed over lanes. Three such vectors by eight columns fill the registers. The rows
// of a task are brought into this form once for all columns. Whole sums are exact, and every product
// of floats is that of byte_dots.h or nibble_dots.h, so that a column has the bits that it has there.

#ifndef SPECJAX_BYTE_TILES_H_
#define SPECJAX_BYTE_TILES_H_

#include "byte_columns.h"
#include "turn.h"
#include "vectors.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS)

constexpr int kTall = 3, kAcross = kFew;  // vectors of rows, and columns, of which sums are in registers
constexpr int64_t kTallRows = kTall * kLanes;

// Up to kTallRows rows of weights, and their scales.
struct TallRows {
  const uint8_t* values;
  const float* scales;
  const int8_t* zeros;  // of four bits, or null
  int64_t bytes, groups, group, rows;

  TallRows From(int64_t row, int64_t count) const {
    const int64_t at = row * groups;
    return {values + row * bytes, scales + at, zeros == nullptr ? zeros : zeros + at, bytes, groups,
            group, count};
  }
};

// kMore less the zeros of a tile, each in the four bytes of a lane: of `rows` rows from `first` on.
ALWAYS_INLINE __m512i RowsMore(const TallRows& w, int64_t first, int64_t rows, int64_t tile) {
  if (w.zeros == nullptr) return _mm512_set1_epi8(kMore - kMiddle);
  IntVec more = {};
  const int8_t* zeros = w.zeros + first * w.groups + tile * kTile / w.group;
  for (int64_t r = 0; r < rows; ++r) more[r] = kMore - zeros[r * w.groups];
  return reinterpret_cast<__m512i>(more * 0x01010101);
}

// The inputs k ... k + deep - 1 of the rows as bytes from 0 to 255, [inputs / 4, tall, 16 rows, 4];
// where weights have four bits, the scales too, [tiles, tall, 16 rows].
template <bool kFour>
void PackTall(const TallRows& w, int64_t k, int64_t deep, int tall, uint8_t* to, float* scales) {
  const __m512i turn = _mm512_set1_epi8(-128), low = _mm512_set1_epi8(15);
  const int64_t length = kFour ? deep / 2 : deep, begin = kFour ? k / 2 : k;
  for (int v = 0; v < tall; ++v) {
    const int64_t rows = std::min<int64_t>(kLanes, w.rows - v * kLanes);
    const uint8_t* from = w.values + v * kLanes * w.bytes + begin;
    for (int64_t i = 0; i < length; i += kBytes) {
      const __mmask64 held = length - i >= kBytes ? ~0ull : (1ull << (length - i)) - 1;
      __m512i r[kLanes];
      UNROLL
      for (int j = 0; j < kLanes; ++j)
        r[j] = _mm512_maskz_loadu_epi8(j < rows ? held : 0, from + (j < rows ? j : 0) * w.bytes + i);
      UNROLL
      for (int j = 0; j < kLanes; ++j)  // of the next rows
        __builtin_prefetch(from + (kLanes + j) * w.bytes + i);
      Turn(r);
      const auto put = [&](int64_t step, __m512i bytes) {
        _mm512_storeu_si512(to + (step * tall + v) * kBytes, bytes);
      };
      if constexpr (kFour) {  // 16 bytes are a tile, 4 of them the inputs of a step and of one later
        const int64_t tiles = std::min<int64_t>(4, (length - i) / 16);
        for (int64_t t = 0; t < tiles; ++t) {
          const __m512i more = RowsMore(w, v * kLanes, rows, (k + 2 * i) / kTile + t);
          for (int j = 0; j < 4; ++j) {
            const __m512i both = r[4 * t + j];
            const int64_t step = (i / 16 + t) * 8 + j;
            put(step, _mm512_add_epi8(_mm512_and_si512(both, low), more));
            put(step + 4, _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low), more));
          }
        }
      } else {
        const int64_t steps = std::min<int64_t>(kLanes, ManyColumns::Steps(deep) - i / 4);
        for (int64_t s = 0; s < steps; ++s) put(i / 4 + s, _mm512_xor_si512(r[s], turn));
      }
    }
    if constexpr (kFour) {
      const __mmask16 some = rows >= kLanes ? 0xffff : (1u << rows) - 1;
      const IntVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      const __m512i at = reinterpret_cast<__m512i>(lanes * static_cast<int32_t>(w.groups));
      for (int64_t t = 0; t < deep / kTile; ++t) {
        const float* scale = w.scales + v * kLanes * w.groups + (k + t * kTile) / w.group;
        const __m512 of = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), some, at, scale, 4);
        _mm512_storeu_ps(scales + (t * tall + v) * kLanes, of);
      }
    }
  }
}

// sum[v, m] += the products of `steps` times four inputs of kV vectors of rows and kM columns.
template <int kV, int kM>
ALWAYS_INLINE void AddSteps(const uint8_t* w, const int32_t* x, int64_t steps, __m512i* sum) {
  for (int64_t s = 0; s < steps; ++s) {
    __m512i a[kV];
    UNROLL
    for (int v = 0; v < kV; ++v) a[v] = _mm512_loadu_si512(w + (s * kV + v) * kBytes);
    UNROLL
    for (int m = 0; m < kM; ++m) {
      const __m512i b = _mm512_set1_epi32(x[s * kLanes + m]);
      UNROLL
      for (int v = 0; v < kV; ++v) AddDots(sum[v * kM + m], a[v], b);
    }
  }
}

// y[m, v, lane]: the products over a block with columns from the first of `x` on, which is one of
// a group. `scales` [kV, kLanes] of rows.
template <int kV, int kM>
void EightTile(const uint8_t* w, const float* scales, const int32_t* x, int64_t steps,
               const int32_t*, const int32_t* parts, const float* by, float* y) {
  __m512i sum[kV * kM];
  Vec upper[kV * kM];
  for (int low = 0; low < 2; ++low) {
    UNROLL
    for (int i = 0; i < kV * kM; ++i) sum[i] = _mm512_set1_epi32(-parts[low * kLanes + i % kM]);
    AddSteps<kV, kM>(w, x + low * steps * kLanes, steps, sum);
    if (low == 0) {
      UNROLL
      for (int i = 0; i < kV * kM; ++i) upper[i] = Floats(sum[i]);
    }
  }
  UNROLL
  for (int v = 0; v < kV; ++v) {
    const Vec scale = Load(scales + v * kLanes);
    UNROLL
    for (int m = 0; m < kM; ++m) {
      const int i = v * kM + m;  // both sums are whole and below 2^24: this rounds once
      const Vec all = Fma(upper[i], Vec{} + 256.0f, Floats(sum[i]));
      Store(y + (m * kV + v) * kLanes, Once(all * (scale * by[m])));
    }
  }
}

// The same of weights in four bits, of which `scales` [tiles, kV, kLanes] are those of the tiles.
template <int kV, int kM>
void FourTile(const uint8_t* w, const float* scales, const int32_t* x, int64_t steps,
              const int32_t* sums, const int32_t*, const float* by, float* y) {
  constexpr int kSteps = kTile / 4;
  Vec total[4][kV * kM];
  for (auto& part : total) for (Vec& t : part) t = Vec{};
  for (int64_t s = 0, t = 0; s < steps; s += kSteps, ++t) {
    const uint8_t* from = w + s * kV * kBytes;
    __m512i sum[kV * kM];
    UNROLL
    for (int i = 0; i < kV * kM; ++i) sum[i] = _mm512_setzero_si512();
    AddSteps<kV, kM>(from, x + s * kLanes, kSteps, sum);
    UNROLL
    for (int i = 0; i < kV * kM; ++i) reinterpret_cast<IntVec&>(sum[i]) <<= 8;
    AddSteps<kV, kM>(from, x + (steps + s) * kLanes, kSteps, sum);
    Vec* to = total[t % 4];
    UNROLL
    for (int v = 0; v < kV; ++v) {
      const Vec scale = Load(scales + (t * kV + v) * kLanes);
      UNROLL
      for (int m = 0; m < kM; ++m) {
        const int i = v * kM + m;
        const __m512i whole = _mm512_sub_epi32(sum[i], _mm512_set1_epi32(sums[t * kLanes + m]));
        to[i] = Fma(Floats(whole), scale, to[i]);
      }
    }
  }
  UNROLL
  for (int v = 0; v < kV; ++v) {
    UNROLL
    for (int m = 0; m < kM; ++m) {
      const int i = v * kM + m;
      const Vec all = (total[0][i] + total[1][i]) + (total[2][i] + total[3][i]);
      Store(y + (m * kV + v) * kLanes, Once(all * by[m]));
    }
  }
}

using TileBy = void (*)(const uint8_t*, const float*, const int32_t*, int64_t, const int32_t*,
                        const int32_t*, const float*, float*);
template <bool kFour, int kV, int kM>
constexpr TileBy TileOf() {
  if constexpr (kFour) return &FourTile<kV, kM>;
  else return &EightTile<kV, kM>;
}
template <bool kFour, int kV, int... M>
constexpr std::array<TileBy, sizeof...(M)> TileTable(std::integer_sequence<int, M...>) {
  // the last rows of a weight take all columns, of which some are zeros
  return {{TileOf<kFour, kV, kV == kTall ? M + 1 : kAcross>()...}};
}
template <bool kFour>
constexpr std::array<std::array<TileBy, kAcross>, kTall> kTileBy = {
    {TileTable<kFour, 1>(Counts{}), TileTable<kFour, 2>(Counts{}), TileTable<kFour, 3>(Counts{})}};

// y [rows, columns], by `to`, from the first `few` columns of products [kLanes columns, tall, 16 rows].
inline void PutTall(const float* made, int tall, int64_t rows, int64_t few, float* y, To to) {
  const __mmask16 across = (1u << few) - 1;
  for (int v = 0; v < tall; ++v) {
    const int64_t down = std::min<int64_t>(kLanes, rows - v * kLanes);
    float* at = y + v * kLanes * to.down;
    if (to.down == 1) {
      const __mmask16 held = (1u << down) - 1;
      for (int64_t m = 0; m < few; ++m) {
        float* place = at + m * to.across;
        Vec value = Load(made + (m * tall + v) * kLanes);
        if (to.add) value = _mm512_maskz_loadu_ps(held, place) + value;
        _mm512_mask_storeu_ps(place, held, value);
      }
      continue;
    }
    __m512i r[kLanes];
    for (int m = 0; m < kLanes; ++m) r[m] = _mm512_loadu_si512(made + (m * tall + v) * kLanes);
    Turn(r);
    for (int64_t i = 0; i < down; ++i) {
      float* place = at + i * to.down;
      Vec value = reinterpret_cast<Vec>(r[i]);
      if (to.add) value = _mm512_maskz_loadu_ps(across, place) + value;
      _mm512_mask_storeu_ps(place, across, value);
    }
  }
}

// The products of up to kTallRows rows with all columns.
template <bool kFour>
void TallProducts(const TallRows& w, const ManyColumns& x, float* y, To to) {
  const int tall = static_cast<int>((w.rows + kLanes - 1) / kLanes);
  constexpr int64_t kValues = kDeep * kTallRows, kScales = kDeep / kTile * kTallRows;
  float* memory = Scratch(1, kValues / 4 + kScales);
  uint8_t* values = reinterpret_cast<uint8_t*>(memory);
  float* scales = memory + kValues / 4;
  alignas(64) float made[kLanes * kTallRows] = {};
  for (int64_t k = 0; k < x.in; k += kDeep, to.add = true) {
    const int64_t deep = std::min(x.in - k, kDeep), steps = ManyColumns::Steps(deep);
    PackTall<kFour>(w, k, deep, tall, values, scales);
    if (!kFour)
      for (int64_t r = 0; r < tall * kLanes; ++r) scales[r] = r < w.rows ? w.scales[r] : 0;
    for (int64_t group = 0; group < x.Groups(); ++group) {
      const int64_t few = std::min<int64_t>(kLanes, x.columns - group * kLanes);
      const int64_t shares = (few + kAcross - 1) / kAcross;
      for (int64_t share = 0, m = 0; share < shares; ++share) {
        // fewer columns at a time where that leaves no remainder of one or two
        const int64_t end = tall == kTall ? few * (share + 1) / shares : std::min(few, m + kAcross);
        kTileBy<kFour>[tall - 1][end - m - 1](values, scales, x.Words(group, k) + m, steps,
                                              x.Sums(group, k) + m, x.Parts(group, k) + m,
                                              x.Scales(group, k) + m, made + m * tall * kLanes);
        m = end;
      }
      PutTall(made, tall, w.rows, few, y + group * kLanes * to.across, to);
    }
  }
}

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_BYTE_TILES_H_
