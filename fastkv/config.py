"""Config: everything `patch` was told, checked once and never changed, with the files that were fitted for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import corrections
from .backend import BACKENDS, INT4_GROUP
from .budget import HEADS, Budget
from .calibration import HeadShares, beside, check_fitted
from .calibration.fits import QualityCurve, QueryCalibration, VectorMap
from .corrections import Correction
from .errors import FastKVError, is_whole
from .policies import Policy, get
from .reference import INT4, INT8, PLAIN, SlotFormat, slot_format
from .rotary import Rotary

# What `patch`, modules, commands and the vLLM plugin use where nothing is said.
POLICY, BUDGET, EVICT_EVERY = "fastkv", 1024, 16
WITHOUT_ROTARY = "momentkv"  # the policy where nobody says how keys are turned
FOUR_BITS = 12  # times smaller, from which on more tokens of 4 bits answer better than fewer of 8


@dataclass(frozen=True)
class Config:
    """The settings of a patched model.

    Attributes:
        policy: scores tokens.  budget: how many stay.
        prefill_block: None reads the whole prompt and compresses each layer right after its own attention; an int reads
            it in blocks of that many tokens, so that no layer ever holds more than budget + block tokens.
        evict_every: decode steps between evictions; a layer holds at most budget + evict_every tokens.
        correction: what is remembered of evicted tokens and mixed into attention.
        backend: "auto", "reference", "cpu" or "triton".
        slots: how keys and values are stored.  chooses_slots: whether `coded` says so once sizes are known ("auto").
        static: whether decode steps may be compiled into graphs; None: on CUDA.
        vector: map from keys to values, for tokens without value.  curve: that `Budget(quality=...)` uses.
        queries: what each layer's queries are like, for policies that read it.
        rotations: how each layer turns its keys; empty unless something undoes it. These four are found when the model
            is known.
    """

    policy: Policy
    budget: Budget
    prefill_block: int | None = None
    evict_every: int = EVICT_EVERY
    correction: Correction = corrections.NONE
    backend: str = "auto"
    static: bool | None = None
    slots: SlotFormat = PLAIN
    chooses_slots: bool = False
    vector: VectorMap | None = None
    curve: QualityCurve | None = None
    queries: QueryCalibration | None = None
    rotations: Mapping[int, Rotary] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        policy: str | Policy,
        budget: int | str | Budget,
        prefill_block: int | None,
        evict_every: int,
        correction: str | bool | Correction | None,
        backend: str,
        static: bool | None,
        slots: str = "auto",
    ) -> Config:
        """Check the arguments of `fastkv.patch`; slots "auto" are plain until `coded` decides.

        Raises: FastKVError for each that cannot be used.
        """
        chosen = get(policy)
        for name, value in (("prefill_block", prefill_block), ("evict_every", evict_every)):
            if not is_whole(value, 1) and not (value is None and name == "prefill_block"):
                raise FastKVError(f"{name} must be a whole number of at least 1 tokens, got {value!r}")
        wanted = corrections.get(chosen.correction if correction == "auto" else correction)
        if backend not in BACKENDS:
            raise FastKVError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if static is not None and not isinstance(static, bool):
            raise FastKVError(f"static must be True, False or None (on CUDA), got {static!r}")
        share = Budget.of(budget)
        if chosen.shares.layers is not None and share.layers == "uniform":
            share = replace(share, layers=chosen.shares.layers)
        auto = slots == "auto"
        stored = PLAIN if auto else slot_format(slots)
        config = cls(chosen, share, prefill_block, evict_every, wanted, backend, static, stored, auto)
        config._check_combination()
        return config

    def _check_combination(self) -> None:
        name = self.policy.name
        adaptive = self.budget.heads == "adaptive"
        if adaptive and not self.policy.adaptive:
            raise FastKVError(
                f"the scores of {name} do not compare between heads; use Budget(heads='uniform') or another policy"
            )
        if adaptive and self.correction.key_only:
            raise FastKVError(
                "correction='vector' fixes how many tokens each head keeps, heads='adaptive' does not; use one of them"
            )
        if not self.slots.plain and self.correction.key_only:
            raise FastKVError(
                f"correction={self.correction.name!r} stores keys without their values, which "
                f"slots={self.slots.name!r} does not provide for; leave slots out or use another correction"
            )
        if self.correction.match is not None and self.policy.second_reading is None:
            raise FastKVError(
                f"correction={self.correction.name!r} is fitted to a second reading of the prompt, and policy {name!r} "
                "reads once; use 'attention-matching', 'kvzip' or 'fastkv-reread', or another correction"
            )
        if self.prefill_block is not None and self.deferred:
            raise FastKVError(
                f"{self.deferred} needs the whole context before anything is evicted, got blocks; read prompts whole "
                "(prefill_block=None, --prefill-block whole)"
            )

    def coded(self, sizes: Iterable[int], latent: bool = False) -> Config:
        """With the slots that "auto" means, if it was asked for: codes where the budget says how many bytes are spent,
        and not on what.

        The same bytes hold twice as many tokens of 8 bits, and what rounding costs is less than what those are worth.
        Plain where codes cannot be: values that are missing, latents.

        Args: sizes: numbers of a key and of a value in each layer.
        """
        correction, budget = self.correction, self.budget
        fixed = latent or correction.key_only
        if not self.chooses_slots or not budget.in_bytes or fixed:
            return self
        four = (budget.compress or 0) >= FOUR_BITS and not any(size % INT4_GROUP for size in sizes)
        return replace(self, slots=INT4 if four else INT8)

    @property
    def deferred(self) -> str:
        """Why a first prompt is compressed only after all layers have read it, in words; empty if it does not wait."""
        if self.policy.second_reading is not None:
            return f"policy {self.policy.name!r}"
        return "" if self.budget.quality is None else "Budget(quality=...)"

    @property
    def samples_queries(self) -> bool:
        """Whether some queries of a second reading are kept."""
        second = self.policy.second_reading
        return second is not None and (second.samples or self.correction.match is not None)

    @property
    def undoes_rotation(self) -> bool:
        """Whether keys are needed as they were before the rotary embedding."""
        return self.places or self.needs("rotary")

    @property
    def places(self) -> bool:
        """Whether the rotary embedding has to use the positions that are stored, those among real tokens."""
        return self.correction.key_only or self.needs("pre_rope")

    def check_heads(self, heads: Sequence[int]) -> None:
        """Raise FastKVError if the policy fixes heads, of a model with other numbers of KV heads in its layers."""
        if self.policy.shares.heads is not None:
            self.policy.shares.heads.check(heads)

    def needs(self, signal: str) -> bool:
        """Whether the policy reads an optional signal."""
        return signal in self.policy.needs


def with_fits(config: Config, known: Any, vector: str | Path | VectorMap | None) -> Config:
    """The config with the calibration files it needs.

    Args: known: config of the model, of transformers.  vector: see `fastkv.patch`.
    Raises: FastKVError if a file is missing or of another model.
    """
    if config.correction.key_only:
        if not isinstance(vector, VectorMap):
            file = vector or _fitted(known, "vector.safetensors", "correction='vector'", "vector=file")
            vector = VectorMap.load(file, known)
        check_fitted("this VectorMap", vector.fingerprint, vector.model, known, "vector")
        config = replace(config, vector=vector)
    elif vector is not None:
        raise FastKVError("vector=... is for correction='vector', got another correction; add it or leave vector out")
    if config.needs("query_statistics"):
        how = f"fastkv.policies.get({config.policy.name!r}, calibration=file)"
        queries = config.policy.calibration or _fitted(
            known, "queries.safetensors", f"policy {config.policy.name!r}", how
        )
        config = replace(config, queries=QueryCalibration.load(queries, known))
    budget = config.budget
    if budget.quality is not None:
        fitted = budget.calibration or _fitted(known, "context.json", "Budget(quality=...)", "calibration=file")
        config = replace(config, curve=QualityCurve.load(fitted, known, config.policy.name))
    return config


def with_shares(config: Config, known: Any, find: Callable[[str | Path], Any]) -> Config:
    """The config with the shares of heads that its budget asks for.

    Args: known: config of the model, of transformers.  find: the shares for "calibrated" or from a file.
    Raises: FastKVError if they are of another model, or as `find`.
    """
    budget, heads = config.budget, config.budget.heads
    if heads in ("uniform", "adaptive"):
        return config
    if config.policy.shares.heads is not None:
        if heads != "calibrated":
            raise FastKVError(
                f"policy {config.policy.name!r} fixes how many tokens each head keeps, and so does heads={heads!r}; "
                "use one of them"
            )
        return replace(config, budget=replace(budget, heads="uniform"))
    shares = heads if isinstance(heads, HeadShares) else find(heads)
    if isinstance(shares, HeadShares):
        check_fitted("Budget(heads=...)", shares.fingerprint, shares.model, known, "heads")
    return replace(config, budget=replace(budget, heads=shares))


def check_shares(config: Config, heads: list[int]) -> None:
    """Raise FastKVError unless shares of heads are of a model with so many in its layers, heads are alike
    or the policy fixes them for such a model.

    For whoever has no model to calibrate or to find a file for.
    """
    config.check_heads(heads)
    shares = config.budget.heads
    if isinstance(shares, HeadShares):
        shares.check(heads)
    elif shares not in HEADS:
        raise FastKVError(
            f"shares of heads have to be given here, got the file {shares!r}; pass heads=HeadShares.load(file, config)"
        )


def _fitted(config: Any, name: str, what: str, how: str) -> Path:
    """The calibration file of that name in the directory the model was loaded from."""
    path = beside(config, name)
    if not os.path.isfile(path):
        command = name.partition(".")[0]
        raise FastKVError(
            f"{what} needs a file fitted for this model, and there is no {name} where the model was loaded from; make "
            f"one with fastkv calibrate {command} and pass {how}"
        )
    return path
