"""One long document, many questions: it is read once, kept in a file, and forked for all questions together.

    python examples/long_document.py
    python examples/long_document.py --model Qwen/Qwen3-4B-Instruct-2507 --text book.txt --budget 1024 \\
        --question "Who is the narrator?" --question "Where does the story begin?"
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastkv
from fastkv import demo
from fastkv.demo.tasks import generate

EXAMPLE = "example: python examples/long_document.py --model PATH --text book.txt --question 'Who is the narrator?'"


def load(name):
    """The model and its tokenizer; "demo" is the bundled one."""
    if name == "demo":
        return demo.load()
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval(), AutoTokenizer.from_pretrained(name)


def document(args):
    """The text and the questions: of the command line, or generated in the language of the bundled model."""
    if args.text:
        return args.text.read_text(), args.question
    sample = generate("facts", args.length, args.seed, questions=args.questions)
    return sample.context, [*args.question] or [*sample.questions]


@torch.no_grad()
def read(model, ids, path):
    """Read the document in blocks and keep what the cache holds in a file; returns its bytes."""
    cache = fastkv.FastKVCache(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    cache.save(path)
    return cache.nbytes()


def answer(model, tokenizer, path, ids, questions, words):
    """Load the file, and let every question go on from a copy of the cache; returns what the model adds."""
    cache = fastkv.FastKVCache.load(path, model)
    asked = tokenizer(questions, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    prompts = torch.cat([ids.expand(len(questions), -1), asked.input_ids.to(ids.device)], 1)  # only questions are read
    mask = torch.cat([torch.ones_like(prompts[:, : ids.shape[1]]), asked.attention_mask.to(ids.device)], 1)
    written = model.generate(
        prompts,
        attention_mask=mask,
        past_key_values=cache.fork(len(questions)),
        max_new_tokens=words,
        do_sample=False,
    )
    return tokenizer.batch_decode(written[:, prompts.shape[1] :], skip_special_tokens=True)


def main(argv=None):
    """Read once, ask everything; returns the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="demo", help="folder or name of a model (default: the bundled one)")
    parser.add_argument("--text", type=Path, help="a UTF-8 file (default: generated for the bundled model)")
    parser.add_argument("--question", action="append", default=[], help="once for each question")
    parser.add_argument("--policy", default="fastkv", choices=fastkv.policies.names(), metavar="NAME")
    parser.add_argument("--budget", type=int, default=512, help="tokens each KV head keeps (default: 512)")
    parser.add_argument("--block", type=int, default=512, help="tokens that are read at a time (default: 512)")
    parser.add_argument("--words", type=int, default=4, help="tokens of an answer (default: 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a generated text (default: 4096)")
    parser.add_argument("--questions", type=int, default=8, help="questions to a generated text (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of a generated text (default: 0)")
    args = parser.parse_args(argv)
    if (args.model == "demo") == bool(args.text) or (args.text and not args.question):
        parser.error("a model of your own needs --text and --question, the bundled one makes both")
    model, tokenizer = load(args.model)
    fastkv.patch(model, args.policy, args.budget, prefill_block=args.block)
    text, questions = document(args)
    ids = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.fastkv"
        start = time.perf_counter()
        nbytes = read(model, ids, path)
        once = time.perf_counter() - start
        print(f"{ids.shape[1]} tokens read once: {once:.1f} s, {nbytes / 2**20:.1f} MiB, in {path.name}")
        start = time.perf_counter()
        answers = answer(model, tokenizer, path, ids, questions, args.words)
        print(f"{len(questions)} questions: {time.perf_counter() - start:.1f} s")
    for question, said in zip(questions, answers):
        print(f"  {question}  [{said.strip()}]")
    return answers


if __name__ == "__main__":
    main()
