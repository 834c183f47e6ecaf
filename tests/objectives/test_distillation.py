"""Distillation: losses against plain formulas, what a student begins with, exact resume, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from corpora import make_corpus

from pretrain.checkpoint import store
from pretrain.checkpoint.start import read_frozen
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig, PretrainConfig, load_config
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import fused_cross_entropy
from pretrain.objectives import make_objective
from pretrain.objectives.distillation import DistillingModel, evenly_spaced_layers, student_shapes, student_weights
from pretrain.objectives.objective import FrozenModel
from tests.batches_by_hand import make_batch, next_sentence_logits
from tests.distributed import run_workers
from tests.starts import Start, pretraining, records, starts

STEPS = 4
CONFIGS = Path(__file__).resolve().parents[2] / "configs/pretrain"


@pytest.mark.parametrize("piece", [1 << 26, 150])
def test_the_losses_are_those_of_the_plain_formulas(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """As transformers' research project distillation, distiller.py, computes them: values and gradients."""
    monkeypatch.setattr(fused_cross_entropy, "LOGITS_PER_CHUNK", piece)
    torch.manual_seed(0)
    shape = ModelConfig(size="custom", layers=2, hidden=16, heads=2, hidden_dropout=0.0)
    teacher = PretrainingModel(shape.model_copy(update={"layers": 3}), 50, False)
    model = DistillingModel(shape, 50, True, teacher=teacher)
    for one in (teacher, model):
        torch.nn.init.normal_(one.heads.mlm_bias)
    batch = make_batch([5, 9, 7], vocabulary_size=50)

    output = model(batch)
    hidden, theirs = model.encode(batch), teacher.encode(batch).detach()
    scores, given = model.masked_logits(batch), teacher.masked_logits(batch).detach()
    mlm = F.cross_entropy(scores, batch.masked_labels, reduction="sum")
    soft = F.kl_div((scores / 2).log_softmax(-1), (given / 2).softmax(-1), reduction="sum") * 4
    ones = torch.ones(len(hidden))
    cosine = torch.nn.CosineEmbeddingLoss(reduction="sum")(hidden, theirs, ones)
    pairs = F.cross_entropy(next_sentence_logits(model, batch), batch.nsp_labels, reduction="sum")
    expected = {"mlm_loss": mlm, "soft_loss": soft, "cosine_loss": cosine, "nsp_loss": pairs}
    for name, value in expected.items():
        torch.testing.assert_close(getattr(output, name), value, msg=name)
    assert output.soft_loss > 0.1
    assert output.mlm_correct == (scores.argmax(-1) == batch.masked_labels).sum()

    parameters = dict(model.named_parameters())
    total = output.prediction_loss + output.nsp_loss + output.cosine_loss
    got = torch.autograd.grad(total, list(parameters.values()), retain_graph=True)
    want = torch.autograd.grad(5 * soft + 2 * mlm + pairs + cosine, list(parameters.values()))
    for name, one, other in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4, msg=name)
    assert not any(name.startswith("teacher") for name in model.state_dict())


def test_without_a_cosine_loss_the_last_layer_computes_the_masked_tokens_only() -> None:
    """As with a teacher of another width."""
    torch.manual_seed(0)
    shape = ModelConfig(size="custom", layers=2, hidden=16, heads=2, hidden_dropout=0.0)
    wide = PretrainingModel(shape.model_copy(update={"hidden": 32, "intermediate": 64}), 50, False)
    model, batch = DistillingModel(shape, 50, False, teacher=wide), make_batch([5, 9, 7], vocabulary_size=50)
    output = model(batch)
    assert output.cosine_loss == 0
    scores, given = model.masked_logits(batch), wide.masked_logits(batch)
    soft = F.kl_div((scores / 2).log_softmax(-1), (given / 2).softmax(-1), reduction="sum") * 4
    torch.testing.assert_close(output.soft_loss, soft)


def test_layers_are_spread_as_distilbert_spreads_them() -> None:
    assert evenly_spaced_layers(6, 12) == (0, 2, 4, 7, 9, 11)
    assert evenly_spaced_layers(2, 4) == (0, 3)
    assert evenly_spaced_layers(1, 4) == (0,)
    assert evenly_spaced_layers(4, 4) == (0, 1, 2, 3)


def test_every_shipped_student_fits_its_shipped_teacher() -> None:
    """A teacher runs/NAME is a run of configs/pretrain/NAME.yaml."""
    configs = [load_config(path) for path in sorted(CONFIGS.glob("*.yaml"))]
    students = [config for config in configs if config.distillation.teacher]
    assert students
    for config in students:
        given = load_config(CONFIGS / f"{Path(config.distillation.teacher).name}.yaml")
        assert config.corpus.dir == given.corpus.dir
        teacher = as_teacher(given, config.distillation.teacher)
        shapes = student_shapes(config, teacher)
        assert student_weights(config, teacher, shapes).keys() == shapes.keys()


def test_a_student_may_name_another_initialization_of_its_heads() -> None:
    """Its first weights are the teacher's, so the setting is free."""
    config = load_config(CONFIGS / "distil-mini.yaml", ["model.attention_init=neighbors"])
    teacher = as_teacher(load_config(CONFIGS / "mini.yaml"), "runs/mini")
    assert "layers.1.qkv_bias" in student_shapes(config, teacher)


def as_teacher(config: PretrainConfig, folder: str) -> FrozenModel:
    """What `read_frozen` finds in a run of `config`, but for the values of the weights."""
    model, pairs = config.model.model_copy(update={"attention_init": "normal"}), config.pairs.has_classifier
    with torch.device("meta"):
        state = PretrainingModel(model, config.corpus.vocabulary.size, pairs).state_dict()
    return FrozenModel(folder, model, pairs, state, fingerprint="")


class Place:
    """A corpus, a teacher of four layers trained on it, and another teacher."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.corpus = make_corpus(root / "corpus", documents=60, vocabulary_size=300)
        self.other_corpus = make_corpus(root / "other-corpus", documents=60, vocabulary_size=280)
        self.teacher, self.other, self.foreign = (root / name for name in ("teacher", "other", "foreign"))
        plan = [
            Start(self._begun(self.corpus, self.teacher, seed=1)),
            Start(self._begun(self.corpus, self.other, seed=2)),
            Start(self._begun(self.other_corpus, self.foreign, seed=1)),
        ]
        assert run_workers(1, starts, plan) == [["", "", ""]]

    def _begun(self, corpus: Path, folder: Path, **changes: Any) -> dict[str, Any]:
        """Settings of a teacher's run, whose folder has a config.yaml as `pretrain` writes it."""
        import yaml

        values = pretraining(corpus, folder, [(32, 8, 2)], model__layers=4, **changes)
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        return values

    def settings(self, name: str, **changes: Any) -> dict[str, Any]:
        """A run of a student; section__key changes it."""
        small = {
            "engine__micro_batch_tokens": 128,
            "evaluation__every_steps": 2,
            "distillation__teacher": str(self.teacher),
        }
        return pretraining(self.corpus, self.root / name, [(32, 8, STEPS)], **{**small, **changes})

    def config(self, **changes: Any) -> PretrainConfig:
        return PretrainConfig.model_validate(self.settings("unused", **changes))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("distillation"))


@pytest.fixture(scope="module")
def runs(place: Place) -> dict[tuple[int, int], Path]:
    """Run folders by (workers, ZeRO stage): never interrupted; beside the last, one that is stopped at step 2."""
    found = {key: place.root / "{}-{}-through".format(*key) for key in ((1, 0), (2, 1), (2, 3))}
    given = {key: place.settings(folder.name, engine__zero_stage=key[1]) for key, folder in found.items()}
    broken = place.settings("2-3-broken", engine__zero_stage=3)
    assert run_workers(1, starts, [Start(given[1, 0])]) == [[""]]
    plan = [Start(given[2, 1]), Start(given[2, 3]), Start(broken, stop_at=2), Start(broken, resume=True)]
    for outcomes in run_workers(2, starts, plan):
        assert [outcome.partition(":")[0] for outcome in outcomes] == ["", "", "StoppedError", ""]
    return found


def losses(run: Path, split: str = "train") -> list[tuple[float, ...]]:
    keys = ("step", "loss", "mlm_loss", "nsp_loss", "distil_loss", "cosine_loss")
    return [tuple(record[key] for key in keys) for record in records(run, split)]


def test_a_resumed_run_is_bitwise_one_never_interrupted(runs) -> None:
    through = runs[2, 3]
    broken = through.with_name("2-3-broken")
    assert losses(broken) == losses(through)
    assert losses(broken, "validation") == losses(through, "validation")
    assert [one[0] for one in losses(through)] == list(range(1, STEPS + 1))
    final = f"checkpoints/step-{STEPS:08d}"
    weights = {path.name: path.read_bytes() for path in (through / final).glob("*.safetensors")}
    assert weights == {path.name: path.read_bytes() for path in (broken / final).glob("*.safetensors")}


def test_losses_do_not_depend_on_workers_or_stage(runs) -> None:
    expected = losses(runs[1, 0])
    for folder in runs.values():
        for found, wanted in zip(losses(folder), expected, strict=True):
            assert found == pytest.approx(wanted, abs=2e-5), folder.name


def test_micro_batches_do_not_change_the_losses(runs, place: Place) -> None:
    config = place.settings("small", engine__micro_batch_tokens=64)
    assert run_workers(1, starts, [Start(config)]) == [[""]]
    for found, wanted in zip(losses(place.root / "small"), losses(runs[1, 0]), strict=True):
        assert found == pytest.approx(wanted, abs=2e-5)


def test_the_loss_is_the_weighted_sum(runs) -> None:
    for _, loss, mlm, nsp, soft, cosine in losses(runs[2, 1]) + losses(runs[2, 1], "validation"):
        assert loss == pytest.approx(5 * soft + 2 * mlm + cosine + nsp, rel=1e-5)


def test_a_student_begins_with_layers_of_the_teacher(runs, place: Place) -> None:
    teacher = store.read_weights(store.latest(place.teacher / "checkpoints") or Path())
    for run in runs.values():
        student = store.read_weights(run / "checkpoints" / "step-00000000")
        for name, tensor in student.items():
            source = name.replace("layers.1.", "layers.3.")
            assert torch.equal(tensor, teacher[source]), name
        assert len(student) < len(teacher)


def test_a_run_keeps_to_its_teacher(runs, place: Place) -> None:
    """By its weights, wherever they lie."""
    moved = shutil.copytree(place.teacher, place.root / "moved")
    broken = place.settings("keeps")
    again = {**broken, "distillation": {"teacher": str(place.other)}}
    there = {**broken, "distillation": {"teacher": str(moved)}}
    none = {**broken, "distillation": {}}
    plan = [Start(broken, stop_at=2), *(Start(values, resume=True) for values in (again, none, there))]
    stopped, other, without, same = run_workers(1, starts, plan)[0]
    assert stopped.startswith("StoppedError")
    assert "its teacher was" in other
    assert f"distillation.teacher is {place.other}" in other
    assert "distillation.teacher (" in without
    assert same == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation__teacher": "foreign"}, "prepared with a different tokenizer than in distillation.teacher"),
        ({"model__hidden": 16}, "model.hidden: 16, but the teacher"),
        ({"model__activation": "relu"}, "model.activation: 'relu', but the teacher"),
        ({"distillation__layers": [0, 4]}, "has 4 layers, numbered from 0"),
        ({"model__layers": 5}, "model.layers: 5, but the teacher"),
        ({"model__max_positions": 128}, "model.max_positions: 128, but the teacher"),
        ({"distillation__teacher": "nowhere"}, "no such folder"),
    ],
)
def test_teachers_that_do_not_fit(place: Place, changes: dict[str, Any], message: str) -> None:
    teacher = place.root / changes.pop("distillation__teacher", "teacher")
    with pytest.raises(InputError) as error:
        make_objective(place.config(distillation__teacher=str(teacher), **changes)).check(read_frozen)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_student_of_random_weights_may_have_another_shape(place: Place) -> None:
    changes = {"model__hidden": 16, "distillation__initialize": False}
    make_objective(place.config(**changes)).check(read_frozen)
    assert run_workers(1, starts, [Start(place.settings("narrow", **changes))]) == [[""]]
    assert "cosine_loss" not in records(place.root / "narrow")[0]
