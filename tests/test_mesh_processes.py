"""Two processes of two devices each decode as one device does; where one dies the other ends."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mesh_worker
import numpy as np
import pytest
from flax import nnx
from pairs import CONFIG, TOKENIZER
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import specjax
from specjax.analysis.ppd import ppd
from specjax.kernels.xla_cpu import THREADS_PER_DEVICE
from specjax.models import Decoder, save_pretrained

SHARED = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=4, head_dim=8)
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of models that four devices can share: ``decoder``, and those with encoders."""
    root = tmp_path_factory.mktemp("shared")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    save_pretrained(Decoder(SHARED, rngs=nnx.Rngs(0)), root / "decoder", tokenizer=tokenizer)
    layers = dataclasses.replace(SHARED, num_layers=4)
    save_pretrained(Decoder(layers, rngs=nnx.Rngs(1)), root / "layers", tokenizer=tokenizer)
    numbers = Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    for name in ("t5", "whisper"):
        shutil.copytree(HERE / "golden" / "encoder_decoder" / name, root / name)
        numbers.save(str(root / name / "tokenizer.json"))
    return root


def start(root, what):
    """Both processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": ""}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # as quick_compilation
    environment["NPROC"] = str(2 * THREADS_PER_DEVICE)  # fewer may wait for each other without end
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "mesh_worker.py"), address, str(i), str(root), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]


def end(processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.usefixtures("quick_compilation")
def test_two_processes_say_what_one_says_and_each_reads_its_own_parts(root):
    processes, folder = start(root, "decode"), root / "decoder"
    try:
        answers = [process.communicate(timeout=500) for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0, 0], answers[0][1][-2000:]
    lines = [out[out.index('{"read"') :].splitlines()[0] for out, _ in answers]
    first, second = map(json.loads, lines)
    lm, draft = specjax.load(folder), specjax.load(folder)
    wanted = mesh_worker.tokens(lm, draft)
    layers = specjax.load(root / "layers")
    in_stages = mesh_worker.tokens(layers, draft, mesh_worker.STAGED)
    guessed = ppd(layers, mesh_worker.PROMPTS[0], layer=2, guesses=2, max_new_tokens=12)
    with_encoders = mesh_worker.encoded(root)
    assert all(out.stats.accepted.sum() > 0 for out in with_encoders.values())
    for found in (first, second):
        assert found["tokens"] == wanted
        assert found["tokens, whole drafter"] == {"draft": wanted["draft"]}
        for mesh in mesh_worker.STAGES:
            assert found[f"tokens, {mesh}"] == in_stages
        assert found["guessed"] == [guessed.tokens.tolist(), guessed.ticks, guessed.hits]
        for name, out in with_encoders.items():
            assert found[name] == [row.tolist() for row in out.tokens]
    weight = np.asarray(lm.params["blocks"][0]["mlp"]["down"]["weight"].get_value())
    assert first["sum"] == second["sum"] == float(weight.astype("float64").sum())

    total = (folder / "model.safetensors").stat().st_size
    norms = 3 * 4 * SHARED.hidden_size
    for found in (first, second):  # of four parts a process holds two
        assert found["read"] < total / 2 + norms
        assert found["largest"] <= 4 * SHARED.vocab_size * SHARED.hidden_size / 4
    assert first["read"] + second["read"] > 0.9 * total - 8000  # the file's header


@pytest.mark.parametrize("victim", [0, 1])
def test_where_a_process_dies_the_other_ends_with_a_message(root, victim):
    processes = start(root, "linger")
    try:
        for line in processes[1 - victim].stdout:
            if "running" in line:
                break
        os.kill(processes[victim].pid, signal.SIGKILL)
        begin = time.monotonic()
        _, message = processes[1 - victim].communicate(timeout=200)
        spent = time.monotonic() - begin
    finally:
        end(processes)
    assert processes[1 - victim].returncode != 0
    # ours, unless JAX, which hears at once of the end of the first process, was quicker
    messages = f"process {1 - victim} of 2 lost another one", "another task died"
    assert any(words in message for words in messages), message[-2000:]
    assert spent < 40
