#!/usr/bin/env bash
# bash docs/build.sh [MKDOCS FLAGS]   builds the site into site/, strictly: a dead link or a missing fragment is an error
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" docs
cd "$REPO"
"$PYTHON" -m docs.generate
NO_MKDOCS_2_WARNING=1 exec "$PYTHON" -m mkdocs build --strict "$@"
