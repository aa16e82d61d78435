"""What is installed: every package and file, nothing heavy at import, a README that is true."""

import ast
import collections
import graphlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import specjax
from specjax.kernels.cpu import compiler

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def installed_as(path: Path) -> Path:
    """Where a file or folder of the repository stands once it is installed."""
    relative = path.relative_to(ROOT)
    return relative if relative.parts[0] == "specjax" else "specjax" / relative


def test_every_folder_with_code_is_listed_as_a_package():
    tops = (ROOT / top for top in ("specjax", "train", "configs"))
    folders = [file.parent for top in tops for file in top.rglob("__init__.py")]
    found = {".".join(installed_as(folder).parts) for folder in folders}
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def imports_of(file: Path, modules: set[str]) -> set[str]:
    """The modules among ``modules`` that a file imports, in functions and for type checkers too."""
    package = [*file.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            names = {f"{source}.{alias.name}" for alias in node.names}
            found |= names & modules or {source}
    return found & modules


def test_no_module_imports_what_imports_it():
    files = [file for top in ("specjax", "train") for file in (ROOT / top).rglob("*.py")]
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    modules = {name for name in names.values() if not name.endswith("__init__")}
    graph = {names[file]: imports_of(file, modules) for file in files if names[file] in modules}
    assert "specjax.decoding.round" in graph["specjax.decoding.loop"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_the_loop_is_asked_for_no_names_of_other_modules():
    files = [file for top in ("specjax", "tests") for file in (ROOT / top).rglob("*.py")]
    borrowed = re.compile(r"\bloop\.(prepare_inputs|State|Decoded|start|result)\b")
    assert not [file.name for file in files if borrowed.search(file.read_text(encoding="utf-8"))]


def test_kernels_alone_ask_jax_for_its_default_backend():
    files = [file for top in ("specjax", "train", "colab") for file in (ROOT / top).rglob("*")]
    code = [file for file in files if file.suffix in (".py", ".ipynb")]
    found = [file for file in code if "default_backend" in file.read_text(encoding="utf-8")]
    assert [file.relative_to(ROOT).as_posix() for file in found] == ["specjax/kernels/__init__.py"]


def test_no_two_classes_have_one_name():
    files = [file for top in ("specjax", "train") for file in (ROOT / top).rglob("*.py")]
    nodes = [(file, node) for file in files for node in ast.parse(file.read_text("utf-8")).body]
    where = collections.defaultdict(list)
    for file, node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            where[node.name].append(str(file.relative_to(ROOT)))
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_an_editable_install_is_found_beside_a_clone_too(tmp_path):
    """A clone is a folder named specjax, which Python would import as an empty package."""
    build = "import sys; sys.path.insert(0, 'wheels'); import backend; backend.build_editable({!r})"
    command = [sys.executable, "-c", build.format(str(tmp_path))]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
        assert file.testzip() is None
    (hook,) = (tmp_path / "site").glob("*_finder.py")
    (tmp_path / "specjax" / "specjax").mkdir(parents=True)  # the clone
    use = f"""
import sys
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in str(x).lower()]
sys.modules.pop({hook.stem!r}, None)  # that of the install that runs this test
sys.path.insert(1, {str(hook.parent)!r})
import {hook.stem}
{hook.stem}.install()
import specjax
print(specjax.__version__)
"""
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", use]
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.stdout.strip() == specjax.__version__, done.stderr


def test_the_wheel_holds_code_weights_configs_and_data(tmp_path):
    for name in ("specjax", "train", "configs", "wheels"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    build = "import sys; sys.path.insert(0, 'wheels'); import backend; backend.build_wheel('.')"
    command = [sys.executable, "-c", build]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
    assert wheel.stat().st_size < 28e6
    for top in ("specjax", "train", "configs"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert installed_as(path).as_posix() in held
    if compiler.find() is not None:
        assert wheel.name.startswith("specjax-") and not wheel.name.endswith("-any.whl")
        with zipfile.ZipFile(wheel) as file:
            for level in compiler.LEVELS:
                folder = tmp_path / level.name
                names = [compiler.prebuilt_name(name, level) for name in compiler.LIBRARIES]
                for name in names:
                    file.extract(f"specjax/kernels/cpu/{name}", folder)
                if level in compiler.levels_that_run():
                    check_prebuilt(folder / "specjax" / "kernels" / "cpu")


def check_prebuilt(folder):
    """The wheel's libraries of one level serve where there is no compiler."""
    code = f"""
import pathlib
import jax.numpy as jnp
from specjax import kernels
from specjax.kernels.cpu import library
library.FOLDER = pathlib.Path({str(folder)!r})
assert kernels.current().name == "C++" and library.register("quantized") is None
print(kernels.current().argmax(jnp.asarray([[1.0, 3.0, 2.0]])))
"""
    environment = os.environ | {"PATH": "/nowhere", "SPECJAX_NATIVE": "always"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[1]", done.stderr[-2000:]


def imported_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running ``code``."""
    report = "import sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_specjax_imports_nothing_that_decoding_does_not_need():
    modules = imported_by("import specjax; specjax.decode")
    assert "jax" in modules
    assert not modules & {"flax", "transformers", "orbax", "torch", "optax", "grain", "tokenizers"}


def test_the_embedded_models_load_without_transformers_and_orbax():
    unused = "import sys; assert 'specjax.text.round_costs' not in sys.modules"  # only for "auto"
    modules = imported_by(f"import specjax; specjax.load('embedded'); specjax.generate; {unused}")
    assert {"flax", "tokenizers"} <= modules
    assert not modules & {"transformers", "orbax", "torch", "grain", "matplotlib"}


def test_training_and_configurations_are_found_below_specjax():
    import specjax.configs
    import specjax.train.cli

    assert "embedded_target" in specjax.configs.names()
    assert specjax.train.cli.__package__ == "specjax.train"


def test_every_public_name_exists_and_an_unknown_one_is_an_attribute_error():
    for name in specjax.__all__:
        assert getattr(specjax, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = specjax.nonsense


RESEARCH = ["acceptance_keys", "commit_round", "init_state", "round_context", "step"]
TOOLS = ["Decoded", "contrastive", "plan_memory", "quantization_error"]


@pytest.mark.parametrize("name", [*specjax.__all__, *RESEARCH, *TOOLS])
def test_what_is_public_has_a_summary_and_functions_explain_what_they_take_and_return(name):
    public = getattr(specjax, name)
    summary = inspect.getdoc(public).splitlines()[0]
    assert not summary.startswith(("Attributes:", "Args:"))
    if inspect.isfunction(public):
        wanted = ["Args:"] + ["Returns:"] * (inspect.signature(public).return_annotation != "None")
        assert [word for word in wanted if word not in public.__doc__] == []


def test_the_readme_and_ci_run_the_same_tests():
    (command,) = re.findall(r"python -m pytest tests.*", README)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
