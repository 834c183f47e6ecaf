"""Models of sentence-transformers: their own pooling is read, and said where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_bert, write_reviews

from finetune.artifacts.export import export as export_run
from finetune.training.train import main
from pretrain.checkpoint.released import read_model_config, read_released
from pretrain.checkpoint.sentence_transformers import declared_max_length, length_warnings, sentence_pooling
from pretrain.common.errors import InputError
from tests.distributed import run_workers
from tests.starts import Start, make_starts

transformers: Any = pytest.importorskip("transformers")


def say_pooling(folder: Path, **flags: Any) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **flags}))
    return folder


@pytest.mark.parametrize(
    ("flags", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, {"classifier_pooling": "cls"}),
        ({"pooling_mode": "mean"}, {"classifier_pooling": "mean"}),
        ({"pooling_mode_lasttoken": True}, {}),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, {}),  # both, end to end
    ],
)
def test_what_a_folder_says_of_its_pooling(tmp_path: Path, flags: dict[str, Any], pooling: dict[str, str]) -> None:
    assert sentence_pooling(say_pooling(tmp_path, **flags)) == pooling


def test_its_own_pooling_wins_over_a_default_of_the_family(tmp_path: Path) -> None:
    """transformers writes classifier_pooling: cls into every config.json of ModernBERT."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    shape = transformers.ModernBertConfig(**sizes, **special, num_attention_heads=2)
    transformers.ModernBertModel(shape).save_pretrained(tmp_path)
    assert read_released(tmp_path).task_head("sequence").pooling == "cls"
    say_pooling(tmp_path, pooling_mode_mean_tokens=True)
    assert read_released(tmp_path).task_head("sequence").pooling == read_model_config(tmp_path).pooling == "mean"


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    assert (length_warnings(tmp_path, 512), declared_max_length(tmp_path)) == ([], None)
    say_pooling(tmp_path, pooling_mode_lasttoken=True)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    pooling, longest = length_warnings(tmp_path, 512)
    assert "lasttoken) is not supported" in pooling
    assert "at most 256 tokens" in longest
    assert declared_max_length(tmp_path) == 256
    assert len(length_warnings(tmp_path, 256)) == 1


def test_a_fine_tuned_one_says_how_to_load_it(tmp_path: Path) -> None:
    folder = say_pooling(make_bert(tmp_path / "bert"), pooling_mode_mean_tokens=True)
    config: dict[str, Any] = {
        "name": "pooled",
        "run_dir": str(tmp_path / "run"),
        "start_from": str(folder),
        "max_length": 32,
    }
    config |= {"classification": write_reviews(tmp_path, train=16, dev=8), "tracking": {"wandb": "off"}}
    config |= {"training": {"steps": 2, "examples_per_step": 4}, "engine": {"precision": "fp32", "compile": False}}
    assert run_workers(1, make_starts, main, [Start(config)]) == [[""]]
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert 'AutoModelForSequenceClassification.from_pretrained(".", trust_remote_code=True)' in card
    out = tmp_path / "exported"
    for _ in range(2):
        assert "trust_remote_code=True, and encoder/ without" in export_run(tmp_path / "run", out)
    transformers.AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True)
    assert "`encoder/`" in card
    assert read_released(out).sentence_files == read_released(folder).sentence_files != {}
    (out / "encoder" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"encoder/notes\.txt: no export wrote it"):
        export_run(tmp_path / "run", out)
    assert (out / "encoder" / "notes.txt").read_text() == "mine"
