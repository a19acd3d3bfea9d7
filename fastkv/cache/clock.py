"""When a layer evicts: every so many decode steps, whether or not there is room, so that a row depends on no other."""

from __future__ import annotations


class Tick:
    """How many tokens were decoded since the last prompt or eviction, as a link of a ring.

    A compiled step can follow a link. A number that it counted up would be part of its graph and make it another one.

    Attributes:
        steps: that many.  evicts: whether the step that leads here evicts.  next: after one more.
    """

    def __init__(self, steps: int, evicts: bool) -> None:
        self.steps, self.evicts, self.next = steps, evicts, self


class EvictionClock:
    """The clock of rows that decode in lock-step; rows with clocks of their own each have another.

    Attributes: period: decode steps between evictions.  now: the tick that the last step led to.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.first = self.last = Tick(0, True)
        for steps in range(1, period):
            self.last.next = Tick(steps, False)
            self.last = self.last.next
        self.last.next = self.first
        self.now = self.first

    def advance(self) -> None:
        """One more token is decoded."""
        self.now = self.now.next

    def restart(self) -> None:
        """A prompt was read, or nothing was."""
        self.now = self.first

    def move_to(self, steps: int) -> None:
        """As if so many tokens had been decoded since the last prompt or eviction."""
        self.restart()
        for _ in range(steps):
            self.advance()
