#!/usr/bin/env bash
# The GPU kit: measures on one GPU what is derived on a CPU. It runs slices of at most nine minutes,
# each of which writes FOLDER/SLICE.json and is skipped if that file exists, and then prints a page.
#
#   benchmarks/gpu.sh [--dry] FOLDER [SLICE ...]
#
# SLICE: names of `gpu_slices.py names`, or `second`: the machine's parts, MFU and speed of compiled
# and padded models, their bytes, and fp8, in 25 minutes. Default: all, after `ptrain selftest`.
# A second machine that has neither network nor all packages gets them from WHEELS, a folder of
# wheels (pip download pyyaml rich). PYTHON is the interpreter, default python3.
# --dry: on a CPU, with tiny models. It tests this script and proves nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

dry=()
if [ "${1:-}" = "--dry" ]; then
    dry=(--dry)
    shift
fi
if [ $# -eq 0 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder="$1"
shift
python="${PYTHON:-python3}"
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if ! "$python" -c 'import yaml, rich' 2>/dev/null; then
    "$python" -m pip install --quiet --no-index --find-links "${WHEELS:?a folder of wheels}" pyyaml rich
fi

# Real NCCL between two ranks that share the card: bytes, peaks and losses, no times.
if [ $# -eq 0 ] && [ ! -e "$folder/selftest.md" ]; then
    devices=(--device cuda)
    if [ ${#dry[@]} -gt 0 ]; then devices=(--device cpu); fi
    PTRAIN_SHARE_GPUS=1 timeout --signal=INT 500 "$python" -m ptrain selftest --ranks 2 --brief \
        "${devices[@]}" --out "$folder/selftest.md" || true # the page has what came to an end
fi

mapfile -t slices < <("$python" benchmarks/gpu_slices.py names "$@")
for slice in "${slices[@]}"; do
    if [ -e "$folder/$slice.json" ]; then
        printf '%s: done before\n' "$slice"
        continue
    fi
    printf '%s …\n' "$slice"
    # a slice that fails leaves no file, and the page names it
    timeout --signal=INT --kill-after=20 520 "$python" benchmarks/gpu_slices.py run "$slice" --out "$folder" \
        "${dry[@]}" || printf '%s: failed\n' "$slice" >&2
done
"$python" benchmarks/gpu_slices.py page "$@" --out "$folder" "${dry[@]}"
