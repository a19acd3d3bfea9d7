"""Tests inside vLLM, which has an environment and a command of its own: make test-vllm."""
