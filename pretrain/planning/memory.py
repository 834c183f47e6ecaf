"""Computes the peak memory of a worker for each ZeRO stage, by arithmetic alone."""

from typing import Literal

from pretrain.config import PretrainConfig
from pretrain.model import cost
from pretrain.model.parameters import total
from pretrain.objectives import make_objective
from pretrain.planning.work import read_frozen_config, vocabulary_rows

Device = Literal["cpu", "cuda"]

# With ZeRO 0, DeepSpeed 0.19.8 reduces gradients in flattened copies of at most this many entries (runtime/engine.py,
# MEMORY_OPT_ALLREDUCE_SIZE). The buckets of ZeRO 1 to 3 are defined in training/engine/buckets.py, and their number in
# flight in gradient_sums.py.
_WHOLE_BUCKET = 500_000_000
BUCKET, MAX_IN_FLIGHT = 10_000_000, 8  # entries of a bucket; maximum number of buckets sent simultaneously
# ZeRO 3 keeps gathered weights up to this number (stage3_max_live_parameters, by default 1e9).
_MAX_LIVE_PARAMETERS = 1_000_000_000
# Resident set of a CPU worker without the model: Python, torch, DeepSpeed, Ray and their threads (measured).
_PROCESS_BYTES = 450 << 20
_COMPILER_BYTES = 200 << 20  # memory added by torch.compile


def memory_bytes(config: PretrainConfig, stage: int, workers: int, device: Device = "cpu") -> dict[str, int]:
    """Return the peak memory of one worker in bytes, by use; the values add up to the total.

    On CUDA this is the memory that torch allocates. Tensors that are not needed simultaneously share memory:
    activations are freed before the optimizer steps. On CPU it is the resident set of the process, which keeps freed
    memory and cannot always reuse it, so activations and the copies of the step are added.

    weights       the weights that the model computes with: all of them, or a shard and the gathered ones (ZeRO 3)
    optimizer     fp32 master weights, the optimizer's moments, and averaged weights if configured
    gradients     gradient sums, from the first micro-batch to the step; fp32 in ZeRO 1 to 3, sharded in ZeRO 2 and 3
    activations   tensors saved for the backward pass of one micro-batch, and the working space of one layer
    logits        logits of the masked tokens and their gradient; like activations, twice with CUDA graphs
    (a role)      the frozen model: its weights, and the working space of its forward pass
    copies        gradients in communication, and DeepSpeed's copies in a step
    checkpoint    the copy that is written in the background (CPU only; with CUDA it is in host memory)
    process       the Python interpreter and its libraries (CPU only)
    """
    vocabulary_size = vocabulary_rows(config)
    objective = make_objective(config, vocabulary_size)
    parameters, role = objective.trained, objective.frozen_role
    is_half = config.engine.precision != "fp32"
    activations, logits = _micro_batch_bytes(config, vocabulary_size, workers, device)
    # The tied embedding has two gradients: the decoder's, and the look-up's, which is summed in fp32. The latter is
    # computed at the end of the backward pass, when activations are freed.
    embedding_gradients = (6 if is_half else 12) * vocabulary_size * (config.model.embedding or config.model.hidden)
    states, during_backward, after_backward = _zero_states(stage, is_half, parameters, workers)
    extra_state = _extra_state_bytes(config, parameters)
    states["optimizer"] += extra_state // (workers if stage else 1)
    if device == "cuda":
        late_copies = max(after_backward - during_backward, embedding_gradients)  # reuse freed activations and logits
        copies = during_backward + max(0, late_copies - activations - logits)
        if config.engine.cuda_graphs is True:  # recordings keep their memory, and launched passes cannot use it
            activations, logits = 2 * activations, 2 * logits
    else:
        copies = max(during_backward + embedding_gradients, after_backward)
    return {
        **states,
        "activations": activations,
        "logits": logits,
        **({role: _frozen_bytes(config, vocabulary_size, workers)} if role else {}),
        "copies": copies,
        "checkpoint": (12 * parameters + extra_state) // workers if device == "cpu" else 0,
        "process": _PROCESS_BYTES + config.engine.compiled * _COMPILER_BYTES if device == "cpu" else 0,
    }


def _frozen_bytes(config: PretrainConfig, vocabulary_size: int, workers: int) -> int:
    """Return the bytes of the frozen model, which every worker stores whole, and of its forward pass's workspace."""
    frozen = read_frozen_config(config)
    if frozen is None:
        return 0
    itemsize = 4 if config.engine.precision == "fp32" else 2
    tokens = micro_batch_tokens(config, workers)
    logits = min(round(config.largest_masking_share * tokens) * vocabulary_size, cost.LOGITS_PER_CHUNK)
    weights = cost.parameter_count(frozen, vocabulary_size, next_sentence=False).total
    return itemsize * (weights + logits) + cost.working_bytes(frozen, tokens, itemsize)


def _extra_state_bytes(config: PretrainConfig, parameters: int) -> int:
    """Return the bytes of optimizer state over all workers, beyond AdamW's; negative for Muon, which needs less."""
    averages = 4 * parameters if any(phase.averaged_share for phase in config.phases) else 0
    matrices = sum(total(cost.hidden_matrices(shape)) for shape in make_objective(config).shapes)
    return averages - (4 * matrices if config.optimizer.name == "muon" else 0)


def _zero_states(stage: int, is_half: bool, parameters: int, workers: int) -> tuple[dict[str, int], int, int]:
    """Return the memory of the engine's state with DeepSpeed 0.19.8, and of the largest temporary copies.

    Args:
        stage: the ZeRO stage.
        is_half: whether the precision is bf16 or fp16.
        parameters: number of trained parameters.
        workers: number of workers.

    Returns:
        (bytes by use, bytes of copies during the backward pass, bytes of copies after it).
    """
    itemsize = 2 if is_half else 4  # bytes of a weight in the forward pass, and of its gradient
    weights = itemsize * parameters
    if stage == 0:
        # FP16_UnfusedOptimizer: one flattened copy to reduce, then an fp32 copy of all gradients to step with.
        states = {"weights": weights, "optimizer": (12 if is_half else 8) * parameters, "gradients": weights}
        return states, 0, max(itemsize * min(parameters, _WHOLE_BUCKET), 4 * parameters if is_half else 0)
    entries = min(parameters, BUCKET)
    bucket = itemsize * entries
    if stage < 3:
        # Pieces that are being sent, and this worker's part of each, which is being received.
        sent_bytes = itemsize * min(parameters, MAX_IN_FLIGHT * BUCKET)
        in_flight = sent_bytes + sent_bytes // workers if workers > 1 else 0
        states = {"weights": weights, "optimizer": 12 * parameters // workers, "gradients": 4 * parameters}
        if stage == 1 or workers == 1:
            return states, in_flight, 0
        # Unsharded gradients exist only in two incomplete buckets: a layer's, and the one of all biases and norms.
        return {**states, "gradients": 4 * parameters // workers}, in_flight + 2 * bucket, 0
    # The bucket stays allocated, and reducing it in the backward pass takes two copies. The step reads gradients from
    # one flat copy.
    states = {
        "weights": weights // workers + itemsize * min(parameters, _MAX_LIVE_PARAMETERS),
        "optimizer": 12 * parameters // workers,
        "gradients": 4 * parameters // workers + bucket,
    }
    return states, 2 * bucket, 4 * parameters // workers


def micro_batch_tokens(config: PretrainConfig, workers: int) -> int:
    """Return the number of tokens of a worker's largest micro-batch: the budget, or its share of a batch if less."""
    shares = (-(-phase.global_sequences // workers) * phase.sequence_length for phase in config.phases)
    return min(config.engine.micro_batch_tokens, max(shares))


def _micro_batch_bytes(config: PretrainConfig, vocabulary_size: int, workers: int, device: Device) -> tuple[int, int]:
    """Return (activations, logits) in bytes of a worker's largest possible micro-batch."""
    engine, tokens = config.engine, micro_batch_tokens(config, workers)
    masked = round(config.largest_masking_share * tokens)
    objective, longest = make_objective(config), max(phase.sequence_length for phase in config.phases)
    itemsize = 4 if engine.precision == "fp32" else 2
    activations = sum(
        cost.activation_bytes(
            model,
            tokens,
            round(rows),
            itemsize=itemsize,
            compiled=engine.compiled,
            checkpointing=engine.activation_checkpointing,
            native=device == "cpu",
        )
        for model, rows in zip(objective.shapes, objective.last_rows(tokens, tokens // longest, masked), strict=True)
    )
    logits = cost.logits_bytes(config.model, vocabulary_size, masked, itemsize=itemsize, compiled=engine.compiled)
    return activations, logits
