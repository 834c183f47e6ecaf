"""Every ZeRO stage, precision and optimizer takes the same steps, saves and loads the same state.

The reference is a loop of plain torch in one process.
"""

import copy
import functools
import itertools
import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pretrain.checkpoint import store, writing
from pretrain.common.errors import InputError
from pretrain.config import EngineConfig as EngineSettings
from pretrain.config import ModelConfig, OptimizerConfig
from pretrain.model.heads import PretrainingModel
from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.engine import Engine, buckets, deepspeed_config, gradient_sums, state_layouts
from pretrain.training.engine import engine as engine_module
from pretrain.training.engine.deepspeed_patches import import_deepspeed
from pretrain.training.optim import make_optimizer, muon, parameter_groups
from tests.batches_by_hand import make_batch
from tests.distributed import engine_of, of_whole_tensors, run_workers

SHAPE = ModelConfig(size="custom", layers=2, hidden=32, heads=2, max_positions=64)
VOCABULARY, LENGTHS, MICRO_BATCHES, RATE = 101, (7, 12, 20, 20), 4, 1e-2
STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "lamb", "stable_adamw", "muon")


def choice_of(optimizer: str) -> OptimizerConfig:
    return OptimizerConfig(name=optimizer)  # type: ignore[arg-type]


def make_model() -> PretrainingModel:
    torch.manual_seed(0)
    return PretrainingModel(SHAPE, VOCABULARY)


def make_engine(stage: int, precision: str = "fp32", optimizer: str = "adamw", clip: float = 1.0) -> Engine:
    choice, how = choice_of(optimizer), {"zero_stage": stage, "precision": precision, "gradient_clip_norm": clip}
    return engine_of(make_model(), choice, choice.weight_decay, **how)


def refusal(section: dict[str, Any]) -> str:
    try:
        engine_of(make_model(), choice_of("adamw"), zero_stage=1, deepspeed=section)
    except InputError as error:
        return str(error)
    return ""


def test_what_deepspeed_refuses_of_its_own_section_is_an_input_error() -> None:
    (said,) = run_workers(1, refusal, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    assert said.startswith("engine.deepspeed: DeepSpeed rejects it (You are using ZeRO-Offload with a client")


def own_bug() -> str:
    import_deepspeed().initialize = lambda **_: store.latest(None)  # type: ignore[arg-type]
    try:
        return refusal({"prescale_gradients": False})
    except (AttributeError, TypeError) as error:
        return type(error).__name__


def test_a_bug_of_ours_within_deepspeeds_start_keeps_its_traceback() -> None:
    assert run_workers(1, own_bug)[0] in ("AttributeError", "TypeError")


def step_batches(step: int) -> list[Any]:
    return [make_batch(LENGTHS, VOCABULARY, seed=MICRO_BATCHES * step + k) for k in range(MICRO_BATCHES)]


Poison = tuple[int, int, float]  # step, micro-batch of all workers', what its loss is multiplied with


def norm_of(result: Any) -> float:
    """The gradients' norm; inf for a step that was not applied, whose norm may be NaN or inf."""
    return float(result.norm) if result.applied else math.inf


def take_steps(engine: Engine, steps: range, poison: Poison = (-1, 0, math.nan)) -> list[tuple[float, float, bool]]:
    """(global loss, gradient norm, applied) of each step."""
    results = []
    for step in steps:
        batches = step_batches(step)
        masked = sum(len(batch.masked_rows) for batch in batches)
        mine, total = batches[dist.get_rank() :: dist.get_world_size()], torch.zeros(1)
        for number, batch in enumerate(mine):
            losses = engine.forward(batch)
            loss = losses.mlm_loss / masked + losses.nsp_loss / (MICRO_BATCHES * len(LENGTHS))
            if (step, number * dist.get_world_size() + dist.get_rank()) == poison[:2]:
                loss = loss * poison[2]
            engine.backward(loss, last=number == len(mine) - 1)
            total += loss.detach()
        result = engine.step(RATE)
        results.append((engine.workers.sum_over_workers(total).item(), norm_of(result), result.applied))
    return results


def whole_state(engine: Engine) -> dict[str, torch.Tensor]:
    """All weights and moments, put together from every rank's fragments; fails on a gap or an overlap."""
    held = [(f.name, f.start, f.replicated, {k: t.clone() for k, t in f.tensors.items()}) for f in engine.fragments()]
    ranks = engine.workers.gather_objects(held)
    if held and held[0][2]:
        ranks = ranks[:1]
    out: dict[str, torch.Tensor] = {}
    for kind in ("weight", "exp_avg", "exp_avg_sq", *(["average"] if engine.averaged_steps else [])):
        for name, shape in engine.shapes.items():
            pieces = sorted((start, t[kind]) for rank in ranks for n, start, _, t in rank if n == name and kind in t)
            if kind == "exp_avg_sq" and not pieces and is_hidden_matrix(name):
                continue  # Muon has none
            end = 0
            for start, piece in pieces:
                assert start == end, f"{name}: next piece at {start}, after {end}"
                end += piece.numel()
            assert end == shape.numel(), name
            out[f"{kind}|{name}"] = torch.cat([piece for _, piece in pieces]).view(shape)
    return out


@functools.cache
def reference(optimizer: str) -> tuple[list[tuple[float, float, bool]], dict[str, torch.Tensor]]:
    """Three steps of plain torch."""
    model, choice = make_model(), choice_of(optimizer)
    optim = of_whole_tensors(make_optimizer(choice, parameter_groups(model.named_parameters(), choice.weight_decay)))
    results = []
    for step in range(3):
        batches = step_batches(step)
        outputs = [model(batch) for batch in batches]
        masked, sequences = sum(len(b.masked_rows) for b in batches), MICRO_BATCHES * len(LENGTHS)
        mlm, nsp = (sum(getattr(o, name) for o in outputs) for name in ("mlm_loss", "nsp_loss"))
        loss = mlm / masked + nsp / sequences
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        for group in optim.param_groups:
            group["lr"] = RATE
        optim.step()
        optim.zero_grad()
        results.append((loss.item(), norm, True))  # pyright: ignore[reportAttributeAccessIssue]
    return results, {name: p.detach() for name, p in model.named_parameters()}


def combinations(world: int, precision: str) -> list[tuple[int, str]]:
    """Of stages and optimizers: in fp32 all by two workers; else each in fp32 or bf16, and in bf16 by one or by two."""
    every = itertools.product(STAGES, OPTIMIZERS)
    if (world, precision) == (2, "fp32"):
        return list(every)
    return [(s, name) for s, name in every if (s + OPTIMIZERS.index(name) + world) % 2 == (precision == "bf16")]


COMBINATIONS = [(world, *one) for world in (1, 2) for one in combinations(world, "fp32")]


def run_combinations(world: int) -> dict[tuple[int, str, str], Any]:
    found = {}
    for stage, precision, optimizer in [(s, p, o) for p in PRECISIONS for s, o in combinations(world, p)]:
        engine = make_engine(stage, precision, optimizer)
        results = take_steps(engine, range(3))
        found[stage, precision, optimizer] = (results, whole_state(engine), engine.state()["updates"])
        engine.close()
    return found


@pytest.fixture(scope="module")
def by_workers() -> dict[int, Any]:
    return {world: run_workers(world, run_combinations, world)[0] for world in (1, 2)}


@pytest.mark.parametrize(("world", "stage", "optimizer"), COMBINATIONS)
def test_fp32_steps_equal_plain_torch(by_workers, world: int, stage: int, optimizer: str) -> None:
    results, state, updates = by_workers[world][stage, "fp32", optimizer]
    expected, weights = reference(optimizer)
    for (loss, norm, applied), (expected_loss, expected_norm, _) in zip(results, expected, strict=True):
        assert applied
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    # Adam's first steps are the gradient's sign where it is tiny: a last bit there moves a weight by 2 * rate.
    for name, weight in weights.items():
        off = (state[f"weight|{name}"] - weight).abs()
        assert off.mean() < 2e-6, name
        assert (off > 1e-4).float().mean() < 1e-3, name
    assert updates == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_steps_stay_near_fp32(by_workers, stage: int, optimizer: str) -> None:
    for results, _, _ in [
        found[stage, "bf16", optimizer] for found in by_workers.values() if (stage, "bf16", optimizer) in found
    ]:
        for (loss, norm, _), (expected_loss, expected_norm, _) in zip(results, reference(optimizer)[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=5e-3)
            assert norm == pytest.approx(expected_norm, rel=5e-2)


def places_of_weights() -> dict[tuple[int, str], Any]:
    """Addresses modulo 16 of all parameters, and of all ranks' parts of them."""
    found = {}
    for stage, precision in itertools.product((1, 2), PRECISIONS):
        engine = make_engine(stage, precision)
        flats = engine.layout._weights  # pyright: ignore[reportAttributeAccessIssue]
        parts = [part for flat in flats for part in flat.view(engine.world_size, -1)]
        weights = dict(engine.module.named_parameters())
        found[stage, precision] = {str(name): x.data_ptr() % 16 for name, x in (*weights.items(), *enumerate(parts))}
        engine.close()
    return found


def test_weights_begin_at_16_bytes() -> None:
    (found, *_) = run_workers(3, places_of_weights)
    for combination, places in found.items():
        assert len(places) > 3
        assert not any(places.values()), f"{combination}: {places}"


def poison_every_combination() -> dict[tuple[int, str], Any]:
    """Of two steps one is poisoned in each, and a good one follows."""
    found, kinds = {}, itertools.cycle([math.nan, math.inf, -math.inf])
    for stage, precision in itertools.product(STAGES, PRECISIONS):
        engine = make_engine(stage, precision)
        take_steps(engine, range(1))
        poison, before = (1, len(found) % MICRO_BATCHES, next(kinds)), whole_state(engine)
        (result,) = take_steps(engine, range(1, 2), poison)
        untouched = all(torch.equal(before[key], value) for key, value in whole_state(engine).items())
        trial = (poison, result, untouched, take_steps(engine, range(2, 3)))
        found[stage, precision] = (*trial, engine.state()["updates"])
        engine.close()
    return found


def run_with_a_head_at_rest(alone: bool, on_the_way: bool = False, clip: float = 1.0) -> dict[int, Any]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sums, "reduces_in_transit", lambda: on_the_way)
        patch.setattr(buckets, "BUCKET_ENTRIES", 9000)  # several buckets
        patch.setattr(gradient_sums, "PIECE_ENTRIES", 5000)  # several pieces of some
        if not alone:
            patch.setattr(state_layouts, "uses_gradient_sums", lambda _: False)
        for stage in (1, 2):
            engine = make_engine(stage, "bf16", clip=clip)
            assert (engine.sums is not None) == alone
            results = take_steps(engine, range(2))
            losses = engine.forward(step_batches(2)[0])
            engine.backward(losses.mlm_loss / 10 / engine.world_size, last=True)  # NSP's own parameters get no gradient
            result = engine.step(RATE)
            results.append((0.0, norm_of(result), result.applied))
            results += take_steps(engine, range(3, 4), (3, 0, math.nan)) + take_steps(engine, range(4, 5))
            found[stage] = (results, whole_state(engine))
            engine.close()
    return found


def test_a_single_worker_sums_gradients_as_deepspeeds_stage_2_does() -> None:
    """DeepSpeed's stage 1 rounds the sums to bf16, to send them to nobody: there ours must equal its stage 2."""
    # Without clipping: the norms of both add other rows, and their last digits differ.
    ours, deepspeeds = (run_workers(1, run_with_a_head_at_rest, alone, False, 0.0)[0] for alone in (True, False))
    results, state = deepspeeds[2]
    for stage in (1, 2):
        for mine, its in zip(ours[stage][0], results, strict=True):
            assert mine == pytest.approx(its, rel=1e-6, nan_ok=True)
        for name, value in state.items():
            torch.testing.assert_close(ours[stage][1][name], value, rtol=1e-6, atol=1e-9)


def test_parts_of_sums_reach_their_owners() -> None:
    """All are near one worker's. Ours rounds what a worker sends; DeepSpeed also the owner's part, and the sum."""
    alone = run_workers(1, run_with_a_head_at_rest, True)[0][1]
    off, states = {}, {}
    # The last is as NCCL adds them; gloo can do so too.
    for name, how in {"ours": (True,), "deepspeed's": (False,), "on the way": (True, True)}.items():
        results, states[name] = run_workers(2, run_with_a_head_at_rest, *how)[0][1]
        for mine, its in zip(results, alone[0], strict=True):
            assert mine[2] == its[2]
            assert mine[:2] == pytest.approx(its[:2], rel=5e-3, nan_ok=True)
        far = [(states[name][key] - value).abs().sum().item() for key, value in alone[1].items() if "avg_sq" not in key]
        off[name] = sum(far)
    # Each step of AdamW makes whole digits of what rounding leaves of small gradients: the sums of both are as noisy.
    assert 0 < off["ours"] < 1.2 * off["deepspeed's"], "not more roundings"
    momenta = {key: value for key, value in states["ours"].items() if key.startswith("exp_avg|")}
    assert momenta
    for key, value in momenta.items():
        assert (states["on the way"][key] - value).abs().sum() <= 0.05 * value.abs().sum(), key


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_with_nan_changes_nothing(world: int) -> None:
    found = run_workers(world, poison_every_combination)[0]
    for (stage, precision), (poison, result, untouched, after, updates) in found.items():
        where = f"stage {stage} {precision} {poison}"
        assert not math.isfinite(result[0]), where
        assert result[1:] == (math.inf, False), where
        assert untouched, where
        assert after[0][2], where
        assert math.isfinite(after[0][0]), where
        assert updates == 2, where


def lend_parameters() -> dict[int, tuple[bool, Any, Any]]:
    """By stage: whether parameters that are lent are the master weights, and the steps with and without lending."""
    found = {}
    for stage in STAGES:
        steps = []
        equal = True
        for lend in (True, False):
            engine, taken = make_engine(stage), []
            for step in range(3):
                if lend:
                    with engine.whole_parameters() as parameters:
                        copies = {f"weight|{name}": parameter.clone() for name, parameter in parameters.items()}
                    state = whole_state(engine)
                    equal &= all(torch.equal(copies[name], state[name]) for name in copies)
                    equal &= len(copies) == len(engine.shapes)
                taken += take_steps(engine, range(step, step + 1))
            steps.append(taken)
            engine.close()
        found[stage] = (equal, *steps)
    return found


def test_lent_parameters_are_whole_and_change_no_step() -> None:
    for by_stage in run_workers(2, lend_parameters):
        for stage, (equal, lent, plain) in by_stage.items():
            assert equal, stage
            assert lent == plain, stage


def save_at(folder: Path, stage: int, optimizer: str, precision: str) -> tuple[dict[str, torch.Tensor], Any]:
    engine = make_engine(stage, precision, optimizer)
    take_steps(engine, range(2))
    state = {"step": 2, **engine.state()}
    writing.save(folder, 2, engine.fragments(), state, engine.workers)
    saved, after = whole_state(engine), take_steps(engine, range(2, 4))
    engine.close()
    return saved, after


def load_at(checkpoint: Path, stage: int, optimizer: str, precision: str) -> tuple[dict[str, torch.Tensor], Any]:
    engine = make_engine(stage, precision, optimizer)
    take_steps(engine, range(5, 6))  # some other state, which loading must overwrite
    with store.CheckpointReader(checkpoint) as reader:
        engine.load(reader, {"updates": 2})
    loaded = whole_state(engine)
    after = take_steps(engine, range(2, 4))
    engine.close()
    return loaded, after


PAIRS = ((0, 3), (1, 1), (1, 2), (2, 0), (3, 3), (3, 1))  # stages: that wrote, that reads


def save_everywhere(folder: Path) -> dict[tuple[int, str], Any]:
    return {
        (stage, precision): save_at(folder / precision / str(stage), stage, "adamw", precision)
        for stage, precision in itertools.product(STAGES, PRECISIONS)
    }


def moves(writers: int, readers: int, precision: str) -> list[tuple[int, int]]:
    """All pairs in both precisions from two workers to two; else each pair in one precision."""
    kept = (0, 1) if writers == readers else ((writers + PRECISIONS.index(precision)) % 2,)
    return [pair for number, pair in enumerate(PAIRS) if number % 2 in kept]


def load_everywhere(folders: dict[int, Path]) -> dict[int, dict[tuple[int, int, str], Any]]:
    """What was saved by so many writers, as it is loaded."""
    engine_module.MIN_SPLIT_ENTRIES = 64
    found: dict[int, dict[tuple[int, int, str], Any]] = {}
    for writers, folder in folders.items():
        found[writers] = {
            (wrote, reads, precision): load_at(
                folder / precision / str(wrote) / store.name_of(2), reads, "adamw", precision
            )
            for precision in PRECISIONS
            for wrote, reads in moves(writers, dist.get_world_size(), precision)
        }
    return found


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], tuple[Any, Any]]:
    """By (writers, readers): what was saved at every stage and precision, and what was loaded at other ones."""
    folders = {writers: tmp_path_factory.mktemp(f"by-{writers}") for writers in (1, 2)}
    saved = {writers: run_workers(writers, save_everywhere, folder)[0] for writers, folder in folders.items()}
    for manifest in folders[1].rglob("manifest.json"):
        store.verify_manifest(manifest.parent)
    alone = run_workers(1, load_everywhere, {2: folders[2]})[0]
    together = run_workers(2, load_everywhere, folders)[0]
    return {(2, 1): (saved[2], alone[2]), (1, 2): (saved[1], together[1]), (2, 2): (saved[2], together[2])}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2)])
def test_state_moves_between_stages_and_worker_counts(moved, writers: int, readers: int, precision: str) -> None:
    saved, loaded = moved[writers, readers]
    for wrote, reads in moves(writers, readers, precision):
        written, went_on = saved[wrote, precision]
        state, after = loaded[wrote, reads, precision]
        for key, value in state.items():
            assert torch.equal(value, written[key]), f"{wrote} -> {reads}: {key}"
        for (loss, norm, _), (expected, expected_norm, _) in zip(after, went_on, strict=True):
            if writers == readers and wrote == reads:
                assert (loss, norm) == (expected, expected_norm), "resumed steps are bitwise the same"
            assert loss == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 5e-3)


class CountingReader(store.CheckpointReader):
    entries = 0

    def read(self, kind: str, name: str, start: int, numel: int) -> torch.Tensor:
        self.entries += numel
        return super().read(kind, name, start, numel)


def entries_read(folder: Path) -> dict[int, float]:
    """By stage, what this rank reads of a checkpoint, as a share of the whole one."""
    engine_module.MIN_SPLIT_ENTRIES = 64
    save_at(folder, 1, "adamw", "bf16")
    shares = {}
    for stage in STAGES:
        engine = make_engine(stage, "bf16", "adamw")
        reader = CountingReader(folder / store.name_of(2))
        with reader:
            engine.load(reader, {"updates": 2})
        shares[stage] = reader.entries / (3 * sum(shape.numel() for shape in engine.shapes.values()))
        engine.close()
    return shares


def test_a_rank_reads_its_own_part_of_a_checkpoint(tmp_path: Path) -> None:
    for shares in run_workers(3, entries_read, tmp_path):
        assert shares[0] == pytest.approx(1 / 3, rel=0.1), "small tensors whole"
        assert shares[1] == pytest.approx(1 / 3, rel=0.02)
        assert shares[2] == pytest.approx(1 / 3, rel=0.02)
        assert shares[3] == pytest.approx(4 / 9, rel=0.05), "its weights twice: for the optimizer and the model"


def average_and_save(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state after two steps of Muon whose weights are averaged, which is saved, and after a third one."""
    engine = make_engine(1, "fp32", "muon")
    for step in range(2):
        take_steps(engine, range(step, step + 1))
        engine.average(engine.averaged_steps + 1)
    shapes = {name: list(shape) for name, shape in engine.shapes.items()}
    writing.save(folder, 2, engine.fragments(), {"step": 2, "averaged": 2, "shapes": shapes}, engine.workers)
    saved = whole_state(engine)
    take_steps(engine, range(2, 3))
    engine.average(3)
    after = whole_state(engine)
    engine.close()
    return saved, after


def load_averaged(
    checkpoint: Path, stages: tuple[int, ...]
) -> dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """By stage: the state that was saved, as it is loaded, and after a third step."""
    found = {}
    for stage in stages:
        engine = make_engine(stage, "fp32", "muon")
        with store.CheckpointReader(checkpoint) as reader:
            engine.load(reader, {"updates": 2, "averaged": 2})
        loaded = whole_state(engine)
        take_steps(engine, range(2, 3))
        engine.average(engine.averaged_steps + 1)
        found[stage] = loaded, whole_state(engine)
        with store.CheckpointReader(checkpoint) as reader:
            engine.load(reader, {"updates": 2})
        assert not any("average" in fragment.tensors for fragment in engine.fragments()), "a mean before its first step"
        engine.close()
    return found


def test_muons_moments_and_averages_move_between_stages_and_worker_counts(tmp_path: Path) -> None:
    saved, after = run_workers(2, average_and_save, tmp_path)[0]
    assert not any(key.startswith("exp_avg_sq|layers.") and key.endswith("in_weight") for key in saved)
    assert not torch.equal(saved["average|embeddings.word"], saved["weight|embeddings.word"])
    for readers, stages in ((1, (0, 3)), (2, STAGES)):
        found = run_workers(readers, load_averaged, tmp_path / store.name_of(2), stages)[0]
        for stage, (loaded, moved_on) in found.items():
            assert loaded.keys() == saved.keys()
            for key, value in saved.items():
                assert torch.equal(loaded[key], value), f"{readers} workers, stage {stage}: {key}"
            for key, value in after.items():
                if (readers, stage) == (2, 1):
                    assert torch.equal(moved_on[key], value), key
                assert (moved_on[key] - value).abs().mean() < 2e-6, f"{readers} workers, stage {stage}: {key}"


def test_the_users_deepspeed_section_goes_over_ours() -> None:
    settings = EngineSettings(deepspeed={"zero_optimization": {"reduce_bucket_size": 7}, "wall_clock_breakdown": True})
    config = deepspeed_config(settings, 2)
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["stage"] == 1
    assert config["wall_clock_breakdown"] is True


@pytest.mark.parametrize(("stage", "warns"), [(1, True), (2, False)])
def test_sums_in_bf16_are_said(stage: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    section = {"zero_optimization": {"contiguous_gradients": False}}
    settings = EngineSettings.model_validate({"precision": "bf16", "zero_stage": stage, "deepspeed": section})
    assert ("data_types" in deepspeed_config(settings, 2)) != warns
    assert ("DeepSpeed sums gradients in bf16" in caplog.text) == warns


def orthogonalized_types(precision: str) -> set[str]:
    """What Muon orthogonalizes in, in a step of an engine of this precision."""
    seen: set[str] = set()
    real = muon.orthogonalize

    def watched(update: torch.Tensor) -> torch.Tensor:
        seen.add(str(update.dtype))
        return real(update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "orthogonalize", watched)
        take_steps(make_engine(1, precision, "muon"), range(1))
    return seen


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "torch.float32"), ("bf16", "torch.bfloat16")])
def test_muon_orthogonalizes_in_the_precision_of_the_engine(precision: str, expected: str) -> None:
    assert run_workers(1, orthogonalized_types, precision) == [{expected}]


def fp16_norms() -> dict[int, tuple[list[float], list[float], float]]:
    """By ZeRO stage: norms of steps in fp16, of which two overflow; the scales after them; torch's norm in fp32."""
    import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = type(get_accelerator())
    accelerator.is_fp16_supported = lambda self: True
    accelerator.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    inputs, found = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)), {}
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        plain = copy.deepcopy(module)
        plain(inputs).square().mean().backward()
        gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
        engine = engine_of(module, decay=0.0, zero_stage=stage, precision="fp16")
        norms, scales = [], []
        for factor in (1.0, math.inf, math.inf, 1.0):
            engine.backward(engine.forward(inputs.half()).float().square().mean() * factor, last=True)
            norms.append(engine.step(0.0).norm.item())
            assert engine.loss_scale is not None
            scales.append(engine.loss_scale.cur_scale)
        found[stage] = (norms, scales, torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        engine.close()
    return found


def test_fp16_scales_the_loss_in_every_stage() -> None:
    """DeepSpeed scales the losses of its ZeRO optimizers only; in stage 0 it is our work. A second overflow counts."""
    for stage, (norms, scales, expected) in run_workers(1, fp16_norms)[0].items():
        assert norms[::3] == pytest.approx([expected] * 2, rel=1e-2), stage
        assert not any(map(math.isfinite, norms[1:3])), stage
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15], stage


def groups_timeouts() -> set[float]:
    """Of the groups that an engine and DeepSpeed use, in seconds."""
    world: Any = dist.group.WORLD
    world.set_timeout(timedelta(hours=5))
    engine = make_engine(0)
    side: Any = engine.workers.new_cpu_group(timedelta(hours=5))._group
    used = [dist.group.WORLD, engine._deepspeed.data_parallel_group, side]
    dist.barrier(side)  # a rank that ended now would cut the other's connection off
    left = (group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in used)
    return {float(round(seconds)) for seconds in left}  # torch 2.14 takes off what it has waited


def test_all_groups_have_the_timeout_of_the_first() -> None:
    assert run_workers(2, groups_timeouts) == [{5 * 3600.0}] * 2


def compiled_kernels() -> list[str]:
    """The functions of DeepSpeed's Muon that are compiled after an engine's start."""
    make_engine(1)
    muon = sys.modules["deepspeed.runtime.zero.muon.original_muon"]
    return [name for name, one in vars(muon).items() if hasattr(one, "_torchdynamo_orig_callable")]


def test_deepspeed_starts_without_compiling() -> None:
    """Its Muon, which it imports with every optimizer, loads 570 modules of the compiler: 1.2 s of each start."""
    assert run_workers(1, compiled_kernels) == [[]]
    assert torch.compile.__module__ == "torch"
