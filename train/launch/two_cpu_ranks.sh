#!/usr/bin/env bash
# Two processes on the CPU, which exchange gradients through gloo: to try multi-process training without a GPU.
#     train/launch/two_cpu_ranks.sh -m essm_train.train_clm [arguments]
#     FSDP2=1 train/launch/two_cpu_ranks.sh -m essm_train.train_clm [arguments]     # sharded
# torchrun, because `accelerate launch --cpu --num_processes 2` starts a single process where there is no MPI.
set -euo pipefail
export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1
if [ "${FSDP2:-0}" = 1 ]; then
    export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP
    export FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT
    export FSDP_CPU_RAM_EFFICIENT_LOADING=false
fi
exec torchrun --standalone --nproc_per_node 2 "$@"
