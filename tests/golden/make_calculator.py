"""Makes calculator.json: what the calculator gives on a grid, in Python and in the browser's code.

    python tests/golden/make_calculator.py      # needs Node.js

The file also holds the digest of docs/assets/calculator.js, which is written only if Node.js
computed the same values with it as Python; a machine without Node.js compares the digest.
"""

import hashlib
import json
import subprocess
from pathlib import Path

import specjax

ROOT = Path(__file__).parents[2]
SCRIPT, GOLDEN = ROOT / "docs/assets/calculator.js", Path(__file__).with_name("calculator.json")
CLOSE = 1e-9
RANKS = [[0.7, 0.12, 0.05], [0.6, 0.15], [0.5]]
GRID = [
    *(
        {"acceptance": a, "draft_cost": c, "num_draft": g}
        for a in (0.0, 0.5, 0.8, 1.0)
        for c in (0.0, 0.05, 0.3)
        for g in (1, 4, 20)
    ),
    *({"tau": t, "num_draft": g} for t, g in ((1.0, 3), (3.2, 5), (4.0, 3))),
    *(
        {
            "acceptance": 0.75,
            "batch": b,
            "knee": 24.5,
            "prompt": 100,
            "pass_seconds": 0.02,
            "overhead": o,
            "parallel": p,
            "new_tokens": 50,
        }
        for b in (1, 6, 40)
        for o in (0.0, 0.4)
        for p in (False, True)
    ),
    {"acceptance": [0.9, 0.7, 0.2], "overhead": 0.2},
    {"acceptance": 0.6, "prompt": 40, "knee": 8.0, "read_cost": 0.3},
    {"acceptance": [0.9, 0.7, 0.2], "num_draft": 2, "prompt": 9, "knee": 4.0},
    *(
        {"acceptance": 0.7, "passes": {1: 1.0, 3: 1.2, 6: 1.7}, "draft_overhead": d, **shape}
        for d in (0.0, 0.3)
        for shape in ({"num_draft": 2}, {"num_draft": 4, "batch": 3, "knee": 2.0, "overhead": 0.1})
    ),
    {"acceptance": RANKS, "tree": "1x2", "passes": {1: 1.0, 8: 1.5}, "draft_overhead": 0.2},
    *(
        {"acceptance": RANKS, "tree": t, "batch": b, "knee": 10.0, "parallel": p}
        for t in ("3x2x1", "2", "1x2")
        for b in (1, 5)
        for p in (False, True)
    ),
]


def python_values() -> list[dict]:
    """What Python computes for each case of the grid."""
    return [values(specjax.analysis.calculate(**given)) for given in GRID]


def values(found) -> dict:
    """The numbers of a result that the browser computes as well."""
    speedups = [one.speedup for one in found.chains]
    return {"asked": vars(found.asked), "best": found.best.num_draft, "speedups": speedups}


def browser_values(node: str, script: Path = SCRIPT) -> list[dict]:
    """What the browser's code computes for each case of the grid, run by Node.js."""
    cases = [dict(given) for given in GRID]
    for case in cases:
        if "tree" in case:
            case["tree"] = [*map(int, case["tree"].split("x"))]
        if "passes" in case:
            case["passes"] = [*case["passes"].items()]
    code = (
        f"const {{ calculate }} = require({json.dumps(str(script))});"
        "const values = ({asked, best, chains}) => "
        "({asked, best: best.num_draft, speedups: chains.map((one) => one.speedup)});"
        f"console.log(JSON.stringify({json.dumps(cases)}.map(calculate).map(values)));"
    )
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def numbers(value) -> list[float]:
    """All numbers of a result, in order of their names."""
    if isinstance(value, dict):
        return [x for name in sorted(value) for x in numbers(value[name])]
    return [x for one in value for x in numbers(one)] if isinstance(value, list) else [float(value)]


def differences(these: list[dict], those: list[dict]) -> list[str]:
    """One line for each case in which two lists of results differ."""
    lines = []
    for given, a, b in zip(GRID, these, those, strict=True):
        x, y = numbers(a), numbers(b)
        if len(x) != len(y) or any(
            abs(p - q) > CLOSE * max(1, abs(p)) for p, q in zip(x, y, strict=True)
        ):
            lines.append(f"{given}: {a} against {b}")
    return lines


def digest() -> str:
    """The SHA-256 of the browser's code."""
    return hashlib.sha256(SCRIPT.read_bytes()).hexdigest()


if __name__ == "__main__":
    expected = python_values()
    if lines := differences(expected, browser_values("node")):
        raise SystemExit("\n".join(["Python and the browser's code differ:", *lines]))
    GOLDEN.write_text(json.dumps({"script": digest(), "expected": expected}) + "\n")
    print(f"wrote {GOLDEN.name}: {len(expected)} cases")
