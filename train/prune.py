"""Recipe ``prune``: makes a draft model of some of the target's own layers, and distils it.

The search is greedy. Each step leaves out the layer without which the held-out loss is least, until
``num_layers`` remain. The loss is the mean KL divergence of the part's law from the law of the
whole target, in nats per token, over ``data.eval_rows`` held-out rows. The layers that remain, the
embeddings, the last norm and the LM head become a model of their own, with the target's tokenizer,
and learn by the recipe ``distill``, whose fields this recipe has.

Every measured set is written to ``prune.jsonl`` in the folder of the run at once, so that a search
that was stopped is resumed by the same command; the training after it is resumed as that of
``distill`` is. ``pruned.json`` in the folder of the run says which layers remain.

Differs from the papers: 2402.01528 prunes the width, by Sheared LLaMA; SLEB removes layers by the
same greedy method and judges by the loss on text, where this recipe judges by the target's laws.

References: Decoding Speculative Decoding, 2402.01528; SLEB, 2402.09025, algorithm 1.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models import translate
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.config import DecoderConfig

from . import checkpoint, data, distill, features, model
from .config import ConfigError, RunConfig, resolved
from .evaluate import make_evaluate
from .journal import Journal
from .progress import LINE_SECONDS, clock
from .scale import is_first

JOURNAL, PRUNED = "prune.jsonl", "pruned.json"
LOSS = "heldout_loss"  # the measure by which layers are chosen, see ``distill.make_measure``
Measures = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneConfig(distill.LearningFromTarget):
    """The size of the draft model."""

    num_layers: int  # how many of the target's layers remain
    run: RunConfig = RunConfig(folder="runs/pruned")

    def __post_init__(self):
        super().__post_init__()
        if self.num_layers < 1:
            raise ConfigError(f"num_layers={self.num_layers}; accepted: at least 1")


Config = PruneConfig


@dataclasses.dataclass(frozen=True)
class GatedPair(distill.Pair):
    """A target and a part of its layers, whose parameters are ``weights`` and ``gates [L, 2]``.

    The gates are factors on the outputs of attention and MLP, so that one compiled program serves
    every set of layers.
    """

    def student_states(self, params, inputs):
        segments = data.segments_of(inputs, self.end_of_text)
        graph, last = graph_definition(self.student), (self.student.num_layers,)
        gates = params["gates"]
        return features.hidden_states(graph, params["weights"], inputs, segments, last, gates)[0]

    def drafter_table(self, params):
        return CausalLM(self.student).head_table(params["weights"])


def part_config(config: DecoderConfig, kept: Sequence[int]) -> DecoderConfig:
    """Returns the shape of the model of some layers of a decoder.

    Args:
      config: the shape of the whole.
      kept: the indices of the layers that remain, in ascending order.

    Raises:
      ValueError: the layout of the family cannot express these layers, or they have experts.
    """
    if config.num_experts:
        raise ValueError(
            f"{config.model_type} has experts, and which layers have them follows from their "
            "places; layers of models without experts can be left out"
        )
    local = config.local_layers
    if local is not None:
        local = tuple(local[layer] for layer in kept)
    window = config.window if local is None or any(local) else None
    local = local if window is not None else None
    part = dataclasses.replace(config, num_layers=len(kept), local_layers=local, window=window)
    translate.config_to_hf(part)  # raises ValueError
    return part


def part_params(params: dict, kept: Sequence[int]) -> dict:
    """Returns float32 copies of the weights of some layers, and of all that is in no layer.

    Args:
      params: the weights of the whole, see ``model.create``.
      kept: the indices of the layers that remain, in ascending order.
    """
    blocks = {place: params["blocks"][layer] for place, layer in enumerate(kept)}
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params | {"blocks": blocks})


def search(
    num_layers: int,
    keep: int,
    judge: Callable[[tuple[int, ...]], float],
    allowed: Callable[[tuple[int, ...]], bool] = lambda kept: True,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[int, ...]:
    """Returns the layers that greedy removal leaves, in ascending order.

    Args:
      num_layers: the number of layers of the whole.
      keep: the number of layers that remain.
      judge: returns the loss of the model of some layers.
      allowed: whether a model may have these layers.
      tell: a function that is called with a line of text after each removed layer.

    Raises:
      ConfigError: no layer may be removed, though more than ``keep`` are left.
    """
    kept = tuple(range(num_layers))
    while len(kept) > keep:
        without = {layer: tuple(x for x in kept if x != layer) for layer in kept}
        losses = {layer: judge(rest) for layer, rest in without.items() if allowed(rest)}
        if not losses:
            raise ConfigError(
                f"num_layers={keep}: the layout of the target's family cannot express fewer than "
                f"{len(kept)} of its layers, because they differ; give num_layers={len(kept)}"
            )
        removed = min(losses, key=lambda layer: losses[layer])
        kept = without[removed]
        tell(
            f"without layer {removed}: {len(kept)} of {num_layers} layers, held-out loss "
            f"{losses[removed]:.4f} nats"
        )
    return kept


def num_sets(num_layers: int, keep: int) -> int:
    """Returns how many sets of layers a search measures at most."""
    return sum(range(keep + 1, num_layers + 1))


def make_judge(config: PruneConfig, lesson: distill.Lesson):
    """Returns ``judge(kept) -> measures`` of a set of layers, see ``distill.make_measure``."""
    teacher = lesson.teacher
    pair = GatedPair(teacher.config, teacher.config, lesson.end_of_text)
    rows = data.heldout_batches(lesson.heldout, config.data)
    states = jax.jit(pair.teacher_states)  # the whole target's, computed once
    known = [(*row, states(teacher.params, row[0][:, :-1])) for row in rows]
    evaluate = make_evaluate(distill.make_measure(pair, chunk=config.chunk), {"": known})

    def judge(kept: tuple[int, ...]) -> Measures:
        gates = np.zeros((teacher.config.num_layers, 2), np.float32)
        gates[list(kept)] = 1
        return evaluate({"weights": teacher.params, "gates": gates}, teacher.params)

    return judge


def choose_layers(config: PruneConfig, lesson: distill.Lesson) -> tuple[tuple[int, ...], Measures]:
    """Searches for the layers that remain, and resumes a search that the run's folder holds.

    Returns:
      the layers, and the measures of the model of these layers before it is trained.
    """
    folder, every = Path(config.run.folder), lesson.teacher.config.num_layers
    checkpoint.record_config(folder, resolved(config))
    about = {"target": lesson.teacher.checkpoint, "rows": config.data.eval_rows, "layers": every}
    journal = Journal(folder / JOURNAL, about)
    known: dict[tuple[int, ...], Measures] = {tuple(x["kept"]): x["found"] for x in journal.rows}
    earlier, most = len(known), num_sets(every, config.num_layers)
    judge, began, told = make_judge(config, lesson), time.monotonic(), [time.monotonic()]

    def say(line: str) -> None:
        each = (time.monotonic() - began) / max(len(known) - earlier, 1)
        left = (most - len(known)) * each
        beside = f" · about {clock(left)} left" if len(known) > earlier and left else ""
        print(f"{line} · {len(known)} of {most} sets measured{beside}", flush=True)
        told[0] = time.monotonic()

    def loss(kept: tuple[int, ...]) -> float:
        if kept not in known:
            known[kept] = judge(kept)
            journal.add({"kept": kept, "found": known[kept]})
            if time.monotonic() - told[0] > LINE_SECONDS:
                say("searching layers")
        return known[kept][LOSS]

    def allowed(kept: tuple[int, ...]) -> bool:
        try:
            part_config(lesson.teacher.config, kept)
        except ValueError:
            return False
        return True

    if earlier:
        print(f"resumed the search of layers after {earlier} of {most} sets")
    kept = search(every, config.num_layers, loss, allowed, say)
    return kept, known.get(kept, {})


def run(config: PruneConfig, *, dry_run: bool = False) -> None:
    """Chooses layers, trains their draft model, and exports it to ``run.folder/model``."""
    config.check_used()
    lesson = distill.load_lesson(config)
    whole = lesson.teacher.config
    if not isinstance(whole, DecoderConfig):
        raise ConfigError(
            f"teacher={config.teacher!r} is no decoder of one stack: give another one"
        )
    if not config.num_layers < whole.num_layers:
        raise ConfigError(
            f"num_layers={config.num_layers}; accepted: fewer than the {whole.num_layers} layers "
            f"of {lesson.teacher.name}"
        )
    try:
        part_config(whole, tuple(range(whole.num_layers)))
    except ValueError as error:
        raise ConfigError(f"teacher={config.teacher!r} cannot be pruned: {error}") from error
    if dry_run:
        kept = tuple(range(config.num_layers))
        begin, judge = time.monotonic(), make_judge(config, lesson)
        judge(kept)
        compiled = time.monotonic()
        judge(kept)
        each, most = time.monotonic() - compiled, num_sets(whole.num_layers, config.num_layers)
        print(
            f"search        at most {most} sets of layers, {each:.2f} s each, about "
            f"{clock(compiled - begin + most * each)}; then the training:"
        )
    else:
        kept, found = choose_layers(config, lesson)
        print(
            f"layers        {', '.join(map(str, kept))} of {whole.num_layers}: {model.words(whole)}"
        )
        record = {"target": lesson.teacher.name, "fingerprint": lesson.teacher.checkpoint}
        record |= {"layers": kept, "before_training": found}
        if is_first():
            (Path(config.run.folder) / PRUNED).write_text(json.dumps(record, indent=2) + "\n")
    params = part_params(nnx.to_pure_dict(lesson.teacher.params), kept)
    distill.teach(config, lesson, part_config(whole, kept), params, dry_run=dry_run)
