"""Whole steps on fake CUDA tensors: one device, no shape that depends on values, and the host waits for nothing."""

from typing import Any

import pytest
import torch

from finetune.training import train as finetuning
from pretrain.run import session, train
from pretrain.training.watchdog import LAUNCHING
from tests import fake_cuda

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has a CUDA device of its own")

# All layers of a kind do the same; the first of ModernBERT is global, the others are local.
MODELS: dict[str, dict[str, Any]] = {
    "bert-large": {"size": "large", "layers": 2, "max_positions": 512},
    "modernbert-base": {"family": "modernbert", "size": "base", "layers": 3},
}
SMALL = {"size": "mini", "layers": 2, "max_positions": 128}


def case(model: dict[str, Any], stage: int, optimizer: str = "adamw", precision: str = "bf16") -> dict[str, Any]:
    return {"model": model, "stage": stage, "optimizer": {"name": optimizer}, "precision": precision}


# Parts of a model; in fp32 without flash attention, whose groups are copied to the device once for all layers.
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "local": ({"family": "modernbert", "local_attention": 16, "global_every": 2, "pooling": "mean"}, "fp32"),
    "relative": ({"positions": "relative", "relative_buckets": 8, "relative_max_distance": 32}, "fp32"),
    "shared keys": ({"family": "modernbert", "kv_heads": 2, "pooling": "mean"}, "bf16"),
    "sinusoidal": ({"positions": "sinusoidal", "activation": "relu", "embedding": 32}, "bf16"),
}
TASKS = (
    *(("sequence", "classes", pooling) for pooling in ("cls", "mean", "max", "late")),
    ("sequence", "labels", "cls"),
    ("sequence", "value", "cls"),
    ("tokens", "classes", "cls"),
    ("spans", "span", "cls"),
)
CASES = {
    **{f"{name} {stage}": case(model, stage) for name, model in MODELS.items() for stage in (0, 1, 2)},
    **{f"fp32 {stage}": case(SMALL, stage, precision="fp32") for stage in (0, 2)},
    **{f"{name} {stage}": case(SMALL, stage, name) for name in ("muon", "lamb", "stable_adamw") for stage in (0, 1, 2)},
    **{f"{name} recorded": {**case(model, 1), "cuda_graphs": True} for name, model in MODELS.items()},
    **{name: case({**SMALL, **part}, 1, precision=precision) for name, (part, precision) in PARTS.items()},
    **{
        f"electra {precision}": {**case(SMALL, 1, precision=precision), "electra": True}
        for precision in ("bf16", "fp32")
    },
    **{" ".join(task): {**case(SMALL, 1), "task": task} for task in TASKS},
    **{f"wide {n}": {**case({**SMALL, "hidden": 768, "heads": 12}, 1), "task": TASKS[0], "ranks": n} for n in (1, 8)},
    **{f"{name} alone": {**case(model, 1), "ranks": 1} for name, model in MODELS.items()},
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    lines = fake_cuda.run("trace", CASES.values(), tmp_path_factory.mktemp("fake-cuda"))
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_nothing_in_a_step(traced: dict[str, dict[str, Any]], name: str) -> None:
    (read,) = traced[name]["host_reads"]
    assert read.endswith('values.to("cpu", non_blocking=True)  # into pinned memory')


@pytest.mark.parametrize("name", CASES)
def test_a_host_that_can_launch_no_more_counts_as_waiting(traced: dict[str, dict[str, Any]], name: str) -> None:
    ours = [function for function in traced[name]["launches"] if not function.startswith("__main__.")]
    assert ours
    launching = (*LAUNCHING, *session.LAUNCHING, *train.LAUNCHING, *finetuning.LAUNCHING)
    assert [function for function in ours if not function.startswith(launching)] == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "task" not in case])
def test_an_evaluation_reads_its_sums_once(traced: dict[str, dict[str, Any]], name: str) -> None:
    assert len(traced[name]["host_reads_of_evaluation"]) == 1


@pytest.mark.parametrize("name", [f"{name} {stage}" for name in MODELS for stage in (1, 2)])
def test_buckets_are_summed_and_gathered(traced: dict[str, dict[str, Any]], name: str) -> None:
    counted = traced[name]["collectives"]
    (sums,) = (count for collective, count in counted.items() if "scatter" in collective)
    (gathers,) = (count for collective, count in counted.items() if "gather" in collective)
    assert counted["all_reduce"] == 2, "the losses, and the norm"
    assert counted.keys() <= {"all_reduce", *(n for n in counted if "scatter" in n or "gather" in n)}
    micro_batches = 2 if name.endswith("2") else 1
    assert gathers <= sums / micro_batches <= gathers + 4, "the embeddings are one bucket of several pieces"
