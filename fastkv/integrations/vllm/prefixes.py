"""Prefixes: pages that hold what beginnings of prompts left, for later prompts to go on from. vLLM is not needed here.

A page is all that a sequence left in a layer, evicted tokens included, so one page stands for a prompt of any length.
When a step ends with a block of a prompt that is worth it, the page is copied into a free one before the next step
changes it. A prompt that begins the same way gets a copy of the longest such page and reads only the rest.

For vLLM a kept page is free, behind all other free ones: requests that need one get the least recently used. While it
is a source or a target of a copy it is held, so that nobody else gets it in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


def is_kept(block: int, last: int) -> bool:
    """Whether what the first `block` blocks of a prompt left is worth a page, of `last` whole blocks that it has.

    The last one is: the next turn of a conversation goes on from there. Of the others, for texts that only begin alike,
    the first seven, and then four for every doubling: less than a fifth of what they share, or a block, is read again.
    """
    return block == last or (0 < block < last and block % (1 << max(block.bit_length() - 3, 0)) == 0)


class Prefixes:
    """Which pages hold the beginning of which prompts: one page, or one of each group of layers with a block table.

    Keys are hashes of all tokens up to the end of a block, and of whatever else must be equal. A turn is a step of the
    engine: `begin`, then `find` for requests that are to begin, `copies`, and `reach` where blocks of prompts end.

    Attributes:
        kept: numbers of the pages by key, least recently used first.  key_of: the key by number.
        found: held pages from which requests of this turn would begin, by name of the request.
    """

    def __init__(self, pool: Any, most: int) -> None:
        """Args: pool: vLLM's `BlockPool`, whose blocks are pages.  most: keys to keep at once."""
        self.pool, self.most = pool, most
        self.kept: dict[Hashable, tuple[int, ...]] = {}
        self.key_of: dict[int, Hashable] = {}
        self.found: dict[str, list[Any]] = {}
        self._reached: dict[Hashable, list[Any]] = {}  # in this turn: pages of requests, held
        self._due: dict[Hashable, list[Any]] = {}  # in the last one, so that they are now what their keys say

    def begin(self) -> None:
        """A turn begins: what was reached in the last one has been computed."""
        self._due, self._reached = self._reached, {}

    def find(self, name: str, keys: Sequence[Hashable], accept: Callable[[int], bool] = lambda blocks: True) -> int:
        """How many blocks of a prompt with these keys somebody else has read; the pages that say so are held.

        0 also if no free page would be left for the request itself.

        Args: accept: says whether that many blocks will do.
        """
        for number in range(len(keys), 0, -1):
            key = keys[number - 1]
            if (key not in self._due and key not in self.kept) or not accept(number):
                continue
            pages = self._pages(key)
            self.pool.touch(pages)
            self.found[name] = pages
            if self.pool.get_num_free_blocks():
                return number
            self._release(self.found.pop(name))
            return 0
        return 0

    def copies(self, begun: dict[str, Sequence[int]]) -> list[tuple[int, int]]:
        """What is to be copied before anything is computed in this turn: numbers of pages, each source with its target.
        No page is both.

        Args: begun: numbers of the pages of requests that begin now, by name; others have to `find` again.
        """
        made, held = list[tuple[int, int]](), list[Any]()
        for name, pages in self.found.items():
            made += [(page.block_id, number) for page, number in zip(pages, begun.get(name, ()))]
            held += pages
        for key, pages in self._due.items():
            targets = [] if key in self.kept else self._targets(len(pages))
            if targets:
                made += [(page.block_id, target.block_id) for page, target in zip(pages, targets)]
                self.kept[key] = tuple(target.block_id for target in targets)
                self.key_of.update(dict.fromkeys(self.kept[key], key))
                held += targets
        self._release(held)
        self.found.clear()
        self._let_go()
        return made

    def reach(self, key: Hashable, pages: list[Any]) -> None:
        """This turn ends with what the key stands for in these pages of a request."""
        if key not in self._reached:
            self.pool.touch(pages)
            self._reached[key] = pages

    def clear(self) -> None:
        """Between turns: forget all that is not copied yet, and let go of its pages."""
        self.begin()
        self._let_go()

    def _pages(self, key: Hashable) -> list[Any]:
        """The pages that hold this, which are then the most recently used."""
        if key in self._due:
            return self._due[key]
        self.kept[key] = numbers = self.kept.pop(key)
        return [self.pool.blocks[number] for number in numbers]

    def _targets(self, number: int) -> list[Any]:
        """So many pages to keep something in, held; none if too many are in use."""
        if len(self.kept) < self.most:
            return self.pool.get_new_blocks(number) if self.pool.get_num_free_blocks() >= number else []
        for key, numbers in self.kept.items():
            pages = [self.pool.blocks[number] for number in numbers]
            if not any(page.ref_cnt for page in pages):
                self._forget(key)
                self.pool.touch(pages)
                return pages
        return []

    def _release(self, pages: list[Any]) -> None:
        """Hold these once less: kept ones stay readable until somebody else needs them."""
        if not pages:
            return
        self.pool.unpin_blocks([page for page in pages if page.block_id in self.key_of], self._given_away)
        self.pool.free_blocks([page for page in pages if page.block_id not in self.key_of])

    def _let_go(self) -> None:
        for pages in self._due.values():
            self.pool.free_blocks(pages)
        self._due = {}

    def _given_away(self, page: Any) -> None:
        """The page is another's now, or vLLM was told to forget."""
        if page.block_id in self.key_of:
            self._forget(self.key_of[page.block_id])

    def _forget(self, key: Hashable) -> None:
        for number in self.kept.pop(key):
            del self.key_of[number]
