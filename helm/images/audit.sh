#!/bin/bash
# Looks for known vulnerabilities in all that images install, and lints the Dockerfile: `make audit`. Needs the advisories
# of the package registry; a package that nothing can be learnt about is an error, since silence is no good news.
set -euo pipefail
cd "$(dirname "$0")/../.."
hadolint helm/images/Dockerfile
failed=0
for name in build gateway dashboard engine-cuda; do # engine-cpu has the same packages but for another build of torch
  echo "$name"
  pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement "helm/images/$name.lock" || failed=1
done
exit $failed
