#!/usr/bin/env bash
# Install, start a server for SmolLM2-135M-Instruct on two ranks, and ask it a question.
#
#   bash launch/quickstart.sh                  leaves the server up and says how to go on
#   bash launch/quickstart.sh --once           stops it again
#   bash launch/quickstart.sh --model DIR -pp 2   other flags go to `aioengine serve`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/lib.sh
source launch/lib.sh

QUESTION="What is the capital of France? Answer in one sentence."
READY_WITHIN_S=600

once=false
serve_flags=()
for argument in "$@"; do
    if [[ $argument == --once ]]; then
        once=true
    else
        serve_flags+=("$argument")
    fi
done

server_pid=""
log_pid=""
run_dir=""

start_server() {
    run_dir=$(mktemp -d "${TMPDIR:-/tmp}/aioengine-quickstart.XXXXXX")
    log=$run_dir/server.log
    endpoint_file=$run_dir/endpoint
    : >"$log" # there before anything wants to show it
    # A session of its own: neither Ctrl-C here nor the end of this script reaches the server.
    setsid "$VENV/bin/aioengine" serve -tp 2 --port 0 "${serve_flags[@]}" \
        --endpoint-file "$endpoint_file" </dev/null >>"$log" 2>&1 &
    server_pid=$!
}

is_ready() {
    [[ -s $endpoint_file ]] || return 1
    url=$(<"$endpoint_file")
    "$VENV_PYTHON" - "$url" <<'PY' 2>/dev/null
import sys, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
opener.open(sys.argv[1] + "/readyz", timeout=5)
PY
}

# The server's log is its progress: show it until /readyz answers 200.
wait_ready() {
    local deadline=$((SECONDS + READY_WITHIN_S)) status
    tail -n +1 -f --pid="$server_pid" "$log" &
    log_pid=$!
    until is_ready; do
        if ! kill -0 "$server_pid" 2>/dev/null; then
            wait "$log_pid" || true
            wait "$server_pid" && status=0 || status=$?
            server_pid=""
            die "the server ended with status $status before it was ready; its log: $log"
        fi
        ((SECONDS < deadline)) || die "the server was not ready within $READY_WITHIN_S s; its log: $log"
        sleep 0.5
    done
    stop_log
}

stop_log() {
    if [[ -n $log_pid ]]; then
        kill "$log_pid" 2>/dev/null || true
        wait "$log_pid" 2>/dev/null || true
        log_pid=""
    fi
}

# SIGTERM lets answers in flight finish; the server's exit status is this function's.
stop_server() {
    kill "$server_pid" 2>/dev/null || true
    local pid=$server_pid
    server_pid=""
    wait "$pid"
}

# Whatever ends this script early also ends the server.
clean_up() {
    stop_log
    if [[ -n $server_pid ]]; then
        echo "stopping the server"
        stop_server || true
    fi
}
# After a failure its log stays; after Ctrl-C nothing does.
interrupted() {
    clean_up
    [[ -z $run_dir ]] || rm -rf "$run_dir"
    exit "$1"
}
trap clean_up EXIT
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

install run
say "starting aioengine serve -tp 2${serve_flags[*]:+ ${serve_flags[*]}}"
start_server
wait_ready

say "$QUESTION"
"$VENV_PYTHON" launch/ask.py "$url" "$QUESTION" || die "no answer; the server's log: $log"

if $once; then
    say "stopping the server"
    stop_server || die "the server ended with status $?; its log: $log"
    rm -r "$run_dir"
    exit
fi

cat <<TEXT

== The server keeps running at $url (pid $server_pid, log $log). To go on:

  $VENV_PYTHON launch/ask.py $url "your question"

  curl $url/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "your question"}], "max_tokens": 50, "temperature": 0}'

  kill $server_pid    # stops it; answers in flight get 25 s to end

Two ranks show how it works; on a CPU, one rank is faster for a model this small.
TEXT
server_pid="" # left alive on purpose
