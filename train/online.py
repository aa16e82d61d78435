"""Recipe ``online``: a drafter meets text of another kind than it was trained on, and learns it.

It serves requests and goes on learning from them (``learner.Online``); acceptance on held-out
prompts is measured on the way, beside what it was where the drafter was trained.

References: Online Speculative Decoding, 2310.07177.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax

from . import corpus, data, distill, model, outlook, regenerate, tokenizer
from .config import ConfigError, DataConfig, RunConfig
from .evaluate import make_evaluate
from .learner import LearningConfig, Online


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """``text``: ``topics``, the English of Python's help (``pydoc_data/topics.py``), or a folder
    as ``data.corpus`` takes it. ``home``: files of ``regenerate`` from where the drafter was
    trained, ``greedy.npz`` and ``sampled.npz``: acceptance there is what the shift costs.
    ``num_requests`` of ``batch`` rows are served, every second row greedily, the others at
    ``temperature``; every ``eval_every`` of them acceptance is measured on continuations of
    ``eval_rows`` held-out prompts by the target. ``output``: a folder.
    """

    teacher: str = "embedded"
    drafter: str = "embedded-draft"
    text: str = "topics"
    home: tuple[str, ...] = ("runs/greedy.npz", "runs/sampled.npz")
    num_requests: int = 160
    batch: int = 8
    prompt_tokens: int = 48
    new_tokens: int = 64
    num_draft: int = 3
    temperature: float = 1.0
    eval_rows: int = 64
    eval_every: int = 10
    learning: LearningConfig = LearningConfig()
    output: str = "runs/online"
    run: RunConfig = RunConfig()

    def __post_init__(self):
        counts = "num_requests batch prompt_tokens new_tokens num_draft eval_rows eval_every"
        for name in counts.split():
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
HELDOUT_IN = 5  # of so many topics, one is held out
HELDOUT_SEED = 1000  # not that of any request


def documents(text: str, split: str) -> list[tuple[str, str]]:
    """``[(name, text)]`` of a split: the topics of Python's help, or a folder's."""
    if text != "topics":
        return corpus.texts(DataConfig(corpus=text), split)
    from pydoc_data.topics import topics

    def own(name: str) -> str:
        number = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        return "train" if number % HELDOUT_IN else "heldout"

    return [(name, topics[name]) for name in sorted(topics) if own(name) == split]


def prompts_of(config: OnlineConfig, vocabulary, split: str, end_of_text: int) -> np.ndarray:
    """int32 ``[n, prompt_tokens]``: every place of a split at which a prompt fits a document."""
    texts = [text for _, text in documents(config.text, split)]
    stream = data.pack([found.ids for found in vocabulary.encode_batch(texts)], end_of_text)
    places = regenerate.whole_windows(stream, config.prompt_tokens, end_of_text)
    return stream[places[:, None] + np.arange(config.prompt_tokens)]


def continuations(config: OnlineConfig, teacher, prompts: np.ndarray, end_of_text: int) -> dict:
    """``{"english greedy/": batches, "english sampled/": batches}``: what the target says behind
    held-out prompts, for ``evaluate.make_evaluate``."""
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
                stops=sorted({end_of_text, *teacher.config.eos_ids}),
            )
            parts.append((np.asarray(out.tokens), np.asarray(out.lengths)))
        tokens, stop = (np.concatenate(column) for column in zip(*parts, strict=True))
        start = np.full(len(tokens), config.prompt_tokens, np.int32)
        sets[f"{name}/"] = regenerate.Samples(tokens, start, stop).batches(config.batch)
    return sets


KINDS = {"greedy": "greedy/greedy_match", "sampled": "sampled/acceptance"}


def recovered(home: float, before: float, now: float) -> float:
    """The share of what a shift of domain has cost that is won back; 0 where it cost nothing."""
    return (now - before) / (home - before) if home > before else 0.0


def run(config: OnlineConfig, *, dry_run: bool = False) -> None:
    """Serves, learns, measures; writes ``curve.jsonl`` and ``curve.png`` into ``output``."""
    vocabulary = tokenizer.load(config.teacher)
    capacity = config.prompt_tokens + config.new_tokens
    teacher = distill.load_teacher(config.teacher, vocabulary, capacity)
    end_of_text = tokenizer.end_of_text(config.teacher, vocabulary)
    folder = Path(config.drafter)  # one that `distill` has exported has the teacher's tokenizer
    without = folder.is_dir() and not (folder / "tokenizer.json").is_file()
    online = Online(
        teacher,
        specjax.load(config.drafter, tokenizer=False if without else None),
        capacity=capacity,
        num_draft=config.num_draft,
        learning=config.learning,
        seed=config.run.seed,
    )
    known = teacher.target.vocab_size
    home = {f"{Path(path).stem}/": regenerate.read(path, known).batches(8) for path in config.home}
    served = prompts_of(config, vocabulary, "train", end_of_text)
    heldout = prompts_of(config, vocabulary, "heldout", end_of_text)
    heldout = heldout[np.linspace(0, len(heldout) - 1, config.eval_rows).astype(int)]
    rows = config.num_requests * config.batch
    tokens = rows * config.new_tokens
    rng, key = np.random.default_rng(config.run.seed), jax.random.key(config.run.seed)
    temperature = np.where(np.arange(config.batch) % 2, config.temperature, 0.0)
    sampling = specjax.Sampling(temperature=jnp.asarray(temperature, jnp.float32))
    lengths = np.full(config.batch, config.prompt_tokens, np.int32)

    def request(number: int) -> dict:
        """Serves a request and learns from it; the drafter's weights."""
        online.serve(
            served[rng.choice(len(served), config.batch)],
            lengths,
            key=jax.random.fold_in(key, number),
            max_new_tokens=config.new_tokens,
            sampling=sampling,
            stops=sorted({end_of_text, *teacher.config.eos_ids}),
        )
        online.learn()
        return online.params["drafter"]

    if dry_run:
        own = online.drafter.inner.model.config
        init = functools.partial(teacher.target.init, batch=config.batch, capacity=capacity)
        slots = jax.eval_shape(init, teacher.params)
        return outlook.show(
            model=f"{config.drafter}: {model.words(own)}; for {teacher.name}",
            shapes=f"{config.batch} rows of {capacity} tokens a request",
            parameters=f"{outlook.num_parameters(online.params['drafter']):,} to train",
            memory={
                "target": outlook.num_bytes(teacher.params),
                "drafter": outlook.num_bytes(online.params["drafter"]),
                "cache": outlook.num_bytes(slots),
            },
            steps=f"{config.num_requests} requests, {tokens:,} tokens; {config.learning.updates} "
            f"updates behind each, over {config.learning.rows} rows",
            seconds=config.num_requests * outlook.seconds_of(lambda: request(0)),
            beside="and the held-out measures",
        )
    print(f"{config.num_requests} requests of {config.batch} rows, {tokens:,} tokens")
    away = continuations(config, teacher, heldout, end_of_text)
    pair = distill.Pair(online.drafter.inner.model.config, teacher.config, end_of_text)
    evaluate = make_evaluate(distill.make_measure(pair, config.num_draft), away)
    at_home = make_evaluate(distill.make_measure(pair, config.num_draft), home)
    began = at_home(online.params["drafter"], teacher.params)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    curve: list[dict] = []
    for number in range(config.num_requests + 1):
        if number % config.eval_every == 0 or number == config.num_requests:
            found = evaluate(online.params["drafter"], teacher.params)
            row = {"requests": number, "laws": online.num_laws}
            for kind, name in KINDS.items():
                before = curve[0][kind] if curve else found[name]
                row[kind] = found[name]
                row[f"{kind}_recovered"] = recovered(began[name], before, found[name])
            curve.append(row)
            print(" · ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            record = [{"home": {kind: began[name] for kind, name in KINDS.items()}}, *curve]
            text = "".join(json.dumps(line) + "\n" for line in record)
            (folder / "curve.jsonl").write_text(text, encoding="utf-8")
        if number < config.num_requests:
            request(number)
    draw(folder / "curve.png", record)
    print(f"wrote {folder}")


def draw(picture: Path, record: list[dict]) -> None:
    """Acceptance on held-out English over requests, beside that at home."""
    from matplotlib.figure import Figure  # not pyplot, whose state is the user's (notebooks)

    home, *curve = record
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    steps = [row["requests"] for row in curve]
    names = {"greedy": "T = 0: argmaxes agree", "sampled": "T = 1: sum of min(p, q)"}
    for i, (kind, label) in enumerate(names.items()):
        axes.plot(steps, [row[kind] for row in curve], "o-", color=f"C{i}", label=label)
        axes.axhline(home["home"][kind], color=f"C{i}", linestyle="--", linewidth=1)
    axes.plot([], [], "k--", linewidth=1, label="where it was trained")
    axes.set(xlabel="requests served", ylabel="acceptance, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
