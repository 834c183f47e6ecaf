"""The manifest of a run, rendered from the template of its kind."""

import json
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox

from cluster.manifests.run import values_of
from cluster.manifests.settings import KubeRaySettings, SlurmSettings
from pretrain.common.errors import InputError, printable
from pretrain.common.wording import counted
from pretrain.config import RunConfig

KIND_SETTINGS = {"kuberay": (KubeRaySettings, "kuberay.yaml.j2"), "slurm": (SlurmSettings, "slurm.sbatch.j2")}


def render(
    kind: str, run_type: type[RunConfig], config: Path | str, overrides: Sequence[str] = (), copy: Path | None = None
) -> str:
    """Return the manifest of the run in the YAML file `config`, as the text of one file.

    `overrides` are `key.path=value`, also below `place.`; `copy` is a template of the user. `InputError` on bad input.
    """
    return fill(kind, values_of(config, run_type, KIND_SETTINGS[kind][0], overrides), copy)


def fill(kind: str, values: dict[str, Any], copy: Path | None = None) -> str:
    """Render a template with `values`. An error names its line, and the file from which it can be copied again."""
    builtin = Path(__file__).parent / "templates" / KIND_SETTINGS[kind][1]
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {one.__name__: one for one in (tojson, sh, block, comment, heredoc, counted)}
    try:
        return environment.from_string((copy or builtin).read_text(encoding="utf-8")).render(values)
    except Exception as error:  # whatever its expressions raise
        if not copy:
            raise
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = getattr(error, "lineno", None) or (frames or [0])[-1]
        problem = f"line {line}: {error}" if line else getattr(error, "strerror", None) or str(error)
        problem = " ".join(problem.split()).rstrip(".")
        raise InputError(f"{copy}: {problem}. Correct it, or start with a copy of {builtin}.") from None


def tojson(value: Any) -> str:
    """Return JSON that is YAML on one line: line separators and invisible characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def sh(value: Any) -> str:
    """Quote a value as one word of a shell."""
    return shlex.quote(str(value))


def block(text: str, width: int) -> str:
    """Return a literal block of YAML, indented by `width`, or a quoted scalar where a block is not allowed."""
    lines = text.removesuffix("\n").split("\n")
    if not text.endswith("\n") or not lines[-1] or lines[0][:1] in ("", " ") or not all(map(str.isprintable, lines)):
        return tojson(text)
    return "\n".join(["|", *(" " * width + line if line else "" for line in lines)])


def comment(text: str) -> str:
    """`text` as comment lines of YAML or of a shell script; every line separator of either starts a new comment."""
    return "\n".join(f"# {printable(line)}".rstrip() for line in text.splitlines())


def heredoc(text: str, command: str) -> str:
    """Shell lines that pass `text` to the standard input of `command`, unchanged but for line breaks at its end."""
    lines, end = text.rstrip("\n"), "CONFIG"
    while end in lines.split("\n"):
        end += "_"
    return f"{command} <<'{end}'\n{lines}\n{end}"
