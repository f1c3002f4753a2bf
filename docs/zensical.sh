#!/usr/bin/env bash
# bash docs/zensical.sh   builds the same pages with Zensical, the successor of mkdocs-material, into site/zensical/zh and /en
# Zensical reads only a language's folder. Figures and assets are outside of it: this script copies them next to the pages.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" docs
cd "$REPO"
"$PYTHON" -m docs.generate
rm -rf site/zensical
for language in zh en; do
    "$PYTHON" -m zensical build --clean --strict --config-file "zensical.$language.yml"
    cp -R docs/assets/. "site/zensical/$language/assets/"
done
mkdir -p site/zensical/_generated
cp -R docs/_generated/figures site/zensical/_generated/
