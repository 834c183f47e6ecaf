"""Which precision a run takes: what the device says, the same in all workers, kept at every restart."""

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from pretrain.common.worker import Worker
from pretrain.config import EngineConfig, PretrainConfig, forbidden_changes, keep_precision
from pretrain.model import precision
from pretrain.model.precision import DeviceCapabilities, PrecisionChoice, choose_precision
from pretrain.run import preflight, session
from tests.distributed import run_program, run_workers
from tests.starts import pretraining


def run_config(folder: Path | str = "run", chosen: str = "auto") -> PretrainConfig:
    values = pretraining(Path("corpus"), Path(folder), [(32, 8, 3)], engine={"precision": chosen})
    return PretrainConfig.model_validate(values)


def gpu(major: int, minor: int) -> DeviceCapabilities:
    return DeviceCapabilities("GPU", (major, minor))


def cpu(bf16: float, fp32: float) -> DeviceCapabilities:
    return DeviceCapabilities("this CPU", None, bf16, fp32)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([gpu(9, 0)], "bf16"),
        ([gpu(8, 0)], "bf16"),
        ([gpu(7, 5)], "fp16"),  # T4
        ([gpu(7, 0)], "fp16"),  # V100
        ([gpu(6, 1)], "fp32"),
        ([gpu(8, 0), gpu(7, 0)], "fp16"),  # all workers must compute it
        ([gpu(7, 0), gpu(6, 0)], "fp32"),
        ([cpu(2.6e9, 98e9)], "fp32"),  # emulated
        ([cpu(800e9, 225e9)], "bf16"),
        ([cpu(200e9, 210e9)], "bf16"),  # no difference beyond that of measurements
        ([cpu(100e9, 200e9), cpu(900e9, 200e9)], "bf16"),  # the sum counts: workers wait for one another
    ],
)
def test_the_devices_decide(offers: list[DeviceCapabilities], expected: str) -> None:
    assert choose_precision(offers).precision == expected


@pytest.mark.parametrize("held_up", [False, True])
@pytest.mark.parametrize("rate", [0.3e9, 90e9, 5e12])
def test_a_product_takes_milliseconds_whatever_the_rate(
    monkeypatch: pytest.MonkeyPatch, rate: float, held_up: bool
) -> None:
    """A device of each rate, whose clock is that of its products: the rate comes out, and soon.

    Beside another program most products wait for a time slice: the rate is that of the ones that do not.
    """
    now, products, number = [0.0], [0.0], itertools.count()

    def product(a: torch.Tensor, _: torch.Tensor) -> None:
        products[-1] = 2 * len(a) ** 3 / rate
        now[0] += products[-1] + (0.02 if held_up and next(number) % 4 != 3 else 0.0)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "randn", lambda n, _, **__: torch.empty(n, n))
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now[0])
    assert precision.measure_matmul("cpu", "fp32", 0.25) == pytest.approx(rate)
    assert held_up or now[0] < 0.5
    assert products[-1] < 0.05


def test_measuring_draws_no_random_numbers() -> None:
    """Otherwise a start that measures would differ from one that reads the cache."""
    state = torch.get_rng_state()
    assert precision.measure_matmul("cpu", "fp32", 0.01) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_that_share_a_unit_do_not_count_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two virtual cores share AMX: most products take twice as long, some are alone between two of the other worker."""
    now, number = [0.0], itertools.count()

    def product(a: torch.Tensor, _: torch.Tensor) -> None:
        now[0] += 2 * len(a) ** 3 / 1e12 * (1 if next(number) % 4 == 3 else 2)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "randn", lambda n, _, **__: torch.empty(n, n))
    monkeypatch.setattr(precision.time, "perf_counter", lambda: now[0])
    assert precision.measure_matmul("cpu", "fp32") == pytest.approx(1e12)
    assert precision.measure_matmul("cpu", "fp32", concurrent=True) == pytest.approx(0.5e12)


def test_the_choice_of_a_run_is_not_a_change_of_its_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not resolved"):
        _ = EngineConfig().resolved_precision
    preflight.record_config(run_config(tmp_path, "fp32"))
    for folder, chosen, found in ((tmp_path, "auto", "fp32"), (tmp_path, "bf16", "bf16"), ("new", "auto", "auto")):
        assert preflight.with_resolved_precision(run_config(folder, chosen)).engine.precision == found
    before = run_config(chosen="fp32")
    assert keep_precision(run_config(), before).engine.precision == "fp32"
    assert forbidden_changes(before, run_config(), 1) == []
    assert forbidden_changes(before, run_config(chosen="bf16"), 1) == ["engine.precision (fp32 -> bf16)"]


def settle(folder: str, given: list[str]) -> list[str]:
    """What each config in turn is settled to; rank 0's processor is slow in bf16, the other's hardly faster."""
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size())
    made = cpu(10e9, 100e9) if worker.rank == 0 else cpu(110e9, 100e9)
    found = []
    for number, chosen in enumerate(given):
        session.precision.capabilities = lambda _: made if number == 0 else pytest.fail("measured again")  # noqa: B023
        config, _ = session.choose_device(run_config(folder, chosen), worker)
        found.append(config.engine.precision)
    return found


def test_all_workers_take_what_is_fastest_for_all_and_restarts_keep_it(tmp_path: Path) -> None:
    made = run_workers(2, settle, str(tmp_path), ["auto", "auto", "bf16"])
    assert made == [["fp32", "fp32", "bf16"]] * 2
    assert "precision: fp32" in (tmp_path / "config.yaml").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a CPU refuses fp16, which shows the choice")
def test_only_the_first_process_may_know_an_earlier_choice(tmp_path: Path) -> None:
    """torchrun's other processes read no run folder: they must not wait for one that measures nothing."""
    assert run_workers(2, first_knows, str(tmp_path)) == [["fp16"], ["fp16"]]


def first_knows(folder: str) -> list[str]:
    worker = Worker(rank=dist.get_rank(), world_size=dist.get_world_size())
    if worker.rank == 0:
        preflight.record_config(run_config(folder, "fp16"))
    try:
        session.choose_device(run_config(folder, "auto"), worker)
    except MachineError as error:  # the choice was taken over, and a CPU refuses this one
        return [str(error).split(":")[1].split()[0]]
    return []


@pytest.mark.parametrize(
    ("trained", "device", "offered", "expected"),
    [
        ("fp32", "cpu", cpu(900e9, 200e9), "fp32"),
        ("bf16", "cpu", cpu(900e9, 200e9), "bf16"),
        ("bf16", "cpu", cpu(3e9, 98e9), "fp32"),
        ("bf16", "cpu", cpu(85e9, 100e9), "bf16"),  # training may have measured a little more
        ("fp16", "cpu", cpu(900e9, 200e9), "bf16"),
        ("bf16", "cuda", gpu(8, 0), "bf16"),
        ("fp16", "cuda", gpu(8, 0), "fp16"),
        ("bf16", "cuda", gpu(7, 5), "fp16"),
        ("fp16", "cuda", gpu(6, 0), "fp32"),
    ],
)
def test_a_model_runs_as_it_was_trained_where_that_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, trained: Any, device: str, offered: DeviceCapabilities, expected: str
) -> None:
    monkeypatch.setattr(precision, "capabilities", lambda _: offered)
    choice = precision.inference_precision(trained, torch.device(device))
    assert choice.precision == expected
    assert (choice.reason == "as trained") == (trained == expected)


def test_the_dry_run_shows_the_precision_and_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pretrain.planning import estimate

    monkeypatch.setattr(precision, "choose_local_precision", lambda: PrecisionChoice("fp32", "because it is faster"))
    text = estimate.dry_run(run_config(tmp_path), show_config=True)
    assert "Precision\n  fp32: because it is faster" in text
    assert "precision: fp32" in text
    assert "bf16: supported by 8xH100" in estimate.dry_run(run_config(tmp_path), on="8xH100")
    assert "fp16: supported by 4xV100" in estimate.dry_run(run_config(tmp_path), on="4xV100")
    elsewhere = run_config(tmp_path).model_copy(
        update={"scheduling": run_config().scheduling.model_copy(update={"address": "10.0.0.5:6379"})}
    )
    assert "bf16: assumed; the nodes of 10.0.0.5:6379 decide" in estimate.dry_run(elsewhere)


@pytest.mark.parametrize(
    ("settled", "expected"),
    [
        (["", "", ""], ["fp32"] * 3),  # all runs of one command have one precision
        (["", "fp32", ""], ["fp32"] * 3),  # that of the started run
        # On a cluster of several kinds of nodes each decides for itself: going on must not change that.
        (["bf16", "fp16", "auto"], ["bf16", "fp16", "bf16"]),
    ],
)
def test_runs_of_one_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settled: list[str], expected: list[str]
) -> None:
    from finetune.experiments import trials
    from finetune.experiments.grid import GridPoint
    from finetune.training.config import FinetuneConfig

    first = ["fp32"] if settled == ["", "", ""] else []
    answers = (PrecisionChoice(one, "") for one in itertools.chain(first, itertools.repeat("bf16")))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(trials, "choose_local_precision", lambda: next(answers))
    given = {"name": "task", "run_dir": str(tmp_path), "classification": {"train": "train.csv"}}
    config, members = FinetuneConfig.model_validate(given), []
    for seed, started in enumerate(settled):
        one = trials.trial_config(config, f"seed-{seed}", folder=tmp_path / f"{seed}", seed=seed)
        members.append(trials.Trial(f"seed {seed}", one, config, GridPoint({})))
        if started:
            one.folder.mkdir()
            engine = EngineConfig.model_validate({"precision": started})
            preflight.record_config(one.model_copy(update={"engine": engine}))
    made = trials.with_one_precision(config, members)
    assert [one.config.engine.precision for one in made] == expected


class FakeGpu:
    """What torch says of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built_for: list[str]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)


@pytest.mark.parametrize(
    ("chosen", "capability", "message"),
    [
        ("bf16", (7, 0), "bf16 needs compute capability 8.0; Tesla has 7.0"),
        ("fp16", (7, 0), "needs compute capability 7.5 or newer, but Tesla has 7.0"),
        ("fp16", (7, 5), ""),
        ("bf16", (9, 0), ""),
    ],
)
def test_an_unsuitable_gpu_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, chosen: str, capability: tuple[int, int], message: str
) -> None:
    FakeGpu(monkeypatch, capability, ["sm_75", "sm_80", "sm_90", "compute_120"])
    config, device = run_config(chosen=chosen), torch.device("cuda")
    if not message:
        return session.check_device(config, device)
    with pytest.raises(MachineError, match=message):
        session.check_device(config, device)


@pytest.mark.parametrize("variable", ["", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_device_memory_grow_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    FakeGpu(monkeypatch, (9, 0), [])
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: order.append("device"))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", order.append)
    session.select_gpu(Worker())
    assert order == (["device"] if variable else ["expandable_segments:True", "device"])


@pytest.mark.parametrize(("gpus", "local_rank", "number"), [(8, 5, 5), (1, 5, 0)])
def test_a_worker_takes_its_gpu_before_the_workers_connect(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: int, number: int
) -> None:
    """What is sent lies on the current GPU, and NCCL refuses two workers on one."""
    FakeGpu(monkeypatch, (9, 0), [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    order: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", order.append)

    def connect(backend: str, **_: Any) -> None:
        order.append(backend)
        raise RuntimeError

    monkeypatch.setattr(session.dist, "init_process_group", connect)
    worker = Worker(local_rank=local_rank)
    with pytest.raises(RuntimeError), session.process_group(worker):
        pass
    assert order == [number, "nccl"]
    assert os.environ["LOCAL_RANK"] == str(number), "DeepSpeed's"


ENDS = [(None, 2, True), (StoppedError("stopped"), 2, True), (DivergedError("diverged"), 2, True)]
ENDS += [(InputError("a damaged shard"), 2, False), (torch.OutOfMemoryError(), 2, False), (InputError("x"), 1, True)]


@pytest.mark.parametrize(("error", "workers", "ended"), ENDS)
def test_an_error_of_one_rank_does_not_wait_for_the_end_of_nccl(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, workers: int, ended: bool
) -> None:
    """Its group ends when all ranks end it, and the others wait for this one elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(session, "select_gpu", lambda _: None)
    monkeypatch.setattr(session.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(session.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ends: list[bool] = []
    monkeypatch.setattr(session, "end_process_group", lambda: ends.append(True))
    worker = Worker(world_size=workers)
    with pytest.raises(type(error)) if error else contextlib.nullcontext(), session.process_group(worker):
        if error is not None:
            raise error
    assert ends == [True] * ended


def grown() -> None:
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda _: None
    session.select_gpu(Worker())
    print(torch._C._accelerator_getAllocatorSettings())


def test_torch_takes_the_allocators_settings_while_it_runs() -> None:
    assert run_program(grown).stdout == "expandable_segments:True\n"


def test_tf32_is_for_runs_in_fp32_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of a model in bf16, which are in fp32, must not lose digits because another model came before."""
    set_to: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_to.append)
    FakeGpu(monkeypatch, (8, 0), [])
    assert precision.allow_tf32("fp32", torch.device("cuda"))
    assert not precision.allow_tf32("bf16", torch.device("cuda"))
    FakeGpu(monkeypatch, (7, 5), [])
    assert not precision.allow_tf32("fp32", torch.device("cuda"))
    assert set_to == ["high", "highest", "highest"]
    assert not precision.allow_tf32("fp32", torch.device("cpu"))
