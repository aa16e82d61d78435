"""Recipe ``corpus``: Python's standard library, pinned by a manifest, some files held out.

Every Python installation has these files (PSF licence), so nothing is downloaded. The manifest
names each file, its SHA-256 and its split; a file's split depends on its path alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import sysconfig
import time
from pathlib import Path

from . import outlook
from .config import ConfigError, RunConfig
from .sources import split_of

MANIFEST = "corpus.json"  # beside the embedded models

# Not code that a person would write by hand, or not the same on every machine.
SKIPPED_FOLDERS = frozenset(
    "site-packages test tests idle_test __pycache__ encodings pydoc_data".split()
)
SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "html/entities")


def library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def make_manifest(root: Path | None = None) -> dict:
    """Lists the corpus below ``root``: ``{"python": "3.11.7", "files": [{path, sha256, ...}]}``."""
    root = root or library()
    files = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(path.split("/")) or path.startswith(SKIPPED_PREFIXES):
            continue
        data = file.read_bytes()
        if data.strip():
            files.append(
                {
                    "path": path,
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "bytes": len(data),
                    "split": split_of(path),
                }
            )
    return {"python": platform.python_version(), "files": files}


def read_manifest() -> dict:
    """The manifest that ships with the package."""
    import specjax

    folder = Path(specjax.__path__[0]) / "models" / "embedded"
    return json.loads((folder / MANIFEST).read_text())


def write_manifest(manifest: dict, path: Path) -> None:
    """Writes one file a line, so that a change of one file is a change of one line."""
    rows = ",\n  ".join(json.dumps(entry) for entry in manifest["files"])
    path.write_text(f'{{"python": "{manifest["python"]}", "files": [\n  {rows}\n]}}\n')


def stdlib_documents(split: str, *, strict: bool = True, manifest=None, root=None):
    """``[(path, text)]`` of the files of a split, in the order of the manifest.

    Raises:
      ConfigError: ``strict`` and a file is missing or differs from the manifest.
    """
    root, manifest = root or library(), manifest or read_manifest()
    found, wrong = [], []
    for entry in manifest["files"]:
        if entry["split"] != split:
            continue
        file = root / entry["path"]
        data = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            wrong.append(entry["path"])
        if data:
            found.append((entry["path"], data.decode("utf-8", errors="replace")))
    if strict and wrong:
        raise ConfigError(
            f"{len(wrong)} files of the standard library differ from the manifest (the first: "
            f"{wrong[0]}). It was made with Python {manifest['python']}, this is "
            f"{platform.python_version()}: train under that version, or give data.strict=false "
            "to train on the files as they are"
        )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The standard library to list."""

    root: str = ""  # the folder of a standard library; "": that of the running Python
    run: RunConfig = RunConfig(folder="runs/corpus")


Config = CorpusConfig


def run(config: CorpusConfig, *, dry_run: bool = False) -> None:
    """Writes ``corpus.json``, the manifest of the standard library as it is on this machine."""
    begin = time.monotonic()
    manifest = make_manifest(Path(config.root) if config.root else None)
    for split in ("train", "heldout"):
        sizes = [entry["bytes"] for entry in manifest["files"] if entry["split"] == split]
        print(f"{split}: {len(sizes)} files, {sum(sizes):,} bytes")
    if dry_run:
        return outlook.show(
            model="none: files are listed",
            shapes="one file at a time",
            parameters="0",
            memory={"the largest file": max(entry["bytes"] for entry in manifest["files"])},
            steps=f"{len(manifest['files']):,} files",
            seconds=time.monotonic() - begin,
        )
    folder = Path(config.run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(manifest, folder / MANIFEST)
    print(f"wrote {folder / MANIFEST}")
