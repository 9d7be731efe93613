#!/usr/bin/env bash
# Replaces the containers of a running project one after the other, while it serves, by new ones of the images and settings there are now.
#
#   compose/roll.sh FILE[:FILE...] [SERVICE...]     e.g. compose/roll.sh compose/scale.yml
#
# Tokenizers, detokenizers and routers without published ports: a new container is healthy before an old one is asked to leave. A worker
# is replaced with its scheduler, whose outputs move to the other schedulers first; with one scheduler only, streams pause and go on. What
# publishes ports (a front, a single router) is stopped before the next one starts. docs/upgrades.md says what clients see.
# Ends with 1 where a new container does not become healthy; what was not replaced yet serves on.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,10p' "$0"; exit 2; }
files=()
IFS=: read -ra paths <<<"$1"
for path in "${paths[@]}"; do files+=(-f "$path"); done
shift
replaced=()
compose() { docker compose "${files[@]}" "$@"; }
say() { echo "roll.sh: $*"; }
abort() {
    echo "roll.sh: $*; replaced before: ${replaced[*]:-nothing}" >&2
    exit 1
}
# Not by head: a docker whose reader leaves fails.
first_of() {
    local all
    all=$(compose ps -q "$1")
    echo "${all%%$'\n'*}"
}
kind_of() { docker inspect -f '{{index .Config.Cmd 1}}' "$1"; }
setting_of() { docker inspect -f '{{range .Config.Env}}{{println .}}{{end}}' "$1" | sed -n "s/^$2=//p"; }
publishes() { [ -n "$(docker inspect -f '{{range $port, $host := .HostConfig.PortBindings}}{{$port}} {{end}}' "$1")" ]; }
up() { compose up --detach --no-build --no-deps --wait "$@"; }

declare -A kinds workers_of
mapfile -t running < <(compose ps --services)
for service in "${running[@]}"; do
    container=$(first_of "$service")
    kinds[$service]=$(kind_of "$container")
    [ "${kinds[$service]}" != scheduler ] || workers_of[$service]=$(setting_of "$container" RADIXMESH_WORKERS | sed -E 's/:[^,]*,?/ /g')
done
chosen=" ${*:-${running[*]}} "
for service in $chosen; do [ -n "${kinds[$service]:-}" ] || abort "$service is not up"; done
is_chosen() { [[ $chosen == *" $1 "* ]]; }
is_any_chosen() { for each in "$@"; do ! is_chosen "$each" || return 0; done; return 1; }

# One more, then one less: never fewer than before serve.
replace_beside() {
    local service=$1 old before container new
    old=$(compose ps -q "$service")
    for container in $old; do
        before=$(compose ps -aq "$service")
        if ! up --no-recreate --scale "$service=$(($(wc -w <<<"$old") + 1))" "$service"; then
            for new in $(compose ps -aq "$service"); do
                [[ $before == *"$new"* ]] || docker rm -f "$new" >/dev/null
            done
            abort "a new $service does not become healthy: it is removed, and the old ones serve on"
        fi
        # Routers ask once a second who is behind a name.
        sleep 3
        # SIGTERM: it takes nothing new, finishes what it has, and leaves; SIGKILL only after the file's grace period.
        docker stop "$container" >/dev/null
        docker rm "$container" >/dev/null
    done
}

# Nobody else takes what the only scheduler has: a second signal tells it not to wait for that. The next one adopts the KV.
hurry() {
    local container
    container=$(compose ps -q "$1")
    docker kill -s TERM "$container" >/dev/null
    sleep 1
    docker kill -s TERM "$container" >/dev/null 2>&1 || true
}

recreate() {
    up --force-recreate "$1" || abort "the new $1 does not become healthy"
    replaced+=("$1")
}

replace_pair() {
    local scheduler=$1 worker
    if [ "${#workers_of[@]}" -gt 1 ]; then
        compose stop "$scheduler"
    elif is_chosen "$scheduler"; then
        hurry "$scheduler"
    fi
    for worker in ${workers_of[$scheduler]}; do
        ! is_chosen "$worker" || recreate "$worker"
    done
    [ "${#workers_of[@]}" -eq 1 ] && ! is_chosen "$scheduler" || recreate "$scheduler"
}

for kind in tokenizer detokenizer scheduler router front; do
    for service in "${running[@]}"; do
        # A worker is its scheduler's affair.
        [ "${kinds[$service]}" = "$kind" ] && is_any_chosen "$service" ${workers_of[$service]:-} || continue
        started=$SECONDS
        if [ "$kind" = scheduler ]; then
            replace_pair "$service"
        elif publishes "$(first_of "$service")"; then
            recreate "$service"
        else
            replace_beside "$service"
            replaced+=("$service")
        fi
        say "$service replaced in $((SECONDS - started)) s"
        # Peers connect again before the next one leaves.
        sleep 2
    done
done
say "replaced: ${replaced[*]}"
