"""`predict`: predictions for one record, a file or a stream of lines, printed or written as JSON Lines."""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.artifacts.predictor import Predictor, read_records
from finetune.training.rows import json_line, write_rows
from finetune.training.saved import prediction_rows, write_predictions
from pretrain.common.errors import InputError
from pretrain.common.files import check_outputs_differ, is_stream
from pretrain.common.packages import expect
from pretrain.common.thread_waits import one_thread, sleep_when_contended
from pretrain.common.wording import counted

STANDARD_INPUT = "-"
_SHORT_RECORD = 2_000  # characters; below this length, a single thread is fastest


def predict(
    model: Path, source: str, out: Path | None, fields: Mapping[str, str] | None = None, **options: Any
) -> None:
    """Print predictions as JSON Lines, or write a file: CSV or Parquet if it has that suffix, else JSON Lines.

    Args:
        model: the folder of a fine-tuned model.
        source: a file; `STANDARD_INPUT` or a pipe is read line by line, and the prediction of each line is printed
            immediately. An invalid line is an error, after the predictions of the lines before it.
        out: file to write atomically, then its name and the number of predictions are printed. None: print the
            predictions.
        fields: a single record, used instead of `source`, with the keys text, pair, question, context.
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
        is_short = sum(map(len, fields.values())) < _SHORT_RECORD
        with one_thread() if is_short else contextlib.nullcontext():
            _print_or_write(predictor.stream_lines([(1, record)], "record"), out)
    elif source == STANDARD_INPUT or is_stream(Path(source)):
        with _open_lines(source) as (lines, where), sleep_when_contended():
            records = read_records(lines, where)
            _print_or_write(predictor.stream_lines(records, where, live=True), out)
    else:
        _predict_file(predictor, source, out)


def _predict_file(predictor: Predictor, source: str, out: Path | None) -> None:
    examples = predictor.task.read_file(source, labeled=False)
    with sleep_when_contended():
        predictions = predictor.predict(examples)
    if out is None:
        _print_or_write(prediction_rows(predictor.task, examples, predictions), None)
    else:
        write_predictions(out, predictor.task, examples, predictions, inputs=[source])
        print(f"{out}: {counted(len(predictions), 'prediction')}")


@contextlib.contextmanager
def _open_lines(source: str) -> Iterator[tuple[Iterator[str], str]]:
    """Open a file or standard input; yield (its lines, its name for messages)."""
    name = "standard input" if source == STANDARD_INPUT else source
    stdin = contextlib.nullcontext(sys.stdin.buffer)  # not closed here
    try:
        with stdin if source == STANDARD_INPUT else Path(source).open("rb") as raw:
            yield _decode_lines(raw, name), name
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"{name}: cannot be read ({error.strerror}).") from None


def _decode_lines(raw: Iterable[bytes], name: str) -> Iterator[str]:
    """Decode lines as UTF-8, whatever the locale: a container's locale may accept invalid bytes."""
    for number, line in enumerate(raw, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line). Convert it first."
            ) from None


def _print_or_write(rows: Iterator[dict[str, Any]], out: Path | None) -> None:
    """Write rows to the file `out`, or print each one immediately. Rows before an `InputError` are not lost.

    The file is written atomically: a killed process or a full disk leaves no partial file.
    """
    if out is None:
        for row in rows:
            print(json_line(row), flush=True)
        return
    errors: list[InputError] = []

    def rows_before_error() -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except InputError as error:
            errors.append(error)

    valid_rows = rows_before_error()
    first = list(itertools.islice(valid_rows, 1))
    if first or not errors:
        print(f"{out}: {counted(write_rows(out, itertools.chain(first, valid_rows)), 'prediction')}")
    if errors:
        raise errors[0]
