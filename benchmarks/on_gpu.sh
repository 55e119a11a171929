#!/usr/bin/env bash
# Makes this checkout importable where it is not installed, then runs the rest of the command line.
set -eu
at=$(mktemp -d)
mkdir "$at/mla_fusion"
ln -s "$PWD"/mla_fusion/* "$PWD/passes" "$PWD/patterns" "$at/mla_fusion/"
export PYTHONPATH="$at${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
