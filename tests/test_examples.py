"""The scripts and the notebook in examples/ run as they are, on a toy and on SmolLM2."""

import importlib.util
import json
from pathlib import Path

import pytest

from tools.notebook import execute, printed

from .toy import MODEL_DIR, generate, load

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
SMALL = {
    "long_document": ["--length", "400", "--budget", "128", "--words", "4"],
    "custom_policy": "--length 256 --texts 2 --budget 64 --words 4 --against manifold,random".split(),
}


def main_of(name):
    """The script's `main`, which takes a command line."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture
def folder(tmp_path):
    """A checkpoint like one that is downloaded: the toy, with a template for chats."""
    _, tokenizer = load()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(MODEL_DIR / name)
    return tmp_path


def test_every_script_is_run():
    assert sorted(SMALL) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_and_gives_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main_of(name)(["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and "--model" in said and f"example: python examples/{name}.py" in said


@pytest.mark.parametrize(
    "name, given, said",
    [*(("long_document", given, "needs --") for given in (["--text", "somewhere"], ["--question", "What?"])),
     ("custom_policy", ["--texts", "0"], "must be at least 1, got 0 and 16")],
)  # fmt: skip
def test_what_is_missing_is_said(name, given, said, folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main_of(name)(["--model", str(folder), *given])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_long_document(folder, capsys):
    assert len(main_of("long_document")(["--model", str(folder), *SMALL["long_document"]])) == 6


def test_a_policy_of_ones_own(folder, capsys):
    agreed = main_of("custom_policy")(["--model", str(folder), *SMALL["custom_policy"]])
    assert list(agreed) == ["far-and-long", "manifold", "random"] and all(0 <= one <= 1 for one in agreed.values())


@pytest.mark.real
@pytest.mark.parametrize("name", SCRIPTS)
def test_with_smollm2(name, capsys):
    assert main_of(name)([*SMALL[name], "--budget", "128"])


def test_questions_of_several_lengths_to_a_text_of_ones_own(folder, capsys):
    """Each is answered as if it were the only one."""
    sample = generate("facts", 512, 0, questions=2)
    (folder / "text.txt").write_text(sample.context)
    short = sample.questions[1].partition("answer : ")[2]
    given = ["--model", str(folder), "--text", str(folder / "text.txt"), "--budget", "256", "--words", "4"]
    run = main_of("long_document")
    both = run([*given, "--question", sample.questions[0], "--question", short])
    alone = [run([*given, "--question", question])[0] for question in (sample.questions[0], short)]
    assert both == alone and both[0].strip() == sample.answers[0]


@pytest.mark.real
@pytest.mark.calibrated
def test_the_notebook_runs():
    """Its cells print as many lines as the file says; `python -m tools.notebook` writes them."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = list(execute(notebook))
    assert len(cells) >= 5
    for cell, said in cells:
        assert len(said.splitlines()) == len(printed(cell).splitlines()) > 0
    compressed = cells[2][1].splitlines()[1:]  # most of what the full cache answers
    assert 2 * sum(line.startswith("right:") for line in compressed) > len(compressed) > 4
