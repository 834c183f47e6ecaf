"""The report of a run: one self-contained HTML page, and a summary for the terminal.

The page shows data of the run folder (config, environment, metrics.jsonl, the export) and of the corpus folder (card,
held-out shards). It loads no external resources: charts are inline SVG, and our encoder predicts the masked words.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.records import SOURCE_LOSS, is_training, metric_lines, metrics_of, read_records
from pretrain.common.run_files import PROBES, read_fork
from pretrain.common.settings import dump, names
from pretrain.common.wording import clock, counted
from pretrain.config import PretrainConfig, load_config
from pretrain.reporting.attention.progress import attention_section
from pretrain.reporting.charts import Change, Series, change_chart, line_chart
from pretrain.reporting.fill_mask import Filling, fill, held_out_sentences
from pretrain.reporting.gains import gains
from pretrain.reporting.pages import write_page
from pretrain.run.metrics import objective_metrics
from pretrain.tracking.events import PROBE_SCORES

SENTENCES, SHOWN = 100, 10  # that the model fills a word in, and those of them on the page
FINETUNED = "finetuned.json"
_MOST_SOURCES = 8  # whose held-out loss has a chart
_LEAST_GAIN = 0.02  # of a score from pretrained weights, to be called a gain


def write_report(run_dir: Path, out: Path) -> Path:
    """Write the run's HTML report to the file `out` atomically and return `out`.

    The predictions of masked words need the run's export in `run_dir/export`; without it the page says so.
    Raises `InputError` if the run has no config or no records.
    """
    run = _ReportData.read(run_dir)
    filled = _predictions(run)
    results, (loss, accuracy, *others) = _read_finetuned(run), _charts(run)
    worth = _worth(results)
    return write_page(
        out,
        "report.html.j2",
        run=run,
        model=_model_line(run.config),
        tiles=_tiles(run),
        worth=[worth, accuracy] if worth else [],
        charts=[chart for chart in ([loss] if worth else [loss, accuracy]) + others if chart],
        attention=attention_section(run_dir, run.config.corpus.folder),
        domains=gains(run_dir),
        fillings=filled[:: max(1, len(filled) // SHOWN)],
        filled=_found(filled),
        finetuned=[{**result, "missing": _missing(result)} for result in results],
        gains=_gains(results),
        card=card_page(run.card),
        config_yaml=dump(run.config),
        environment=list(_flat(run.environment)),
    )


def summary(run_dir: Path) -> str:
    """The run in a few lines for the terminal."""
    run = _ReportData.read(run_dir)
    lines = [
        f"{run.config.name}: step {run.step:,} of {run.config.total_steps:,}, "
        f"{clock(run.seconds)} of training on {_workers(run.config)}",
        f"  model       {_model_line(run.config)}",
        *([f"  begins      {run.begins}"] if run.begins else []),
    ]
    if run.evaluations:
        last = run.evaluations[-1]
        lines.append(f"  held-out    {'   '.join(metric_lines(last, objective_metrics()))}   (step {last['step']:,})")
    if run.probes:
        last = run.probes[-1]
        scores = metric_lines(last, metrics_of(last, PROBE_SCORES))
        lines.append(f"  probes      {'   '.join(scores) or last.get('error')}   (step {last['step']:,})")
    lines.append(f"  throughput  {'   '.join(_throughput(run))}")
    if run.card.get("totals"):
        lines.append(f"  corpus      {_corpus_line(run.card)}")
    lines += _finetuned_lines(run)
    return "\n".join(lines)


def _worth(results: list[dict[str, Any]]) -> str:
    """The picture of what pretraining added to each fine-tuning task; "" without any score."""
    rows = [
        Change(result["title"], result["metric"], result["scores"].get("random"), result["scores"].get("pretrained"))
        for result in results
        if result["scores"]
    ]
    title, unit = "What pretraining added", "scores on held-out examples, 0 to 1"
    names = {"before": "from random weights", "after": "from pretrained weights"}
    return change_chart(title, unit, rows, **names, form=lambda value: f"{value:.3f}") if rows else ""


def _finetuned_lines(run: _ReportData) -> list[str]:
    """A line for each fine-tuning task of the demo: its scores, and the models that have none yet."""
    results = _read_finetuned(run)
    width = max((len(result["title"]) for result in results), default=0)
    lines = ["  fine-tuning"] if results else []
    for result in results:
        scores = [f"{value:.3f} from {start} weights" for start, value in result["scores"].items()]
        missing = [f"not finished from {start} weights" for start in _missing(result)]
        lines.append(f"    {result['title']:<{width}}  {result['metric']} {', '.join([*scores, *missing])}")
    return lines


def _gains(results: list[dict[str, Any]]) -> dict[bool, list[str]]:
    """Titles of the finished tasks by whether the pretrained weights gave a clearly higher score."""
    titles: dict[bool, list[str]] = {True: [], False: []}
    for result in results:
        if not _missing(result):
            gained = result["scores"]["pretrained"] - result["scores"]["random"] >= _LEAST_GAIN
            titles[gained].append(result["title"])
    return titles


def _missing(result: dict[str, Any]) -> list[str]:
    """The starts, pretrained or random, from which a task has no score yet."""
    return [start for start in ("pretrained", "random") if start not in result["scores"]]


def _read_finetuned(run: _ReportData) -> list[dict[str, Any]]:
    path = run.folder / FINETUNED
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


# ---- reading a run folder


@dataclass(frozen=True)
class _ReportData:
    folder: Path
    config: PretrainConfig
    environment: dict[str, Any]
    card: dict[str, Any]
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    probes: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> _ReportData:
        if not (folder / "config.yaml").is_file():
            raise InputError(f"{folder}: not a run folder (no config.yaml). Give a run folder such as runs/bert-mini.")
        if "training" in names(folder / "config.yaml"):
            raise InputError(
                f"{folder}: a fine-tuning, and the report is one of pretraining. `dashboard` draws its curves; its "
                "scores are in scores.json and model/README.md."
            )
        config = load_config(folder / "config.yaml")
        records = read_records(folder)
        training = [record for record in records if is_training(record)]
        if not training:
            raise InputError(f"{folder}/metrics.jsonl: no training record yet. Train first.")
        return cls(
            folder=folder,
            config=config,
            environment=_read_json(folder / "environment.json"),
            card=_read_json(config.corpus.folder / "card.json"),
            training=training,
            evaluations=[record for record in records if record.get("split") == "validation"],
            probes=read_records(folder, PROBES),
        )

    @property
    def begins(self) -> str:
        """What the run forked from, the last fork first; "" if it did not."""
        fork = read_fork(self.folder)
        past = [fork, *reversed(fork.get("earlier", ()))] if fork else []
        return ", ".join(f"forked from {one['name']} at step {one['step']:,}" for one in past)

    @property
    def step(self) -> int:
        return self.training[-1]["step"]

    @property
    def seconds(self) -> float:
        """Training time over all starts."""
        return self.training[-1].get("seconds") or 0.0

    def curve(
        self, field: str, split: str = "training", x: str = "step", scale: float = 1.0
    ) -> list[tuple[float, float]]:
        """(x, value) of every record that has both fields."""
        records = {"training": self.training, "validation": self.evaluations, "probe": self.probes}[split]
        return [
            (record[x] * scale, record[field])
            for record in records
            if record.get(field) is not None and record.get(x) is not None
        ]


def _read_json(path: Path) -> dict[str, Any]:
    """An optional JSON object; {} if the file is missing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}). Restore it, or remove it.") from None


# ---- tiles and charts


def _tiles(run: _ReportData) -> list[tuple[str, str, str]]:
    """(label, value, note) of the most important results."""
    tiles = []
    if run.evaluations:
        last = run.evaluations[-1]
        note = f"held-out, step {last['step']:,}"
        for name, metric in objective_metrics().items():
            if metric.short and last.get(name) is not None:
                tiles.append((metric.title, metric.text(last[name]), note))
    speeds = [value for _, value in run.curve("tokens_per_second")]
    utilization = [value for _, value in run.curve("mfu")]
    if speeds:
        note = f"median; {statistics.median(utilization):.0%} MFU" if utilization else "median"
        tiles.append(("useful tokens/s", f"{statistics.median(speeds):,.0f}", note))
    tokens = run.training[-1].get("tokens")
    if tokens:
        tiles.append(("tokens trained on", short(tokens), f"{run.step:,} of {run.config.total_steps:,} steps"))
    tiles.append(("training time", clock(run.seconds), f"on {_workers(run.config)}"))
    return tiles


def _workers(config: PretrainConfig) -> str:
    return counted(config.scheduling.workers, "worker")


def _throughput(run: _ReportData) -> list[str]:
    """Throughput, MFU and data stalls: medians over the run's records."""
    forms = {
        "tokens_per_second": "{:,.0f} useful tokens/s",
        "mfu": "{:.0%} MFU",
        "data_stall_fraction": "data stall {:.1%}",
    }
    medians = {field: [value for _, value in run.curve(field)] for field in forms}
    return [forms[field].format(statistics.median(values)) for field, values in medians.items() if values]


def _model_line(config: PretrainConfig) -> str:
    model = config.model
    sizes = f"{model.layers} layers x {model.hidden}, {model.heads} heads"
    return f"{sizes}, {config.optimizer.name}, {config.engine.precision}"


def _corpus_line(card: dict[str, Any]) -> str:
    totals = card.get("totals", {})
    counts = ("documents", "sentences", "words", "tokens")
    return "   ".join(f"{short(totals[key])} {key}" for key in counts if key in totals)


def _charts(run: _ReportData) -> list[str]:
    """The charts of the page: MLM loss and accuracy first; "" is a chart without data."""

    def pair(field: str) -> list[Series]:
        return [
            Series("training", run.curve(field), "train", smooth=True),
            Series("held-out", run.curve(field, "validation"), "held-out"),
            *(
                [Series("general text", general, "baseline")]
                if (general := run.curve(f"general_{field}", "validation"))
                else []
            ),
        ]

    def one(field: str, x: str = "step", scale: float = 1.0, smooth: bool = True) -> list[Series]:
        return [Series("training", run.curve(field, x=x, scale=scale), "train", smooth)]

    def timed(title: str, field: str, form: Callable[[float], str]) -> str:
        unit, size = ("h", 3600) if run.seconds > 2 * 3600 else ("min", 60)
        series = one(field, "seconds", 1 / size)
        return line_chart(title, series, form=form, form_x=lambda x: f"{x:.3g} {unit}", x_name="", from_zero=True)

    at_step: dict[str, Any] = {"form_x": lambda step: f"{step:,.0f}", "marks": _phase_marks(run.config)}
    return [
        *(
            line_chart(one.title, pair(name), form=_percent if one.unit == "fraction" else _plain, **at_step)
            for name, one in objective_metrics().items()
        ),
        *(
            line_chart(title, [Series("held-out", run.curve(name, split), "held-out")], form=form, **at_step)
            for name, title, split, form in _measured(run)
        ),
        line_chart("Learning rate", one("lr", smooth=False), form=_scientific, from_zero=True, **at_step),
        line_chart("Gradient norm", one("grad_norm"), form=_plain, from_zero=True, **at_step),
        timed("Useful tokens per second", "tokens_per_second", short),
        timed("MFU", "mfu", _percent),
        timed("Peak memory of worker 0", "memory_bytes", _bytes),
    ]


def _measured(run: _ReportData) -> Iterator[tuple[str, str, str, Callable[[float], str]]]:
    """(field, title, kind of record, form of a value): losses of the first `_MOST_SOURCES`, scores of checkpoints."""
    sources = dict.fromkeys(key for record in run.evaluations for key in record if key.startswith(SOURCE_LOSS))
    for name in list(sources)[:_MOST_SOURCES]:
        yield name, f"Held-out loss of {name.removeprefix(SOURCE_LOSS)}", "validation", _plain
    fields = dict.fromkeys(key for record in run.probes for key in record)
    for name, metric in metrics_of(fields, PROBE_SCORES).items():
        yield name, metric.title, "probe", _percent if metric.unit == "fraction" else _plain


def _phase_marks(config: PretrainConfig) -> list[tuple[float, str, str]]:
    """The steps where a phase ends, with the sequence lengths before and after."""
    marks, step = [], 0
    for phase, following in itertools.pairwise(config.phases):
        step += phase.steps
        marks.append((float(step), f"length {phase.sequence_length}", str(following.sequence_length)))
    return marks


def short(value: float) -> str:
    """1234567 -> 1.23M; at most three significant digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _scientific(value: float) -> str:
    return "0" if value == 0 else re.sub(r"e([+-])0*", r"e\1", f"{value:.2e}").replace(".00", "").replace("0e", "e")


def _percent(value: float) -> str:
    return f"{100 * value:.3g}\N{NO-BREAK SPACE}%"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


# ---- the corpus card and the environment

_SOURCE_COLUMNS = (
    "name",
    "kind",
    "license",
    "weight",
    "files",
    "documents",
    "sentences",
    "words",
    "tokens",
    "duplicates",
    "too_short",
)


def card_page(card: dict[str, Any]) -> dict[str, Any]:
    """The corpus card in the layout of the page: totals, sources, length histograms, input errors."""
    sources = card.get("sources", [])
    facts = {**card.get("totals", {}), "language": card.get("language")}
    facts.update({f"vocabulary {key}": value for key, value in card.get("vocabulary", {}).items()})
    for one in card.get("readings", []):
        shares = f"{one['reads']:.3f} ({one['unread']:.2%} of the tokens unread, {one['twice']:.2%} twice)"
        facts[f"reads of a token in an epoch, length {one['sequence_length']}"] = shares
    facts.update(line.split(": ", 1) for line in card.get("phases", []))
    return {
        "facts": [(_label(key), _cell(key, value)) for key, value in facts.items() if value is not None],
        "source_columns": [_label(column) for column in _SOURCE_COLUMNS],
        "sources": [[_cell(column, source.get(column, "")) for column in _SOURCE_COLUMNS] for source in sources],
        "contents": [(source["name"], source["content"]) for source in sources if "content" in source],
        "histograms": [
            ("tokens per sentence", bars([source.get("sentence_lengths", {}) for source in sources])),
            ("tokens per document", bars([source.get("document_lengths", {}) for source in sources])),
        ],
        "problems": card.get("problems", []),
    }


def bars(histograms: list[dict[str, int]]) -> list[tuple[str, int, float]]:
    """(range of lengths such as 8-15, count over all sources, count / largest count), in ascending order of length."""
    counts = sum((Counter(histogram) for histogram in histograms), Counter())
    largest = max(counts.values(), default=1)
    by_length = sorted(counts, key=lambda lengths: int(lengths.split("-")[0]))
    return [(_short(lengths), counts[lengths], counts[lengths] / largest) for lengths in by_length]


def _short(lengths: str) -> str:
    """16384-32767 -> 16k-32k, which fits below a bar."""
    return "-".join(f"{(int(n) + 1) // 1024}k" if int(n) > 2000 else n for n in lengths.split("-"))


def _flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested objects as flat rows, such as (`packages torch`, `2.13.0`)."""
    for key, value in values.items():
        name = f"{before} {key}".strip()
        if isinstance(value, dict):
            yield from _flat(value, name)
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "none"
        elif value is not None:
            yield name, value


def _label(key: str) -> str:
    return key.replace("_", " ")


def _cell(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith(("rate", "share", "fraction")):
        return f"{value:.3%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _predictions(run: _ReportData) -> list[Filling]:
    """The predictions for masked words; [] if the run has no export or its corpus is missing."""
    from pretrain.checkpoint import hf

    export_dir, corpus = hf.fills_masks(run.folder, run.config), run.config.corpus.folder
    if not export_dir.is_dir() or not corpus.is_dir():
        return []
    from pretrain.corpus.shards import open_shards
    from pretrain.corpus.vocabulary import read_vocabulary

    sentences = held_out_sentences(open_shards(corpus, "validation"), read_vocabulary(corpus / "vocab.txt"), SENTENCES)
    return fill(export_dir, sentences)


def _found(filled: Sequence[Filling]) -> str:
    """Such as "the first guess in 21 and among the guesses in 44 of 100 sentences"."""
    first = sum(filling.rank == 1 for filling in filled)
    among = sum(filling.rank <= len(filling.guesses) for filling in filled)
    return f"the first guess in {first} and among the guesses in {among} of {counted(len(filled), 'sentence')}"
