"""Holds Hugging Face transformers' own generation against the exact law of a small model."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from ..sampling.distribution import Sampling
from .audit_report import AuditReport
from .engine_audit import audit_callable

Way = Literal["assistant", "lookup", "plain"]
VOCAB = 4  # tokens of the models that are made here
SPARE = 4  # tokens beyond the tested ones: near the end of its budget the engine drafts less


def audit_transformers(
    way: Way = "assistant",
    *,
    model: Any = None,
    assistant: Any = None,
    prompt: Sequence[int] = (1, 2, 3),
    num_draft: int = 3,
    num_tokens: int = 10,
    samples: int = 4000,
    sampling: Sampling = Sampling(temperature=1.0),
    false_alarm: float = 1e-3,
    seed: int = 0,
    **settings: Any,
) -> AuditReport:
    """Compares what ``model.generate`` of transformers draws with the law of its own model.

    The law is computed from whole passes of the model without a cache, in PyTorch, which must be
    installed; see ``specjax.audit_callable`` for the tests. transformers writes one text a call, so
    an audit of 4,000 texts takes a few minutes.

    Args:
      way: ``assistant`` is assisted generation (speculative sampling with an assistant), ``lookup``
        drafts by prompt lookup, ``plain`` drafts nothing.
      model: a causal language model of transformers with a small vocabulary, at most 16 tokens;
        None: a Llama of two layers over four tokens with random weights.
      assistant: the assistant, over the same vocabulary; None: a Llama of one layer.
      prompt: token ids.
      num_draft: tokens that the assistant drafts a round, at a constant schedule.
      num_tokens: the tokens of a text that are tested.
      samples: the number of texts.
      sampling: temperature, top-k, top-p and min-p of the engine; the temperature must be above 0.
      false_alarm: the probability that a lossless engine is reported as biased.
      seed: the seed of the weights and of the draws.
      **settings: more arguments of ``generate``, such as ``assistant_ensemble_weight=0.5``. The
        law takes account of ``sampling`` alone: an argument, or a setting of the model's own
        ``generation_config``, that changes what the engine draws shows as a bias.

    Returns:
      an ``AuditReport`` with one finding for each test.

    Raises:
      ImportError: PyTorch is not installed.
      ValueError: ``way`` is unknown, the temperature is 0, a number or a token of the prompt is out
        of range, the vocabularies differ, or one of ``settings`` has a parameter of its own here.
    """
    if way not in get_args(Way):
        raise ValueError(f"way={way!r}: give one of {', '.join(get_args(Way))}")
    if sampling.greedy or sampling.adjusts or num_draft < 1:
        raise ValueError(
            f"sampling={sampling}, num_draft={num_draft}: the temperature must be above 0, without "
            "bias, penalties and logits processors, and num_draft at least 1"
        )
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            "PyTorch is not installed, and transformers generates with it: pip install torch"
        ) from error
    if model is None:
        model = _toy(torch, seed, width=16, layers=2)
    if assistant is None:
        assistant = _toy(torch, seed + 1, width=8, layers=1)
    vocab = model.config.vocab_size
    if way == "assistant" and assistant.config.vocab_size != vocab:
        raise ValueError(
            f"assistant: it has {assistant.config.vocab_size} tokens and the model {vocab}; give "
            "an assistant with the model's vocabulary"
        )
    if len(prompt) == 0 or not 0 <= min(prompt) <= max(prompt) < vocab:
        raise ValueError(f"prompt={[*prompt]}: give token ids from 0 to {vocab - 1}, at least one")
    start = torch.tensor([list(prompt)])
    options = {
        "attention_mask": torch.ones_like(start),
        "do_sample": True,
        "max_new_tokens": num_tokens + SPARE,
        "temperature": float(np.asarray(sampling.temperature)),
        "top_k": 0 if sampling.top_k is None else int(np.asarray(sampling.top_k)),
        "top_p": 1.0 if sampling.top_p is None else float(np.asarray(sampling.top_p)),
        "min_p": None if sampling.min_p is None else float(np.asarray(sampling.min_p)),
        **({"prompt_lookup_num_tokens": num_draft} if way == "lookup" else {}),
        **({"assistant_model": assistant} if way == "assistant" else {}),
    }
    # read from the assistant's own config alone; without a threshold of 0 a draft would end at the
    # first token that the assistant gives less than 0.4
    schedule = {
        "num_assistant_tokens": num_draft,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    if taken := sorted((options.keys() | schedule.keys()) & settings.keys()):
        raise ValueError(
            f"{taken[0]}={settings[taken[0]]!r}: it is set by sampling, way, num_draft or "
            "num_tokens"
        )
    options |= settings

    def draw(num: int) -> Iterator[list[int]]:
        noise = None
        for _ in range(num):
            text, noise = one(noise)
            yield text

    def one(noise):
        """A text, and the state of the generator after it; all else is left as it was."""
        threads = torch.get_num_threads()
        own = {name: getattr(assistant.generation_config, name) for name in schedule}
        torch.set_num_threads(1)  # a small model is faster so
        assistant.generation_config.update(**schedule)
        try:
            with torch.random.fork_rng(devices=[]), torch.inference_mode():
                torch.manual_seed(seed) if noise is None else torch.set_rng_state(noise)
                text = model.generate(start, **options)[0, len(prompt) :].tolist()
                return text, torch.get_rng_state()
        finally:
            torch.set_num_threads(threads)
            assistant.generation_config.update(**own)

    def law(texts: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            new = torch.from_numpy(texts)
            whole = torch.cat([start.expand(len(texts), -1), new], dim=1)
            logits = model(whole, use_cache=False).logits[:, len(prompt) - 1 : -1].float().numpy()
        rows = jnp.asarray(logits.reshape(-1, logits.shape[-1]))
        found = sampling.rows(len(rows)).probabilities(rows)
        return np.asarray(found).reshape(logits.shape)

    version = importlib.import_module("transformers").__version__
    said = "".join(f", {name}={value}" for name, value in settings.items())
    return audit_callable(
        draw,
        law,
        vocab_size=vocab,
        num_tokens=num_tokens,
        samples=samples,
        false_alarm=false_alarm,
        seed=seed,
        subject=f"transformers {version}, {way}{said}: {samples:,} texts of {num_tokens} tokens",
    )


def _toy(torch, seed: int, width: int, layers: int):
    """Returns a Llama with random weights over ``VOCAB`` tokens, without an end of text."""
    llama = importlib.import_module("transformers.models.llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = llama.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        return llama.LlamaForCausalLM(config).eval()
