"""Files of JSON objects, one a line; the text column of each is a document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pretrain.corpus.inputs import Input, Piece, Problems, check_column, decode, open_file, without_surrogates
from pretrain.corpus.records import RecordReader


class Reader(RecordReader):
    """Lines of JSON, one document each."""

    suffixes = (".jsonl", ".json", ".ndjson")
    record_start = b"\n"
    previous_bytes = 1

    def find(self, where: str) -> list[Input]:
        files = super().find(where)
        check_column(self.config, where, Path(files[0].paths[0]), _column_names)
        return files

    def read(self, piece: Piece, problems: Problems) -> Iterator[str]:
        path, column = piece.paths[0], self.config.text_column
        lines = decode(self.records(piece, problems), path, piece.start, problems).split("\n")
        for number, line in enumerate(lines):
            if not line or line.isspace():
                continue
            place = f"line {number + 1} of block {piece.block}"
            try:
                text = json.loads(line)[column]
            except (ValueError, RecursionError) as error:
                problems.add(path, "line that is not JSON", f"{place}: {error}")
            except (KeyError, TypeError):
                problems.add(path, f"line without {column!r}", place)
            else:
                if isinstance(text, str):
                    yield without_surrogates(text, path, problems)
                else:
                    problems.add(path, f"{column!r} that is not text", place)


def _column_names(file: Path) -> list[str]:
    with open_file(file) as lines:
        row = json.loads(lines.readline())
    return list(row) if isinstance(row, dict) else []
