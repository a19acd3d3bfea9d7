"""Pages that hold beginnings of prompts: what is kept, found, copied and given away, without vLLM."""

import random
from collections import deque
from dataclasses import dataclass

import pytest

from fastkv.integrations.vllm.prefixes import Prefixes, is_kept


@dataclass(eq=False)
class Page:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """Pages that are free for all, as vLLM's `BlockPool` hands them out. Page 0 is nobody's."""

    def __init__(self, number):
        self.blocks = [Page(i) for i in range(number)]
        self.free, self.watched = deque(self.blocks[1:]), {}

    def get_num_free_blocks(self):
        return len(self.free)

    def get_new_blocks(self, num_blocks):
        taken = [self.free.popleft() for _ in range(num_blocks)]
        for page in taken:
            page.ref_cnt += 1
            self.watched.pop(page.block_id, lambda page: None)(page)
        return taken

    def touch(self, blocks):
        for page in blocks:
            if not page.ref_cnt:
                self.free.remove(page)
            page.ref_cnt += 1

    def _let_go(self, pages):
        pages = list(pages)
        for page in pages:
            page.ref_cnt -= 1
            assert page.ref_cnt >= 0
        return [page for page in dict.fromkeys(pages) if not page.ref_cnt]

    def free_blocks(self, ordered_blocks):
        self.free.extendleft(self._let_go(ordered_blocks))

    def unpin_blocks(self, blocks, on_reuse):
        blocks = list(blocks)
        self.watched.update((page.block_id, on_reuse) for page in blocks)
        self.free.extend(self._let_go(blocks))


def keys_of(tokens):
    """One for each token and all before it: blocks of one token."""
    return [tuple(tokens[: i + 1]) for i in range(len(tokens))]


@dataclass
class Request:
    """A prompt that is read in steps of a few tokens and then answered: its page says what was computed in it."""

    tokens: tuple
    answer: int
    pages: list | None = None
    done: int = 0


def turn(prefixes, pool, contents, begin=(), go_on=(), steps=1, groups=1):
    """A step: these requests begin, if there are pages, those go on. A page holds its group, and all tokens so far."""
    prefixes.begin()
    begun = {}
    for name, request in begin:
        request.done = prefixes.find(name, keys_of(request.tokens)[:-1])
        if pool.get_num_free_blocks() >= groups:
            request.pages = pool.get_new_blocks(groups)
            begun[name] = request
    running = [*go_on, *begun.values()]
    copies = prefixes.copies({name: numbers(request) for name, request in begun.items()})
    sources, targets = {source for source, _ in copies}, [target for _, target in copies]
    assert len(set(targets)) == len(targets) and not sources & set(targets)
    assert not set(targets) & {number for request in go_on for number in numbers(request)}
    for source, target in copies:
        contents[target] = contents[source]
    for request in running:
        whole = request.tokens + ("answer",) * request.answer
        for group, number in enumerate(numbers(request)):
            assert not request.done or contents[number] == (group, whole[: request.done])
        reading = request.done < len(request.tokens)
        request.done = min(request.done + steps, len(request.tokens)) if reading else len(whole)
        contents.update((number, (group, whole[: request.done])) for group, number in enumerate(numbers(request)))
        if request.done <= len(request.tokens):
            prefixes.reach(whole[: request.done], request.pages)
    return begun


def numbers(request):
    return [page.block_id for page in request.pages]


def traffic(pool, number, most, seed, groups=1, turns=300):
    """Requests that begin alike come, go on, end, are aborted or preempted; some wait. How often much was found."""
    draw, prefixes, contents, found = random.Random(seed), Prefixes(pool, most), {}, 0
    running, waiting = {}, {}
    for at in range(turns):
        for name in [name for name in running if draw.random() < 0.1 or running[name].done > len(running[name].tokens)]:
            request = running.pop(name)
            pool.free_blocks(request.pages)
            if draw.random() < 0.3:
                waiting[name] = Request(request.tokens, request.answer)
        if draw.random() < 0.6:
            waiting[f"{at}"] = Request(tuple(draw.choices("ab", k=draw.randint(1, 6))), 2)
        go_on = [request for request in running.values() if draw.random() < 0.8]
        begun = turn(prefixes, pool, contents, list(waiting.items()), go_on, draw.randint(1, 3), groups)
        for name, request in begun.items():
            running[name] = waiting.pop(name)
            found += request.done > 3
        if draw.random() < 0.02:
            prefixes.clear()
        assert len(prefixes.kept) <= most
        held = {number for request in running.values() for number in numbers(request)}
        assert len(held) == groups * len(running)
        for key, kept in prefixes.kept.items():
            assert [contents[page] for page in kept] == [(group, key) for group in range(groups)]
            assert not held & set(kept) and not any(pool.blocks[page].ref_cnt for page in kept)
    prefixes.clear()
    for request in running.values():
        pool.free_blocks(request.pages)
    assert pool.get_num_free_blocks() == number - 1
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number, most", [(2, 1), (5, 1), (8, 4), (40, 12), (40, 39)])
def test_pages_hold_what_their_keys_say(number, most, seed):
    """And all pages are free in the end."""
    for groups in (1, 2):
        assert traffic(Pool(number), number, most // groups or 1, seed, groups) or number < 40


def read(prefixes, pool, contents, tokens):
    """A request of one step from its beginning to its end; the tokens that it found."""
    request = Request(tuple(tokens), 0)
    turn(prefixes, pool, contents, [("", request)], steps=0)
    found = request.done
    turn(prefixes, pool, contents, [], [request], steps=len(tokens))
    turn(prefixes, pool, contents)
    pool.free_blocks(request.pages)
    return found


def test_the_least_recently_used_goes_first():
    pool, contents = Pool(9), {}
    prefixes = Prefixes(pool, 3)
    for text in ("a1", "b1", "c1"):
        assert read(prefixes, pool, contents, text) == 0
    assert sorted(map("".join, prefixes.kept)) == ["a1", "b1", "c1"]
    assert read(prefixes, pool, contents, "a1x") == 2  # a1 is used, a1x takes the place of b1
    assert list(map("".join, prefixes.kept)) == ["c1", "a1", "a1x"]
    assert read(prefixes, pool, contents, "b1y") == 0


def test_a_page_that_is_read_from_is_not_given_away_in_that_step():
    pool, contents = Pool(4), {}
    prefixes = Prefixes(pool, 3)
    read(prefixes, pool, contents, "a1")
    prefixes.begin()
    assert prefixes.find("x", keys_of("a1x")) == 2
    (source,) = prefixes.kept["a", "1"]
    own, other = pool.get_new_blocks(2)
    assert source not in (own.block_id, other.block_id) and not pool.get_num_free_blocks()
    assert prefixes.copies({"x": [own.block_id]}) == [(source, own.block_id)]
    assert pool.get_new_blocks(1)[0].block_id == source and not prefixes.kept


def test_what_a_step_reached_is_found_in_the_next_before_it_is_kept():
    pool, contents = Pool(4), {}
    prefixes, first = Prefixes(pool, 2), Request(tuple("a1"), 1)
    turn(prefixes, pool, contents, [("first", first)], steps=2)
    assert not prefixes.kept
    prefixes.begin()
    assert prefixes.find("second", keys_of("a1")) == 2
    (own,) = pool.get_new_blocks(1)
    copies = prefixes.copies({"second": [own.block_id]})
    assert copies == [(numbers(first)[0], target) for target in (own.block_id, *prefixes.kept["a", "1"])]


def test_a_shorter_beginning_where_the_longest_will_not_do():
    pool, contents = Pool(9), {}
    prefixes = Prefixes(pool, 8)
    for text in ("a", "ab", "abc"):
        read(prefixes, pool, contents, text)
    prefixes.begin()
    assert prefixes.find("x", keys_of("abcd"), lambda blocks: blocks != 3) == 2
    assert prefixes.find("y", keys_of("abcd"), lambda blocks: False) == 0 and list(prefixes.found) == ["x"]


def test_what_is_worth_a_page():
    """The last block of a prompt; of the others, the first seven and then four for every doubling."""
    assert [block for block in range(70) if is_kept(block, 69)] == [
        1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 69
    ]  # fmt: skip
    assert [block for block in range(4) if is_kept(block, 2)] == [1, 2]
    assert not any(is_kept(block, 0) for block in range(1, 4))
