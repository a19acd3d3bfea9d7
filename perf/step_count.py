"""What inductor leaves of a compiled decode step, counted without a GPU: kernels and bytes, beside the floor.

    python -m perf.step_count                                   all models, into perf/results/step_count.json
    python -m perf.step_count --models qwen3-4b --ways inductor  one of them, one way

Inductor schedules the step of the patched model as it does for a GPU and is stopped before it compiles anything: on a
CPU it is told to write Triton kernels and to concatenate in them, as it does on CUDA. Layers have their real widths,
and weights that nobody has touched. A model with one layer is compared with those that have one more of each kind, so
that a step of all layers is a sum. One step in 16 evicts; operators of fastkv count their launches on a GPU and each of
their tensors once.

Floor: the bytes of all weights and of the cache, once. Microseconds are a prediction: bytes at BANDWIDTH, and LAUNCH
for every kernel, which is what a captured step of Llama-3.1-8B is predicted to lose with one (6.5 ms, floor 3.5, 1250
of them). "captured" counts the eager step: every operator that is no view is a kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from triton.backends.compiler import GPUTarget

import fastkv

from .speed.models import SHAPES

BANDWIDTH = 4.3e6  # bytes a microsecond, of an H200
LAUNCH = 2.4  # microseconds
BATCHES = (1, 8, 32)
SAID = ("title", "way", "launches", "bytes_over_floor", "predicted_us", "predicted_over_floor")
PERIOD, BUDGET, POLICY = 16, 1024, "fastkv"
WORDS = 16  # of the vocabulary that is compiled; the real one differs in the head's bytes only
COMBO = {"combo_kernels": True, "benchmark_combo_kernel": False}
WAYS: dict[str, dict[str, Any]] = {  # options of `torch.compile`
    "inductor": {},
    "combo kernels": COMBO,
    "frozen": COMBO | {"freezing": True},  # products of the same row with several weights become one
}
AS_ON_CUDA = {
    "cpu_backend": "triton",
    "cpp.enable_concat_linear": True,
    "force_pointwise_cat": True,
    "fx_graph_cache": False,
    "compile_threads": 1,
}
MODELS = ("llama-3.1-8b", "qwen3-4b", "qwen3-8b", "gemma-3-12b")
LAUNCHES = {"fastkv.evict": 2}  # of fastkv's operators on a GPU, for at most 64 victims; of all others 1
RESULTS = ("MultiOutput", "MutationOutput")  # of the operator before
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "sym_size"}


@dataclass(frozen=True)
class Count:
    """Kernels that a step launches, and bytes that they read and write."""

    launches: float = 0.0
    bytes: float = 0.0

    def plus(self, other: Count, times: float = 1.0) -> Count:
        return Count(self.launches + times * other.launches, self.bytes + times * other.bytes)

    @property
    def microseconds(self) -> float:
        """Predicted."""
        return self.bytes / BANDWIDTH + LAUNCH * self.launches


class Stopped(InductorError):
    """Inductor has scheduled everything."""


class Device:
    """What Triton asks of a driver while code is generated: the target is an H200."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Eager(TorchDispatchMode):
    """Counts the operators of an eager step."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.names = Count(), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            once = {t.data_ptr(): t.nbytes for t in tensors}
            launches = LAUNCHES.get(f"{func.namespace}.{name}", 1)
            self.count = self.count.plus(Count(launches, sum(once.values())))
            self.names[name] += launches
        return result


CALLS = r"(?P<fused>triton)_\w+\.run|extern_kernels\.(?P<extern>\w+)|torch\.ops\.(?P<op>\w+\.\w+)[\w.]*"
LAUNCHED = re.compile(rf"^ +(?:\w+ = )?(?:{CALLS})\(", re.M)


def scheduled(graph: GraphLowering, code: str) -> tuple[Count, Counter[str]]:
    """What a graph launches, by its code, and the bytes that its nodes read and write."""
    names = Counter[str]()
    for found in LAUNCHED.finditer(code):
        name = found["fused"] or found["extern"] or found["op"]
        names[name] += LAUNCHES.get(name, 1)
    total = sum(weight.nbytes for weight in graph.constants.values())  # frozen weights are no node's dependency
    for node in graph.scheduler.nodes:
        if "fastkv" in str(getattr(node.node, "op_overload", "")):  # changed in place, which would count twice
            total += sum(graph.get_dep_size_hint(dep) for dep in node.read_writes.reads)
        elif type(node).__name__ != "NopKernelSchedulerNode" and type(node.node).__name__ not in RESULTS:
            total += traffic(node)
    return Count(names.total(), total), names


def traffic(node: Any) -> int:
    """Bytes that a kernel reads and writes: of each buffer no more than its parts do, which may be one row of it."""
    whole, *parts = (
        Counter(one.get_read_write_buffer_accesses(include_reads=True, include_writes=True))
        for one in (node, *node.get_nodes())
    )
    return (whole & sum(parts, Counter())).total()


def together(scheduler: Any) -> list[list[Any]]:
    """Kernels that do not wait for each other, as inductor groups them on CUDA: it would leave out those on a CPU."""
    size = inductor.combo_kernel_max_num_nodes
    return [
        nodes[first : first + size]
        for nodes in scheduler._topological_sort_nodes()
        for first in range(0, len(nodes), size)
    ]


def build(name: str, kinds: list[str]) -> Any:
    """A model with layers of these kinds, of the real widths, in bf16; weights are zeros that take no memory."""
    shape = SHAPES[name]
    sizes = shape.config | {"vocab_size": WORDS, "num_hidden_layers": len(kinds), "tie_word_embeddings": False}
    if shape.model_type.startswith("gemma"):
        sizes |= {"layer_types": kinds}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(shape.model_type, max_position_embeddings=8192, **ids, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(0.01)
    return model


@torch.no_grad()
def counted(name: str, kinds: list[str], way: str, evicts: bool) -> tuple[Count, Counter[str], int]:
    """A step of such a model, and the bytes of its cache."""
    model = build(name, kinds)
    fastkv.patch(model, POLICY, BUDGET, evict_every=PERIOD, static=True)
    cache = fastkv.FastKVCache(model)
    model(torch.full((1, 8), 5), past_key_values=cache, logits_to_keep=1)
    token, position = torch.full((1, 1), 5), torch.full((1, 1), 8)
    for _ in range(PERIOD - 1 if evicts else 0):
        model(token, past_key_values=cache, position_ids=position)
    if way == "captured":
        with Eager() as eager:
            model(token, past_key_values=cache, position_ids=position)
        return eager.count, eager.names, cache.nbytes()
    found: list[tuple[Count, Counter[str]]] = []

    def stop(code: str) -> None:
        found.append(scheduled(V.graph, code))
        raise Stopped(RuntimeError("scheduled"), sys._getframe())

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(together)
    with (
        mock.patch.object(GraphLowering, "save_output_code", stop),
        inductor.patch(AS_ON_CUDA | WAYS[way]),
        torch.backends.mkldnn.flags(enabled=False),  # its products are not those of a GPU
    ):
        try:
            compiled(token, past_key_values=cache, position_ids=position)
        except InductorError:
            if not found:
                raise
    return *found[-1], cache.nbytes()


def layers_of(name: str) -> dict[str, int]:
    """How many layers of each kind a model has."""
    number = SHAPES[name].config["num_hidden_layers"]
    if not SHAPES[name].model_type.startswith("gemma"):
        return {"full_attention": number}
    every = SHAPES[name].config["sliding_window_pattern"]
    return {"full_attention": number // every, "sliding_attention": number - number // every}


def step_of(name: str, way: str, evicts: bool) -> dict[str, Any]:
    """A whole step: one layer, and the difference that one more of each kind makes, as often as there are."""
    first = "full_attention"
    base, names, cache = counted(name, [first], way, evicts)
    layers, held = layers_of(name), {}
    whole, rest = base, base
    kinds = {}
    for kind, number in layers.items():
        two, more, both = counted(name, [first, kind], way, evicts)
        layer = two.plus(base, -1.0)
        whole = whole.plus(layer, number - (kind == first))
        rest = rest.plus(layer, -1.0) if kind == first else rest
        held[kind] = both - cache
        kinds[kind] = asdict(layer) | {"kernels": dict(more - names)}
    head = 2 * SHAPES[name].config["hidden_size"] * (SHAPES[name].config["vocab_size"] - WORDS)
    return {
        "step": whole.plus(Count(0, head)),
        "layers": kinds,
        "outside": asdict(rest.plus(Count(0, head))),
        "cache": sum(number * held[kind] for kind, number in layers.items()),
    }


def weights_of(name: str) -> int:
    """Bytes of all weights that a step reads: those of its layers and of the head."""
    with torch.device("meta"):
        config = AutoConfig.for_model(SHAPES[name].model_type, **SHAPES[name].config)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    table = model.get_input_embeddings().weight.nbytes
    return sum(weight.nbytes for weight in model.parameters()) - (0 if tied else table)


def row(name: str, way: str) -> dict[str, Any]:
    """Of a step, evictions included."""
    plain, evicting = (step_of(name, way, evicts) for evicts in (False, True))
    mean = plain["step"].plus(plain["step"], -1 / PERIOD).plus(evicting["step"], 1 / PERIOD)
    weights, cache = weights_of(name), plain["cache"]
    return {
        "model": name,
        "title": SHAPES[name].title,
        "way": way,
        "launches": round(mean.launches, 1),
        "bytes": round(mean.bytes),
        "floor_bytes": weights + cache,
        "bytes_over_floor": round(mean.bytes / (weights + cache), 4),
        "predicted_us": round(mean.microseconds),
        "predicted_over_floor": {batch: round(over_floor(mean, weights, cache, batch), 3) for batch in BATCHES},
        "layer": plain["layers"],
        "layer_that_evicts": evicting["layers"],
        "outside_of_layers": plain["outside"],
    }


def over_floor(step: Count, weights: int, cache: int, batch: int) -> float:
    """Predicted time of a step of so many sequences over its floor. Args: step: of one; all but weights is its own."""
    whole = Count(step.launches, step.bytes + (batch - 1) * (step.bytes - weights))
    return whole.microseconds / Count(0, weights + batch * cache).microseconds


def main() -> int:
    """Returns: 0."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.step_count", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(MODELS))
    parser.add_argument("--ways", nargs="+", choices=["captured", *WAYS], default=["captured", *WAYS])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_count.json")
    options = parser.parse_args()
    triton.runtime.driver.set_active(Device())
    rows = []
    for name in options.models:
        for way in options.ways:
            rows.append(row(name, way))
            print(*(rows[-1][key] for key in SAID), flush=True)
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    settings = {"policy": POLICY, "budget": BUDGET, "period": PERIOD, "launch_us": LAUNCH, "bandwidth": BANDWIDTH * 1e6}
    options.out.write_text(json.dumps({"versions": versions, "settings": settings, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
