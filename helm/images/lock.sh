#!/bin/bash
# Writes the lock files that images are installed from, every package with its version and its hashes: `make locks`.
# What is locked stays as it is where it still fits; `make locks ARGS=--upgrade` takes the newest of everything.
# TORCH_CPU, an option of uv, says where the builds of torch without CUDA are; `--find-links=FOLDER` will do.
set -euo pipefail
cd "$(dirname "$0")/../.."
TORCH_CPU=${TORCH_CPU:---extra-index-url=https://download.pytorch.org/whl/cpu}
TORCH=$(sed -n 's/^torch==//p' constraints.txt)

lock() { # name, then what uv takes
  local name=$1
  shift
  echo "$name" >&2
  uv pip compile --output-file "helm/images/$name.lock" --generate-hashes --only-binary :all: --quiet --no-config \
    --python-version 3.11 --python-platform x86_64-manylinux_2_36 --custom-compile-command 'make locks' "$@"
}

lock build - "$@" <<<'hatchling>=1.27'
lock gateway pyproject.toml --extra gateway --extra endpoint-picker "$@"
lock dashboard pyproject.toml --extra dashboard "$@"
lock engine-cuda pyproject.toml --extra engine --constraint constraints.txt "$@"
lock engine-cpu pyproject.toml --extra engine --constraint <(echo "torch==$TORCH+cpu") \
  --index-strategy unsafe-best-match --no-annotate "$TORCH_CPU" "$@"
