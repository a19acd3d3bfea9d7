"""What is fitted to one model: what every such file needs, which model it belongs to and a write that is whole or not
at all; and which heads of a model keep how much, `HeadShares`. `fits` has the other files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from ..errors import FastKVError, alternatives, is_number

FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def fingerprint(config: Any) -> str:
    """16 hexadecimal digits that are equal for models of the same shape, whatever their weights, dtype or patches.

    Hashed are the fields that decide what a layer, a head and a position mean: type, sizes, heads, rotary parameters
    and kinds of layers of the text model. A fine-tuned model keeps the fingerprint of its base: a fit transfers there
    approximately, so fit again if the weights moved far.

    Args: config: of a transformers model, also a multimodal one.
    """
    described = json.dumps(_shape(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def describe(config: Any) -> str:
    """The model in one line, for headers and messages: `llama, 4 layers of width 256, 4 query and 2 KV heads of 64`."""
    shape = _shape(config)
    return (
        f"{shape['model_type']}, {shape['num_hidden_layers']} layers of width {shape['hidden_size']}, "
        f"{shape['num_attention_heads']} query and {shape['num_key_value_heads']} KV heads of {shape['head_dim']}, "
        f"vocabulary of {shape['vocab_size']}"
    )


def check_fitted(what: Any, fitted: str, model: str, config: Any, command: str) -> None:
    """Raise FastKVError unless `fitted` is the fingerprint of this config.

    Args: model: what was fitted, in words; command: of `fastkv calibrate`, which fits this one.
    """
    if fitted != fingerprint(config):
        raise FastKVError(
            f"{what} was fitted to another model ({model}, fingerprint {fitted}), got {describe(config)}, fingerprint "
            f"{fingerprint(config)}; fit this one with fastkv calibrate {command}"
        )


def _shape(config: Any) -> dict[str, Any]:
    """The fields, in a form that does not depend on which of them a config spells out and which it leaves out."""
    text = config.get_text_config(decoder=True)
    shape = {name: getattr(text, name) for name in FIELDS}
    heads, dims = zip(*kv_shapes(text))
    shape["num_key_value_heads"], shape["head_dim"] = _common(heads), _common(dims)
    shape["layer_types"] = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    shape["rope"] = _plain(getattr(text, "rope_parameters", None))
    return shape


def kv_shapes(text: Any) -> list[tuple[int, int]]:
    """KV heads of each layer, and the dimensions of their keys, from the config of a text model."""
    layers = getattr(text, "per_layer_config", None)  # of newer transformers, where layers may differ
    layers = [text] * text.num_hidden_layers if layers is None else layers
    return [
        (
            getattr(one, "num_key_value_heads", None) or one.num_attention_heads,
            getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads,
        )
        for one in layers
    ]


def _common(numbers: Sequence[int]) -> Any:
    """The number, if all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _plain(value: Any) -> Any:
    """Nested dictionaries without empty entries and with every number a float: 10000 and 10000.0 are the same base."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return float(value) if is_number(value) else value


def beside(config: Any, name: str) -> Path:
    """The file of that name in the directory that the model with this config was loaded from; it need not be there.
    Of a model that was not loaded from any, a path where nothing can be."""
    return Path(getattr(config, "_name_or_path", "") or os.devnull) / name


def user_cache(kind: str) -> Path:
    """Where fastkv keeps what it made once for all runs; it need not be there yet."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as containers have
        folder = _own_folder()
    return folder / "fastkv" / kind


@functools.cache
def _own_folder() -> Path:
    """For this process, and writable by its user only: what is compiled is loaded from there."""
    return Path(tempfile.mkdtemp(prefix="fastkv-"))


def check_writable(path: Any) -> Path:
    """The path. Raises: FastKVError if no file can be written there, before somebody works for it."""
    file = Path(path) if isinstance(path, (str, os.PathLike)) else None
    other = file is not None and os.path.exists(file) and not os.path.isfile(file)  # a device would be replaced, too
    if file is None or other or not os.access(file.parent, os.W_OK):
        raise FastKVError(f"{path!s} cannot be written; choose a file in a directory that exists and is writable")
    return file


def replace_file(path: Any, content: bytes) -> None:
    """Write next to `path`, then rename over it, which is atomic.

    Raises: FastKVError if that fails; what was there before is then still there.
    """
    path = check_writable(path)
    fresh = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        with open(fresh, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise FastKVError(
            f"{path} cannot be written ({error.strerror or error}) and is as it was; choose a file in a directory that "
            "exists and is writable"
        ) from error
    finally:
        if fresh.is_file():
            fresh.unlink()


def read_tensors(path: Any, entry: str, what: str, again: str) -> tuple[str, dict[str, Tensor]]:
    """What a safetensors file says in an entry of its metadata, and its tensors, on the CPU.

    Args: what: the file is to be, in words.  again: how such a file is made.
    Raises: FastKVError if there is no such file, or none with that entry.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FastKVError(f"{what} is read from a path, got {type(path).__name__}; {again}")
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get(entry)
            if found is None:
                raise FastKVError(
                    f"{path} is a safetensors file, but expected {what}, got one without the header {entry}; {again}"
                )
            return found, {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FastKVError(f"{path} cannot be read as {what} ({reason}); {again}") from error


def header_of(path: Any, words: str, version: int) -> dict[str, Any]:
    """The header of a file in JSON, {} for anything else. Raises: FastKVError for a later version of its format."""
    try:
        header = json.loads(words)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        return {}
    if header["version"] > version:
        raise FastKVError(
            f"{path} has format {header['version']}, but this fastkv reads formats up to {version}; update fastkv or "
            "write the file again"
        )
    return header


@dataclass(frozen=True)
class TensorFile:
    """The format of a safetensors file with tensors that were fitted to one model and facts about the fit.

    Attributes: command: of `fastkv calibrate`, which writes it.  what: is in it, in words.  facts: their names and
        types.  version: of the format.
    """

    command: str
    what: str
    facts: Mapping[str, type]
    version: int = 1

    @property
    def header(self) -> str:
        """The one metadata entry; its presence says what the file is."""
        return f"fastkv.{self.command}"

    @property
    def _fits(self) -> str:
        """The command that writes it."""
        return f"fastkv calibrate {self.command}"

    def save(self, path: str | os.PathLike[str], fitted: Any, tensors: Mapping[str, Tensor]) -> None:
        """Write a file; whoever reads `path` sees the old one or the whole new one.

        Args: fitted: has the facts as attributes.
        Raises: FastKVError if it cannot be written; a file that was there before is then still there.
        """
        header = {"version": self.version, **{name: kind(getattr(fitted, name)) for name, kind in self.facts.items()}}
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        replace_file(path, to_bytes(whole, {self.header: json.dumps(header, sort_keys=True)}))

    def load(self, path: str | os.PathLike[str], config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The facts and the tensors of a file for the model with this config, patched or not, or with None for whatever
        model; tensors on the CPU.

        Raises: FastKVError if there is no such file, if it is damaged or something else, if a newer fastkv wrote it, or
            if it was fitted to another model.
        """
        words, tensors = read_tensors(path, self.header, f"a file of {self.what}", f"write one with {self._fits}")
        header = header_of(path, words, self.version)
        if any(type(header.get(name)) is not kind for name, kind in self.facts.items()):
            raise self.damaged(path)
        if config is not None:
            check_fitted(path, header["fingerprint"], header["model"], config, self.command)
        return {name: header[name] for name in self.facts}, tensors

    def damaged(self, path: Any) -> FastKVError:
        """The error for a file whose header or tensors are not what `save` writes."""
        return FastKVError(
            f"{path} is damaged, expected a header and tensors as fastkv writes them, got something else; write it "
            f"again with {self._fits}"
        )


FITTED = {"fingerprint": str, "model": str, "tokens": int}  # facts of every file
FILE = TensorFile("heads", "shares of heads", FITTED | {"weights": str})
KEEPS = tuple(2 ** (-step / 2) for step in range(13))  # 1 to 1/64: shares are stored for these
HEADS_FILE = "heads.safetensors"  # beside a model
KNOWN = Path(__file__).parent / "known"  # of weights that were calibrated with the defaults, by their digest
FLOOR = 0.1  # of the mean, what every head keeps in any case


@dataclass(frozen=True, eq=False)
class HeadShares:
    """How much each KV head of a model keeps relative to the mean, for several shares of a text that stay.

    Heads differ in how much they need; the less stays, the more they differ. `fastkv.calibrate_heads` measures it.

    Attributes:
        table: [len(KEEPS), layers, Hkv] fp16 on the CPU, for the compressed layers in order; the mean of each row is 1.
            Layers with fewer heads than others are padded with 0.
        heads: number of KV heads in each of these layers.
        fingerprint: digest of the model's config.  model: the same in words.
        weights: digest of the model's weights.  tokens: how many tokens were read.
    """

    table: Tensor
    heads: tuple[int, ...]
    fingerprint: str
    model: str
    weights: str
    tokens: int

    def __post_init__(self) -> None:
        sums = self.table.float().sum((1, 2)) if self.table.numel() else torch.zeros(1)
        shape = (len(KEEPS), len(self.heads), max(self.heads, default=0))
        usable = bool(sums.isfinite().all()) and bool(sums.all()) and not (self.table < 0).any()
        if tuple(self.table.shape) != shape or not usable:
            raise FastKVError(
                f"shares of heads must be finite, at least 0 and of shape {list(shape)}, got {list(self.table.shape)}; "
                "calibrate again with fastkv calibrate heads"
            )

    def __repr__(self) -> str:
        """Short, and the same for equal shares: saved caches are compared by it."""
        digest = hashlib.sha256(self.table.numpy().tobytes()).hexdigest()[:16]
        return f"HeadShares({len(self.heads)} layers, {sum(self.heads)} heads, {digest})"

    def shares(self, keep: float) -> Tensor:
        """[layers, Hkv] fp32, mean 1 over all heads: what each keeps relative to the mean if `keep` of a text stays.

        Between the rows of the table it is linear in log keep.
        Raises: FastKVError unless keep is in (0, 1].
        """
        if not 0 < keep <= 1:
            raise FastKVError(f"keep must be in (0, 1], got {keep!r}; 0.25 is a quarter")
        place = min(-2 * math.log2(keep), len(KEEPS) - 1.0)
        below = min(int(place), len(KEEPS) - 2)
        first, second = self.table[below].float(), self.table[below + 1].float()
        mixed = first + (second - first) * (place - below)
        return mixed * sum(self.heads) / mixed.sum()

    @functools.lru_cache(maxsize=64)  # noqa: B019  # every layer of a cache asks
    def tokens_of(
        self, average: int, context: int, reserved: int, layers: tuple[float, ...] | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Tokens that each head of each layer keeps: `average` times the number of heads in all, each `reserved`.

        Args:
            average: tokens per head, at least `reserved` and 1.  reserved: tokens that every head keeps.
            context: tokens of the text; if they are no more than the average, all heads keep the same number.
            layers: weights of the layers, if heads share tokens within their layer only.
        """
        if context <= average and layers is None:
            return tuple((average,) * heads for heads in self.heads)
        keep = average / context if context > average else 1.0
        wanted = self.shares(keep).double()
        heads = torch.tensor(self.heads, device=wanted.device)
        real = torch.arange(wanted.shape[1], device=wanted.device) < heads[:, None]
        if layers is not None:
            weights = wanted.new_tensor(layers)
            wanted = wanted / wanted.sum(-1, keepdim=True) * (weights / weights.mean() * heads)[:, None]
        wanted, total = wanted[real] * average, average * sum(self.heads)
        floor = max(int(FLOOR * average), reserved, 1)
        most = float(context) if context > average else math.inf  # no head holds more than there is
        rest = (wanted - floor).clamp(min=1e-6, max=most - floor)
        rest = _scaled(rest, total - floor * len(rest), most - floor)
        # Cumulative rounding: the total is met to a token.
        ends = (floor * torch.arange(1, len(rest) + 1, device=rest.device) + rest.cumsum(0)).round().long()
        ends[-1] = total
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        return tuple(tuple(counts.pop(0) for _ in range(heads)) for heads in self.heads)

    def check(self, heads: list[int]) -> None:
        """Raise FastKVError unless a model has so many KV heads in its compressed layers."""
        if list(self.heads) != heads:
            raise FastKVError(
                f"the shares are for {len(self.heads)} layers of {alternatives(self.heads)} KV heads, got a model with "
                f"{len(heads)} of {alternatives(heads)}; calibrate it with fastkv calibrate heads"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all. Raises: FastKVError if that fails."""
        FILE.save(path, self, {"shares": self.table, "heads": torch.tensor(self.heads, device="cpu")})

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any = None) -> HeadShares:
        """Read a file for the model with this config, patched or not. Without one its numbers of heads alone say, when
        it is used, whether it fits.

        Raises: FastKVError if there is no such file, if it is damaged, or of a model of another shape.
        """
        facts, tensors = FILE.load(path, config)
        if tensors.keys() != {"shares", "heads"} or tensors["heads"].ndim != 1 or tensors["heads"].is_floating_point():
            raise FILE.damaged(path)
        return cls(tensors["shares"], tuple(tensors["heads"].tolist()), **facts)


def _scaled(rest: Tensor, total: float, most: float) -> Tensor:
    """min(factor * rest, most), of the factor with which they add up to `total`, at most most * len(rest)."""
    if total <= 0:
        return rest * 0
    low, high = 0.0, total / float(rest.sum())
    while float((high * rest).clamp(max=most).sum()) < total * (1 - 1e-12):
        low, high = high, 2 * high
    for _ in range(100 if low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if float((middle * rest).clamp(max=most).sum()) >= total else (middle, high)
    return (high * rest).clamp(max=most)


def weights_digest(model: Any) -> str:
    """16 hexadecimal digits that differ between fine-tunes of a model, but not between its devices and dtypes.

    Of each parameter up to 64 numbers are looked at, rounded to bfloat16. After float16 they may be others.
    """
    named = sorted(model.named_parameters())
    return digest_of(model.config, (parameter.detach() for _, parameter in named if not parameter.is_meta))


def digest_of(config: Any, parameters: Iterable[Tensor]) -> str:
    """`weights_digest` of the model with that config and these parameters, in the order of their names."""
    found = hashlib.sha256(describe(config).encode())
    for parameter in parameters:
        flat = parameter.flatten()
        some = flat[:: max(len(flat) // 64, 1)][:64].to(torch.bfloat16).float().cpu()
        found.update(some.numpy().tobytes())
    return found.hexdigest()[:16]
