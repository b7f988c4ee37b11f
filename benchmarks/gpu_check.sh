#!/usr/bin/env bash
# Checks correctness on the accelerator and prints a speed table; under 6 minutes, builds and downloads nothing.
# usage: benchmarks/gpu_check.sh [--small]      --small: a tiny model, for trying the script itself on a CPU
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
