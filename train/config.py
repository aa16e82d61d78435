"""Configurations: frozen dataclasses, read from a TOML file and from ``field=value`` words.

Each recipe declares one dataclass. A field that is a dataclass itself is a section of the file:

    [model]
    hidden_size = 256
    [run]
    steps = 4000

The command ``specjax train pretrain --config file.toml run.steps=10`` overrides one field.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
import types
import typing
from pathlib import Path

from specjax._internal.keywords import did_you_mean


class ConfigError(ValueError):
    """A configuration is not valid; the message has the reason and the way out."""


class Unused(ConfigError):
    """A setting is given that nothing reads.

    Attributes:
      field: its name.
      usual: its default.
    """

    def __init__(self, message: str, field: str, usual):
        super().__init__(message)
        self.field, self.usual = field, usual


OPTIMIZERS = ("muon", "adamw")
PRECISIONS = ("float32", "bfloat16")
SINKS = ("csv", "tensorboard", "wandb")  # see metrics.py


SPLITS = ("train", "heldout")  # of a corpus
NOTHING = 1e-6  # a share of the rows below this counts as none
SEEDS, COUNTS = 2**32, 2**31  # below: seeds as JAX and Grain tell them apart, int32 counters


def _check(name: str, value, fine: bool, accepted: str) -> None:
    if not fine:
        raise ConfigError(f"{name}={value!r}; accepted: {accepted}")


def check_named(name: str, path: str) -> None:
    """Raises ConfigError for a path that is empty, as that of a variable of the shell that is not
    set, which would be taken for the folder in which the command runs."""
    _check(name, path, bool(path.strip()), "a name that is not empty ('.': this folder)")


def check_stems(name: str, paths: typing.Sequence[str]) -> None:
    """Raises ConfigError for files of the same stem, by which the log names their measures."""
    stems = [Path(path).stem for path in paths]
    twice = sorted({path for path, stem in zip(paths, stems, strict=True) if stems.count(stem) > 1})
    _check(name, list(paths), not twice, f"files of different names, not {' and '.join(twice)}")


def check_split(split: str) -> None:
    """Raises ConfigError for a word that is no split of a corpus."""
    _check("split", split, split in SPLITS, " or ".join(SPLITS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on, and how it is cut into rows of tokens."""

    corpus: str = "stdlib"  # or "packages", a file, a folder, hf:owner/name (train/sources.py)
    mixed: tuple[str, ...] = ()  # further corpora that rows to train on are drawn from
    mixed_share: tuple[float, ...] = ()  # the share of the rows of each; []: equal shares
    tokenizer: str = "embedded"  # a model that specjax.load takes, or a tokenizer.json
    length: int = 256  # tokens of context per row (a row holds one more token, to predict)
    batch: int = 16  # rows per step
    eval_rows: int = 64  # held-out rows per evaluation
    seed: int = 0  # of the order of the rows
    samples: tuple[str, ...] = ()  # files of rows that the target wrote (recipe `regenerate`)
    samples_share: tuple[float, ...] = ()  # the share of the rows of each; []: equal shares
    strict: bool = True  # refuse files of stdlib or packages that differ from the manifest
    broken_share: float = 0.01  # the share of a file's lines that may be unreadable (left out)
    end_of_text: str = ""  # the token between documents; "": the tokenizer's own end of text

    def __post_init__(self):
        check_named("data.corpus", self.corpus)
        for number, corpus in enumerate(self.mixed):
            check_named(f"data.mixed[{number}]", corpus)
        _check("data.length", self.length, self.length >= 8, "at least 8")
        _check("data.batch", self.batch, self.batch >= 1, "at least 1")
        _check("data.eval_rows", self.eval_rows, self.eval_rows >= 1, "at least 1")
        _check("data.seed", self.seed, 0 <= self.seed < SEEDS, "0 to 2**32 - 1")
        broken = self.broken_share
        _check("data.broken_share", broken, 0 <= broken <= 1, "0 to 1")
        self._check_shares()

    def _check_shares(self) -> None:
        """Checks the shares. Where none are given, the corpus and all others get equal ones."""
        sources = {name: getattr(self, name) for name in ("samples", "mixed")}
        stated = {name: getattr(self, f"{name}_share") for name in sources}
        free = [name for name in sources if sources[name] and not stated[name]]
        parts = 1 + sum(len(sources[name]) for name in free)
        each = (1 - sum(map(sum, stated.values()))) / parts
        for name in free if each > NOTHING else ():
            stated[name] = (each,) * len(sources[name])
            object.__setattr__(self, f"{name}_share", stated[name])
        for name, paths in sources.items():
            shares, example = stated[name], f"data.{name}_share=[{', '.join(['0.4'] * len(paths))}]"
            _check(
                f"data.{name}_share",
                list(shares),
                len(shares) == len(paths) and all(s > 0 for s in shares),
                f"{len(paths)} positive shares, one for each of data.{name}"
                + (f", for example {example}" if paths else "; leave it out without them"),
            )
        total = sum(map(sum, stated.values()))
        names = " and ".join(f"data.{name}_share" for name, shares in stated.items() if shares)
        if total > 1 + NOTHING:
            raise ConfigError(
                f"{names} sum to {total:g}; accepted: a sum of at most 1, for example 0.8, which "
                "leaves 0.2 of the rows to data.corpus (a sum of 1 leaves it none)"
            )


def _shown(value) -> str:
    """A value as it is written on the command line."""
    shown = repr(list(value) if isinstance(value, tuple) else value)
    return shown.lower() if isinstance(value, bool) else shown


def check_unread(data: DataConfig, names: typing.Sequence[str], reason: str, way_out: str) -> None:
    """Raises ConfigError for fields of the section ``data`` that a recipe does not read.

    Args:
      data: the section.
      names: the fields that have to be as they are by themselves.
      reason: why the recipe does not read them.
      way_out: the end of the message.
    """
    equal = dataclasses.replace(data, samples_share=()).samples_share  # it is filled in
    usual = vars(DataConfig()) | {"samples_share": equal}
    for name in names:
        given = vars(data)[name]
        if given != usual[name]:
            share = f" (and data.{name}_share)" if f"{name}_share" in usual else ""
            shown = f"data.{name}={_shown(given)}"
            raise ConfigError(f"{shown}: {reason}; leave it out{share}, or {way_out}")


def check_unused(settings, names: typing.Sequence[str], reason: str, way_out: str) -> None:
    """Raises Unused for fields that are not as by default, although nothing reads them.

    Args:
      settings: the dataclass of the fields.
      names: the fields.
      reason: why nothing reads them.
      way_out: the end of the message.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in names and value != field.default:
            raise Unused(
                f"{field.name}={_shown(value)}: {reason}; leave {field.name} out (a run that was "
                f"begun with it goes on without it), or {way_out}",
                field.name,
                field.default,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer: Muon for matrices and AdamW for the rest, or AdamW for all."""

    name: str = "muon"  # or "adamw"
    rate: float = 0.02  # peak learning rate of Muon; "adamw" does not use it
    adam_rate: float = 0.003  # peak learning rate of AdamW
    weight_decay: float = 0.1  # decoupled: a step subtracts rate * weight_decay * weight
    warmup: int = 100  # steps in which the rate rises linearly from zero
    decay_share: float = 0.5  # the last share of the steps, in which the rate falls to zero
    clip: float = 1.0  # the greatest global norm of the gradient

    def __post_init__(self):
        _check("optimizer.name", self.name, self.name in OPTIMIZERS, " or ".join(OPTIMIZERS))
        for name in ("rate", "adam_rate", "clip"):
            value = getattr(self, name)
            _check(f"optimizer.{name}", value, 0 < value < math.inf, "above 0, and finite")
        decay = self.weight_decay
        _check("optimizer.weight_decay", decay, 0 <= decay < math.inf, "at least 0, and finite")
        _check("optimizer.warmup", self.warmup, 0 <= self.warmup < COUNTS, "at least 0")
        share = self.decay_share
        _check("optimizer.decay_share", share, 0 <= share <= 1, "0 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The steps of a run, its folder and its devices."""

    folder: str = "runs/unnamed"  # where checkpoints, log, report and exported model are written
    steps: int = 1000  # in total, those before a resumption included
    save_every: int = 200  # steps between checkpoints
    save_minutes: float = 0.0  # minutes after which a checkpoint is saved as well; 0: never
    eval_every: int = 200  # steps between evaluations
    keep: int = 2  # how many of the last checkpoints are kept
    seed: int = 0  # of the initial weights and of what losses draw
    best: str = ""  # export the weights with the best such measure, or "last"; "": by the recipe
    mesh: str = ""  # the devices that share the run, such as "data=2,model=4"; "": one device
    fully_sharded: bool = False  # split weights and moments over the mesh axis data as well
    accumulate: int = 1  # parts of a batch that are computed one after the other
    remat: bool = False  # recompute the inside of layers in the backward pass, to save memory
    precision: str = "float32"  # of the computation, or "bfloat16"; weights stay float32
    metrics: tuple[str, ...] = ("csv",)  # views of log.jsonl: csv, tensorboard, wandb

    def __post_init__(self):
        check_named("run.folder", self.folder)
        for name in ("steps", "save_every", "eval_every", "keep"):
            value = getattr(self, name)
            _check(f"run.{name}", value, 1 <= value < COUNTS, "at least 1, below 2**31")
        minutes = self.save_minutes
        _check("run.save_minutes", minutes, 0 <= minutes < math.inf, "at least 0, and finite")
        _check("run.seed", self.seed, 0 <= self.seed < SEEDS, "0 to 2**32 - 1")
        _check("run.accumulate", self.accumulate, self.accumulate >= 1, "at least 1")
        known = self.precision in PRECISIONS
        _check("run.precision", self.precision, known, " or ".join(PRECISIONS))
        known = all(name in SINKS for name in self.metrics)
        _check("run.metrics", self.metrics, known, f"a list of {', '.join(SINKS)}")


# Fields that a resumed run may change. They do not alter the steps before the resumption. Of the
# steps after it they alter only the rounding, and with accumulation the choice of the rows that a
# drafter writes itself.
FREE_FIELDS = ("run.folder", "run.steps", "run.save_every", "run.eval_every", "run.keep")
FREE_FIELDS += (
    "run.save_minutes",
    "start_share",
    "run.metrics",
    "run.best",
    "run.mesh",
    "run.fully_sharded",
    "run.accumulate",
    "run.remat",
)
FREE_SECTIONS = ("report.", "card.")


def build(kind: type, values: dict, where: str = ""):
    """Makes an instance of the dataclass ``kind`` from nested dictionaries.

    Raises:
      ConfigError: a field is unknown, missing or of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        meant = did_you_mean(unknown[0], fields, lambda name: where + name)
        raise ConfigError(
            f"unknown field {where}{unknown[0]}; {meant}known fields of {where or 'the file'}: "
            f"{', '.join(fields)}"
        )
    made = {}
    for name, value in values.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}{name}={value!r} should be a section of fields")
            made[name] = build(hint, value, f"{where}{name}.")
        else:
            made[name] = _typed(value, hint, f"{where}{name}")
    missing = [
        name
        for name, field in fields.items()
        if name not in made
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(
            f"missing field {where}{missing[0]}: give it in the file, or on the command line as "
            f"{where}{missing[0]}=VALUE"
        )
    return kind(**made)


def _typed(value, hint, name: str):
    """``value`` converted to the type ``hint`` (an int to a float, a list to a tuple), and the
    ``~/`` with which a path may begin to the user's folder."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    expected = getattr(hint, "__name__", str(hint))
    for choice in choices:
        if choice is type(None) and value is None:
            return None
        if choice is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if typing.get_origin(choice) is tuple:
            if isinstance(value, (list, tuple)):
                one = typing.get_args(choice)[0]
                return tuple(_typed(own, one, f"{name}[{i}]") for i, own in enumerate(value))
            expected = "a list, [...]"
            continue
        if isinstance(choice, type) and type(value) is choice:
            return _expanded(value)
    raise ConfigError(f"{name}={value!r} is of type {type(value).__name__}, expected {expected}")


def load(kind: type, path: str | Path | None, words: typing.Sequence[str] = ()):
    """Reads a configuration from a TOML file and from words such as ``run.steps=10``.

    The value of a word is read as TOML; a value that is not TOML is taken as a string.

    Args:
      kind: the dataclass of the recipe.
      path: the TOML file; None: no file.
      words: ``field=value``, which override the fields of the file.

    Raises:
      ConfigError: an unknown field, a wrong type, a word without ``=``, unreadable TOML.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig")) if path else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{Path(path).name} is not TOML: {error}") from error
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form field=value, e.g. run.steps=10")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        section, *keys = values, *name.split(".")
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{name}: {key} is a field, not a section")
        section[keys[-1]] = value
    return build(kind, values)


def flatten(config, where: str = "", whole: bool = True) -> dict:
    """Flattens a configuration to ``{"run.steps": 1000, ...}``.

    Args:
      config: a dataclass of dataclasses.
      where: what the names begin with.
      whole: whether fields that have their default value are included.
    """
    flat = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{where}{field.name}.", whole)
        elif whole or value != field.default:
            flat[where + field.name] = list(value) if isinstance(value, tuple) else value
    return flat


def defaults(kind: type, where: str = "") -> dict:
    """Flattens the defaults of a configuration's class; a field without a default is left out."""
    flat = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default):
            flat |= flatten(field.default, f"{where}{field.name}.")
        elif field.default is not dataclasses.MISSING:
            value = field.default
            flat[where + field.name] = list(value) if isinstance(value, tuple) else value
    return flat


def settled(kind: type, flat: dict) -> dict:
    """A flattened configuration, as it was recorded, with their defaults in the place of settings
    that nothing reads, which an earlier version did not refuse. One that ``kind`` refuses for
    another reason is returned as it is."""
    while True:
        values: dict = {}
        for name, value in flat.items():
            *sections, field = name.split(".")
            section = values
            for key in sections:
                section = section.setdefault(key, {})
            section[field] = value
        values.pop("recipe", None)
        try:
            made = build(kind, values)
            if hasattr(made, "check_used"):
                made.check_used()
        except Unused as error:
            flat = flat | {error.field: error.usual}
        except ConfigError:
            return flat
        else:
            return flat


def resolved(config) -> dict:
    """The configuration that is stored with a run: ``recipe`` and all fields, flattened."""
    return {"recipe": type(config).__module__.rpartition(".")[2], **flatten(config)}


def differences(old: dict, new: dict) -> list[str]:
    """One line for each field in which two flattened configurations differ.

    Fields that a resumed run may change are left out.
    """
    return [
        f"{name}: {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(set(old) | set(new))
        if name not in FREE_FIELDS and not name.startswith(FREE_SECTIONS)
        if _expanded(old.get(name)) != _expanded(new.get(name))
    ]


def _expanded(value):
    """A value with the user's folder in the place of ``~``, which earlier versions recorded."""
    if isinstance(value, list | tuple):
        return [_expanded(one) for one in value]
    is_path = isinstance(value, str) and value.startswith("~/")  # shells leave run.folder=~/x
    return os.path.expanduser(value) if is_path else value
