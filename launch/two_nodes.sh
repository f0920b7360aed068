#!/usr/bin/env bash
# Run one job on two machines. Start it on both, with the same arguments and the first machine's name:
#
#     HEAD=first-machine:29400 launch/two_nodes.sh my_training.py --my-option
#
# Without HEAD, both agents start on this machine and meet on the loopback address, as a dry run:
#
#     launch/two_nodes.sh                                  # the digits example, 2 agents with 2 ranks each
#
# Edit: RANKS is the number of processes per machine. The port must be open between the machines. The store must be
# on a path that rank 0 can write to; the rendezvous decides which machine gets rank 0, so use a shared file system,
# or check both. On machines with several network interfaces, set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.
set -euo pipefail
[ $# -gt 0 ] || set -- examples/digits.py --store runs/digits.zarr

agent() { # agent ADDRESS ARGUMENTS...
    local address=$1
    shift
    torchrun --nnodes=2 --nproc_per_node="${RANKS:-2}" --rdzv_backend=c10d --rdzv_endpoint="$address" \
        --rdzv_id="${JOB:-distcockpit}" "$@"
}

if [ -n "${HEAD:-}" ]; then
    agent "$HEAD" "$@"
else
    address=127.0.0.1:${PORT:-29400}
    agent "$address" --local_addr=127.0.0.1 "$@" &
    second=$!
    trap 'kill "$second" 2>/dev/null || true' EXIT
    agent "$address" --local_addr=127.0.0.1 "$@"
    wait "$second"
fi
