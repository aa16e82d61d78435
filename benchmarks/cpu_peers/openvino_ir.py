"""OpenVINO's intermediate representation of a Llama, built operation by operation.

The graph is what OpenVINO GenAI expects of an exported model: inputs ``input_ids``,
``attention_mask``, ``position_ids`` and ``beam_idx``, output ``logits``, and keys and values in
variables. It is built from the weights themselves, so that eight and four bits are the very
integers and scales that specjax computes with, and no exporter has to be installed.

========  =================================================================================
float32   float32
bfloat16  bfloat16; OpenVINO computes in bfloat16 where the processor can
int8      signed integers with a float32 scale for each output channel
int4      signed integers with a float32 scale for each group of 32; embedding and LM head int8
========  =================================================================================
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specjax.kernels.quantized import Quantized
from specjax.models import LM

from .weights import check_llama, integers, tensors

MASKED = -65504.0  # the smallest float16, as in exported models


def write(lm: LM, precision: str, file: Path) -> None:
    """Writes ``file`` (``.xml``) and the weights beside it.

    Raises:
      UnsupportedError: the model is no plain Llama.
    """
    import openvino as ov

    check_llama(lm.config)
    graph = _Graph(lm, precision)
    ov.save_model(graph.model(), str(file), compress_to_fp16=False)


def write_tokenizer(file: Path) -> None:
    """Writes a tokenizer that makes id 0 of any text: pipelines with a draft model compare their
    tokenizers, and the suite gives token ids."""
    import openvino as ov
    from openvino import opset13 as ops

    text = ops.parameter([-1], ov.Type.string, name="string_input")
    text.output(0).set_names({"string_input"})
    shape = ops.concat([ops.shape_of(text, "i64"), _ints(ops, [1])], 0)
    results = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        results.append(ops.result(ops.broadcast(_ints(ops, value), shape), name=name))
        results[-1].output(0).set_names({name})
    ov.save_model(ov.Model(results, [text], "tokenizer"), str(file))


class _Graph:
    """The nodes that all layers share, and functions that make more."""

    def __init__(self, lm: LM, precision: str):
        import openvino as ov
        from openvino import opset13

        self.ov, self.ops, self.config = ov, opset13, lm.config
        self.precision, self.tensors = precision, tensors(lm, precision)
        ops = opset13
        self.inputs = {
            "input_ids": ops.parameter([-1, -1], np.int64, name="input_ids"),
            "attention_mask": ops.parameter([-1, -1], np.int64, name="attention_mask"),
            "position_ids": ops.parameter([-1, -1], np.int64, name="position_ids"),
            "beam_idx": ops.parameter([-1], np.int32, name="beam_idx"),
        }
        for name, node in self.inputs.items():
            node.output(0).set_names({name})
        shape = ops.shape_of(self.inputs["input_ids"], "i64")
        self.batch = ops.gather(shape, _ints(ops, [0]), _ints(ops, 0))
        self.sinks, self.kept = [], []

    def model(self):
        """The whole model."""
        ops, config = self.ops, self.config
        table = self.weight("model.embed_tokens.weight")
        ids = ops.convert(self.inputs["input_ids"], "i32")
        x = ops.gather(table, ids, _ints(ops, 0))
        angles, mask = self.angles(), self.mask()
        for layer in range(config.num_layers):
            x = self.block(f"model.layers.{layer}", layer, x, angles, mask)
        x = self.norm("model.norm", x)
        if not config.tie_embeddings:
            table = self.weight("lm_head.weight")
        logits = ops.result(ops.matmul(x, table, False, True), name="logits")
        logits.output(0).set_names({"logits"})
        return self.ov.Model([logits], self.sinks, [*self.inputs.values()], "llama")

    def weight(self, name: str):
        """The node of a matrix, float32 ``[out, in]``."""
        ops, weight = self.ops, self.tensors[name]
        if isinstance(weight, Quantized):
            return self.quantized(weight)
        if self.precision == "bfloat16":
            rounded = np.asarray(weight, jnp.bfloat16).view(np.uint16)  # OpenVINO would cut it
            return ops.convert(self.constant(rounded, rounded.shape, self.ov.Type.bf16), "f32")
        return ops.constant(weight)

    def quantized(self, weight: Quantized):
        ops, (values, scale) = self.ops, integers(weight)
        if weight.bits == 8:
            return ops.multiply(ops.convert(ops.constant(values), "f32"), ops.constant(scale))
        pairs = values.astype(np.uint8).reshape(-1, 2) & 15  # the first of two in the low bits
        packed = pairs[:, 0] | pairs[:, 1] << 4
        shape = [*scale.shape, values.shape[1] // scale.shape[1]]
        held = self.constant(packed, shape, self.ov.Type.i4)
        wide = ops.multiply(ops.convert(held, "f32"), ops.constant(scale[..., None]))
        return ops.reshape(wide, _ints(ops, values.shape), False)

    def constant(self, bits: np.ndarray, shape, kind):
        """A constant of a type that NumPy lacks."""
        self.kept.append(bits)  # the constant is a view, until the model is written
        return self.ops.constant(self.ov.Tensor(bits, self.ov.Shape(list(shape)), kind))

    def norm(self, name: str, x):
        ops = self.ops
        squares = ops.power(x, ops.constant(np.full((1, 1, 1), 2.0, np.float32)))
        mean = ops.reduce_mean(squares, _ints(ops, [-1]), True)
        added = ops.add(mean, ops.constant(np.full((1, 1, 1), self.config.norm_eps, np.float32)))
        factor = ops.divide(ops.constant(np.ones((1, 1, 1), np.float32)), ops.sqrt(added))
        scale = np.asarray(self.tensors[f"{name}.weight"], np.float32)
        return ops.multiply(ops.constant(scale[None, None]), ops.multiply(x, factor))

    def angles(self):
        """Cosine and sine of all positions, ``[B, 1, T, E]``."""
        ops, size = self.ops, self.config.head_dim
        steps = np.arange(0, size, 2, dtype=np.float32) / size
        frequencies = (1 / self.config.rope_theta**steps).astype(np.float32)[None, :, None]
        shape = ops.concat([self.batch, _ints(ops, [1]), _ints(ops, [1])], 0)
        wide = ops.broadcast(ops.constant(frequencies), shape, broadcast_spec="BIDIRECTIONAL")
        places = ops.unsqueeze(self.inputs["position_ids"], _ints(ops, 1))
        found = ops.matmul(wide, ops.convert(places, "f32"), False, False)
        found = ops.transpose(found, _ints(ops, [0, 2, 1]))
        both = ops.concat([found, found], -1)
        return tuple(ops.unsqueeze(f(both), _ints(ops, 1)) for f in (ops.cos, ops.sin))

    def mask(self):
        """0 where a query sees a key and ``MASKED`` elsewhere, ``[B, 1, T, S]``."""
        ops = self.ops
        shape = ops.shape_of(self.inputs["attention_mask"], "i64")
        total = ops.gather(shape, _ints(ops, 1), _ints(ops, 0))
        keys = ops.range(_ints(ops, 0), total, _ints(ops, 1), "i64")
        queries = ops.unsqueeze(self.inputs["position_ids"], _ints(ops, [1, 3]))
        seen = ops.less_equal(keys, queries)
        zero, masked = (ops.constant(np.float32(x)) for x in (0, MASKED))
        return ops.select(seen, zero, masked)

    def rotated(self, x, angles):
        ops, half = self.ops, self.config.head_dim // 2
        cos, sin = angles
        axis, one = _ints(ops, [3]), _ints(ops, [1])
        late = ops.slice(x, _ints(ops, [half]), _ints(ops, [2**63 - 1]), one, axis)
        early = ops.slice(x, _ints(ops, [0]), _ints(ops, [half]), one, axis)
        negative = ops.multiply(late, ops.constant(np.full((1, 1, 1, 1), -1, np.float32)))
        turned = ops.concat([negative, early], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def cached(self, name: str, x):
        """``x [B, K, T, E]`` after the entries of the variable ``name``, which keeps both."""
        ops, util = self.ops, self.ov.op.util
        count, size = self.config.num_kv_heads, self.config.head_dim
        info = util.VariableInfo()
        info.data_shape = self.ov.PartialShape([-1, count, -1, size])
        info.data_type, info.variable_id = self.ov.Type.f32, name
        variable = util.Variable(info)
        sizes = [_ints(ops, [n]) for n in (count, 0, size)]
        empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([self.batch, *sizes], 0))
        before = ops.read_value(empty, variable)
        before = ops.gather(before, self.inputs["beam_idx"], _ints(ops, 0))
        whole = ops.concat([before, x], 2)
        self.sinks.append(ops.assign(whole, variable))
        return whole

    def repeated(self, x):
        """Keys or values ``[B, K, S, E]`` for each query head ``[B, H, S, E]``."""
        ops, config = self.ops, self.config
        groups = config.num_heads // config.num_kv_heads
        if groups == 1:
            return x
        sizes = [_ints(ops, [n]) for n in (config.num_kv_heads, groups, 1, config.head_dim)]
        shape = ops.concat([self.batch, *sizes], 0)
        wide = ops.broadcast(ops.unsqueeze(x, _ints(ops, 2)), shape, broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, _ints(ops, [0, config.num_heads, -1, config.head_dim]), True)

    def block(self, name: str, layer: int, x, angles, mask):
        ops, config = self.ops, self.config
        normed = self.norm(f"{name}.input_layernorm", x)

        def heads(part, count):
            y = ops.matmul(normed, self.weight(f"{name}.self_attn.{part}.weight"), False, True)
            y = ops.reshape(y, _ints(ops, [0, 0, count, config.head_dim]), True)
            return ops.transpose(y, _ints(ops, [0, 2, 1, 3]))

        q = self.rotated(heads("q_proj", config.num_heads), angles)
        k = self.rotated(heads("k_proj", config.num_kv_heads), angles)
        v = heads("v_proj", config.num_kv_heads)
        past = f"past_key_values.{layer}"
        k = self.repeated(self.cached(f"{past}.keypresent.{layer}.key", k))
        v = self.repeated(self.cached(f"{past}.valuepresent.{layer}.value", v))
        y = ops.scaled_dot_product_attention(q, k, v, mask)
        y = ops.transpose(y, _ints(ops, [0, 2, 1, 3]))
        y = ops.reshape(y, _ints(ops, [0, 0, config.num_heads * config.head_dim]), True)
        x = ops.add(x, ops.matmul(y, self.weight(f"{name}.self_attn.o_proj.weight"), False, True))
        normed = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (
            ops.matmul(normed, self.weight(f"{name}.mlp.{part}.weight"), False, True)
            for part in ("gate_proj", "up_proj")
        )
        y = ops.multiply(ops.swish(gate), up)
        return ops.add(x, ops.matmul(y, self.weight(f"{name}.mlp.down_proj.weight"), False, True))


def _ints(ops, values):
    return ops.constant(np.asarray(values, np.int64))
