"""Completion scripts for `bertrain` and ./launch.sh, in bash and zsh: shtab's, extended by values of our arguments."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from pretrain.common.commands import Parser
from pretrain.common.examples import CONFIGS, KINDS, examples

# Suffix of the shell function that completes an argument, by its attribute or the first word of its metavar. Other
# arguments complete their choices, or nothing. shtab treats results of functions with `_file` or `_dir` as paths.
_KINDS = {
    **dict.fromkeys(("start_from", "RUN", "MODEL", "JOB", "RUN@STEP"), "dir_of_run"),
    **dict.fromkeys(("texts", "general", "FILE", "PATH"), "file"),
    "DIR": "dir",
    "CONFIG": "file_of_any",
    "--": "file_of_job",
    "example": "example",
}
_CONFIGS_OF = {"prepare": "pretrain", "pretrain": "pretrain", "finetune": "finetune", "sweep": "finetune"}


class MarkedParser(Parser):
    """A parser whose arguments name the functions that complete them, in the form that shtab reads."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        kind = _KINDS.get(action.dest) or _KINDS.get(str(action.metavar).split(" ")[0])
        if kind == "file_of_any":
            kind = f"file_of_{_CONFIGS_OF.get(self.prog.split(' ')[-1], 'any')}"
        if kind:
            action.complete = dict.fromkeys(("bash", "zsh"), f"_bertrain_{kind}")  # type: ignore[attr-defined]
        return action


def script(parser: Parser, shell: str) -> str:
    """Return the completion script for `shell`, bash or zsh."""
    import shtab

    parser.prog = "bertrain"
    # The last lines of shtab's zsh script complete a single command, and nothing if another script sources it.
    base = shtab.complete(parser, shell).partition("\ntypeset -A opt_args\n")[0]
    if shell == "zsh":
        base = base.replace("#compdef bertrain", "#compdef bertrain launch.sh").replace('"(*):', '"*:')
        base = re.sub(r'^(  "\*?--[\w-]+)(\[.*\]:)', r"\1=\2", base, flags=re.MULTILINE)  # accept --keep=all, too
    extension = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    for kind in KINDS:
        names = [name for name, path in examples().items() if path.is_relative_to(CONFIGS / kind)]
        extension = extension.replace(kind.upper(), " ".join(names))
    return f"{base}\n{extension}".rstrip()
