"""The kinds of sources: each module implements one, in a class `Reader` that finds, splits and reads the inputs.

A config names a kind by its module, which may also be in another package: see docs/extend/add-a-source.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pretrain.common.addresses import is_remote
from pretrain.common.extensions import Contract
from pretrain.common.kinds import load_kind
from pretrain.config import SourceConfig
from pretrain.corpus.inputs import Chunk, Input, Problems, SourceReader, Span, no_files_error
from pretrain.storage.objects import ObjectStore

INTERFACE = Contract("Reader", SourceReader, ("read",))


def reader(config: SourceConfig) -> SourceReader:
    """Return the reader of a source's kind."""
    return load_kind(__name__, config.kind).Reader(config)


def find_inputs(config: SourceConfig, config_key: str) -> list[Input]:
    """Return the inputs of a source in a fixed order. `config_key` is the source's key in the config, for messages.

    Raises:
        InputError: no file is found, one cannot be read, or the text column does not exist.
    """
    source_reader = reader(config)
    return _with_problems(source_reader.find(config_key), source_reader)


def list_inputs(config: SourceConfig, config_key: str) -> list[Input]:
    """Return the inputs like `find_inputs`, without downloading remote files or checking their columns."""
    if not is_remote(config.path):
        return find_inputs(config, config_key)
    source_reader = reader(config)
    objects = source_reader.stored_files(ObjectStore())
    if not objects:
        raise no_files_error(config, config_key, source_reader.problems.entries())
    return _with_problems([Input((address,), listed.bytes) for address, listed in objects.items()], source_reader)


def _with_problems(inputs: list[Input], source_reader: SourceReader) -> list[Input]:
    """Attach the problems found while listing to the first input."""
    problems = tuple(source_reader.problems.entries())
    return [replace(item, problems=problems if n == 0 else ()) for n, item in enumerate(inputs)]


def cut(
    config: SourceConfig, source_index: int, input_index: int, item: Input, *, defer_streams: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks of one input: at least one, since a file's problems are reported when a chunk is read.

    A file that must be read in order is read here, and its chunks contain the text. With `defer_streams`, it becomes a
    single chunk, which a worker process later cuts with `cut_stream`.
    """
    source_reader = reader(config)
    is_deferred = defer_streams and source_reader.is_stream(item)
    spans = [Span(bytes=item.bytes, is_stream=True)] if is_deferred else source_reader.cut(item)
    for index, span in enumerate(spans):
        yield Chunk(source=source_index, input=input_index, index=index, config=config, paths=item.paths, **vars(span))


def cut_stream(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the chunks of a file that must be read in order, each with its text."""
    return cut(chunk.config, chunk.source, chunk.input, Input(chunk.paths, chunk.bytes))


def documents(chunk: Chunk, problems: Problems) -> Iterator[str]:
    """Yield the documents of `chunk`, without NUL; readers replace lone surrogates. Faults are added to `problems`."""
    problems.extend(chunk.problems)
    for text in reader(chunk.config).read(chunk, problems):
        yield text.replace("\0", "") if "\0" in text else text
