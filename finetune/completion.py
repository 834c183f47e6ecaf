"""Scripts that make bash and zsh complete `bertrain` and ./launch.sh: shtab's, told of the values of our arguments."""

from __future__ import annotations

import argparse
import re
from typing import Any

from pretrain.common.commands import Parser
from pretrain.common.examples import CONFIGS, KINDS, examples

# The function that completes an argument, by its attribute or the first word of its metavar. Others complete their
# choices, or nothing. shtab reads what a function with `_file` or `_dir` in its name offers as paths.
_KINDS = {
    **dict.fromkeys(("start_from", "RUN", "MODEL", "JOB", "RUN@STEP"), "dir_of_run"),
    **dict.fromkeys(("texts", "general", "FILE", "PATH"), "file"),
    "DIR": "dir",
    "CONFIG": "file_of_any",
    "--": "file_of_job",
    "example": "example",
}
_CONFIGS_OF = {"prepare": "pretrain", "pretrain": "pretrain", "finetune": "finetune", "sweep": "finetune"}

_BASH = """
_bertrain_file() { compgen -f -- "$1"; }
_bertrain_dir() { compgen -d -- "$1"; }
_bertrain_dir_of_run() { compgen -d -- "$1"; [[ ! -d runs ]] || (cd runs && compgen -d -- "$1"); }
_bertrain_yaml() { compgen -f -X '!*.y*ml' -- "$1"; compgen -d -- "$1"; }
_bertrain_file_of_pretrain() { compgen -W "PRETRAIN" -- "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_finetune() { compgen -W "FINETUNE" -- "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_any() { _bertrain_example "$1"; _bertrain_yaml "$1"; }
_bertrain_file_of_job() { compgen -W "pretrain finetune prepare" -- "$1"; _bertrain_file_of_any "$1"; }
_bertrain_example() { compgen -W "PRETRAIN FINETUNE" -- "$1"; }
_bertrain() {
  local own=help root=${1%/*}
  if [[ $1 == *launch.sh ]]; then
    [[ -d ${root/#\\~/$HOME}/finetune ]] || return 0 # of another project
    own+=" bench docs test"
  fi
  # bash splits at an equals sign: --grid=x becomes two words, and --set a=b the one word that shtab expects.
  local words=("${COMP_WORDS[@]:0:COMP_CWORD+1}") COMP_WORDS=() COMP_CWORD i
  for ((i = 0; i < ${#words[@]}; i++)); do
    if [[ ${words[i]} != = ]]; then
      COMP_WORDS+=("${words[i]}")
    elif [[ ${words[i - 1]} != --* ]]; then
      ((i += 1))
    elif ((i + 1 == ${#words[@]})); then
      COMP_WORDS+=("")
    fi
  done
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_bertrain
  ((COMP_CWORD > 1)) || COMPREPLY+=($(compgen -W "$own" -- "$2"))
}
complete -o bashdefault -o default -F _bertrain bertrain launch.sh"""

_ZSH = """
_bertrain_file() { _files }
_bertrain_dir() { _files -/ }
_bertrain_dir_of_run() { _alternative "runs:run:(runs/*(N/:t))" "folders:folder:_files -/" }
_bertrain_yaml() { _files -g "*.y*ml" }
_bertrain_file_of_pretrain() { compadd -- PRETRAIN; _bertrain_yaml }
_bertrain_file_of_finetune() { compadd -- FINETUNE; _bertrain_yaml }
_bertrain_file_of_any() { _bertrain_example; _bertrain_yaml }
_bertrain_file_of_job() { compadd -- pretrain finetune prepare; _bertrain_file_of_any }
_bertrain_example() { compadd -- PRETRAIN FINETUNE }
_bertrain() {
  local own=(help)
  if [[ $service == launch.sh ]]; then
    [[ -d ${${words[1]:h}/#\\~/$HOME}/finetune ]] || { _default; return }
    own+=(bench docs test)
  fi
  if ((CURRENT == 2)); then compadd -- $own; fi
  if [[ $words[2] == help ]]; then _shtab_bertrain_commands; else _shtab_bertrain; fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _bertrain "$@"
else
  (($+functions[compdef])) || { autoload -Uz compinit && compinit }
  compdef _bertrain bertrain launch.sh
fi"""


class MarkedParser(Parser):
    """A parser whose arguments name the functions that complete them, as shtab reads it."""

    def add_argument(self, *names: Any, **given: Any) -> argparse.Action:
        action = super().add_argument(*names, **given)
        kind = _KINDS.get(action.dest) or _KINDS.get(str(action.metavar).split(" ")[0])
        if kind == "file_of_any":
            kind = f"file_of_{_CONFIGS_OF.get(self.prog.split(' ')[-1], 'any')}"
        if kind:
            action.complete = dict.fromkeys(("bash", "zsh"), f"_bertrain_{kind}")  # type: ignore[attr-defined]
        return action


def script(parser: MarkedParser, shell: str) -> str:
    """The script for a shell, bash or zsh."""
    import shtab

    parser.prog = "bertrain"
    # The last lines of shtab's zsh script complete one command, and nothing where the script is read by another.
    theirs, ours = shtab.complete(parser, shell).partition("\ntypeset -A opt_args\n")[0], _BASH
    if shell == "zsh":
        theirs = theirs.replace("#compdef bertrain", "#compdef bertrain launch.sh").replace('"(*):', '"*:')
        theirs = re.sub(r'^(  "\*?--[\w-]+)(\[.*\]:)', r"\1=\2", theirs, flags=re.MULTILINE)  # take --keep=all, too
        ours = _ZSH
    for kind in KINDS:
        names = [name for name, path in examples().items() if path.is_relative_to(CONFIGS / kind)]
        ours = ours.replace(kind.upper(), " ".join(names))
    return theirs + ours
