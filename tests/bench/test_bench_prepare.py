"""`bench prepare --memory`: texts of any size made of a file's sentences, and what preparing them takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pretrain.common.errors import InputError
from tests.bench import prepare
from tests.bench.prepare_checks import write_recombined
from tests.bench.prepare_data import read_documents
from tests.chaos import wait_for
from tests.corpus.test_filters import prose

DOCUMENTS = [prose(seed, words).split("\n") for seed, words in enumerate((90, 300, 1200, 3000))]


def test_recombined_articles_have_the_sentences_and_the_lengths_of_the_documents(tmp_path: Path) -> None:
    path = write_recombined(DOCUMENTS, tmp_path / "text.txt", 100_000)
    found = list(read_documents(path))
    assert {len(article) for article in found} == {len(document) for document in DOCUMENTS}
    given = {sentence for document in DOCUMENTS for sentence in document}
    drawn = {sentence.strip() for article in found for sentence in article}
    assert drawn <= given
    assert len(drawn) > 0.9 * len(given)
    assert 100_000 <= path.stat().st_size < 110_000
    again = write_recombined(DOCUMENTS, tmp_path / "again.txt", 50_000).read_bytes()
    assert path.read_bytes().startswith(again), "the same draws at every size"


def test_peak_memory_is_measured_by_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_recombined(DOCUMENTS, tmp_path / "file.txt", 100_000)
    assert prepare.main(["--file", str(file), "--memory", "0.2", "0.4", "--filters", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["memory"]
    assert large["documents"] > 1.3 * small["documents"] > 0
    for row, megabytes in ((small, 0.2), (large, 0.4)):
        assert row["megabytes"] == pytest.approx(megabytes, rel=0.1)
        assert 20 < row["private_mb"] < row["resident_mb"] < 4000
        assert row["seconds"] > 0


def test_a_terminated_measurement_leaves_neither_its_process_nor_its_text(tmp_path: Path) -> None:
    file = write_recombined(DOCUMENTS, tmp_path / "file.txt", 100_000)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "tests.bench", "prepare", "--file", str(file), "--memory", "50"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}) as measuring:
        wait_for(lambda: psutil.Process(measuring.pid).children())
        started = psutil.Process(measuring.pid).children(recursive=True)
        assert list(scratch.iterdir())
        measuring.terminate()
        assert measuring.wait(timeout=60) == 128 + signal.SIGTERM
    psutil.wait_procs(started, timeout=60)
    assert not [process for process in started if process.is_running()]
    assert not list(scratch.iterdir())


def test_escaped_characters_stay(tmp_path: Path) -> None:
    path = write_recombined([["One < two & three."]], tmp_path / "text.txt", 1)
    assert list(read_documents(path)) == [["One < two & three."]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filters"], "--filters: belongs to --memory"),
        (["--memory", "1", "0"], "--memory: each size"),
        (["--memory", "nan"], "--memory: each size"),
        (["--memory", "1", "--file", __file__], "no sentence"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prepare.main(arguments)
