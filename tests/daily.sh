#!/usr/bin/env bash
# The daily suite in two processes, for two cores, that take about as long: what computes, and what mostly waits.
# tests/daily.sh PYTHON [PYTEST-ARGUMENT...]
set -uo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
computing=(tests/unit tests/kernels tests/gpu tests/contract tests/mesh/test_{recitation,kills,double_kills}.py)
output=$(mktemp)

"$python" -m pytest -m 'not full' "${computing[@]}" "$@" >"$output" 2>&1 &
process=$!
trap 'kill $process 2>/dev/null; rm -f "$output"' EXIT
"$python" -m pytest -m 'not full' tests "${computing[@]/#/--ignore=}" "$@"
waited=$?
wait $process
computed=$?
echo
echo "=== ${computing[*]}"
cat "$output"

# 5: nothing was selected, which is well if the other half had something.
[ $waited = 5 ] && exit $computed
[ $computed = 5 ] && exit $waited
exit $((waited ? waited : computed))
