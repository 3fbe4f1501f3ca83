# Sourced by the scripts in this directory. Settings are in zarrfs.conf in the same directory, in the syntax of sh.
# shellcheck shell=sh disable=SC2034

here=$(dirname "$(readlink -f "$0")")
ZARRFS=/opt/zarrfs/.venv/bin/zarrfs
JOBS=/run/zarrfs-jobs
TIMEOUT=60
[ ! -e "$here/zarrfs.conf" ] || . "$here/zarrfs.conf"

group() { # print the group of the job's user
    id -g -- "$(getent passwd "$FLUX_JOB_USERID" | cut -d: -f1)" 2>/dev/null || echo 65534
}

job_directory() { # JOB: print its directory, named by the decimal number, as a job ID has several spellings
    number=$(flux job id --to=dec "$1" 2>/dev/null) || number=
    case $number in
        '' | *[!0-9]*) number=$(printf %s "$1" | LC_ALL=C tr -c 'A-Za-z0-9\n' _) ;;
    esac
    echo "$JOBS/$number"
}

own_place() { # JOB_DIRECTORY: print the directory for mounts if there is no prolog
    echo "${XDG_RUNTIME_DIR:-/tmp}/zarrfs-flux-$(id -u)/${1##*/}"
}

uptime_seconds() { # print seconds of a clock that is never set
    cut -d. -f1 /proc/uptime
}
