"""The folder that holds a model: inside this package, on disk, or fetched from the hub."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from .headers import MODULES, SHARD, SINGLE

_EMBEDDED = Path(__file__).parent / "embedded"
EMBEDDED = {"embedded": _EMBEDDED / "target", "embedded-draft": _EMBEDDED / "draft"}
_HUB_NAME = r"[\w.-]+(/[\w.-]+)?"
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# files in subfolders, and Mistral's own beside the shards, are other formats of the same weights
_HUB_OTHERS = ["*/*", "consolidated*"]
_CHUNK = 1 << 20  # bytes


def name_of(argument: str, given: object) -> str:
    """The text of a folder or hub name that a user gave as ``argument``, with the user's folder in
    place of a ``~`` at its beginning.

    Raises:
      TypeError: it is neither a text nor a path.
    """
    if not isinstance(given, str | os.PathLike):
        raise TypeError(
            f"{argument}={given!r:.60}: give a folder or a name on the hub (owner/name), as a text "
            "or a path"
        )
    return os.path.expanduser(os.fspath(given))


def folder_of(name: str, revision: str | None, files: Sequence[str] = _HUB_FILES) -> Path:
    """The folder of an embedded model, of a path, or of a name on the hub, ``files`` of which are
    then fetched. Raises FileNotFoundError and OSError as ``load`` does."""
    if name in EMBEDDED:
        if not (EMBEDDED[name] / "config.json").is_file():
            raise FileNotFoundError(f"the {name} weights are not part of this installation")
        return EMBEDDED[name]
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return path
    if path.is_file():
        raise FileNotFoundError(f"{path} is a file; give the folder that holds config.json")
    if not re.fullmatch(_HUB_NAME, name) or name.startswith("."):
        raise FileNotFoundError(
            f"{name!r} is neither a folder, nor a name on the hub (owner/name), nor one of "
            f"{', '.join(EMBEDDED)}"
        )
    return _download(name, revision, files)


def config_folder(name: str, revision: str | None = None) -> Path:
    """A folder with the ``config.json`` of a model; from the hub, only that is fetched."""
    return folder_of(name, revision, files=["config.json", "generation_config.json"])


def _download(name: str, revision: str | None, files: Sequence[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{name} (revision {revision})" if revision else name
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=[*files], ignore_patterns=_HUB_OTHERS
            )
        )
    except errors.GatedRepoError:
        reason = "its owner grants access on request: accept its licence there, then log in"
    except errors.RepositoryNotFoundError:
        known = ", ".join(EMBEDDED)
        reason = (
            f"{_meant(name)}There is no such model there or as a folder here; also known: {known}"
        )
    except errors.RevisionNotFoundError:
        reason = "it has no such revision"
    except errors.LocalEntryNotFoundError as error:
        reason = (
            f"{_meant(name)}There is no folder of this name here, it was not "
            f"downloaded before, and there is no connection ({_first_line(error)})"
        )
    except OSError as error:
        reason = _first_line(error)
    raise OSError(f"cannot load {at} from the Hugging Face hub: {reason}")


def _meant(name: str) -> str:
    """The embedded model that a name is nearly spelt like, as a question; else an empty text."""
    near = difflib.get_close_matches(name, EMBEDDED, n=1, cutoff=0.85)
    return f"did you mean {near[0]}? " if near else ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def checkpoint_fingerprint(files: Sequence[Path]) -> str:
    """``fingerprint`` of a model's files, which modules that are saved beside them do not change:
    they are a file of their own, and give a single file of weights another name."""
    own = [path for path in files if path.name != MODULES]
    alone = len(own) < len(files) and [path.name for path in own] == [SHARD]
    return fingerprint(own, [SINGLE] if alone else None)


def fingerprint(files: Sequence[Path], names: Sequence[str] | None = None) -> str:
    """Hash of weight files with their names: whole up to 64 MiB each, else 64 samples. ``names``:
    others than their own."""
    digest = hashlib.sha256()
    for path, name in zip(files, names or [path.name for path in files], strict=True):
        size = path.stat().st_size
        digest.update(f"{name} {size}".encode())
        chunks = max(-(-size // _CHUNK), 1)
        with path.open("rb") as file:
            for i in range(min(chunks, 64)):
                file.seek(i * chunks // min(chunks, 64) * _CHUNK)
                digest.update(file.read(_CHUNK))
    return digest.hexdigest()[:16]
