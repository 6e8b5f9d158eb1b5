#!/usr/bin/env bash
# Start one process per GPU on one or several machines. Without GPUs, the processes communicate through gloo.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: [NNODES=1] [NODE_RANK=0] [MASTER_ADDR=127.0.0.1] [PORT=29500]" \
        "$0 CONFIG GPUS [train.py arguments]" >&2
    exit 2
fi

exec python -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$2" \
    "$(dirname "$0")/train.py" "$1" --launcher pytorch "${@:3}"
