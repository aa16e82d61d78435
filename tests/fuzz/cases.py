"""A case: a program, and the batches that it is run on."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from specjax import Sampling, acceptance
from specjax.types import Drafter

from . import targets
from .drafters import Composition, composed, parts_of
from .draws import Draws, between, pick
from .reference_law import RowSettings
from .settings import Settings, drawn_settings
from .targets import Model

# how texts are checked: token for token, greedily or by the noise that ``coupled`` shares; row by
# row, whatever the other rows are (``mates``); by their law
KINDS = ("greedy", "greedy", "coupled", "sampled", "law", "law")
LOSSLESS = tuple(name for name, rule in acceptance.RULES.items() if rule.lossless)
MORE = 6  # tokens at most that are appended to a text in its second turn
LAW_PROMPTS = 2  # of such a case, but for the shipped model
LAW_ROWS = {"toy": 20_000, "decoder": 6000, "shipped": 512}  # texts drawn at first
LAW_TOKENS = 3  # tokens at least of a text whose law is enumerated; two of the shipped model
EXPECTED = 8  # texts of each kind that are drawn at first, at least on average
SHIPPED_EVERY = 8  # one case in so many is about the shipped model


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one run of a program is given, and what the reference needs to know of it.

    Attributes:
      prompts: token ids of each row, ``num_samples`` not counted.
      tokens, lengths, budgets, stops, keys: as ``decode`` takes them; ``keys`` one for each row of
        the result.
      sampling: as ``decode`` takes it.
      settings: of each prompt.
    """

    prompts: list[list[int]]
    tokens: np.ndarray
    lengths: np.ndarray
    budgets: int | np.ndarray
    stops: np.ndarray
    keys: jax.Array
    sampling: Sampling
    settings: list[RowSettings]

    def stops_of(self, row: int) -> set[int]:
        """The ids that end a prompt's row."""
        return {int(t) for t in (self.stops[row] if self.stops.ndim == 2 else self.stops)} - {-1}

    def budget_of(self, row: int) -> int:
        """The tokens that a prompt's row may generate."""
        return int(self.budgets if np.ndim(self.budgets) == 0 else self.budgets[row])


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: everything that is static when it is compiled.

    Attributes:
      draws: which case it is.
      model, composition: the target and the drafter.
      words: a description.
      kind: how it is checked, one of ``KINDS``.
      rule: the name of an acceptance rule, or ``auto``.
      settings: which sampling settings it has.
      entry: how it is run: ``decode``, ``bursts``, ``extend`` or ``insert``.
      batch, width: of the prompts.
      most: the greatest budget.
      num_stops, stops_by_row, budgets_by_row, num_samples, logprobs: of the request.
      capacity: of the buffer; None: what ``decode`` takes.
      chunk: prompt tokens that are read at once; None: what the package takes.
    """

    draws: Draws
    model: Model
    composition: Composition
    words: str
    kind: str
    rule: str
    settings: Settings
    entry: str
    batch: int
    width: int
    most: int
    num_stops: int
    stops_by_row: bool
    budgets_by_row: bool
    num_samples: int
    logprobs: str | None
    capacity: int | None
    chunk: int | None

    @property
    def rows(self) -> int:
        return self.batch * self.num_samples

    @property
    def slots(self) -> int:
        """The capacity of the token buffer."""
        return self.width + self.most if self.capacity is None else self.capacity

    @functools.cached_property
    def params(self) -> dict:
        """The ``params`` of ``decode``."""
        weights = self.composition.weights
        if isinstance(weights, dict) and "truth" in weights:
            weights = weights | {"truth": weights["truth"][: self.batch]}
        own = {"target": self.model.params, "drafter": weights}
        return own | self.settings.processor_params()

    def drawn(self, index: int) -> Batch:
        """The batch of the ``index``-th run."""
        generator = self.draws.generator("prompts", index)
        lengths = generator.integers(1, self.width + 1, self.batch)
        if "ragged" in self.draws.dropped:
            lengths[:] = self.width
        prompts = [random_prompt(generator, int(n), self.model.vocab) for n in lengths]
        return self.with_prompts(prompts, index)

    def with_prompts(self, prompts: list[list[int]], index: int, width: int | None = None) -> Batch:
        """A batch of given prompts with settings of its own; ``width``: of the padded prompts."""
        rows, generator = len(prompts), self.draws.generator
        tokens = np.full((rows, width or self.width), self.model.vocab - 1, np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        budgets = self.most
        if self.budgets_by_row:
            own = generator("budgets of rows", index)
            budgets = own.integers(1, self.most + 1, rows).astype(np.int32)
            budgets[own.integers(rows)] = self.most  # the buffer follows from the greatest
        stops = (rows, self.num_stops) if self.stops_by_row else (self.num_stops,)
        stops = generator("stops of rows", index).integers(-1, self.model.vocab, stops)
        seed = int(generator("keys", index).integers(0, 2**31 - 1))
        sampling, settings = self.settings.drawn(lambda name: generator(name, index), rows)
        return Batch(
            prompts=prompts,
            tokens=tokens,
            lengths=np.asarray([len(p) for p in prompts], np.int32),
            budgets=budgets,
            stops=stops.astype(np.int32),
            keys=jax.random.split(jax.random.key(seed), rows * self.num_samples),
            sampling=sampling,
            settings=settings,
        )


def random_prompt(generator, length: int, vocab: int) -> list[int]:
    """Token ids, half of the time with repetitions, which tables copy."""
    if generator.random() < 0.5:
        return generator.integers(0, vocab, length).tolist()
    pattern = generator.integers(0, vocab, between(generator, 1, 4))
    noise = generator.integers(0, vocab, length)
    text = np.resize(pattern, length)
    return np.where(generator.random(length) < 0.15, noise, text).tolist()


def drawn_case(draws: Draws, kinds=KINDS, rules=LOSSLESS) -> Case:
    """The case of a number, of one of ``kinds``.

    Raises:
      Refused: the package refuses the composition.
    """
    turn, shipped = divmod(draws.number, SHIPPED_EVERY)
    shipped = shipped == SHIPPED_EVERY - 1
    kind = pick(draws.generator("kind"), kinds)
    if shipped:
        model = targets.shipped()
    else:
        turn = draws.number - turn
        vocab = between(draws.generator("vocab"), 4, 5) if kind == "law" else 13
        make = draws.option("decoder", None, 0.4, lambda g: targets.decoder(g, vocab))
        seed = between(draws.generator("toy"), 0, 99)
        sharpness = 0.8 if kind == "law" else 1.5  # a flat law shows more of what is wrong with it
        model = targets.toy(vocab, seed, sharpness) if make is None else make
    words, composition = composed(draws, model, turn)
    kind = "greedy" if composition.greedy_only else kind
    settings = drawn_settings(draws, model.vocab, kind == "greedy", shared=kind == "law")
    rule = "coupled" if kind == "coupled" else pick(draws.generator("rule"), rules)
    if kind == "greedy":
        rule = draws.option("rule", "auto", 0.3, lambda g: pick(g, rules))
    case = Case(
        draws=draws,
        model=model,
        composition=composition,
        words=f"{words} for {model.words}",
        kind=kind,
        rule=rule,
        settings=settings,
        **(
            law_shape(draws, model, composition)
            if kind == "law"
            else text_shape(draws, shipped, composition)
        ),
    )
    return limited(case) if kind == "law" and shipped else case


def law_tokens(model: Model, drafter: Drafter) -> int:
    """How many tokens a text has whose law is enumerated: one more than the deepest draft, so that
    the token after a draft that was accepted whole is among them, as far as there are enough texts
    for so many kinds."""
    if model.kind == "shipped":
        return LAW_TOKENS - 1
    most = np.log(LAW_ROWS[model.kind] / LAW_PROMPTS / EXPECTED) / np.log(model.vocab)
    return max(LAW_TOKENS, min(drafter.depth + 1, int(most)))


def law_shape(draws: Draws, model: Model, composition: Composition) -> dict:
    """The sizes of a case whose law is enumerated: few prompts, each of which is read once."""
    batch = 1 if model.kind == "shipped" else LAW_PROMPTS
    most = law_tokens(model, composition.drafter)
    return dict(
        entry="decode",
        batch=batch,
        width=draws.option("width", 5, 0.5, lambda g: between(g, 1, 8)),
        most=most + draws.option("budget", 0, 0.5, lambda g: between(g, 1, 3)),
        num_stops=draws.option("stops", 0, 0.25, lambda g: 1),
        stops_by_row=False,
        budgets_by_row=False,
        num_samples=LAW_ROWS[model.kind] // batch,
        logprobs=None,
        capacity=None,
        chunk=None,
    )


def limited(case: Case) -> Case:
    """The shipped model with so few tokens to choose from that its texts can be enumerated."""
    names = tuple({*case.settings.names, "top_k"})
    settings = dataclasses.replace(case.settings, names=names, fixed={"top_k": 3})
    return dataclasses.replace(case, settings=settings)


def text_shape(draws: Draws, shipped: bool, composition: Composition) -> dict:
    """The sizes of a case whose texts are compared token for token."""
    batch = draws.option("rows", 1, 0.8, lambda g: between(g, 2, 5))
    width = draws.option("width", 6, 0.7, lambda g: between(g, 1, 24 if shipped else 14))
    most = draws.option("budget", 8, 0.7, lambda g: between(g, 1, 24 if shipped else 16))
    truth = any(d.name.startswith("synthetic") for d in parts_of(composition.drafter))
    entry = draws.option(
        "entry", "decode", 0.4, lambda g: pick(g, ("bursts", "bursts", "extend", "insert"))
    )
    samples = 1
    if entry == "decode" and not truth:
        samples = draws.option("samples", 1, 0.15, lambda g: between(g, 2, 3))
    capacity = draws.option("capacity", None, 0.2, lambda g: width + between(g, 0, most + 3))
    if entry == "extend":
        capacity = width + most + MORE + most
    return dict(
        entry="decode" if truth else entry,
        batch=batch,
        width=width,
        most=most,
        num_stops=draws.option("stops", 0, 0.4, lambda g: between(g, 1, 2)),
        stops_by_row=draws.option("stops_by_row", False, 0.4, lambda g: True),
        budgets_by_row=draws.option("budgets", False, 0.4, lambda g: True),
        num_samples=samples,
        logprobs=draws.option("logprobs", None, 0.25, lambda g: pick(g, ("raw", "law"))),
        capacity=capacity,
        chunk=draws.option("chunk", None, 0.4, lambda g: between(g, 1, 5)),
    )
