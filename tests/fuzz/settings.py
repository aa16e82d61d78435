"""Sampling settings and logits processors, each with its reference in NumPy."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax import Sampling
from specjax.sampling.processors import LogitsProcessor
from specjax.sampling.processors.grammar import Automaton

from .draws import Draws
from .reference_law import RowSettings

# classes of tokens, token % 3: after a class (state 2 + class) some are forbidden; after class 2
# and then class 0 there is nothing more to say
CLASSES = 3
NEXT = np.asarray(
    [
        [0, 0, 0],  # dead
        [2, 3, 4],  # the beginning
        [2, 3, 4],  # after class 0
        [2, 0, 4],  # after class 1
        [5, 3, 4],  # after class 2
        [0, 0, 0],  # after class 2 and then 0
    ],
    np.int32,
)


def leaning(logits, prefix):
    """Leans to even tokens while the number of low tokens so far, prompt included, is even."""
    valid = jnp.arange(prefix.tokens.shape[1]) < prefix.length[:, None]
    low = jnp.sum((prefix.tokens < 2) & valid, axis=1)
    low += jnp.sum((prefix.path >= 0) & (prefix.path < 2), axis=1)
    lean = jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, 1.0, -1.0)
    return logits + lean * (1 - low % 2)[:, None]


def leaning_reference(logits, prompt, new):
    low = sum(token < 2 for token in (*prompt, *new))
    lean = np.where(np.arange(len(logits)) % 2 == 0, 1.0, -1.0)
    return logits + lean * (1 - low % 2)


def grammar(vocab: int) -> Automaton:
    """The automaton of ``NEXT`` for a vocabulary."""
    kind = (np.arange(vocab) % CLASSES).astype(np.int32)
    return Automaton(f"classes of {vocab}", {"next": NEXT, "kind": kind})


def grammar_reference(logits, prompt, new):
    state = 1
    for token in new:
        state = NEXT[state, token % CLASSES]
    return np.where(NEXT[state][np.arange(len(logits)) % CLASSES] > 0, logits, -np.inf)


PROCESSORS = {
    "leaning": (lambda vocab: leaning, leaning_reference),
    "grammar": (grammar, grammar_reference),
}
# each setting: its share of the cases, and a value for one row
VALUES = {
    "top_k": (0.2, lambda g, vocab: int(g.integers(0, vocab + 2))),
    "top_p": (0.25, lambda g, vocab: float(np.float32(1 - 0.6 * g.random() * (g.random() < 0.8)))),
    "min_p": (0.15, lambda g, vocab: float(np.float32(0.3 * g.random()))),
    "repetition_penalty": (0.2, lambda g, vocab: float(np.float32(0.7 + g.random()))),
    "presence_penalty": (0.15, lambda g, vocab: float(np.float32(2 * g.random() - 1))),
    "frequency_penalty": (0.15, lambda g, vocab: float(np.float32(g.random() - 0.3))),
}
BIAS = 0.2  # share of the cases with a bias


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which settings a program has; their values change from run to run.

    Attributes:
      vocab: of the target.
      greedy: whether the temperature is the number 0.
      names: of the settings in ``VALUES`` that are given.
      by_row: whether rows have values of their own.
      bias: whether there is a bias: None, ``"all"`` (one for all rows) or ``"row"``.
      processor: a name of ``PROCESSORS``, or None.
      process_drafts: see ``Sampling``.
      fixed: values that are given instead of drawn ones.
    """

    vocab: int
    greedy: bool
    names: tuple[str, ...]
    by_row: bool
    bias: str | None
    processor: str | None
    process_drafts: bool
    fixed: dict = dataclasses.field(default_factory=dict)

    def processor_params(self) -> dict:
        """``params["logits_processor"]``, where the processor has arrays."""
        made = self._processor()
        has = isinstance(made, LogitsProcessor) and made.params is not None
        return {"logits_processor": made.params} if has else {}

    def _processor(self):
        return None if self.processor is None else PROCESSORS[self.processor][0](self.vocab)

    def drawn(self, generator, rows: int) -> tuple[Sampling, list[RowSettings]]:
        """Values for ``rows`` prompts: what the package is given, and the reference's settings.

        ``generator(name)`` returns the generator of a setting.
        """
        count = rows if self.by_row else 1
        warm = generator("temperature")
        values: dict[str, list] = {"temperature": []}
        for _ in range(count):
            value = float(np.float32(0.4 + warm.random()))
            cold = self.greedy or (warm.random() < 0.25 and self.by_row)
            values["temperature"].append(0.0 if cold else value)
        for name in self.names:
            own = generator(name)
            values[name] = [VALUES[name][1](own, self.vocab) for _ in range(count)]
        for name, value in self.fixed.items():
            values[name] = [value] * count
        given = {
            name: np.asarray(v, np.int32 if name == "top_k" else np.float32)
            if self.by_row
            else v[0]
            for name, v in values.items()
        }
        if self.greedy:
            given["temperature"] = 0.0
        if self.bias is not None:
            size = (rows, self.vocab) if self.bias == "row" else (self.vocab,)
            given["logit_bias"] = generator("bias").standard_normal(size).astype(np.float32)
        sampling = Sampling(
            **given, logits_processor=self._processor(), process_drafts=self.process_drafts
        )
        return sampling, [self._of_row(values, given.get("logit_bias"), i) for i in range(rows)]

    def joined(self, own: Sampling, mates: Sampling, with_row) -> Sampling:
        """The values of ``mates`` with a row of ``own``, by ``with_row(mates, own)``; where one
        value stands for all rows, that of ``own``."""
        names = ["temperature", *self.names, *self.fixed] if self.by_row else []
        names += ["logit_bias"] if self.bias == "row" else []
        values = {name: with_row(getattr(mates, name), getattr(own, name)) for name in names}
        return dataclasses.replace(own, **values)

    def _of_row(self, values, bias, row: int) -> RowSettings:
        own = {name: v[row % len(v)] for name, v in values.items()}
        if bias is not None:
            own["logit_bias"] = np.asarray(bias[row] if bias.ndim == 2 else bias, np.float64)
        if self.processor is not None:
            own["processor"] = PROCESSORS[self.processor][1]
        return RowSettings(**own)


def drawn_settings(draws: Draws, vocab: int, greedy: bool, shared: bool = False) -> Settings:
    """The settings of a case; ``shared``: one value for all rows."""
    unused = ("top_k", "top_p", "min_p") if greedy else ()
    names = [
        name
        for name, (share, _) in VALUES.items()
        if name not in unused and draws.option(name, False, share, lambda g: True)
    ]
    processor = draws.option("processor", None, 0.2, lambda g: [*PROCESSORS][g.integers(2)])
    blind = processor is not None and draws.option("process_drafts", False, 0.3, lambda g: True)
    bias = draws.option("bias", None, BIAS, lambda g: ("all", "row")[g.integers(2)])
    by_row = not shared and draws.option("by_row", False, 0.5, lambda g: True)
    return Settings(
        vocab=vocab,
        greedy=greedy,
        names=tuple(names),
        by_row=by_row,
        bias="all" if shared and bias else bias,
        processor=processor,
        process_drafts=not blind,
    )
