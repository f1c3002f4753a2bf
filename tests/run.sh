#!/usr/bin/env bash
# bash tests/run.sh                      the quick command: sets the environment up when it is missing, checks the style, runs
#                                        every mechanism and every oracle at least once. CI runs it.
# bash tests/run.sh --all                the deep rest too: full matrices, hundreds of kills, long fuzzing, every page's commands
# bash tests/run.sh PYTEST ARGUMENTS     what they name (a path, -k WORDS, -m deep), in one process
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$here/../scripts/setup.sh" dev,docs,horovod,parquet,peft
cd "$REPO"

# One worker more than cores: a third of the time a test waits for a process to start or to end. At most three, because each
# forks ranks of its own, and tests/tally.py has budgets for that.
cores=$("$PYTHON" -c 'from durable.cores import num_cores; print(num_cores())')
workers=$((cores > 1 ? 3 : 2))
shared=(--numprocesses "$workers" --no-loadscope-reorder --durations 30 --durations-min 1 --tb short)
case "${1-}" in
    "") export TESTS_WHOLE=quick; set -- "${shared[@]}" -m "not deep" ;;
    --all) shift; export TESTS_WHOLE=all; set -- "${shared[@]}" "$@" ;;
esac

export PYTHONUTF8=1  # files of tests are UTF-8, in every locale
# Where the environment forbids bytecode files, every worker would compile all tests at every run, and every program its modules.
unset PYTHONDONTWRITEBYTECODE
begin=$SECONDS
style=0 tests=0 horovod=0
# Compiled once (three to ten minutes), then a line. Without a compiler its tests are skipped; where $CI is set that is red.
bash scripts/build_horovod.sh || horovod=$?
echo "style: ruff check"
"$PYTHON" -m ruff check . || style=$?
echo "tests: pytest $*"
"$PYTHON" -m pytest "$@" || tests=$?

echo
echo "style: $([ $style -eq 0 ] && echo passed || echo "FAILED (ruff, status $style)")"
echo "tests: $([ $tests -eq 0 ] && echo passed || echo "FAILED (pytest, status $tests)") in $((SECONDS - begin)) s"
echo "horovod: $([ $horovod -eq 0 ] && echo built || echo "NOT BUILT (status $horovod): the tests of chapter 03 were skipped")"
if [ $style -ne 0 ] || [ $tests -ne 0 ] || { [ $horovod -ne 0 ] && [ -n "${CI:-}" ]; }; then
    exit 1
fi
