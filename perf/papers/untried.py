"""Rows that a small model on a CPU cannot say anything about, and why."""

from .row import Row

ROWS = (
    Row("", "ManifoldKV", "Tables 1, 2, 5, 10, 12, 16, 17, Fig. 2",
        "global means collapse at 64K, windows of 4K do not",
        why="the model's positions end at 8,192 tokens"),
    Row("", "ManifoldKV", "Tables 3, 8, 9, 11, 14", "the same on Gemma 3, Qwen 3, Ministral",
        why="needs models of 8 and more billion weights"),
    Row("", "KeyDiff", "Tables 3 to 6", "MATH-500 with DeepSeek-R1 distillates", why="needs a model that reasons"),
    Row("", "KeyDiff", "Figs. 7, 17", "time to the first token on a GPU", why="this is a CPU"),
    Row("", "KeyDiff", "Tables 10, 11", "LongBench with Llama 3 and Qwen 2.5",
        why="needs LongBench, whose texts do not fit into 8,192 tokens"),
    Row("", "MomentKV", "Tables 1, 2, 7, 8, Fig. 4", "LongBench and RULER at 16K",
        why="the model reads 8,192 tokens; needs LongBench"),
    Row("", "MomentKV", "Tables 4, 5", "1.6 ms a token more on a GPU; 6.4 % of memory",
        why="no GPU; no model of that size"),
    Row("", "Compactor", "Fig. 3", "time of the selection on an H100", why="no GPU"),
    Row("", "Compactor", "Figs. 1, 7 (finetuned), Table 1, Table 5", "LongBench, also after finetuning on its texts",
        why="needs LongBench, and nothing is trained here"),
    Row("", "VECTOR", "Tables 2, 3", "LongBench with four policies", why="needs LongBench"),
    Row("", "VECTOR", "Fig. 4", "needles at 3K to 30K tokens", why="the model reads 8,192 tokens; at 1,024 see Fig. 3"),
)  # fmt: skip
