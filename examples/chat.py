"""A chat of many turns in bounded memory: one cache for all of them, and its bytes after every turn.

python examples/chat.py
python examples/chat.py --model Qwen/Qwen3-4B-Instruct-2507 --budget 1024 --words 200 --say "Hello!" --say "Go on."
"""

import argparse

import torch

import fastkv
from fastkv.lab import pretrained

SAY = (
    "Hello! My name is Rosalind, and I have a dog called Biscuit.",
    "What is a good breakfast before a long walk?",
    "Tell me something about lighthouses.",
    "And what is the name of my dog?",
)
EXAMPLE = "example: python examples/chat.py --model PATH --budget 1024 --words 200 --say 'Hello!' --say 'Go on.'"


def turns(said, tokenizer):
    """The tokens [1, T] of every turn: one message alone, so that the turns before stay as they were said."""
    for words in said:
        message = [{"role": "user", "content": words}]
        new = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        yield new.input_ids


@torch.no_grad()
def token_bytes(model):
    """Bytes that one token takes in the stock cache."""
    layers = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True).past_key_values.layers
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def main(argv=None):
    """Say every turn; returns, for each, the bytes of the cache and the answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a .gguf file (default: smollm2)")
    parser.add_argument("--say", action="append", default=[], help="once for each turn (default: four of them)")
    parser.add_argument("--policy", default="fastkv", choices=fastkv.policies.names(), metavar="NAME")
    parser.add_argument("--budget", type=int, default=128, help="tokens each KV head keeps (default: 128)")
    parser.add_argument("--words", type=int, default=24, help="tokens of an answer, at most (default: 24)")
    args = parser.parse_args(argv)
    model, tokenizer = pretrained.load(args.model)
    full = token_bytes(model)
    fastkv.patch(model, args.policy, args.budget, prefill_block="auto")
    cache, ids, held = fastkv.FastKVCache(model), torch.empty(1, 0, dtype=torch.long, device=model.device), []
    print("turn  tokens  cache, KiB  full cache, KiB  answer")
    for turn, new in enumerate(turns(args.say or SAY, tokenizer)):
        ids = torch.cat([ids, new.to(model.device)], 1)  # all that was said, of which only what is new is read
        start = ids.shape[1]
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=args.words,
            do_sample=False,
        )
        said = tokenizer.decode(ids[0, start:], skip_special_tokens=True)
        held.append((cache.nbytes(), said))
        seen = cache.get_seq_length()
        sizes = f"{cache.nbytes() / 2**10:11.0f} {seen * full / 2**10:16.0f}"
        print(f"{turn + 1:4} {seen:7} {sizes}  {' '.join(said.split())}")
    return held


if __name__ == "__main__":
    main()
