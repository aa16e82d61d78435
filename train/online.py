"""Recipe ``online``: a drafter learns from requests whose text is unlike its training text.

The drafter serves requests and learns from them (``learner.Online``): a step is one request and the
updates after it. Acceptance on held-out prompts is measured during the run and compared with that
on text like the training text. The drafter is exported at the end.

References: Online Speculative Decoding, 2310.07177.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.models.lm import LM
from specjax.text import drafter_names

from . import (
    card,
    checkpoint,
    corpora,
    data,
    decoding,
    distill,
    export,
    measured,
    metrics,
    model,
    outlook,
    recovery,
    report,
    samples,
    tokenizer,
)
from .config import ConfigError, DataConfig, RunConfig, resolved
from .learner import LearningConfig, Online
from .loop import Steps, advance
from .teacher import load_teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """The requests and what is measured.

    ``run.steps`` requests are served. After every ``run.eval_every`` of them, acceptance is
    measured on the target's continuations of held-out prompts, and τ on the prompts of
    ``decoding``.
    """

    teacher: str = "embedded"  # the frozen target: a name or folder that specjax.load takes
    drafter: str = "embedded-draft"  # the draft model that learns
    text: str = "topics"  # the English of Python's help, or a folder as data.corpus takes it
    home: tuple[str, ...] = ("runs/greedy.npz", "runs/sampled.npz")  # text like the training text
    batch: int = 8  # rows per request: every second row is greedy
    prompt_tokens: int = 48  # tokens of a prompt
    new_tokens: int = 64  # tokens that are emitted for each prompt
    num_draft: int = 3  # tokens that are drafted per round
    temperature: float = 1.0  # of the rows that are not greedy
    eval_rows: int = 64  # held-out prompts, a multiple of batch
    learning: LearningConfig = LearningConfig()
    decoding: decoding.DecodingConfig = decoding.DecodingConfig()
    run: RunConfig = RunConfig(folder="runs/online", steps=160, save_every=20, eval_every=20)
    report: measured.ReportConfig = measured.ReportConfig()
    card: card.CardConfig = card.CardConfig()

    def __post_init__(self):
        for name in ("batch", "prompt_tokens", "new_tokens", "num_draft", "eval_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 1")
        if self.eval_rows % self.batch:
            raise ConfigError(
                f"eval_rows={self.eval_rows}; accepted: a multiple of batch={self.batch}"
            )
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature}; accepted: above 0")
        names = sorted(Path(path).stem for path in self.home)
        if names != ["greedy", "sampled"]:
            raise ConfigError(
                f"home={list(self.home)}; accepted: two files of `regenerate`, greedy.npz and "
                "sampled.npz"
            )


Config = OnlineConfig
HELDOUT_IN = 5  # every fifth topic is held out
HELDOUT_SEED = 1000  # a seed that no request has


def documents(text: str, split: str) -> list[tuple[str, str]]:
    """Returns ``[(name, text)]`` of a split of Python's help or of a folder."""
    if text != "topics":
        return corpora.texts(DataConfig(corpus=text), split)
    from pydoc_data.topics import topics

    def own(name: str) -> str:
        number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        return "train" if number % HELDOUT_IN else "heldout"

    return [(name, topics[name]) for name in sorted(topics) if own(name) == split]


def stream_of(config: OnlineConfig, vocabulary, split: str, end_of_text: int) -> data.Stream:
    """The tokens of a split."""
    texts = [text for _, text in documents(config.text, split)]
    ids = [found.ids for found in vocabulary.encode_batch(texts)]
    return data.Stream(data.pack(ids, end_of_text))


def prompts_of(config: OnlineConfig, stream: data.Stream, end_of_text: int) -> np.ndarray:
    """Returns the prompts int32 ``[n, prompt_tokens]``: all windows within one document."""
    places = data.whole_windows(stream.tokens, config.prompt_tokens, end_of_text)
    return stream.tokens[places[:, None] + np.arange(config.prompt_tokens)]


def requests_of(config: OnlineConfig, prompts: np.ndarray):
    """Returns an endless Grain iterator over int32 ``[batch, prompt_tokens]``.

    Each pass visits the prompts in another order.
    """
    import grain

    places = grain.MapDataset.source(np.arange(len(prompts))).seed(config.run.seed).shuffle()
    rows = places.repeat(data.EPOCHS).map(lambda place: prompts[place])
    return data.batched(rows, config, (0, 1), prefetch=8)


def continuations(config: OnlineConfig, teacher, prompts: np.ndarray, ends: list[int]) -> dict:
    """Returns the target's continuations of held-out prompts, for ``recovery.make_rates``.

    Returns:
      ``{"greedy": batches, "sampled": batches}``.
    """
    lengths = np.full(config.batch, config.prompt_tokens, np.int32)
    sets: dict = {}
    for name, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        parts = []
        for first in range(0, len(prompts), config.batch):
            out = specjax.decode(
                teacher.target,
                specjax.drafters.Plain(),
                {"target": teacher.params},
                prompts[first : first + config.batch],
                lengths,
                key=jax.random.key(HELDOUT_SEED + first),
                max_new_tokens=config.new_tokens,
                sampling=specjax.Sampling(temperature=temperature),
                stops=ends,
            )
            parts.append((np.asarray(out.tokens), np.asarray(out.lengths)))
        tokens, stop = (np.concatenate(column) for column in zip(*parts, strict=True))
        start = np.full(len(tokens), config.prompt_tokens, np.int32)
        sets[name] = samples.Samples(tokens, start, stop).batches(config.batch)
    return sets


def make_steps(
    config: OnlineConfig, online: Online, prompts: np.ndarray, ends: list[int], evaluate
):
    """Returns the steps of ``loop.advance``: a request, and the updates after it.

    The state is that of ``online`` and the number of served requests, which decides the draws.

    Args:
      config: the configuration of the recipe.
      online: the session.
      prompts: int32 ``[n, prompt_tokens]``.
      ends: the ids of the tokens that end a text.
      evaluate: ``evaluate(params) -> {name: float}``.
    """
    key = jax.random.key(config.run.seed)
    temperature = np.where(np.arange(config.batch) % 2, config.temperature, 0.0)
    sampling = specjax.Sampling(temperature=jnp.asarray(temperature, jnp.float32))
    lengths = np.full(config.batch, config.prompt_tokens, np.int32)

    def init():
        return {**online.state, "num_requests": 0}

    def step(state, tokens):
        online.state, number = state, state["num_requests"]
        stats = online.serve(
            tokens,
            lengths,
            key=jax.random.fold_in(key, number),
            max_new_tokens=config.new_tokens,
            sampling=sampling,
            stops=ends,
        ).stats
        found = {"accepted": stats.accepted.sum() / stats.drafted.sum(), "laws": online.num_laws}
        try:
            found |= online.learn()
        except FloatingPointError:
            found["loss"] = math.nan  # at which the loop raises Diverged
        return {**online.state, "num_requests": number + 1}, found

    return Steps(
        init=init,
        step=step,
        batches=requests_of(config, prompts),
        evaluate=evaluate,
        tokens=lambda batch: len(batch) * config.new_tokens,
    )


def run(config: OnlineConfig, *, dry_run: bool = False) -> None:
    """Serves, learns and measures, and exports the drafter to ``run.folder/model``.

    The export has no tokenizer. ``curve.jsonl`` and ``curve.png`` show how acceptance recovered.
    """
    vocabulary = tokenizer.load(config.teacher)
    capacity = config.prompt_tokens + config.new_tokens
    teacher = load_teacher(config.teacher, vocabulary, capacity)
    end_of_text = tokenizer.end_of_text(config.teacher, vocabulary)
    ends = sorted({end_of_text, *teacher.config.eos_ids})
    draft = drafter_names.named(teacher, config.drafter)
    if not isinstance(draft, LM):
        raise ConfigError(f"drafter={config.drafter!r}; accepted: a draft model, which this is not")
    online = Online(
        teacher,
        draft,
        capacity=capacity,
        num_draft=config.num_draft,
        learning=config.learning,
        seed=config.run.seed,
    )
    known, own = teacher.target.vocab_size, online.drafter.inner.model.config
    of = samples.fingerprints(teacher, vocabulary)
    home = {Path(path).stem: samples.read(path, of, known).batches(8) for path in config.home}
    served, heldout = (
        stream_of(config, vocabulary, split, end_of_text) for split in ("train", "heldout")
    )
    prompts = prompts_of(config, heldout, end_of_text)
    prompts = prompts[np.linspace(0, len(prompts) - 1, config.eval_rows).astype(int)]
    if dry_run:
        return estimate(config, teacher, online, prompts_of(config, served, end_of_text), ends)
    pair = distill.Pair(own, teacher.config, end_of_text)
    rates = recovery.make_rates(pair, continuations(config, teacher, prompts, ends))
    start = online.params["drafter"]
    at_home = recovery.make_rates(pair, home)(start, teacher.params)
    before = rates(start, teacher.params)
    sets = decoding.prompt_sets(teacher, heldout, config.decoding, end_of_text)
    decoded = decoding.make_decoded(teacher, online.drafter.inner, sets, config.decoding)

    def evaluate(params) -> dict[str, float]:
        found, now = {}, rates(params, teacher.params)
        for kind, measure in recovery.MEASURES.items():
            found[f"{kind}/{measure}"] = float(recovery.rate(now[kind]))
            names = (f"{kind}_{name}" for name in ("recovered", "low", "high"))
            shares = recovery.recovery(at_home[kind], before[kind], now[kind])
            found |= zip(names, shares, strict=True)
        return found | decoded(teacher.params, params)

    began = evaluate(start)
    print("before: " + " · ".join(f"{name} {value:.4f}" for name, value in began.items()))
    steps = make_steps(config, online, prompts_of(config, served, end_of_text), ends, evaluate)
    params = advance(steps, resolved(config), config.run)
    folder = Path(config.run.folder)
    write_curve(folder, {kind: float(recovery.rate(rows)) for kind, rows in at_home.items()}, began)
    export.export(own, params, folder / "model", vocabulary, with_tokenizer=False)
    whose = teacher.name, teacher.checkpoint
    made = card.Export(folder / "model", card.DRAFT, "draft", resolved(config), *whose)
    loaded = specjax.load(folder / "model", tokenizer=False)
    report.finish(config, made, teacher, loaded, sets, config.num_draft)
    checkpoint.mark_finished(folder, resolved(config))


def write_curve(folder: Path, home: dict[str, float], began: dict[str, float]) -> None:
    """Writes ``curve.jsonl`` and draws it as ``curve.png``.

    The file holds the acceptance on text like the training text (``home``), the measures before any
    request (``began``), and those of the run's log.
    """
    rows = [{"step": 0, **began}, *metrics.read(folder / metrics.LOG)]
    curve = []
    for row in rows:
        if "greedy_recovered" in row:
            own = {"requests": row["step"]}
            for kind, measure in recovery.MEASURES.items():
                own[kind] = row[f"{kind}/{measure}"]
                own |= {name: row[name] for name in row if name.startswith(f"{kind}_")}
            curve.append(own)
    lines = "".join(json.dumps(row) + "\n" for row in [{"home": home}, *curve])
    (folder / "curve.jsonl").write_text(lines, encoding="utf-8")
    recovery.draw(folder / "curve.png", home, curve)


def estimate(config: OnlineConfig, teacher, online: Online, prompts: np.ndarray, ends) -> None:
    """Prints the time and memory of a run, estimated from a few requests."""
    steps, learning = make_steps(config, online, prompts, ends, None), config.learning
    state, batch = steps.init(), next(steps.batches)
    count = config.run.steps
    init = functools.partial(teacher.target.init, batch=config.batch, capacity=online.capacity)
    outlook.show(
        model=f"{config.drafter}: {model.words(online.drafter.inner.model.config)}; for "
        f"{teacher.name}",
        shapes=f"{config.batch} rows of {online.capacity} tokens a request",
        parameters=f"{outlook.num_parameters(state['params']):,} to train",
        memory={
            "target": outlook.num_bytes(teacher.params),
            "drafter": outlook.num_bytes(state["params"]),
            "optimiser": outlook.num_bytes(state["optimizer"]),
            "buffer": outlook.num_bytes(state["buffer"]),
            "cache": outlook.num_bytes(jax.eval_shape(init, teacher.params)),
        },
        steps=f"{count} requests, {count * steps.tokens(batch):,} tokens; {learning.updates} "
        f"updates after each, over {learning.rows} rows",
        seconds=count * outlook.seconds_of(lambda: steps.step(state, batch)[0]["params"]),
        beside="and the held-out measures",
    )
