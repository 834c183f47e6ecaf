"""Renders the manifest of a run from the template of its kind."""

import json
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox

from cluster.manifests.run import template_values
from cluster.manifests.settings import KubeRaySettings, SlurmSettings
from pretrain.common.errors import InputError, printable
from pretrain.common.wording import counted
from pretrain.config import RunConfig

# {kind: (class of the section `place`, file name of the template)}
KIND_SETTINGS = {"kuberay": (KubeRaySettings, "kuberay.yaml.j2"), "slurm": (SlurmSettings, "slurm.sbatch.j2")}


def render(
    kind: str, run_type: type[RunConfig], path: Path | str, overrides: Sequence[str] = (), template: Path | None = None
) -> str:
    """Return the manifest of the run in the YAML file `path`, as the text of one file.

    `overrides` are strings `key.path=value`, also for the section `place`; `template` replaces the built-in one.
    """
    return fill(kind, template_values(path, run_type, KIND_SETTINGS[kind][0], overrides), template)


def fill(kind: str, values: dict[str, Any], template: Path | None = None) -> str:
    """Render the user's `template`, or the built-in one. For an error in the user's, an `InputError` names the line."""
    builtin = Path(__file__).parent / "templates" / KIND_SETTINGS[kind][1]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {function.__name__: function for function in (tojson, sh, block, comment, heredoc, counted)}
    try:
        return environment.from_string((template or builtin).read_text(encoding="utf-8")).render(values)
    except Exception as error:  # a template's expressions may raise anything
        if not template:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = getattr(error, "lineno", None) or (lines or [0])[-1]
        problem = f"line {line}: {error}" if line else getattr(error, "strerror", None) or str(error)
        problem = " ".join(problem.split()).rstrip(".")
        raise InputError(f"{template}: {problem}. Correct it, or start with a copy of {builtin}.") from None


def tojson(value: Any) -> str:
    """Return JSON that is also one line of YAML: line separators and invisible characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def sh(value: Any) -> str:
    """Quote a value as a single shell word."""
    return shlex.quote(str(value))


def block(text: str, indent: int) -> str:
    """Return `text` as a YAML literal block with this indent, or as a quoted scalar if a block cannot hold it."""
    lines = text.removesuffix("\n").split("\n")
    if not text.endswith("\n") or not lines[-1] or lines[0][:1] in ("", " ") or not all(map(str.isprintable, lines)):
        return tojson(text)
    return "\n".join(["|", *(" " * indent + line if line else "" for line in lines)])


def comment(text: str) -> str:
    """Return `text` as comment lines for YAML or a shell script, one for each line; handles all line separators."""
    return "\n".join(f"# {printable(line)}".rstrip() for line in text.splitlines())


def heredoc(text: str, command: str) -> str:
    """Return shell lines that pipe `text`, with a single line break at its end, into `command`."""
    lines, delimiter = text.rstrip("\n"), "CONFIG"
    while delimiter in lines.split("\n"):
        delimiter += "_"
    return f"{command} <<'{delimiter}'\n{lines}\n{delimiter}"
