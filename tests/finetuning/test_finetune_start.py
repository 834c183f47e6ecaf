"""What a fine-tuning begins with, and the table that says so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import make_bert, write_reviews
from torch import Tensor

from finetune.tasks.base import Task
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.model.start import initial_state, start_table
from finetune.training.runs import plan
from finetune.training.train import make_model
from pretrain.checkpoint.assembly import ReleasedModel, assemble
from pretrain.checkpoint.layouts import read_config
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.common.errors import InputError
from pretrain.model.heads import PretrainingModel
from tests.starts import with_changes
from tests.tasks.refusals import refused

LABELS = ("bad", "good")
CONFIG: dict[str, Any] = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIG |= {"intermediate_size": 16, "max_position_embeddings": 16}
PRETRAINED = (
    "bert.embeddings.*      5 tensors -> embeddings.*",
    "bert.encoder.layer.*  48 tensors -> layers.*",
    "bert.pooler.dense.*    2 tensors -> head.dense.*",
    "cls.*: 7 tensors left out: pretraining heads",
)


def make_released(outputs: int = 0, name: str = "SequenceClassification", **config: Any) -> ReleasedModel:
    """A pretrained BERT; with `outputs` one with an output layer, which a class of transformers called `name` wrote."""
    values = {**CONFIG, **config}
    torch.manual_seed(0)
    state: dict[str, Tensor] = {
        name.replace("heads.pooler_", "head.dense_"): tensor
        for name, tensor in PretrainingModel(read_config(values).model, 20).state_dict().items()
        if not (outputs and name.startswith(("heads.mlm", "heads.nsp")))
    }
    if outputs:
        values["architectures"] = [f"BertFor{name}"]
        state |= {"head.out_weight": torch.randn(outputs, 16), "head.out_bias": torch.randn(outputs)}
    return assemble(released_tensors(state, read_config(values)), read_config(values), values)


def make_config(**changes: Any) -> FinetuneConfig:
    values = {"name": "x", "classification": {"train": "x"}, **changes}
    return FinetuneConfig.model_validate(values)


FITTED = "head.out.*: fitted to the frozen encoder's features"


def make_task(head: str = "sequence", objective: str = "classes", labels: tuple[str, ...] = LABELS) -> Task[Any]:
    outputs = 1 if objective == "value" else len(labels)
    task: Any = SimpleNamespace(head=head, objective=objective, labels=labels, outputs=outputs)
    return task


VALUE, SPANS = make_task(labels=(), objective="value"), make_task("spans", "span", ("start", "end"))


def named(*labels: str) -> dict[str, Any]:
    return {"id2label": {str(number): label for number, label in enumerate(labels)}}


def test_a_pretrained_model_gives_backbone_and_pooler() -> None:
    lines = start_table(make_config(), make_task(), make_released()).split("\n")
    assert sorted(lines) == sorted([*PRETRAINED, FITTED])


def test_a_head_without_a_pooler_and_random_weights_are_reported() -> None:
    config = FinetuneConfig.model_validate({"name": "x", "entities": {"train": "x"}})
    text = start_table(config, make_task("tokens"), make_released())
    assert ": 2 tensors left out: the head of entities has only one layer" in text
    assert text.endswith(f"\n{FITTED}")
    text = start_table(make_config(random_weights=True), make_task(), make_released())
    assert " -> " not in text
    assert "62 tensors left out: initialized at random (random_weights)" in text


@pytest.mark.parametrize(
    ("task", "released", "kept"),
    [
        (make_task(), make_released(2, **named(*LABELS)), True),
        (make_task(), make_released(2, **named("good", "bad")), False),
        (make_task(), make_released(3, **named(*LABELS, "neutral")), False),
        (VALUE, make_released(1, problem_type="regression", **named("LABEL_0")), True),
        (VALUE, make_released(1, **named("similarity")), True),
        (VALUE, make_released(2, problem_type="regression", **named("a", "b")), False),
        (VALUE, make_released(1, problem_type="single_label_classification"), False),
        (VALUE, make_released(1, "TokenClassification"), False),
        (SPANS, make_released(2, "QuestionAnswering"), True),
        (SPANS, make_released(2, "TokenClassification"), False),
    ],
)
def test_an_output_layer_is_kept_if_it_has_the_same_meaning(
    task: Task[Any], released: ReleasedModel, kept: bool
) -> None:
    config = make_config()
    state = initial_state(config, task, released)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    model = make_model(config, task, released)
    # Nothing is sampled: what is not in the checkpoint is fitted.
    assert torch.equal(torch.get_rng_state(), before)
    for name, tensor in model.state_dict().items():
        assert name not in state or torch.equal(tensor, state[name]), name
    assert ("head.out_weight" in state) == ("head.out_bias" in state) == kept
    text = start_table(config, task, released)
    assert ("-> head.out.*" in text) == kept
    assert ("2 tensors left out: an output layer of another task or of other labels" in text) != kept
    assert (FITTED in text) != kept


@pytest.mark.parametrize("given", [["bad", "good"], {"bad": 0, "good": 1}])
def test_labels_that_are_not_numbered_are_refused(given: Any) -> None:
    config, released = make_config(start_from="bert"), make_released(2, id2label=given)
    with pytest.raises(InputError, match=r"bert: id2label in config\.json is .*'bad'.*expected a label for each index"):
        initial_state(config, make_task(), released)


def test_a_pretraining_run_is_reported_like_an_export(tmp_path: Path) -> None:
    """Its own names: the pooler is the head's first layer there, too."""
    from pretrain.checkpoint.mapping import MappedTensor

    released = make_released()
    pooler = MappedTensor("heads.pooler_weight", (16, 16), "head.dense_weight")
    mapping = (pooler, MappedTensor("heads.mlm_bias", (20,), "heads.mlm_bias"))
    own = dataclasses.replace(released, config={}, mapping=mapping)
    assert start_table(make_config(), make_task(), own).split("\n") == [
        "heads.pooler_weight  1 tensor -> head.dense.*",
        "heads.mlm_bias: 1 tensor left out: pretraining heads",
        FITTED,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine__micro_batch_tokens": 32}, r"classification, training set: an example has 76 tokens .* fits 32"),
        ({"engine__micro_batch_tokens": 64, "scheduling__workers": 2}, r"an example has 76 tokens .* fits 32"),
        ({"engine__micro_batch_tokens": 76}, ""),
    ],
)
def test_a_dry_run_refuses_what_the_run_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    sets = write_reviews(tmp_path, train=8, dev=4)
    long = json.dumps({"text": "the film " * 28, "label": "positive"})
    (tmp_path / "long.jsonl").write_text(Path(sets["train"]).read_text() + long + "\n")
    values = {"name": "x", "start_from": str(make_bert(tmp_path / "bert")), "max_length": 32}
    values |= {"classification": {**sets, "train": str(tmp_path / "long.jsonl")}, "training": {"examples_per_step": 4}}
    config = FinetuneConfig.model_validate(with_changes(values, changes))
    if message:
        refused(message, plan, config, in_process=True)
    else:
        found = plan(config, in_process=True)
        assert found.units == 9
        assert "32 tensors -> layers.*" in found.key_mapping
        assert "head.out.*" in found.key_mapping.splitlines()[-1]


def test_configs_that_compare_encoders_are_valid_and_say_how_they_are_run() -> None:
    folder = Path(__file__).parents[2] / "configs" / "finetune" / "transfer"
    configs = {path: load_config(path, ["start_from=a"]) for path in folder.glob("*.yaml")}
    assert sorted(path.stem for path in configs) == ["cola", "mrpc", "rte", "sst2", "sst2-2000", "stsb", "wnut17"]
    for path, config in configs.items():
        assert (config.name, config.max_length <= 128) == (f"transfer-{path.stem}", True)
        for command in ("finetune", "sweep"):
            assert f"{command} configs/finetune/transfer/{path.name} --from MODEL --" in path.read_text()
