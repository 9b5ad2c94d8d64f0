#!/usr/bin/env bash
# One run of accelcheck as a Slurm array: each task runs one shard on its node or accelerator and writes a journal of its own; a job
# that depends on the array merges the journals. On the login node, in a folder that all nodes see:
#
#   ACCELCHECK_SHARDS=8 bash slurm-array.sh --accel-device=cuda --accel-level=2
#
# The words are options of pytest; they select cases. pytest and accelcheck are on PATH, which jobs inherit. Options of sbatch come
# from its own variables: SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, SBATCH_GPUS_PER_TASK, SBATCH_EXCLUSIVE, ...
set -euo pipefail

shards=${ACCELCHECK_SHARDS:-2}
folder=${ACCELCHECK_FOLDER:-$PWD/accelcheck-run}

if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then # a task of the array
    journal=$folder/shard-$SLURM_ARRAY_TASK_ID.jsonl
    keep=--accel-journal=$journal
    if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && -s $journal ]]; then
        keep=--accel-resume=$journal # it was preempted and queued again: cases that it finished do not run again
    fi
    # Without -n, so that timed cases run too; the task has its node or accelerator for itself.
    exec pytest --pyargs accelcheck.suite --accel-require "--accel-shard=$SLURM_ARRAY_TASK_ID/$shards" "$keep" -q "$@"
fi

if [[ -n ${SLURM_JOB_ID:-} ]]; then # the job after the array
    accelcheck merge "$folder"/shard-*.jsonl -o "$folder/journal.jsonl"
    exec accelcheck report "$folder/journal.jsonl" --html "$folder/report.html"
fi

mkdir -p "$folder"
rm -f "$folder"/shard-*.jsonl "$folder"/*.log # of an earlier run: they would be merged with this one
export ACCELCHECK_SHARDS=$shards ACCELCHECK_FOLDER=$folder
array=$(sbatch --parsable --job-name=accelcheck "--array=1-$shards" --nodes=1 --ntasks=1 --requeue --open-mode=append \
    "--output=$folder/shard-%a.log" "$0" "$@")
array=${array%%;*} # a federation adds the name of its cluster
# afterany, not afterok: a shard in which a case failed is to be merged too, and merge says which shards are missing.
merge=$(sbatch --parsable --job-name=accelcheck-merge "--dependency=afterany:$array" --nodes=1 --ntasks=1 \
    "--output=$folder/merge.log" "$0")
echo "array $array of $shards shards, then job ${merge%%;*} merges them into $folder/journal.jsonl"
