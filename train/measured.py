"""Measures an exported drafter once, and stores the figures in ``measured.json``.

The figures are τ and acceptance by position for each domain of held-out prompts, with intervals
over the prompts; the speed-up that the planner predicts on this machine; and texts with their
accepted tokens. The report and the model card read this file, so that both show the same figures.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.checkpoints import HeadLM
from specjax.models.lm import LM
from specjax.text.drafter_names import resolve_drafter

from .config import ConfigError
from .decoding import DecodingConfig, Prompts, decode_all, tau_of

FILE = "measured.json"
MAIN = "held-out corpus"  # the domain without a name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What the report shows besides τ."""

    texts: int = 3  # how many texts are shown with their accepted tokens
    plan_prompts: int = 8  # prompts that the planner decodes to predict the speed; 0: no prediction

    def __post_init__(self):
        for name in ("texts", "plan_prompts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"report.{name}={getattr(self, name)}; accepted: at least 0")


def measure(
    folder: Path,
    lm: LM,
    loaded: LM | HeadLM,
    sets: Mapping[str, Prompts],
    decoding: DecodingConfig,
    config: ReportConfig,
    num_draft: int | None = None,
) -> dict:
    """Measures a drafter that was loaded from its export; writes and returns ``measured.json``.

    Args:
      folder: the folder of the run.
      lm: the target.
      loaded: the drafter.
      sets: the prompts of each domain.
      decoding: how prompts are decoded.
      config: what is measured besides τ.
      num_draft: the tokens that a draft model drafts per round; heads draft their saved tree.
    """
    drafter, params = resolve_drafter(lm, loaded, num_draft)
    both, how = {"target": lm.params, "drafter": params}, {"drafter": loaded}
    how |= {"drafting": specjax.Drafting(num=num_draft), "max_new_tokens": decoding.new_tokens}
    sizes = dict(batch=decoding.batch, new_tokens=decoding.new_tokens)
    domains = {}
    count = sum(len(tokens) for tokens, _ in sets.values())
    print(f"measuring     τ of the export on {count} prompts", flush=True)
    for prefix, prompts in sets.items():
        found = decode_all(lm, drafter, both, *prompts, **sizes)
        tau, low, high = tau_of(found)
        rounds = max(found["rounds"].sum(), 1)
        domains[prefix.rstrip("/") or MAIN] = {
            "tau": tau,
            "low": low,
            "high": high,
            "prompts": len(found["rounds"]),
            "kept": [float(n / rounds) for n in found["accepted_at"].sum(axis=0)],
        }
    rows = _spread(sets)
    if config.plan_prompts:
        print("planning      the best number of drafts, for the report", flush=True)
    facts = {
        "target": {"name": lm.name, "fingerprint": lm.checkpoint},
        "drafter": {"name": drafter.name, "num_draft": num_candidates(drafter)},
        "machine": f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}",
        "new_tokens": decoding.new_tokens,
        "domains": domains,
        "plan": _plan(lm, loaded, [ids for _, ids in rows[: config.plan_prompts]], decoding),
        "texts": [_text(lm, domain, ids, how) for domain, ids in rows[: config.texts]],
    }
    (folder / FILE).write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def num_candidates(drafter: specjax.types.Drafter) -> int:
    """The tokens that a drafter drafts per round, without the passengers of its tree, which are
    scored with them and are never accepted."""
    return drafter.num_draft - drafter.num_passengers


def read(folder: Path) -> dict:
    """Reads the figures of a run; an empty dictionary if nothing was measured."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def _spread(sets: Mapping[str, Prompts]) -> list[tuple[str, list[int]]]:
    """Returns all prompts as ``(domain, ids)``, from the domains in turn, spread over each."""
    ordered = []
    for prefix, (tokens, lengths) in sets.items():
        order = np.random.default_rng(0).permutation(len(tokens))
        for turn, row in enumerate(order):
            ids = [int(token) for token in tokens[row, : lengths[row]]]
            ordered.append((turn, prefix.rstrip("/") or MAIN, ids))
    return [(domain, ids) for _, domain, ids in sorted(ordered, key=lambda one: one[0])]


def _plan(lm: LM, loaded, prompts, decoding: DecodingConfig) -> dict | None:
    """Returns the planner's prediction for the drafter and plain decoding; None: no prompts."""
    if not prompts or jax.process_count() > 1:  # it plans for one process
        return None
    found = specjax.plan(lm, prompts, drafters=[loaded], max_new_tokens=decoding.new_tokens)
    return found.as_json()


def _text(lm: LM, domain: str, ids: list[int], how: dict) -> dict:
    traced = specjax.trace(lm, ids, **how)
    pieces = [
        [piece, drafted]
        for one, own in zip(traced.rounds, traced.pieces, strict=True)
        for piece, drafted in zip(own, one.from_draft, strict=True)
    ]
    return {"domain": domain, "prompt": traced.prompt, "tau": traced.tau, "pieces": pieces}
