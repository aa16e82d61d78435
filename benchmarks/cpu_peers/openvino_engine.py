"""OpenVINO GenAI: plain decoding, a draft model, and prompt lookup, each a pipeline of its own.

Pipelines are OpenVINO GenAI's ``LLMPipeline`` as it chooses them: paged attention and continuous
batching, with the prefix cache off, since a request must read its prompt each time. A pass is run
by OpenVINO itself on the same file, with keys and values in the model's variables.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import numpy as np

from .engine import METHODS, Setting, written_once

NGRAM = 2  # tokens that the lookup compares, at most
CACHE_GB = 1  # memory for keys and values of a pipeline, which it takes as needed
NO_TOKEN = 1 << 30  # an id that no text holds: nothing ends a text early
LATENCY = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
COMPUTED = {  # precision -> properties beside the defaults
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {},
    "int4": {},
}


def prepare(pair, precision: str, folder: Path) -> None:
    """Writes the intermediate representations of target and draft model."""
    import json

    from . import openvino_ir
    from .weights import hf_config

    def write(beside):
        for name, lm in (("target", pair.target), ("draft", pair.draft)):
            (beside / name).mkdir()
            openvino_ir.write(lm, precision, beside / name / "openvino_model.xml")
            openvino_ir.write_tokenizer(beside / name / "openvino_tokenizer.xml")
            (beside / name / "config.json").write_text(json.dumps(hf_config(lm)))

    written_once(folder, write)


def start(setting: Setting) -> OpenVino:
    return OpenVino(setting)


class OpenVino:
    """See ``engine.Engine``."""

    methods = METHODS

    def __init__(self, setting: Setting):
        import openvino
        import openvino_genai

        self.openvino, self.genai, self.setting = openvino, openvino_genai, setting
        self.properties = {
            **LATENCY,
            **COMPUTED[setting.precision],
            "INFERENCE_NUM_THREADS": setting.threads,
        }
        folder = Path(setting.prepared)
        self.target, self.draft = (str(folder / name) for name in ("target", "draft"))
        self._pipeline(setting.method)
        shown = COMPUTED[setting.precision] or {"computed": "by default", "cache": "by default"}
        self.scheme = ", ".join(f"{k} {v}" for k, v in shown.items())

    @functools.cache  # noqa: B019 - the engine lives as long as its process
    def _pipeline(self, method: str):
        genai = self.genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        options = dict(self.properties, scheduler_config=scheduler)
        if method == "draft":
            given = genai.draft_model(self.draft, "CPU", **self.properties)
            return genai.LLMPipeline(self.target, "CPU", draft_model=given, **options)
        if method == "lookup":
            options["prompt_lookup"] = True
        return genai.LLMPipeline(self.target, "CPU", **options)

    def generate(self, method, prompt, new, num_draft):
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        config.apply_chat_template = False
        config.set_eos_token_id(NO_TOKEN)
        if method != "plain":
            config.num_assistant_tokens = num_draft
        if method == "lookup":
            config.max_ngram_size = NGRAM
        ids = np.asarray(prompt, np.int64)[None]
        tensor = self.openvino.Tensor
        inputs = self.genai.TokenizedInputs(tensor(ids), tensor(np.ones_like(ids)))
        out = self._pipeline(method).generate(inputs, config)
        passes = out.perf_metrics.raw_metrics.m_batch_sizes  # the tokens that each one emitted
        return np.asarray(out.tokens[0], np.int32)[:new], len(passes)

    @functools.cached_property
    def _model(self):
        core = self.openvino.Core()
        compiled = core.compile_model(f"{self.target}/openvino_model.xml", "CPU", self.properties)
        return compiled.create_infer_request()

    def pass_seconds(self, nodes, length):
        self._model.reset_state()
        self._infer([1 + t % 97 for t in range(length)], 0)
        begin = time.perf_counter()
        self._infer([1] * nodes, length)
        return time.perf_counter() - begin

    def _infer(self, tokens, length):
        """Appends tokens after ``length`` others; returns the most likely token after each."""
        end = length + len(tokens)
        given = {
            "input_ids": np.asarray(tokens, np.int64)[None],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(length, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return np.argmax(self._model.infer(given)["logits"], axis=-1)[0]
