#!/usr/bin/env bash
# bash scripts/slurm_on_one_machine.sh up              starts a Slurm of two nodes, n1 and n2, on this machine: to rehearse a class
# bash scripts/slurm_on_one_machine.sh up accounting   the same with accounts: limits, hours and fair share of each student
# bash scripts/slurm_on_one_machine.sh status          its nodes and jobs; status 1 if it is not running
# bash scripts/slurm_on_one_machine.sh down            ends it and its jobs, also a half-made one, and removes its files
#
# A real slurmctld, two slurmd and munge, as root; with accounting also slurmdbd and MariaDB, whose tables `down` removes.
# `up` installs Debian's packages if they are missing; `down` leaves them.
# All processes, those of jobs too, are in one namespace of processes: when its first process ends, the kernel ends them all.
# GPT2_CHINESE_SLURM is the folder of configuration and logs, GPT2_CHINESE_SLURM_PORT the first of four ports.
set -euo pipefail

FOLDER="${GPT2_CHINESE_SLURM:-/run/slurm_on_one_machine}"
PORT="${GPT2_CHINESE_SLURM_PORT:-17000}"
WAIT_S=60
MARK="$FOLDER/made-by-slurm_on_one_machine" # `down` removes only a folder with this file
export SLURM_CONF="$FOLDER/slurm.conf"

fail() {
    echo "error: $*" >&2
    exit 2
}

# Prints the number of the `unshare` that waits for this cluster's first process. No file needs to hold it.
holder() {
    local pid
    for pid in $(pgrep -x unshare); do
        if [ "$(tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | tail -n 1)" = "$FOLDER" ]; then
            echo "$pid"
            return 0 # a bare return in a trap has the status of what was before the trap
        fi
    done
    return 1
}

install_packages() {
    local missing=()
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null || missing+=(slurm-wlm)
    command -v munged >/dev/null || missing+=(munge)
    if [ "$ACCOUNTING" = yes ]; then
        command -v slurmdbd >/dev/null || missing+=(slurmdbd)
        command -v mariadbd >/dev/null && command -v mariadb-admin >/dev/null || missing+=(mariadb-server)
    fi
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || fail "Slurm is missing (${missing[*]}), and this system has no apt-get to install it"
    echo "installing ${missing[*]}"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"; } \
        >"$FOLDER/apt.log" 2>&1 || { tail -n 5 "$FOLDER/apt.log" >&2; fail "apt-get cannot install ${missing[*]}"; }
}

configure() {
    local host cores
    host="$(hostname -s)" cores="$(nproc)"
    (umask 077 && head -c 1024 /dev/urandom >"$FOLDER/munge.key")
    # Jobs look up the node's names; the machine's own file stays as it is.
    { cat /etc/hosts; echo "127.0.0.1 n1 n2"; } >"$FOLDER/hosts"
    mkdir -p "$FOLDER/state" "$FOLDER/n1" "$FOLDER/n2"
    # cred_expire and sched_interval: a job that is requeued starts after seconds, not after two minutes.
    # FirstJobId: jobs of two such clusters on one machine have different numbers, so that their ranks meet at different ports.
    cat >"$SLURM_CONF" <<CONF
ClusterName=rehearsal
FirstJobId=$PORT
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/%n.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/%n.log
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 1)) CPUs=$cores State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 2)) CPUs=$cores State=UNKNOWN
# Jobs of the partition urgent preempt the others.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=class Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2
CONF
    [ "$ACCOUNTING" = no ] || configure_accounting "$host"
}

# The priority plugin counts the used hours, here every minute; Slurm's usual priority/basic counts none.
configure_accounting() {
    mkdir "$FOLDER/database"
    cat >>"$SLURM_CONF" <<CONF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 3))
AccountingStoragePass=$FOLDER/munge.socket
AccountingStorageEnforce=limits,qos
JobAcctGatherType=jobacct_gather/linux
PriorityType=priority/multifactor
PriorityWeightFairshare=10000
PriorityCalcPeriod=1
CONF
    (umask 077 && cat >"$FOLDER/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
DbdHost=$1
DbdAddr=127.0.0.1
DbdPort=$((PORT + 3))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
LogFile=$FOLDER/slurmdbd.log
PidFile=$FOLDER/slurmdbd.pid
CONF
}

# The first process: it ends as soon as a daemon ends, because the others are of no use without it.
# shellcheck disable=SC2016
DAEMONS='
set -e
mount --bind "$1/hosts" /etc/hosts
munged --foreground --force --socket="$1/munge.socket" --key-file="$1/munge.key" --pid-file="$1/munged.pid" \
    --log-file="$1/munged.log" --seed-file="$1/munged.seed" &
until munge --socket="$1/munge.socket" --no-input >/dev/null 2>&1; do sleep 0.1; done
if [ -e "$1/slurmdbd.conf" ]; then
    export MYSQL_UNIX_PORT="$1/database.socket" # where slurmdbd looks for the database, too
    mariadb-install-db --no-defaults --user=root --datadir="$1/database" --auth-root-authentication-method=socket >"$1/mariadb.log" 2>&1
    mariadbd --no-defaults --user=root --datadir="$1/database" --skip-networking \
        --innodb-lock-wait-timeout=900 >>"$1/mariadb.log" 2>&1 &
    until mariadb-admin --no-defaults ping >/dev/null 2>&1; do sleep 0.1; done
    slurmdbd -D &
    until sacctmgr --immediate add cluster rehearsal >/dev/null 2>&1; do sleep 0.1; done
fi
slurmctld -D &
slurmd -D -N n1 &
slurmd -D -N n2 &
wait -n'

up() {
    [ "$(id -u)" -eq 0 ] || fail "a Slurm on this machine needs root"
    if holder >/dev/null; then
        [ "$ACCOUNTING" = no ] || [ -e "$FOLDER/slurmdbd.conf" ] ||
            fail "a Slurm without accounts is running: first end it and its jobs with bash scripts/slurm_on_one_machine.sh down"
        echo "it is running already"
        status
        return
    fi
    [ ! -e "$FOLDER" ] || [ -e "$MARK" ] || [ -z "$(ls -A "$FOLDER")" ] || fail "$FOLDER is not a folder of this script"
    rm -rf "$FOLDER"
    mkdir -p "$FOLDER"
    touch "$MARK"
    chmod 755 "$FOLDER"
    trap 'down >/dev/null' EXIT # until both nodes are ready: half a cluster is of no use
    trap 'exit 130' INT TERM HUP
    install_packages
    configure
    setsid unshare --pid --mount --fork --mount-proc --kill-child bash -c "$DAEMONS" rehearsal "$FOLDER" \
        </dev/null >"$FOLDER/daemons.log" 2>&1 &
    local end=$((SECONDS + WAIT_S))
    until [ "$(sinfo --noheader --Node --format=%T 2>/dev/null | sort -u)" = idle ]; do
        if ! holder >/dev/null || [ $SECONDS -ge $end ]; then
            tail -n 20 "$FOLDER"/*.log >&2
            fail "the nodes are not ready after $WAIT_S s, or a daemon ended; the logs say why"
        fi
        sleep 0.2
    done
    trap - EXIT INT TERM HUP
    echo "Two nodes are ready. For sbatch, squeue and scancel in this shell:"
    echo "  export SLURM_CONF=$SLURM_CONF"
    echo "  sbatch scripts/train.sbatch 02_ddp"
    [ "$ACCOUNTING" = no ] || echo "Accounts and limits: docs/en/production/clusters.md#accounting"
}

down() {
    local pid found=no
    if pid="$(holder)"; then
        found=yes
        # The kernel reports the end of the first process when all others of the namespace have ended.
        pkill -KILL -P "$pid" || kill -KILL "$pid" 2>/dev/null || true
        while holder >/dev/null; do sleep 0.05; done
    fi
    if [ -e "$MARK" ]; then
        found=yes
        rm -rf "$FOLDER"
    fi
    [ $found = yes ] && echo "the Slurm on this machine is gone" || echo "no Slurm of this script is here"
}

status() {
    if ! holder >/dev/null; then
        echo "no Slurm of this script is running"
        return 1
    fi
    sinfo
    squeue
}

ACCOUNTING=no
case "$*" in
    up | down | status) "$1" ;;
    "up accounting")
        ACCOUNTING=yes
        up
        ;;
    *) fail "what to do? bash scripts/slurm_on_one_machine.sh up, up accounting, status or down" ;;
esac
