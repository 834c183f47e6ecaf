"""Files of JSON objects: one per line, in an array, or indented. The text column of each object is one document."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePath

from pretrain.corpus import json_values
from pretrain.corpus.inputs import (
    Chunk,
    Input,
    Problems,
    Span,
    check_column,
    data_spans,
    decode,
    plain_suffix,
    without_surrogates,
)
from pretrain.corpus.records import RecordReader


class Reader(RecordReader):
    """JSON objects, one document each. Files with an object per line are read in byte ranges, others in order."""

    suffixes = (".jsonl", ".json", ".ndjson")
    record_start = b"\n"
    previous_bytes = 1

    def find(self, config_key: str) -> list[Input]:
        files = super().find(config_key)
        for file in files:
            if file.bytes > json_values.MAX_BYTES and json_values.is_multiline(path := Path(file.paths[0])):
                raise json_values.too_large_error(path)
        check_column(self.config, config_key, Path(files[0].paths[0]), _column_names)
        return files

    def accepts(self, file: PurePath) -> bool:
        # WikiExtractor's --json writes files without a suffix.
        return super().accepts(file) or (not plain_suffix(file) and _starts_with_object(Path(file)))

    def is_stream(self, item: Input) -> bool:
        return super().is_stream(item) or json_values.is_multiline(Path(item.paths[0]))

    def cut(self, item: Input) -> Iterator[Span]:
        path = Path(item.paths[0])
        if not json_values.is_multiline(path):
            return super().cut(item)
        return data_spans(item, json_values.value_batches(path), b"")

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        path, column = chunk.paths[0], self.config.text_column
        text = decode(self.records(chunk, problems), path, chunk.start, problems)
        # A byte-order mark between objects: files were concatenated without a line break between them.
        lines = text.replace("}\ufeff{", "}\n{").split("\n")
        for line_number, line in enumerate(lines, 1):
            if not line or line.isspace():
                continue
            location = f"line {line_number} of chunk {chunk.index}"
            try:
                text = json.loads(line)[column]
            except (ValueError, RecursionError) as error:
                problems.add(path, "line that is not JSON", f"{location}: {error}")
            except (KeyError, TypeError):
                problems.add(path, f"line without {column!r}", location)
            else:
                if isinstance(text, str):
                    yield without_surrogates(text, path, problems)
                else:
                    problems.add(path, f"{column!r} that is not a string", location)


def _starts_with_object(file: Path) -> bool:
    try:
        return json_values.starts_with_object(file)
    except OSError:
        return False


def _column_names(file: Path) -> list[str]:
    first = json_values.first_value(file)
    return list(first) if isinstance(first, dict) else []
