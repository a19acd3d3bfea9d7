"""The targets and predictions for the GPU as data: what was promised, and how a measurement answers it.

Predictions were computed from bytes and published figures before anything was timed; until a row is measured they are
shown as predictions, and afterwards they stay beside the measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..tables import Answer, Target
from .heads import GEMMA, LLAMA, decode_bytes, moment_bytes

LAUNCH_US, REACHED_GBPS = 4.5, 4000.0  # predicted cost of one launch, and GB/s: 93 % of a predicted 4.3 TB/s copy
COPY_GBPS = 4300.0
# Microseconds that peers report of an H200, at Llama's heads, by batch and tokens: tile-ai/TileOPs #2084, #2136.
PUBLISHED = {(1, 1024): "TileOPs 6.9, FlashInfer 9.5, FA3 16.2", (32, 4096): "TileOPs 135"}
PLAIN = "fastkv no correction"
DEFAULT = "fastkv default"  # with attention sums and centroids
OWN = (DEFAULT, "fastkv", "fastkv order 0", PLAIN, "copy")
FLASHINFER = ("FlashInfer", "FlashInfer tensor cores", "FlashInfer single")
FLEX = ("FlexAttention", "FlexAttention 3 stages", "FlexAttention autotuned")
HEADS = {heads.name: heads for heads in (LLAMA, GEMMA)}
SCORES = ("keydiff_scores", "manifold_scores", "window_scores", "leverage_scores", "noncausal_attention_mass")


@dataclass
class Table:
    """All timed rows by (op, heads, batch, length)."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def find(self, op: str, heads: str, batch: int, length: int) -> dict[str, Any] | None:
        """The timed row of a case, or None."""
        key = (op, heads, batch, length)
        found = [r for r in self.rows if (r["op"], r["heads"], r["batch"], r["length"]) == key and r.get("median_us")]
        return found[0] if found else None

    def us(self, op: str, batch: int, length: int, heads: str = LLAMA.name) -> float | None:
        """Its median in microseconds."""
        row = self.find(op, heads, batch, length)
        return row["median_us"] if row else None

    def shapes(self, heads: str) -> list[tuple[int, int]]:
        """(batch, length) at which fastkv's decode step was timed."""
        wanted = [r for r in self.rows if r["op"] == "fastkv" and r["heads"] == heads and r.get("median_us")]
        return sorted({(r["batch"], r["length"]) for r in wanted})

    def ops(self) -> list[str]:
        """Names of everything timed for decode, fastkv first."""
        names = {r["op"] for r in self.rows if r["part"] in ("decode", "flex")}
        return [*(n for n in OWN[:-1] if n in names), *sorted(names - set(OWN)), *(["copy"] if "copy" in names else [])]


def predicted_us(heads: str, batch: int, length: int) -> float:
    """Microseconds of one fastkv decode step: a launch, and the bytes at the predicted bandwidth."""
    return LAUNCH_US + decode_bytes(HEADS[heads], batch, length, 1) / REACHED_GBPS / 1e3


def floor_us(heads: str, batch: int, length: int) -> float:
    """Microseconds that the bytes of one decode step take at the predicted bandwidth of a copy, and nothing else."""
    return decode_bytes(HEADS[heads], batch, length, 1) / COPY_GBPS / 1e3


def correction_cost(table: Table, heads: str, batch: int, length: int) -> tuple[float, float] | None:
    """Extra time of the first-order correction as a share of the step without, and the same share of bytes."""
    with_it, without = (table.us(op, batch, length, heads) for op in ("fastkv", PLAIN))
    if with_it is None or without is None:
        return None
    shape = HEADS[heads]
    extra = batch * shape.num_kv_heads * moment_bytes(shape.head_dim, 1)
    return with_it / without - 1, extra / decode_bytes(shape, batch, length, None)


def below(names: tuple[str, ...], batch: int, length: int, low: float, high: float) -> Callable[[Table], Answer | None]:
    """The fastest of the named at that shape lies within [low, high] microseconds."""

    def answer(table: Table) -> Answer | None:
        times = [t for t in (table.us(name, batch, length) for name in names) if t is not None]
        return (f"{min(times):.2f} µs", low <= min(times) <= high) if times else None

    return answer


def copy_share(table: Table) -> Answer | None:
    """The share of the copy bandwidth at B = 32, L = 4096."""
    row = table.find("fastkv", LLAMA.name, 32, 4096)
    return None if row is None or not row.get("of_copy") else (f"{row['of_copy']:.1%}", row["of_copy"] >= 0.9)


def costs(long: bool) -> Callable[[Table], Answer | None]:
    """The worst correction cost over the measured shapes: at L >= 1024 against 5 %, below against its bytes."""

    def answer(table: Table) -> Answer | None:
        found = [
            (cost - (0.05 if long else share), cost, share, f"{heads} B={b} L={n}")
            for heads in HEADS
            for b, n in table.shapes(heads)
            if (n >= 1024) == long and (pair := correction_cost(table, heads, b, n)) is not None
            for cost, share in [pair]
        ]
        if not found:
            return None
        over, cost, share, where = max(found)
        return f"worst {cost:+.1%} ({where}, bytes {share:+.1%}; {len(found)} shapes)", over <= 0

    return answer


def fastest(table: Table) -> Answer | None:
    """At how many measured shapes up to L = 4096 fastkv is faster than every peer timed there."""
    wins, lost, met = 0, [], set()
    for heads in HEADS:
        for batch, length in table.shapes(heads):
            mine = table.us("fastkv", batch, length, heads)
            times = {op: table.us(op, batch, length, heads) for op in table.ops() if op not in OWN}
            rivals = {op: t for op, t in times.items() if t is not None}
            if length > 4096 or not rivals or mine is None:
                continue
            met |= rivals.keys()
            best = min(rivals, key=lambda op: rivals[op])
            if mine < rivals[best]:
                wins += 1
            else:
                lost.append(f"{heads} B={batch} L={length}: {best} {rivals[best]:.2f} against {mine:.2f} µs")
    if not wins + len(lost):
        return None
    text = f"fastest at {wins} of {wins + len(lost)} shapes against {', '.join(sorted(met))}"
    return text + "".join(f"; {line}" for line in lost[:3]), not lost


def scoring(table: Table) -> Answer | None:
    """The slowest score over 64K keys."""
    times = {op: t for op in SCORES if (t := table.us(op, 1, 65_536)) is not None}
    if not times:
        return None
    return ", ".join(f"{op.removesuffix('_scores')} {t:.0f} µs" for op, t in times.items()), max(times.values()) < 100


def unmeasured(table: Table) -> Answer | None:
    """Asks for a variant that these scripts do not build."""
    return None


TARGETS = (
    Target("decode, share of copy bandwidth, B=32 L=4096 D=128", "≥ 90 %", "target", copy_share),
    Target("decode, B=1 L=1024 D=128", "≤ 5 µs", "target", below(("fastkv",), 1, 1024, 0, 5)),
    Target("the default policy's step, B=1 L=1024 D=128", "≤ 10 µs", "prediction", below((DEFAULT,), 1, 1024, 0, 10)),
    Target("cost of the correction, L ≥ 1024", "≤ 5 %", "target", costs(long=True)),
    Target("cost of the correction, L < 1024", "≤ its share of bytes", "target", costs(long=False)),
    Target("decode, L ≤ 4096, against every peer", "faster everywhere", "target", fastest),
    Target("scores of 64K keys, one layer, D=128", "< 100 µs each", "target", scoring),
    Target(
        "select + compact + moments of a block of 128, B=1 L=1024 D=128",
        "≤ 15 µs",
        "target",
        below(("select",), 1, 1024, 0, 15),
    ),
    Target("one launch, B=1 L=1024 D=128", "4 to 5 µs", "prediction", below(("fastkv",), 1, 1024, 4, 5)),
    Target(
        "two launches (baseline), B=1 L=1024 D=128",
        "7 to 8 µs",
        "prediction",
        below(("split-KV Triton",), 1, 1024, 7, 8),
    ),
    Target("decode, B=8 L=1024 D=128", "≤ 12 µs", "prediction", below(("fastkv",), 8, 1024, 0, 12)),
    Target("decode, B=32 L=1024 D=128", "≤ 38 µs", "prediction", below(("fastkv",), 32, 1024, 0, 38)),
    Target("decode, B=128 L=4096 D=128", "≤ 560 µs", "prediction", below(("fastkv",), 128, 4096, 0, 560)),
    Target("FlashInfer, B=1 L=1024 D=128", "9 to 10 µs", "prediction", below(FLASHINFER, 1, 1024, 9, 10)),
    Target("FlexAttention, B=1 L=1024 D=128", "≥ 15 µs", "prediction", below(FLEX, 1, 1024, 15, 1e9)),
    Target("SDPA flash, B=1 L=1024 D=128", "10 to 15 µs", "prediction", below(("SDPA flash",), 1, 1024, 10, 15)),
    Target("half-precision against fp32 moments, B=32 L=512", "10 % faster", "prediction", unmeasured),
    Target("tile sizes, stages and warps, B=32", "≤ 8 % spread", "prediction", unmeasured),
)
