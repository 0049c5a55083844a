#!/bin/sh
#SBATCH --job-name=kvjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
# Training on GPUs under SLURM, one process per GPU:
#
#   sbatch launch/slurm.sh CONFIG OUTPUT
#
# OUTPUT is on a file system that all nodes share. VENV names the environment, by default .venv of
# the directory from which it is submitted; it needs JAX for GPUs: pip install '.[gpu,train,hub]'.
# Every process sees all GPUs of its node and takes the one of its SLURM_LOCALID; they find each
# other by SLURM's variables. Two minutes before its time is over the run saves; submitted again
# with the same OUTPUT, it resumes.
set -eu

if [ $# -ne 2 ]; then
    printf 'launch/slurm.sh: %s arguments; needed are CONFIG OUTPUT\n' "$#" >&2
    exit 2
fi
kvjax=${VENV:-$SLURM_SUBMIT_DIR/.venv}/bin/kvjax
srun "$kvjax" doctor "$1" --output "$2"
exec srun "$kvjax" train "$1" --output "$2"
