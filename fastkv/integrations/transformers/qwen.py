"""Qwen 2 to 3 and Qwen3-MoE: biases (2) or norms (3) on q and k act before the cache, so nothing differs here.

Which layers slide a window follows `config.layer_types`.
"""

from .attach import Family

QWEN = Family(name="Qwen", model_types=("qwen2", "qwen3", "qwen3_moe"), example="Qwen/Qwen3-4B-Instruct-2507")
