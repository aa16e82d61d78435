"""One TOML file a training run; ``find("embedded_target")`` is the path of one of them."""

from __future__ import annotations

from pathlib import Path

from specjax._internal.keywords import did_you_mean

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The names of the configurations that ship with the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def find(name: str) -> Path:
    """The file of a configuration, given its name or a path to a TOML file of one's own."""
    path = Path(name)
    if path.suffix == ".toml" and path.is_file():
        return path
    if name in names():
        return FOLDER / f"{name}.toml"
    meant = did_you_mean(name, names(), repr)
    raise FileNotFoundError(
        f"config={name!r} is neither a TOML file nor a known name: {meant}Known are "
        f"{', '.join(names())}"
    )
