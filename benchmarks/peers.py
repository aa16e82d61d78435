"""Other libraries on the same weights, prompts, dtype, threads and drafts.

The peer is Hugging Face transformers: plain ``generate``, assisted generation, prompt lookup, and
on a GPU compiled ``generate``. The peer and specjax run in one process, in turn, one whole request
at a time, so that the threads of one sleep while the other works. On two quiet cores the time of a
token of a 100M pair was the same in turn with the peer as alone, within 3 %.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os

import numpy as np
from flax import nnx

from specjax import kernels
from specjax.analysis import timing
from specjax.models.translate import config_to_hf, tensors_of

from . import heldout, pairs
from .figures import interval, spread
from .jobs import make_job

NEEDED = {"torch": "torch", "transformers": "transformers"}  # module -> package of pip
OURS = {"plain": "plain", "draft": "draft", "ngram": "ngram"}
THEIRS = ("hf plain", "hf assisted", "hf lookup")
PAIRED = {"plain": "hf plain", "draft": "hf assisted", "ngram": "hf lookup"}


class MissingPeerError(RuntimeError):
    """A peer is not installed; the message says how to install it."""


def check_installed() -> None:
    """Raises ``MissingPeerError`` where PyTorch or transformers is missing."""
    missing = [pip for module, pip in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise MissingPeerError(
            f"the peer Hugging Face needs {' and '.join(missing)}: "
            f'pip install {" ".join(missing)}, or pip install -e ".[peers]"'
        )


class HuggingFace:
    """The same pair in PyTorch; ``generate`` returns new token ids ``[new]``."""

    def __init__(self, pair: pairs.Pair, dtype: str):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.torch = torch
        torch.set_num_threads(int(os.environ.get("NPROC", os.cpu_count() or 1)))
        self.device = "cuda" if kernels.platform() == "gpu" else "cpu"
        self.dtype = getattr(torch, dtype)
        make = self._from_folder if pair.folders else self._from_arrays
        names = pair.folders or (pair.target, pair.draft)
        self.target, self.draft = (make(name) for name in names)

    @contextlib.contextmanager
    def counting(self):
        """A context with a list that grows by one with every pass of the target.

        Use it only where nothing is timed, and never with compiled passes, which would contain the
        hook and be compiled anew.
        """
        passes = []
        handle = self.target.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            yield passes
        finally:
            handle.remove()

    def _from_folder(self, folder):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)
        return self._ready(model.to(self.device))

    def _from_arrays(self, lm):
        """Returns a PyTorch model that shares the arrays of ``lm`` without a copy."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**config_to_hf(lm.config))
        with self.torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        arrays = {
            ".".join(map(str, path)): param.get_value()
            for path, param in nnx.to_flat_state(lm.params)
        }
        weights = {
            name: self.torch.from_dlpack(arrays[tensor.parts[0]])
            for name, tensor in tensors_of(lm.config, arrays).items()
        }
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        with self.torch.device(self.device):  # rotary frequencies are in no checkpoint
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return self._ready(model)

    def _ready(self, model):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model.eval()

    def generate(self, method: str, prompt: np.ndarray, new: int, num_draft: int) -> np.ndarray:
        """Decodes one greedy request.

        Args:
          method: one of ``THEIRS``, ``hf compiled``, or ``hf draft`` (the drafter alone).
          prompt: int ``[T]``.
          new: the number of tokens to emit.
          num_draft: the number of tokens that are drafted in a round.
        """
        ids = self.torch.as_tensor(np.asarray(prompt)[None], dtype=self.torch.long).to(self.device)
        model, options = self.target, {}
        if method == "hf assisted":
            settings = self.draft.generation_config
            settings.num_assistant_tokens = num_draft
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            options["assistant_model"] = self.draft
        elif method == "hf lookup":
            options["prompt_lookup_num_tokens"] = num_draft
        elif method == "hf compiled":
            options["cache_implementation"] = "static"  # which also compiles the forward pass
        elif method == "hf draft":
            model = self.draft
        with self.torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                **options,
            )
        return out[0, ids.shape[1] :].cpu().numpy()


def side_by_side(
    bench,
    *,
    pair: str,
    agreement: float | None = None,
    num_draft: int = 4,
    context: int = 32,
    new: int = 64,
    rows: int = 1,
    repetitions: int = 7,
    lookup: bool = True,
) -> dict:
    """Measures specjax and the peer in turn, in whole greedy requests of batch 1.

    The time of a round is measured between the first and the last round. The time of reading the
    prompt is subtracted, for the peer that of target and assistant.
    """
    check_installed()
    made = bench.pair(pair, agreement)
    if made.synthetic:
        requests = list(pairs.prompts(made.target.config, rows, context))
    else:
        encoded = (made.target.tokenizer.encode(text) for text in heldout.prompts(rows))
        requests = [np.asarray(ids, np.int32) for ids in encoded]
    theirs = HuggingFace(made, bench.dtype)
    methods = [m for m in (*OURS, *THEIRS) if lookup or m not in ("ngram", "hf lookup")]
    if theirs.device == "cuda":
        methods.append("hf compiled")
    ours = {
        m: [make_job(made, m, num_draft, ids[None], new) for ids in requests]
        for m in methods
        if m in OURS
    }

    def whole(method):
        if method in ours:
            return [w.burst(w.capacity, w.start()) for w in ours[method]]
        return [theirs.generate(method, ids, new, num_draft) for ids in requests]

    def first(method):
        """Runs up to the first token, whose time is subtracted."""
        if method in ours:
            return [w.start().length for w in ours[method]]
        models = ["hf plain", "hf draft"] if method == "hf assisted" else ["hf plain"]
        return [theirs.generate(m, ids, 1, num_draft) for m in models for ids in requests]

    texts, rounds = {}, {}
    for method in methods:
        if method == "hf compiled":
            texts[method], rounds[method] = whole(method), len(requests) * new
            continue
        with theirs.counting() as passes:
            out = whole(method)
        if method in ours:
            pieces = zip(out, requests, strict=True)
            texts[method] = [np.asarray(o.tokens)[0, len(i) : len(i) + new] for o, i in pieces]
            rounds[method] = int(sum(1 + np.sum(o.stats.rounds) for o in out))  # and the prompts'
        else:
            texts[method], rounds[method] = out, len(passes)
    calls = {m: functools.partial(_lengths, whole, m) for m in methods}
    calls |= {f"{m} first": functools.partial(first, m) for m in methods}
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=1)

    figures, total = {}, len(requests) * new
    for m in methods:
        later = seconds[m] - np.median(seconds[f"{m} first"])
        figures[m] = {
            "tokens_per_second": spread(total / seconds[m]),
            "tau": total / rounds[m],
            "rounds": rounds[m],
            "seconds_per_round": spread(later / max(1, rounds[m] - len(requests))),
            # assisted generation cannot be stopped after a round: its baseline is two requests
            "first_token": None
            if m == "hf assisted"
            else spread(seconds[f"{m} first"] / len(requests)),
            "over_own_plain": interval(
                timing.ratio(seconds["plain" if m in OURS else "hf plain"], seconds[m])
            ),
            "same_text": same_text(texts["plain"], texts[m]),
        }
        if m in PAIRED:
            peer = PAIRED[m]
            figures[m]["over_peer"] = interval(timing.ratio(seconds[peer], seconds[m]))
            peer_later = seconds[peer] - np.median(seconds[f"{peer} first"])
            per_round = peer_later / max(1, rounds[peer] - len(requests))
            own_round = later / max(1, rounds[m] - len(requests))
            figures[m]["round_over_peer"] = interval(timing.ratio(per_round, own_round))
            figures[m]["peer"] = peer
    return {
        "synthetic": made.synthetic,
        "pair_found": made.describe(),
        "methods": figures,
        "threads": theirs.torch.get_num_threads(),
        "versions": {
            "torch": theirs.torch.__version__,
            "transformers": importlib.import_module("transformers").__version__,
        },
    }


def _lengths(whole, method):
    """Runs whole requests and returns a value that is known when they are finished."""
    out = whole(method)
    return [o.length if hasattr(o, "length") else o for o in out]


def same_text(ours: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Returns the share of tokens before the first that differs; 1 means the same text."""
    equal = total = 0
    for a, b in zip(ours, others, strict=True):
        length = min(len(a), len(b))
        different = np.flatnonzero(a[:length] != b[:length])
        equal += int(different[0]) if len(different) else length
        total += max(len(a), len(b))
    return equal / total
