"""The recipe `features`: what a folder holds, and what a stopped run leaves."""

import json
import shutil

import pytest
from specjax.train import data, features


def test_another_request_for_a_finished_folder_is_refused(place, capsys):
    root, train, teacher = place
    fields = [teacher, "num_rows=16", f"output={root / 'asked'}"]
    fields += [f'data.samples=["{root / "samples.npz"}"]', "data.samples_share=[0.5]"]
    for other in ([], ["data.eval_rows=8"]):  # these are no other rows
        assert train("features", *fields, *other) == 0
    for field, said in (
        ("num_rows=8", "num_rows: 16 -> 8"),
        ("layers=[0]", r"layers: [] -> [0]"),
        ("top_k=2", "top_k: 0 -> 2"),
        ("split=heldout", "split: 'train' -> 'heldout'"),
        ("data.seed=1", "data.seed: 0 -> 1"),
    ):
        assert train("features", *fields, field) == 2
        assert said in capsys.readouterr().err
    record = root / "asked" / features.RECORD
    old = {
        name: x for name, x in json.loads(record.read_text()).items() if name != features.REQUEST
    }
    record.write_text(json.dumps(old))  # of a version that did not say what was asked for
    assert train("features", *fields, "num_rows=8") == 0


def test_features_that_were_stopped_go_on_to_the_same_files(place, monkeypatch, capsys):
    root, train, teacher = place
    fields = [teacher, "num_rows=16", "top_k=2", "layers=[0]"]
    assert train("features", *fields, f"output={root / 'at_once'}") == 0
    monkeypatch.setattr(features, "PAUSE", 0.0)
    unpacked, read = data.unpacked, []

    def stopped(batch):
        read.append(batch)
        if len(read) == 3:
            raise KeyboardInterrupt
        return unpacked(batch)

    monkeypatch.setattr(data, "unpacked", stopped)
    with pytest.raises(KeyboardInterrupt):
        train("features", *fields, f"output={root / 'stopped'}")
    monkeypatch.setattr(data, "unpacked", unpacked)
    assert not (root / "stopped" / features.RECORD).exists()
    shutil.copytree(root / "stopped", root / "other")
    assert train("features", *fields, f"output={root / 'stopped'}") == 0
    assert "goes on after 8 of 16 rows" in capsys.readouterr().out
    names = sorted(path.name for path in (root / "at_once").iterdir())
    assert names == sorted(path.name for path in (root / "stopped").iterdir())
    for name in names:
        assert (root / "at_once" / name).read_bytes() == (root / "stopped" / name).read_bytes()
    assert train("features", *fields, "data.seed=1", f"output={root / 'other'}") == 0  # anew
    assert "goes on after" not in capsys.readouterr().out
