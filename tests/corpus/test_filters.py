"""The filters of `prepare`: what each rule measures, against plain code, and corpora that are the same however made."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.common.errors import InputError, MachineError
from pretrain.config import FiltersConfig, QualityConfig, SourceConfig
from pretrain.config.filters import RULE_SETS
from pretrain.corpus.filters import Filters, check_filters, filter_settings
from pretrain.corpus.filters.quality import MEASURES, broken_rules
from pretrain.corpus.filters.report import Report
from pretrain.corpus.filters.text_columns import text_columns
from pretrain.corpus.prepare import prepare
from tests.corpus.preparing import card, content, preparation

WORDS = ["the", "of", "and", "river", "bridge", "house", "light", "people"]
WORDS += ["water", "stone", "green", "winter", "paper", "music", "letter", "garden"]


def prose(seed: int, words: int = 120) -> str:
    """Lines of random words, most of them made up, that no rule drops."""
    draw = random.Random(seed)
    lines, left = [], words
    while left > 0:
        count = min(left, draw.randint(12, 30))
        left -= count
        chosen = [draw.choice(WORDS) if draw.random() < 0.3 else _word(draw) for _ in range(count)]
        lines.append(" ".join(["The", "of", *chosen]) + ".")
    return "\n".join(lines)


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnoprstuvw", k=draw.randint(3, 9)))


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


BREAKS = {
    "min_words": "The river of light.",
    "max_words": prose(0, 400),
    "min_mean_word_length": prose(1) + " a b" * 400,
    "max_mean_word_length": prose(2) + " " + " ".join("x" * 90 + str(n) for n in range(30)),
    "max_symbols_per_word": prose(3).replace(" ", " # "),
    "max_bullet_lines": "\n".join(f"• {line}" for line in prose(4).splitlines()),
    "max_ellipsis_lines": prose(5).replace(".\n", "...\n"),
    "min_alphabetic_words": prose(6) + " 1234" * 60,
    "min_stop_words": prose(7).replace("of", "off").replace("and", "ant"),
    "max_repeated_lines": prose(8) + "\n" + "\n".join(["river"] * 9),
    "max_repeated_line_characters": prose(9, 60) + "\n" + prose(9, 25) * 1 + ("\n" + prose(10, 30)) * 3,
    "max_top_2_gram": prose(11, 60) + " river stone" * 18,
    "min_punctuated_lines": prose(12).replace(".", ""),
    "max_short_lines": "\n".join(" ".join(prose(13).split()[n : n + 3]) + "." for n in range(0, 90, 3)),
    "max_curly_brackets": prose(14) + " { }",
    "max_lorem_ipsum": prose(15) + " Lorem ipsum dolor.",
    "max_odd_characters": prose(16) + " " + "\ufffd\x07☺" * 60,
}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_rule_drops_what_it_is_for_and_nothing_else(rule: str) -> None:
    thresholds = {"max_words": 300} if rule == "max_words" else {}
    rules = QualityConfig(rules=(rule,), thresholds=thresholds)
    broken, _ = broken_rules(text_columns([prose(100), BREAKS[rule], prose(101)]), rules)
    assert broken.tolist() == [-1, 0, -1]


def test_all_rules_together_keep_prose() -> None:
    rules = QualityConfig(rules=("gopher_quality", "gopher_repetition", "fineweb", "c4", "characters"))
    assert (broken_rules(text_columns([prose(seed) for seed in range(30)]), rules)[0] == -1).all()


def _terms(text: str) -> list[str]:
    return "".join(character if character.isalnum() else " " for character in text.lower()).split()


def _plain(text: str) -> dict[str, float]:
    """The figures, by loops over one document."""
    words, terms = text.split(), _terms(text)
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    size = sum(map(len, lines))
    same, seen = [], set()
    for line in lines:
        key = tuple(_terms(line))
        same.append(bool(key) and key in seen)
        seen.add(key)
    figures: dict[str, float] = {
        "min_words": len(words),
        "min_mean_word_length": sum(map(len, words)) / max(1, len(words)),
        "max_bullet_lines": sum(line[0] in "•‣◦▪●⁃*-" for line in lines) / max(1, len(lines)),
        "max_ellipsis_lines": sum(line.endswith(("...", "…")) for line in lines) / max(1, len(lines)),
        "min_alphabetic_words": sum(any(c.isalpha() for c in word) for word in words) / max(1, len(words)),
        "max_repeated_lines": sum(same) / max(1, len(lines)),
        "max_repeated_line_characters": sum(len(line) for line, s in zip(lines, same, strict=True) if s) / max(1, size),
        "max_short_lines": sum(len(line) <= 30 for line in lines) / max(1, len(lines)),
        "max_curly_brackets": text.count("{") + text.count("}"),
    }
    for n in (2, 3, 4):
        counts = Counter(tuple(terms[i : i + n]) for i in range(len(terms) - n + 1))
        most = max(counts.values(), default=0)
        # The words of these texts are separated by one blank.
        longest = max((len(" ".join(gram)) for gram, count in counts.items() if count == most), default=0)
        figures[f"max_top_{n}_gram"] = most * longest / size if most > 1 else 0.0
    for n in (5, 7, 10):
        covered, grams = set(), set()
        for i in range(len(terms) - n + 1):
            gram = tuple(terms[i : i + n])
            if gram in grams:
                covered |= set(range(i, i + n))
            grams.add(gram)
        figures[f"max_repeated_{n}_grams"] = sum(len(terms[i]) for i in covered) / max(1, size)
    return figures


def test_figures_are_those_of_plain_code() -> None:
    draw = random.Random(3)
    texts = []
    for seed in range(60):
        few = WORDS[: draw.randint(2, 16)]
        lines = [" ".join(draw.choices(few, k=draw.randint(1, 14))) for _ in range(draw.randint(0, 12))]
        lines += ["", " • stone", "café naïve…", "34 {5}"][: draw.randint(0, 4)]
        texts.append("\n".join(lines + lines[: draw.randint(0, 3)]) if seed else "")
    # A threshold of 0 counts every document exactly.
    grams = {rule: 0.0 for rules in RULE_SETS.values() for rule in rules if "_gram" in rule}
    columns, rules = text_columns(texts), QualityConfig(thresholds=grams)
    plain = [_plain(text) for text in texts]
    for rule in plain[0]:
        expected = [figures[rule] for figures in plain]
        assert np.allclose(MEASURES[rule](columns, rules), expected), rule


def test_figures_do_not_depend_on_the_documents_beside_it() -> None:
    texts = [*BREAKS.values(), *(prose(seed) for seed in range(20))]
    rules = QualityConfig()
    together = broken_rules(text_columns(texts), rules)
    alone = [broken_rules(text_columns([text]), rules) for text in texts]
    assert together[0].tolist() == [broken[0] for broken, _ in alone]
    assert together[1].tolist() == [figure[0] for _, figure in alone]


ALL: dict[str, Any] = {"quality": {"enabled": True}, "near_duplicates": {"enabled": True}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of lines: good documents, and some that rules drop."""
    folder = tmp_path_factory.mktemp("lines")
    write_lines(folder / "a.jsonl", [prose(seed) for seed in range(40)] + list(BREAKS.values()))
    write_lines(folder / "b.jsonl", [prose(seed) for seed in range(200, 230)] + [BREAKS["min_stop_words"], "Short."])
    write_lines(folder / "c.jsonl", [prose(seed) for seed in range(300, 330)])
    return folder


def filtered(folder: Path, out: Path, filters: dict[str, Any], **changes: Any) -> Any:
    """A config with `filters` for the sources in `folder`, of which a and b are one source and c is another."""
    both = (
        SourceConfig(kind="jsonl", name="ab", path=str(folder / "[ab].jsonl")),
        SourceConfig(kind="jsonl", name="c", path=str(folder / "c.jsonl")),
    )
    return preparation(out, **{"sources": both, "filters": filters, **changes})


def test_the_card_counts_each_rule_and_shows_examples(sources: Path, tmp_path: Path) -> None:
    prepare(filtered(sources, tmp_path / "one", {"quality": {"enabled": True}}), quiet=True)
    found = {entry["rule"]: entry for entry in card(tmp_path / "one")["filters"]}
    assert found["min_stop_words"]["documents"] == 2
    assert found["min_stop_words"]["by_source"] == [2, 0]
    assert found["min_stop_words"]["examples"][0]["text"].startswith("The ")
    assert "max_curly_brackets" not in found, "the rules of c4 are not in the default"
    dropped = sum(entry["documents"] for entry in found.values())
    ab, c = card(tmp_path / "one")["sources"]
    assert ab["documents_read"] == ab["documents"] + ab["duplicates"] + ab["too_short"] + dropped
    assert (c["documents"], c["too_short"]) == (30, 0)
    shown = (tmp_path / "one" / "card.md").read_text()
    assert "## Filters" in shown
    assert f"and {dropped} that filters drop" in shown


def test_filters_that_are_off_change_nothing(sources: Path, tmp_path: Path) -> None:
    prepare(filtered(sources, tmp_path / "off", {"quality": {"enabled": False, "min_words": 90}}), quiet=True)
    manifest = json.loads((tmp_path / "off" / "manifest.json").read_text())
    assert not [key for key in manifest["settings"] if "filters" in key]
    assert "filters" not in card(tmp_path / "off")
    assert "filtered" not in card(tmp_path / "off")["totals"]


@pytest.mark.parametrize("processes", [2, 3])
def test_the_bytes_are_those_of_one_process(processes: int, sources: Path, tmp_path: Path) -> None:
    for name, count in (("one", 1), ("more", processes)):
        prepare(filtered(sources, tmp_path / name, ALL, processes=count), quiet=True)
    assert content(tmp_path / "one") == content(tmp_path / "more")


def test_a_corpus_of_other_filters_is_not_taken_for_this_one(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "one"
    prepare(filtered(sources, out, {"quality": {"enabled": True}}), quiet=True)
    assert "already prepared" in prepare(filtered(sources, out, {"quality": {"enabled": True}}), quiet=True)
    with pytest.raises(InputError, match=r"corpus\.filters\.quality\.min_words: was 50, is 60"):
        prepare(filtered(sources, out, {"quality": {"enabled": True, "min_words": 60}}), quiet=True)
    with pytest.raises(InputError, match=r"corpus\.filters\.quality\.rules"):
        prepare(filtered(sources, out, {}), quiet=True)


def test_thresholds_of_rules_that_do_not_apply_decide_nothing() -> None:
    some = filtered(
        Path(), Path("x"), {"quality": {"enabled": True, "rules": ["min_words"], "thresholds": {"max_words": 70}}}
    )
    assert filter_settings(some.corpus.filters) == {"quality.rules": ["min_words"], "quality.min_words": 50}


@pytest.mark.parametrize("near_duplicates", [True, False])
def test_nothing_left_names_the_filters(near_duplicates: bool, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [prose(1), prose(2)])
    source = (SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl")),)
    strict = {"quality": {"enabled": True, "min_words": 5000}, "near_duplicates": {"enabled": near_duplicates}}
    with pytest.raises(InputError, match=r"Relax corpus\.filters, which drop 2"):
        prepare(preparation(tmp_path / "out", source, filters=strict), quiet=True)


BROKEN = "Le cafÃ© de la gare Ã©tait fermÃ©."
REPAIRED = "Le café de la gare était fermé."


def _repair(texts: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    report = Report()
    return Filters(FiltersConfig(repair_mojibake=True), Path()).keep(texts, report)[0], report.entries()


def test_only_broken_lines_are_repaired() -> None:
    right = "“Curly quotes” — and naïve œuvres, &amp; ﬁles stay."
    texts = [
        "Plain.",
        f"{right}\n{BROKEN}\n{right}",
        right,
        "這條河流過山谷，幾公里後流入湖中。",
        "Река течёт через долину.",
    ]
    kept, entries = _repair(texts)
    assert kept == [texts[0], f"{right}\n{REPAIRED}\n{right}", *texts[2:]]
    assert entries == [
        {
            "filter": "mojibake",
            "rule": "repaired",
            "dropped": False,
            "documents": 1,
            "examples": [{"text": BROKEN, "found": REPAIRED}],
        }
    ]


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp1251", "mac_roman"])
@pytest.mark.parametrize("text", ["Müller wohnt in Köln–Süd.", "Wikipédia à l’école", "“quoted” … €"])
def test_what_ftfy_repairs_is_not_missed_by_the_faster_search(encoding: str, text: str) -> None:
    import ftfy

    try:
        broken = text.encode().decode(encoding)
    except UnicodeDecodeError:
        pytest.skip(f"{encoding} has no such characters")
    assert _repair([broken])[0] == [ftfy.fix_encoding(broken)]


def test_a_repair_leaves_neither_nul_nor_line_ends() -> None:
    kept, _ = _repair(["cafÃ©\0 Ã©tÃ© â\x80¨ fermÃ©"])
    assert "\0" not in kept[0]
    assert len(kept[0].splitlines()) == 1


def test_repaired_documents_count_but_stay(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [prose(seed) for seed in range(20)] + [f"{prose(30)}\n{BROKEN}"])
    write_lines(tmp_path / "c.jsonl", [prose(seed) for seed in range(40, 50)])
    prepare(filtered(tmp_path, tmp_path / "out", {"repair_mojibake": True}), quiet=True)
    assert card(tmp_path / "out")["totals"]["documents"] == 31
    assert card(tmp_path / "out")["totals"]["filtered"] == 0
    assert card(tmp_path / "out")["filters"][0]["by_source"] == [1, 0]
    assert "était" in Path(tmp_path / "out" / "card.md").read_text()
    with pytest.raises(InputError, match=r"corpus\.filters\.repair_mojibake: was True, is None"):
        prepare(filtered(tmp_path, tmp_path / "out", {}), quiet=True)


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
