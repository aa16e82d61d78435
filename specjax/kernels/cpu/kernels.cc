// Products of a weight matrix with a few columns, attention over a cache, and argmax, for CPUs.
//
// Every function is deterministic: which thread computes a row does not change it.
//
// One translation unit, so that the library is compiled in one call of the compiler.

#include "argmax.h"
#include "attention.h"
#include "products.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxArgmax, Argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxProducts, Products, BindProducts());

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
