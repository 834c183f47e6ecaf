#!/usr/bin/env bash
# The entry point: sets up .venv on first use, then runs the console command bertrain. ./launch.sh --help
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv
lock=$root/requirements.lock
log=$venv/install.log

# Prints the list of commands in the reference, which docs/generate.py writes from the parser.
list_commands() {
    awk '/^```/ { if (inside) exit; inside = 1; next } inside' "$root/docs/reference/commands.md"
}

usage() {
    printf 'usage: ./launch.sh COMMAND [arguments]      (help COMMAND describes a command)\n\n'
    list_commands
    cat <<'TEXT'

Develop:
  bench                compare speed and quality with other software
  docs                 serve the documentation as a site on 127.0.0.1
  test                 run lint, type checks and tests; with arguments, pytest

The first command sets up .venv next to this file.
PYTHON=/path/to/python3 chooses its Python (3.10 to 3.13).
TEXT
}

usage_docs() {
    cat <<'TEXT'
usage: ./launch.sh docs [--port N | --build DIR | --generate]

Build the documentation as a static site and serve it on this machine only.

  --port N      port on 127.0.0.1 (default: 8000)
  --build DIR   write the site's files to DIR and do not serve them
  --generate    write docs/reference from the code and do nothing else
TEXT
}

usage_test() {
    cat <<'TEXT'
usage: ./launch.sh test [pytest arguments]

Without arguments: run ruff check, ruff format --check, pyright (with Python 3.11 only) and pytest. With arguments: run
only pytest with them.

examples:
  ./launch.sh test
  ./launch.sh test tests/config/test_config.py
  ./launch.sh test -k precision

.venv/bin/python -m pytest --help lists the arguments of pytest.
TEXT
}

asks_for_help() { # [arguments]
    [[ " $* " == *" --help "* || " $* " == *" -h "* ]]
}

is_command() { # NAME
    [[ $'\n'$(list_commands) == *$'\n'"  $1 "* ]]
}

print_error() { # LINE... `error:` is red, as in the console command
    local format='error: %s\n'
    if [[ -z ${NO_COLOR:-} ]] && { [[ ${FORCE_COLOR:-0} != 0 ]] || [[ -t 2 && ${TERM:-} != dumb ]]; }; then
        format='\e[1;31merror:\e[0m %s\n'
    fi
    printf "$format" "$@" >&2
}

fail() {
    print_error "$@"
    exit 3
}

# Prints the first suitable Python, or fails with advice.
find_python() {
    local candidate candidates=(python3 python3.12 python3.11 python3.13 python3.10)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
                fail "$candidate cannot create virtual environments. Install its venv module (apt-get install python3-venv)."
            echo "$candidate"
            return
        fi
    done
    if [[ -n ${PYTHON:-} ]]; then
        fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13. Set it to one, or unset it."
    fi
    fail "No Python 3.10 to 3.13 found. Install one, or set its path: PYTHON=/path/to/python3 ./launch.sh"
}

# Prints a checksum of the files that determine the packages; a stamp with it means that they are installed.
checksum() {
    cat "$lock" "$root/pyproject.toml" | cksum
}

# Succeeds if .venv was created at this path, not copied: its scripts contain Python's absolute path.
is_in_place() {
    local lines
    mapfile -t -n 2 lines 2>/dev/null <"$venv/bin/bertrain" || return
    # pip writes #!PYTHON, and in a path with a space "PYTHON" on a second line.
    [[ ${lines[*]} =~ (/[^\"]*)/python && ${BASH_REMATCH[1]} -ef $venv/bin ]]
}

is_set_up() { # EXTRA
    is_in_place && [[ -f $venv/stamp-$1 && $(<"$venv/stamp-$1") == "$(checksum)" ]]
}

# Terminates a process group and waits until it has exited, for at most ten seconds.
end_group() { # PID
    local tries=100
    kill -- "-$1" 2>/dev/null || return 0
    while ((tries--)) && kill -0 -- "-$1" 2>/dev/null; do
        wait "$1" 2>/dev/null || true
        sleep 0.1
    done
}

# Prints the current step of pip, such as "Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.3 MB)", from its log.
pip_step() {
    local line
    line=$(grep -E '^ *(Collecting|Downloading|Building|Preparing|Installing) ' "$log" 2>/dev/null | tail -n 1) || true
    line=${line#"${line%%[! ]*}"}
    [[ $line != Installing\ collected* ]] || line="Installing the packages"
    echo "${line:0:70}"
}

# Runs a command with its output in the log. Shows time and pip's step on a terminal; elsewhere a line every 10 s.
with_progress() { # TEXT COMMAND...
    local text=$1 start=$SECONDS job status last_line=$SECONDS
    shift
    # In a separate process group, which is terminated as a whole; Ctrl-C does not reach it.
    set -m
    # Without the lock's descriptor: a command that outlives this script must not hold the lock.
    "$@" >>"$log" 2>&1 </dev/null 9<&- &
    job=$!
    set +m
    trap 'end_group "$job"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    printf '%s ...\n' "$text" >&2
    while kill -0 "$job" 2>/dev/null; do
        if [[ -t 2 ]]; then
            printf '\r\033[K  %d s  %s' $((SECONDS - start)) "$(pip_step)" >&2
        elif ((SECONDS >= last_line + 10)); then
            last_line=$SECONDS
            printf '  %d s  %s\n' $((last_line - start)) "$(pip_step)" >&2
        fi
        sleep 0.5
    done
    wait "$job" && status=0 || status=$?
    if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
    ((status)) || printf '  ready after %d s\n' $((SECONDS - start)) >&2
    trap - EXIT INT TERM
    return "$status"
}

# Creates .venv if PYTHON is not empty, and installs PACKAGE.
install() { # PYTHON PACKAGE
    [[ -z $1 ]] || "$1" -m venv "$venv" || return
    # --use-pep517: before 23.1, as in Debian 12, pip builds sdists with whatever their setup.py downloads.
    "$venv/bin/python" -m pip install --disable-pip-version-check --use-pep517 --editable "$2" --constraint "$lock"
}

# Creates or extends .venv so that the packages of EXTRA are installed. A second command at the same time waits.
set_up() { # EXTRA: base, test, docs or bench
    local extra=$1 package="$root[all]" python=""
    is_set_up "$extra" && return
    exec 9<"$lock"
    if ! flock --nonblock 9; then
        echo "Waiting for another command that sets up .venv ..." >&2
        flock 9 || fail "flock failed on $lock. Install util-linux."
    fi
    if ! is_set_up "$extra"; then
        is_in_place || rm -f "$venv"/stamp-*
        # Without any stamp, .venv is incomplete or a copy: start over.
        if ! compgen -G "$venv/stamp-*" >/dev/null; then
            python=$(find_python)
            [[ ! -e $venv || -f $venv/made-by-launch.sh ]] ||
                fail "$venv already exists and was not created by launch.sh. Move it, then run the same command again."
            rm -rf "$venv"
            mkdir "$venv" && touch "$venv/made-by-launch.sh" ||
                fail "$venv cannot be created. Is the disk full, or the folder read-only?"
        fi
        is_set_up base || rm -f "$venv"/stamp-*
        [[ $extra == base ]] || package="$root[all,$extra]"
        if ! with_progress "Setting up .venv ($extra), log in .venv/install.log" install "$python" "$package"; then
            tail -n 12 "$log" >&2
            fail "The set-up failed; its last lines are above, the full log is $log." \
                "Check the network or pip's index and the disk space ($(df -h "$root" | awk 'END { print $4 }') free), then run the same command again."
        fi
        checksum >"$venv/stamp-base"
        checksum >"$venv/stamp-$extra"
    fi
    exec 9<&-
}

run_tests() {
    local python=$venv/bin/python failed=() version
    cd "$root"
    if (($#)); then
        exec "$python" -m pytest "$@"
    fi
    version=$("$python" --version)
    echo "$version"
    "$venv/bin/ruff" check || failed+=("ruff check")
    "$venv/bin/ruff" format --check || failed+=("ruff format --check")
    # The version of numpy, and so its type annotations, depends on Python's version.
    if [[ $version == "Python 3.11."* ]]; then
        "$venv/bin/pyright" --pythonpath "$python" || failed+=("pyright")
    else
        echo "pyright: not run; types are checked with Python 3.11"
    fi
    "$python" -m pytest || failed+=("pytest")
    ((${#failed[@]})) || exit 0
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
}

command=${1:---help}
[[ $# -eq 0 ]] || shift
case $command in
    help)
        (($#)) || set -- --help
        exec "$root/launch.sh" "$1" --help
        ;;
    -h | --help)
        usage
        ;;
    --version)
        sed -n 's/^version = "\(.*\)"/bertrain \1/p' "$root/pyproject.toml"
        ;;
    docs)
        if asks_for_help "$@"; then
            usage_docs
            exit
        fi
        set_up docs
        exec "$venv/bin/python" "$root/docs/build.py" "$@"
        ;;
    test)
        if asks_for_help "$@"; then
            usage_test
            exit
        fi
        set_up test
        run_tests "$@"
        ;;
    bench)
        set_up bench
        PYTHONPATH=$root PYTHONSAFEPATH=1 BERTRAIN_PROGRAM=./launch.sh exec "$venv/bin/python" -m tests.bench "$@"
        ;;
    *)
        # Once .venv is set up, the console command reports an unknown command and suggests a similar one.
        if ! is_command "$command" && ! is_set_up base; then
            print_error "'$command' is not a command; ./launch.sh --help lists them."
            exit 2
        fi
        set_up base
        PYTHONSAFEPATH=1 BERTRAIN_PROGRAM=./launch.sh exec "$venv/bin/bertrain" "$command" "$@"
        ;;
esac
