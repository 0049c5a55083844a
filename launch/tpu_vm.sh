#!/bin/sh
# Trains on every worker of a Cloud TPU slice (one TPU VM or a pod), from this machine:
#
#   launch/tpu_vm.sh NAME ZONE CONFIG OUTPUT
#
# OUTPUT is a directory that all workers see at the same path, such as a Filestore share or a
# bucket mounted with gcsfuse. Of this machine the workers get a wheel of this repository and CONFIG;
# other files that CONFIG names have to be there already. The workers find each other; started
# again, the run resumes.
#
# KVJAX_REQUIREMENT is what pip installs there instead of the wheel, such as
# 'kvjax[tpu,train,hub] @ git+https://HOST/kvjax'. A gated model needs a token on the workers:
# `hf auth login` there.
set -eu

if [ $# -ne 4 ]; then
    printf 'launch/tpu_vm.sh: %s arguments; needed are NAME ZONE CONFIG OUTPUT\n' "$#" >&2
    exit 2
fi
name=$1 zone=$2 config=$3 output=$4
[ -f "$config" ] || {
    printf 'launch/tpu_vm.sh: %s: no such file\n' "$config" >&2
    exit 2
}
gcloud=${GCLOUD:-gcloud}
requirement=${KVJAX_REQUIREMENT:-}

copy() {
    "$gcloud" compute tpus tpu-vm scp "$1" "$name:$2" --zone "$zone" --worker=all
}

if [ -z "$requirement" ]; then
    built=$(mktemp -d)
    trap 'rm -rf "$built"' EXIT
    ${PYTHON:-python3} -m pip wheel -q --no-deps -w "$built" "$(dirname "$0")/.."
    wheel=$(basename "$built"/kvjax-*.whl)
    copy "$built/$wheel" "$wheel"
    requirement="./$wheel[tpu,train,hub]"
fi
copy "$config" kvjax-run.yaml
# The images of many TPU VMs have an older Python; uv brings one along.
"$gcloud" compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "set -e
python3.12 -m venv --clear kvjax-venv || {
    python3 -m pip install -q --user uv
    python3 -m uv venv -q --clear --seed --python 3.12 kvjax-venv
}
kvjax-venv/bin/pip install -q '$requirement'
kvjax-venv/bin/kvjax doctor kvjax-run.yaml --output '$output'
kvjax-venv/bin/kvjax train kvjax-run.yaml --output '$output'"
