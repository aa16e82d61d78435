// Attention over a cache, which is read in place.

#ifndef SPECJAX_ATTENTION_H_
#define SPECJAX_ATTENTION_H_

#include "few_columns.h"
#include "tasks.h"
#include "vectors.h"
#include "wide_columns.h"

namespace {

constexpr int kSums = kRegisters * 3 / 4;  // vectors of sums that the registers hold
constexpr int kSlots = 128;  // cache slots scored at a time: their keys stay in the L1 cache
constexpr float kHidden = -1e30f;  // the score of what a node may not see

// a where either is no number: the running maximum stays one, and Exp passes NaN on.
inline Vec Max(Vec a, Vec b) { return a < b ? b : a; }

// e^x for x <= 0, relative error below 2e-7 (Cephes); 0 below -87.
inline Vec Exp(Vec x) {
  const Vec low = Vec{} - 87.0f;
  const IntVec dead = x < low;
  x = Max(x, low);
  const Vec turns = x * 1.44269504088896341f - 0.5f;
  const IntVec n = __builtin_convertvector(turns, IntVec);  // towards zero: rounds, since x <= 0
  const Vec f = __builtin_convertvector(n, Vec);
  const Vec r = (x - f * 0.693359375f) + f * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const IntVec bits = (n + 127) << 23;
  const Vec scaled = p * reinterpret_cast<const Vec&>(bits);
  return dead ? Vec{} : scaled;
}

// One key/value head of one row: a running softmax over blocks of slots (2205.14135, forward).
struct Head {
  int64_t size, columns, nodes;
  const float* query;  // packed, [blocks, size, lanes]
  float* out;          // unnormalised, [blocks, size, lanes]
  float* stats;        // running maximum and sum, [blocks, 2, lanes]

  // `mask` [count, nodes], or null: all are seen. Column c is about node c % nodes.
  void Add(const float* keys, const float* values, int64_t count, const bool* mask) {
    alignas(64) float scores[kSlots * kLanes];
    for (int64_t b = 0; b * kLanes < columns; ++b) {
      const float* q = query + b * size * kLanes;
      int64_t s = 0;
      Vec* to = reinterpret_cast<Vec*>(scores);
      for (; s + 8 <= count; s += 8) Wide<8>(keys + s * size, size, 1, q, size, to + s);
      for (; s < count; ++s) Wide<1>(keys + s * size, size, 1, q, size, to + s);
      if (mask != nullptr)
        for (s = 0; s < count; ++s)
          for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
            if (!mask[s * nodes + (b * kLanes + lane) % nodes]) scores[s * kLanes + lane] = kHidden;
      Vec top = Load(stats + 2 * b * kLanes), sum = Load(stats + (2 * b + 1) * kLanes);
      const Vec before = top;
      for (s = 0; s < count; ++s) top = Max(top, to[s]);
      const Vec fade = Exp(before - top);
      sum *= fade;
      for (s = 0; s < count; ++s) sum += to[s] = Exp(to[s] - top);
      Store(stats + 2 * b * kLanes, top);
      Store(stats + (2 * b + 1) * kLanes, sum);
      float* o = out + b * size * kLanes;
      int64_t e = 0;
      const auto keep = [&](int64_t from, int64_t rows, const Vec* fresh) {
        for (int64_t i = 0; i < rows; ++i) {
          float* at = o + (from + i) * kLanes;
          Store(at, Load(at) * fade + fresh[i]);
        }
      };
      Vec fresh[16];
      for (; e + 16 <= size; e += 16) {
        Wide<16>(values + e, 1, size, scores, count, fresh);
        keep(e, 16, fresh);
      }
      for (; e < size; ++e) {
        Wide<1>(values + e, 1, size, scores, count, fresh);
        keep(e, 1, fresh);
      }
    }
  }
};

// The same where the columns would leave most lanes empty: a vector holds features, then slots.
template <int M>
struct FewHead {
  int64_t size, nodes;
  const float* query;  // [M, size]
  float* out;          // unnormalised, [M, size], then as much room
  float* stats;        // running maximum and sum, [2, M]

  void Add(const float* keys, const float* values, int64_t count, const bool* mask) {
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
      Vec top = Vec{} + stats[m], sum = {};
      for (int64_t s = 0; s < count; s += kLanes) top = Max(top, Load(column + s));
      float highest = top[0];
      for (int i = 1; i < kLanes; ++i) highest = highest < top[i] ? top[i] : highest;
      for (int64_t s = 0; s < count; s += kLanes) {
        const Vec p = Exp(Load(column + s) - highest);
        Store(column + s, p);
        sum += p;
      }
      // what fills up the last vector is far below any score, but not below a hidden one
      for (int64_t s = count; s % kLanes; ++s) sum[s % kLanes] -= column[s];
      fades[m] = Exp(Vec{} + (stats[m] - highest))[0];
      float total = 0;
      for (int i = 0; i < kLanes; ++i) total += sum[i];
      stats[m] = highest;
      stats[M + m] = stats[M + m] * fades[m] + total;
    }
    float* fresh = out + M * size;
    int64_t e = 0;
    for (; e + 4 * kLanes <= size; e += 4 * kLanes) Weigh<4>(scores, values + e, count, fresh + e);
    for (; e + kLanes <= size; e += kLanes) Weigh<1>(scores, values + e, count, fresh + e);
    if (e < size && size >= kLanes) {  // the last vector overlaps the one before it
      e = size - kLanes;
      Weigh<1>(scores, values + e, count, fresh + e);
    } else {
      for (; e < size; ++e) {
        for (int m = 0; m < M; ++m) {
          float s = 0;
          for (int64_t t = 0; t < count; ++t) s += scores[m * kSlots + t] * values[t * size + e];
          fresh[m * size + e] = s;
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (e = m * size; e < (m + 1) * size; ++e) out[e] = out[e] * fades[m] + fresh[e];
  }

  // V vectors of features of every column.
  template <int V>
  void Weigh(const float* scores, const float* values, int64_t count, float* to) const {
    // vectors at a time; two of them halve how often scores are read
    constexpr int N = V * M <= kSums ? V : V % 2 == 0 && 2 * M <= kSums ? 2 : 1;
    for (int v = 0; v < V; v += N) {
      Vec sum[M * N];
      UNROLL
      for (int i = 0; i < M * N; ++i) sum[i] = Vec{};
      for (int64_t s = 0; s < count; ++s) {
        UNROLL
        for (int i = 0; i < N; ++i) {
          const Vec value = Once(Load(values + s * size + (v + i) * kLanes));
          UNROLL
          for (int m = 0; m < M; ++m) sum[m * N + i] += scores[m * kSlots + s] * value;
        }
      }
      UNROLL
      for (int m = 0; m < M; ++m)
        UNROLL
        for (int i = 0; i < N; ++i) Store(to + m * size + (v + i) * kLanes, sum[m * N + i]);
    }
  }
};

// One head of one row: its query and result [size, columns], `used` slots of the cache, then `own`.
struct Slots {
  const float *keys, *values;
  int64_t count;
  const bool* mask;
};

template <typename H>
void AddAll(H& head, const std::array<Slots, 2>& both) {
  for (const Slots& part : both)
    for (int64_t s = 0; s < part.count; s += kSlots)
      head.Add(part.keys + s * head.size, part.values + s * head.size,
               std::min<int64_t>(kSlots, part.count - s),
               part.mask == nullptr ? nullptr : part.mask + s * head.nodes);
}

void WideHead(const float* query, int64_t size, int64_t columns, int64_t nodes,
              const std::array<Slots, 2>& both, float* result) {
  const int64_t blocks = (columns + kLanes - 1) / kLanes;
  const float* packed = PackWide(1, query, size, columns, 1 / std::sqrt(float(size)));
  Head h{size,   columns, nodes,
         packed, Scratch(2, blocks * size * kLanes), Scratch(3, blocks * 2 * kLanes)};
  std::fill_n(h.out, blocks * size * kLanes, 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    std::fill_n(h.stats + 2 * b * kLanes, kLanes, kHidden);
    std::fill_n(h.stats + (2 * b + 1) * kLanes, kLanes, 0.0f);
  }
  AddAll(h, both);
  for (int64_t b = 0; b < blocks; ++b) {
    const Vec part = 1.0f / Load(h.stats + (2 * b + 1) * kLanes);
    for (int64_t e = 0; e < size; ++e) {
      const Vec o = Load(h.out + (b * size + e) * kLanes) * part;
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, columns - b * kLanes); ++lane)
        result[e * columns + b * kLanes + lane] = o[lane];
    }
  }
}

template <int M>
void NarrowHead(const float* query, int64_t size, int64_t nodes, const std::array<Slots, 2>& both,
                float* result) {
  float *q = Scratch(1, M * size), stats[2 * M];
  const float scale = 1 / std::sqrt(float(size));
  for (int64_t e = 0; e < size; ++e)
    for (int m = 0; m < M; ++m) q[m * size + e] = query[e * M + m] * scale;
  FewHead<M> h{size, nodes, q, Scratch(2, 2 * M * size), stats};
  std::fill_n(h.out, M * size, 0.0f);
  std::fill_n(stats, M, kHidden);
  std::fill_n(stats + M, M, 0.0f);
  AddAll(h, both);
  for (int64_t e = 0; e < size; ++e)
    for (int m = 0; m < M; ++m) result[e * M + m] = h.out[m * size + e] / stats[M + m];
}

using Narrow = void (*)(const float*, int64_t, int64_t, const std::array<Slots, 2>&, float*);
template <int... M>
constexpr std::array<Narrow, sizeof...(M)> NarrowTable(std::integer_sequence<int, M...>) {
  return {{&NarrowHead<M + 1>...}};
}
constexpr auto kNarrow = NarrowTable(Counts{});

// query [B, K, E, G, N], keys and values [B, K, S, E], own keys and values [B, K, M, E],
// mask [B or 1, M, N], length [B] -> [B, K, E, G, N]. Slots from `length` on are not read.
ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> keys,
                     ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::F32> own_keys,
                     ffi::Buffer<ffi::F32> own_values, ffi::Buffer<ffi::PRED> mask,
                     ffi::Buffer<ffi::S32> length, ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = query.dimensions();
  const int64_t batch = dims[0], heads = dims[1], size = dims[2], nodes = dims[4];
  const int64_t columns = dims[3] * nodes, slots = keys.dimensions()[2];
  const int64_t own = own_keys.dimensions()[2];
  const int64_t mask_step = mask.dimensions()[0] == 1 ? 0 : own * nodes;
  const float *q = query.typed_data(), *k = keys.typed_data(), *v = values.typed_data();
  const float *ok = own_keys.typed_data(), *ov = own_values.typed_data();
  const bool* seen = mask.typed_data();
  const int32_t* lengths = length.typed_data();
  float* result = out->typed_data();

  const auto head = [=](int64_t task) {
    const int64_t row = task / heads, used = std::clamp<int64_t>(lengths[row], 0, slots);
    const int64_t at = task * slots * size, own_at = task * own * size;
    const float* from = q + task * size * columns;
    float* to = result + task * size * columns;
    const std::array<Slots, 2> both = {{{k + at, v + at, used, nullptr},
                                        {ok + own_at, ov + own_at, own, seen + row * mask_step}}};
    if (columns <= kFew) {
      kNarrow[columns - 1](from, size, nodes, both, to);
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

}  // namespace

#endif  // SPECJAX_ATTENTION_H_
