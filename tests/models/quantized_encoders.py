"""Writes weights as published layouts define them, independently of the code that reads them."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

GROUP = 32


def words(codes, bits, order=None):
    """Codes ``[a, b]`` in words along ``b``, one by one as the layouts' definitions say."""
    count = 32 // bits
    out = np.zeros((codes.shape[0], codes.shape[1] // count), np.int64)
    for i in range(count):
        out |= codes[:, (order or range(count))[i] :: count].astype(np.int64) << bits * i
    return out.astype(np.uint32).view(np.int32)


def gptq(codes, zeros, scales, bits=4):
    groups = zeros.shape[1]
    return {
        "qweight": words(codes, bits).T,
        "qzeros": words(zeros.T - 1, bits),
        "scales": scales.T.astype(np.float16),
        "g_idx": np.arange(codes.shape[1], dtype=np.int32) // (codes.shape[1] // groups),
    }


def gptq_v2(codes, zeros, scales, bits=4):
    return gptq(codes, zeros, scales, bits) | {"qzeros": words(zeros.T, bits)}


def awq(codes, zeros, scales, bits=4):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(codes.T, bits, order),
        "qzeros": words(zeros.T, bits, order),
        "scales": scales.T.astype(np.float16),
    }


def compressed(codes, zeros, scales, bits=4):
    return {
        "weight_packed": words(codes, bits),
        "weight_zero_point": words(zeros.T, bits).T,
        "weight_scale": scales.astype(np.float16),
        "weight_shape": np.asarray(codes.shape, np.int64),
    }


def symmetric(codes, zeros, scales, bits=4):
    tensors = compressed(codes, zeros, scales, bits)
    del tensors["weight_zero_point"]
    return tensors


def older(codes, zeros, scales, bits=4):
    """Zeros of older versions: int8, not packed, 0 in the middle."""
    held = (zeros - (1 << (bits - 1))).astype(np.int8)
    return compressed(codes, zeros, scales, bits) | {"weight_zero_point": held}


def plain(codes, zeros, scales, bits=8):
    """``int-quantized``: integers from -128, as they are."""
    return {
        "weight": (codes - 128).astype(np.int8),
        "weight_scale": scales.astype(np.float16),
        "weight_zero_point": (zeros - 128).astype(np.int8),
    }


def plain_symmetric(codes, zeros, scales, bits=8):
    tensors = plain(codes, zeros, scales)
    del tensors["weight_zero_point"]
    return tensors


def compressed_config(format="pack-quantized", **weights):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": format}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
AWQ |= {"group_size": GROUP}
CHANNEL = {"strategy": "channel", "group_size": None}
LAYOUTS = {
    "gptq": (gptq, GPTQ),
    "gptq v2": (gptq_v2, GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": (awq, AWQ),
    "compressed-tensors": (compressed, compressed_config(symmetric=False)),
}
# by the encoder, the config, bits, and the inputs of a group (None: all)
OTHERS = {
    "gptq 8": (gptq, GPTQ | {"bits": 8}, 8, GROUP),
    "gptq one group": (gptq, GPTQ | {"group_size": -1}, 4, None),
    "awq one group": (awq, AWQ | {"group_size": -1}, 4, None),
    "packed 8": (compressed, compressed_config(num_bits=8), 8, GROUP),
    "packed 8 channels": (compressed, compressed_config(num_bits=8, **CHANNEL), 8, None),
    "packed channels": (compressed, compressed_config(**CHANNEL), 4, None),
    "packed groups of 16": (compressed, compressed_config(group_size=16), 4, 16),
    "packed symmetric": (symmetric, compressed_config(), 4, GROUP),
    "packed older zeros": (older, compressed_config(), 4, GROUP),
    "plain channels": (plain, compressed_config("int-quantized", num_bits=8, **CHANNEL), 8, None),
    "plain groups": (plain, compressed_config("int-quantized", num_bits=8), 8, GROUP),
    "plain symmetric": (
        plain_symmetric,
        compressed_config("int-quantized", num_bits=8, **CHANNEL),
        8,
        None,
    ),
}


def published(folder, layout):
    """Turns a folder's projections into random quantized ones; the float64 numbers by name."""
    make, config, bits, group = OTHERS.get(layout) or (*LAYOUTS[layout], 4, GROUP)
    rng, tensors, wanted = np.random.default_rng(0), load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj." in name]:
        out, size = tensors.pop(name).shape
        codes = rng.integers(0, 1 << bits, (out, size))
        zeros = rng.integers(1, 1 << bits, (out, size // (group or size)))
        if "symmetric" in layout:
            zeros[:] = 1 << (bits - 1)
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16).astype(np.float64)
        for kind, array in make(codes, zeros, scales, bits).items():
            tensors[name.replace("weight", kind)] = np.ascontiguousarray(array)
        shift, scale = (np.repeat(x, group or size, axis=1) for x in (zeros, scales))
        wanted[name] = (codes - shift) * scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": config}))
    return wanted
