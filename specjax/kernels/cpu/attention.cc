// Attention over a cache in float32, for CPUs: a part of the library whose other half is kernels.cc.

#include "attention.h"

XLA_FFI_DEFINE_HANDLER_SYMBOL(SpecjaxAttention, (Attention<float, ffi::F32>),
                              BindAttention<ffi::F32>());
