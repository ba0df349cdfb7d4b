#!/bin/sh
# Prints the first Python that is new enough, or says what to do. PYTHON=... chooses one; then no other is tried.
set -u

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ -n "${PYTHON:-}" ]; then
    if new_enough "$PYTHON"; then
        echo "$PYTHON"
        exit 0
    fi
    echo "PYTHON=$PYTHON is not a Python 3.11 or newer (it says: $("$PYTHON" --version 2>&1 | head -n 1))." >&2
    exit 1
fi

for candidate in python3.11 python3.12 python3.13 python3; do
    if new_enough "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done

echo "No Python 3.11 or newer found (tried python3.11, python3.12, python3.13, python3)." >&2
echo "Debian 12 and Ubuntu 24.04: apt install python3 python3-venv (as root). Elsewhere: install one," >&2
echo "then name it if it is not on the PATH:  make book PYTHON=path/to/python3.11" >&2
exit 1
