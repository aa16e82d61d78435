// Products of rows of weights in eight or four bits with columns in 16 bits by tiles of bytes (AMX).
//
// A tile of weights, 16 rows of 64 inputs, or of 32 in four bits, meets the high and the low bytes of
// 16 columns, or both bytes of eight columns at once. Weights of eight bits are taken as they lie in
// memory; those of four become bytes once for every 128 columns. Sums are exact, and every product of
// floats is that of byte_dots.h or nibble_dots.h, so that a column has the bits that it has there.

#ifndef SPECJAX_AMX_BYTES_H_
#define SPECJAX_AMX_BYTES_H_

#include "amx.h"
#include "byte_columns.h"
#include "byte_tiles.h"
#include "vectors.h"

namespace {

#if defined(SPECJAX_BYTE_DOTS)

constexpr int64_t kAmxRows = 32;       // of weights at a time: of two tiles
constexpr int64_t kAmxColumns = 128;   // at a time: with a block of weights they stay in the caches
constexpr int64_t kEightColumns = 3;   // from so many on, tiles are faster than sums over lanes
constexpr int64_t kFourColumns = 16;   // the same of weights in four bits

inline bool HasByteTiles() {
#if defined(SPECJAX_TILES)
  static const bool has = HasByteDots() && HasTilesOf(kByteTiles);
  return has;
#else
  return false;
#endif
}

#if defined(SPECJAX_TILES)

// Tiles 0 and 1 are sums of high bytes, or of both, and 2 and 3 of low ones, of the upper and the
// lower rows; 4 and 5 are weights of `depth` inputs, 6 and 7 columns.
inline TileConfig ByteConfig(int64_t rows, int64_t depth) {
  TileConfig config;
  const int64_t upper = std::min<int64_t>(rows, kLanes), lower = std::max<int64_t>(rows - kLanes, 1);
  for (int t : {0, 2, 4}) config.rows[t] = upper;
  for (int t : {1, 3, 5}) config.rows[t] = lower;
  for (int t : {6, 7}) config.rows[t] = depth / 4;
  for (int t = 0; t < 8; ++t) config.bytes[t] = t == 4 || t == 5 ? depth : 4 * kLanes;
  return config;
}

// A group of columns over a block of inputs, and the rows of weights that meet it.
struct Meeting {
  const int8_t* values;       // of `rows` rows, `stride` bytes apart
  int64_t stride, rows, first, deep;  // inputs from `first` on
  const int32_t *high, *low;  // of the columns
  const float* scales;        // of the first row; rows are `groups` apart
  int64_t groups, group;
  Vec by;                     // the columns' scales
  bool fetch;                 // whether the next rows are fetched
};

// What columns there are: up to eight, whose high and low bytes share tiles; a group; or more, which
// meet the same weights one after the other.
enum class Groups { kHalf, kOne, kMany };

// The sums of two tiles of weights, or with !kTwo of one, with high and low bytes side by side; in
// halves [rows, kLanes] of both.
template <bool kTwo, Groups kGroups>
struct TileSums {
  static constexpr bool kHalves = kGroups == Groups::kHalf;
  static constexpr int64_t kPitch = (kHalves ? 1 : 2) * kLanes;
  alignas(64) int32_t sums[kAmxRows * kPitch];

  WITH_TILES static ALWAYS_INLINE void Clear() {
    TILE_ZERO(0);
    if constexpr (kTwo) TILE_ZERO(1);
    if constexpr (!kHalves) TILE_ZERO(2);
    if constexpr (kTwo && !kHalves) TILE_ZERO(3);
  }
  // Calls `fetch` after each load of weights: before it, the load would wait for what is fetched.
  template <typename Call>
  WITH_TILES static ALWAYS_INLINE void Add(const int8_t* w, int64_t stride, const int32_t* high,
                                           const int32_t* low, const Call& fetch) {
    if constexpr (kGroups == Groups::kMany) {
      TILE_STREAM(6, high, 4 * kLanes);
    } else {
      TILE_LOAD(6, high, 4 * kLanes);
    }
    TILE_LOAD(4, w, stride);
    fetch();
    TILE_SIGNED(0, 4, 6);
    if constexpr (kTwo) {
      TILE_LOAD(5, w + kLanes * stride, stride);
      fetch();
      TILE_SIGNED(1, 5, 6);
    }
    if constexpr (!kHalves) {
      if constexpr (kGroups == Groups::kMany) {
        TILE_STREAM(7, low, 4 * kLanes);
      } else {
        TILE_LOAD(7, low, 4 * kLanes);
      }
      TILE_SIGNED(2, 4, 7);
      if constexpr (kTwo) TILE_SIGNED(3, 5, 7);
    }
  }
  WITH_TILES ALWAYS_INLINE void Take() {
    TILE_STORE(0, sums, 4 * kPitch);
    if constexpr (kTwo) TILE_STORE(1, sums + kLanes * kPitch, 4 * kPitch);
    if constexpr (!kHalves) TILE_STORE(2, sums + kLanes, 4 * kPitch);
    if constexpr (kTwo && !kHalves) TILE_STORE(3, sums + kLanes * kPitch + kLanes, 4 * kPitch);
  }
  // 256 high + low of a row, rounded once: both sums are whole and below 2^24.
  ALWAYS_INLINE Vec Row(int64_t r) const {
    const __m512i first = _mm512_load_si512(sums + r * kPitch);
    const __m512i second = kHalves ? _mm512_shuffle_i64x2(first, first, 0xee)
                                   : _mm512_load_si512(sums + r * kPitch + kLanes);
    return Fma(Floats(first), Vec{} + 256.0f, Floats(second));
  }
};

// made [rows, kLanes]: the products of rows of eight bits with a group of columns over a block.
template <bool kTwo, Groups kGroups>
WITH_TILES void EightRows(const Meeting& at, float* made) {
  alignas(64) int8_t rest[kAmxRows * kBytes];
  TileSums<kTwo, kGroups> tiles;
  Fetch next(at.values + kAmxRows * at.stride, at.deep, at.stride);
  tiles.Clear();
  for (int64_t k = 0; k < at.deep; k += kBytes) {
    const int8_t* from = at.values + k;
    int64_t stride = at.stride;
    const int64_t left = at.deep - k;
    if (left < kBytes) {  // what comes after the row's end may be no memory at all
      std::memset(rest, 0, sizeof rest);
      for (int64_t r = 0; r < at.rows; ++r) std::memcpy(rest + r * kBytes, from + r * stride, left);
      from = rest, stride = kBytes;
    }
    tiles.Add(from, stride, at.high + k * (kLanes / 4), at.low + k * (kLanes / 4),
              [&]() __attribute__((always_inline)) {
                if (at.fetch && left >= kBytes) next.Lines<kLanes>();
              });
  }
  tiles.Take();
  for (int64_t r = 0; r < at.rows; ++r)
    Store(made + r * kLanes, Once(tiles.Row(r) * (at.scales[r] * at.by)));
}

// The same of rows of four bits, of which the values are bytes. A tile of inputs is multiplied while
// the sums of the one before it are scaled, and its own sums are stored after that: no other order
// that was tried is faster.
template <bool kTwo, Groups kGroups>
WITH_TILES void FourRows(const Meeting& at, float* made) {
  TileSums<kTwo, kGroups> tiles[2];
  alignas(64) Vec total[4][kAmxRows];
  std::memset(total, 0, sizeof total);
  const int64_t count = at.deep / kTile, rows = at.rows, groups = at.groups;
  const auto multiply = [&](int64_t t) WITH_TILES __attribute__((always_inline)) {
    const int64_t k = t * kTile, words = k * (kLanes / 4);
    tiles->Clear();
    tiles->Add(at.values + k, at.stride, at.high + words, at.low + words, [] {});
  };
  multiply(0);
  tiles[0].Take();
  for (int64_t t = 0; t < count; ++t) {
    if (t + 1 < count) multiply(t + 1);
    const float* scales = at.scales + (at.first + t * kTile) / at.group;
    Vec* to = total[t % 4];
    for (int64_t r = 0; r < rows; ++r, scales += groups)
      to[r] = Fma(tiles[t % 2].Row(r), All(*scales), to[r]);
    if (t + 1 < count) tiles[(t + 1) % 2].Take();
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Vec all = (total[0][r] + total[1][r]) + (total[2][r] + total[3][r]);
    Store(made + r * kLanes, Once(all * at.by));
  }
}

// The signed bytes for which the values of rows of four bits stand, k ... k + deep - 1, in rows of
// kDeep bytes.
inline void OpenNibbles(const TallRows& w, int64_t k, int64_t deep, int64_t rows, int8_t* to) {
  const __m512i mask = _mm512_set1_epi8(15), middle = _mm512_set1_epi8(kMiddle);
  const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
  const __m512i second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = w.values + r * w.bytes + k / 2;
    for (int64_t i = 0; i < deep; i += 2 * kBytes) {
      const int64_t left = (deep - i) / 2;
      const __mmask64 held = left >= kBytes ? ~0ull : (1ull << left) - 1;
      const __m512i both = _mm512_maskz_loadu_epi8(held, from + i / 2);
      const __m512i low = _mm512_and_si512(both, mask);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
      const __m512i zero = w.zeros == nullptr
                               ? middle
                               : TileZeros(w.zeros + r * w.groups, w.group, k + i,
                                           std::min<int64_t>(4, (deep - i) / kTile));
      const __m512i even = _mm512_sub_epi8(low, zero), odd = _mm512_sub_epi8(high, zero);
      int8_t* place = to + r * kDeep + i;
      _mm512_storeu_si512(place, _mm512_permutex2var_epi64(even, first, odd));
      _mm512_storeu_si512(place + kBytes, _mm512_permutex2var_epi64(even, second, odd));
    }
  }
}

// y [rows, columns], by `to`, from the first `few` columns of products [rows, kLanes].
inline void PutLow(const float* made, int64_t rows, int64_t few, float* y, To to) {
  const __mmask16 across = (1u << few) - 1;
  if (to.across == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      float* place = y + r * to.down;
      Vec value = Load(made + r * kLanes);
      if (to.add) value = _mm512_maskz_loadu_ps(across, place) + value;
      _mm512_mask_storeu_ps(place, across, value);
    }
    return;
  }
  for (int64_t r = 0; r < rows; r += kLanes) {
    const __mmask16 held = (1u << std::min<int64_t>(kLanes, rows - r)) - 1;
    __m512i turned[kLanes];
    for (int i = 0; i < kLanes; ++i) turned[i] = _mm512_loadu_si512(made + (r + i) * kLanes);
    Turn(turned);
    for (int64_t m = 0; m < few; ++m) {
      float* place = y + r * to.down + m * to.across;
      Vec value = reinterpret_cast<Vec>(turned[m]);
      if (to.add) value = _mm512_maskz_loadu_ps(held, place) + value;
      _mm512_mask_storeu_ps(place, held, value);
    }
  }
}

#endif  // SPECJAX_TILES

#endif  // SPECJAX_BYTE_DOTS

}  // namespace

#endif  // SPECJAX_AMX_BYTES_H_
