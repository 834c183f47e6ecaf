"""Corpora that earlier versions prepared: they open, count as prepared, and give the same batches, bit by bit."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pretrain.batches.loader import BatchMaker
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards, verify_shards

FIXTURES = Path(__file__).parent / "fixtures"
sys.path.insert(0, str(FIXTURES))

import make_prepared_corpus  # noqa: E402  # pyright: ignore[reportMissingImports]

FINGERPRINT = "f8288e00d9915f2bb1574546c0034b92e2e432d3443efe3086aadba94b2083af"
# SHA-256 of all batches of four epochs for two workers, as commit ca011b1 made them.
BATCHES = [
    ({}, "1facc61d986386c2559d63ba1cc26dfa04d119bcef715e4c6abab0336e0260e7"),
    ({"whole_word": True}, "2a834b7bf678a0ca8a8d8d813ffb7e04523eedebf8052d6e7f930ab9dcc69913"),
    (
        {"probability": 0.3, "mask_share": 0.5, "random_share": 0.4},
        "c363de90ae98f9e6c58570ea01e5d10616e0655fc7ac7d306f1ee2441ad4bcfe",
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
    manifest["settings"] = {key: value for key, value in manifest["settings"].items() if not key.endswith(".path")}
    return {**files, "manifest.json": manifest}


def test_an_old_corpus_opens_and_counts_as_prepared(folder: Path) -> None:
    before = content(folder)
    verify_shards(folder)
    assert open_shards(folder, "train").fingerprint == FINGERPRINT
    assert "already prepared" in prepare(make_prepared_corpus.config(), quiet=True)
    assert content(folder) == before


def test_the_same_sources_give_the_same_corpus(folder: Path) -> None:
    prepare(make_prepared_corpus.config("anew"), quiet=True)
    assert open_shards(Path("anew"), "train").fingerprint == FINGERPRINT
    made, before = content(Path("anew")), content(folder)
    for files in (made, before):  # the wording of card.md may change; card.json has its figures
        del files["card.md"], files["manifest.json"]["files"]["card.md"], files["manifest.json"]["files"]["card.json"]
        files["card.json"] = json.loads(files["card.json"])
    for files in (made["card.json"], made["manifest.json"]):  # headings were not counted before
        assert files["sources"][2].pop("left_out") == {"paragraphs": 8, "characters": 64, "read_characters": 1917}
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
