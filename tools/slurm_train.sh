#!/usr/bin/env bash
# Start one process per GPU with Slurm.
set -euo pipefail

if [ $# -lt 4 ]; then
    echo "usage: [GPUS=8] [GPUS_PER_NODE=8] [CPUS_PER_TASK=5] [SRUN_ARGS=]" \
        "$0 PARTITION JOB_NAME CONFIG WORK_DIR [train.py arguments]" >&2
    exit 2
fi

# SRUN_ARGS is not quoted, because it may contain several arguments.
# shellcheck disable=SC2086
exec srun -p "$1" \
    --job-name="$2" \
    --gres=gpu:"${GPUS_PER_NODE:-8}" \
    --ntasks="${GPUS:-8}" \
    --ntasks-per-node="${GPUS_PER_NODE:-8}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    python -u "$(dirname "$0")/train.py" "$3" --work-dir "$4" --launcher slurm "${@:5}"
