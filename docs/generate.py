"""Generate the reference pages from the code: commands, settings, metrics, exit codes.

`./launch.sh docs --generate` writes them to docs/reference/; a test fails when they are stale. The text does not depend
on the Python version or on the machine, so argparse's own formatting is not used.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic_core import PydanticUndefined

from finetune.cli import GROUPS, build_parsers, overview
from pretrain.common import errors
from pretrain.common.examples import examples
from pretrain.common.records import Metric
from pretrain.common.sections import LocalPath, Location, Section, WritableLocation
from pretrain.run.metrics import TRAINING_METRICS
from pretrain.tracking.events import EVALUATION_FIELDS, EVENT_FIELDS, EVENTS, PROBE_FIELDS

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
COMMAND = "./launch.sh docs --generate"
CONFIG_TABLE = "../guides/pretraining.md"  # written by hand, except for the results of dry runs of the example configs
_PATHS: dict[Any, str] = {LocalPath: "path", Location: "path or address", WritableLocation: "path or address"}
_NOTE = f"<!-- Generated from the code by `{COMMAND}`. Do not edit this page by hand. -->"

# The unit of a setting, by the last words of its name; the first match is used.
_UNITS = (
    ("size", "entries"),
    ("seconds", "s"),
    ("bytes", "bytes"),
    ("gib", "GiB"),
    ("tokens", "tokens"),
    ("max_length|sequence_length|overlap|max_positions", "tokens"),
    ("steps", "steps"),
    ("epochs", "epochs"),
    ("words", "words"),
    ("sequences", "sequences"),
    ("predictions", "tokens"),
    ("examples_per_step", "examples"),
    ("share|fraction|probability|dropout|layer_decay", "fraction"),
    ("workers|processes", "processes"),
    ("workers_per_node", "processes"),
    ("cpus_per_worker", "CPU cores"),
    ("max_windows", "windows"),
    ("layers", "layers"),
    ("max_failures", "failures"),
    ("max_rollbacks", "rollbacks"),
    ("patience", "evaluations"),
    ("keep_last", "checkpoints"),
)


def pages() -> dict[str, str]:
    """Return the text of every generated page, by file name."""
    from finetune.training.config import FinetuneConfig
    from pretrain.config import PretrainConfig

    with patch.dict(os.environ, BERTRAIN_PROGRAM="./launch.sh"):  # not the name of this program
        commands = commands_page()
    return {
        "commands.md": commands,
        "config-pretrain.md": _settings_page(
            "Pretraining config",
            "Settings of `configs/pretrain/*.yaml`, for `prepare` and `pretrain`.",
            PretrainConfig,
            example="A list item is addressed by its number: `--set phases.0.steps=100`.",
        ),
        "config-finetune.md": _settings_page(
            "Fine-tuning config",
            "Settings of `configs/finetune/*.yaml`, for `finetune` and `sweep`.",
            FinetuneConfig,
            shared=PretrainConfig,
            example="Example: `--set training.epochs=2`.",
        ),
        "config-place.md": place_page(),
        "metrics.md": metrics_page(),
        "exit-codes.md": exit_codes_page(),
        CONFIG_TABLE: config_table(_text(REFERENCE / CONFIG_TABLE)),
    }


def write(folder: Path = REFERENCE) -> list[Path]:
    """Write every page to `folder`; return the files whose text changed."""
    changed = []
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def stale(folder: Path = REFERENCE) -> list[str]:
    """Return the names of the pages that are out of date."""
    return [name for name, text in pages().items() if _text(folder / name) != text]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# Commands


def commands_page() -> str:
    """Return usage, options and examples of every command."""
    _, parsers = build_parsers()
    lines = [
        _title("Commands"),
        "Every command is `./launch.sh COMMAND`. Each also takes `--help`, which prints the same text. "
        "[Contributing](../contributing.md) has the commands `test` and `docs`.",
        "",
        "```text",
        overview(parsers),
        "```",
        "",
    ]
    for name, parser in ((name, parsers[name]) for names in GROUPS.values() for name in names):
        lines += [f"## {name}", "", *_command(parser), ""]
    return _joined(lines)


def _command(parser: argparse.ArgumentParser) -> list[str]:
    actions = [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS
    ]
    lines = [_one_line(parser.description or ""), "", "```text", _usage(parser.prog, actions), "```", ""]
    if actions:
        rows = [(_code(_invocation(action)), _one_line(_help(action))) for action in actions]
        lines += [*_table(("Argument", "Meaning"), rows), ""]
    examples, _, rest = (parser.epilog or "").partition("\n\n")
    if examples.startswith("examples:"):
        body = "\n".join(line.strip() for line in examples.splitlines()[1:])
        lines += ["```sh", body, "```", ""]
    if rest:
        lines += ["```text", rest, "```", ""]
    return lines[:-1]


def _usage(prog: str, actions: list[argparse.Action]) -> str:
    """One line per argument would be too long here; options are listed below it anyway."""
    options = " [options]" if any(action.option_strings for action in actions) else ""
    given = [_bracketed(action) for action in actions if not action.option_strings or action.required]
    return f"{prog}{options} {' '.join(given)}".rstrip()


def _bracketed(action: argparse.Action) -> str:
    text = _invocation(action)
    return f"[{text}]" if action.nargs == "?" else text


def _invocation(action: argparse.Action) -> str:
    """`-f, --follow`, `--workers N` or `CONFIG`."""
    value = "" if action.nargs == 0 else _value_name(action)
    return f"{', '.join(action.option_strings)} {value}".strip()


def _value_name(action: argparse.Action) -> str:
    if action.metavar is not None:
        name = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    elif action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = action.dest.upper() if action.option_strings else action.dest
    return f"{name} ..." if action.nargs == "+" and not name.startswith("-- ") else name


def _help(action: argparse.Action) -> str:
    # `%(default)s` and its like are not used; a percent sign is written twice for argparse.
    return (action.help or "").replace("%%", "%")


# Settings


def place_page() -> str:
    """Return the settings of `place.` for each kind of manifest."""
    from cluster.manifests.settings import KubeRaySettings, SlurmSettings

    lines = [
        _title("Cluster settings (`place`)"),
        "Cluster settings for `bertrain manifest KIND CONFIG`: `--set place.KEY=VALUE`.",
        "",
    ]
    for kind, settings in (("kuberay", KubeRaySettings), ("slurm", SlurmSettings)):
        lines += [f"## {kind}", "", _one_line(settings.__doc__ or ""), "", *_fields(settings, "place."), ""]
    return _joined(lines)


def _settings_page(
    title: str, about: str, model: type[Section], shared: type[Section] | None = None, *, example: str
) -> str:
    """Return all settings of a config, with links instead of sections that `shared` also has."""
    lines = [
        _title(title),
        f"{about} Every setting can be given on the command line: `--set key.path=value`. {example}",
        "",
        "## Top level",
        "",
        *_fields(model, "", sections=False),
        "",
    ]
    own = vars(model).get("__annotations__", {})
    for name, inner, is_list in sorted(_sections(model), key=lambda one: one[0] not in own):
        known = shared.model_fields.get(name) if shared else None
        if known is not None and known.annotation is inner:
            lines += [f"## {name}", "", *_as_elsewhere(name, inner, model), ""]
        else:
            lines += list(_section(f"{name}[]" if is_list else name, inner))
    return _joined(lines)


def _section(path: str, model: type[Section], level: int = 2) -> Iterator[str]:
    yield from (f"{'#' * level} {path}", "", _about(model), "")
    rows = _fields(model, "", sections=False)
    yield from (*rows, "")
    for name, inner, is_list in _sections(model):
        yield from _section(f"{path}.{name}{'[]' if is_list else ''}", inner, min(level + 1, 4))


def _as_elsewhere(name: str, inner: type[Section], model: type[Section]) -> Iterator[str]:
    yield f"The same settings as in [pretraining](config-pretrain.md#{name})."
    default = model.model_fields[name].default
    if isinstance(default, Section):
        for key, field in inner.model_fields.items():
            value = getattr(default, key)
            if not field.is_required() and value != field.get_default(call_default_factory=True):
                yield f"Different default: `{name}.{key}` is {_value(value)}."


def _about(model: type[Section]) -> str:
    text = _one_line(model.__doc__ or "")
    return text if not text.startswith("Base of all sections") else ""


def _sections(model: type[Section]) -> Iterator[tuple[str, type[Section], bool]]:
    """(name, model, whether it is a list) of every section in `model`."""
    for name, field in model.model_fields.items():
        for one in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, Section):
                yield name, one, typing.get_origin(field.annotation) is tuple
                break


def _fields(model: type[Section], prefix: str, sections: bool = True) -> list[str]:
    inner = set() if sections else {name for name, _, _ in _sections(model)}
    rows = [
        (
            _code(prefix + name),
            _one_line(field.description or ""),
            _type(field),
            _default(field),
            _unit(name, field),
        )
        for name, field in model.model_fields.items()
        if name not in inner
    ]
    return _table(("Setting", "Meaning", "Type", "Default", "Unit"), rows) if rows else []


def _type(field: Any) -> str:
    """A field's type in words, with its bounds."""
    checks = {kind.__metadata__[0]: name for kind, name in _PATHS.items()}  # type: ignore[attr-defined]
    name = next((checks[one] for one in field.metadata if one in checks), "") or _type_name(field.annotation)
    bounds = [
        f"{sign}\u00a0{_number(getattr(one, key))}"
        for one in field.metadata
        for key, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if getattr(one, key, None) is not None
    ]
    return ", ".join([name, *bounds])


def _type_name(annotation: Any) -> str:
    plain = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "empty"}
    if annotation in plain:
        return plain[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _PATHS.get(annotation) or _type_name(inner[0])
    if origin is typing.Literal:
        return ", ".join(_value(one) for one in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(one) for one in inner)
    if origin is tuple:
        return f"list of {_type_name(inner[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is PydanticUndefined else _value(value)


def _value(value: Any) -> str:
    """A default as YAML has it, in code style."""
    if value is None or value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}`"
    return f"`{_number(value)}`"


def _number(value: Any) -> str:
    if isinstance(value, int) and value == 2**63:
        return "2^63"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unit(name: str, field: Any) -> str:
    kinds = {int, float} & {field.annotation, *typing.get_args(field.annotation)}
    unit = next((unit for words, unit in _UNITS if re.search(rf"(^|_)({words})$", name)), "")
    if not kinds or not unit:
        return ""
    is_share = float in kinds and any(
        1 in (getattr(one, "le", None), getattr(one, "lt", None)) for one in field.metadata
    )
    return "fraction" if is_share else unit


# The table of the example configs


def config_table(page: str) -> str:
    """Return the page with models, steps and times updated in each row of an example config."""
    lines = []
    for line in page.split("\n"):
        if (row := re.fullmatch(r"\| `([\w-]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|", line)) and row[
            1
        ] in examples():
            line = f"| `{row[1]}` | {' | '.join(_config_cells(row[1], *(cell.strip() for cell in row.groups()[1:])))} |"
        lines.append(line)
    return "\n".join(lines)


def _config_cells(name: str, model: str, steps: str, text: str, time: str) -> list[str]:
    """Return the cells of a config's row. Measurements and references to other configs or checkpoints stay."""
    from pretrain.config import load_config
    from pretrain.planning.estimate import dry_run
    from pretrain.planning.work import phase_work, vocabulary_rows

    if "`" in model:  # as another config
        return [model, steps, text, time]
    config = load_config(examples()[name], ["corpus.dir=not-prepared"])  # else the numbers would be those of its text
    size = vocabulary_rows(config)
    tokens = sum(phase.sequences * phase_work(config, phase, size).mean_length for phase in config.phases)
    lengths = ", then ".join(dict.fromkeys(f"{phase.sequence_length:,}" for phase in config.phases))
    steps = f"{config.total_steps:,} of {lengths}; {_large(tokens)} tokens"
    if not config.start_from:
        model = _model(config, size)
    if cluster := re.match(r"(\d+) x (H100).*?: ", time):
        shown = dry_run(config, on=f"{cluster[1]}x{cluster[2]}")
        least, usual = re.findall(r"total: +at least ([\d.]+ \w+) on .*; about ([\d.]+ \w+) expected", shown)[0]
        time = f"{cluster[0]}{least}" + f" to {usual}" * (usual != least)
    return [model, steps, text, time]


def _model(config: Any, size: int) -> str:
    from pretrain.objectives import make_objective

    objective, shape = make_objective(config, size), config.model
    family = {"bert": "BERT", "modernbert": "ModernBERT"}[shape.family]
    optimizer = ", LAMB" if config.optimizer.name == "lamb" else ""
    more = {name: count for name, count, _ in objective.parameters()} if len(objective.shapes) > 1 else {}
    counts = ", ".join(f"{name} {_large(count)}" for name, count in more.items()) or _large(objective.trained)
    return f"{family}, {shape.layers} x {shape.hidden}{optimizer}; {counts}"


def _large(number: float) -> str:
    """Such as 6.4 M."""
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.1f} {unit}"


# Metrics and exit codes


def metrics_page() -> str:
    """Return all fields of metrics.jsonl."""
    lines = [
        _title("Metrics"),
        "`metrics.jsonl` in the run folder has one JSON object per line: a training record, an evaluation or an event. "
        "NaN and infinity are written as null. A fraction is between 0 and 1.",
        "",
        "## Training records",
        "",
        *_metrics(TRAINING_METRICS),
        "",
        "## Evaluations",
        "",
        "An evaluation also has the losses and accuracies above or, in fine-tuning, the scores of the task.",
        "",
        *_metrics(EVALUATION_FIELDS),
        "",
        "## Events",
        "",
        *_metrics(EVENT_FIELDS),
        "",
        *_table(("Event", "Meaning"), [(_code(name), meaning) for name, meaning in EVENTS.items()]),
        "",
        "## Probes",
        "",
        "`probes.jsonl` has one JSON object per scored checkpoint, with `time` as in events and `split`: `probe`.",
        "",
        *_metrics(PROBE_FIELDS),
    ]
    return _joined(lines)


def _metrics(metrics: dict[str, Metric]) -> list[str]:
    rows = [(_code(name), _one_line(metric.description), metric.unit) for name, metric in metrics.items()]
    return _table(("Field", "Meaning", "Unit"), rows)


# Exit codes that no `RunError` has.
_OTHER_CODES = {
    0: "Done.",
    1: "An internal error (a bug); a traceback is printed.",
}


def exit_codes_page() -> str:
    """Return the exit codes of all commands, from the error classes."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RunError)]
    codes = {kind.exit_code: _one_line(kind.__doc__ or "") for kind in kinds if kind is not errors.RunError}
    rows = [(f"`{code}`", meaning) for code, meaning in sorted({**_OTHER_CODES, **codes}.items())]
    lines = [
        _title("Exit codes"),
        "Every command ends with one of these codes. Under torchrun, the code is torchrun's.",
        "",
        *_table(("Code", "Meaning"), rows),
    ]
    return _joined(lines)


# Markdown


def _title(text: str) -> str:
    return f"{_NOTE}\n\n# {text}\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A Markdown table. A column in which every cell is empty is left out."""
    keep = [index for index in range(len(header)) if any(row[index] for row in rows)]
    cells = [[_cell(row[index]) for index in keep] for row in rows]
    head = [header[index] for index in keep]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(keep), *cells)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


def _one_line(text: str) -> str:
    """`text` without line breaks, and with what Markdown would take for markup made harmless."""
    text = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_])", r"\\\1", part) for part in parts)


def _joined(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    for path in write():
        print(f"{path.relative_to(ROOT)}: written")
