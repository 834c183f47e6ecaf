"""On a real GPU: the losses, gradients, steps and runs of the CPU, and steps for which the host does not wait."""

import contextlib
import copy
import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import make_corpus
from tiny_checkpoints import make_bert, write_reviews
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.batches.filler import with_filler
from pretrain.checkpoint.start import read_frozen
from pretrain.common.settings import dump
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.config import ModelConfig, OptimizerConfig, PretrainConfig
from pretrain.model.heads import PretrainingModel
from pretrain.objectives.masked import MaskedTokens
from pretrain.objectives.replaced_tokens import ElectraModel
from pretrain.run import session
from pretrain.run.forward_backward import ForwardBackward, seed_device
from pretrain.training.engine import Engine
from pretrain.training.optim import make_optimizer, parameter_groups
from tests.batches.test_loader import run_config
from tests.batches_by_hand import make_batch
from tests.bench.gpu import host_reads
from tests.distributed import NullWatchdog, free_port, of_whole_tensors
from tests.starts import pretraining, records

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

VOCABULARY = 1000
LENGTHS = (40, 128, 9, 77)
SIZES = {"size": "custom", "layers": 3, "hidden": 64, "heads": 2, "max_positions": 128, "hidden_dropout": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {"family": "modernbert"},
    "local": {"family": "modernbert", "local_attention": 16, "global_every": 2},
    "shared keys": {"family": "modernbert", "kv_heads": 1},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 32},
    "disentangled": {"family": "deberta"},
    "sinusoidal": {"positions": "sinusoidal", "activation": "relu", "embedding": 32},
}
OPTIMIZERS = ("adamw", "lamb", "stable_adamw", "muon")
GPU = torch.device("cuda")
Run = Callable[..., Tensor]
NO_LABELS = torch.zeros(0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()


def make_model(changes: dict[str, Any], *, compile: bool = False) -> PretrainingModel:
    """Weights away from their initialization, so that biases and norms matter."""
    torch.manual_seed(0)
    shape = ModelConfig.model_validate({**SIZES, "attention_dropout": 0.0, **changes})
    model = PretrainingModel(shape, VOCABULARY, compile=compile)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def loss_and_gradients(model: torch.nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """(loss, all gradients in one row), in fp32 on the CPU."""
    output = model(batch)
    loss = output.mlm_loss / len(batch.masked_rows) + output.nsp_loss / len(batch.lengths)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.detach().float().cpu(), torch.cat([gradient.float().cpu().flatten() for gradient in gradients])


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_those_of_the_cpu(shape: str, compile: bool) -> None:
    batch = make_batch(LENGTHS, VOCABULARY)
    loss, gradients = loss_and_gradients(make_model(SHAPES[shape]), batch)
    for dtype, close in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        model = make_model(SHAPES[shape], compile=compile).to(GPU, dtype)
        found, found_gradients = loss_and_gradients(model, batch.to(GPU))
        assert distance(found, loss) < close
        assert distance(found_gradients, gradients) < 3 * close


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sequence_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    """Flash attention, the head's rows and the losses see one sequence at a time."""
    model = make_model({"family": "modernbert"}).to(GPU, dtype)
    one, two = (make_batch([length], VOCABULARY, seed=length).to(GPU) for length in (70, 120))
    alone = sum(float(model(batch).mlm_loss.detach()) for batch in (one, two))
    names = ("input_ids", "token_types", "positions", "masked_labels", "nsp_labels", "token_keys")
    joined = {name: torch.cat([getattr(one, name), getattr(two, name)]) for name in names}
    together = dataclasses.replace(
        one,
        **joined,
        cu_seqlens=torch.tensor([0, 70, 190], dtype=torch.int32, device=GPU),
        masked_rows=torch.cat([one.masked_rows, two.masked_rows + 70]),
        lengths=(70, 120),
    )
    assert float(model(together).mlm_loss.detach()) == pytest.approx(alone, rel=5e-3)


def test_electra_has_the_losses_of_the_cpu() -> None:
    shape = ModelConfig.model_validate({**SIZES, "attention_dropout": 0.0})
    config = run_config(pairs={"objective": "none"}, electra={"generator_width": 0.5}, model=shape.model_dump())
    torch.manual_seed(0)
    model = ElectraModel(shape, VOCABULARY, settings=config.electra)
    batch = make_batch(LENGTHS, VOCABULARY)
    expected, found = model(batch), copy.deepcopy(model).to(GPU)(batch.to(GPU))
    # Replaced tokens are drawn with a hash of their keys, so they are the same on every device.
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_cpu(name: str) -> None:
    settings = OptimizerConfig.model_validate({"name": name})
    weights = []
    for device in (torch.device("cpu"), GPU):
        model = make_model({}).to(device)
        optimizer = of_whole_tensors(make_optimizer(settings, parameter_groups(model.named_parameters(), 0.1)))
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2
            optimizer.step()
        start = torch.cat([p.detach().flatten() for p in make_model({}).parameters()])
        weights.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]) - start)
    assert distance(weights[1], weights[0]) < (2e-2 if "mu" in name else 1e-4)  # Muon multiplies in bf16


ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "stage 0": {"precision": "bf16", "zero_stage": 0},
    "stage 2": {"precision": "bf16", "zero_stage": 2},
    "checkpointing": {"precision": "bf16", "activation_checkpointing": True},
}
STEPS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{name: (engine, {}, {"name": "adamw"}) for name, engine in ENGINES.items()},
    **{name: (ENGINES["bf16"], {}, {"name": name}) for name in OPTIMIZERS[1:]},
    "modernbert": (ENGINES["bf16"], {"family": "modernbert"}, {"name": "muon"}),
    "local": (ENGINES["bf16"], SHAPES["local"], {"name": "adamw"}),
    "disentangled": (ENGINES["bf16"], SHAPES["disentangled"], {"name": "adamw"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_model_learns_and_the_host_waits_for_nothing(name: str) -> None:
    engine_section, model_section, optimizer = STEPS[name]
    config = run_config(
        engine={"micro_batch_tokens": 512, "zero_stage": 1, **engine_section},
        model={**SIZES, **model_section},
        optimizer=optimizer,
    )
    with training(config) as (engine, run):
        batch = make_batch(LENGTHS, VOCABULARY)
        totals: list[Tensor] = []

        def train() -> None:
            totals.append(run(batch, last=True))
            engine.step(2e-3)

        for _ in range(30):
            train()
        reads = host_reads(train) if engine.settings.precision != "fp16" else {}
    per_token = [float(sums[0]) / len(batch.masked_rows) for sums in totals]
    assert reads == {}
    assert per_token[-1] < per_token[0] - 0.2


def test_new_lengths_do_not_compile_again() -> None:
    model = make_model({"family": "modernbert"}, compile=True).to(GPU, torch.bfloat16)
    several = ((40, 128), (9, 9, 77), (128,) * 4, (33,), (30, 20))
    batches = [make_batch(lengths, VOCABULARY).to(GPU) for lengths in several]
    for batch in batches[:2]:
        loss_and_gradients(model, batch)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches:
            loss_and_gradients(model, batch)


@pytest.mark.parametrize("shape", ["bert", "modernbert", "local"])
def test_compiled_scores_of_masked_tokens_are_those_of_the_cpu(shape: str) -> None:
    """In inference mode, with new lengths in each batch."""
    several = ((40, 128), (9, 9, 77), (11,) * 50, (128,) * 4, (33,), (30, 20))
    batches = [make_batch(lengths, VOCABULARY) for lengths in several]
    eager, compiled = make_model(SHAPES[shape]).eval(), make_model(SHAPES[shape], compile=True).eval()
    for dtype, close in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        compiled = compiled.to(GPU, dtype)
        with torch.inference_mode():
            for batch in batches[:2]:
                compiled.masked_logits(batch.to(GPU))
            with torch._dynamo.config.patch(error_on_recompile=True):
                for batch in batches:
                    found, expected = compiled.masked_logits(batch.to(GPU)), eager.masked_logits(batch)
                    assert distance(found.float().cpu(), expected) < close


@contextlib.contextmanager
def training(config: PretrainConfig) -> Iterator[tuple[Engine, Run]]:
    """An engine, and what adds the gradients of a micro-batch on the host and returns its totals."""
    with session.process_group(Worker()):
        config, device = session.choose_device(config, Worker())
        torch.manual_seed(0)
        objective = MaskedTokens(config, VOCABULARY)
        objective.build(read_frozen)
        engine = Engine(
            objective.model,
            lambda named: make_optimizer(config.optimizer, parameter_groups(named, config.weight_decay(0))),
            config.engine,
            NullWatchdog(),
        )
        engine.module.train()
        forward_backward = ForwardBackward(engine, objective)

        def run(micro: MicroBatch, *, last: bool) -> Tensor:
            step = StepBatch((micro,), len(micro.lengths), sum(micro.lengths), len(micro.masked_rows), 0, 0)
            return forward_backward.run(micro.to(device), objective.loss_weights(step), last=last)

        yield engine, run
        engine.close()


def recording(*, graphs: bool = True, **sections: Any) -> contextlib.AbstractContextManager[tuple[Engine, Run]]:
    """`training` with `sections` of the config, with or without graphs."""
    engine_section = {"micro_batch_tokens": 512, "cuda_graphs": graphs}
    return training(run_config(engine=engine_section, **sections))


def rounded(lengths: tuple[int, ...], seed: int, *, pairs: bool = False) -> MicroBatch:
    batch = make_batch(lengths, VOCABULARY, seed=seed)
    return with_filler(batch if pairs else dataclasses.replace(batch, nsp_labels=NO_LABELS), 128)


RECORDED: dict[str, dict[str, Any]] = {
    "adamw": {"model": {"family": "modernbert"}, "optimizer": {"name": "adamw"}},
    "muon": {"model": {"family": "modernbert"}, "optimizer": {"name": "muon"}},
    "pairs": {"model": {}, "pairs": {"objective": "nsp"}},
    "untied": {"model": {"family": "modernbert", "tied_decoder": False}},
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_passes_train_as_launched_ones(name: str) -> None:
    sections = {"pairs": {"objective": "none"}, **RECORDED[name]}
    sections["model"] = {**SIZES, "attention_dropout": 0.0, **sections["model"]}
    several, found = ((100, 100, 120), (101, 104, 115), (60, 70, 128)), {}
    for graphs in (True, False):
        with recording(graphs=graphs, **sections) as (engine, run):
            totals: list[Tensor] = []

            def train(number: int, engine: Engine = engine, run: Run = run, totals: list[Tensor] = totals) -> None:
                for position in range(1 + number % 2):
                    lengths = several[(number + position) % 3]
                    batch = rounded(lengths, 10 * number + position, pairs=name == "pairs")
                    totals.append(run(batch, last=position == number % 2))
                engine.step(2e-3)

            for number in range(24):
                train(number)
            before = engine.graphs.replay_count if engine.graphs else 0
            reads = host_reads(lambda train=train: train(24))
            if graphs:
                assert engine.graphs is not None
                assert 2 <= len(engine.graphs._recordings) < before < engine.graphs.replay_count
                assert reads == {}
            with engine.whole_parameters() as parameters:
                weights = torch.cat([parameter.float().flatten() for parameter in parameters.values()]).cpu()
            found[graphs] = weights, [float(one[0]) for one in totals]
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-2)
    assert distance(found[True][0], found[False][0]) < 1e-2


def test_a_recorded_dropout_is_another_in_each_replay() -> None:
    model = {**SIZES, "family": "modernbert", "attention_dropout": 0.5}
    batch, losses = rounded((100, 100, 120), 0), []
    with recording(model=model, pairs={"objective": "none"}) as (engine, run):
        for weights in engine.layout.flats():  # as they are initialized, attention changes no loss
            weights.data.add_(torch.randn_like(weights) * 0.3)
        engine.step(0.0)
        for seed in (1, 1, 1, 0, 7, 7, 8):  # 0: none
            if seed:
                seed_device(engine, seed, 0)
            losses.append(float(run(batch, last=True)[0]))
            engine.step(0.0)
        assert engine.graphs is not None
        assert engine.graphs.replay_count == 5
    assert losses[4] == pytest.approx(losses[5], rel=1e-5), "the same seed"
    assert min(abs(losses[i] - losses[i - 1]) / losses[i] for i in (3, 4, 6)) > 1e-3, losses


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus."""
    root = tmp_path_factory.mktemp("gpu-runs")
    make_corpus(root / "corpus", vocabulary_size=300)
    return root


NO_DROPOUT = {"model__attention_dropout": 0.0, "model__hidden_dropout": 0.0}


@pytest.fixture(scope="module")
def runs(root: Path) -> Path:
    """Runs of 12 steps: whole on the GPU, in two parts, with filler, and on the CPU."""
    for name, changes in {
        "whole": {},
        "parts": {},
        "graphs": {**NO_DROPOUT, "engine__cuda_graphs": True},
        "gpu32": {**NO_DROPOUT, "engine__precision": "fp32"},
        "cpu32": {**NO_DROPOUT, "engine__precision": "fp32"},
    }.items():
        values = _run_values(root, name, **changes)
        (root / f"{name}.yaml").write_text(dump(PretrainConfig.model_validate(values)), encoding="utf-8")
    processes = {name: [_pretrain(root, name)] for name in ("whole", "graphs", "gpu32")}
    processes["cpu32"] = [_pretrain(root, "cpu32", CUDA_VISIBLE_DEVICES="")]
    processes["parts"] = [_pretrain(root, "parts", stop=True)]
    assert _ends(processes) == {name: [75] if name == "parts" else [0] for name in processes}
    assert _ends({"parts": [_pretrain(root, "parts", "--resume")]}) == {"parts": [0]}
    return root


def _run_values(root: Path, name: str, **changes: Any) -> dict[str, Any]:
    common = {"engine__precision": "bf16", "engine__compile": True, "engine__cuda_graphs": False}
    common |= {"model__hidden": 64, "optimizer__name": "muon"}
    common |= {"evaluation__every_steps": 6, "checkpoint__every_steps": 6}
    values = pretraining(root / "corpus", root / name, [(32, 16, 8), (64, 16, 4)], **{**common, **changes})
    for phase in values["phases"]:
        phase["peak_learning_rate"] = 5e-3  # at which a wrong update shows
    return values


def _ends(processes: dict[str, list[subprocess.Popen[str]]]) -> dict[str, list[int]]:
    """The exit codes of all processes; what the failed ones wrote is printed."""
    codes: dict[str, list[int]] = {}
    for name, ranks in processes.items():
        for process in ranks:
            output = process.communicate(timeout=300)[0]
            codes.setdefault(name, []).append(process.returncode)
            if process.returncode not in (0, 75):
                print(f"---- {name}: {process.returncode}\n{output[-3000:]}")
    return codes


def _pretrain(root: Path, name: str, *options: str, stop: bool = False, **environment: str) -> subprocess.Popen[str]:
    if stop:  # read after the first step
        (root / name).mkdir(exist_ok=True)
        code = "import sys, tests.run.test_gpu as t; sys.exit(t.stopped_run(sys.argv[1]))"
    else:
        # Small buckets, of which a model of this size has several.
        code = (
            "import sys, pretrain.training.engine.buckets as b; b.BUCKET_ENTRIES = 40_000; "
            "from finetune.cli import main; sys.exit(main(['pretrain', *sys.argv[1:]]))"
        )
        options = options if environment.get("RANK") else (*options, "--no-ray")
    arguments = [sys.executable, "-c", code, str(root / f"{name}.yaml"), *options]
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join([*sys.path, "tests"])},
        cwd=Path(__file__).parents[2],
    )


def _pretrain_over_nccl(root: Path, name: str, *options: str, stop: bool = False) -> list[subprocess.Popen[str]]:
    """Two workers on one GPU. NCCL refuses that within a host, so each is a host of its own to it."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
    ranks = [{"RANK": str(rank), "NCCL_HOSTID": f"host-{rank}", **common} for rank in range(2)]
    return [_pretrain(root, name, *options, stop=stop, **rank) for rank in ranks]


def stopped_run(path: str) -> int:
    """Train until the fifth step, in this process."""
    from pretrain.common.errors import StoppedError
    from pretrain.config import load_config
    from pretrain.run import train
    from tests.starts import _StopsAt

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = load_config(Path(path)).model_dump(mode="json")
        train.main(TrainingRequest(config, resume=False), _StopsAt(rank, size, 0, 1, step=5))
    except StoppedError:
        return 75
    return 0


def assert_trained_alike(folder: Path, expected: Path) -> None:
    """The losses and gradient norms of two runs are equal but for rounding.

    On a CPU, those of bf16 and fp32 differ by up to 1e-4 and 0.3 %; half of the learning rate makes it 9e-3 and 12 %.
    """
    for name, tolerance in (("loss", 2e-3), ("grad_norm", 3e-2)):
        mine, theirs = ([record[name] for record in records(run)] for run in (folder, expected))
        assert mine == pytest.approx(theirs, rel=tolerance), name


def test_a_run_in_parts_trains_as_a_whole_one(runs: Path) -> None:
    # Not bit for bit: flash attention's backward pass adds in any order.
    assert_trained_alike(runs / "parts", runs / "whole")


def test_filler_and_graphs_change_nothing_beyond_rounding(runs: Path) -> None:
    assert_trained_alike(runs / "graphs", runs / "cpu32")


OVER_NCCL: dict[str, dict[str, Any]] = {
    "stage-0": {"engine__zero_stage": 0},
    "stage-1": {},
    "stage-2": {"engine__zero_stage": 2},
    "stage-3": {"engine__zero_stage": 3, "optimizer__name": "adamw"},
    "recorded": {"engine__cuda_graphs": True},
}


@pytest.fixture(scope="module")
def over_nccl(root: Path) -> Path:
    """Runs of two workers, of one, and one that two workers begin and one ends."""
    plain = {**NO_DROPOUT, "engine__compile": False}
    alone: dict[str, dict[str, Any]] = {"one": {}, "one-adamw": {"optimizer__name": "adamw"}}
    for name, changes in {**OVER_NCCL, **alone, "halves": {}}.items():
        values = _run_values(root, name, **{**plain, **changes})
        (root / f"{name}.yaml").write_text(dump(PretrainConfig.model_validate(values)), encoding="utf-8")
    processes = {name: _pretrain_over_nccl(root, name) for name in OVER_NCCL}
    processes |= {name: [_pretrain(root, name)] for name in alone}
    processes["halves"] = _pretrain_over_nccl(root, "halves", stop=True)
    codes = _ends(processes)
    expected = {name: [0] if name in alone else [75, 75] if name == "halves" else [0, 0] for name in processes}
    assert codes == expected
    assert _ends({"halves": [_pretrain(root, "halves", "--resume")]}) == {"halves": [0]}
    return root


@pytest.mark.parametrize("name", [*OVER_NCCL, "halves"])
def test_two_workers_over_nccl_have_the_losses_of_one(over_nccl: Path, name: str) -> None:
    alone = "one-adamw" if name == "stage-3" else "one"
    assert_trained_alike(over_nccl / name, over_nccl / alone)


def test_a_run_in_fp32_trains_as_on_the_cpu(runs: Path) -> None:
    # TF32 products on the GPU.
    assert_trained_alike(runs / "gpu32", runs / "cpu32")
    record = records(runs / "gpu32")[-1]
    assert record["tokens"] == records(runs / "cpu32")[-1]["tokens"]
    environment = json.loads((runs / "gpu32" / "environment.json").read_text())
    assert torch.cuda.get_device_name() in json.dumps(environment)


def test_a_fine_tuned_model_predicts_what_it_does_on_the_cpu(tmp_path: Path) -> None:
    make_bert(tmp_path / "bert")
    write_reviews(tmp_path, train=160, dev=40)
    values: dict[str, Any] = {
        "name": "reviews",
        "run_dir": str(tmp_path / "reviews"),
        "start_from": str(tmp_path / "bert"),
        "max_length": 32,
        "classification": {"train": str(tmp_path / "train.jsonl"), "dev": str(tmp_path / "dev.jsonl")},
        "training": {"examples_per_step": 16, "learning_rate": 1e-2, "epochs": 3.0},
        "tracking": {"log_every_steps": 1, "wandb": "off"},
    }
    from finetune.training.config import FinetuneConfig

    (tmp_path / "reviews.yaml").write_text(dump(FinetuneConfig.model_validate(values)), encoding="utf-8")
    code = "import sys; from finetune.cli import main; sys.exit(main(sys.argv[1:]))"
    answers = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    subprocess.run([*command, "finetune", str(tmp_path / "reviews.yaml"), "--no-ray"], check=True, env=environment)
    for devices in ({}, {"CUDA_VISIBLE_DEVICES": ""}):
        done = subprocess.run(
            [*command, "predict", str(tmp_path / "reviews"), "--text", "the film was fine and it is the end"],
            check=True,
            env={**environment, **devices},
            capture_output=True,
            text=True,
        )
        answers.append(json.loads(done.stdout.splitlines()[0]))
    assert answers[0]["label"] == answers[1]["label"]
