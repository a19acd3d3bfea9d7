"""What the verdict compares: contestants, bytes, and geometries of keys. Nothing is measured here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..cases import FULL

LENGTHS = (32, 64, 128, 256)  # tokens per KV head that MomentKV keeps; its bytes are everybody's
SINKS, RECENT = 4, 16


@dataclass(frozen=True)
class Contestant:
    """One cache: name in tables, and policy and correction as `fastkv.patch` is told."""

    name: str
    policy: str
    correction: str = "auto"


SNAPKV_ALONE, MANIFOLD_ALONE, MOMENTKV, KEYDIFF = "SnapKV alone", "ManifoldKV alone", "MomentKV", "KeyDiff alone"
FASTKV = "fastkv"
ALONE = (SNAPKV_ALONE, MANIFOLD_ALONE)  # more tokens and nothing else
RIVALS = (*ALONE, MOMENTKV, KEYDIFF)  # those that the default must not fall behind
CONTESTANTS = (
    Contestant(FASTKV, "fastkv"),
    Contestant(SNAPKV_ALONE, "snapkv", "none"),
    Contestant(MANIFOLD_ALONE, "manifold", "none"),
    Contestant(MOMENTKV, "momentkv"),
    Contestant(KEYDIFF, "keydiff", "none"),
    Contestant("SnapKV + centroids", "snapkv", "centroids"),
)
# Beside the default and not against it: it reads a prompt a second time.
TWICE = (Contestant("fastkv, read twice", "fastkv-reread"),)

BUNDLED, SECOND, LANGUAGE = "bundled model", "second model", "language model"
TRAINED = {
    BUNDLED: "trained Llama, head_dim 64",
    SECOND: "trained Qwen3, queries and keys normed, head_dim 32",
    LANGUAGE: "Llama trained on the source of Python's standard library, head_dim 64",
}
ANSWERING = (BUNDLED, SECOND)  # the language model has no answers, but text that goes on
SYNTHETIC = {
    "isotropic": "normal keys, values and queries",
    "massive channels": "clusters, and two channels with large means and a first token larger still",
    "RoPE": "clusters, turned by a rotary embedding",
    "massive + RoPE": "both",
}
GEOMETRIES = TRAINED | SYNTHETIC

WHOLE, LATER, PROSE, STEPS = "whole", "later", "prose", "steps"
READS = {
    WHOLE: "prompt and question read at once",
    LATER: "text compressed before the question",
    PROSE: "held-out text, its end fed token by token",
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

    @property
    def id(self) -> str:
        """Of the progress bar."""
        return f"{self.geometry} | {self.tokens} | {self.name}"

    def record(self) -> dict[str, Any]:
        """All of it, as it stands in a file."""
        return asdict(self)


def lengths(geometry: str) -> tuple[int, ...]:
    """Tokens that MomentKV keeps of 1024: from a 32nd to a quarter, on the language model to a half."""
    return (*LENGTHS, 512) if geometry == LANGUAGE else LENGTHS


def contestants(geometry: str) -> tuple[Contestant, ...]:
    """All of them; a second reading needs the prompt's tokens, which synthetic keys have not."""
    return CONTESTANTS + (TWICE if geometry in TRAINED else ())


def cases() -> list[Case]:
    """All of them, in the order in which they are measured."""
    full = [Case(geometry, 0, "full cache", FULL, "none") for geometry in ANSWERING]
    return full + [
        Case(geometry, tokens, **asdict(contestant))
        for geometry in GEOMETRIES
        for tokens in lengths(geometry)
        for contestant in contestants(geometry)
    ]
