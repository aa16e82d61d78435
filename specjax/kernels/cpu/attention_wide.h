// Attention of more columns than `kFew`: a vector holds columns, so that maxima, weights and sums
// of a softmax need no other lane. Scores and values are outer products: numbers of several slots,
// or features, meet several vectors of columns, and the sums stay in the registers.

#ifndef SPECJAX_ATTENTION_WIDE_H_
#define SPECJAX_ATTENTION_WIDE_H_

#include "attention_slots.h"
#include "bfloat16.h"
#include "softmax.h"
#include "vectors.h"
#include "wide_columns.h"

namespace {

constexpr int kMostVectors = 3;  // of columns, which a task takes together
// Cache slots that are scored at a time: fewer would have sums moved more often, with more the time
// in which nothing is fetched, that of weights, would be longer.
constexpr int kWideSlots = 32;

constexpr int kMostTurned = 6, kTurned = kRegisters / 8;  // columns, vectors of features at a time

// `lines` of every slot's row of `size` floats are fetched, from `of_row` on in the first.
struct Lines {
  const float* of_row;
  int64_t count;
};

// Adds the values of `count` slots, by `weights` [slots, lanes], to `out` [M, size] times `fade`: N
// vectors of features of M columns.
template <int N, int M>
void Turned(const float* weights, const float* values, int64_t size, int64_t count,
            const float* fade, float* out, Lines lines) {
  Vec sum[M * N];
  UNROLL
  for (int m = 0; m < M; ++m) {
    UNROLL
    for (int n = 0; n < N; ++n) sum[m * N + n] = Load(out + m * size + n * kLanes) * fade[m];
  }
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t i = 0; i < lines.count; ++i)
      __builtin_prefetch(lines.of_row + s * size + i * (kLine / 4), 0, 2);
    Vec value[N];
    UNROLL
    for (int n = 0; n < N; ++n) value[n] = Once(Load(values + s * size + n * kLanes));
    UNROLL
    for (int m = 0; m < M; ++m) {
      const Vec weight = Once(All(weights[s * kLanes + m]));
      UNROLL
      for (int n = 0; n < N; ++n) sum[m * N + n] = Fma(weight, value[n], sum[m * N + n]);
    }
  }
  UNROLL
  for (int m = 0; m < M; ++m) {
    UNROLL
    for (int n = 0; n < N; ++n) Store(out + m * size + n * kLanes, sum[m * N + n]);
  }
}

using TurnedBy = void (*)(const float*, const float*, int64_t, int64_t, const float*, float*,
                          Lines);
template <int N>  // by the number of columns, less one
constexpr TurnedBy kTurnedBy[kMostTurned] = {&Turned<N, 1>, &Turned<N, 2>, &Turned<N, 3>,
                                             &Turned<N, 4>, &Turned<N, 5>, &Turned<N, 6>};

// V vectors of columns of one key/value head of one row: a running softmax over blocks of slots
// (2205.14135, forward).
template <int V>
struct WideTile {
  static constexpr int kRows = kRegisters / (V == 1 ? 4 : 8);               // slots at a time
  static constexpr int kWeighed = V == 1 ? kRegisters / 2 : kRegisters / 4;  // features at a time

  // Where one vector holds all columns, a vector of `out` may hold features: values are weighed for
  // as many columns as there are then, not for all lanes.
  static constexpr bool kMayTurn = V == 1 && kLanes > kFew;
  bool Turns() const { return kMayTurn && columns > kLanes / 2 && size % kLanes == 0; }

  int64_t size, columns;
  const Vec* query;      // [size, V], scaled
  Vec* out;              // unnormalised, [size, V], or, where it turns, [columns, size]
  Vec top[V], total[V];  // running maxima, and sums of weights
  alignas(64) Vec scores[kWideSlots * V];

  // `mask` [count, pitch], or null: all are seen; that of vector v begins at mask[first[v]]. With
  // `fetch`, values are fetched from memory while keys are scored, and the keys of the next slots
  // while values are weighed: a loop alone would wait for memory, which would rest in the other.
  template <bool fetch>
  void Add(const float* keys, const float* values, int64_t count, const bool* mask, int64_t pitch,
           const int64_t* first) {
    const auto score = [&](auto rows, int64_t s) {
      constexpr int R = rows;
      Wide<R, V>(keys + s * size, query, size, scores + s * V, values + s * size,
                 fetch ? R * size * 4 / kLine : 0);
    };
    if (count < kRows) {
      for (int64_t s = 0; s < count; ++s) score(std::integral_constant<int, 1>{}, s);
    } else {  // the last slots overlap those before them
      for (int64_t s = 0; s < count; s += kRows)
        score(std::integral_constant<int, kRows>{}, std::min(s, count - kRows));
    }
    Vec best[V], fade[V], sum[V];
    for (int v = 0; v < V; ++v) best[v] = All(kHidden);
    for (int64_t s = 0; s < count; ++s) {
      UNROLL
      for (int v = 0; v < V; ++v) {
        Vec& of_slot = scores[s * V + v];
        if (mask != nullptr) of_slot = Seen(mask + s * pitch + first[v], of_slot);
        best[v] = Max(best[v], of_slot);
      }
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
    const float* next = fetch ? keys + kWideSlots * size : nullptr;
    if constexpr (kMayTurn) {
      if (Turns()) {
        WeighTurned(values, count, fade[0], next);
        return;
      }
    }
    int64_t e = 0;
    for (; e + kWeighed <= size; e += kWeighed) {
      const bool line = fetch && e * 4 % kLine == 0;
      Weigh<kWeighed>(values + e, count, fade, out + e * V, line ? next + e : nullptr);
    }
    for (; e < size; ++e) Weigh<1>(values + e, count, fade, out + e * V, nullptr);
  }

  // N features of the values; the line of each slot from `next` on, if any, is fetched.
  template <int N>
  void Weigh(const float* values, int64_t count, const Vec* fade, Vec* o, const float* next) const {
    Vec sum[N * V];
    UNROLL
    for (int i = 0; i < N; ++i) {
      UNROLL
      for (int v = 0; v < V; ++v) sum[i * V + v] = o[i * V + v] * fade[v];
    }
    for (int64_t s = 0; s < count; ++s) {
      if (next != nullptr) __builtin_prefetch(next + s * size, 0, 2);
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

  // The same by vectors of features; each loop over the slots fetches as many lines as any other.
  void WeighTurned(const float* values, int64_t count, Vec fade, const float* next) const {
    const int64_t parts = (columns + kMostTurned - 1) / kMostTurned, vectors = size / kLanes;
    const int64_t loops = parts * (vectors / kTurned + vectors % kTurned);
    const int64_t lines = next == nullptr ? 0 : (size * 4 + kLine - 1) / kLine;
    int64_t loop = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t m = columns * part / parts, taken = columns * (part + 1) / parts - m;
      const float* weights = reinterpret_cast<const float*>(scores) + m;
      const float* fades = reinterpret_cast<const float*>(&fade) + m;
      float* to = reinterpret_cast<float*>(out) + m * size;
      for (int64_t e = 0; e < size;) {
        const bool several = e + kTurned * kLanes <= size;
        const TurnedBy turned = several ? kTurnedBy<kTurned>[taken - 1] : kTurnedBy<1>[taken - 1];
        const int64_t begin = loop * lines / loops, end = ++loop * lines / loops;
        turned(weights, values + e, size, count, fades, to + e,
               Lines{next + begin * (kLine / 4), end - begin});
        e += several ? kTurned * kLanes : kLanes;
      }
    }
  }
};

// The vectors of columns of a head, each with the node of its first column: those of the same nodes
// come one after the other, since they see equally many of the own entries.
struct WideVector {
  int64_t node, column;
};
using WideOrder = std::vector<WideVector>;
inline WideOrder OrderOf(int64_t columns, int64_t nodes) {
  WideOrder order;
  for (int64_t c = 0; c < columns; c += kLanes) order.push_back({c % nodes, c});
  std::sort(order.begin(), order.end(), [](const WideVector& a, const WideVector& b) {
    return a.node != b.node ? a.node < b.node : a.column < b.column;
  });
  return order;
}

// Into how many tasks the vectors of each of `heads` heads are divided.
inline int64_t TilesOf(int64_t vectors, int64_t heads, int64_t threads) {
  const int64_t least = (vectors + kMostVectors - 1) / kMostVectors;
  return std::max(least, std::min(vectors, (threads + heads - 1) / std::max<int64_t>(heads, 1)));
}

// The head and the tile of a task. Threads begin with a head each, whose keys and values are then
// in the caches of one core, and with the tiles whose nodes come last, which usually see the most.
struct HeadAndTile {
  int64_t head, tile;
};
inline HeadAndTile WideTask(int64_t task, int64_t heads, int64_t tiles, int64_t threads) {
  const int64_t first = task / (threads * tiles) * threads, side = std::min(threads, heads - first);
  const int64_t place = task - first * tiles;
  return {first + place % side, tiles - 1 - place / side};
}

// Masks [rows, own, pitch] of which a vector of columns can be read from every node on.
struct WideMasks {
  const bool* seen;
  int64_t pitch, step;  // from slot to slot and from row to row
};
// `seen` [rows, own, nodes], where column c is about node c % nodes.
inline WideMasks PadMasks(const bool* seen, int64_t rows, int64_t own, int64_t nodes) {
  if (nodes % kLanes == 0) return {seen, nodes, rows == 1 ? 0 : own * nodes};
  const int64_t pitch = nodes + kLanes - 1;
  bool* padded = reinterpret_cast<bool*>(Scratch(4, (rows * own * pitch + 3) / 4));
  for (int64_t s = 0; s < rows * own; ++s) {
    bool* to = padded + s * pitch;
    std::copy_n(seen + s * nodes, nodes, to);
    for (int64_t i = nodes; i < pitch; ++i) to[i] = to[i - nodes];
  }
  return {padded, pitch, rows == 1 ? 0 : own * pitch};
}

// Whether one of a vector of columns sees a slot.
inline bool AnySeen(const bool* seen) {
  uint32_t any = 0, part;
  for (int i = 0; i < kLanes; i += 4) {
    std::memcpy(&part, seen + i, 4);
    any |= part;
  }
  return any != 0;
}

// V vectors of columns of one head of row `row`: its query and result.
template <int V, typename T>
void WideColumns(const T* query, int64_t size, int64_t columns, HeadColumns at, const WideVector* vectors,
                 const Both<T>& both, const WideMasks& masks, int64_t row, T* result) {
  WideTile<V> tile;
  Vec* packed = reinterpret_cast<Vec*>(Scratch(1, size * V * kLanes));
  tile.size = size, tile.query = packed;
  tile.columns = std::min<int64_t>(kLanes, columns - vectors[0].column);
  tile.out = reinterpret_cast<Vec*>(Scratch(2, size * V * kLanes));
  const float scale = kLog2E / std::sqrt(float(size));
  const bool* seen = masks.seen + row * masks.step;
  int64_t first[V], own = 0;  // own entries that are seen, but for hidden ones among them
  for (int v = 0; v < V; ++v) {
    first[v] = vectors[v].node;
    const int64_t column = vectors[v].column, count = std::min<int64_t>(kLanes, columns - column);
    for (int64_t e = 0; e < size; ++e) packed[e * V + v] = tile.out[e * V + v] = Vec{};
    at.EachStretch(column, count, [&](int64_t lane, auto some) {
      const T* from = query + at(column + lane);
      float* to = reinterpret_cast<float*>(packed + v) + lane;
      for (int64_t e = 0; e < size; ++e, from += at.feature, to += V * kLanes) {
        if constexpr (some == kLanes) {
          Store(to, Load(from) * scale);
        } else {
          constexpr int n = some;
          float x[n];  // all are read before one is written, so that compilers may use a vector
          UNROLL
          for (int i = 0; i < n; ++i) x[i] = Number(from[i]) * scale;
          std::memcpy(to, x, sizeof(x));
        }
      }
    });
    tile.top[v] = All(kFloor), tile.total[v] = Vec{};
    int64_t end = both[1].count;
    while (end > own && !AnySeen(seen + (end - 1) * masks.pitch + first[v])) --end;
    own = std::max(own, end);
  }
  const auto add = [&](const Slots<T>& slots, int64_t used, const bool* mask) {
    for (int64_t s = 0; s < used; s += kWideSlots) {
      const int64_t count = std::min<int64_t>(kWideSlots, used - s);
      const T *keys = slots.keys + s * size, *values = slots.values + s * size;
      const bool* part = mask == nullptr ? nullptr : mask + s * masks.pitch;
      if constexpr (std::is_same_v<T, float>) {
        tile.template Add<true>(keys, values, count, part, masks.pitch, first);
      } else {  // numbers are spread over lanes one by one, so they are made floats first
        float *whole = Scratch(0, 2 * kWideSlots * size), *other = whole + kWideSlots * size;
        for (int64_t i = 0; i < count * size; ++i) whole[i] = Number(keys[i]);
        for (int64_t i = 0; i < count * size; ++i) other[i] = Number(values[i]);
        tile.template Add<false>(whole, other, count, part, masks.pitch, first);
      }
    }
  };
  add(both[0], both[0].count, nullptr);
  add(both[1], own, seen);
  for (int v = 0; v < V; ++v) {
    const int64_t column = vectors[v].column, count = std::min<int64_t>(kLanes, columns - column);
    alignas(64) float part[kLanes];
    Store(part, 1.0f / tile.total[v]);
    const float* out = reinterpret_cast<const float*>(tile.out + v);
    // `down` and `across` are the distances in `out` between features and between columns
    const auto put = [&](int64_t down, auto across) {
      at.EachStretch(column, count, [&](int64_t lane, auto some) {
        const float* o = out + lane * across;
        T* to = result + at(column + lane);
        for (int64_t e = 0; e < size; ++e, o += down, to += at.feature) {
          constexpr int n = some;
          alignas(64) float x[n];
          UNROLL
          for (int i = 0; i < n; ++i) x[i] = o[i * across] * part[lane + i];
          if constexpr (n == kLanes) {
            Put(Load(x), to);
          } else {
            UNROLL
            for (int i = 0; i < n; ++i) Put(x[i], to + i);
          }
        }
      });
    };
    if (tile.Turns()) {
      put(1, size);
    } else {
      put(V * kLanes, std::integral_constant<int, 1>{});
    }
  }
}

// By the number of vectors, less one.
template <typename T>
constexpr std::array<decltype(&WideColumns<1, T>), kMostVectors> kWide = {
    {&WideColumns<1, T>, &WideColumns<2, T>, &WideColumns<3, T>}};

}  // namespace

#endif  // SPECJAX_ATTENTION_WIDE_H_
