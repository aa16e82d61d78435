// The activation of a gated feed-forward layer.

#ifndef SPECJAX_ACTIVATION_H_
#define SPECJAX_ACTIVATION_H_

#include "bfloat16.h"
#include "softmax.h"
#include "tasks.h"
#include "vectors.h"

namespace {

constexpr int64_t kActivations = 1 << 13;  // numbers of a task

// x / (1 + e^-x), relative error below 6e-7 from -87 on; what is less is as -87, which gives -1e-36.
inline Vec Silu(Vec x) {
  const Vec least = All(-87.0f), minus_log2e = All(-1.44269504088896341f);
  x = x < least ? least : x;  // what is no number stays
  const Vec bounded = x > -least ? -least : x, whole = Round(bounded * minus_log2e);
  const IntVec bits = (__builtin_convertvector(whole == whole ? whole : Vec{}, IntVec) + 127) << 23;
  const Vec power = Fraction(Fma(bounded, minus_log2e, -whole)) * reinterpret_cast<const Vec&>(bits);
  return x / (1.0f + power);
}

// y = silu(gate) up, of `count` numbers; `y` may be `gate` or `up`.
template <typename T>
void Gated(const T* gate, const T* up, T* y, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Put(Silu(Load(gate + i)) * Load(up + i), y + i);
  for (; i < count; ++i) Put(Silu(All(Number(gate[i])))[0] * Number(up[i]), y + i);
}

// gate, up -> silu(gate) up, computed in float32 and rounded once.
template <typename T, Type kType>
Problem Swiglu(ThreadPool pool, In<kType> gate, In<kType> up, Out<kType> out) {
  const T *g = gate.template data<T>(), *u = up.template data<T>();
  T* y = out.template data<T>();
  const int64_t count = gate.count();
  Parallel(pool, (count + kActivations - 1) / kActivations, [=](int64_t task) {
    const int64_t begin = task * kActivations;
    Gated(g + begin, u + begin, y + begin, std::min(kActivations, count - begin));
  });
  return nullptr;
}

}  // namespace

#endif  // SPECJAX_ACTIVATION_H_
