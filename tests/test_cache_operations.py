"""Random sequences of everything one can do to a cache, against a model of it in plain Python lists.

The model holds, for every row and head, the tokens that are kept and those that are gone. The policies are those whose
scores it knows: the position (streaming, duoattention) or minus the length of the key (knorm; keys here tie often).
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import fastkv
from fastkv import Budget, FastKVCache
from fastkv.integrations.transformers.attention import fastkv_attention
from fastkv.policies import Policy

from .conftest import examples
from .models import build, policy, prompt
from .test_properties import attention_of, best, moments_of
from .test_saved import refused, rewritten, saved_bytes

HEADS, GROUPS, KEY_DIM, SCALE = 2, 2, 4, 0.3
SINKS, RECENT = 1, 2


@dataclass(frozen=True)
class Case:
    """How a model is patched."""

    policy: str
    tokens: int = 5
    every: int = 3
    heads: str = "uniform"
    correction: str = "none"

    @property
    def order(self):
        return {"none": None, "mean": 0, "moments": 1}[self.correction]

    def __str__(self):
        return f"{self.policy}-{self.heads}-{self.correction}-{self.tokens}+{self.every}"


CASES = [
    Case("streaming"), Case("streaming", tokens=3, every=1, correction="moments"),
    Case("knorm", every=4, correction="moments"), Case("knorm", tokens=8, correction="mean"),
    Case("knorm", heads="adaptive", correction="moments"), Case("duoattention", every=2, correction="moments"),
    Case("remembering"),
]  # fmt: skip


@dataclass(frozen=True)
class Remembering(Policy):
    """Keeps the latest tokens by what it stored with them: their position, plus one."""

    name = "remembering"
    needs = frozenset({"memory"})

    def remember(self, signals):
        return torch.where(signals.memory > 0, signals.memory, signals.positions + 1.0)

    def score(self, signals):
        return signals.memory


@functools.cache
def patched(case):
    """A patched model of one layer; only its cache is used."""
    with tempfile.TemporaryDirectory() as folder:
        remembers = case.policy == "remembering"
        chosen = Remembering() if remembers else policy(case.policy, Path(folder), pattern="0.9\t0.1\n")
        budget = Budget(tokens=case.tokens, sinks=SINKS, recent=RECENT, heads=case.heads)
        return fastkv.patch(one_layer(), chosen, budget, evict_every=case.every, correction=case.correction)


def one_layer():
    return build(num_hidden_layers=1, head_dim=KEY_DIM, hidden_size=16, intermediate_size=16)


@dataclass
class Row:
    """One sequence: per head, the kept tokens {position: (key, value)} and those that are gone."""

    seen: int = 0
    kept: list = field(default_factory=lambda: [{} for _ in range(HEADS)])
    gone: list = field(default_factory=lambda: [[] for _ in range(HEADS)])

    def copy(self):
        return Row(self.seen, [dict(head) for head in self.kept], [list(head) for head in self.gone])

    def candidates(self, case, head):
        """(protected, score, place, (head, position)) of the kept tokens of one head."""
        for position, (key, _) in self.kept[head].items():
            score = -float(key.norm()) if case.policy == "knorm" else float(position)
            protected = position < SINKS or position >= self.seen - RECENT
            yield protected, score, (position, head), (head, position)

    def shrink(self, stay):
        """Keep the named (head, position)."""
        for head in range(HEADS):
            for position in [position for position in self.kept[head] if (head, position) not in stay]:
                self.gone[head].append(self.kept[head].pop(position))


@dataclass
class Expected:
    """What a cache should hold."""

    case: Case
    rows: list = field(default_factory=list)
    length: int = 0  # padding included
    steps: int = 0
    recording: bool = False

    def copy(self):
        return Expected(self.case, [row.copy() for row in self.rows], self.length, self.steps, self.recording)

    def budgets(self, rooms):
        """Tokens that each head of each row keeps; where heads compete, what their slots were traded for."""
        tokens = self.case.tokens
        if self.case.heads == "adaptive":
            return [[room - self.case.every for room in row] for row in rooms]
        own = [2 * tokens - SINKS - RECENT, SINKS + RECENT] if self.case.policy == "duoattention" else [tokens] * HEADS
        return [own] * len(self.rows)

    def add(self, tokens):
        """tokens[row] = [(keys [HEADS][D], values [HEADS][D])], without padding."""
        for row, new in zip(self.rows, tokens):
            for keys, values in new:
                for head in range(HEADS):
                    row.kept[head][row.seen] = keys[head], values[head]
                row.seen += 1

    def compress(self, budgets):
        """Every head keeps its best."""
        for row, own in zip(self.rows, budgets):
            row.shrink(set().union(*(best(list(row.candidates(self.case, h)), own[h]) for h in range(HEADS))))
        self.steps = 0

    def compete(self):
        """Each head its floor, then all heads together."""
        tokens = self.case.tokens
        floor = max(-(-tokens // 5), SINKS + RECENT)
        for row in self.rows:
            own = [list(row.candidates(self.case, head)) for head in range(HEADS)]
            safe = set().union(*(best(one, floor) for one in own))
            row.shrink(best([(one[3] in safe, *one[1:]) for head in own for one in head], HEADS * tokens))
        self.steps = 0


class Operations(RuleBasedStateMachine):
    """The rules. Up to two caches live at once, so that a clone that shares memory with its original shows."""

    def __init__(self, case):
        super().__init__()
        self.case, self.model = case, patched(case)
        self.pairs = [(FastKVCache(self.model), Expected(case))]
        self.folder = tempfile.TemporaryDirectory()
        self.generator = torch.Generator().manual_seed(0)
        self.named = 0

    def teardown(self):
        self.folder.cleanup()

    # What a layer is given.

    def forward(self, index, real):
        """One forward of T tokens for each row, real[b][t] or padding; the attention output is checked, too."""
        cache, expected = self.pairs[index]
        batch, num = len(real), len(real[0])
        q = torch.randn(batch, HEADS * GROUPS, num, KEY_DIM, generator=self.generator)
        # Keys along an axis, of a whole length: norms are exact and often equal. Values are all different.
        axis = torch.randint(0, KEY_DIM, (batch, HEADS, num), generator=self.generator)
        size = torch.randint(1, 4, (batch, HEADS, num, 1), generator=self.generator)
        k = torch.nn.functional.one_hot(axis, KEY_DIM).float() * size
        v = torch.randn(batch, HEADS, num, KEY_DIM, generator=self.generator)
        v[..., 0] = torch.arange(self.named, self.named + v[..., 0].numel()).view(batch, HEADS, num)
        self.named += v[..., 0].numel()
        valid = torch.tensor(real)
        padding = ~valid[:, None, :, None]
        given_k, given_v = k.masked_fill(padding, float("nan")), v.masked_fill(padding, float("nan"))
        first = expected.length == 0
        if first:
            expected.rows = [Row() for _ in real]
        cache.layers[0].named = True  # as the module that asks for it does
        cache.update(given_k, given_v, 0)
        mask = torch.ones(num, num, dtype=torch.bool).tril() & valid[:, None, None]
        module, layer = self.model.model.layers[0].self_attn, cache.layers[0]
        out, _ = fastkv_attention(module, q, given_k, given_v, mask, scaling=SCALE, fastkv_layer=layer)
        expected.length += num
        if not first:
            self.check_attention(expected, q, k, v, real, out.transpose(1, 2))
        return [[(k[b, :, t], v[b, :, t]) for t in range(num) if real[b][t]] for b in range(batch)]

    def check_attention(self, expected, q, k, v, real, out):
        for b, row in enumerate(expected.rows):
            for h in range(HEADS):
                head = h * GROUPS + expected.length % GROUPS  # each query head in its turn
                held = list(row.kept[h].values())
                t = len(real[b]) - 1  # the last query sees all
                past = held + [(k[b, h, i], v[b, h, i]) for i in range(t + 1) if real[b][i]]
                exact = attention_of(q[b, head, t], past, row.gone[h], SCALE, None, self.case.order, KEY_DIM)[0]
                torch.testing.assert_close(out[b, head, t].double(), exact, atol=1e-4, rtol=1e-4)

    def absorbed(self, index, tokens):
        """A block has become part of the cache."""
        cache, expected = self.pairs[index]
        if not expected.rows:
            return
        expected.add(tokens)
        if self.case.heads == "adaptive":
            expected.compete()
        else:
            expected.compress(expected.budgets(None))

    def rooms(self, index):
        starts = self.pairs[index][0].layers[0].state.exact.starts
        return None if starts is None else starts.diff(dim=-1).tolist()

    def filled(self):
        return [index for index, (_, expected) in enumerate(self.pairs) if expected.length]

    # The rules.

    @rule(data=st.data(), num=st.integers(1, 7))
    def append(self, data, num):
        index = data.draw(st.sampled_from(range(len(self.pairs))))
        cache, expected = self.pairs[index]
        batch = len(expected.rows) if expected.length else data.draw(st.integers(1, 3))
        if expected.length and not expected.recording:
            num += 1  # a single token is decoded
        pads = data.draw(st.lists(st.integers(0, num), min_size=batch, max_size=batch))
        tokens = self.forward(index, [[t >= pad for t in range(num)] for pad in pads])
        if expected.recording:
            cache.crop(0)
        self.absorbed(index, tokens)

    @precondition(lambda self: self.filled())
    @rule(data=st.data(), num=st.integers(1, 6))
    def decode(self, data, num):
        self.decode_tokens(data.draw(st.sampled_from(self.filled())), num)

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def decode_until_eviction(self, data):
        index = data.draw(st.sampled_from(self.filled()))
        self.decode_tokens(index, self.case.every - self.pairs[index][1].steps)

    def decode_tokens(self, index, num):
        cache, expected = self.pairs[index]
        for _ in range(num):
            tokens = self.forward(index, [[True]] * len(expected.rows))
            if expected.recording:
                cache.crop(0)
                self.absorbed(index, tokens)
                continue
            expected.add(tokens)
            expected.steps += 1
            if expected.steps == self.case.every:
                expected.compress(expected.budgets(self.rooms(index)))
            self.compare(index)

    @precondition(lambda self: self.filled())
    @rule(data=st.data(), num=st.integers(1, 5))
    def roll_back(self, data, num):
        index = data.draw(st.sampled_from(self.filled()))
        cache, expected = self.pairs[index]
        cache.activate_past_recording()
        expected.recording = True
        drop = data.draw(st.integers(0, num))
        tokens = self.forward(index, [[True] * num] * len(expected.rows))
        cache.crop(-drop)
        expected.length -= drop
        if drop < num:
            self.absorbed(index, [row[: num - drop] for row in tokens])

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def reorder(self, data):
        index = data.draw(st.sampled_from(self.filled()))
        cache, expected = self.pairs[index]
        batch = len(expected.rows)
        order = data.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        cache.reorder_cache(torch.tensor(order))
        expected.rows = [expected.rows[row].copy() for row in order]

    @precondition(lambda self: any(len(self.pairs[index][1].rows) < 3 for index in self.filled()))
    @rule(data=st.data(), fork=st.booleans())
    def repeat(self, data, fork):
        index = data.draw(st.sampled_from([i for i in self.filled() if len(self.pairs[i][1].rows) < 3]))
        cache, expected = self.pairs[index]
        if fork:
            cache, expected = cache.fork(2), expected.copy()
            self.pairs[index] = cache, expected
        else:
            cache.batch_repeat_interleave(2)
        expected.rows = [row.copy() for row in expected.rows for _ in range(2)]

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def choose(self, data):
        index = data.draw(st.sampled_from(self.filled()))
        cache, expected = self.pairs[index]
        chosen = data.draw(st.lists(st.integers(0, len(expected.rows) - 1), min_size=1, max_size=4))
        cache.batch_select_indices(torch.tensor(chosen))
        expected.rows = [expected.rows[row].copy() for row in chosen]

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def reset(self, data):
        index = data.draw(st.sampled_from(self.filled()))
        cache, expected = self.pairs[index]
        cache.reset()
        self.pairs[index] = cache, Expected(self.case, recording=expected.recording)

    @precondition(lambda self: self.filled())
    @rule(data=st.data())
    def save_and_load(self, data):
        index = data.draw(st.sampled_from(self.filled()))
        cache, expected = self.pairs[index]
        path = Path(self.folder.name) / "cache"
        cache.save(path)
        cache.reset()  # what was read must not hang on it
        self.pairs[index] = FastKVCache.load(path, self.model), expected

    @precondition(lambda self: len(self.pairs) < 2)
    @rule()
    def clone(self):
        cache, expected = self.pairs[0]
        self.pairs.append((cache.clone(), expected.copy()))

    @precondition(lambda self: len(self.pairs) == 2)
    @rule(which=st.booleans())
    def forget(self, which):
        del self.pairs[which]

    # What always holds.

    @invariant()
    def all_caches_are_as_expected(self):
        for index in range(len(self.pairs)):
            self.compare(index)

    def compare(self, index):
        cache, expected = self.pairs[index]
        assert cache.get_seq_length() == expected.length
        if not expected.length:
            return
        state, tokens, every = cache.layers[0].state, self.case.tokens, self.case.every
        exact, moments = state.exact, cache.moments(0)
        batch, lengths = len(expected.rows), exact.lengths.tolist()
        assert state.seen.tolist() == [row.seen for row in expected.rows] and state.seen.dtype == torch.int64
        assert torch.equal(cache.stored(0) + moments.count, state.seen[:, None].expand(batch, HEADS))
        assert cache.slots(0) == tokens + every
        assert int(exact.lengths.max()) <= exact.filled <= exact.limit
        if self.case.heads == "adaptive":  # what the heads of a row traded is the budget, up to rounding
            for row in self.rooms(index):
                assert HEADS * (tokens + every) - HEADS < sum(row) <= HEADS * (tokens + every)
        room = 4 * (2 * KEY_DIM + 1 + (exact.memory is not None))  # a key, a value, a position and what is remembered
        order = self.case.order
        summary = 8 + (0 if order is None else 4 * 2 * KEY_DIM + (4 * KEY_DIM**2 if order else 0))
        bound = HEADS * ((tokens + every) * room + summary + 4) + 8 + (0 if exact.starts is None else 4 * (HEADS + 1))
        assert cache.nbytes() == batch * bound
        for b, row in enumerate(expected.rows):
            for h in range(HEADS):
                first = 0 if exact.starts is None else int(exact.starts[b, h])
                used = slice(first, first + lengths[b][h])
                place = (b, h, used) if exact.starts is None else (b, used)
                keys, values, positions = (part[place] for part in exact.moving().values())
                held = positions.tolist()
                assert sorted(held) == sorted(row.kept[h])
                if exact.memory is not None:  # nothing yet of the tokens that were decoded since the last eviction
                    known = [p + 1 if p < row.seen - expected.steps else 0 for p in held]
                    assert exact.memory[place].tolist() == known
                for part, stored in enumerate((keys, values)):
                    own = [row.kept[h][p][part] for p in held]
                    assert torch.equal(stored, torch.stack([stored[:0].sum(0), *own])[1:])
                assert int(moments.count[b, h]) == len(row.gone[h])
                if order is None or not row.gone[h]:
                    continue
                _, key_mean, value_mean, cross = moments_of(row.gone[h])
                torch.testing.assert_close(moments.key_mean[b, h].double(), key_mean, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(moments.value_mean[b, h].double(), value_mean, atol=1e-4, rtol=1e-5)
                if order:
                    size = max(1.0, float(value_mean.abs().max())) * len(row.gone[h])
                    torch.testing.assert_close(moments.cross[b, h].double(), cross, atol=1e-5 * size, rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_sequence_of_operations(case):
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    every = settings(max_examples=examples(170), stateful_step_count=10, suppress_health_check=slow)
    run_state_machine_as_test(lambda: Operations(case), settings=every)


@dataclass(frozen=True)
class Spy(Policy):
    """Keeps the latest tokens and remembers what it was told of each: {position: attention} per head."""

    name = "spy"
    needs = frozenset({"attention"})

    told: list = field(default_factory=list, compare=False)

    def score(self, signals):
        if signals.decoding:
            pairs = zip(signals.positions[0].tolist(), signals.attention[0].tolist(), signals.valid[0].tolist())
            self.told.append([{p: a for p, a, real in zip(*head) if real} for head in pairs])
        return signals.positions.float()


@pytest.mark.parametrize("length", [2, 9], ids=["room", "full"])
def test_attention_while_decoding_is_a_mean_over_the_queries_that_saw_the_token(length):
    every, tokens, spy = 3, 5, Spy()
    model = fastkv.patch(one_layer(), spy, Budget(tokens=tokens, sinks=0, recent=0), evict_every=every)
    cache, module = FastKVCache(model), model.model.layers[0].self_attn
    keys, values = torch.randn(2, 1, HEADS, length + 3 * every, KEY_DIM)
    queries = torch.randn(1, HEADS * GROUPS, length + 3 * every, KEY_DIM)
    steps = [slice(0, length)] + [slice(at, at + 1) for at in range(length, length + 3 * every)]
    kept, received = list(range(length))[-tokens:], []
    for step in steps:
        q, k, v = queries[:, :, step], keys[:, :, step], values[:, :, step]
        cache.layers[0].named = True
        cache.update(k, v, 0)
        mask = torch.ones(1, 1, k.shape[2], k.shape[2], dtype=torch.bool).tril()
        fastkv_attention(module, q, k, v, mask, scaling=SCALE, fastkv_layer=cache.layers[0])
        if step.start == 0:
            continue
        kept.append(step.start)
        logits = SCALE * torch.einsum("hgd,hnd->hgn", q[0, :, 0].view(HEADS, GROUPS, -1), keys[0][:, kept]).double()
        received.append([dict(zip(kept, head.tolist())) for head in logits.softmax(-1).mean(1)])
        if len(received) < every:
            continue
        told = spy.told.pop() if spy.told else None
        assert told is not None or len(kept) <= tokens, "nothing needs to be evicted where there is room"
        for head in range(HEADS if told is not None else 0):
            seen_by = {p: [row[head][p] for row in received if p in row[head]] for p in kept}
            assert told[head] == pytest.approx({p: sum(given) / len(given) for p, given in seen_by.items()}, rel=1e-4)
        kept, received = kept[-tokens:], []
    assert not spy.told and cache.moments(0).count.tolist() == [[length + 3 * every - tokens] * HEADS]


def test_windows_in_later_blocks_do_not_see_the_padding_of_the_first_turn():
    """Layers that stay transformers' are told by the mask of each block, which also covers what came before it."""
    model = build("gemma3")
    (ids, _), later = prompt(1, 12), prompt(1, 17, seed=3)[0]
    mask = torch.ones(1, 29, dtype=torch.long)
    mask[0, :6] = 0
    expected = model(torch.cat([ids, later], 1), attention_mask=mask).logits[:, 12:]
    fastkv.patch(model, "streaming", Budget(tokens=64, sinks=2, recent=4), prefill_block=7)
    cache = model(ids, attention_mask=mask[:, :12]).past_key_values
    got = model(later, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_a_file_with_more_tokens_than_a_head_has_room_for_is_refused(tmp_path):
    def forge(held):
        lengths, rooms = held["1.exact.lengths"], held["1.exact.starts"].diff(dim=-1)
        row, head = divmod(int(rooms.argmin()), rooms.shape[1])
        more = int(rooms[row, head] + 1 - lengths[row, head])
        lengths[row, head] += more
        held["1.moments.count"][row, head] -= more  # every token is still either stored or evicted

    def claim(header):
        header["layers"][1]["exact.filled"] = header["layers"][1]["exact.limit"]

    model, content = saved_bytes()
    refused(rewritten(tmp_path / "forged", content, claim, forge), model, "is damaged")


SAID = {"tokens 64": 64, "keep 0.5": Budget(keep=0.5), "compress 4.0": "4x", "bytes 300000": Budget(bytes=300_000)}


@pytest.mark.parametrize("said, budget", SAID.items())
def test_a_cache_says_what_it_is_in_any_unit(budget, said):
    model = fastkv.patch(build(), "keydiff", budget)
    cache = FastKVCache(model)
    assert f"budget={said}" in repr(cache) and "empty" in repr(cache)
    model(prompt(1, 200, (0,))[0], past_key_values=cache)
    assert "200 tokens seen" in repr(cache)
