"""``specjax quantize``: quantizes a model, measures the error, and saves the quantized model."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

import specjax

from ..models import model_folder, save_pretrained
from ..models.headers import WEIGHT_FILE
from ..models.quantize import FLOAT
from .options import add_quantize, quantization_of, require
from .outputs import check_folder
from .prompts import read_prompts


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "quantize",
        help="quantize a model, and measure how far its law is from the original's",
        description="Quantizes the weights of a model, compares its next-token laws with those of "
        "the model as its files hold it on held-out texts, and, with --output, saves the "
        "quantized model as a folder that every command takes as --model.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    add_quantize(p, required=True)
    p.add_argument(
        "-o", "--output", help="the folder in which the quantized model is saved; default: none"
    )
    p.add_argument(
        "--overwrite",
        action="store_const",
        const=True,
        help="with --output: replace the model that is in the folder",
    )
    p.add_argument(
        "--prompts",
        help="a file with one held-out text in each line; in a .jsonl file each line is a string "
        'or {"text": ...}; default: the held-out Python code that ships with the package',
    )
    p.add_argument(
        "--limit", type=int, default=64, help="the most texts that are compared, 64 by default"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Quantizes, measures, saves and prints; returns the exit code."""
    wish = quantization_of(arguments)
    if wish == FLOAT:
        raise ValueError("--quantize float quantizes nothing: give int8, int4 or fp8")
    if arguments.output and wish.scheme == "fp8":
        raise ValueError(
            f"--output {arguments.output}: there is no layout for fp8, so it cannot be saved; "
            "leave --output out to measure it, or give --quantize int8 or int4"
        )
    require(arguments, "output", "overwrite")
    if arguments.output:
        check_folder("--output", arguments.output)
        if not arguments.overwrite and _holds_model(Path(arguments.output)):
            raise FileExistsError(
                f"--output {arguments.output}: the folder holds a model already; give another "
                "folder, or --overwrite to replace the model that is there"
            )
    texts = read_prompts(arguments.prompts, "embedded", arguments.limit)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "--prompts: a quantized model is compared on texts, so features and conversations are "
            "refused"
        )
    lm = specjax.load(arguments.model)
    quantized = specjax.load(arguments.model, quantize=wish)
    error = specjax.quantization_error(lm, quantized, texts)
    if arguments.output:
        save_pretrained(quantized, arguments.output)
        _record_hashes(lm.name, Path(arguments.output))
    if arguments.json:
        saved = {"model": arguments.model, "scheme": str(wish), "saved": arguments.output}
        print(json.dumps(saved | error.as_json()))
        return 0
    print(f"{arguments.model} quantized to {wish}: {error}")
    if arguments.output:
        print(f"saved to {arguments.output}; decode with --model {arguments.output}")
    return 0


def _holds_model(folder: Path) -> bool:
    """Whether a folder holds a config, or weights, which saving a model would replace."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(name == "config.json" or re.fullmatch(WEIGHT_FILE, name) for name in names)


def _record_hashes(model: str, folder: Path) -> None:
    """Writes ``fingerprint.json``, where the model has one, for the files of the quantized model:
    the tokenizer's fingerprint stays, and the hashes of the files are new."""
    name = "fingerprint.json"
    source = Path(model_folder.EMBEDDED.get(model, model)) / name
    record = json.loads(source.read_text(encoding="utf-8")) if source.is_file() else None
    (folder / name).unlink(missing_ok=True)  # of what lay there before
    if not isinstance(record, dict) or "tokenizer" not in record:
        return  # none, or another program's file
    files = [folder / own for own in ("config.json", "generation_config.json", "tokenizer.json")]
    files = [file for file in (*files, *sorted(folder.glob("*.safetensors"))) if file.is_file()]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    text = json.dumps(record | {"files": hashes}, indent=2) + "\n"
    (folder / name).write_text(text, encoding="utf-8")
