"""Estimates against what they estimate: transformers' counts, torch's FLOP counter, the published figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import make_corpus, make_vocabulary, write_corpus
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from finetune.cli import main
from pretrain.batches.loader import BatchMaker
from pretrain.common.settings import dump
from pretrain.config import EngineConfig, ModelConfig, PhaseConfig, PretrainConfig, load_config
from pretrain.model import cost
from pretrain.model.cost import parameter_count
from pretrain.model.heads import PretrainingModel
from pretrain.objectives import make_objective
from pretrain.planning import estimate, memory, roofline, work
from pretrain.planning.text import mean_lengths
from pretrain.run.continuation import Corpora
from pretrain.run.train import make_full_batch
from pretrain.training.engine import buckets, gradient_sums
from tests.model.test_architecture import saved_bytes, saving_as_compiled  # noqa: F401
from tests.tasks.refusals import refused

TINY = {"size": "custom", "layers": 2, "hidden": 64, "heads": 2}
CONFIGS = Path(__file__).parents[2] / "configs" / "pretrain"


def make_config(folder: Path | str = "nowhere", vocabulary: int = 30522, **sections: Any) -> PretrainConfig:
    phase = PhaseConfig(sequence_length=128, global_sequences=256, steps=1000, peak_learning_rate=1e-4)
    corpus = {"dir": str(folder), "vocabulary": {"size": vocabulary}}
    return PretrainConfig.model_validate({"name": "trial", "corpus": corpus, "phases": (phase,), **sections})


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("size", ["mini", "base", "large"])
def test_parameters_are_transformers_count(size: Any, next_sentence: bool):
    model = ModelConfig(size=size)  # pyright: ignore[reportArgumentType]
    shape: dict[str, Any] = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
    }
    config = BertConfig(vocab_size=30522, intermediate_size=model.intermediate, **shape)
    with torch.device("meta"):
        reference = (BertForPreTraining if next_sentence else BertForMaskedLM)(config)
    assert parameter_count(model, 30522, next_sentence).total == reference.num_parameters()


def test_flops_add_up_over_sequences():
    config = make_config(model=ModelConfig(size="mini"))
    alone = [make_objective(config, 500).useful_flops([length], 3) for length in (20, 70)]
    assert make_objective(config, 500).useful_flops([20, 70], 6) == pytest.approx(sum(alone))


def test_bert_large_flops_are_the_published_arithmetic():
    """1,811.9 MFLOP per token in the encoder's matmuls, 37.7 in attention at 128, 193.8 per prediction."""
    config = make_config(model=ModelConfig(size="large"), pairs={"objective": "none"})
    encoder = make_objective(config, 30522).useful_flops([128], 0) / 128
    assert encoder / 1e6 == pytest.approx(1811.9 + 37.7, rel=1e-4)
    assert (make_objective(config, 30522).useful_flops([128], 1) - encoder * 128) / 1e6 == pytest.approx(
        193.8, rel=1e-3
    )


def test_work_of_the_two_phase_recipe():
    config = load_config(CONFIGS / "bert-large-phase1-phase2.yaml")
    first, second = (work.phase_work(config, phase, 30522) for phase in config.phases)
    assert (first.sequences, second.sequences) == (461_242_368, 51_216_384)
    full = sum(
        work.phase_work(config, phase, 30522, mean_length=length).flops
        for phase, length in zip(config.phases, (128, 254), strict=True)
    )
    assert full == pytest.approx(1.36e20, rel=0.01)  # NVIDIA's recipe with Wikipedia's mean of 254 tokens at 512


def test_work_and_memory_follow_the_masking_schedule():
    """Of a falling share the mean counts for the work and the largest for memory."""
    phase = PhaseConfig(sequence_length=128, global_sequences=256, steps=1000, peak_learning_rate=1e-4)

    def figures(phases: list[dict[str, Any]], **masking: Any) -> tuple[list[float], int]:
        config = make_config(
            phases=tuple(phase.model_copy(update=one) for one in phases), masking=masking, pairs={"objective": "none"}
        )
        flops = [work.phase_work(config, one, 30522).flops for one in config.phases]
        return flops, memory.memory_bytes(config, 1, 1)["logits"]

    halves = [{"final_masking_probability": 0.3}, {"masking_probability": 0.3, "final_masking_probability": 0.2}]
    (high, low), logits = figures(halves, probability=0.4)
    assert high == pytest.approx(figures([{}], probability=0.35)[0][0])
    assert low == pytest.approx(figures([{}], probability=0.25)[0][0])
    assert logits == figures([{}], probability=0.4)[1]
    assert figures([{"masking_probability": 0.25}], probability=0.4)[0][0] == pytest.approx(low)


def test_the_mean_length_is_bounded_by_the_phase():
    config = make_config()
    assert work.phase_work(config, config.phases[0], 30522).mean_length == pytest.approx(102.4)
    assert work.phase_work(config, config.phases[0], 30522, mean_length=500).mean_length == 128


def states(stage: int, workers: int, **engine: Any) -> dict[str, int]:
    config = make_config(model=ModelConfig(size="large"), engine=EngineConfig(**engine))
    return memory.memory_bytes(config, stage, workers, "cuda")


def test_recorded_passes_keep_their_memory_beside_that_of_launched_ones():
    plain, recorded = states(1, 8), states(1, 8, cuda_graphs=True)
    passes = ("activations", "logits")
    assert [recorded[name] for name in passes] == [2 * plain[name] for name in passes]
    assert {**recorded, "activations": 0, "logits": 0} == {**plain, "activations": 0, "logits": 0}


def test_buckets_are_those_of_the_engine():
    """Estimates are made without torch, so they repeat these numbers."""
    assert memory.BUCKET == roofline.BUCKET == buckets.BUCKET_ENTRIES
    assert memory.MAX_IN_FLIGHT == gradient_sums.MAX_IN_FLIGHT


def test_states_follow_rajbhandari():
    """ZeRO (arXiv:1910.02054), section 3: 12 bytes of optimizer state per parameter, divided from stage 1 on."""
    parameters = parameter_count(ModelConfig(size="large"), 30522).total
    assert parameters == 336_226_108
    assert states(0, 8)["optimizer"] == 12 * parameters
    for stage in (1, 2, 3):
        assert states(stage, 8)["optimizer"] == 12 * parameters // 8
    assert states(1, 8)["gradients"] == 4 * parameters  # fp32 sums
    assert states(2, 8)["gradients"] == 4 * parameters // 8
    assert states(2, 8)["weights"] == 2 * parameters
    assert states(0, 8, precision="fp32")["optimizer"] == 8 * parameters


def test_a_narrow_embedding_has_narrow_gradients():
    models = [ModelConfig(size="large", embedding=width) for width in (1024, 128)]
    configs = [make_config(model=model, engine=EngineConfig(precision="bf16")) for model in models]
    wide, narrow = (memory.memory_bytes(config, 1, 2) for config in configs)
    saved = 30522 * (1024 - 128)
    assert wide["logits"] - narrow["logits"] == 2 * saved
    assert wide["copies"] - narrow["copies"] == (2 + 4) * saved


def test_muon_keeps_one_moment_of_matrices_and_averages_need_a_copy():
    """4 bytes less for each entry of the 24 layers' matrices; 4 more for each averaged parameter."""
    parameters, matrices = 336_226_108, 24 * 12 * 1024**2

    def optimizer(stage: int, **changes: Any) -> int:
        config = make_config(model=ModelConfig(size="large"), **changes)
        return memory.memory_bytes(config, stage, 8, "cuda")["optimizer"]

    muon = {"optimizer": {"name": "muon"}}
    averaging = {"phases": (make_config().phases[0].model_copy(update={"averaged_share": 0.1}),)}
    assert optimizer(0, **muon) == 12 * parameters - 4 * matrices
    assert optimizer(1, **muon) == pytest.approx((12 * parameters - 4 * matrices) / 8, abs=8)
    assert optimizer(0, **averaging) == 16 * parameters
    assert optimizer(2, **muon, **averaging) == pytest.approx((16 * parameters - 4 * matrices) / 8, abs=8)
    assert optimizer(1, optimizer={"name": "stable_adamw"}) == optimizer(1)
    electra = {"electra": {"generator_width": 0.25}, "pairs": {"objective": "none"}}
    of_generator = 24 * 12 * 256**2
    assert optimizer(0, **electra) - optimizer(0, **electra, **muon) == 4 * (matrices + of_generator)


def test_the_flops_of_muon_are_those_of_its_products():
    from pretrain.training.optim.muon import orthogonalize

    config = make_config(
        model=ModelConfig(size="custom", layers=2, hidden=8, heads=2, intermediate=24), optimizer={"name": "muon"}
    )
    with FlopCounterMode(display=False) as counter:
        for shape in [(8, 8)] * 4 + [(24, 8), (8, 24)]:
            orthogonalize(torch.ones(shape))
    assert cost.orthogonalization_flops(config.model) == 2 * counter.get_total_flops()
    assert work.optimizer_flops(config) == cost.orthogonalization_flops(config.model)
    assert work.optimizer_flops(make_config()) == 0
    assert "Muon" in estimate.dry_run(config)
    assert "Muon" not in estimate.dry_run(make_config())


def test_a_decay_timescale_is_shown_as_a_decay():
    shown = estimate.dry_run(make_config(optimizer={"decay_timescale": 0.1}))
    assert "weight decay is 100: alone, it divides the matrices by e in 100 steps" in shown  # 1 / (0.1 * 1000 * 1e-4)
    assert "weight decay" not in estimate.dry_run(make_config())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_workers_need_less_each(stage: int):
    totals = [sum(states(stage, workers).values()) for workers in (1, 2, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.usefixtures("saving_as_compiled")
def test_activations_are_what_torch_saves(precision: Any, compile: bool, monkeypatch: pytest.MonkeyPatch):
    """Beside what is saved, the estimate has one layer's working space."""
    monkeypatch.setattr("pretrain.model.kernels.native.supports_native", lambda _: False)  # a GPU has no such loops
    config = make_config(
        vocabulary=64,
        model=ModelConfig(size="custom", layers=4, hidden=128, heads=2, hidden_dropout=0.1),
        engine=EngineConfig(precision=precision, micro_batch_tokens=1024, compile=compile),  # pyright: ignore[reportArgumentType]
    )
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    working = dtype.itemsize * 1024 * (2 * 512 + 10 * 128)
    estimated = memory.memory_bytes(config, 1, 1, "cuda")["activations"] - working
    model = PretrainingModel(config.model, 64, compile=compile).to(dtype)
    assert estimated == pytest.approx(saved_bytes(model, make_full_batch(config, [128] * 8, 64)), rel=0.05)


def test_checkpointing_keeps_the_layers_inputs():
    model = ModelConfig(size="large")
    plain = make_config(model=model)
    less = make_config(model=model, engine=EngineConfig(activation_checkpointing=True))
    tokens = plain.engine.micro_batch_tokens
    dropped = [memory.memory_bytes(c, 1, 1, "cuda")["activations"] for c in (plain, less)]
    assert dropped[1] < dropped[0] / 4
    assert dropped[1] > 24 * 2 * tokens * 1024


@pytest.mark.parametrize("text", ["8xH100", "8 x h100", "8XH100"])
def test_clusters_are_known_by_count_and_name(text: str):
    cluster = estimate.parse_cluster(text, make_config())
    assert (cluster.workers, cluster.peak_flops, cluster.device) == (8, 8 * 989e12, "cuda")
    assert estimate.parse_cluster("A100", make_config()).workers == 1


@pytest.mark.parametrize("text", ["8xTPU", "0xH100", "00xH100", "H100x8", ""])
def test_other_clusters_are_refused(text: str):
    refused("not a known cluster", estimate.parse_cluster, text, make_config())


@pytest.mark.parametrize(("on", "phase"), [("512xH100", {}), ("200xH100", {"ramp_from": 128, "ramp_steps": 10})])
def test_a_cluster_with_more_workers_than_sequences_is_refused(on: str, phase: dict[str, int]):
    config = make_config()
    config = make_config(phases=(config.phases[0].model_copy(update=phase),), engine=EngineConfig(precision="bf16"))
    name = f"phases.0.{'ramp_from' if phase else 'global_sequences'}"
    refused(rf"^--on {on}: {name} \(\d+\) is less than the number of workers", estimate.dry_run, config, on=on)
    assert "at least" in estimate.dry_run(config, on="128xH100")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"precision": "bf16"}, "engine.precision: bf16 needs compute capability 8.0; V100 has 7.0."),
        ({"cuda_graphs": True}, "engine.cuda_graphs needs bf16, and this run computes"),
    ],
)
def test_a_cluster_that_the_run_would_refuse_is_refused(engine: dict[str, Any], message: str):
    refused(rf"^--on 8xV100: {re.escape(message)}", estimate.dry_run, make_config(engine=engine), on="8xV100")


def test_a_cluster_at_an_address_is_assumed_to_have_gpus():
    scheduling = {"workers": 8, "address": "10.0.0.5:6379"}
    text = estimate.dry_run(make_config(scheduling=scheduling))
    assert "8 GPU workers (assumed), bf16" in text
    assert "cuda_graphs: auto; chosen for the GPUs" in text
    assert "  process " not in text


@pytest.mark.parametrize("capability", [(9, 0), (7, 0)])
def test_this_machine_is_measured_as_it_trains(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]):
    """A run in fp32 uses TF32 tensor cores where there are any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    before = torch.get_float32_matmul_precision()
    found: list[str] = []
    monkeypatch.setattr(estimate, "matmul_peak", lambda *_: found.append(torch.get_float32_matmul_precision()) or 1e12)
    try:
        assert estimate.measure_peak("fp32") == ("cuda", 1e12)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["high" if capability == (9, 0) else "highest"]


@pytest.mark.parametrize(("workers", "used"), [(1, 1), (4, 4), (16, 8)])
def test_a_run_uses_one_gpu_for_each_worker(monkeypatch: pytest.MonkeyPatch, workers: int, used: int):
    """Of the machine's eight."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(estimate, "measure_peak", lambda *_: ("cuda", 7e14))
    config = make_config(scheduling={"workers": workers}, engine={"precision": "bf16"})
    assert estimate.parse_cluster("here", config).peak_flops == used * 7e14


@pytest.mark.parametrize(
    ("model", "embeddings"),
    [
        ({"size": "mini"}, "30,522 tokens, 512 positions, 2 segments"),
        (TINY | {"family": "eurobert"}, "30,522 tokens"),
    ],
)
def test_the_parts_of_the_parameters_are_named(model: dict[str, Any], embeddings: str):
    lines = [" ".join(line.split()) for line in estimate.dry_run(make_config(model=ModelConfig(**model))).splitlines()]
    assert next(line for line in lines if line.startswith("embeddings ")).endswith(f" {embeddings}")


def test_this_machine_is_measured():
    config = make_config(scheduling={"workers": 2}, engine=EngineConfig(precision="fp32"))
    cluster = estimate.parse_cluster("here", config)
    assert cluster.workers == 2
    assert 1e6 < cluster.peak_flops < 1e18, "FLOP/s of any processor"


def test_time_on_this_machine_is_work_over_rate(monkeypatch: pytest.MonkeyPatch):
    config = make_config(engine=EngineConfig(precision="fp32"))
    monkeypatch.setattr(estimate, "matmul_peak", lambda *_: 2e11)
    text = estimate.dry_run(config, on="here", mean_length=128)
    hours = work.phase_work(config, config.phases[0], 30522, 128).flops / (2e11 * 0.50) / 3600
    assert f"total:   {hours:.1f} h on this machine, assuming an MFU of 50% at the measured fp32" in text


def test_dry_run_reports_a_missing_corpus(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 2_000_000)
    for suffix, expected in (("txt", "books, 1 file, 2.0 MB"), ("none", "not prepared, and cannot be prepared yet")):
        corpus = {"dir": str(tmp_path / "c"), "sources": [{"kind": "books", "path": str(tmp_path / f"*.{suffix}")}]}
        assert expected in estimate.dry_run(make_config(corpus=corpus))


def test_dry_run_reports_the_prepared_corpus(tmp_path: Path):
    folder = make_corpus(tmp_path / "corpus", documents=30, vocabulary_size=700)
    config = make_config(folder)
    assert work.vocabulary_rows(config) == 700  # the corpus decides, not the 30,522 to train
    text = estimate.dry_run(config)
    assert "train: 30 documents" in text
    assert "validation: 20 documents" in text


@pytest.mark.parametrize("path", ["~/vocab.txt", "~"])
def test_a_given_vocabulary_is_found_as_preparing_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str):
    """As the folder that holds it, and below the home folder; only line feeds end an entry."""
    monkeypatch.setenv("HOME", str(tmp_path))
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "\x85", "b", ""]
    (tmp_path / "vocab.txt").write_text("\n".join(entries), encoding="utf-8")
    corpus = {"dir": str(tmp_path / "none")}
    for given in (path, path.replace("~", str(tmp_path))):
        assert work.vocabulary_rows(make_config(corpus=corpus | {"vocabulary": {"path": given}})) == 8


@pytest.mark.parametrize("length", [0.0, -5.0, float("nan"), float("inf")])
def test_a_mean_length_must_be_positive(length: float):
    refused(r"^--mean-length: .*; expected a number above 0", estimate.dry_run, make_config(), mean_length=length)


def test_a_warmup_step_masks_a_token_however_rarely_training_does():
    batch = make_full_batch(make_config(masking={"probability": 0.003}), [128, 64], 100)
    assert batch.masked_rows.tolist() == [1, 129]


# ---- mean lengths of the sequences of a prepared text, beside what a run trains on


def mini(**values: Any) -> PretrainConfig:
    config = load_config(CONFIGS / "mini.yaml")
    return PretrainConfig.model_validate({**config.model_dump(), "corpus": {"dir": "nowhere"}, **values})


def test_a_dry_run_has_the_tokens_of_the_prepared_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within 1 % of those of all batches, in each phase. Without a corpus they are assumed."""
    config = two_lengths(corpus={"dir": str(make_corpus(tmp_path / "corpus"))})
    (tmp_path / "run.yaml").write_text(dump(config))
    printed = dry_run_tokens(tmp_path / "run.yaml", capsys, "measured on ")
    assert printed == pytest.approx([length * 12800 for length in counted_lengths(config)], rel=0.01)
    most = [one.sequences * one.sequence_length for one in config.phases]
    assert printed[0] < 0.94 * most[0], "it is not what is assumed"
    (tmp_path / "run.yaml").write_text(dump(two_lengths()))
    assumed = dry_run_tokens(tmp_path / "run.yaml", capsys, "assumed, 0.8 of the length; `prepare` ")
    assert assumed == pytest.approx([work.ASSUMED_FILL * one for one in most], rel=1e-3)


def test_replayed_text_counts_in_the_mean_length(tmp_path: Path) -> None:
    """A text of questions, half replaced by long documents."""
    short = [[np.arange(10, 30)] for _ in range(3000)]
    own = write_corpus(
        tmp_path / "own", {"train": [(0, short)], "validation": [(0, short[:20])]}, make_vocabulary(1000)
    )
    replay = {"replay_corpus": str(make_corpus(tmp_path / "general")), "replay_share": 0.5}
    config = two_lengths(corpus={"dir": str(own)}, start_from="start", adaptation=replay)
    assert mean_lengths(config) == pytest.approx(counted_lengths(config), rel=0.01)
    assert mean_lengths(config)[0] > 1.5 * mean_lengths(two_lengths(corpus={"dir": str(own)}))[0]


def two_lengths(**values: Any) -> PretrainConfig:
    """Phases of 128 and 32 tokens, of 12,800 sequences each."""
    phase = {**mini().phases[0].model_dump(), "ramp_from": 0, "ramp_steps": 0, "steps": 200}
    return mini(phases=[{**phase, "sequence_length": length} for length in (128, 32)], **values)


def counted_lengths(config: PretrainConfig) -> list[float]:
    """Mean tokens of all sequences that a run trains on, of each phase."""
    shards, means = Corpora.open(config).training, []
    for number, phase in enumerate(config.phases):
        maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
        size = phase.global_sequences
        means.append(sum(maker.make(size * step, size).tokens for step in range(phase.steps)) / phase.sequences)
    return means


def dry_run_tokens(path: Path, capsys: pytest.CaptureFixture[str], source: str) -> list[float]:
    """Of each phase, as printed with where the mean lengths come from."""
    assert main(["pretrain", str(path), "--dry-run"]) == 0
    table = capsys.readouterr().out.partition("Work\n")[2]
    assert f"mean: tokens per sequence, {source}" in table
    return [float(cell) for cell in table.partition("tokens ")[2].split()[:2]]
