#!/bin/bash
# One machine, 8 GPUs. Usage: launch-1x8.sh RECIPE.toml OUT [more arguments of orl-train orl]
set -euo pipefail
here=$(dirname "$(realpath "$0")")
recipe=$1 out=$2
shift 2
exec accelerate launch --config_file "$here/fsdp2-1x8.yaml" -m orl_train orl "$recipe" --out "$out" "$@"
