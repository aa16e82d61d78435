// Attention of prompts by tiles (AMX), which multiply bfloat16: scores and weighed values are sums of
// products of tiles, and what stands between them is a running softmax (2205.14135, forward), a
// vector of columns at a time.
//
// Weights are rounded to bfloat16. Floats are divided into two numbers of bfloat16, the nearest one
// and the nearest of what is left, so that they are rounded to 16 bits; the product of two small
// ones is left out. A result depends on nothing but what its node sees, in blocks of slots, so that
// it has other last bits than that of few columns.

#ifndef SPECJAX_ATTENTION_TILES_H_
#define SPECJAX_ATTENTION_TILES_H_

#include "amx.h"
#include "attention_slots.h"
#include "bfloat16.h"
#include "softmax.h"
#include "turn.h"
#include "vectors.h"

// Clang's assembler knows only what it compiles for.
#if defined(SPECJAX_TILES) && (defined(__AVX512BF16__) || !defined(__clang__))
#define SPECJAX_TILED_ATTENTION
#include "tasks.h"

namespace {

constexpr int64_t kLeastTiled = 33;  // nodes; those of fewer have the same bits however many there are
constexpr int64_t kBlockSlots = 128, kDepthOfTile = 32;
constexpr int64_t kGroup = 4;  // vectors of columns that go through a block together

// Two vectors as pairs of bfloat16: number i of `even` is the lower half of lane i.
ALWAYS_INLINE IntVec PairsOf(Vec even, Vec odd) {
  Vec both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(even), "v"(odd));
  alignas(64) static constexpr uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  return reinterpret_cast<IntVec>(_mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(both)));
}
// The numbers of the lower, and of the upper halves.
ALWAYS_INLINE Vec LowerOf(IntVec pairs) {
  const IntVec bits = pairs << 16;
  return reinterpret_cast<const Vec&>(bits);
}
ALWAYS_INLINE Vec UpperOf(IntVec pairs) {
  const IntVec bits = pairs & ~0xffff;
  return reinterpret_cast<const Vec&>(bits);
}
// The first parts of two vectors, and for floats the second ones `step` later.
template <int kParts>
ALWAYS_INLINE void PutParts(Vec even, Vec odd, IntVec* to, int64_t step) {
  const IntVec first = PairsOf(even, odd);
  *to = first;
  if constexpr (kParts == 2) to[step] = PairsOf(even - LowerOf(first), odd - UpperOf(first));
}

// 2^(t - n), relative error below 3e-6: much less than that of bfloat16.
ALWAYS_INLINE Vec ShortWeights(Vec t, Vec n) {
  const Vec whole = Round(t), f = Clamped(t - whole);
  Vec p = Fma(All(9.58275e-3f), f, All(5.590615e-2f));
  p = Fma(p, f, All(2.4024099e-1f));
  p = Fma(p, f, All(6.9312423e-1f));
  p = Fma(p, f, All(1.0f));
  return Scaled(p, whole - n);
}

// Values [count, size] -> [kParts, size, kBlockSlots]; slots from `count` on are zeros.
template <int kParts, typename T>
void TurnValues(const T* values, int64_t size, int64_t count, Half* to) {
  for (int64_t s = 0; s < count; s += kDepthOfTile) {
    for (int64_t e = 0; e < size; e += kLanes) {
      alignas(64) IntVec rows[kParts][16];
      UNROLL
      for (int i = 0; i < 16; ++i) {
        const int64_t at = s + 2 * i;
        const Vec even = at < count ? Load(values + at * size + e) : Vec{};
        const Vec odd = at + 1 < count ? Load(values + (at + 1) * size + e) : Vec{};
        PutParts<kParts>(even, odd, &rows[0][i], 16);
      }
      for (int p = 0; p < kParts; ++p) {
        __m512i* turned = reinterpret_cast<__m512i*>(rows[p]);
        Turn(turned);
        for (int i = 0; i < 16; ++i)
          _mm512_storeu_si512(to + (p * size + e + i) * kBlockSlots + s, turned[i]);
      }
    }
  }
}

// Keys [count, size] -> [kParts, kBlockSlots, size]; up to a whole tile, slots from `count` on are
// zeros.
template <int kParts, typename T>
void CopyKeys(const T* keys, int64_t size, int64_t count, Half* to) {
  const int64_t step = kBlockSlots * size, whole = count * size;
  const int64_t end = (count + kDepthOfTile - 1) / kDepthOfTile * kDepthOfTile * size;
  for (int64_t i = 0; i < end; i += kLanes) {
    const Vec x = i < whole ? Load(keys + i) : Vec{};
    const Vec first = Rounded<Half>(x);
    Put(first, to + i);
    if constexpr (kParts == 2) Put(x - first, to + step + i);
  }
}

// Sums of four tiles: 32 rows of a meet 16 columns of b and 16 of c, whose rows are 64 bytes long.
// They are added to what stands there, if `add`.
struct FourTiles {
  float *sums, *right;  // by b and by c; the sums of the lower 16 rows come 256 floats later
  template <bool add>
  ALWAYS_INLINE void Begin() const {
    if constexpr (add) {
      TILE_LOAD(0, sums, kLine);
      TILE_LOAD(1, sums + 256, kLine);
      TILE_LOAD(2, right, kLine);
      TILE_LOAD(3, right + 256, kLine);
    } else {
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  }
  ALWAYS_INLINE static void Add(const Half* a, int64_t stride, const IntVec* b, const IntVec* c,
                                int64_t depth) {
    for (int64_t k = 0; k < depth; k += kDepthOfTile) {
      TILE_LOAD(6, b + k / 2, kLine);
      TILE_LOAD(4, a + k, 2 * stride);
      TILE_HALVES(0, 4, 6);
      TILE_LOAD(5, a + 16 * stride + k, 2 * stride);
      TILE_HALVES(1, 5, 6);
      TILE_LOAD(7, c + k / 2, kLine);
      TILE_HALVES(2, 4, 7);
      TILE_HALVES(3, 5, 7);
    }
  }
  ALWAYS_INLINE void End() const {
    TILE_STORE(0, sums, kLine);
    TILE_STORE(1, sums + 256, kLine);
    TILE_STORE(2, right, kLine);
    TILE_STORE(3, right + 256, kLine);
  }
};

// Vectors of columns of one key/value head of one row, which pass through all slots in blocks.
template <int kParts, typename T>
struct TiledHead {
  int64_t size, columns, vectors;  // `vectors` is even: the last may be empty
  HeadColumns at;
  IntVec* query;  // [vectors, kParts, size / 2, 16] pairs of features
  float* out;     // [vectors, size, 16], unnormalised
  Vec *top, *total;
  Half *turned, *copied;   // the values, and the keys, of a block
  float* scores;           // [kGroup, kBlockSlots, 16]
  IntVec* weights;         // [kGroup, kParts, kBlockSlots / 2, 16]
  float scale;

  void Begin(const T* from, int64_t first) {
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t column = (first + v) * kLanes, feature = at.feature;
      const bool empty = column >= columns;
      const T* here = empty ? from : from + at(column);
      for (int64_t e = 0; e < size; e += 2) {
        const Vec even = empty ? Vec{} : Load(here + e * feature);
        const Vec odd = empty ? Vec{} : Load(here + (e + 1) * feature);
        PutParts<kParts>(even, odd, query + v * kParts * size / 2 + e / 2, size / 2);
      }
      std::fill_n(out + v * size * kLanes, size * kLanes, 0.0f);
      top[v] = All(kFloor), total[v] = Vec{};
    }
  }

  // `mask` [count, nodes] of a block's slots, or null: all are seen.
  void Block(const T* keys, const T* values, int64_t count, const bool* mask, int64_t first) {
    TurnValues<kParts>(values, size, count, turned);
    const Half* rows = copied;
    if (std::is_same_v<T, Half> && count == kBlockSlots) {
      rows = reinterpret_cast<const Half*>(keys);
    } else {
      CopyKeys<kParts>(keys, size, count, copied);
    }
    const int64_t whole = (count + kDepthOfTile - 1) / kDepthOfTile * kDepthOfTile;
    for (int64_t v = 0; v < vectors; v += kGroup) {
      const int64_t some = std::min(kGroup, vectors - v);
      Score(rows, whole, v, some);
      for (int64_t i = 0; i < some; ++i) Soften(v + i, i, count, whole, mask, first);
      Weigh(whole, v, some);
    }
  }

  WITH_TILES void Score(const Half* rows, int64_t whole, int64_t v, int64_t some) const {
    const int64_t step = size / 2, lower = kBlockSlots * size;
    for (int64_t i = 0; i < some; i += 2) {
      const IntVec *b = query + (v + i) * kParts * step, *c = b + kParts * step;
      for (int64_t s = 0; s < whole; s += kDepthOfTile) {
        float* to = scores + (i * kBlockSlots + s) * kLanes;
        const FourTiles four{to, to + kBlockSlots * kLanes};
        four.Begin<false>();
        FourTiles::Add(rows + s * size, size, b, c, size);
        if constexpr (kParts == 2) {
          FourTiles::Add(rows + s * size, size, b + step, c + step, size);
          FourTiles::Add(rows + lower + s * size, size, b, c, size);
        }
        four.End();
      }
    }
  }

  // Scores -> weights of vector v, number i of its group.
  void Soften(int64_t v, int64_t i, int64_t count, int64_t whole, const bool* mask, int64_t first) {
    float* own = scores + i * kBlockSlots * kLanes;
    for (int64_t s = count; s < whole; ++s) Store(own + s * kLanes, All(kHidden));
    Vec best = All(kHidden);
    if (mask == nullptr) {
      for (int64_t s = 0; s < count; ++s) best = Max(best, Load(own + s * kLanes));
    } else {
      const bool* seen = mask + std::min((first + v) * kLanes, columns - kLanes) % at.nodes;
      for (int64_t s = 0; s < count; ++s) {
        const Vec score = Seen(seen + s * at.nodes, Load(own + s * kLanes));
        Store(own + s * kLanes, score);
        best = Max(best, score);
      }
    }
    const Vec factor = All(scale), now = Max(top[v], Round(best * factor));
    const Vec fade = Power(top[v] - now);
    const IntVec moved = now != top[v];
    bool any = false;
    for (int lane = 0; lane < kLanes; ++lane) any |= moved[lane] != 0;
    if (any) {
      total[v] = total[v] * fade;
      float* o = out + v * size * kLanes;
      for (int64_t e = 0; e < size; ++e) Store(o + e * kLanes, Load(o + e * kLanes) * fade);
      top[v] = now;
    }
    Vec sum = total[v];
    IntVec* to = weights + i * kParts * kBlockSlots / 2;
    for (int64_t s = 0; s < whole; s += 2) {
      const Vec even = ShortWeights(Load(own + s * kLanes) * factor, now);
      const Vec odd = ShortWeights(Load(own + (s + 1) * kLanes) * factor, now);
      sum = (sum + even) + odd;
      PutParts<kParts>(even, odd, to + s / 2, kBlockSlots / 2);
    }
    total[v] = sum;
  }

  WITH_TILES void Weigh(int64_t whole, int64_t v, int64_t some) const {
    const int64_t step = kBlockSlots / 2, lower = size * kBlockSlots;
    for (int64_t i = 0; i < some; i += 2) {
      const IntVec *b = weights + i * kParts * step, *c = b + kParts * step;
      for (int64_t e = 0; e < size; e += 2 * kLanes) {
        float* to = out + ((v + i) * size + e) * kLanes;
        const FourTiles four{to, to + size * kLanes};
        const Half* a = turned + e * kBlockSlots;
        four.Begin<true>();
        FourTiles::Add(a, kBlockSlots, b, c, whole);
        if constexpr (kParts == 2) {
          FourTiles::Add(a, kBlockSlots, b + step, c + step, whole);
          FourTiles::Add(a + lower, kBlockSlots, b, c, whole);
        }
        four.End();
      }
    }
  }

  void End(int64_t first, T* result) const {
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t column = (first + v) * kLanes;
      if (column >= columns) break;
      const Vec part = 1.0f / total[v];
      T* to = result + at(column);
      const int64_t feature = at.feature;
      for (int64_t e = 0; e < size; ++e)
        Put(Load(out + (v * size + e) * kLanes) * part, to + e * feature);
    }
  }
};

// Whether such attention is computed by tiles.
inline bool MayTile(int64_t size, int64_t nodes) {
  static const bool has = [] {
    uint32_t a, b, c, d;  // AVX-512 BF16, whose conversions are used
    return HasTilesOf(kHalfTiles) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  }();
  return has && nodes >= kLeastTiled && nodes % kLanes == 0 && size % kDepthOfTile == 0;
}

// Vectors first ... last - 1 of the columns of one head: its query and result.
template <typename T>
void TiledColumns(const T* query, int64_t size, int64_t columns, HeadColumns at_column, int64_t first,
                  int64_t last, const Both<T>& both, T* result) {
  constexpr int kParts = std::is_same_v<T, float> ? 2 : 1;
  const int64_t vectors = (last - first + 1) / 2 * 2;
  const int64_t of_query = vectors * kParts * size / 2, of_weights = kGroup * kParts * kBlockSlots / 2;
  const int64_t of_block = kParts * kBlockSlots * size / 2 / kLanes;
  Vec* at = reinterpret_cast<Vec*>(Scratch(
      0, kLanes * (of_query + vectors * (size + 2) + 2 * of_block + kGroup * kBlockSlots + of_weights)));
  const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
  TiledHead<kParts, T> head;
  head.size = size, head.columns = columns, head.at = at_column, head.vectors = vectors;
  head.query = reinterpret_cast<IntVec*>(take(of_query));
  head.out = reinterpret_cast<float*>(take(vectors * size));
  head.top = take(vectors), head.total = take(vectors);
  head.turned = reinterpret_cast<Half*>(take(of_block));
  head.copied = reinterpret_cast<Half*>(take(of_block));
  head.scores = reinterpret_cast<float*>(take(kGroup * kBlockSlots));
  head.weights = reinterpret_cast<IntVec*>(take(of_weights));
  head.scale = kLog2E / std::sqrt(float(size));
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.rows[t] = 16, config.bytes[t] = kLine;
  TILES_AS(config);
  head.Begin(query, first);
  for (const Slots<T>& part : both)
    for (int64_t s = 0; s < part.count; s += kBlockSlots)
      head.Block(part.keys + s * size, part.values + s * size,
                 std::min(kBlockSlots, part.count - s),
                 part.mask == nullptr ? nullptr : part.mask + s * head.at.nodes, first);
  TILES_FREE();
  head.End(first, result);
}

// Attention of `count` heads of all rows, whose columns begin at first_of(head) and whose slots are
// slots_of(head).
template <typename T, typename FirstOf, typename SlotsOf>
void TiledHeads(ThreadPool& pool, int64_t count, const T* query, int64_t size, int64_t columns,
                HeadColumns at, const FirstOf& first_of, const SlotsOf& slots_of, T* result) {
  const int64_t threads = std::max<int64_t>(1, pool.num_threads()), vectors = columns / kLanes;
  const bool even = count % threads == 0 || count >= 4 * threads;
  const int64_t parts = even ? 1 : std::min((threads + count - 1) / count * 2, vectors / 2);
  Parallel(pool, count * parts, [=, &first_of, &slots_of](int64_t task) {
    const int64_t head = task / parts, part = task % parts;
    const int64_t first = vectors * part / parts / 2 * 2, end = part + 1;
    const int64_t last = end == parts ? vectors : vectors * end / parts / 2 * 2;
    TiledColumns<T>(query + first_of(head), size, columns, at, first, last, slots_of(head),
                    result + first_of(head));
  });
}

}  // namespace

#endif  // SPECJAX_TILED_ATTENTION

#endif  // SPECJAX_ATTENTION_TILES_H_
