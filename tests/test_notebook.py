"""The notebook runs from top to bottom, offline, on the embedded models."""

import json
from pathlib import Path

import matplotlib

NOTEBOOK = Path(__file__).parents[1] / "colab" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_every_cell_runs_in_order(monkeypatch, tmp_path, capsys):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    figures = []
    monkeypatch.setattr(plt, "show", lambda: figures.append(plt.gcf()))
    names = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    plt.close("all")
    assert len(figures) == 2
    assert 0 <= names["accepted"] <= 3 and len(names["by_hand"]) == names["accepted"] + 1
    for share in names["kept"].values():  # a token can only be kept if the one before it is
        assert list(share) == sorted(share, reverse=True)
    assert "same text        yes" in capsys.readouterr().out


def test_it_is_committed_without_outputs():
    for cell in CELLS:
        assert not cell.get("outputs") and not cell.get("execution_count"), cell["id"]
