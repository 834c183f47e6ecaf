"""`predict`: predictions for one record, a file or a stream of lines, printed or written as JSON Lines."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from finetune.artifacts.predictor import Predictor, RequestedPrecision, read_records
from finetune.artifacts.saved import prediction_lines, write_predictions
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open
from pretrain.common.thread_waits import sleeping_when_crowded

STANDARD_INPUT = "-"


def predict(
    model: Path, source: str, out: Path | None, precision: RequestedPrecision, fields: Mapping[str, str] | None = None
) -> None:
    """Predict, and print JSON Lines or write them to a file.

    Args:
        model: a fine-tuned model or its run folder.
        source: a file; `STANDARD_INPUT` or a pipe is read line by line, and each line is answered at once.
        out: file to write, complete or not at all; None prints.
        precision: of the arithmetic, as `Predictor` takes it.
        fields: one record's texts by name (text, pair, question, context), instead of `source`.

    Raises:
        InputError: there is no model, or the input cannot be read.
    """
    predictor = Predictor(model, precision=precision)
    if fields:
        record: Any = fields["text"] if set(fields) == {"text"} else dict(fields)
        _write_lines(map(_as_line, predictor.stream_lines([(1, record)], "record")), out)
    elif source == STANDARD_INPUT or _is_stream(Path(source)):
        with _opened(source) as (lines, where), sleeping_when_crowded():
            records = read_records(lines, where)
            _write_lines(map(_as_line, predictor.stream_lines(records, where, live=True)), out)
    else:
        _predict_file(predictor, source, out)


def _predict_file(predictor: Predictor, source: str, out: Path | None) -> None:
    examples = predictor.task.read_file(source, labelled=False)
    with sleeping_when_crowded():
        predictions = predictor.predict(examples)
    if out is None:
        _write_lines(prediction_lines(predictor.task, examples, predictions), None)
    else:
        write_predictions(out, predictor.task, examples, predictions)


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe or a terminal, such as bash's <(command)."""
    return path.is_fifo() or path.is_char_device()


@contextlib.contextmanager
def _opened(source: str) -> Iterator[tuple[TextIO, str]]:
    """The lines of a file or of standard input, and the name that messages use for it."""
    name = "standard input" if source == STANDARD_INPUT else source
    stdin = contextlib.nullcontext(sys.stdin.buffer)
    try:
        # UTF-8 in every locale: a container's may accept invalid bytes.
        with stdin if source == STANDARD_INPUT else Path(source).open("rb") as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n"), name
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 ({error.reason} at byte {error.start}). Convert it first.") from None
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise InputError(f"{name}: cannot be read ({error.strerror}).") from None


def _as_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)


def _write_lines(lines: Iterable[str], out: Path | None) -> None:
    """To the file `out`, complete or not at all, or to standard output, each line at once."""
    if out is None:
        for line in lines:
            print(line, flush=True)
        return
    with atomic_open(out, "w") as file:
        for line in lines:
            file.write(line + "\n")
