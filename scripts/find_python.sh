#!/bin/sh
# Prints the path of a Python that can host kvjax: 3.12 or newer, 64 bit, with venv and ensurepip.
# Every candidate is run, because a name on PATH may be a version manager's shim that only fails.
# PYTHON=/path/to/python overrides the search.
set -u

check='
import sys
if sys.version_info < (3, 12) or sys.maxsize < 2**32:
    print("version", "%d.%d.%d" % sys.version_info[:3])
else:
    try:
        import ensurepip, venv
        print("ok", "%d.%d" % sys.version_info[:2], sys.executable)
    except ImportError as error:
        print("venv", "%d.%d" % sys.version_info[:2], error.name)
'

seen=''
untested=''

# Prints and leaves with success if "$1" serves; remembers what it was otherwise.
try() {
    answer=$("$1" -c "$check" 2>/dev/null </dev/null) || answer=''
    case $answer in
        'ok 3.12 '* | 'ok 3.13 '*)
            printf '%s\n' "${answer#ok 3.?? }"
            exit 0
            ;;
        'ok '*)
            [ -n "$untested" ] || untested=${answer#ok 3.?? }
            ;;
        'version '*) seen="$seen, $1 is ${answer#version }" ;;
        'venv '*) seen="$seen, $1 lacks its venv module (Debian: apt install python3-venv)" ;;
        *) seen="$seen, $1 does not run" ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
else
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name" >/dev/null 2>&1 && try "$name"
    done
    for path in \
        "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/3.*/bin/python \
        "${HOME:-/nonexistent}"/.local/share/uv/python/cpython-3.*/bin/python3 \
        "${HOME:-/nonexistent}"/.local/bin/python3.1? \
        /usr/local/bin/python3.1? /opt/homebrew/bin/python3.1? /opt/python*/bin/python3; do
        [ -x "$path" ] && try "$path"
    done
fi

if [ -n "$untested" ]; then
    printf '%s\n' "$untested"
    exit 0
fi
printf 'kvjax: no Python >= 3.12 found (%s); install one or give it as PYTHON=/path/to/python\n' \
    "$(printf '%s' "${seen:-, no candidate}" | sed 's/^, //')" >&2
exit 1
