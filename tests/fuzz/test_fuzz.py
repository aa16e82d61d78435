"""Whatever may be combined: random programs against passes without a cache, for a given time.

    python -m pytest tests/fuzz/test_fuzz.py -s --fuzz-seconds 600 --fuzz-seed 7

(``-v`` names each case; ``--fuzz-quick`` compiles without most optimizations, three times as fast.)
A case is a drafter of the registry or of the shipped model, perhaps with another tree and inside of
combinators, for the toy, a random decoder or the shipped model, with random settings, at the
optimizations that a user's program is compiled with. Its texts are compared token for token with
``reference_model`` (greedy, or sampled by shared noise), or their law with the enumerated one. The
same seed draws the same cases; what fails is printed with a command that runs it alone.
"""

import collections

import jax
import pytest

from .draws import Draws
from .hunt import Report, hunt, tried


@pytest.fixture(autouse=True)
def programs_are_not_kept(request):
    """The programs of random cases would fill the cache of compiled programs."""
    if request.config.getoption("--fuzz-quick"):
        request.getfixturevalue("quick_compilation")
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def test_whatever_is_combined_says_what_the_target_says(pytestconfig):
    option = pytestconfig.getoption
    seed, number = option("--fuzz-seed"), option("--fuzz-case")
    if number is not None:
        report = Report(collections.Counter(), collections.Counter(), 0, [])
        dropped = tuple(filter(None, option("--fuzz-drop").split(",")))
        failure = tried(Draws(seed, number, dropped), report)
        report.failures += [] if failure is None else [failure]
    else:
        print(f"\n--fuzz-seed {seed}")
        report = hunt(seed, option("--fuzz-seconds"), follow=option("verbose") >= 0)
    print(report)
    if report.failures:
        raise AssertionError(f"{len(report.failures)} cases failed\n{report}") from (
            report.failures[0].error
        )
    assert number is not None or report.tried > 0.5 * report.counts.total()
