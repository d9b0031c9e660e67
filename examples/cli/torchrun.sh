#!/usr/bin/env bash
# The same command on every node, with the address of one of them and a free port there:
#   HEAD=node0:29500 bash examples/cli/torchrun.sh
# NODES and DEVICES (of each node) are 2 unless set; further arguments go to the program.
set -euo pipefail
: "${HEAD:?set HEAD to host:port of one of the nodes}"
here="$(dirname "$(realpath "$0")")"
nodes="${NODES:-2}" devices="${DEVICES:-2}"
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$devices" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-two_nodes}" --max-restarts "${RESTARTS:-0}" \
  "$here/main.py" fit --config "$here/two_nodes.yaml" \
  --trainer.num_nodes "$nodes" --trainer.devices "$devices" "$@"
