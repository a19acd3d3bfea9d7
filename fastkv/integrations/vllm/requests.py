"""What requests ask of their cache: a class that the server named at its start, or fewer tokens than the server keeps;
and what compression did for them, as metrics.

Arguments of a request are `SamplingParams.extra_args`, over HTTP `vllm_xargs`. vLLM hands them to logits processors
and not to attention: `RequestArguments` looks at them, and tells the layers which request asked for what.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, ClassVar

from prometheus_client import Counter
from torch import Tensor
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as NewerProcessor

from ...config import Config
from ...errors import is_number, is_whole
from . import settings
from .settings import Kind

CLASS, BUDGET, KEEP = (f"{settings.KEY}_{name}" for name in ("class", "budget", "keep"))
PARTS = 16  # of the server's budget, to which others are rounded up: sequences of one budget are computed together


@dataclass(frozen=True)
class Menu:
    """What requests may ask for.

    Attributes: classes: names, None where a server has not said that requests may ask for anything.
        least, most: tokens that a request may keep; most: the server's, 0 for a budget in bytes.
    """

    classes: tuple[str, ...] | None = None
    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, vllm_config: Any) -> Menu:
        """Of a server with that config."""
        if not settings.asked(vllm_config):
            return cls()
        budget = settings.config_of(vllm_config).budget
        classes, least = settings.setting(vllm_config, "classes"), max(budget.reserved, 1)
        if not isinstance(budget.layers, str):  # what the layer of the smallest weight needs; one more for rounding
            least = ceil((least + 1) * sum(budget.layers) / len(budget.layers) / min(budget.layers))
        most = budget.tokens or 0
        return cls(None if classes is None else tuple(classes), min(least, most or least), most)

    def chosen(self, arguments: dict[str, Any] | None, prompt: int) -> Kind:
        """What a request with these arguments and so many tokens of prompt gets: a class, tokens to keep, or None for
        what the server keeps.

        Raises: ValueError for arguments that ask for what there is not.
        """
        asked = {name: value for name, value in (arguments or {}).items() if name.startswith(settings.KEY)}
        if not asked:
            return None
        (name, value), *more = asked.items()
        if self.classes is None:
            raise ValueError(
                f"all requests have the server's settings for {settings.KEY}, got {name}={value!r} for one of them; "
                "leave it out, or start the server with classes"
            )
        if more or name not in (CLASS, BUDGET, KEEP):
            raise ValueError(
                f"a request has one of {CLASS}, {BUDGET} and {KEEP}, got {', '.join(asked)}; leave the rest out"
            )
        if name == CLASS:
            if value not in self.classes:
                known = ", ".join(self.classes) or "none"
                raise ValueError(f"the server has no class {value!r}, its classes: {known}; use one of them")
            return str(value)
        if not self.most:
            raise ValueError(
                f"{name}={value!r} is for servers with a budget in tokens, this one has bytes; use a class"
            )
        if name == BUDGET:
            if not is_whole(value, self.least) or value > self.most:
                raise ValueError(f"{name} must be a number of tokens from {self.least} to {self.most}, got {value!r}")
        elif not is_number(value) or not 0 < value <= 1:
            raise ValueError(f"{name} must be a share of the prompt in (0, 1], got {value!r}; 0.25 keeps a quarter")
        tokens = value if name == BUDGET else ceil(value * prompt)
        return next((size for size in self.sizes if size >= tokens), None)

    @property
    def sizes(self) -> range:
        """All numbers of tokens that a request can be granted, but for the server's own."""
        part = ceil(self.most / PARTS) or 1
        return range(ceil(self.least / part) * part, self.most, part) if self.classes is not None else range(0)


class RequestArguments(LogitsProcessor, NewerProcessor):
    """Looks at the arguments of requests and leaves logits alone.

    It has the interfaces of both of vLLM's model runners: each refuses to start beside a plugin without its own.

    Attributes: menu: of the server, None in a process that was not told.
        kinds: what requests chose if they did, by place in the batch or, of the newer runner, in its table. Of the
        runner that was made last in this process.
    """

    menu: ClassVar[Menu | None] = None
    kinds: ClassVar[dict[int, Kind]] = {}

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
        """Args: rest: vLLM's, of which the newer runner's knows how long prompts are."""
        self.requests = rest[0] if len(rest) == 1 else None
        type(self).menu = Menu.of(vllm_config)
        self.kinds.clear()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which vLLM answers with status 400, for arguments that ask for what there is not."""
        if cls.menu is not None:
            cls.menu.chosen(sampling_params.extra_args, 1)

    def _kind(self, sampling_params: Any, prompt: int) -> Kind:
        """As the scheduler has checked."""
        assert self.menu is not None
        try:
            return self.menu.chosen(sampling_params.extra_args, prompt)
        except ValueError:
            return None

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """A request begins in this place of the table; whether its logits change: never."""
        kind = self._kind(sampling_params, int(self.requests.prompt_len.np[req_idx]) if self.requests else 0)
        self.kinds.pop(req_idx, None)
        if kind is not None:
            self.kinds[req_idx] = kind
        return False

    def update_state(self, batch_update: Any) -> None:
        """Requests have come to other places of the batch."""
        process_dict_updates(self.kinds, batch_update, lambda params, prompt, _: self._kind(params, len(prompt or ())))

    def apply(self, logits: Tensor, *rest: Any) -> Tensor:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True: greedy sampling passes it over."""
        return True


# Prometheus metrics beside vLLM's own. They are counted where requests end, in the process of the server, by the clock
# that all layers follow: how much a sequence evicts and keeps depends on nothing but its length.

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
    steps, block = max(answer - 1, 0), config.prefill_block
    decoded = steps + (block is not None and prompt > block and prompt % block == 1)
    evictions = max(decoded - 1, 0) // config.evict_every  # before the next step, if there is one
    found = {"seen": prompt + steps, "evictions": evictions}
    if config.budget.tokens is not None:
        found["kept"] = min(found["seen"], config.budget.tokens + decoded - evictions * config.evict_every)
    return found


class FastKVMetrics(StatLoggerBase):
    """Counts the requests of one engine as they end, among `vllm.stat_logger_plugins`; nothing without settings for
    fastkv.
    """

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
