"""One text of a seed under ``coupled``, over the whole registry: ``python tests/one_text.py``.

200 prompts of 1 to 9 tokens, at the temperatures 0, 0.7 and 1, each with a key of its own. Plain
decoding writes the texts, in ragged batches. Then every drafter of the registry writes them, in
ragged batches and alone, and every token is compared. A finished drafter is a line of
``benchmarks/results/coupled/rows.jsonl`` that is not measured again; the page comes at the end.
Exit code 1: a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "coupled"
TEMPERATURES = (0.0, 0.7, 1.0)
VOCAB, NUM, BATCH, LONGEST = 13, 12, 20, 9


def prompts(count: int):
    """``count`` prompts of different lengths."""
    import numpy as np

    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, int(random.integers(1, LONGEST + 1))) for _ in range(count)]


def texts(model, params, drafter, weights, rows, keys, temperature, batch: int) -> list[list[int]]:
    """The new tokens of each prompt of ``rows``, decoded ``batch`` at a time."""
    import jax.numpy as jnp
    import numpy as np

    import specjax

    said = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        lengths = np.asarray([len(row) for row in part], np.int32)
        tokens = np.zeros((len(part), LONGEST), np.int32)
        for row, prompt in enumerate(part):
            tokens[row, : len(prompt)] = prompt
        out = specjax.decode(
            model,
            drafter,
            {"target": params, "drafter": weights},
            tokens,
            lengths,
            key=keys[first : first + batch],
            max_new_tokens=NUM,
            # an array, so that one program serves all temperatures
            sampling=specjax.Sampling(temperature=jnp.full(len(part), temperature, jnp.float32)),
            rule="coupled",
        )
        found, ends = np.asarray(out.tokens), np.asarray(out.lengths)
        said += [found[i, n : ends[i]].tolist() for i, n in enumerate(lengths)]
    return said


def differing(said, wanted) -> int:
    """The number of texts that differ."""
    return sum(one != other for one, other in zip(said, wanted, strict=True))


def kept_shares() -> list[dict]:
    """The share of rounds in which one of k siblings is kept, by rule, for two fixed laws."""
    import numpy as np
    import test_coupled as t

    ways = (("coupled", "distinct"), ("rejection", "distinct"), ("gls", "distinct"))
    shares = []
    for rule, draws in ways:
        found = [t.kept(rule, k, sibling_sampling=draws) for k in (1, 2, 3)]
        shares.append({"rule": rule, "kept": found})
    overlap = float(np.minimum(t.P, t.Q).sum())
    return [{"overlap": overlap, "least": overlap / (2 - overlap)}, *shares]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all texts are the same, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--drafters", help="names of lines of the registry, with commas")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(arguments)
    import jax
    from registry import cases
    from toys import bag

    model, params = bag(VOCAB, 3, features=8)
    lines = cases(model, params)
    names = [*lines] if args.drafters is None else args.drafters.split(",")
    if unknown := [name for name in names if name not in lines]:
        parser.error(f"--drafters {unknown[0]}: no such line of tests/registry.py")
    rows, keys = prompts(args.prompts), jax.random.split(jax.random.key(11), args.prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    file, head = args.out / "rows.jsonl", {"prompts": args.prompts, "commit": commit()}
    done = read(file, head)
    if not file.exists() or not done:
        file.write_text(json.dumps(head) + "\n")
    names = [name for name in names if name != "plain" and name not in done]
    plain = lines["plain"]
    wanted = {
        t: texts(model, params, *plain[:2], rows, keys, t, BATCH) for t in TEMPERATURES if names
    }
    for index, name in enumerate(names):
        begin, (drafter, weights, _) = time.perf_counter(), lines[name]
        row: dict = {"drafter": name, "tokens": 0}
        try:
            for t in TEMPERATURES:
                for way, batch in (("batches", BATCH), ("alone", 1)):
                    said = texts(model, params, drafter, weights, rows, keys, t, batch)
                    row[f"{way} T={t:g}"] = differing(said, wanted[t])
                    row["tokens"] += sum(map(len, said))
        except ValueError as error:  # this drafter has no drafts for this rule
            row["refused"] = str(error)[:200]
        row["seconds"] = round(time.perf_counter() - begin, 1)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{index + 1}/{len(names)} {json.dumps(row)}", flush=True)
        jax.clear_caches()
    found = read(file, head)
    kept = kept_shares() if args.drafters is None else []
    (args.out / "README.md").write_text(page(head, found, kept))
    return 1 if any(wrong(row) for row in found.values()) else 0


def commit() -> str:
    """The commit of this file's repository."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"


def read(file: Path, head: dict) -> dict[str, dict]:
    """The finished rows of a file with the same head, by drafter."""
    lines = file.read_text().splitlines() if file.exists() else []
    if not lines or json.loads(lines[0]) != head:
        return {}
    rows = [json.loads(line) for line in lines[1:]]
    return {row["drafter"]: row for row in rows}


def wrong(row: dict) -> int:
    """The number of texts of a row that differ."""
    return sum(count for name, count in row.items() if name.startswith(("batches", "alone")))


def page(head: dict, found: dict[str, dict], kept: list[dict]) -> str:
    """The page of the results."""
    ran = [row for row in found.values() if "refused" not in row]
    refused = [row for row in found.values() if "refused" in row]
    tokens = sum(row["tokens"] for row in ran)
    bad = {row["drafter"]: wrong(row) for row in ran if wrong(row)}
    parts = [
        "# One text of a seed, whatever drafts\n\n`python tests/one_text.py`",
        f"Commit {head['commit']}. A toy target, {head['prompts']} prompts of 1 to {LONGEST} "
        f"tokens, {NUM} new tokens each, at the temperatures "
        f"{', '.join(f'{t:g}' for t in TEMPERATURES)}; rule `coupled`, a key for each prompt. The "
        f"texts of plain decoding in ragged batches of {BATCH} are compared with those of each "
        "drafter, in such batches and with each prompt alone.",
        f"**{len(ran)} drafters of the test registry wrote {tokens:,} tokens; texts that differ: "
        f"{sum(bad.values())}.**" + (f" {json.dumps(bad)}" if bad else ""),
    ]
    if refused:
        lines = [f"- {row['drafter']}: {row['refused']}" for row in refused]
        parts.append("Not decoded under `coupled`:\n\n" + "\n".join(lines))
    if kept:
        bounds, *rules = kept
        lines = [
            f"| {row['rule']} | " + " | ".join(f"{x:.3f}" for x in row["kept"]) + " |"
            for row in rules
        ]
        parts.append(
            "The share of rounds in which one of k siblings is kept, for one fixed law p and one "
            f"fixed law q with 1 - TV = {bounds['overlap']:.2f}, 20,000 rounds each. On a chain "
            f"(k = 1) coupling keeps between {bounds['least']:.3f} and {bounds['overlap']:.3f}; "
            "siblings of `rejection` are drawn without replacement.\n\n"
            "| rule | k = 1 | k = 2 | k = 3 |\n|---|---|---|---|\n" + "\n".join(lines)
        )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
