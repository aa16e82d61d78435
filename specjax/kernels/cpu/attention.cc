// Attention over a cache in float32, for CPUs: a part of the library whose other half is kernels.cc.

#include "attention.h"

KERNEL(SpecjaxAttention, (Attention<float, kF32>), "tiled")
