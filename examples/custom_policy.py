"""A policy of your own: a frozen dataclass that says how much each token matters, compared with some that are there.

python examples/custom_policy.py
python examples/custom_policy.py --model Qwen/Qwen3-4B-Instruct-2507 --prompt prompt.txt --budget 1024 --words 50
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastkv
from fastkv import demo
from fastkv.demo.tasks import generate
from fastkv.policies import Policy, Signals

EXAMPLE = "example: python examples/custom_policy.py --model PATH --prompt prompt.txt --budget 1024 --words 50"


@dataclass(frozen=True)
class FarAndLong(Policy):
    """Keep keys that lie far from their mean, the more the longer their value is.

    Args: power: of the value's length; 0 looks at keys alone.
    """

    name: ClassVar[str] = "far-and-long"
    power: float = 0.5

    def score(self, signals: Signals) -> torch.Tensor:
        """[B, Hkv, N] fp32, larger = keep. Sinks, the latest tokens, padding and ties are not a policy's business."""
        keys, valid = signals.keys.float(), signals.valid.unsqueeze(-1)
        mean = (keys * valid).sum(2, keepdim=True) / valid.sum(2, keepdim=True).clamp_min(1)
        return (keys - mean).norm(dim=-1) * signals.values.float().norm(dim=-1) ** self.power


def load(name):
    """The model and its tokenizer; "demo" is the bundled one."""
    if name == "demo":
        return demo.load()
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)


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
    """Compare the policies; returns, for each, the share of words that are the full cache's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="demo", help="folder or name of a model (default: the bundled one)")
    parser.add_argument("--prompt", type=Path, help="a UTF-8 file (default: generated for the bundled model)")
    parser.add_argument("--against", default="manifold,knorm,streaming,random", metavar="NAME,...", help="policies")
    parser.add_argument("--budget", type=int, default=128, help="tokens each KV head keeps (default: 128)")
    parser.add_argument("--words", type=int, default=4, help="tokens to write (default: 4)")
    parser.add_argument("--power", type=float, default=0.5, help="of FarAndLong (default: 0.5)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a generated text (default: 1024)")
    parser.add_argument("--texts", type=int, default=8, help="that are generated (default: 8)")
    args = parser.parse_args(argv)
    if (args.model == "demo") == bool(args.prompt):
        parser.error("a model of your own needs --prompt, the bundled one makes its own")
    model, tokenizer = load(args.model)
    samples = [generate("facts", args.length, seed) for seed in range(args.texts)]
    texts = [args.prompt.read_text()] if args.prompt else [f"{one.context} {one.questions[0]}" for one in samples]
    ids = tokenizer(texts, return_tensors="pt").input_ids.to(model.device)
    full, held = write(model, ids, args.words)
    print(f"{'full cache':<14}{held / 2**10:8.0f} KiB")
    agreed = {}
    for policy in (FarAndLong(power=args.power), *map(fastkv.policies.get, args.against.split(","))):
        with fastkv.patched(model, policy, args.budget):
            written, held = write(model, ids, args.words)
        agreed[policy.name] = (written == full).float().mean().item()
        print(f"{policy.name:<14}{held / 2**10:8.0f} KiB  {agreed[policy.name]:4.0%} of the words of the full cache")
    return agreed


if __name__ == "__main__":
    main()
