#!/usr/bin/env bash
set -euo pipefail
# echo "python nothing.py"
torchrun --nproc-per-node 4 \
    "$(dirname "$0")/healthy.py" \
    --num-workers 12 \
    --epochs "$EPOCHS" "$@"
