"""Every check of one type of model, and what came of it."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import transformers

import fastkv
from fastkv.integrations import transformers as engine

from . import tiny
from .checks import CHECKS, OF_ATTENTION, SMALL, Subject, first_line

WORKS, REFUSED, FAILS, UNBUILT = "works", "refused", "fails", "not built"
ATTENTIONS = ("sdpa", "eager")


@dataclass
class Result:
    """What is known of a kind of model.

    Attributes:
        name: of the kind.  status: one of the four above.  reason: why it does not work, or what failed.
        model: transformers' class.
        layers: number of layers by the class of their cache; those of FastKVLayer are compressed.
        passed: checks that it passed.  limits: what is refused or was not checked, and why.
        transformers: version that it was found with.
    """

    name: str
    status: str = UNBUILT
    reason: str = ""
    model: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)
    transformers: str = transformers.__version__

    def __str__(self):
        """One row of a table."""
        kinds = ", ".join(f"{number} {kind.removesuffix('Layer')}" for kind, number in self.layers.items())
        limits = "; ".join(f"{what}: {why}" for what, why in self.limits.items())
        return f"{self.name:<28} {self.status:<9} {self.reason or ' | '.join(filter(None, (kinds, limits)))}"


def cause(error):
    """An exception as one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{first_line(error)} ({Path(frame.filename).name}:{frame.lineno})"


def examine(name, checks=tuple(CHECKS)):
    """Build a kind of model and run the checks of these names."""
    result, reasons = Result(name), {}
    with torch.no_grad():
        for attention in ATTENTIONS:
            chosen = checks if result.status != WORKS else [check for check in checks if check in OF_ATTENTION]
            reasons[attention] = attempt(result, attention, chosen)
            if result.status == FAILS:
                result.reason = f"{attention}: {reasons[attention]}"
                return result
    if result.status == WORKS:
        result.limits |= {attention: why for attention, why in reasons.items() if why}
        result.limits |= {check: "not checked" for check in CHECKS if check not in checks}
    else:
        result.reason = reasons["eager"] or reasons["sdpa"]
    return result


def attempt(result, attention, checks):
    """Run checks of a model with this attention function and write down what comes of it.

    Returns: why there is nothing to check, or what failed; nothing where all is well.
    """
    try:
        subject = Subject(result.name, tiny.build(result.name, attention))
        result.model = type(subject.model).__name__
        subject.touch()
    except tiny.CannotBuild as error:
        return first_line(error)
    except tiny.BROKEN as error:
        return f"the tiny stock model does not run: {cause(error)}"
    try:
        with fastkv.patched(subject.model, budget=SMALL):
            result.layers = dict(Counter(type(layer).__name__ for layer in fastkv.FastKVCache(subject.model).layers))
    except fastkv.FastKVError as error:
        result.status = REFUSED if result.status == UNBUILT else result.status
        return first_line(error)
    except tiny.BROKEN as error:
        result.status = FAILS
        return f"patch: {cause(error)}"
    # An untested model was compared with the stock one when it was patched; once is enough.
    with mock.patch.dict(engine.TESTED, {subject.model.config.model_type: ""}):
        failures = [failure for check in checks if (failure := failed(check, subject, result))]
    result.status = FAILS if failures else WORKS
    return "; ".join(failures)


def failed(check, subject, result):
    """Run one check and write down what it has to say. Returns what failed."""
    try:
        result.limits |= CHECKS[check](subject) or {}
    except fastkv.FastKVError as error:
        result.limits[check] = first_line(error)
    except tiny.BROKEN as error:
        return f"{check}: {cause(error)}"
    else:
        result.passed += [check] if check not in result.passed else []
    return ""
