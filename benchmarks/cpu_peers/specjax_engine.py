"""specjax as one of the engines: the same interface, in a process of its own."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from .engine import METHODS, Setting


def prepare(pair, precision: str, folder: Path) -> None:
    """Nothing: specjax reads the checkpoints."""


def start(setting: Setting) -> Specjax:
    return Specjax(setting)


class Specjax:
    """See ``engine.Engine``."""

    methods = METHODS

    def __init__(self, setting: Setting):
        from specjax.analysis import timing
        from specjax.models import load
        from specjax.models.hf import load_config
        from specjax.text.prepare import SMALLEST_BUFFER, round_up

        from .. import pairs
        from .weights import quantization

        models, schemes, precision = [], [], setting.precision
        dtype = "bfloat16" if precision == "bfloat16" else "float32"
        for folder in setting.folders:
            wish = quantization(precision, load_config(folder))
            schemes.append(str(wish or precision))
            options = dict(dtype=dtype, quantize=wish, tokenizer=False)
            models.append(load(folder, **options))
        self.pair, self.timing = pairs.Pair("pair", *models), timing
        limit = models[0].config.context_length
        self.capacity = functools.partial(round_up, smallest=SMALLEST_BUFFER, limit=limit)
        self.scheme = f"target {schemes[0]}, draft model {schemes[1]}, cache in {dtype}"

    def generate(self, method, prompt, new, num_draft):
        work = self._job(method, np.asarray(prompt, np.int32).tobytes(), new, num_draft)
        end = work.burst(work.capacity, work.start())
        text = np.asarray(end.tokens)[0, len(prompt) : len(prompt) + new]
        return text, 1 + int(np.max(end.stats.rounds))  # and the pass over the prompt

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the engine lives as long as its process
    def _job(self, method, prompt, new, num_draft):
        from .. import jobs

        ids = np.frombuffer(prompt, np.int32)
        name = {"lookup": "ngram"}.get(method, method)
        return jobs.make_job(self.pair, name, num_draft, ids[None], new)

    def pass_seconds(self, nodes, length):
        return self._passes(nodes, length).seconds()

    @functools.cache  # noqa: B019 - the engine lives as long as its process
    def _passes(self, nodes, length):
        capacity = self.capacity(length + nodes)
        call = self.timing.pass_call(self.pair.target, nodes, length=length, capacity=capacity)
        call.seconds()
        return call
