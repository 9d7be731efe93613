#!/usr/bin/env bash
# Replaces the containers of stateless services one by one, while they serve: for each, a new one is started and healthy
# before the old one is asked to leave. Never fewer than before serve.
#
#   compose/roll.sh FILE SERVICE...     e.g. compose/roll.sh compose/scale.yml tokenizer detokenizer router
#
# For tokenizers, detokenizers and routers behind a front. A scheduler or worker is restarted instead (docker compose restart):
# its streams pause until it is back, and none is lost.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,10p' "$0"; exit 2; }
file=$1
shift
compose() { docker compose -f "$file" "$@"; }

for service in "$@"; do
    old=$(compose ps -q "$service")
    count=$(wc -w <<<"$old")
    [ "$count" -gt 0 ] || { echo "roll.sh: $service is not up" >&2; exit 1; }
    for container in $old; do
        compose up --detach --no-build --no-deps --no-recreate --wait --scale "$service=$((count + 1))" "$service"
        # Routers ask once a second who is behind a name.
        sleep 3
        # SIGTERM: it takes nothing new, finishes what it has, and leaves; SIGKILL only after the file's grace period.
        docker stop "$container" >/dev/null
        docker rm "$container" >/dev/null
    done
    echo "$service: $count replaced"
done
