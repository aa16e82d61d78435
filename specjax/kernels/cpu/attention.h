// Attention over a cache, which is read in place.
//
// A result depends on the keys and values that its node sees, in their order, and on nothing else:
// not on how many other nodes and heads there are, nor on which keys are in the cache already. Sums
// over slots are taken slot by slot, those over features alike on both ways (that of few columns
// stands here, that of many in attention_wide.h), and softmax.h has weights of which hidden ones
// are zero and the others do not depend on the blocks of slots.

#ifndef SPECJAX_ATTENTION_H_
#define SPECJAX_ATTENTION_H_

#include "attention_slots.h"
#include "attention_tiles.h"
#include "attention_wide.h"
#include "few_columns.h"
#include "softmax.h"
#include "tasks.h"
#include "vectors.h"

namespace {

constexpr int kSlots = 128;  // cache slots scored at a time: their keys stay in the L1 cache

// One key/value head of one row: a running softmax over blocks of slots (2205.14135, forward). As
// M columns would leave most lanes empty, a vector holds features, then slots.
template <int M, typename T>
struct FewHead {
  int64_t size, nodes;
  const float* query;  // [M, size]
  float* out;          // unnormalised, [M, size]
  float* fresh;        // as much room: the next `out`
  float* stats;        // running maximum and sum, [2, M]

  void Add(const T* keys, const T* values, int64_t count, const bool* mask) {
    alignas(64) float scores[M * kSlots];
    constexpr int R = M < kLanes ? kLanes / M : 1;  // fills a vector of sums
    FewRows<M, R>(keys, query, scores, size, size, size, count, To{1, kSlots, false});
    float fades[M];
    for (int m = 0; m < M; ++m) {
      float* column = scores + m * kSlots;
      if (mask != nullptr)
        for (int64_t s = 0; s < count; ++s)
          if (!mask[s * nodes + m % nodes]) column[s] = kHidden;
      for (int64_t s = count; s % kLanes; ++s) column[s] = kHidden;
      Vec top = All(kHidden);
      for (int64_t s = 0; s < count; s += kLanes) top = Max(top, Load(column + s));
      top = Round(top);
      float now = stats[m];
      for (int i = 0; i < kLanes; ++i) now = now < top[i] ? top[i] : now;
      for (int64_t s = 0; s < count; s += kLanes)
        Store(column + s, Weights(Load(column + s), All(now)));
      fades[m] = Power(All(stats[m] - now))[0];
      stats[m] = now;
    }
    int64_t e = 0;
    if constexpr (!kTogether) Total(scores, count, fades);
    if (size < kLanes) {
      if constexpr (kTogether) Total(scores, count, fades);
      for (; e < size; ++e)
        for (int m = 0; m < M; ++m) {
          float s = out[m * size + e] * fades[m];
          for (int64_t t = 0; t < count; ++t)
            s = Fma(scores[m * kSlots + t], Number(values[t * size + e]), s);
          fresh[m * size + e] = s;
        }
    } else if (size < 4 * kLanes) {
      Weigh<1, true>(scores, values, count, fades, 0);
      for (e = kLanes; e + kLanes <= size; e += kLanes)
        Weigh<1, false>(scores, values, count, fades, e);
    } else {
      Weigh<4, true>(scores, values, count, fades, 0);
      for (e = 4 * kLanes; e + 4 * kLanes <= size; e += 4 * kLanes)
        Weigh<4, false>(scores, values, count, fades, e);
      for (; e + kLanes <= size; e += kLanes) Weigh<1, false>(scores, values, count, fades, e);
    }
    // the last vector overlaps the one before it
    if (e < size) Weigh<1, false>(scores, values, count, fades, size - kLanes);
    std::swap(out, fresh);
  }

  // Whether the registers have room for totals beside the vectors of features.
  static constexpr bool kTogether = 2 * M <= kRegisters - 2;

  void Total(const float* scores, int64_t count, const float* fades) const {
    float sum[M];
    UNROLL
    for (int m = 0; m < M; ++m) sum[m] = stats[M + m] * fades[m];
    for (int64_t s = 0; s < count; ++s) {
      UNROLL
      for (int m = 0; m < M; ++m) sum[m] += scores[m * kSlots + s];
    }
    for (int m = 0; m < M; ++m) stats[M + m] = sum[m];
  }

  // V vectors of features of every column, from feature e on; `first`: and the sums of weights,
  // where they are summed together.
  template <int V, bool first>
  void Weigh(const float* scores, const T* values, int64_t count, const float* fades,
             int64_t e) const {
    constexpr bool kSums = first && kTogether;
    constexpr int kMost = kRegisters - 2 - (kSums ? M : 0);
    // vectors at a time; two of them halve how often scores are read
    constexpr int N = V * M <= kMost ? V : V % 2 == 0 && 2 * M <= kMost ? 2 : 1;
    Chunk<N, kSums>(scores, values, count, fades, e);
    for (int v = N; v < V; v += N) Chunk<N, false>(scores, values, count, fades, e + v * kLanes);
  }

  template <int N, bool kSums>
  ALWAYS_INLINE void Chunk(const float* scores, const T* values, int64_t count, const float* fades,
                           int64_t e) const {
    Vec sum[M * N], total[M];
    UNROLL
    for (int m = 0; m < M; ++m) {
      if constexpr (kSums) total[m] = All(stats[M + m] * fades[m]);
      UNROLL
      for (int i = 0; i < N; ++i) sum[m * N + i] = Load(out + m * size + e + i * kLanes) * fades[m];
    }
    for (int64_t s = 0; s < count; ++s) {
      if constexpr (kSums) {
        UNROLL
        for (int m = 0; m < M; ++m) total[m] += scores[m * kSlots + s];
      }
      UNROLL
      for (int i = 0; i < N; ++i) {
        const Vec value = Once(Load(values + s * size + e + i * kLanes));
        UNROLL
        for (int m = 0; m < M; ++m)
          sum[m * N + i] = Fma(All(scores[m * kSlots + s]), value, sum[m * N + i]);
      }
    }
    UNROLL
    for (int m = 0; m < M; ++m) {
      if constexpr (kSums) stats[M + m] = total[m][0];
      UNROLL
      for (int i = 0; i < N; ++i) Store(fresh + m * size + e + i * kLanes, sum[m * N + i]);
    }
  }
};

template <typename H, typename T>
void AddAll(H& head, const Both<T>& both) {
  for (const Slots<T>& part : both)
    for (int64_t s = 0; s < part.count; s += kSlots)
      head.Add(part.keys + s * head.size, part.values + s * head.size,
               std::min<int64_t>(kSlots, part.count - s),
               part.mask == nullptr ? nullptr : part.mask + s * head.nodes);
}

// One head of one row: its query and result, M columns.
template <int M, typename T>
void NarrowHead(const T* query, int64_t size, HeadColumns at, const Both<T>& both, T* result) {
  float *q = Scratch(1, M * size), *out = Scratch(2, 2 * M * size), stats[2 * M];
  const float scale = kLog2E / std::sqrt(float(size));
  for (int m = 0; m < M; ++m) {
    const T* from = query + at(m);
    for (int64_t e = 0; e < size; ++e) q[m * size + e] = Number(from[e * at.feature]) * scale;
  }
  FewHead<M, T> h{size, at.nodes, q, out, out + M * size, stats};
  std::fill_n(h.out, M * size, 0.0f);
  std::fill_n(stats, M, kFloor);
  std::fill_n(stats + M, M, 0.0f);
  AddAll(h, both);
  for (int m = 0; m < M; ++m) {
    const float part = 1.0f / stats[M + m];
    T* to = result + at(m);
    for (int64_t e = 0; e < size; ++e) Put(h.out[m * size + e] * part, to + e * at.feature);
  }
}

template <typename T>
using Narrow = void (*)(const T*, int64_t, HeadColumns, const Both<T>&, T*);
template <typename T, int... M>
constexpr std::array<Narrow<T>, sizeof...(M)> NarrowTable(std::integer_sequence<int, M...>) {
  return {{&NarrowHead<M + 1, T>...}};
}
template <typename T>
constexpr auto kNarrow = NarrowTable<T>(Counts{});

// query [K, G, E, B, N], keys and values [B, K, S, E], own keys and values [B, K, M, E],
// mask [B or 1, M, N], length [B] -> [K, G, E, B, N]. Slots from `length` on are not read. With
// `tiled`, attention_tiles.h computes what it takes.
template <typename T, Type kType>
Problem Attention(ThreadPool pool, In<kType> query, In<kType> keys, In<kType> values,
                  In<kType> own_keys, In<kType> own_values, In<kBool> mask, In<kS32> length,
                  [[maybe_unused]] bool tiled, Out<kType> out) {
  const int64_t* dims = query.dims;
  const int64_t heads = dims[0], groups = dims[1], size = dims[2], batch = dims[3], nodes = dims[4];
  const int64_t columns = groups * nodes, slots = keys.dims[2];
  const HeadColumns place{nodes, size * batch * nodes, batch * nodes};
  const int64_t own = own_keys.dims[2];
  const int64_t mask_step = mask.dims[0] == 1 ? 0 : own * nodes;
  const auto at = [](const Buffer& buffer) { return buffer.data<const T>(); };
  const T *q = at(query), *k = at(keys), *v = at(values), *ok = at(own_keys), *ov = at(own_values);
  const bool* seen = mask.data<const bool>();
  const int32_t* lengths = length.data<const int32_t>();
  T* result = out.template data<T>();

  const auto slots_of = [=](int64_t head) {
    const int64_t at = head * slots * size, own_at = head * own * size, row = head / heads;
    const int64_t used = std::clamp<int64_t>(lengths[row], 0, slots);
    return Both<T>{{{k + at, v + at, used, nullptr},
                    {ok + own_at, ov + own_at, own, seen + row * mask_step}}};
  };
  // where the first column of key/value head `head % heads` of row `head / heads` begins
  const auto first_of = [=](int64_t head) {
    return head % heads * groups * place.query_head + head / heads * nodes;
  };
#if defined(SPECJAX_TILED_ATTENTION)
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, float>) {
    if (tiled && MayTile(size, nodes)) {
      TiledHeads<T>(pool, batch * heads, q, size, columns, place, first_of, slots_of, result);
      return nullptr;
    }
  }
#endif
  const bool few = columns <= kFew;
  const WideOrder order = few ? WideOrder{} : OrderOf(columns, nodes);
  const WideMasks masks = few ? WideMasks{} : PadMasks(seen, mask.dims[0], own, nodes);
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tiles = few ? 1 : TilesOf(order.size(), batch * heads, threads);

  const auto tile = [=, &order](int64_t task) {
    const auto [head, part] = WideTask(task, batch * heads, tiles, threads);
    const int64_t row = head / heads;
    const T* from = q + first_of(head);
    T* to = result + first_of(head);
    const Both<T> both = slots_of(head);
    if (few) {
      kNarrow<T>[columns - 1](from, size, place, both, to);
    } else {
      const int64_t begin = part * order.size() / tiles, end = (part + 1) * order.size() / tiles;
      kWide<T>[end - begin - 1](from, size, columns, place, &order[begin], both, masks, row, to);
    }
  };
  // multiplications of vectors; where a vector holds features, its sums cost twice as much again
  const int64_t a_slot = few ? (columns * size * 4 + kLanes - 1) / kLanes
                             : (columns + kLanes - 1) / kLanes * size * 2;
  int64_t work = 0;
  for (int64_t row = 0; row < batch; ++row)
    work += heads * (std::clamp<int64_t>(lengths[row], 0, slots) + own) * a_slot;
  if (work < 16'000) {  // some 6 microseconds; longer ones find and keep the threads awake
    for (int64_t task = 0; task < batch * heads * tiles; ++task) tile(task);
  } else {
    Parallel(pool, batch * heads * tiles, tile);
  }
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_ATTENTION_H_
