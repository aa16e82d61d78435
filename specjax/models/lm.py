"""``load``: a checkpoint, its tokenizer and its weights, ready to decode."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from .. import kernels, sharding
from ..sharding import STAGE
from ..types import PyTree, Target
from .causal_lm import CausalLM
from .config import DecoderConfig
from .headers import weight_files
from .hf import check_dtype, load_config, load_weights, quantized_layout
from .model_folder import EMBEDDED, checkpoint_fingerprint, folder_of, name_of
from .pipeline import PipelinedLM
from .quantize import FLOAT, Quantization, supported
from .seq2seq.config import EncoderDecoderConfig
from .seq2seq.target import Seq2SeqLM
from .tokenizer import Tokenizer, load_tokenizer, wrap_tokenizer
from .vocabularies import OtherTokenizer, way_out

_COMPUTED_AS = {"embedded": FLOAT}  # its file has eight bits, which are floats where it is computed
_SHARED_TOKENIZER = {"embedded-draft": "embedded"}  # the pair has one; it lies with the target


@dataclasses.dataclass(frozen=True, eq=False)
class LM:
    """A language model with its weights and tokenizer, as ``generate`` takes it.

    ``specjax.load`` makes one from a checkpoint, ``LM.of`` from a target of your own.

    Attributes:
      target: the functions of the model, without arrays (see ``specjax.Target``).
      params: the weights, ``params["target"]`` of ``decode``.
      tokenizer: None where the model works with token ids alone.
      name: what ``load`` was asked for (``~`` stands for the user's folder, whose name is written
        out), or the name given to ``LM.of``.
      fingerprint: identifies the checkpoint (config and weights) and its quantization.
      checkpoint: identifies the weights alone; draft heads name their target by it.
      mesh: the devices that hold the weights and decode; None: the default device.
      revision: the branch, tag or commit on the hub that ``load`` was asked for.
      bound: the longest sequence in tokens, where ``LM.of`` was told one; see ``max_positions``.
      loaded: whether ``name`` is the folder or the hub name from which ``load`` read the model, so
        that drafters may lie beside its weights. False for a model of ``LM.of``.
    """

    target: Target
    params: PyTree
    tokenizer: Tokenizer | None
    name: str
    fingerprint: str
    mesh: Mesh | None = None
    checkpoint: str = ""
    revision: str | None = None
    bound: int | None = None
    loaded: bool = False

    @classmethod
    def of(
        cls,
        target: Target,
        params: PyTree,
        tokenizer: object = None,
        *,
        name: str | None = None,
        eos_ids: Iterable[int] = (),
        mesh: Mesh | str | Mapping[str, int] | None = None,
        max_positions: int | None = None,
    ) -> LM:
        """Makes a language model of a target of your own.

        Everything that takes what ``specjax.load`` returns then takes your model: ``generate``,
        ``stream_text``, ``compare``, ``trace``, ``plan`` and ``serve_offline``.

        Args:
          target: an instance of a subclass of ``specjax.Target``. ``specjax.check_target(target,
            params)`` tells whether it keeps the contract.
          params: the weights, a pytree of arrays.
          tokenizer: an object as ``TokenizerLike`` describes it, a tokenizer of the libraries
            tokenizers or transformers, or None to work with token ids alone.
          name: shown in results; default: the name of the target's class.
          eos_ids: the ids that end a text; default: those that the tokenizer names.
          mesh: devices to decode on (see ``specjax.load``).
          max_positions: the longest sequence in tokens, prompt and new tokens together; longer
            requests are refused. Default: ``target.max_positions``, and without limit where that is
            None.

        Raises:
          ValueError: ``max_positions`` is no integer from 1 to ``target.max_positions``.
          TypeError: ``target`` is no ``specjax.Target``, or the tokenizer cannot encode or decode.

        Example::

            lm = specjax.LM.of(MyTarget(vocab_size=256), weights, MyTokenizer())
            specjax.generate(lm, "def f(x):", drafter="ngram")
        """
        if not isinstance(target, Target):
            shown = f"{target!r:.80}"
            raise TypeError(
                f"target={shown}: expected an instance of a subclass of specjax.Target; what "
                "specjax.load returns is an LM already"
            )
        most = target.max_positions
        if max_positions is not None and (
            not isinstance(max_positions, int) or not 1 <= max_positions <= (most or max_positions)
        ):
            raise ValueError(
                f"max_positions={max_positions!r}: give an integer of at least 1"
                + ("" if most is None else f", at most the target's own {most}")
                + ", or leave it out"
            )
        wrapped = None
        if tokenizer is not None:
            wrapped = wrap_tokenizer(tokenizer, eos_ids, target.vocab_size)
        weights = _fingerprint_of_arrays(params)
        return cls(
            target=target,
            params=params,
            tokenizer=wrapped,
            name=name or type(target).__name__,
            fingerprint=hashlib.sha256(f"{target!r}{weights}".encode()).hexdigest()[:16],
            mesh=sharding.as_mesh(mesh),
            checkpoint=weights,
            bound=max_positions,
        )

    @property
    def max_positions(self) -> int | None:
        """The longest sequence in tokens, prompt and new tokens together; None: there is no limit.
        It is the target's, unless ``LM.of`` was told a smaller one."""
        return self.target.max_positions if self.bound is None else self.bound

    @property
    def config(self) -> DecoderConfig | EncoderDecoderConfig:
        """The shape of a model that was loaded.

        Raises:
          TypeError: the target is one of your own, which need not have a config.
        """
        config = self.config_if_any
        if config is None:
            raise TypeError(
                f"{self.name} is a target of your own, which has no config: this needs a model "
                "that specjax.load returns"
            )
        return config

    @property
    def config_if_any(self) -> DecoderConfig | EncoderDecoderConfig | None:
        """The shape of a model that was loaded; None for a target of your own."""
        target = self.target
        while target.parts:
            target = target.parts[0]  # the one whose config decides
        return target.config if isinstance(target, CausalLM | Seq2SeqLM) else None

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the activations, the cache, and all weights that are not quantized."""
        return np.dtype(self.target.activation_dtype(self.params))

    def __repr__(self) -> str:
        held = f", quantized to {self.target.quantized}" if self.target.quantized else ""
        return f"LM({self.name!r}{held}{': approximate' if self.target.approximate else ''})"

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the token ids of a conversation in the model's chat template.

        Args:
          messages: ``[{"role": "user", "content": "..."}, ...]``.

        Raises:
          ValueError: there is no tokenizer, or it has no chat template (see ``Tokenizer.chat``).
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.name} was loaded without a tokenizer")
        return self.tokenizer.chat(messages)


def load(
    name_or_folder: str | os.PathLike,
    *,
    dtype: object = None,
    revision: str | None = None,
    tokenizer: object = None,
    quantize: str | Quantization | None = None,
    mesh: Mesh | str | Mapping[str, int] | None = None,
) -> LM:
    """Loads a model in Hugging Face layout.

    Args:
      name_or_folder: ``"embedded"`` or ``"embedded-draft"`` (the pair inside this package), a
        folder, or a name on the Hugging Face hub.
      dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, in which the model computes; default:
        float32 on CPU, elsewhere that of the checkpoint. Where the CPU kernels compute in float32,
        matrices that the files hold in bfloat16 stay so in memory: the numbers are the same, and
        half of the bytes are read (``quantize="float"`` widens them, as to train them).
      revision: branch, tag or commit on the hub.
      tokenizer: another folder's tokenizer, a tokenizer object, or False for none.
      quantize: ``"int8"`` or ``"int4"`` hold the weights in eight or four bits,
        ``specjax.Quantization`` has further settings; ``"fp8"`` needs ``pip install
        'specjax[quantize]'``. As a target such a model is approximate, and every result says so;
        as a drafter it leaves the output law untouched. Weights that the files hold in few bits
        stand for floats, which are quantized; ``"float"`` leaves them so: in float32, the same law.
        That is the default of ``embedded``, whose file has eight bits.
      mesh: devices to share the model, ``"data=2,model=4"`` or a ``jax.sharding.Mesh`` with these
        axes: weights, caches and vocabulary are split over ``model``, the rows of a batch over
        ``data``; on ``"data=2,stage=2"`` the layers are divided over ``stage``. A drafter
        loaded without it is held whole by every device of its target's mesh.

    Returns:
      The model with its weights and its tokenizer.

    Raises:
      TypeError: the name is neither a text nor a path.
      FileNotFoundError: no such folder, or it lacks its config, tokenizer or weights.
      ValueError: unknown model type, dtype or quantization; broken or mismatched files; a group
        size that does not divide; fp8 without qwix; a mesh that cannot share the model.
      OSError: the hub does not have the model, or cannot be reached.

    Example::

        lm = specjax.load("embedded")
        lm.tokenizer.encode("def f(x):")
    """
    name = name_of("name_or_folder", name_or_folder)
    check_dtype(dtype)
    quantize = _COMPUTED_AS.get(name) if quantize is None else quantize
    widened = quantize == FLOAT
    quantize = quantize if widened else supported(quantize)
    held = None if widened or quantize is None else str(quantize)
    mesh = sharding.as_mesh(mesh)
    folder = folder_of(name, revision)
    config = load_config(folder)
    found = None
    if tokenizer is None:
        place = EMBEDDED.get(_SHARED_TOKENIZER.get(name, ""), folder)
        found = load_tokenizer(place, config.eos_ids)
    elif isinstance(tokenizer, str | os.PathLike):
        found = load_tokenizer(name_of("tokenizer", tokenizer), config.eos_ids)
    elif tokenizer is not False:
        found = wrap_tokenizer(tokenizer, config.eos_ids, config.vocab_size)
    if found is not None and not config.eos_ids:
        config = dataclasses.replace(config, eos_ids=found.eos_ids)
    if isinstance(config, EncoderDecoderConfig):
        target = Seq2SeqLM(config, quantized=held)
    else:
        layout = quantized_layout(folder) if quantize is None else None
        held = held if layout is None else str(layout)
        target = CausalLM(config, quantized=held, published=layout is not None)
        stages = 1 if mesh is None else mesh.shape.get(STAGE, 1)
        if stages > 1:
            target = PipelinedLM(target, stages)
    checkpoint = checkpoint_fingerprint(weight_files(folder))
    params = load_weights(folder, config, dtype, quantize, mesh)
    params = kernels.of(params).settle(params)
    return LM(
        target=target,
        params=params,
        tokenizer=found,
        name=name,
        fingerprint=hashlib.sha256(f"{config!r}{held}{checkpoint}".encode()).hexdigest()[:16],
        mesh=mesh,
        checkpoint=checkpoint,
        revision=revision,
        loaded=True,
    )


def as_drafter(target: LM, draft: LM) -> Target:
    """The model of a drafter, answering in as many rows as its target has.

    Raises ValueError as ``check_reading`` and ``check_same_tokenizer`` do.
    """
    check_reading(target, draft)
    check_same_tokenizer(target, draft)
    rows = target.target.vocab_size
    if isinstance(draft.target, PipelinedLM):
        whole = dataclasses.replace(draft.target.whole, rows=rows)
        return dataclasses.replace(draft.target, whole=whole)
    if not isinstance(draft.target, CausalLM | Seq2SeqLM):
        if draft.target.vocab_size != rows:
            raise ValueError(
                f"the drafter {draft.name} has {draft.target.vocab_size} logits, the target "
                f"{target.name} has {rows}: a draft model of your own must have as many"
            )
        return draft.target
    axis = draft.target.axis if draft.mesh is not None else None
    return dataclasses.replace(draft.target, rows=rows, axis=axis)


def check_reading(target: LM, draft: LM) -> None:
    """Raises ValueError where one of two models reads what the other does not, or the drafter lies
    on another mesh."""
    ours, theirs = _kind(target), _kind(draft)
    if ours != theirs:
        raise ValueError(
            f"the drafter {draft.name} is {theirs}, the target {target.name} is {ours}: take a "
            "drafter that reads what its target reads, or drafter='ngram'"
        )
    if draft.mesh is not None and draft.mesh != target.mesh:
        raise ValueError(
            f"the drafter {draft.name} was loaded with another mesh than the target {target.name}: "
            "load both with the same, or the drafter without one"
        )


def _kind(lm: LM) -> str:
    """Describes the input of a model; models that differ in it cannot draft for each other."""
    reads = lm.target.reads
    if reads is None:
        return "a decoder-only model"
    frames = ""
    if reads == "features" and isinstance(lm.target, Seq2SeqLM):
        config = lm.target.config
        frames = f" ({config.num_features} by {2 * (config.max_source or 0)})"
    return f"an encoder-decoder model that reads {reads}{frames}"


def check_same_tokenizer(target: LM, draft: LM) -> None:
    """Checks that a token id means the same to a drafter as to its target.

    Two vocabularies agree if every id that both have names the same token, and if a token that
    only one of them has is an *added* one (a chat model and its base). How many rows a model has
    beyond its vocabulary does not matter: Qwen2.5 pads the same tokens to 151,936 rows in small
    models and to 152,064 in large ones. Merges and normalisation do not matter either: only ids
    pass between the two.

    Raises:
      ValueError: with the sizes and the first tokens that differ.
    """
    sizes = target.target.vocab_size, draft.target.vocab_size
    if target.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the drafter {draft.name} has a vocabulary of {sizes[1]}, the target "
                f"{target.name} one of {sizes[0]}, and without both tokenizers there is no "
                "telling which ids correspond; load both with their tokenizers"
            )
        return
    if target.tokenizer.fingerprint == draft.tokenizer.fingerprint:
        return
    ours, theirs = target.tokenizer.vocabulary, draft.tokenizer.vocabulary
    added = target.tokenizer.added | draft.tokenizer.added
    differing = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    differing += [i for i in sorted(ours.keys() ^ theirs.keys()) if i not in added]
    if differing:
        across = way_out(target.tokenizer, draft.tokenizer, draft.name)
        shown = "; ".join(f"id {i}: {ours.get(i)!r} / {theirs.get(i)!r}" for i in differing[:4])
        raise OtherTokenizer(
            f"the drafter {draft.name} has another tokenizer than the target {target.name}: "
            f"{len(differing)} token ids differ (target / drafter: {shown}); the target has "
            f"{len(ours)} tokens in {sizes[0]} rows, the drafter {len(theirs)} in {sizes[1]}. "
            f"Drafts are compared by token id: {across}take a drafter of the target's own family, "
            "or train one with the target's tokenizer",
            across,
        )


def _fingerprint_of_arrays(params: PyTree) -> str:
    """A hash of the structure of weights and of some numbers of each."""
    leaves, structure = jax.tree.flatten(params)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        digest.update(f"{np.shape(leaf)} {leaf.dtype}".encode())
        numbers = leaf.reshape(-1)
        digest.update(np.asarray(numbers[:: max(1, numbers.size // 1024)]).tobytes())
    return digest.hexdigest()[:16]
