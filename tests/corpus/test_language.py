"""Documents of other languages: which are dropped, which stay, and what a missing package says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.common.errors import InputError, MachineError
from pretrain.config import FiltersConfig
from pretrain.corpus.filters import Filters, check_filters
from pretrain.corpus.filters.report import Report
from pretrain.corpus.prepare import prepare
from tests.corpus.preparing import card, content
from tests.corpus.test_filters import filtered, write_lines

TEXTS = {
    "en": "The river rises in the mountains and flows through a narrow valley before it reaches the lake. "
    "In winter the bridge near the old mill is closed, and people take the road along the shore.",
    "de": "Der Fluss entspringt in den Bergen und fließt durch ein enges Tal, bevor er den See erreicht. "
    "Im Winter ist die Brücke bei der alten Mühle gesperrt, und man nimmt die Straße am Ufer.",
    "fr": "La rivière prend sa source dans les montagnes et traverse une vallée étroite avant de rejoindre le lac. "
    "En hiver, le pont près du vieux moulin est fermé, et les gens prennent la route de la rive.",
    "ru": "Река берёт начало в горах и течёт по узкой долине, прежде чем впадает в озеро. "
    "Зимой мост у старой мельницы закрыт, и люди едут по дороге вдоль берега, где растут старые сосны.",
    "nl": "De rivier ontspringt in de bergen en stroomt door een smal dal voordat zij het meer bereikt. "
    "In de winter is de brug bij de oude molen gesloten, en de mensen nemen de weg langs de oever.",
}


def _kept(texts: list[str], *keep: str, **settings: Any) -> tuple[list[str], list[dict[str, Any]]]:
    pytest.importorskip("lingua", reason="needs the extra `language`")
    config = FiltersConfig.model_validate({"language": {"keep": keep, **settings}})
    report = Report()
    return Filters(config, Path()).keep(texts, report)[0], report.entries()


@pytest.mark.parametrize("keep", [("en",), ("de",), ("ru", "fr"), ("nl",)])
def test_documents_of_the_languages_to_keep_stay(keep: tuple[str, ...]) -> None:
    kept, entries = _kept(list(TEXTS.values()), *keep)
    assert kept == [text for code, text in TEXTS.items() if code in keep]
    dropped = [code for code in TEXTS if code not in keep]
    assert [example["found"] for example in entries[0]["examples"]] == dropped[:3]
    assert (entries[0]["filter"], entries[0]["documents"]) == ("language", len(dropped))


def test_short_documents_and_tables_of_numbers() -> None:
    """A document of a few words stays, whatever its language; one of many words in no language does not."""
    few = "Der Fluss fließt durch das Tal."
    kept, _ = _kept([few, "12 34 56 78 " * 20], "en")
    assert kept == [few]


def test_a_foreign_quotation_does_not_decide() -> None:
    long = "\n".join([TEXTS["en"]] * 4)
    quoting = f"{TEXTS['fr']}\n{long}\n{TEXTS['de']}"
    assert _kept([quoting, "\n".join([TEXTS["fr"]] * 4)], "en")[0] == [quoting]


def test_plain_english_is_recognized_by_its_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Detector:
        def detect_language_of(self, text: str) -> None:
            asked.append(text)

    monkeypatch.setattr("pretrain.corpus.filters.language.detectors", lambda keep: (Detector(), Detector()))
    half = f"{TEXTS['de']} {TEXTS['fr']} {TEXTS['en']}"
    kept, entries = _kept([TEXTS["en"], half, TEXTS["nl"]], "en", "de")
    assert kept == [TEXTS["en"]]
    assert [example["found"] for example in entries[0]["examples"]] == ["unknown"] * 2
    assert not any(text in TEXTS["en"] for text in asked)
    _kept([TEXTS["en"]], "de")
    assert asked[-1] == TEXTS["en"], "English is not to be kept"


def test_the_corpus_is_that_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("lingua", reason="needs the extra `language`")
    english = [f"{TEXTS['en']} Number {n} of the same kind." for n in range(30)]
    write_lines(tmp_path / "a.jsonl", [*english[:15], TEXTS["de"], TEXTS["fr"]])
    write_lines(tmp_path / "c.jsonl", [*english[15:], TEXTS["ru"]])
    for name, processes in (("one", 1), ("two", 2)):
        prepare(filtered(tmp_path, tmp_path / name, {"language": {"keep": ["en"]}}, processes=processes), quiet=True)
    assert card(tmp_path / "one")["filters"][0]["by_source"] == [2, 1]
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_an_unknown_language_is_one_line() -> None:
    pytest.importorskip("lingua", reason="needs the extra `language`")
    with pytest.raises(InputError, match=r"^corpus\.filters\.language\.keep: lingua does not know 'xx'\. Give .*"):
        check_filters(FiltersConfig.model_validate({"language": {"keep": ["xx"]}}))


def test_a_missing_package_is_one_line_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)
    write_lines(tmp_path / "a.jsonl", [TEXTS["en"]])
    write_lines(tmp_path / "c.jsonl", [TEXTS["en"]])
    with pytest.raises(
        MachineError, match=r"lingua, the extra `language`, is not installed\. Run: .* install"
    ) as error:
        prepare(filtered(tmp_path, tmp_path / "out", {"language": {"keep": ["en"]}}), quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    check_filters(FiltersConfig())  # nothing is asked of those who keep it off
