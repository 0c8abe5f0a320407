#!/bin/sh
# Print the path of a Python that can run this book: 3.12, else 3.13, 3.11 or plain python3.
# Each candidate is run, not only looked up: pyenv's shims exist and then say "command not found".
# With an argument, only that Python is tried.
check='
import sys
import ensurepip, venv
print(sys.executable)
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

if [ -n "$1" ]; then
    "$1" -c "$check" 2>/dev/null && exit 0
    echo "$1 is not a Python 3.11, 3.12 or 3.13 with its venv module: choose another with" \
        "\`make PYTHON=/path/to/python3.12\`." >&2
    exit 1
fi
for name in python3.12 python3.13 python3.11 python3 python; do
    IFS=:
    for folder in $PATH; do
        if [ -x "$folder/$name" ]; then
            found=$("$folder/$name" -c "$check" 2>/dev/null) && echo "$found" && exit 0
        fi
    done
    unset IFS
done
echo "This book needs Python 3.11, 3.12 or 3.13 with its venv module, and none was found: install" \
    "one, or name yours with \`make PYTHON=/path/to/python3.12\`." >&2
exit 1
