"""The notebooks run from top to bottom, offline, on the embedded models."""

import json
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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_committed_without_outputs(name):
    for cell in cells(name):
        assert not cell.get("outputs") and not cell.get("execution_count"), cell["id"]
