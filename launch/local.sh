#!/usr/bin/env bash
# Train SPEC on this machine:   launch/local.sh SPEC [a.b=c …] [options of `ptrain train`]
#
# `ptrain train` starts one process per rank by itself, and anew with --max-restarts N. To use torchrun
# instead (which listens on all interfaces), set LAUNCHER=torchrun; NPROC is then the number of ranks.
set -euo pipefail

if [[ $# -eq 0 || $1 == -h || $1 == --help ]]; then
  sed -n '2,5s/^# \{0,1\}//p' "$0"
  exit 2
fi

case ${LAUNCHER:-ptrain} in
  ptrain)
    exec python -m ptrain train "$@"
    ;;
  torchrun)
    # The agent's store is otherwise handed from a dead attempt to the next one (docs/howto/launch.md).
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    exec torchrun --standalone --nproc-per-node "${NPROC:?set NPROC to the number of ranks}" \
      --max-restarts "${MAX_RESTARTS:-0}" -m ptrain.train "$@"
    ;;
  *)
    echo "LAUNCHER=$LAUNCHER is not known: write ptrain or torchrun" >&2
    exit 2
    ;;
esac
