"""Plain text with a sentence per line and blank lines between documents, the input format of the original BERT's
create_pretraining_data.py (google-research/bert)."""

import mmap
import re
from collections.abc import Iterator

from pretrain.corpus.inputs import Chunk, Problems, decode
from pretrain.corpus.records import RecordReader

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")


class Reader(RecordReader):
    """Documents separated by blank lines. Each line is a sentence."""

    record_start = b"\n\n"
    lines_are_sentences = True

    def next_record_start(self, text: mmap.mmap, position: int) -> int:
        match = _BLANK_LINE.search(text, max(0, position - 1)) if position else None
        return 0 if not position else match.end() if match else len(text)

    def last_record_start(self, text: bytearray) -> int:
        ends = [match.end() for match in _BLANK_LINE.finditer(text)]
        return ends[-1] if ends else 0

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        text = decode(self.records(chunk, problems), chunk.paths[0], chunk.start, problems)
        sentences: list[str] = []
        for line in (*text.split("\n"), ""):
            if sentence := line.strip():
                sentences.append(sentence)
            elif sentences:
                yield "\n".join(sentences)
                sentences = []
