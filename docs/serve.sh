#!/usr/bin/env bash
# bash docs/serve.sh [MKDOCS FLAGS]   shows the site at http://127.0.0.1:8000 and follows changes of the pages
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" docs
cd "$REPO"
"$PYTHON" -m docs.generate
NO_MKDOCS_2_WARNING=1 exec "$PYTHON" -m mkdocs serve "$@"
