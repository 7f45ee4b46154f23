#!/usr/bin/env bash
# What is measured on a machine with an NVIDIA GPU, in one go of at most nine minutes; the tables come last.
# Uses the Python that has torch, and installs nothing but fxc itself, without what it depends on.
#   benchmarks/gpu.sh [RESULTS_DIRECTORY [NAME [PARTS...]]]
set -uo pipefail
cd "$(dirname "$0")/.."
export CXX=${CXX:-g++} PYTHONUNBUFFERED=1 BENCH_RESULTS=${1:-benchmarks/results}
unset PYTHONDONTWRITEBYTECODE # else every new process compiles Python's own bytecode again, which is then what is timed
name=${2:-h200}
shift $(($# > 2 ? 2 : $#))
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(build load call)
mkdir -p "$BENCH_RESULTS"
python=${PYTHON:-python3}
"$python" -m pip install -q --no-deps --no-build-isolation -e . || exit 1
"$python" -m fxc doctor || true
status=0
"$python" benchmarks/run.py --device cuda --name "$name" --limit 510 "${parts[@]}" >"$BENCH_RESULTS/$name.log" 2>&1 || status=$?
tail -n 60 "$BENCH_RESULTS/$name.log"
exit $status
