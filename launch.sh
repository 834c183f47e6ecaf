#!/usr/bin/env bash
# The door: sets up .venv on first use, then hands over to Python. ./launch.sh --help
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
lock=$root/requirements.lock
log=$venv/install.log

usage() {
    cat <<'TEXT'
./launch.sh COMMAND [arguments]      each command takes --help

  demo                       prepare, pretrain and report on text that every Python installation has
  prepare  CONFIG            raw text -> vocabulary, token shards and a corpus card
  pretrain CONFIG            train on local or cluster workers; --workers N, --resume, --dry-run
  export   RUN DIR           its model in the Hugging Face layout; a fine-tuned one also as ONNX with --onnx
  finetune CONFIG            classification, entities or questions, --from a checkpoint; --seeds N, --workers N
  evaluate MODEL [FILE]      official scores of a fine-tuned model on a labelled file
  predict  MODEL [FILE]      its predictions for a file, or for lines of text or JSON
  sweep    CONFIG            a grid of settings; --grid devlin or small-bert, --grid-set KEY=VALUE,VALUE
  glue     [CONFIG]          every task of GLUE in --glue-dir, and the table of the BERT paper
  report   RUN               curves, corpus card and filled-in masks of a run as one HTML page
  dashboard RUN|JOB          curves, events and scores as one HTML page and a W&B workspace; --follow
  manifest KIND CONFIG       kuberay, rayup or slurm: what a real cluster needs to run it; --out FILE
  submit   -- COMMAND CONFIG pretrain, finetune or prepare as a job of a cluster; --address URL, --workers MIN-MAX, --follow
  status JOB | logs JOB | list | stop JOB | delete JOB       of submitted jobs; logs -f goes on, stop saves first
  up | down                  a Ray cluster on this machine, to try jobs on; --nodes N
  doctor                     what this machine has and what is missing; a cluster's with --address URL
  bench    NAME              measurements beside other systems; `all` of them, `compare` two of its results
  docs                       the documentation as a site on 127.0.0.1; --port N, or --build DIR for the files
  test     [pytest args]     lint, types and tests; with arguments only pytest, with them

The first use sets up .venv beside this file. PYTHON=/path/to/python3 chooses the Python for it (3.10 to 3.13).
TEXT
}

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 3
}

# The first Python that will do, or an end with what to do.
find_python() {
    local candidate candidates=(python3 python3.12 python3.11 python3.13 python3.10)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$candidate cannot make virtual environments. Install its venv module (apt-get install python3-venv)."
            echo "$candidate"
            return
        fi
    done
    if [[ -n ${PYTHON:-} ]]; then
        fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13. Name one that is, or unset PYTHON."
    fi
    fail "No Python 3.10 to 3.13 found. Install one, or name it: PYTHON=/path/to/python3 ./launch.sh"
}

# What the installed packages follow from; a stamp with this hash says that they are there.
wanted() {
    cat "$lock" "$root/pyproject.toml" | cksum
}

is_set_up() { # EXTRA
    [[ -f $venv/stamp-$1 && $(<"$venv/stamp-$1") == "$(wanted)" ]]
}

# Runs a command with its output in the log and its time on the terminal.
with_progress() { # TEXT COMMAND...
    local text=$1 start=$SECONDS job
    shift
    "$@" >>"$log" 2>&1 </dev/null &
    job=$!
    if [[ -t 2 ]]; then
        while kill -0 "$job" 2>/dev/null; do
            printf '\r%s ... %d s' "$text" $((SECONDS - start)) >&2
            sleep 0.5
        done
        printf '\r%s ... %d s\n' "$text" $((SECONDS - start)) >&2
    else
        printf '%s ...\n' "$text" >&2
    fi
    wait "$job"
}

# Makes .venv, or adds to it, so that EXTRA's packages are there. Two at once: the second waits for the first.
set_up() { # EXTRA: base, onnx, test, docs or bench
    local extra=$1 package=$root python
    is_set_up "$extra" && return
    exec 9<"$lock"
    flock 9 || fail "flock failed on $lock. Install util-linux."
    if ! is_set_up "$extra"; then
        # Without any stamp it was left half-made: begin again.
        if ! compgen -G "$venv/stamp-*" >/dev/null; then
            python=$(find_python)
            [[ ! -e $venv || -f $venv/made-by-launch.sh ]] ||
                fail "$venv is there already and was not made by launch.sh. Move it away, then run the same command again."
            rm -rf "$venv"
            mkdir "$venv" && touch "$venv/made-by-launch.sh" && "$python" -m venv "$venv" || fail "$python could not make $venv. Is the disk full, or the folder read-only?"
        fi
        is_set_up base || rm -f "$venv"/stamp-*
        [[ $extra == base ]] || package="$root[$extra]"
        if ! with_progress "Setting up .venv ($extra)" \
            "$venv/bin/python" -m pip install --disable-pip-version-check --editable "$package" --constraint "$lock"; then
            tail -n 12 "$log" >&2
            fail "The set-up failed; its last lines are above, all of them in $log." \
                "Check the network or pip's index and the disk space ($(df -h "$root" | awk 'END { print $4 }') free), then run the same command again."
        fi
        wanted >"$venv/stamp-base"
        wanted >"$venv/stamp-$extra"
    fi
    exec 9<&-
}

run_tests() {
    local python=$venv/bin/python failed=()
    cd "$root"
    if (($#)); then
        exec "$python" -m pytest "$@"
    fi
    "$venv/bin/ruff" check || failed+=("ruff check")
    "$venv/bin/ruff" format --check || failed+=("ruff format --check")
    "$venv/bin/pyright" --pythonpath "$python" || failed+=("pyright")
    "$python" -m pytest || failed+=("pytest")
    ((${#failed[@]})) || exit 0
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
}

command=${1:---help}
[[ $# -eq 0 ]] || shift
case $command in
    -h | --help | help)
        usage
        ;;
    demo)
        set_up base
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m finetune demo "$@"
        ;;
    prepare | pretrain | report | dashboard)
        set_up base
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m pretrain "$command" "$@"
        ;;
    finetune | evaluate | predict | sweep | glue)
        set_up base
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m finetune "$command" "$@"
        ;;
    export) # of a fine-tuned model, or of a pretraining run
        module=pretrain extra=base before=
        for run in "$@"; do # the first that is neither an option nor its value
            [[ $run == -* || $before == --checkpoint ]] || break
            before=$run
        done
        [[ ! -f ${run:-}/finetune.json && ! -f ${run:-}/model/finetune.json ]] || module=finetune
        [[ $module == pretrain || " $* " != *" --onnx "* ]] || extra=onnx
        set_up "$extra"
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m "$module" export "$@"
        ;;
    bench)
        set_up bench
        if [[ ${1:-} == finetune ]]; then
            PYTHONSAFEPATH=1 exec "$venv/bin/python" -m finetune bench "${@:2}"
        fi
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m pretrain bench "$@"
        ;;
    doctor | manifest | submit | status | logs | list | stop | delete | up | down)
        set_up base
        PYTHONSAFEPATH=1 exec "$venv/bin/python" -m cluster "$command" "$@"
        ;;
    docs)
        set_up docs
        exec "$venv/bin/python" "$root/docs/build.py" "$@"
        ;;
    test)
        set_up test
        run_tests "$@"
        ;;
    *)
        usage >&2
        printf '\nerror: %s is not a command; choose one of those above.\n' "'$command'" >&2
        exit 2
        ;;
esac
