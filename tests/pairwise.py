"""Products of everything with everything, of which a few cases run every day and the others are slow."""

from itertools import combinations, product

import pytest


def covering(*factors, together=2):
    """The product of the factors for `parametrize`; any `together` values meet in a case that is not marked slow.

    together=1: every value of every factor is in some case of every day; 2: so is every pair of values.
    """
    cases = list(product(*(range(len(factor)) for factor in factors)))
    factors = [list(factor) for factor in factors]

    def met(case):
        """The values that are together in a case, as (factor, value) each."""
        return set(combinations(enumerate(case), together))

    left, often = set().union(*map(met, cases)), set()
    while left:  # greedy: next is the first case in which most meets that has not met yet
        often.add(best := max(cases, key=lambda case: len(met(case) & left)))
        left -= met(best)
    return [named(*(factor[at] for factor, at in zip(factors, case)), slow=case not in often) for case in cases]


def named(*values, slow):
    """A case for `parametrize` with a readable id."""
    name = "-".join(str(value).removeprefix("torch.") for value in values)
    return pytest.param(*values, id=name, marks=pytest.mark.slow if slow else ())
