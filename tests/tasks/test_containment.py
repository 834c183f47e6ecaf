"""Pairs of a passage and words that it contains or does not, made of unlabeled text."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from finetune.tasks.classification import Classification, ClassificationSettings, table_source
from finetune.tasks.datasets.containment import LABELS, containment_pairs
from pretrain.common.errors import InputError

MARKS = ".,;:!?\"'"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents of sentences, each word of which is one of 300, some far more frequent than others."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(3)
    words, weights = [f"w{number}" for number in range(300)], [1 / (number + 5) for number in range(300)]
    for number in range(40):
        sentences = [" ".join(rng.choices(words, weights, k=rng.randint(6, 20))).capitalize() for _ in range(60)]
        paragraphs = [". ".join(sentences[at : at + 5]) + "." for at in range(0, 60, 5)]
        (folder / f"{number:02}.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    return folder


def bare(text: str) -> list[str]:
    return [word.lower().strip(MARKS) for word in text.split()]


def test_words_that_a_passage_contains_are_all_in_it_in_order(text: Path) -> None:
    table = containment_pairs(text, 400)
    passages, parts, labels = (table.columns[name] for name in ("text", "pair", "label"))
    assert Counter(labels)["entailment"] == pytest.approx(200, abs=50)
    held = [(bare(a), bare(b)) for a, b, label in zip(passages, parts, labels, strict=True) if label == "entailment"]
    left_out = 0
    for passage, part in held:
        rest = iter(passage)
        assert all(word in rest for word in part), "words, or their order"
        windows = [passage[at : at + len(part)] for at in range(len(passage))]
        left_out += part not in windows
    assert 0.3 < left_out / len(held) < 0.6  # of those of more than 6 words, every second one lacks a word


def test_words_of_elsewhere_are_not_in_the_passage(text: Path) -> None:
    table = containment_pairs(text, 2_000)
    passages, parts, labels = (table.columns[name] for name in ("text", "pair", "label"))
    missing = [
        sum(word not in bare(passage) for word in bare(part))
        for passage, part, label in zip(passages, parts, labels, strict=True)
        if label == "not_entailment"
    ]
    assert min(missing) >= 1
    assert missing.count(1) > 40, "one word replaced"
    assert sum(count > 2 for count in missing) > 100, "a sentence beside the passage"
    assert all(5 <= len(part.split()) <= 14 for part in parts)


def test_text_is_read_until_there_is_enough_and_used_again_if_there_is_too_little(text: Path) -> None:
    few = containment_pairs(text, 100)
    assert len(few) == 100
    (text / "99.txt").write_bytes(b"\xff\xfe\xff not text")  # the last file, which is not needed
    try:
        assert containment_pairs(text, 100) == few
    finally:
        (text / "99.txt").unlink()
    assert len(containment_pairs(text / "00.txt", 10_000)) < 100
    short = text / "00.txt"
    assert len({*containment_pairs(short, 10_000).columns["pair"]}) > 2 * len(short.read_text()) / 1_000


def test_what_is_not_text_is_warned_of(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x80\x81 " + (text / "00.txt").read_bytes() + "\n\n\u4e2d\u6587".encode())
    containment_pairs(tmp_path / "a.txt", 100)
    assert "a.txt: bytes that are not UTF-8 (" in caplog.text


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("One sentence of some six words alone.")
    with pytest.raises(InputError, match=r"classification\.containment: .*note\.txt: too little text: 0 pairs\. Give"):
        containment_pairs(tmp_path / "note.txt", 100)


def test_a_task_of_containment_holds_out_pairs_and_has_the_labels_of_entailment(text: Path, monkeypatch) -> None:
    monkeypatch.setattr(table_source, "CONTAINMENT_PAIRS", 300)
    settings = ClassificationSettings(containment=str(text), dev_share=0.1)
    task = Classification(settings)
    train, dev = task.read_train(), task.read_held_out()["dev"]
    assert len(train) + len(dev) == 300
    assert 10 < len(dev) < 60
    assert task.takes_pairs
    assert task.labels == LABELS
    assert train[0].pair
    # A model that was trained so predicts for files with columns `text` and `pair`.
    rows = text.parent / "rows.tsv"
    rows.write_text("text\tpair\nw1 w2 w3\tw2\n")
    again = Classification(settings, task.state())
    assert again.read_file(str(rows), labeled=False)[0].pair == "w2"


@pytest.mark.parametrize(
    "values",
    [
        {"containment": "text", "train": "train.tsv"},
        {"containment": "text", "glue": "rte", "glue_dir": "glue"},
        {"containment": "text", "dataset": "folder", "train": "train"},
    ],
)
def test_containment_and_other_training_sets_exclude_each_other(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="containment"):
        ClassificationSettings.model_validate(values)
