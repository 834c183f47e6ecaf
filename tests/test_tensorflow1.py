"""TensorFlow 1 checkpoints without TensorFlow: one from tests/fixtures/make_tensorflow1.py, and damaged copies."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures.make_tensorflow1 import HIDDEN, INTERMEDIATE, LAYERS, POSITIONS, VOCABULARY, shapes, values
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.checkpoint import tensorflow1
from pretrain.checkpoint.mapping import mapping_table
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tensorflow1 import Checkpoint, crc32c
from pretrain.common.errors import InputError
from pretrain.model.heads import PretrainingModel
from tests.batches_by_hand import make_batch, next_sentence_logits
from tests.bench.baselines import pad

CONFIG = {
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with zipfile.ZipFile(Path(__file__).parent / "fixtures" / "tensorflow1.zip") as archive:
        for name in archive.namelist():
            (tmp_path / name).write_bytes(archive.read(name))
    (tmp_path / "bert_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_variable_of_every_block_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, block = [], tensorflow1._block
    monkeypatch.setattr(tensorflow1, "_block", lambda *place: blocks.append(place) or block(*place))
    checkpoint = Checkpoint(folder / "bert_model.ckpt")
    assert len(blocks) >= 3  # that of the blocks, and at least two
    assert len(checkpoint.variables) == len(shapes()) + 302
    for name, shape in shapes().items():
        assert checkpoint.variables[name].shape == shape
        np.testing.assert_array_equal(checkpoint.read(name).numpy(), values(name, shape))
    for number in range(300):
        assert checkpoint.read(f"{number:03d}" + "/of_long_names" * 70) == number
    assert checkpoint.read("global_step").dtype == torch.int64
    assert checkpoint.read("global_step") == 7


def test_googles_bert_computes_what_transformers_does_with_its_values(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in CONFIG.items() if key != "hidden_act"}
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**config)).eval()
    state = {}
    for name in theirs.state_dict():
        if "position_ids" in name or "decoder" in name:
            continue
        # The inverse of our own reading, by hand: convert_bert_original_tf_checkpoint_to_pytorch.py of transformers 4.
        tensorflow = re.sub(r"layer\.(\d+)", r"layer_\1", name.removesuffix(".weight").removesuffix(".bias"))
        tensorflow, weight = tensorflow.replace(".", "/"), name.endswith("weight")
        if tensorflow == "cls/predictions":
            tensorflow += "/output_bias"
        elif tensorflow == "cls/seq_relationship":
            tensorflow += "/output_weights" if weight else "/output_bias"
        elif tensorflow.endswith("LayerNorm"):
            tensorflow += "/gamma" if weight else "/beta"
        elif not tensorflow.endswith("embeddings"):
            tensorflow += "/kernel" if weight else "/bias"
        array = values(tensorflow, shapes()[tensorflow])
        state[name] = torch.from_numpy(array.T if tensorflow.endswith("kernel") else array)
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()

    released = read_released(folder)
    model = PretrainingModel(released.model, VOCABULARY).eval()
    model.load_state_dict({**released.backbone, **released.pretraining})
    batch = make_batch((3, 9, 24), VOCABULARY)
    inputs = pad(batch)
    with torch.no_grad():
        output = theirs(**inputs)
        logits = output.prediction_logits[inputs["attention_mask"].bool()][batch.masked_rows]
        assert logits.std() > 0.1
        torch.testing.assert_close(model.masked_logits(batch), logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            next_sentence_logits(model, batch), output.seq_relationship_logits, atol=1e-5, rtol=0
        )
    assert (released.config, released.family, released.token_types) == ({}, "bert", 2)


def test_the_mapping_has_tensorflows_names_and_shapes(folder: Path) -> None:
    released = read_released(folder)
    mapping = {tensor.name: tensor for tensor in released.mapping}
    assert mapping["bert/encoder/layer_1/intermediate/dense/kernel"][1:] == (
        (HIDDEN, INTERMEDIATE),
        "layers.1.ffn_in_weight",
    )
    assert (
        mapping["global_step"].target == mapping["bert/pooler/dense/bias/adam_m"].target == "left out: the optimizer's"
    )
    assert len(mapping) == len(shapes()) + 302
    assert "bert/encoder/layer_0-1/*" in mapping_table(released.mapping)


def test_fine_tuned_heads_have_names_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run_classifier.py writes output_weights at the root, run_squad.py below cls/squad."""
    read = tensorflow1.Checkpoint.__init__
    for scope in ("", "cls/squad/"):

        def renamed(self: Checkpoint, prefix: Path, scope: str = scope) -> None:
            read(self, prefix)
            for name in ("output_weights", "output_bias"):
                self.variables[scope + name] = self.variables.pop(f"cls/seq_relationship/{name}")

        monkeypatch.setattr(tensorflow1.Checkpoint, "__init__", renamed)
        released = read_released(folder)
        expected = values("cls/seq_relationship/output_weights", (2, HIDDEN))
        np.testing.assert_array_equal(released.head["out_weight"].numpy(), expected)
        assert "heads.nsp_weight" not in released.pretraining


def test_damage_is_found(folder: Path) -> None:
    index, data = (folder / f"bert_model.ckpt.{end}" for end in ("index", "data-00000-of-00001"))
    whole = {path: path.read_bytes() for path in (index, data)}

    def refused(path: Path, content: bytes, message: str) -> None:
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"^{re.escape(str(path))}: {message}"):
            read_released(folder)
        path.write_bytes(whole[path])

    place = Checkpoint(folder / "bert_model.ckpt").variables["bert/pooler/dense/kernel"].offset + 5
    flipped = whole[data][:place] + bytes([whole[data][place] ^ 4]) + whole[data][place + 1 :]
    refused(data, flipped, r"damaged \(the checksum of bert/pooler/dense/kernel differs")
    refused(data, whole[data][:-200], r"damaged \(.* is \d+ bytes, not \d+ values")
    middle = len(whole[index]) // 2
    flipped = whole[index][:middle] + bytes([whole[index][middle] ^ 4]) + whole[index][middle + 1 :]
    refused(index, flipped, r"damaged \(the checksum of a block differs")
    refused(index, whole[index][:-1], r"damaged \(it does not end")
    refused(index, whole[index][:20], r"damaged \(it does not end")
    refused(index, whole[index][middle:], r"damaged \(")
    data.rename(folder / "elsewhere")
    with pytest.raises(InputError, match=r"data-00000-of-00001: not found, but listed in bert_model\.ckpt\.index"):
        read_released(folder)


def test_of_several_checkpoints_the_one_that_is_named(folder: Path) -> None:
    for path in sorted(folder.glob("bert_model.ckpt.*")):
        (folder / path.name.replace("bert_model.ckpt", "model.ckpt-343")).write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"several TensorFlow checkpoints \(bert_model\.ckpt, model\.ckpt-343\)"):
        read_released(folder)
    (folder / "checkpoint").write_text('model_checkpoint_path: "/old/place/model.ckpt-343"\n')
    (folder / "bert_model.ckpt.index").write_bytes(b"")  # not looked at
    assert read_released(folder).family == "bert"


def slow_crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_has_the_published_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's polynomial; the check value of CRC-32/ISCSI


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_crc32c_equals_the_definition(content: bytes) -> None:
    assert crc32c(content) == slow_crc32c(content)


@pytest.mark.parametrize("size", [16 * 8192, 16 * 8192 + 1, 200_001])
def test_crc32c_equals_the_definition_for_many_bytes(size: int) -> None:
    content = np.random.default_rng(0).bytes(size)
    assert crc32c(content) == slow_crc32c(content)
