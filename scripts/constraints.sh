#!/bin/sh
# Writes constraints.txt anew: the newest versions that pyproject.toml allows, resolved together
# in a fresh environment. JAX stays at the version that current CUDA 13 images carry.
# Run the tests before committing the result.
set -eu

cd "$(dirname -- "$0")/.."
jax='jax==0.11.2'
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$(sh scripts/find_python.sh)" -m venv "$scratch/venv"
python=$scratch/venv/bin/python
"$python" -m pip install -qq --disable-pip-version-check "$jax" -e '.[test,plot,hub,bench]'
{
    printf '# The versions the tests run with. Written by scripts/constraints.sh; do not edit.\n'
    "$python" -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools |
        LC_ALL=C sort -f
} >"$scratch/constraints.txt"
mv "$scratch/constraints.txt" constraints.txt
