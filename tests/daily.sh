#!/usr/bin/env bash
# The daily suite in two processes, for two cores, that take about as long: what computes, and what mostly waits. Only the
# first imports torch and transformers.
# tests/daily.sh PYTHON [PYTEST-ARGUMENT...]
#
# Much of it is real processes on whatever machine there is. Up to three failures are run once more, alone, and said to
# have failed at first: what fails twice fails the suite, and what failed once is there to be read.
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
computing=(tests/unit tests/kernels tests/gpu tests/contract tests/mesh/test_{vectors,scheduler_service}.py)
output=$(mktemp)
cache=$(mktemp -d)

# half NAME PYTEST-ARGUMENT...: 5 (nothing was selected) is well if the other half had something.
half() {
    local name=$1
    shift
    "$python" -m pytest -m 'not full' -o cache_dir="$cache/$name" "$@"
}

# again NAME CODE PYTEST-ARGUMENT...: the code of the half, after a second try of what failed.
again() {
    local name=$1 code=$2 failed
    shift 2
    failed=$("$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$cache/$name/v/cache/lastfailed" 2>/dev/null)
    if [ "$code" = 1 ] && [ "${failed:-0}" -ge 1 ] && [ "${failed:-0}" -le 3 ]; then
        echo "=== $failed failed at first, and are run again"
        half "$name" --last-failed --last-failed-no-failures none "$@"
        code=$?
    fi
    return "$code"
}

half computing "${computing[@]}" "$@" >"$output" 2>&1 &
process=$!
trap 'kill $process 2>/dev/null; rm -rf "$output" "$cache"' EXIT
half waiting tests "${computing[@]/#/--ignore=}" "$@"
waited=$?
wait $process
computed=$?
echo
echo "=== ${computing[*]}"
cat "$output"

again waiting $waited tests "${computing[@]/#/--ignore=}" "$@"
waited=$?
again computing $computed "${computing[@]}" "$@"
computed=$?
[ $waited = 5 ] && exit $computed
[ $computed = 5 ] && exit $waited
exit $((waited ? waited : computed))
