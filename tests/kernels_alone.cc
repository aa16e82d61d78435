// Calls the libraries of CPU kernels as XLA does, and compares their results with loops in double
// precision: for processors on which Python and JAX do not run, only a program under emulation.
// Prints each difference, and at the end how many comparisons there were.

#include "kernels_alone.h"

#include <algorithm>
#include <cmath>
#include <functional>

// Products of one weight, of `arrays`, that stands for `numbers` [out, in], with up to as many
// columns as `counts` says: each to rounding, and with the bits that it has beside the most columns.
void Product(const std::string& what, const char* name, std::vector<const Array*> arrays,
             const Numbers& numbers, int64_t out, int64_t in, Type type, const std::vector<int>& counts) {
  const int64_t most = counts.back();
  const Array x(type, {in, most}, Random(in * most));
  const auto run = [&](int64_t columns, bool turned) {
    const Array some = Columns(x, columns);
    Array y(type, turned ? Dims{columns, out} : Dims{out, columns});
    std::vector<const Array*> args = {&some};
    args.insert(args.end(), arrays.begin(), arrays.end());
    Attributes how = {{"transpose_out", {turned, 0, true}}};
    if (std::string(name) == "SpecjaxQuantized") how["words"] = {false, 0, true};
    Call(name, args, {&y}, how);
    return y;
  };
  const Array whole = run(most, false);
  bool near = true, same = true, turns = true;
  for (int64_t r = 0; r < out; ++r) {
    for (int64_t m = 0; m < most; ++m) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < in; ++k) {
        const double product = numbers[r * in + k] * x.At(k * most + m);
        sum += product, size += std::fabs(product);
      }
      near &= std::fabs(whole.At(r * most + m) - sum) <= 2e-6 * size + whole.Rounding() * std::fabs(sum);
    }
  }
  for (int64_t columns : counts) {
    const Array some = run(columns, false), turned = run(columns, true);
    for (int64_t r = 0; r < out; ++r) {
      for (int64_t m = 0; m < columns; ++m) {
        same &= some.SameBits(r * columns + m, whole, r * most + m);
        turns &= turned.SameBits(m * out + r, whole, r * most + m);
      }
    }
  }
  const std::string where = what + " " + std::to_string(out) + " x " + std::to_string(in);
  Check(near, where);
  Check(same, where + ": bits beside others");
  Check(turns, where + ": turned");
}

const std::vector<int> kFew = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 16, 32}, kMany = {1, 3, 17, 64, 100, 260};

void Products() {
  for (int64_t out : {1, 15, 17, 130}) {
    for (int64_t in : {1, 7, 33, 64, 1025}) {
      const auto weight = [&](Type type) { return Array(type, {out, in}, Random(out * in)); };
      const Array whole = weight(F32), half = weight(BF16), other = weight(F16);
      Product("float32", "SpecjaxProducts", {&whole}, whole.All(), out, in, F32, kFew);
      Product("float32 by bfloat16", "SpecjaxProducts", {&half}, half.All(), out, in, F32, kFew);
      Product("bfloat16", "SpecjaxProductsBfloat16", {&half}, half.All(), out, in, BF16, kFew);
      Product("float16", "SpecjaxProductsFloat16", {&other}, other.All(), out, in, F16, kFew);
      Product("many, float32", "SpecjaxManyProducts", {&whole}, whole.All(), out, in, F32, kMany);
      Product("many, bfloat16", "SpecjaxManyProducts", {&half}, half.All(), out, in, F32, kMany);
    }
  }
}

// Weights of eight or four bits in groups of inputs, with zeros or none.
void Quantized(int bits, int64_t out, int64_t in, int64_t group, bool with_zeros) {
  const int64_t groups = in / group;
  const Numbers values = bits == 8 ? Whole(out * in, -128, 127) : Whole(out * in, 0, 15);
  const Array scales(F32, {out, groups}, Random(out * groups, 0.5, 2));
  const Array zeros(S8, with_zeros ? Dims{out, groups} : Dims{0},
                    with_zeros ? Whole(out * groups, bits == 8 ? -128 : 0, bits == 8 ? 127 : 16) : Numbers{});
  Numbers numbers(out * in);
  Array stored(bits == 8 ? S8 : U8, {out, bits == 8 ? in : in / 2});
  for (int64_t i = 0; i < out * in; ++i) {
    const int64_t at = i / in * groups + i % in / group;
    const double zero = with_zeros ? zeros.At(at) : bits == 8 ? 0 : 8;
    numbers[i] = (values[i] - zero) * scales.At(at);
    if (bits == 8) {
      stored.Put(i, values[i]);
    } else {  // the lower half of 16 bytes' bits are the first 16 of 32 inputs
      uint8_t& byte = stored.bytes[i / 32 * 16 + i % 16];
      byte |= static_cast<int>(values[i]) << (i % 32 < 16 ? 0 : 4);
    }
  }
  const std::string what = std::to_string(bits) + " bits, groups of " + std::to_string(group);
  Product(what + (with_zeros ? ", zeros" : ""), "SpecjaxQuantized", {&stored, &scales, &zeros}, numbers,
          out, in, F32, kFew);
}

void AllQuantized() {
  for (int64_t out : {1, 15, 17, 130}) {
    for (int64_t in : {1, 7, 33, 64, 1025}) Quantized(8, out, in, in, false);
    for (int64_t in : {64, 192, 1344}) {
      for (bool zeros : {false, true}) {
        Quantized(8, out, in, 32, zeros);
        Quantized(8, out, in, 64, zeros);
        Quantized(4, out, in, 32, zeros);
        Quantized(4, out, in, 64, zeros);
      }
    }
  }
}

// Attention of `nodes` nodes in `groups` of a key/value head, over a cache and `own` entries.
struct Heads {
  int64_t batch, heads, size, groups, nodes, own, slots, length;
  double spread;
};

// Calls body(i, j) for every number of queries: number i of [B, K, E, G, N] is number j of the layout
// of projections, [K, G, E, B, N], which the kernel takes and gives.
void EachQuery(const Heads& h, const std::function<void(int64_t, int64_t)>& body) {
  int64_t i = 0;
  for (int64_t b = 0; b < h.batch; ++b)
    for (int64_t k = 0; k < h.heads; ++k)
      for (int64_t e = 0; e < h.size; ++e)
        for (int64_t g = 0; g < h.groups; ++g)
          for (int64_t n = 0; n < h.nodes; ++n)
            body(i++, (((k * h.groups + g) * h.size + e) * h.batch + b) * h.nodes + n);
}

// Attention of queries [B, K, E, G, N], of which the result has the layout, too.
Array Attend(Type type, const Heads& h, const Numbers& q, const Numbers& k, const Numbers& v,
             const Numbers& own_k, const Numbers& own_v, const Numbers& mask) {
  const Dims cache = {h.batch, h.heads, h.slots, h.size}, own = {h.batch, h.heads, h.own, h.size};
  const Dims query = {h.heads, h.groups, h.size, h.batch, h.nodes};
  const Array ak(type, cache, k), av(type, cache, v), ok(type, own, own_k), ov(type, own, own_v),
      seen(PRED, {1, h.own, h.nodes}, mask), length(S32, {h.batch}, Numbers(h.batch, h.length));
  Array aq(type, query), y(type, query);
  EachQuery(h, [&](int64_t i, int64_t j) { aq.Put(j, q[i]); });
  const char* name = type == F32    ? "SpecjaxAttention"
                     : type == BF16 ? "SpecjaxAttentionBfloat16"
                                    : "SpecjaxAttentionFloat16";
  Call(name, {&aq, &ak, &av, &ok, &ov, &seen, &length}, {&y}, {{"tiled", {false, 0, true}}});
  Array made(type, {h.batch, h.heads, h.size, h.groups, h.nodes});
  EachQuery(h, [&](int64_t i, int64_t j) { made.Put(i, y.At(j)); });
  return made;
}

void Attention(Type type, const Heads& h) {
  const auto held = [&](int64_t count, double spread) {  // numbers that the type holds
    return Array(type, {count}, Random(count, -spread, spread)).All();
  };
  const int64_t rows = h.batch * h.heads, inner = h.groups * h.nodes;
  const Numbers q = held(rows * h.size * inner, 2 * h.spread), k = held(rows * h.slots * h.size, 2),
                v = held(rows * h.slots * h.size, 2), own_k = held(rows * h.own * h.size, 2),
                own_v = held(rows * h.own * h.size, 2);
  Numbers mask = Whole(h.own * h.nodes, 0, 1);
  for (int64_t n = 0; n < h.nodes; ++n)
    for (int64_t s = 0; s < h.own; ++s)
      if (s < 2 || s == n) mask[s * h.nodes + n] = 1;  // all see the first two, and themselves
  const Array y = Attend(type, h, q, k, v, own_k, own_v, mask);
  const auto at = [&](int64_t row, int64_t e, int64_t column) { return (row * h.size + e) * inner + column; };
  bool near = true, alone = true, moved = true;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t c = 0; c < inner; ++c) {
      Numbers weights, sums(h.size, 0.0);
      double top = -1e300, total = 0;
      const auto each = [&](const std::function<void(const double*, const double*)>& see) {
        for (int64_t s = 0; s < h.length; ++s) {
          const int64_t place = (row * h.slots + s) * h.size;
          see(&k[place], &v[place]);
        }
        for (int64_t s = 0; s < h.own; ++s) {
          const int64_t place = (row * h.own + s) * h.size;
          if (mask[s * h.nodes + c % h.nodes]) see(&own_k[place], &own_v[place]);
        }
      };
      each([&](const double* key, const double*) {
        double score = 0;
        for (int64_t e = 0; e < h.size; ++e) score += key[e] * q[at(row, e, c)];
        weights.push_back(score / std::sqrt(double(h.size)));
        top = std::max(top, weights.back());
      });
      size_t i = 0;
      each([&](const double*, const double* value) {
        const double weight = std::exp(weights[i++] - top);
        total += weight;
        for (int64_t e = 0; e < h.size; ++e) sums[e] += weight * value[e];
      });
      for (int64_t e = 0; e < h.size; ++e) {
        const double wanted = sums[e] / total;
        const double bound = 2e-5 * h.spread + 1.1 * y.Rounding() * std::fabs(wanted);
        near &= std::fabs(y.At(at(row, e, c)) - wanted) <= bound;
      }
    }
  }
  for (int64_t n = 0; n < h.nodes; ++n) {  // each node alone
    Heads one = h;
    one.nodes = 1;
    Numbers query, seen;
    for (size_t i = n; i < q.size(); i += h.nodes) query.push_back(q[i]);
    for (int64_t s = 0; s < h.own; ++s) seen.push_back(mask[s * h.nodes + n]);
    const Array z = Attend(type, one, query, k, v, own_k, own_v, seen);
    for (size_t i = 0; i < query.size(); ++i) alone &= z.SameBits(i, y, i * h.nodes + n);
  }
  Heads later = h;  // two of the own entries, which all nodes see, are in the cache already
  later.own -= 2, later.length += 2;
  Numbers keys = k, values = v, rest_k, rest_v;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t from = row * h.own * h.size, two = 2 * h.size, to = (row * h.slots + h.length) * h.size;
    std::copy_n(&own_k[from], two, &keys[to]);
    std::copy_n(&own_v[from], two, &values[to]);
    rest_k.insert(rest_k.end(), &own_k[from + two], &own_k[from] + h.own * h.size);
    rest_v.insert(rest_v.end(), &own_v[from + two], &own_v[from] + h.own * h.size);
  }
  const Numbers seen(mask.begin() + 2 * h.nodes, mask.end());
  const Array z = Attend(type, later, q, keys, values, rest_k, rest_v, seen);
  for (size_t i = 0; i < q.size(); ++i) moved &= z.SameBits(i, y, i);
  const std::string where = "attention, type " + std::to_string(type) + ", size " + std::to_string(h.size) +
                            ", columns " + std::to_string(inner) + ", length " + std::to_string(h.length);
  Check(near, where);
  Check(alone, where + ": bits of a node alone");
  Check(moved, where + ": bits with entries in the cache");
}

void AllAttention() {
  for (Type type : {F32, BF16, F16}) {
    for (int64_t nodes : {1, 2, 3, 4, 5, 8, 9, 17, 32})
      for (int64_t size : {3, 7, 16, 20, 64}) Attention(type, {2, 2, size, 1, nodes, nodes + 2, 160, 131, 1});
    Attention(type, {1, 2, 64, 3, 5, 7, 300, 290, 1});
    Attention(type, {1, 1, 80, 2, 40, 42, 40, 0, 1});
    Attention(type, {1, 1, 16, 1, 3, 5, 300, 270, 1000});  // scores that overflow an exponential
    Attention(type, {1, 1, 16, 1, 12, 14, 300, 270, 1000});
  }
}

void Norm(Type type, int64_t size, bool centered, bool plus_one, bool with_bias) {
  const int64_t most = 32;
  const Array x(type, {size, most}, Random(size * most)), weight(type, {size}, Random(size)),
      bias(type, {with_bias ? size : 0}, Random(with_bias ? size : 0));
  const char* name = type == F32    ? "SpecjaxNorm"
                     : type == BF16 ? "SpecjaxNormBfloat16"
                                    : "SpecjaxNormFloat16";
  const Attributes kind = {{"eps", {false, 1e-5f, false}},
                           {"centered", {centered, 0, true}},
                           {"plus_one", {plus_one, 0, true}}};
  const auto run = [&](int64_t columns) {
    const Array some = Columns(x, columns);
    Array y(type, some.dims);
    Call(name, {&some, &weight, &bias}, {&y}, kind);
    return y;
  };
  const Array whole = run(most);
  bool near = true, same = true;
  for (int64_t m = 0; m < most; ++m) {
    double mean = 0, square = 0;
    for (int64_t f = 0; f < size; ++f) mean += x.At(f * most + m) / size;
    if (!centered) mean = 0;
    for (int64_t f = 0; f < size; ++f) square += std::pow(x.At(f * most + m) - mean, 2) / size;
    for (int64_t f = 0; f < size; ++f) {
      const double normed = (x.At(f * most + m) - mean) / std::sqrt(square + 1e-5);
      const double wanted = normed * (weight.At(f) + plus_one), all = wanted + (with_bias ? bias.At(f) : 0);
      // small differences of the mean show where all numbers are near it, as where there is one
      const double rounding = whole.Rounding() * (std::fabs(wanted) + std::fabs(all));
      const double bound = 3e-5 * (1 + 300 * (size == 1)) + 2.1 * rounding;
      near &= std::fabs(whole.At(f * most + m) - all) <= bound;
    }
  }
  for (int64_t columns : kFew) {
    const Array some = run(columns);
    for (int64_t f = 0; f < size; ++f)
      for (int64_t m = 0; m < columns; ++m) same &= some.SameBits(f * columns + m, whole, f * most + m);
  }
  const std::string where = "norm, type " + std::to_string(type) + ", size " + std::to_string(size) +
                            (centered ? ", centered" : "") + (plus_one ? ", plus one" : "") +
                            (with_bias ? ", bias" : "");
  Check(near, where);
  Check(same, where + ": bits beside others");
}

void AllNorms() {
  for (Type type : {F32, BF16, F16})
    for (int64_t size : {1, 7, 16, 33, 1025})
      for (int kind = 0; kind < 8; ++kind) Norm(type, size, kind & 1, kind & 2, kind & 4);
}

void Argmaxes() {
  for (int64_t size : {1, 2, 3, 7, 15, 16, 17, 33, 1025, 50'000}) {
    const int64_t rows = 8;
    Array x(F32, {rows, size}, Whole(rows * size, -9, 9)), y(S32, {rows});
    x.Put(5 * size + size / 2, NAN), x.Put(6 * size + size - 1, INFINITY), x.Put(7 * size, -INFINITY);
    Call("SpecjaxArgmax", {&x}, {&y}, {});
    bool right = true;
    for (int64_t r = 0; r < rows; ++r) {
      int64_t best = 0;
      for (int64_t i = 1; i < size; ++i)
        if (x.At(r * size + i) > x.At(r * size + best)) best = i;
      if (r == 5 || r == 6 || std::isinf(x.At(r * size + best))) best = -1;
      right &= y.At(r) == best;
    }
    Check(right, "argmax of " + std::to_string(size));
  }
}

void Likeliests() {
  for (int64_t size : {1, 2, 3, 7, 15, 16, 17, 33, 1025, 20'000}) {
    for (int64_t most : {1, 3, 64}) {
      const int64_t rows = 8, count = std::min(size, most);
      Array x(F32, {rows, size}, Whole(rows * size, -9, 9)), index(S32, {rows, count}), said(F32, {rows, count});
      x.Put(5 * size + size / 2, NAN), x.Put(6 * size + size - 1, INFINITY);
      for (int64_t i = 0; i < size; i += 2) x.Put(7 * size + size - 1 - i, -INFINITY);
      Call("SpecjaxLikeliest", {&x}, {&index, &said}, {});
      bool right = true, near = true;
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<int64_t> order(size);
        double total = 0;
        for (int64_t i = 0; i < size; ++i) order[i] = i, total += std::exp(double(x.At(r * size + i)));
        if (std::isfinite(total))
          std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return x.At(r * size + a) > x.At(r * size + b);
          });
        for (int64_t k = 0; k < count; ++k) {
          const double number = x.At(r * size + order[k]), wanted = number - std::log(total);
          const bool real = std::isfinite(total) && std::isfinite(number);
          right &= index.At(r * count + k) == (real ? order[k] : -1);
          near &= real ? std::fabs(said.At(r * count + k) - wanted) < 1e-4 : std::isinf(said.At(r * count + k));
        }
      }
      const std::string where = std::to_string(count) + " likeliest of " + std::to_string(size);
      Check(right, where);
      Check(near, where + ": logarithms");
    }
  }
}

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    libraries.push_back(dlopen(names[i], RTLD_NOW));
    if (libraries.back() == nullptr) return std::printf("error: %s\n", dlerror()), 2;
  }
  Products();
  AllQuantized();
  AllAttention();
  AllNorms();
  Argmaxes();
  Likeliests();
  std::printf("%d comparisons, %d wrong\n", comparisons, failures);
  return failures > 0;
}
