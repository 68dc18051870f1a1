#!/bin/bash
# Several machines with 8 GPUs each, under Slurm: sbatch --nodes 4 launch-multinode.sh RECIPE.toml OUT [more arguments]
# OUT must lie on a file system that every machine sees. Without Slurm, run the accelerate command on each machine
# with its own --machine_rank and the first machine's address.
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
set -euo pipefail
here=${SLURM_SUBMIT_DIR:-$(dirname "$(realpath "$0")")}  # Slurm runs a copy: submit it from this folder
recipe=$1 out=$2
shift 2
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export here recipe out first
exec srun bash -c 'exec accelerate launch --config_file "$here/fsdp2-multinode.yaml" \
    --num_machines "$SLURM_NNODES" --num_processes "$((8 * SLURM_NNODES))" --machine_rank "$SLURM_PROCID" \
    --main_process_ip "$first" --main_process_port 29500 \
    -m orl_train orl "$recipe" --out "$out" "$@"' bash "$@"
