"""One of two processes that train together; ``test_scale_processes.py`` starts them.

The arguments are address, index, and the folder for its gradients and losses by task.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
from specjax.train import loop, scale
from specjax.train.config import RunConfig
from training_toys import OPTIMIZER, ROWS, STEPS, trained, with_batches

from specjax.sharding import join

MESHES = {"pretrain": "data=2,model=2", "eagle3": "data=4", "block": "data=4"}
STOP = 7  # the step after which a process is asked to stop


def main():
    address, index, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    join(address, 2, int(index), patience=300)
    found = {}
    for name, mesh in MESHES.items():
        run = RunConfig(mesh=mesh)
        found[name] = trained(name, run)
        found[name] = {part: found[name][part] for part in ("gradients", "losses")}
        found[name]["gradients"] = [x.tolist() for x in found[name]["gradients"]]

    fields = dict(folder=folder, steps=STEPS, save_every=5, eval_every=100)
    run = RunConfig(mesh="data=4", fully_sharded=True, **fields)

    def task():
        return with_batches("pretrain", scale.shard_of(run), asked)

    def asked(step):  # the second process alone, as a cluster may do
        if step == STOP and index == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        loop.fit(task(), {"data.batch": ROWS}, OPTIMIZER, run)
    except loop.Interrupted as stopped:
        found["stopped"] = stopped.code
    params = loop.fit(task(), {"data.batch": ROWS}, OPTIMIZER, run)
    found["weights"] = [x.tolist() for x in jax.tree.leaves(params)]
    Path(folder, f"{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
