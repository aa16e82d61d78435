"""The notebooks run from top to bottom, offline, on the embedded models."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import matplotlib
import pytest

FOLDER = Path(__file__).parents[1] / "colab"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """``execute(name) -> (its names, the figures it showed)``, in an empty folder."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    figures, names = [], {"__name__": "__main__"}
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))

    def run(name):
        for number, cell in enumerate(cells(name)):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
        return names, figures

    yield run
    plt.close("all")


def test_a_round_is_taken_apart_and_gives_what_the_loop_gives(execute, capsys):
    names, figures = execute("quickstart.ipynb")
    assert len(figures) == 2
    assert 0 <= names["accepted"] <= 3 and len(names["by_hand"]) == names["accepted"] + 1
    for share in names["kept"].values():  # a token can only be kept if the one before it is
        assert list(share) == sorted(share, reverse=True)
    assert "same text        yes" in capsys.readouterr().out


def test_a_head_is_trained_measured_and_exported_from_texts_alone(execute, capsys):
    names, figures = execute("train_eagle3.ipynb")
    assert len(figures) == 2
    taus = [entry["decoded_tau"] for entry in names["measured"]]
    assert len(taus) == 3 and taus[-1] > 1.1  # nothing learnt: 1.0
    assert 1.1 < names["tau"][0.0] <= 4 and names["tau"][1.0] > 1
    assert names["speed"].identical and names["speed"].interval[0] > 0
    assert names["config"]["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "same text        yes" in capsys.readouterr().out


# ---------------------------------------------------------------- installing


def install_cell(name):
    return next("".join(c["source"]) for c in cells(name) if c["id"] == "c2")


def make_wheel(folder):
    """A wheel of the package's name that needs nothing, with the extra ``train``."""
    info = "specjax-9.9.dist-info"
    files = {
        "specjax/__init__.py": "WHERE = 'the wheel'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: specjax\nVersion: 9.9\n"
        "Provides-Extra: train\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "specjax-9.9-py3-none-any.whl", "w") as wheel:
        for file, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(file, text)


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory):
    """The interpreter of an environment without any package."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def run_install(python, name, folder, then=""):
    """Runs the install cell in ``folder``, without network, and ``then`` some lines."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [python, "-c", f"{install_cell(name)}\n{then}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_installs_the_wheel_beside_it_in_an_empty_folder(name, empty_python, tmp_path):
    missing = run_install(empty_python, name, tmp_path)
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1  # one line, no traceback
    assert "set REPOSITORY, or put a clone or a wheel of specjax beside" in missing.stderr
    make_wheel(tmp_path)
    done = run_install(empty_python, name, tmp_path, "import specjax; print(specjax.WHERE)")
    assert done.stdout.endswith("the wheel\n"), done.stderr
    uninstall = [empty_python, "-m", "pip", "uninstall", "--quiet", "--yes", "specjax"]
    subprocess.run(uninstall, check=True)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_installs_the_clone_around_it_or_the_address_that_it_holds(name, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[-1]))

    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.chdir(FOLDER)
    exec(install_cell(name), {})
    assert commands.pop() == f"{FOLDER.parent}[train]"
    monkeypatch.chdir(tmp_path)
    address = 'REPOSITORY = "https://example.org/specjax"'
    exec(install_cell(name).replace('REPOSITORY = ""', address), {})
    assert commands.pop() == "specjax[train] @ git+https://example.org/specjax"
    (tmp_path / "clone" / "specjax").mkdir(parents=True)
    (tmp_path / "clone" / "specjax" / "__init__.py").touch()
    exec(install_cell(name), {})  # as after `git clone` in the folder of the notebook
    assert commands.pop() == f"{tmp_path / 'clone'}[train]"
    if name == "train_eagle3.ipynb":
        monkeypatch.setenv("TPU_NAME", "local")
        exec(install_cell(name), {})
        assert commands.pop().endswith("[train,tpu]")
        monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        exec(install_cell(name), {})
        assert commands.pop().endswith("[train,cuda]")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_its_outputs_and_pictures_before_it_is_run(name):
    outputs = [out for cell in cells(name) for out in cell.get("outputs", ())]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 2
    assert not any(out["output_type"] == "error" for out in outputs)
    runs = [cell["execution_count"] for cell in cells(name) if cell["cell_type"] == "code"]
    assert runs == [*range(1, len(runs) + 1)]  # each cell once, from top to bottom
