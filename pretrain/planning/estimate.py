"""The dry run: parameters, memory per worker for each ZeRO stage, FLOPs and time of a run, by arithmetic alone.

`pretrain/model/cost.py` has the costs of an architecture; this module adds them up for a run. It needs torch only to
measure this machine.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pretrain.batches.blocks import WINDOW_BLOCKS
from pretrain.common.addresses import display_path
from pretrain.common.errors import InputError
from pretrain.common.settings import dump
from pretrain.common.wording import counted
from pretrain.config import ModelConfig, Precision, PretrainConfig
from pretrain.corpus.blocks import ARRAYS, BLOCK_TOKENS
from pretrain.corpus.stored import is_streamed, prepared_manifest
from pretrain.model import cost
from pretrain.model.precision import allow_tf32, matmul_peak, resolve_precision, unsupported_feature
from pretrain.objectives import make_objective
from pretrain.planning.memory import Device, memory_bytes
from pretrain.planning.recording import choose_graphs, with_graphs
from pretrain.planning.roofline import GPUS, REACHED_SHARE, Gpu, StepTimes, step_times
from pretrain.planning.work import ASSUMED_FILL, Work, optimizer_flops, phase_work, read_frozen_config, vocabulary_rows

# MFU (share of the peak FLOP/s) that is assumed for this machine. On a CPU, a step reaches half of the measured matmul
# peak. NVIDIA's BERT-Large on 8 A100 reaches 0.44 at length 128 (DeepLearningExamples README).
ASSUMED_MFU = {"cuda": 0.40, "cpu": 0.50}

_DOLLARS_PER_REQUEST = 0.0004 / 1000  # price of a GET request to S3 Standard in us-east-1, 2026


def dry_run(
    config: PretrainConfig,
    on: str = "",
    mean_length: float | None = None,
    *,
    measured: Sequence[float] = (),
    readings: Sequence[str] = (),
    show_config: bool = False,
) -> str:
    """Return all estimates as text for the terminal.

    Args:
        on: cluster to estimate the time for, such as "8xH100"; "here" measures this machine.
        mean_length: mean tokens per sequence in every phase; by default, the values of `measured`.
        measured: mean tokens per sequence of each phase on the prepared corpus; if empty, means are assumed.
        readings: lines of text on how often an epoch reads a token.
        show_config: whether to add the resolved config.

    Raises:
        InputError: `on` is not a known cluster or has too many workers for a batch, `mean_length` is not positive, the
            model's norm or activation is unknown, or the prepared corpus is damaged.
    """
    if mean_length is not None and not 0 < mean_length < math.inf:
        raise InputError(f"--mean-length: {mean_length:g}; expected a number above 0.")
    vocabulary_size = vocabulary_rows(config)
    config, precision_reason = resolve_precision(config, on)
    cluster = parse_cluster(on, config) if on else None
    if cluster:
        _check_batches(config, cluster.workers, f"--on {on}")
    has_gpus = bool(config.scheduling.address) or Path("/proc/driver/nvidia").exists()
    device: Device = cluster.device if cluster else "cuda" if has_gpus else "cpu"
    lengths = [mean_length] * len(config.phases) if mean_length else measured or [None] * len(config.phases)
    graphs = ""
    if not cluster and device == "cuda" and config.engine.cuda_graphs == "auto":
        graphs = "\n  engine.cuda_graphs: auto; chosen for the GPUs when the run starts"
    if cluster and device == "cuda":
        enabled, reason = choose_graphs(config, vocabulary_size, lengths, [cluster.name] * cluster.workers)
        config = with_graphs(config, enabled)
        graphs = f"\n  engine.cuda_graphs: {'on' if enabled else 'off'}; {reason}"
    frozen_config, phases = read_frozen_config(config), zip(config.phases, lengths, strict=True)
    work = [phase_work(config, phase, vocabulary_size, length, frozen_config) for phase, length in phases]
    parts = [
        f"Precision\n  {config.engine.precision}: {precision_reason}{graphs}",
        "Parameters\n" + _parameter_lines(config, vocabulary_size),
        "Memory per worker\n" + _memory_lines(config, cluster.workers if cluster else None, device),
        "Work\n" + _work_lines(config, work, _mean_note(config, mean_length, measured)),
        "Time\n" + _time_lines(config, work, vocabulary_size, cluster),
        "Corpus\n" + _corpus_lines(config),
        *(["Reading\n" + _indent("\n".join(readings))] if readings else []),
        *(["Resolved config\n" + _indent(dump(config))] if show_config else []),
    ]
    return "\n\n".join(parts)


def _check_batches(config: PretrainConfig, workers: int, where: str) -> None:
    """Raise `InputError`, prefixed with `where`, if a batch cannot be balanced across `workers`."""
    for index, phase in enumerate(config.phases):
        for name in ("ramp_from", "global_sequences"):
            sequences = getattr(phase, name)
            if sequences and (reason := config.balance_problem(index, sequences, workers)):
                raise InputError(f"{where}: phases.{index}.{name} ({sequences}) {reason}.")


# ---- Time


@dataclass(frozen=True)
class Cluster:
    """The machines for which the time is estimated."""

    name: str
    workers: int
    device: Device
    peak_flops: float  # peak FLOP/s of all workers together
    gpu: Gpu | None = None  # model of the GPUs; None for this machine


def parse_cluster(text: str, config: PretrainConfig) -> Cluster:
    """Parse a cluster: `8xH100`, `H100`, or `here`; for the latter, measure the matmul peak, for half a second.

    Raises `InputError` if the cluster is unknown or the run cannot compute there.
    """
    where = f"--on {text}"
    if text == "here":
        import torch

        device, peak = measure_peak(config.engine.resolved_precision)
        name = f"this machine ({torch.cuda.get_device_name()})" if device == "cuda" else "this machine"
        return Cluster(name, config.scheduling.workers, device, peak * _used_device_count(config))
    match = re.fullmatch(r"(?:(\d{1,9})\s*[xX]\s*)?([A-Za-z0-9]+)", text.strip())
    names = {name.upper(): name for name in GPUS}
    count = int(match[1] or 1) if match else 0
    if not match or match[2].upper() not in names or not count:
        known = ", ".join(GPUS)
        raise InputError(f"{where}: not a known cluster. Use here, or COUNTxNAME with one of {known}.")
    name = names[match[2].upper()]
    if config.engine.precision == "fp32":
        raise InputError(f"{where}: the known peaks are for bf16 and fp16; engine.precision is fp32.")
    gpu = GPUS[name]
    if reason := unsupported_feature(config.engine, gpu.capability):
        raise InputError(f"{where}: {reason}; {name} has {gpu.capability[0]}.{gpu.capability[1]}.")
    return Cluster(f"{count} x {name}", count, "cuda", count * gpu.peak_flops, gpu)


def measure_peak(precision: Precision) -> tuple[Device, float]:
    """Return (device, measured FLOP/s of matrix products), on one GPU or on all cores."""
    import torch

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    allow_tf32(precision, torch.device(device))  # as the run does
    return device, matmul_peak(device, precision)


def _used_device_count(config: PretrainConfig) -> int:
    """Return the number of this machine's GPUs that the run uses, one per worker; 1 for CPUs, which workers share."""
    import torch

    return max(1, min(torch.cuda.device_count(), config.scheduling.workers))


# ---- Text


def _parameter_lines(config: PretrainConfig, vocabulary_size: int) -> str:
    objective, model = make_objective(config, vocabulary_size), config.model
    trained, trained_total = objective.parameters(), objective.trained
    if len(trained) > 1:
        pairs = zip(trained, objective.shapes, strict=True)
        rows = [(name, count, _describe_layers(shape) + note) for (name, count, note), shape in pairs]
        rows.append(("total", trained_total, "trained"))
    else:
        count = cost.parameter_count(model, vocabulary_size, config.pairs.has_classifier)
        rows = [
            ("embeddings", count.embeddings, _embedding_note(model, vocabulary_size)),
            ("layers", count.layers, _describe_layers(model)),
            ("heads", trained_total - count.embeddings - count.layers, ""),
            ("total", trained_total, "the decoder is the word embeddings, counted once" if model.tied_decoder else ""),
        ]
    return "\n".join(f"  {label:<12}{count:>14,}  {note}".rstrip() for label, count, note in rows)


def _embedding_note(model: ModelConfig, vocabulary_size: int) -> str:
    positions = f", {model.max_positions} positions" if model.positions == "learned" else ""
    return f"{vocabulary_size:,} tokens{positions}{', 2 segments' if model.token_types else ''}"


def _describe_layers(model: ModelConfig) -> str:
    return f"{model.layers} of hidden size {model.hidden}, {model.heads} heads, feed-forward size {model.intermediate}"


def _memory_lines(config: PretrainConfig, workers: int | None, device: Device) -> str:
    engine, count = config.engine, workers or config.scheduling.workers
    columns = [memory_bytes(config, stage, count, device) for stage in range(4)]
    headers = [f"ZeRO {stage}{'*' if stage == engine.zero_stage else ''}" for stage in range(4)]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    rows.append(("total", [sum(column.values()) for column in columns]))
    lines = [f"  {'GiB':<14}" + "".join(f"{name:>9}" for name in headers)]
    for name, values in rows:
        if any(values):
            lines.append(f"  {name:<14}" + "".join(f"{value / 2**30:>9.2f}" for value in values))
    note = " (assumed)" if config.scheduling.address and not workers else ""
    kind = "GPU worker" if device == "cuda" else "CPU worker"
    lines.append(
        f"  * configured. {counted(count, kind)}{note}, {engine.precision}, "
        f"{engine.micro_batch_tokens:,} tokens per micro-batch"
        + (", activations recomputed" if engine.activation_checkpointing else "")
        + (", compiled" if engine.compiled else "")
    )
    return "\n".join(lines)


def _mean_note(config: PretrainConfig, mean_length: float | None, measured: Sequence[float]) -> str:
    """Return the origin of the mean lengths as a phrase."""
    if mean_length:
        return "as given"
    if measured:
        return f"measured on {config.corpus.dir}"
    is_prepared = prepared_manifest(config.corpus) is not None
    advice = "it is measured on machines that have the text" if is_prepared else "`prepare` the corpus to measure it"
    return f"assumed, {ASSUMED_FILL:g} of the length; {advice}"


def _work_lines(config: PretrainConfig, work: list[Work], mean_note: str) -> str:
    def with_total(name: str, spec: str) -> list[str]:
        values = [getattr(w, name) for w in work]
        return [format(value, spec) for value in (*values, sum(values))]

    rows = {
        "length": [str(phase.sequence_length) for phase in config.phases],
        "mean": [f"{w.mean_length:.1f}" for w in work],
        "steps": with_total("steps", ","),
        "sequences": with_total("sequences", ","),
        "tokens": with_total("tokens", ".4g"),
        "FLOP/token": [f"{w.flops / w.tokens:.4g}" for w in work],
        "FLOP/step": [f"{w.flops / w.steps:.3g}" for w in work],
        "FLOP": with_total("flops", ".3g"),
        "executed": with_total("executed", ".3g"),
    }
    lines = [*_phase_table("", rows, len(work), "total")]
    lines.append("  FLOP: useful FLOP, without padding; MLM head only at masked tokens")
    lines.append(f"  mean: tokens per sequence, {mean_note}")
    lines.append(
        "  executed: FLOP without the positions that the last layer skips, plus recomputation in the backward pass"
        + (" and the optimizer's products" if config.optimizer.name == "muon" else "")
    )
    objective = make_objective(config)
    if role := objective.frozen_role:
        note = f"FLOP and executed include the {role}'s forward pass"
        note = note if read_frozen_config(config) else f"the {role} cannot be read, so it is not counted"
        lines.append(f"  {attrgetter(objective.setting)(config)}: {note}")
    if config.optimizer.name == "muon":
        flops = optimizer_flops(config)
        shares = ", ".join(f"{flops / (w.flops / w.steps):.2g}" for w in work)
        lines.append(f"  Muon takes {flops:.3g} FLOP per step: {shares} of the useful FLOP, by phase")
    if timescale := config.optimizer.decay_timescale:
        steps = f"{timescale * config.total_steps:,.0f}"
        decay = config.weight_decay(len(config.phases) - 1)
        lines.append(f"  weight decay is {decay:.3g}: alone, it divides the matrices by e in {steps} steps")
    return "\n".join(lines)


def _phase_table(title: str, rows: Mapping[str, Sequence[str]], phase_count: int, *columns: str) -> Iterator[str]:
    """Yield the lines of a table with a column per phase and further `columns`; rows may lack the last cells."""
    table = {title: [*(f"phase {index}" for index in range(phase_count)), *columns], **rows}
    name_width, width = max(map(len, table)), max(len(cell) for cells in table.values() for cell in cells)
    for name, cells in table.items():
        yield f"  {name:<{name_width}}" + "".join(f"  {cell:>{width}}" for cell in cells)


def _time_lines(config: PretrainConfig, work: list[Work], vocabulary_size: int, cluster: Cluster | None) -> str:
    if cluster is None:
        return "  give a cluster, such as --on 8xH100, or measure this machine with --on here"
    if cluster.gpu is not None:
        objective = make_objective(config, vocabulary_size, read_frozen_config(config))
        times = [
            step_times(objective, phase, w, cluster.gpu, cluster.workers)
            for phase, w in zip(config.phases, work, strict=True)
        ]
        return _roofline_lines(work, times, cluster)
    rate = cluster.peak_flops * ASSUMED_MFU[cluster.device]
    lines = [
        f"  phase {index}: {_duration(w.flops / rate)}, {w.sequences / (w.flops / rate):,.0f} sequences/s, "
        f"{w.tokens / (w.flops / rate):,.0f} tokens/s"
        for index, w in enumerate(work)
    ]
    lines.append(
        f"  total:   {_duration(sum(w.flops for w in work) / rate)} on {cluster.name}, assuming an MFU of "
        f"{ASSUMED_MFU[cluster.device]:.0%} at the measured {config.engine.precision} matmul peak of "
        f"{cluster.peak_flops / 1e12:,.4g} TFLOP/s"
    )
    return "\n".join(lines)


def _roofline_lines(work: list[Work], times: list[StepTimes], cluster: Cluster) -> str:
    """Return lines with the minimum time of each part of a step, and of the run."""
    rows = {name: [f"{1e3 * dict(step.rows())[name]:.2f}" for step in times] for name, _ in times[0].rows()}
    rows["limit"] = [f"{1e3 * step.limit:.2f}" for step in times]
    rows["limited by"] = [step.limited_by for step in times]
    rows["expected"] = [f"{1e3 * step.expected:.2f}" for step in times]
    phases = [(w, w.steps * step.limit) for w, step in zip(work, times, strict=True)]
    rows["maximum sequences/s"] = [f"{w.sequences / seconds:,.0f}" for w, seconds in phases]
    rows["maximum tokens/s"] = [f"{w.tokens / seconds:,.0f}" for w, seconds in phases]
    rows["maximum MFU"] = [f"{w.flops / seconds / cluster.peak_flops:.0%}" for w, seconds in phases]
    minimum = sum(seconds for _, seconds in phases)
    expected = sum(w.steps * step.expected for w, step in zip(work, times, strict=True))
    lines = [
        *_phase_table("minimum ms per step", rows, len(work)),
        f"  total:   at least {_duration(minimum)} on {cluster.name}; about {_duration(expected)} expected, "
        f"with kernels at {REACHED_SHARE:.2f} of their limit, as in published training runs",
        "  products, attention and memory run one after another on the GPU; host and loader overlap with them, as does "
        "the network without CUDA graphs",
    ]
    return "\n".join(lines)


def _corpus_lines(config: PretrainConfig) -> str:
    folder, manifest = config.corpus.dir, prepared_manifest(config.corpus)
    if not manifest:
        from pretrain.corpus.description import describe

        try:
            return preparation_lines(describe(config))
        except InputError as error:  # the text may not exist yet
            return f"  {folder}: not prepared, and cannot be prepared yet: {error}"
    lines = []
    for split in ("train", "validation"):
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        kinds = ("documents", "sentences", "tokens")
        lines.append(f"  {split}: " + ", ".join(f"{sum(s[kind] for s in shards):,} {kind}" for kind in kinds))
    names = ", ".join(source["name"] for source in manifest["sources"])
    lines.append(f"  {folder}: {manifest['vocabulary_size']:,} vocabulary entries, sources {names}")
    if is_streamed(config.corpus):
        lines.append(f"  {_streaming_line(manifest, int(config.corpus.cache))}")
    return "\n".join(lines)


def _streaming_line(manifest: dict[str, Any], cache: int) -> str:
    """Return a line with the cost of streaming a corpus from its object store."""
    shards = [shard for shard in manifest["shards"] if shard["split"] == "train"]
    files = (f"{shard['name']}.{part}.npy" for shard in shards for part in ARRAYS)
    size, blocks = sum(manifest["files"][name]["bytes"] for name in files), sum(map(_block_count, shards))
    open_blocks = min(blocks, WINDOW_BLOCKS + len(manifest["sources"]))
    min_cache, requests = min(blocks, 2 * open_blocks) * size / max(1, blocks), len(ARRAYS) * blocks
    return (
        f"streamed: {size / 1e9:,.3g} GB in {counted(blocks, 'block')}; a machine caches {cache / 1e9:,.3g} GB and "
        f"needs at least {min_cache / 1e9:,.3g} GB, less if machines divide the text"
        f"{': more than corpus.cache' if min_cache > cache else ''}. "
        f"An epoch takes {requests:,} requests, ${requests * _DOLLARS_PER_REQUEST:,.2f} at S3's prices without transfer"
    )


def _block_count(shard: dict[str, Any]) -> int:
    return max(1, round(shard["tokens"] / BLOCK_TOKENS))


def preparation_lines(plan: dict[str, Any]) -> str:
    """Return the result of `pretrain.corpus.description.describe` as text."""
    lines = [
        f"  {source['name']}: {source['kind']}, {counted(source['files'], 'file')}, {source['bytes'] / 1e6:,.1f} MB, "
        f"weight {source['weight']:g}"
        for source in plan["sources"]
    ]
    lines += [f"  {note}" for note in plan["notes"]]
    readers = counted(plan["processes"], "process", "processes") if plan["processes"] else "all cores"
    where = f" of the Ray cluster at {plan['address']}" if plan["address"] else ""
    amount = f"{plan['bytes'] / 1e6:,.1f} MB to read by {readers}{where}"
    finished = "finished and up to date" if plan["sources_compared"] else "finished; its sources are not compared"
    lines.append(
        f"  {display_path(plan['dir'])}: " + (finished if plan["state"] == "finished" else f"{plan['state']}; {amount}")
    )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 4 * 86400 else f"{seconds / 86400:.1f} days"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip().splitlines())
