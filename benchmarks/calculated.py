"""What the calculator says of measured runs, from ever more measurements, and how far it is off.

Nothing is timed here: ``calculator.py`` measures.
"""

from __future__ import annotations

import numpy as np

from specjax.analysis import calculate


def conditional(shares: list[float]) -> list[float]:
    """The rate of each position, given that all before it were accepted, of the shares of rounds in
    which positions were accepted."""
    before = [1.0, *shares[:-1]]
    return [now / past if past else 0.0 for now, past in zip(shares, before, strict=True)]


def computed(figures: dict, batch: int) -> list[dict]:
    """What the calculator says of each chain of one drafter, from ever more measurements.

    Args:
      figures: what ``calculator.measure`` returns.
      batch: the requests that were decoded together.

    Returns:
      for each chain ``run``, as measured; ``pass_seconds``, those of a pass over one token of each
      row, in plain runs; in such passes, what was measured (``inputs``, as ``calculate`` takes
      them, with the ``rate`` of all positions) and what the run's rounds cost beside it
      (``rest``); a speed-up by one rate and the cost of a draft step (``formula``), by the rates of
      the positions and the costs of passes (``passes``), and with the rest of a round of the other
      lengths (``others``); and ``halves``, the same of each half of the prompts, with the rest of a
      round of the other half (``others``).
    """
    plain, *parts = figures["seconds"]
    chains = []
    for part, measured in zip(parts, figures["chains"], strict=True):
        chain = beside_parts(measured["run"], plain, part, batch)
        halves = [beside_parts(run, plain, part, batch) for run in measured["run"].get("parts", [])]
        both = zip(halves, reversed(halves), strict=True)
        halves = [with_rest(mine, other["rest"]) for mine, other in both]
        chains.append(chain | {"halves": halves})
    return beside_others(chains)


def beside_parts(run: dict, plain: dict, part: dict, batch: int) -> dict:
    """The chain of a run, without what the calculator says with a ``draft_overhead``.

    Args:
      run: its figures, as ``heldout.measure_model`` has them.
      plain: the seconds of the parts of a plain round.
      part: those of a round of this chain.
      batch: the requests that were decoded together.
    """
    shares = run["acceptance_by_position"]
    num = len(shares)
    one = min(plain["pass"], plain["round"])
    overhead = plain["round"] / one - 1
    draft, verify = max(0.0, part["draft"]) / one, part["pass"] / one  # noise of few calls
    running = batch / run["slowest"]  # rows that still run in a round, on average
    seconds = batch * run["seconds_per_plain_step"] / (1 + overhead)
    rest = running * run["seconds_per_round"] / seconds - draft - verify - overhead
    known = {
        "acceptance": conditional(shares),
        "draft_cost": draft / num,
        "passes": {1: 1.0, num + 1: verify},
    }
    rate = sum(shares) / (1 + sum(shares[:-1]))  # accepted, of those that could have been
    kinds = {
        "formula": calculate(rate, num_draft=num, draft_cost=known["draft_cost"]),
        "passes": calculate(**known),
    }
    said = {kind: found.asked.speedup for kind, found in kinds.items()}
    inputs = {"rate": rate, **known, "overhead": overhead}
    return {"run": run, "pass_seconds": seconds, "inputs": inputs, "rest": rest} | said


def with_rest(chain: dict, rest: float) -> dict:
    """A chain with a rest of a round, at least 0, among its inputs (``draft_overhead``), and with
    what the calculator says then (``others``)."""
    inputs = chain["inputs"] | {"draft_overhead": max(0.0, rest)}
    return {**chain, "inputs": inputs, "others": calculate(**given(inputs)).asked.speedup}


def beside_others(chains: list[dict]) -> list[dict]:
    """The chains of one drafter, each with the rest of a round that the other lengths say.

    It is halfway between the mean of the rests of the other lengths and what the line through them
    says, by least squares. Much of the slope of a line through four points is noise, which beyond
    the points is multiplied.
    """
    lengths = [len(one["inputs"]["acceptance"]) for one in chains]
    rests = [one["rest"] for one in chains]
    found = []
    for i, one in enumerate(chains):
        others = [k for k in range(len(chains)) if k != i]
        known = [rests[k] for k in others]
        line = np.polyfit([lengths[k] for k in others], known, 1)
        found.append(with_rest(one, float(np.polyval(line, lengths[i]) + np.mean(known)) / 2))
    return found


def latencies(chains: list[dict], requests: int, new: int, batch: int) -> list[dict]:
    """Seconds to the first token (``ttft``) and per later token of a row (``tpot``), each measured
    and computed, of each chain of one drafter.

    The calculator is given for TPOT the seconds of a pass over one token of each row, in runs, and
    for TTFT the seconds in which the target alone reads the prompts, and what the drafter's reading
    cost in the runs of the other lengths (``read_cost``, their mean, at least 0).

    Args:
      chains: what ``computed`` returns, of ``requests`` requests of ``new`` tokens.
    """
    tokens, later = requests * new, requests * (new - 1)  # reading a prompt emits the first one

    def reading(run: dict, which: str) -> float:
        rates = (run[f"{which}tokens_per_second_{name}"] for name in ("whole", "rounds"))
        whole, rounds = (count / rate for count, rate in zip((tokens, later), rates, strict=True))
        return (whole - rounds) * batch / requests

    alone = [reading(one["run"], "plain_") for one in chains]
    both = [reading(one["run"], "") for one in chains]
    costs = np.asarray(both) / alone - 1
    found = []
    for i, one in enumerate(chains):
        run = one["run"]
        cost = max(0.0, float(np.delete(costs, i).mean()))
        known = given(one["inputs"]) | {"batch": batch, "read_cost": cost}
        rounds = calculate(**known, pass_seconds=one["pass_seconds"]).asked
        read = calculate(**known, prompt=1, pass_seconds=alone[i]).asked
        found.append(
            {
                "ttft": (both[i], read.ttft),
                "tpot": (batch / run["tokens_per_second_rounds"], rounds.tpot * run["slowest"]),
            }
        )
    return found


def given(inputs: dict) -> dict:
    """The arguments of ``calculate``, of inputs as ``computed`` has them."""
    return {name: value for name, value in inputs.items() if name != "rate"}


def speedup(chain: dict, kind: str) -> float:
    """The computed speed-up of the rounds, of a batch that lasts as long as its slowest row."""
    return chain[kind] / chain["run"]["slowest"]


def error(chain: dict, kind: str) -> float:
    """How far a computed speed-up is above the measured one, as a share of it."""
    return speedup(chain, kind) / chain["run"]["ratio_rounds"]["median"] - 1
