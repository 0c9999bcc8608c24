#!/usr/bin/env bash
# Start a Ceph cluster of one monitor, one OSD and one RADOS Gateway that speaks S3 on 127.0.0.1. No Docker, no systemd.
# Prints shell assignments (AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID, …) once the gateway answers, so
# `export $(localstack/rgw/start.sh)` points every S3 client of a shell at it. Does nothing when it already runs; what is
# left of an earlier cluster in the directory is removed first. install.sh installs the daemons, stop.sh stops them.
#
#   RGW_DIR                        state directory             (default: dcp-s3-rgw in the temporary directory)
#   RGW_PORT                       S3 port; the 62 ports above it are for the cluster behind it      (default: free ones)
#   RGW_STORE                      memstore | bluestore        (default memstore: data in the OSD's memory, 1.8 bytes per
#                                  byte; bluestore: in a file of the state directory, best on /dev/shm when data are big)
#   RGW_BYTES                      size of the store, bytes    (default 6 GiB; a full one hangs)
#   RGW_ACCESS_KEY, RGW_SECRET_KEY                             (default test, testtest)
#   RGW_TLS_PORT, RGW_TLS_PEM      also serve https on this port, with the certificate and key of this PEM file
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${RGW_DIR:-${TMPDIR:-/tmp}/dcp-s3-rgw}
port=${RGW_PORT:-}
store=${RGW_STORE:-memstore}
bytes=${RGW_BYTES:-$((6 * 1024 * 1024 * 1024))}
access_key=${RGW_ACCESS_KEY:-test}
secret_key=${RGW_SECRET_KEY:-testtest}
missing=()
for binary in ceph ceph-mon ceph-osd curl monmaptool radosgw radosgw-admin; do
    command -v "$binary" >/dev/null || missing+=("$binary")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "rgw/start.sh: not installed: ${missing[*]} (install them with localstack/rgw/install.sh)" >&2
    exit 2
fi

answers() { # the list of all buckets, asked for without credentials, is an empty one on this gateway
    [ "$(curl --noproxy '*' -s -o "$dir/run/answer" -m 2 -w '%{http_code}' "$url/" || true)" = 200 ]
}
alive() { # alive DAEMON: the pid in its file is a daemon of this cluster (a zombie has an empty command line)
    local pid
    pid=$(cat "$dir/run/$1.pid" 2>/dev/null) && [ -n "$pid" ] \
        && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF -- "-c $conf "
}

if [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
    if [ ! -f "$dir/.dcp-s3-rgw" ]; then
        echo "rgw/start.sh: $dir is not empty and was not made by this script" >&2
        exit 2
    fi
    dir=$(cd "$dir" && pwd)
    conf=$dir/ceph.conf
    url=$(sed -n 's/^AWS_ENDPOINT_URL_S3=//p' "$dir/ready" 2>/dev/null || true)
    if [ -n "$url" ] && alive mon && alive osd && alive rgw && answers; then
        cat "$dir/ready"
        exit 0
    fi
    RGW_DIR=$dir "$here/stop.sh"
fi
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
while [ -z "$port" ]; do # below the range of outgoing connections; the OSD looks for free ones in its range by itself
    port=$((12000 + RANDOM % 19000))
    if listens $port || listens $((port + 1)) || listens $((port + 2)); then port=; fi
done
if listens "$port"; then
    echo "rgw/start.sh: something listens on port $port already" >&2
    exit 2
fi
mon_port=$((port + 1))
url=http://127.0.0.1:$port
frontend="beast endpoint=127.0.0.1:$port"
if [ -n "${RGW_TLS_PORT:-}" ]; then
    frontend+=" ssl_endpoint=127.0.0.1:$RGW_TLS_PORT ssl_certificate=${RGW_TLS_PEM:?with RGW_TLS_PORT}"
fi

mkdir -p "$dir"/{run,log,mon,osd,rgw}
touch "$dir/.dcp-s3-rgw"
dir=$(cd "$dir" && pwd)
conf=$dir/ceph.conf

fail() { # say what happened, with the last lines of each log, and leave nothing running
    echo "rgw/start.sh: $1" >&2
    for log in "$dir"/log/*; do
        if [ -s "$log" ]; then printf -- '--- %s\n' "$log" >&2; tail -n 15 "$log" >&2; fi
    done
    RGW_DIR=$dir "$here/stop.sh"
    exit 1
}
spawn() { # spawn DAEMON COMMAND…: in a session of its own, its pid and its output in files
    local daemon=$1
    shift
    setsid "$@" >"$dir/log/$daemon.out" 2>&1 </dev/null &
    echo $! >"$dir/run/$daemon.pid"
    disown $!
}
wait_for() { # wait_for SECONDS DAEMON COMMAND…: until the command succeeds; not when the daemon has died or time is up
    local end=$((SECONDS + $1)) daemon=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if ! alive "$daemon" || [ $SECONDS -ge $end ]; then return 1; fi
        sleep 0.05
    done
}
cluster() { timeout 5 ceph -c "$conf" --connect-timeout 3 "$@"; }
osd_is_up() { cluster osd stat 2>/dev/null | grep -q '1 up'; }

fsid=$(cat /proc/sys/kernel/random/uuid)
osd_uuid=$(cat /proc/sys/kernel/random/uuid)
cat >"$conf" <<CONF
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$mon_port,v1:127.0.0.1:$((mon_port + 1))]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind port min = $((mon_port + 2))
ms bind port max = $((mon_port + 61))
run dir = $dir/run
crash dir = $dir/run
admin socket = $dir/run/\$name.\$pid.asok

# Loopback only: no keys. Without them the gateway's default, "secure" frames only, cannot be met.
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc

# Warnings that hold for a real cluster.
mon warn on insecure global id reclaim = false
mon warn on insecure global id reclaim allowed = false
mon warn on pool no redundancy = false

# Logs in the state directory, and none kept in memory: that costs time in each operation.
log file = $dir/log/\$name.log
log to stderr = false
err to stderr = true
log to syslog = false
mon cluster log file = $dir/log/cluster.log
mon cluster log to syslog = false
debug bdev = 0/0
debug bluestore = 0/0
debug memstore = 0/0
debug ms = 0/0
debug objecter = 0/0
debug osd = 0/0
debug rocksdb = 0/0

# One copy of everything in few placement groups, and nothing that moves them.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush update on start = true
mon allow pool size one = true
mon allow pool delete = true
mon max pg per osd = 2000

# Only a store that is truly full refuses writes, and a full disk of the machine is not the monitor's business.
mon osd nearfull ratio = 0.97
mon osd backfillfull ratio = 0.975
mon osd full ratio = 0.98
osd failsafe full ratio = 0.99
mon data avail warn = 1
mon data avail crit = 1

[mon]
mon data = $dir/mon
# A lone monitor agrees with itself at once.
paxos propose interval = 0.05
paxos min wait = 0.01
mon osdmap full prune enabled = false

[osd]
osd data = $dir/osd
osd journal = $dir/osd/journal
osd objectstore = $store
memstore device bytes = $bytes
memstore page set = false
bluestore block create = true
bluestore block size = $bytes
bluestore cache size = 268435456
bluestore fsck on mount = false
bluestore fsck on umount = false
osd memory target = 1610612736
# The gateway keeps its bucket indexes by OSD classes.
osd class load list = *
osd class default list = *
osd max object name len = 2048
osd max object namespace len = 256
osd op num shards = 2
osd op num threads per shard = 2
# No scrubbing beside a test.
osd scrub load threshold = 0
osd scrub begin hour = 0
osd scrub end hour = 1

[client.rgw.a]
rgw data = $dir/rgw
rgw frontends = $frontend
rgw dns name = localhost
rgw thread pool size = 64
rgw enable ops log = false
rgw enable usage log = false
rgw run sync thread = false
# Encryption with customer keys (SSE-C) over plain http: this is loopback.
rgw crypt require ssl = false
# What is deleted makes room within a minute, not after two hours.
rgw gc obj min wait = 30
rgw gc processor period = 30
debug rgw = 0/0
CONF

monmaptool --create --clobber --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port,v1:127.0.0.1:$((mon_port + 1))]" \
    "$dir/monmap" >"$dir/log/create.out" 2>&1 || fail "monmaptool failed"
ceph-mon -c "$conf" -i a --mkfs --monmap "$dir/monmap" >>"$dir/log/create.out" 2>&1 || fail "ceph-mon --mkfs failed"
spawn mon ceph-mon -c "$conf" -i a -f
wait_for 30 mon cluster osd new "$osd_uuid" 0 || fail "the monitor did not come up"

ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$osd_uuid" >>"$dir/log/create.out" 2>&1 || fail "ceph-osd --mkfs failed"
spawn osd ceph-osd -c "$conf" -i 0 -f
wait_for 60 osd osd_is_up || fail "the OSD did not come up"

# The first command of an administrator also makes the pools that the gateway needs.
timeout 120 radosgw-admin -c "$conf" -n client.rgw.a user create --uid=owner --display-name=owner --max-buckets=0 \
    --access-key="$access_key" --secret-key="$secret_key" >"$dir/log/user.out" 2>&1 || fail "radosgw-admin user create failed"
spawn rgw radosgw -c "$conf" -n client.rgw.a -f
wait_for 60 rgw answers || fail "the gateway did not answer on $url"

cat >"$dir/ready" <<READY
AWS_ENDPOINT_URL_S3=$url
AWS_ACCESS_KEY_ID=$access_key
AWS_SECRET_ACCESS_KEY=$secret_key
AWS_DEFAULT_REGION=us-east-1
CEPH_RGW_PID=$(cat "$dir/run/rgw.pid")
CEPH_OSD_PID=$(cat "$dir/run/osd.pid")
CEPH_MON_PID=$(cat "$dir/run/mon.pid")
READY
cat "$dir/ready"
