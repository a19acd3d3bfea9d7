"""A cache in a file: every tensor of every layer, and a header that says which model and settings they belong to.

The file is safetensors with one entry of metadata: a SHA-256 over header and tensors, by which damage is noticed, and
the header in JSON. All slots are written, used or not: the file is as large as the cache, and what is read back
continues bit for bit. How the model computes (`prefill_block`, `backend`, device) is free to differ when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save as to_bytes
from torch import Tensor

from ... import __version__
from ...calibration import describe, fingerprint, header_of, read_tensors, replace_file
from ...config import Config
from ...errors import FastKVError
from ...policies import Policy
from ...reference import LayerState
from . import modules, stock
from .layer import FastKVLayer

if TYPE_CHECKING:
    from .cache import FastKVCache

HEADER = "fastkv.cache"  # the one metadata entry; its presence says what the file is
VERSION = 1
DELTAS = "rope_deltas"  # of the cache, where positions do not count tokens
STOCK = "stock."  # before the names of what a compressed layer keeps for transformers


def write(path: str | os.PathLike[str], cache: FastKVCache) -> None:
    """Save a cache, see `FastKVCache.save`."""
    _check_alone(cache)
    deltas = cache.rope_deltas
    tensors: dict[str, Tensor] = {} if deltas is None else {DELTAS: deltas.cpu().contiguous()}
    entries = []
    for index, layer in enumerate(cache.layers):
        compressed = isinstance(layer, FastKVLayer)
        if compressed and layer.state is None:
            raise FastKVError("an empty cache cannot be saved; run the model with it first")
        entries.append(stock.numbers(layer) | (_numbers(layer) if compressed else {}))
        held = dict(layer.state.named_tensors()) if compressed else {}
        held |= {f"{STOCK if compressed else ''}{name}": one for name, one in stock.tensors(layer).items()}
        tensors |= {f"{index}.{name}": tensor.detach().cpu().contiguous() for name, tensor in held.items()}
    header = {
        "version": VERSION,
        "fingerprint": fingerprint(cache.model_config),
        "model": describe(cache.model_config),
        "settings": {"dtype": str(cache.compressed[0].dtype), **described(cache.config)},
        "layers": entries,
        "versions": {"fastkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }
    words = json.dumps(header, sort_keys=True)
    replace_file(path, to_bytes(tensors, {HEADER: f"{_digest(words, tensors)} {words}"}))


def _check_alone(cache: FastKVCache) -> None:
    """Raise FastKVError if several processes share the heads: each would hold a part only."""
    size = cache.workspace.parallel.size
    if size > 1:
        raise FastKVError(
            f"caches are saved and loaded by one process, but {size} share this model's heads; load it without tp_plan"
        )


def _numbers(layer: FastKVLayer) -> dict[str, int]:
    """What the host knows of a compressed layer."""
    if layer.cache.pending is not None:
        raise FastKVError(
            "the last tokens of this cache may still be rolled back, so there is no state to save yet; accept them "
            "with cache.crop(0) first"
        )
    cache, (state, rule) = layer.cache, layer.cache.held()
    entry = {"seen": int(layer.seen), "steps": cache.workspace.clock.now.steps, "recording": int(layer.is_croppable)}
    for name, numbers in (("tokens", rule.layout.tokens), ("approx", rule.layout.approx)):
        entry |= {f"{name}.{head}": number for head, number in enumerate(numbers)}
    if rule.layout.shared:
        entry |= {"average": cache.average, "context": cache.context, "mean": rule.layout.mean}
    for name, slots in state.tiers.items():
        entry |= {f"{name}.filled": slots.filled, f"{name}.limit": slots.limit}
    if cache.plan.latent:
        entry["exact.value_dim"] = state.exact.value_dim
    return entry


def described(config: Config) -> dict[str, Any]:
    """What the contents of a cache depend on, as JSON: `policy`, `policy.window`, `budget.tokens`, `correction`, ..."""
    flat: dict[str, Any] = {
        "policy": config.policy.name,
        "correction": config.correction.name,
        "slots": config.slots.name,
        "evict_every": config.evict_every,
        "vector": None,
    }
    flat |= _settings("policy", config.policy) | _settings("budget", config.budget)
    flat |= {f"correction.{name}": getattr(config.correction, name) for name in config.correction.options}
    flat["budget.heads"] = str(config.budget.heads)  # no path any more
    if config.vector is not None:
        flat["vector"] = _digest("", {str(layer): weight.cpu() for layer, weight in config.vector.weights.items()})
    return json.loads(json.dumps(flat, default=str))


def _settings(prefix: str, settings: Any) -> dict[str, Any]:
    """The fields of a dataclass, also of a policy within. Not where files lie: what they said shows in the layout. Nor
    how prompts are read: what is kept goes on alike.
    """
    flat: dict[str, Any] = {}
    for one in fields(settings):
        name, value = f"{prefix}.{one.name}", getattr(settings, one.name)
        if isinstance(value, Policy):
            flat |= {name: value.name} | _settings(name, value)
        elif "Path" not in str(one.type) and one.name != "rounds":
            flat[name] = value
    return flat


def _digest(words: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text and of names, dtypes, shapes and bytes of tensors on the CPU, in hexadecimal."""
    found = hashlib.sha256(words.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def read(path: str | os.PathLike[str], cache: FastKVCache, model: Any) -> None:
    """Fill a new cache of a model with what `write` saved, see `FastKVCache.load`; half filled after an error."""
    _check_alone(cache)
    file, known, layers, dtype = _File.open(path), cache.model_config, cache.layers, model.dtype
    if file.header.get("fingerprint") != fingerprint(known):
        raise FastKVError(
            f"{path} holds a cache of another model ({file.header.get('model')}, fingerprint "
            f"{file.header.get('fingerprint')}), got {describe(known)}, fingerprint {fingerprint(known)}; load it with "
            "the model it was saved from"
        )
    file.check_settings({"dtype": str(dtype), **described(cache.config)})
    groups = {layer: modules.Sizes.of(module).groups for layer, module in modules.attentions(model).items()}
    devices = modules.devices(model)
    entries: Any = file.header.get("layers")
    file.need(isinstance(entries, list) and len(entries) == len(layers))
    for index, (layer, entry) in enumerate(zip(layers, entries)):
        file.need(isinstance(entry, dict) and isinstance(layer, FastKVLayer) == ("seen" in entry))
        start = f"{index}."
        saved = {name.removeprefix(start): each for name, each in file.tensors.items() if name.startswith(start)}
        device = devices.get(index, torch.device("cpu"))  # a layer without weights keeps nothing
        own = saved
        if isinstance(layer, FastKVLayer):
            _fill(file, layer, entry, saved, device, groups[index], dtype)
            own = {name.removeprefix(STOCK): each for name, each in saved.items() if name.startswith(STOCK)}
        file.need(stock.fits(layer, own))
        names = [name for name in stock.numbers(layer) if name in entry]
        stock.fill(layer, own, dict(zip(names, file.counts(entry, *names))), device)
    first, deltas = cache.compressed[0].state, file.tensors.get(DELTAS)
    if first is not None and deltas is not None:
        file.need(deltas.dtype == torch.int64 and deltas.shape == (len(first.seen), 1))
        cache.rope_deltas = deltas.to(first.seen.device)


def _fill(
    file: _File,
    layer: FastKVLayer,
    entry: dict[str, Any],
    saved: dict[str, Tensor],
    device: torch.device,
    groups: int,
    dtype: torch.dtype,
) -> None:
    """Put the saved tensors and numbers of a compressed layer into it."""
    pairs = ("exact.keys",) if layer.cache.plan.latent else ("exact.keys", "exact.values")
    file.need(all(name in saved and saved[name].ndim > 1 for name in (*pairs, "exact.lengths")))
    batch, heads = saved["exact.lengths"].shape[:2]
    file.need(batch > 0 and heads > 0)
    tokens = file.counts(entry, *(f"tokens.{head}" for head in range(heads)))
    approx = file.counts(entry, *(f"approx.{head}" for head in range(heads))) if "approx.0" in entry else []
    cache, shares, mean = layer.cache, None, sum(tokens) // heads
    if cache.config.budget.shared is not None:
        cache.average, cache.context, mean = file.counts(entry, "average", "context", "mean")
        shares = tuple(tokens)
    layout = cache.plan.layout(heads, device, mean, shares=shares)
    known = shares is not None or cache.config.correction.key_only
    if not known and (layout.tokens, layout.approx) != (tuple(tokens), tuple(approx)):
        raise FastKVError(
            f"{file.path} was saved with heads of {tokens} tokens in layer {cache.layer}, but policy "
            f"{cache.config.policy.name!r} now gives them {list(layout.tokens)}; patch the model as it was then"
        )
    layout = replace(layout, tokens=tuple(tokens), approx=tuple(approx))
    dims = [getattr(layout.format, name.split(".")[1]).dim(saved[name].shape[-1]) for name in pairs]
    if layer.cache.plan.latent:
        dims += file.counts(entry, "exact.value_dim")
        file.need(dims[1] <= dims[0])
    stored = saved["exact.keys"].dtype if layout.format.plain else dtype  # another than the model's under autocast
    keys, values = (torch.empty(batch, heads, 0, dim, dtype=stored, device="meta") for dim in dims)
    state = layout.allocate(keys, values)
    for name, like in list(state.named_tensors()):
        if name == "moments.slope" and name not in saved:
            continue
        file.need(name in saved and saved[name].shape == like.shape and saved[name].dtype == like.dtype)
        state.replace(name, saved[name].to(device, copy=True))
    if state.moments.slope is not None and state.moments.slope.is_meta:  # saved where no kernel needed it
        state.moments.slope = torch.empty_like(state.moments.slope, device=device)
        state.moments.copy_(state.moments)
    seen, steps, recording = file.counts(entry, "seen", "steps", "recording")
    clock = layer.cache.workspace.clock
    file.need(steps < clock.period)
    clock.move_to(steps)
    for name, slots in state.tiers.items():
        slots.filled, slots.limit = file.counts(entry, f"{name}.filled", f"{name}.limit")
    file.need(_sound(state, seen))
    layer.cache.adopt(state, layout, heads * groups)
    layer.cache.loaded()
    layer.adopted(seen, recording > 0, dtype)


def _sound(state: LayerState, seen: int) -> bool:
    """Whether the numbers of a state can be: nothing outside its slots, every token either stored or evicted."""
    if (state.stored + state.moments.count != state.seen[:, None]).any() or state.seen.max() > seen:
        return False
    if state.parts is not None:
        count = state.parts.count
        total = count.reshape(*count.shape[:2], -1).sum(-1)
        if (count < 0).any() or (total != state.moments.count).any():
            return False
    for slots in state.tiers.values():
        lengths, starts, size = slots.lengths, slots.starts, slots.keys.shape[-2]
        if starts is not None and ((starts[:, 0] != 0) | (starts[:, -1] > size)).any():
            return False
        rooms = torch.full_like(lengths, size) if starts is None else starts.diff(dim=-1)
        if ((lengths < 0) | (lengths > rooms)).any() or not rooms.max() <= slots.limit <= size:
            return False
        if not lengths.max() <= slots.filled <= slots.limit:
            return False
        if (((slots["positions"] < 0) | (slots["positions"] >= seen)) & slots.valid).any():
            return False
    return True


@dataclass(frozen=True)
class _File:
    """A file that was read whole and is what it was when it was written."""

    path: Any
    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, path: Any) -> _File:
        """Raise FastKVError unless all of it can be read by this version."""
        found, tensors = read_tensors(path, HEADER, "a saved cache", "write one with cache.save(path)")
        digest, _, words = found.partition(" ")
        file = cls(path, header_of(path, words, VERSION), tensors)
        file.need(digest == _digest(words, file.tensors) and file.header.get("version") == VERSION)
        return file

    def need(self, fact: bool) -> None:
        """Raise FastKVError unless the file is as it should be."""
        if not fact:
            raise FastKVError(
                f"{self.path} is damaged, expected a header and tensors as fastkv writes them, got something else; "
                "save the cache again"
            )

    def counts(self, entry: dict[str, Any], *names: str) -> list[int]:
        """The named entries, each a number of at least 0."""
        found: list[Any] = [entry.get(name) for name in names]
        self.need(all(type(number) is int and number >= 0 for number in found))
        return found

    def check_settings(self, here: dict[str, Any]) -> None:
        """Raise FastKVError unless these are the settings that were saved."""
        saved = dict(self.header.get("settings") or {})
        names = [name for name in sorted(saved.keys() | here.keys()) if saved.get(name) != here.get(name)]
        for kind in ("policy", "correction"):
            if kind in names:  # another one has other hyper-parameters
                names = [name for name in names if not name.startswith(f"{kind}.")]
        if names:
            was, now = ([f"{name}={settings.get(name)}" for name in names] for settings in (saved, here))
            raise FastKVError(
                f"{self.path} was saved with {', '.join(was)}, got {', '.join(now)}; load and patch the model as it "
                "was then"
            )
