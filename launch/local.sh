#!/usr/bin/env bash
# Run a script on all ranks of this machine:
#
#     launch/local.sh                                      # the digits example on 4 ranks
#     RANKS=2 launch/local.sh my_training.py --my-option   # your own
#
# Edit: nothing; RANKS is the number of processes (one per GPU if there are GPUs).
set -euo pipefail
[ $# -gt 0 ] || set -- examples/digits.py --store runs/digits.zarr
exec torchrun --standalone --nproc_per_node="${RANKS:-4}" "$@"
