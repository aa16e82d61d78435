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

from . import outlook, sources
from .config import ConfigError, DataConfig, RunConfig
from .sources import Document, split_of

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


def documents(
    corpus: str, split: str, *, strict: bool = True, broken_share: float = 0.0
) -> list[Document]:
    """The documents of a corpus: ``"stdlib"``, ``"packages"``, or what ``sources`` reads, where
    ``broken_share`` is explained. ``split``: ``train`` or ``heldout``."""
    from . import packages  # which compares its files with those of the standard library

    if corpus == "stdlib":
        found = stdlib_documents(split, strict=strict)
    elif corpus == "packages":
        found = packages.documents(split, strict=strict)
    else:
        found = sources.read(corpus, split, broken_share)
    if not found:
        raise ConfigError(
            f"data.corpus={corpus!r} has no documents in the split {split!r}: give a folder, some "
            f"of its files in its subfolder heldout, the others beside"
        )
    return found


def are_texts(corpus: str, documents: list[Document]) -> bool:
    """Whether these are texts, not conversations. Raises ConfigError where some of each are."""
    count = sum(isinstance(document, str) for _, document in documents)
    if 0 < count < len(documents):
        raise ConfigError(
            f"data.corpus={corpus!r} holds {count:,} texts and {len(documents) - count:,} "
            "conversations: give one kind at a time"
        )
    return count > 0


def texts(config: DataConfig, split: str) -> list[tuple[str, str]]:
    """``[(name, text)]`` of the corpus of a run, for who learns no roles; to train on, those of
    the corpora mixed into it as well."""
    how = dict(strict=config.strict, broken_share=config.broken_share)
    mixed = config.mixed if split == "train" else ()
    found = [own for name in (config.corpus, *mixed) for own in documents(name, split, **how)]
    return [(name, sources.text_of(document)) for name, document in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """``root``: another Python's library than the running one's."""

    root: str = ""
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
