"""A chat of many turns in bounded memory: one cache for all of them, and its bytes after every turn.

python examples/chat.py
python examples/chat.py --model Qwen/Qwen3-4B-Instruct-2507 --budget 1024 --words 200 --say "Hello!" --say "Go on."
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastkv
from fastkv import demo
from fastkv.demo.tasks import generate

EXAMPLE = "example: python examples/chat.py --model PATH --budget 1024 --words 200 --say 'Hello!' --say 'Go on.'"


def load(name):
    """The model and its tokenizer; "demo" is the bundled one."""
    if name == "demo":
        return demo.load()
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)


def turns(args, tokenizer):
    """The tokens [1, T] of every turn, and what is to be answered, None if nobody knows.

    The bundled model does not chat: it is told a text in each turn, and asked about one it was told before.
    """
    if args.model != "demo":
        for said in args.say:  # one message alone, so that the turns before stay as they were said
            message = [{"role": "user", "content": said}]
            new = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            yield new.input_ids, None
        return
    told = [generate("facts", args.length, args.seed + turn) for turn in range(args.turns)]
    for turn, sample in enumerate(told):
        asked = told[max(turn - args.ago, 0)]
        text = f"{sample.context} {asked.questions[0]}"
        yield tokenizer(text, add_special_tokens=turn == 0, return_tensors="pt").input_ids, asked.answers[0]


@torch.no_grad()
def token_bytes(model):
    """Bytes that one token takes in the stock cache."""
    layers = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True).past_key_values.layers
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


def main(argv=None):
    """Say every turn; returns, for each, the bytes of the cache, the answer and what it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="demo", help="folder or name of a chat model (default: the bundled one)")
    parser.add_argument("--say", action="append", default=[], help="to a model of your own, once for each turn")
    parser.add_argument("--policy", default="fastkv", choices=fastkv.policies.names(), metavar="NAME")
    parser.add_argument("--budget", type=int, default=384, help="tokens each KV head keeps (default: 384)")
    parser.add_argument("--words", type=int, default=4, help="tokens of an answer, at most (default: 4)")
    parser.add_argument("--turns", type=int, default=16, help="of the bundled model (default: 16)")
    parser.add_argument("--length", type=int, default=256, help="tokens of its turns (default: 256)")
    parser.add_argument("--ago", type=int, default=1, help="it is asked about the text so many turns ago (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of its first text (default: 0)")
    args = parser.parse_args(argv)
    if (args.model == "demo") == bool(args.say):
        parser.error("a model of your own needs --say, the bundled one has its own turns")
    model, tokenizer = load(args.model)
    full = token_bytes(model)
    fastkv.patch(model, args.policy, args.budget, prefill_block="auto")
    cache, ids, held = fastkv.FastKVCache(model), torch.empty(1, 0, dtype=torch.long, device=model.device), []
    print("turn  tokens  cache, KiB  full cache, KiB  answer")
    for turn, (new, expected) in enumerate(turns(args, tokenizer)):
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
        held.append((cache.nbytes(), said, expected))
        mark = "" if expected is None else "  (right)" if said == expected else f"  (it was {expected})"
        seen = cache.get_seq_length()
        print(f"{turn + 1:4} {seen:7} {cache.nbytes() / 2**10:11.0f} {seen * full / 2**10:16.0f}  {said}{mark}")
    return held


if __name__ == "__main__":
    main()
