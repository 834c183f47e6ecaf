"""Models that no released layout holds: written and read as they are, and used by every command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from corpora import SPECIALS, make_corpus, write_tokenizer
from labeled_batches import ROWS, make_batch, pad
from safetensors.torch import load_file
from tiny_checkpoints import write_reviews
from torch import Tensor

import finetune
from finetune.artifacts.padded import PaddedModel
from finetune.cli import main
from finetune.tasks.base import Head, Objective
from finetune.training.model.batches import LabeledBatch
from finetune.training.model.task_model import TaskModel
from pretrain.checkpoint import hf, store
from pretrain.checkpoint.layouts import BERTRAIN, LAYOUTS, layout_of, task_head
from pretrain.checkpoint.released import read_model_config, read_released
from pretrain.checkpoint.released_writer import write_released
from pretrain.common.errors import InputError
from pretrain.config import ElectraConfig, ModelConfig, PretrainConfig, load_config
from pretrain.model.heads import PretrainingModel
from pretrain.objectives import make_objective
from pretrain.objectives.replaced_tokens import ElectraModel, discriminator_state, generator_state
from pretrain.reporting.attention.weights import AttentionModel
from tests.batches_by_hand import make_batch as make_unlabeled_batch
from tests.distributed import run_workers
from tests.starts import Start, make_starts, pretraining, records

SIZES = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "intermediate": 48, "max_positions": 64}
PARTS = {"recursions": 2, "embedding": 16, "norm": "rms_norm", "activation": "relu"}
# Parts that are new, and mixtures of old ones.
SHAPES: list[dict[str, Any]] = [
    PARTS,
    {"family": "modernbert", "local_attention": 8, "norm": "rms_norm"},
    {"pooling": "max", "tied_decoder": False, "activation": "relu"},
    {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 20, "kv_heads": 1, "pooling": "mean"}
    | {"token_types": False, "norm": "rms_norm", "norm_placement": "pre", "gated": True},
]
OBJECTIVES: dict[Head, Objective] = {"sequence": "classes", "tokens": "classes", "spans": "span"}


def make_shape(**values: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SIZES, **values})


def make_state(shape: ModelConfig, *, next_sentence: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = PretrainingModel(shape, ROWS, next_sentence)
    return {name: tensor + torch.randn_like(tensor) * 0.2 for name, tensor in model.state_dict().items()}


def make_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    write_tokenizer(folder, [*SPECIALS, *(f"word{number}" for number in range(ROWS - len(SPECIALS)))])
    return folder


# ---- files


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("entry", SHAPES, ids=str)
def test_there_and_back_is_exact(entry: dict[str, Any], next_sentence: bool, tmp_path: Path) -> None:
    shape, tokenizer = make_shape(**entry, init_std=0.03), make_tokenizer(tmp_path / "tokenizer")
    state = make_state(shape, next_sentence=next_sentence)
    assert layout_of(shape) is BERTRAIN
    hf.export(state, shape, tokenizer, tmp_path / "out", next_sentence=next_sentence, card="")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "bertrain"
    assert config["architectures"] == ["BertrainForPreTraining" if next_sentence else "BertrainForMaskedLM"]
    assert (config["vocab_size"], config["pad_token_id"]) == (ROWS, 0)
    assert config["model"].keys() == ModelConfig.model_fields.keys()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys()

    released = read_released(tmp_path / "out")
    assert (released.family, released.model) == ("bertrain", shape)
    assert released.token_types == (2 if shape.token_types else 0)
    read, missing = released.prediction_state(next_sentence=next_sentence)
    assert not missing
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert all(tensor.is_read for tensor in released.mapping)
    # The pooler begins the head of a task, as BERT's does.
    assert set(released.head) == ({"dense_weight", "dense_bias"} if next_sentence else set())


def test_models_that_their_family_holds_stay_there() -> None:
    for family in ("bert", "roberta", "modernbert", "eurobert", "nomic_bert", "gte", "deberta"):
        assert layout_of(make_shape(family=family, max_positions=128)) is LAYOUTS[family]
    assert layout_of(make_shape(embedding=16), "electra") is LAYOUTS["electra"]
    assert layout_of(make_shape(embedding=16)) is BERTRAIN
    assert layout_of(make_shape(gated=True), "electra") is BERTRAIN


def test_every_example_loads_in_transformers() -> None:
    examples = list((Path(__file__).parents[2] / "configs" / "pretrain").glob("*.yaml"))
    own = []
    for path in examples:
        config = load_config(path)
        if layout_of(config.model, "electra" if config.electra.is_on else "") is BERTRAIN:
            own.append(path.name)
    assert examples
    assert own == []


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_sinusoidal_positions_are_a_table_in_berts_layout(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    shape = make_shape(positions="sinusoidal", **({"embedding": 16} if family == "electra" else {}))
    state, tokenizer = make_state(shape, next_sentence=False), make_tokenizer(tmp_path / "tokenizer")
    name = "" if family == "bert" else family
    hf.export(state, shape, tokenizer, tmp_path / "out", next_sentence=False, card="", family=name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    model, batch = PretrainingModel(shape, ROWS, next_sentence=False).eval(), make_unlabeled_batch([9, 14], ROWS)
    model.load_state_dict(state)
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    back, read, _ = hf.load(tmp_path / "out")
    again = PretrainingModel(back, ROWS, next_sentence=False).eval()
    again.load_state_dict(read)
    with torch.no_grad():
        parts = zip(batch.input_ids.split(batch.lengths), batch.token_types.split(batch.lengths), strict=True)
        logits = [theirs(input_ids=ids[None], token_type_ids=types[None]).logits[0] for ids, types in parts]
        expected = torch.cat(logits)[batch.masked_rows]
        torch.testing.assert_close(model.masked_logits(batch), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(again.masked_logits(batch), expected, atol=1e-4, rtol=1e-4)


def test_another_family_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    shape, tokenizer = make_shape(**PARTS), make_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=r"layout of bert cannot represent this model: .*model.recursions is 2"):
        hf.export(make_state(shape), shape, tokenizer, tmp_path / "x", next_sentence=True, card="", family="bert")
    assert not (tmp_path / "x").exists()


def test_both_models_of_an_electra_run_are_written(tmp_path: Path) -> None:
    shape, tokenizer = make_shape(gated=True), make_tokenizer(tmp_path / "tokenizer")
    settings = ElectraConfig.model_validate({"generator_width": 0.5, "embeddings": "disentangled"})
    torch.manual_seed(0)
    model = ElectraModel(shape, ROWS, settings=settings)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    values = pretraining(tokenizer, tmp_path / "run", [(32, 8, 2)], model=shape.model_dump(mode="json"))
    config = PretrainConfig.model_validate({**values, "electra": settings.model_dump(), "pairs": {"objective": "none"}})
    for part in make_objective(config).exported:
        kind: dict[str, Any] = {"family": layout_of(part.shape, part.layout).family, "class_suffix": part.head}
        folder = tmp_path / f"out{part.suffix}"
        hf.export(part.weights(state), part.shape, tokenizer, folder, next_sentence=False, card="", **kind)
    for folder, own in (("out", discriminator_state(state)), ("out-generator", generator_state(state))):
        released = read_released(tmp_path / folder)
        assert released.family == "bertrain"
        assert released.model.gated
        read = {**released.backbone, **released.pretraining}
        assert own.keys() - read.keys() == {name for name in own if name.startswith("heads.rtd_")}
        assert all(torch.equal(read[name], own[name]) for name in read)


def test_a_config_that_is_damaged_or_newer_is_refused(tmp_path: Path) -> None:
    for model, message in (
        (None, "'model' is missing"),
        ({**SIZES, "halting": 3}, "halting"),
        ({**SIZES, "heads": 5}, "must be a multiple of heads"),
    ):
        values = {"model_type": "bertrain", **({} if model is None else {"model": model})}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(InputError, match=message):
            read_model_config(tmp_path)
    # A field that is newer than the file has its default.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bertrain", "model": SIZES}))
    assert read_model_config(tmp_path) == make_shape()


# ---- logits


@pytest.mark.parametrize("head", OBJECTIVES)
@pytest.mark.parametrize("entry", SHAPES, ids=str)
def test_a_fine_tuned_model_is_written_with_its_logits(entry: dict[str, Any], head: Head, tmp_path: Path) -> None:
    shape, tokenizer = make_shape(**entry), make_tokenizer(tmp_path / "tokenizer")
    layers, batch = task_head("bertrain", {}, shape, head), make_batch(shape.token_types, head)
    assert layers.pooling == (shape.pooling if head == "sequence" else "cls")
    torch.manual_seed(0)
    model = TaskModel(shape, ROWS, head, OBJECTIVES[head], 2, layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        expected, state = model(batch).logits, model.state_dict()
        if head == "sequence":
            assert torch.allclose(expected, sequence_logits(model, batch), atol=1e-5)
    write_released(
        tmp_path / "out",
        family="bertrain",
        model=shape,
        backbone={name: tensor for name, tensor in state.items() if not name.startswith("head.")},
        head={name.removeprefix("head."): tensor for name, tensor in state.items() if name.startswith("head.")},
        purpose=head,
        config={},
        tokenizer_folder=tokenizer,
        card="",
    )
    released = read_released(tmp_path / "out")
    assert released.model == shape
    padded, inputs = PaddedModel(released, head), pad(batch)
    assert ("token_type_ids" in padded.inputs) == shape.token_types
    with torch.no_grad():
        found = padded(**{name: inputs[name] for name in padded.inputs})
    rows = found[0] if head == "sequence" else torch.stack(found, -1) if head == "spans" else found[0]
    rows = rows if head == "sequence" else rows[inputs["attention_mask"].bool()]
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=0)


def sequence_logits(model: TaskModel, batch: LabeledBatch) -> Tensor:
    """[S, 2] by the definition of the model's pooling."""
    pools = {"cls": lambda x: x[0], "mean": lambda x: x.mean(0), "max": lambda x: x.amax(0)}
    parts = model.encode(batch).split(list(batch.lengths))
    pooled = torch.stack([pools[model.shape.pooling](part) for part in parts])
    head = model.head
    dense = torch.tanh(pooled @ head.dense_weight.T + head.dense_bias)
    return dense @ head.out_weight.T + head.out_bias


# ---- commands


def starts(pretrainings: list[Start], finetunings: list[Start]) -> list[str]:
    from finetune.training import train as fine
    from pretrain.run import train

    return [*make_starts(train.main, pretrainings), *make_starts(fine.main, finetunings)]


def tuned(root: Path, name: str, start: Path, section: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "run_dir": str(root / name),
        "start_from": str(start),
        "max_length": 48,
        **section,
        "training": {"examples_per_step": 8, "learning_rate": 1e-3, "steps": 2},
        "engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 400},
        "tracking": {"log_every_steps": 1, "wandb": "off"},
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretraining with every part, its export, a run and a student that continue, and the three fine-tunings."""
    root = tmp_path_factory.mktemp("own")
    corpus = make_corpus(root / "corpus", documents=40, vocabulary_size=300)
    model = make_shape(**PARTS).model_dump(mode="json")
    plain = pretraining(corpus, root / "run", [(32, 8, 2)], model=model)
    continued = pretraining(corpus, root / "continued", [(32, 8, 1)], model=model, start_from=str(root / "export"))
    for values in (plain, continued):  # as the command writes it
        Path(values["run_dir"]).mkdir()
        (Path(values["run_dir"]) / "config.yaml").write_text(yaml.safe_dump(values))
    assert run_workers(1, starts, [Start(plain)], []) == [[""]]
    assert main(["export", str(root / "run"), str(root / "export")]) == 0
    tagged, asked = root / "names.conll", root / "asked.jsonl"
    tagged.write_text("ab B-X\ncd O\n\ncd O\nab B-X\n\n" * 8)
    lines = [
        {"id": str(n), "question": "ab?", "context": "ab cd", "answers": [{"text": "cd", "answer_start": 3}]}
        for n in range(8)
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reviews = write_reviews(root, train=16, dev=6)
    learns = {"distillation__teacher": str(root / "export"), "distillation__initialize": False}
    plan = [Start(continued), Start(pretraining(corpus, root / "student", [(32, 8, 1)], **learns))]
    questions = {"train": str(asked), "dev": str(asked), "stride": 8, "max_question_tokens": 8}
    tunings = [
        Start(tuned(root, "reviews", root / "run", {"classification": reviews})),
        Start(tuned(root, "names", root / "export", {"entities": {"train": str(tagged), "dev": str(tagged)}})),
        Start(tuned(root, "answers", root / "export", {"questions": questions})),
    ]
    assert run_workers(1, starts, plan, tunings) == [[""] * 5]
    return root


def test_the_export_says_what_it_is_for(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(place / "run"), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "transformers cannot load it (" in printed
    assert "model.recursions is 2, and bert supports only 1" in printed
    assert "AutoModel" not in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: bertrain\n")
    assert "`transformers` cannot load this folder" in card
    assert "from transformers" not in card
    assert "model.recursions is 2" in card


def test_pretrainings_continue_and_learn_from_it(place: Path) -> None:
    begun = store.read_weights(place / "continued" / "checkpoints" / "step-00000000")
    last = store.read_weights(place / "run" / "checkpoints" / "step-00000002")
    assert all(torch.equal(begun[name], last[name]) for name in last)
    assert begun.keys() == last.keys()
    assert main(["export", str(place / "continued"), str(place / "continued-export")]) == 0
    assert read_released(place / "continued-export").family == "bertrain"
    assert records(place / "student")[0]["distil_loss"] > 0


@pytest.mark.parametrize(
    ("name", "section"), [("reviews", "classification"), ("names", "entities"), ("answers", "questions")]
)
def test_a_saved_model_predicts_as_it_did_before(place: Path, name: str, section: str) -> None:
    """What the run predicted before it saved the model, and the scores of that, are those of the folder."""
    released = read_released(place / name)
    assert (released.family, released.model) == ("bertrain", make_shape(**PARTS))
    saved = json.loads((place / name / "model" / "finetune.json").read_text())
    scores, _, predicted = finetune.load(place / name).evaluate(saved["config"][section]["dev"])
    assert scores == pytest.approx(saved["scores"]["dev"])
    lines = [json.loads(line) for line in (place / name / "predictions" / "dev.jsonl").read_text().splitlines()]
    assert len(lines) == len(predicted) > 0
    for line, one in zip(lines, predicted, strict=True):
        assert {key: line[key] for key in one} == _about(one)


def _about(value: Any) -> Any:
    """The same with numbers that equal others to 1e-6: sums in another order differ in the last digits."""
    if isinstance(value, dict):
        return {key: _about(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_about(one) for one in value]
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


def test_a_fine_tuned_model_is_exported_with_onnx(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert main(["export", str(place / "reviews"), str(tmp_path / "out"), "--onnx"]) == 0
    printed = capsys.readouterr().out
    assert re.search("transformers cannot load it: .*model.recursions is 2", printed)
    assert "model.onnx: opset" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: bertrain" in card
    assert "`transformers` cannot load this folder" in card
    assert "from_pretrained" not in card


def test_pictures_and_scores_of_it(place: Path, tmp_path: Path) -> None:
    shown = AttentionModel(place / "export")
    weights = shown.weights(shown.tokens("ab cd"))
    assert len(weights) == 4, "a layer that is applied twice has two pictures"
    (tmp_path / "text.txt").write_text("ab cd ef gh " * 20)
    arguments = ["evaluate-pretrained", str(place / "export"), "--out", str(tmp_path / "out")]
    assert main([*arguments, "--texts", str(tmp_path / "text.txt"), "--length", "32"]) == 0
    (found,) = json.loads((tmp_path / "out/scores.json").read_text())["models"]
    assert found["held_out"]
