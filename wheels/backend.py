"""Builds wheels: setuptools, and one step that compiles the CPU kernels into the package.

A wheel holds the libraries once for each of the ``LEVELS`` of ``specjax/kernels/cpu/compiler.py``,
and is then one for this platform. Without a C++ compiler, or without jaxlib, whose headers it
needs, the wheel is a pure one, and kernels are compiled at first use. A source distribution and an
editable install compile nothing.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (all other hooks)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

JAXLIB = "jaxlib>=0.10.1,<0.12"  # as among the dependencies
PLACE = Path("specjax/kernels/cpu")


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), JAXLIB]


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Setuptools' editable wheel, whose import hook is asked before the folders of ``sys.path``.

    Setuptools appends the hook. Python started in the folder that holds a clone would then take the
    clone, a folder named ``specjax`` without an ``__init__.py``, for an empty namespace package.
    """
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with zipfile.ZipFile(wheel) as file:
        held = {info: file.read(info) for info in file.infolist()}
    changed = {}
    for info, content in held.items():
        if info.filename.endswith("_finder.py"):
            appended = b"sys.meta_path.append(_EditableFinder)"
            held[info] = content.replace(appended, b"sys.meta_path.insert(0, _EditableFinder)")
            changed[info.filename] = held[info]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        for info, content in held.items():
            if info.filename.endswith(".dist-info/RECORD"):
                content = _record(content.decode(), changed)
            file.writestr(info, content)
    return name


def _record(record: str, changed: dict[str, bytes]) -> str:
    """The list of a wheel's files with the hashes and sizes of the changed files."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    for name, *rest in csv.reader(io.StringIO(record)):
        if name in changed:
            digest = base64.urlsafe_b64encode(hashlib.sha256(changed[name]).digest())
            rest = [f"sha256={digest.rstrip(b'=').decode()}", str(len(changed[name]))]
        lines.writerow([name, *rest])
    return out.getvalue()


@functools.cache
def compiled(scratch: Path) -> tuple[Path, ...]:
    """The libraries, compiled into the folder ``scratch``; says why, if there are none."""
    spec = importlib.util.spec_from_file_location("compiler", PLACE / "compiler.py")
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    found, jaxlib = compiler.find(), importlib.util.find_spec("jaxlib")
    if found is None or jaxlib is None:
        missing = "C++ compiler" if found is None else "jaxlib"
        print(f"a pure wheel, without CPU kernels: there is no {missing}", file=sys.stderr)
        return ()
    scratch.mkdir(parents=True, exist_ok=True)
    include = Path(jaxlib.submodule_search_locations[0], "include")

    def compile_one(name, level):
        target = scratch / compiler.prebuilt_name(name, level)
        compiler.compile_to(target, found, str(include), level.flags, name)
        return target

    kinds = [(name, level) for name in compiler.LIBRARIES for level in compiler.LEVELS]
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return tuple(pool.map(compile_one, *zip(*kinds, strict=True)))
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[:500]
        print(f"a pure wheel, without CPU kernels: {found} failed: {reason}", file=sys.stderr)
        return ()


class BuildPackages(build_py):
    """Adds the compiled kernels to the packages of a wheel."""

    def run(self):
        super().run()
        made = () if self.editable_mode else compiled(Path(self.build_lib, "..", "kernels"))
        for library in made:
            self.copy_file(library, Path(self.build_lib, PLACE, library.name))


class BuildWheel(bdist_wheel):
    """Names the platform in the wheel's tag if the wheel holds a library."""

    def run(self):
        self.run_command("build")
        self.skip_build = True
        built = self.get_finalized_command("build_py").build_lib
        holds_library = any(Path(built, PLACE).glob("*.so"))
        self.root_is_pure = not holds_library
        self.distribution.has_ext_modules = lambda: holds_library  # files go to "platlib"
        super().run()

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform
