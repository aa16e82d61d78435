// The most probable tokens of each row, and the logarithms of their probabilities, in two passes.

#ifndef SPECJAX_LIKELIEST_H_
#define SPECJAX_LIKELIEST_H_

#include "softmax.h"
#include "tasks.h"
#include "vectors.h"

namespace {

// The indices of the k greatest of n numbers, the greatest first and the first of equal ones first,
// and log_softmax(x) there. -1 and minus infinity where fewer are finite, and everywhere where a
// number is infinite or none.
void Likeliest(const float* x, int64_t n, int64_t k, int32_t* index, float* said) {
  constexpr float kInfinity = __builtin_inff();
  std::fill_n(index, k, -1);
  std::fill_n(said, k, -kInfinity);  // the numbers themselves, in the first pass
  const auto meet = [=](float number, int64_t at) {
    if (!(number > said[k - 1])) return;
    int64_t place = k - 1;
    for (; place > 0 && said[place - 1] < number; --place) {
      said[place] = said[place - 1];
      index[place] = index[place - 1];
    }
    said[place] = number;
    index[place] = static_cast<int32_t>(at);
  };
  IntVec none = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = Load(x + i);
    none |= v != v;
    const IntVec over = v > All(said[k - 1]);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= over[lane];
    if (any)
      for (int lane = 0; lane < kLanes; ++lane) meet(v[lane], i + lane);
  }
  int32_t ill = 0;
  for (int lane = 0; lane < kLanes; ++lane) ill |= none[lane];
  const int64_t rest = i;
  for (; i < n; ++i) {
    ill |= x[i] != x[i];
    meet(x[i], i);
  }
  const float top = said[0];
  if (ill || top == kInfinity || index[0] < 0) {
    std::fill_n(index, k, -1);
    std::fill_n(said, k, -kInfinity);
    return;
  }
  Vec sums = {};
  for (i = 0; i < rest; i += kLanes) sums += Weights((Load(x + i) - top) * kLog2E, Vec{});
  if (rest < n) {
    Vec last = All(-kInfinity);
    for (i = rest; i < n; ++i) last[i - rest] = x[i];
    sums += Weights((last - top) * kLog2E, Vec{});
  }
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  for (int64_t place = 0; place < k; ++place) said[place] = said[place] - top - std::log(total);
}

// x [..., V] -> indices and logarithms [..., K].
Problem LikeliestTokens(ThreadPool pool, In<kF32> x, Out<kS32> index, Out<kF32> said) {
  const int64_t size = x.dims[x.rank - 1], count = index.dims[index.rank - 1];
  const int64_t rows = count ? index.count() / count : 0;
  const float* from = x.data<float>();
  int32_t* to = index.data<int32_t>();
  float* logs = said.data<float>();
  EachRow(pool, rows, size, 50'000, [=](int64_t r) {
    Likeliest(from + r * size, size, count, to + r * count, logs + r * count);
  });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_LIKELIEST_H_
