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
LIBRARY = "libspecjax_kernels.so"


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), JAXLIB]


@functools.cache
def compiled(scratch: Path) -> bool:
    """Whether the kernels could be compiled to ``scratch``; says why not."""
    spec = importlib.util.spec_from_file_location("compiler", PLACE / "compiler.py")
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    found, jaxlib = compiler.find(), importlib.util.find_spec("jaxlib")
    if found is None or jaxlib is None:
        missing = "C++ compiler" if found is None else "jaxlib"
        print(f"a pure wheel, without CPU kernels: there is no {missing}", file=sys.stderr)
        return False
    scratch.parent.mkdir(parents=True, exist_ok=True)
    include = Path(jaxlib.submodule_search_locations[0], "include")
    try:
        compiler.compile_to(scratch, found, str(include), compiler.portable_flags())
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip()[:500]
        print(f"a pure wheel, without CPU kernels: {found} failed: {reason}", file=sys.stderr)
        return False
    return True


class BuildPackages(build_py):
    """Adds the compiled kernels to the packages of a wheel."""

    def run(self):
        super().run()
        if not self.editable_mode and compiled(scratch := Path(self.build_lib, "..", LIBRARY)):
            self.copy_file(scratch, Path(self.build_lib, PLACE, LIBRARY))


class BuildWheel(bdist_wheel):
    """Names the platform in the wheel's tag if the wheel holds a library."""

    def run(self):
        self.run_command("build")
        self.skip_build = True
        built = self.get_finalized_command("build_py").build_lib
        holds_library = Path(built, PLACE, LIBRARY).exists()
        self.root_is_pure = not holds_library
        self.distribution.has_ext_modules = lambda: holds_library  # files go to "platlib"
        super().run()

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform
