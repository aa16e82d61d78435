// Norms over the features of columns [features, columns].
//
// A column has the same bits, however many columns there are: its squares are summed in 16 shares,
// that of feature f the f % 16th, and the shares by a tree.

#ifndef SPECJAX_NORM_H_
#define SPECJAX_NORM_H_

#include "bfloat16.h"
#include "tasks.h"
#include "vectors.h"

namespace {

constexpr int64_t kShares = 16;

// What a norm computes beside its scale.
struct NormKind {
  float eps;
  bool centered, plus_one;  // the mean is subtracted; one is added to weights
};

// share[i] = the sum of term(x[i + b * period], i) over all blocks b of `period` numbers, the last of
// which may be short.
template <int N, typename T, typename F>
ALWAYS_INLINE void Shares(const T* x, int64_t count, int64_t period, int64_t i, float* share, const F& term) {
  Vec sum[N];
  UNROLL
  for (int v = 0; v < N; ++v) sum[v] = Vec{};
  int64_t k = i;
  for (; k + N * kLanes <= count; k += period) {
    UNROLL
    for (int v = 0; v < N; ++v) sum[v] = term(Load(x + k + v * kLanes), i + v * kLanes, sum[v]);
  }
  UNROLL
  for (int v = 0; v < N; ++v) Store(share + i + v * kLanes, sum[v]);
  if (k < count) {
    alignas(64) float rest[N * kLanes] = {};
    for (int64_t t = k; t < count; ++t) rest[t - k] = Number(x[t]);
    UNROLL
    for (int v = 0; v < N; ++v) sum[v] = term(Load(rest + v * kLanes), i + v * kLanes, sum[v]);
    for (int64_t t = k; t < count; ++t) share[i + t - k] = sum[(t - k) / kLanes][(t - k) % kLanes];
  }
}

// to[m] = finish(the sum of the terms of column m), repeated `kShares` times.
template <typename T, typename F, typename G>
ALWAYS_INLINE void EachColumn(const T* x, int64_t count, int64_t columns, float* to, const F& term,
                              const G& finish) {
  const int64_t period = kShares * columns;
  int64_t i = 0;
  for (; i + 4 * kLanes <= period; i += 4 * kLanes) Shares<4>(x, count, period, i, to, term);
  for (; i < period; i += kLanes) Shares<1>(x, count, period, i, to, term);
  for (int64_t half = period / 2; half >= columns; half /= 2)
    for (i = 0; i < half; i += kLanes) Store(to + i, Load(to + i) + Load(to + i + half));
  for (i = 0; i < columns; ++i) to[i] = finish(to[i]);
  for (i = columns; i < period; i += columns) std::memcpy(to + i, to, sizeof(float) * columns);
}

// x[place[i]] of 16 numbers x.
inline Vec Gather(const float* x, const int32_t* place) {
#if defined(__AVX512F__)
  return _mm512_maskz_permutexvar_ps(-1, _mm512_loadu_si512(place), Load(x));
#else
  Vec y;
  for (int i = 0; i < kLanes; ++i) y[i] = x[place[i]];
  return y;
#endif
}

// Copies n of up to kShares numbers.
template <typename T>
void Take(const T* from, int64_t n, float* to) {
  if (n == kShares) {
    for (int64_t i = 0; i < kShares; i += kLanes) Store(to + i, Load(from + i));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = Number(from[i]);
  }
}

template <typename T>
void NormColumns(const T* x, const T* weight, const T* bias, T* y, int64_t size, int64_t columns,
                 NormKind kind) {
  const int64_t period = kShares * columns, count = size * columns;
  float *mean = Scratch(0, 3 * period + kLanes), *scale = mean + period;
  const float features = size;
  if (kind.centered) {
    EachColumn(x, count, columns, mean, [](Vec v, int64_t, Vec sum) { return sum + v; },
               [=](float sum) { return sum / features; });
  } else {
    std::fill_n(mean, period, 0.0f);
  }
  EachColumn(x, count, columns, scale,
             [=](Vec v, int64_t i, Vec sum) {
               const Vec off = v - Load(mean + i);
               return Fma(off, off, sum);
             },
             [=](float sum) { return 1.0f / std::sqrt(sum / features + kind.eps); });
  int32_t* place = reinterpret_cast<int32_t*>(scale + period);
  for (int64_t l = 0; l < kShares; ++l) std::fill_n(place + l * columns, columns, l);

  alignas(64) float weights[kShares] = {}, biases[kShares] = {};
  const auto one = [&](Vec v, int64_t i) __attribute__((always_inline)) {
    const Vec w = Gather(weights, place + i), normed = (v - Load(mean + i)) * Load(scale + i);
    const Vec out = kind.plus_one ? normed * (1.0f + w) : Rounded<T>(normed) * w;
    return bias == nullptr ? out : Apart(Rounded<T>(out)) + Gather(biases, place + i);
  };
  for (int64_t f = 0; f < size; f += kShares) {
    Take(weight + f, std::min(kShares, size - f), weights);
    if (bias != nullptr) Take(bias + f, std::min(kShares, size - f), biases);
    const int64_t end = std::min(period, count - f * columns);
    const T* from = x + f * columns;
    T* to = y + f * columns;
    int64_t i = 0;
    for (; i + kLanes <= end; i += kLanes) Put(one(Load(from + i), i), to + i);
    if (i == end) continue;
    alignas(64) float rest[kLanes] = {};
    for (int64_t t = i; t < end; ++t) rest[t - i] = Number(from[t]);
    const Vec out = one(Load(rest), i);
    for (int64_t t = i; t < end; ++t) Put(out[t - i], to + t);
  }
}

// x [size, ...], weight [size], bias [size] or [0] -> as x.
template <typename T, Type kType>
Problem Norm(ThreadPool, In<kType> x, In<kType> weight, In<kType> bias, float eps, bool centered,
             bool plus_one, Out<kType> out) {
  const int64_t size = x.dims[0];
  const auto at = [](const Buffer& buffer) { return buffer.data<const T>(); };
  NormColumns(at(x), at(weight), bias.count() == 0 ? nullptr : at(bias), out.template data<T>(), size,
              x.count() / size, NormKind{eps, centered, plus_one});
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_NORM_H_
