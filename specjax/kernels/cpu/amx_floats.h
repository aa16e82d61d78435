// Products of floats with many columns by tiles of bfloat16 (AMX).
//
// A float is the sum of three bfloat16 numbers: its upper eight bits of precision, the next eight, and
// the last eight. Of the nine products of two such sums six are summed, in float32; the others, below
// 2^-21 of the product, are left out: on average about 2^-24 of it. Weights in bfloat16 are one number,
// and nothing is left out. Tiles take denormal numbers for zero, so that inputs below 2^-110 lose their
// last bits, and what is infinite becomes NaN.

#ifndef SPECJAX_AMX_FLOATS_H_
#define SPECJAX_AMX_FLOATS_H_

#include "amx.h"
#include "bfloat16.h"
#include "tasks.h"
#include "vectors.h"

namespace {

inline bool HasFloatTiles() {
#if defined(SPECJAX_TILES)
  static const bool has = HasTilesOf(kHalfTiles);
  return has;
#else
  return false;
#endif
}

#if defined(SPECJAX_TILES)

constexpr int kPlanes = 3;                // bfloat16 numbers of a float
constexpr int64_t kOfTile = 512;          // bfloat16 numbers of a tile: 16 rows of 32
constexpr int64_t kSide = 16;             // rows, or columns, of a tile
constexpr int64_t kTileInputs = 32;       // inputs of a tile
constexpr int64_t kHeldInputs = 128;      // at a time: what rows are opened to stays in the L1 cache
constexpr int64_t kOpenRows = 2 * kSide;  // at a time

// The three numbers of each lane, in the upper halves of lanes; what is not finite has NaN among them.
struct Planes {
  Vec plane[kPlanes];
  explicit ALWAYS_INLINE Planes(Vec x) {
    const auto upper = [](Vec v) {
      const IntVec bits = reinterpret_cast<const IntVec&>(v) & static_cast<int32_t>(0xffff0000);
      return reinterpret_cast<const Vec&>(bits);
    };
    plane[0] = upper(x);
    const Vec rest = x - plane[0];
    plane[1] = upper(rest);
    plane[2] = upper(rest - plane[1]);  // which cuts off what no normal number has
  }
  ALWAYS_INLINE __m512i operator[](int i) const { return _mm512_castps_si512(plane[i]); }
};

// How many floats' room columns of so many inputs take when they are packed.
inline int64_t PackedFloats(int64_t in, int64_t columns) {
  const int64_t steps = (in + kTileInputs - 1) / kTileInputs;
  return (columns + kSide - 1) / kSide * steps * kPlanes * kOfTile / 2;
}

// x [in, columns], rows `pitch` apart, -> [groups of columns, steps of 32 inputs, planes, pairs of
// inputs, 16 columns, 2], filled up with zeros: the inputs of steps first ... last - 1.
inline void PackPlanes(const float* x, int64_t pitch, int64_t in, int64_t columns, int64_t first,
                       int64_t last, uint16_t* packed) {
  const int64_t steps = (in + kTileInputs - 1) / kTileInputs;
  for (int64_t k = first * kTileInputs; k < last * kTileInputs; k += 2) {
    for (int64_t m = 0; m < columns; m += kSide) {
      const int64_t count = std::min(kSide, columns - m);
      const __mmask16 held = (1u << count) - 1;
      const float* from = x + k * pitch + m;
      const Planes even(_mm512_maskz_loadu_ps(k < in ? held : 0, from));
      const Planes odd(_mm512_maskz_loadu_ps(k + 1 < in ? held : 0, from + pitch));
      const int64_t tile = (m / kSide * steps + k / kTileInputs) * kPlanes;
      uint16_t* to = packed + tile * kOfTile + k % kTileInputs * kSide;
      UNROLL
      for (int p = 0; p < kPlanes; ++p) {
        const __m512i lower = _mm512_maskz_srli_epi32(-1, even[p], 16);
        _mm512_storeu_si512(to + p * kOfTile, _mm512_or_si512(lower, odd[p]));
      }
    }
  }
}

// 32 numbers of a row, of which the bits of `held` tell which are there, -> their planes, which are two
// tiles apart. Weights in bfloat16 have one plane.
ALWAYS_INLINE void OpenStep(const float* w, uint32_t held, __m512i upper, uint16_t* to) {
  const Planes first(_mm512_maskz_loadu_ps(held, w));
  const Planes second(_mm512_maskz_loadu_ps(held >> kLanes, w + kLanes));
  UNROLL
  for (int p = 0; p < kPlanes; ++p)
    _mm512_storeu_si512(to + p * 2 * kOfTile, _mm512_permutex2var_epi16(first[p], upper, second[p]));
}
ALWAYS_INLINE void OpenStep(const Half* w, uint32_t held, __m512i, uint16_t* to) {
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(held, w));
}
// Rows of weights, `in` apart, over `deep` inputs -> [steps, planes, 32 rows, 32 inputs], filled up with
// zeros.
template <typename Weight>
inline void OpenRows(const Weight* w, int64_t in, int64_t rows, int64_t deep, uint16_t* to) {
  constexpr int64_t kStep = (std::is_same_v<Weight, float> ? kPlanes : 1) * 2 * kOfTile;
  alignas(64) uint16_t odd[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) odd[i] = 2 * i + 1;
  const __m512i upper = _mm512_load_si512(odd);
  for (int64_t r = 0; r < rows; ++r, w += in, to += kTileInputs) {
    int64_t k = 0;
    uint16_t* at = to;
    for (; k + kTileInputs <= deep; k += kTileInputs, at += kStep) OpenStep(w + k, ~0u, upper, at);
    if (k < deep) OpenStep(w + k, (1u << (deep - k)) - 1, upper, at);
  }
  for (int64_t r = rows; r < kOpenRows; ++r, to += kTileInputs)
    for (int64_t i = 0; i < (deep + kTileInputs - 1) / kTileInputs * kStep; i += 2 * kOfTile)
      _mm512_storeu_si512(to + i, _mm512_setzero_si512());
}

// Sums [2 groups, 32 rows, 16 columns] that wait to be added to y [rows, pitch], or to be put there, which
// is done while the next ones are made.
struct FloatsWaiting {
  const float* sums;
  float* y;
  int64_t pitch, rows;
  bool two, add;

  ALWAYS_INLINE void Next() {
    const auto put = [this](const float* from, float* to) {
      const Vec made = Load(from);
      Store(to, add ? Load(to) + made : made);
    };
    put(sums, y);
    if (two) put(sums + kOpenRows * kSide, y + kSide);
    sums += kSide, y += pitch, --rows;
  }
  template <int kRows>
  ALWAYS_INLINE void Some() {
    for (int i = 0; i < kRows && rows > 0; ++i) Next();
  }
};

// The sums of 32 opened rows with one or two groups of columns over some steps, of which the tiles of
// the second group are `apart` further. Tiles 0 and 1 are sums of the first group, 2 and 3 of the second;
// 4 and 5 are weights, 6 and 7 columns, which are read once. kOf: the planes of weights.
template <int kOf, bool kTwo>
struct FloatSums {
  template <int kPlane>
  WITH_TILES static ALWAYS_INLINE void Multiply(const uint16_t* opened, FloatsWaiting& before) {
    TILE_LOAD(4, opened + kPlane * 2 * kOfTile, 2 * kTileInputs);
    TILE_HALVES(0, 4, 6);
    TILE_LOAD(5, opened + (kPlane * 2 + 1) * kOfTile, 2 * kTileInputs);
    TILE_HALVES(1, 5, 6);
    if constexpr (kTwo) {
      TILE_HALVES(2, 4, 7);
      TILE_HALVES(3, 5, 7);
    }
    before.Some<kOf == 1 ? 3 : 2>();
  }
  template <int kPlane>
  WITH_TILES static ALWAYS_INLINE void Meet(const uint16_t* opened, const uint16_t* x, int64_t apart,
                                            FloatsWaiting& before) {
    TILE_STREAM(6, x + kPlane * kOfTile, 4 * kSide);
    if constexpr (kTwo) TILE_STREAM(7, x + apart + kPlane * kOfTile, 4 * kSide);
    Multiply<0>(opened, before);
    if constexpr (kOf > 1 && kPlane < 2) Multiply<1>(opened, before);
    if constexpr (kOf > 1 && kPlane < 1) Multiply<2>(opened, before);
  }
  WITH_TILES static void Make(const uint16_t* opened, const uint16_t* x, int64_t apart, int64_t steps,
                              FloatsWaiting before, float* sums) {
    constexpr int64_t kBytes = 4 * kSide, kTile = kSide * kSide;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (kTwo) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int64_t s = 0; s < steps; ++s, opened += kOf * 2 * kOfTile, x += kPlanes * kOfTile) {
      Meet<0>(opened, x, apart, before);
      Meet<1>(opened, x, apart, before);
      Meet<2>(opened, x, apart, before);
    }
    while (before.rows > 0) before.Next();
    TILE_STORE(0, sums, kBytes);
    TILE_STORE(1, sums + kTile, kBytes);
    if constexpr (kTwo) {
      TILE_STORE(2, sums + 2 * kTile, kBytes);
      TILE_STORE(3, sums + 3 * kTile, kBytes);
    }
  }
};

// Rows of weights [height, in] and packed columns -> y [height, pitch].
template <typename Weight>
WITH_TILES void FloatTiles(const Weight* weight, const uint16_t* packed, int64_t in, int64_t height,
                           int64_t columns, float* y, int64_t pitch) {
  constexpr int kOf = std::is_same_v<Weight, float> ? kPlanes : 1;
  constexpr int64_t kSteps = kHeldInputs / kTileInputs;
  alignas(64) float sums[2][2 * kOpenRows * kSide];
  uint16_t* opened = reinterpret_cast<uint16_t*>(Scratch(2, kSteps * kOf * kOfTile));
  const int64_t steps = (in + kTileInputs - 1) / kTileInputs, apart = steps * kPlanes * kOfTile;
  const int64_t pairs = (columns + 2 * kSide - 1) / (2 * kSide);
  FloatsWaiting waiting{};
  int turn = 0;
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.rows[t] = kSide, config.bytes[t] = 4 * kSide;
  TILES_AS(config);
  for (int64_t k = 0; k < in; k += kHeldInputs) {
    const int64_t deep = std::min(kHeldInputs, in - k), some = (deep + kTileInputs - 1) / kTileInputs;
    for (int64_t begin = 0; begin < height; begin += kOpenRows) {
      const int64_t rows = std::min(kOpenRows, height - begin);
      OpenRows(weight + begin * in + k, in, rows, deep, opened);
      // what is opened next is fetched meanwhile: rows further down, or the next inputs of the first
      const bool down = begin + kOpenRows < height;
      const Weight* next = down ? weight + (begin + kOpenRows) * in + k : weight + k + kHeldInputs;
      for (int64_t pair = 0; pair < pairs; ++pair, turn ^= 1) {
        for (int64_t r = kOpenRows * pair / pairs; r < kOpenRows * (pair + 1) / pairs; ++r) {
          for (size_t i = 0; i < kHeldInputs * sizeof(Weight); i += kLine)
            __builtin_prefetch(reinterpret_cast<const char*>(next + r * in) + i, 0, 2);
        }
        const int64_t m = pair * 2 * kSide;
        const bool two = columns - m > kSide;
        const uint16_t* x = packed + (m / kSide * steps + k / kTileInputs) * kPlanes * kOfTile;
        const auto make = two ? &FloatSums<kOf, true>::Make : &FloatSums<kOf, false>::Make;
        make(opened, x, apart, some, waiting, sums[turn]);
        waiting = {sums[turn], y + begin * pitch + m, pitch, rows, two, k > 0};
      }
    }
  }
  while (waiting.rows > 0) waiting.Next();
  TILES_FREE();
}

#endif

}  // namespace

#endif  // SPECJAX_AMX_FLOATS_H_
