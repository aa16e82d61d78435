"""Proposals of Bayesian optimization, by optuna's tree-structured Parzen estimator."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any


def optuna(way_out: str = "") -> Any:
    """Imports optuna.

    Args:
      way_out: what the error adds on how to do without it.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ValueError(
            "Bayesian optimization needs optuna, which is not installed: pip install "
            f"'specjax[search]'{way_out}"
        ) from None


def suggest(
    names: Sequence[str],
    known: Sequence[tuple[Mapping[str, Any], float]],
    seed: int,
    *,
    real: bool = False,
) -> dict[str, Any]:
    """Returns the values of some variables that are worth a try next.

    The study is made anew from what is known, so the proposal is a function of the arguments.

    Args:
      names: of the variables.
      known: for each trial the values of the variables, and its result; a greater one is better.
      seed: of the random draws.
      real: whether the variables are numbers from 0 to 1; otherwise they are True or False.
    """
    own = optuna()
    kinds, before = own.distributions, own.logging.get_verbosity()
    one = (
        kinds.FloatDistribution(0.0, 1.0) if real else kinds.CategoricalDistribution((False, True))
    )
    space = dict.fromkeys(names, one)
    own.logging.set_verbosity(own.logging.WARNING)  # it would say that it made a study
    try:
        sampler = own.samplers.TPESampler(seed=seed, n_startup_trials=0)
        study = own.create_study(direction="maximize", sampler=sampler)
        for values, result in known:
            values = {name: float(value) if real else value for name, value in values.items()}
            make = own.trial.create_trial
            study.add_trial(make(params=values, distributions=space, value=result))
        return study.ask(space).params
    finally:
        own.logging.set_verbosity(before)
