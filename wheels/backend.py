"""Builds wheels: setuptools, and one step that compiles the CPU kernels into the package.

The library in a wheel is portable (see ``PORTABLE`` in ``specjax/kernels/cpu/compiler.py``), and
the wheel is then one for this platform. Without a C++ compiler, or without jaxlib, whose headers it
needs, the wheel is a pure one, and kernels are compiled at first use. A source distribution and an
editable install compile nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (all other hooks)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

JAXLIB = "jaxlib>=0.10.1,<0.12"  # as among the dependencies
PLACE = Path("specjax/kernels/cpu")


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), JAXLIB]


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
    try:
        for name in compiler.LIBRARIES:
            target = scratch / compiler.prebuilt_name(name)
            compiler.compile_to(target, found, str(include), compiler.portable_flags(), name)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[:500]
        print(f"a pure wheel, without CPU kernels: {found} failed: {reason}", file=sys.stderr)
        return ()
    return tuple(scratch / compiler.prebuilt_name(name) for name in compiler.LIBRARIES)


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
