"""The command `adapt`: which texts it takes, the config it writes, what it says it gained and lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import build_parsers, main
from finetune.workflows.adaptation import settings
from finetune.workflows.adaptation.stages import check_arguments, run
from finetune.workflows.adaptation.texts import find_sources, held_out_share
from pretrain.batches.loader import BatchMaker
from pretrain.common.errors import InputError, StoppedError
from pretrain.common.files import write_manifest
from pretrain.config import ModelConfig, load_config
from pretrain.planning import pace
from pretrain.reporting.gains import gain_lines, gains
from pretrain.run import api
from pretrain.run.continuation import Corpora
from tests.distributed import ROOT, run_program
from tests.run.test_start import JARGON, make_pretrained, write_text
from tests.tasks.refusals import refused
from tests.tiny_checkpoints import WORDS


def options(*words: str) -> Any:
    return build_parsers()[0].parse_args(["adapt", *words])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small pretrained model."""
    folder = tmp_path_factory.mktemp("pretrained") / "start"
    make_pretrained(folder)
    return str(folder)


def test_a_text_becomes_a_model_and_a_report(start: str, tmp_path: Path) -> None:
    """The same command again finds everything done."""
    write_text(tmp_path / "text", [*WORDS, *JARGON])
    write_text(tmp_path / "other", WORDS, seed=7)
    words = ["text", "--from", start, "--out", "out", "--steps", "4", "--general", "other", "--new-words", "3"]
    sets = ["engine.precision=fp32", "engine.compile=false", "tracking.wandb=off", "corpus.processes=1"]
    command = ["adapt", *words, "--workers", "1"]
    command += [word for one in sets for word in ("--set", one)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BERTRAIN_PROGRAM": "./launch.sh"}
    for again in (False, True):
        result = run_program(main, command, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr + result.stdout
        assert ("already finished" in result.stdout) == again
        assert "new text: held-out MLM loss, nats" in result.stdout
        assert "general text: held-out MLM loss, nats" in result.stdout
        assert "Next: ./launch.sh finetune CONFIG --from out/model" in result.stdout
        assert "Next: ./launch.sh export" not in result.stdout
    out = tmp_path / "out"
    config = load_config(out / "adapt.yaml")
    assert (config.model.hidden, config.phases[0].sequence_length, config.adaptation.replay_share) == (32, 64, 0.2)
    assert config.corpus.min_document_words == 0, "no text of a domain is too short"
    assert_loads(out / "model", config.corpus.vocabulary.size)
    page = (out / "run/report.html").read_text()
    assert "Changes since the initial checkpoint" in page
    assert "general text: held-out MLM loss, nats" in page
    changed = run_program(main, [*command, "--steps", "5"], cwd=tmp_path, env=environment)
    assert changed.returncode == 2
    assert "was started with different options (phases.0.steps (4 -> 5))" in changed.stderr


def assert_loads(folder: Path, size: int) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(folder)) == size
    assert AutoModelForMaskedLM.from_pretrained(folder).config.vocab_size == size


def test_a_refused_stage_can_be_corrected(start: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    write_text(tmp_path / "text", WORDS)
    words = [str(tmp_path / "text"), "--from", start, "--out", str(tmp_path / "out")]
    added: list[int] = []

    def refuse(config: Path) -> None:
        added.append(load_config(config).corpus.vocabulary.added_words)
        raise InputError("refused")

    monkeypatch.setattr(api, "prepare", refuse)
    for more in (["--new-words", "3"], []):
        refused("refused", run, options(*words, *more))
    assert added == [3, 0]
    assert "same command again" not in capsys.readouterr().out


def test_steps_are_timed_once_for_a_folder(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "text", WORDS)
    out, timed = tmp_path / "out", []
    words = ["--from", start, "--out", str(out), "--minutes", "7"]
    arguments = options(str(tmp_path / "text"), *words)

    def fit(config: Any, minutes: float, _: Any) -> Any:
        timed.append(minutes)
        return pace.scale(config, 40)

    def stop(*_: Any, **__: Any) -> None:
        write_manifest(out / "run/checkpoints/step-00000001", {})
        raise StoppedError("stopped")

    monkeypatch.setattr(pace, "fit", fit)
    monkeypatch.setattr(api, "train", stop)
    for _ in range(2):
        with pytest.raises(StoppedError, match="Run the same command again to continue"):
            run(arguments)
        assert load_config(out / "adapt.yaml").phases[0].steps == 40
    assert timed == [7]


def test_a_table_without_texts_says_which_setting_names_them(start: str, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "my.csv").write_text("sentence,label\ngood,a\nbad,b\n")
    words = [str(tmp_path / "my.csv"), "--from", start, "--out", str(tmp_path / "out")]
    refused(r"^--set corpus\.sources\.0\.text_column: .*my\.csv has no column 'text'; it has sen", run, options(*words))
    monkeypatch.delattr(api, "prepare")
    with pytest.raises(AttributeError, match="prepare"):  # the first stage began
        run(options(*words, "--set", "corpus.sources.0.text_column=sentence"))


@pytest.mark.parametrize("name", ["corpus.jsonl", "adapt.yaml"])
def test_no_text_is_written_over(name: str, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="is also an input"):
        check_arguments(options(str(tmp_path / name), "--from", str(tmp_path / "start"), "--out", str(tmp_path)))


def test_the_format_of_a_text_follows_from_its_name_or_beginning(tmp_path: Path) -> None:
    texts = {"a.jsonl": '{"text": "x"}', "b.csv": "text\nx", "c.txt": "plain", "d.xml": "<x>"}
    texts["wiki_00"] = '<doc id="1" url="" title="T">\nT\n\nx\n</doc>'
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = [tmp_path / name for name in texts]
    kinds = {source["name"]: source["kind"] for source in find_sources(paths, tmp_path / "pieces.jsonl")}
    assert kinds == {"a": "jsonl", "b": "csv", "c": "jsonl", "d": "mediawiki", "wiki_00": "wikiextractor"}
    with pytest.raises(InputError, match="has files of several formats: books, csv, jsonl, mediawiki"):
        find_sources([tmp_path], tmp_path / "none.jsonl")
    refused("nowhere: no such file or folder", find_sources, [tmp_path / "nowhere"], tmp_path / "none.jsonl")


def test_a_few_plain_texts_are_cut_into_documents_without_loss(tmp_path: Path) -> None:
    lines = [f"Sentence number {number} of a long text that goes on and on." for number in range(3000)]
    (tmp_path / "long.txt").write_text("\n\n".join(lines))
    pieces = tmp_path / "pieces.jsonl"
    (source,) = find_sources([tmp_path / "long.txt"], pieces)
    assert source == {"kind": "jsonl", "name": "long", "path": str(pieces)}
    documents = [json.loads(line)["text"] for line in pieces.read_text().splitlines()]
    assert len(documents) == 21
    assert "\n".join(documents).split("\n") == lines
    for text in ("\n".join(lines), "\r\n".join(lines)):  # a sentence on each line, without blank ones
        (tmp_path / "lines.txt").write_bytes(text.encode())
        find_sources([tmp_path / "lines.txt"], pieces)
        assert [json.loads(line)["text"] for line in pieces.read_text().splitlines()] == documents
    queries = [f"best film number {number}" for number in range(1000)]  # in a book, these would be titles
    (tmp_path / "queries.txt").write_text("\n".join(queries))
    find_sources([tmp_path / "queries.txt"], pieces)
    assert "\n".join(json.loads(line)["text"] for line in pieces.read_text().splitlines()).split("\n") == queries
    find_sources([tmp_path / "long.txt"], pieces)
    before = pieces.stat().st_mtime_ns
    find_sources([tmp_path / "long.txt"], pieces)
    assert pieces.stat().st_mtime_ns == before
    (tmp_path / "long.txt").write_text("\n\n".join(lines[:3]))
    find_sources([tmp_path / "long.txt"], pieces)
    assert [json.loads(line)["text"] for line in pieces.read_text().splitlines()] == lines[:3]
    (tmp_path / "empty.txt").write_text(" \n\n")
    refused(r"empty\.txt: no text", find_sources, [tmp_path / "empty.txt"], pieces)
    find_sources([tmp_path / "long.txt", tmp_path / "empty.txt"], pieces)
    assert [json.loads(line)["text"] for line in pieces.read_text().splitlines()] == lines[:3]
    many = write_text(tmp_path / "many", WORDS, documents=100)
    assert find_sources([many], tmp_path / "no.jsonl") == [{"kind": "books", "name": "many", "path": str(many)}]
    assert not (tmp_path / "no.jsonl").exists()


def test_a_short_text_is_cut_into_documents_enough_to_hold_some_out(tmp_path: Path) -> None:
    pieces, note = tmp_path / "pieces.jsonl", tmp_path / "note.txt"
    note.write_text("\n\n".join(f"This is what paragraph number {number} of a note says." for number in range(60)))
    find_sources([note], pieces)
    assert len(pieces.read_text().splitlines()) == 15  # of four paragraphs each
    note.write_text("One line.\n\nAnother line.\n")
    refused(r"note\.txt: 2 documents; at least 3 are needed, as 2 are held out", find_sources, [note], pieces)
    (tmp_path / "more.jsonl").write_text('{"text": "x"}\n')
    assert len(find_sources([note, tmp_path / "more.jsonl"], pieces)) == 2  # other documents are there


def test_the_held_out_share_shrinks_with_the_text() -> None:
    assert [held_out_share(size) for size in (10_000, 6_000_000, 10**9)] == [0.1, 0.05, 0.005]


@pytest.mark.parametrize(
    ("documents", "words", "sequences", "workers", "alone"),
    [
        (14, [], 12, 8, False),
        (14, ["--general", "other"], 15, 8, False),  # a fifth is replayed
        (14, ["--workers", "3", "--set", "phases.0.global_sequences=9"], 9, 3, False),
        (8, [], 6, 6, False),
        (3, [], 1, 1, True),
        (80, [], 32, 8, False),
    ],
)
def test_a_short_text_has_smaller_batches(
    start, tmp_path, monkeypatch, documents, words, sequences, workers, alone
) -> None:
    """A document of 41 tokens gives one sequence of up to 64, so tokens do not count them."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "other", WORDS, seed=7)
    rows = [{"text": f"{number} " + " ".join(WORDS[number % 9 :][:10] * 4)} for number in range(documents)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(settings, "default_workers", lambda: 8)
    started: list[Any] = []

    def stop(path: Path, **given: Any) -> None:
        started.append(given)
        config = load_config(path)
        shards, workers = Corpora.open(config).training, config.scheduling.workers
        BatchMaker(shards, config, 0, seed=0, rank=0, world_size=workers).check_batch()
        write_manifest(tmp_path / "out/run/checkpoints/step-00000001", {})
        raise StoppedError("stopped")

    monkeypatch.setattr(api, "train", stop)
    for _ in range(2):
        with pytest.raises(StoppedError):
            run(options("text.jsonl", "--from", start, "--out", "out", *words))
    config = load_config(tmp_path / "out/adapt.yaml")
    assert (config.phases[0].global_sequences, config.scheduling.workers) == (sequences, workers)
    assert started == 2 * [{"no_ray": alone, "resume": True}]


def test_a_batch_that_training_refused_can_be_corrected(start: str, tmp_path: Path, monkeypatch: Any) -> None:
    write_text(tmp_path / "text", WORDS, documents=3)
    words = [str(tmp_path / "text"), "--from", start, "--out", str(tmp_path / "out")]

    def refuse(path: Path, **_: Any) -> None:
        load_config(path).folder.mkdir(exist_ok=True)
        raise InputError("refused")

    monkeypatch.setattr(api, "train", refuse)
    for sequences in (99, 2):
        refused("refused", run, options(*words, "--set", f"phases.0.global_sequences={sequences}"))
        assert load_config(tmp_path / "out/adapt.yaml").phases[0].global_sequences == sequences


@pytest.mark.parametrize(
    ("tokens", "replay", "expected"),
    [(1_000, 0.0, 100), (500_000, 0.0, 1285), (2_000_000, 0.5, 5140), (2 * 10**9, 0.0, 50_000)],
)
def test_steps_follow_from_the_prepared_text(tmp_path, monkeypatch, tokens, replay, expected) -> None:
    monkeypatch.setattr(settings, "mean_lengths", lambda _: [121.6])
    write_manifest(tmp_path, {"shards": [{"split": "train", "tokens": tokens}, {"split": "validation", "tokens": 9}]})
    path = tmp_path / "run.yaml"
    arguments = options("x", "--from", "y", "--out", str(tmp_path))
    values = settings.run_settings(arguments, {"dir": str(tmp_path)}, ModelConfig(size="mini"), 1)
    values["adaptation"] |= {"replay_corpus": "g", "replay_share": replay}
    path.write_text(json.dumps(values))
    assert settings.choose_steps(load_config(path), arguments) == pytest.approx(expected, abs=1)


def test_wider_models_learn_at_lower_rates() -> None:
    assert [settings.peak_rate(width) for width in (256, 384, 512, 768, 1024)] == [3e-4, 3e-4, 2e-4, 1e-4, 5e-5]


def test_gains_compare_the_first_evaluation_with_the_last(tmp_path: Path) -> None:
    losses = (0, 4.0, 2.0), (5, 3.5, 2.01), (9, 3.0, 2.1)
    rows = [{"step": n, "split": "validation", "mlm_loss": new, "general_mlm_loss": old} for n, new, old in losses]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gain_lines(tmp_path) == [
        "new text: held-out MLM loss, nats      4.000 -> 3.000  -1.000 (-25.0%)",
        "general text: held-out MLM loss, nats  2.000 -> 2.100  +0.100 (+5.0%)",
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    assert gains(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "--minutes: 0; expected a number above 0"),
        (["--minutes", "nan"], "--minutes: nan; expected a number above 0"),
        (["--replay", "1"], "--replay: 1; expected a number >= 0 and < 1"),
        ([], "--from: nowhere: no such folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(tmp_path: Path, words: list[str], message: str) -> None:
    refused(message, run, options("text.txt", "--from", "nowhere", "--out", str(tmp_path / "out"), *words))
    assert not (tmp_path / "out").exists()
