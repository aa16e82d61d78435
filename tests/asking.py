"""The options of ``generate`` as one flat dictionary, which tests can combine easily."""

import dataclasses

from specjax.sampling.distribution import Sampling
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare_measured

DRAFTING = {"num_draft": "num", "tree": "tree", "rule": "rule"}
SAMPLING = {field.name: field.name for field in dataclasses.fields(Sampling)}


def flat(**options):
    """Gathers the options of drafting and sampling in their objects."""
    for name, kind, fields in (("drafting", Drafting, DRAFTING), ("sampling", Sampling, SAMPLING)):
        given = {fields[key]: options.pop(key) for key in fields if key in options}
        if given:
            options[name] = kind(**given)
    return options


def prepared(lm, prompts, **options):
    """Prepares the task of ``generate``; ``least_width`` ... are arguments of ``prepare``."""
    sizes = ("least_width", "least_buffer", "chunk")
    sizes = {name: options.pop(name) for name in sizes if name in options}
    return prepare_measured(lm, prompts, Options(**flat(**options)), **sizes)
