#!/usr/bin/env bash
# bash chapters/08_param_efficient/train.sh [FLAGS]   adapts a base model to another kind of text with LoRA; --help lists the flags
# Hugging Face PEFT is installed where --backend peft asks for it.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case " $* " in
*" --backend peft "* | *" --backend=peft "*) source "$HERE/../../scripts/setup.sh" peft ;;
*) source "$HERE/../../scripts/setup.sh" ;;
esac
exec "$PYTHON" "$HERE/train.py" "$@"
