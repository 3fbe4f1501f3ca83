#!/bin/sh
# Copy SOURCE to $OUT/data and check it, by the jobs of an array, each its share:
#
#     sbatch --export=ALL,SOURCE=s3://bucket/refs.json,OUT=/lustre/me/copy slurm-array.sh
#     sbatch --dependency=afterany:ID --wrap "zarrfs check --merge /lustre/me/copy/part-*.json"
#
# What a time-out, a failed node or a requeue breaks off is done by the same job, submitted again: files that are there
# stay, and a share with a report is not checked again.
#SBATCH --array=0-63
#SBATCH --time=01:00:00
#SBATCH --requeue
set -eu
mkdir -p "$OUT"
# with srun the end of the time is told to zarrfs, which then has on the disk what it has copied
srun zarrfs stage -q --copy --shard auto "$SOURCE" "$OUT/data"
part=$OUT/part-$SLURM_ARRAY_TASK_ID.json
[ -e "$part" ] || srun zarrfs check -q --shard auto --report "$part" "$SOURCE"
