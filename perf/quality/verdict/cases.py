"""What the verdict compares: contestants, bytes, and geometries of keys. Nothing is measured here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..cases import FULL

LENGTHS = (32, 64, 128, 256)  # tokens per KV head that MomentKV keeps; its bytes are everybody's
SINKS, RECENT = 4, 16


@dataclass(frozen=True)
class Contestant:
    """One cache: name in tables, and policy and correction as `fastkv.patch` is told.

    share: the pairs' bytes for each byte of centroids, where it is not the library's.
    """

    name: str
    policy: str
    correction: str = "auto"
    share: int | None = None


SNAPKV_ALONE, MANIFOLD_ALONE, MOMENTKV, FASTKV = "SnapKV alone", "ManifoldKV alone", "MomentKV", "fastkv"
ALONE = (SNAPKV_ALONE, MANIFOLD_ALONE)  # more tokens and nothing else
CONTESTANTS = (
    Contestant(SNAPKV_ALONE, "snapkv", "none"),
    Contestant(MANIFOLD_ALONE, "manifold", "none"),
    Contestant(MOMENTKV, "momentkv"),
    Contestant("MomentKV, cosh", "momentkv", "cosh"),
    Contestant("SnapKV + centroids", "snapkv", "centroids"),
    Contestant("ManifoldKV + cosh", "manifold", "cosh"),
    Contestant("ManifoldKV + centroids", "manifold", "centroids"),
    Contestant(FASTKV, "fastkv"),
)
SHARES = (
    Contestant("ManifoldKV + centroids, 1/8", "manifold", "centroids", 8),
    Contestant("ManifoldKV + centroids, 1/4", "manifold", "centroids", 4),
)

BUNDLED, SECOND = "bundled model", "second model"
TRAINED = {
    BUNDLED: "trained Llama, head_dim 64",
    SECOND: "trained Qwen3, queries and keys normed, head_dim 32",
}
SYNTHETIC = {
    "isotropic": "normal keys, values and queries",
    "massive channels": "clusters, and two channels with large means and a first token larger still",
    "RoPE": "clusters, turned by a rotary embedding",
    "massive + RoPE": "both",
}
GEOMETRIES = TRAINED | SYNTHETIC

WHOLE, LATER, STEPS = "whole", "later", "steps"
READS = {
    WHOLE: "prompt and question read at once",
    LATER: "text compressed before the question",
    STEPS: "decode steps after a prompt",
}


@dataclass(frozen=True)
class Case:
    """One contestant on one geometry, in the bytes of MomentKV with so many tokens; or the full cache."""

    geometry: str
    tokens: int
    name: str
    policy: str
    correction: str
    share: int | None

    @property
    def id(self) -> str:
        """Of the progress bar."""
        return f"{self.geometry} | {self.tokens} | {self.name}"

    def record(self) -> dict[str, Any]:
        """All of it, as it stands in a file."""
        return asdict(self)


def cases() -> list[Case]:
    """All of them, in the order in which they are measured: other shares of centroids last."""
    full = [Case(geometry, 0, "full cache", FULL, "none", None) for geometry in TRAINED]
    order = [(one, CONTESTANTS) for one in GEOMETRIES] + [(one, SHARES) for one in GEOMETRIES]
    return full + [
        Case(geometry, tokens, **asdict(contestant))
        for geometry, contestants in order
        for tokens in LENGTHS
        for contestant in contestants
    ]
