# source scripts/slurm_job.sh   for the script of a Slurm job, which Slurm copies: source it from the folder of the submission;
# the script defines `fail`
#
#     check_gpus        ends the job with an error if each rank sees a GPU that it would not look for
#     queue_again WHY   queues this job again, behind those that wait, and ends it; returns where Slurm may not queue it again
#     seconds_left      prints the seconds until the job's time limit, 999999 without one
# shellcheck shell=bash
check_gpus() {
    if [ -n "${SLURM_GPUS_PER_TASK:-}" ] && [ "$SLURM_NTASKS_PER_NODE" -gt 1 ]; then
        fail "--gpus-per-task shows each rank one GPU, but a rank takes the GPU of its local rank: give --gpus-per-node"
    fi
}

queue_again() {
    echo "$1: the job is queued again"
    behind_the_others || true
    if scontrol requeue "$SLURM_JOB_ID"; then sleep 600; fi # Slurm ends this script
}

# A job that is queued again keeps its priority. With priority/basic (first come, first served) two jobs would take turns until
# one is complete, and a third would wait all the time. So the job lowers its priority, as every user may. Other priorities are
# left alone: an administrator has weighted waiting, size and fair-share there.
behind_the_others() {
    local own nice last
    [[ "$(scontrol show config)" == *priority/basic* ]] || return 0
    read -r own nice <<<"$(squeue --noheader --jobs="$SLURM_JOB_ID" --format="%Q %y")"
    # The priority of held jobs is 0.
    last="$(squeue --noheader --partition="$SLURM_JOB_PARTITION" --states=PENDING --format=%Q |
        awk '$1 > 0 && (least == "" || $1 < least) { least = $1 } END { print least }')"
    if [ "${last:-$own}" -lt "$own" ]; then scontrol update JobId="$SLURM_JOB_ID" Nice=$((nice + own - last + 1)); fi
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
