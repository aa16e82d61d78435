// What attention of few and of many columns have in common: the slots that a head of a row reads, and
// where its queries lie.

#ifndef SPECJAX_ATTENTION_SLOTS_H_
#define SPECJAX_ATTENTION_SLOTS_H_

#include "vectors.h"

namespace {

// `used` slots of the cache of one head of one row, then its own entries.
template <typename T>
struct Slots {
  const T *keys, *values;
  int64_t count;
  const bool* mask;
};
template <typename T>
using Both = std::array<Slots<T>, 2>;

// The columns of one key/value head of one row in an array [K, G, E, B, N], the layout of projections:
// column g * N + n is node n of query head g.
struct HeadColumns {
  int64_t nodes;  // N
  // how many numbers lie between the beginnings of two neighbouring query heads, and of two features
  int64_t query_head, feature;

  // Where the first feature of a column stands, counted from that of the first column.
  int64_t operator()(int64_t column) const {
    return column / nodes * query_head + column % nodes;
  }

  // Calls body(i, n) for columns column + i ... column + i + n - 1 that stand side by side, up to
  // column + count - 1. n is a constant, so that loops over such columns become vectors.
  template <typename F>
  ALWAYS_INLINE void EachStretch(int64_t column, int64_t count, const F& body) const {
    constexpr int kHalf = 8;
    for (int64_t i = 0; i < count;) {
      const int64_t together = std::min(count - i, nodes - (column + i) % nodes);
      if (together >= kLanes) {
        body(i, std::integral_constant<int, kLanes>{}), i += kLanes;
        continue;
      }
      if constexpr (kLanes > kHalf) {
        if (together >= kHalf) {
          body(i, std::integral_constant<int, kHalf>{}), i += kHalf;
          continue;
        }
      }
      body(i, std::integral_constant<int, 1>{}), ++i;
    }
  }
};

}  // namespace

#endif  // SPECJAX_ATTENTION_SLOTS_H_
