// Attention of more columns than `kFew`: a vector holds columns, so that maxima, weights and sums of
// a softmax need nothing of other lanes.

#ifndef SPECJAX_ATTENTION_WIDE_H_
#define SPECJAX_ATTENTION_WIDE_H_

#include "attention_slots.h"
#include "softmax.h"
#include "wide_columns.h"

namespace {

constexpr int kMostVectors = 3;  // of columns, which are taken together

typedef uint8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

// V vectors of columns of one key/value head of one row: a running softmax over blocks of slots
// (2205.14135, forward).
template <int V>
struct WideTile {
  static constexpr int kRows = kRegisters / (V == 1 ? 4 : 8);  // slots that are scored at once
  static constexpr int kWeighed = V == 1 ? kRegisters / 2 : kRegisters / 4;  // features at once

  int64_t size;
  const Vec* query;  // [size, V], scaled
  Vec* out;          // unnormalised, [size, V]
  Vec top[V], total[V];  // running maxima and sums of weights
  Vec scores[kSlots * V];

  // `mask` [count, pitch], or null: all are seen; vector v begins at mask[first[v]].
  void Add(const float* keys, const float* values, int64_t count, const bool* mask, int64_t pitch,
           const int64_t* first) {
    if (count < kRows) {
      for (int64_t s = 0; s < count; ++s) Wide<1, V>(keys + s * size, query, size, scores + s * V);
    } else {
      // the last rows overlap those before them
      for (int64_t s = 0; s < count; s += kRows) {
        const int64_t at = std::min(s, count - kRows);
        Wide<kRows, V>(keys + at * size, query, size, scores + at * V);
      }
    }
    Vec best[V], fade[V], sum[V];
    for (int v = 0; v < V; ++v) best[v] = All(kHidden);
    if (mask != nullptr) {
      for (int64_t s = 0; s < count; ++s) {
        UNROLL
        for (int v = 0; v < V; ++v) {
          const ByteVec bytes = *reinterpret_cast<const ByteVec*>(mask + s * pitch + first[v]);
          const IntVec seen = __builtin_convertvector(bytes, IntVec);
          scores[s * V + v] = seen != 0 ? scores[s * V + v] : All(kHidden);
        }
      }
    }
    for (int64_t s = 0; s < count; ++s) {
      UNROLL
      for (int v = 0; v < V; ++v) best[v] = Max(best[v], scores[s * V + v]);
    }
    UNROLL
    for (int v = 0; v < V; ++v) {
      best[v] = Max(top[v], Round(best[v]));
      fade[v] = Power(top[v] - best[v]);
      sum[v] = total[v] * fade[v];
      top[v] = best[v];
    }
    for (int64_t s = 0; s < count; ++s) {
      UNROLL
      for (int v = 0; v < V; ++v) sum[v] += scores[s * V + v] = Weights(scores[s * V + v], best[v]);
    }
    UNROLL
    for (int v = 0; v < V; ++v) total[v] = sum[v];
    int64_t e = 0;
    for (; e + kWeighed <= size; e += kWeighed) Weigh<kWeighed>(values + e, count, fade, out + e * V);
    for (; e < size; ++e) Weigh<1>(values + e, count, fade, out + e * V);
  }

  // N features of the values.
  template <int N>
  void Weigh(const float* values, int64_t count, const Vec* fade, Vec* o) const {
    Vec sum[N * V];
    UNROLL
    for (int i = 0; i < N; ++i) {
      UNROLL
      for (int v = 0; v < V; ++v) sum[i * V + v] = o[i * V + v] * fade[v];
    }
    for (int64_t s = 0; s < count; ++s) {
      Vec weight[V];
      UNROLL
      for (int v = 0; v < V; ++v) weight[v] = Once(scores[s * V + v]);
      UNROLL
      for (int i = 0; i < N; ++i) {
        const Vec value = V > 1 ? Once(All(values[s * size + i])) : All(values[s * size + i]);
        UNROLL
        for (int v = 0; v < V; ++v) sum[i * V + v] = Fma(weight[v], value, sum[i * V + v]);
      }
    }
    UNROLL
    for (int i = 0; i < N * V; ++i) o[i] = sum[i];
  }
};

// Whether one of a vector of columns sees a slot.
inline bool AnySeen(const bool* mask) {
  uint32_t any = 0, word;
  for (int i = 0; i < kLanes; i += 4) {
    std::memcpy(&word, mask + i, 4);
    any |= word;
  }
  return any != 0;
}

// What all heads of one row have in common.
struct WideMask {
  const bool* seen;  // [own, pitch]
  int64_t pitch, nodes;
};

// The vectors of columns order[0 ... V-1] of one head of one row: its query and result
// [size, columns].
template <int V, typename T>
void WideColumns(const T* query, int64_t size, int64_t columns, const int64_t* order,
                 const WideMask& mask, const Both<T>& both, T* result) {
  Vec* packed = reinterpret_cast<Vec*>(Scratch(1, size * V * kLanes));
  Vec* out = reinterpret_cast<Vec*>(Scratch(2, size * V * kLanes));
  const float scale = kLog2E / std::sqrt(float(size));
  WideTile<V> tile;
  tile.size = size, tile.query = packed, tile.out = out;
  int64_t first[V], own = 0;
  for (int v = 0; v < V; ++v) {
    const int64_t column = order[v] * kLanes, count = std::min<int64_t>(kLanes, columns - column);
    for (int64_t e = 0; e < size; ++e) {
      const T* from = query + e * columns + column;
      if (count == kLanes) {
        packed[e * V + v] = Load(from) * scale;
      } else {
        Vec x{};
        for (int64_t lane = 0; lane < count; ++lane) x[lane] = Number(from[lane]) * scale;
        packed[e * V + v] = x;
      }
    }
    tile.top[v] = All(kFloor);
    tile.total[v] = Vec{};
    first[v] = column % mask.nodes;
    int64_t end = both[1].count;
    while (end > own && !AnySeen(mask.seen + (end - 1) * mask.pitch + first[v])) --end;
    own = std::max(own, end);
  }
  std::fill_n(out, size * V, Vec{});
  for (int part = 0; part < 2; ++part) {
    const Slots<T>& slots = both[part];
    const int64_t end = part == 0 ? slots.count : own;
    for (int64_t s = 0; s < end; s += kSlots) {
      const int64_t count = std::min<int64_t>(kSlots, end - s);
      const T *keys = slots.keys + s * size, *values = slots.values + s * size;
      const bool* seen = part == 0 ? nullptr : mask.seen + s * mask.pitch;
      if constexpr (std::is_same_v<T, float>) {
        tile.Add(keys, values, count, seen, mask.pitch, first);
      } else {  // numbers are spread over lanes one by one, so they are made floats first
        float *whole = Scratch(0, 2 * kSlots * size), *other = whole + kSlots * size;
        for (int64_t i = 0; i < count * size; ++i) whole[i] = Number(keys[i]);
        for (int64_t i = 0; i < count * size; ++i) other[i] = Number(values[i]);
        tile.Add(whole, other, count, seen, mask.pitch, first);
      }
    }
  }
  for (int v = 0; v < V; ++v) {
    const int64_t column = order[v] * kLanes, count = std::min<int64_t>(kLanes, columns - column);
    const Vec part = 1.0f / tile.total[v];
    for (int64_t e = 0; e < size; ++e) {
      const Vec o = out[e * V + v] * part;
      T* to = result + e * columns + column;
      if (count == kLanes) {
        Put(o, to);
      } else {
        for (int64_t lane = 0; lane < count; ++lane) Put(o[lane], to + lane);
      }
    }
  }
}

}  // namespace

#endif  // SPECJAX_ATTENTION_WIDE_H_
