"""Recorded passes add the gradients that launched ones do. A CPU records nothing, so a stand-in repeats the pass."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch
from pretrain.batches.filler import with_filler
from pretrain.common.errors import MachineError
from pretrain.config import EngineConfig, ModelConfig, PretrainConfig, forbidden_changes
from pretrain.model.heads import Losses, PretrainingModel
from pretrain.planning.recording import choose_graphs
from pretrain.run import session, train
from pretrain.training.engine import pass_graphs as graphs_module
from pretrain.training.engine.pass_graphs import PassGraphs, shape_key
from tests.batches.test_loader import run_config
from tests.batches_by_hand import make_batch
from tests.distributed import engine_of, run_workers

SHAPE = ModelConfig(size="custom", layers=2, hidden=32, heads=2, max_positions=64, hidden_dropout=0.1)
VOCABULARY, RATE, STEPS = 101, 1e-2, 9
# Two shapes, with other lengths and tokens in each step; the number of micro-batches differs.
LENGTHS = ((20, 20, 23), (18, 22, 23), (7, 12, 40, 41))


class RepeatedPasses(PassGraphs):
    """Recording changes no tensor, and a replay none of Python's state: as with CUDA graphs."""

    def run(self, batch: Any, loss_weights: Any, compute: Any, variant: Any = None) -> Tensor:
        self.lengths = batch.lengths
        return super().run(batch, loss_weights, compute, variant)

    def _run_pass(self, batch: Any, compute: Any) -> Any:
        # Attention on a CPU needs the lengths themselves.
        return super()._run_pass(dataclasses.replace(batch, lengths=self.lengths), compute)

    def _record(self, batch: Any, compute: Any) -> Any:
        buckets = self._sums._buckets
        tensors = [bucket._sums.clone() for bucket in buckets if bucket._sums is not None]
        filled = [set(bucket.filled) for bucket in buckets]
        weights_read = self._loss_weights
        totals, reached = self._run_pass(batch, compute)
        for bucket, before in zip(buckets, tensors, strict=True):
            assert bucket._sums is not None
            bucket._sums.copy_(before)

        def replay() -> None:
            assert self._loss_weights is weights_read
            after = [set(bucket.filled) for bucket in buckets]
            for bucket, before in zip(buckets, filled, strict=True):
                bucket.filled = set(before)
            totals.copy_(self._run_pass(batch, compute)[0])
            assert [bucket.filled for bucket in buckets] == after
            for bucket, marked in zip(buckets, after, strict=True):
                bucket.filled = marked

        graph: Any = type("Graph", (), {"replay": staticmethod(replay)})()
        return graphs_module._Recording(graph, batch, totals, reached)


def loss_and_totals(output: Losses, weights: Any) -> tuple[Tensor, Tensor]:
    return output.mlm_loss * weights[0] + output.nsp_loss * weights[1], torch.stack(list(output[:4]))


def batch_of(step: int, position: int, rank: int) -> MicroBatch:
    lengths = LENGTHS[(step + position) % len(LENGTHS)]
    return with_filler(make_batch(lengths, VOCABULARY, seed=100 * rank + 10 * step + position), 64)


def trained(recorded: bool) -> tuple[list[Tensor], list[Tensor], int]:
    """(weights, totals of each micro-batch, replays) after some steps."""
    torch.manual_seed(0)
    engine = engine_of(PretrainingModel(SHAPE, VOCABULARY), decay=0.1, zero_stage=1)
    engine.module.train()
    assert engine.sums is not None
    graphs = RepeatedPasses(engine.module, engine.sums)
    if recorded:
        engine.graphs, engine.uses_cuda_graphs = graphs, True
    totals = []
    for step in range(STEPS):
        weights = (1 / (20 + step), 1 / 8)
        count = 1 + step % 3
        for position in range(count):
            batch, last = batch_of(step, position, engine.rank), position == count - 1
            if engine.uses_cuda_graphs:
                totals.append(engine.graphed_pass(batch, weights, loss_and_totals, last=last))
            else:
                loss, of_batch = loss_and_totals(engine.forward(batch), weights)
                engine.backward(loss, last=last)
                totals.append(of_batch.detach())
        engine.step(RATE)
    with engine.whole_parameters() as parameters:
        whole = [parameter.clone() for parameter in parameters.values()]
    assert (engine.graphs is None) is not recorded
    engine.close()
    return whole, totals, graphs.replay_count


@pytest.mark.parametrize("workers", [1, 2])
def test_recorded_passes_train_as_launched_ones(workers: int) -> None:
    with_graphs, without = (run_workers(workers, trained, how) for how in (True, False))
    for recorded, launched in zip(with_graphs, without, strict=True):
        assert recorded[2] >= 4
        assert launched[2] == 0
        assert all(map(torch.equal, recorded[1], launched[1]))
        assert all(map(torch.equal, recorded[0], launched[0]))


def test_what_one_recording_serves() -> None:
    first, second, other = (with_filler(make_batch(lengths, VOCABULARY), 64) for lengths in LENGTHS)
    assert first.lengths != second.lengths
    assert shape_key(first) == shape_key(second) != shape_key(other)
    longer = dataclasses.replace(first, lengths=(*first.lengths[:-1], 33))
    assert shape_key(longer) != shape_key(first)


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"zero_stage": 2}, "zero_stage is 2"),
        ({"deepspeed": {"timers": {}}}, "deepspeed.timers is set"),
        ({"activation_checkpointing": True}, "activation_checkpointing is true"),
    ],
)
def test_what_cannot_be_recorded_is_refused(section: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"timers and profilers; {found}"):
        EngineConfig.model_validate({"cuda_graphs": True, **section})


@pytest.mark.parametrize(
    ("model", "fits"),
    [
        ({}, True),
        ({"family": "modernbert"}, True),
        ({"family": "deberta"}, False),
        ({"size": "custom", "layers": 1, "hidden": 60, "heads": 5}, False),
    ],
)
def test_graphs_need_flash_attention(model: dict[str, Any], fits: bool) -> None:
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="needs flash attention"):
        assert run_config(engine={"cuda_graphs": True, "micro_batch_tokens": 512}, model=model).engine.cuda_graphs


def test_the_precision_is_checked_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's config.yaml has the resolved precision, and must be read on any machine."""
    config = run_config(engine={"cuda_graphs": True, "precision": "fp32", "micro_batch_tokens": 512})
    assert run_config(engine=config.engine.model_dump(mode="json")) == config
    without = run_config(engine={"precision": "fp32", "micro_batch_tokens": 512})
    assert not forbidden_changes(config, without, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    session.check_device(config, torch.device("cpu"))
    with pytest.raises(MachineError, match=r"engine\.cuda_graphs needs bf16, and this run computes in fp32"):
        session.check_device(config, torch.device("cuda"))


def of_base(sequences: int, **engine: Any) -> PretrainConfig:
    engine = {"precision": "bf16", "micro_batch_tokens": 65_536, **engine}
    config = run_config(length=128, model={"size": "base"}, engine=engine)
    phase = config.phases[0].model_copy(update={"global_sequences": sequences})
    return config.model_copy(update={"phases": (phase,)})


@pytest.mark.parametrize(
    ("config", "gpus", "on", "reason"),
    [
        (of_base(32), ["NVIDIA H200"], True, "a step is expected to take 41.2 ms without CUDA graphs and 8.9"),
        (of_base(512), ["NVIDIA H200"], False, "without CUDA graphs and 1"),
        (of_base(512), ["NVIDIA H200"] * 16, True, "without CUDA graphs and"),
        (of_base(32), ["NVIDIA H200", "NVIDIA L4"], False, "without CUDA graphs and"),  # whose kernels take longer
        (of_base(32), ["NVIDIA H200", "NVIDIA T4"], False, "the dry run does not know NVIDIA T4"),
        (of_base(32, precision="fp16"), ["NVIDIA H200"], False, "recording needs bf16, not fp16"),
        (of_base(32, zero_stage=2), ["NVIDIA H200"], False, "engine.zero_stage is 2"),
        (of_base(32, deepspeed={"steps_per_print": 5}), ["NVIDIA H200"], False, "engine.deepspeed is set"),
        (of_base(512, cuda_graphs=True), ["NVIDIA H200"], True, "as configured"),
    ],
)
def test_auto_records_what_waits_for_the_host(config: PretrainConfig, gpus: list[str], on: bool, reason: str) -> None:
    chosen, found = choose_graphs(config, 30_522, [128.0], gpus)
    assert (chosen, reason in found) == (on, True), found


def test_auto_leaves_room_for_what_recordings_keep() -> None:
    assert choose_graphs(of_base(32), 30_522, [128.0], ["NVIDIA H200"], 1e11)[0]
    chosen, found = choose_graphs(of_base(32), 30_522, [128.0], ["NVIDIA H200"], 2e9)
    assert not chosen
    assert re.search(r"CUDA graphs would need [\d.]+ GB, and the smallest GPU has 2\.0", found)


def chosen_with(names: list[str], device: str) -> Any:
    torch.cuda.get_device_name = lambda _: names[torch.distributed.get_rank()]
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=80e9)
    return train.with_chosen_graphs(of_base(32), 30_522, torch.device(device)).engine.cuda_graphs


@pytest.mark.parametrize(
    ("second", "device", "on"), [("H100", "cuda", True), ("T4", "cuda", False), ("", "cpu", "auto")]
)
def test_all_ranks_choose_the_same(second: str, device: str, on: Any) -> None:
    assert run_workers(2, chosen_with, ["NVIDIA H200", second], device) == [on, on]
