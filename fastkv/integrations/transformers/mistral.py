"""Mistral. Version 0.1 slides a window in every layer and is refused; from 0.2 on every layer attends to everything."""

from .attach import Family

MISTRAL = Family(name="Mistral", model_types=("mistral",), example="mistralai/Mistral-7B-Instruct-v0.3")
