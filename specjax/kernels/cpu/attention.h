// Attention over a cache, which is read in place.
//
// A result depends on the keys and values that its node sees, in their order, and on nothing else:
// not on how many other nodes and heads there are, nor on which keys are in the cache already. Sums
// over slots are taken slot by slot, those over features alike on both ways, and softmax.h has
// weights of which hidden ones are zero and the others do not depend on the blocks of slots.

#ifndef SPECJAX_ATTENTION_H_
#define SPECJAX_ATTENTION_H_

#include "few_columns.h"
#include "softmax.h"
#include "tasks.h"
#include "vectors.h"
#include "wide_columns.h"

namespace {

constexpr int kSlots = 128;  // cache slots scored at a time: their keys stay in the L1 cache
constexpr float kLog2E = 1.44269504088896341f;

// x [in, columns] -> blocks of kLanes columns, each [in, kLanes], times `scale`; zeros fill up.
template <typename X>
float* PackWide(int slot, const X* x, int64_t in, int64_t columns, float scale) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  float* packed = Scratch(slot, blocks * in * kLanes);
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t n = std::min<int64_t>(kLanes, columns - b * kLanes);
    for (int64_t k = 0; k < in; ++k) {
      float* to = packed + (b * in + k) * kLanes;
      for (int64_t m = 0; m < n; ++m) to[m] = Number(x[k * columns + b * kLanes + m]) * scale;
      for (int64_t m = n; m < kLanes; ++m) to[m] = 0.0f;
    }
  }
  return packed;
}

// One key/value head of one row: a running softmax over blocks of slots (2205.14135, forward).
template <typename T>
struct Head {
  int64_t size, columns, nodes;
  const float* query;  // packed, [blocks, size, lanes]
  float* out;          // unnormalised, [blocks, size, lanes]
  float* stats;        // running maximum and sum, [blocks, 2, lanes]
  float* whole;        // where numbers are narrow: room for keys and values as floats

  // `mask` [count, nodes], or null: all are seen. Column c is about node c % nodes.
  void Add(const T* keys, const T* values, int64_t count, const bool* mask) {
    if constexpr (std::is_same_v<T, float>) {
      AddFloats<true>(keys, values, count, mask);
    } else {  // numbers are spread over lanes one by one, so they are made floats first
      float* other = whole + kSlots * size;
      for (int64_t i = 0; i < count * size; ++i) whole[i] = Number(keys[i]);
      for (int64_t i = 0; i < count * size; ++i) other[i] = Number(values[i]);
      AddFloats<false>(whole, other, count, mask);
    }
  }

  // With `fetch`, values are fetched from memory while keys are scored, and the keys of the next slots
  // while values are weighed: either loop alone would wait for memory, which would rest in the other.
  template <bool fetch>
  void AddFloats(const float* keys, const float* values, int64_t count, const bool* mask) {
    constexpr int kRows = kRegisters / 8;  // slots in flight
    alignas(64) float scores[kSlots * kLanes];
    for (int64_t b = 0; b * kLanes < columns; ++b) {
      const float* q = query + b * size * kLanes;
      int64_t s = 0;
      Vec* to = reinterpret_cast<Vec*>(scores);
      for (; s + kRows <= count; s += kRows) {
        if (fetch && b == 0)
          for (int64_t i = 0; i < kRows * size; i += kLine / 4)
            __builtin_prefetch(values + s * size + i, 0, 2);
        Wide<kRows>(keys + s * size, q, size, to + s);
      }
      for (; s < count; ++s) Wide<1>(keys + s * size, q, size, to + s);
      if (mask != nullptr)
        for (s = 0; s < count; ++s)
          for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
            if (!mask[s * nodes + (b * kLanes + lane) % nodes]) scores[s * kLanes + lane] = kHidden;
      Vec top = to[0], sum = Load(stats + (2 * b + 1) * kLanes);
      for (s = 1; s < count; ++s) top = Max(top, to[s]);
      const Vec before = Load(stats + 2 * b * kLanes), now = Max(before, Round(top));
      const Vec fade = Power(before - now);
      sum *= fade;
      for (s = 0; s < count; ++s) sum += to[s] = Weights(to[s], now);
      Store(stats + 2 * b * kLanes, now);
      Store(stats + (2 * b + 1) * kLanes, sum);
      float* o = out + b * size * kLanes;
      int64_t e = 0;
      for (; e + kWeighed <= size; e += kWeighed) {
        const float* next = fetch && b == 0 ? keys + kSlots * size + e : nullptr;
        Weigh<kWeighed>(to, values + e, count, fade, o + e * kLanes, next);
      }
      for (; e < size; ++e) Weigh<1>(to, values + e, count, fade, o + e * kLanes, nullptr);
    }
  }

  static constexpr int kWeighed = kLine / 4;  // features at a time: a line of a slot's values

  // N features of a block of columns; the line of each slot from `next` on, if any, is fetched.
  template <int N>
  void Weigh(const Vec* weights, const float* values, int64_t count, Vec fade, float* o,
             const float* next) const {
    Vec sum[N];
    UNROLL
    for (int i = 0; i < N; ++i) sum[i] = Load(o + i * kLanes) * fade;
    for (int64_t s = 0; s < count; ++s) {
      if (next != nullptr) __builtin_prefetch(next + s * size, 0, 2);
      UNROLL
      for (int i = 0; i < N; ++i) sum[i] = Fma(weights[s], All(values[s * size + i]), sum[i]);
    }
    UNROLL
    for (int i = 0; i < N; ++i) Store(o + i * kLanes, sum[i]);
  }
};

// The same where the columns would leave most lanes empty: a vector holds features, then slots.
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
    FewRows<M, R>(keys, query, scores, size, size, count, To{1, kSlots, false});
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

// `used` slots of the cache of one head of one row, then its own entries.
template <typename T>
struct Slots {
  const T *keys, *values;
  int64_t count;
  const bool* mask;
};
template <typename T>
using Both = std::array<Slots<T>, 2>;

template <typename H, typename T>
void AddAll(H& head, const Both<T>& both) {
  for (const Slots<T>& part : both)
    for (int64_t s = 0; s < part.count; s += kSlots)
      head.Add(part.keys + s * head.size, part.values + s * head.size,
               std::min<int64_t>(kSlots, part.count - s),
               part.mask == nullptr ? nullptr : part.mask + s * head.nodes);
}

// One head of one row: its query and result [size, columns].
template <typename T>
void WideHead(const T* query, int64_t size, int64_t columns, int64_t nodes, const Both<T>& both,
              T* result) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  const float* packed = PackWide(1, query, size, columns, kLog2E / std::sqrt(float(size)));
  Head<T> h{size,   columns,
            nodes,  packed,
            Scratch(2, blocks * size * kLanes), Scratch(3, blocks * 2 * kLanes),
            std::is_same_v<T, float> ? nullptr : Scratch(0, 2 * kSlots * size)};
  std::fill_n(h.out, blocks * size * kLanes, 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    std::fill_n(h.stats + 2 * b * kLanes, kLanes, kFloor);
    std::fill_n(h.stats + (2 * b + 1) * kLanes, kLanes, 0.0f);
  }
  AddAll(h, both);
  for (int64_t b = 0; b < blocks; ++b) {
    const Vec part = 1.0f / Load(h.stats + (2 * b + 1) * kLanes);
    for (int64_t e = 0; e < size; ++e) {
      const Vec o = Load(h.out + (b * size + e) * kLanes) * part;
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
        Put(o[lane], result + e * columns + b * kLanes + lane);
    }
  }
}

template <int M, typename T>
void NarrowHead(const T* query, int64_t size, int64_t nodes, const Both<T>& both, T* result) {
  float *q = Scratch(1, M * size), *out = Scratch(2, 2 * M * size), stats[2 * M];
  const float scale = kLog2E / std::sqrt(float(size));
  for (int64_t e = 0; e < size; ++e)
    for (int m = 0; m < M; ++m) q[m * size + e] = Number(query[e * M + m]) * scale;
  FewHead<M, T> h{size, nodes, q, out, out + M * size, stats};
  std::fill_n(h.out, M * size, 0.0f);
  std::fill_n(stats, M, kFloor);
  std::fill_n(stats + M, M, 0.0f);
  AddAll(h, both);
  for (int m = 0; m < M; ++m) {
    const float part = 1.0f / stats[M + m];
    for (int64_t e = 0; e < size; ++e) Put(h.out[m * size + e] * part, result + e * M + m);
  }
}

template <typename T>
using Narrow = void (*)(const T*, int64_t, int64_t, const Both<T>&, T*);
template <typename T, int... M>
constexpr std::array<Narrow<T>, sizeof...(M)> NarrowTable(std::integer_sequence<int, M...>) {
  return {{&NarrowHead<M + 1, T>...}};
}
template <typename T>
constexpr auto kNarrow = NarrowTable<T>(Counts{});

// query [B, K, E, G, N], keys and values [B, K, S, E], own keys and values [B, K, M, E],
// mask [B or 1, M, N], length [B] -> [B, K, E, G, N]. Slots from `length` on are not read.
template <typename T, ffi::DataType kType>
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<kType> query, ffi::Buffer<kType> keys,
                     ffi::Buffer<kType> values, ffi::Buffer<kType> own_keys,
                     ffi::Buffer<kType> own_values, ffi::Buffer<ffi::PRED> mask,
                     ffi::Buffer<ffi::S32> length, ffi::ResultBuffer<kType> out) {
  const auto dims = query.dimensions();
  const int64_t batch = dims[0], heads = dims[1], size = dims[2], nodes = dims[4];
  const int64_t columns = dims[3] * nodes, slots = keys.dimensions()[2];
  const int64_t own = own_keys.dimensions()[2];
  const int64_t mask_step = mask.dimensions()[0] == 1 ? 0 : own * nodes;
  const auto at = [](auto& buffer) { return static_cast<const T*>(buffer.untyped_data()); };
  const T *q = at(query), *k = at(keys), *v = at(values), *ok = at(own_keys), *ov = at(own_values);
  const bool* seen = mask.typed_data();
  const int32_t* lengths = length.typed_data();
  T* result = static_cast<T*>(out->untyped_data());

  const auto head = [=](int64_t task) {
    const int64_t row = task / heads, used = std::clamp<int64_t>(lengths[row], 0, slots);
    const int64_t at = task * slots * size, own_at = task * own * size;
    const T* from = q + task * size * columns;
    T* to = result + task * size * columns;
    const Both<T> both = {{{k + at, v + at, used, nullptr},
                           {ok + own_at, ov + own_at, own, seen + row * mask_step}}};
    if (columns <= kFew) {
      kNarrow<T>[columns - 1](from, size, nodes, both, to);
    } else {
      WideHead(from, size, columns, nodes, both, to);
    }
  };
  // multiplications of vectors; where a vector holds features, its sums cost twice as much again
  const int64_t a_slot = columns <= kFew ? (columns * size * 4 + kLanes - 1) / kLanes
                                         : (columns + kLanes - 1) / kLanes * size * 2;
  int64_t work = 0;
  for (int64_t row = 0; row < batch; ++row)
    work += heads * (std::clamp<int64_t>(lengths[row], 0, slots) + own) * a_slot;
  if (work < 16'000) {  // some 6 microseconds; longer ones find and keep the threads awake
    for (int64_t task = 0; task < batch * heads; ++task) head(task);
  } else {
    Parallel(pool, batch * heads, head);
  }
  return ffi::Error::Success();
}

template <ffi::DataType kType>
auto BindAttention() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::Buffer<kType>>()
      .template Arg<ffi::Buffer<kType>>()
      .template Arg<ffi::Buffer<kType>>()
      .template Arg<ffi::Buffer<kType>>()
      .template Arg<ffi::Buffer<kType>>()
      .template Arg<ffi::Buffer<ffi::PRED>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<kType>>();
}

}  // namespace

#endif  // SPECJAX_ATTENTION_H_
