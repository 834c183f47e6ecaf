"""Use of a fine-tuned model: predictions for a stream of records, and scores on labeled files."""

import itertools
import json
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from finetune.tasks.datasets.surrogates import check_id
from finetune.tasks.datasets.text import TextEncoder
from finetune.training.config import FinetuneConfig
from finetune.training.folders import model_folder
from finetune.training.model.batches import Batches
from finetune.training.model.inference import inference_model, predict_logits
from finetune.training.saved import SetResult, load_saved
from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.common.errors import InputError
from pretrain.model.precision import PrecisionChoice, allow_tf32, capabilities, choose_precision, inference_precision

logger = logging.getLogger(__name__)

T = TypeVar("T")
RequestedPrecision = Literal["auto", "bf16", "fp16", "fp32"]
Record = str | Mapping[str, Any]

MAX_RECORDS = 512  # maximum number of records in a batch; the first batches are smaller


class Predictor:
    """A loaded fine-tuned model; call it to predict.

    Args:
        folder: the model's folder, or its run folder.
        precision: bf16, fp16 (on a GPU) or fp32; auto is the precision of training unless it is slow on this device
            (see `precision_reason`).
        micro_batch_tokens: maximum number of tokens per forward pass; 0 uses the value from training.
        compile: use torch.compile; the first call takes a minute, later calls are faster.
        threshold: minimum probability to predict a label (multi_label) or the positive class; None: the model's.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        precision: RequestedPrecision = "auto",
        micro_batch_tokens: int = 0,
        compile: bool = False,
        threshold: float | None = None,
    ) -> None:
        folder = model_folder(Path(folder))
        saved = load_saved(folder)
        self.config, self.scores = saved.config, saved.scores
        self.task = saved.config.make_task(saved.state)
        if threshold is not None:
            self.task.set_threshold(threshold)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.precision, self.precision_reason = _choose_precision(precision, saved.config, self.device)
        self._micro_batch_tokens = micro_batch_tokens or saved.config.engine.micro_batch_tokens
        released = read_released(folder)
        self.encoder = TextEncoder(
            read_tokenizer(folder, released.vocabulary_size),
            saved.config.max_length,
            segments=released.token_types > 1,
        )
        head = {f"head.{name}": tensor for name, tensor in released.head.items()}
        weights = {**released.backbone, **head}
        self.model = inference_model(self.task, released, weights, self.device, self.precision, compile=compile)

    def __call__(self, records: Record | Iterable[Any]) -> Any:
        """Return the prediction for a string or record, or predictions for a list. The task's `decode` lists the keys.

        The rows of a table (pandas, polars, Arrow) are records.
        """
        if isinstance(records, str | Mapping):
            return next(self.stream([records]))
        # All are returned together, so small first batches would only cause more forward passes.
        predicted = self._predict_records(enumerate(_to_records(records), 1), "record", first_size=MAX_RECORDS)
        return [{**_id_entry(record), **prediction} for record, _, prediction in predicted]

    def stream(
        self, records: Iterable[Record], where: str = "record", *, live: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield predictions in the order of `records`, which are read in batches of at most `MAX_RECORDS`.

        With `live`, predictions do not wait for later records: a batch has the records that have arrived by then. The
        only exception is `document_context`: a sentence waits until its document is complete.
        """
        for record, _, prediction in self._predict_records(enumerate(_to_records(records), 1), where, live=live):
            yield {**_id_entry(record), **prediction}

    def stream_lines(
        self, numbered_records: Iterable[tuple[int, Record]], where: str, *, live: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield predictions like `stream`, from (line number, record); errors name the line.

        Each prediction also has the fields of `Task.record`.
        """
        for record, example, prediction in self._predict_records(numbered_records, where, live=live):
            yield {**_id_entry(record), **self.task.record(example), **prediction}

    def _predict_records(
        self, numbered_records: Iterable[tuple[int, Record]], where: str, *, live: bool = False, first_size: int = 1
    ) -> Iterator[tuple[Record, Any, dict[str, Any]]]:
        """Yield (record, example, prediction); without `live`, the first batch has `first_size` records."""
        batches = _arrived_batches(numbered_records) if live else _growing_batches(numbered_records, first_size)
        for records, examples in self._complete_examples(batches, where):
            yield from zip(records, examples, self.predict(examples), strict=True)

    def _complete_examples(
        self, batches: Iterable[list[tuple[int, Record]]], where: str
    ) -> Iterator[tuple[list[Record], list[Any]]]:
        """Yield (records, examples) with complete context. An error in a record is raised after the earlier records."""
        records: list[Record] = []
        pending: list[Any] = []
        error = None
        try:
            for batch in batches:
                for number, record in batch:
                    location = f"{where}:{number}"
                    check_id(_id_entry(record).get("id"), location)
                    pending.append(self.task.example(record, location))
                    records.append(record)
                ready, pending = self.task.with_context(pending, is_end_of_input=False)
                if ready:
                    yield records[: len(ready)], ready
                records = records[len(ready) :]
        except Exception as caught:
            error = caught
        if pending:
            yield records, self.task.with_context(pending, is_end_of_input=True)[0]
        if error is not None:
            raise error

    def predict(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        """Return predictions for examples of the task."""
        windows = self.task.windows(examples, self.encoder, training=False)
        batches = Batches(windows, seed=0, budget=self._micro_batch_tokens, rank=0, world_size=1)
        with torch.inference_mode():
            logits = predict_logits(self.model, batches, self.task.outputs, self.device)
        return self.task.decode(examples, windows, logits)

    def evaluate(self, path: str) -> tuple[dict[str, float], dict[str, Any], list[dict[str, Any]]]:
        """Return (scores, details, predictions) for a labeled file in the format of the dev file."""
        examples = self.task.read_file(path)
        result = SetResult.of(self.task, examples, self.predict(examples))
        return result.scores, result.details, result.predictions


def _choose_precision(requested: RequestedPrecision, config: FinetuneConfig, device: torch.device) -> PrecisionChoice:
    """Choose the precision of the computation; in fp32, also allow TF32 if the GPU has it."""
    if requested == "fp16" and device.type == "cpu":
        raise InputError("precision: fp16 needs a GPU. Use auto, which chooses the fastest precision of this machine.")
    if requested != "auto":
        choice = PrecisionChoice(requested, "as requested")
    elif config.engine.precision == "auto":  # the model was saved without a training run, which resolves it
        choice = choose_precision([capabilities(device)])
    else:
        choice = inference_precision(config.engine.resolved_precision, device)
    if allow_tf32(choice.precision, device):
        logger.info("matrix products of fp32 use TF32 tensor cores")
    return choice


def _to_records(records: Any) -> Iterable[Any]:
    """Return the records of an iterable, or the rows of a table, whose own iterator would yield columns."""
    if hasattr(records, "columns") or hasattr(records, "column_names"):
        for method, options in (("to_pylist", {}), ("to_dicts", {}), ("to_dict", {"orient": "records"})):
            if hasattr(records, method):
                return getattr(records, method)(**options)
    if not isinstance(records, Iterable):
        raise InputError(f"{type(records).__name__}: not a string, a record, or a list or table of them.")
    return records


def _id_entry(record: Record) -> dict[str, Any]:
    """Return {"id": the record's id}; {} if it has none."""
    return {"id": record["id"]} if isinstance(record, Mapping) and "id" in record else {}


def _growing_batches(records: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield batches of `size` records, then twice as many each time, up to `MAX_RECORDS`."""
    source = iter(records)
    while batch := list(itertools.islice(source, size)):
        yield batch
        size = min(2 * size, MAX_RECORDS)


def _arrived_batches(records: Iterable[T]) -> Iterator[list[T]]:
    """Read records in a thread; yield batches of what it has read so far. Its error is raised after the last batch."""
    arrived: queue.Queue[T | _EndOfRecords] = queue.Queue(MAX_RECORDS)

    def read() -> None:
        error = None
        try:
            for record in records:
                arrived.put(record)
        except Exception as caught:
            error = caught
        arrived.put(_EndOfRecords(error))

    threading.Thread(target=read, daemon=True, name="records").start()
    while True:
        items = [arrived.get()]
        while not isinstance(items[-1], _EndOfRecords) and len(items) < MAX_RECORDS and not arrived.empty():
            items.append(arrived.get())
        if batch := [item for item in items if not isinstance(item, _EndOfRecords)]:
            yield batch
        last = items[-1]
        if isinstance(last, _EndOfRecords):
            if last.error is not None:
                raise last.error
            return


class _EndOfRecords(NamedTuple):
    error: Exception | None  # raised while reading, if any


def read_records(lines: Iterable[str], where: str) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield (line number, JSON object) of each line, or (line number, string) if it does not start with a brace.

    An empty line is an empty string; after the first object, empty lines are skipped.
    """
    has_objects = False
    for number, line in enumerate(lines, 1):
        text = line.removesuffix("\n").removesuffix("\r")
        if not text.lstrip().startswith("{"):
            if text.strip() or not has_objects:
                yield number, text
            continue
        has_objects = True
        try:
            yield number, json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{where}:{number}: not valid JSON ({error}). Write one JSON object or one string per line."
            ) from None
