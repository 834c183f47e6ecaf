"""Corpora that earlier versions prepared: they open, count as prepared, and give batches that do not change."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pretrain.batches.loader import BatchMaker
from pretrain.common.earlier import as_now
from pretrain.common.errors import InputError
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards, verify_shards
from pretrain.corpus.vocabulary import Fold
from pretrain.run.train import check_state

FIXTURES = Path(__file__).parents[1] / "fixtures"
sys.path.insert(0, str(FIXTURES))

import make_prepared_corpus  # noqa: E402  # pyright: ignore[reportMissingImports]

FINGERPRINT = "f8288e00d9915f2bb1574546c0034b92e2e432d3443efe3086aadba94b2083af"
# SHA-256 of all batches of four epochs for two workers.
BATCHES = [
    ({}, "4d46eab3bd8633d16900da2f9af7666a3820afefbd2a60a3020469666ee07c5d"),
    ({"scheme": "whole_words"}, "e2978c10fa1df4ad3593ad6ebb983d576e3e6a8e6e72100f4b5e913ca9056b7b"),
    (
        {"probability": 0.3, "mask_share": 0.5, "random_share": 0.4},
        "a15de9990ebefa3f13d0f0e253197cb1a9dbeb901b7d4c882a24129ea0e63a45",
    ),
]
FIELDS = (
    "input_ids",
    "token_types",
    "positions",
    "cu_seqlens",
    "masked_rows",
    "masked_labels",
    "nsp_labels",
    "token_keys",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sources of every kind that is a file, and the corpus of commit ca011b1."""
    zipfile.ZipFile(FIXTURES / "prepared_corpus.zip").extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "corpus"


def content(folder: Path) -> dict[str, Any]:
    """All files; the manifest without the state of the source files, which has their times."""
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}
    manifest = json.loads(files["manifest.json"])
    del manifest["manifest_sha256"]
    manifest["sources"] = [as_now("sources", source) for source in manifest["sources"]]
    manifest["settings"] = {key: value for key, value in manifest["settings"].items() if not key.endswith(".path")}
    return {**files, "manifest.json": manifest}


def test_an_old_corpus_opens_and_counts_as_prepared(folder: Path) -> None:
    before = content(folder)
    verify_shards(folder)
    assert open_shards(folder, "train").fingerprint == FINGERPRINT
    assert "already prepared" in prepare(make_prepared_corpus.config(), quiet=True)
    assert content(folder) == before


def documents_of(folder: Path) -> list[tuple[str, int, bytes]]:
    """(split, source, tokens and sentences) of each document, sorted."""
    found = []
    for split in ("train", "validation"):
        for shard in open_shards(folder, split).shards:
            for (first, begin), (last, end) in itertools.pairwise(shard.documents.astype(int).tolist()):
                sentences = shard.sentences[first:last] - shard.sentences[first]
                found.append((split, shard.source, shard.tokens[begin:end].tobytes() + sentences.tobytes()))
    return sorted(found)


def test_the_same_sources_give_the_same_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another order: documents of a source are in random order now. Hashes of that version ignored no accents."""
    monkeypatch.setattr("pretrain.corpus.prepare.fold_of", lambda *_: Fold.ASCII_CASE)
    prepare(make_prepared_corpus.config("again"), quiet=True)
    assert documents_of(Path("again")) == documents_of(folder)
    made, before = (json.loads((one / "card.json").read_text()) for one in (Path("again"), folder))
    assert made["sources"][2].pop("left_out") == {"paragraphs": 8, "characters": 64, "read_characters": 1917}
    assert all(len(source.pop("fingerprint")) == 64 for source in made["sources"])
    for card in (made, before):
        del card["totals"]["shards"]
        card["sources"] = [as_now("sources", source) for source in card["sources"]]
    assert made == before


@pytest.mark.parametrize(("masking", "expected"), BATCHES)
def test_an_old_corpus_gives_the_same_batches(folder: Path, masking: dict[str, Any], expected: str) -> None:
    settings = {**make_prepared_corpus.config().model_dump(), "masking": masking}
    config = make_prepared_corpus.PretrainConfig.model_validate(settings)
    shards, digest = open_shards(folder, "train"), hashlib.sha256()
    for rank in range(2):
        maker = BatchMaker(shards, config, 0, seed=7, rank=rank, world_size=2)
        for first in range(0, 4 * maker.samples_per_epoch, 16):
            batch = maker.make(first, 16)
            counts = [batch.sequences, batch.tokens, batch.masked, batch.epoch, batch.first_sample]
            digest.update(json.dumps(counts).encode())
            for micro_batch in batch.micro_batches:
                for name in FIELDS:
                    digest.update(getattr(micro_batch, name).numpy().tobytes())
    assert digest.hexdigest() == expected


def test_runs_of_the_former_order_of_samples_are_refused(folder: Path) -> None:
    """In one line, before anything is trained."""
    shards = open_shards(folder, "train")
    with pytest.raises(InputError, match=r"order of another version of bertrain\. Finish the run with"):
        check_state({"fingerprint": shards.fingerprint}, Path("run"), make_prepared_corpus.config(), shards, [])
