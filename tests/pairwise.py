"""Products of everything with everything, of which a few cases run every day and the others are slow."""

from collections import Counter
from itertools import combinations, product

import pytest


def covering(*factors, together=2, where=lambda *values: True, slow=()):
    """The product of the factors for `parametrize`; any `together` values meet in a case that is not marked slow.

    together=1: every value of every factor is in some case of every day; 2: so is every pair of values. Cases are left
    out unless `where(*values)`, and are slow with one of the values in `slow`."""
    sizes = [range(len(factor)) for factor in factors]
    values = {case: [list(factor)[at] for factor, at in zip(factors, case)] for case in product(*sizes)}
    cases = [case for case in values if where(*values[case])]
    daily = [case for case in cases if not any(value in slow for value in values[case])]

    def met(case):
        """The places, (factor, index of its value), that are together in a case."""
        return set(combinations(enumerate(case), together))

    left, often, used = set().union(*map(met, daily)), set(), Counter()

    def gain(case):
        """How much meets here that has not met yet; of equal cases, the one whose values have been used least."""
        return len(met(case) & left), -sum(used[place] for place in enumerate(case))

    while left:
        best = max(daily, key=gain)
        often.add(best)
        left -= met(best)
        used.update(enumerate(best))
    return [named(*values[case], slow=case not in often) for case in cases]


# Policies that ask for nothing which another one does not ask for: what carries their scores is tested with the others.
FOLLOWERS = (
    *("lagkv", "rkv", "expected-attention", "triattention"),
    *("manifold", "manifold-windowed", "leverage", "noncausal", "pyramidkv", "knorm", "streaming", "random"),
)


def each(names, *factors, often=FOLLOWERS):
    """The product of policies and factors for `parametrize`; all cases of a follower are marked slow, or, where it is
    among the `often` tested, all but one, which is another one for each."""
    cases = list(product(*factors))
    return [
        named(name, *case, slow=name in FOLLOWERS and (name not in often or at != FOLLOWERS.index(name) % len(cases)))
        for name in names
        for at, case in enumerate(cases)
    ]


def named(*values, slow):
    """A case for `parametrize` with a readable id."""
    shown = [value.values() if isinstance(value, dict) else [getattr(value, "__name__", value)] for value in values]
    words = [" ".join(map(str, parts)) for parts in shown]
    name = "-".join(word.removeprefix("torch.") for word in words if word)
    return pytest.param(*values, id=name, marks=pytest.mark.slow if slow else ())
