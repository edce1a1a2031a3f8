# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the pages say runs: Python blocks from top to bottom, scripts and flags of commands as the scripts know them."""

import ast
import contextlib
import functools
import io
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from apart import run_script
from helpers import COMMANDS, ROOT, random_model

from modeling_essm import build_byte_tokenizer

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CARDS = [ROOT / "hub_configs" / name for name in ("README.md", "essm-novels-6m/README.md")]
SCRIPT = re.compile(r"\b(?:train|examples|docs)/[\w/]+\.(?:py|sh)\b")
COMMAND = re.compile(
    rf"(?:-m )((?:essm_train|benchmarks)\.\w+)|(?<![\w/-])({'|'.join(sorted(COMMANDS, reverse=True))})(?![\w-])"
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Lines of bash blocks, and what stands in single backquotes and calls a script."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return lines + [
        code for code in re.findall(r"`([^`\n]+)`", page.read_text()) if SCRIPT.search(code) or COMMAND.search(code)
    ]


@functools.cache
def flags_of(module: str, *task: str) -> frozenset[str]:
    """What a command lists in its help, or in that of a task."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *task, "--help"])
        with contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as stop:
            runpy.run_module(module, run_name="__main__")
    assert not stop.value.code, stop.value
    return frozenset(re.findall(r"--\w+", shown.getvalue()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that the pages speak of."""
    model = random_model(block="elastic", num_hidden_layers=8, num_spectral_channels=8)  # as the first command's
    model.save_pretrained(tmp_path / "runs/train_clm/model")
    build_byte_tokenizer().save_pretrained(tmp_path / "runs/train_clm/model")
    (tmp_path / "hub_configs").symlink_to(ROOT / "hub_configs")
    (tmp_path / "heldout.txt").write_bytes(bytes(range(97, 123)) * 60)
    (tmp_path / "books").mkdir()
    (tmp_path / "books/a.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page, folder):
    code = "\n".join(blocks(page, "python"))
    if not code:
        pytest.skip("no Python on this page")
    ast.parse(code)
    if "budget_profile" in code or '"small"' in code:
        shutil.copytree(calibrated(), "runs/train_clm/model", dirs_exist_ok=True)
    (folder / "blocks.py").write_text(code)
    run = run_script(folder / "blocks.py")
    assert run.returncode == 0, run.stderr[-3000:]


@functools.cache
def calibrated():
    """The model of the first page that needs it, calibrated."""
    arguments = ["--model", "runs/train_clm/model", "--text_files", "heldout.txt", "--budgets", "2", "6", "8"]
    short = ["--batch_sizes", "1", "--prompt_length", "16", "--decode_tokens", "2", "--rounds", "1"]
    run = run_script("essm_train.calibrate", *arguments, *short)
    assert run.returncode == 0, run.stderr[-3000:]
    return shutil.copytree("runs/train_clm/model", Path.cwd().parent / "calibrated")


def test_commands_name_scripts_and_flags_that_exist():
    seen = 0
    for page in [*PAGES, *(ROOT / "benchmarks/results").glob("*.md")]:
        for command in commands(page):
            if script := SCRIPT.search(command):
                assert (ROOT / script.group()).is_file(), (page, command)
            for path in re.findall(r"train/launch/[\w.]+", command):
                assert (ROOT / path).is_file(), (page, command)
            if name := COMMAND.search(command):
                seen += 1
                module = name[1] or COMMANDS[name[2]].partition(":")[0]
                after = shlex.split(command[name.end() :].replace("`", ""))
                has_tasks = module in ("essm_train.make_task_data", "essm_train.prepare_audio") and after
                flags = flags_of(module, *after[:1] if has_tasks else ())
                given = {word.split("=")[0] for word in after if word.startswith("--")}
                assert given <= flags, (page, command, given - flags)
    assert seen > 20


def test_the_script_draws_the_pictures(tmp_path):
    """All that lie in docs/figures but a screenshot, small and not empty; and every one of them stands on a page."""
    run = run_script("docs/figures/make.py", tmp_path, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    committed = {path.name: path for path in (ROOT / "docs/figures").glob("*.png")}
    drawn = {path.name: path for path in tmp_path.iterdir()}
    assert set(committed) - set(drawn) <= {"browser.png"} and set(drawn) <= set(committed)
    text = "".join(page.read_text() for page in PAGES)
    for name, path in committed.items():
        assert f"figures/{name})" in text
        for picture in (path, drawn.get(name, path)):
            assert 5_000 < picture.stat().st_size < 80_000, picture
