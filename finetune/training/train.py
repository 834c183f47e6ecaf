"""Fine-tunes on one worker: connects checkpoint, task, engine and training loop.

`main` is the same for a single process, torchrun and Ray (cluster/workers/launch.py).
"""

import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.tasks.base import Task, Windows, data_digest
from finetune.tasks.datasets.text import TextEncoder
from finetune.training.config import FinetuneConfig, forbidden_changes
from finetune.training.model.batches import Batches, LabeledBatch, LabeledStep
from finetune.training.model.inference import inference_model, predict_logits
from finetune.training.model.output_layer import fit_output_layer
from finetune.training.model.start import fits_output_layer, initial_state, is_short, read_start
from finetune.training.model.task_model import Output, TaskModel
from finetune.training.saved import MODEL, SetResult, save_model
from pretrain.checkpoint import store
from pretrain.checkpoint.released import ReleasedModel
from pretrain.checkpoint.start import digest
from pretrain.common.errors import InputError
from pretrain.common.files import checkpoint_names
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.config import ModelConfig
from pretrain.model.cost import encoder_flops
from pretrain.model.parameters import layer_of
from pretrain.run.loop import LONG_SECONDS
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import check_settings, read_state
from pretrain.run.run import Training, run
from pretrain.run.session import check_same_data, worker_session
from pretrain.training.engine import Engine, InitialWeights
from pretrain.training.optim import learning_rate, make_optimizer, parameter_groups

LAUNCHING = (TaskModel.__module__, f"{__name__}.loss", f"{__name__}.totals")  # code that only launches GPU kernels


def main(request: TrainingRequest, worker: Worker) -> None:
    """Train `request.config` (a FinetuneConfig); with `request.resume`, continue from the latest checkpoint.

    Writes the best model, its scores and predictions to the run folder, or raises an error of `pretrain.common.errors`.
    """
    config = FinetuneConfig.model_validate(request.config)
    with worker_session(config, worker, resume=request.resume, launching=LAUNCHING) as (config, device, watchdog):
        task = config.make_task()
        examples = task.training_set()
        released, encoder = read_start(config)
        if worker.world_size > 1:
            labels_digest = hashlib.sha256(json.dumps(task.labels).encode()).hexdigest()
            check_same_data({"start_from": digest(released.backbone), config.task_name: labels_digest})
        too_short = is_short(config, task, examples, encoder, released.model)
        model = make_model(uncompiled(config) if too_short else config, task, released, examples)
        weights = model.state_dict()
        needs_fit = fits_output_layer(config, task, released)
        engine = Engine(
            model,
            lambda params: make_optimizer(config.optimizer, layered_groups(config, params, released.model.layers)),
            config.engine,
            watchdog,
        )
        finetuning = Finetuning(config, task, examples, encoder, released.model, engine, device)
        config = finetuning.config
        # Rank 0 checks only whether a checkpoint exists; `run` verifies and reads it later.
        if needs_fit and not (request.resume and store.agree(engine.workers, lambda: checkpoint_names(config.folder))):
            weights |= finetuning.fitted_output_layer(released, weights)
        engine.load(InitialWeights(weights))
        del weights
        held_out_digest = finetuning.data_digest({})
        check_same_data({config.task_name: held_out_digest})
        training = Training(
            finetuning,
            _plan(config, finetuning, evaluate_first=needs_fit, warmup_step=not too_short),
            job_type="finetune",
            card={"examples": len(examples), "labels": list(task.labels)},
            identity={"data": finetuning.training_digest, "held_out": held_out_digest},
            check=lambda state, checkpoint: _check_state(state, checkpoint, config, finetuning),
            finish=lambda tracker: _finish(config, finetuning, released, engine, tracker.log_artifact),
        )
        run(training, engine, worker, request)
        engine.close()


def make_model(
    config: FinetuneConfig, task: Task[Any], released: ReleasedModel, examples: Sequence[Any] = ()
) -> TaskModel:
    """Create the initial model: the checkpoint's weights, and random weights for parameters that it lacks.

    The bias of a new output layer for regression starts at the task's `initial_prediction` for the `examples`.
    """
    build = functools.partial(
        TaskModel.of,
        task,
        released,
        compile=config.engine.compiled,
        activation_checkpointing=config.engine.activation_checkpointing,
    )
    loaded = {} if config.random_weights else initial_state(config, task, released)
    with torch.device("meta"):
        model = build()
    fitted_names = ("head.out_weight", "head.out_bias") if fits_output_layer(config, task, released) else ()
    zeros = {name: torch.zeros(model.state_dict()[name].shape) for name in fitted_names}
    # If any random weight is used, all are sampled, since each depends on the samples before it.
    model = model.to_empty(device="cpu") if {*loaded, *zeros} >= model.state_dict().keys() else build()
    model.load_state_dict(zeros | loaded, strict=False)
    if examples and task.objective == "value" and "head.out_bias" not in loaded:
        with torch.no_grad():
            model.head.out_bias.fill_(task.initial_prediction(examples))
    return model


def layered_groups(
    config: FinetuneConfig, parameters: Sequence[tuple[str, Tensor]], num_layers: int
) -> list[dict[str, Any]]:
    """Return parameter groups with a learning-rate scale per layer (discriminative rates, Howard and Ruder 2018)."""
    decay = config.training.layer_decay
    if decay == 1:
        return parameter_groups(parameters, config.optimizer.weight_decay)
    groups: list[dict[str, Any]] = []
    for depth in range(num_layers + 2):  # embeddings, layers, head
        members = [(name, parameter) for name, parameter in parameters if layer_of(name, num_layers) == depth]
        scale = decay ** (num_layers + 1 - depth)
        groups += [{**group, "lr_scale": scale} for group in parameter_groups(members, config.optimizer.weight_decay)]
    return groups


class Finetuning:
    """Implements `TrainingTask`, the interface of the training loop of `pretrain.run`, for fine-tuning."""

    def __init__(
        self,
        config: FinetuneConfig,
        task: Task[Any],
        examples: list[Any],
        encoder: TextEncoder,
        shape: ModelConfig,
        engine: Engine,
        device: torch.device,
    ) -> None:
        self.config, self.task, self.encoder = config, task, encoder
        self._shape, self._engine, self._device = shape, engine, device
        self.training_examples = len(examples)
        self.held_out = task.read_held_out()
        self._batches = self._make_batches(task.windows(examples, encoder, training=True), config.seed)
        self._batches.check(f"{config.task_name}, training set")
        self._held_out_windows = {name: self._windows(members) for name, members in self.held_out.items()}
        self.units = self._batches.examples
        self.training_digest = self._batches.windows.digest(task.labels)
        self.config = config.filled(shape.hidden, self.units)
        self.total_steps = self.config.total_steps(self.units)
        self._stalled_seconds = 0.0

    def fitted_output_layer(self, released: ReleasedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call `fit_output_layer` for a model with these weights on rank 0; return the fitted tensors on all ranks."""

        def fit() -> dict[str, Tensor]:
            model = inference_model(self.task, released, weights, self._device, self.config.engine.resolved_precision)
            batches = Batches(
                self._batches.windows,
                seed=self.config.seed,
                budget=self.config.engine.micro_batch_tokens,
                rank=0,
                world_size=1,
            )
            return fit_output_layer(model, batches, self._device)

        with self._engine.watch.allow(LONG_SECONDS):
            return store.agree(self._engine.workers, lambda: fit() if self._engine.rank == 0 else {})

    def data_digest(self, tests: Mapping[str, list[Any]]) -> str:
        """Compute a digest of the training set, the held-out sets and the labeled sets in `tests`."""
        scored = {name: self._windows(members) for name, members in tests.items() if self.task.is_labeled(members)}
        return data_digest(self.task.labels, self._batches.windows, {**self._held_out_windows, **scored})

    def batches(self, start_step: int, skipped: dict[str, Any]) -> Iterator[LabeledStep]:
        count = self.config.training.examples_per_step
        offset = skipped.get("steps", 0)
        for step in range(start_step + offset, self.total_steps + offset):
            started_at = time.perf_counter()
            labeled_step = self._batches.step(step * count, count).to(self._device)
            self._stalled_seconds += time.perf_counter() - started_at
            yield labeled_step

    def skip(self, step: int, failed: int, skipped: dict[str, Any]) -> dict[str, Any]:
        return {"steps": skipped.get("steps", 0) + failed - step}

    def largest_step(self) -> LabeledStep:
        return self._batches.largest().to(self._device)

    def loss_weights(self, step: LabeledStep) -> tuple[float, ...]:
        return (1 / step.weight,)

    def loss(self, output: Output, weights: Sequence[float] | Tensor) -> Tensor:
        return output.loss * weights[0]

    def totals(self, output: Output) -> Tensor:
        return output.loss[None]

    def counts(self, step: LabeledStep) -> Tensor:
        return torch.tensor([step.weight], dtype=torch.float64)

    def flops(self, micro_batch: LabeledBatch) -> float:
        return encoder_flops(self._shape, micro_batch.lengths, len(micro_batch.query_positions))

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        return {"loss": totals[0] / counts[0]}

    def evaluate(self, engine: Engine) -> dict[str, float]:
        scores: dict[str, float] = {}
        for index, name in enumerate(self.held_out):
            predictions, loss = self.predictions(name, tune=index == 0)
            if engine.rank == 0:
                values = {"loss": loss, **self.task.score(self.held_out[name], predictions)}
                scores |= values if index == 0 else {f"{name}/{key}": value for key, value in values.items()}
        return engine.workers.gather_objects(scores)[0]

    def predictions(self, name: str, *, tune: bool) -> tuple[list[dict[str, Any]], float]:
        """Return the predictions on a held-out set and the mean loss; on ranks other than 0, ([], 0.0).

        With `tune`, the task first tunes parameters such as a threshold on this set.
        """
        return self._predict(self.held_out[name], self._held_out_windows[name], tune=tune)

    def predict_examples(self, model: TaskModel, examples: list[Any], *, tune: bool) -> list[dict[str, Any]]:
        """Return the predictions of `model` on rank 0, [] on other ranks; every rank passes a copy of the model."""
        windows = self._windows(examples)
        logits = self.logits(model, windows)
        return [] if self._engine.rank else self._decode(examples, windows, logits, tune=tune)

    def temperature(self, model: TaskModel) -> float:
        """Return the task's temperature for `model` on the first held-out set, on all ranks; 1 without such a set."""
        name = self.validation_set()
        if not name or self.task.head != "sequence" or self.task.objective == "value":
            return 1.0
        windows = self._held_out_windows[name]
        return self.task.temperature(self.held_out[name], windows, self.logits(model, windows))

    def logits(self, model: TaskModel, windows: Windows) -> np.ndarray:
        """Return the logits, float32 [R, C], on all ranks; every rank passes a copy of `model`."""

        def forward(batch: LabeledBatch) -> Output:
            self._engine.watch.beat()
            return model(batch)

        batches, gather = self._make_batches(windows, 0), self._engine.workers.gather_objects
        with torch.inference_mode():
            return predict_logits(forward, batches, self.task.outputs, self._device, gather)

    def to_minimize(self, means: dict[str, float]) -> float:
        return -means[self.task.metric]

    def validation_set(self) -> str:
        return next(iter(self.held_out), "")

    def stalled_seconds(self) -> float:
        return self._stalled_seconds

    def close(self) -> None:
        """Do nothing: no file is open between steps."""

    def _windows(self, examples: list[Any]) -> Windows:
        return self.task.windows(examples, self.encoder, training=False)

    def _make_batches(self, windows: Windows, seed: int) -> Batches:
        engine = self._engine
        return Batches(
            windows,
            seed=seed,
            budget=self.config.engine.micro_batch_tokens,
            rank=engine.rank,
            world_size=engine.world_size,
        )

    def _predict(self, examples: list[Any], windows: Windows, *, tune: bool) -> tuple[list[dict[str, Any]], float]:
        engine, sums = self._engine, torch.zeros(2, dtype=torch.float64, device=self._device)

        def forward(batch: LabeledBatch) -> Output:
            output = engine.forward(batch)
            sums.add_(torch.stack([output.loss.double(), batch.weights.sum().double()]))
            return output

        batches = self._make_batches(windows, 0)
        engine.module.eval()
        with torch.no_grad():
            logits = predict_logits(forward, batches, self.task.outputs, self._device, engine.workers.gather_objects)
        engine.module.train()
        engine.workers.sum_over_workers(sums)
        if engine.rank:
            return [], 0.0
        loss, weight = sums.tolist()
        return self._decode(examples, windows, logits, tune=tune), loss / (weight or 1.0)

    def _decode(self, examples: list[Any], windows: Windows, logits: np.ndarray, *, tune: bool) -> list[dict[str, Any]]:
        if tune:
            self.task.tune(examples, windows, logits)
        return self.task.decode(examples, windows, logits)


def uncompiled(config: FinetuneConfig) -> FinetuneConfig:
    """Return `config` with compilation off, unless the config sets it explicitly."""
    engine = config.engine
    compile = engine.compile if engine.compile != "auto" else False
    return config.model_copy(update={"engine": engine.model_copy(update={"compile": compile})})


def _plan(config: FinetuneConfig, finetuning: Finetuning, *, evaluate_first: bool, warmup_step: bool) -> TrainingPlan:
    interval, phase = config.evaluate_every_steps(finetuning.units), config.phase(finetuning.units)
    return TrainingPlan(
        config,
        total_steps=finetuning.total_steps,
        learning_rate=lambda step: learning_rate([phase], step),
        evaluate_every_steps=interval,
        checkpoint_every_steps=min(interval, config.checkpoint.every_steps),
        keep_best=True,
        patience=config.training.patience,
        evaluate_first=evaluate_first,
        warmup_step=warmup_step,
    )


def _check_state(state: dict[str, Any], checkpoint: Path, config: FinetuneConfig, finetuning: Finetuning) -> None:
    if state.get("data") != finetuning.training_digest:
        raise InputError(
            f"{checkpoint}: the files of {config.task_name}, or the tokenizer of {config.start_from}, have changed "
            "since it was trained. Restore them, or choose another name or run_dir."
        )
    if state.get("held_out") != finetuning.data_digest({}):
        raise InputError(
            f"{checkpoint}: the dev set of {config.task_name}, whose scores choose the model, has changed since it was "
            "scored. Restore the dev set, or choose another name or run_dir."
        )
    check_settings(state, checkpoint, config, forbidden_changes)


def _finish(
    config: FinetuneConfig,
    finetuning: Finetuning,
    released: ReleasedModel,
    engine: Engine,
    log_artifact: Callable[[Path], None],
) -> None:
    """Predict and score all sets with the best checkpoint, save it as the run's model, and delete the checkpoints.

    The model is loaded in the same way as in the command `evaluate`, so that the scores agree.
    """
    checkpoints = config.folder / "checkpoints"

    def best_name() -> str | None:
        best = store.best_intact(checkpoints) if engine.rank == 0 else None
        return best and best.name

    name = store.agree(engine.workers, best_name)
    if name is None:
        raise InputError(f"{checkpoints}: has no complete checkpoint. Start the run again.")
    state = read_state(engine, checkpoints / name)
    weights = store.read_weights(checkpoints / name)
    if released.token_types == 1:
        # The second embedding was not trained. Set equal to the first, it keeps the model at a single token type.
        weights["embeddings.token_type"][1] = weights["embeddings.token_type"][0]

    def load_model() -> TaskModel:
        return inference_model(finetuning.task, released, weights, engine.device, config.engine.resolved_precision)

    model = load_model()
    if (temperature := finetuning.temperature(model)) != 1:
        weights |= {name: weights[name] / temperature for name in ("head.out_weight", "head.out_bias")}
        model = load_model()
    predictions: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {}
    for index, (split, examples) in enumerate(finetuning.held_out.items()):
        predictions[split] = examples, finetuning.predict_examples(model, examples, tune=index == 0)
    tests = finetuning.task.test_sets()
    for split, examples in tests.items():
        predictions[split] = examples, finetuning.predict_examples(model, examples, tune=False)
    engine.workers.barrier()  # every rank has read the checkpoint
    if engine.rank == 0:
        save_model(
            config,
            finetuning.task,
            released,
            weights,
            step=state["step"],
            chosen_on=finetuning.validation_set(),
            results={split: SetResult.of(finetuning.task, *pair) for split, pair in predictions.items()},
            training_examples=finetuning.training_examples,
            digest=finetuning.data_digest(tests),
            temperature=temperature,
        )
        log_artifact(config.folder / MODEL)
        shutil.rmtree(checkpoints)
    engine.workers.barrier()
