"""Tiny random models of every supported type, with logits spread widely enough that greedy tokens mean something."""

import copy
import itertools

import pytest
import torch
import transformers as hf

import fastkv
from fastkv.calibration import describe, fingerprint
from fastkv.calibration.fits import QueryCalibration
from fastkv.integrations.transformers.layer import FastKVLayer
from fastkv.policies import QueryStatistics

VOCAB = 98
SHAPE = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
COMMON = {**SHAPE, "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "initializer_range": 0.3}
GEMMA = {
    **COMMON, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 24, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 4,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**COMMON)),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**COMMON, sliding_window=None)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**COMMON)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**COMMON)),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**COMMON, **MOE)),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0)),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**GEMMA)),
}
# Keys and values are made of one latent for all heads.
LATENT = {"deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config(**{**COMMON, **MLA}))}
# Gemma 2 soft-caps its logits, which sdpa cannot do.
COMBINATIONS = [*itertools.product((*FAMILIES, *LATENT), ("eager", "sdpa"))]
COMBINATIONS.remove(("gemma2", "sdpa"))


def build(name="llama", base="sdpa", **changes):
    """A seeded model; `changes` override config fields."""
    cls, config = {**FAMILIES, **LATENT}[name]
    config = copy.deepcopy(config)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = base
    torch.manual_seed(0)
    return cls(config).eval()


def prompt(batch=3, length=50, pads=(0, 7, 19), seed=1):
    """Random ids and mask [B, T]; row b starts with pads[b] padding tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 1, (batch, length), generator=generator)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, pad in enumerate(pads[:batch]):
        ids[row, :pad] = mask[row, :pad] = 0
    return ids, mask


def generate(model, ids, mask=None, new=12, **options):
    """Greedy tokens unless the options say otherwise; always exactly `new` of them."""
    options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, **options}
    return model.generate(ids, attention_mask=mask, **options)


def compressed_layers(cache):
    """Indices of the layers that fastkv keeps."""
    return [index for index, layer in enumerate(cache.layers) if isinstance(layer, FastKVLayer)]


def held(cache, layer, row):
    """For every head of a row, the sets of positions with and without a value."""
    return positions(cache.layers[layer].state, row)


def positions(state, row):
    """For every head of a row, the sets of positions that each tier of slots holds."""
    return [
        [set(tier["positions"][row, head, : int(tier.lengths[row, head])].tolist()) for tier in state.tiers.values()]
        for head in range(state.heads)
    ]


def account(cache, seen, sinks=0, recent=0):
    """Every head stored or evicted each token that its row has seen [B], once, and stored the ends; all is finite."""
    for layer in compressed_layers(cache):
        state, stored = cache.layers[layer].state, cache.stored(layer)
        assert torch.equal(state.seen, seen)
        assert torch.equal(stored + cache.moments(layer).count, seen[:, None].expand_as(stored))
        for row, end in enumerate(seen.tolist()):
            for head, tiers in enumerate(held(cache, layer, row)):
                kept = set().union(*tiers)
                assert len(kept) == sum(map(len, tiers)) == int(stored[row, head]) and kept <= set(range(end))
                assert {*range(min(sinks, end)), *range(max(end - recent, 0), end)} <= kept
        assert all(tensor.isfinite().all() for _, tensor in state.named_tensors())


def query_calibration(model, seed=0):
    """Random statistics of the queries of a Llama-like model, all dimensions turned."""
    config, draw = model.config, torch.Generator().manual_seed(seed)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = {
        layer: QueryStatistics(
            torch.randn(config.num_attention_heads, dim, generator=draw),
            torch.rand(config.num_attention_heads, dim // 2, generator=draw),
        )
        for layer in range(config.num_hidden_layers)
    }
    return QueryCalibration(layers, fingerprint(config), describe(config), 1000)


PATTERN = "1.0\t0.1\n0.2\t0.9\n0.8\t0.7\n0.1\t0.2\n"  # retrieval heads: one, the other, both, none


def policy(name, directory, model=None, pattern=PATTERN):
    """The policy of that name, with the files that DuoAttention and TriAttention need for the model or `build()`."""
    if name == "triattention":
        path = directory / "queries.safetensors"
        query_calibration(model or build()).save(path)
        return fastkv.policies.get(name, calibration=str(path))
    if name != "duoattention":
        return fastkv.policies.get(name)
    path = directory / "pattern.tsv"
    path.write_text(pattern)
    return fastkv.policies.get(name, pattern=str(path))


def small(**options):
    """A budget of 20 tokens, 2 of them sinks and 4 recent."""
    return fastkv.Budget(**{"tokens": 20, "sinks": 2, "recent": 4, **options})


def raises(message, call, *args, **options):
    """The call raises FastKVError with one sentence that matches the message."""
    with pytest.raises(fastkv.FastKVError, match=message) as error:
        call(*args, **options)
    text = str(error.value)
    assert "\n" not in text and len(text) > 30, text


def refused(message, call, *args, **options):
    """The call raises FastKVError with one sentence that holds the message, which is returned."""
    with pytest.raises(fastkv.FastKVError) as error:
        call(*args, **options)
    text = str(error.value)
    assert message in text and not text.endswith(".") and "\n" not in text and ";" in text, text
    return text


def projected(model, ids, *names):
    """{(name, layer): [B, T, H, D] float64}: its q, k or v of full-attention layers before any rotation, with norms."""
    found, hooks = {}, []

    def record(place):
        def hook(module, args, out):
            heads_first = out.ndim == 4 and out.shape[1] != ids.shape[1]
            found[place] = (out.transpose(1, 2) if heads_first else out).reshape(*ids.shape, -1, 16).double()

        return hook

    for module in model.modules():
        for name in names if hasattr(module, "q_proj") else ():
            last = getattr(module, f"{name}_norm", getattr(module, f"{name}_proj"))
            hooks.append(last.register_forward_hook(record((name, module.layer_idx))))
    model(ids)
    for hook in hooks:
        hook.remove()
    return found
