#!/bin/sh
# Take the newest releases that requirements.in allows, execute every chapter with them, and list the
# outputs that changed. Nothing is committed: look at the list, run `make site test`, then decide.
# To go back: git checkout requirements.txt, and make.
#
#     bookkit/upgrade.sh .venv
set -e
venv=$1
before=_build/outputs-before
after=_build/outputs-after
rm -rf $before $after

echo "1. outputs with the releases of today"
"$venv/bin/python" -m bookkit execute --out $before

echo "2. the newest releases, for Python 3.11 to 3.13 alike"
uv=_build/uv
[ -x $uv/bin/uv ] || { "$venv/bin/python" -m venv $uv && $uv/bin/pip install --quiet uv; }
new=_build/requirements.new
{
    echo "# Compiled from requirements.in for Python 3.11 to 3.13 by \`make upgrade\`: do not edit."
    $uv/bin/uv pip compile --quiet --universal --python-version 3.11 --upgrade \
        --fork-strategy requires-python --no-header --no-annotate --no-emit-package bookkit \
        requirements.in
    echo "."
    echo "./bookkit"
} > $new
if cmp -s $new requirements.txt; then
    echo "no newer releases"
    exit 0
fi
diff requirements.txt $new || true
cp $new requirements.txt

echo "3. a fresh environment, and outputs with the new releases"
make --no-print-directory venv VENV="$venv"
"$venv/bin/python" -m bookkit execute --out $after || {
    echo "Some chapters fail with the new releases (above): mend them, or pin in requirements.in." >&2
    exit 1
}

echo "4. outputs that changed"
"$venv/bin/python" -m bookkit compare $before $after
