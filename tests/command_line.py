"""A fixture that runs the command within the process of the tests."""

import pytest

from specjax import cli
from specjax._internal import compile_cache


@pytest.fixture
def run(folders, capsys, monkeypatch):
    """``run(*arguments) -> (exit code, stdout, stderr)`` on the tiny target, in this process."""
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    monkeypatch.setattr("sys.stdin", None)

    def call(*arguments, command="generate", model=folders["target"]):
        arguments = [command, *map(str, arguments)]
        if command == "generate":
            arguments += ["--model", str(model), "--max-new-tokens", "24"]
        try:
            code = cli.main(arguments)
        except SystemExit as error:  # argparse
            code = error.code
        out, err = capsys.readouterr()
        return code, out, err

    return call
