#!/usr/bin/env bash
# Runs the fast tests on each Python 3.11 to 3.13 that is installed and really works, each in its own environment .venv-py3.N.
set -uo pipefail
cd "$(dirname "$0")/.."

# Version managers leave launchers on the PATH that fail for versions that are not selected. So each candidate is run once, and what stands behind the
# launchers of pyenv (ROOT/shims/python3.N for ROOT/versions/3.N.P/bin/python3.N) is tried too.
find_python() {
    local minor=$1 found candidate
    found=$(type -aP "python$minor")
    for candidate in $found $(for f in $found; do case $f in */shims/*) echo "${f%/shims/*}/versions/$minor".*/bin/"python$minor" ;; esac; done) "$PYTHON"; do
        if [ "$("$candidate" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$minor" ]; then
            echo "$candidate"
            return
        fi
    done
}

PYTHON=${PYTHON:-python3}
ran=0 failed=""
for minor in 3.11 3.12 3.13; do
    python=$(find_python "$minor")
    if [ -z "$python" ]; then
        echo "== Python $minor: not installed"
        continue
    fi
    echo "== Python $minor: $python"
    env=.venv-py$minor
    if [ ! "$env/.stamp" -nt pyproject.toml ]; then
        PYTHON=$python bash scripts/make_venv.sh "$env" || exit 1
        "$env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --editable '.[arrow,demo,image,remote,test]' || exit 1
        touch "$env/.stamp"
    fi
    ran=$((ran + 1))
    "$env/bin/python" -m pytest -q -p no:cacheprovider -m "not nightly and not interop and not slow and not servers" || failed="$failed $minor"
done
if [ "$ran" = 0 ]; then
    echo "no Python 3.11 to 3.13 was found" >&2
    exit 1
fi
if [ -n "$failed" ]; then
    echo "failed on:$failed" >&2
    exit 1
fi
