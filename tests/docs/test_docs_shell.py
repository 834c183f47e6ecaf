"""The shell commands and the YAML of the pages: the command line takes the words, and the settings exist."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import build_parsers
from finetune.training.config import FinetuneConfig
from pretrain.common.errors import InputError
from pretrain.common.settings import load, read_values
from pretrain.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PHASE = {"sequence_length": 32, "global_sequences": 4, "steps": 2, "peak_learning_rate": 1e-3}
# What a page leaves out of a config.
PRETRAIN = {"corpus": {"dir": "corpus", "sources": [{"kind": "books", "path": "text"}]}, "phases": [PHASE]}
PRETRAIN["model"] = {"max_positions": 8192}
TASKS = {"classification", "entities", "questions", "task"}
FINETUNE = {"start_from": "bert", "classification": {"train": "train.csv", "dev": "dev.csv"}}
SEPARATORS = ("|", ">", ">>", "&&", ";")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours with arguments, in blocks and between backticks."""
    lines = [line for block in blocks(page, "sh") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    plain = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.M | re.S)
    for line in [*lines, *re.findall(r"`((?:\./launch\.sh|bertrain) [\w-]+ [^`]+)`", plain)]:
        for _, part in itertools.groupby(shlex.split(line, comments=True), lambda word: word in SEPARATORS):
            program, *words = part
            if words and program.endswith(("launch.sh", "bertrain")):
                yield words


def accepted(kind: Any, values: dict[str, Any], overrides: Sequence[str] = ()) -> str:
    """The reason for which the config of a `kind` refuses these values; "" if it takes them."""
    try:
        load({"name": "it", **values}, kind, overrides)
    except InputError as error:
        return str(error)
    return ""


def filled(values: Any, base: Any) -> Any:
    if not isinstance(values, dict) or not isinstance(base, dict):
        return values
    return {**base, **{key: filled(value, base.get(key)) for key, value in values.items()}}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_command_line_takes_what_a_page_types(page: Path) -> None:
    parser, known = build_parsers()
    for block in blocks(page, "sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    for words in commands(page):
        if words[0] not in known:  # of the clone, or of a job
            assert words[0] in ("test", "docs", "bench", "job", "help", "COMMAND"), words
            continue
        # An address would be asked.
        given = parser.parse_args([word.replace("s3://", "").replace("KIND", "slurm") for word in words])
        sets = [one for one in getattr(given, "set", None) or () if not one.startswith("place.")]
        why = accepted(PretrainConfig, PRETRAIN, sets), accepted(FinetuneConfig, FINETUNE, sets)
        assert not all(why), (words, why)
        assert [word for word in words if word.startswith("configs/") and not list(ROOT.glob(word))] == []


YAML = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize(("page", "block"), YAML, ids=[f"{page.name}-{n}" for n, (page, _) in enumerate(YAML)])
def test_the_settings_of_a_page_exist(page: Path, block: str, tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text(textwrap.dedent(block), encoding="utf-8")
    values = read_values(tmp_path / "it.yaml")
    if values.keys() <= {"sources"}:
        values = {"corpus": values}
    if "web.yaml with" in block:  # and one more source
        (tmp_path / "it.yaml").write_text(next(one for at, one in YAML if at == page and "# web.yaml" in one))
        values = filled(values, read_values(tmp_path / "it.yaml"))
        values["corpus"]["sources"].append({"kind": "jsonl", "name": "textbooks", "path": "textbooks.jsonl"})
    finetune = {"start_from": "bert"} if values.keys() & TASKS else FINETUNE
    kind, base = (FinetuneConfig, finetune) if values.keys() & {*TASKS, "training"} else (PretrainConfig, PRETRAIN)
    assert accepted(kind, filled(values, base)) == ""
