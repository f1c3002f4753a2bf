# source scripts/slurm_job.sh   for the script of a Slurm job, which Slurm copies: source it from the folder of the submission
#
#     queue_again WHY   queues this job again and ends it; returns where Slurm may not queue it again
#     seconds_left      prints the seconds until the job's time limit, 999999 without one
# shellcheck shell=bash
queue_again() {
    echo "$1: the job is queued again"
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 600; fi # Slurm ends this script
}

seconds_left() {
    local left days=0 seconds=0 part
    left="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L || true)" # days-hours:minutes:seconds, or minutes:seconds, or a word
    case "$left" in
        *[!0-9:-]* | "") echo 999999 && return ;;
        *-*) days="${left%%-*}" left="${left#*-}" ;;
    esac
    for part in ${left//:/ }; do
        seconds=$((seconds * 60 + 10#$part))
    done
    echo $((days * 86400 + seconds))
}
