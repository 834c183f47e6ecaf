"""`predict`: predictions for one record, a file or a stream of lines, printed or written as JSON Lines."""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.artifacts.predictor import Predictor, read_records
from finetune.training.rows import as_line, write_rows
from finetune.training.saved import prediction_rows, write_predictions
from pretrain.common.errors import InputError
from pretrain.common.files import check_outputs_differ, is_stream
from pretrain.common.packages import expect
from pretrain.common.thread_waits import one_thread, sleep_when_contended
from pretrain.common.wording import counted

STANDARD_INPUT = "-"
_SHORT = 2_000  # characters of a record, which one thread predicts sooner than others wake up


def predict(
    model: Path, source: str, out: Path | None, fields: Mapping[str, str] | None = None, **options: Any
) -> None:
    """Predict, and print JSON Lines or write a file, which is CSV or Parquet if its suffix says so.

    Args:
        model: the folder of a fine-tuned model.
        source: a file; `STANDARD_INPUT` or a pipe is read line by line, and each line is answered immediately. The
            lines before an invalid one are answered.
        out: file to write, whole or not at all; its name and the number of its predictions are printed. None prints
            the predictions.
        fields: one record, instead of `source`: text, pair, question, context.
        options: options of `Predictor`.

    Raises:
        InputError: there is no model, the input cannot be read, or `out` is the input.
    """
    if out is not None:
        check_outputs_differ([out], [source, *model.iterdir()])
        if out.suffix.lower() == ".parquet":
            expect(str(out), "pyarrow")
    predictor = Predictor(model, **options)
    if fields:
        record: Any = fields["text"] if set(fields) == {"text"} else dict(fields)
        short = sum(map(len, fields.values())) < _SHORT
        with one_thread() if short else contextlib.nullcontext():
            _write(predictor.stream_lines([(1, record)], "record"), out)
    elif source == STANDARD_INPUT or is_stream(Path(source)):
        with _opened(source) as (lines, where), sleep_when_contended():
            records = read_records(lines, where)
            _write(predictor.stream_lines(records, where, live=True), out)
    else:
        _predict_file(predictor, source, out)


def _predict_file(predictor: Predictor, source: str, out: Path | None) -> None:
    examples = predictor.task.read_file(source, labeled=False)
    with sleep_when_contended():
        predictions = predictor.predict(examples)
    if out is None:
        _write(prediction_rows(predictor.task, examples, predictions), None)
    else:
        write_predictions(out, predictor.task, examples, predictions, inputs=[source])
        print(f"{out}: {counted(len(predictions), 'prediction')}")


@contextlib.contextmanager
def _opened(source: str) -> Iterator[tuple[Iterator[str], str]]:
    """Open a file or standard input; yields its lines, and its name for messages."""
    name = "standard input" if source == STANDARD_INPUT else source
    stdin = contextlib.nullcontext(sys.stdin.buffer)
    try:
        with stdin if source == STANDARD_INPUT else Path(source).open("rb") as raw:
            yield _decoded(raw, name), name
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"{name}: cannot be read ({error.strerror}).") from None


def _decoded(raw: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines as UTF-8 in every locale: a container's locale may accept invalid bytes."""
    for number, line in enumerate(raw, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line). Convert it first."
            ) from None


def _write(rows: Iterator[dict[str, Any]], out: Path | None) -> None:
    """Write to the file `out`, or each line immediately to standard output. Earlier rows precede an `InputError`.

    The file is written whole or not at all if the process is killed or the disk is full.
    """
    if out is None:
        for row in rows:
            print(as_line(row), flush=True)
        return
    faults: list[InputError] = []

    def before_fault() -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except InputError as error:
            faults.append(error)

    good = before_fault()
    first = list(itertools.islice(good, 1))
    if first or not faults:
        print(f"{out}: {counted(write_rows(out, itertools.chain(first, good)), 'prediction')}")
    if faults:
        raise faults[0]
