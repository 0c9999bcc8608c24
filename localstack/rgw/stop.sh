#!/usr/bin/env bash
# Stop the Ceph daemons that start.sh started on one directory, by the pids it wrote there, and remove the directory.
#   RGW_DIR    state directory (default: dcp-s3-rgw in the temporary directory)
#   RGW_KEEP   1 = leave the directory, with the daemons' logs
set -uo pipefail

dir=${RGW_DIR:-${TMPDIR:-/tmp}/dcp-s3-rgw}
[ -n "$(ls -A "$dir" 2>/dev/null)" ] || exit 0
dir=$(cd "$dir" && pwd)
if [ ! -f "$dir/.dcp-s3-rgw" ]; then
    echo "rgw/stop.sh: $dir was not made by start.sh" >&2
    exit 2
fi

ours() { # ours PID: this process is alive, and is a daemon of this directory's cluster
    [ -r "/proc/$1/cmdline" ] && tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" | grep -qF -- "-c $dir/ceph.conf "
}

pids=()
for daemon in rgw osd mon; do
    pid=$(cat "$dir/run/$daemon.pid" 2>/dev/null) || continue
    if [ -n "$pid" ] && ours "$pid"; then pids+=("$pid"); fi
done

# The data are thrown away: there is nothing to flush, so no reason to ask politely and wait.
for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null; done
for pid in "${pids[@]}"; do
    for _ in $(seq 250); do
        ours "$pid" || break
        sleep 0.02
    done
done

rm -f "$dir/ready"
[ "${RGW_KEEP:-0}" = 1 ] || rm -rf "$dir"
exit 0
