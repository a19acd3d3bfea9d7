"""Many questions about one long document: it is read once, saved to a file, and forked for all questions.

    python examples/long_document.py
    python examples/long_document.py --model Qwen/Qwen3-4B-Instruct-2507 --text book.txt --budget 1024 \\
        --question "Who is the narrator?" --question "Where does the story begin?"
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

import fastkv
from fastkv.lab import facts, pretrained

EXAMPLE = "example: python examples/long_document.py --model PATH --text book.txt --question 'Who is the narrator?'"


def document(args, tokenizer):
    """Tokens of the text and of every question, and the questions: from the command line, or facts in a real text."""
    if args.text is None:
        sample = facts.sample(tokenizer, args.length, args.seed)
        return sample.prefix, [one.ids for one in sample.questions], [one.text for one in sample.questions]
    around = [facts.around(tokenizer, question) for question in args.question]
    text = tokenizer(args.text.read_text(), add_special_tokens=False, verbose=False).input_ids
    return around[0][0] + text, [after for _, after in around], args.question


@torch.no_grad()
def read(model, ids, path):
    """Read the document in blocks and save the cache; returns the bytes of the cache."""
    cache = fastkv.FastKVCache(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    cache.save(path)
    return cache.nbytes()


def answer(model, tokenizer, path, ids, questions, words):
    """Load the file and ask every question of a copy of the cache; returns the answers."""
    cache = fastkv.FastKVCache.load(path, model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = tokenizer.pad({"input_ids": questions}, padding_side="left", return_tensors="pt")
    prompts = torch.cat([ids.expand(len(questions), -1), asked.input_ids.to(ids.device)], 1)  # only questions are read
    mask = torch.cat([torch.ones_like(prompts[:, : ids.shape[1]]), asked.attention_mask.to(ids.device)], 1)
    written = model.generate(
        prompts, attention_mask=mask, past_key_values=cache.fork(len(questions)), max_new_tokens=words, do_sample=False
    )
    return tokenizer.batch_decode(written[:, prompts.shape[1] :], skip_special_tokens=True)


def main(argv=None):
    """Read once, ask everything; returns the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=EXAMPLE)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder or a .gguf file (default: smollm2)")
    parser.add_argument("--text", type=Path, help="a UTF-8 file (default: docstrings of Python with facts in them)")
    parser.add_argument("--question", action="append", default=[], help="a question about your text; may be repeated")
    parser.add_argument("--policy", default="fastkv", choices=fastkv.policies.names(), metavar="NAME")
    parser.add_argument("--budget", type=int, default=512, help="tokens each KV head keeps (default: 512)")
    parser.add_argument("--block", type=int, default=512, help="tokens of a prompt block (default: 512)")
    parser.add_argument("--words", type=int, default=16, help="tokens of an answer (default: 16)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the text with facts (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the facts (default: 0)")
    args = parser.parse_args(argv)
    if bool(args.text) != bool(args.question):
        parser.error("a text of your own needs --question, and a question needs --text")
    model, tokenizer = pretrained.load(args.model)
    fastkv.patch(model, args.policy, args.budget, prefill_block=args.block)
    text, asked, questions = document(args, tokenizer)
    ids = torch.tensor([text])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.fastkv"
        start = time.perf_counter()
        nbytes = read(model, ids, path)
        once = time.perf_counter() - start
        print(f"{ids.shape[1]} tokens read once: {once:.1f} s, {nbytes / 2**20:.1f} MiB, in {path.name}")
        start = time.perf_counter()
        answers = answer(model, tokenizer, path, ids, asked, args.words)
        print(f"{len(questions)} questions: {time.perf_counter() - start:.1f} s")
    for question, said in zip(questions, answers):
        print(f"  {question}  [{said.strip()}]")
    return answers


if __name__ == "__main__":
    main()
