#!/bin/bash
# A training over the nodes of a SLURM job; docs/launching.md explains it.
#
#   sbatch examples/slurm.sh --tp_degree 8 --pp_degree 2 train.py --lr 3e-4
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1      # one launcher on each node; it starts the ranks
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@120        # two minutes before the end: the ranks save and stop
#SBATCH --output=%x-%j.log
set -euo pipefail

if (($# == 0)); then
    echo "usage: sbatch $0 [flags of accelerate-megatron launch] SCRIPT [arguments]" >&2
    exit 2
fi

# Where the ranks of all nodes meet: a port of the first node, another one for each job.
# Not through "head": with pipefail, scontrol's failure to write the rest would end the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 10000))

# Newer versions of srun do not take the CPUs over from sbatch.
# The variables in single quotes are each task's own.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} bash -c '
    exec accelerate-megatron launch --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$0" --main_process_port "$1" "${@:2}"' "$address" "$port" "$@"
