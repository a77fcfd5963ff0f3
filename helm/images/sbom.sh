#!/bin/bash
# Writes a CycloneDX bill of materials for each image into dist/, from what its lock file names: `make sbom`.
# The packages of the base image are not in it: docker's `--sbom=true` adds those to the image when it is pushed.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p dist
for lock in helm/images/*.lock; do
  name=$(basename "$lock" .lock)
  # The warning would be that a lock file does not say what needs what.
  PYTHONWARNINGS=ignore::UserWarning cyclonedx-py requirements "$lock" --pyproject pyproject.toml \
    --mc-type application --output-reproducible --output-format JSON --output-file "dist/moiety-$name.cdx.json"
  echo "dist/moiety-$name.cdx.json"
done
