"""The two who are compared: our engine and transformers' BertForPreTraining, behind the same two calls."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.batches.loader import MicroBatch, StepBatch
from pretrain.config import RunConfig
from pretrain.engine import Engine
from pretrain.model.heads import PretrainingModel
from pretrain.optim import make_optimizer, parameter_groups


def alone(device: torch.device) -> None:
    """A process group of this process, which DeepSpeed wants."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportAttributeAccessIssue]


class Ours:
    """The product's engine on one worker."""

    def __init__(self, config: RunConfig, vocabulary_size: int) -> None:
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
        self._engine.module.eval()
        with torch.no_grad():
            total = sum(
                self._engine.forward(batch).mlm_loss.item() for step in steps for batch in step.micro_batches
            )
        self._engine.module.train()
        return total / sum(step.masked for step in steps)


class Peer:
    """transformers: autocast to bf16, fused AdamW, padded to the longest of the batch.

    Args:
        kind: its attention, "eager" or "sdpa", and "-compiled" behind it for torch.compile. Which is the fastest
            depends on the machine.
    """

    def __init__(self, config: RunConfig, vocabulary_size: int, device: torch.device, kind: str) -> None:
        attention, _, compiled = kind.partition("-")
        import transformers

        shape = config.model
        self._device = device
        self._model = transformers.BertForPreTraining(
            transformers.BertConfig(
                vocab_size=vocabulary_size, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, intermediate_size=shape.intermediate,
                max_position_embeddings=shape.max_positions, hidden_dropout_prob=shape.hidden_dropout,
                attention_probs_dropout_prob=shape.attention_dropout, attn_implementation=attention,  # pyright: ignore[reportCallIssue]
            )
        ).to(device)  # fmt: skip  # pyright: ignore[reportArgumentType]
        self._model.train()
        self._forward = torch.compile(self._model, dynamic=True) if compiled else self._model
        choice = config.optimizer
        self._optimizer = torch.optim.AdamW(
            parameter_groups_of_peer(self._model, choice.weight_decay), lr=0.0, betas=(choice.beta1, choice.beta2),
            eps=choice.epsilon, fused=True,
        )  # fmt: skip

    def ready(self, step: StepBatch) -> list[dict[str, Tensor]]:
        """The step's micro-batches, padded; not timed."""
        return [pad(batch) for batch in step.micro_batches]

    def train(self, step: list[dict[str, Tensor]], learning_rate: float) -> float:
        """One optimizer step; returns its loss."""
        total = 0.0
        for batch in step:
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
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
        with torch.no_grad(), torch.autocast(self._device.type, dtype=torch.bfloat16):
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
        ("input_ids", batch.input_ids, 0), ("token_type_ids", batch.token_types, 0), ("labels", labels_T, -100),
    ):  # fmt: skip
        padded[name] = torch.full((sequences, longest), filler, device=device).masked_scatter(real, values)
    return {**padded, "attention_mask": real.long(), "next_sentence_label": batch.nsp_labels}
