// Arrays of the types of the CPU kernels, and calls of their libraries as XLA makes them.

#ifndef SPECJAX_TESTS_KERNELS_ALONE_H_
#define SPECJAX_TESTS_KERNELS_ALONE_H_

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"

using Dims = std::vector<int64_t>;
using Numbers = std::vector<double>;

constexpr auto F32 = XLA_FFI_DataType_F32, BF16 = XLA_FFI_DataType_BF16, F16 = XLA_FFI_DataType_F16,
               S8 = XLA_FFI_DataType_S8, U8 = XLA_FFI_DataType_U8, S32 = XLA_FFI_DataType_S32,
               PRED = XLA_FFI_DataType_PRED;
using Type = decltype(F32);

int failures = 0, comparisons = 0;
void Check(bool right, const std::string& what) {
  ++comparisons;
  if (!right && ++failures <= 30) std::printf("wrong: %s\n", what.c_str());
}

int64_t Count(const Dims& dims) {
  int64_t count = 1;
  for (int64_t d : dims) count *= d;
  return count;
}

// Compilers have no type for float16 in common. Numbers are finite.
uint16_t ToFloat16(double x) {
  int exponent;
  std::frexp(x, &exponent);
  exponent = std::max(exponent, -13);
  const int size = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(x), 11 - exponent)));
  return (std::signbit(x) ? 0x8000 : 0) | (size + (exponent + 13) * 1024);  // 1024 is carried over
}
double FromFloat16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, size = (bits & 1023) + (exponent > 0 ? 1024 : 0);
  return std::ldexp(bits >> 15 ? -size : size, std::max(exponent, 1) - 25);
}

// An array, and the numbers for which its bytes stand.
struct Array {
  Type type;
  Dims dims;
  std::vector<uint8_t> bytes;

  Array(Type type, Dims dims) : type(type), dims(dims), bytes(Count(dims) * Size()) {}
  Array(Type type, Dims dims, const Numbers& values) : Array(type, dims) {
    for (size_t i = 0; i < values.size(); ++i) Put(i, values[i]);
  }
  int64_t Size() const { return type == F32 || type == S32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }
  template <typename T>
  void Write(int64_t i, T value) { std::memcpy(&bytes[i * sizeof(T)], &value, sizeof(T)); }
  template <typename T>
  T Read(int64_t i) const {
    T value;
    std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
    return value;
  }
  void Put(int64_t i, double value) {
    if (type == F32) {
      Write(i, static_cast<float>(value));
    } else if (type == S32) {
      Write(i, static_cast<int32_t>(value));
    } else if (type == F16) {
      Write(i, ToFloat16(value));
    } else if (type == BF16) {
      const float number = static_cast<float>(value);
      uint32_t bits;
      std::memcpy(&bits, &number, 4);
      Write(i, static_cast<uint16_t>(bits >> 16));  // any bfloat16 near it will do
    } else {
      bytes[i] = static_cast<uint8_t>(static_cast<int>(value));
    }
  }
  double At(int64_t i) const {
    if (type == F32) return Read<float>(i);
    if (type == S32) return Read<int32_t>(i);
    if (type == F16) return FromFloat16(Read<uint16_t>(i));
    if (type == S8) return static_cast<int8_t>(bytes[i]);
    if (type != BF16) return bytes[i];
    const uint32_t bits = static_cast<uint32_t>(Read<uint16_t>(i)) << 16;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
  }
  Numbers All() const {
    Numbers all(Count(dims));
    for (size_t i = 0; i < all.size(); ++i) all[i] = At(i);
    return all;
  }
  bool SameBits(int64_t i, const Array& other, int64_t j) const {
    return std::memcmp(&bytes[i * Size()], &other.bytes[j * Size()], Size()) == 0;
  }
  // Half of the distance between 1 and the next number.
  double Rounding() const { return type == BF16 ? 1.0 / 256 : type == F16 ? 1.0 / 2048 : 0; }
};

std::mt19937 generator(1);
Numbers Random(int64_t count, double low = -2, double high = 2) {
  std::uniform_real_distribution<double> drawn(low, high);
  Numbers made(count);
  for (double& x : made) x = drawn(generator);
  return made;
}
Numbers Whole(int64_t count, int low, int high) {
  Numbers made = Random(count, low, high + 1);
  for (double& x : made) x = std::floor(x);
  return made;
}

// The first `count` columns of x.
Array Columns(const Array& x, int64_t count) {
  Array some(x.type, {x.dims[0], count});
  for (int64_t k = 0; k < x.dims[0]; ++k)
    for (int64_t m = 0; m < count; ++m) some.Put(k * count + m, x.At(k * x.dims[1] + m));
  return some;
}

std::vector<void*> libraries;
std::vector<std::thread> threads;

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 3;
  return nullptr;
}
XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  threads.emplace_back(args->task, args->data);
  return nullptr;
}
XLA_FFI_Error* Refuse(XLA_FFI_Error_Create_Args* args) {
  std::printf("error: %s\n", args->message);
  std::exit(2);
}

// A flag or a number, by its name.
struct Attribute {
  bool flag;
  float number;
  bool is_flag;
};
using Attributes = std::map<std::string, Attribute>;

void Call(const char* name, std::vector<const Array*> args, std::vector<Array*> results,
          const Attributes& attributes) {
  XLA_FFI_Handler* handler = nullptr;
  for (void* library : libraries)
    if (void* found = dlsym(library, name)) handler = reinterpret_cast<XLA_FFI_Handler*>(found);
  if (handler == nullptr) std::printf("error: no %s\n", name), std::exit(2);
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_ThreadPool_NumThreads = &NumThreads;
  api.XLA_FFI_ThreadPool_Schedule = &Schedule;
  api.XLA_FFI_Error_Create = &Refuse;
  const size_t count = args.size() + results.size();
  std::vector<XLA_FFI_Buffer> buffers(count);
  std::vector<void*> places(count);
  std::vector<XLA_FFI_ArgType> arg_types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results.size(), XLA_FFI_RetType_BUFFER);
  for (size_t i = 0; i < count; ++i) {
    Array* array = i < args.size() ? const_cast<Array*>(args[i]) : results[i - args.size()];
    buffers[i] = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array->type, array->bytes.data(),
                  static_cast<int64_t>(array->dims.size()), array->dims.data()};
    places[i] = &buffers[i];
  }
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<XLA_FFI_Scalar> scalars;
  for (const auto& [key, value] : attributes) {
    names.push_back({key.data(), key.size()});
    const void* at = value.is_flag ? static_cast<const void*>(&value.flag) : &value.number;
    scalars.push_back({value.is_flag ? PRED : F32, const_cast<void*>(at)});
  }
  std::vector<XLA_FFI_ByteSpan*> name_places;
  std::vector<void*> scalar_places;
  for (size_t i = 0; i < names.size(); ++i) {
    name_places.push_back(&names[i]);
    scalar_places.push_back(&scalars[i]);
  }
  std::vector<XLA_FFI_AttrType> kinds(names.size(), XLA_FFI_AttrType_SCALAR);
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(args.size()), arg_types.data(), places.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(results.size()), result_types.data(),
                places.data() + args.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(names.size()), kinds.data(),
                 name_places.data(), scalar_places.data()};
  handler(&frame);
  for (std::thread& thread : threads) thread.join();
  threads.clear();
}

#endif  // SPECJAX_TESTS_KERNELS_ALONE_H_
