#!/usr/bin/env bash
# On a machine with a Hopper GPU: every kernel against its definition, then the table of times.
# Needs Python >= 3.12 with jax[cuda13], jaxtyping, numpy and pytest; PYTHON names another one.
# Writes device_tests.txt, kernels.md and kernels.json to $OUT, or to docs/results. Under 5 minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-docs/results}
mkdir -p "$out"

export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda}
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
unset KVJAX_KERNELS
"$python" - <<'PY'
import sys

if sys.version_info < (3, 12):
    sys.exit(f"Python {sys.version.split()[0]}: 3.12 or newer is needed; set PYTHON")
try:
    import jax, jaxtyping, numpy, pytest
except ImportError as missing:
    sys.exit(f"{missing}: pip install 'jax[cuda13]' jaxtyping numpy pytest")
try:
    devices = jax.devices()
except Exception as none:
    sys.exit(f"JAX finds no GPU here ({type(none).__name__}: {none})")
print(f"{devices[0].device_kind}, jax {jax.__version__}")
PY

status=0
timeout 150 "$python" -m pytest -p no:cacheprovider --confcutdir=tests/device tests/device -q -rs \
    --durations=5 2>&1 | tee "$out/device_tests.txt" || status=$?
# The table is of use also where a kernel is wrong.
timeout 150 "$python" -m benchmarks.kernels --seconds 90 --out "$out" || status=$?
exit "$status"
