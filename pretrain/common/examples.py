"""The example configs in configs/, the folder next to this file."""

import functools
import itertools
import re
import textwrap
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.common.wording import did_you_mean

CONFIGS = Path(__file__).with_name("configs").resolve()
KINDS = ("pretrain", "finetune")  # kinds of configs, named after the commands that take them


@functools.cache
def examples() -> dict[str, Path]:
    """Return the example configs as name -> file, such as `mini` -> configs/pretrain/mini.yaml."""
    return {
        path.relative_to(CONFIGS / kind).with_suffix("").as_posix(): path
        for kind in KINDS
        for path in sorted((CONFIGS / kind).rglob("*.yaml"))
    }


def config_path(path: Path) -> Path:
    """Return `path`, or the example config of that name if there is no such file. `InputError` for a misspelling."""
    if path.suffix or path.exists():
        return path
    if (name := path.as_posix()) not in examples() and (nearest := did_you_mean(name, examples())):
        raise InputError(f"{path}: no such file; {nearest} `configs` lists the example configs.")
    return examples().get(name, path)


def listing() -> str:
    """Return the names of the example configs, each with the first sentence of its comment."""
    lines = []
    for kind in KINDS:
        lines += ["", f"{kind.capitalize()}:"]
        for name, path in examples().items():
            if path.is_relative_to(CONFIGS / kind):
                lines.append(f"  {name:24}  {_purpose(path)}")
    return "\n".join(lines[1:])


def text_of(name: str) -> str:
    """Return the text of the example config `name`. Raises `InputError` if there is none."""
    if name not in examples():
        advice = f"{did_you_mean(name, examples())} `configs` lists them.".lstrip()
        raise InputError(f"configs: {name!r} is not an example config; {advice}")
    return examples()[name].read_text(encoding="utf-8")


def _purpose(path: Path) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    comment = re.sub(r" ?\([^)]*\)", "", " ".join(line.lstrip("# ") for line in lines))
    return textwrap.shorten(re.split(r"[.:?](?= [A-Z`./]|$)", comment)[0], 90, placeholder=" ...")
