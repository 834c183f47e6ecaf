"""The executed FLOPs against torch's counter over real steps: forward, backward, teacher, generator, recomputation."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pretrain.batches.batch import MicroBatch
from pretrain.config import CorpusConfig, ModelConfig, PhaseConfig, PretrainConfig
from pretrain.model import cost
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import grouped_op
from pretrain.model.parameters import is_hidden_matrix, stacked_parts
from pretrain.objectives import make_objective
from pretrain.objectives.distillation import DistillingModel
from pretrain.objectives.replaced_tokens import ElectraModel
from pretrain.planning import estimate, memory, work
from tests.batches_by_hand import make_batch

VOCABULARY = 211
SHAPE: dict[str, Any] = {"size": "custom", "layers": 3, "hidden": 32, "heads": 2, "max_positions": 128}
TEACHER = ModelConfig(**{**SHAPE, "layers": 4, "hidden": 48})


def make_config(**sections: Any) -> PretrainConfig:
    phase = PhaseConfig(sequence_length=96, global_sequences=4, steps=10, peak_learning_rate=1e-3)
    values = {"name": "trial", "corpus": CorpusConfig(dir="nowhere"), "model": SHAPE, "phases": (phase,)}
    return PretrainConfig.model_validate({**values, **sections})


def model_of(config: PretrainConfig) -> torch.nn.Module:
    again = config.engine.activation_checkpointing
    if config.electra.is_on:
        return ElectraModel(config.model, VOCABULARY, settings=config.electra, activation_checkpointing=again)
    if not config.distillation.teacher:
        return PretrainingModel(config.model, VOCABULARY, config.pairs.has_classifier, activation_checkpointing=again)
    teacher = PretrainingModel(TEACHER, VOCABULARY, False)
    return DistillingModel(config.model, VOCABULARY, config.pairs.has_classifier, teacher=teacher)


def counted(config: PretrainConfig, batch: MicroBatch, monkeypatch: pytest.MonkeyPatch) -> int:
    """What torch counts in one eager step, inside our attention operator too."""

    def inside(operator: Any) -> Any:
        def count(*arguments: Any, out_val: Any = None, **_: Any) -> int:
            with FlopCounterMode(display=False) as inner:
                operator._init_fn(*arguments)
            return inner.get_total_flops()

        count._get_raw = True  # type: ignore[attr-defined]
        return count

    operators = torch.ops.bertrain
    mapping = {
        operators.grouped_attention: inside(grouped_op.forward_op),
        operators.grouped_attention_backward: inside(grouped_op.backward_op),
    }
    model = model_of(config).train()
    monkeypatch.setattr("pretrain.model.kernels.native.supports_native", lambda _: False)  # torch cannot look into it
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        losses = [part for part in model(batch)[:3] if torch.is_tensor(part) and part.requires_grad]
        torch.stack([one.float() for one in losses]).sum().backward()
    return counter.get_total_flops()


CASES: dict[str, dict[str, Any]] = {
    "bert": {},
    "without pairs": {"pairs": {"objective": "none"}},
    "mean pooling": {"model": {**SHAPE, "pooling": "mean"}},
    "modernbert": {"model": {**SHAPE, "family": "modernbert"}, "pairs": {"objective": "none"}},
    "checkpointing": {"engine": {"activation_checkpointing": True}},
    "recursions": {"model": {**SHAPE, "recursions": 2, "embedding": 8}, "pairs": {"objective": "none"}},
    "electra": {"electra": {"generator_width": 0.5}, "pairs": {"objective": "none"}},
    "narrow electra": {"model": {**SHAPE, "embedding": 16}, "electra": {"generator_width": 0.5}}
    | {"pairs": {"objective": "none"}},
    "distillation": {"distillation": {"teacher": "x"}, "pairs": {"objective": "none"}},
    "distillation of pairs": {"distillation": {"teacher": "x"}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_executed_flops_are_what_torch_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch also counts the sum of the decoder's gradient, made as a product with ones.

    Sequences of equal lengths with equally many masked tokens have no padding in the attention.
    """
    config = make_config(**CASES[name])
    batch = make_batch([64] * 6, VOCABULARY, masked_share=10 / 64)
    rows = torch.tensor([64 * s + 3 + 6 * n for s in range(6) for n in range(10)])
    batch = dataclasses.replace(batch, masked_rows=rows)
    masked = len(batch.masked_rows)
    teacher = TEACHER if config.distillation.teacher else None
    objective = make_objective(config, VOCABULARY, teacher)
    expected = objective.executed_flops(batch.lengths, masked)
    if name == "checkpointing":
        assert objective.model_flops(batch.lengths, masked) < expected / 1.2
    ones = 2 * masked * VOCABULARY
    assert expected == pytest.approx(counted(config, batch, monkeypatch) - ones, rel=0.002)


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_the_layers_of_a_model_are_counted_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop asks for the FLOPs of each micro-batch."""
    asked: list[int] = []
    plain = cost.layer_parameters
    monkeypatch.setattr(cost, "layer_parameters", lambda model, number: asked.append(number) or plain(model, number))
    cost.cached_layer_costs.cache_clear()
    for lengths in ([64, 32], [17, 5, 3]):
        make_objective(make_config(**CASES[name]), VOCABULARY).model_flops(lengths, 4)
    assert sorted(asked) == sorted([0, 1, 2] * (1 + (name == "electra")))


def test_padding_of_groups_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, sequences of unequal lengths are attended in padded groups: a few per cent more than is counted."""
    shape = {**SHAPE, "layers": 2, "hidden": 256}
    config, batch = make_config(model=shape), make_batch([70, 81, 88, 93, 96, 96, 96, 96], VOCABULARY)
    expected = make_objective(config, VOCABULARY).executed_flops(batch.lengths, len(batch.masked_rows))
    measured = counted(config, batch, monkeypatch)
    assert 1.001 < measured / expected < 1.05


def test_the_dry_run_counts_a_teacher(tmp_path: Path) -> None:
    """Its shape is read from config.json; without one, the text says what is missing."""
    values = {"model_type": "bert", "vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 4}
    values |= {"num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128}
    config = make_config(distillation={"teacher": str(tmp_path)}, engine={"precision": "fp32"})
    assert "the teacher cannot be read" in estimate.dry_run(config)
    assert memory.memory_bytes(config, 1, 1)["teacher"] == 0
    (tmp_path / "config.json").write_text(json.dumps(values))
    text = estimate.dry_run(config)
    assert "FLOP and executed include the teacher's forward pass" in text
    assert "\n  teacher " in text
    shape = ModelConfig(**{**SHAPE, "layers": 4})
    weights = cost.parameter_count(shape, 30522, next_sentence=False).total
    assert memory.memory_bytes(config, 1, 1)["teacher"] > 4 * weights
    phase = config.phases[0]
    alone, taught = (work.phase_work(config, phase, 30522, frozen_config=one) for one in (None, shape))
    assert taught.flops > 1.2 * alone.flops
    assert taught.executed > 1.2 * alone.executed


def test_muon_orthogonalizes_the_matrices_of_a_generator_too() -> None:
    config = make_config(optimizer={"name": "muon"}, electra={"generator_width": 0.5}, pairs={"objective": "none"})
    expected = 0
    for name, parameter in model_of(config).named_parameters():
        if is_hidden_matrix(name):
            parts = stacked_parts(name.rpartition(".")[2])
            small, large = sorted((parameter.shape[0] // parts, parameter.shape[1]))
            expected += parts * 5 * (4 * small * small * large + 2 * small**3)
    assert work.optimizer_flops(config) == expected
    assert expected > work.optimizer_flops(make_config(optimizer={"name": "muon"})) > 0
