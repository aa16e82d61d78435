"""Makes ``ddtree.npz`` by the authors' own code: the trees that DDTree draws from laws of places.

    python tests/golden/make_ddtree.py DDTREE

takes a checkout of github.com/liranringel/ddtree, and needs torch. Of the authors' file only the
function ``build_ddtree_tree`` is run. For N laws of D places over V tokens, and B budgets::

    logits   float32 [N, D, V]
    budgets  int32 [B]
    tokens   int32 [N, B, most]   of the nodes below the root; -1 beyond the budget
    parents  int32 [N, B, most]   0 the root, and n the node n - 1 of ``tokens``
"""

from __future__ import annotations

import ast
import heapq
import sys
import time
from pathlib import Path

import numpy as np
import torch

CASES, DEPTH, VOCAB, BUDGETS = 6, 5, 9, (5, 12, 30)


def authors_function(checkout: Path):
    """The function of the authors' file, whose other imports need a GPU."""
    name = "build_ddtree_tree"
    tree = ast.parse((checkout / "ddtree.py").read_text())
    own = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    space = dict(torch=torch, np=np, heapq=heapq, time=time, cuda_time=time.perf_counter)
    space |= dict(empty_stage_times=dict.fromkeys, DDTREE_TREE_BUILD_STAGE_ORDER=())
    exec(compile(ast.Module(own, []), "ddtree.py", "exec"), space)
    return space[name]


def main() -> None:
    build = authors_function(Path(sys.argv[1]))
    random = np.random.default_rng(0)
    sharpness = np.linspace(0.3, 3, CASES)[:, None, None]
    logits = (sharpness * random.normal(size=(CASES, DEPTH, VOCAB))).astype(np.float32)
    tokens = np.full((CASES, len(BUDGETS), max(BUDGETS)), -1, np.int32)
    parents = np.full_like(tokens, -1)
    for n, law in enumerate(logits):
        for b, budget in enumerate(BUDGETS):
            said, _, above, *_ = build(torch.from_numpy(law), budget)
            tokens[n, b, :budget], parents[n, b, :budget] = said.numpy(), above[1:]
    where = Path(__file__).parent / "ddtree.npz"
    np.savez_compressed(where, logits=logits, budgets=BUDGETS, tokens=tokens, parents=parents)


if __name__ == "__main__":
    main()
