# Sourced by the scripts in this directory. Settings are in zarrfs.conf in the same directory.
# shellcheck shell=sh disable=SC2034

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # slurmd runs a prolog without PATH
export PATH
here=$(dirname "$(readlink -f "$0")")

ZARRFS=/opt/zarrfs/.venv/bin/zarrfs
JOBS=/run/zarrfs-jobs
DATASETS=$here/datasets
TIMEOUT=60
[ ! -e "$here/zarrfs.conf" ] || . "$here/zarrfs.conf"

job=$JOBS/${SLURM_JOB_ID:?not set: this is for slurmd to run}

say() { # write to the log of slurmd, and to syslog if there is one
    echo "zarrfs: job $SLURM_JOB_ID: $*" >&2
    logger -t zarrfs "job $SLURM_JOB_ID: $*" 2>/dev/null || true
}

good_name() { # whether $1 is a plain name for a directory
    case $1 in '' | .* | *[!A-Za-z0-9._-]*) return 1 ;; esac
}

reason() { # STATUS FILE: print why `within` failed; FILE has its error output
    case $1 in
        137) [ $(($(uptime_seconds) - began)) -ge "$TIMEOUT" ] || set -- killed "$2" ;;
    esac
    case $1 in
        124 | 137) echo "not mounted within $TIMEOUT seconds" ;;
        killed) echo "zarrfs stage was killed (SIGKILL), perhaps for want of memory" ;;
        *)
            said=$(sed -n 's/^zarrfs: //; $p' "$2") || said=
            echo "${said:-zarrfs stage ended with status $1, without a word}"
            ;;
    esac
}

uptime_seconds() { # print seconds of a clock that is never set
    cut -d. -f1 /proc/uptime
}

within() { # COMMAND...: run it; send SIGTERM after TIMEOUT seconds, SIGKILL 5 seconds later
    began=$(uptime_seconds)
    timeout -k 5 "$TIMEOUT" "$@" </dev/null
}
