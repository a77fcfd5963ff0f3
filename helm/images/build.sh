#!/bin/bash
# Builds the images with docker or podman, whichever is here, named as chart and compose.yaml name them: `make images`.
#   IMAGES="gateway dashboard"   some of them; all three if not set
#   TORCH=cpu                    the engine without CUDA, for laptops and kind: a fraction of the size, and no GPU
#   REGISTRY=registry.example.com/ml/   put before the names
#   BASE_DIGEST=@sha256:…        the very base that an earlier image was built from
set -euo pipefail
cd "$(dirname "$0")/../.."
IMAGES=${IMAGES:-gateway dashboard engine}
TORCH=${TORCH:-cuda}
REGISTRY=${REGISTRY:-}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)
EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}

if docker buildx version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
  build() { docker buildx build --output "type=docker,rewrite-timestamp=true,name=$1" "${@:2}" .; }
elif command -v podman >/dev/null; then
  build() { podman build --timestamp "$EPOCH" --tag "$1" "${@:2}" .; }
else
  echo 'Images are built by docker (with buildx, its daemon running) or podman, and neither is here: install one.' >&2
  exit 1
fi

for image in $IMAGES; do
  echo "building ${REGISTRY}moiety-$image:$VERSION …"
  build "${REGISTRY}moiety-$image:$VERSION" --file helm/images/Dockerfile --target "$image" \
    --build-arg VERSION="$VERSION" --build-arg REVISION="$REVISION" --build-arg SOURCE_DATE_EPOCH="$EPOCH" \
    --build-arg TORCH="$TORCH" --build-arg BASE_DIGEST="${BASE_DIGEST:-}"
done
