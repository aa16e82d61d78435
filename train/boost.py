"""Recipe ``boost``: several drafters for one target, each taught where the earlier ones fail.

    loss of drafter k = mean of D(p, q_k) over the positions at which no drafter before it has the
    target's most likely token

Merged to one tree (``drafters.Union``), these drafters contain the target's token more often than
as many drafters that were trained on the same positions. The measures are ``coverage``, the share
of held-out positions at which the most likely token of one drafter is the target's, and τ of the
union.

References: SpecInfer's collective boost-tuning, 2305.09781, section 3. The paper leaves out whole
samples that an earlier drafter predicts; this recipe leaves out single positions.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp

from specjax.drafters import DraftModel, Union
from specjax.models.causal_lm import CausalLM

from . import (
    card,
    chunks,
    data,
    decoding,
    distill,
    export,
    losses,
    model,
    report,
    samples,
    tokenizer,
)
from .config import SEEDS, ConfigError, resolved
from .evaluate import Mean, make_evaluate, mean
from .loop import TrainingTask, estimate, fit
from .teacher import load_teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoostConfig:
    """The drafters to train."""

    distill: distill.DistillConfig
    num_drafters: int = 2  # at least 2
    boosted: bool = True  # train each drafter where the earlier ones fail; false: everywhere
    num_draft: int = 3  # tokens that each drafts per round, where τ is measured

    def __post_init__(self):
        if self.num_drafters < 2:
            raise ConfigError(f"num_drafters={self.num_drafters}; accepted: at least 2")
        if self.num_draft < 1:
            raise ConfigError(f"num_draft={self.num_draft}; accepted: at least 1")
        if self.distill.on_policy or self.distill.data_share or self.distill.init:
            raise ConfigError(
                f"distill.on_policy={self.distill.on_policy}, distill.data_share="
                f"{self.distill.data_share}, distill.init={self.distill.init!r}: drafters are "
                "boosted against the target's laws, from random weights; leave these out"
            )


Config = BoostConfig


def make_terms(pair: distill.Pair):
    """Returns ``terms(table, states, fixed, pieces) -> (p, q, failed)``.

    ``p`` and ``q`` are the logits of the target and of the drafter in training. ``failed`` is 1.0
    where no earlier drafter has the target's most likely token.
    """

    def terms(table, states, fixed, pieces):
        q = pair.drafter_logits(table, states)
        p = pair.target_logits(fixed["target"], pieces["target"])
        failed = jnp.ones(p.shape[:2], jnp.float32)
        for own, hidden in zip(fixed["earlier"], pieces["earlier"], strict=True):
            failed *= 1.0 - losses.greedy_match(p, pair.drafter_logits(own, hidden))
        return p, q, failed

    return terms


def arrays(pair: distill.Pair, params, frozen, inputs, hidden):
    """Returns the arguments of ``make_terms``: the drafter's table and states, fixed, pieces.

    ``frozen`` holds the weights of the ``target`` and of the ``earlier`` drafters.
    """
    earlier = frozen["earlier"]
    hidden = pair.teacher_states(frozen["target"], inputs) if hidden is None else hidden
    fixed = {
        "target": pair.target_table(frozen["target"]),
        "earlier": [pair.drafter_table(own) for own in earlier],
    }
    pieces = {
        "target": hidden,
        "earlier": [pair.student_states(own, inputs) for own in earlier],
    }
    return pair.drafter_table(params), pair.student_states(params, inputs), fixed, pieces


def make_loss(pair: distill.Pair, config: BoostConfig):
    """The loss of the next drafter, in the form of ``TrainingTask.loss``.

    The logged term ``failed`` is the share of the positions that the mean is over.
    """
    distance, terms_of = config.distill.distance(), make_terms(pair)

    def terms(table, states, fixed, pieces):
        p, q, failed = terms_of(table, states, fixed, pieces)
        failed = failed if config.boosted else jnp.ones_like(failed)
        return {"loss": failed * distance(p, q), "failed": failed}

    def loss(params, frozen, batch, keys):
        del keys  # there are no draws
        tokens, weight, hidden = distill.unpacked(pair, batch)
        read = arrays(pair, params, frozen, tokens[:, :-1], hidden)
        summed, others = chunks.total(terms, *read, weight, chunk=config.distill.chunk)
        count = others["failed"]
        return {
            "distance": Mean(summed, count),
            "failed": Mean(count, jnp.sum(weight), 0.0),
        }

    return loss


def make_measure(pair: distill.Pair, chunk: int = chunks.CHUNK):
    """Returns the held-out measures.

    They are forward KL and agreement of this drafter alone, and ``coverage`` with the earlier ones.
    """
    terms_of = make_terms(pair)

    def terms(table, states, fixed, pieces):
        p, q, failed = terms_of(table, states, fixed, pieces)
        match = losses.greedy_match(p, q)
        return {
            "heldout_loss": losses.fkl(p, q),
            "greedy_match": match,
            "coverage": 1.0 - failed * (1.0 - match),
        }

    def measure(params, frozen, tokens, weight):
        found = chunks.each(terms, *arrays(pair, params, frozen, tokens[:, :-1], None), chunk=chunk)
        return {name: mean(value, weight) for name, value in found.items()}

    return measure


def run(config: BoostConfig, *, dry_run: bool = False) -> None:
    """Trains the drafters one after the other, then decodes with the first, the first two, ..."""
    one = config.distill
    vocabulary = tokenizer.load(one.data.tokenizer)
    teacher = load_teacher(one.teacher, vocabulary, one.data.length)
    heldout, end_of_text = data.load_stream(one.data, "heldout")
    shape = one.model.decoder(teacher.config.vocab_size, end_of_text)
    pair = distill.Pair(shape, teacher.config, end_of_text)
    sets = {"": data.heldout_batches(heldout, one.data)}
    of = samples.fingerprints(teacher, vocabulary)
    sets |= samples.heldout_batches(one.eval_samples, of, shape.vocab_size, one.data)
    evaluate = make_evaluate(make_measure(pair, one.chunk), sets)
    prompts = decoding.prompt_sets(teacher, heldout, one.decoding, end_of_text)
    folder, trained, rows = Path(one.run.folder), [], []
    for number in range(config.num_drafters):
        own = dataclasses.replace(
            one,
            data=dataclasses.replace(one.data, seed=(one.data.seed + number) % SEEDS),
            run=dataclasses.replace(
                one.run, folder=str(folder / f"{number + 1}"), seed=(one.run.seed + number) % SEEDS
            ),
        )
        frozen = {"target": teacher.params, "earlier": trained}
        start = model.create(shape, own.run.seed)[1]
        task = TrainingTask(
            loss=make_loss(pair, config),
            params=start,
            batches=distill.training_batches(own, teacher, vocabulary),
            evaluate=evaluate,
            frozen=frozen,
            measures=functools.partial(evaluate.names, start, frozen),
        )
        if dry_run:
            print(f"{config.num_drafters} drafters, each of")
            return estimate(task, own.optimizer, own.run, model.words(shape))
        flat = resolved(own) | {"recipe": "boost", "boosted": config.boosted, "drafter": number + 1}
        params = fit(task, flat, own.optimizer, own.run)
        folder_of = Path(own.run.folder) / "model"
        export.export(shape, params, folder_of, vocabulary, with_tokenizer=False)
        whose = teacher.name, teacher.checkpoint
        report.finish(own, card.Export(folder_of, card.DRAFT, "draft", resolved(config), *whose))
        found = {"drafters": number + 1, **evaluate(params, frozen)}
        trained = [*trained, params]
        for name, (tokens, lengths) in prompts.items():
            found[f"{name}decoded_tau"] = union_tau(
                teacher, shape, trained, tokens, lengths, config
            )
        rows.append(found)
        print(" · ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "boost.jsonl").write_text(lines, encoding="utf-8")


def union_tau(teacher, shape, trained, tokens, lengths, config: BoostConfig) -> float:
    """Returns the greedy τ of the union of all drafters that were trained so far."""
    drafter = DraftModel(num_draft=config.num_draft, model=CausalLM(shape))
    weights = trained[0]
    if len(trained) > 1:
        drafter, weights = Union(drafters=(drafter,) * len(trained)), tuple(trained)
    params = {"target": teacher.params, "drafter": weights}
    sizes = dict(batch=config.distill.decoding.batch, new_tokens=config.distill.decoding.new_tokens)
    found = decoding.decode_all(teacher, drafter, params, tokens, lengths, **sizes)
    return decoding.tau_of(found)[0]
