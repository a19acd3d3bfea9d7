"""Llama 2 to 3.3 and models with its architecture: every layer full attention, no biases, no norms on q and k."""

from .attach import Family

LLAMA = Family(name="Llama", model_types=("llama",), example="meta-llama/Llama-3.1-8B-Instruct")
