#!/bin/sh
# Copy SOURCE with the first part of a heterogeneous job (nodes with a fast network), then check the copy with all parts:
#
#     sbatch --export=ALL,SOURCE=s3://bucket/store.zarr,OUT=/lustre/me/copy slurm-heterogeneous.sh
#
#SBATCH --ntasks=4 --time=01:00:00
#SBATCH hetjob
#SBATCH --ntasks=32
set -eu
mkdir -p "$OUT"
srun --het-group=0 zarrfs stage -q --copy --shard auto "$SOURCE" "$OUT/data"
# ranks count over all parts, so that this makes 36 shares
srun --het-group=0,1 sh -c 'exec zarrfs check -q --shard auto --report "$OUT/part-$SLURM_PROCID.json" "$OUT/data"' ||
    echo "some shares have faults" >&2
zarrfs check --merge "$OUT"/part-*.json
