"""Released checkpoints in and out: every tensor is mapped, and what is not whole is refused (invariant 6)."""

import json
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import SPECIALS, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from finetune.tasks.datasets.tables import read_table
from pretrain.checkpoint.assembly import ReleasedModel, assemble
from pretrain.checkpoint.layouts import read_config
from pretrain.checkpoint.mapping import MappedTensor, mapping_table
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.common import files
from pretrain.common.errors import InputError
from pretrain.model.heads import PretrainingModel
from tests import parity
from tests.tiny_checkpoints import write_again

transformers: Any = pytest.importorskip("transformers")

ROWS = 101
BERT_SIZES = {**parity.usual(parity.Shape(3, 32, 4, 48, ())), "max_position_embeddings": 40}


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


# ---- heads


def test_heads_of_electra(tmp_path: Path) -> None:
    """A generator's head is kept whole; a discriminator loses only the head that is not ours."""
    released = parity.read_back(parity.make_theirs("AutoModelForMaskedLM", "ELECTRA", parity.SHAPES[0]), tmp_path)
    assert all(tensor.is_read for tensor in released.mapping)
    released = parity.read_back(parity.make_theirs("AutoModelForPreTraining", "ELECTRA", parity.SHAPES[0]), tmp_path)
    left_out = {tensor.name for tensor in released.mapping if not tensor.is_read}
    assert left_out == {name for name in load_file(tmp_path / "model.safetensors") if "discriminator" in name}


@pytest.mark.parametrize("family", ["DistilBERT", "RoBERTa"])
def test_what_fine_tuning_adds_to_token_types_survives(family: str, tmp_path: Path) -> None:
    """DistilBERT has no such table and RoBERTa one row, but ours are trained all the same."""
    write_tokenizer(tmp_path, [*SPECIALS, *"abc"])
    shape = parity.SHAPES[0]
    theirs: Any = parity.make_theirs(parity.CLASSES["tokens"], family, shape)
    read = parity.read_back(theirs, tmp_path / family)
    read.backbone["embeddings.token_type"][0] += torch.linspace(-1, 1, 32)
    write_again(read, tmp_path / "out", tmp_path, "tokens")
    written = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    inputs = parity.inputs_of(parity.batch_for(read, shape), read)
    with torch.no_grad():
        expected = parity.task_model(read, "tokens", "classes").eval()(parity.task_batch(read, shape, "tokens")).logits
        found, before = (parity.their_logits(model.eval(), inputs, "tokens") for model in (written, theirs))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert (expected - before).abs().max() > 0.1


# ---- spellings and files of BERT


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**BERT_SIZES)).eval()
    with torch.no_grad():  # all random, so that no two could be swapped unseen
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def spell(tensors: dict[str, Tensor], pattern: str, replacement: str) -> dict[str, Tensor]:
    return {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}


def as_safetensors(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors")


def as_nvidia(tensors: dict[str, Tensor], folder: Path) -> None:
    """DeepLearningExamples: "model", DataParallel's prefix, LinearActivation, an optimizer beside."""
    tensors = spell(tensors, r"(intermediate|pooler|transform)\.dense\.", r"\1.dense_act.")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    content = {"model": spell(tensors, "^", "module."), "optimizer": {"state": {0: {"step": 1}}}, "epoch": 3}
    torch.save(content, folder / "ckpt_8601.pt")
    (folder / "config.json").rename(folder / "bert_config.json")


def as_2018(tensors: dict[str, Tensor], folder: Path) -> None:
    """pytorch-pretrained-bert: TensorFlow's names of LayerNorm, no model_type, constants among the weights."""
    tensors = spell(spell(tensors, r"LayerNorm\.weight", "LayerNorm.gamma"), r"LayerNorm\.bias", "LayerNorm.beta")
    tensors["bert.embeddings.position_ids"] = torch.arange(40)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"], config["architectures"], config["layer_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))


def as_sentence_encoder(tensors: dict[str, Tensor], folder: Path) -> None:
    """sentence-transformers: the base model alone, without its prefix."""
    bare = {name.removeprefix("bert."): tensor for name, tensor in tensors.items() if name.startswith("bert.")}
    as_safetensors(bare, folder)


def as_tied_the_other_way(tensors: dict[str, Tensor], folder: Path) -> None:
    """Of two tensors that share their storage safetensors keeps one, and not always the same."""
    tensors = spell(tensors, "^cls.predictions.bias$", "cls.predictions.decoder.bias")
    as_safetensors(spell(tensors, "^bert.embeddings.word_embeddings.weight$", "cls.predictions.decoder.weight"), folder)


def as_bin_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    places = {name: f"pytorch_model-{number % 3:05d}.bin" for number, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        torch.save({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def as_safetensors_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """transformers' own sharding."""
    model = transformers.BertForPreTraining(transformers.BertConfig.from_pretrained(folder))
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3


SPELLINGS = [as_safetensors, as_nvidia, as_2018, as_sentence_encoder, as_tied_the_other_way]
SPELLINGS += [as_bin_shards, as_safetensors_shards]


@pytest.mark.parametrize("write", SPELLINGS)
def test_every_spelling_and_file_of_bert(write: Callable[..., None], theirs: Any, tmp_path: Path) -> None:
    """They are read as what transformers writes today, whose logits are ours (test_parity.py)."""
    today = parity.read_back(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    write(tensors, tmp_path)
    released = read_released(tmp_path)
    for part in ("backbone", "head", "pretraining"):
        expected = {} if (part, write) == ("pretraining", as_sentence_encoder) else getattr(today, part)
        found = getattr(released, part)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in found.values())
    filled = {tensor.target for tensor in released.mapping if tensor.is_read}
    pooler = {"heads.pooler_weight", "heads.pooler_bias"}
    named = {target.replace("head.dense", "heads.pooler") for target in filled} - pooler
    assert named == (released.backbone.keys() | released.pretraining.keys()) - pooler
    reasons = {tensor.target for tensor in released.mapping} - filled
    expected = {
        as_nvidia: {"left out: tied to embeddings.word"},
        as_2018: {"left out: tied to embeddings.word", "left out: a constant: 0, 1, 2, ..."},
    }
    assert reasons == expected.get(write, set())


def test_half_precision_is_widened(theirs: Any, tmp_path: Path) -> None:
    full = load_file(save(theirs, tmp_path) / "model.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in full.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    released = read_released(tmp_path)
    word = released.backbone["embeddings.word"]
    assert word.dtype == torch.float32
    assert torch.equal(word, tensors["bert.embeddings.word_embeddings.weight"].float())


def test_a_padded_vocabulary_stays_as_it_is(theirs: Any, tmp_path: Path) -> None:
    """NVIDIA pads to a multiple of 8 and leaves the config's number alone."""
    tensors = load_file(save(theirs, tmp_path) / "model.safetensors")
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        tensors[name] = torch.cat([tensors[name], torch.zeros(3, *tensors[name].shape[1:])])
    save_file(tensors, tmp_path / "model.safetensors")
    released = read_released(tmp_path)
    assert released.vocabulary_size == len(released.pretraining["heads.mlm_bias"]) == ROWS + 3
    write_tokenizer(tmp_path, [*SPECIALS, *"abc"])
    head = {"out_weight": torch.ones(2, 32), "out_bias": torch.ones(2)}
    write_again(released, tmp_path / "out", tmp_path, "spans", head=head)
    written = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out")
    assert written.config.vocab_size == ROWS + 3


# ---- the mapping


def test_the_mapping_table_is_short_and_names_what_is_left_out(theirs: Any, tmp_path: Path) -> None:
    tensors = load_file(save(theirs, tmp_path) / "model.safetensors")
    extra = {f"adapters.{number}.down": torch.zeros(1) for number in range(2)}
    extra["embeddings.position_ids"] = torch.arange(40)[None]
    extra["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    released = read_released(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in {**tensors, **extra}.items()}
    assert {tensor.name: tensor.shape for tensor in released.mapping} == shapes
    assert sorted(mapping_table(released.mapping).split("\n")) == sorted(
        [
            "bert.embeddings.*        5 tensors -> embeddings.*",
            "bert.encoder.layer.*    48 tensors -> layers.*",
            "bert.pooler.dense.*      2 tensors -> head.dense.*",
            "cls.predictions.*        5 tensors -> heads.mlm.*",
            "cls.seq_relationship.*   2 tensors -> heads.nsp.*",
            "adapters.*: 2 tensors left out: not a parameter of the encoder or its heads",
            "embeddings.position_ids: 1 tensor left out: a constant: 0, 1, 2, ...",
            "cls.predictions.decoder.weight: 1 tensor left out: tied to embeddings.word",
        ]
    )


def test_names_left_out_are_a_pattern_unless_it_matches_one_that_is_read() -> None:
    heads = [MappedTensor(f"cls.{letter}.weight", (1,), "left out: why") for letter in "abcdefgh"]
    read = MappedTensor("bert.pooler.weight", (1,), "head.dense_weight")
    assert mapping_table([read, *heads]).split("\n")[1] == "cls.*: 8 tensors left out: why"
    rows = mapping_table([read._replace(name="cls.pooler.weight"), *heads]).split("\n")
    assert rows[1] == "cls.a.weight, cls.b.weight and 6 more: 8 tensors left out: why"
    assert mapping_table([]) == ""


FACTS = read_config(BERT_SIZES)
SHAPE = FACTS.model
STATE = PretrainingModel(SHAPE, ROWS).state_dict().items()
TENSORS = released_tensors({n.replace("heads.pooler_", "head.dense_"): torch.randn_like(t) for n, t in STATE}, FACTS)


def read_tensors(tensors: dict[str, Tensor], **config: Any) -> ReleasedModel:
    return assemble(tensors, read_config({**BERT_SIZES, **config}), {}, where="here")


def target_of(released: ReleasedModel, name: str) -> str:
    return {tensor.name: tensor.target for tensor in released.mapping}[name]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("cls.predictions.transform.dense.bias", None, "cls.predictions.transform.dense.bias is missing"),
        ("cls.predictions.bias", torch.zeros(7), r"heads.mlm_bias would have the shape \[7\]"),
        ("cls.predictions.decoder.weight", torch.zeros(ROWS, 32), "differs from embeddings.word; an untied"),
    ],
)
def test_a_head_that_is_not_whole_is_left_out_whole(name: str, change: Tensor | None, reason: str) -> None:
    tensors = {key: tensor for key, tensor in TENSORS.items() if key != name}
    released = read_tensors({**tensors, **({} if change is None else {name: change})})
    others = ("heads.pooler_weight", "heads.pooler_bias", "heads.nsp_weight", "heads.nsp_bias")
    assert set(released.pretraining) == set(others)
    assert re.search(f"^left out: .*{reason}", target_of(released, "cls.predictions.transform.LayerNorm.weight"))
    if "decoder" in name:
        assert target_of(released, name) == "left out: its head is not read"


def test_a_classifier_of_another_shape_is_left_out() -> None:
    classifier = {"classifier.weight": torch.ones(3, 33), "classifier.bias": torch.ones(3)}
    released = read_tensors({**TENSORS, **classifier})
    assert set(released.head) == {"dense_weight", "dense_bias"}
    assert target_of(released, "classifier.bias") == "left out: head.out_weight would have the shape [3, 33]"
    classifier = {"classifier.weight": torch.ones(3, 32), "classifier.bias": torch.ones(2)}
    reason = target_of(read_tensors({**TENSORS, **classifier}), "classifier.weight")
    assert reason.startswith("left out: its weight and bias have")


@pytest.mark.parametrize("prefix", ["0.auto_model.", "encoder.", "backbone.bert.", "net.backbone."])
def test_a_foreign_prefix_is_taken_off_and_shown(prefix: str) -> None:
    head = {"classifier.weight": torch.ones(3, 32), "classifier.bias": torch.ones(3)}
    plain = read_tensors({**TENSORS, **head})
    bare = {name.removeprefix("bert."): tensor for name, tensor in TENSORS.items() if name.startswith("bert.")}
    wrapped = read_tensors({**{f"{prefix}{name}": tensor for name, tensor in bare.items()}, **head})
    assert wrapped.backbone.keys() == plain.backbone.keys()
    assert all(torch.equal(wrapped.backbone[name], plain.backbone[name]) for name in plain.backbone)
    assert wrapped.head["out_weight"].shape == (3, 32)
    assert target_of(wrapped, f"{prefix}embeddings.word_embeddings.weight") == "embeddings.word"
    assert f"{prefix}encoder.layer.*" in mapping_table(wrapped.mapping)


def test_what_names_a_file_has_is_said() -> None:
    with pytest.raises(InputError, match=r"word_embeddings\.weight is missing; the file has a\.b, c\.d, \.\.\. Use"):
        read_tensors({"c.d": torch.ones(3), "a.b": torch.ones(3), "e.f": torch.ones(3)})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["bert.encoder.layer.1.output.dense.weight", "cls.predictions.bias"])
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    broken = TENSORS[name].clone()
    broken.view(-1)[3] = value
    with pytest.raises(InputError, match=re.escape(f"here: {name} has values that are not finite")):
        read_tensors({**TENSORS, name: broken})


def test_a_pointer_of_git_lfs_is_named(theirs: Any, tmp_path: Path) -> None:
    save(theirs, tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(InputError, match=r"model\.safetensors: a Git LFS pointer"):
        read_released(tmp_path)
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        (tmp_path / name).write_text(pointer)
        with pytest.raises(InputError, match=f"{name}: a Git LFS pointer"):
            read_table(tmp_path / name, ["text"])


def test_the_transformer_of_a_sentence_encoder_is_found(theirs: Any, tmp_path: Path) -> None:
    save(theirs, tmp_path / "0_Transformer")
    (tmp_path / "modules.json").write_text("[]")
    released = read_released(tmp_path)
    kept = read_released(tmp_path / "0_Transformer").backbone
    assert all(torch.equal(released.backbone[name], tensor) for name, tensor in kept.items())
    write_tokenizer(tmp_path / "0_Transformer", [*SPECIALS, "a"])
    assert read_tokenizer(tmp_path).get_vocab_size() == 6


def test_a_name_of_the_hub_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=r"no such folder.* Did you mean hf://sentence-transformers/all-MiniLM-L6-v2\?"
    ):
        read_released(Path("sentence-transformers/all-MiniLM-L6-v2"))
    (tmp_path / "exported").mkdir()
    for path in (Path("exported/bert-mini"), tmp_path / "a", Path("bert")):
        with pytest.raises(InputError, match=r"no such folder[^?]*$"):
            read_released(path)


def test_blank_lines_at_the_end_of_a_vocabulary_are_no_tokens(theirs: Any, tmp_path: Path) -> None:
    for end in ("", "\n", "\n\n", "\r\n\r\n"):
        (tmp_path / "vocab.txt").write_bytes(("\n".join([*SPECIALS, "a"]) + end).encode())
        assert read_tokenizer(tmp_path, 6).get_vocab_size() == 6


# ---- refusals


@pytest.mark.parametrize("name", [name for name in TENSORS if name.startswith("bert.") and "pooler" not in name])
def test_a_partly_filled_backbone_is_refused(name: str) -> None:
    without = {key: tensor for key, tensor in TENSORS.items() if key != name}
    with pytest.raises(InputError, match=re.escape(f"here: {name} is missing")):
        read_tensors(without)
    rows = TENSORS[name][:-1] if "word" not in name else TENSORS[name][:, :-1]
    with pytest.raises(InputError, match=re.escape(f"here: {name} has the shape {list(rows.shape)}; expected [")):
        read_tensors({**TENSORS, name: rows})


def test_weights_of_another_config_are_refused() -> None:
    with pytest.raises(InputError, match=r"layer\.3\.\S* is missing"):
        read_tensors(TENSORS, num_hidden_layers=4)
    with pytest.raises(InputError, match=r"layer\.2\.\S*, beyond the 2 layers"):
        read_tensors(TENSORS, num_hidden_layers=2)
    with pytest.raises(InputError, match=r"expected \[101, 64\]"):
        read_tensors(TENSORS, hidden_size=64)
    narrow = {name: tensor[..., :24] if "embeddings" in name else tensor for name, tensor in TENSORS.items()}
    electra = {name.replace("bert.", "electra."): tensor for name, tensor in narrow.items()}
    with pytest.raises(InputError, match=r"embeddings_project\.weight is missing"):
        read_tensors(electra, model_type="electra", embedding_size=24)


def test_a_tensor_given_twice_is_refused() -> None:
    word = TENSORS["bert.embeddings.word_embeddings.weight"]
    with pytest.raises(InputError, match=r"both fill embeddings\.word"):
        read_tensors({**TENSORS, "embeddings.word_embeddings.weight": word})


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "name",
    ["bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.output.dense.weight", "bert.pooler.dense.weight"],
)
def test_quantized_weights_are_refused(name: str, kind: torch.dtype) -> None:
    """Values of FP8 are floating-point numbers, but without their scales not the weights."""
    with pytest.raises(InputError, match=rf"{name} is {kind}; quantized"):
        read_tensors({**TENSORS, name: TENSORS[name].to(kind)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deberta"}, "model_type is 'deberta'; bert, bertrain, deberta-v2, .* are supported"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'; only 'gelu'"),
        ({"layer_norm_eps": 0}, "greater than 0"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is"),
        ({"type_vocab_size": 16}, "type_vocab_size is 16"),
        ({"hidden_size": None}, "bertrain's encoder does not support this model"),
        ({"num_attention_heads": 5}, "must be a multiple of heads"),
    ],
)
def test_configs_that_are_not_this_encoder_are_refused(change: dict, message: str, theirs: Any, tmp_path: Path) -> None:
    config = json.loads((save(theirs, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message) as error:
        read_released(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_what_is_missing_or_damaged_is_named(theirs: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        read_released(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_released(tmp_path)
    weights = save(theirs, tmp_path) / "model.safetensors"
    content = weights.read_bytes()
    files.write_manifest(tmp_path, {"format": 1})
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match="SHA-256 differs"):
        read_released(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "somebody else\'s", "files": {}}')
    read_released(tmp_path)
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"model\.safetensors: damaged"):
        read_released(tmp_path)
    weights.unlink()
    with pytest.raises(InputError, match=r"has none of model\.safetensors, "):
        read_released(tmp_path)
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    with pytest.raises(InputError, match=r"a TensorFlow checkpoint\. .* hf://google-bert/bert-base-uncased"):
        read_released(tmp_path)
    (tmp_path / "bert_model.ckpt.index").unlink()
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=r"has a\.pt, b\.pt, but only one is allowed"):
        read_released(tmp_path)
    (tmp_path / "b.pt").unlink()
    with pytest.raises(InputError, match=r"a\.pt: cannot be read as plain tensors"):
        read_released(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="is not a mapping of names to tensors"):
        read_released(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="'num_hidden_layers' is missing"):
        read_released(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        read_released(tmp_path)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)

    def __init__(self, mark: Path) -> None:
        self.mark = mark


@pytest.mark.parametrize("seed", range(20))
def test_a_pickle_is_not_run_wherever_it_hides(theirs: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    save(theirs, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    mark, place = tmp_path / "was-run", rng.choice(sorted(TENSORS))
    hostile: Any = Hostile(mark)
    for wrap in rng.choices([lambda x: [x], lambda x: {"x": x}, lambda x: (1, x), lambda x: x], k=3):
        hostile = wrap(hostile)
    content: dict[Any, Any] = {**TENSORS, **rng.choice([{place: hostile}, {f"{place}.more": hostile}])}
    if rng.random() < 0.5:
        content = {"model": content, "optimizer": {"state": {0: hostile}}}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=rng.random() < 0.5)
    # torch's own message advises to run it.
    refused = r"pytorch_model\.bin: cannot be read as plain tensors \(it contains other objects\)"
    with pytest.raises(InputError, match=refused):
        read_released(tmp_path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists()  # it would have


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../outside.safetensors", "only files in the same folder are read"),
        ("/etc/passwd", "only files in the same folder are read"),
        (7, "only files in the same folder are read"),
        ("absent.safetensors", r"absent\.safetensors: not found"),
        ("other.safetensors", r"other\.safetensors: has no bert\."),
    ],
)
def test_an_index_leads_nowhere_else(file: Any, message: str, theirs: Any, tmp_path: Path) -> None:
    folder = save(theirs, tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        read_released(folder)


def test_writing_refuses_what_does_not_fit(tmp_path: Path) -> None:
    released = read_tensors(TENSORS)
    head = {"out_weight": torch.ones(3, 32), "out_bias": torch.ones(3)}
    two_labels = {"id2label": {0: "a", 1: "b"}, "pad_token_id": 0}

    def write(purpose: str, config: dict[str, Any]) -> Path:
        return write_again(released, tmp_path / "out", tmp_path, purpose, head=head, config=config)

    with pytest.raises(ValueError, match="needs dense_bias, dense_weight"):
        write("sequence", {})
    with pytest.raises(ValueError, match="names 2 labels, but the head has 3"):
        write("tokens", two_labels)
    with pytest.raises(InputError, match="has no tokenizer"):
        write("tokens", {})
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.iterdir())
    # Whatever the config that was read said of another code is not passed on.
    write_tokenizer(tmp_path, [*SPECIALS, *"abc"])
    stale = {"auto_map": {"AutoModel": "evil.Model"}, "torch_dtype": "float16", "hidden_size": 7, "num_labels": 9}
    config = json.loads((write("tokens", stale) / "config.json").read_text())
    assert not {"auto_map", "torch_dtype", "num_labels"} & set(config)
    assert (config["hidden_size"], config["dtype"], config["pad_token_id"]) == (32, "float32", 0)
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
