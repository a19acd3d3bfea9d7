"""What compression did, as Prometheus metrics beside vLLM's own: `FastKVMetrics` is among `vllm.stat_logger_plugins`.

They are counted where requests end, in the process of the server, by the clock that all layers follow: how much a
sequence evicts and keeps depends on nothing but its length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter
from vllm.v1.metrics.loggers import StatLoggerBase

from ...config import Config
from . import settings
from .requests import Menu, RequestArguments

LABELS = ("model_name", "engine")
COUNTERS = {
    "seen": ("fastkv:tokens_seen", "Tokens that requests had in their cache, or would have had, when they ended."),
    "kept": ("fastkv:tokens_kept", "Of these, those that were kept, per KV head, mean over heads; budgets in tokens."),
    "evictions": ("fastkv:evictions", "Evictions of requests while they decoded."),
}


@cache
def counters() -> dict[str, Counter]:
    """The metrics, by what `counted` calls them; a process has them once."""
    return {name: Counter(title, text, LABELS) for name, (title, text) in COUNTERS.items()}


def counted(config: Config, prompt: int, answer: int) -> dict[str, int]:
    """What a request with so many tokens of prompt and answer, of which the last was not fed, adds to `COUNTERS`."""
    steps = max(answer - 1, 0)
    evictions = max(steps - 1, 0) // config.evict_every  # before the next step, if there is one
    found = {"seen": prompt + steps, "evictions": evictions}
    if config.budget.tokens is not None:
        found["kept"] = min(found["seen"], config.budget.tokens + steps - evictions * config.evict_every)
    return found


class FastKVMetrics(StatLoggerBase):
    """Counts the requests of one engine as they end; nothing without settings for fastkv."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.config = settings.config_of(vllm_config) if settings.asked(vllm_config) else None
        RequestArguments.menu = Menu.of(vllm_config)  # the process that takes requests makes this, too
        self.labels = (vllm_config.model_config.served_model_name, str(engine_index))

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM calls it after each step; iteration_stats: what ended, None if nothing is counted."""
        if self.config is None or iteration_stats is None:
            return
        for ended in iteration_stats.finished_requests:
            found = counted(self.config, ended.num_prompt_tokens, ended.num_generation_tokens)
            for name, number in found.items():
                counters()[name].labels(*self.labels).inc(number)

    def log_engine_initialized(self) -> None:
        """The scheduler says what fits."""
