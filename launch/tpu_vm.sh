#!/bin/sh
# Trains on every worker of a Cloud TPU slice (one TPU VM or a pod), from this machine:
#
#   launch/tpu_vm.sh NAME ZONE CONFIG OUTPUT
#
# OUTPUT is a directory that all workers see at the same path, such as a Filestore share or a
# bucket mounted with gcsfuse. The workers find each other; started again, the run resumes.
# KVJAX_SOURCE is what pip installs there (default: kvjax of the package index).
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
source=${KVJAX_SOURCE:-kvjax}

"$gcloud" compute tpus tpu-vm scp "$config" "$name:kvjax-run.yaml" --zone "$zone" --worker=all
"$gcloud" compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command "set -e
python3.12 -m venv kvjax-venv
kvjax-venv/bin/pip install -q '$source[tpu,train,hub]'
kvjax-venv/bin/kvjax doctor kvjax-run.yaml --output '$output'
kvjax-venv/bin/kvjax train kvjax-run.yaml --output '$output'"
