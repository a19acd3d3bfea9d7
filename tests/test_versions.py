"""What fastkv takes for granted about transformers and no other test would miss: a broken one costs memory, or skips.

Whatever else changes in transformers fails where it is used, on each version in `python -m tests.matrix`.
"""

import inspect

import torch
import transformers
from transformers.masking_utils import create_causal_mask

from fastkv.backend import MESHES
from fastkv.integrations.transformers.stock import CACHE

from .models import build


def test_a_prepared_mask_is_kept():
    """A mask of 4 dimensions comes back as it is, so that a decode step makes none (forward.py)."""
    ones = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    given = {"config": build().config, "inputs_embeds": torch.zeros(2, 1, 8), "attention_mask": ones}
    assert create_causal_mask(**given, **{CACHE: None}, position_ids=None) is ones


def test_the_mesh_of_tensor_parallelism_is_where_it_was():
    new, old = MESHES
    if hasattr(transformers.PreTrainedModel, new):
        assert transformers.PreTrainedModel._device_mesh is None
    else:  # 5.17 gives the attribute to parallel models only
        from transformers.distributed import utils

        assert f"model.{old} = device_mesh" in inspect.getsource(utils)
