#!/usr/bin/env bash
# make_venv.sh DIR: makes the virtual environment DIR with $PYTHON, unless a working one stands there.
set -euo pipefail
dir=$1
python=${PYTHON:-python3}

say() { echo "liveset: $*" >&2; }

if ! "$python" -c '' 2>/dev/null; then
    say "'$python' does not run; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "'$python' is Python $("$python" -c 'import platform; print(platform.python_version())'), but 3.11 or newer is needed;" \
        "name a newer one: make PYTHON=python3.12"
    exit 1
fi
# An environment that was moved, or whose Python is gone or has another version, is made anew
wanted=$("$python" -c 'import sys; print(*sys.version_info[:2])')
if [ -x "$dir/bin/python" ] && [ "$("$dir/bin/python" -c 'import pip, sys; print(*sys.version_info[:2])' 2>/dev/null)" = "$wanted" ] &&
    head -c 200 "$dir/bin/pip" | grep -qF "$PWD/$dir/bin/python"; then
    exit 0
fi
rm -rf "$dir"
if ! "$python" -m venv "$dir"; then
    rm -rf "$dir"
    say "'$python' cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)"
    exit 1
fi
