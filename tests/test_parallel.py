"""Tensor parallelism: two processes with half of the heads each generate what one process generates."""

import json

import pytest
import torch

import fastkv

from .models import PATTERN, build, generate, prompt, query_calibration
from .pairwise import named
from .processes import begin
from .test_head_shares import shares_of
from .test_vector_cache import mapping

HEADS = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]  # usable heads differ between the processes

WORKER = """
import json, os, sys
import torch
import torch.distributed
from transformers import AutoModelForCausalLM
import fastkv
from tests.models import generate, prompt

torch.manual_seed(0)
torch.set_num_threads(1)
directory, cases = sys.argv[1], json.loads(sys.argv[2])
torch.distributed.init_process_group("gloo", f"file://{directory}/meeting", rank=int(os.environ["RANK"]), world_size=2)
model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto")
ids, mask = prompt()
found = []
for policy, hyper, budget, options in cases:
    chosen = fastkv.policies.get(policy, **hyper)
    fastkv.patch(model, chosen, fastkv.Budget(**budget), evict_every=5, **options)
    out = generate(model, ids, mask, new=8, return_dict_in_generate=True)
    cache = out.past_key_values
    stored = [cache.stored(layer).tolist() for layer in range(4)]
    found.append({"tokens": out.sequences.tolist(), "stored": stored})
rank = torch.distributed.get_rank()
with open(f"{directory}/found{rank}.json", "w") as file:
    json.dump(found, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["llama", named("qwen3", slow=True)])
def test_two_processes_equal_one(name, tmp_path):
    model = build(name, vocab_size=98)
    model.save_pretrained(tmp_path)
    (tmp_path / "pattern.tsv").write_text(PATTERN)
    query_calibration(model).save(tmp_path / "queries.safetensors")
    shares_of(model).save(tmp_path / "heads.safetensors")
    mapping(model, r2=HEADS).save(tmp_path / "map.safetensors")
    small = {"tokens": 20, "sinks": 2, "recent": 4, "heads": "uniform"}
    adaptive = {**small, "heads": "adaptive"}
    vector = {"correction": "vector", "vector": str(tmp_path / "map.safetensors")}
    cases = [
        ("momentkv", {}, small, {}), ("keydiff", {}, adaptive, {}), ("snapkv", {}, adaptive, {"prefill_block": 16}),
        ("tova", {}, small, {}), ("criticalkv", {}, adaptive, {}), ("compactor", {}, adaptive, {}),
        ("duoattention", {"pattern": str(tmp_path / "pattern.tsv")}, small, {}), ("keydiff", {}, small, vector),
        ("fastkv", {}, small, {"prefill_block": 16}),
        ("keydiff", {}, {**small, "heads": str(tmp_path / "heads.safetensors")}, {}), ("fastkv", {}, adaptive, {}),
        ("fastkv", {}, small, {"prefill_block": 16, "slots": "int8"}), ("snapkv", {}, adaptive, {"slots": "fp8"}),
        ("duoattention", {"pattern": str(tmp_path / "pattern.tsv")}, small, {"correction": "centroids"}),
        ("expected-attention", {}, adaptive, {}),
        ("triattention", {"calibration": str(tmp_path / "queries.safetensors")}, adaptive, {}),
    ]  # fmt: skip
    told = str(tmp_path), json.dumps(cases)
    ranks = [begin(WORKER, tmp_path / str(rank), *told, env=environment(rank)) for rank in range(2)]
    for one in ranks:
        code, _, errors = one.ended()
        assert code == 0, errors[-9000:]
    halves = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    ids, mask = prompt()
    model = type(model).from_pretrained(tmp_path)
    for index, (policy, hyper, budget, options) in enumerate(cases):
        fastkv.patch(model, fastkv.policies.get(policy, **hyper), fastkv.Budget(**budget), evict_every=5, **options)
        out = generate(model, ids, mask, new=8, return_dict_in_generate=True)
        stored = torch.tensor([out.past_key_values.stored(layer).tolist() for layer in range(4)])
        for rank, half in enumerate(halves):
            assert half[index]["tokens"] == out.sequences.tolist(), (policy, rank)
            assert half[index]["stored"] == stored[:, :, rank : rank + 1].tolist(), (policy, rank)


def environment(rank):
    """As torchrun would set it, without a GPU."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
