#!/usr/bin/env bash
# Prints the first of the given Python versions that runs and can make a virtual environment.
#
#   tools/find_python.sh 3.10 3.11 3.12 3.13
#
# Looks at python3, then at python3.X on the PATH, then under pyenv. Each candidate is run:
# a pyenv shim is a file that may exist and still not start anything.
set -euo pipefail

candidates=(python3)
for version in "$@"; do
    candidates+=("python$version" "${HOME:-}/.pyenv/versions/$version."*/bin/python)
done
for candidate in "${candidates[@]}"; do
    if "$candidate" -c "
import ensurepip, sys, venv
sys.exit(f'{sys.version_info.major}.{sys.version_info.minor}' not in sys.argv[1:])" "$@" 2>/dev/null
    then
        echo "$candidate"
        exit 0
    fi
done
exit 1
