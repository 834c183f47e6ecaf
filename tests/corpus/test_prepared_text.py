"""A corpus of files of every kind: the same text gives the same tokens, and batches that no version changes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.batches.loader import BatchMaker
from pretrain.batches.sampler import SAMPLER_VERSION as VERSION
from pretrain.common.errors import InputError
from pretrain.common.files import put_manifest, read_manifest
from pretrain.corpus.description import describe
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards
from pretrain.run.train import check_state

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

import text_of_every_kind as texts  # pyright: ignore[reportMissingImports]

FINGERPRINT = "4f18154f714947641b4474923ab9bff86b48eee9fc7e8da0008356eb5e5c814a"
# SHA-256 of all batches of four epochs for two workers.
BATCHES = [
    ({}, "93a95c6025ad12510f140329498f178f1c1148fef1d18eef3c3b127bfc45610d"),
    ({"scheme": "whole_words"}, "f5f3eb37633c8845f474762d907b14387ac3b60b2f2de13c0a5d7840eddc74e8"),
    (
        {"probability": 0.3, "mask_share": 0.5, "random_share": 0.4},
        "a17fe94a171a965213ec8131daed71c867001e0c61c2af79ae5d836f96540312",
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus."""
    place = tmp_path_factory.mktemp("texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        texts.write_sources()
        prepare(texts.config(), quiet=True)
    return place / "corpus"


def test_the_same_text_gives_the_same_corpus(folder: Path) -> None:
    assert open_shards(folder, "train").fingerprint == FINGERPRINT


@pytest.mark.parametrize(("masking", "expected"), BATCHES)
def test_a_corpus_gives_the_same_batches(folder: Path, masking: dict[str, Any], expected: str) -> None:
    settings = {**texts.config().model_dump(), "masking": masking}
    config = texts.PretrainConfig.model_validate(settings)
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


@pytest.mark.parametrize("mark", ["format", "folded"])
def test_a_corpus_of_another_version_is_refused_in_one_line(folder, tmp_path, monkeypatch, mark: str) -> None:
    monkeypatch.chdir(folder.parent)
    other = shutil.copytree(folder, tmp_path / "other")
    put_manifest(other, {key: value for key, value in read_manifest(other).items() if key != mark})
    config = texts.config(str(other))
    for read in (lambda: open_shards(other, "train"), lambda: describe(config), lambda: prepare(config, quiet=True)):
        with pytest.raises(InputError) as refusal:
            read()
        told = f"{other}: made by another version of bertrain. Prepare the text again, into another corpus.dir or after"
        assert str(refusal.value) == f"{told} removing this one."


@pytest.mark.parametrize(
    "state", [{}, {"sampler": VERSION - 1}, {"sampler": VERSION, "step": 0, "mixtures": [], "config": {"was": "old"}}]
)
def test_a_run_of_another_version_is_refused_in_one_line(folder: Path, state: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^run: made by another version of bertrain\. Train again\.$"):
        check_state(state, Path("run"), texts.config(), open_shards(folder, "train"), [])
