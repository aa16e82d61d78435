"""Two processes of two devices each train as one device does, and go on as they were."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from scale_worker import MESHES, STOP
from specjax.train import loop, metrics
from specjax.train.config import RunConfig
from training_toys import OPTIMIZER, ROWS, STEPS, assert_same, trained, with_batches

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What both processes say, and the folder of their run."""
    folder = tmp_path_factory.mktemp("together")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": ""}
    words = [sys.executable, str(HERE / "scale_worker.py"), address]
    processes = [
        subprocess.Popen(
            [*words, str(i), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    try:
        answers = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], answers[0][1][-3000:]
    return folder, [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


@pytest.fixture(autouse=True)
def highest_precision(quick_compilation):
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", MESHES)
def test_gradients_and_losses_are_those_of_one_device(together, name):
    for found in together[1]:
        assert_same(found[name], trained(name, RunConfig()))


def test_asked_to_stop_one_process_stops_both_and_they_go_on_from_there(together, tmp_path):
    folder, found = together
    fields = dict(folder=str(tmp_path), steps=STEPS, save_every=5, eval_every=100)
    task = with_batches("pretrain", (0, 1))
    alone = loop.fit(task, {"data.batch": ROWS}, OPTIMIZER, RunConfig(**fields))
    losses = [
        [row["loss"] for row in metrics.read(where / metrics.LOG) if "loss" in row]
        for where in (folder, tmp_path)
    ]
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)
    saved = {int(path.name) for path in (folder / "checkpoints").iterdir()}
    assert STEPS in saved
    for own in found:
        assert own["stopped"] == 128 + signal.SIGTERM
        for ours, whole in zip(own["weights"], jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(ours, whole, rtol=0, atol=1e-4)
    assert STOP < STEPS
