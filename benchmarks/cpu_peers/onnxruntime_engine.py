"""onnxruntime-genai, on models of its own builder: plain, a draft model, and lookup by n-grams.

The builder reads a checkpoint of Hugging Face with PyTorch and wants a tokenizer in it; since the
suite works with token ids, it is given a small one. In eight and four bits the builder quantizes
the weights itself, from the same floats.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from .engine import METHODS, Setting, UnsupportedError, written_once

NGRAM = 3  # a lookup compares one token fewer; OpenVINO's and llama.cpp's compare two at most
CONFIG = "genai_config.json"
HEADS = 16  # onnxruntime's attention wants heads of a multiple of so many features
NAMES = {"float32": "fp32", "int8": "int8", "int4": "int4"}


def prepare(pair, precision: str, folder: Path) -> None:
    """Builds the models, and the configurations of both methods.

    A draft model whose heads onnxruntime cannot compute is left out, and with it its method.

    Raises:
      UnsupportedError: bfloat16, which the builder has on GPUs only, or the target's heads.
    """
    if precision not in NAMES:
        raise UnsupportedError(
            f"onnxruntime-genai builds no model in {precision} for CPUs; it has {', '.join(NAMES)}"
        )
    size = pair.target.config.head_dim
    if size % HEADS:
        raise UnsupportedError(
            f"onnxruntime computes no heads of {size} features, only multiples of {HEADS}"
        )
    written_once(folder, functools.partial(_build, pair, precision))


def _build(pair, precision: str, beside: Path) -> None:
    from specjax.models import save_pretrained

    builder = _builder()
    models = {"target": pair.target, "draft": pair.draft}
    if pair.draft.config.head_dim % HEADS:
        del models["draft"]
    for name, lm in models.items():
        source = beside / f"{name}-source"
        save_pretrained(lm, source)
        _write_tokenizer(source)
        given = ("", str(source), str(beside / name), NAMES[precision], "cpu", str(beside))
        with contextlib.redirect_stdout(sys.stderr):
            options = builder.parse_extra_options(*given, [])
            builder.create_model(*given, **options)
        shutil.rmtree(source)
    if "draft" in models:
        _write_pair(beside)


def _builder():
    """The module of the model builder, which imports its neighbours as top-level modules."""
    root = Path(importlib.util.find_spec("onnxruntime_genai").origin).parent / "models"
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module("onnxruntime_genai.models.builder")


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of two tokens, which nothing uses."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])
    )
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a")
    wrapped.save_pretrained(folder)


def _write_pair(beside: Path) -> None:
    """The configuration of target and draft model together, above the folders of both."""
    configs = {
        name: json.loads((beside / name / CONFIG).read_text()) for name in ("target", "draft")
    }
    both = configs["target"]
    for name in ("target", "draft"):
        decoder = configs[name]["model"]["decoder"]
        decoder["filename"] = f"{name}/{decoder['filename']}"  # a path must lie below the folder
    both["model"]["draft"] = configs["draft"]["model"]["decoder"]
    both["speculative"] = {"max_draft_tokens": 4}
    for file in (beside / "target").glob("*.json"):
        (beside / file.name).write_bytes(file.read_bytes())
    (beside / CONFIG).write_text(json.dumps(both, indent=1))


def start(setting: Setting) -> OnnxRuntime:
    return OnnxRuntime(setting)


class OnnxRuntime:
    """See ``engine.Engine``."""

    def __init__(self, setting: Setting):
        import onnxruntime_genai

        self.module, self.setting = onnxruntime_genai, setting
        self.folder = Path(setting.prepared)
        self.methods = METHODS if (self.folder / CONFIG).exists() else ("plain", "lookup")
        # some id must end texts, before it is emitted: the last one, or one before it if the
        # model says it
        config = json.loads((self.folder / "target" / CONFIG).read_text())
        self.end = config["model"]["vocab_size"] - 1
        self._model(self._needed(setting.method))
        kind = {"float32": "float32", "int8": "8 bits", "int4": "4 bits"}[setting.precision]
        self.scheme = f"weights in {kind} by its own builder, cache in float32"
        if "draft" not in self.methods:
            self.scheme += f"; no draft model: its heads are no multiple of {HEADS} features"

    def _needed(self, method: str) -> str:
        return "pair" if method == "draft" and method in self.methods else "target"

    @functools.cache  # noqa: B019 - the engine lives as long as its process
    def _model(self, name: str):
        module = self.module
        config = module.Config(str(self.folder if name == "pair" else self.folder / name))
        threads = {"intra_op_num_threads": self.setting.threads}
        model = {"decoder": {"session_options": threads}}
        model |= {"eos_token_id": self.end, "pad_token_id": self.end}
        if name == "pair":
            model["draft"] = {"session_options": threads}
        config.overlay(json.dumps({"model": model}))
        return module.Model(config)

    def _generator(self, method, length, num_draft):
        module = self.module
        model = self._model(self._needed(method))
        options = module.GeneratorParams(model)
        options.set_search_options(max_length=length, do_sample=False)
        if method == "draft":
            options.set_speculative_options(max_draft_tokens=num_draft)
        elif method == "lookup":
            options.set_speculative_options(max_draft_tokens=num_draft, ngram_size=NGRAM)
        return module.Generator(model, options)

    def generate(self, method, prompt, new, num_draft):
        tokens, rounds = self._generate(method, prompt, new, num_draft)
        while len(tokens) < new:  # in the first run of a text, which is not timed
            self.end -= 1
            self._model.cache_clear()
            tokens, rounds = self._generate(method, prompt, new, num_draft)
        return tokens, rounds

    def _generate(self, method, prompt, new, num_draft):
        # room after the text, so that the last round drafts like the others
        generator = self._generator(method, len(prompt) + new + num_draft + 1, num_draft)
        generator.append_tokens(np.asarray(prompt, np.int32))
        for _ in range(new):
            if generator.is_done():
                break
            generator.generate_next_token()
        tokens = np.asarray(generator.get_sequence(0), np.int32)[len(prompt) :][:new]
        if method == "plain":
            return tokens, new
        stats = generator.get_speculative_stats()
        emitted = new + int(stats["tokens_buffered"])
        return tokens, emitted - int(stats["draft_tokens_accepted"])

    def pass_seconds(self, nodes, length):
        generator = self._generator("plain", length + nodes + 1, 0)
        generator.append_tokens(np.asarray([1 + t % 97 for t in range(length)], np.int32))
        begin = time.perf_counter()
        generator.append_tokens(np.ones(nodes, np.int32))
        np.argmax(generator.get_logits(), axis=-1)
        return time.perf_counter() - begin
