"""The trainers that the step benchmarks compare: bertrain's engine and its baselines, with one interface.

The baselines are transformers' BERT in several variants, and this project's model in a plain torch loop.
Each trainer runs in a separate process, so that the settings of one process do not affect another; for example, our
engine keeps freed memory. Only one trainer works at a time.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.batches.loader import Loader
from pretrain.common.errors import InputError
from pretrain.common.memory import hold_freed_memory
from pretrain.common.setting_errors import first_problem
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.model.heads import PretrainingModel
from pretrain.model.precision import resolve_local_precision, torch_dtype
from pretrain.training.optim import make_optimizer, parameter_groups
from tests.distributed import engine_of, of_whole_tensors

OURS = "ours"
# Variants of transformers, with or without torch.compile. Which is fastest depends on the machine.
BASELINES = ("sdpa", "sdpa-compiled")
BARE = "bare"  # our model and batches in a plain torch loop, which shows the overhead of the engine
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # torch device type


@dataclass(frozen=True)
class TrainerSpec:
    """Describes one trainer."""

    kind: str  # `OURS`, `BARE` or one of `BASELINES`
    config: PretrainConfig  # config of the run that it trains
    steps: int = 0  # number of batches to make before training starts; 0: make each batch when it is needed


def bench_config(
    corpus: str, size: str, length: int, sequences: int, *, precision: str = "auto", **model: Any
) -> PretrainConfig:
    """Return the config of a run without end, with `sequences` per step in one micro-batch.

    `model` has further settings of the section model. The precision is resolved for this machine; the baselines use
    the same one. Only BERT predicts the next sentence. Raises `InputError` if the options are invalid.
    """
    phase = {"sequence_length": length, "global_sequences": sequences, "steps": 10**9, "peak_learning_rate": 1e-4}
    config = validated(
        {
            "name": "bench",
            "corpus": {"dir": corpus},
            "model": {"size": size, **model},
            "pairs": {"objective": "nsp" if model.get("family", "bert") == "bert" else "none"},
            "phases": [phase],
            "engine": {"zero_stage": 1, "micro_batch_tokens": sequences * length, "precision": precision},
        }
    )
    return resolve_local_precision(config)[0]


def validated(values: dict[str, Any]) -> PretrainConfig:
    """Return the config of a benchmark. Raises `InputError` if its options are invalid."""
    try:
        return PretrainConfig.model_validate(values)
    except ValidationError as error:
        raise InputError(f"bench: {first_problem(error)}.") from None


class StepReport(NamedTuple):
    """Measurements of one training step."""

    seconds: float  # time of training, without making the batch
    tokens: int  # number of tokens without padding
    loss: float


class TrainerProcess:
    """A process that trains the steps of an epoch in order, one per call; its errors are raised by the calls."""

    def __init__(self, spec: TrainerSpec) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(spec, child_end), daemon=True)
        self._process.start()
        child_end.close()

    def train(self, learning_rate: float) -> StepReport:
        """Train the next step of the epoch."""
        return self._call("train", learning_rate)

    def close(self) -> None:
        """End the process and wait for it."""
        self._connection.close()
        self._process.join()

    def _call(self, *call: Any) -> Any:
        self._connection.send(call)
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a trainer's process exited with code {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(spec: TrainerSpec, connection: Any) -> None:
    try:
        trainer = _Worker(spec)
        while True:
            method, *arguments = connection.recv()
            connection.send(getattr(trainer, method)(*arguments))
    except EOFError:
        return  # the parent closed the connection
    except Exception as error:
        connection.send(error)


class _Worker:
    """Runs one trainer inside the process of `TrainerProcess`."""

    def __init__(self, spec: TrainerSpec) -> None:
        torch.manual_seed(0)
        self._device = torch.device(DEVICE)
        shards = open_shards(spec.config.corpus.folder, "train")
        loader = Loader(shards, spec.config, 0, rank=0, world_size=1)
        self._steps: Iterator[StepBatch] = iter(loader)
        if spec.steps:
            self._steps = iter([next(loader).to(self._device) for _ in range(spec.steps)])
            loader.close()
        if spec.kind == OURS:
            join_single_process_group(self._device)
            self._trainer = EngineTrainer(spec.config, shards.vocabulary_size)
        elif spec.kind == BARE:
            self._trainer = PlainLoopTrainer(spec.config, shards.vocabulary_size, self._device)
        else:
            self._trainer = TransformersTrainer(spec.config, shards.vocabulary_size, self._device, spec.kind)

    def train(self, learning_rate: float) -> StepReport:
        step = next(self._steps).to(self._device)
        prepared = self._trainer.prepare(step) if isinstance(self._trainer, TransformersTrainer) else step
        self._synchronize()
        started = time.perf_counter()
        loss = self._trainer.train(prepared, learning_rate)  # pyright: ignore[reportArgumentType]
        self._synchronize()
        return StepReport(time.perf_counter() - started, step.tokens, loss)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def join_single_process_group(device: torch.device) -> None:
    """Initialize a process group of this process only; DeepSpeed requires one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]


class EngineTrainer:
    """This project's engine on one worker."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        model = PretrainingModel(
            config.model, vocabulary_size, config.pairs.has_classifier, compile=config.engine.compiled
        )
        self._engine = engine_of(model, config.optimizer, config.weight_decay(0), **config.engine.model_dump())
        self._engine.module.train()

    def train(self, step: StepBatch, learning_rate: float) -> float:
        """Run one optimizer step, and return its loss."""
        total = 0.0
        for number, batch in enumerate(step.micro_batches):
            output = self._engine.forward(batch)
            loss = output.mlm_loss / step.masked + output.nsp_loss / step.sequences
            self._engine.backward(loss, last=number == len(step.micro_batches) - 1)
            total += loss.item()
        self._engine.step(learning_rate)
        return total


class PlainLoopTrainer:
    """This project's model in a plain torch loop: low-precision weights, fp32 master weights, clipping, fused AdamW."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int, device: torch.device) -> None:
        hold_freed_memory()
        model = PretrainingModel(
            config.model, vocabulary_size, config.pairs.has_classifier, compile=config.engine.compiled
        ).to(device)
        groups = parameter_groups(model.named_parameters(), config.weight_decay(0))
        for group in groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        self._masters = [p for group in groups for p in group["params"]]
        self._optimizer = of_whole_tensors(make_optimizer(config.optimizer, groups))
        self._model = model.to(torch_dtype(config.engine.precision))
        named = dict(model.named_parameters())
        self._weights = [named[name] for group in groups for name in group["names"]]

    def train(self, step: StepBatch, learning_rate: float) -> float:
        """Run one optimizer step, and return its loss."""
        total = 0.0
        for batch in step.micro_batches:
            output = self._model(batch)
            loss = output.mlm_loss / step.masked + output.nsp_loss / step.sequences
            loss.backward()
            total += loss.item()
        for master, weight in zip(self._masters, self._weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        return total


class TransformersTrainer:
    """transformers with autocast to the config's precision and fused AdamW, padded to the batch's longest sequence."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int, device: torch.device, kind: str) -> None:
        self._device, dtype = device, torch_dtype(config.engine.precision)
        self._autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not torch.float32)
        self._model = _their_model(config, vocabulary_size).to(device)
        self._model.train()
        self._forward = torch.compile(self._model, dynamic=True) if kind.endswith("compiled") else self._model
        settings = config.optimizer
        self._optimizer = torch.optim.AdamW(
            hf_parameter_groups(self._model, settings.weight_decay),
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

    def prepare(self, step: StepBatch) -> list[dict[str, Tensor]]:
        """Return the step's micro-batches with padding; not timed."""
        return [pad(batch) for batch in step.micro_batches]

    def train(self, step: list[dict[str, Tensor]], learning_rate: float) -> float:
        """Run one optimizer step, and return its loss."""
        total = 0.0
        for batch in step:
            with self._autocast():
                loss = self._forward(**batch).loss / len(step)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total


def _their_model(config: PretrainConfig, vocabulary_size: int) -> Any:
    """Return transformers' BERT with our model section's sizes, random weights and the heads of both losses."""
    import transformers

    shape = config.model
    values: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_positions,
        "attn_implementation": "sdpa",
    }
    values |= {"hidden_dropout_prob": shape.hidden_dropout, "attention_probs_dropout_prob": shape.attention_dropout}
    return transformers.BertForPreTraining(transformers.BertConfig(**values))


def hf_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return parameter groups without weight decay for biases and LayerNorm, as in the HF Trainer."""
    groups = {True: [], False: []}  # {is exempt: parameters}
    for parameter in model.parameters():
        groups[parameter.ndim < 2].append(parameter)
    return [{"params": groups[False], "weight_decay": weight_decay}, {"params": groups[True], "weight_decay": 0.0}]


def pad(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the arguments of transformers' model: tensors [sequences, longest], label -100 at unmasked tokens."""
    sequences, longest = len(batch.lengths), max(batch.lengths)
    device = batch.input_ids.device
    lengths = torch.tensor(batch.lengths, device=device)
    is_token = torch.arange(longest, device=device) < lengths[:, None]
    labels_T = torch.full_like(batch.input_ids, -100)
    labels_T[batch.masked_rows] = batch.masked_labels
    padded = {}
    for name, values, filler in (
        ("input_ids", batch.input_ids, 0),
        ("token_type_ids", batch.token_types, 0),
        ("labels", labels_T, -100),
    ):
        padded[name] = torch.full((sequences, longest), filler, device=device).masked_scatter(is_token, values)
    return {**padded, "attention_mask": is_token.long(), "next_sentence_label": batch.nsp_labels}
