"""Contamination: which documents share words with evaluation sets of each format, and what the card says of it."""

from __future__ import annotations

import gzip
import json
import random
from functools import partial
from pathlib import Path
from unicodedata import normalize

import pytest

from pretrain.common.errors import InputError
from pretrain.config import ContaminationConfig, EvaluationSetConfig
from pretrain.corpus.filters.contamination import Contamination, Matches
from pretrain.corpus.filters.evaluation_sets import write_table
from pretrain.corpus.filters.terms import document_terms
from pretrain.corpus.prepare import prepare
from tests.corpus.preparing import card
from tests.corpus.test_filters import LANGUAGES, clauses_of, filtered, prose, words_of, write_lines

QUESTION = "In which year did the last glacier of the northern valley melt away and form the lake?"
SHORT = "Green stones of the winter garden sing at night."  # 9 words


def find(folder: Path, texts: list[str], *sets: EvaluationSetConfig) -> Matches:
    config = ContaminationConfig(sets=sets)
    write_table(config, folder / "table")
    return Contamination(config, folder / "table").find(document_terms(texts))


def _squad(text: str) -> str:
    paragraph = {"context": prose(50), "qas": [{"question": text, "id": "1"}]}
    return json.dumps({"data": [{"title": "x", "paragraphs": [paragraph]}]})


FILES = {
    "set.txt": (f"{prose(40)}\n{QUESTION}\n", ()),
    "set.csv": (f'id,question,label\n1,"{QUESTION}",yes\n', ("question",)),
    "set.tsv": (f"question\tlabel\n{QUESTION}\tyes\n", ()),
    "set.jsonl": (json.dumps({"id": 3, "question": QUESTION}) + "\n\n", ()),
    "set.json": (_squad(QUESTION), ("question",)),
    "set.conll": ("-DOCSTART- O\n\n" + "".join(f"{word} X O\n" for word in QUESTION.split()) + "\nRiver X O\n", ()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_text_is_found_in_each_format(name: str, tmp_path: Path) -> None:
    text, columns = FILES[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    spoken = QUESTION.upper().replace(" ", ",\n ")
    texts = [prose(1), f"{prose(2)} {spoken} {prose(3)}", QUESTION[: QUESTION.index(" form")], prose(50)]
    matches = find(tmp_path, texts, EvaluationSetConfig(path=str(tmp_path / name), columns=columns))
    assert matches.sets.tolist() == [-1, 0, 0, -1]
    assert matches.excerpts[1].startswith("IN,\n WHICH,")


def _texts_in(path: Path, *columns: str) -> int:
    config = ContaminationConfig(sets=(EvaluationSetConfig(path=str(path), columns=columns),))
    return write_table(config, path.with_suffix(".npz"))[0]["texts"]


def test_a_quote_at_the_beginning_of_a_tsv_cell_swallows_no_rows(tmp_path: Path) -> None:
    lines = [f"{n}\t" + '"' * (n == 3) + f"{prose(n)}\n" for n in range(20)]
    (tmp_path / "bare.tsv").write_text("id\tquestion\n" + "".join(lines))
    assert _texts_in(tmp_path / "bare.tsv", "question") == 20


def test_a_long_cell_of_a_csv_file_is_read_and_an_open_quote_refused(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text(f"id,context\n1,{'word ' * 30_000}\n2\n")
    assert _texts_in(tmp_path / "long.csv", "context") == 1
    (tmp_path / "open.csv").write_text('id,context\n1,"It never ends.\n2,Another one.\n')
    with pytest.raises(InputError, match=r"open\.csv: cannot be read as an evaluation set \(line 2: not CSV"):
        _texts_in(tmp_path / "open.csv")


def test_a_folder_is_an_evaluation_set_and_linked_ones_belong_to_it(tmp_path: Path) -> None:
    for name in ("set", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{QUESTION}\n")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "other")
    assert _texts_in(tmp_path / "set") == 2


def test_thirteen_words_are_needed_but_of_shorter_texts_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{QUESTION}\n{SHORT}\nToo short to be looked for.\n")
    words = QUESTION.split()
    texts = [
        " ".join(words[:12]),
        " ".join(words[2:15]),
        SHORT,
        SHORT.replace("sing", "hum"),
        "Too short to be looked for.",
    ]
    matches = find(tmp_path, texts, EvaluationSetConfig(path=str(tmp_path / "a.txt")))
    assert matches.sets.tolist() == [-1, 0, 0, -1, -1]
    assert matches.matched_examples.tolist() == [0, 1]


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_within_runs_of_words_are_found_in_every_script_and_form(language: str, tmp_path: Path) -> None:
    draw = random.Random(language)
    texts = [words_of(language, draw, draw.randint(13, 20)) for _ in range(20)]
    others = [" ".join(clauses_of(language, seed)) for seed in range(300)]
    ends = [(words_of(language, draw, 4), words_of(language, draw, 5)) for _ in texts]
    planted = [LANGUAGES[language][0].join([a, text, b]) for text, (a, b) in zip(texts, ends, strict=True)]
    composed, decomposed = partial(normalize, "NFC"), partial(normalize, "NFD")
    for form, of_documents in ((composed, composed), (composed, decomposed), (decomposed, composed)):
        (tmp_path / "a.txt").write_text(form("\n".join(texts)), encoding="utf-8")
        held = [of_documents(text.upper()) for text in planted]
        matches = find(tmp_path, [*others, *held], EvaluationSetConfig(path=str(tmp_path / "a.txt")))
        assert matches.sets.tolist() == [-1] * 300 + [0] * 20


def test_ideographs_are_rarely_the_same_by_chance(tmp_path: Path) -> None:
    """Of a few words of two to four; a text of eight is still looked for."""
    draw = random.Random(1)
    words = ["".join(chr(draw.randrange(0x4E00, 0x4E80)) for _ in range(2 + n % 3)) for n in range(40)]
    others, texts = (["".join(draw.choices(words, k=k)) for _ in range(n)] for n, k in ((1500, 100), (20, 40)))
    (tmp_path / "a.txt").write_text("\n".join([*texts, "鳥獸魚蟲草木花果", "鳥獸魚蟲草木花"]), encoding="utf-8")
    held = [f"{others[0]}{text}{others[1]}" for text in texts]
    matches = find(
        tmp_path,
        [*others, *held, "鳥獸魚蟲草木花", "之鳥獸魚蟲草木花果"],
        EvaluationSetConfig(path=str(tmp_path / "a.txt")),
    )
    assert matches.sets.tolist() == [-1] * 1500 + [0] * 20 + [-1, 0]


@pytest.mark.parametrize(
    "changed",
    [
        "In which\u00a0year did the last gla\u00adcier of the northern val\u200dley melt away and form",
        "Ｉｎ　ｗｈｉｃｈ year… did the last glacier of the northern valley ⑁ melt away and ﬁnd",
        "In which year did the last glacier 🏔️ of the northern valley 🌊 melt away and",
    ],
)
def test_what_is_not_of_words_does_not_hide_them(changed: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(QUESTION)
    texts = [prose(1), f"One 😀 line.\n{changed}\nAnother ½."]
    assert find(tmp_path, texts, EvaluationSetConfig(path=str(tmp_path / "a.txt"))).sets.tolist() == [-1, 0]


def test_words_of_two_documents_are_no_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(QUESTION)
    words = QUESTION.split()
    matches = find(
        tmp_path, [" ".join(words[:8]), " ".join(words[8:])], EvaluationSetConfig(path=str(tmp_path / "a.txt"))
    )
    assert matches.sets.tolist() == [-1, -1]


def test_the_first_set_and_the_first_place_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(SHORT)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write(QUESTION)
    sets = [EvaluationSetConfig(path=str(tmp_path / name)) for name in ("a.txt", "b.txt.gz")]
    matches = find(tmp_path, [f"{QUESTION} {SHORT}", QUESTION], *sets)
    assert matches.sets.tolist() == [0, 1]
    assert matches.excerpts == [SHORT[:-1], " ".join(QUESTION.split()[:13])]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contaminated")
    write_lines(folder / "a.jsonl", [prose(seed) for seed in range(20)] + [f"{prose(21)} {QUESTION}"])
    write_lines(folder / "b.jsonl", [prose(seed) for seed in range(30, 40)])
    write_lines(folder / "c.jsonl", [f"{SHORT} {prose(seed)}" for seed in range(50, 52)] + [prose(60), prose(61)])
    (folder / "quiz.txt").write_text(f"{QUESTION}\n{SHORT}\n{prose(99)[:100]}\nToo short.\n")
    (folder / "answers.txt").write_text("Yes.\nสวัสดีครับ\n")
    return folder


def test_the_card_reports_the_sets(sources: Path, tmp_path: Path) -> None:
    sets = [{"path": str(sources / f"{name}.txt"), "name": name} for name in ("quiz", "answers")]
    line = prepare(filtered(sources, tmp_path / "out", {"contamination": {"sets": sets}}), quiet=True)
    (entry,) = card(tmp_path / "out")["filters"]
    assert (entry["filter"], entry["rule"], entry["by_source"]) == ("contamination", "quiz", [1, 2])
    assert entry["examples"][1]["found"] == SHORT[:-1]
    assert card(tmp_path / "out")["evaluation_sets"] == [
        {"name": "quiz", "texts": 4, "too_short": 1, "found": 2},
        {"name": "answers", "texts": 2, "too_short": 2, "found": 0},
    ]
    totals = card(tmp_path / "out")["totals"]
    assert (totals["documents"], totals["too_short"]) == (32, 0)
    shown = (tmp_path / "out" / "card.md").read_text()
    assert "| quiz | 4 | 1 | 2 | 66.67 % |\n| answers | 2 | 2 | 0 | none searched |" in shown
    for text in (line, shown):
        assert "Evaluation set quiz: 3 of its 4 texts can be searched for; 1 have fewer than 8 words." in text
        assert "Evaluation set answers: none of its 2 texts can be searched for; 2 have fewer" in text


def test_another_content_of_a_set_is_another_setting(sources: Path, tmp_path: Path) -> None:

    (tmp_path / "quiz.txt").write_text(QUESTION)
    filters = {"contamination": {"sets": [{"path": str(tmp_path / "quiz.txt")}]}}
    prepare(filtered(sources, tmp_path / "out", filters), quiet=True)
    (tmp_path / "quiz.txt").write_text(SHORT)
    with pytest.raises(InputError, match=r"corpus\.filters\.contamination\.sets\.0: was"):
        prepare(filtered(sources, tmp_path / "out", filters), quiet=True)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.txt", None, r"contamination\.sets\.0\.path: .*gone\.txt: no such file or folder"),
        ("set.pdf", "x", r"set\.pdf: unknown format. Use one of \.txt, \.csv"),
        ("set.json", "{", r"set\.json: cannot be read as an evaluation set"),
        ("set.csv", "a,b\n1,2\n", r"set\.csv: cannot be read .*no column 'text'; it has a, b"),
        ("set.txt", "\n\n", r"set\.txt: no text in this evaluation set"),
    ],
)
def test_mistakes_are_one_line(name: str, text: str | None, message: str, sources: Path, tmp_path: Path) -> None:

    if text is not None:
        (tmp_path / name).write_text(text)
    columns = ["text"] if name.endswith(".csv") else []
    sets = [{"path": str(tmp_path / name), "columns": columns}]
    with pytest.raises(InputError, match=message) as error:
        prepare(filtered(sources, tmp_path / "out", {"contamination": {"sets": sets}}), quiet=True)
    assert "\n" not in str(error.value)
