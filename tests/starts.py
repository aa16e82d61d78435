"""States whose first round drafts the first token, to see what a draft or a rule does there."""

import jax

from specjax.decoding import prefill
from specjax.decoding.inputs import prepare_inputs
from specjax.sampling.distribution import Sampling

unanswered = jax.jit(prefill.unanswered, static_argnums=(0, 1, 2, 3, 6))


def begun(target, drafter, params, tokens, lengths, *, key, max_new_tokens, **settings):
    """As ``specjax.init_state``, without the first token."""
    sampling, capacity = settings.get("sampling", Sampling()), settings.get("capacity")
    rule = settings.get("rule", "auto")
    assert {*settings} <= {"sampling", "capacity", "rule"}, settings
    given = target, drafter, tokens, lengths, key, max_new_tokens, sampling, capacity, ()
    request, slots = prepare_inputs(*given)
    return unanswered(target, drafter, rule, slots, params, request)
