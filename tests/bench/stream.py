"""`bench stream`: data loaders of several ranks on simulated machines, with a synthetic corpus that is not stored.

An S3 server generates the corpus from block positions: each of a shard's hundred positions has one of ten different
blocks, so that the digests are known. Each machine has a separate cache. The benchmark measures the time to the first
step (also when starting in the middle), stalls at a given token rate, bytes fetched by each machine, and memory.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.commands import program
from pretrain.common.files import manifest_bytes
from pretrain.config import PretrainConfig
from pretrain.corpus.blocks import BLOCK, block_digest
from tests.bench import environment

_KINDS, _PLACES, _TOKENS, _DOCUMENT, _SENTENCE = 10, 100, 1 << 20, 512, 32
_SEQUENCES, _VOCABULARY, _ADDRESS = 4096, 30_000, "s3://bucket/corpus"
_MACHINES, _CACHE = 2, 10**9  # number of machines; size of the cache of each machine in bytes
_SPECIAL = ("pad", "unk", "cls", "sep", "mask")
_HEADER, _WIDTHS = 128, {"tokens": 2, "sentences": 8, "documents": 16}  # bytes of a header, and of an element
_LENGTHS = {"tokens": _TOKENS, "sentences": _TOKENS // _SENTENCE, "documents": _TOKENS // _DOCUMENT}


def config(steps: int) -> PretrainConfig:
    """Return the config of the run that reads the corpus."""
    phase = {"sequence_length": 128, "global_sequences": _SEQUENCES, "steps": steps, "peak_learning_rate": 1e-3}
    corpus = {"dir": _ADDRESS, "cache": _CACHE}
    return PretrainConfig.model_validate(
        {"name": "stream", "corpus": corpus, "phases": [phase], "pairs": {"objective": "none"}}
    )


class Corpus:
    """Generates the objects that the server stores."""

    def __init__(self, shards: int) -> None:
        random = np.random.default_rng(0)
        self._text = [
            random.integers(len(_SPECIAL), _VOCABULARY, _TOKENS).astype("<u2").tobytes() for _ in range(_KINDS)
        ]
        self._arrays = {
            "sentences": np.arange(_PLACES * _LENGTHS["sentences"] + 1, dtype="<u8") * _SENTENCE,
            "documents": np.arange(_PLACES * _LENGTHS["documents"] + 1, dtype="<u8")[:, None]
            * np.array([_DOCUMENT // _SENTENCE, _DOCUMENT], "<u8"),
        }
        self._digests = [[self._digest(place, kind) for kind in range(_KINDS)] for place in range(_PLACES)]
        entries = [*(f"[{name.upper()}]" for name in _SPECIAL), *map(str, range(len(_SPECIAL), _VOCABULARY))]
        self.small = {"vocab.txt": "\n".join(entries)}
        files = {"vocab.txt": _file(self.small["vocab.txt"].encode())}
        names = [f"train-{number:05d}" for number in range(shards)]
        for number, name in enumerate(names):
            files[f"{name}.blocks.npy"] = _file(self.table(number))
            for part in ("tokens", "sentences", "documents"):
                elements = _PLACES * _LENGTHS[part] + (part != "tokens")
                digest = hashlib.sha256(f"{name}.{part}".encode()).hexdigest()  # whole files are never read
                files[f"{name}.{part}.npy"] = {"bytes": _HEADER + elements * _WIDTHS[part], "sha256": digest}
        counts = {part: _PLACES * length for part, length in _LENGTHS.items()}
        manifest = {
            "format": 1,
            "folded": True,
            "fingerprint": "made-up",
            "vocabulary_size": _VOCABULARY,
            "dtype": "uint16",
            "special_ids": {name: number for number, name in enumerate(_SPECIAL)},
            "sources": [{"name": "made-up", "weight": 1.0}],
            "shards": [{"name": name, "split": "train", "source": 0, **counts} for name in names],
            "files": files,
        }
        self.bytes = sum(entry["bytes"] for name, entry in files.items() if "blocks" not in name)
        self.small["manifest.json"] = manifest_bytes(manifest).decode()
        name, content = _counts(manifest, shards * _PLACES)
        self.counts = {f".samples/{name}": content}

    def table(self, shard: int) -> bytes:
        """Return the content of a shard's file of blocks."""
        blocks = np.zeros(_PLACES, BLOCK)
        place = np.arange(_PLACES)
        for begin, end, part in (("begin", "end", "tokens"), ("first", "last", "documents")):
            blocks[begin], blocks[end] = place * _LENGTHS[part], (place + 1) * _LENGTHS[part]
        blocks["first_sentence"] = place * _LENGTHS["sentences"]
        blocks["last_sentence"] = (place + 1) * _LENGTHS["sentences"]
        digests = [self._digests[number][kind_of(shard, number)] for number in range(_PLACES)]
        blocks["digest"] = np.frombuffer(b"".join(digests), np.uint8).reshape(_PLACES, 16)
        return _npy(blocks)

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Return the bytes `begin` to `end - 1` of the file `name`, which has an array of a shard."""
        shard, part = int(name[6:11]), name.split(".")[1]
        begin, end = begin - _HEADER, end - _HEADER
        if part != "tokens":
            return self._arrays[part].tobytes()[begin:end]
        assert begin // (2 * _TOKENS) == (end - 1) // (2 * _TOKENS), "clients read whole blocks"
        place, begin = divmod(begin, 2 * _TOKENS)
        return self._text[kind_of(shard, place)][begin : begin + end - 2 * _TOKENS * place - begin]

    def _digest(self, place: int, kind: int) -> bytes:
        documents, sentences = (
            self._arrays[part][place * _LENGTHS[part] : (place + 1) * _LENGTHS[part] + 1].tobytes()
            for part in ("documents", "sentences")
        )
        return block_digest(iter((documents, sentences, self._text[kind])))


def kind_of(shard: int, place: int) -> int:
    """Return which of the `_KINDS` different blocks is at a position of a shard."""
    return hashlib.blake2b(f"{shard} {place}".encode(), digest_size=4).digest()[0] % _KINDS


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _file(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _counts(manifest: dict[str, Any], blocks: int) -> tuple[str, bytes]:
    """Return (name, content) of the file with the sample count of every block; all counts are equal."""
    from pretrain.batches.blocks import counts_file
    from pretrain.batches.cuts import Cutting
    from pretrain.corpus.shards import TokenShards, source_fingerprints

    run = config(1)
    cutting = Cutting(126, 1, run.pairs.short_share, crosses_documents=False)
    shards = TokenShards(Path(), "", _VOCABULARY, {}, [], [], source_fingerprints(manifest))
    count = int(cutting.count(np.full(_LENGTHS["documents"], _DOCUMENT)).sum())
    return counts_file(shards, 0, cutting, blocks).name, _npy(np.full(blocks, count, np.uint32))


def serve(shards: int) -> None:
    """Serve the corpus; print the port, then the size of the corpus in bytes."""
    corpus = Corpus(shards)
    small = {name: content.encode() for name, content in corpus.small.items()} | corpus.counts

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            path, _, query = self.path.partition("?")
            name = path.removeprefix("/bucket/corpus/")
            if "list-type" in query:
                keys = "".join(
                    f"<Contents><Key>corpus/{key}</Key><Size>{len(content)}</Size><ETag>x</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                    for key, content in corpus.counts.items()
                )
                listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
                return self._send(200, listing.encode())
            if name.endswith(".blocks.npy"):
                content = corpus.table(int(name[6:11]))
            elif name in small:
                content = small[name]
            elif not name.startswith("train-"):
                return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if body else b"")
            else:
                begin, end = map(int, re.findall(r"\d+", self.headers["Range"]))
                return self._send(206, corpus.read(name, begin, end + 1))
            if found := re.findall(r"\d+", self.headers.get("Range", "")):
                content = content[int(found[0]) : int(found[1]) + 1]
            self._send(206 if found else 200, content, body=body)

        def _send(self, status: int, content: bytes, *, body: bool = True) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", "x")
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, corpus.bytes, flush=True)
    server.serve_forever()


def rank_main(arguments: argparse.Namespace) -> None:
    """Run one rank: read at the given rate for the given time, and print the measurements."""
    began = time.monotonic()
    import s3fs  # noqa: F401 - here, so that the first read does not import it
    import torch
    import torch.distributed as dist

    from pretrain.batches.exchange import Exchange
    from pretrain.batches.loader import Loader
    from pretrain.corpus.stored import fetch_corpus, open_corpus
    from pretrain.storage.objects import ObjectStore
    from pretrain.training.engine.workers import RankGroup

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{arguments.rendezvous}", rank=arguments.rank, world_size=arguments.ranks
    )
    imported, before = time.monotonic() - began, _memory()
    run = config(10**9)
    fetch_corpus(run.corpus)
    opened = time.monotonic() - began
    fetched, read_range = [], ObjectStore.read_range

    def counting(self: ObjectStore, address: str, start: int, end: int) -> bytes:
        fetched.append(end - start)
        return read_range(self, address, start, end)

    ObjectStore.read_range = counting
    shards = open_corpus(run.corpus, "train")
    exchange = Exchange(RankGroup(arguments.rank, arguments.ranks, torch.device("cpu"), dist.new_group(backend="gloo")))
    loader = Loader(
        shards,
        run,
        0,
        rank=arguments.rank,
        world_size=arguments.ranks,
        start_step=arguments.step,
        machines=_MACHINES,
        exchange=exchange,
    )
    tokens, first, start, stalled = 0, 0.0, 0.0, 0.0
    deadline, peak = float("inf"), before
    for number, batch in enumerate(loader):
        if not number:
            first, start, stalled = time.monotonic() - began, time.monotonic(), loader.stall_seconds
            deadline = start + arguments.seconds
        else:
            tokens += batch.tokens
        peak = max(peak, _memory())
        if (wait := start + tokens / arguments.rate - time.monotonic()) > 0:
            time.sleep(wait)
        is_over = torch.tensor([float(time.monotonic() > deadline)])
        dist.all_reduce(is_over)  # all ranks stop at the same step
        if is_over.item():
            break
    seconds = time.monotonic() - start
    result = {
        "rank": arguments.rank,
        "import_s": round(imported, 1),
        "opened_s": round(opened, 1),
        "first_step_s": round(first, 1),
        "tokens_per_s": round(tokens / seconds),
        "stalled": round((loader.stall_seconds - stalled) / seconds, 4),
        "fetched_mb": round(sum(fetched) / 1e6, 1),
        "memory_mb": round((peak - before) / 1e6),
    }
    print(json.dumps(result), flush=True)
    loader.close()
    os._exit(0)


def _memory() -> int:
    """Return this process's memory in bytes without file-backed pages, which it may share with others."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(found) for found in re.findall(r"RssAnon:\s+(\d+)", status))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench stream", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--terabytes", type=float, default=1.0, help="size of the corpus (1)")
    parser.add_argument("--ranks", type=int, default=8, help="total number of ranks (8)")
    parser.add_argument("--rate", type=float, default=4e5, help="tokens/s to consume, over all ranks (4e5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to read after each start (60)")
    parser.add_argument("--steps", type=int, nargs="*", default=[0, 800_000], help="steps to start from (0 800000)")
    for name, kind in (("serve", int), ("rank", int), ("rendezvous", str), ("step", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve:
        serve(arguments.serve)
    elif arguments.rank is not None:
        rank_main(arguments)
    else:
        _measure(arguments)
    return 0


def _measure(arguments: argparse.Namespace) -> None:
    shards = round(arguments.terabytes * 1e12 / (_PLACES * sum(_LENGTHS[part] * _WIDTHS[part] for part in _LENGTHS)))
    this = [sys.executable, "-m", "tests.bench.stream"]
    with tempfile.TemporaryDirectory() as scratch:
        server = subprocess.Popen([*this, "--serve", str(shards)], stdout=subprocess.PIPE, text=True, env=environment())
        try:
            assert server.stdout is not None
            port, size = server.stdout.readline().split()
            print(f"{int(size) / 1e12:.3f} TB in {shards:,} shards", flush=True)
            for step in arguments.steps:
                _start(arguments, this, Path(scratch), port, step)
        finally:
            server.kill()
            server.wait()


def _start(arguments: argparse.Namespace, this: list[str], scratch: Path, port: str, step: int) -> None:
    """Run all ranks from the given step, and print their measurements."""
    ranks, options = [], ("ranks", "rate", "seconds")
    given = [word for name in options for word in (f"--{name}", str(getattr(arguments, name)))]
    for rank in range(arguments.ranks):
        machine = rank * _MACHINES // arguments.ranks
        variables = {
            **environment(),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
            "BERTRAIN_CACHE": str(scratch / f"machine-{machine}"),
        }
        own = ["--rank", str(rank), "--rendezvous", str(scratch / f"rendezvous-{step}"), "--step", str(step)]
        ranks.append(subprocess.Popen([*this, *given, *own], stdout=subprocess.PIPE, text=True, env=variables))
    results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in ranks]
    print(f"from step {step:,}:")
    for result in results:
        print("  " + "  ".join(f"{name} {value}" for name, value in result.items()))
    for machine in range(_MACHINES):
        on_machine = [one for one in results if one["rank"] * _MACHINES // arguments.ranks == machine]
        files = (scratch / f"machine-{machine}").rglob(".streamed/*/*")
        used = sum(512 * path.stat().st_blocks for path in files)
        fetched = sum(one["fetched_mb"] for one in on_machine)
        print(f"  machine {machine}: fetched {fetched:,.1f} MB; cache {used / 1e6:,.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
