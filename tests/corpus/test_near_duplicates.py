"""Near-duplicates: how many of a planted set are found, which document of a pair stays, and the same bytes always."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pretrain.config import FiltersConfig, NearDuplicatesConfig, SourceConfig
from pretrain.corpus.filters import Filters
from pretrain.corpus.filters import near_duplicates as near
from pretrain.corpus.filters.report import Report
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards
from pretrain.corpus.vocabulary import Fold
from pretrain.corpus.whole_documents import document_records
from tests.corpus.preparing import card, content, document_tokens, preparation
from tests.corpus.test_filters import LANGUAGES, clauses_of, filtered, prose, words_of, write_lines

ON = {"near_duplicates": {"enabled": True}}


def changed(text: str, share: float, seed: int) -> str:
    """`text` with a share of its words, drawn at random, left out, replaced or followed by another."""
    draw = random.Random(seed)
    words = []
    for word in text.split(" "):
        other = "".join(draw.choices("abcdefghij", k=5))
        edits = [[], [other], [word, other]]
        words += draw.choice(edits) if draw.random() < share else [word]
    return " ".join(words)


def zipf_documents(count: int, seed: int) -> list[str]:
    """Documents of 60 to 400 words of a vocabulary of 5,000 with Zipf's law, as in natural text."""
    draw = np.random.default_rng(seed)
    ranks = 1 / np.arange(1, 5001)
    vocabulary = np.array([f"w{n}" for n in range(5000)])
    sizes = draw.integers(60, 400, count)
    words = vocabulary[draw.choice(5000, int(sizes.sum()), p=ranks / ranks.sum())]
    return [" ".join(part) for part in np.split(words, np.cumsum(sizes)[:-1])]


def search(texts: list[str], folder: Path, *, per_part: int = 400, shares: int = 1) -> dict[int, int]:
    """Document -> the earliest one that it is similar to, with the settings' defaults."""
    config = FiltersConfig(near_duplicates=NearDuplicatesConfig(enabled=True))
    folder.mkdir()
    for number, first in enumerate(range(0, len(texts), per_part)):
        kept, sketches = Filters(config, folder).keep(texts[first : first + per_part], Report())
        assert sketches is not None
        hashes = np.array([[hash(text) & (2**63 - 1), 0] for text in kept], np.uint64)
        sketches.save(folder / f"000-000000-{number:06d}-0000{near.SUFFIX}", hashes)
    pairs = np.zeros(0, near.PAIR)
    for band in range(near.BANDS):
        for share in range(shares):
            threshold = config.near_duplicates.threshold
            near.find_pairs(folder, folder / "pairs.npy", band, share, shares, threshold, near.Precedence((), 0, ()))
            pairs = np.append(pairs, np.load(folder / "pairs.npy"))
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["document"]))[::-1]]
    return {int(pair["document"]): int(pair["earlier"]) for pair in pairs}


def test_a_planted_set_is_found(tmp_path: Path) -> None:
    """5 % of the documents are copies of others with 5 to 10 % of their words changed."""
    draw = random.Random(1)
    texts = zipf_documents(1000, 0)
    planted = draw.sample(range(1000), 50)
    copies = [changed(texts[number], draw.uniform(0.05, 0.10), number) for number in planted]
    found = search(texts + copies, tmp_path / "all")
    right = {
        document for document, earlier in found.items() if document >= 1000 and earlier == planted[document - 1000]
    }
    assert len(right) / len(planted) >= 0.95
    assert len(right) / len(found) >= 0.99
    assert search(texts + copies, tmp_path / "shares", per_part=300, shares=3) == found


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_with_a_word_in_every_third_clause_changed_are_found_in_every_script(
    language: str, tmp_path: Path
) -> None:
    words = LANGUAGES[language][1].split()
    draw, texts = random.Random(language), [clauses_of(language, seed) for seed in range(320)]
    copies = [list(clauses) for clauses in texts[:20]]
    for clauses in copies:
        for number in range(0, len(clauses), 3):
            word = next(one for one in draw.sample(words, len(words)) if one in clauses[number])
            clauses[number] = clauses[number].replace(word, words_of(language, draw, 1), 1)
    found = search([" ".join(clauses) for clauses in texts + copies], tmp_path / "found")
    right = {number + 320: number for number in range(20)}
    assert found.items() <= right.items()
    assert len(found) >= 18


def test_pairs_need_the_threshold(tmp_path: Path) -> None:
    texts = zipf_documents(40, 2)
    found = search(texts + [changed(text, 0.3, 1) for text in texts], tmp_path / "far")
    assert not found


def test_copies_do_not_hide_or_drop_their_original(tmp_path: Path) -> None:
    """Of an original, a similar text, a copy of the original and another similar text, only the similar ones go."""
    text = prose(1)
    similar = [changed(text, 0.05, seed) for seed in (1, 2)]
    found = search([text, similar[0], text, similar[1]], tmp_path / "four")
    assert found == {1: 0, 3: 0}


def test_texts_without_a_known_letter_are_not_taken_for_each_other(tmp_path: Path) -> None:
    adlam = [" ".join(chr(0x1E900 + (7 * number * k) % 60) * 3 for k in range(1, 30)) for number in range(1, 8)]
    assert not search(adlam, tmp_path / "work")


def test_short_and_empty_documents_have_sketches(tmp_path: Path) -> None:
    found = search(["One two.", "one two", "three four", "5", "", "…"], tmp_path / "short")
    assert found.items() >= {1: 0}.items()
    assert not {2, 3} & found.keys()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 documents in a and b, 2 of them copies; c has 20 others, then 10 of a with 4 % of the words changed."""
    folder = tmp_path_factory.mktemp("near")
    texts = [prose(seed) for seed in range(28)]
    write_lines(folder / "a.jsonl", texts[:20])
    write_lines(folder / "b.jsonl", texts[20:] + texts[:2])
    similar = [changed(text, 0.04, 5) for text in texts[:10]]
    write_lines(folder / "c.jsonl", [prose(seed) for seed in range(100, 120)] + similar)
    return folder


@pytest.fixture(scope="module")
def whole(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of `sources`, made in one process without a stop."""
    folder = tmp_path_factory.mktemp("corpora") / "whole"
    prepare(filtered(sources, folder, ON), quiet=True)
    return folder


def _documents(folder: Path) -> set[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shards = (open_shards(folder, split) for split in ("train", "validation"))
    return {tokenizer.decode(ids) for one in shards for ids in document_tokens(one)}


def test_the_first_document_stays_across_sources(sources: Path, whole: Path, tmp_path: Path) -> None:
    entry = card(whole)["filters"][0]
    assert (entry["filter"], entry["documents"], entry["by_source"]) == ("near_duplicates", 10, [0, 10])
    assert " to: The of " in entry["examples"][0]["found"]
    ab, c = card(whole)["sources"]
    assert (ab["documents"], ab["duplicates"]) == (28, 2)
    assert (c["documents"], c["duplicates"], c["too_short"]) == (20, 0, 0)
    write_lines(tmp_path / "c.jsonl", [prose(seed) for seed in range(100, 120)])
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes((sources / name).read_bytes())
    prepare(filtered(tmp_path, tmp_path / "plain", {}, vocabulary={"path": str(whole)}), quiet=True)
    assert _documents(whole) == _documents(tmp_path / "plain")


@pytest.mark.parametrize(("names", "processes"), [("thd", 2), ("dht", 1), ("htd", 1)])
def test_held_out_text_wins(names: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """t has copies and near copies of h, which is held out, and so has d, in another form."""
    monkeypatch.setattr("pretrain.corpus.buckets.MAX_BUFFERED_ROWS", 1)
    held_out = [f"{prose(seed)}\nCaf\u00e9." for seed in range(20)]
    copies = [text.replace("\u00e9", "e\u0301") + "  \n" for text in held_out[:10]]
    copies += [changed(text, 0.05, 5) for text in held_out[10:]]
    write_lines(tmp_path / "h.jsonl", held_out)
    write_lines(tmp_path / "t.jsonl", [*copies, *(prose(seed) for seed in range(100, 130)), *copies])
    write_lines(tmp_path / "d.jsonl", held_out[5:15][:: -1 if names[0] == "d" else 1])
    sources = [
        SourceConfig(kind="jsonl", name=name, path=str(tmp_path / f"{name}.jsonl"), held_out=name != "t")
        for name in names
    ]
    given = {"filters": ON, "processes": processes, "validation_fraction": 0}
    line = prepare(preparation(tmp_path / "out", sources, **given), quiet=True)
    found = {source["name"]: source for source in card(tmp_path / "out")["sources"]}
    assert (found["t"]["documents"], found["t"]["lost_to_held_out"]) == (30, 30)
    assert found["h"]["validation_documents"] + found["d"]["validation_documents"] == 20
    assert "30 of them copies of held-out text" in line
    assert ("d: none of its 10 documents is left (10 duplicates" in line) == (names != "dht")


def test_validation_documents_win_over_similar_ones(tmp_path: Path) -> None:
    texts = [prose(seed) for seed in range(40)]
    similar = [changed(text, 0.05, 5) for text in texts]
    write_lines(tmp_path / "texts.jsonl", [*similar, *texts])
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "texts.jsonl"))
    prepare(preparation(tmp_path / "out", [source], filters=ON, validation_fraction=0.3), quiet=True)
    hashes = document_records([*texts, *similar], fold=Fold.CASE)["hash"]
    one, other = near.Precedence((), 0.3, ()).in_fraction(hashes).reshape(2, 40)
    (found,) = card(tmp_path / "out")["sources"]
    assert found["documents"] == 40
    assert found["validation_documents"] == (one | other).sum() > other.sum()


@pytest.mark.parametrize("vocabulary", ["trained", "given", "bytes"])
def test_the_bytes_do_not_depend_on_the_processes(vocabulary: str, sources: Path, whole: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "trained": {},
        "given": {"vocabulary": {"path": str(whole)}},
        "bytes": {"vocabulary": {"kind": "byte_bpe", "size": 300}},
    }[vocabulary]
    one, two = tmp_path / "one" if changes else whole, tmp_path / "two"
    for folder, processes in ((one, 1), (two, 2)):
        if folder != whole:
            prepare(filtered(sources, folder, ON, processes=processes, **changes), quiet=True)
        assert card(folder)["filters"][0]["documents"] == 10
    assert content(one) == content(two)


def test_the_bytes_do_not_depend_on_how_many_are_compared_at_once(sources, whole, tmp_path, monkeypatch) -> None:
    for name in ("filters.near_duplicates.MAX_DOCUMENTS", "near_search.MAX_DOCUMENTS", "documents.MAX_DOCUMENTS"):
        monkeypatch.setattr(f"pretrain.corpus.{name}", 7)
    prepare(filtered(sources, tmp_path / "apart", ON), quiet=True)
    assert content(whole) == content(tmp_path / "apart")
    assert card(tmp_path / "apart")["filters"][0]["by_source"] == [0, 10]


def test_a_stopped_search_goes_on(sources: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pretrain.corpus import stages

    calls: list[str] = []
    find = stages.find_pairs

    def stop(name: str, *rest: Any) -> None:
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(name)
        find(name, *rest)

    monkeypatch.setattr(stages, "find_pairs", stop)
    with pytest.raises(Exception, match="stopped"):
        prepare(filtered(sources, tmp_path / "twice", ON), quiet=True)
    monkeypatch.setattr(stages, "find_pairs", lambda name, *rest: (calls.append(name), find(name, *rest)))
    prepare(filtered(sources, tmp_path / "twice", ON), quiet=True)
    assert len(calls) == len(set(calls)) == 32
    assert content(tmp_path / "twice") == content(whole)


@pytest.mark.parametrize("written", range(3))
def test_a_merge_that_is_killed_between_two_files_is_done_again(written, sources, whole, tmp_path, monkeypatch) -> None:
    replaced, replace = [], Path.replace

    def stop(source: Path, target: Path) -> None:
        if target.stem == "near_duplicates":
            if len(replaced) == written:
                raise RuntimeError("killed")
            replaced.append(target)
        replace(source, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", stop)
        with pytest.raises(RuntimeError, match="killed"):
            prepare(filtered(sources, tmp_path / "twice", ON), quiet=True)
    prepare(filtered(sources, tmp_path / "twice", ON), quiet=True)
    assert content(tmp_path / "twice") == content(whole)
