"""Pretrains on one worker: combines corpus, model, engine and training loop.

`main` runs in every worker: in one process, under torchrun and under Ray (cluster/workers/launch.py).
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.batches.exchange import Exchange
from pretrain.batches.filler import with_filler
from pretrain.batches.loader import BatchMaker, Loader, validation_batches
from pretrain.batches.sampler import SAMPLER_VERSION, Rollback, make_rollback
from pretrain.checkpoint import hf
from pretrain.checkpoint.start import read_frozen
from pretrain.common.addresses import is_remote
from pretrain.common.errors import InputError, version_mismatch
from pretrain.common.records import SOURCE_LOSS
from pretrain.common.wording import counted
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.config import PretrainConfig, forbidden_changes
from pretrain.corpus.shards import TokenShards
from pretrain.corpus.stored import fetch_corpus
from pretrain.model.encoder import Encoder
from pretrain.model.precision import torch_dtype
from pretrain.objectives import Objective, make_objective
from pretrain.planning.memory import micro_batch_tokens
from pretrain.planning.recording import choose_graphs, with_graphs
from pretrain.planning.text import mean_lengths
from pretrain.run.attention.history import AttentionHistory
from pretrain.run.continuation import Continuation, Corpora
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import check_settings
from pretrain.run.run import Training, run
from pretrain.run.session import check_same_data, collective_timeout, worker_session
from pretrain.tracking.tracker import Tracker
from pretrain.training.engine import Engine, InitialWeights, broadcast_object, gather_objects
from pretrain.training.optim import learning_rate, make_optimizer
from pretrain.training.rates import scaled_groups

LAUNCHING = (make_objective.__module__,)  # modules that only launch GPU kernels; see `Watchdog`
_FETCH_SECONDS = 86400.0  # time limit for fetching a corpus to this machine

logger = logging.getLogger(__name__)


def main(request: TrainingRequest, worker: Worker) -> None:
    """Train `request.config` (values of a `PretrainConfig`); with `request.resume`, from the latest checkpoint.

    Returns when all steps are done; otherwise raises one of `pretrain.common.errors`.
    """
    config = PretrainConfig.model_validate(request.config)
    with worker_session(config, worker, resume=request.resume, launching=LAUNCHING) as (config, device, watchdog):
        with watchdog.allow(_FETCH_SECONDS) if is_remote(config.corpus.dir) else contextlib.nullcontext():
            fetch_corpus(config.corpus)
        corpora = Corpora.open(config)
        check_same_data(corpora.fingerprints())
        vocabulary_rows = config.model.rows(corpora.domain.vocabulary_size)
        config = with_chosen_graphs(config, vocabulary_rows, device)
        objective = make_objective(config, vocabulary_rows)
        objective.build(read_frozen)
        for frozen_model in objective.identity.values():
            check_same_data({objective.setting: frozen_model["fingerprint"]})
        continuation = Continuation(config, corpora, objective.model.state_dict())
        continuation.identity.update(objective.identity)
        scales = continuation.lr_scales
        engine = Engine(
            objective.model,
            lambda named: make_optimizer(config.optimizer, scaled_groups(named, config.weight_decay(0), scales)),
            config.engine,
            watchdog,
        )
        objective.to(engine.device, torch_dtype(config.engine.resolved_precision))

        task = Pretraining(config, corpora, objective, engine, device, _count_machines(engine, worker))
        continuation.identity["mixtures"] = task.mixtures

        def initialize() -> None:
            continuation.initialize(engine)
            if weights := objective.initial_weights():
                engine.load(InitialWeights(weights))

        def check(state: dict[str, Any], checkpoint: Path) -> None:
            check_state(state, checkpoint, config, corpora.training, task.mixtures)
            objective.check_resumed(state, checkpoint)
            continuation.resume(engine, state)

        card_path = config.corpus.folder / "card.json"
        training = Training(
            task,
            _make_plan(config),
            job_type="pretrain",
            card={"corpus_card": json.loads(card_path.read_text(encoding="utf-8")) if card_path.is_file() else {}},
            identity=continuation.identity,
            check=check,
            finish=lambda tracker: _export_to_wandb(config, tracker),
            initialize=initialize,
        )
        run(training, engine, worker, request)
        engine.close()


def with_chosen_graphs(config: PretrainConfig, vocabulary_rows: int, device: torch.device) -> PretrainConfig:
    """Return `config` with `engine.cuda_graphs: auto` resolved on GPUs: rank 0 chooses for all ranks."""
    if device.type == "cpu" or config.engine.cuda_graphs != "auto":
        return config
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    gpu_names, memory_sizes = zip(*gather_objects(gpu), strict=True)
    enabled = False
    if dist.get_rank() == 0:
        lengths: list[Any] = [None] * len(config.phases)
        with contextlib.suppress(InputError):  # the loader reports problems with the text
            lengths = mean_lengths(config) or lengths
        enabled, reason = choose_graphs(config, vocabulary_rows, lengths, gpu_names, min(memory_sizes))
        logger.info("engine.cuda_graphs: %s; %s", "on" if enabled else "off", reason)
    return with_graphs(config, broadcast_object(enabled))


def _count_machines(engine: Engine, worker: Worker) -> int:
    """Return the number of machines if each has the same number of consecutive ranks; otherwise 1."""
    world_size, local_size = engine.world_size, worker.local_world_size
    sums = torch.tensor([local_size, local_size**2, worker.rank % local_size != worker.local_rank], dtype=torch.float64)
    engine.workers.sum_over_workers(sums)
    is_even = sums.tolist() == [world_size * local_size, world_size * local_size**2, 0] and not world_size % local_size
    return world_size // local_size if is_even else 1


def _make_plan(config: PretrainConfig) -> TrainingPlan:
    return TrainingPlan(
        config,
        total_steps=config.total_steps,
        learning_rate=lambda step: learning_rate(config.phases, step),
        evaluate_every_steps=config.evaluation.every_steps,
        checkpoint_every_steps=config.checkpoint.every_steps,
        weight_decay=lambda step: config.weight_decay(config.phase_at(step)[0]),
        averaged_steps=config.averaged_steps,
        evaluate_first=bool(config.start_from),
    )


def _export_to_wandb(config: PretrainConfig, tracker: Tracker) -> None:
    """Export the last checkpoint and log it as a W&B artifact, if this rank's tracker mirrors the run to W&B."""
    if not tracker.mirrored:
        return
    hf.export_run(config.folder, config.folder / "export")
    tracker.log_artifact(config.folder / "export")


class Pretraining:
    """A `TrainingTask`: an objective on the samples of a corpus."""

    def __init__(
        self,
        config: PretrainConfig,
        corpora: Corpora,
        objective: Objective,
        engine: Engine,
        device: torch.device,
        machines: int,
    ) -> None:
        self._machines = machines
        self._config, self._shards, self._objective = config, corpora.training, objective
        self._engine, self._device = engine, device
        self._loader: Loader | None = None
        self._stalled_before = 0.0  # seconds spent waiting for batches of earlier loaders, and opening loaders
        self._phase = 0  # index of the current phase
        self._steps = 0  # number of steps started so far
        self._history: AttentionHistory | None = None
        if len(objective.shapes) == 1:  # with two models, one may use the other's embeddings
            self._history = AttentionHistory(config.folder, config.model, corpora.held_out)
        self._exchange: Exchange | None = None
        self._validation: dict[int, list[StepBatch]] = {}
        self._general_validation: dict[int, list[StepBatch]] = {}
        self._growths = corpora.held_out.grown  # how many times `prepare` has added text
        self.mixtures: list[list[list[Any]]] = []  # `Sampler.identity` of each phase
        ranks: dict[str, Any] = {"rank": engine.rank, "world_size": engine.world_size}
        for index, phase in enumerate(config.phases):  # all phases, so that errors of later ones are raised now
            maker = BatchMaker(self._shards, config, index, seed=config.seed, machines=machines, **ranks)
            maker.check_batch()
            self.mixtures.append(maker.sampler.identity)
            if self._exchange is None and maker.needs_exchange(phase.global_sequences):
                self._exchange = Exchange(engine.workers.new_cpu_group(collective_timeout(config)))
            self._validation[index] = validation_batches(corpora.held_out, config, index, **ranks)
            if corpora.general_held_out is not None:
                self._general_validation[index] = validation_batches(corpora.general_held_out, config, index, **ranks)

    def batches(self, start_step: int, skipped: dict[str, Any]) -> Iterator[StepBatch]:
        first_phase, phase_step = self._config.phase_at(start_step)
        self._steps = start_step
        if self._history is not None and self._engine.rank == 0:
            self._history.rewind(start_step)
        rollback = Rollback(**skipped) if skipped else None
        for index in range(first_phase, len(self._config.phases)):
            self.open_loader(index, phase_step, rollback)
            assert self._loader is not None
            for _, step in zip(range(phase_step, self._config.phases[index].steps), self._loader, strict=False):
                self._steps += 1
                yield step.to(self._device)
            phase_step = 0

    def skip(self, step: int, failed: int, skipped: dict[str, Any]) -> dict[str, Any]:
        previous = Rollback(**skipped) if skipped else None
        return asdict(make_rollback(self._shards, self._config, step, failed, previous))

    def largest_step(self) -> StepBatch:
        lengths = largest_lengths(self._config, self._engine.world_size)
        batch = make_full_batch(self._config, lengths, self._shards.vocabulary_size)
        if self._config.engine.cuda_graphs is True:
            batch = with_filler(batch, max(lengths))
        step = StepBatch(
            (batch,), len(lengths), sum(lengths), batch.targets, epoch=0, first_sample=0, labeled=len(lengths)
        )
        return step.to(self._device)

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        return self._objective.loss_weights(step)

    def loss(self, output: Any, weights: Sequence[float] | Tensor) -> Tensor:
        return self._objective.loss(output, weights)

    def totals(self, output: Any) -> Tensor:
        return self._objective.totals(output)

    def counts(self, step: StepBatch) -> Tensor:
        return torch.tensor(self._objective.counts(step), dtype=torch.float64)

    def flops(self, micro_batch: MicroBatch) -> float:
        return self._objective.model_flops(micro_batch.real_lengths, micro_batch.targets)

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        return self._objective.means(totals, counts)

    def evaluate(self, engine: Engine) -> dict[str, float]:
        means = self._means(engine, self._validation[self._phase])
        general_means = self._means(engine, self._general_validation.get(self._phase, []))
        if self._history is not None:
            # Only rank 0 records; the other ranks contribute their parts of the weights.
            with self._engine.whole_parameters() as parameters:
                if self._engine.rank == 0:
                    self._history.record(self._steps, parameters, self._config.model_in(self._phase))
        return {**means, **{f"general_{name}": value for name, value in general_means.items()}} if means else {}

    def _means(self, engine: Engine, steps: list[StepBatch]) -> dict[str, float]:
        """Return the means over held-out batches, and the losses of several sources; {} without batches."""
        if not steps:
            return {}
        sources = list(dict.fromkeys(step.text for step in steps))
        sums: list[Tensor] = []  # of each source; they stay on the device, so that nothing waits for it
        counts: list[Tensor] = []
        for source in sources:
            own_steps = [step for step in steps if step.text == source]
            outputs = ((engine.forward(mb.to(self._device)), step) for step in own_steps for mb in step.micro_batches)
            sums.append(torch.stack([self.totals(output).double() / step.copies for output, step in outputs]).sum(0))
            counts.append(torch.stack([self.counts(step) / step.copies for step in own_steps]).sum(0))
        totals = torch.stack(sums)
        engine.workers.sum_over_workers(totals)
        total_counts = torch.stack(counts).sum(0).tolist()
        if not total_counts[0]:
            return {}
        means = self.metrics(totals.sum(0).tolist(), total_counts)
        if len(sources) > 1:
            for source, source_totals, source_counts in zip(sources, totals.tolist(), counts, strict=True):
                means[f"{SOURCE_LOSS}{source}"] = self.metrics(source_totals, source_counts.tolist())["loss"]
        return means

    def to_minimize(self, means: dict[str, float]) -> float:
        return means["loss"]

    def validation_set(self) -> str:
        return f"phase {self._phase}" + (f", corpus grown {counted(self._growths, 'time')}" if self._growths else "")

    def stalled_seconds(self) -> float:
        return self._stalled_before + (self._loader.stall_seconds if self._loader else 0.0)

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._exchange is not None:
            self._exchange.close()
        self._shards.close()

    def _set_rotary_bases(self) -> None:
        """Set the RoPE bases of the phase in the model, and select the CUDA graphs that were recorded with them."""
        phase = self._config.phases[self._phase]
        self._engine.variant = phase.rotary_base, phase.local_rotary_base
        model = self._config.model_in(self._phase)
        for module in self._engine.module.modules():
            if isinstance(module, Encoder):
                module.use_rotary_bases(model.rotary_base, model.local_rotary_base)

    def open_loader(self, phase: int, start_step: int, rollback: Rollback | None) -> None:
        """Open the loader at step `start_step` of the phase; `rollback` is passed to `Loader`."""
        if self._loader is not None:
            self._stalled_before += self._loader.stall_seconds
            self._loader.close()
        self._phase = phase
        self._set_rotary_bases()
        started_at = time.perf_counter()
        self._loader = Loader(
            self._shards,
            self._config,
            phase,
            rank=self._engine.rank,
            world_size=self._engine.world_size,
            start_step=start_step,
            rollback=rollback,
            pin_memory=self._device.type == "cuda",
            machines=self._machines,
            exchange=self._exchange,
        )
        self._stalled_before += time.perf_counter() - started_at


def check_state(
    state: dict[str, Any],
    checkpoint: Path,
    config: PretrainConfig,
    shards: TokenShards,
    mixtures: Sequence[list[list[Any]]],
) -> None:
    """Raise `InputError` unless a run with this config can continue from a checkpoint with this state."""
    if state.get("sampler") != SAMPLER_VERSION:  # which determines the order of the samples
        raise InputError(version_mismatch(checkpoint, "Train again."))
    _check_mixtures(state, checkpoint, config, shards, mixtures)
    check_settings(state, checkpoint, config, forbidden_changes)
    if state["step"] > config.total_steps:
        raise InputError(
            f"{checkpoint}: is at step {state['step']}, past the {config.total_steps} steps of the config's phases."
        )


def _check_mixtures(
    state: dict[str, Any],
    checkpoint: Path,
    config: PretrainConfig,
    shards: TokenShards,
    mixtures: Sequence[list[list[Any]]],
) -> None:
    """Raise `InputError` if the config changes the text of started phases. The corpus may have new sources."""
    available = {shards.source_fingerprint(index) for index in range(len(shards.sources))}
    for phase, old in zip(_started_phases(config, state["step"]), state["mixtures"], strict=False):
        if difference := _mixture_difference(old, mixtures[phase], phase, available):
            raise InputError(f"{checkpoint}: {difference}")


def _started_phases(config: PretrainConfig, step: int) -> range:
    """Return the indices of the phases that have started after `step` steps."""
    if step >= config.total_steps:
        return range(len(config.phases))
    index, step_in_phase = config.phase_at(step)
    return range(index + (step_in_phase > 0))


def _mixture_difference(old: list[list[Any]], new: list[list[Any]], phase: int, available: set[str]) -> str:
    """Describe how the data of a started phase has changed; "" if it has not.

    `old` and `new` are values of `Sampler.identity`; `available` are the fingerprints of the corpus's sources.
    """
    if old == new:
        return ""
    where, new_names = f"phases.{phase}", {fingerprint: name for name, fingerprint, _ in new}
    old_names = {fingerprint: name for name, fingerprint, _ in old}
    added = [name for fingerprint, name in new_names.items() if fingerprint not in old_names]
    if lost := [name for fingerprint, name in old_names.items() if fingerprint not in available]:
        return (
            f"has read {' and '.join(lost)} in {where}, which is missing or changed in the corpus. Restore the "
            "corpus, or start a new run."
        )
    if omitted := [name for fingerprint, name in old_names.items() if fingerprint not in new_names]:
        return (
            f"has read {' and '.join(omitted)} in {where}, which now has no weight there. Restore it; later phases may "
            "omit it."
        )
    if added:
        zero = ", ".join(f"{name}: 0" for name in added)
        return (
            f"has not read {' and '.join(added)} in {where}, which has started. Set {where}.weights: {{{zero}}}; later "
            "phases may read it."
        )
    return (
        f"has read the sources of {where} in different shares than its weights, temperature and max_epochs now give. "
        "Restore them (and the steps, if max_epochs limits a source), or end the phase here and change the next."
    )


def largest_lengths(config: PretrainConfig, workers: int) -> list[int]:
    """Return the sequence lengths of the largest micro-batch: the maximum, and a shorter one for the remainder."""
    longest = max(phase.sequence_length for phase in config.phases)
    count, rest = divmod(micro_batch_tokens(config, workers), longest)
    return [*([rest] if rest > 2 else []), *[longest] * count]  # two tokens, both special, leave nothing to mask


def make_full_batch(config: PretrainConfig, lengths: list[int], vocabulary_size: int) -> MicroBatch:
    """Return a micro-batch of random tokens: sequences of these lengths, with as many masked tokens as possible."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    masked = [max(1, min(round(config.largest_masking_share * length), length - 2)) for length in lengths]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    positions = [start + 1 + i for start, count in zip(starts, masked, strict=True) for i in range(count)]
    return MicroBatch(
        input_ids=torch.randint(vocabulary_size, (tokens,), generator=generator),
        token_types=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([*starts, tokens], dtype=torch.int32),
        masked_rows=torch.tensor(positions),
        masked_labels=torch.zeros(len(positions), dtype=torch.int64),
        nsp_labels=torch.zeros(len(lengths) if config.pairs.has_classifier else 0, dtype=torch.int64),
        token_keys=torch.randint(-(2**31), 2**31 - 1, (tokens,), generator=generator).int(),
        lengths=tuple(lengths),
    )
