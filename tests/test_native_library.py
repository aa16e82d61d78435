"""Which library of kernels is loaded: a wheel's before one that is compiled here, and the fastest
that this processor runs."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from test_native import needs_kernels, python

from specjax.kernels.cpu import compiler, library


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A folder with a file for every library of a wheel."""
    for name in compiler.LIBRARIES:
        for level in compiler.LEVELS:
            (tmp_path / compiler.prebuilt_name(name, level)).write_text("no library")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.skipif(not compiler.X86, reason="one level")
def test_the_fastest_library_that_the_processor_runs_comes_first(wheel, monkeypatch):
    fastest, slower = compiler.LEVELS
    for features, levels in {
        fastest.needed: ["x86-64-v4", "x86-64-v3"],
        fastest.needed - {"avx512vl"}: ["x86-64-v3"],
        slower.needed | {"avx512f"}: ["x86-64-v3"],
        slower.needed - {"fma"}: [],
        frozenset(): [],
    }.items():
        monkeypatch.setattr(compiler, "processor_features", lambda features=features: features)
        for name in compiler.LIBRARIES:
            found = [file.name for file in library.prebuilt(name)]
            assert found == [f"libspecjax_{name}_{level}.so" for level in levels]
    monkeypatch.setattr(compiler, "processor_features", lambda: fastest.needed)
    (wheel / "libspecjax_kernels_x86-64-v4.so").unlink()
    assert library.prebuilt("kernels") == [wheel / "libspecjax_kernels_x86-64-v3.so"]


BEGIN = """
import pathlib, shutil
from specjax.kernels.cpu import compiler, library
compiled, _ = library._native("kernels")
library.FOLDER = pathlib.Path({folder!r})
compiler.levels_that_run = lambda: compiler.LEVELS
"""


@needs_kernels
def test_nothing_is_compiled_where_a_library_of_the_wheel_runs(wheel):
    code = """
shutil.copy(compiled, library.prebuilt("kernels")[0])
library.build = None  # raises an error if it is called
assert library.register() is None
"""
    done = python(BEGIN.format(folder=str(wheel)) + code)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_kernels
def test_a_library_is_compiled_where_those_of_the_wheel_cannot_be_loaded(wheel):
    done = python(BEGIN.format(folder=str(wheel)) + "assert library.register() is None")
    assert done.returncode == 0, done.stderr[-2000:]
    for level in compiler.LEVELS:
        name = compiler.prebuilt_name("kernels", level)
        assert f"the prebuilt {name} cannot be loaded" in done.stderr


def test_without_a_compiler_xla_serves_and_a_line_says_so():
    code = """
import specjax
from specjax import kernels
out = specjax.generate(specjax.load("embedded"), "def f(x):", drafter="ngram", max_new_tokens=8)
print(kernels.current().name, len(out.tokens[0]))
"""
    done = python(code, PATH="/nowhere", SPECJAX_NATIVE="auto")
    assert done.stdout.split() == ["XLA", "8"], done.stderr
    assert "no C++ compiler" in done.stderr
    always = python(code, PATH="/nowhere", SPECJAX_NATIVE="always")
    assert "SPECJAX_NATIVE=always, but there are no kernels: there is no C++" in always.stderr


def test_a_cache_that_cannot_be_made_is_named_with_its_variable(tmp_path):
    (tmp_path / "file").write_text("")
    done = python(
        "from specjax import kernels; print(kernels.current().name)",
        XDG_CACHE_HOME=str(tmp_path / "file"),
        SPECJAX_NATIVE="auto",
    )
    assert done.stdout.strip() == "XLA", done.stderr
    assert f"the cache of compiled kernels, {tmp_path}/file/specjax/kernels-" in done.stderr
    assert "set XDG_CACHE_HOME to a folder" in done.stderr


def test_the_compiler_writes_to_no_folder_but_that_of_the_library(monkeypatch, tmp_path):
    """A machine may have no other that can be written."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    places = []

    def run(words, env, **how):
        places.append(Path(env["TMPDIR"]))

    monkeypatch.setattr(compiler.subprocess, "run", run)
    compiler.compile_to(tmp_path / "library.so", "c++", "include", ())
    assert len(places) == 3 and {place.parent for place in places} == {tmp_path}
    assert not list(tmp_path.iterdir())


@needs_kernels
def test_a_library_is_on_disk_before_its_name_is_in_the_cache(monkeypatch, tmp_path):
    """Otherwise a machine that stops then may leave a file cut short, which every start loads."""
    seen = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_to", lambda made, *rest: made.write_bytes(b"made"))
    monkeypatch.setattr(library.os, "fsync", lambda file: seen.append("on disk") or fsync(file))
    monkeypatch.setattr(library.os, "replace", lambda *at: seen.append("named") or replace(*at))
    assert library.build(compiler.find()).read_bytes() == b"made"
    assert seen == ["on disk", "named"]
    assert library.build(compiler.find()).exists() and len(seen) == 2  # and it is not made again


def test_an_unknown_wish_is_refused():
    done = python("from specjax import kernels; kernels.current()", SPECJAX_NATIVE="yes")
    assert "SPECJAX_NATIVE='yes': it must be auto, always or never" in done.stderr


def test_a_compiler_that_knows_no_tiles_builds_the_kernels_without_them(monkeypatch, tmp_path):
    def build(compiler, *flags, name):
        if not flags:
            raise subprocess.CalledProcessError(1, compiler, stderr=b"no such target: amx-tile")
        return tmp_path / f"{name}{''.join(flags)}"

    monkeypatch.setattr(library, "build", build)
    monkeypatch.setattr(library.compilers, "find", lambda: "c++")
    path, problem = library._native("kernels")
    assert problem is None and path.name.endswith("TILES-DSPECJAX_WITHOUT_DOTS")
