"""Who is compared: our engine, and transformers' BertForPreTraining in several kinds, behind the same calls.

Each contestant lives in a process of its own, as its user would run it: what one does to the process (our engine
holds on to freed memory) neither helps nor harms the other. Only one of them works at a time.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.batches.loader import Loader, MicroBatch, StepBatch, validation_batches
from pretrain.common.memory import hold_freed_memory
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.model.heads import PretrainingModel
from pretrain.model.precision import settle_here, torch_dtype
from pretrain.training.engine import Engine
from pretrain.training.optim import make_optimizer, parameter_groups

OURS = "ours"
# Kinds of the peer: its attention, and whether torch.compile fuses it. Which is fastest depends on the machine.
PEERS = ("sdpa", "eager", "sdpa-compiled", "eager-compiled")
BARE = "bare"  # our model and batches in a plain torch loop: what the engine costs


@dataclass(frozen=True)
class Entry:
    """What a contestant is given."""

    kind: str  # OURS, BARE or one of PEERS
    config: PretrainConfig
    device: str = "cpu"
    threads: int = 0  # CPU threads; 0 leaves torch's default
    steps: int = 0  # made before the first one is trained; 0 makes each when its turn comes


def bench_config(
    corpus: str, size: str, length: int, sequences: int, *, rate: float = 1e-4, precision: str = "auto", **model: Any
) -> PretrainConfig:
    """A run without end of `sequences` a step, each step one micro-batch; `model` adds to its section.

    Its precision is settled for this machine, and is also that of those it is compared with.
    """
    phase = {
        "sequence_length": length,
        "global_sequences": sequences,
        "steps": 1 << 30,
        "peak_learning_rate": rate,
    }
    config = PretrainConfig.model_validate(
        {
            "name": "bench",
            "corpus": {"dir": corpus},
            "model": {"size": size, **model},
            "phases": [phase],
            "engine": {"zero_stage": 1, "micro_batch_tokens": sequences * length, "precision": precision},
            "evaluation": {"sequences": 512},
        }
    )
    return settle_here(config)[0]


class StepReport(NamedTuple):
    """One trained step."""

    seconds: float  # of the training alone
    tokens: int  # without padding
    loss: float


class Contestant:
    """A process that trains the steps of an epoch in order, one at each call; raises what went wrong there."""

    def __init__(self, entry: Entry) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(entry, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def train(self, learning_rate: float) -> StepReport:
        """Train the next step of the epoch."""
        return self._ask("train", learning_rate)

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the held-out masked tokens in nats, without dropout."""
        return self._ask("held_out_loss")

    def close(self) -> None:
        self._connection.close()
        self._process.join()

    def _ask(self, *call: Any) -> Any:
        self._connection.send(call)
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a contestant's process ended with code {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(entry: Entry, connection: Any) -> None:
    try:
        trainer = _Trainer(entry)
        while True:
            method, *arguments = connection.recv()
            connection.send(getattr(trainer, method)(*arguments))
    except EOFError:
        return  # the other side is done
    except Exception as error:
        connection.send(error)


class _Trainer:
    """The contestant's side of `Contestant`."""

    def __init__(self, entry: Entry) -> None:
        if entry.threads:
            torch.set_num_threads(entry.threads)
        torch.manual_seed(0)
        self._entry, self._device = entry, torch.device(entry.device)
        shards = open_shards(Path(entry.config.corpus.dir), "train")
        loader = Loader(shards, entry.config, 0, rank=0, world_size=1)
        self._steps: Iterator[StepBatch] = iter(loader)
        if entry.steps:
            self._steps = iter([next(loader).to(self._device) for _ in range(entry.steps)])
            loader.close()
        if entry.kind == OURS:
            alone(self._device)
            self._model = Ours(entry.config, shards.vocabulary_size)
        elif entry.kind == BARE:
            self._model = Bare(entry.config, shards.vocabulary_size, self._device)
        else:
            self._model = Peer(entry.config, shards.vocabulary_size, self._device, entry.kind)

    def train(self, learning_rate: float) -> StepReport:
        step = next(self._steps).to(self._device)
        ready = self._model.ready(step)
        self._synchronise()
        began = time.perf_counter()
        loss = self._model.train(ready, learning_rate)  # pyright: ignore[reportArgumentType]
        self._synchronise()
        return StepReport(time.perf_counter() - began, step.tokens, loss)

    def held_out_loss(self) -> float:
        held_out = open_shards(Path(self._entry.config.corpus.dir), "validation")
        steps = validation_batches(held_out, self._entry.config, 0, rank=0, world_size=1)
        return self._model.held_out_loss([step.to(self._device) for step in steps])

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def alone(device: torch.device) -> None:
    """A process group of this process, which DeepSpeed wants."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportAttributeAccessIssue]


class Ours:
    """The product's engine on one worker."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int) -> None:
        optimizer = config.optimizer
        self._engine = Engine(
            PretrainingModel(config.model, vocabulary_size, compile=config.engine.compile),
            lambda named: make_optimizer(optimizer, parameter_groups(named, optimizer.weight_decay)),
            config.engine,
        )
        self._engine.module.train()

    def ready(self, step: StepBatch) -> StepBatch:
        """The step as `train` takes it; not timed."""
        return step

    def train(self, step: StepBatch, learning_rate: float) -> float:
        """One optimizer step; returns its loss."""
        total = 0.0
        for number, batch in enumerate(step.micro_batches):
            output = self._engine.forward(batch)
            loss = output.mlm_loss / step.masked + output.nsp_loss / step.sequences
            self._engine.backward(loss, last=number == len(step.micro_batches) - 1)
            total += loss.item()
        self._engine.step(learning_rate)
        return total

    def held_out_loss(self, steps: list[StepBatch]) -> float:
        """Mean cross-entropy of the masked tokens in nats, without dropout."""
        return _held_out_loss(self._engine.module, steps)


class Bare:
    """Our model in a loop of torch alone: rounded weights, fp32 masters, clipping and fused AdamW; no DeepSpeed."""

    def __init__(self, config: PretrainConfig, vocabulary_size: int, device: torch.device) -> None:
        hold_freed_memory()
        model = PretrainingModel(config.model, vocabulary_size, compile=config.engine.compile).to(device)
        groups = parameter_groups(model.named_parameters(), config.optimizer.weight_decay)
        for group in groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
        self._masters = [p for group in groups for p in group["params"]]
        self._optimizer = make_optimizer(config.optimizer, groups)
        self._model = model.to(torch_dtype(config.engine.precision))
        named = dict(model.named_parameters())
        self._weights = [named[name] for group in groups for name in group["names"]]

    def ready(self, step: StepBatch) -> StepBatch:
        """The step as `train` takes it; not timed."""
        return step

    def train(self, step: StepBatch, learning_rate: float) -> float:
        """One optimizer step; returns its loss."""
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

    def held_out_loss(self, steps: list[StepBatch]) -> float:
        """Mean cross-entropy of the masked tokens in nats, without dropout."""
        return _held_out_loss(self._model, steps)


def _held_out_loss(model: nn.Module, steps: list[StepBatch]) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(model(batch).mlm_loss.item() for step in steps for batch in step.micro_batches)
    model.train()
    return total / sum(step.masked for step in steps)


class Peer:
    """transformers: autocast to the config's precision, fused AdamW, padded to the longest of the batch.

    Args:
        kind: its attention, "eager" or "sdpa", and "-compiled" behind it for torch.compile. Which is the fastest
            depends on the machine.
    """

    def __init__(self, config: PretrainConfig, vocabulary_size: int, device: torch.device, kind: str) -> None:
        attention, _, compiled = kind.partition("-")
        import transformers

        shape = config.model
        self._device, dtype = device, torch_dtype(config.engine.precision)
        self._autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not torch.float32)
        self._model = transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=vocabulary_size,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                intermediate_size=shape.intermediate,
                max_position_embeddings=shape.max_positions,
                hidden_dropout_prob=shape.hidden_dropout,
                attention_probs_dropout_prob=shape.attention_dropout,
                attn_implementation=attention,  # pyright: ignore[reportCallIssue]
            )
        ).to(device)  # pyright: ignore[reportArgumentType]
        self._model.train()
        self._forward = torch.compile(self._model, dynamic=True) if compiled else self._model
        choice = config.optimizer
        self._optimizer = torch.optim.AdamW(
            parameter_groups_of_peer(self._model, choice.weight_decay),
            lr=0.0,
            betas=(choice.beta1, choice.beta2),
            eps=choice.epsilon,
            fused=True,
        )

    def ready(self, step: StepBatch) -> list[dict[str, Tensor]]:
        """The step's micro-batches, padded; not timed."""
        return [pad(batch) for batch in step.micro_batches]

    def train(self, step: list[dict[str, Tensor]], learning_rate: float) -> float:
        """One optimizer step; returns its loss."""
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

    def held_out_loss(self, steps: list[StepBatch]) -> float:
        """Mean cross-entropy of the masked tokens in nats, without dropout."""
        self._model.eval()
        total = 0.0
        with torch.no_grad(), self._autocast():
            for batch in (batch for step in steps for batch in step.micro_batches):
                inputs = pad(batch)
                labels = inputs.pop("labels")
                logits = self._model(**inputs).prediction_logits
                total += nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
                ).item()
        self._model.train()
        return total / sum(step.masked for step in steps)


def parameter_groups_of_peer(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """No decay for biases and LayerNorm, as the HF Trainer has it."""
    exempt = {True: [], False: []}
    for parameter in model.parameters():
        exempt[parameter.ndim < 2].append(parameter)
    return [
        {"params": exempt[False], "weight_decay": weight_decay},
        {"params": exempt[True], "weight_decay": 0.0},
    ]


def pad(batch: MicroBatch) -> dict[str, Tensor]:
    """The micro-batch as transformers wants it: [sequences, longest], labels -100 where nothing is predicted."""
    sequences, longest = len(batch.lengths), max(batch.lengths)
    device = batch.input_ids.device
    lengths = torch.tensor(batch.lengths, device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    labels_T = torch.full_like(batch.input_ids, -100)
    labels_T[batch.masked_rows] = batch.masked_labels
    padded = {}
    for name, values, filler in (
        ("input_ids", batch.input_ids, 0),
        ("token_type_ids", batch.token_types, 0),
        ("labels", labels_T, -100),
    ):
        padded[name] = torch.full((sequences, longest), filler, device=device).masked_scatter(real, values)
    return {**padded, "attention_mask": real.long(), "next_sentence_label": batch.nsp_labels}
