#!/usr/bin/env bash
#SBATCH --job-name=two_nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=0:30:00
# sbatch examples/cli/slurm.sh    (--nodes is trainer.num_nodes, --ntasks-per-node is trainer.devices)
# Lightning takes ranks and addresses from SLURM; srun starts one process for each device.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch, from the root of the repository}"
srun "${PYTHON:-python}" examples/cli/main.py fit --config examples/cli/two_nodes.yaml "$@"
