// The first index of the greatest number.

#ifndef SPECJAX_ARGMAX_H_
#define SPECJAX_ARGMAX_H_

#include "tasks.h"
#include "vectors.h"

namespace {

// The first index of the greatest of n numbers; -1 where that is not finite, or one is no number.
int32_t Greatest(const float* x, int64_t n) {
  constexpr float kInfinity = __builtin_inff();
  Vec tops = Vec{} - kInfinity, sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec v = Load(x + i);
    tops = tops > v ? tops : v;
    sum += v * 0.0f;  // stays zero unless a number is infinite or none
  }
  float top = -kInfinity, odd = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    top = std::max(top, tops[lane]);
    odd += sum[lane];
  }
  for (int64_t t = i; t < n; ++t) {
    top = std::max(top, x[t]);
    odd += x[t] * 0.0f;
  }
  if (odd != 0) {  // numbers of minus infinity are no matter
    for (int64_t t = 0; t < n; ++t)
      if (!(x[t] < kInfinity)) return -1;
    top = *std::max_element(x, x + n);
    if (top == -kInfinity) return -1;
  }
  for (int64_t t = 0;; t += kLanes) {
    if (t + kLanes <= n) {
      const IntVec same = Load(x + t) == top;
      int32_t any = 0;
      for (int lane = 0; lane < kLanes; ++lane) any |= same[lane];
      if (!any) continue;
    }
    while (x[t] != top) ++t;
    return static_cast<int32_t>(t);
  }
}

// x [..., V] -> [...].
Problem Argmax(ThreadPool pool, In<kF32> x, Out<kS32> out) {
  const int64_t size = x.dims[x.rank - 1], rows = out.count();
  const float* from = x.data<float>();
  int32_t* to = out.data<int32_t>();
  EachRow(pool, rows, size, 200'000, [=](int64_t r) { to[r] = Greatest(from + r * size, size); });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_ARGMAX_H_
