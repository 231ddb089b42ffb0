#!/usr/bin/env bash
# The nightly training. More flags can follow:  bash train.sh --data /data/stock --epochs 5
set -euo pipefail

exec python "$(dirname "$0")/train.py" \
    --batch-size 256 \
    --num-workers 40 \
    --persistent-workers \
    --pin-memory \
    --amp bf16 \
    "$@"
