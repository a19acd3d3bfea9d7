"""A custom policy, which is a frozen dataclass that scores tokens, compared with policies of fastkv.

python examples/custom_policy.py
python examples/custom_policy.py --model Qwen/Qwen3-4B-Instruct-2507 --prompt prompt.txt --budget 1024 --words 50
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import fastkv
from fastkv.lab import facts, pretrained
from fastkv.policies import Policy, Signals

EXAMPLE = "example: python examples/custom_policy.py --model PATH --prompt prompt.txt --budget 1024 --words 50"


@dataclass(frozen=True)
class FarAndLong(Policy):
    """Keep keys that lie far from their mean, weighted by the norm of their value.

    Args: power: exponent of the value's norm; 0 ignores values.
    """

    name: ClassVar[str] = "far-and-long"
    power: float = 0.5

    def score(self, signals: Signals) -> torch.Tensor:
        """[B, Hkv, N] fp32, larger = keep. The library handles sinks, recent tokens, padding and ties."""
        keys, valid = signals.keys.float(), signals.valid.unsqueeze(-1)
        mean = (keys * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp_min(1)
        return (keys - mean).norm(dim=-1) * signals.values.float().norm(dim=-1) ** self.power


def write(model, ids, words):
    """The tokens [B, words] that the model adds, and the bytes of its cache for each sequence."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=words,
        min_new_tokens=words,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return out.sequences[:, ids.shape[1] :], nbytes(out.past_key_values) // len(ids)


def nbytes(cache):
    """Bytes of a compressed cache, or of transformers' own."""
    if isinstance(cache, fastkv.FastKVCache):
        return cache.nbytes()
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def main(argv=None):
    """Compare the policies; returns, for each, the share of tokens that equal the full cache's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a .gguf file (default: smollm2)")
    parser.add_argument("--prompt", type=Path, help="a UTF-8 file (default: real texts with facts, and questions)")
    parser.add_argument(
        "--against", default="manifold,knorm,streaming,random", metavar="NAME,...", help="policies to compare with"
    )
    parser.add_argument("--budget", type=int, default=128, help="tokens each KV head keeps (default: 128)")
    parser.add_argument("--words", type=int, default=16, help="tokens to write (default: 16)")
    parser.add_argument("--power", type=float, default=0.5, help="of the value's norm (default: 0.5)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a text with facts (default: 512)")
    parser.add_argument("--texts", type=int, default=3, help="number of texts with facts (default: 3)")
    args = parser.parse_args(argv)
    if min(args.texts, args.words) < 1:
        parser.error(f"--texts and --words must be at least 1, got {args.texts} and {args.words}")
    model, tokenizer = pretrained.load(args.model)
    prompts = [tokenizer(args.prompt.read_text()).input_ids] if args.prompt else []
    for seed in range(0 if args.prompt else args.texts):
        sample = facts.sample(tokenizer, args.length, seed)
        prompts.append(sample.prefix + sample.questions[0].ids)
    shortest = min(map(len, prompts))  # all end with their question, and the longer ones lose their first tokens
    ids = torch.tensor([prompt[-shortest:] for prompt in prompts])
    full, held = write(model, ids, args.words)
    print(f"{'full cache':<14}{held / 2**10:8.0f} KiB")
    agreed = {}
    for policy in (FarAndLong(power=args.power), *map(fastkv.policies.get, args.against.split(","))):
        with fastkv.patched(model, policy, args.budget):
            written, held = write(model, ids, args.words)
        agreed[policy.name] = (written == full).float().mean().item()
        print(f"{policy.name:<14}{held / 2**10:8.0f} KiB  {agreed[policy.name]:4.0%} of the tokens of the full cache")
    return agreed


if __name__ == "__main__":
    main()
