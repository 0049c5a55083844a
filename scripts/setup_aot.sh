#!/bin/sh
# Makes an environment that compiles for an accelerator without having it: setup_aot.sh tpu|gpu.
# .venv-aot-tpu holds JAX with libtpu, .venv-aot-gpu JAX with the CUDA plugin and NVIDIA's
# assembler; about 1.4 GB each. Nothing of the project is installed there: it runs from the tree.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
platform=${1:-}
case $platform in
    tpu) packages='libtpu==0.0.48' ;;
    gpu) packages='nvidia-cuda-nvcc==13.* nvidia-nvvm==13.*' ;;
    *)
        printf 'kvjax: platform %s: allowed are tpu and gpu\n' "'$platform'" >&2
        exit 2
        ;;
esac
venv=.venv-aot-$platform
stamp=$venv/kvjax-setup

wanted() { cksum constraints.txt scripts/setup_aot.sh; }
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(wanted)" ] && exit 0

python=$(sh scripts/find_python.sh)
printf 'kvjax: setting up %s with %s (about 1.4 GB)\n' "$venv" "$python"
rm -rf "$venv"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq -c constraints.txt jax jaxtyping numpy pytest
if [ "$platform" = gpu ]; then
    # Without their dependencies: cuDNN, NCCL and the like are for running, not for compiling.
    version=$("$venv/bin/python" -c 'import jaxlib; print(jaxlib.__version__)')
    pip install -qq --no-deps "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"
fi
pip install -qq -c constraints.txt $packages
wanted >"$stamp"
