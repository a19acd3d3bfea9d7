"""How fastkv plugs into vLLM: `register` is its entry point among `vllm.general_plugins`.

vLLM is imported when it calls `register`, and not before. Without settings for fastkv in vLLM's `additional_config`,
every layer keeps vLLM's own backend.
"""

from __future__ import annotations

BACKENDS = "fastkv.integrations.vllm.backend"


def register() -> None:
    """Tell vLLM about the backends. It calls this in each of its processes, perhaps several times."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{BACKENDS}.FastKVBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{BACKENDS}.CPUBackend")  # the only one that a CPU may have
