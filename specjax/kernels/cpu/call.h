// How XLA calls a kernel, by the C interface of its foreign functions. The templates of the C++
// interface beside it took 40 % of the time in which the kernels are compiled.

#ifndef SPECJAX_CALL_H_
#define SPECJAX_CALL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "xla/ffi/api/c_api.h"

namespace {

using Type = XLA_FFI_DataType;
constexpr Type kBool = XLA_FFI_DataType_PRED, kS8 = XLA_FFI_DataType_S8, kU8 = XLA_FFI_DataType_U8,
               kS32 = XLA_FFI_DataType_S32, kF16 = XLA_FFI_DataType_F16,
               kBF16 = XLA_FFI_DataType_BF16, kF32 = XLA_FFI_DataType_F32;

// What is wrong with a call, in words, or null.
using Problem = const char*;

// An argument or a result, in memory that XLA owns.
struct Buffer {
  Type type;
  void* memory;
  int64_t rank;
  const int64_t* dims;

  template <typename T>
  T* data() const { return static_cast<T*>(memory); }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
  int64_t width() const {  // bytes of a number
    switch (type) {
      case XLA_FFI_DataType_F64:
      case XLA_FFI_DataType_S64:
      case XLA_FFI_DataType_U64:
      case XLA_FFI_DataType_C64: return 8;
      case XLA_FFI_DataType_F32:
      case XLA_FFI_DataType_S32:
      case XLA_FFI_DataType_U32: return 4;
      case XLA_FFI_DataType_F16:
      case XLA_FFI_DataType_BF16:
      case XLA_FFI_DataType_S16:
      case XLA_FFI_DataType_U16: return 2;
      case XLA_FFI_DataType_C128: return 16;
      default: return 1;
    }
  }
  int64_t bytes() const { return count() * width(); }
};

// Parameters of kernels: one argument or result, of one type or of any type.
constexpr Type kAny = XLA_FFI_DataType_INVALID;
template <Type kType = kAny>
struct In : Buffer {};
template <Type kType = kAny>
struct Out : Buffer {};

// Parameters of kernels: all further arguments, or all further results.
struct Buffers {
  void* const* places;
  int64_t size;

  Buffer operator[](int64_t i) const {
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(places[i]);
    return {buffer->dtype, buffer->data, buffer->rank, buffer->dims};
  }
};
struct Ins : Buffers {};
struct Outs : Buffers {};

// XLA's threads, a parameter of kernels.
class ThreadPool {
 public:
  explicit ThreadPool(const XLA_FFI_CallFrame* frame) : api_(frame->api), context_(frame->ctx) {}

  int64_t num_threads() const {
    int64_t threads = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.num_threads = &threads;
    Forget(api_->XLA_FFI_ThreadPool_NumThreads(&args));
    return threads;
  }

  // Runs work() on one of the threads, now or later; in this thread if there are none.
  template <typename Work>
  void Schedule(const Work& work) {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.task = [](void* data) {
      Work* work = static_cast<Work*>(data);
      (*work)();
      delete work;
    };
    args.data = new Work(work);
    XLA_FFI_Error* error = api_->XLA_FFI_ThreadPool_Schedule(&args);
    if (error == nullptr) return;
    Forget(error);
    args.task(args.data);
  }

 private:
  void Forget(XLA_FFI_Error* error) const {
    if (error == nullptr) return;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    api_->XLA_FFI_Error_Destroy(&args);
  }

  const XLA_FFI_Api* api_;
  XLA_FFI_ExecutionContext* context_;
};

// Reads a call's parameters, one after the other.
class Reader {
 public:
  Reader(const XLA_FFI_CallFrame* frame, const char* const* names) : frame_(frame), names_(names) {}

  template <Type kType>
  void Read(In<kType>* to) { *static_cast<Buffer*>(to) = Next(Arguments(), &argument_, kType); }
  template <Type kType>
  void Read(Out<kType>* to) { *static_cast<Buffer*>(to) = Next(Results(), &result_, kType); }
  void Read(Ins* to) { *static_cast<Buffers*>(to) = Rest(Arguments(), &argument_); }
  void Read(Outs* to) { *static_cast<Buffers*>(to) = Rest(Results(), &result_); }
  void Read(bool* to) { Attribute(kBool, to, sizeof(bool)); }
  void Read(float* to) { Attribute(kF32, to, sizeof(float)); }

  // What was wrong with one of the parameters, or that there are more arguments or results.
  Problem problem() const {
    if (problem_ != nullptr) return problem_;
    const bool all = argument_ == frame_->args.size && result_ == frame_->rets.size;
    if (!all) return "more buffers than the kernel has parameters";
    return attributes_ == frame_->attrs.size ? nullptr : "more attributes than the kernel has";
  }

 private:
  Buffers Arguments() const { return {frame_->args.args, frame_->args.size}; }
  Buffers Results() const { return {frame_->rets.rets, frame_->rets.size}; }

  Buffer Next(Buffers buffers, int64_t* at, Type type) {
    if (*at >= buffers.size) {
      problem_ = "fewer buffers than the kernel has parameters";
      return {};
    }
    const Buffer buffer = buffers[(*at)++];
    if (type != kAny && buffer.type != type) problem_ = "a buffer has another type than the parameter";
    return buffer;
  }

  Buffers Rest(Buffers buffers, int64_t* at) {
    const Buffers rest{buffers.places + *at, buffers.size - *at};
    *at = buffers.size;
    return rest;
  }

  void Attribute(Type type, void* to, size_t size) {
    const char* name = *names_++;
    ++attributes_;
    const size_t length = std::strlen(name);
    const XLA_FFI_Attrs& attributes = frame_->attrs;
    for (int64_t i = 0; i < attributes.size; ++i) {
      const XLA_FFI_ByteSpan& key = *attributes.names[i];
      if (key.len != length || std::memcmp(key.ptr, name, length) != 0) continue;
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i]);
      if (attributes.types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != type) break;
      std::memcpy(to, scalar->value, size);
      return;
    }
    problem_ = "an attribute is missing, or has another type than the parameter";
  }

  const XLA_FFI_CallFrame* frame_;
  const char* const* names_;
  int64_t argument_ = 0, result_ = 0, attributes_ = 0;
  Problem problem_ = nullptr;
};

// XLA's error with these words.
inline XLA_FFI_Error* ErrorOf(const XLA_FFI_CallFrame* frame, Problem problem) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = problem;
  args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Whether XLA asks, by this call, which version of the interface the kernel was compiled with, and
// the answer. XLA refuses a version that it does not know when the kernel is registered.
inline bool AnswersVersion(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Extension_Base* asked = frame->extension_start;
  if (asked == nullptr || asked->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(asked)->metadata;
  metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                           XLA_FFI_API_MINOR};
  metadata->traits = 0;
  metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
  return true;
}

template <typename Parameter>
Parameter Next(Reader& reader) {
  Parameter parameter{};
  reader.Read(&parameter);
  return parameter;
}

// The parameters of a kernel, read in their order, and the kernel's call.
template <typename... Parameters>
struct Called {
  Problem problem;
  Called(Problem (*kernel)(ThreadPool, Parameters...), ThreadPool pool, const Reader& reader,
         Parameters... parameters)
      : problem(reader.problem()) {
    if (problem == nullptr) problem = kernel(pool, parameters...);
  }
};

// Calls a kernel with the parameters of a call. The attributes of those that are numbers or flags
// have these names, in the order of the parameters.
template <int64_t kNames, typename... Parameters>
XLA_FFI_Error* Handle(const XLA_FFI_CallFrame* frame,
                      Problem (*kernel)(ThreadPool, Parameters...), const char* const* names) {
  static_assert((0 + ... + std::is_arithmetic_v<Parameters>) == kNames, "a name for each attribute");
  if (AnswersVersion(frame)) return nullptr;
  Reader reader(frame, names);
  // braces: the parameters are read from the left to the right
  const Called<Parameters...> called{kernel, ThreadPool(frame), reader, Next<Parameters>(reader)...};
  return called.problem == nullptr ? nullptr : ErrorOf(frame, called.problem);
}

}  // namespace

// Gives XLA a kernel by a name: KERNEL(name, (kernel), names of attributes ...).
#define KERNEL(symbol, kernel, ...)                             \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) { \
    static constexpr const char* kNames[] = {"", ##__VA_ARGS__}; \
    return Handle<sizeof(kNames) / sizeof(kNames[0]) - 1>(frame, &kernel, kNames + 1); \
  }

#endif  // SPECJAX_CALL_H_
