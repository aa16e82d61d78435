"""llama.cpp by its bindings llama-cpp-python, whose functions are those of the C library.

Drafting is llama.cpp's own way: the draft model's most likely tokens one by one, one pass of the
target over all of them, and both caches cut after the accepted tokens. Lookup takes its drafts
from the bindings' ``LlamaPromptLookupDecoding``. The choice of the most likely token is NumPy's,
which takes about 10 microseconds for 32,000 tokens.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from .engine import METHODS, Setting, written_once

NGRAM = 2  # tokens that the lookup compares, at most; the bindings' default
MOST_TOKENS = 512  # of one pass: llama.cpp's default


def prepare(pair, precision: str, folder: Path) -> None:
    """Writes GGUF files of target and draft model."""
    from . import gguf_file

    def write(beside):
        for name, lm in (("target", pair.target), ("draft", pair.draft)):
            gguf_file.write(lm, precision, beside / f"{name}.gguf")

    written_once(folder, write)


def start(setting: Setting) -> LlamaCpp:
    return LlamaCpp(setting)


class LlamaCpp:
    """See ``engine.Engine``."""

    methods = METHODS

    def __init__(self, setting: Setting):
        import llama_cpp

        if not setting.prepared:
            raise ValueError("LlamaCpp: the setting names no prepared folder")
        self.module = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive with the engine
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        full = setting.precision == "float32"
        kind = llama_cpp.GGML_TYPE_F32 if full else llama_cpp.GGML_TYPE_F16
        self.target, self.draft = (
            _Context(llama_cpp, Path(setting.prepared) / f"{name}.gguf", setting, kind)
            for name in ("target", "draft")
        )
        stored = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
        cache = "float32, without flash attention" if full else "float16"
        self.scheme = f"{stored[setting.precision]}, cache in {cache}"
        parts = llama_cpp.llama_print_system_info().decode().replace(":", "|").split("|")
        used = [part.split("=")[0].strip() for part in parts if part.strip().endswith("= 1")]
        self.scheme += f"; built with {', '.join(used)}"

    def generate(self, method, prompt, new, num_draft):
        drafts = self._drafts(method, num_draft)
        target, text = self.target, [int(t) for t in prompt]
        target.cut(0)
        text.append(int(target.read(text)[-1]))
        if method == "draft":
            self.draft.cut(0)
            self.draft.read(text[:-1])
        rounds, end = 1, len(prompt) + new
        while len(text) < end:
            guess = drafts(text)[: end - len(text) - 1]
            said = target.read([text[-1], *guess], every=True)
            right = 0
            while right < len(guess) and guess[right] == said[right]:
                right += 1
            text += [int(t) for t in said[: right + 1]]
            target.cut(len(text) - 1)
            self.draft.cut(len(text) - 1)
            rounds += 1
        return np.asarray(text[len(prompt) :], np.int32), rounds

    def _drafts(self, method, num_draft):
        """The function from a text to the tokens that are drafted after it."""
        if method == "plain":
            return lambda text: []
        if method == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            look = LlamaPromptLookupDecoding(NGRAM, num_draft)
            return lambda text: [int(t) for t in look(np.asarray(text, np.intc))]

        def by_model(text):
            guess = []
            for _ in range(num_draft):
                unread = (text + guess)[self.draft.length :]
                guess.append(int(self.draft.read(unread)[-1]))
            return guess

        return by_model

    def pass_seconds(self, nodes, length):
        import time

        target = self.target
        target.cut(0)
        target.read([1 + t % 97 for t in range(length)])
        begin = time.perf_counter()
        target.read([1] * nodes, every=True)
        return time.perf_counter() - begin


class _Context:
    """A model with its cache of one text."""

    def __init__(self, module, file: Path, setting: Setting, kind: int):
        self.module, self.length = module, 0
        model_options = module.llama_model_default_params()
        self.model = module.llama_model_load_from_file(str(file).encode(), model_options)
        if self.model is None:
            raise RuntimeError(f"llama.cpp does not read {file}")
        options = module.llama_context_default_params()
        options.n_ctx = max(256, -(-(setting.longest + 32) // 256) * 256)
        options.n_batch = options.n_ctx
        options.n_ubatch = MOST_TOKENS
        options.n_threads = options.n_threads_batch = setting.threads
        options.type_k = options.type_v = kind
        options.no_perf = True
        if setting.precision == "float32":  # flash attention rounds to float16
            options.flash_attn_type = module.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = module.llama_init_from_model(self.model, options)
        if self.context is None:
            raise RuntimeError(f"llama.cpp makes no context for {file}")
        self.memory = module.llama_get_memory(self.context)
        vocab = module.llama_model_get_vocab(self.model)
        self.vocab_size = module.llama_vocab_n_tokens(vocab)
        self.batch = module.llama_batch_init(options.n_ctx, 0, 1)
        for i in range(options.n_ctx):
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, 0
        arrays = self.batch.token, self.batch.pos, self.batch.logits
        self.tokens, self.places, self.asked = (
            np.ctypeslib.as_array(array, (options.n_ctx,)) for array in arrays
        )

    def read(self, tokens, every: bool = False) -> np.ndarray:
        """Appends tokens; returns the most likely token after the last, or after every one."""
        self.batch.n_tokens = count = len(tokens)
        self.tokens[:count] = tokens
        self.places[:count] = np.arange(self.length, self.length + count)
        self.asked[:count] = every
        self.asked[count - 1] = 1
        failed = self.module.llama_decode(self.context, self.batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed} for {count} tokens")
        self.length += count
        first = self.module.llama_get_logits(self.context)
        shape = (count if every else 1, self.vocab_size)
        array = np.ctypeslib.as_array(ctypes.cast(first, ctypes.POINTER(ctypes.c_float)), shape)
        return np.argmax(array, axis=-1)

    def cut(self, length: int) -> None:
        """Forgets what was read after the first ``length`` tokens."""
        if length < self.length:
            self.module.llama_memory_seq_rm(self.memory, 0, length, -1)
            self.length = length
