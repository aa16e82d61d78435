"""Which heads the scripts about heads measure, and in which ways: their common arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from specjax import trees
from specjax.drafters.drawn_or_top import LEARNED
from specjax.sampling.distribution import Sampling
from specjax.text.auto_number import auto_policy
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare
from specjax.trees import expand

CHAINS = (
    "top",
    "iid",
    LEARNED,
)  # ways to choose the tokens of a chain; the others are about siblings


def named(heads: Sequence[str]) -> dict[str, str]:
    """The drafter of each name, from ``NAME=FOLDER`` or ``FOLDER``, which is its own name."""
    return dict(one.rpartition("=")[::2] if "=" in one else (one, one) for one in heads)


def add_shapes(parser: argparse.ArgumentParser, temperatures: Iterable[float], **usual) -> None:
    """Adds the arguments that say what is drafted, and how tokens are chosen above temperature 0.

    ``usual``: the defaults of ``lengths``, ``trees`` and ``siblings``.
    """
    at = parser.add_argument
    at("--temperatures", type=float, nargs="+", default=list(temperatures), metavar="T")
    for name, kind, what in (
        ("lengths", length, "drafted tokens of chains"),
        ("trees", _tree, "trees, such as 3x2x1"),
        ("siblings", str, f"how tokens are chosen above T = 0; in chains {', '.join(CHAINS)}"),
    ):
        choices = (*expand.HOW, LEARNED) if name == "siblings" else None
        default = list(usual.get(name, ()))
        at(f"--{name}", type=kind, nargs="+", choices=choices, default=default, help=what)


def add_policies(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of rows in which a policy decides how many tokens are drafted."""
    what = "rows in which a policy chooses the length, such as auto or auto:schedule"
    parser.add_argument("--policies", type=_policy, nargs="+", default=[], help=what)
    what = "requests that rows with a policy decode together"
    parser.add_argument("--batches", type=length, nargs="+", default=[1, 8], help=what)


def rows_of(args: argparse.Namespace) -> list[dict]:
    """The rows of all shapes at all temperatures, and of all policies with all batches.

    A row holds ``temperature``, ``num`` or ``tree``, and only where they are asked for
    ``siblings`` and, above 1, ``batch``.
    """
    shapes: list[dict] = [*({"num": n} for n in args.lengths), *({"tree": t} for t in args.trees)]
    rows = []
    for t in args.temperatures:
        rows += with_siblings([{"temperature": t, **shape} for shape in shapes], args.siblings)
        for num in getattr(args, "policies", ()):
            for batch in args.batches:
                together = {} if batch == 1 else {"batch": batch}
                rows.append({"temperature": t, "num": num, **together})
    return rows


def in_turn(rows: Sequence[dict]) -> list[list[dict]]:
    """The rows in groups that can be measured in turn: of one temperature and one batch."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row.get("batch", 1)), []).append(row)
    return [*groups.values()]


def words_of(rows: Sequence[dict]) -> list[str]:
    """The arguments for which ``rows_of`` has all of these rows."""
    nums = [row["num"] for row in rows if "num" in row]
    values = {
        "temperatures": [f"{row['temperature']:g}" for row in rows],
        "lengths": [num for num in nums if isinstance(num, int)],
        "trees": [row["tree"] for row in rows if "tree" in row],
        "siblings": [row["siblings"] for row in rows if "siblings" in row],
        "policies": [num for num in nums if isinstance(num, str)],
        "batches": [row.get("batch", 1) for row in rows if isinstance(row.get("num"), str)],
    }
    given = [(f"--{name}", *map(str, dict.fromkeys(found))) for name, found in values.items()]
    return [word for words in given if len(words) > 1 for word in words]


def with_siblings(rows: Sequence[dict], siblings: Sequence[str]) -> list[dict]:
    """The rows, those above temperature 0 once for each way to choose tokens, if any is given."""
    found = []
    for row in rows:
        known = expand.HOW if "tree" in row else CHAINS
        ways = [how for how in siblings if how in known]
        ways = ways if row["temperature"] else []
        found += [row | {"siblings": how} for how in ways] or [row]
    return found


def drafting_of(row: dict) -> Drafting:
    """How a row drafts."""
    shape = {name: row[name] for name in ("num", "tree") if name in row}
    return Drafting(**shape, sibling_sampling=row.get("siblings"))


def sampling_of(row: dict) -> Sampling:
    """How the tokens of a row are drawn."""
    return Sampling(temperature=row["temperature"])


def check_heads(lm, prompt: str, drafters: Iterable[str]) -> None:
    """Raises what ``specjax.generate`` raises for a drafter that cannot be used at all."""
    for drafter in drafters:
        prepare(lm, [prompt], Options(drafter=drafter, max_new_tokens=1))


def refusal(lm, prompt: str, drafter, row: dict) -> str | None:
    """Why a drafter refuses the shape of a row; None: it does not."""
    how = dict(drafting=drafting_of(row), sampling=sampling_of(row))
    try:
        prepare(lm, [prompt], Options(drafter=drafter, max_new_tokens=1, **how))
    except ValueError as error:
        return str(error)
    return None


def label(row: dict) -> str:
    """A row in words, without the drafter."""
    if "tree" in row:
        shape = f"tree {row['tree']}"
    elif isinstance(row["num"], str):
        shape = f"`{row['num']}`, batch {row.get('batch', 1)}"
    else:
        shape = f"{row['num']} tokens a round"
    drawn = f", `{row['siblings']}`" if "siblings" in row else ""
    return f"T = {row['temperature']:g}, {shape}{drawn}"


def length(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _tree(text: str) -> str:
    try:
        trees.as_topology(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _policy(text: str) -> str:
    if text.partition(":")[0] != "auto":
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor auto:POLICY")
    try:
        auto_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
