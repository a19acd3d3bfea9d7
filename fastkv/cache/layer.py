"""LayerCache: everything one layer does with a prompt block, a token, a batch change, a reset; it knows no engine.

And what it can be wrapped in while a first prompt is read: held in full until all layers have read it (KVzip reads it
twice, quality budgets grade it).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..backend import autocast_dtype, follows_rows, implementation
from ..errors import FastKVError
from ..policies import Reread
from ..reference import LayerState, Moments, Recovery, Slots, Spec, rows_at
from . import CacheWorkspace, compaction, fixed, selection, signals
from .layout import Attends, LayerConfig, LayerPlan, Layout
from .prefill import absorb_block, attend_block, without_padding

Stock = Callable[[], Tensor]
HeldTokens = tuple[Tensor, Tensor, Tensor, Tensor]  # q [B, Hq, T, D], k, v [B, Hkv, T, D], valid [B, T]
SAMPLED, FEWEST = 16, 64  # of a second reading one query in so many, and no fewer of a chunk, are there for a refit
GROWTH = 1.25  # of a text, after which a decode step deals its heads slots anew


@dataclass(frozen=True)
class PendingBlock:
    """A block of a prompt that is not absorbed yet: other layers still have to attend to it, or it may be taken back.

    Attributes: q [B, Hq, T, D]; k, v [B, Hkv, T, D] without padding; valid [B, T]; mass of `attend_block`.
        first: whether it has no past.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    mass: Tensor | None
    first: bool


def in_one_piece(token: Tensor) -> Tensor:
    """Queries, keys or values [B, H, 1, D] of a step, as kernels want them: copied if there are gaps between heads, as
    in slices of the fused projection of GPT-NeoX, but not if they are between sequences.
    """
    return token if token.is_contiguous() or token[0].is_contiguous() else token.contiguous()


class LayerCache:
    """One layer's tokens, and what it remembers of those it evicted, for a batch of sequences.

    `read` takes a block of a prompt and `step` a token; both return attention over everything so far. Sequence b lives
    in row b of every tensor of the state. All rows follow one clock; an engine whose rows decode out of step brings a
    clock for each and says itself whether a step evicts.

    Attributes:
        plan: how the layer is laid out.
        state: None until `allocate` or the first tokens.  rule: what the layer needs of the config, None until then.
        leads: whether its steps advance the clock of the workspace: one layer's do.
        started: whether there is a past.
        kv_sharers: how many other layers attend to this one's keys and values, each once after it and before the
            next tokens (`attend_shared`, `step_shared`).  left: how many of them still have to.
        records: whether the last block can be taken back (assisted decoding): it is absorbed by `accept`, or by the
            block after it.  pending: a block that is not absorbed yet.
        static: whether a step may be compiled into one graph: it then changes tensors only, at fixed addresses.
    """

    differentiates = False  # whether it takes tokens that autograd follows

    def __init__(self, plan: LayerPlan, workspace: CacheWorkspace, static: bool = False) -> None:
        """Args: workspace: of all layers that share the budget."""
        self.plan, self.config, self.layer = plan, plan.config, plan.layer
        self.workspace, self.static, self.started = workspace, static, False
        self.num_heads, self.leads = 0, plan.place == 0
        self.average = self.context = 0  # tokens per head of all layers, and the text that heads were dealt them for
        self.anew = False  # whether that is more than their slots were made for
        self.length = 0  # tokens so far, as the last step was told
        self.kv_sharers, self.left = plan.kv_sharers, 0
        self.records = False
        self.pending: PendingBlock | None = None
        self.state: LayerState | None = None
        self.rule: LayerConfig | None = None

    # Allocation.

    def allocate(self, num_heads: int, keys: Tensor, values: Tensor, context: int, keep: float | None = None) -> None:
        """Make the slots for `num_heads` query heads and the shapes, dtype and device of keys, values [B, Hkv, T, D].

        Args: context: length of the prompt to be read, tokens; keep: share of it that stays, where the budget left that
            open.
        Raises: FastKVError if the budget is too small.
        """
        layout, self.average = self.plan.of(keys, values, context, keep)
        self.context = context
        self.adopt(layout.allocate(keys, values), layout, num_heads)

    def deal(self, context: int, growth: float = 1.0) -> bool:
        """Let heads keep what they need of a text of so many tokens: the longer it is, the more they differ.

        Their slots are dealt at the next selection. Not for a static cache, whose addresses stay.

        Returns: whether they are; not where heads do not follow the text, nor unless it has grown by this factor.
        """
        if self.rule is None or not self.follows_text or context <= growth * max(self.context, self.average):
            return False
        self.context, plan, heads = context, self.plan, len(self.rule.layout.tokens)
        shares = self.config.budget.heads_of(plan.place, plan.num_layers, self.average, context)
        self.rule = self.rule.keeping(shares[plan.parallel.rank * heads : (plan.parallel.rank + 1) * heads])
        self.anew = True
        return True

    @property
    def follows_text(self) -> bool:
        """Whether heads keep what they need of a text of its length.

        Not where some tokens have no values, and not where the budget says for which text.
        """
        layout = None if self.rule is None else self.rule.layout
        return layout is not None and layout.shared and not layout.approx and self.config.budget.context is None

    def adopt(self, state: LayerState, layout: Layout, num_heads: int) -> None:
        """Go on from a state that was laid out for this layer: a new one or a saved one."""
        self.rule = LayerConfig.of(self.plan, layout, state.seen.device)
        self.state, self.num_heads = state, num_heads
        self.prepare()

    def loaded(self) -> None:
        """Heads are dealt slots anew if those of a state that was loaded are not what its layout gives them."""
        state, rule = self.held()
        self.anew = rule.layout.shared and not state.exact.dealt(rule.layout.capacities("exact"))

    def prepare(self) -> None:
        """Make what follows from where the state lies: scratch, tables and, if static, the promise that it stays."""
        state, rule = self.held()
        state.scratch = self.workspace.scratch_of(self.num_heads, state, rule.spec)
        self._recover(0)
        if self.static:
            recovery = [] if state.recovery is None else [state.recovery.weight]
            for tensor in (*dict(state.named_tensors()).values(), *state.scratch, *recovery):
                fixed(tensor)

    def _recover(self, length: int) -> None:
        """Tables of cos and sin for so many positions, for tokens without values."""
        state, rule = self.held()
        if state.approx is not None:
            assert rule.weight is not None
            table = self.workspace.table(self.config.rotations[self.layer], state.seen.device, length)
            state.recovery = Recovery(rule.weight, *table)

    def held(self) -> tuple[LayerState, LayerConfig]:
        """The state and the rule. Raises: FastKVError before there are any."""
        if self.state is None or self.rule is None:
            raise FastKVError(f"layer {self.layer} is empty; run it on a prompt first")
        return self.state, self.rule

    def configure(self, how: Attends) -> LayerConfig:
        """How the layer attends from now on."""
        state, rule = self.held()
        state.sink_logits = how.sink_logits
        spec = rule.spec
        if spec.scale != how.scale or spec.softcap != how.softcap or rule.output is not how.output:
            self.rule = rule = rule.attending(how)
        return rule

    # Tokens.

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock | None = None) -> Tensor:
        """Attention output for a block of a prompt, [B, Hq, T, Dv]; the state then includes it, unless other layers
        still have to attend to it or it may be taken back.

        Args:
            q [B, Hq, T, D], k, v [B, Hkv, T, D], post-RoPE; valid [B, T] bool, false for padding.
            stock: attention over the new tokens alone; used where they have no past: exact and fast.
        """
        self._expect_sharers()
        self.accept()
        state, rule = self.held()
        k, v = without_padding(k, valid), without_padding(v, valid)
        if rule.config.needs("attention"):  # NaN, too, times the weight 0 of padding is NaN
            q = without_padding(q, valid)
        first, self.started = not self.started, True
        if first and stock is not None:
            out, mass = stock(), None
        else:
            out, mass = attend_block(state, q, k, v, valid, rule, self.workspace.ahead)
        self.pending = PendingBlock(q, k, v, valid, mass, first)
        if not self.kv_sharers and not self.records:
            self.accept()
        return out

    def accept(self, drop: int = 0) -> None:
        """Absorb the pending block, without its last `drop` tokens, of which it has at least as many."""
        block = self.pending
        if block is None:
            return
        num = block.k.shape[2]
        self.pending = None
        if drop < num:
            kept = slice(0, num - drop)
            q, k, v = (rows[:, :, kept] for rows in (block.q, block.k, block.v))
            mass = None if block.mass is None else block.mass[:, :, kept]
            self.absorb(q, k, v, block.valid[:, kept], mass=mass)

    def absorb(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, reread: Reread | None = None, mass: Tensor | None = None
    ) -> None:
        """Make tokens of a prompt part of the state; shapes as in `read`, reread and mass as in `absorb_block`."""
        state, rule = self.held()
        with torch.autocast(k.device.type, enabled=False) if autocast_dtype(k) else nullcontext():
            absorb_block(state, q, k, v, valid, rule, reread, mass, self.anew)
        self.anew = False
        self.workspace.clock.move_to(0)
        if state.exact.starts is not None:
            self.prepare()  # the longest head may have changed

    def step(self, q: Tensor, k: Tensor, v: Tensor, length: int = 0) -> Tensor:
        """Attention output for one new token of every row, none of them padding, [B, Hq, 1, Dv].

        All lengths stay on the device, and the host counts nothing: a captured graph of the step can be replayed.

        Args: q [B, Hq, 1, D]; k, v [B, Hkv, 1, D]; length: true tokens so far, for tokens without values: their tables
            have to reach so far (0 where they do).
        """
        state, rule = self.held()
        self._expect_sharers()
        if state.approx is not None:
            self._recover(length)
        state.fill()
        q, k, v = (in_one_piece(part) for part in (q, k, v))
        out, _, _ = ops.decode_step(q.squeeze(2), k, v, state, rule.spec)
        self._stepped(length)
        return out.unsqueeze(2)

    def step_before_rope(
        self, q: Tensor, k: Tensor, v: Tensor, turns: tuple[Tensor, Tensor], length: int
    ) -> Tensor | None:
        """Attention output [B, 1, Hq * D] of `step` on a CPU, in one compiled call; None where it has to be done there,
        and nothing has happened.

        Args: q [B, 1, Hq * D], k, v [B, 1, Hkv * D], contiguous, fp32, before RoPE; turns: cos and sin [B or 1, 1, D].
        """
        state, rule = self.held()
        if self.kv_sharers:
            return None
        state.fill()
        out: Tensor | None = implementation("step_before_rope", "cpu", "cpu")(q, k, v, turns, state, rule.spec)
        if out is not None:
            self._stepped(length)
        return out

    def _stepped(self, length: int) -> None:
        """After a step's attention: one layer advances the clock for all, and every layer evicts when it says so."""
        clock, self.length = self.workspace.clock, length
        if self.leads:
            clock.now = clock.now.next
        if clock.now.evicts and not self.kv_sharers:
            self._evict()

    def _evict(self) -> None:
        """Shrink every head to its budget; heads are dealt slots anew for a text that has grown, or where
        a state that was loaded had others."""
        if (not self.static and self.deal(self.length, GROWTH)) or self.anew:
            evict(*self.held(), anew=True)
            self.anew = False
            self.prepare()
        else:
            evict(*self.held())

    # Other layers that attend to the same keys and values.

    def _expect_sharers(self) -> None:
        if self.left:
            raise FastKVError(
                f"{self.left} of {self.kv_sharers} layers that share the keys of layer {self.layer} did not attend to "
                "its last tokens; call reset() on this cache and use the model as it was patched"
            )
        self.left = self.kv_sharers

    def _looked(self) -> bool:
        """One more of them has attended; whether it was the last one."""
        if not self.left:
            raise FastKVError(
                f"layers that share the keys of layer {self.layer} attend more often than once; call "
                "fastkv.unpatch(model)"
            )
        self.left -= 1
        return not self.left

    def step_shared(self, q: Tensor, how: Attends) -> Tensor:
        """Attention of another layer's query [B, Hq, 1, D] over everything so far, after `step`: [B, Hq, 1, Dv]."""
        state, rule = self.held()
        out, _, _ = ops.decode_step(in_one_piece(q).squeeze(2), None, None, state, rule.attending(how).spec)
        if self._looked() and self.workspace.clock.now.evicts:
            self._evict()
        return out.unsqueeze(2)

    def attend_shared(self, q: Tensor, how: Attends, stock: Stock) -> Tensor:
        """Attention of another layer's last queries [B, Hq, <= T, D] over the block of `read` and what came before.

        Args: stock: attention over the block alone.
        """
        state, rule, block = *self.held(), self.pending
        last = self._looked()
        assert block is not None
        if block.first:
            out = stock()
        else:
            num = q.shape[2]  # transformers leaves out queries whose results nobody reads
            whole = pad(q, (0, 0, block.k.shape[2] - num, 0))
            other, ahead = rule.attending(how), self.workspace.ahead
            out, _ = attend_block(state, whole, block.k, block.v, block.valid, other, ahead)
            out = out[:, :, -num:]
        if last and not self.records:
            self.accept()
        return out

    # The batch, and the end.

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch axis to every tensor."""
        if self.state is not None:
            batch = len(self.state.seen)
            self.state.map_batch_(change)
            if len(self.state.seen) != batch:
                self.prepare()

    def reset(self) -> None:
        """Forget the sequences but keep the slots, unless their number depends on the prompt."""
        self.started, self.left = False, 0
        self.pending = None
        self.workspace.clock.move_to(0)
        if self.config.budget.follows_prompt or self.config.deferred or (self.follows_text and not self.static):
            self.state = self.rule = None
        self.anew = False
        if self.state is not None and self.rule is not None:
            self.rule.layout.clear(self.state)

    def copied(self, workspace: CacheWorkspace) -> LayerCache:
        """An independent copy, one of the layers of that workspace."""
        twin = copy.copy(self)
        twin.workspace, twin.pending = workspace, copy.deepcopy(self.pending)  # slots are dealt where a block lies
        if self.state is not None:
            # The cache's or the model's, not the layer's.
            kept = (self.state.scratch, self.state.recovery, self.state.sink_logits)
            twin.state = copy.deepcopy(self.state, {id(part): part for part in kept if part is not None})
            twin.prepare()
        return twin

    def nbytes(self) -> int:
        """Bytes of the state; the workspace counts its own."""
        return 0 if self.state is None else self.state.nbytes()


def evict(state: LayerState, rule: LayerConfig, anew: bool = False) -> None:
    """Shrink every head to its budget; heads that hold fewer tokens lose none.

    Args: anew: whether heads are dealt other slots than they have.

    All slots are looked at, used or not (the host counts on no slot being free), so that shapes never differ. Where
    the batch lives in chosen rows, what the policy reads of them is copied; everything, and written back, unless the
    backend evicts there.
    """
    exact, spare, copied = state.exact, rule.layout.spare, state
    if state.rows is not None:
        if not _evicts_in_place(state, rule):
            with state.gathered() as own:
                evict(own, rule)
            return
        unread = [] if rule.config.policy.moments.order is not None else ["moments"]
        unread += [] if state.parts is None else [state.parts.kind]
        but = ("seen", "exact.lengths", "exact.attention", *unread)
        copied = ops.taken(state, rule.spec, but, rule.layout.fixed)
    candidates, guard = signals.of_slots(state, copied, rule)
    candidates, scores = signals.score(candidates, rule)
    if anew or state.approx is not None:
        kept = selection.keep_best(candidates, scores, guard, rule)
        compaction.store(state, candidates, kept, 0, rule, full=True, anew=anew)
        return
    chosen = selection.keep_slots(candidates, scores, guard, copied, rule)
    compaction.remember(state, candidates, chosen.kept, spare, rule)
    known = None if exact.memory is None else candidates.memory
    ops.compact(candidates.valid, chosen, None, known, state, rule.spec)
    if state.rows is None:  # else other rows have more
        exact.filled = exact.limit - spare


def _evicts_in_place(state: LayerState, rule: LayerConfig) -> bool:
    """Whether nothing but the backend's own operations, which all follow rows, changes the state in an eviction."""
    where = rule.spec.backend, state.seen.device.type
    asked = "slot_signals", "remember", "compact"
    return state.approx is None and all(follows_rows(name, *where) for name in asked)


class HeldPrompt:
    """A layer's cache while its first prompt is read: `read`, perhaps `read_again`, then `commit`.

    Attributes: reread: what a second reading has found so far; None unless it has begun.
    """

    differentiates = False

    def __init__(self, cache: LayerCache) -> None:
        self.cache = cache
        self.held: HeldTokens | None = None
        self.attends = Attends(scale=1.0)
        self.reread: Reread | None = None
        self.fed: tuple[Tensor, Tensor, Tensor] | None = None  # the last tokens of a second reading

    def configure(self, how: Attends) -> None:
        """As `LayerCache.configure`."""
        self.attends = how

    def read(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, stock: Stock) -> Tensor:
        """Hold the prompt, or attend to it where it is read again; arguments as in `LayerCache.read`."""
        if self.reread is not None:
            return self.read_again(q, k, v, valid)
        if self.cache.config.needs("attention"):
            q = without_padding(q, valid)
        self.held = (q, without_padding(k, valid), without_padding(v, valid), valid)
        return stock()

    def attend_shared(self, q: Tensor, how: Attends, stock: Stock) -> Tensor:
        """As `LayerCache.attend_shared`; a second reading watches the queries of this layer only."""
        if self.reread is None:
            return stock()
        assert self.fed is not None
        k, v, valid = self.fed
        num = q.shape[2]
        whole = pad(q, (0, 0, k.shape[2] - num, 0))
        return self._attend(whole, k, v, valid, how)[0][:, :, -num:]

    def expect_again(self) -> None:
        """From now on the prompt is read a second time. Padding goes behind its tokens, which are then slots in use."""
        assert self.held is not None
        q, k, v, valid = self.held
        order = (~valid).to(torch.uint8).argsort(dim=-1, stable=True)
        q, k, v = (rows_at(rows, order[:, None].expand(rows.shape[:3])) for rows in (q, k, v))
        self.held = (q, k, v, valid.gather(1, order))
        self.reread = Reread(k.new_zeros(k.shape[:3], dtype=torch.float32), q[:, :, :0], valid[:, :0])

    def read_again(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor) -> Tensor:
        """Attention of re-fed tokens over the held prompt and, causally, themselves. Nothing is stored."""
        assert self.held is not None and self.reread is not None
        q, k, v = (without_padding(rows, valid) for rows in (q, k, v))
        self.fed = (k, v, valid)
        how = self.attends
        out, lse = self._attend(q, k, v, valid, how)
        everything = lse.masked_fill(~valid[:, None], float("inf"))
        most = ops.most_attended(q, self.held[1], everything, how.scale, how.softcap, backend=self.cache.config.backend)
        self.reread.received = self.reread.received.maximum(torch.where(self.held[3][:, None], most, 0))
        if self.cache.config.samples_queries:
            self._sample(self.reread, q, valid)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, how: Attends) -> tuple[Tensor, Tensor]:
        """Attention [B, Hq, T, Dv] of re-fed tokens and the log of its mass [B, Hq, T]; see `ops.prefill_attention`."""
        assert self.held is not None
        _, keys, values, real = self.held
        batch, heads, _, dim = keys.shape
        seen = real.sum(-1)
        state = LayerState(
            Slots(keys, values, seen[:, None].repeat(1, heads).to(torch.int32)),
            seen,
            Moments.empty(batch, heads, dim, values.shape[-1], keys.device, order=None),
            sink_logits=how.sink_logits,
        )
        spec = Spec(how.scale, how.softcap, backend=self.cache.config.backend)
        out, lse, _ = ops.prefill_attention(q, k, v, valid, state, spec)
        return out, lse

    def _sample(self, reread: Reread, q: Tensor, valid: Tensor) -> None:
        """Keep some of the queries, evenly spaced in each row: its own, as padding is on the right."""
        second = self.cache.config.policy.second_reading
        assert second is not None
        fed, num = valid.sum(-1, keepdim=True), max(second.chunk // SAMPLED, FEWEST)
        index = torch.arange(num, device=q.device) * fed // num
        some = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        reread.queries = torch.cat([reread.queries, some], 2)
        reread.asked = torch.cat([reread.asked, (fed > 0).expand_as(index)], 1)

    def commit(self, keep: float | None) -> None:
        """Compress the held prompt, to the share `keep` of its tokens if the budget left that open."""
        assert self.held is not None
        q, k, v, valid = self.held
        length = self.cache.config.budget.length_of(k.shape[2], valid.sum(-1))
        self.cache.allocate(q.shape[1], k, v, length, keep)
        self.cache.configure(self.attends)
        self.cache.absorb(q, k, v, valid, self.reread)
        self.cache.started = True
