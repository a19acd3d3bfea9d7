"""Which heads of a model need how much, found in a text that it writes itself.

The model reads a text, and then the same text again behind it. A model with other layers, which see a window of the
text or a state, reads one half, and then the other: such layers know nothing of what is read again, so that repeating
it would be the compressed heads' part alone, and hide what else they do. For every head, the tokens of the first
reading are put in the order in which the policy would keep them. With g the gradient of the second reading's loss with
respect to a head's output o_t for its t-th token, a head that keeps the c best tokens costs, to first order,

    cost_h(c) = sum_t (g_t . (o_t(c) - o_t))^2

with o_t(c) the attention over these c tokens and the second reading's own. Two losses are taken: that of the tokens
which are there, and of tokens drawn from the model's own prediction (for which the squares estimate the divergence
between the two predictions, as in Fisher pruning, Theis et al. 2018, arXiv:1801.05787). Each is divided by what it
costs if all heads keep an eighth. For any number of tokens in all, the heads' numbers then minimise the sum over the
lower convex hulls of these curves: the tokens go where they save most, until there are no more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backend import Parallel
from ...budget import Budget
from ...cache import signals
from ...cache.layer import HeldPrompt
from ...calibration import (
    FLOOR,
    HEADS_FILE,
    KEEPS,
    KNOWN,
    HeadShares,
    beside,
    check_writable,
    describe,
    fingerprint,
    user_cache,
    weights_digest,
)
from ...config import POLICY, WITHOUT_ROTARY, Config
from ...errors import FastKVError
from ...policies import get
from ...reference.attention import grouped_logits, softcapped
from . import attach, check, detach, modules, restored
from .cache import FastKVCache, Prompt
from .prompt import read_again
from .selfcheck import unchanged, with_rotations
from .stock import CACHE

TEXTS, ROWS, LENGTH = 2, 4, 256  # own texts, of so many pieces, of so many tokens each
CHUNK = 512  # tokens that are read again at once
POINTS = 128  # numbers of tokens at which a curve is known
LONGEST = 3072  # tokens that are read of a text that is given
SHORTEST = 128
TINY = 1e-30
EVEN = 8  # losses count as much as each other where heads keep one token in so many, all alike


class Watched(HeldPrompt):
    """A layer that is read twice, the second time so that the loss can be differentiated by its output.

    Attributes:
        order: [Hkv, N], the tokens of the first reading, best first.
        curves: [2, Hkv, POINTS + 1] fp32, what keeping the best 0, ..., N of them costs, for each loss.
        output: [1, Hq, T, Dv] of the last chunk.
    """

    differentiates = True

    def rank(self) -> None:
        """Put the tokens of the first reading in order."""
        assert self.held is not None
        q, k, v, valid = self.held
        self.cache.allocate(q.shape[1], k, v, k.shape[2])
        rule, state = self.cache.configure(self.attends), self.cache.state
        assert state is not None
        known, guard = signals.candidates(state, k, v, valid, rule)
        first = state.exact.filled  # slots, all of them empty
        known, scores = signals.score(signals.of_block(known, q, state, rule, None, None), rule)
        scores = scores.float().masked_fill(guard, float("inf"))[0, :, first:]
        self.order = scores.sort(stable=True, dim=-1, descending=True).indices
        self.curves = torch.zeros(2, k.shape[1], POINTS + 1, device=k.device)

    def read_again(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Attention over the held prompt and, causally, the tokens themselves; in plain torch, for autograd."""
        assert self.held is not None
        self.fed = (k.detach(), v.detach(), valid)
        scale, softcap, _, sinks = self.attends
        _, past_k, past_v, _ = self.held
        keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        num, past = k.shape[2], past_k.shape[2]
        logits = grouped_logits(q.float(), keys.float(), scale, softcap)
        ahead = torch.ones(num, num, dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(torch.nn.functional.pad(ahead, (past, 0)), float("-inf"))
        heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        if sinks is not None:
            column = sinks.float().view(1, heads, groups, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, column], -1)
        weights = logits.softmax(-1)
        out = (weights[..., : past + num] @ values[:, :, None].float()).flatten(1, 2).to(q.dtype)
        self.output = out if out.requires_grad else out.requires_grad_()
        self.weights, own = weights.detach()[0].split([past, weights.shape[-1] - past], -1)  # [Hkv, G, T, N]
        self.own_weight = own.sum(-1)
        self.own_output = own[..., :num] @ v.detach()[0, :, None].float()
        return self.output

    def add(self, loss: int, gradient: Tensor) -> None:
        """Add what the last chunk says, by the gradient of a loss with respect to its output [1, Hq, T, Dv]."""
        assert self.held is not None
        values, heads = self.held[2][0].float(), self.weights.shape[0]
        gradient = gradient[0].float().unflatten(0, (heads, -1))
        whole = (gradient * self.output.detach()[0].float().unflatten(0, (heads, -1))).sum(-1)  # g . o, [Hkv, G, T]
        num = values.shape[1]
        points = torch.linspace(0, num, POINTS + 1, device=values.device).round().long()
        for head in range(heads):
            # One head at a time: these are as large as its logits.
            weights = self.weights[head]
            shares = weights * (gradient[head] @ values[head].T)  # what each token adds to g . o
            own_weight, own_share = self.own_weight[head], (gradient[head] * self.own_output[head]).sum(-1)

            def upto(rows: Tensor, head: int = head) -> Tensor:
                return torch.nn.functional.pad(rows[..., self.order[head]].cumsum(-1), (1, 0))[..., points]

            kept = upto(weights) + own_weight[..., None]
            change = (upto(shares) + own_share[..., None]) / kept.clamp(min=TINY) - whole[head][..., None]
            self.curves[loss, head] += change.sum(0).square().sum(0)


def sees_everything(model: Any) -> bool:
    """Whether every layer of the model is one that fastkv compresses."""
    with held_whole(model, SHORTEST):
        cache = FastKVCache(model, static=False)
        return len(cache.compressed) == len(cache.layers)


def own_texts(model: Any, seed: int, rows: int = ROWS) -> list[Tensor]:
    """Tokens [1, ROWS * LENGTH] that the model draws from its own predictions, in `rows` pieces that each begin with
    its first token.
    """
    known: Any = model.generation_config
    text = model.config.get_text_config(decoder=True)
    places = (known.bos_token_id, text.bos_token_id, known.eos_token_id, text.eos_token_id, 0)
    first: Any = next(place for place in places if place is not None)
    first = first[0] if isinstance(first, (list, tuple)) else first
    ids = torch.full((TEXTS * rows, 1), int(first), device=model.device)
    drawn, past = [ids], None
    generator = torch.Generator().manual_seed(seed)  # of the CPU, so that every device draws the same
    for _ in range(ROWS * LENGTH // rows - 1):
        out = model(ids, **{CACHE: past}, use_cache=True)
        past, chances = out[CACHE], out.logits[:, -1].float().softmax(-1)
        ids = torch.multinomial(chances.cpu(), 1, generator=generator).to(ids.device)
        drawn.append(ids)
    return list(torch.cat(drawn, 1).reshape(TEXTS, 1, -1))


@contextmanager
def held_whole(model: Any, num: int) -> Iterator[None]:
    """The model with the policy that is default for it, heads alike, and room for `num` tokens; then stock again."""
    config = Config.make(POLICY, Budget(tokens=num, heads="uniform"), None, 1, "none", "auto", False)
    found = check(model, config)
    with restored(model):
        attach(model, found, with_rotations(config, model, found, replace(config, policy=get(WITHOUT_ROTARY))))
        yield


def curves(model: Any, ids: Tensor, seed: int, progress: Callable[[int], None], behind: Tensor) -> list[Tensor]:
    """Of each compressed layer, what its heads cost by the number of tokens they keep, [Hkv, POINTS + 1] fp64.

    Args: ids: [1, N].  seed: of tokens that are drawn.  progress: called with how many more tokens were read.
        behind: [1, T], what is read after them; the same again, or what follows.
    """
    num = ids.shape[1]
    generator = torch.Generator().manual_seed(seed)
    with held_whole(model, num):
        cache = FastKVCache(model, static=False)
        held = [Watched(layer.cache) for layer in cache.compressed]
        for layer, watched in zip(cache.compressed, held):
            layer.reader = watched
        base: Any = modules.base(model)
        head: Any = modules.get_head(model)
        softcap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        # Positions in three dimensions are numbered by the mask, the whole of it, where nobody says them.
        placed = {"position_ids": torch.arange(num, device=ids.device)[None]} if hasattr(base, "rope_deltas") else {}
        with cache.reading(Prompt(positions=placed.get("position_ids"))):
            base._fastkv_base_forward(input_ids=ids, **placed, **{CACHE: cache}, use_cache=True)
            for prompt in held:
                prompt.rank()
            progress(num)
            done = 0

            def add(out: Any) -> None:
                nonlocal done
                fed = out.last_hidden_state.shape[1]
                log_probs = softcapped(head(out.last_hidden_state)[0].float(), softcap).log_softmax(-1)
                drawn = torch.multinomial(log_probs.detach().exp().cpu(), 1, generator=generator).to(log_probs.device)
                there = behind[0, done : done + fed].to(log_probs.device)  # the head may be on another device
                losses = log_probs[:-1].gather(-1, there[1:, None]).sum(), log_probs.gather(-1, drawn).sum()
                outputs = [prompt.output for prompt in held]
                for loss, total in enumerate(losses):
                    found = torch.autograd.grad(total, outputs, retain_graph=loss == 0, allow_unused=True)
                    for prompt, gradient in zip(held, found):
                        if gradient is not None:
                            prompt.add(loss, gradient)
                done += fed
                progress(fed)

            # Layers of transformers write their new state over the one that they have just read.
            with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
                read_again(base, cache, held, behind, torch.ones_like(behind), chunk=CHUNK, after=add)
    made = torch.cat([prompt.curves.transpose(0, 1).cpu() for prompt in held]).double()  # [heads, 2, P]
    if not made.isfinite().all():
        raise FastKVError(
            "calibrate_heads needs finite gradients, got others; load the model in bfloat16 or float32, or use "
            "Budget(heads='uniform')"
        )
    made = (made / made[:, :, POINTS // EVEN].sum(0)[:, None].clamp(min=TINY)).sum(1)
    return list(made.split([len(prompt.order) for prompt in held]))


def pieces(text: Any, most: int) -> list[Tensor]:
    """A text [N] or [1, N] in pieces [1, T] as long as the model's own, of which the last may be longer; T <= most."""
    try:
        ids = torch.as_tensor(text).reshape(1, -1)[:, :LONGEST]
        got = f"{ids.shape[1]} of {ids.dtype}"
    except (TypeError, ValueError, RuntimeError):  # of words, of lists of several lengths
        ids, got = torch.zeros(1, 0), type(text).__name__
    if ids.shape[1] < SHORTEST or ids.is_floating_point():
        raise FastKVError(
            f"calibrate_heads needs token ids of a text of at least {SHORTEST} tokens, got {got}; give a longer text "
            "as tokenizer(text, return_tensors='pt').input_ids, or none for the model's own"
        )
    return list(ids.tensor_split(max(ids.shape[1] // (ROWS * LENGTH), -(-ids.shape[1] // most)), 1))


def longest_piece(model: Any, again: bool) -> int:
    """Tokens that its positions let the model read, again: twice. Raises FastKVError if they are too few."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2 * LONGEST
    most = positions // 2 if again else positions
    if most < SHORTEST:
        raise FastKVError(
            f"calibrate_heads reads at least {SHORTEST} tokens{' twice' * again}, got {type(model).__name__} with "
            f"{positions} positions; use Budget(heads='uniform')"
        )
    return most


def hull(curve: Tensor) -> Tensor:
    """The lower convex hull of a curve [P], at the same points."""
    values, corners = curve.tolist(), [0]
    for place in range(1, len(values)):
        while len(corners) > 1:
            (a, b), c = corners[-2:], place
            if (values[b] - values[a]) * (c - a) < (values[c] - values[a]) * (b - a):
                break
            corners.pop()
        corners.append(place)
    drops = [(values[a] - values[b]) / (b - a) for a, b in zip(corners, corners[1:]) for _ in range(b - a)]
    return torch.cat([curve[:1], curve[0] - curve.new_tensor(drops).cumsum(0)])


def shares_of(layers: list[Tensor]) -> Tensor:
    """The table of `HeadShares` from the curves of each layer [Hkv, P]."""
    rows = torch.cat(layers)
    heads, steps = rows.shape[0], rows.shape[1] - 1
    saved = -torch.stack([hull(row) for row in rows]).diff(dim=-1)  # by each further step, [heads, steps]
    table = []
    for keep in KEEPS:
        floor = FLOOR * keep * steps
        whole = int(floor)
        gains = saved.clone()
        gains[:, :whole] = float("inf")
        total = max(round(keep * steps * heads), 1)
        chosen = torch.zeros_like(gains.flatten(), dtype=torch.bool)
        chosen[gains.flatten().topk(total).indices] = True
        counts = chosen.view(heads, steps).sum(-1).double().clamp(min=floor)
        table.append(counts / counts.mean())
    widest = max(len(layer) for layer in layers)
    split = torch.stack(table).split([len(layer) for layer in layers], -1)
    return torch.stack([torch.nn.functional.pad(part, (0, widest - part.shape[-1])) for part in split], 1).half()


def calibrate_heads(
    model: Any,
    path: str | Path | None = None,
    text: Tensor | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> HeadShares:
    """Measure how many tokens each KV head of a model needs, on text that the model generates.

    The result is deterministic for a seed and serves all policies and budgets. Calibration takes about as long as
    generating 256 tokens in a batch of eight and reading 1,024 tokens ten times. Where some layers are not compressed,
    it is 1,024 tokens in a batch of two, and half the reading. A model with few positions reads fewer tokens. It needs
    memory for the gradients of 512 tokens.

    Args:
        model: a transformers model that `fastkv.patch` accepts, not patched.
        path: file to write, if any.
        text: token ids [N] or [1, N] to read instead, at least 128 tokens, of which the first 3,072 are used.
        seed: of the text, and of the tokens that are drawn from the model's predictions.
        progress: called with the number of tokens that were just read.
    Returns: the shares, also written to `path` if it is given.
    Raises: FastKVError if the model cannot be patched, has no output embeddings, has positions for fewer than 128
        tokens that are read twice, or is shared by several processes, if the text is too short, or if the file cannot
        be written.
    """
    if "_fastkv_config" in getattr(model, "__dict__", {}):
        raise FastKVError("calibrate_heads needs a stock model, got a patched one; call fastkv.unpatch(model) first")
    if modules.get_head(model) is None:
        raise FastKVError(
            f"calibrate_heads needs logits, {type(model).__name__} has no output embeddings; load the model with "
            "AutoModelForCausalLM, or use Budget(heads='uniform')"
        )
    _check_whole(model)
    if path is not None:
        check_writable(path)
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise FastKVError(
            "calibrate_heads needs gradients, got weights made in inference mode, which have none; load the model "
            "outside of torch.inference_mode(), or use Budget(heads='uniform')"
        )
    show = progress or (lambda tokens: None)
    # Whatever the caller is in, the result is the same. To leave inference mode turns gradients on, so it comes first.
    with torch.inference_mode(False), unchanged(model), torch.autocast(model.device.type, enabled=False):
        again = sees_everything(model)
        most = longest_piece(model, again)
        if text is None:
            read = [ids[:, :most] for ids in own_texts(model, seed, ROWS if again else 1)]
        else:
            read = pieces(text, most)
        each = []
        for ids in (piece.to(model.device).clone() for piece in read):
            first, rest = (ids, ids) if again else ids.tensor_split(2, 1)
            each.append(curves(model, first, seed, show, rest if again else rest[:, :CHUNK]))
    found = [sum(same[1:], same[0]) for same in zip(*each)]
    made = HeadShares(
        table=shares_of(found),
        heads=tuple(map(len, found)),
        fingerprint=fingerprint(model.config),
        model=describe(model.config),
        weights=weights_digest(model),
        tokens=sum(ids.shape[1] for ids in read),
    )
    if path is not None:
        made.save(path)
    return made


def shares_for(model: Any, wanted: str | Path) -> HeadShares:
    """The shares of a model from a file, or for "calibrated" from beside the model, the user's cache, or made now.

    Raises: FastKVError if a file is damaged or of other weights, or as `calibrate_heads`.
    """
    known = known_shares(model, wanted)
    if known is not None:
        return known
    _check_whole(model)
    file = _cached(model.config, weights_digest(model))
    print(
        f"fastkv: calibrating the heads of {describe(model.config)}, once for these weights, into {file}; "
        "Budget(heads='uniform') does without",
        file=sys.stderr,
        flush=True,
    )
    with restored(model):
        detach(model)
        made = calibrate_heads(model)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(file)
    except (OSError, FastKVError) as error:  # a home that cannot be written is no reason not to run
        print(f"fastkv: the shares were not stored ({error})", file=sys.stderr, flush=True)
    return made


def known_shares(model: Any, wanted: str | Path = "calibrated") -> HeadShares | None:
    """The shares of a model from a file, or for "calibrated" from beside the model, from the package or from the user's
    cache. None if it was not calibrated.

    Raises: FastKVError if a file is damaged or of other weights.
    """
    alone = Parallel.of(model).size == 1  # a process with a part of the weights cannot know whose they are
    weights, rounded = weights_digest(model) if alone else None, model.dtype == torch.float16
    return stored_shares(model.config, weights, wanted, compared=not rounded)


def stored_shares(
    known: Any, weights: str | None, wanted: str | Path = "calibrated", compared: bool = True
) -> HeadShares | None:
    """`known_shares` of the model with that config and digest of the weights, None where they are not known.

    compared: whether the digest is that of the weights as they were before somebody rounded them.
    """
    file = Path(wanted)
    if wanted == "calibrated":
        file = beside(known, HEADS_FILE)
        if not os.path.isfile(file):  # also where nobody may look
            return None if weights is None else _found(known, weights)
    shares = HeadShares.load(file, known)
    if weights is not None and shares.weights != weights and not compared:
        print(f"fastkv: weights in float16 do not tell whether {file} is theirs", file=sys.stderr, flush=True)
    elif weights is not None and shares.weights != weights:
        raise FastKVError(
            f"{file} was calibrated for other weights of {shares.model} ({shares.weights}), got {weights}; calibrate "
            "these with fastkv calibrate heads, or use Budget(heads='uniform')"
        )
    return shares


def _found(known: Any, weights: str) -> HeadShares | None:
    """The shares of these weights in the package or in the user's cache; None if there are none, or none that can be
    used: of a damaged file or one of another rotary embedding nobody has to know.
    """
    for file in (KNOWN / f"{weights}.safetensors", _cached(known, weights)):
        if os.path.isfile(file):
            with suppress(FastKVError):
                return HeadShares.load(file, known)
    return None


def _cached(known: Any, weights: str) -> Path:
    """Where the user's cache has the shares of these weights in a model of that config."""
    return user_cache("heads") / f"{weights}-{fingerprint(known)}.safetensors"


def _check_whole(model: Any) -> None:
    """Raise FastKVError if this process sees a part of the heads only."""
    if Parallel.of(model).size > 1:
        raise FastKVError(
            "calibrating heads needs all of them in one process, got tensor parallelism; calibrate in one process, put "
            f"{HEADS_FILE} beside the model or pass Budget(heads=file), or use Budget(heads='uniform')"
        )
